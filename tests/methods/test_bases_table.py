"""The bases of docs/bases.md, each against the real package inside each wrapper. Packages that are not installed are
skipped.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
import random
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from bases_table import BOTH, MEAN, RANK_0, REFUSED, ROWS, Row
from sim import Ranks
from slow_rows import slow_but
from torch import Tensor, nn

import compopt
from compopt._state.leaves import read_leaves

FAST = "torch SGD", "torch-optimizer Lamb", "torch-optimizer AdaBelief"
PAGE = (Path(__file__).parents[2] / "docs/bases.md").read_text()
WRAPPERS = {
    "Average": (compopt.Average, dict(payload_dtype=None)),
    "Separate": (compopt.Separate, dict(rank=4, dense_steps=1)),
    "LocalSteps": (compopt.LocalSteps, dict(every=3, growth_steps=0)),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8))


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 24, generator=draw)
    return (model(x) - x[:, :8].roll(1, 1) - 0.1 * torch.randn(16, 8, generator=draw)).square().mean()


def make_base(row: Row, params: Any) -> Any:
    params = list(params)
    if row.build is not None:
        return row.build(params)
    cls, options = getattr(importlib.import_module(row.module), row.name), dict(row.options)
    if row.package == "bitsandbytes":
        options["min_8bit_size"] = 1024
    if row.matrices:
        matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        return cls([{"params": rest}, {"params": matrices, **row.matrices}], **options)
    return cls([(f"layers.{n}.weight", p) for n, p in enumerate(params)] if row.named else params, **options)


def train_mode(optimizers: list[Any], name: str = "train") -> None:
    for optimizer in optimizers:
        getattr(optimizer, name, lambda: None)()


def begin(row: Row, wrapper: str) -> Ranks:
    cls, options = WRAPPERS[wrapper]
    ranks = Ranks(2, model, lambda ps, process_group: cls(make_base(row, ps), process_group=process_group, **options))
    train_mode(ranks.optimizers)
    return ranks


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def on_averaged_gradients(row: Row, steps: int) -> nn.Module:
    """A model that the base alone has trained on the mean of two ranks' gradients."""
    torch.manual_seed(0)
    alone = model()
    base = make_base(row, alone.parameters())
    members = base if isinstance(base, list) else [base]
    train_mode(members)
    for step in range(steps):
        grads = []
        for rank in range(2):
            alone.zero_grad()
            loss(alone, rank, step).backward()
            grads.append([p.grad.clone() for p in alone.parameters()])
        for p, g, h in zip(alone.parameters(), *grads, strict=True):
            p.grad = (g + h) / 2
        state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        torch.manual_seed(step), random.seed(step), numpy.random.seed(step)  # as ranks draw, from the step's number
        for member in members:
            member.step()
        torch.set_rng_state(state[0]), random.setstate(state[1]), numpy.random.set_state(state[2])
    train_mode(members, "eval")
    return alone


def read_state(optimizer: Any, models: nn.Module) -> list[list[Any]]:
    """The tensors and numbers of every parameter's state."""
    found = []
    for p in models.parameters():
        leaves = read_leaves(optimizer.base.state.get(p, {}))
        assert not leaves.unknown
        numbers = [torch.tensor(float(container[key])) for container, key in leaves.scalars]
        found.append([t.clone() for t in leaves.tensors] + numbers)
    return found


