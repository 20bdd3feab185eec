"""How one tensor is sent at one step: projected, or whole. Both answer to the same calls.

A part of a payload is what is sent of the tensor, or after averaging what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._ops.norms import scale_
from .._ops.operations import Ops
from .._wire.payload import Payload
from .projections import Projection, by_blocks


@dataclass
class Whole:
    """A tensor whose gradient is averaged as it is.

    ``e`` is what an earlier step, projected or rounded, has left of it: None where nothing ever is.
    ``owed``: it may be other than 0; ``sends``: and what it holds is worth sending.
    """

    g: Tensor | None
    e: Tensor | None
    clipped: float
    ops: Ops
    length: int
    owed: bool
    sends: bool

    def cosine(self, part: Tensor) -> Tensor | float:
        return 0.0

    @property
    def square_scale(self) -> float:
        """What |part|^2 is multiplied by to be the squared norm of what is averaged."""
        return 1.0

    def average_in(self, part: Tensor) -> Tensor | None:
        """Where the averaged gradient is already."""
        return part

    def reconstruct(self, part: Tensor, factor: float, ghat: Tensor) -> Tensor:
        """``factor`` times the averaged gradient, into ``ghat``, where it may be already."""
        if ghat.data_ptr() != part.data_ptr():
            ghat.view(-1).copy_(part)
        scale_(ghat, factor)
        return ghat

    def feed_back(self, mean: Payload, i: int, factor: float) -> None:
        """All has been sent, or was the noise of an unbiased projection, which owes nothing: there
        remains what rounding took off.

        Where the average was clipped, ``factor`` of what was owed has arrived.
        """
        if self.e is None:
            return
        if not self.owed and mean.dropped is None:
            return
        self.e.mul_(1 - factor if self.sends else 0.0)
        if mean.dropped is not None:
            self.e.view(-1).add_(mean.dropped_parts[i], alpha=factor)


@dataclass
class Projected:
    """A tensor of which p_n = h_n R is averaged: SEPARATE's lines for one matrix."""

    g: Tensor | None
    e: Tensor
    clipped: float
    q: Projection
    ops: Ops
    R: Tensor = field(init=False)  # of line 2; asked for wherever it is used
    p: Tensor = field(init=False)  # this rank's, to be subtracted from its error; see ``keep``

    @property
    def length(self) -> int:
        return self.q.m * self.q.r

    def h(self) -> Tensor:
        """Line 1, as an (m, d) matrix. Scratch memory."""
        e, g = self.e, self.g
        h = self.ops.scratch(e, e.numel()).view(e.shape)
        if g is None:
            h.copy_(e)
        else:
            torch.add(e, g, alpha=self.clipped, out=h)
        return self.q.matrix(h)

    def write(self, part: Tensor) -> None:
        """Line 2, into its part of the message."""
        self.times(self.R, self.q.of_part(part))

    def times(self, right: Tensor, out: Tensor, across: bool = False) -> None:
        """``h right``, or with ``across`` its transpose's product.

        A device would write h, and read it again: the product of g is added to that of e.
        """
        e, g = self.e, self.g
        if sums_products(e) and (g is None or g.dtype == e.dtype == out.dtype):
            terms = [(self.q.matrix(e), 1.0)]
            if g is not None:
                terms.append((self.q.matrix(g.contiguous()), self.clipped))
        else:
            terms = [(self.h(), 1.0)]
        for number, (term, factor) in enumerate(terms):
            term = term.t() if across else term
            for own, rows, into in by_blocks(right, term, out, self.q.height):
                if number:
                    add_product_(into, rows, own, factor)
                else:
                    multiply(rows, own, into)

    def cosine(self, part: Tensor) -> Tensor | float:
        """Between this rank's gradient and the reconstruction of what it sends."""
        q, R = self.q, self.R
        if self.g is None:
            return 0.0
        g = q.matrix(self.g.contiguous()).to(R.dtype)
        ghat = self.expand(q.of_part(part).to(R.dtype), R, torch.empty_like(g))
        lengths = torch.linalg.vector_norm(g) * torch.linalg.vector_norm(ghat)
        cosine: Tensor = (g * ghat).sum() / lengths.clamp_min(torch.finfo(R.dtype).tiny)
        return cosine

    @property
    def square_scale(self) -> float:
        """What |p|^2 is multiplied by to be the squared norm of what is averaged, not of its
        reconstruction.

        With a Gaussian R the mean of |h R|^2 / r is |h|^2; orthonormal columns find the part of h
        that they span.
        """
        return self.q.scale

    def average_in(self, part: Tensor) -> Tensor | None:
        """Nowhere yet."""
        return None

    def reconstruct(self, part: Tensor, factor: float, ghat: Tensor) -> Tensor:
        """Line 4, times ``factor``, into ``ghat``."""
        q, R = self.q, self.R
        p = q.of_part(part).to(R.dtype) * (q.scale * factor)
        if ghat.dtype == R.dtype:
            self.expand(p, R, q.matrix(ghat))
            return ghat
        exact = self.ops.scratch(R, ghat.numel()).view(ghat.shape)
        self.expand(p, R, q.matrix(exact))
        return ghat.copy_(exact)

    def expand(self, p: Tensor, R: Tensor, out: Tensor) -> Tensor:
        """``p R^T``."""
        for own, rows, into in by_blocks(R, p, out, self.q.height):
            torch.matmul(rows, own.mT, out=into)
        return out

    def rows(self, part: Tensor, first: int, last: int) -> Tensor:
        """These rows of line 4's matrix, as the tensor has them."""
        q, R = self.q, self.R
        p = q.of_part(part).to(R.dtype)
        if q.of_rows:
            some = R.new_empty(last - first, q.m)
            self.expand(p, R[..., first:last, :], some.t())
            return some.mul_(q.scale)
        if q.height is not None:  # no more blocks than these rows lie in
            begin, end = first // q.height, math.ceil(last / q.height)
            R, p = R[begin:end], p[begin * q.height : end * q.height]
            first, last = first - begin * q.height, last - begin * q.height
        else:
            p, first, last = p[first:last], 0, last - first
        whole = self.expand(p, R, R.new_empty(len(p), q.d))
        return whole[first:last].mul_(q.scale)

    def feed_back(self, mean: Payload, i: int, factor: float) -> None:
        """Line 5: e <- beta e + (1 - beta) (g + e - p R^T / r) = e + (1 - beta) (g - p R^T / r).

        p is what the others got of this rank: where it was rounded on its way, as int8, without
        what that took off. ``factor`` is what the average was clipped by: so was then the gradient,
        and only that much of the error has arrived.
        """
        e, g, q, R = self.e, self.g, self.q, self.R
        if q.beta == 1:
            return
        new = (1 - q.beta) * factor
        if mean.seed is not None:
            self.p.sub_(mean.dropped_parts[i])
        p = q.of_part(self.p).to(R.dtype)
        if g is not None:
            e.add_(g, alpha=new * self.clipped)
        for own, rows, into in by_blocks(R, p, q.matrix(e), q.height):
            add_product_(into, rows, own.mT, -new * q.scale)


