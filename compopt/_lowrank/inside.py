"""SEPARATE inside FSDP2: Algorithm 1 (see ``separate.py``) in place of FSDP's own reduce-scatter.

In backward, as soon as FSDP has the gradients of some parameters, of every matrix among them::

     1  h_n <- g_n + e_n
     2  p_n <- h_n R
     3  p <- mean over ranks of p_n
     4  on rank d, of the rows that are its shard:  ghat <- p R^T / r

All ranks have p, as under DistributedDataParallel: it is small, and where rows are projected, or
tracked, every shard needs all of it. What is not projected is reduced to its owner as it is. The
base takes ghat in ``step()``, and the errors that line 5 finds become the residuals then (see
``_engine.inside``). Of a further backward in the same step e_n is left out of line 1: it has been
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .._engine.inside import Held, Unsent, place_of
from .._engine.session import Session
from .._engine.when import dense_steps
from .._ops.operations import Ops
from .._state.buckets import Bucket
from .._state.fsdp_rows import FsdpRows, Piece, columns_of
from .._wire.payload import Payload
from .._wire.requests import AllReduceMean, ReduceScatterMean, RequestGenerator
from .sent import Projected
from .step import Projections
from .tracking import next_bases


class Whole(NamedTuple):
    """Matrices of one group that are averaged together, as if they were not cut.

    The bucket's tensors have no memory but their gradients'; its state is the optimizer's.
    """

    bucket: Bucket
    pieces: list[Piece]
    places: list[tuple[Bucket, int]]  # of the optimizer's own buckets, which hold their state

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

    @property
    def phase(self) -> str:
        return "dense" if all(one.dense for one in self.whole) else "projected"

    def read(self, one: Whole, rows: Tensor, held: Held) -> Projections:
        """Line 1. What an earlier backward of this step holds back is not sent twice."""
        bucket, residual = one.bucket, one.bucket.state["residual"]
        for p, piece in zip(bucket.params, one.pieces, strict=True):
            p.grad = piece.gather(rows)
        bucket.cache["warm"] = [own.cache["warm"][i] for own, i in one.places]
        sending = self.projections(bucket)
        for tensor, e, piece in zip(sending.tensors, residual, one.pieces, strict=True):
            tensor.e = torch.zeros_like(e) if piece.p in held else e.clone()
        return sending

    def write(self, one: Whole, sending: Projections, mean: Payload, out: Tensor) -> None:
        """Line 4, of this rank's rows."""
        for i, (piece, tensor) in enumerate(zip(one.pieces, sending.tensors, strict=True)):
            assert isinstance(tensor, Projected)
            own, part = out[piece.begin : piece.end], mean.parts[i]
            first, last = piece.span(self.rank, self.ranks)
            rows = tensor.q.rows // max(1, piece.p.shape[0])  # of the matrix, in one of the tensor
            if piece.dim:
                whole = tensor.rows(part, 0, tensor.q.rows).view(piece.p.shape)
                own.copy_(whole.chunk(self.ranks, piece.dim)[self.rank].reshape(-1))
            else:
                mine = tensor.rows(part, first * rows, last * rows).reshape(-1)
                own[: len(mine)] = mine  # FSDP does not read what follows

    def note_unsent(self, one: Whole, sending: Projections, mean: Payload, held: Held) -> None:
        """Line 5, and what tracked tensors begin with the next time."""
        bases = dict(zip(sending.tracked, next_bases(sending.tracked, mean), strict=True))
        for i, (tensor, piece) in enumerate(zip(sending.tensors, one.pieces, strict=True)):
            tensor.feed_back(mean, i, 1.0)
            rest, residual = tensor.e, one.bucket.state["residual"][i]
            assert rest is not None
            if piece.p in held:
                rest, residual = held[piece.p].rest.add_(rest), held[piece.p].residual
            held[piece.p] = Unsent(rest, residual, bases.get(i))
            one.bucket.params[i].grad = None


def averaged(
    parcel: Parcel, ops: Ops, rows: Tensor, out: Tensor, held: Held
) -> RequestGenerator[None]:
    """One reduce-scatter: average this rank's row of ``rows`` over ranks into ``out``."""
    projected = [one for one in parcel.whole if not one.dense]
    for one in projected:
        sending = parcel.read(one, rows, held)  # line 1
        yield from sending.track()
        sending.draw()
        payload = sending.pack()  # line 2
        sending.keep(payload)
        mean = yield AllReduceMean(payload)  # line 3
        sending.draw()
        parcel.write(one, sending, mean, out)  # line 4
        parcel.note_unsent(one, sending, mean, held)  # line 5

    compressed = {piece.p for one in projected for piece in one.pieces}
    plain = [piece for piece in parcel.pieces if piece.p not in compressed]
    if any(piece.size for piece in plain):
        message = columns_of(rows, plain)
        row = yield ReduceScatterMean(message.view(-1), [message.shape[1]] * parcel.ranks)
        for piece, own in zip(plain, row.split([piece.size for piece in plain]), strict=True):
            out[piece.begin : piece.end] = own


def uncut(pieces: list[Piece], session: Session, dtype: torch.dtype, before: int) -> list[Whole]:
    """A bucket for each group that has any of them, of gradients in this dtype.

    ``before``: how many others there are.
    """
    by_group: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_group.setdefault(id(session.bucket_of[piece.p].group), []).append(piece)
    found: list[Whole] = []
    for own in by_group.values():
        held = [place_of(piece.p, session) for piece in own]
        (first, _), names = held[0], [bucket.names[i] for bucket, i in held]
        tensors = [
            torch.empty(1, dtype=dtype, device=first.device).expand(piece.p.shape) for piece in own
        ]
        index = before + len(found)
        bucket = Bucket(index, first.group, tensors, names, lambda *_: True, first.scratch)
        for name in first.state.keys() & {"residual", "basis"}:
            bucket.state[name] = [other.state[name][i] for other, i in held]
        bucket.make_mean = session.ops.quantized_mean(bucket)
        found.append(Whole(bucket, own, held))
    return found
