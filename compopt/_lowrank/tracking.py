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
of P differ in size by singular values, not by their squares, and int8 keeps the small ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._ops.operations import Ops
from .._ops.updates import Factored
from .._state.buckets import Bucket
from .._wire.payload import Payload
from .._wire.requests import AllReduceMean, RequestGenerator, RunBatched
from .orthonormal import orthonormal
from .sent import Projected


@dataclass
class Tracked(Projected):
    """A tensor that is projected on columns which follow its gradient."""

    Q: Tensor  # what the step before left, (m, r)

    @property
    def first_length(self) -> int:
        """Of P, on the wire."""
        return self.q.d * self.q.r

    def P(self, part: Tensor) -> Tensor:
        """A part of the first payload as a (d, r) matrix.

        By columns: values of one size follow each other.
        """
        return part.view(self.q.r, self.q.d).t()

    def factored(self, i: int, mean: Payload) -> Factored:
        """Lines 4 and 5 of it, for a back end that does them at once."""
        dropped = None if mean.seed is None else mean.dropped_parts[i]
        rows, columns = self.q.rows, self.q.columns
        return Factored(i, rows, columns, self.R, mean.parts[i], self.p, dropped)


def track(
    bucket: Bucket, ops: Ops, grads: list[Tensor | None], tracked: dict[int, Tracked]
) -> RequestGenerator[Payload]:
    """Lines 1 and 2: R for each of these tensors of the bucket, by their numbers.

    Returns the payload, whose header all ranks have agreed on.
    """
    lengths = [0] * len(bucket.params)
    for i, tensor in tracked.items():
        lengths[i] = tensor.first_length
    payload = bucket.payload(lengths, bucket.group["payload_dtype"], use=1)
    ops.write_header(payload, grads)
    for i, tensor in tracked.items():
        tensor.times(tensor.Q, tensor.P(payload.exact[i]), across=True)
    mean: Payload = yield AllReduceMean(payload.round(), has_next=True)  # line 1
    P = [tensor.P(mean.parts[i]).to(tensor.Q.dtype) for i, tensor in tracked.items()]
    for tensor, R in zip(tracked.values(), orthonormal(P), strict=True):  # line 2
        tensor.R = R
    return mean


def next_bases(tracked: dict[int, Tracked], mean: Payload) -> list[Tensor]:
    """Line 5: the next Q of each."""
    return orthonormal([tensor.q.of_part(mean.parts[i]) for i, tensor in tracked.items()])


def follow(
    bucket: Bucket, tracked: dict[int, Tracked], bases: list[Tensor], present: list[bool]
) -> None:
    """Keep the next Q of those that any rank has a gradient of, and note which have one."""
    for i, Q in zip(tracked, bases, strict=True):
        if present[i]:
            bucket.state["basis"][i].view(Q.shape).copy_(Q)
            bucket.cache["warm"][i] = True


def follow_all(asked: list[RunBatched]) -> list[None]:
    """Find the next Q of all buckets, and keep those of tensors that have had a gradient."""
    parts, bases = [], []
    for one in asked:
        tracked, mean, present = one.args
        for i in (i for i in tracked if present[i]):
            parts.append(tracked[i].q.of_part(mean.parts[i]))
            bases.append(one.bucket.state["basis"][i].view(parts[-1].shape))
            one.bucket.cache["warm"][i] = True
    if parts:
        torch._foreach_copy_(bases, orthonormal(parts))
    return [None] * len(asked)
