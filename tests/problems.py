"""Toy problems that optimizers of the conformance table must solve, data split over any number of ranks.

TABLE

`python tests/problems.py` prints the table anew (one core, about a minute).
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Problem:
    """A training problem with a stated loss.

    Attributes:
        make_model: make_model(seed), float32; call .double() on it for float64: the data follows the parameters' dtype.
        loss: loss(model, rank, ranks, step) on this rank's data, step from 0. Averaging its gradient over the ranks is
            what data-parallel training does.
        evaluate: evaluate(model), the loss on all data, as a float; what the numbers here are about.
        steps, lr: budget of steps; the learning rate to start from, see lr_at. Weight decay is 0.
        budget: loss that AdamW and every compressed method reach and plain SGD, at its best learning rate, does not.
        reached: what each method reached, the worse of 1 and 4 ranks ("sgd": best of `sgd_lrs`).
        sgd_lrs: learning rates tried for plain SGD; the last one diverges or is worse than the one before.
    """

    name: str
    make_model: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, int, int, int], Tensor]
    evaluate: Callable[[nn.Module], float]
    steps: int
    lr: float
    budget: float
    reached: dict[str, float]
    sgd_lrs: tuple[float, ...]

    def lr_at(self, step: int, lr: float | None = None) -> float:
        """Learning rate of a step (from 0): falls linearly to 0. Without it all end at the noise of their last steps."""
        return (self.lr if lr is None else lr) * (1 - step / self.steps)

    def limit(self, method: str) -> float:
        """Loss that `method` ("adamw", "radius", "scape", "separate") must end below: 1.5 times what was measured."""
        return min(1.5 * self.reached[method], self.budget)


class Matrix(nn.Module):
    """A model that is one 64 x 64 matrix: 4096 elements, just enough to be compressed."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.weight = nn.Parameter(start)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=_generator(seed), dtype=torch.float64)


def _quadratic() -> Problem:
    """Least squares for a 64 x 64 matrix, 256 samples: 4 features of scale 8, 60 of scales from 1 down to 0.1.

    The strong features bound SGD's learning rate, the weak ones then hardly move: condition about (8 / 0.1)^2 = 6400.
    """
    scale = torch.cat([torch.full((4,), 8.0), torch.logspace(0, -1, 60)]).double()
    a = _randn(256, 64, seed=1) * scale
    b = a @ _randn(64, 64, seed=2)

    def make_model(seed: int) -> nn.Module:
        return Matrix(0.1 * _randn(64, 64, seed=seed).float())

    def squares(model: nn.Module, rows: slice) -> Tensor:
        w = model.weight
        return 0.5 * (a[rows].to(w.dtype) @ w - b[rows].to(w.dtype)).square().mean()

    def loss(model: nn.Module, rank: int, ranks: int, step: int) -> Tensor:
        return squares(model, slice(rank, None, ranks))

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        return squares(model, slice(None)).item()

    reached = {}
    return Problem(
        "quadratic", make_model, loss, evaluate, 300, 0.1, budget=0.1, reached=reached, sgd_lrs=(0.3, 1.0, 2.0, 3.0)
    )


def _rosenbrock() -> Problem:
    """2048 Rosenbrock functions (1 - x)^2 + 100 (y - x^2)^2 side by side, from far starts; the mean over them.

    The data: 16 samples whose x wants to be somewhere else than 1, by shifts that cancel over the samples.
    """
    shift = 0.5 * _randn(8, 64, 32, seed=3)
    target = 1 + torch.stack([shift, -shift], dim=1).view(16, 64, 32)

    def make_model(seed: int) -> nn.Module:
        return Matrix(2 * _randn(64, 64, seed=seed).float())

    def pairs(model: nn.Module, wanted: Tensor) -> Tensor:
        x, y = model.weight[:, ::2], model.weight[:, 1::2]
        return ((wanted.to(x.dtype) - x).square() + 100 * (y - x.square()).square()).mean()

    def loss(model: nn.Module, rank: int, ranks: int, step: int) -> Tensor:
        # Blocks, not every ranks-th sample: with 2 ranks that would give each rank shifts of one sign only.
        return pairs(model, target.chunk(ranks)[rank])

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        return pairs(model, torch.ones(())).item()

    reached = {}
    return Problem(
        "rosenbrock", make_model, loss, evaluate, 500, 0.2, budget=2.4, reached=reached, sgd_lrs=(0.03, 0.1, 0.14, 0.2)
    )


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # slow to import, and two problems do without

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float64) / 16, torch.tensor(labels)


