"""SCAPE's selection by C passes: the counterpart of ``scape_masks.Selection``, for all tensors of a
bucket.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.masks import (
    Mask,
    MaskPartition,
    SelectionRange,
    bits_by_tensor,
    code_layout,
)
from ..._wire.requests import CommunicationError
from ..operations import Ops
from ..update_helpers import compute_x_of_slice
from .passes import Column, Table, address, address_in_turn, is_plain


class NativeTopK(Ops):
    """Selection of the largest elements of single tensors."""

    library: ctypes.CDLL

    def select_top_k(self, x: Tensor, k: int, guess: float, out: Tensor) -> float:
        """Write the positions of the k largest |x|, ascending, to int32 ``out``; return a guess of
        the threshold for the next step.
        """
        room = 2 * self.library.room_for(k)
        memory = self.scratch(x, room, torch.int32, "candidates")
        scratch = address("candidates", memory, room, torch.int32)
        positions, values = address("positions", out, k, torch.int32), address("values", x, k)
        next_guess: float = self.library.largest(values, x.numel(), k, guess, scratch, positions)
        return next_guess

    def top_k_positions(self, x: Tensor, k: int) -> Tensor:
        if not is_plain(x) or not k < x.numel() < 2**31:
            return super().top_k_positions(x, k)
        out = torch.empty(k, dtype=torch.int32, device="cpu")
        self.select_top_k(x, k, 0.0, out)
        return out.long()

    def top_k_mask(self, score: Tensor, k: int) -> Tensor:
        if not is_plain(score) or score.numel() >= 2**31:
            return super().top_k_mask(score, k)
        positions = torch.empty(k, dtype=torch.int32, device="cpu")
        bits = torch.zeros((score.numel() + 7) // 8, dtype=torch.uint8, device="cpu")
        self.select_top_k(score, k, 0.0, positions)
        row = Table(1, chosen=address("positions", positions, k, torch.int32), k=k, at=0)
        mask = address("a mask", bits, len(bits), torch.uint8)
        self.library.encode(row, 1, None, mask, len(bits))
        return bits


class NativeSelection:
    """The elements that this rank selects in one step: exactly k of every slice, so that all sizes
    are known beforehand.
    """

    def __init__(self, bucket: Bucket, ops: NativeTopK, partition: MaskPartition, rank: int):
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
        count, cache = len(have_gradients), self.bucket.cache
        if "guesses" not in cache:  # where to look first: no state, for it changes no result
            cache["guesses"] = torch.zeros(count, dtype=torch.float64, device="cpu")
        guesses = address_in_turn("guesses", cache["guesses"], [1] * count, torch.float64)
        columns = {
            name: [0] * len(have_gradients)
            for name in ("guess", "start", "stop", "wanted", "chosen")
        }
        for (i, piece), chosen in zip(self.slices.items(), self._position_addresses(), strict=True):
            if have_gradients[i]:
                row = (guesses[i], piece.start, piece.stop, piece.k, chosen)
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
            self.ops.select_top_k(compute_x_of_slice(self.bucket, i, piece), piece.k, 0.0, out)

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
        sizes = [0] * len(bucket.lengths)
        for piece in (piece for byte_range in byte_ranges for piece in byte_range.slices):
            sizes[piece.tensor] += piece.k
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