Sent = Whole | Projected


def sums_products(e: Tensor) -> bool:
    """Whether h times a matrix is the sum of two products, in place of a product of a sum."""
    return e.device.type != "cpu"


def write(tensors: Sequence[Sent], parts: Sequence[Tensor]) -> None:
    """All tensors into their parts of the message."""
    given = []
    for tensor, part in zip(tensors, parts, strict=False):
        if isinstance(tensor, Projected):
            tensor.write(part)
        elif tensor.g is None:
            part.zero_()
        else:
            given.append((tensor, part, tensor.g.reshape(-1)))
    if given:
        whole = [part for _, part, _ in given]
        torch._foreach_copy_(whole, [g for _, _, g in given])
        if given[0][0].clipped != 1:
            torch._foreach_mul_(whole, given[0][0].clipped)
    for tensor, part in zip(tensors, parts, strict=False):
        if isinstance(tensor, Whole) and tensor.e is not None and tensor.sends:
            part.add_(tensor.e.view(-1))


def keep(tensors: Sequence[Sent], sent: Payload) -> None:
    """Copies of what is needed when the payload is the mean of all ranks', and R holds other
    numbers.
    """
    pairs = zip(tensors, sent.parts, strict=False)
    kept = [(tensor, part) for tensor, part in pairs if isinstance(tensor, Projected)]
    if not kept:
        return
    parts = [part for _, part in kept]
    copies = torch.empty_like(sent.body[: sum(map(len, parts))]).split([len(p) for p in parts])
    torch._foreach_copy_(list(copies), parts)
    for (tensor, _), copy in zip(kept, copies, strict=True):
        tensor.p = copy


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
