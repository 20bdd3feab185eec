"""What was found, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .findings import Findings
from .shares import RANKS
from .stability import DENSITIES, LAGS
from .telling import QUANTITIES, Row


def draw(
    path: str, found: Findings, rows: Sequence[Row], residuals: Mapping[str, Sequence[float]]
) -> None:
    """Save four panels as the kind of picture that the path's end names.

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
    _overlaps(axes[0, 0], found)
    _shares(axes[0, 1], found)
    _kept(axes[1, 0], rows)
    _residuals(axes[1, 1], residuals)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _overlaps(axis: Any, found: Findings) -> None:
    for number, (quantity, label) in enumerate(QUANTITIES.items()):
        for density, style in zip(DENSITIES, ("-", "--", ":"), strict=True):
            key = ("overlap", quantity, str(density))
            points = [(lag, found.get((*key, str(lag), ""))) for lag in LAGS]
            seen = [(lag, share) for lag, share in points if share is not None]
            if seen:
                told = f"{label}, {density}" if density == DENSITIES[0] else f"{density}"
                x, y = zip(*seen, strict=True)
                axis.plot(x, y, style, color=f"C{number}", marker="o", label=told)
    axis.set(
        xscale="log", xlabel="steps between", ylim=(0, 1), title="share of the largest that stay"
    )
    axis.legend(fontsize=7, frameon=False, ncols=3)


def _shares(axis: Any, found: Findings) -> None:
    ranks = [rank for rank in RANKS if ("share", "gradient", str(rank), "") in found]
    for number, quantity in enumerate(("gradient", "update")):
        layers = {name[3] for name in found if name[:2] == ("share", quantity)}
        for layer in sorted(layers):
            y = [found["share", quantity, str(rank), layer] for rank in ranks]
            style = dict(color=f"C{number}", alpha=0.25 if layer else 1.0, lw=1 if layer else 2.5)
            axis.plot(ranks, y, label=None if layer else QUANTITIES[quantity], **style)
    axis.set(xscale="log", xlabel="rank", ylim=(0, 1), title="share of the norm kept, by layer")
    axis.minorticks_off()
    axis.set_xticks(ranks, [str(rank) for rank in ranks])
    axis.legend(fontsize=8, frameon=False)


def _kept(axis: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.share is not None:
            axis.plot(row.share, row.kept, "o", color="C0" if row.front else "C7")
            axis.annotate(f" {row.method}", (row.share, row.kept), fontsize=7, va="center")
    axis.set(xscale="log", xlabel="share of a dense step's bytes", ylim=(0, 1.02))
    axis.set_title("kept of AdamW's update")
    axis.set_xmargin(0.3)


def _residuals(axis: Any, residuals: Mapping[str, Sequence[float]]) -> None:
    for number, (name, values) in enumerate(residuals.items()):
        if any(values):
            style = "-" if number < 10 else "--"
            axis.plot(range(1, len(values) + 1), values, style, label=name, lw=1.2)
    axis.set(xlabel="step after the start", title="residual, in norms of a gradient")
    axis.legend(fontsize=6, frameon=False, ncols=2)
