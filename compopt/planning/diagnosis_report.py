"""The report of a diagnosis: tables and conclusions from its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .advice_decision import at_link_rate, choose_row
from .candidates import Candidate
from .formatting import align_columns, format_number_of, format_rate, format_seconds
from .gradient_statistics import DENSITIES, LAGS, SampledTensor
from .prediction import Situation, predict_rows
from .workload import Workload

Findings = dict[tuple[str, ...], float]

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
        method: its name; the first word is the method's, the rest its setting.
        line: the constructor call.
        class_name: of the method.
        kept: cosine of its update and AdamW's, over all sampled tensors.
        least, most: the same of the layers that keep least and most.
        residual: in norms of the gradient.
        grows: whether the residual still grows.
        share: of a dense step's bytes; None where no formula counts them.
        front: no method that sends less keeps as much.
    """

    method: str
    line: str
    class_name: str
    kept: float
    least: float
    most: float
    residual: float
    grows: bool
    share: float | None
    front: bool = False

    @property
    def family(self) -> str:
        """The method without its setting."""
        return self.method.split()[0]


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
        # Where no gradient has reached a tensor, nothing is known of it.
        keys = [("kept", name, tensor.name) for tensor in sampled]
        layers = [findings[key] for key in keys if key in findings]
        row = Row(
            name,
            candidate.line,
            candidate.class_name,
            kept=findings["kept", name, ""],
            least=min(layers, default=0.0),
            most=max(layers, default=0.0),
            residual=findings["residual", name],
            grows=findings["growth", name] > GROWTH,
            share=candidate.share_of_bytes(work, ranks),
        )
        rows.append(row)
    rows.sort(key=lambda row: -row.kept)
    counted = [(row.share, row.kept) for row in rows if row.share is not None]
    return [
        replace(
            row,
            front=row.share is not None
            and not any(share < row.share and kept >= row.kept for share, kept in counted),
        )
        for row in rows
    ]


# Tables


def format_methods(rows: Sequence[Row]) -> list[str]:
    cells = [
        (
            f"{'*' if row.front else ' '} {row.method}",
            f"{row.kept:.2f}",
            f"{row.least:.2f} .. {row.most:.2f}",
            f"{row.residual:.2f}{'+' if row.grows else ' '}",
            "-" if row.share is None else f"{row.share:.1%}",
        )
        for row in rows
    ]
    return [
        "Methods, the largest kept first",
        *align_columns([("", "kept", "by layer", "residual ", "bytes"), *cells]),
        "  kept: cosine of the method's update and AdamW's at the same gradients, mean over steps",
        "  residual: not sent yet, in multiples of the gradient's norm; + where it still grows",
        "  bytes: on the network after the dense start, as a share of DDP's",
        "  *: no row with fewer bytes keeps as much",
        "  TAGC: its rows simulate a single rank",
    ]


def format_stability(findings: Findings) -> list[str]:
    table = [("  density", *(format_number_of(lag, "step") for lag in LAGS))]
    for density in DENSITIES:
        cells = []
        for lag in LAGS:
            key = (str(density), str(lag), "")
            overlap, norm = findings.get(("overlap", *key)), findings.get(("norm", *key), 0.0)
            cells.append("-" if overlap is None else f"{overlap:.2f} ({norm:.2f})")
        table.append((f"  {density}", *cells))
    return [
        "The largest elements of AdamW's update: the share of them that was among the largest so",
        "many steps before, and in brackets the norm that those of before still have, over that of",
        "the largest",
        *align_columns(table),
    ]


def format_layers(
    findings: Findings, rows: Sequence[Row], sampled: Sequence[SampledTensor]
) -> list[str]:
    best = recommend_row(rows).method
    table: list[tuple[str, ...]] = [
        ("  Layer", "rows x columns", "looked at", "kept", "overlap 10")
    ]
    for tensor in sampled:
        part = "all" if tensor.is_complete else f"{tensor.rows} x {tensor.columns}"
        numbers = [
            findings.get(("kept", best, tensor.name)),
            findings.get(("overlap", "0.1", "10", tensor.name)),
        ]
        shape = "{} x {}".format(*tensor.full_shape)
        cells = ("-" if n is None else f"{n:.2f}" for n in numbers)
        table.append((f"  {tensor.name}", shape, part, *cells))
    return [
        *align_columns(table),
        f"  kept: by {best}; overlap 10: of the largest tenth of AdamW's update, 10 steps before",
    ]


