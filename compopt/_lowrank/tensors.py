"""One tensor at one step, sent whole, projected on random columns, or on tracked columns.

The tensor's part of a payload holds what this rank sends of it, and after the exchange the average
over ranks. Lines are those of SEPARATE's Algorithm 1, see ``compopt.separate``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._ops.norms import scale_
from .._ops.operations import Ops
from .._ops.updates import Factored
from .._wire.payload import Payload
from .projections import Projection


@dataclass
class WholeTensor:
    """A tensor whose gradient is averaged whole.

    ``residual`` is what earlier steps, projected or rounded, have not sent (None: nothing ever
    remains); it may be non-zero only where ``has_residual``. ``sends_residual`` is false for the
    noise of an unbiased projection, which is not worth sending. ``local_factor`` clips the local
    gradient.
    """

    grad: Tensor | None
    residual: Tensor | None
    local_factor: float
    length: int
    has_residual: bool
    sends_residual: bool

    def average_in(self, part: Tensor) -> Tensor | None:
        """Return memory that already holds the averaged gradient, if any."""
        return part

    def reconstruct(self, part: Tensor, factor: float, out: Tensor) -> Tensor:
        """Write ``factor`` times the averaged gradient to ``out``, which may be ``part``."""
        if out.data_ptr() != part.data_ptr():
            out.view(-1).copy_(part)
        scale_(out, factor)
        return out

    def feed_back(self, mean: Payload, i: int, factor: float) -> None:
        """Set the residual to the rounding error of this rank's payload.

        Where the average was clipped, ``factor`` of both residuals has arrived.
        """
        if self.residual is None or not (self.has_residual or mean.dropped is not None):
            return
        self.residual.mul_(1 - factor if self.sends_residual else 0.0)
        if mean.dropped is not None:
            self.residual.view(-1).add_(mean.dropped_parts[i], alpha=factor)


@dataclass
class ProjectedTensor:
    """A tensor of which p_n = h_n R is averaged: SEPARATE's lines 1, 2, 4 and 5 for one matrix.

    ``residual`` is e_n, ``q`` the projection, ``local_factor`` clips the local gradient. ``R`` is
    drawn again before each use; ``p`` is a copy of what this rank sends.
    """

    grad: Tensor | None
    residual: Tensor
    local_factor: float
    q: Projection
    ops: Ops
    R: Tensor = field(init=False)
    p: Tensor = field(init=False)

    @property
    def length(self) -> int:
        return self.q.m * self.q.r

    def multiply_h(self, right: Tensor, out: Tensor, transposed: bool = False) -> None:
        """Lines 1 and 2: write ``h right``, or ``h^T right``, to ``out``, with h = e + g.

        ``out`` may be of another dtype.
        """
        q, e, g = self.q, self.residual, self.grad
        if adds_products(e) and (g is None or g.dtype == e.dtype == out.dtype):
            terms = [(q.view_as_matrix(e), 1.0)]
            if g is not None:
                terms.append((q.view_as_matrix(g.contiguous()), self.local_factor))
        else:
            h = self.ops.scratch(e, e.numel()).view(e.shape)
            if g is None:
                h.copy_(e)
            else:
                torch.add(e, g, alpha=self.local_factor, out=h)
            terms = [(q.view_as_matrix(h), 1.0)]
        for n, (matrix, factor) in enumerate(terms):
            matrix = matrix.t() if transposed else matrix
            for R, rows, out_rows in q.iterate_blocks(right, matrix, out):
                if n > 0:
                    add_product_(out_rows, rows, R, factor)
                elif out.dtype == R.dtype:
                    torch.matmul(rows, R, out=out_rows)
                else:
                    out_rows.copy_(rows @ R)

    def compute_cosine(self, part: Tensor) -> Tensor | float:
        """Return the cosine between the local gradient and its reconstruction (Algorithm 3)."""
        q, R = self.q, self.R
        if self.grad is None:
            return 0.0
        g = q.view_as_matrix(self.grad.contiguous()).to(R.dtype)
        ghat = self._expand(q.view_as_projected(part).to(R.dtype), R, torch.empty_like(g))
        lengths = torch.linalg.vector_norm(g) * torch.linalg.vector_norm(ghat)
        cosine: Tensor = (g * ghat).sum() / lengths.clamp_min(torch.finfo(R.dtype).tiny)
        return cosine

    def average_in(self, part: Tensor) -> Tensor | None:
        return None  # it exists only as a reconstruction

    def reconstruct(self, part: Tensor, factor: float, out: Tensor) -> Tensor:
        """Line 4: write ``factor`` times the averaged gradient to ``out``."""
        q, R = self.q, self.R
        p = q.view_as_projected(part).to(R.dtype) * (q.scale * factor)
        if out.dtype == R.dtype:
            self._expand(p, R, q.view_as_matrix(out))
            return out
        exact = self.ops.scratch(R, out.numel()).view(out.shape)
        self._expand(p, R, q.view_as_matrix(exact))
        return out.copy_(exact)

    def reconstruct_rows(self, part: Tensor, first: int, last: int) -> Tensor:
        """Line 4 for some rows of the tensor as a matrix."""
        q, R = self.q, self.R
        p = q.view_as_projected(part).to(R.dtype)
        if q.transposes:
            rows = R.new_empty(last - first, q.m)
            self._expand(p, R[..., first:last, :], rows.t())
            return rows.mul_(q.scale)
        height = q.block_height
        if height is None:
            p, first, last = p[first:last], 0, last - first
        else:  # only the blocks that contain these rows
            begin, end = first // height, math.ceil(last / height)
            R, p = R[begin:end], p[begin * height : end * height]
            first, last = first - begin * height, last - begin * height
        blocks = self._expand(p, R, R.new_empty(len(p), q.d))
        return blocks[first:last].mul_(q.scale)

    def _expand(self, p: Tensor, R: Tensor, out: Tensor) -> Tensor:
        """Write ``p R^T`` to ``out``."""
        for matrix, rows, out_rows in self.q.iterate_blocks(R, p, out):
            torch.matmul(rows, matrix.mT, out=out_rows)
        return out

    def feed_back(self, mean: Payload, i: int, factor: float) -> None:
        """Line 5: e <- beta e + (1 - beta) (g + e - p R^T / r) = e + (1 - beta) (g - p R^T / r).

        p is what the other ranks received from this one, after rounding. Where the average was
        clipped by ``factor``, only that share of the new error is taken.
        """
        e, g, q, R = self.residual, self.grad, self.q, self.R
        if q.beta == 1:
            return
        new = (1 - q.beta) * factor
        if mean.seed is not None:
            self.p.sub_(mean.dropped_parts[i])
        p = q.view_as_projected(self.p).to(R.dtype)
        if g is not None:
            e.add_(g, alpha=new * self.local_factor)
        for matrix, rows, e_rows in q.iterate_blocks(R, p, q.view_as_matrix(e)):
            add_product_(e_rows, rows, matrix.mT, -new * q.scale)


@dataclass
class TrackedTensor(ProjectedTensor):
    """A tensor that is projected on columns which follow its gradient.

    The projection is PowerSGD's power iteration (Vogels, Karimireddy and Jaggi, NeurIPS 2019,
    Algorithm 1). H_n is the gradient plus residual of rank n as a matrix of d rows and m columns,
    and Q (m x r) the basis that the step before left::

        1  P <- mean over ranks of H_n Q
        2  R <- orthonormal columns that span those of P
        3  p_n <- H_n^T R;  p <- mean over ranks of p_n         # SEPARATE, on H_n^T, with this R
        4  Hhat <- R p^T;  the residual is H_n - R p_n^T
        5  Q <- orthonormal columns that span those of p

    The space that is sent follows the gradient's largest singular vectors, one power iteration a
    step. R is the same on all ranks, since P is. The mean of the residuals is exact for any R, so P
    may be sent as int8 like p.

    Two things differ from the paper. The residual is what the rank itself has not sent, instead of
    its distance from the average; the mean is the same, and it does not grow. Q is orthonormal, so
    that the columns of P differ in size by singular values instead of their squares, and int8
    keeps the small ones.
    """

    Q: Tensor

    def view_as_P(self, part: Tensor) -> Tensor:
        """View a part of the first payload as P, (d, r); it is stored by columns."""
        return part.view(self.q.r, self.q.d).t()

    def factors(self, i: int, mean: Payload) -> Factored:
        """Return the factors of the averaged gradient, for a fused lines 4 and 5."""
        dropped = None if mean.seed is None else mean.dropped_parts[i]
        return Factored(i, self.q.rows, self.q.columns, self.R, mean.parts[i], self.p, dropped)


def adds_products(e: Tensor) -> bool:
    """True where multiplying e and g and adding the products beats writing and reading e + g."""
    return e.device.type != "cpu"


def add_product_(x: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """Add ``factor * a b`` to ``x``; all are matrices, or stacks of matrices."""
    if x.dim() == 2:
        x.addmm_(a, b, alpha=factor)
    else:
        x.baddbmm_(a, b, alpha=factor)
