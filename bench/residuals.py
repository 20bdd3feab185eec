"""Residuals over a run, and how much of the mask stays: SCAPE's Figures 3 and 6 in small.

    python bench/residuals.py                       # 8 runs in one process, two minutes on a quiet core
    python bench/residuals.py --show                # train nothing: the table of what is there

Figure 3: the gradient's largest tenth is applied and the rest kept for the next step (error feedback), with AdamW and
with AdamS; the paper finds AdamW's residual much larger. Beside them ScapeAdamS at four densities, its residual divided
by 1 - beta1 to be in the gradient's units, and the norm of what each sends. Figure 6: the share of SCAPE's mask that
was in the one before. A GPT of 0.86 M parameters on real text, dense for the first 60 of 400 steps, one process: what
is "sent" is sent to nobody. Saves results/residuals.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(ROOT / "examples"))

import corpus  # noqa: E402
import train_gpt  # noqa: E402

import compopt  # noqa: E402
from compopt._state.tensors import is_compressed  # noqa: E402

STEPS, DENSE, EVERY, LR = 400, 60, 5, 1e-3
DENSITIES = (0.2, 0.1, 0.05, 0.01)
FIELDS = ("run", "step", "loss", "gradient", "sent", "residual", "overlap")


class TopK:
    """The largest of gradient and residual, a tensor at a time, replace the gradient; the rest is the new residual."""

    def __init__(self, params: list[Tensor], density: float):
        self.kept = {p: torch.zeros_like(p) for p in params if is_compressed(p, {})}
        self.density = density

    def __call__(self) -> None:
        for p, kept in self.kept.items():
            kept += p.grad
            largest = kept.view(-1).abs().topk(round(self.density * p.numel()), sorted=False).indices
            p.grad.zero_().view(-1)[largest] = kept.view(-1)[largest]
            kept.view(-1)[largest] = 0


def norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(t) for t in tensors]).norm()) if tensors else 0.0


def scape(density: float) -> Callable:
    return lambda params: compopt.ScapeAdamS(
        params,
        LR,
        (0.9, 0.95),
        density=density,
        warmup_steps=DENSE,
        density_warmup_steps=0,
        weight_decay=1e-2,
        simulate=True,
    )


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, fused=True)


def adams(params: list[Tensor]) -> torch.optim.Optimizer:
    return compopt.AdamS(params, lr=LR, betas=(0.9, 0.95), weight_decay=1e-2)


RUNS: dict[str, Callable] = {
    "AdamW, dense": adamw,
    "AdamW, top-k 0.1": adamw,
    "AdamS, dense": adams,
    "AdamS, top-k 0.1": adams,
    **{f"ScapeAdamS {density}": scape(density) for density in DENSITIES},
}


def train(name: str) -> list[dict]:
    """Every few steps: norms of the gradient, of what is sent, of the residual after the step, and the overlap."""
    torch.manual_seed(0)
    model = train_gpt.GPT(layers=4, width=128, heads=4, context=64)
    params = list(model.parameters())
    optimizer, sparsify = RUNS[name](params), TopK(params, 0.1) if "top-k" in name else None
    data = corpus.batches(corpus.load()[0], batch=8, context=64, seed=1)
    rows, losses = [], []
    for step in range(1, STEPS + 1):
        loss = model(*next(data))
        loss.backward()
        losses.append(loss.item())
        row = {"run": name, "step": step, "gradient": norm([p.grad for p in params])}
        if sparsify and step > DENSE:
            sparsify()
            row["sent"] = norm([p.grad for p in params])
        optimizer.step()
        if name.startswith("Scape"):
            row["sent"] = optimizer.stats.grad_norm
            row["residual"] = optimizer.stats.residual_norm() / (1 - optimizer.param_groups[0]["betas"][0])
        if step % EVERY == 0:
            if name.startswith("Scape"):
                row["overlap"] = optimizer.stats.mask_overlap() if step > DENSE + 1 else None
            elif sparsify:
                row["residual"] = norm(list(sparsify.kept.values()))
            rows.append({**row, "loss": statistics.mean(losses[-EVERY:])})
        optimizer.zero_grad()
    return rows


def table(rows: list[dict]) -> None:
    """Means over the last tenth of each run."""
    print(f"{'last 40 steps':<22}" + "".join(f"{field:>10}" for field in FIELDS[2:]))
    for name in RUNS:
        last = [row for row in rows if row["run"] == name and int(row["step"]) > 0.9 * STEPS]
        cells = []
        for field in FIELDS[2:]:
            results = [float(row[field]) for row in last if row.get(field) not in (None, "")]
            cells.append(f"{statistics.mean(results):>10.3f}" if results else f"{'-':>10}")
        if last:
            print(f"{name:<22}{''.join(cells)}")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--show", action="store_true", help="train nothing")
    args = cli.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "residuals.csv"
    if not args.show:
        rows = []
        for name in RUNS:
            print(name, flush=True)
            rows += train(name)
        RESULTS.mkdir(exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    if not path.exists():
        cli.error("nothing has run yet: leave --show away")
    table(list(csv.DictReader(path.open())))


if __name__ == "__main__":
    main()
