"""Precision, for every class: oracles in float32, float32 masters of bfloat16 and float16, torch's default dtype."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import conformance
import pytest
import torch
from conservation import everywhere, mean_residuals, moments
from oracles import AdamSOracle, AverageOracle, RadiusOracle, ScapeOracle, SeparateOracle, TagcOracle
from oracles.common import as_float64
from pairs import name_of
from problems import gradients, replicas, step, weights
from sim import Ranks
from simple import local_steps, separate_adam
from slow_rows import in_turn
from table import CASES, FORMS, Case, by_name, projecting
from torch import Tensor, nn
from twins import TwinRanks, start_separate_adam_alike

import compopt
from compopt.separate.matrices import MatrixSource
from compopt.separate.projections import plan_projection

LARGE = [(260, 512), (80,), (260, 512)]  # of 133,120 elements: two ranks own, and select in, one each
SMALL = [(64, 64), (80,), (64, 64)]  # for Triton's interpreter
COMPRESS = [True, False, True]
HYPER = dict(lr=3e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
STEPS = 8
CLOSE = 1e-4  # relative; ten times that in parameters, where AdamW makes a step of every rounded zero


def radius(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    return RadiusOracle(start, len(optimizers), compress=COMPRESS, **HYPER, **options)


def adams(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    return AdamSOracle(start, len(optimizers), **HYPER, **options)


def scape(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    known = {name: value for name, value in options.items() if name != "sharded"}
    owner = [len(optimizers) - 1, 0, 0]  # ranks select in the order of the bucket, which is reversed
    return ScapeOracle(start, len(optimizers), owner=owner, compress=COMPRESS, **HYPER, **known)


def tagc(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    known = {name: value for name, value in options.items() if name not in ("codec", "sketch_ratio")}
    parts = [[(n, 0, start[n].numel())] for n in (2, 0)]
    shards = parts if len(optimizers) == 2 else [parts[0] + parts[1]]
    return TagcOracle(start, len(optimizers), shards=shards, compress=COMPRESS, **HYPER, **known)


def separate(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    kind, ratio = options.get("projection", "gaussian"), options["ratio"]
    plan = [
        plan_projection(w.shape, False, ratio, kind, "auto") if c else None
        for w, c in zip(start, COMPRESS, strict=True)
    ]
    assert not any(q and q.transposes for q in plan) or start[0].shape[0] < start[0].shape[1]
    (bucket,) = optimizers[0]._buckets

    def random(t: int, i: int) -> Tensor:
        drawn = MatrixSource().draw(bucket, [2, 1, 0], plan[::-1], 0, t)[2 - i].double()
        return drawn if kind == "gaussian" else drawn * plan[i].r ** 0.5  # the oracle divides by r

    known = {name: value for name, value in options.items() if name not in ("ratio", "projection")}
    if kind != "gaussian":
        known["ef_beta"] = 0.0
    return SeparateOracle([turned(w) for w in start], len(optimizers), adamw, random, compress=COMPRESS, **known)


def tracked(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    kept = dict(HYPER, rank=options["rank"], dense_steps=0)
    wanted = as_float64(start)
    ranks = TwinRanks(separate_adam, lambda p: separate_adam.SeparateAdam(p, **kept), wanted, len(optimizers))
    start_separate_adam_alike(ranks, optimizers[0])
    pairs = zip(ranks.twins, ranks.all_params, strict=True)
    ranks.error = [[twin.e.get(p, torch.zeros_like(p)) for p in params] for twin, params in pairs]
    return ranks


def average(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    return AverageOracle(start, len(optimizers), sgd, **options)


def local(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    return TwinRanks(
        local_steps, lambda p: local_steps.LocalSteps(adamw(p), options["every"]), as_float64(start), len(optimizers)
    )


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **HYPER)


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    """Shows how large gradients are; AdamW's step is the same whatever they are clipped to."""
    return torch.optim.SGD(params, lr=3e-2, momentum=0.9)


def turned(x: Tensor) -> Tensor:
    """As the oracle of SEPARATE has it: what is projected comes last. The smaller side of a matrix is."""
    return x.t().contiguous() if x.dim() == 2 and x.shape[0] < x.shape[1] else x


