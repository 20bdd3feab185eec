"""Rows of 128 values that share a scale, dealt to the programs of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton

from ._blocks import INTERPRETED, on, upload

ROW = 128
# Rows a program.
ROWS = 64 if INTERPRETED else 8

# Start in the body, first row, values; pieces (value, row, values), both counted from the chunk's.
Cut = tuple[int, int, int, tuple[tuple[int, int, int], ...]]


class Programs:
    """Chunks of a body, cut into programs of some rows; none spans two chunks or two pieces.

    ``where``: a program's first value and row in its chunk, its values, the chunk. ``chunks``: what
    a chunk's programs have in common. ``first[c]``: the first program of chunk c.
    """

    def __init__(self, cuts: Sequence[Cut], device: torch.device, rows: int = ROWS):
        found, counts = [], []
        for number, (_, _, _, pieces) in enumerate(cuts):
            counts.append(0)
            for at, row, n in pieces:
                begin = torch.arange(0, n, rows * ROW, dtype=torch.int64)
                counts[-1] += len(begin)
                columns = [at + begin, row + begin // ROW, (n - begin).clamp(max=rows * ROW)]
                found.append(torch.stack([*columns, torch.full_like(begin, number)], 1))
        table = torch.cat(found) if found else torch.empty(0, 4, dtype=torch.int64)
        self.rows, self.device = rows, device
        self.where = upload(table.to(torch.int32), device)
        heads = torch.tensor([cut[:3] for cut in cuts], dtype=torch.int32)
        self.chunks = upload(heads, device)
        self.first = [0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()]
        self.largest = max((cut[2] for cut in cuts), default=0)

    def run(
        self, kernel: triton.JITFunction, *arguments: object, own: int | None, bits: int
    ) -> None:
        """On all chunks, or on one's ``own``."""
        first, last = (0, len(self.where)) if own is None else self.first[own : own + 2]
        if last > first:
            with on(self.device):
                kernel[(last - first,)](
                    self.where[first:],
                    self.chunks,
                    *arguments,
                    BITS=bits,
                    ROWS=self.rows,
                    enable_fp_fusion=False,
                )


@lru_cache(maxsize=256)
def programs(cuts: tuple[Cut, ...], device: torch.device) -> Programs:
    """The programs of these chunks; the same object for the same."""
    return Programs(cuts, device)