# Conclusions


def conclude(findings: Findings, rows: Sequence[Row], training: Situation) -> list[str]:
    """All sentences that follow from the findings, the most important first.

    ``training`` is as the advice sees it.
    """
    best = recommend_row(rows)
    settings = [row for row in rows if row.family == best.family]
    settings.sort(key=lambda row: row.share or 0.0)
    listed = ", ".join(f"{row.kept:.2f} ({row.method})" for row in settings)
    is_enough = max(row.kept for row in settings) < best.kept + NEGLIGIBLE
    gain = f"at most {NEGLIGIBLE} more" if is_enough else "more"
    growing = "; ".join(row.method for row in rows if row.grows)
    sentences = [
        describe_recommendation(best),
        f"Settings of this method keep {listed}. More bytes than {best.method} sends keep {gain}.",
        compare_with_advice(training, best.class_name),
        assess_interval(findings),
        assess_start(findings),
        f"Residuals that still grow: {growing}. Such a method sends less than it adds to its "
        "residual, so its `kept` is not final: diagnose more steps."
        if growing
        else "No residual still grows.",
        "This ranks the methods by these steps alone. It does not predict the value of a loss.",
    ]
    return [sentence for sentence in sentences if sentence]


def recommend_row(rows: Sequence[Row]) -> Row:
    """Return the row that sends least, among the methods that send few bytes and keep at most
    `NEGLIGIBLE` less than the best of them. One whose residual still grows only where all do: what
    it keeps is not final.
    """
    compressed = [row for row in rows if row.share is not None and row.share < 1]
    compressed = [row for row in compressed if not row.grows] or compressed
    few = [row for row in compressed if (row.share or 0.0) <= FEW_BYTES]
    candidates = few or compressed
    most = max(row.kept for row in candidates)
    close = [row for row in candidates if row.kept >= most - NEGLIGIBLE]
    return min(close, key=lambda row: row.share or 0.0)


def describe_recommendation(best: Row) -> str:
    share = best.share or 0.0
    text = (
        f"Start with {best.line}: it keeps {best.kept:.2f} of AdamW's update with {share:.1%} of "
        f"the bytes. No method with at most {FEW_BYTES:.0%} of the bytes is better by "
        f"{NEGLIGIBLE} or more."
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
        rates = [format_rate(rate) for rate, _ in group]
        low, high = rates[0], rates[-1]
        span = f"at {low}" if low == high else f"from {low} to {high}"
        reason = "" if name == class_name else REASONS.get(name, "whose runs ended at a lower loss")
        parts.append(f"{span} {name}{f', {reason}' if reason else ''}")
    agrees = any(name == class_name for _, name in named)
    comparison = f"also names {class_name}" if agrees else f"does not name {class_name}"
    seconds, ranks = format_seconds(training.compute_s), training.machine.ranks
    return (
        f"compopt-advise {comparison}, for {ranks} ranks and {seconds} a step. By link: "
        f"{'; '.join(parts)}. "
        "compopt-advise judges by the time and the loss of whole runs."
    )


def assess_interval(findings: Findings) -> str:
    """The longest lag at which an old mask keeps enough of the norm, for Radius."""
    parts = []
    for density in DENSITIES:
        norms = {g: findings.get(("norm", str(density), str(g), "")) for g in LAGS}
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
            "start (dense_steps=, say 15% of the run), and diagnose again after it."
        )
    if last < first - SETTLED:
        return (
            f"Dense start: {numbers}. They change faster as training goes on, so a longer dense "
            "start would not help. Diagnose again later: methods that select may keep less."
        )
    return f"Dense start: {numbers}. A longer one would change little of what is selected."