TRACKED = projecting("tracked")
RUNS: dict[str, tuple[type, Callable, dict[str, Any]]] = {
    "Radius": (compopt.RadiusAdamW, radius, dict(density=0.4, interval=4, dense_steps=2)),
    "Radius, few": (compopt.RadiusAdamW, radius, dict(density=0.01, interval=3, dense_steps=0, max_grad_norm=100.0)),
    "AdamS": (compopt.AdamS, adams, {}),
    "SCAPE": (compopt.ScapeAdamS, scape, dict(density=0.1, dense_steps=1, density_steps=2)),
    "SCAPE, few": (
        compopt.ScapeAdamS,
        scape,
        dict(density=0.01, density_steps=0),
    ),
    "TAGC": (compopt.TagcAdamW, tagc, dict(density=0.1, dense_steps=1)),
    "TAGC, few": (compopt.TagcAdamW, tagc, dict(density=0.01, codec="sketch", sketch_ratio=10)),
    "SEPARATE": (compopt.SeparateAdam, separate, dict(projection="gaussian", ratio=8, dense_steps=1)),
    "SEPARATE, tracked": (compopt.SeparateAdam, tracked, TRACKED),
    "Separate": (compopt.Separate, separate, dict(projection="gaussian", ratio=16, reset_interval=5)),
    "Average": (compopt.Average, average, dict(max_grad_norm=100.0)),
    "Average, rounded": (compopt.Average, average, dict(payload_dtype=torch.bfloat16)),
    "Local steps": (compopt.LocalSteps, local, dict(every=3, growth_steps=0, payload_dtype=None)),
}
BASES = {compopt.Separate: adamw, compopt.Average: sgd, compopt.LocalSteps: adamw}


def test_every_class_is_run():
    assert {cls for cls, *_ in RUNS.values()} == {case.cls for case in CASES}


