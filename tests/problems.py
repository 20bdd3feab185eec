"""Toy problems."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Problem:
    name: str
    make_model: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, int, int, int], Tensor]
    evaluate: Callable[[nn.Module], float]
    steps: int
    lr: float
    budget: float
    sgd_lr: float = 0.0


class Matrix(nn.Module):
    """A model that is one 64 x 64 matrix: 4096 elements, just enough to be compressed."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.weight = nn.Parameter(start)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _quadratic(steps, lr, budget, condition=1e3) -> Problem:
    """Least squares, one 64 x 64 matrix, 256 samples whose features' scales fall from 1 to 1/sqrt(condition)."""
    generator = _generator(1)
    scale = torch.logspace(0, -0.5, 64, base=condition, dtype=torch.float64)
    a = torch.randn(256, 64, generator=generator, dtype=torch.float64) * scale
    solution = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    b = a @ solution

    def make_model(seed: int) -> nn.Module:
        return Matrix(0.1 * torch.randn(64, 64, generator=_generator(seed)))

    def squares(model: nn.Module, rows: slice) -> Tensor:
        w = model.weight
        return 0.5 * (a[rows].to(w.dtype) @ w - b[rows].to(w.dtype)).square().mean()

    def loss(model: nn.Module, rank: int, ranks: int, step: int) -> Tensor:
        return squares(model, slice(rank, None, ranks))

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            return squares(model, slice(None)).item()

    return Problem("quadratic", make_model, loss, evaluate, steps, lr, budget)


def _rosenbrock(steps, lr, budget) -> Problem:
    """2048 Rosenbrock functions of two variables; 16 samples shift the minimum, by zero on average."""
    shift = 0.5 * torch.randn(8, 64, 32, generator=_generator(2), dtype=torch.float64)
    minimum = 1 + torch.stack([shift, -shift], dim=1).view(16, 64, 32)

    def make_model(seed: int) -> nn.Module:
        return Matrix(torch.randn(64, 64, generator=_generator(seed)))

    def pairs(model: nn.Module, target: Tensor) -> Tensor:
        x, y = model.weight[:, ::2], model.weight[:, 1::2]
        return ((target.to(x.dtype) - x).square() + 100 * (y - x.square()).square()).mean()

    def loss(model: nn.Module, rank: int, ranks: int, step: int) -> Tensor:
        return pairs(model, minimum[rank::ranks])

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            return pairs(model, torch.ones(())).item()

    return Problem("rosenbrock", make_model, loss, evaluate, steps, lr, budget)


def _digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float64) / 16, torch.tensor(labels)


def _classifier(name, make_model, features, labels, batch, steps, lr, budget) -> Problem:
    """Cross-entropy on minibatches; a rank draws from its own shard, every ranks-th sample."""

    def loss(model: nn.Module, rank: int, ranks: int, step: int) -> Tensor:
        shard = torch.arange(rank, len(labels), ranks)
        rows = shard[torch.randint(len(shard), (batch,), generator=_generator(1000 * step + rank))]
        dtype = next(model.parameters()).dtype
        return functional.cross_entropy(model(features[rows].to(dtype)), labels[rows])

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            dtype = next(model.parameters()).dtype
            return functional.cross_entropy(model(features.to(dtype)), labels).item()

    return Problem(name, make_model, loss, evaluate, steps, lr, budget)


def _logistic(steps, lr, budget) -> Problem:
    """Logistic regression on the pixels of the digits and their products: 10 x 2144."""
    pixels, labels = _digits()
    i, j = torch.triu_indices(64, 64)
    features = torch.cat([pixels, pixels[:, i] * pixels[:, j]], dim=1)

    def make_model(seed: int) -> nn.Module:
        model = nn.Linear(features.shape[1], 10)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    return _classifier("logistic", make_model, features, labels, 32, steps, lr, budget)


def _mlp(steps, lr, budget) -> Problem:
    """Two-layer perceptron on the digits: 64 - 128 - 10, the hidden matrix has 8192 elements."""
    pixels, labels = _digits()

    def make_model(seed: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        generator = _generator(seed)
        for p in model.parameters():
            nn.init.zeros_(p) if p.dim() == 1 else nn.init.normal_(p, 0, p.shape[1] ** -0.5, generator=generator)
        return model

    return _classifier("mlp", make_model, pixels, labels, 32, steps, lr, budget)
