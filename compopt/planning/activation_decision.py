"""The choice of the compressor of activations that is advised.

A compressor is advised when its measured accuracy is within the budget and a step at least 5 %
faster; of those the fastest, of as fast ones the most accurate. Otherwise activations are sent as
they are, which is the answer nearly always inside a node. The choice is deterministic.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from .activation_costs import UNCOMPRESSED
from .decision import WORTH_IT
from .layer_prediction import CodecCosts, Grid, LayerRow, predict_layer_rows

# Steps within this of the fastest are as fast.
AS_FAST = 1.0005


def choose_layer_row(grid: Grid, rows: list[LayerRow]) -> LayerRow | None:
    """The most accurate of the fastest rows within the budget; None where none is worth it."""
    least = (1 - grid.loss_budget) * UNCOMPRESSED - 1e-9
    near = [row for row in rows if row.accuracy >= least]
    fastest = max(row.speedup for row in near)
    as_fast = [row for row in near if row.speedup >= fastest / AS_FAST]
    best = max(as_fast, key=lambda row: (row.accuracy, row.speedup))
    return best if best.speedup >= WORTH_IT else None


def layers_pay_below(grid: Grid, codecs: dict[str, CodecCosts]) -> float | None:
    """About the fastest link between stages, or inside where there is one stage, on which some
    compressor is advised, in bit/s; None where none is at 1 Mbit/s.
    """

    def does_not_pay(exponent: int) -> bool:
        name = "between" if grid.pipeline > 1 else "inside"
        link = replace(getattr(grid, name), link_bytes_per_s=10 ** (exponent / 10) / 8)
        slower = Grid(**{**vars(grid), name: link})
        return choose_layer_row(slower, predict_layer_rows(slower, codecs)) is None

    exponents = range(60, 131)
    count = bisect_left(exponents, True, key=does_not_pay)
    return 10 ** (exponents[count - 1] / 10) if count else None
