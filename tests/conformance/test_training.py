"""Training to a loss, for every class: toy problems, and torch-optimizer 0.3's own test-suite."""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable

import numpy as np
import problems
import pytest
import torch
from sim import Ranks
from table import CASES, Case
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

import compopt

EVERY_RUN = "COMPOPT_EXAMPLES" in os.environ  # in `make properties`
RANKS = {"quadratic": 1, "rosenbrock": 4, "logistic": 1, "mlp": 4}


def is_selected(case: Case, name: str, ranks: int) -> bool:
    """Separate around AdamW and SeparateAdam take the same steps: one problem shows that."""
    if not case.problems or (case.cls is compopt.Separate and name != "mlp"):
        return False
    return EVERY_RUN or ranks == RANKS[name]


RUNS = [
    pytest.param(case, name, ranks, id=f"{case.name}-{name}-{ranks}")
    for case, name, ranks in itertools.product(CASES, problems.NAMES, [1, 4])
    if is_selected(case, name, ranks)
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name", "ranks"), RUNS)
def test_reaches_the_stated_loss(case: Case, name: str, ranks: int):
    toy = problems.problem(name)
    options = {**case.problems, **({"dense_steps": round(0.15 * toy.steps)} if case.compressed else {})}
    world = Ranks(
        ranks,
        lambda: toy.make_model(0).double(),
        lambda params, process_group: case.new(
            params, lr=toy.lr, weight_decay=0.0, process_group=process_group, **options
        ),
    )
    for step in range(toy.steps):
        for optimizer in world.optimizers:
            optimizer.param_groups[0]["lr"] = toy.lr_at(step)
        world.train(lambda model, rank, step: toy.loss(model, rank, ranks, step), 1)
    world.assert_replicas_equal()
    limit = case.limits.get(name, toy.limit(case.method))
    assert toy.evaluate(world.models[0]) < limit < toy.reached["sgd"]


# What fails for both: torch's zero_grad sets gradients to None since 2.0, so the suite's sparse gradient is gone before
# step() and nothing can refuse it.
FAIL_FOR_BOTH = {"sparse gradients are refused"}
# What AdamW alone fails: its load_state_dict keeps the tensors it is given, so that steps write into the loaded dict.
FAIL_FOR_ADAMW = {f"resumed, constructor {i}" for i in range(4)}

ADAMW = ({"lr": 0.3, "weight_decay": 0.0}, 400)
ADAMS = ({"lr": 0.1, "weight_decay": 0.0, "eps": 0.3}, 600)  # its update does not shrink with the gradient above eps
ENTRIES: dict[str, tuple[dict, int, dict, int]] = {  # options and iterations: on functions, on the network
    "AdamW": (*ADAMW, {"lr": 0.05, "weight_decay": 1e-3}, 300),
    "RadiusAdamW": (*ADAMW, {"lr": 0.05, "weight_decay": 1e-3}, 300),
    "SeparateAdam": (*ADAMW, {"lr": 0.05, "weight_decay": 1e-3}, 300),
    "TagcAdamW": (*ADAMW, {"lr": 0.05, "weight_decay": 1e-3}, 300),
    "Separate": (*ADAMW, {"lr": 0.05, "weight_decay": 1e-3}, 300),
    "Average": (*ADAMW, {"lr": 0.05, "weight_decay": 1e-3}, 300),
    "LocalSteps": (*ADAMW, {"lr": 0.05, "weight_decay": 1e-3}, 300),
    "AdamS": (*ADAMS, {"lr": 0.02, "weight_decay": 1e-3}, 500),
    "ScapeAdamS": (*ADAMS, {"lr": 0.02, "weight_decay": 1e-3}, 500),
}
FAST = ("SeparateAdam",)  # the others: `make slow`
AROUND_ADAMW = {case.name for case in CASES if case.build}


def make(name: str) -> Callable[..., torch.optim.Optimizer]:
    new = torch.optim.AdamW if name == "AdamW" else getattr(compopt, name)
    if name in AROUND_ADAMW:  # takes an optimizer: a bad option is refused by that
        return lambda params, **options: new(torch.optim.AdamW(params, **options))
    return new


def rosenbrock(p: torch.Tensor) -> torch.Tensor:
    x, y = p
    return (1 - x) ** 2 + 1 * (y - x**2) ** 2


def quadratic(p: torch.Tensor) -> torch.Tensor:
    x, y = p
    return x**2 / 1.0 + y**2 / 1.0


def beale(p: torch.Tensor) -> torch.Tensor:
    x, y = p
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


MINIMA = {rosenbrock: (1.0, 1.0), quadratic: (0.0, 0.0), beale: (3.0, 0.5)}


def finds_the_minimum(name: str, function: Callable) -> bool:
    options, iterations, *_ = ENTRIES[name]
    x = torch.tensor([1.5, 1.5], requires_grad=True)
    optimizer = make(name)([x], **options)
    for _ in range(iterations):
        optimizer.zero_grad()
        function(x).backward(retain_graph=True, create_graph=True)
        optimizer.step()
    printed = type(optimizer).__name__ in repr(optimizer)
    return printed and torch.allclose(x, torch.tensor(MINIMA[function]), atol=0.001)


def clusters() -> tuple[torch.Tensor, torch.Tensor]:
    x = np.random.RandomState(42).randn(100, 2) * 2
    x[:50] -= 2
    x[50:] += 2
    return torch.tensor(x, dtype=torch.float32), torch.tensor([0.0] * 50 + [1.0] * 50).view(100, 1)


def trains_a_network(name: str) -> bool:
    torch.manual_seed(42)
    x, y = clusters()
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1), nn.Sigmoid())
    *_, options, iterations = ENTRIES[name]
    optimizer = make(name)(model.parameters(), **options)
    losses = []
    for _ in range(iterations):
        losses.append(nn.functional.binary_cross_entropy(model(x), y))
        optimizer.zero_grad()
        losses[-1].backward(create_graph=True)
        optimizer.step()
    return losses[0].item() > 2.0 * losses[-1].item()


