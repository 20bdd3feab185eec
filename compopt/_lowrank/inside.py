"""SEPARATE inside FSDP2: Algorithm 1 (see ``separate.py``) in place of FSDP's own reduce-scatter.

In backward, as soon as FSDP has the gradients of some parameters, of every matrix among them::

     1  h_n <- g_n + e_n
     2  p_n <- h_n R
     3  p <- mean over ranks of p_n
     4  on rank d, of the rows that are its shard:  ghat <- p R^T / r

All ranks have p, as under DistributedDataParallel: it is small, and where rows are projected, or
tracked, every shard needs all of it. What is not projected is reduced to its owner as it is. The
base takes ghat in ``step()``, and with it line 5 is done (see ``_engine.inside``): until then each
rank keeps its gradient of what is projected, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .._engine.engine import Engine
from .._engine.inside import place_of
from .._engine.when import dense_steps
from .._ops.clipping import clip_factor
from .._ops.ops import Ops
from .._state.buckets import Bucket
from .._state.fsdp_rows import FsdpRows, Piece, columns_of
from .._wire.requests import AllReduceMean, Asking, Payload, ReduceScatterMean, Together
from .sent import Projected
from .step import Projections
from .tracking import follow, follow_all


class Sent(NamedTuple):
    """What a backward has sent of some parcel."""

    projections: Projections
    mean: Payload


class Whole(NamedTuple):
    """Matrices of one group that are averaged together, as if they were not cut.

    The bucket's tensors have no memory but their gradients'; its state is the optimizer's.
    """

    bucket: Bucket
    pieces: list[Piece]

    @property
    def dense(self) -> bool:
        """Whether the dense start is not over."""
        return bool(self.bucket.group["step"] < dense_steps(self.bucket))


class Parcel(FsdpRows):
    """The parameters of one reduce-scatter over ``ranks``, in its order.

    ``given``: each with the dimension that FSDP cuts, and its residual where it is projected.
    ``projections`` says how a bucket is projected at a step.
    """

    def __init__(
        self,
        given: Iterable[tuple[Tensor, int, Tensor | None]],
        rank: int,
        ranks: int,
        projections: Callable[[Bucket], Projections],
    ):
        super().__init__(given, rank, ranks)
        self.projections = projections
        self.whole: list[Whole] = []  # what is projected, by groups
        self.sent: list[Sent] = []  # in this step

    @property
    def phase(self) -> str:
        return "dense" if all(one.dense for one in self.whole) else "projected"

    def read(self, one: Whole, rows: Tensor, again: bool) -> Projections:
        """Line 1.

        ``again``: what is owed has been added to an earlier backward's gradients.
        """
        for p, piece in zip(one.bucket.params, one.pieces, strict=True):
            p.grad = piece.gather(rows)
        sending = self.projections(one.bucket)
        if again:
            one.bucket.let_go()
            for tensor in sending.tensors:
                assert tensor.e is not None
                tensor.e = torch.zeros_like(tensor.e)
        return sending

    def write(self, one: Whole, sent: Sent, out: Tensor) -> None:
        """Line 4, of this rank's rows."""
        for i, (piece, tensor) in enumerate(zip(one.pieces, sent.projections.tensors, strict=True)):
            assert isinstance(tensor, Projected)
            own, part = out[piece.begin : piece.end], sent.mean.parts[i]
            first, last = piece.span(self.rank, self.ranks)
            rows = tensor.q.rows // max(1, piece.p.shape[0])  # of the matrix, in one of the tensor
            if piece.dim:
                whole = tensor.rows(part, 0, tensor.q.rows).view(piece.p.shape)
                own.copy_(whole.chunk(self.ranks, piece.dim)[self.rank].reshape(-1))
            else:
                mine = tensor.rows(part, first * rows, last * rows).reshape(-1)
                own[: len(mine)] = mine  # FSDP does not read what follows

    def commit(self, norm: float) -> None:
        """Line 5, and what tracked tensors begin with the next time."""
        for sending, mean in self.sent:
            bucket = sending.bucket
            factor = clip_factor(norm, bucket.group["max_grad_norm"])
            sending.draw()
            for i, tensor in enumerate(sending.tensors):
                tensor.e = bucket.state["residual"][i]
                tensor.feed_back(mean, i, factor)
                if sending.forgets:
                    tensor.e.zero_()
            gates, tracked = [True] * len(bucket.params), sending.tracked
            if bucket.device.type == "cpu":
                follow(bucket, tracked, sending.bases, [*gates])
            else:
                follow_all([Together("", follow_all, bucket, (tracked, mean, gates))])

    def drop(self) -> None:
        """The step has ended: gradients are not kept."""
        self.sent = []
        for p in (p for one in self.whole for p in one.bucket.params):
            p.grad = None


def averaged(parcel: Parcel, ops: Ops, rows: Tensor, out: Tensor, again: bool) -> Asking[None]:
    """One reduce-scatter: the mean over ranks of this rank's row of ``rows`` into ``out``.

    ``again``: an earlier backward belongs to the same step.
    """
    again = again and bool(parcel.sent)  # not where gradients were set to zero
    if not again:
        parcel.drop()
    projected = [one for one in parcel.whole if not one.dense]
    for one in projected:
        sending = parcel.read(one, rows, again)  # line 1
        yield from sending.track()
        sending.draw()
        payload = sending.pack()  # line 2
        sending.keep(payload)
        mean = yield AllReduceMean(payload)  # line 3
        sending.find_bases(mean)
        sending.draw()
        sent = Sent(sending, mean)
        parcel.write(one, sent, out)  # line 4
        parcel.sent.append(sent)

    compressed = {piece.p for one in projected for piece in one.pieces}
    plain = [piece for piece in parcel.pieces if piece.p not in compressed]
    if any(piece.size for piece in plain):
        message = columns_of(rows, plain)
        row = yield ReduceScatterMean(message.view(-1), [message.shape[1]] * parcel.ranks)
        for piece, own in zip(plain, row.split([piece.size for piece in plain]), strict=True):
            out[piece.begin : piece.end] = own


def uncut(pieces: list[Piece], engine: Engine, dtype: torch.dtype, before: int) -> list[Whole]:
    """A bucket for each group that has any of them, of gradients in this dtype.

    ``before``: how many others there are.
    """
    by_group: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_group.setdefault(id(engine.bucket_of[piece.p].group), []).append(piece)
    found: list[Whole] = []
    for own in by_group.values():
        held = [place_of(piece.p, engine) for piece in own]
        (first, _), names = held[0], [bucket.names[i] for bucket, i in held]
        tensors = [
            torch.empty(1, dtype=dtype, device=first.device).expand(piece.p.shape) for piece in own
        ]
        index = before + len(found)
        bucket = Bucket(index, first.group, tensors, names, lambda *_: True, first.scratch)
        for name in first.state.keys() & {"residual", "basis"}:
            bucket.state[name] = [other.state[name][i] for other, i in held]
        bucket.job = engine.ops.job(bucket)
        found.append(Whole(bucket, own))
    return found
