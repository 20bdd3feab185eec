"""Draw the picture of README.md from kept runs: loss over seconds at 100 Mbit/s, and over the bytes of a whole run.

    .venv/bin/python bench/readme.py

Trains nothing and times nothing. The runs are those of the ladder (bench/ladder.py), at the largest size at which all
of LADDER have run on four ranks and are timed (`bench/time_to_loss.py ladder`): both panels are of one setting.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import _ladder_clock
import _ladder_runs
import _ladder_tables
import matplotlib.pyplot as plt
from _clock import RATE
from _ladder_model import SIZES

PICTURE = Path(__file__).parent / "results" / "readme.png"
LADDER = {  # row: its label, and the label's offset in the right panel
    "DDP + AdamW": ("DDP + AdamW", (-75, -14)),
    "DDP + Muon": ("DDP + Muon", (-62, 6)),
    "PowerSGD 4": ("PowerSGD 4", (7, 2)),
    "SeparateAdam": ("SeparateAdam", (7, 4)),
    "LocalSteps(Muon) 30, int4, 800": ("LocalSteps(Muon)", (7, -12)),  # the defaults
}


def load_ladder() -> list[dict[str, Any]]:
    """The rows of the ladder at the largest size at which all of LADDER are timed."""
    runs, timings = _ladder_runs.kept(), _ladder_clock.kept()
    for size, products in product(reversed(SIZES), ("bfloat16", "float32")):
        others = {"ranks": 4, "tokens": 20, "products": products}
        seconds = _ladder_clock.tabulate(runs, timings, size, **others)
        lines = {line["row"]: line for line in seconds if line["rate"] == RATE}
        if LADDER.keys() <= lines.keys():
            table = [line for line in _ladder_tables.tabulate(runs, **others) if line["size"] == size]
            return [line | {"evals": lines[line["row"]]["evals"]} for line in table if line["row"] in lines]
    raise LookupError(f"at no size have all of {', '.join(LADDER)} run and been timed")


def draw_ladder(left: Any, right: Any, lines: list[dict[str, Any]]) -> None:
    """Draw loss over seconds, and the last loss, the mean over seeds, over the bytes of the run."""
    first = lines[0]
    for line in lines:
        if line["row"] not in LADDER:
            continue
        (label, offset), color = LADDER[line["row"]], _ladder_clock.color_of(line["row"])
        points = [[point[key] for point in line["evals"]] for key in ("seconds", "val_loss")]
        left.plot(*points, color=color, label=label, linewidth=2)
        left.plot(points[0][-1], points[1][-1], "o", color=color)
        at = (line["bytes_percent"], line["to_adamw"])
        right.plot(*at, "o", color=color)
        right.annotate(label, at, offset, textcoords="offset points", fontsize=9, color=color)
    about = "{ranks} ranks, {:.2g} M parameters, {tokens_per_parameter:g} tokens per parameter"
    left.set(title=about.format(first["parameters"] / 1e6, **first), xlim=(0, None))
    left.set(ylim=(None, first["evals"][1]["val_loss"]))  # all fall alike before
    right.axhline(1, color="0.25", linestyle=":", linewidth=1)
    right.margins(x=0.2, y=0.15)


def draw(path: Path = PICTURE) -> None:
    plt.switch_backend("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    right.set(
        title="The end of each run",
        xscale="log",
        xlabel="bytes of the whole run, % of DDP's in float32",
        ylabel="final loss / DDP + AdamW's",
    )
    draw_ladder(left, right, load_ladder())
    left.set(xlabel="seconds over a link of 100 Mbit/s", ylabel="validation loss")
    left.legend(frameon=False, fontsize=9)
    right.set_xticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    right.minorticks_off()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw()
