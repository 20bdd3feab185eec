"""What was found, in tables of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..costmodel import Workload
from .findings import GROWS, Findings
from .methods import Judged
from .sampling import Part
from .shares import RANKS
from .stability import DENSITIES, LAGS

QUANTITIES = {
    "gradient": "gradient",
    "update": "AdamW's update (Radius)",
    "moment": "first moment (SCAPE)",
}


@dataclass(frozen=True)
class Row:
    """A method, as it is told: ``kept`` of AdamW's update, over all and in the layers that keep
    least and most; ``residual`` in norms of the gradient, and whether it still ``grows``; ``share``
    of a dense step's bytes (None: not known); ``front``: no method that sends less keeps as much.
    """

    method: str
    line: str
    kept: float
    least: float
    most: float
    residual: float
    grows: bool
    share: float | None
    front: bool = False


def rows_of(
    found: Findings, judged: Mapping[str, Judged], work: Workload, ranks: int, parts: Sequence[Part]
) -> list[Row]:
    """The methods, those that keep most first."""
    rows = []
    for name, one in judged.items():
        layers = [found["kept", name, part.name] for part in parts]
        kept, grows = found["kept", name, ""], found["growth", name] > GROWS
        share = one.share(work, ranks)
        held = found["residual", name]
        rows.append(Row(name, one.line, kept, min(layers), max(layers), held, grows, share))
    rows.sort(key=lambda row: -row.kept)
    counted = [(row.share, row.kept) for row in rows if row.share is not None]

    def front(row: Row) -> bool:
        share, kept = row.share, row.kept
        return share is not None and not any(s < share and k >= kept for s, k in counted)

    return [Row(**{**vars(row), "front": front(row)}) for row in rows]


def width_of(parts: Sequence[Part]) -> int:
    """The smaller side of most of what is looked at."""
    weights: dict[int, float] = {}
    for part in parts:
        side = min(part.matrix)
        weights[side] = weights.get(side, 0.0) + part.weight * part.numel
    return max(weights, key=lambda side: weights[side])


def of_methods(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Methods, in the order in which their losses are expected",
        f"  {'':<28}{'kept':>6}{'by layer':>14}{'residual':>10}{'bytes':>9}",
    ]
    for row in rows:
        grows = "+" if row.grows else " "
        share = "-" if row.share is None else f"{row.share:.1%}"
        layers = f"{row.least:.2f} .. {row.most:.2f}"
        held = f"{row.residual:.2f}{grows}"
        name = f"{'*' if row.front else ' '} {row.method}"
        lines.append(f"  {name:<28}{row.kept:>6.2f}{layers:>14}{held:>10}{share:>9}")
    return [
        *lines,
        "  kept: cosine of the method's update and AdamW's at the same gradients, mean over steps",
        "  residual: what is held back, in norms of a gradient; + where it still grows",
        "  bytes: of a dense step's, after the start; *: no method that sends less keeps as much",
    ]


def of_stability(found: Findings) -> list[str]:
    heads = "".join(f"{f'{lag} steps' if lag > 1 else '1 step':>16}" for lag in LAGS)
    lines = [
        "The largest elements: the share of them that was among the largest so many steps before,",
        "and in brackets the norm that those of before still have, over that of the largest",
        f"  {'':<26}{'density':>8}{heads}",
    ]
    for quantity, label in QUANTITIES.items():
        for density in DENSITIES:
            cells = []
            for lag in LAGS:
                key = (quantity, str(density), str(lag), "")
                overlap, norm = found.get(("overlap", *key)), found.get(("norm", *key), 0.0)
                cells.append("-" if overlap is None else f"{overlap:.2f} ({norm:.2f})")
            told = label if density == DENSITIES[0] else ""
            lines.append(f"  {told:<26}{density:>8}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


def of_shares(found: Findings, width: int) -> list[str]:
    ranks = [rank for rank in RANKS if ("share", "gradient", str(rank), "") in found]
    lines = [
        f"Share of the norm that tracked columns keep (width: {width}, the smaller side of most)",
        f"  {'rank':<26}" + "".join(f"{rank:>8}" for rank in ranks),
        f"  {'rank / width':<26}" + "".join(f"{rank / width:>8.3f}" for rank in ranks),
    ]
    for quantity in ("gradient", "update"):
        cells = (found["share", quantity, str(rank), ""] for rank in ranks)
        label = QUANTITIES[quantity].split(" (")[0]
        lines.append(f"  {label:<26}" + "".join(f"{cell:>8.2f}" for cell in cells))
    return lines


def of_layers(found: Findings, parts: Sequence[Part]) -> list[str]:
    longest = max(len(part.name) for part in parts)
    lines = [
        f"  {'Layer':<{longest}}{'rows x columns':>16}{'looked at':>14}"
        f"{'gradient 16':>13}{'update 16':>11}{'overlap 10':>12}{'cosine':>8}",
    ]
    for part in parts:
        rows, columns = part.matrix
        at = "all" if part.whole else f"{part.rows} x {part.columns}"
        numbers = [
            found.get(("share", "gradient", "16", part.name)),
            found.get(("share", "update", "16", part.name)),
            found.get(("overlap", "update", "0.1", "10", part.name)),
            found.get(("cosine", part.name)),
        ]
        cells = [
            f"{'-' if n is None else f'{n:.2f}':>{w}}"
            for n, w in zip(numbers, (13, 11, 12, 8), strict=True)
        ]
        size = f"{rows} x {columns}"
        lines.append(f"  {part.name:<{longest}}{size:>16}{at:>14}" + "".join(cells))
    return [
        *lines,
        "  gradient 16, update 16: share of the norm at rank 16; overlap 10: of the largest tenth",
        "  of AdamW's update, 10 steps before; cosine: of two ranks' gradients",
    ]
