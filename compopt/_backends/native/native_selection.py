"""Selection of the largest elements by C passes (kernels/native): SCAPE's and TAGC's.

``native_ops`` and ``native_updates`` select by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..._state.bucket import Bucket
from ..._state.masks import (
    Mask,
    MaskPartition,
    SelectionRange,
    Tensors,
    bits_by_tensor,
    code_layout,
)
from ..._state.residuals import Residuals
from ..._state.shards import BitRun
from ..._wire.requests import CommunicationError
from ...scape.momenta import compute_x_of_slice
from ...tagc.tagc import Selected
from .library import (
    NUMBER,
    Column,
    LibraryOps,
    Table,
    address,
    address_in_turn,
    addresses,
    as_float32,
    run_pass,
)

# The fields of structs of tagc.c, in their order.
PIECE = "n first g e squares"
SHARD = "pieces many begin size k selected guess positions values"


def find_largest(ops: LibraryOps, x: Tensor, k: int, out: Tensor, guess: float = 0.0) -> float:
    """Write the positions of the k largest |x|, ascending, to int32 ``out``, given a guess of the
    threshold (0: none); return a guess for the next step.
    """
    room = 2 * ops.library.room_for(k)
    memory = ops.scratch(x, room, torch.int32, "candidates")
    scratch = address("candidates", memory, room, torch.int32)
    positions, values = address("positions", out, k, torch.int32), address("values", x, k)
    next_guess: float = ops.library.largest(values, x.numel(), k, guess, scratch, positions)
    return next_guess


def guess_addresses(bucket: Bucket, count: int) -> list[int]:
    """Return where the ``count`` thresholds are that the last step has found, 0 at first. They are
    no state: they change no result.
    """
    guesses = bucket.cache.get("guesses")
    if guesses is None or len(guesses) != count:
        guesses = bucket.cache["guesses"] = torch.zeros(count, dtype=torch.float64, device="cpu")
    return address_in_turn("guesses", guesses, [1] * count, torch.float64)


# SCAPE


class NativeSelection:
    """``scape.scape_masks.Selection`` by C passes.

    It selects exactly k of every slice, so that all sizes are known beforehand.
    """

    def __init__(self, bucket: Bucket, ops: LibraryOps, partition: MaskPartition, rank: int):
        self.bucket, self.ops, self.partition = bucket, ops, partition
        self.own_range: SelectionRange = partition.by_rank[rank]
        self.slices = {piece.tensor: piece for piece in self.own_range.slices}
        # Each tensor's first position among all; the memory that the longest selection needs.
        self.first, self.room, total = {}, 0, 0
        for piece in self.own_range.slices:
            self.first[piece.tensor], total = total, total + piece.k
            self.room = max(self.room, 2 * ops.library.room_for(piece.k))
        self.positions = torch.empty(total, dtype=torch.int32, device="cpu")

    def columns(self, have_gradients: list[bool]) -> dict[str, Column]:
        """Return what scape.c needs to select: a guess of the threshold, the slice, how many
        elements, and memory for their positions; for tensors with a gradient on any rank.
        """
        count = len(have_gradients)
        guesses, chosen = guess_addresses(self.bucket, count), self._position_addresses()
        columns = {name: [0] * count for name in ("guess", "start", "stop", "wanted", "chosen")}
        for piece, positions in zip(self.own_range.slices, chosen, strict=True):
            i = piece.tensor
            if have_gradients[i]:
                row = guesses[i], piece.start, piece.stop, piece.k, positions
                for column, number in zip(columns.values(), row, strict=True):
                    column[i] = number
        return dict(columns)

    def _position_addresses(self) -> list[int]:
        """Return where each slice's positions go, counted from the first element of the slice."""
        sizes = [piece.k for piece in self.own_range.slices]
        return address_in_turn("positions", self.positions, sizes, torch.int32)

    def select_absent(self, i: int) -> None:
        """Select by line 10's x of tensor i, which has no gradient on any rank."""
        if i in self.slices:
            piece, first = self.slices[i], self.first[i]
            out = self.positions[first : first + piece.k]
            find_largest(self.ops, compute_x_of_slice(self.bucket, i, piece), piece.k, out)

    def encode(self) -> Tensor:
        """Return this rank's message."""
        slices, size = self.own_range.slices, self.partition.message_bytes
        message = self.bucket.get_memory("mask message", size, torch.uint8).zero_()
        table = Table(
            len(slices),
            chosen=self._position_addresses(),
            k=[piece.k for piece in slices],
            at=[piece.first_bit for piece in slices],
        )
        code = code_table(self.own_range) if self.partition.is_elias_fano else None
        out = address("a mask", message, size, torch.uint8)
        if self.ops.library.encode(table, len(slices), code, out, size) >= 0:
            raise RuntimeError(
                "positions that were selected are not within their tensor: memory is at fault."
            )
        return message

    def assemble(self, messages: Tensor) -> Mask:
        """Return the mask that all ranks have selected.

        Raises CommunicationError where a rank selected what was not agreed.
        """
        bucket, byte_ranges = self.bucket, self.partition.by_rank
        sizes = self.partition.sizes
        positions = torch.empty(sum(sizes), dtype=torch.int32, device="cpu")
        bits = bucket.get_memory("mask bits", byte_ranges[-1].last_byte, torch.uint8).zero_()
        first = 0
        for rank, (byte_range, message) in enumerate(zip(byte_ranges, messages, strict=True)):
            k = sum(piece.k for piece in byte_range.slices)
            shard_bits = bits[byte_range.first_byte : byte_range.last_byte]
            self._decode(rank, message, positions[first : first + k], shard_bits)
            first += k
        rows = zip(positions.split(sizes), bucket.compressed, strict=True)
        index = [selected if compressed else None for selected, compressed in rows]
        return Mask(bucket, bits=bits_by_tensor(bucket, bits), positions=index)

    def _decode(self, rank: int, message: Tensor, positions: Tensor, bits: Tensor) -> None:
        byte_range, is_elias_fano = self.partition.by_rank[rank], self.partition.is_elias_fano
        if byte_range is self.own_range and not is_elias_fano:
            positions.copy_(self.positions)
            bits.copy_(message[: len(bits)])
            for piece in byte_range.slices[:1]:  # only the first slice can begin within a tensor
                positions[: piece.k] += piece.start
            return
        k = [piece.k for piece in byte_range.slices]
        table = Table(
            len(k),
            positions=address_in_turn("positions", positions, k, torch.int32),
            k=k,
            at=[piece.first_bit for piece in byte_range.slices],
            start=[piece.start for piece in byte_range.slices],
            stop=[piece.stop for piece in byte_range.slices],
        )
        code, size = (
            (code_table(byte_range), self.partition.message_bytes)
            if is_elias_fano
            else (None, len(bits))
        )
        received = address("a mask of another rank", message, size, torch.uint8)
        out = address("a mask", bits, byte_range.nbytes, torch.uint8)
        count = self.ops.library.decode(received, len(bits), code, table, len(k), out)
        if count != len(positions):
            raise CommunicationError(
                f"the mask of rank {rank} is not what was agreed: it has other positions than "
                f"{len(positions)} in their order. Memory or the network is at fault."
            )


