"""What a rank selects, by Triton kernels: of one bucket, or of all in the same launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.deal import Deal, Part, code_of
from ..._state.masks import Mask, bits_by_tensor
from ..ops import Ops
from .places import Before
from .tables import joined, note_starts, starts_between

# Bytes of x, which is selected by, that there may be at a time.
ROOM = 256 * 2**20
# Bytes that messages and masks begin at multiples of.
ALIGNED = 16


class TritonSelection:
    """What this rank selects of one bucket in one step: exactly as many as are wanted, so that all
    sizes are known.

    The counterpart of ``selection.Selection``, for all tensors at once.
    """

    def __init__(self, bucket: Bucket, ops: Ops, deal: Deal, rank: int):
        self.bucket, self.ops, self.deal = bucket, ops, deal
        self.part: Part = deal.parts[rank]
        self.bits = torch.empty(
            self.part.last - self.part.first, dtype=torch.uint8, device=bucket.device
        )
        self.code = self.bits  # as a message; set where codes are smaller
        # Of each tensor: how many elements are selected by all ranks.
        self.sizes = _sizes(bucket, deal)

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Select, by line 10's x."""
        take([Taken(self, grads, Before(self.bucket, self.bucket.state["exp_avg"]))])

    def settle(self) -> None:
        """There is nothing to keep: kernels look for no threshold."""

    def message(self) -> Tensor:
        """This rank's bits, coded where codes are smaller."""
        if self.deal.coded:
            return self.code
        return torch.nn.functional.pad(self.bits, (0, self.deal.length - self.bits.numel()))

    def found(self, messages: Tensor) -> Mask:
        """All ranks' selections."""
        (flat,) = decoded([(self, messages)])
        mask = self.mask(bits_by_tensor(self.bucket, flat))
        note_starts([self.bucket], [mask])
        return mask

    def mask(self, bits: Sequence[Tensor | None]) -> Mask:
        """The mask that has these bits."""
        return Mask(self.bucket, bits=bits, sizes=self.sizes, decode=self.ops.positions)


def _sizes(bucket: Bucket, deal: Deal) -> list[int]:
    """Of each tensor: how many elements are selected. Found once a deal."""
    held: tuple[Deal, list[int]] | None = bucket.cache.get("selected")
    if held is not None and held[0] is deal:
        return held[1]
    sizes = [0 if c else n for n, c in zip(bucket.lengths, bucket.compressed, strict=True)]
    for piece in (piece for part in deal.parts for piece in part.pieces):
        sizes[piece.tensor] += piece.wanted
    bucket.cache["selected"] = deal, sizes
    return sizes


class Taken(NamedTuple):
    """Of what a selection is taken: gradients, and the momenta where they were held."""

    selection: TritonSelection
    grads: Sequence[Tensor | None]
    old: Before


def take(asked: Sequence[Taken]) -> None:
    """Select of buckets of one group's options and of the same dtypes, and make the messages."""
    for some in _with_room(asked):
        _select(some)
    _encode([one.selection for one in asked if one.selection.deal.coded])


def _with_room(asked: Sequence[Taken]) -> Iterator[list[Taken]]:
    """As many at a time as there is room for."""
    some: list[Taken] = []
    held = 0
    for one in asked:
        part, width = one.selection.part, one.selection.bucket.flat["residual"].element_size()
        size = width * sum(piece.stop - piece.start for piece in part.pieces)
        if some and held + size > ROOM:
            yield some
            some, held = [], 0
        some.append(one)
        held += size
    yield some


