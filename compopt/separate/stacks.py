"""Projections of stacks: SEPARATE's lines for k tensors of one shape, as one tensor (k, ...).

Lines are those of Algorithm 1, see ``compopt.separate``. h is a tensor as it is stored, H the
(m, d) matrix that is projected: h or its transpose (``Projection.view_as_matrices``)::

    1   h <- g + e                                    add_residual
    2   R <- random numbers, (d, r);  p <- H R        multiply
    3   p <- mean over ranks of p
    4   ghat <- p R^T / r                             reconstruct
    5   e <- e + (1 - beta) (g - p R^T / r)           keep_unsent_of_stack

A tracked projection is PowerSGD's power iteration (Vogels, Karimireddy and Jaggi, NeurIPS 2019,
Algorithm 1). It computes R from Q, (m, r), the basis of the step before; H is the transpose of h
(lines are written with h), 1/r is 1, and beta is 0::

    2a  P <- mean over ranks of h Q                   multiply
    2b  R <- orthonormal columns that span those of P     orthonormalize_columns
    2c  p <- h^T R                                    multiply
    3   p <- mean over ranks of p
    4   ghat <- R p^T                                 reconstruct
    5   e <- h less this rank's R p^T                 keep_unsent_of_stack
    6   Q <- orthonormal columns that span those of p     orthonormalize_columns

The space that is sent follows the gradient's largest singular vectors, one power iteration a step.
R is the same on all ranks, since P is. The mean of the residuals is exact for any R, so P may be
sent as int8 like p. Two things differ from the paper. The residual is what the rank itself has not
sent, instead of its distance from the average; the mean is the same, and it does not grow. Q is
orthonormal, so that the columns of P differ in size by singular values instead of their squares,
and int8 keeps the small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._ops.operations import Ops
from .._state.bucket import Bucket
from .._state.residuals import ResidualStack
from .._wire.payload import Payload
from .projections import Projection, orthonormalize

UNSET = torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass
class ProjectedStack:
    """Neighbours in a bucket with one projection, at one step.

    ``indices``: their places in the bucket. ``grads``: this rank's gradients, None where there is
    none. ``residual``: their residuals, which ``keep_unsent_of_stack`` writes. ``R``: the random or
    orthonormal columns, (k, d, r), or (k, blocks, d, r). ``Q``: the basis of a tracked projection,
    (k, m, r). ``sent``: what this rank sends of p, as it lies in the payload; after the exchange,
    as the others have received it. ``mean``: the average of p, as it lies in the payload. Tensors
    are empty until they are computed.
    """

    indices: range
    projection: Projection
    grads: list[Tensor | None]
    residual: ResidualStack
    Q: Tensor = UNSET
    R: Tensor = UNSET
    sent: Tensor = UNSET
    mean: Tensor = UNSET

    def select(self, at: slice) -> ProjectedStack:
        """Return the stack of some of its tensors."""
        k, flat = len(self.indices), (self.sent, self.mean)
        sent, mean = (x.view(k, -1)[at].reshape(-1) if len(x) else x for x in flat)
        return replace(
            self,
            indices=self.indices[at],
            grads=self.grads[at],
            residual=self.residual.select(at),
            Q=self.Q[at],
            R=self.R[at],
            sent=sent,
            mean=mean,
        )

    def view_as_projected(self, part: Tensor) -> Tensor:
        """View the stack's part of a payload as p, the (k, m, r) matrices H R.

        Tracked ones are stored by columns: columns differ in size, and values of one size then
        share the scales of a quantized payload.
        """
        projection = self.projection
        if projection.is_tracked:
            return part.view(-1, projection.r, projection.m).mT
        return part.view(-1, projection.m, projection.r)

    def view_as_P(self, part: Tensor) -> Tensor:
        """View the stack's part of the first payload as P, (k, d, r); it is stored by columns."""
        return part.view(-1, self.projection.r, self.projection.d).mT


def make_room(ops: Ops, like: Tensor, shape: torch.Size) -> Tensor:
    """Return memory of the step for a stack, of the dtype and device of ``like``. A CPU reuses it:
    new pages cost more than copies; elsewhere it is freed with the stack.
    """
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return ops.scratch(like, shape.numel(), use="stack").view(shape)


def add_residual(ops: Ops, stack: ProjectedStack) -> Tensor:
    """Do line 1: return h = g + e, in memory of the step."""
    stored = stack.residual.exact
    if stored is None:
        h = stack.residual.read()  # a copy
    else:
        h = make_room(ops, stored, stored.shape).copy_(stored)
    add_gradients(stack, h)
    return h


def add_gradients(stack: ProjectedStack, sums: Tensor, scale: float = 1.0) -> None:
    """Add ``scale`` times this rank's gradients, those that there are, to ``sums``."""
    rows = [(to, g) for to, g in zip(sums.unbind(), stack.grads, strict=True) if g is not None]
    if rows:
        torch._foreach_add_([to for to, _ in rows], [g for _, g in rows], alpha=scale)


