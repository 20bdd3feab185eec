"""PowerSGD's power iteration as a projection of SEPARATE (Vogels, Karimireddy and Jaggi, NeurIPS
2019, Algorithm 1).

One matrix H_n of d rows and m columns on rank n, gradient plus residual; Q (m x r) is what the step
before left::

    1  P <- mean over ranks of H_n Q
    2  R <- orthonormal columns that span those of P
    3  p_n <- H_n^T R;  p <- mean over ranks of p_n             # SEPARATE, on H_n^T, with this R
    4  Hhat <- R p^T;  the residual is H_n - R p_n^T
    5  Q <- orthonormal columns that span those of p

So the space that is sent follows the gradient's largest singular vectors, one power iteration a
step. R is the same on all ranks, since P is, and the mean of the residuals is exact whatever R is:
P may travel as int8 as well as p.

Where we differ from the paper: the residual is what each rank sent too little, not its distance
from the average, which has the same mean and does not grow; Q is made orthonormal, so that columns
of P differ in size by singular values, not by their squares, and int8 keeps the small ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._ops.operations import Ops
from .._ops.updates import Factored
from .._state.buckets import Bucket
from .._wire.payload import Payload
from .._wire.requests import AllReduceMean, RequestGenerator
from .orthonormal import orthonormal
from .tensors import ProjectedTensor


@dataclass
class TrackedTensor(ProjectedTensor):
    """A tensor that is projected on columns which follow its gradient."""

    Q: Tensor  # what the step before left, (m, r)

    @property
    def first_length(self) -> int:
        """Of P, on the wire."""
        return self.q.d * self.q.r

    def first_part(self, part: Tensor) -> Tensor:
        """A part of the first payload as P, (d, r).

        By columns: values of one size follow each other.
        """
        return part.view(self.q.r, self.q.d).t()

    def factored(self, i: int, mean: Payload) -> Factored:
        """Lines 4 and 5 of SEPARATE, for a back end that fuses them."""
        dropped = None if mean.seed is None else mean.dropped_parts[i]
        rows, columns = self.q.rows, self.q.columns
        return Factored(i, rows, columns, self.R, mean.parts[i], self.p, dropped)


def find_columns(
    bucket: Bucket, ops: Ops, tracked: dict[int, TrackedTensor]
) -> RequestGenerator[Payload]:
    """Lines 1 and 2: find R for each of these tensors, by their numbers in the bucket.

    Returns the payload, whose header all ranks have agreed on.
    """
    lengths = [0] * len(bucket.params)
    for i, tensor in tracked.items():
        lengths[i] = tensor.first_length
    payload = bucket.make_payload(lengths, bucket.group["payload_dtype"], use=1)
    ops.write_header(payload, bucket.grads())
    for i, tensor in tracked.items():
        P = tensor.first_part(payload.exact[i])
        tensor.multiply_h(tensor.Q, P, transposed=True)
    mean: Payload = yield AllReduceMean(payload.round(), has_next=True)  # line 1
    Ps = [tensor.first_part(mean.parts[i]).to(tensor.Q.dtype) for i, tensor in tracked.items()]
    for tensor, R in zip(tracked.values(), orthonormal(Ps), strict=True):  # line 2
        tensor.R = R
    return mean


def next_bases(tracked: dict[int, TrackedTensor], mean: Payload) -> list[Tensor]:
    """Line 5: the next Q of each."""
    return orthonormal([tensor.q.of_part(mean.parts[i]) for i, tensor in tracked.items()])