def far(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Relative distance over all tensors."""
    pairs = [(a.detach().double().reshape(-1), b.detach().reshape(-1)) for a, b in zip(got, wanted, strict=True)]
    size = max(float(torch.cat([b for _, b in pairs]).norm()), 1e-30)
    return float(torch.cat([a - b for a, b in pairs]).norm()) / size


@pytest.mark.parametrize(("name", "ranks"), in_turn(RUNS, (2, 1)))
def test_equals_the_oracle(name, backend, ranks):
    cls, oracle_of, options = RUNS[name]
    if "sharded" in options and ranks > 1:
        pytest.skip("ranks select by what they own, not by their own momenta")
    if backend == "triton" and (name not in ("Radius", "SCAPE", "AdamS")):
        pytest.skip("its interpreter takes seconds; one run of each kernel is enough")
    base_of = BASES.get(cls)
    start = weights(SMALL if backend == "triton" else LARGE, torch.float32)
    world, params, optimizers = replicas(
        ranks,
        start,
        lambda p, process_group: cls(
            base_of(p) if base_of else p, process_group=process_group, **{**({} if base_of else HYPER), **options}
        ),
    )
    oracle, turn = oracle_of(start, optimizers, options), turned if oracle_of is separate else (lambda x: x)
    for t in range(5 if backend == "triton" else STEPS):
        grads = gradients(ranks, t, [w.shape for w in start], torch.float32)
        step(world, params, optimizers, grads)
        oracle.step([[turn(g) for g in local_part] for local_part in grads])
        moved, wanted = ([p.detach().double() - w.double() for p, w in zip(now, map(turn, start), strict=True)]
                         for now in (map(turn, params[-1]), oracle.params))  # fmt: skip
        assert far(moved, wanted) < 10 * CLOSE, f"parameters after step {t + 1}, {optimizers[0].stats.phase}"
    if hasattr(oracle, "m"):
        assert far(moments(optimizers), oracle.m) < CLOSE
    held = getattr(oracle, "residual", getattr(oracle, "error", None))
    if held:
        mean = [torch.stack(each).mean(0) for each in zip(*held, strict=True)]
        assert far([turn(r) for r in mean_residuals(optimizers)], mean) < CLOSE
        for optimizer, local_part in zip(optimizers, held, strict=True) if "sharded" not in options else ():
            entries = [optimizer.state[p] for p in everywhere(optimizer)]
            got = [turn(entry["residual"]) if "residual" in entry else torch.zeros_like(r)
                   for entry, r in zip(entries, local_part, strict=True)]  # fmt: skip
            assert far(got, local_part) < CLOSE


# of the others, parameters of low precision are the inner optimizer's, or refused
WITH_MASTERS = [case for case in CASES + FORMS if case.keeps_masters]


def train(case, ranks, steps: int, dtype) -> None:
    """Gradients of low precision, as real ones; every rank's own."""
    for _ in range(steps):
        for rank, model, _ in ranks:
            generator = torch.Generator().manual_seed(10 * ranks.steps + rank)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        ranks.world.step(ranks.optimizers)
        ranks.steps += 1


def masters(optimizer) -> list[torch.Tensor]:
    return [value for entry in optimizer.state.values() for name, value in entry.items() if name == "master"]


@pytest.mark.parametrize(("case", "dtype"), in_turn(WITH_MASTERS, (torch.bfloat16, torch.float16)), ids=name_of)
def test_a_clamp_between_steps_holds(case, dtype):
    """In place, by ``.data``, which no version counter sees, and by load_state_dict: the next step begins there."""
    ranks = conformance.make_ranks(case, 2, dtype)
    train(case, ranks, 3, dtype)
    kept = [m.clone() for m in masters(ranks.optimizers[0])]
    assert any(not torch.equal(m, m.to(dtype).float()) for m in kept), "masters know more than parameters"
    ways = {
        "in place": lambda model: [p.detach().clamp_(-0.02, 0.02) for p in model.parameters()],
        "data": lambda model: [p.data.mul_(p.data.abs() > 0.01) for p in model.parameters()],
        "loaded": lambda model: model.load_state_dict({k: v * 0 + 3 for k, v in model.state_dict().items()}),
    }
    for change in ways.values():
        for model in ranks.models:
            with torch.no_grad():
                change(model)
        before = [p.detach().clone() for p in ranks.models[0].parameters()]
        train(case, ranks, 1, dtype)
        ranks.assert_replicas_equal()
        for p, old in zip(ranks.models[0].parameters(), before, strict=True):
            assert float((p.detach().float() - old.float()).abs().max()) < 0.1, "a step of lr 1e-2 at most"


@pytest.mark.parametrize("case", WITH_MASTERS, ids=name_of)
def test_what_was_not_touched_keeps_its_digits(case):
    runs = []
    for touched in (False, True):
        ranks = conformance.make_ranks(case, 1, torch.bfloat16, lr=1e-5)
        train(case, ranks, 2, torch.bfloat16)
        weight = ranks.models[0].up.weight
        if touched:
            weight.data[0, 0] = 2.0
        train(case, ranks, 2, torch.bfloat16)
        runs.append(ranks.optimizers[0].state[weight]["master"].view(-1))
    plain, changed = runs
    assert abs(float(changed[0]) - 2.0) < 1e-2
    assert torch.equal(plain[1:], changed[1:])
    assert not torch.equal(plain, plain.bfloat16().float())


SHAPES = [(64, 80), (80,), (400, 500)]


def trained(case: Case, dtype: torch.dtype, **options) -> list[torch.Tensor]:
    """Ends of one process's run on gradients that bfloat16 holds exactly."""
    params = [nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in SHAPES]
    optimizer = case.new(params, **{"lr": 1e-3, "weight_decay": 0.1, **case.lossless, **options})
    for t in range(5):
        random = torch.Generator().manual_seed(t)
        for p in params:
            p.grad = torch.randn(p.shape, generator=random).bfloat16().to(dtype)
        optimizer.step()
    return [optimizer.state[p]["master"] if dtype == torch.bfloat16 else p.detach() for p in params]


@pytest.mark.parametrize("case", [c for c in CASES + FORMS if not c.build], ids=lambda case: case.name)
@pytest.mark.parametrize("maximize", [False, True])
def test_masters_take_the_steps_of_float32(case, maximize):
    ours, wanted = (trained(case, dtype, maximize=maximize) for dtype in (torch.bfloat16, torch.float32))
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.view(b.shape), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", ["AdamS", "RadiusAdamW"])
def test_a_step_does_not_depend_on_how_a_tensor_lies_in_memory(name, maximize):
    ends = []
    for turned in (False, True):
        random = torch.Generator().manual_seed(0)
        w = torch.randn(80, 70, generator=random)
        p = nn.Parameter(w.t().contiguous().t() if turned else w)
        optimizer = by_name[name].make([p], lr=0.1, maximize=maximize)
        for _ in range(7):
            p.grad = torch.randn(80, 70, generator=random)
            optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


ROOT = Path(compopt.__file__).parent
MAKES = {"empty", "zeros", "ones", "full", "tensor", "scalar_tensor", "arange", "randn", "rand", "randint", "randperm",
         "eye", "linspace", "logspace", "empty_strided", "frombuffer", "normal"}  # fmt: skip


def without(option: str, path: Path) -> list[str]:
    """The calls of torch in a file that make a tensor and do not say its dtype, or its device.

    Parameters of modules take both from the user's defaults, as torch's own do.
    """
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    torchs = [c for c in calls if isinstance(c.func, ast.Attribute) and getattr(c.func.value, "id", "") == "torch"]
    made = [c for c in torchs if c.func.attr in MAKES and not {option, "out"} & {k.arg for k in c.keywords}]
    if option == "device":  # parameters; and what is always on the host
        made = [c for c in made if "get_default_dtype" not in ast.unparse(c) and c.func.attr != "frombuffer"]
    return [f"{path.name}:{c.lineno}: {ast.unparse(c)}" for c in made]


@pytest.mark.parametrize("option", ["dtype", "device"])
def test_every_allocation_says_its(option):
    files = [*ROOT.rglob("*.py"), *(ROOT.parent / "kernels").rglob("*.py")]
    assert [call for path in files for call in without(option, path)] == []


@contextmanager
def default(of_tensors: torch.dtype | str) -> Iterator[None]:
    """Make this dtype, or device, the default."""
    change = torch.set_default_device if isinstance(of_tensors, str) else torch.set_default_dtype
    change(of_tensors)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


class Net(nn.Module):
    """A matrix that is cut into several shards, one with an odd number of elements, a vector; float32 for good."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(150, 130), (65, 67), (33,)]
        self.all = nn.ParameterList(nn.Parameter(torch.randn(s, dtype=torch.float32)) for s in shapes)


def loss(model: Net, rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1 + 10 * step + rank)
    pairs = [(p, torch.randn(p.shape, generator=random, dtype=torch.float32, device="cpu")) for p in model.all]
    return sum(((p - target) ** 2).sum() for p, target in pairs)


@pytest.mark.parametrize(
    ("case", "changed"), in_turn(CASES + FORMS, (torch.float64, torch.bfloat16, "meta")), ids=name_of
)
def test_it_may_change_between_construction_and_steps(monkeypatch, case, changed):
    """TAGC's pass wrote marks of float32 into memory for another dtype: parameters that do not move, or worse.

    What is on the meta device is lost, and an accelerator would refuse to pin it.
    """
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    expected, ours = (Ranks(2, Net, case.make) for _ in range(2))
    expected.train(loss, 5)
    expected.world.consolidate(expected.optimizers)
    with default(changed):
        ours.train(loss, 5)
        ours.world.consolidate(ours.optimizers)
        state = ours.optimizers[0].state_dict()
        ours.optimizers[0].load_state_dict(state)
    for p, q in zip(ours.models[0].parameters(), expected.models[0].parameters(), strict=True):
        assert torch.equal(p, q)
    theirs = expected.optimizers[0].state_dict()
    for key, entry in state["state"].items():
        for name, value in entry.items():
            assert not isinstance(value, torch.Tensor) or (
                value.dtype == theirs["state"][key][name].dtype and torch.equal(value, theirs["state"][key][name])
            ), name