def check_consolidated(row: Row, ranks: Ranks) -> None:
    """Afterwards all ranks have the mean, or rank 0's, as the row says."""
    before = [read_state(optimizer, own) for _, own, optimizer in ranks]
    ranks.world.consolidate(ranks.optimizers)
    after = [read_state(optimizer, own) for _, own, optimizer in ranks]
    ways = set()
    for p, first, second, a, b in zip(ranks.models[0].parameters(), *before, *after, strict=True):
        large = [t for t in first if t.numel() > 1]
        is_mean = row.averaged != RANK_0 and all(
            t.is_floating_point() and t.numel() == p.numel() and t.element_size() > 1 for t in large
        )
        ways.update({MEAN if is_mean else RANK_0} if large else ())
        for x, y, new, other in zip(first, second, a, b, strict=True):
            expected = (x + y) / 2 if is_mean and x.numel() == p.numel() and x.is_floating_point() else x
            assert torch.equal(new, other) and torch.equal(new.float(), expected.float())
    assert row.averaged == (BOTH if len(ways) > 1 else next(iter(ways), MEAN))  # some keep no state


def resume(row: Row, wrapper: str, ranks: Ranks) -> Ranks:
    file = io.BytesIO()
    torch.save([ranks.optimizers[0].state_dict(), ranks.models[0].state_dict()], file)
    file.seek(0)
    saved, weights = torch.load(file, weights_only=False)
    new = begin(row, wrapper)
    for _, own, optimizer in new:
        own.load_state_dict(weights)
        optimizer.load_state_dict(saved)
    new.steps = ranks.steps
    train_mode(new.optimizers)
    return new


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("row", "wrapper"),
    slow_but(lambda row, wrapper: wrapper == "Separate" and row.id in FAST, itertools.product(ROWS, WRAPPERS)),
    ids=lambda value: getattr(value, "id", value),
)
def test_a_base_trains_saves_and_resumes_as_the_table_says(row, wrapper):
    pytest.importorskip(row.module)
    with torch.random.fork_rng():
        ranks = begin(row, wrapper)
        losses = ranks.train(loss, 4)
        assert all(map(math.isfinite, losses))
        if wrapper == "LocalSteps":
            ranks.world.run([optimizer.end_round for optimizer in ranks.optimizers])
        ranks.assert_replicas_equal()
        train_mode(ranks.optimizers, "eval")
        ranks.assert_replicas_equal()
        if wrapper == "Average":
            alone = flat(on_averaged_gradients(row, 4))
            assert (flat(ranks.models[0]) - alone).abs().max() <= row.tolerance
        train_mode(ranks.optimizers)
        if wrapper == "LocalSteps":
            ranks.train(loss, 1)
            check_consolidated(row, ranks)
        else:
            ranks.world.consolidate(ranks.optimizers)
        new = resume(row, wrapper, ranks)
        for one in (ranks, new):
            torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
            one.train(loss, 3)
        for a, b in zip(ranks.models, new.models, strict=True):
            assert torch.equal(flat(a), flat(b))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in REFUSED.items() for n in names if "dist" not in m])
def test_a_base_of_the_second_table_is_refused(module, name, wrapper):
    cls = getattr(pytest.importorskip(module), name)
    own = model()
    base = object.__new__(cls)  # some need a model, some a process group, to be made
    vars(base).update(vars(torch.optim.SGD(own.parameters(), lr=0.1)))
    with pytest.raises((TypeError, ValueError), match=f"base {name} "):
        WRAPPERS[wrapper][0](base)


# The page


def test_the_page_has_every_base_and_its_version():
    for package in {row.package for row in ROWS}:
        lines = [line for line in PAGE.splitlines() if re.match(rf"\| `{re.escape(package)}` ", line)]
        names = {name for line in lines for name in re.findall(r"`([^`]+)`", line)} - {package}
        assert names == {row.name for row in ROWS if row.package == package}, package
        for line in lines:
            shown, averaged = line.split(" | ")[1], line.rstrip(" |").split(" | ")[-1]
            of_line = [r for r in ROWS if r.package == package and f"`{r.name}`" in line]
            assert {row.averaged for row in of_line} == {averaged}, line
            if package in ("torch", "torch-optimizer"):  # others need not be installed
                assert shown in version(package) or package == "torch"
    for name in (name for names in REFUSED.values() for name in names):
        assert f"`{name}`" in PAGE, name
