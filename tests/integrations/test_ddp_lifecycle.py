"""DistributedDataParallel over a program's life: optimizers that follow each other, copies, two DDPs, join(). Gloo."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from ddp_models import Net, apart, batch, plain, radius, vector
from ranks import FOREVER, catch_message, run_ranks
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks as forward_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._state import buckets


def successors(rank: int) -> dict:
    buckets.BUCKET_BYTES = 80_000  # several buckets
    gc.disable()
    results = {}
    torch.manual_seed(0)
    model = DDP(Net())
    first = radius(model.parameters())
    for step in range(4):
        plain(model, first, step, None)
    model(batch(4)).square().mean().backward()  # what this starts is given up
    kept = [first]
    if rank == 0:
        kept.append(kept)  # on rank 0 only the collector would find it
    ref = weakref.ref(first)
    second = compopt.ScapeAdamS(model.parameters(), lr=1e-3, density=0.2, density_steps=1)
    results["replaced"] = catch_message(RuntimeError, first.step)
    del first, kept
    results["gone"] = ref() is None
    second.zero_grad()
    for step in range(5, 9):
        plain(model, second, step, None)
    results["early"] = second.stats.early_buckets > 0
    results["apart"] = apart(model)

    single = dist.new_group([rank], use_local_synchronization=True)
    results["other ranks"] = catch_message(ValueError, lambda: radius(model.parameters(), process_group=single))
    third = radius(model.parameters())
    compopt.attach(model, second)
    plain(model, second, 9, None)
    results["taken back"] = catch_message(RuntimeError, third.step)
    results["apart"] = max(results["apart"], apart(model))

    gone = [weakref.ref(second), weakref.ref(third)]
    del second, third
    results["freed"] = [ref() is None for ref in gone]
    gc.enable()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plain(model, sgd, 10, None)
    results["apart"] = max(results["apart"], apart(model))
    return results


def test_an_optimizer_made_later_takes_over_at_once():
    for rank, results in enumerate(run_ranks(successors, 2)):
        assert results["gone"] == (rank == 1)
        assert "RadiusAdamW was replaced" in results["replaced"] and "compopt.attach" in results["replaced"]
        assert results["early"] and results["apart"] == 0
        assert "process_group of the optimizer has ranks" in results["other ranks"]
        assert "was replaced" in results["taken back"]
        assert all(results["freed"])


def two_ddps(rank: int) -> list:
    """A critic that is first used after four steps; and the distance from torch's AdamW."""
    torch.set_default_dtype(torch.float64)
    ends, hooks = [], []
    for make in (torch.optim.AdamW, lambda ps, lr: radius(ps, lr=lr, density=1.0)):
        torch.manual_seed(0)
        actor, critic = Net(), Net()
        optimizer = make([*actor.parameters(), *critic.parameters()], lr=1e-3)
        actor, critic = DDP(actor), DDP(critic)
        for step in range(8):
            loss = actor(batch(step)).square().mean()
            if step >= 4:
                loss = loss + (critic(batch(step, 1)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([vector(actor), vector(critic)]))
        hooks.append(len(forward_hooks))
    averaged_by_us = [len(model._comm_hooks) for model in (actor, critic)]
    return [float((ends[0] - ends[1]).abs().max()), averaged_by_us, *hooks]


def test_one_optimizer_over_two_ddps():
    for distance, averaged_by_us, *hooks in run_ranks(two_ddps, 2):
        assert distance < 1e-9
        assert averaged_by_us == [1, 1]
        assert hooks == [0, 0]


class Ignoring(nn.Module):
    """A DDP is told not to average ``own``."""

    def __init__(self):
        super().__init__()
        self.net, self.own = Net(), nn.Linear(96, 96)
        DDP._set_params_and_buffers_to_ignore_for_model(self, ["own.weight", "own.bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.net(x))


def copies(rank: int) -> dict:
    results = {}
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = radius(model.parameters())
    plain(model, optimizer, 0, None)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    copied = copy.deepcopy(model)
    module = copy.deepcopy(model.module)
    results["same"] = all(torch.equal(vector(model), vector(other)) for other in (loaded, copied, module))
    plain(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1), 1, None)  # the copy averages as any DDP does
    other = radius(copied.parameters())
    plain(copied, other, 1, None)
    plain(model, optimizer, 1, None)
    results["apart"] = max(map(apart, (model, loaded, copied)))

    ignoring = DDP(Ignoring())
    optimizer = radius(ignoring.module.net.parameters())
    plain(ignoring, optimizer, 0, None)
    results["ignored"] = apart(ignoring.module.net)

    def in_join(model: nn.Module, step: int) -> None:
        with model.join():
            model(batch(step)).square().mean().backward()

    combined = DDP(Net())
    optimizer = radius(combined.parameters())
    results["join at first"] = catch_message(RuntimeError, lambda: in_join(combined, 0))
    combined = DDP(Net())
    optimizer = radius(combined.parameters())
    plain(combined, optimizer, 0, None)
    results["join later"] = catch_message(RuntimeError, lambda: in_join(combined, 1))
    return results


def test_copies_ignored_parameters_and_join():
    for results in run_ranks(copies, 2):
        assert results["same"] and results["apart"] == 0
        assert results["ignored"] == 0
        for when in ("join at first", "join later"):
            assert "write `with Join([ddp_model, optimizer]):`" in results[when]


def wrapped_anew(rank: int, keeps: bool) -> dict:
    """The model gets another DDP, while the first one is alive (``keeps``) or gone."""
    buckets.BUCKET_BYTES = 80_000
    torch.manual_seed(0)
    net = Net()
    replaced, optimizer = radius(net.parameters()), radius(net.parameters())
    compopt.attach(first := DDP(net), replaced)
    compopt.attach(first, optimizer)
    for step in range(4):
        plain(first, optimizer, step, None)
    if not keeps:
        del first
        gc.collect()
    second = DDP(net)
    for step in range(4, 8):
        optimizer.zero_grad()
        second(batch(step)).square().mean().backward()
        optimizer.step()
    gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
    theirs = gradient.clone()
    dist.broadcast(theirs, 0)
    return {
        "averaged by DDP": torch.equal(gradient, theirs),
        "early": optimizer.stats.early_buckets,
        "resent": optimizer.stats.resent,
        "apart": apart(second),
        "replaced": catch_message(RuntimeError, replaced.step),
    }


@pytest.mark.parametrize("keeps", [True, False])
def test_a_model_that_is_wrapped_anew_is_averaged_by_its_optimizer(keeps):
    for rank, results in enumerate(run_ranks(wrapped_anew, 2, keeps)):
        assert results["averaged by DDP"] == (rank == 0)  # rank 0 compares with itself
        assert results["early"] and not results["resent"] and results["apart"] == 0
        assert "was replaced" in results["replaced"]


def group_made_anew(rank: int, file: str) -> dict:
    """The process group is destroyed and made anew while the first model and its optimizer are alive."""
    torch.manual_seed(0)
    net = Net()
    first, old = DDP(net), radius(net.parameters())
    plain(first, old, 0, None)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=FOREVER)
    optimizer = radius(net.parameters())
    refused = catch_message(RuntimeError, lambda: first(batch(1)))
    second = DDP(net)
    for step in range(1, 6):  # the fifth step is a sparse one
        plain(second, optimizer, step, None)
    return {
        "refused": refused,
        "apart": apart(second),
        "share": optimizer.stats.bytes_sent / optimizer.stats.bytes_dense,
    }


def test_an_optimizer_made_after_the_process_group_was_made_anew(tmp_path):
    """It asked for the ranks of the first model's group: a KeyError."""
    for results in run_ranks(group_made_anew, 2, str(tmp_path / "second")):
        assert "the process group of this DistributedDataParallel was destroyed" in results["refused"]
        assert results["apart"] == 0 and results["share"] < 0.6


def stepped_without(rank: int, ddp_is: str) -> bool:
    """Return whether gradients are the rank's own in a DDP around a model that was trained without it before."""
    torch.manual_seed(0)
    net = Net()
    model = None if ddp_is == "made later" else DDP(net)
    first = DDP(net) if ddp_is == "the second" else net
    optimizer = radius(net.parameters())
    plain(first, optimizer, 0, None)
    model = model or DDP(net)
    net(batch(rank)).square().mean().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    optimizer.zero_grad()
    model(batch(rank)).square().mean().backward()
    return not forward_hooks and all(torch.equal(p.grad, e) for p, e in zip(net.parameters(), expected, strict=True))


@pytest.mark.parametrize("ddp_is", ["made later", "made before", "the second"])
def test_an_optimizer_that_has_stepped_without_a_ddp_finds_it_later(ddp_is):
    """DDP went on averaging, whole, beside the optimizer's own exchange."""
    assert run_ranks(stepped_without, 2, ddp_is) == [True, True]


def chain(depth: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), chain(depth - 1)) if depth else nn.Sequential(nn.Linear(4, 4))


@pytest.fixture
def no_other_watches():
    """Optimizers of earlier tests in this process may not be collected yet, and watch as well."""
    others = dict(forward_hooks)
    forward_hooks.clear()
    yield
    forward_hooks.update(others)


def test_every_module_is_looked_into_once(monkeypatch, no_other_watches):
    """Without a DDP, and where the optimizer never steps: no walk through all modules at every submodule's forward."""
    model, looked = chain(30), []
    modules = nn.Module.modules
    monkeypatch.setattr(nn.Module, "modules", lambda module: looked.append(module) or modules(module))
    optimizer = radius(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 4))
    assert looked == [model]
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not forward_hooks  # no DDP is waited for any more
    optimizer = radius(model.parameters())
    assert len(forward_hooks) == 1
    del optimizer
    assert not forward_hooks


def test_a_parameter_that_waits_for_its_gradient_keeps_the_watch(no_other_watches):
    used, waiting = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = radius([*used.parameters(), *waiting.parameters()])
    used(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert forward_hooks
    waiting(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not forward_hooks
