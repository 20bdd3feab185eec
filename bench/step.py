"""Seconds of step() on a CPU: every class beside torch's fused AdamW, in turns; one process of one thread.

    python bench/step.py                                    # all rows at 10 M parameters; a minute and a half
    python bench/step.py --sizes 1M 10M 124M 355M           # a quarter of an hour, 16 GB
    python bench/step.py --only "ScapeAdamS 0.01"
    python bench/step.py --isa avx2                         # as on a processor that has no more; portable: no vectors

Gradients are those of real batches, made before the clock starts (drawn at random above 10 M parameters); masks are
refreshed within the time. Only the ratios mean anything: a row and fused AdamW take turns, step by step, after enough
steps for the residuals to have settled. Saves results/step.csv: ``isa`` is the instruction set of the C passes,
``torch`` that of PyTorch's own operators (with ``--isa avx2`` both have AVX2; with ``portable`` PyTorch keeps its own).
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time

import torch
from _model import GPT, Batches
from _table import RESULTS, make_parser, read_rows, write_rows

import compopt
from compopt._backends.native import library

FUSED = "AdamW, fused"
ROWS = {
    FUSED: lambda p: torch.optim.AdamW(p, lr=3e-4, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=3e-4, foreach=True),
    "AdamS": lambda p: compopt.AdamS(p, lr=3e-4),
    "RadiusAdamW 0.4, sparse": lambda p: compopt.RadiusAdamW(p, lr=3e-4, density=0.4, interval=10**6, dense_steps=1),
    "ScapeAdamS 0.1": lambda p: compopt.ScapeAdamS(p, lr=3e-4, density=0.1, density_steps=0),
    "ScapeAdamS 0.01": lambda p: compopt.ScapeAdamS(p, lr=3e-4, density=0.01, density_steps=0),
    "Average(AdamW), int8": lambda p: compopt.Average(torch.optim.AdamW(p, lr=3e-4, fused=True), payload_dtype="int8"),
    "RadiusAdamW 0.4, int8, sparse": lambda p: compopt.RadiusAdamW(
        p, lr=3e-4, density=0.4, interval=10**6, dense_steps=1, payload_dtype="int8"
    ),
    "TagcAdamW": lambda p: compopt.TagcAdamW(p, lr=3e-4),
    "SeparateAdam": lambda p: compopt.SeparateAdam(p, lr=3e-4),
    "LocalSteps(AdamW), a sync each step": lambda p: compopt.LocalSteps(
        torch.optim.AdamW(p, lr=3e-4, fused=True), every=1, growth_steps=0
    ),
    "SeparateAdam 16": lambda p: compopt.SeparateAdam(p, lr=3e-4, projection="gaussian", ratio=16),
}
SIZES = {"1M": (5, 128, 4), "10M": (8, 320, 5), "124M": (17, 768, 12), "355M": (28, 1024, 16)}  # layers, width, heads
STEPS = {"1M": (60, 200), "10M": (60, 40), "124M": (30, 12), "355M": (20, 8)}  # untimed, timed


def gradients(size: str) -> list[list[torch.Tensor]]:
    """Sets of gradients that are handed out in turn."""
    torch.manual_seed(0)
    model, batches, results = GPT(*SIZES[size]), Batches(rank=0), []
    for _ in range(4 if size in ("1M", "10M") else 2):
        if size in ("1M", "10M"):
            model.zero_grad()
            model(*batches.next()).backward()
        results.append([torch.randn_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
    return results


def measure(size: str, row: str, pool: list[list[torch.Tensor]]) -> tuple[list[float], list[float], str]:
    """Seconds of steps of this row, and of fused AdamW's beside them; and the row's back end."""
    names = (row, FUSED)
    params = {name: [torch.nn.Parameter(0.02 * torch.randn(g.shape)) for g in pool[0]] for name in names}
    optimizers = {name: ROWS[name](params[name]) for name in names}
    for optimizer in optimizers.values():
        optimizer.simulate = True  # one process, the work of many
    seconds, (settle, steps) = {name: [] for name in names}, STEPS[size]
    for step in range(settle + steps):
        for name in names:
            for p, g in zip(params[name], pool[step % len(pool)], strict=True):
                p.grad = g
            start = time.perf_counter()
            optimizers[name].step()
            if step >= settle:
                seconds[name].append(time.perf_counter() - start)
    chosen = getattr(optimizers[row], "backend_reason", "").split(":")[0]
    return seconds[row], seconds[FUSED], chosen


def main() -> None:
    cli = make_parser(__doc__, "--only", ROWS)
    cli.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M"], help="parameters")
    cli.add_argument("--isa", choices=["avx512", "avx2", "neon", "portable"], help="the C passes run with no more")
    args = cli.parse_args()
    if args.isa and args.isa != os.environ.get("COMPOPT_NATIVE_ISA"):
        again(args.isa)
    torch.set_num_threads(1)
    isa, vectors = instruction_set(), torch.backends.cpu.get_cpu_capability()
    print(f"C passes: {isa}; PyTorch's operators: {vectors}")
    for size in args.sizes:
        rows, pool = [], gradients(size)
        print(f"{size}: {sum(g.numel() for g in pool[0]):,} parameters")
        for name in args.only:
            ours, theirs, backend = measure(size, name, pool)
            gc.collect()
            low, middle, high = (1000 * t for t in statistics.quantiles(ours, n=4))
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            figures = {"ms": round(middle, 2), "iqr_ms": round(high - low, 2), "to_adamw": round(ratio, 2)}
            rows.append({"parameters": size, "isa": isa, "torch": vectors, "row": name, "backend": backend, **figures})
            print(
                f"{name:<36}{middle:>8.1f} ms  IQR {high - low:>5.1f}  {ratio:>6.2f} x fused AdamW  {backend}",
                flush=True,
            )
        if args.only == list(ROWS):
            keep(rows)


def again(isa: str) -> None:
    """This command from its beginning, with what has to be set before PyTorch is imported."""
    os.environ["COMPOPT_NATIVE_ISA"] = isa
    if isa == "avx2":
        os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
    os.execv(sys.executable, [sys.executable, *sys.argv])


def instruction_set() -> str:
    """Return what the C passes have; none where they are not compiled."""
    return library.isa_of_library(library.load_library()) if library.find_objects() else "none"


def keep(rows: list[dict]) -> None:
    """In place of what is there of the same sizes and instruction sets."""
    path, new = RESULTS / "step.csv", {(row["parameters"], row["isa"], row["torch"]) for row in rows}
    rows = [row for row in read_rows(path) if (row["parameters"], row["isa"], row["torch"]) not in new] + rows
    write_rows(path, sorted(rows, key=lambda row: (list(SIZES).index(row["parameters"]), row["isa"], row["torch"])))


if __name__ == "__main__":
    main()