def _cross_entropy(features: Tensor, labels: Tensor, batch: int) -> tuple[Callable, Callable]:
    """loss on `batch` samples a rank, drawn anew each step from the rank's own shard; evaluate on all."""

    def on(model: nn.Module, rows: Tensor | slice) -> Tensor:
        dtype = next(model.parameters()).dtype
        return functional.cross_entropy(model(features[rows].to(dtype)), labels[rows])

    def loss(model: nn.Module, rank: int, ranks: int, step: int) -> Tensor:
        shard = torch.arange(rank, len(labels), ranks)
        return on(model, shard[torch.randint(len(shard), (batch,), generator=_generator(1000 * step + rank))])

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        return on(model, slice(None)).item()

    return loss, evaluate


def _logistic() -> Problem:
    """Logistic regression on the pixels of the digits and all their products: one 10 x 2144 matrix."""
    pixels, labels = _digits()
    i, j = torch.triu_indices(64, 64)
    features = torch.cat([pixels, pixels[:, i] * pixels[:, j]], dim=1)

    def make_model(seed: int) -> nn.Module:
        model = nn.Linear(features.shape[1], 10)
        model.weight.data = 0.01 * _randn(10, features.shape[1], seed=seed).float()
        nn.init.zeros_(model.bias)
        return model

    loss, evaluate = _cross_entropy(features, labels, batch=32)
    reached = {}
    return Problem(
        "logistic", make_model, loss, evaluate, 200, 0.03, budget=0.02, reached=reached, sgd_lrs=(1.0, 2.0, 4.0, 8.0)
    )


def _mlp() -> Problem:
    """Perceptron on the digits, 64 - 128 - 10: the hidden matrix has 8192 elements, all else stays dense."""
    pixels, labels = _digits()

    def make_model(seed: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        for layer in (model[0], model[2]):
            fan_in = layer.in_features
            layer.weight.data = (_randn(*layer.weight.shape, seed=seed + fan_in) / fan_in**0.5).float()
            nn.init.zeros_(layer.bias)
        return model

    loss, evaluate = _cross_entropy(pixels, labels, batch=32)
    reached = {}
    return Problem(
        "mlp", make_model, loss, evaluate, 200, 0.02, budget=0.06, reached=reached, sgd_lrs=(0.5, 1.0, 1.5, 2.0)
    )


_MAKERS = {"quadratic": _quadratic, "rosenbrock": _rosenbrock, "logistic": _logistic, "mlp": _mlp}
NAMES = tuple(_MAKERS)


@functools.cache
def problem(name: str) -> Problem:
    """The problem of that name; built once."""
    return _MAKERS[name]()


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
        for p, own in zip(model.parameters(), zip(*gradients(toy, model, ranks, step))):
            p.grad = sum(own) / ranks
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
        for p, new in zip(model.parameters(), oracle.params):
            p.data.copy_(new.detach())
    return toy.evaluate(model)


def make_oracle(toy: Problem, method: str, model: nn.Module, ranks: int):
    """The oracle with the settings of the table."""
    from oracles import RadiusOracle, ScapeOracle, SeparateOracle

    params, compress, warmup = list(model.parameters()), compressed(model), round(0.15 * toy.steps)
    common = {"compress": compress, "warmup_steps": warmup}
    if method == "radius":
        return RadiusOracle(params, ranks, toy.lr, (0.9, 0.999), 1e-8, 0.0, density=0.4, interval=10, **common)
    if method == "scape":
        owner = [i % ranks for i in range(len(params))]
        return ScapeOracle(params, ranks, toy.lr, (0.9, 0.95), 1e-8, 0.0, owner, density=0.1, **common)

    def random(t: int, i: int) -> Tensor:
        c = params[i].shape[-1]
        return _randn(c, -(-c // 8), seed=1000 * t + i)

    return SeparateOracle(
        params, ranks, lambda ps: torch.optim.AdamW(ps, lr=toy.lr, weight_decay=0.0), random, **common
    )


def measure(toy: Problem, seed: int = 0) -> dict[str, tuple[float, ...]]:
    """Losses reached: method -> (at 1 rank, at 4 ranks); for SGD (best of the grid, its learning rate)."""
    adamw = functools.partial(torch.optim.AdamW, lr=toy.lr, weight_decay=0.0)
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    row = {"adamw": tuple(train_dense(toy, adamw, toy.lr, ranks, seed) for ranks in (1, 4))}
    for method in ("radius", "scape", "separate"):
        row[method] = tuple(train_oracle(toy, method, ranks, seed) for ranks in (1, 4))
    losses = {lr: train_dense(toy, sgd, lr, 4, seed) for lr in toy.sgd_lrs}
    best = min((lr for lr in losses if losses[lr] == losses[lr]), key=losses.get)
    row["sgd"] = (losses[best], best)
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="losses reached on the toy problems")
    parser.add_argument("--seeds", type=int, default=1)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    for name in NAMES:
        for seed in range(seeds):
            row = measure(problem(name), seed)
            print(f"{name:10} seed {seed} ", *(f"{m} {a:.3g} / {b:.3g}" for m, (a, b) in row.items()), sep="  ")
