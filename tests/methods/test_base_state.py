"""State of a wrapped optimizer: changed through the wrapper, saved once, given to the base; bases that communicate."""

from __future__ import annotations

import io
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from ranks import catch_message, run_ranks
from torch import Tensor, nn

import compopt
from compopt._inside.base_state import save_entry

WRAPPERS = {
    "Average": compopt.Average,
    "Separate": compopt.Separate,
    "LocalSteps": lambda base, **options: compopt.LocalSteps(base, every=4, growth_steps=0, **options),
}
every_wrapper = pytest.mark.parametrize("name", WRAPPERS)


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def clear(optimizer, params):
    optimizer.state.clear()


def assign(optimizer, params):
    optimizer.state = defaultdict(dict)


def pop(optimizer, params):
    optimizer.state.pop(params[0])


def zero(optimizer, params):
    for p in params:
        for name, value in optimizer.state[p].items():
            if name in ("step", "exp_avg", "exp_avg_sq"):
                value.zero_()


def replace_moment(optimizer, params):
    optimizer.state[params[0]]["exp_avg"] = torch.zeros_like(params[0])


def replace_entry(optimizer, params):
    state = optimizer.state[params[0]]
    optimizer.state[params[0]] = {**state, "exp_avg": torch.zeros_like(params[0])}


def replace_parameter(optimizer, params):
    """As a model does that grows: state moves to a parameter that takes the place of another."""
    (group,), new = optimizer.param_groups, nn.Parameter(params[0].detach().clone())
    optimizer.state[new] = {**optimizer.state.pop(params[0]), "exp_avg": torch.ones_like(new)}
    group["params"][0] = params[0] = new


RESETS = [clear, assign, pop, zero, replace_moment, replace_entry, replace_parameter]


def train(make, reset, saves: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))]
    optimizer = make(params)
    for step in range(7):
        if step == 5:
            reset(optimizer, params)
            if saves:
                optimizer.state_dict()
        for n, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + n))
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("reset", RESETS)
@every_wrapper
def test_what_is_changed_in_the_wrappers_state_is_the_bases(name, reset, saves):
    wanted = train(adamw, reset)
    got = train(lambda params: WRAPPERS[name](adamw(params)), reset, saves)
    assert all(map(torch.equal, got, wanted))
    assert not all(map(torch.equal, wanted, train(adamw, lambda *_: None)))


@every_wrapper
def test_what_is_changed_in_the_bases_state_stays(name):
    def reset(optimizer, params):
        state = getattr(optimizer, "base", optimizer).state
        state[params[0]]["exp_avg"] = torch.zeros_like(params[0])
        state.pop(params[1])

    got = train(lambda params: WRAPPERS[name](adamw(params)), reset, saves=True)
    assert all(map(torch.equal, got, train(adamw, reset)))


# State dicts


def bytes_of(value) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(bytes_of, values))


@pytest.mark.parametrize(("name", "bytes_per_value"), [("Average", 12), ("LocalSteps", 24)])
def test_a_state_dict_has_every_state_once(name, bytes_per_value):
    """8 are moments, 4 the residual; LocalSteps has anchors, their momentum, and what is on its way."""
    p = nn.Parameter(torch.randn(100, 100))
    options = {"delay": 1} if name == "LocalSteps" else {}
    optimizer = WRAPPERS[name](adamw([p]), simulate=True, **options)
    for _ in range(3):
        p.grad = torch.randn(100, 100)
        optimizer.step()
    assert bytes_of(optimizer.state_dict()) / p.numel() == pytest.approx(bytes_per_value, abs=0.1)


@every_wrapper
def test_a_state_dict_that_has_the_bases_twice_is_loaded(name):
    def steps(optimizer, p, count):
        for seed in range(count):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()

    p, q = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    first, second = WRAPPERS[name](adamw([p])), WRAPPERS[name](adamw([q]))
    steps(first, p, 3)
    saved = first.state_dict()
    earlier = {**saved, "base": {**first.base.state_dict()}}  # as versions before had it
    q.data.copy_(p.data)
    second.load_state_dict(earlier)
    steps(first, p, 2)
    steps(second, q, 2)
    assert torch.equal(p, q)


@every_wrapper
def test_the_base_alone_goes_on_from_a_wrappers_checkpoint(name):
    """The line of docs/checkpoints.md."""

    def step(optimizer, p, seed):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()

    p, q = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    wrapped, plain = WRAPPERS[name](adamw([p])), torch.optim.AdamW([q], lr=1.0)
    for seed in range(3):
        step(wrapped, p, seed)
    file = io.BytesIO()
    torch.save(wrapped.state_dict(), file)
    file.seek(0)
    q.data.copy_(p.data)
    WRAPPERS[name](plain).load_state_dict(torch.load(file, weights_only=True))
    step(wrapped, p, 3)
    step(plain, q, 3)
    assert torch.equal(p, q) and not plain.state_dict()["param_groups"][0].keys() & {"residuals", "format"}


class HalfWay(torch.optim.Optimizer):
    """Raises when it has made a part of its state."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = torch.zeros_like(p)
            raise RuntimeError("no step without a loss")


def test_a_first_state_that_cannot_be_made_is_empty():
    p = nn.Parameter(torch.ones(3))
    base = HalfWay([p])
    assert save_entry(base, p, base.param_groups[0], None).keys() == {"begun"}


# Bases that communicate


class Gathering(torch.optim.Optimizer):
    """Ranks step a part of the tensors each, and gather them."""

    def __init__(self, params, group=None):
        super().__init__(params, {"lr": 0.1})
        self.group = group

    @torch.no_grad()
    def step(self, closure=None):
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        for n, p in enumerate(self.param_groups[0]["params"]):
            if n % size == rank:
                self.state[p]["steps"] = torch.ones(1)
                p.sub_(p.grad, alpha=0.1)
            gathered = [torch.empty_like(p) for _ in range(size)]
            dist.all_gather(gathered, p.detach(), group=self.group)
            p.copy_(gathered[n % size])


def bases_that_communicate(rank: int) -> dict:
    results = {}
    alone = dist.new_group([rank], use_local_synchronization=True)
    for name, wrap in WRAPPERS.items():
        params = [nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
        optimizer = wrap(Gathering(params))
        if rank == 0:  # alone: a stand-in for the first step sends nothing either
            optimizer.state_dict()
        for p in params:
            p.grad = torch.full((8, 8), 1.0 + rank)
        results[name] = catch_message(TypeError, optimizer.step)

        params = [nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
        optimizer = wrap(Gathering(params, alone))  # as among ranks that hold other shards
        for _ in range(4):
            for p in params:
                p.grad = torch.full((8, 8), 1.0 + rank)
            optimizer.step()
        results[f"{name}, among others"] = optimizer.stats.applied_steps
    return results


def test_a_base_that_communicates_is_refused_in_its_first_step():
    for results in run_ranks(bases_that_communicate, 2):
        for name in WRAPPERS:
            assert "base Gathering cannot be wrapped: it communicates within its step" in results[name]
            assert "c10d.allgather_" in results[name] and "MuonAdamW" in results[name]
            assert results[f"{name}, among others"] == 4
