"""Train the same small GPT with DDP + AdamW and with compopt on two processes; print and plot them side by side.

python examples/demo.py          # about three minutes on two cores; `make demo` runs this
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt

# What is compared: a name, and options of train_gpt.py. The first is what the others are measured against.
RUNS = {
    "DDP + AdamW": ["--optimizer", "adamw"],
    "RadiusAdamW": ["--optimizer", "radius", "--density", "0.4", "--interval", "100"],
    "SeparateAdam tracked": ["--optimizer", "tracked"],
    "ScapeAdamS": ["--optimizer", "scape", "--density", "0.1", "--lr", "1e-3"],
}
RANKS = 2
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
RATES = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}  # bits a second
COLOURS = ["#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"]  # told apart by colour-blind readers too
SCRIPT = Path(__file__).parent / "train_gpt.py"
FOLDER = Path(__file__).parent.parent / "runs"


def train(name: str, options: list[str], limit: float) -> dict:
    """Run train_gpt.py on RANKS processes, one thread each, and return what it measured.

    Raises:
        RuntimeError: the run failed or took more than `limit` seconds; the message says how to repeat it alone.
    """
    out = FOLDER / (name.replace(" ", "").replace("+", "_") + ".json")
    out.unlink(missing_ok=True)
    command = [*LAUNCHER, str(SCRIPT), *options, "--out", str(out)]
    # No GPU: the table is about processes with one core each, and there may be fewer GPUs than processes.
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    try:
        code = process.wait(limit)
        problem = f"ended with exit code {code}; its messages are above" if code or not out.exists() else None
    except subprocess.TimeoutExpired:
        problem = f"was stopped after {limit:.0f} s"
    finally:
        stop(process)
    if problem:
        raise RuntimeError(f"The run '{name}' {problem}. To repeat it alone: OMP_NUM_THREADS=1 {' '.join(command)}")
    return json.loads(out.read_text())


def stop(process: subprocess.Popen) -> None:
    """End the launcher if it still runs. Asked with SIGTERM it ends its workers; killed, it would leave them behind."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(40)  # the launcher itself gives its workers 30 s
        except subprocess.TimeoutExpired:
            process.kill()


def bytes_a_step(result: dict) -> float:
    """Bytes a rank hands over in a typical step: of the compressed steps, where there are any."""
    sizes = result["bytes_per_step"]
    return sizes["compressed"] or sizes["dense"]


def step_ms(result: dict, rate: float | None = None) -> float:
    """Milliseconds a step: measured here, or computed for a link of `rate` bits a second.

    A ring all-reduce sends 2(N-1)/N bytes a byte. That time is added to the measured step: nothing is overlapped.
    """
    ranks = result["config"]["ranks"]
    wire = 2 * (ranks - 1) / ranks * bytes_a_step(result)
    return result["step_ms"] + (8000 * wire / rate if rate else 0.0)


def table(results: dict[str, dict]) -> str:
    """The results as text: a column for each run, with its ratio to the first."""
    rows = {
        "validation loss (nats a byte)": (lambda r: r["evals"][-1]["val_loss"], "{:.3f}"),
        "bytes a step, each rank": (bytes_a_step, "{:,.0f}"),
        "bytes in the whole run": (lambda r: r["evals"][-1]["bytes"], "{:,.0f}"),
        "step time here (ms)": (step_ms, "{:.1f}"),
        **{
            f"step time at {name} (ms, computed)": (lambda r, rate=rate: step_ms(r, rate), "{:.1f}")
            for name, rate in RATES.items()
        },
    }
    first = next(iter(results.values()))
    lines = [" " * 40 + "".join(f"{name:>24}" for name in results)]
    for label, (value, form) in rows.items():
        cells = [
            form.format(value(r)) + ("" if r is first else f" ({value(r) / value(first):.2f} x)")
            for r in results.values()
        ]
        lines.append(f"{label:<40}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def plot(results: dict[str, dict], path: Path) -> None:
    """Validation loss against steps, and against the bytes a rank has handed over."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, (key, unit, label) in zip(
        panels, [("step", 1, "step"), ("bytes", 1e9, "gigabytes each rank handed to collectives")], strict=True
    ):
        for (name, result), colour in zip(results.items(), COLOURS, strict=False):
            across = [row[key] / unit for row in result["evals"]]
            axis.plot(across, [row["val_loss"] for row in result["evals"]], color=colour, linewidth=1.8, label=name)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation loss (nats a byte)")
    panels[1].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, default=600)
    args = cli.parse_args()
    FOLDER.mkdir(exist_ok=True)
    begin, results = time.perf_counter(), {}
    for name, options in RUNS.items():
        print(f"{name}: {args.steps} steps on {RANKS} processes", flush=True)
        common = ["--steps", str(args.steps), "--eval-every", str(max(1, args.steps // 20))]
        try:
            results[name] = train(name, [*options, *common], limit=60 + args.steps)
        except RuntimeError as error:
            sys.exit(str(error))
    plot(results, FOLDER / "demo.png")
    first = next(iter(results.values()))
    seconds = time.perf_counter() - begin
    print(f"\nA GPT of {first['parameters']:,} parameters on {RANKS} processes; {seconds:.0f} s in all.\n")
    print(table(results))
    print(
        "\nBytes a step are the median of the compressed steps; the steps before (dense warm-up) cost what DDP's cost."
        "\nComputed: the step measured here plus 2(N-1)/N x bytes over the link, none of it overlapped."
        f"\nLoss curves: {FOLDER / 'demo.png'}"
    )


if __name__ == "__main__":
    main()
