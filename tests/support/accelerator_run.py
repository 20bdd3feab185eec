"""Every class on the device of fake_device.py, beside the same run on the CPU: a process of its own, which prints JSON.

    python tests/support/accelerator_run.py [CASE ...]

For each case: what is not as on the CPU, operators of two devices, messages from host memory, where the host looked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fake_device
import sim
import torch
from conformance import Small, data, snapshot
from fake_device import Device, OnDevice
from table import CASES, DERIVED, FORMS, Case, by_name
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from compopt._wire.requests import CommunicationError
from compopt.separate import projections

CPU = torch.device("cpu")
SIZE, STEPS, STEADY = 2, 10, 3  # ranks; steps of a run; how many of the last are counted


def also(name: str, form: str, **options) -> Case:
    return dataclasses.replace(by_name[name], compressed=options, form=form)


MORE = [
    also("RadiusAdamW", "int8, clipped", density=0.4, dense_steps=2, payload_dtype="int8", max_grad_norm=0.5),
    also("ScapeAdamS", "large", density=0.1, density_steps=2),
    also("SeparateAdam", "tracked", rank=4, dense_steps=2, max_grad_norm=0.5),
    also("SeparateAdam", "residual in int8", rank=4, dense_steps=2, residual_dtype="int8", max_grad_norm=0.5),
    also("RadiusAdamW", "residual in int8", density=0.4, interval=3, dense_steps=2, residual_dtype="int8"),
    also("SeparateAdam", "adaptive", projection="gaussian", ratio=8, dense_steps=0, adaptive=True, adapt_interval=4),
    also("TagcAdamW", "large", density=0.1, dense_steps=2),
    also("TagcAdamW", "odd", density=0.1, dense_steps=2, payload_dtype="bfloat16", max_grad_norm=0.5),
    also("TagcAdamW", "int2", density=0.1, dense_steps=2, payload_dtype="bfloat16", update_dtype="int2"),
    also("TagcAdamW", "sketch", density=0.1, dense_steps=2, codec="sketch"),
    also("LocalSteps", "int4, fragments", every=4, fragments=2, delay=1, dense_steps=2, payload_dtype="int4"),
    also("LocalSteps", "fused", every=2, dense_steps=2, growth_steps=0, max_grad_norm=0.5, fused=True),
    also("LocalSteps", "int2", every=4, dense_steps=2, payload_dtype="int2"),
    also("LocalSteps", "offloaded", every=4, fragments=2, delay=1, payload_dtype="int2", offload="outer"),
]
RUNS = {case.name: case for case in CASES + FORMS + DERIVED + MORE}
OFFLOADED = {"RadiusAdamW": "residual", "ScapeAdamS": "all", "ScapeAdamS, sharded": "all"}


class Large(Small):
    """With one matrix more, of whose gradients no two are alike: which of these is taken is the device's choice.

    All tensors have gradients.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__(dtype)
        self.wide = nn.Linear(256, 320, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = (torch.linspace(0.5, 1.5, n, dtype=x.dtype, device=x.device) for n in (256, 320))
        wide = self.wide(x.repeat(1, 4) * inner) * outer
        return super().forward(x) + wide.view(-1, 64, 5).mean(2) + 0.1 * self.idle(x)[:, :64]


class Odd(Small):
    """With matrices of no whole bytes of mask, of which one has a gradient in few rows; all have some."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__(dtype)
        self.more = nn.Linear(67, 65, dtype=dtype)
        self.table = nn.Parameter(torch.randn(901, 67).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.embedding((x[:, 0].abs() * 100).long(), self.table)
        return super().forward(x) + self.more(rows)[:, :64] + 0.1 * self.idle(x)[:, :64]


# models of more than 16384 elements a rank, in which a threshold is looked for; others are Small
MODELS = {"ScapeAdamS, large": Large, "TagcAdamW, large": Large, "TagcAdamW, odd": Odd}


def norms_of_devices(xs: list[Tensor], reproducible: bool = False) -> Tensor:
    """|x|^2 as devices find it, on the CPU too, which else adds up in an order of its own."""
    return torch.stack(torch._foreach_norm(list(xs), 2, dtype=torch.float64)).square()


def placed(model: nn.Module, device: torch.device) -> nn.Module:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(p.detach().to(device)))
    return model


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = data(rank, step, model.scale.dtype).to(model.scale.device)
    return (model(x) - x.flip(1)).square().mean()


def on_host(tensors: object) -> object:
    return tree_map_only(OnDevice, lambda x: x.held.clone(), tensors)


running = Device.running


class Pair:
    """The same ranks on the CPU and on the device; whatever is done to both has to have the same result."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32, **options):
        self.case, self.dtype, self.options = case, dtype, options
        self.differs: list[str] = []
        self.hosts: Counter[str] = Counter()  # collectives that were given host memory
        self.both = [self.made(device) for device in (CPU, torch.device(fake_device.NAME, 0))]

    def made(self, device: torch.device) -> sim.Ranks:
        model = MODELS.get(self.case.name, Small)
        return sim.Ranks(
            SIZE, lambda: placed(model(self.dtype), device), functools.partial(self.case.make, **self.options)
        )

    def do(self, what: str, action: Callable[[sim.Ranks], object]) -> object:
        (wanted, state), (results, there) = (self._after(action, ranks) for ranks in self.both)
        self.differs += [] if same(wanted, results) else [f"{what}: what it returns"]
        self.differs += [] if same(state, there) else [f"{what}: its state"]
        return results

    def _after(self, action: Callable[[sim.Ranks], object], ranks: sim.Ranks) -> tuple[object, object]:
        """On the host: what the action returns, and all that it may have changed."""
        if ranks is self.both[0]:
            with _disable_current_modes():
                return action(ranks), [snapshot(optimizer) for optimizer in ranks.optimizers]
        with self._watched():
            result = action(ranks)
        accesses = running().accesses.copy()
        state = on_host([snapshot(optimizer) for optimizer in ranks.optimizers])
        running().accesses = accesses  # without what was looked at here
        return on_host(result), state

    @contextlib.contextmanager
    def _watched(self):
        ask = sim.World.ask

        def watched(world: sim.World, number: int, rank: int, request) -> None:
            if not isinstance(request.tensor, OnDevice):
                self.hosts[f"{type(request).__name__}, {tuple(request.tensor.shape)}, {request.tensor.dtype}"] += 1
            ask(world, number, rank, request)

        sim.World.ask = watched
        try:
            yield
        finally:
            sim.World.ask = ask


def same(a: object, b: object) -> bool:
    """To the bit."""
    (a, spec), (b, other) = tree_flatten(a), tree_flatten(b)
    return spec == other and all(
        x.dtype == y.dtype and torch.equal(x.nan_to_num(7), y.nan_to_num(7)) if isinstance(x, Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def step(ranks: sim.Ranks) -> object:
    ranks.train(loss, 1)
    return [optimizer.stats.phase for optimizer in ranks.optimizers]


def without(ranks: sim.Ranks) -> object:
    """A step in which no rank has a gradient of one matrix."""
    ranks.backward(loss)
    for model in ranks.models:
        model.up.weight.grad = None
    ranks.world.step(ranks.optimizers)
    return [optimizer.stats.phase for optimizer in ranks.optimizers]


def scaled(ranks: sim.Ranks) -> object:
    """A step under a GradScaler, which tells the optimizer what it has found."""
    ranks.backward(loss)
    for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * 8
        optimizer.grad_scale, optimizer.found_inf = (torch.full_like(model.scale[0].detach(), x) for x in (8.0, 0.0))
    ranks.world.step(ranks.optimizers)
    return [optimizer.stats.phase for optimizer in ranks.optimizers]


def lost(ranks: sim.Ranks, number: int = 0) -> object:
    """A collective of the step fails: it raises, if it has one, and is as if it had not been tried."""
    before = on_host([snapshot(optimizer) for optimizer in ranks.optimizers])
    ranks.backward(loss)
    ranks.world.failing_everywhere = {ranks.world.comms[0].started + number}
    try:
        ranks.world.step(ranks.optimizers)
    except CommunicationError:
        return same(before, on_host([snapshot(optimizer) for optimizer in ranks.optimizers]))
    finally:
        ranks.world.failing_everywhere = set()
    return "no collective"


def read_reports(ranks: sim.Ranks) -> object:
    """Return what a user may ask after a step."""
    return [(o.stats.grad_norm, o.stats.residual_norm(), o.stats.bytes_sent) for o in ranks.optimizers]


def alone(ranks: sim.Ranks) -> object:
    """The second rank is gone, the first goes on with all that it has."""
    ranks.shrink([0])
    return step(ranks)


def spoiled(ranks: sim.Ranks, number: float) -> object:
    """The second rank's parameters, or their norm, are not finite where a round ends: it takes the other's average."""
    ranks.models[1].up.weight.data[3, 5] = ranks.models[1].down.weight.data[3, 5] = number
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        phases = [step(ranks) for _ in range(4)]
    finite = all(bool(p.isfinite().all()) for model in ranks.models for p in model.parameters())
    return {"phases": phases, "finite": finite, "rounds": [optimizer.stats.round for optimizer in ranks.optimizers]}


def refused(ranks: sim.Ranks) -> object:
    """A gradient of one rank is not finite: nothing of the step is kept, on any."""
    before = on_host([snapshot(optimizer) for optimizer in ranks.optimizers])
    ranks.backward(loss)
    ranks.models[1].up.weight.grad[3, 5] = torch.inf
    ranks.world.step(ranks.optimizers)
    kept = same(before, on_host([snapshot(optimizer) for optimizer in ranks.optimizers]))
    stats = ranks.optimizers[0].stats
    return {"phase": stats.phase, "reason": stats.reason, "kept": kept}


def saved(ranks: sim.Ranks) -> list[dict]:
    ranks.world.consolidate(ranks.optimizers)
    return on_host([optimizer.state_dict() for optimizer in ranks.optimizers])


def loaded(pair: Pair, ranks: sim.Ranks, state: list[dict]) -> None:
    """As from a file that was read into host memory, by new optimizers of parameters like those."""
    new = pair.made(ranks.models[0].scale.device)
    for mine, old, optimizer, held in zip(new.models, ranks.models, new.optimizers, state, strict=True):
        for p, q in zip(mine.parameters(), old.parameters(), strict=True):
            p.data.copy_(q.detach())
        optimizer.load_state_dict(held)
    ranks.models, ranks.optimizers, ranks.world = new.models, new.optimizers, new.world


def run(case: Case) -> dict[str, object]:
    looks: dict[str, dict[str, int]] = {}

    def note(name: str) -> None:
        looks[name] = dict(running().accesses)
        running().accesses.clear()

    mended = None
    with Device() as device:
        pair = Pair(case)
        note("making")
        phases = [pair.do(f"step {k + 1}", step) for k in range(STEPS - STEADY)]
        note("first steps")
        for k in reversed(range(STEADY)):
            phases.append(pair.do(f"step {STEPS - k}", step))
            note(f"steady step {STEADY - k}, {phases[-1][0]}")
        if case.cls is by_name["TagcAdamW"].cls:
            pair.do("a step without a gradient", without)
            pair.do("parameters are not gathered", functools.partial(lost, number=3))
            note("absent, lost")
        if "every" in case.compressed:
            if "fragments" not in case.compressed:  # of each, one of the two numbers: its norm is finite, and is taken
                pair.do("parameters whose norm is not finite", functools.partial(spoiled, number=1.5e19))
            mended = pair.do("parameters that are not finite", functools.partial(spoiled, number=torch.nan))
            note("spoiled")
        skipped, failed = pair.do("a step that is refused", refused), pair.do("a step that fails", lost)
        note("refused")
        pair.do("a step under a scaler", scaled)
        note("scaled")
        pair.do("what is told", read_reports)
        note("told")
        states = pair.do("saving", saved)
        note("saving")
        pair.do("loading", lambda ranks: loaded(pair, ranks, states))
        note("loading")
        for k in range(2):
            pair.do(f"step {k + 1} after loading", step)
        note("steps after loading")
        pair.do("a rank is lost", alone)
        note("recovery")
        differs, hosts = pair.differs, pair.hosts
        if case.name in OFFLOADED:
            pair = Pair(case, torch.bfloat16, offload=OFFLOADED[case.name])
            for k in range(STEPS):
                pair.do(f"offloaded step {k + 1}", step)
            pair.do("saving what is offloaded", saved)
            note("offloaded")
            differs, hosts = differs + pair.differs, hosts + pair.hosts
            bucket = pair.both[1].optimizers[0]._buckets[0]
            differs += [f"{n} is not pinned" for n in bucket.offload.names if not bucket.flat[n].is_pinned()]
    return {
        "differs": differs,
        "mixed": dict(device.mixed),
        "hosts": dict(hosts),
        "looks": looks,
        "phases": sorted({phase for both in phases for phase in both}),
        "refused": skipped,
        "failed": failed,
        "mended": mended,
    }


def run_all(names: Iterable[str] = ()) -> dict[str, dict]:
    """Run these cases, or all; return what was found of each."""
    fake_device.register()
    os.environ["COMPOPT_BACKEND"] = "torch"
    torch.set_num_threads(1)
    for module in [module for name, module in sys.modules.items() if name.startswith("compopt")]:
        if hasattr(module, "stacked_squared_norms"):
            module.stacked_squared_norms = norms_of_devices
    projections._orthonormalize_each = projections.orthonormalize_by_cholesky
    results = {}
    for name in names or RUNS:
        try:
            results[name] = run(RUNS[name])
        except Exception:
            results[name] = {"raised": traceback.format_exc()}
    return results


if __name__ == "__main__":
    print(json.dumps(run_all(sys.argv[1:])))
