"""The report of a diagnosis: tables, conclusions and a picture from its findings."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from .candidates import Candidate
from .decision import at_link_rate, choose_row
from .formatting import format_rate, format_seconds
from .gradient_statistics import DENSITIES, LAGS, RANKS, SampledTensor
from .methods import Workload
from .prediction import Situation, predict_rows

Findings = dict[tuple[str, ...], float]

QUANTITIES = {
    "gradient": "gradient",
    "update": "AdamW's update (Radius)",
    "moment": "first moment (SCAPE)",
}
# A residual grows if its maximum in the second half of the steps is so many times the first half's.
GROWTH = 1.2
# Share of a dense step's bytes that a slow link allows.
FEW_BYTES = 0.1
# Cosine with AdamW's update below which a method is recommended with a warning.
HALF = 0.5
# A method that keeps less than the best by at most this is as good.
NEGLIGIBLE = 0.05
STAY_DENSE = "AdamW"
# Reasons why the advice may name a method that is not judged here, or none.
REASONS = {
    "LocalSteps": "which is not judged here, because it exchanges only once in a round",
    STAY_DENSE: "because steps hardly wait for the network",
}
# Norm that an old mask must keep.
STABLE_NORM = 0.95
# Change of the overlap from the first to the last third of the steps that means something.
SETTLED = 0.05


@dataclass(frozen=True)
class Row:
    """A method in the report.

    Args:
        method: its name.
        line: the constructor call.
        kept: cosine of its update and AdamW's, over all sampled tensors.
        least, most: the same of the layers that keep least and most.
        residual: in norms of the gradient.
        grows: whether the residual still grows.
        share: of a dense step's bytes; None where no formula counts them.
        class_name: of the method.
        family, setting: the method, and what a user chooses of it ("rank 16").
        front: no method that sends less keeps as much.
    """

    method: str
    line: str
    kept: float
    least: float
    most: float
    residual: float
    grows: bool
    share: float | None
    class_name: str = ""
    family: str = ""
    setting: str = ""
    front: bool = False


def make_rows(
    findings: Findings,
    candidates: Mapping[str, Candidate],
    work: Workload,
    ranks: int,
    sampled: Sequence[SampledTensor],
) -> list[Row]:
    """The methods, those that keep most first."""
    rows = []
    for name, candidate in candidates.items():
        layers = [findings["kept", name, tensor.name] for tensor in sampled]
        kept, grows = findings["kept", name, ""], findings["growth", name] > GROWTH
        share = candidate.share_of_bytes(work, ranks)
        residual = findings["residual", name]
        numbers = kept, min(layers), max(layers), residual, grows, share
        chosen = candidate.class_name, candidate.family, candidate.setting
        rows.append(Row(name, candidate.line, *numbers, *chosen))
    rows.sort(key=lambda row: -row.kept)
    counted = [(row.share, row.kept) for row in rows if row.share is not None]

    def is_in_front(row: Row) -> bool:
        share, kept = row.share, row.kept
        return share is not None and not any(s < share and k >= kept for s, k in counted)

    return [Row(**{**vars(row), "front": is_in_front(row)}) for row in rows]


def typical_width(sampled: Sequence[SampledTensor]) -> int:
    """The smaller side of most of the elements."""
    weights: dict[int, float] = {}
    for tensor in sampled:
        side = min(tensor.full_shape)
        weights[side] = weights.get(side, 0.0) + tensor.weight * tensor.numel
    return max(weights, key=lambda side: weights[side])


# Tables


def format_methods(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Methods, in the order in which their losses are expected",
        f"  {'':<28}{'kept':>6}{'by layer':>14}{'residual':>10}{'bytes':>9}",
    ]
    for row in rows:
        grows = "+" if row.grows else " "
        share = "-" if row.share is None else f"{row.share:.1%}"
        layers = f"{row.least:.2f} .. {row.most:.2f}"
        residual = f"{row.residual:.2f}{grows}"
        name = f"{'*' if row.front else ' '} {row.method}"
        lines.append(f"  {name:<28}{row.kept:>6.2f}{layers:>14}{residual:>10}{share:>9}")
    return [
        *lines,
        "  kept: cosine of the method's update and AdamW's at the same gradients, mean over steps",
        "  residual: not sent yet, in norms of a gradient; + where it still grows",
        "  bytes: share of a dense step's, after the start; *: no row with fewer bytes keeps more",
    ]


def format_stability(findings: Findings) -> list[str]:
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
                overlap, norm = findings.get(("overlap", *key)), findings.get(("norm", *key), 0.0)
                cells.append("-" if overlap is None else f"{overlap:.2f} ({norm:.2f})")
            first = label if density == DENSITIES[0] else ""
            lines.append(f"  {first:<26}{density:>8}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


def format_subspaces(findings: Findings, width: int) -> list[str]:
    ranks = [rank for rank in RANKS if ("share", "gradient", str(rank), "") in findings]
    lines = [
        f"Share of the norm that tracked columns keep (width: {width}, the smaller side of most)",
        f"  {'rank':<26}" + "".join(f"{rank:>8}" for rank in ranks),
        f"  {'rank / width':<26}" + "".join(f"{rank / width:>8.3f}" for rank in ranks),
    ]
    for quantity in ("gradient", "update"):
        cells = (findings["share", quantity, str(rank), ""] for rank in ranks)
        label = QUANTITIES[quantity].split(" (")[0]
        lines.append(f"  {label:<26}" + "".join(f"{cell:>8.2f}" for cell in cells))
    return lines


def format_layers(findings: Findings, sampled: Sequence[SampledTensor]) -> list[str]:
    longest = max(len(tensor.name) for tensor in sampled)
    lines = [
        f"  {'Layer':<{longest}}{'rows x columns':>16}{'looked at':>14}"
        f"{'gradient 16':>13}{'update 16':>11}{'overlap 10':>12}{'cosine':>8}",
    ]
    for tensor in sampled:
        rows, columns = tensor.full_shape
        part = "all" if tensor.is_complete else f"{tensor.rows} x {tensor.columns}"
        numbers = [
            findings.get(("share", "gradient", "16", tensor.name)),
            findings.get(("share", "update", "16", tensor.name)),
            findings.get(("overlap", "update", "0.1", "10", tensor.name)),
            findings.get(("cosine", tensor.name)),
        ]
        cells = [
            f"{'-' if n is None else f'{n:.2f}':>{w}}"
            for n, w in zip(numbers, (13, 11, 12, 8), strict=True)
        ]
        size = f"{rows} x {columns}"
        lines.append(f"  {tensor.name:<{longest}}{size:>16}{part:>14}" + "".join(cells))
    return [
        *lines,
        "  gradient 16, update 16: share of the norm at rank 16; overlap 10: of the largest tenth",
        "  of AdamW's update, 10 steps before; cosine: of two ranks' gradients",
    ]


# Conclusions


def format_item(sentence: str) -> str:
    """An item of a list, in lines of at most 100 characters."""
    return textwrap.fill(
        f"- {sentence}", 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def conclude(findings: Findings, rows: Sequence[Row], ranks: int, training: Situation) -> list[str]:
    """All sentences that follow from the findings, the most important first.

    ``ranks`` are those whose gradients were compared; ``training`` is as the advice sees it.
    """
    best = recommend_row(rows)
    sentences = [
        describe_recommendation(rows, best),
        describe_settings(rows, best),
        compare_with_advice(training, best.class_name),
        assess_interval(findings),
        assess_start(findings),
        assess_spread(findings, ranks),
        list_growing_residuals(rows),
        "This ranks the methods by these steps alone. It does not predict the value of a loss.",
    ]
    return [sentence for sentence in sentences if sentence]


def recommend_row(rows: Sequence[Row]) -> Row:
    """Return the row that sends least, among the methods that send few bytes and keep at most
    `NEGLIGIBLE` less than the best of them.
    """
    compressed = [row for row in rows if row.share is not None and row.share < 1]
    few = [row for row in compressed if (row.share or 0.0) <= FEW_BYTES]
    candidates = few or compressed
    most = max(row.kept for row in candidates)
    close = [row for row in candidates if row.kept >= most - NEGLIGIBLE]
    return min(close, key=lambda row: row.share or 0.0)


def describe_recommendation(rows: Sequence[Row], best: Row) -> str:
    share = best.share or 0.0
    text = (
        f"Start with {best.line}: it keeps {best.kept:.2f} of AdamW's update with {share:.1%} of "
        f"the bytes. No method with at most {FEW_BYTES:.0%} of the bytes keeps {NEGLIGIBLE} more."
        if share <= FEW_BYTES
        else f"No method sends at most {FEW_BYTES:.0%} of the bytes. Start with {best.line}: "
        f"it keeps {best.kept:.2f} of AdamW's update with {share:.0%} of the bytes. No other "
        f"keeps {NEGLIGIBLE} more."
    )
    if best.kept < HALF:
        text += (
            " That is less than half of AdamW's direction: expect a higher loss, and compare it "
            "with a dense run of some hundred steps first."
        )
    return text


def describe_settings(rows: Sequence[Row], best: Row) -> str:
    """Describe the shares that other settings of the recommended method keep."""
    family = [row for row in rows if row.family == best.family]
    family.sort(key=lambda row: row.share or 0.0)
    listed = ", ".join(f"{row.kept:.2f} at {row.setting}" for row in family)
    enough = max(row.kept for row in family) < best.kept + NEGLIGIBLE
    more = f"Above {best.setting}, at most {NEGLIGIBLE} is gained."
    if not enough:
        more = f"Above {best.setting}, more is kept, for more bytes."
    return f"{best.family} keep {listed}. {more}"


def compare_with_advice(training: Situation, class_name: str) -> str:
    """Compare with what `compopt-advise` recommends for this training, over all links."""
    named: list[tuple[float, str]] = []
    for exponent in range(12, 23):
        rate = 10 ** (exponent / 2)
        situation = at_link_rate(training, rate)
        row = choose_row(situation, predict_rows(situation))
        named.append((rate, row.method.split(",")[0] if row else STAY_DENSE))
    parts = []
    for name, group in groupby(named, key=lambda pair: pair[1]):
        rates = [rate for rate, _ in group]
        reason = "" if name == class_name else REASONS.get(name, "whose runs ended at a lower loss")
        parts.append(f"{format_span(rates)} {name}{f', {reason}' if reason else ''}")
    agrees = any(name == class_name for _, name in named)
    comparison = f"also names {class_name}" if agrees else f"does not name {class_name}"
    seconds, ranks = format_seconds(training.compute_s), training.machine.ranks
    return (
        f"compopt-advise {comparison}, for {ranks} ranks and {seconds} a step. By link: "
        f"{'; '.join(parts)}. "
        "compopt-advise judges by the time and the loss of whole runs."
    )


def format_span(rates: Sequence[float]) -> str:
    low, high = format_rate(rates[0]), format_rate(rates[-1])
    return f"at {low}" if low == high else f"from {low} to {high}"


def assess_interval(findings: Findings) -> str:
    """The longest lag at which an old mask keeps enough of the norm, for Radius."""
    parts = []
    for density in DENSITIES:
        norms = {g: findings.get(("norm", "update", str(density), str(g), "")) for g in LAGS}
        seen = [lag for lag, norm in norms.items() if norm is not None]
        if not seen:
            return ""
        good = [lag for lag in seen if (norms[lag] or 0.0) >= STABLE_NORM]
        if not good:
            parts.append(f"Density {density}: not even one step")
        else:
            more = " (more was not seen)" if good[-1] == seen[-1] and seen[-1] < LAGS[-1] else ""
            steps = f"{good[-1]} steps" if good[-1] > 1 else "one step"
            parts.append(f"Density {density}: {steps}{more}")
    return (
        "Radius's interval: for how many steps do the positions of the largest elements of AdamW's "
        f"update hold {STABLE_NORM:.0%} of the norm that newly selected positions would hold? "
        f"{'. '.join(parts)}."
    )


def assess_start(findings: Findings) -> str:
    if ("settling", "first") not in findings:
        return ""
    first, last = findings["settling", "first"], findings["settling", "last"]
    numbers = (
        "from one step to the next, the 10% largest elements of AdamW's update kept "
        f"{first:.0%} of their positions in the first steps, and {last:.0%} in the last"
    )
    if last > first + SETTLED:
        return (
            f"Dense start: {numbers}. They had not settled. Give methods that select a dense "
            "start (warmup_steps=0.15, total_steps=...), and diagnose again after it."
        )
    if last < first - SETTLED:
        return (
            f"Dense start: {numbers}. They change faster as training goes on, so a longer dense "
            "start would not help. Diagnose again later: methods that select may keep less."
        )
    return f"Dense start: {numbers}. A longer one would change little of what is selected."


def assess_spread(findings: Findings, ranks: int) -> str:
    if ("cosine", "") not in findings:
        return ""
    cosine, ratio = findings["cosine", ""], findings["ratio", ""]
    who = f"{ranks} ranks" if ranks > 1 else "two batches in a row, which stand for ranks,"
    text = (
        f"Spread: gradients of {who} have a cosine of {cosine:.2f}; the norm of one is {ratio:.2f} "
        "times that of their average."
    )
    if cosine < 0.1:
        text += (
            " A rank's own gradient is mostly noise: what each rank selects by itself (TagcAdamW) "
            "differs from rank to rank, and is judged too well here."
        )
    return text


def list_growing_residuals(rows: Sequence[Row]) -> str:
    growing = [row.method for row in rows if row.grows]
    if not growing:
        return "No residual still grows."
    return (
        f"Residuals that still grow: {'; '.join(growing)}. Such a method sends less than it adds "
        "to its residual, so its `kept` is not final: diagnose more steps."
    )


# Picture


def draw(
    path: str, findings: Findings, rows: Sequence[Row], residuals: Mapping[str, Sequence[float]]
) -> None:
    """Save four panels; the suffix of the path says as what kind of picture.

    Raises ValueError where its folder is missing or matplotlib is not installed.
    """
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"plot({path!r}): there is no folder {Path(path).resolve().parent}.")
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "plot() needs matplotlib, which is not installed: pip install matplotlib."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    _draw_overlaps(axes[0, 0], findings)
    _draw_subspaces(axes[0, 1], findings)
    _draw_methods(axes[1, 0], rows)
    _draw_residuals(axes[1, 1], residuals)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_overlaps(axis: Any, findings: Findings) -> None:
    for number, (quantity, label) in enumerate(QUANTITIES.items()):
        for density, style in zip(DENSITIES, ("-", "--", ":"), strict=True):
            key = ("overlap", quantity, str(density))
            points = [(lag, findings.get((*key, str(lag), ""))) for lag in LAGS]
            seen = [(lag, share) for lag, share in points if share is not None]
            if seen:
                text = f"{label}, {density}" if density == DENSITIES[0] else f"{density}"
                x, y = zip(*seen, strict=True)
                axis.plot(x, y, style, color=f"C{number}", marker="o", label=text)
    axis.set(
        xscale="log", xlabel="steps between", ylim=(0, 1), title="share of the largest that stay"
    )
    axis.legend(fontsize=7, frameon=False, ncols=3)


def _draw_subspaces(axis: Any, findings: Findings) -> None:
    ranks = [rank for rank in RANKS if ("share", "gradient", str(rank), "") in findings]
    for number, quantity in enumerate(("gradient", "update")):
        layers = {name[3] for name in findings if name[:2] == ("share", quantity)}
        for layer in sorted(layers):
            y = [findings["share", quantity, str(rank), layer] for rank in ranks]
            style = dict(color=f"C{number}", alpha=0.25 if layer else 1.0, lw=1 if layer else 2.5)
            axis.plot(ranks, y, label=None if layer else QUANTITIES[quantity], **style)
    axis.set(xscale="log", xlabel="rank", ylim=(0, 1), title="share of the norm kept, by layer")
    axis.minorticks_off()
    axis.set_xticks(ranks, [str(rank) for rank in ranks])
    axis.legend(fontsize=8, frameon=False)


def _draw_methods(axis: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.share is not None:
            axis.plot(row.share, row.kept, "o", color="C0" if row.front else "C7")
            axis.annotate(f" {row.method}", (row.share, row.kept), fontsize=7, va="center")
    axis.set(xscale="log", xlabel="share of a dense step's bytes", ylim=(0, 1.02))
    axis.set_title("kept of AdamW's update")
    axis.set_xmargin(0.3)


def _draw_residuals(axis: Any, residuals: Mapping[str, Sequence[float]]) -> None:
    for number, (name, values) in enumerate(residuals.items()):
        if any(values):
            style = "-" if number < 10 else "--"
            axis.plot(range(1, len(values) + 1), values, style, label=name, lw=1.2)
    axis.set(xlabel="step after the start", title="residual, in norms of a gradient")
    axis.legend(fontsize=6, frameon=False, ncols=2)
