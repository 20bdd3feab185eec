"""PowerSGD's power iteration as a projection of SEPARATE (Vogels, Karimireddy and Jaggi, NeurIPS
2019, Algorithm 1).

One matrix H_n of d rows and m columns on rank n, what the rank holds back added to its gradient; Q
(m x r) is what the step before left::

    1  P <- mean over ranks of H_n Q
    2  R <- orthonormal columns that span those of P
    3  p_n <- H_n^T R;  p <- mean over ranks of p_n             # SEPARATE, on H_n^T, with this R
    4  Hhat <- R p^T;  the rank holds back H_n - R p_n^T
    5  Q <- orthonormal columns that span those of p

So the space that is sent follows the gradient's largest singular vectors, one power iteration a
step. R is the same on all ranks, since P is, and the mean of what is held back is exact whatever R
is: P may travel as int8 as well as p.

Where we differ from the paper: each rank holds back what *it* sent too little, not its distance
from the average, which has the same mean and does not grow; Q is made orthonormal, so that columns
of P differ in size by singular values, not by their squares, and int8 keeps the small ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.ops import Ops
from .._state.buckets import Bucket
from .._wire.requests import AllReduceMean, Asking, Payload
from .projections import Plan, columns_of, scaled_sum

Matrices = list[Tensor | None]


def track(
    bucket: Bucket,
    ops: Ops,
    grads: list[Tensor | None],
    plan: Plan,
    bases: Matrices,
    clipped: float,
) -> Asking[tuple[Matrices, Payload | None]]:
    """Lines 1 and 2: for each tensor that is tracked its R, (d, r); and the payload whose header is
    agreed already.

    ``bases``: Q of these tensors, None for others. Nothing is exchanged where there are none.
    """
    if all(Q is None for Q in bases):
        return [None] * len(plan), None
    lengths = [0 if Q is None else q.d * q.r for q, Q in zip(plan, bases, strict=True)]
    payload = bucket.payload(lengths, bucket.group["payload_dtype"], use=1)
    ops.mark(payload, grads)
    for i, (q, Q) in enumerate(zip(plan, bases, strict=True)):
        if Q is not None:
            h = q.matrix(scaled_sum(bucket.state["residual"][i], grads[i], clipped, ops)).t()
            out = (
                payload.exact[i].view(q.r, q.d).t()
            )  # by columns: values of one size follow each other
            if out.dtype == h.dtype:
                torch.mm(h, Q, out=out)
            else:
                out.copy_(h @ Q)
    mean = yield AllReduceMean(payload.round(), more=True)
    wide = [
        None if Q is None else part.view(q.r, q.d).t().to(Q.dtype)
        for part, q, Q in zip(mean.parts, plan, bases, strict=True)
    ]
    return orthonormal(wide), mean


def orthonormal(matrices: Matrices) -> Matrices:
    """Orthonormal columns that span each matrix's, those of equal shape found together. Zeros give
    unit vectors.

    In float32 at least. Every rank finds its own, of equal matrices, so they must be equal to the
    bit."""
    found: Matrices = [None] * len(matrices)
    for shape in {matrix.shape for matrix in matrices if matrix is not None}:
        same = [
            i for i, matrix in enumerate(matrices) if matrix is not None and matrix.shape == shape
        ]
        stacked = torch.stack([matrices[i] for i in same])
        for i, Q in zip(same, columns_of(stacked), strict=True):
            found[i] = Q
    return found


def join(some: list[Tensor | None], others: list[Tensor | None]) -> list[Tensor | None]:
    """The tracked matrices, and for other tensors the drawn ones."""
    return [b if a is None else a for a, b in zip(some, others, strict=True)]


def followed(plan: Plan, mean: Payload) -> Matrices:
    """Line 5: the next Q of each tensor that is tracked."""
    tracked = [q is not None and q.kind == "tracked" for q in plan]
    return orthonormal(
        [
            q.of_part(part) if yes else None
            for q, part, yes in zip(plan, mean.parts, tracked, strict=False)
        ]
    )


def follow(bucket: Bucket, new: Matrices, present: list[bool]) -> None:
    """Keep the next Q of the tensors that have had a gradient."""
    for i, (Q, here) in enumerate(zip(new, present, strict=True)):
        if Q is not None and here:
            bucket.state["basis"][i].view(Q.shape).copy_(Q)
            bucket.cache["warm"][i] = True