def code_table(byte_range: SelectionRange) -> Table:
    """Return how a range is encoded, as masks.c reads it."""
    upper, row, low = code_layout(byte_range)
    return Table(1, low=low, upper=upper, row=row)


# TAGC: all tensors of a bucket, in the order of the mask (kernels/native/tagc.c)


class Pieces(NamedTuple):
    """The runs of a bucket's mask, shard by shard, then its dense tensors, a run each."""

    counts: list[int]  # how many runs each shard has, and how many dense tensors there are
    tensors: Tensor  # of each run
    runs: list[BitRun]

    def table(self, g: Sequence[int], e: Sequence[int], squares: Sequence[int]) -> Table:
        """Return a table of the runs, from the addresses of gradients and residuals (0: none)."""
        columns = [
            [places[tensor] and places[tensor] + NUMBER * at for _, _, tensor, at in self.runs]
            for places in (g, e)
        ]
        first, n, *_ = zip(*self.runs, strict=True)
        return Table(len(n), PIECE, n=n, first=first, g=columns[0], e=columns[1], squares=squares)


def list_pieces(bucket: Bucket) -> Pieces:
    """Return the pieces of a bucket, computed once."""
    if "pieces" not in bucket.cache:
        rows = enumerate(zip(bucket.lengths, bucket.compressed, strict=True))
        dense = [BitRun(0, n, i, 0) for i, (n, compressed) in rows if not compressed]
        shards = [*bucket.shards.runs_by_shard, dense]
        runs = [*chain(*shards)]
        tensors = torch.tensor([run.tensor for run in runs], dtype=torch.int64, device="cpu")
        bucket.cache["pieces"] = Pieces([*map(len, shards)], tensors, runs)
    pieces: Pieces = bucket.cache["pieces"]
    return pieces


