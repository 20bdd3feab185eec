"""What was found, in sentences: which method, rank or density, interval, start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .findings import Findings
from .shares import RANKS
from .stability import DENSITIES, LAGS
from .telling import Row

FEW = 0.1  # of a dense step's bytes: what a slow link asks for
HALF = 0.5  # of AdamW's direction: less is a method to be careful with
ADDS = 0.05  # of the norm: what twice the rank must add to be worth its bytes
STILL = 0.95  # of the norm: what an old set must keep
SETTLED = 0.05  # of a set: what it may change by from the first to the last third of the steps


def sentences(found: Findings, rows: Sequence[Row], width: int, ranks: int) -> list[str]:
    """All that follow from what was found, the most important first."""
    told = [start_with(rows), rank_of(found, width), density_of(found), settling_of(found)]
    told += [spread_of(found, ranks), growing_of(rows)]
    told.append(
        "This is an order, not a loss: it comes from these steps alone. LocalSteps is not judged."
    )
    return [sentence for sentence in told if sentence]


def start_with(rows: Sequence[Row]) -> str:
    compressed = [row for row in rows if row.share is not None and row.share < 1]
    few = [row for row in compressed if row.share is not None and row.share <= FEW]
    best = (few or compressed)[0]
    share = best.share or 0.0
    said = (
        f"Start with {best.line}: of what sends at most {FEW:.0%} of the bytes it stays closest to "
        f"AdamW (kept {best.kept:.2f}, {share:.1%} of the bytes)."
        if few
        else f"Nothing here sends less than {FEW:.0%} of the bytes. Closest to AdamW stays "
        f"{best.line} (kept {best.kept:.2f}, {share:.0%} of the bytes)."
    )
    if best.kept < HALF:
        said += (
            " That is less than half of AdamW's direction: expect a higher loss, and compare it "
            "with a dense run of some hundred steps first."
        )
    nearer = [row for row in compressed if row.kept > best.kept + 0.02 and row.front]
    if nearer:
        also = nearer[-1]
        said += f" Closer for more bytes: {also.line} ({also.kept:.2f}, {also.share or 0.0:.0%})."
    return said


def rank_of(found: Findings, width: int) -> str:
    shares = {r: found.get(("share", "gradient", str(r), "")) for r in RANKS}
    known = [(r, s) for r, s in shares.items() if s is not None]
    if not known:
        return ""
    rank, share = known[-1]
    for (r, s), (_, twice) in pairwise(known):
        if twice - s < ADDS:
            rank, share = r, s
            break
    more = f"; twice that adds less than {ADDS}" if rank != known[-1][0] else ""
    return (
        f"Rank: {rank} tracked columns keep {share:.2f} of the gradient's norm "
        f"(rank / width {rank / width:.3f}){more}."
    )


def density_of(found: Findings) -> str:
    """The longest lag at which an old set will do, for Radius."""
    told = []
    for density in DENSITIES:
        norms = {g: found.get(("norm", "update", str(density), str(g), "")) for g in LAGS}
        seen = [lag for lag, norm in norms.items() if norm is not None]
        if not seen:
            return ""
        good = [lag for lag in seen if (norms[lag] or 0.0) >= STILL]
        if not good:
            told.append(f"at density {density} not even for one step")
        else:
            more = " (more was not seen)" if good[-1] == seen[-1] and seen[-1] < LAGS[-1] else ""
            steps = f"{good[-1]} steps" if good[-1] > 1 else "one step"
            told.append(f"at density {density} for {steps}{more}")
    return (
        f"Radius's interval: the largest elements of AdamW's update keep {STILL:.0%} of their norm "
        f"{', '.join(told)}; a set that is used for longer misses more."
    )


def settling_of(found: Findings) -> str:
    if ("settling", "first") not in found:
        return ""
    first, last = found["settling", "first"], found["settling", "last"]
    numbers = (
        f"of the largest tenth of AdamW's update {first:.2f} stayed from step to step at first, "
        f"{last:.2f} at the end"
    )
    if last > first + SETTLED:
        return (
            f"Start: {numbers}, so they had not settled. Give methods that select elements a dense "
            "start (warmup_steps=0.15, total_steps=...), and diagnose again after it."
        )
    if last < first - SETTLED:
        return (
            f"Start: {numbers}, so they change faster as training goes on; a longer dense start "
            "would not help that. Diagnose again later: what selects elements may keep less then."
        )
    return f"Start: {numbers}, so a longer dense start would change little of what is selected."


def spread_of(found: Findings, ranks: int) -> str:
    if ("cosine", "") not in found:
        return ""
    cosine, ratio = found["cosine", ""], found["ratio", ""]
    who = f"{ranks} ranks" if ranks > 1 else "two batches in a row, which stand for ranks,"
    said = (
        f"Spread: gradients of {who} have a cosine of {cosine:.2f}; one is {ratio:.2f} times as "
        "long as their mean."
    )
    if cosine < 0.1:
        said += (
            " A rank's own gradient is mostly noise: what each rank selects by itself (TagcAdamW) "
            "differs from rank to rank, and is judged too well here."
        )
    return said


def growing_of(rows: Sequence[Row]) -> str:
    growing = [row.method for row in rows if row.grows]
    if not growing:
        return "No residual still grows."
    return (
        f"Residuals that still grow: {', '.join(growing)}. What they hold back has not begun to "
        "arrive in full; more steps tell more."
    )
