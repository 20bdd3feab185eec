"""Trains the oracles, torch's AdamW and plain SGD on the toy problems: where the stated losses come from.

`cd tests; python -m oracles.training` prints the losses reached (one core, about a minute).
"""

import functools
import math
from collections.abc import Callable

import torch
from problems import NAMES, Problem, problem
from torch import Tensor, nn

from .radius import RadiusOracle
from .scape import ScapeOracle
from .separate import SeparateOracle


def gradients(toy: Problem, model: nn.Module, ranks: int, step: int) -> list[list[Tensor]]:
    """grads[rank][i] of every rank at this step, from one model that stands for all replicas."""
    parameters = list(model.parameters())
    return [list(torch.autograd.grad(toy.loss(model, rank, ranks, step), parameters)) for rank in range(ranks)]


def compressed(model: nn.Module) -> list[bool]:
    """Which parameters the optimizers compress when not told: at least two dimensions and 4096 elements."""
    return [p.dim() >= 2 and p.numel() >= 4096 for p in model.parameters()]


def train_dense(toy: Problem, base: Callable, lr: float, ranks: int, seed: int = 0) -> float:
    """Loss reached in float64 by a torch optimizer, base(parameters), on the averaged gradient."""
    model = toy.make_model(seed).double()
    optimizer = base(model.parameters())
    for step in range(toy.steps):
        optimizer.param_groups[0]["lr"] = toy.lr_at(step, lr)
        for p, local in zip(model.parameters(), zip(*gradients(toy, model, ranks, step), strict=True), strict=True):
            p.grad = sum(local) / ranks
        optimizer.step()
    return toy.evaluate(model)


def train_oracle(toy: Problem, method: str, ranks: int, seed: int = 0) -> float:
    """Loss reached in float64 by the oracle of "radius", "scape" or "separate" with the settings of the table."""
    model = toy.make_model(seed).double()
    oracle = make_oracle(toy, method, model, ranks)
    for step in range(toy.steps):
        if method == "separate":
            oracle.base.param_groups[0]["lr"] = toy.lr_at(step)
        else:
            oracle.lr = toy.lr_at(step)
        oracle.step(gradients(toy, model, ranks, step))
        for p, new in zip(model.parameters(), oracle.params, strict=True):
            p.data.copy_(new.detach())
    return toy.evaluate(model)


def make_oracle(toy: Problem, method: str, model: nn.Module, ranks: int):
    """The oracle with the settings of the table."""
    params, compress, dense_steps = list(model.parameters()), compressed(model), round(0.15 * toy.steps)
    common = {"compress": compress, "dense_steps": dense_steps}
    if method == "radius":
        return RadiusOracle(params, ranks, toy.lr, (0.9, 0.999), 1e-8, 0.0, density=0.4, interval=10, **common)
    if method == "scape":
        owner = [i % ranks for i in range(len(params))]
        return ScapeOracle(params, ranks, toy.lr, (0.9, 0.95), 1e-8, 0.0, owner, density=0.1, **common)

    def random(t: int, i: int) -> Tensor:
        c = params[i].shape[-1]
        return torch.randn(c, -(-c // 8), generator=torch.Generator().manual_seed(1000 * t + i), dtype=torch.float64)

    return SeparateOracle(
        params, ranks, lambda ps: torch.optim.AdamW(ps, lr=toy.lr, weight_decay=0.0), random, **common
    )


def measure(toy: Problem, seed: int = 0) -> dict[str, float]:
    """Losses reached: the worse of 1 and 4 ranks; for "sgd" the best of the grid."""
    adamw = functools.partial(torch.optim.AdamW, lr=toy.lr, weight_decay=0.0)
    row = {"adamw": max(train_dense(toy, adamw, toy.lr, ranks, seed) for ranks in (1, 4))}
    for method in ("radius", "scape", "separate"):
        row[method] = max(train_oracle(toy, method, ranks, seed) for ranks in (1, 4))
    row["sgd"] = best_of_sgd(toy, seed)
    return row


def best_of_sgd(toy: Problem, seed: int = 0) -> float:
    """Lowest loss of plain SGD over its grid of learning rates; runs that diverge count as infinite."""
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    losses = [train_dense(toy, sgd, lr, ranks=1, seed=seed) for lr in toy.sgd_lrs]
    return min(loss if math.isfinite(loss) else math.inf for loss in losses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in NAMES:
        for seed in (0, 1):
            print(f"{name:10}  seed {seed}", *(f"{m} {loss:.3g}" for m, loss in measure(problem(name), seed).items()))