def multiply(
    bucket: Bucket,
    ops: Ops,
    stacks: Sequence[ProjectedStack],
    right: Sequence[Tensor],
    out: Sequence[Tensor],
    makes_P: bool,
    payload: Payload | None,
) -> None:
    """Write ``H right`` of each stack to its part ``out`` of a payload: line 2, or 2c. Where
    ``makes_P``, write ``H^T right``, which is ``h Q``: line 2a. Write the gradient flags of the
    bucket into the header of ``payload``.
    """
    for stack, narrow, part in zip(stacks, right, out, strict=True):
        H = stack.projection.view_as_matrices(add_residual(ops, stack))
        product = stack.view_as_P(part) if makes_P else stack.view_as_projected(part)
        wide = H.mT if makes_P else H
        if product.dtype != narrow.dtype:
            product.copy_(wide @ narrow)
        elif product.is_contiguous():
            torch.bmm(wide, narrow, out=product)
        else:  # stored by columns
            torch.bmm(narrow.mT, wide.mT, out=product.mT)
    if payload is not None:
        ops.write_header(payload, bucket.grads())


def orthonormalize_columns(
    bucket: Bucket,
    ops: Ops,
    parts: Sequence[Tensor],
    shapes: Sequence[tuple[int, int, int]],
    use: int = 0,
) -> list[Tensor]:
    """Return orthonormal columns that span those of matrices of these shapes (k, n, r), which a
    payload for this ``use`` stores by columns: line 2b, R from P, or 6, Q from p.
    """
    dtype = bucket.compute_dtype
    stacks = [x.view(k, r, n).mT.to(dtype) for x, (k, n, r) in zip(parts, shapes, strict=True)]
    return orthonormalize(stacks)


def reconstruct(ops: Ops, stack: ProjectedStack, factor: float, out: Tensor) -> None:
    """Do line 4: write ``factor`` times the averaged gradients to ``out``."""
    projection, R = stack.projection, stack.R
    p = stack.view_as_projected(stack.mean).to(R.dtype)
    if projection.scale * factor != 1:
        p = p * (projection.scale * factor)
    wide = out if out.dtype == R.dtype else make_room(ops, R, out.shape)
    expand(p, R, projection.view_as_matrices(wide))
    if wide is not out:
        out.copy_(wide)


def expand(p: Tensor, R: Tensor, out: Tensor) -> None:
    """Write ``p R^T`` to ``out``, (k, m, d)."""
    if out.is_contiguous():
        torch.bmm(p, R.mT, out=out)
    else:
        torch.bmm(R, p.mT, out=out.mT)


def keep_unsent_of_stack(stack: ProjectedStack, factor: float) -> None:
    """Do line 5: e <- beta e + (1 - beta) (g + e - p R^T / r) = e + (1 - beta) (g - p R^T / r).

    p is what the other ranks received from this one. Where the average was clipped by ``factor``,
    only that share of the new error is taken.
    """
    projection, R = stack.projection, stack.R
    if projection.beta == 1:
        return
    new = (1 - projection.beta) * factor
    p = stack.view_as_projected(stack.sent).to(R.dtype)
    scale = -new * projection.scale
    with stack.residual.open() as e:
        add_gradients(stack, e, new)
        matrices = projection.view_as_matrices(e)
        if matrices.is_contiguous():
            matrices.baddbmm_(p, R.mT, alpha=scale)
        else:
            matrices.mT.baddbmm_(R, p.mT, alpha=scale)


def reconstruct_rows(
    stack: ProjectedStack, number: int, part: Tensor, first: int, last: int
) -> Tensor:
    """Do line 4 for some rows of one tensor of the stack as a matrix."""
    projection, R = stack.projection, stack.R[number : number + 1]
    p = stack.view_as_projected(part).to(R.dtype)
    if projection.transposes:
        rows = R.new_empty(1, last - first, projection.m)
        expand(p, R[..., first:last, :], rows.mT)
        return rows[0].mul_(projection.scale)
    rows = R.new_empty(1, last - first, projection.d)
    expand(p[:, first:last], R, rows)
    return rows[0].mul_(projection.scale)


def compute_cosines(stack: ProjectedStack, part: Tensor) -> Tensor:
    """Return the cosine between each local gradient and its reconstruction (Algorithm 3)."""
    R, shape = stack.R, stack.residual.shape
    zeros = R.new_zeros(shape)
    g = torch.stack([zeros if g is None else g.to(R.dtype) for g in stack.grads]).contiguous()
    ghat = torch.empty_like(g)
    p = stack.view_as_projected(part).to(R.dtype)
    expand(p, R, stack.projection.view_as_matrices(ghat))
    rows = g.flatten(1).double(), ghat.flatten(1).double()  # squares may overflow float32
    return torch.cosine_similarity(*rows, eps=torch.finfo(torch.float64).tiny).to(R.dtype)
