"""Codes of 2 bits: -3, -1, 1 and 3 in units of a row's scale.

Twice as many exchanges fit into the bytes of 4 bits. There is no code for 0 and no room for
unbiased rounding, so a value takes the level beside it: 3 where it is at least the root mean square
of its row, else 1. For normally distributed values no four levels take off much less (Max, 1960:
0.1175 of their square; evenly spaced ones 0.1188). The scale is then the one of least squares, so
that what is taken off a row is shorter than the row was: owed and sent again, it dies out. Where
nothing is owed the result is biased.

Sums over a row depend in their last bit on the processor; all ranks read the same codes and scales.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .quantise import BLOCK, ROW, SMALLEST, Piece, rows_of
from .scratch import Scratch, at_a_time


def filled(rows: int, pieces: Iterable[Piece], like: Tensor) -> Tensor:
    """How many values each row holds: 128, or fewer where a part ends within it."""
    values = like.new_full((rows,), ROW)
    for _, row, n in pieces:
        if n % ROW:
            values[row + rows_of(n) - 1] = n % ROW
    return values


def quantise(
    x: Tensor, values: Tensor, codes: Tensor, scales: Tensor, dropped: Tensor, scratch: Scratch
) -> None:
    """Round (rows, 128) values, ``values`` of each row and zeros behind them, to ``codes`` in units
    of ``scales``, float32; ``dropped`` (x itself, or of its shape) gets what rounding took off.

    A row of zeros stays one; a row whose scale is below 1.2e-38 becomes zeros; a row that is not
    finite becomes NaN.
    """
    block = at_a_time(BLOCK, x)
    for a in range(0, len(x), block):
        x_, n, code, scale, drop = (
            rows[a : a + block] for rows in (x, values, codes, scales, dropped)
        )
        t, q = (
            scratch(use, x_.numel(), x.dtype, x.device).view(x_.shape) for use in ("block", "level")
        )
        largest = torch.abs(x_, out=t).amax(1)
        inverse = torch.where(largest >= SMALLEST, 1 / largest, largest - largest)
        torch.mul(x_, inverse.unsqueeze(1), out=t)  # squares of what is at most 1 are finite
        square = torch.mul(t, t, out=q).sum(1)
        rms = (square / n).sqrt_().unsqueeze(1)
        torch.abs(t, out=q).ge_(rms).mul_(2).add_(1)
        q.copysign_(t)
        code.copy_(q)
        along = t.mul_(q).sum(1)
        across = q.mul_(q).sum(1).sub_(ROW - n)  # a zero behind a part is a 1, and is not sent
        scale.copy_(along.div_(across).mul_(largest))
        scale.masked_fill_(scale < SMALLEST, 0)
        # inf becomes NaN.
        scale.add_(scale - scale)
        torch.sub(x_, torch.mul(code, scale.to(x.dtype).unsqueeze(1), out=t), out=drop)


def pack(codes: Tensor, out: Tensor) -> None:
    """Codes, each in an int8, into a quarter as many bytes: two bits of a byte are a code of the
    first quarter, the next two one of the second.
    """
    quarter = len(out)
    out.zero_()
    for number, part in enumerate(codes.split(quarter) if quarter else ()):
        level = (part + 3).bitwise_right_shift_(1)  # 0 to 3
        out[: len(part)].add_(level, alpha=(1, 4, 16, 64)[number])


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """The other way round."""
    quarter = len(packed)
    for number, part in enumerate(out.split(quarter) if quarter else ()):
        torch.bitwise_right_shift(packed[: len(part)], 2 * number, out=part)
        part.bitwise_and_(3).mul_(2).sub_(3)
    return out
