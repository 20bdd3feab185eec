"""State in 8 bits by C passes (kernels/native/blocks.c)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..._state.blocks import BLOCK_BYTES, BlockCodec
from ..._wire.payload import ROW
from ..._wire.quantization import BLOCK_ROWS, noise_offset, noise_table
from .passes import Table, address, is_plain, run_over_rows


class NativeBlocks(BlockCodec):
    """The reference's codec, with the same blocks; float64 is left to the reference."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def encode(
        self, values: Tensor, blocks: Tensor, seed: tuple[int, ...] | None = None, first: int = 0
    ) -> None:
        if not is_plain(values):
            super().encode(values, blocks, seed, first)
            return
        noise = Table(1, numbers=0, place=0)
        if seed is not None:
            table = noise_table(torch.float32, torch.device("cpu"))
            numbers = address("random numbers", table, len(table))
            noise = Table(1, numbers=numbers, place=noise_offset(seed))
        lengths, runs = make_runs(values, blocks, first)
        run_over_rows(lengths, lambda a, b, _: self.library.encode_blocks(runs, a, b, noise))

    def decode(self, blocks: Tensor, out: Tensor) -> None:
        if not is_plain(out):
            super().decode(blocks, out)
            return
        lengths, runs = make_runs(out, blocks, 0)
        run_over_rows(lengths, lambda a, b, _: self.library.decode_blocks(runs, a, b))


def make_runs(values: Tensor, blocks: Tensor, first: int) -> tuple[list[int], Table]:
    """Return a row of a table for each thread, as blocks.c reads it, and the values in each."""
    n, count = values.numel(), len(blocks)
    value, block = (
        address("values", values, n),
        address("blocks", blocks, blocks.numel(), torch.int8),
    )
    step = max(BLOCK_ROWS, -(-count // torch.get_num_threads()))
    begins = range(0, count, step)
    lengths = [min(n, ROW * (begin + step)) - ROW * begin for begin in begins]
    return lengths, Table(
        len(lengths),
        values=[value + 4 * ROW * begin for begin in begins],
        blocks=[block + BLOCK_BYTES * begin for begin in begins],
        n=lengths,
        row=[first + begin for begin in begins],
    )
