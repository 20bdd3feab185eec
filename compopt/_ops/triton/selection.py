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
from ..._state.masks import Mask, Tensors, bits_by_tensor
from .places import Before, Key, bits_places, known, read_places
from .tables import KernelOps, blocks_of, flattened, note_starts, starts_of_all

# Bytes of x, which is selected by, that there may be at a time.
ROOM = 256 * 2**20
# Bytes that messages and masks begin at multiples of.
ALIGNED = 16


class TritonSelection:
    """What this rank selects of one bucket in one step: exactly as many as are wanted, so that all
    sizes are known.

    The counterpart of ``selection.Selection``, for all tensors at once.
    """

    def __init__(self, bucket: Bucket, ops: KernelOps, deal: Deal, rank: int):
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
        note_starts(self.ops.tables, [self.bucket], [mask])
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

    @property
    def among(self) -> slice:
        """From the first tensor that this rank selects of to the last."""
        pieces = self.selection.part.pieces
        return slice(pieces[0].tensor, pieces[-1].tensor + 1)

    @property
    def places(self) -> Key:
        """What tells where that lies which is selected of, and where it is noted."""
        own, bucket = self.selection, self.selection.bucket
        return known(
            bucket,
            bucket.made,
            own.part,
            own.bits.data_ptr(),
            self.old.places,
            read_places(self.grads[self.among]),
            bits_places(bucket, bucket.cache["mask"]),
        )


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
    asked = [one for one in asked if one.selection.part.pieces]
    if not asked:
        return
    ops, bucket = asked[0].selection.ops, asked[0].selection.bucket
    h, device, dtype = bucket.group, bucket.device, bucket.flat["residual"].dtype
    sizes = [p.stop - p.start for one in asked for p in one.selection.part.pieces]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    own: list[Tensors] = []  # what is copied has to live until kernels have been launched

    def tables() -> tuple[kernels.Table, kernels.Table]:
        own[:] = [flattened([*one.grads[one.among]]) for one in asked]
        xs = flat.split(sizes)
        return (
            kernels.moment_table(_blocks(asked), _moment_rows(asked, own, xs)),
            kernels.top_k_table(_top_k_rows(asked, xs)),
        )

    key = known(flat.data_ptr(), *(one.places for one in asked))
    moment, top_k = ops.tables(("selection", bucket.index), key, tables)
    buckets = [one.selection.bucket for one in asked]
    starts = starts_of_all(buckets, [own.cache["mask"] for own in buckets])
    kernels.moment(_blocks(asked), starts, moment, betas=h["betas"], maximize=h["maximize"])
    kernels.top_k(kernels.cut(tuple(sizes), device), top_k)


def _blocks(asked: list[Taken]) -> kernels.Blocks:
    """Of the tensors that are selected of, and of those between."""
    lengths = [n for one in asked for n in one.selection.bucket.lengths[one.among]]
    return kernels.cut(tuple(lengths), asked[0].selection.bucket.device)


def _moment_rows(
    asked: list[Taken], grads: list[Tensors], xs: Sequence[Tensor]
) -> list[kernels.ScapeRow]:
    """Of these tensors; ``xs``: where x goes, of each piece."""
    rows, rest, ahead = [], iter(xs), 0
    for one, own in zip(asked, grads, strict=True):
        bucket, pieces = one.selection.bucket, {p.tensor: p for p in one.selection.part.pieces}
        held, residual, old = bucket.cache["mask"], bucket.state["residual"], one.old.tensors
        counts = blocks_of(bucket).per_tensor
        ahead += sum(counts[: one.among.start])
        for i, grad in enumerate(own, one.among.start):
            piece = pieces.get(i)
            rows.append(
                kernels.ScapeRow(
                    bucket.lengths[i],
                    None,
                    held.bits[i],
                    old[i],
                    residual=residual[i],
                    grad=grad,
                    x=next(rest) if piece else None,
                    begin=piece.start if piece else 0,
                    end=piece.stop if piece else 0,
                    ahead=ahead,
                )
            )
        ahead += sum(counts[one.among.stop :])
    return rows


def _top_k_rows(asked: list[Taken], xs: Sequence[Tensor]) -> list[kernels.TopKRow]:
    """What is wanted of each piece, and where it is noted."""
    pieces = [(one.selection.bits, p) for one in asked for p in one.selection.part.pieces]
    return [
        kernels.TopKRow(len(x), piece.wanted, x, bits[piece.at // 8 :])
        for x, (bits, piece) in zip(xs, pieces, strict=True)
    ]


def _encode(selections: list[TritonSelection]) -> None:
    """The messages of what travels as codes."""
    if not selections:
        return
    ops, bucket = selections[0].ops, selections[0].bucket
    lengths = [selection.deal.length for selection in selections]

    def table() -> kernels.Table:
        rows = [
            kernels.EncodeRow(8 * len(own.bits), own.bits, 8 * at, *code_of(own.part))
            for own, at in zip(selections, _places(lengths), strict=False)
        ]
        return kernels.encode_table(rows, bucket.device)

    key = tuple((own.part, own.deal.length, own.bits.data_ptr()) for own in selections)
    rows = ops.tables(("encode", bucket.index), key, table)
    words = _zeros(lengths, bucket.device)
    blocks = kernels.cut(tuple(8 * len(own.bits) for own in selections), bucket.device)
    kernels.encode(blocks, rows, words)
    for own, code in zip(selections, _cut(words, lengths), strict=True):
        own.code = code


def decoded(asked: Sequence[tuple[TritonSelection, Tensor]]) -> list[Tensor]:
    """All ranks' selections: the bits of buckets on one device, from the messages of each."""
    sizes = [selection.deal.parts[-1].last for selection, _ in asked]
    bucket = asked[0][0].bucket
    words = _zeros(sizes, bucket.device)
    flats, coded = _cut(words, sizes), []
    for (selection, messages), flat, at in zip(asked, flats, _places(sizes), strict=False):
        if selection.deal.coded:
            coded.append((selection.deal, messages, 8 * at))
        else:
            pairs = zip(messages, selection.deal.parts, strict=True)
            torch.cat([m[: p.last - p.first] for m, p in pairs], out=flat)
    if not coded:
        return flats

    def table() -> tuple[kernels.Blocks, kernels.Table]:
        rows = [row for one in coded for row in _code_rows(*one)]
        blocks = kernels.cut(tuple(row.upper for row in rows), bucket.device)
        return blocks, kernels.decode_table(rows, bucket.device)

    key = tuple((deal, messages.data_ptr(), messages.stride(), at) for deal, messages, at in coded)
    kernels.decode(*asked[0][0].ops.tables(("decode", bucket.index), key, table), words)
    return flats


def _code_rows(deal: Deal, messages: Tensor, at: int) -> Iterator[kernels.CodeRow]:
    """All ranks' messages of a bucket whose bits begin with bit ``at``."""
    for message, part in zip(messages, deal.parts, strict=True):
        upper, row_bits, low = code_of(part)
        yield kernels.CodeRow(upper, message, at + 8 * part.first, row_bits, low)


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
