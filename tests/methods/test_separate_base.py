"""Separate as a wrapper: any base, its groups and schedulers; clipping and adaptation; checkpoints, copies, pickles."""

from __future__ import annotations

import copy

import pytest
import torch
from conformance import through_a_file
from problems import replicas, step
from sim import Ranks
from torch import nn
from torch.utils._pytree import tree_flatten

import compopt
from compopt.separate.projections import plan_projection


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.idle = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def loss(model: Net, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(x) - x.flip(1)).square().mean()


def wrapped(base, size: int = 2, **options) -> Ranks:
    settings = {"projection": "gaussian", "ratio": 8, **options}
    return Ranks(
        size, Net, lambda ps, process_group: compopt.Separate(base(ps), process_group=process_group, **settings)
    )


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def test_our_own_adams_as_a_base_does_not_average_again():
    """It has a process group of its own at hand, and must not use it."""

    def make(params, process_group):
        base = compopt.AdamS(params, lr=1e-2, process_group=process_group)
        return compopt.Separate(base, projection="gaussian", ratio=8, process_group=process_group)

    ranks = Ranks(2, Net, make)
    history = ranks.train(loss, 30)
    ranks.assert_replicas_equal()
    assert history[-1] < history[0]
    assert all(optimizer.base.comm.size == 1 and optimizer.comm.size == 2 for optimizer in ranks.optimizers)