def select_largest(bucket: Bucket, ops: LibraryOps, grads: Tensors, ks: list[int]) -> Selected:
    """Do ``tagc.select_largest``; called by ``Ops.run`` for TAGC.

    Gradients and residuals are read once, if the threshold of the step before serves again.
    """
    lengths, wide, residuals = bucket.lengths, as_float32(grads), Residuals(bucket).read_all()
    pieces, ks = list_pieces(bucket), [*ks, 0]  # of dense tensors only the squares
    squares = torch.empty(len(pieces.runs), dtype=torch.float32, device="cpu")
    rows = pieces.table(
        addresses("a gradient", wide, lengths),
        addresses("a residual", residuals, lengths),
        address_in_turn("sums of squares", squares, [1] * len(squares)),
    )
    positions = torch.empty(sum(ks), dtype=torch.int64, device="cpu")
    values = torch.empty(sum(ks), dtype=torch.float32, device="cpu")
    firsts = accumulate(pieces.counts, initial=0)
    bits = [*bucket.shards.bits, (0, 0)]
    table = Table(
        len(ks),
        SHARD,
        pieces=[rows.address + 8 * rows.width * first for first in firsts][:-1],
        many=pieces.counts,
        begin=[begin for begin, _ in bits],
        size=[end - begin for begin, end in bits],
        k=ks,
        guess=guess_addresses(bucket, len(ks)),
        positions=address_in_turn("positions", positions, ks, torch.int64),
        values=address_in_turn("values", values, ks),
    )
    _run_selection(ops, table)
    selected = table.read_column("selected")
    if selected != ks:
        parts = zip(positions.split(ks), values.split(ks), selected, strict=True)
        kept = [(at[:n], of[:n]) for at, of, n in parts]
        positions, values = (torch.cat(column) for column in zip(*kept, strict=True))
    packed = torch.zeros(bucket.shards.mask_bytes, dtype=torch.uint8, device="cpu")
    at = address("positions", positions, len(positions), torch.int64)
    ops.library.set_bits(at, len(positions), address("a mask", packed, len(packed), torch.uint8))
    flags = squares.new_zeros(len(grads)).index_add_(0, pieces.tensors, squares).mul_(0)
    given = torch.tensor([float(g is not None) for g in grads], dtype=torch.float32, device="cpu")
    return Selected(positions, values, packed, flags.add_(given))


def _run_selection(ops: LibraryOps, table: Table) -> None:
    """Run the pass over the shards of a table, each on one thread."""
    sizes, ks = table.read_column("size"), table.read_column("k")
    parts = [k for k, size in zip(ks, sizes, strict=True) if k < size]
    room = 2 * ops.library.room_for(max(parts)) + max(parts) if parts else 0
    own = ops.thread_memory(room, "candidates"), ops.thread_memory(max(sizes), "mask")
    run_pass(ops.library.select_sums, table, sizes, own=own)
