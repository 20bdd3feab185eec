"""Pictures, where matplotlib is installed.

`compopt-advise --plot` and ``Diagnosis`` draw them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .advice_decision import at_link_rate
from .diagnosis_report import Findings, Row
from .formatting import format_count, format_seconds
from .gradient_statistics import DENSITIES, LAGS
from .prediction import Situation, predict_rows


def make_figure(asked: str, path: str, columns: int = 1) -> tuple[Any, Any]:
    """An empty figure of matplotlib and its axes, to be saved at ``path``.

    Raises ValueError, which begins with what the user ``asked`` for, where the path's folder is
    missing or matplotlib is not installed.
    """
    if not (folder := Path(path).resolve().parent).is_dir():
        raise ValueError(f"{asked}: there is no folder {folder}.")
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            f"{asked} needs matplotlib, which is not installed: pip install matplotlib."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(2 + 5 * columns, 4.2), layout="constrained")
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def save_figure(figure: Any, path: str) -> None:
    """Save a figure that `make_figure` made, and free it."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_speedups(path: str, situation: Situation) -> None:
    """Save a PNG: speed-up of every method's run over link rates from 10 Mbit/s to 100 Gbit/s."""
    figure, axes = make_figure(f"--plot {path}", path)
    rates = [10 ** (exponent / 10) for exponent in range(70, 111)]
    tables = [predict_rows(at_link_rate(situation, rate)) for rate in rates]
    for i, row in enumerate(tables[0]):
        speedups = [table[i].run for table in tables]
        style = "-" if row.ours else "--"
        axes.plot([rate / 1e6 for rate in rates], speedups, style, label=row.method)
    machine = situation.machine
    axes.axvline(8 * machine.link_bytes_per_s / 1e6, color="grey", linestyle=":", label="your link")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="link of a rank, Mbit/s",
        ylabel="speed-up of the run over AdamW+DDP",
        title=f"{format_count(situation.work.parameters)} parameters, {machine.ranks} ranks, "
        f"{format_seconds(situation.compute_s)} of computation",
    )
    axes.legend(fontsize=8)
    save_figure(figure, path)


def plot_diagnosis(
    path: str, findings: Findings, rows: Sequence[Row], residuals: Mapping[str, Sequence[float]]
) -> None:
    """Save three panels; the suffix of the path says as what kind of picture.

    Raises ValueError where its folder is missing or matplotlib is not installed.
    """
    figure, (overlaps, methods, norms) = make_figure(f"plot({path!r})", path, columns=3)
    for density in DENSITIES:
        points = [(lag, findings.get(("overlap", str(density), str(lag), ""))) for lag in LAGS]
        seen = [(lag, share) for lag, share in points if share is not None]
        if seen:
            x, y = zip(*seen, strict=True)
            overlaps.plot(x, y, marker="o", label=f"density {density}")
    overlaps.set(xscale="log", xlabel="steps between", ylim=(0, 1))
    overlaps.set_title("share of AdamW's largest updates that stay")
    overlaps.legend(fontsize=7, frameon=False)
    for row in rows:
        if row.share is not None:
            methods.plot(row.share, row.kept, "o", color="C0" if row.front else "C7")
            methods.annotate(f" {row.method}", (row.share, row.kept), fontsize=7, va="center")
    methods.set(xscale="log", xlabel="share of a dense step's bytes", ylim=(0, 1.02))
    methods.set_title("kept of AdamW's update")
    methods.set_xmargin(0.3)
    for number, (name, values) in enumerate(residuals.items()):
        if any(values):
            style = "-" if number < 10 else "--"
            norms.plot(range(1, len(values) + 1), values, style, label=name, lw=1.2)
    norms.set(xlabel="step after the start", title="residual, in multiples of the gradient's norm")
    norms.legend(fontsize=6, frameon=False, ncols=2)
    save_figure(figure, path)
