"""Train the same small GPT with DDP + AdamW and with compopt's optimizers on two processes, and say what that saved.

python examples/demo.py          # about five minutes on two idle cores, longer on busy ones; `make demo` runs this
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

# What is compared: a name, and options of train_gpt.py. The first is what the others are measured against.
RUNS = {
    "DDP + AdamW": ["--optimizer", "adamw"],
    "SeparateAdam": ["--optimizer", "tracked", "--dense-share", "0.025"],  # 10 steps, its default
    "LocalSteps": ["--optimizer", "local"],
    "LocalSteps(MuonAdamW)": ["--optimizer", "local-muon"],
    "RadiusAdamW": ["--optimizer", "radius", "--density", "0.4"],
    "ScapeAdamS": ["--optimizer", "scape", "--density", "0.1", "--lr", "1e-3"],
    "TagcAdamW": ["--optimizer", "tagc", "--density", "0.0125"],
}
RANKS = 2
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
RATES = {"10 Gbit/s": 10e9, "1 Gbit/s": 1e9, "100 Mbit/s": 100e6}  # bits a second
SCRIPT = Path(__file__).parent / "train_gpt.py"
FOLDER = Path(__file__).parent.parent / "runs"


def train(name: str, options: list[str], limit: float) -> dict:
    """Run train_gpt.py on RANKS processes, one thread each; RuntimeError where it fails or takes too long."""
    out = FOLDER / (re.sub(r"\W+", "_", name).strip("_") + ".json")
    out.unlink(missing_ok=True)
    command = [*LAUNCHER, str(SCRIPT), *options, "--out", str(out)]
    # No GPU: the table is about processes with one core each, and there may be fewer GPUs than processes.
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    try:
        problem = f"ended with exit code {code}; its messages are above" if (code := process.wait(limit)) else None
    except subprocess.TimeoutExpired:
        problem = f"was stopped after {limit:.0f} s"
    finally:
        if process.poll() is None:  # asked with SIGTERM the launcher ends its workers; killed, it would leave them
            process.terminate()
            process.wait(40)  # it gives them 30 s
    if problem:
        raise RuntimeError(f"The run '{name}' {problem}. To repeat it alone: OMP_NUM_THREADS=1 {' '.join(command)}")
    return json.loads(out.read_text())


def last(result: dict, key: str) -> float:
    """At the end of the run: "val_loss", the "step", or the "bytes" a rank has handed over, its start included."""
    return result["evals"][-1][key]


def step_bytes(result: dict) -> float:
    """Return what a rank hands over in a step, averaged over the second half of the run: the start is over by then."""
    half = result["evals"][(len(result["evals"]) - 1) // 2]
    return (last(result, "bytes") - half["bytes"]) / (last(result, "step") - half["step"])


def link_bits(result: dict, size: float) -> float:
    """Bits on the link of a rank that hands over `size` bytes: a ring all-reduce sends 2(N-1)/N bytes a byte."""
    ranks = result["config"]["ranks"]
    return 8 * size * 2 * (ranks - 1) / ranks


def step_ms(result: dict, rate: float | None = None) -> float:
    """A step as measured here; with a rate in bits a second plus its bytes over such a link, nothing overlapped."""
    return result["step_ms"] + (1000 * link_bits(result, step_bytes(result)) / rate if rate else 0.0)


def table(results: dict[str, dict]) -> str:
    """A line for each run, every figure with its ratio to the first run's."""
    first = next(iter(results.values()))
    columns = {
        "loss": (lambda r: last(r, "val_loss"), "{:.3f}"),
        "MB a step": (lambda r: step_bytes(r) / 1e6, "{:.2f}"),
        "MB in all": (lambda r: last(r, "bytes") / 1e6, "{:.0f}"),
        "ms a step": (step_ms, "{:.0f}"),
        **{f"at {name}": (lambda r, rate=rate: step_ms(r, rate), "{:.0f}") for name, rate in RATES.items()},
    }
    wide = max(map(len, results))
    lines = [" " * wide + "".join(f"{label:>15}" for label in columns)]
    for name, r in results.items():
        cells = [form.format(value(r)) + f" ({value(r) / value(first):.2f})" for value, form in columns.values()]
        lines.append(f"{name:<{wide}}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def sentences(results: dict[str, dict]) -> list[str]:
    """Say what each run saved, and on which links: where the whole run, dense start included, takes less time."""
    ((_, dense), *others), message = results.items(), []
    for name, result in others:
        lost = (step_ms(result) - step_ms(dense)) * result["config"]["steps"] / 1000  # seconds, beside the link's
        saved = link_bits(dense, last(dense, "bytes")) - link_bits(result, last(result, "bytes"))
        if saved <= 0:
            where = "it pays on no link, in a run as short as this"
        elif lost <= 0:
            where = "it pays on every link, for its steps were no slower here"
        else:
            where = f"it pays on links below {saved / lost / 1e6:,.0f} Mbit/s; above, AdamW is faster"
        share, more = (last(result, key) / last(dense, key) for key in ("bytes", "val_loss"))
        message.append(f"{name}: {share:.0%} of AdamW's bytes in all, {more:.3f} of its loss; {where}.")
    return message


def plot(results: dict[str, dict], path: Path) -> None:
    """Validation loss against steps, and against the bytes a rank has handed over."""
    import matplotlib.pyplot as plt  # slow to import, and not needed before

    plt.switch_backend("Agg")  # a file, no window
    plt.style.use("tableau-colorblind10")
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    labels = {"step": "step", "bytes": "bytes each rank handed to collectives"}
    for axis, (key, label) in zip(panels, labels.items(), strict=True):
        for name, result in results.items():
            axis.plot([row[key] for row in result["evals"]], [row["val_loss"] for row in result["evals"]], label=name)
        axis.set(xlabel=label, ylabel="validation loss (nats a byte)", xlim=(0, None))
        axis.grid(alpha=0.25)
    panels[1].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--steps", type=int, default=400)
    args = cli.parse_args()
    if args.steps < 2:
        cli.error(f"--steps must be at least 2; got {args.steps}")
    FOLDER.mkdir(exist_ok=True)
    begin, results = time.perf_counter(), {}
    for number, (name, options) in enumerate(RUNS.items(), 1):
        seconds = (time.perf_counter() - begin) / max(1, len(results)) * (len(RUNS) - len(results))
        left = f", about {seconds / 60:.0f} min to the end" if results else ""
        print(f"{number} of {len(RUNS)}, {name}: {args.steps} steps on {RANKS} processes{left}", flush=True)
        options = [*options, "--steps", str(args.steps), "--eval-every", str(max(1, args.steps // 10))]
        try:
            results[name] = train(name, options, limit=60 + args.steps)
        except RuntimeError as error:
            sys.exit(str(error))
    plot(results, FOLDER / "demo.png")
    first = next(iter(results.values()))
    print(f"\nA GPT of {first['parameters']:,} parameters, {args.steps} steps; in brackets, times the first line's.\n")
    print(table(results))
    print("\nLoss: nats a byte, on text not trained on. MB a step: of the second half; in all: with the dense start.")
    print("At a rate: computed, the step measured here plus its bytes over such a link, none of it overlapped.")
    print("", *sentences(results), sep="\n")
    print("So little training favours AdamW in loss. For your own model and link: .venv/bin/compopt-advise --help")
    print(f"Loss over steps and bytes: {FOLDER / 'demo.png'}")


if __name__ == "__main__":
    main()
