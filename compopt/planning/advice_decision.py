"""The choice of the row that is advised, by the rule of README.md and docs/choosing.md.

1. Stay dense where AdamW waits for the network less than a fifth of its step.
2. Else take `SeparateAdam`; `LocalSteps` where its run is 1.25 times as fast as that one's.
3. Neither is advised where its measured loss exceeds the budget, its state does not fit, or the
   whole run, with its start, is less than 5 % faster than AdamW's.

Where AdamW itself does not fit, the fastest method that does is advised in place of these two. The
choice is deterministic.

``advice`` and ``activation_advice`` decide by it; reports quote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .losses import is_settled
from .methods import METHODS
from .prediction import Row, Situation, predict_rows

# Below this share of a dense step, the wait for the network is not worth a change.
SHORT_WAIT = 0.2
# A smaller predicted speed-up is not worth advising.
WORTH_IT = 1.05
# A run this much faster is worth another class, and is mentioned beyond the loss budget.
MUCH_FASTER = 1.25


def could_help(situation: Situation, row: Row) -> bool:
    """True if the row is a method of this package whose loss was measured in more than one short
    run, averages over a link, and does not wait for shards.
    """
    is_known = row.ours and row.loss is not None and is_settled(row.losses_key)
    return is_known and row.shard < situation.machine.ranks and not row.is_bound_by_shards


def is_within_budget(situation: Situation, row: Row) -> bool:
    return (row.loss or 0.0) <= 1 + situation.loss_budget + 1e-9


def usable_rows(situation: Situation, rows: list[Row]) -> list[Row]:
    """Return the rows that fit and are within the budget, the fastest run first."""
    usable = [
        row
        for row in rows
        if could_help(situation, row) and row.fits and is_within_budget(situation, row)
    ]
    return sorted(usable, key=lambda row: row.run_s)


def allowed_rows(situation: Situation, rows: list[Row]) -> list[Row]:
    """Return those of them that are worth a change, the fastest run first."""
    usable = usable_rows(situation, rows)
    return [row for row in usable if row.run >= WORTH_IT or not rows[0].fits]


def waits_briefly(row: Row) -> bool:
    """True if the wait for the network is less than a fifth of the step."""
    return row.step.exchange < SHORT_WAIT * row.step.total


def find_class(rows: Sequence[Row], name: str) -> Row | None:
    """Return the first row of a class with its defaults, or of what stands in for it."""
    return next((r for r in rows if name in (r.method, METHODS[r.method].instead_of)), None)


def choose_row(situation: Situation, rows: list[Row]) -> Row | None:
    """The row to advise; None where AdamW is as good."""
    if rows[0].fits and waits_briefly(rows[0]):
        return None
    allowed = allowed_rows(situation, rows)
    separate = find_class(usable_rows(situation, rows), "SeparateAdam")
    local = find_class(allowed, "LocalSteps")
    if local and (separate is None or local.run_s * MUCH_FASTER <= separate.run_s):
        return local
    if separate in allowed:
        return separate
    return allowed[0] if allowed and not rows[0].fits else None


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
    return min(faster, key=lambda row: (not row.fits, row.loss), default=None)


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
