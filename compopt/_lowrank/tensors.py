"""How one tensor is sent at one step: whole, or projected. Both classes have the same methods.

The part of a payload that belongs to a tensor holds what this rank sends of it, and after the
exchange the average over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._ops.norms import scale_
from .._ops.operations import Ops
from .._wire.payload import Payload
from .projections import Projection, by_blocks


@dataclass
class WholeTensor:
    """A tensor whose gradient is averaged whole.

    ``residual``: what earlier steps, projected or rounded, have not sent (None: nothing ever
    remains). ``has_residual``: it may differ from 0. ``sends_residual``: it is worth sending,
    unlike the noise of an unbiased projection. ``local_factor``: clips the local gradient.
    """

    grad: Tensor | None
    residual: Tensor | None
    local_factor: float
    length: int
    has_residual: bool
    sends_residual: bool

    def cosine(self, part: Tensor) -> Tensor | float:
        return 0.0

    @property
    def square_scale(self) -> float:
        """The squared norm of what is averaged, over that of the part."""
        return 1.0

    def average_in(self, part: Tensor) -> Tensor | None:
        """Where the averaged gradient is before it is reconstructed."""
        return part

    def reconstruct(self, part: Tensor, factor: float, out: Tensor) -> Tensor:
        """Write ``factor`` times the averaged gradient to ``out``, where it may be already."""
        if out.data_ptr() != part.data_ptr():
            out.view(-1).copy_(part)
        scale_(out, factor)
        return out

    def feed_back(self, mean: Payload, i: int, factor: float) -> None:
        """Keep what rounding took off; all else was sent.

        Where the average was clipped, ``factor`` of the residual has arrived.
        """
        if self.residual is None or not (self.has_residual or mean.dropped is not None):
            return
        self.residual.mul_(1 - factor if self.sends_residual else 0.0)
        if mean.dropped is not None:
            self.residual.view(-1).add_(mean.dropped_parts[i], alpha=factor)


@dataclass
class ProjectedTensor:
    """A tensor of which p_n = h_n R is averaged: SEPARATE's lines 1, 2, 4 and 5 for one matrix.

    ``residual`` is e_n, ``q`` how the tensor is projected, ``local_factor`` clips the local
    gradient.
    """

    grad: Tensor | None
    residual: Tensor
    local_factor: float
    q: Projection
    ops: Ops
    R: Tensor = field(init=False)  # drawn again wherever it is used
    p: Tensor = field(init=False)  # a copy of what this rank sends

    @property
    def length(self) -> int:
        return self.q.m * self.q.r

    def add_residual(self) -> Tensor:
        """Line 1: h_n as an (m, d) matrix, in scratch memory."""
        e, g = self.residual, self.grad
        h = self.ops.scratch(e, e.numel()).view(e.shape)
        if g is None:
            h.copy_(e)
        else:
            torch.add(e, g, alpha=self.local_factor, out=h)
        return self.q.matrix(h)

    def project(self, part: Tensor) -> None:
        """Line 2, into the part of the payload."""
        self.multiply_h(self.R, self.q.of_part(part))

    def multiply_h(self, right: Tensor, out: Tensor, transposed: bool = False) -> None:
        """Write ``h right``, or ``h^T right``, to ``out``."""
        e, g = self.residual, self.grad
        if sums_products(e) and (g is None or g.dtype == e.dtype == out.dtype):
            matrices = [(self.q.matrix(e), 1.0)]
            if g is not None:
                matrices.append((self.q.matrix(g.contiguous()), self.local_factor))
        else:
            matrices = [(self.add_residual(), 1.0)]
        for number, (matrix, factor) in enumerate(matrices):
            matrix = matrix.t() if transposed else matrix
            for R, rows, into in by_blocks(right, matrix, out, self.q.height):
                if number:
                    add_product_(into, rows, R, factor)
                else:
                    multiply(rows, R, into)

    def cosine(self, part: Tensor) -> Tensor | float:
        """Return the cosine between this rank's gradient and what it sends, reconstructed."""
        q, R = self.q, self.R
        if self.grad is None:
            return 0.0
        g = q.matrix(self.grad.contiguous()).to(R.dtype)
        ghat = self.expand(q.of_part(part).to(R.dtype), R, torch.empty_like(g))
        lengths = torch.linalg.vector_norm(g) * torch.linalg.vector_norm(ghat)
        cosine: Tensor = (g * ghat).sum() / lengths.clamp_min(torch.finfo(R.dtype).tiny)
        return cosine

    @property
    def square_scale(self) -> float:
        """The squared norm of what is averaged, not of its reconstruction, over that of p.

        With a Gaussian R the mean of |h R|^2 / r is |h|^2; orthonormal columns find the part of h
        that they span.
        """
        return self.q.scale

    def average_in(self, part: Tensor) -> Tensor | None:
        return None

    def reconstruct(self, part: Tensor, factor: float, out: Tensor) -> Tensor:
        """Line 4, times ``factor``, into ``out``."""
        q, R = self.q, self.R
        p = q.of_part(part).to(R.dtype) * (q.scale * factor)
        if out.dtype == R.dtype:
            self.expand(p, R, q.matrix(out))
            return out
        exact = self.ops.scratch(R, out.numel()).view(out.shape)
        self.expand(p, R, q.matrix(exact))
        return out.copy_(exact)

    def expand(self, p: Tensor, R: Tensor, out: Tensor) -> Tensor:
        """Write ``p R^T`` to ``out``."""
        for matrix, rows, into in by_blocks(R, p, out, self.q.height):
            torch.matmul(rows, matrix.mT, out=into)
        return out

    def reconstruct_rows(self, part: Tensor, first: int, last: int) -> Tensor:
        """Line 4 for some rows of the tensor as a matrix."""
        q, R = self.q, self.R
        p = q.of_part(part).to(R.dtype)
        if q.of_rows:
            some = R.new_empty(last - first, q.m)
            self.expand(p, R[..., first:last, :], some.t())
            return some.mul_(q.scale)
        if q.height is not None:  # only the blocks that these rows are in
            begin, end = first // q.height, math.ceil(last / q.height)
            R, p = R[begin:end], p[begin * q.height : end * q.height]
            first, last = first - begin * q.height, last - begin * q.height
        else:
            p, first, last = p[first:last], 0, last - first
        whole = self.expand(p, R, R.new_empty(len(p), q.d))
        return whole[first:last].mul_(q.scale)

    def feed_back(self, mean: Payload, i: int, factor: float) -> None:
        """Line 5: e <- beta e + (1 - beta) (g + e - p R^T / r) = e + (1 - beta) (g - p R^T / r).

        p is what the others received from this rank: without what rounding took off. ``factor``
        clipped the average: only that much of the error has arrived.
        """
        e, g, q, R = self.residual, self.grad, self.q, self.R
        if q.beta == 1:
            return
        new = (1 - q.beta) * factor
        if mean.seed is not None:
            self.p.sub_(mean.dropped_parts[i])
        p = q.of_part(self.p).to(R.dtype)
        if g is not None:
            e.add_(g, alpha=new * self.local_factor)
        for matrix, rows, into in by_blocks(R, p, q.matrix(e), q.height):
            add_product_(into, rows, matrix.mT, -new * q.scale)


def sums_products(e: Tensor) -> bool:
    """Whether h is multiplied as e plus g, two products, instead of written and read again."""
    return e.device.type != "cpu"


def add_product_(x: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """``x += factor * a b``, of matrices, or of stacks of them."""
    if x.dim() == 2:
        x.addmm_(a, b, alpha=factor)
    else:
        x.baddbmm_(a, b, alpha=factor)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """The product of two matrices, or of stacks of them, into one of any dtype."""
    if out.dtype == b.dtype:
        torch.matmul(a, b, out=out)
    else:
        out.copy_(a @ b)
