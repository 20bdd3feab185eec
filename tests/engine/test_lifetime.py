"""An optimizer's life: no reference cycles, and wrappers that users put around a model and an optimizer."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from conformance import TRACKED
from pairs import name_of
from ranks import run_ranks
from sim import World
from slow_rows import in_turn
from table import CASES, FORMS, Case, by_name
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from compopt._state import buckets


@pytest.fixture
def no_collector():
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch.compile, which leaves a cycle with its frames
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def several_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 10_000)


def trained(case: Case, comm: object, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 3))
    optimizer = case.make(model.parameters(), process_group=comm)
    optimizer.simulate = True
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 80)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def begun_in_backward(optimizer) -> None:
    engine = optimizer._engine
    finished = [(p, bucket) for bucket in engine.buckets for p in bucket.params]
    engine.overlap.start_ready(finished, engine.buckets, engine.algorithm, engine.comm)


@pytest.mark.usefixtures("several_buckets")
@pytest.mark.parametrize("case", [*CASES, *FORMS, TRACKED], ids=lambda case: case.name)
def test_a_deleted_optimizer_is_gone_at_once(case, no_collector):
    """Also its model, with masks on the wire, with a bucket begun in backward, and whoever holds its statistics."""
    model, optimizer = trained(case, World(1).comms[0], steps=6)
    optimizer.state_dict()
    if getattr(optimizer, "averages_gradients", True):  # a local step sends nothing in backward
        begun_in_backward(optimizer)
        assert optimizer._engine.overlap.schedule.exchanges
    stats, gone = optimizer.stats, [weakref.ref(optimizer), weakref.ref(model), weakref.ref(model[0].weight)]
    del optimizer
    assert gone[0]() is None
    del model
    assert [ref() for ref in gone] == [None] * 3
    with pytest.raises(ReferenceError, match="optimizer that was deleted"):
        stats.residual_norm()


@pytest.mark.usefixtures("several_buckets")
def test_a_failed_step_leaves_no_cycle(no_collector):
    model, optimizer = trained(CASES[0], World(1).comms[0], steps=1)
    model[0].weight.grad = torch.zeros(80, 80).to_sparse()
    with pytest.raises(TypeError):
        optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None


@pytest.mark.slow
@pytest.mark.usefixtures("several_buckets")
def test_the_collector_may_run_while_the_package_is_imported():
    """It calls a function of ours, which may only be there once all that it reads is."""
    code = "import gc, torch.distributed; gc.set_threshold(30); import compopt"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class Net(nn.Module):
    """Three 72 x 72 layers, run again in backward where ``again`` says so."""

    def __init__(self, again: bool = False):
        super().__init__()
        self.again, self.layers = again, nn.ModuleList(nn.Linear(72, 72) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)).tanh()
        return x


def make(again: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(again)


def batch(step: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(8, 72, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def wrapped(rank: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Return how far each way of running the model takes it from plain DDP, for each class."""
    results = {}
    for case in (by_name[name] for name in names):
        far = {}
        plain = DDP(make())
        train(plain, case.make(plain.parameters()), range(7))
        ways = {
            "activation checkpointing": DDP(make(again=True)),
            "activation checkpointing, static graph": DDP(make(again=True), static_graph=True),
            "static graph": DDP(make(), static_graph=True),
        }
        if case is CASES[0]:  # it is the model that is compiled; what differs between classes is behind the hook
            ways["compiled around DDP"] = torch.compile(DDP(make()), backend="aot_eager")
            ways["compiled inside DDP"] = DDP(torch.compile(make(), backend="aot_eager"))
        for name, model in ways.items():
            optimizer = case.make(model.parameters())
            train(model, optimizer, range(7))
            far[name] = float((vector(model) - vector(plain)).abs().max())
        theirs = vector(plain).clone()
        dist.broadcast(theirs, 0)
        far["replicas"] = float((vector(plain) - theirs).abs().max())
        results[case.name] = far
    return results


MAIN = ["RadiusAdamW", "LocalSteps"]  # the others with `make slow`
every_part = pytest.mark.parametrize(
    "names",
    [MAIN, pytest.param([case.name for case in CASES if case.name not in MAIN], marks=pytest.mark.slow)],
    ids=["main", "others"],
)