def test_groups_are_the_bases_own_and_schedulers_act_on_it():
    model = Net()
    base = torch.optim.SGD(
        [{"params": model.up.parameters(), "compopt_ratio": 4}, {"params": model.down.parameters()}],
        lr=1.0,
        momentum=0.9,
    )
    optimizer = compopt.Separate(base, projection="gaussian", ratio=16, simulate=True)
    assert optimizer.param_groups is base.param_groups and isinstance(optimizer, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    loss(model, 0, 0).backward()
    optimizer.step()
    schedule.step()
    assert base.param_groups[0]["lr"] == schedule.get_last_lr()[0] != 1.0
    sizes = [plan_projection(model.up.weight.shape, False, ratio, "gaussian", "auto") for ratio in (4, 16)]
    of_down = plan_projection(model.down.weight.shape, False, 16, "gaussian", "auto")
    biases = model.up.bias.numel() + model.down.bias.numel()
    payload = sum(q.m * q.r for q in (sizes[0], of_down)) + biases
    assert 0 < optimizer.stats.bytes_sent - 4 * payload < 500  # and the header, and the control words

    extra = nn.Parameter(torch.ones(64, 64))
    optimizer.add_param_group({"params": [extra], "compopt_compress": False})
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    assert base.param_groups[2]["params"] == [extra] and not torch.equal(extra, torch.ones(64, 64))
    assert "residual" not in optimizer.state[extra]

    late = nn.Parameter(torch.ones(64, 64))
    base.add_param_group({"params": [late]})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert not torch.equal(late, torch.ones(64, 64)) and optimizer.state[late]["residual"].any()


def assert_same(a: dict, b: dict) -> None:
    """Two state dicts, to the bit."""
    (left, one), (right, other) = tree_flatten(a), tree_flatten(b)
    assert one == other
    for x, y in zip(left, right, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


class Watching(torch.optim.SGD):
    """Notes the gradients it is given."""

    def step(self, closure=None):
        self.given = [p.grad for group in self.param_groups for p in group["params"]]
        if getattr(self, "fails", False):
            raise OSError("the base failed")
        return super().step(closure)


def test_grad_is_the_average_for_the_base_and_the_local_gradient_for_everybody_else():
    ranks = wrapped(lambda ps: Watching(ps, lr=0.1))
    ranks.backward(loss)
    before = [[p.grad for p in model.parameters()] for model in ranks.models]
    values = [[None if g is None else g.clone() for g in local] for local in before]
    ranks.world.step(ranks.optimizers)
    for model, local, kept, optimizer in zip(ranks.models, before, values, ranks.optimizers, strict=True):
        for p, grad, value in zip(model.parameters(), local, kept, strict=True):
            assert p.grad is grad and (grad is None or torch.equal(grad, value))
        names = [name for name, _ in model.named_parameters()]
        for name, given, grad in zip(names, optimizer.base.given, local, strict=True):
            assert (given is None) == name.startswith("idle") and (given is None or given is not grad)
    for a, b in zip(*(optimizer.base.given for optimizer in ranks.optimizers), strict=True):
        assert a is b is None or torch.equal(a, b)

    ranks.backward(loss)
    before = [p.grad for p in ranks.models[0].parameters()]
    for optimizer in ranks.optimizers:
        optimizer.base.fails = True
    with pytest.raises(OSError, match="the base failed"):
        ranks.world.step(ranks.optimizers)
    assert all(p.grad is grad for p, grad in zip(ranks.models[0].parameters(), before, strict=True))


def test_a_bad_gradient_on_one_rank_never_reaches_the_base():
    ranks = wrapped(lambda ps: Watching(ps, lr=0.1, momentum=0.9))
    ranks.train(loss, 2)
    ranks.backward(loss)
    before = [copy.deepcopy(o.state_dict()) for o in ranks.optimizers]
    weights = [p.clone() for p in ranks.models[0].parameters()]
    ranks.models[1].up.weight.grad[3, 5] = float("nan")
    for optimizer in ranks.optimizers:
        optimizer.base.fails = True  # if it were called
    ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[0].stats.phase == "skipped"
    assert all(torch.equal(p, w) for p, w in zip(ranks.models[0].parameters(), weights, strict=True))
    for optimizer, old in zip(ranks.optimizers, before, strict=True):
        optimizer.base.fails = False
        assert_same(optimizer.state_dict(), old)


def test_what_cannot_be_wrapped_is_refused():
    p = nn.Parameter(torch.zeros(64, 64))
    with pytest.raises(TypeError, match="torch optimizer or a list of them, got a list with a Parameter"):
        compopt.Separate([p])
    with pytest.raises(TypeError, match="LBFGS"):
        compopt.Separate(torch.optim.LBFGS([p]))
    with pytest.raises(ValueError, match="compresses by itself"):
        compopt.Separate(compopt.RadiusAdamW([p]))


@pytest.mark.parametrize("ef_beta", ["auto", 0.95])
def test_adaptive_moves_columns_to_where_they_are_missed_and_ranks_agree(ef_beta):
    """An error much larger than the gradient makes one tensor's reconstruction bad: it gets more columns."""
    ranks = wrapped(adamw, ratio=8, adaptive=True, adapt_interval=3, ef_beta=ef_beta, reset_interval=None)
    ranks.train(loss, 2)
    for optimizer, model in zip(ranks.optimizers, ranks.models, strict=True):
        optimizer.state[model.up.weight]["residual"].normal_(generator=torch.Generator().manual_seed(0))
    assert ranks.optimizers[0]._wrapper_groups[0]["adapted"] is None
    ranks.train(loss, 1)
    for optimizer in ranks.optimizers:
        (up, beta), _, (down, other_beta), *_ = optimizer._wrapper_groups[0]["adapted"]
        assert up < 8 < down and up + down == pytest.approx(16)
        if ef_beta == "auto":
            assert beta == other_beta == "auto"
        else:
            assert 0.90 <= beta < 0.95 < other_beta <= 0.99
    assert ranks.optimizers[0]._wrapper_groups[0]["adapted"] == ranks.optimizers[1]._wrapper_groups[0]["adapted"]
    for _ in range(7):
        ranks.train(loss, 1)
        ranks.assert_replicas_equal()


def test_an_adapted_ef_beta_stays_above_the_bound_of_its_projection():
    """With three columns of 64 that is 0.91: below it errors grow from step to step."""
    ranks = wrapped(adamw, ratio=32, adaptive=True, adapt_interval=3, ef_beta=0.95, reset_interval=None)
    ranks.train(loss, 2)
    for optimizer, model in zip(ranks.optimizers, ranks.models, strict=True):
        optimizer.state[model.up.weight]["residual"].normal_(generator=torch.Generator().manual_seed(0))
    ranks.train(loss, 1)
    for optimizer in ranks.optimizers:
        (ratio, beta), *_ = optimizer._wrapper_groups[0]["adapted"]
        projection = plan_projection(torch.Size((96, 64)), False, ratio, "gaussian", 0.95)
        assert ratio < 32 and beta == projection.least_beta > 0.9


@pytest.mark.parametrize("scale", [2**57, 2**-75])
def test_what_is_adapted_does_not_depend_on_the_scale_of_gradients(scale):
    """Though their squares, or products with their reconstructions, are no float32 numbers."""

    def adapt(scale: float) -> list[float]:
        options = dict(projection="gaussian", ratio=4.0, ef_beta=0.95, adaptive=True, adapt_interval=2, dense_steps=0)
        params = [torch.nn.Parameter(torch.zeros(64, 80)) for _ in range(2)]
        optimizer = compopt.SeparateAdam(params, simulate=True, **options)
        for t in range(2):
            for i, p in enumerate(params):
                g = torch.randn(p.shape, generator=torch.Generator().manual_seed(2 * t + i))
                p.grad = (g if i else g + 3 * g.mean(0)) * scale
            optimizer.step()
        return [number for pair in optimizer.option_groups[0]["adapted"] for number in pair]

    assert adapt(scale) == pytest.approx(adapt(1.0), rel=1e-5)


@pytest.mark.parametrize(("name", "value"), [("rank", 8.0), ("ratio", float("inf"))])
def test_a_size_of_another_kind_is_refused(name, value):
    options = {} if name == "rank" else {"projection": "gaussian"}
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        compopt.SeparateAdam([torch.nn.Parameter(torch.zeros(64, 64))], **options, **{name: value})


def test_a_checkpoint_carries_both_and_continues_to_the_bit():
    whole = wrapped(adamw, adaptive=True, adapt_interval=4)
    whole.train(loss, 6)
    saved = [(copy.deepcopy(m.state_dict()), through_a_file(o.state_dict())) for _, m, o in whole]
    whole.train(loss, 6)
    resumed = wrapped(adamw, adaptive=True, adapt_interval=4)
    resumed.steps = 6
    for (weights, state), (_, model, optimizer) in zip(saved, resumed, strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups is optimizer.base.param_groups
    resumed.train(loss, 6)
    for a, b in zip(whole.optimizers, resumed.optimizers, strict=True):
        assert_same(a.state_dict(), b.state_dict())
    for p, q in zip(whole.models[1].parameters(), resumed.models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_of_the_base_alone_is_taken_and_one_that_does_not_fit_is_refused_whole():
    model, wrapped_model = Net(), Net()
    plain = adamw(model.parameters())
    loss(model, 0, 0).backward()
    plain.step()
    optimizer = compopt.Separate(adamw(wrapped_model.parameters()), projection="gaussian", ratio=8)
    optimizer.load_state_dict(through_a_file(plain.state_dict()))
    assert torch.equal(
        optimizer.base.state[wrapped_model.up.weight]["exp_avg"], plain.state[model.up.weight]["exp_avg"]
    )

    loss(wrapped_model, 0, 1).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    broken["state"][0]["residual"] = torch.zeros(3)
    broken["state"][0]["base"]["exp_avg"] += 1
    with pytest.raises(ValueError, match="residual"):
        optimizer.load_state_dict(broken)
    assert_same(optimizer.state_dict(), before)


class Around(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead does, and has no state of a tensor without a gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["slow"] = p.detach().clone()


def matrices(*numbers: int) -> list[list[torch.Tensor | None]]:
    """Gradients of two ranks and two tensors, or None for 0."""
    return [[torch.full((4, 4), float(n + rank)) if n else None for n in numbers] for rank in range(2)]


def is_changed_by_saving(params, optimizers) -> bool:
    before = [p.detach().clone() for p in params[0]]
    counts = [group.get("step") for group in optimizers[0].param_groups]
    optimizers[0].state_dict()
    is_same = all(map(torch.equal, before, params[0]))
    return not is_same or counts != [group.get("step") for group in optimizers[0].param_groups]


@pytest.mark.filterwarnings("ignore:this state dict of")
@pytest.mark.parametrize("wrap", [compopt.Average, compopt.LocalSteps])
def test_a_state_dict_steps_no_optimizer_inside_the_base(wrap):
    """It asks a copy of the base for the state of the second tensor, which never had a gradient."""

    def make(params, process_group):
        return wrap(Around(torch.optim.SGD(params, lr=0.1)), process_group=process_group)

    world, params, optimizers = replicas(2, [torch.zeros(4, 4), torch.zeros(4, 4)], make)
    step(world, params, optimizers, matrices(1, 0))
    assert not is_changed_by_saving(params, optimizers)


@pytest.mark.filterwarnings("ignore:this state dict of")
def test_a_state_dict_does_not_step_a_base_of_this_package():
    """Of a tensor that is trained since the last step, which was skipped, the base has no state yet."""

    def make(params, process_group):
        params[1].requires_grad_(False)
        return compopt.Average(compopt.AdamS(params, lr=0.1), process_group=process_group)

    world, params, optimizers = replicas(2, [torch.zeros(4, 4), torch.zeros(4, 4)], make)
    step(world, params, optimizers, matrices(1, 0))
    for own in params:
        own[1].requires_grad_(True)
    skipped = matrices(2, 3)
    skipped[1][0][0, 0] = torch.inf
    step(world, params, optimizers, skipped)
    assert optimizers[0].stats.phase == "skipped"
    for own, grads in zip(params, matrices(4, 5), strict=True):
        own[0].grad, own[1].grad = grads
    assert not is_changed_by_saving(params, optimizers)
    assert optimizers[0].base.stats.applied_steps == 1
    step(world, params, optimizers, matrices(6, 7))
    assert all(map(torch.equal, *params)) and bool(params[0][1].any())
