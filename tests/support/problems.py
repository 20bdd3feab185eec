"""Toy problems that optimizers of the conformance table must solve, data split over any number of ranks.

Loss reached in float64, the worst of 1 and 4 ranks and seeds 0 and 1 (for SGD the best of its grid and the seeds), with
learning rates falling linearly to 0 and no weight decay:

    problem      start   AdamW    Radius   SCAPE    SEPARATE  SGD     stated loss
    quadratic    107     0.00064  0.00116  0.0321   0.0075    0.58    0.05
    rosenbrock   1750    0.955    1.03     1.02     1.26      11.1    2
    logistic     2.28    0.0094   0.0094   0.0123   0.0129    0.0286  0.02
    mlp          2.34    0.0158   0.017    0.0123   0.0287    0.0708  0.045

    Radius: density 0.4, interval 10, dense for 15 % of the steps. SCAPE: density 0.1, masks delayed by a step, betas
    (0.9, 0.95), dense for 15 %. SEPARATE: ratio 8, ef_beta "auto", over AdamW, dense for 15 %. Others: torch's betas.

`cd tests; python -m oracles.training` prints the table anew (one core, about a minute).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from sim import World
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
        reached: what each method reached, the worst of the table's runs ("sgd": the best, over `sgd_lrs`).
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
        """Learning rate of a step (from 0): falls linearly to 0, else all end at the noise of their last steps."""
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

    reached = {"adamw": 0.00064, "radius": 0.00116, "scape": 0.0321, "separate": 0.0075, "sgd": 0.58}
    return Problem(
        "quadratic", make_model, loss, evaluate, 300, 0.1, budget=0.05, reached=reached, sgd_lrs=(0.3, 1.0, 2.0, 3.0)
    )


def _rosenbrock() -> Problem:
    """2048 Rosenbrock functions (1 - x)^2 + 100 (y - x^2)^2 side by side, weighted from 1 down to 0.01; the mean.

    The data: 16 samples whose x wants to be somewhere else than 1, by shifts that cancel over the samples. The weights
    (scaled to mean 1) leave AdamW as it is, and plain SGD without a learning rate that suits all.
    """
    weight = torch.logspace(0, -2, 32, dtype=torch.float64)
    weight = weight / weight.mean()
    shift = 0.5 * _randn(8, 64, 32, seed=3)
    target = 1 + torch.stack([shift, -shift], dim=1).view(16, 64, 32)

    def make_model(seed: int) -> nn.Module:
        return Matrix(1.5 * _randn(64, 64, seed=seed).float())

    def pairs(model: nn.Module, wanted: Tensor) -> Tensor:
        x, y = model.weight[:, ::2], model.weight[:, 1::2]
        each = (wanted.to(x.dtype) - x).square() + 100 * (y - x.square()).square()
        return (weight.to(x.dtype) * each).mean()

    def loss(model: nn.Module, rank: int, ranks: int, step: int) -> Tensor:
        # Blocks, not every ranks-th sample: with 2 ranks that would give each rank shifts of one sign only.
        return pairs(model, target.chunk(ranks)[rank])

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        return pairs(model, torch.ones(())).item()

    reached = {"adamw": 0.955, "radius": 1.03, "scape": 1.02, "separate": 1.26, "sgd": 11.1}
    return Problem(
        "rosenbrock",
        make_model,
        loss,
        evaluate,
        300,
        0.2,
        budget=2.0,
        reached=reached,
        sgd_lrs=(0.03, 0.06, 0.1, 0.2, 0.4),
    )


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # slow to import, and two problems do without

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float64) / 16, torch.tensor(labels)


def _cross_entropy(features: Tensor, labels: Tensor, batch: int) -> tuple[Callable, Callable]:
    """loss on batch / ranks samples, drawn anew each step from the rank's own shard; evaluate on all."""

    def on(model: nn.Module, rows: Tensor | slice) -> Tensor:
        dtype = next(model.parameters()).dtype
        return functional.cross_entropy(model(features[rows].to(dtype)), labels[rows])

    def loss(model: nn.Module, rank: int, ranks: int, step: int) -> Tensor:
        shard = torch.arange(rank, len(labels), ranks)
        return on(model, shard[torch.randint(len(shard), (batch // ranks,), generator=_generator(1000 * step + rank))])

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

    loss, evaluate = _cross_entropy(features, labels, batch=128)
    reached = {"adamw": 0.0094, "radius": 0.0094, "scape": 0.0123, "separate": 0.0129, "sgd": 0.0286}
    return Problem(
        "logistic",
        make_model,
        loss,
        evaluate,
        200,
        0.025,
        budget=0.02,
        reached=reached,
        sgd_lrs=(1.0, 2.0, 2.5, 3.0, 4.0),
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

    loss, evaluate = _cross_entropy(pixels, labels, batch=128)
    reached = {"adamw": 0.0158, "radius": 0.017, "scape": 0.0123, "separate": 0.0287, "sgd": 0.0708}
    return Problem(
        "mlp", make_model, loss, evaluate, 200, 0.03, budget=0.045, reached=reached, sgd_lrs=(1.0, 1.5, 1.8, 2.5)
    )


_MAKERS = {"quadratic": _quadratic, "rosenbrock": _rosenbrock, "logistic": _logistic, "mlp": _mlp}
NAMES = tuple(_MAKERS)


@functools.cache
def problem(name: str) -> Problem:
    """The problem of that name; built once."""
    return _MAKERS[name]()


# What tests against an oracle train: no model, only tensors, and gradients that are noise.

SHAPES = [(64, 80), (80,), (128, 64), (3, 40, 48), (10, 10)]
COMPRESSED = [True, False, True, True, False]  # at least two dimensions and 4096 elements

BY_DTYPE = {  # of float32 sizes above the blocks that passes work in; all are cut between ranks
    torch.float32: [(64, 80), (80,), (260, 520), (70, 300)],
    torch.float64: [(64, 80), (80,), (70, 80), (64, 66)],
}
MATRICES = (0, 2, 3)  # of these and of SHAPES
each_dtype = pytest.mark.parametrize("dtype", BY_DTYPE, ids=["native", "torch"])

Optimizers = list[torch.optim.Optimizer]
Tensors = list[list[Tensor]]  # a list a rank


def weights(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the point where all ranks begin: the i-th tensor is drawn from seed i."""
    return [torch.randn(shape, generator=_generator(i), dtype=dtype) for i, shape in enumerate(shapes)]


def gradients(
    ranks: int, step: int, shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64
) -> Tensors:
    """A gradient a tensor and rank, other ones each step."""
    seeds = [_generator(100 * step + rank) for rank in range(ranks)]
    return [[torch.randn(shape, generator=seed, dtype=dtype) for shape in shapes] for seed in seeds]


def replicas(
    ranks: int, start: list[Tensor], make: Callable[..., torch.optim.Optimizer]
) -> tuple[World, Tensors, Optimizers]:
    """A world, each rank's parameters, and each rank's make(parameters, process_group=...)."""
    world = World(ranks)
    params = [[nn.Parameter(w.clone()) for w in start] for _ in range(ranks)]
    optimizers = [make(p, process_group=comm) for p, comm in zip(params, world.comms, strict=True)]
    for optimizer in optimizers if ranks == 1 else []:
        optimizer.simulate = True  # as many ranks would step
    return world, params, optimizers


def step(
    world: World,
    params: Tensors,
    optimizers: Optimizers,
    grads: list[list[Tensor | None]],
    samples: Sequence[float] | None = None,
) -> None:
    """One step of all ranks on these gradients; None is a tensor without one."""
    for local, given in zip(params, grads, strict=True):
        for p, g in zip(local, given, strict=True):
            p.grad = None if g is None else g.clone()
    world.step(optimizers, samples)