@pytest.mark.slow
@every_part
def test_compile_activation_checkpointing_and_static_graph(names):
    for results in run_ranks(wrapped, 2, names):
        for name, far in results.items():
            assert far.pop("replicas") == 0, name
            assert len(far) == (5 if name == CASES[0].name else 3)
            assert all(distance < 1e-5 for distance in far.values()), (name, far)


SCHEDULERS = {
    "cosine": lambda o: CosineAnnealingLR(o, 6),
    "warm-up, then cosine": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 6)], [2]),
    "one cycle": lambda o: OneCycleLR(o, 1e-2, total_steps=8, cycle_momentum=False),
    "one cycle with momentum": lambda o: OneCycleLR(o, 1e-2, total_steps=8),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, 1e-4, anneal_epochs=3),
}


@pytest.mark.parametrize(("name", "case"), in_turn(SCHEDULERS, CASES), ids=name_of)
def test_schedulers_set_the_rate_of_the_step_that_follows(case: Case, name: str):
    """The same rates set by hand give the same parameters; the scheduler's own state goes into a checkpoint."""
    model, by_hand = make(), make()
    optimizer, other = case.make(model.parameters()), case.make(by_hand.parameters())
    scheduler = SCHEDULERS[name](optimizer)
    for step in range(7):
        for group, from_scheduler in zip(other.param_groups, optimizer.param_groups, strict=True):
            group.update(lr=from_scheduler["lr"], betas=from_scheduler["betas"])
        train(model, optimizer, range(step, step + 1))
        train(by_hand, other, range(step, step + 1))
        scheduler.step(1.0) if name == "plateau" else scheduler.step()
    assert torch.equal(vector(model), vector(by_hand))
    assert pickle.loads(pickle.dumps(scheduler.state_dict())) == scheduler.state_dict()
    assert optimizer.param_groups[0]["lr"] != case.lr


@every
def test_ema_follows_the_parameters(case: Case):
    model = make()
    optimizer = case.make(model.parameters())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    wanted = vector(model).clone()
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        ema.update_parameters(model)
        wanted = vector(model).clone() if step == 0 else wanted.lerp(vector(model), 0.5)
    torch.testing.assert_close(vector(ema.module), wanted)
    assert not torch.equal(vector(ema.module), vector(model))


def scaled_and_autocast(rank: int, names: list[str]) -> dict[str, list]:
    """A script for one GradScaler, unchanged; rank 1 overflows in step 4. Then FSDP's scaler; then autocast."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    results = {}
    scalers = {
        "GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
        "ShardedGradScaler": lambda: ShardedGradScaler("cpu", init_scale=1024.0),
    }
    cases = [by_name[name] for name in names]
    for name, make_scaler in scalers.items():
        for case in cases:
            model = DDP(make())
            optimizer, scaler = case.make(model.parameters()), make_scaler()
            phases, residuals = [], []
            for step in range(7):
                optimizer.zero_grad()
                loss = model(batch(step)).square().mean()
                scaler.scale(loss * (float("inf") if step == 4 and rank == 1 else 1.0)).backward()
                residuals.append(optimizer.stats.residual_norm())
                if step % 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                phases.append(optimizer.stats.phase == "skipped")
                if step == 4:
                    assert optimizer.stats.residual_norm() == residuals[-1]
            mine = vector(model)
            theirs = mine.clone()
            dist.broadcast(theirs, 0)
            results[f"{name} {case.name}"] = [phases, torch.equal(mine, theirs), bool(mine.isfinite().all())]
    for case in cases:
        model = DDP(make())
        optimizer = case.make(model.parameters())
        losses = []
        for step in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(step % 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        theirs = vector(model).clone()
        dist.broadcast(theirs, 0)
        results[f"autocast {case.name}"] = [losses[-1] < 0.7 * losses[0], torch.equal(vector(model), theirs)]
    return results


@every_part
def test_scalers_skip_together_and_autocast_trains(names):
    for results in run_ranks(scaled_and_autocast, 2, names):
        for name, (first, *rest) in results.items():
            assert all(rest), name
            assert first is True if "autocast" in name else first == [step == 4 for step in range(7)], name