def _select(asked: list[Taken]) -> None:
    sizes = [p.stop - p.start for one in asked for p in one.selection.part.pieces]
    if not sizes:
        return
    bucket = asked[0].selection.bucket
    flat = torch.empty(sum(sizes), dtype=bucket.flat["residual"].dtype, device=bucket.device)
    xs = flat.split(sizes)
    rest = iter(xs)
    rows: list[kernels.ScapeRow] = []
    wanted: list[kernels.TopKRow] = []
    starts = []
    for one in asked:
        pieces = one.selection.part.pieces
        if not pieces:
            continue
        own = {piece.tensor: next(rest) for piece in pieces}
        wanted += [
            kernels.TopKRow(len(x), piece.wanted, x, one.selection.bits[piece.at // 8 :])
            for piece, x in zip(pieces, own.values(), strict=True)
        ]
        rows += _moment_rows(one, own)
        bucket = one.selection.bucket
        starts.append(starts_between(bucket, bucket.cache["mask"], min(own), max(own) + 1))
    h, blocks = bucket.group, kernels.cut(tuple(row.n for row in rows), bucket.device)
    kernels.moment(blocks, joined(starts), rows, betas=h["betas"], maximize=h["maximize"])
    kernels.top_k(kernels.cut(tuple(sizes), bucket.device), wanted)


def _moment_rows(one: Taken, own: dict[int, Tensor]) -> list[kernels.ScapeRow]:
    """From the first tensor that this rank selects of to the last; ``own``: where x goes."""
    bucket, pieces = one.selection.bucket, {p.tensor: p for p in one.selection.part.pieces}
    held, state, rows, old = bucket.cache["mask"], bucket.state, [], one.old.tensors
    for i in range(min(own), max(own) + 1):
        start, stop = (pieces[i].start, pieces[i].stop) if i in own else (0, 0)
        grad = one.grads[i]
        rows.append(
            kernels.ScapeRow(
                bucket.lengths[i],
                None,
                held.bits[i],
                old[i],
                residual=state["residual"][i],
                grad=None if grad is None else grad.reshape(-1),
                x=own.get(i),
                begin=start,
                end=stop,
            )
        )
    return rows


def _encode(selections: list[TritonSelection]) -> None:
    """The messages of what travels as codes."""
    if not selections:
        return
    lengths = [selection.deal.length for selection in selections]
    rows = [
        kernels.EncodeRow(8 * len(own.bits), own.bits, 8 * at, *code_of(own.part))
        for own, at in zip(selections, _places(lengths), strict=False)
    ]
    words = _zeros(lengths, selections[0].bucket.device)
    kernels.encode(rows, words)
    for own, code in zip(selections, _cut(words, lengths), strict=True):
        own.code = code


def decoded(asked: Sequence[tuple[TritonSelection, Tensor]]) -> list[Tensor]:
    """All ranks' selections: the bits of buckets on one device, from the messages of each."""
    sizes = [selection.deal.parts[-1].last for selection, _ in asked]
    words = _zeros(sizes, asked[0][0].bucket.device)
    flats, rows = _cut(words, sizes), []
    for (selection, messages), flat, at in zip(asked, flats, _places(sizes), strict=False):
        pairs = list(zip(messages, selection.deal.parts, strict=True))
        if selection.deal.coded:
            rows += [_code_row(message, part, 8 * at) for message, part in pairs]
        else:
            torch.cat([m[: p.last - p.first] for m, p in pairs], out=flat)
    if rows:
        kernels.decode(rows, words)
    return flats


def _code_row(message: Tensor, part: Part, first: int) -> kernels.CodeRow:
    upper, row_bits, low = code_of(part)
    return kernels.CodeRow(upper, message, first + 8 * part.first, row_bits, low)


def _places(sizes: Sequence[int]) -> list[int]:
    """Where each of these many bytes begin among all; at last, where they end."""
    return [0, *accumulate(n + -n % ALIGNED for n in sizes)]


def _zeros(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Words for all of them."""
    return torch.zeros(_places(sizes)[-1] // 4, dtype=torch.int32, device=device)


def _cut(words: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The bytes of each."""
    flat = words.view(torch.uint8)
    return [flat[at : at + n] for at, n in zip(_places(sizes), sizes, strict=False)]