def refuses_sparse(name: str) -> bool:
    param = torch.randn(1, 1).to_sparse().requires_grad_(True)
    param.grad = torch.randn(1, 1).to_sparse()
    try:
        optimizer = make(name)([param])
        optimizer.zero_grad()
        optimizer.step()
    except RuntimeError as error:
        return "does not support sparse gradients" in str(error)
    return False


def refuses(message: str, name: str, **options: object) -> bool:
    try:
        make(name)(None, **options)
    except ValueError as error:
        return message in str(error)
    return False


SCHEDULERS: list[list[Callable]] = [
    [],
    [lambda o: StepLR(o, gamma=0.9, step_size=10)],
    [lambda o: StepLR(o, gamma=0.9, step_size=10), ReduceLROnPlateau],
    [
        lambda o: StepLR(o, gamma=0.99, step_size=10),
        lambda o: ExponentialLR(o, gamma=0.99),
        ReduceLROnPlateau,
    ],
]
CONSTRUCTORS: list[Callable] = [
    lambda cls, weight, bias: cls([weight, bias], lr=1e-3),
    lambda cls, weight, bias: cls([{"params": [weight]}, {"params": [bias], "lr": 1e-2}], lr=1e-3),
    lambda cls, weight, bias: cls([{"params": bias, "lr": 1e-2}], lr=1e-3),
    lambda cls, weight, bias: cls([{"params": bias, "lr": 1e-2}]),
]


def loss_of(optimizer, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = (weight.mv(x) + bias).pow(2).sum()
    loss.backward(create_graph=True)
    return loss


def goes_down(name: str, construct: Callable, schedulers: list[Callable], strided: bool) -> bool:
    torch.manual_seed(0)
    weight = torch.randn(10, 5, 2)[..., 0] if strided else torch.randn(10, 5)
    bias = torch.randn(10, 2)[..., 0] if strided else torch.randn(10)
    weight, bias, x = weight.requires_grad_(), bias.requires_grad_(), torch.randn(5)
    optimizer = construct(make(name), weight, bias)
    made = [scheduler(optimizer) for scheduler in schedulers]
    repr(optimizer)
    fn = functools.partial(loss_of, optimizer, weight, bias, x)
    first = fn().item()
    optimizer.step(fn)
    for _ in range(200):
        for scheduler in made:
            scheduler.step(fn()) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    return fn().item() < first


def resumes(name: str, construct: Callable) -> bool:
    torch.manual_seed(0)
    x = torch.randn(5)
    weight, bias = torch.randn(10, 5, requires_grad=True), torch.randn(10, requires_grad=True)
    optimizer = construct(make(name), weight, bias)
    fn = functools.partial(loss_of, optimizer, weight, bias, x)
    for _ in range(20):
        optimizer.step(fn)
    weight_c, bias_c = weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    optimizer_c = construct(make(name), weight_c, bias_c)
    fn_c = functools.partial(loss_of, optimizer_c, weight_c, bias_c, x)
    state, state_c = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer_c.load_state_dict(state_c)
    for _ in range(20):
        optimizer.step(fn)
        optimizer_c.step(fn_c)
        if not (torch.allclose(weight, weight_c, atol=1e-4) and torch.allclose(bias, bias_c, atol=1e-4)):
            return False
    return equal(state, state_c)


def equal(a: object, b: object) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.allclose(a, b, atol=1e-6) if isinstance(a, torch.Tensor) else a == b


CHECKS: dict[str, Callable[[str], bool]] = {
    **{
        f"{function.__name__} from (1.5, 1.5)": functools.partial(finds_the_minimum, function=function)
        for function in MINIMA
    },
    "a network on two clusters": trains_a_network,
    "sparse gradients are refused": refuses_sparse,
    "lr -0.01": lambda name: refuses("Invalid learning rate: -0.01", name, lr=-0.01),
    "eps -0.1": lambda name: refuses("Invalid epsilon value: -0.1", name, lr=0.1, eps=-0.1),
    "weight_decay -0.1": lambda name: refuses("Invalid weight_decay value: -0.1", name, lr=0.1, weight_decay=-0.1),
    "betas (-1, .)": lambda name: refuses("beta parameter at index 0: -1", name, lr=0.1, betas=(-1, 0.999)),
    "betas (., -.999)": lambda name: refuses("beta parameter at index 1: -0.999", name, lr=0.1, betas=(0.9, -0.999)),
    **{
        f"constructor {i}, schedulers {j}, strided={strided}": functools.partial(
            goes_down, construct=CONSTRUCTORS[i], schedulers=SCHEDULERS[j], strided=strided
        )
        for i, j in [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (0, 2), (0, 3)]
        for strided in (False, True)
    },
    **{f"resumed, constructor {i}": functools.partial(resumes, construct=CONSTRUCTORS[i]) for i in range(4)},
}


@functools.cache
def passed(check: str, name: str) -> bool:
    return CHECKS[check](name)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "name",
    [case.name if case.name in FAST else pytest.param(case.name, marks=pytest.mark.slow) for case in CASES],
)
def test_at_least_as_well_as_adamw(name, check):
    assert passed(check, "AdamW") == (check not in FAIL_FOR_BOTH | FAIL_FOR_ADAMW)
    assert passed(check, name) == (check not in FAIL_FOR_BOTH)


def test_every_class_has_an_entry():
    assert set(ENTRIES) == {"AdamW"} | {case.name for case in CASES}
