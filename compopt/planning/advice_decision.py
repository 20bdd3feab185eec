"""The choice of the row that is advised.

A method may be advised when it is ours, its expected loss is within the budget, its state fits, and
the whole run, with its dense start, is at least 5 % faster than AdamW's. Runs within 5 % of the
fastest count as equally fast. Of these the one with the lowest loss is advised; among losses that
seeds could reorder, the first row of the table. Otherwise the advice is to stay dense. The choice
is deterministic.
"""

from __future__ import annotations

from dataclasses import replace

from .methods import METHODS
from .prediction import Row, Situation, predict_rows

# A smaller predicted speed-up is not worth advising.
WORTH_IT = 1.05
# Runs within this factor of the fastest are as fast: predictions err by more.
AS_FAST = 1.05
# Losses of one seed vary by this much.
SAME_LOSS = 0.015
# A row this much faster is mentioned although its loss exceeds the budget.
MUCH_FASTER = 1.25


def could_help(situation: Situation, row: Row) -> bool:
    """True if the row is a method of this package with a known loss, averages over a link, and does
    not wait for shards.
    """
    is_known = row.ours and row.expected_loss is not None
    return is_known and row.shard < situation.machine.ranks and not row.is_bound_by_shards


def allowed_rows(situation: Situation, rows: list[Row]) -> list[Row]:
    """Return the rows that may be advised, the fastest run first."""
    limit = 1 + situation.loss_budget + 1e-9
    allowed = [
        row
        for row in rows
        if could_help(situation, row)
        and row.fits
        and (row.expected_loss or 0.0) <= limit
        and (row.run >= WORTH_IT or not rows[0].fits)
    ]
    return sorted(allowed, key=lambda row: row.run_s)


def choose_row(situation: Situation, rows: list[Row]) -> Row | None:
    """The row to advise; None where AdamW is as good."""
    allowed = allowed_rows(situation, rows)
    as_fast = [row for row in allowed if row.run_s <= AS_FAST * allowed[0].run_s]
    limit = min((row.expected_loss or 0.0 for row in as_fast), default=0.0) + SAME_LOSS
    close = [row for row in rows if row in as_fast and (row.expected_loss or 0.0) <= limit]
    return close[0] if close else None


def choose_alternative(situation: Situation, rows: list[Row], best: Row) -> Row | None:
    """Return the fastest row of another class within the loss budget; else, of the much faster
    rows beyond it, the one with the lowest loss.
    """
    cost = METHODS[best.method].cost
    others = [row for row in allowed_rows(situation, rows) if METHODS[row.method].cost is not cost]
    if others:
        return others[0]
    faster = [
        row for row in rows if could_help(situation, row) and row.run_s * MUCH_FASTER <= best.run_s
    ]
    return min(faster, key=lambda row: (not row.fits, row.expected_loss), default=None)


def pays_below(situation: Situation) -> float | None:
    """The fastest link, in bit/s, on which some method is advised; None where none is, down to 1
    Mbit/s.
    """
    for exponent in range(130, 59, -1):
        rate = 10 ** (exponent / 10)
        slower = at_link_rate(situation, rate)
        if choose_row(slower, predict_rows(slower)) is not None:
            return rate
    return None


def at_link_rate(situation: Situation, bits: float) -> Situation:
    return replace(situation, machine=replace(situation.machine, link_bytes_per_s=bits / 8))
