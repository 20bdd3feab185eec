"""A step on simulated and real ranks: clipping, finiteness, dense steps, a GradScaler, torch.compile, determinism."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import warnings
from collections.abc import Callable

import bits_cases as all_cases
import bits_run
import check_same_bits as check
import conformance
import pytest
import torch
from conformance import AVERAGING, Small, loss, make_ranks
from deep import Deep
from pairs import name_of
from problems import gradients, replicas, weights
from problems import step as take_step
from ranks import run_ranks
from sim import Ranks
from slow_rows import in_turn, slow_but
from table import CASES, FORMS, projecting
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from compopt._ops.norms import clip_factor, reproducible_squared_norm, squared_norm, stacked_squared_norms
from compopt._state.masks import Mask
from compopt.scape.scape_masks import density_at

INT8 = {"payload_dtype": torch.int8}
TRACKED = projecting("tracked")
LIMIT = 1e-2


def around(params, **options):
    return compopt.Separate(torch.optim.AdamW(params, lr=1e-3), **options)


MAKES = {
    "Radius": (compopt.RadiusAdamW, dict(density=0.3, interval=3)),
    "SCAPE": (compopt.ScapeAdamS, dict(density_steps=0)),
    "SCAPE, as printed": (compopt.ScapeAdamS, dict(density_steps=0, clip="scape")),
    "SCAPE, sharded": (compopt.ScapeAdamS, dict(density_steps=0, sharded=True)),
    "gaussian": (compopt.SeparateAdam, dict(projection="gaussian", ratio=8)),
    "tracked, int8": (compopt.SeparateAdam, TRACKED | INT8),
    "around AdamW": (around, TRACKED),
    "Average": (lambda params, **o: compopt.Average(torch.optim.AdamW(params, lr=1e-3), **o), INT8),
    "TAGC": (compopt.TagcAdamW, dict(density=0.1)),
}


def on_two(rank: int) -> dict[str, tuple[int, int, float, str]]:
    """Of each: buckets, those that left early, the norm and a digest of the parameters."""
    from compopt._state import buckets

    buckets.BUCKET_BYTES, buckets.JOINED_PART_ON_CPU = 33_300, 0  # two layers
    warnings.simplefilter("error")
    results = {}
    for name, (make, options) in MAKES.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(Deep().layers)
        optimizer = make(model.parameters(), max_grad_norm=LIMIT, **options)
        for number in range(4):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * number + rank))
            (model(x) - x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        stats = optimizer.stats
        results[name] = stats.buckets, stats.early_buckets, stats.grad_norm, hashlib.sha256(bits).hexdigest()
    return results


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_two, 2)


@pytest.mark.parametrize("name", MAKES)
def test_clipping_keeps_communication_behind_backward(ranks, name):
    buckets, overlapped, norm, _ = ranks[0][name]
    assert buckets > 2 and overlapped == buckets - 1
    assert norm > LIMIT, "nothing was clipped"
    assert ranks[0][name] == ranks[1][name], "ranks clip by other factors"


SHAPES = [(64, 160), (160, 96), (30,)]


def squares(tensors: list[Tensor]) -> float:
    return sum(float(t.square().sum()) for t in tensors)


@pytest.mark.parametrize("ratio", [8, 16, 64])
def test_of_a_gaussian_projection_it_is_right_on_average(ratio):
    """Over many matrices; of a reconstruction it would be sqrt(1 + w) times as much, 8 times for ratio 64."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = compopt.SeparateAdam(params, lr=0.0, projection="gaussian", ratio=ratio, ef_beta=1.0, simulate=True)
    results = []
    for p, g in zip(params, gradients(1, 0, SHAPES, torch.float32)[0], strict=True):
        p.grad = g
    for _ in range(100):
        optimizer.step()
        results.append(optimizer.stats.grad_norm**2)
    assert sum(results) / len(results) == pytest.approx(squares([p.grad for p in params]), rel=0.05)


def test_of_orthonormal_columns_it_is_what_arrives_and_never_more_than_what_is_averaged():
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    base = torch.optim.SGD(params, lr=1.0)
    optimizer = compopt.Separate(base, simulate=True, **TRACKED)
    for t in range(5):
        before = [p.detach().clone() for p in params]
        residuals = [optimizer.state[p].get("residual", torch.zeros_like(p)).clone() for p in params]
        for p, g in zip(params, gradients(1, t, SHAPES, torch.float32)[0], strict=True):
            p.grad = g
        optimizer.step()
        arrived = [w - p.detach() for p, w in zip(params, before, strict=True)]
        norm = optimizer.stats.grad_norm
        assert norm == pytest.approx(math.sqrt(squares(arrived)), rel=1e-4)
        assert norm < math.sqrt(squares([p.grad + e for p, e in zip(params, residuals, strict=True)]))


@pytest.mark.parametrize("payload_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("projection", ["gaussian", "tracked"])
def test_an_outlier_that_is_clipped_is_not_owed(projection, payload_dtype):
    """One gradient a thousand times as large: what is applied and held back afterwards is as if it had been clipped."""
    options = projecting(projection, lr=1e-2, reset_interval=None, payload_dtype=payload_dtype)
    world, params, optimizers = replicas(
        2, weights(SHAPES, torch.float32), lambda ps, **o: compopt.SeparateAdam(ps, max_grad_norm=150.0, **options, **o)
    )
    norms = []
    for t in range(8):
        grads = gradients(2, t, SHAPES, torch.float32)
        for local in grads:
            for g in local:
                g.mul_(1000.0 if t == 4 else 1.0)
        take_step(world, params, optimizers, grads)
        norms.append(optimizers[0].stats.grad_norm)
        residuals = optimizers[0].stats.residual_norm()
        assert residuals < 3000, f"step {t + 1}"
    assert norms[4] > 1e4 and max(norms[5:]) < 1000, norms
    assert clip_factor(norms[4], 150.0) < 0.02


@pytest.mark.parametrize("payload_dtype", [None, torch.int8], ids=str)
def test_what_is_not_applied_of_a_clipped_gradient_is_owed(payload_dtype):
    """applied + owed' = f (mean g) + owed, for a projection that keeps all of the error; also in dense steps after it,
    which send it as far as the clip lets them."""
    options = projecting("tracked", lr=1e-2, reset_interval=None, payload_dtype=payload_dtype)
    world, params, optimizers = replicas(
        2, weights(SHAPES, torch.float32), lambda ps, **o: compopt.SeparateAdam(ps, max_grad_norm=20.0, **options, **o)
    )
    states = [[optimizer.state[p] for p in local[:2]] for optimizer, local in zip(optimizers, params, strict=True)]
    for t in range(9):
        if t == 5:
            for optimizer in optimizers:
                optimizer.param_groups[0]["dense_steps"] = 100
        m = [entry["exp_avg"].clone() for entry in states[0]]
        residuals = [(a["residual"] + b["residual"]) / 2 for a, b in zip(*states, strict=True)]
        grads = gradients(2, t, SHAPES, torch.float32)
        take_step(world, params, optimizers, grads)
        f = clip_factor(optimizers[0].stats.grad_norm, 20.0)
        assert f < 0.8
        for i in range(2):
            applied = (states[0][i]["exp_avg"] - 0.9 * m[i]) / (1 - 0.9)
            after = (states[0][i]["residual"] + states[1][i]["residual"]) / 2
            came = f * (grads[0][i] + grads[1][i]) / 2 + residuals[i]
            torch.testing.assert_close(applied + after, came, rtol=1e-4, atol=1e-3)
            assert t < 5 or after.norm() < (1 - f / 2) * residuals[i].norm()


FILLS = {  # what is written where, and whether such a step is skipped
    "inf": ((5, 7), math.inf, True),
    "-inf": ((5, 7), -math.inf, True),
    "nan": ((0, 0), math.nan, True),
    "one of 1e25": ((5, 7), 1e25, True),
    "one of 1e20": ((5, 7), -1e20, True),
    "one of 1e18": ((5, 7), 1e18, False),
    "many of 1e18, together": ((slice(None), slice(None)), 1e18, True),
    "many of 1e16": ((slice(None), slice(None)), -1e16, False),
}


@pytest.mark.parametrize(("case", "backend"), in_turn(AVERAGING, ("torch", "native")), ids=name_of)
def test_the_same_gradients_are_too_large_on_every_back_end(case, backend, monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    for at in (1, 4):  # dense, sparse
        bad = conformance.make_ranks(case, 2)
        bad.train(conformance.loss, at)
        for name, (where, value, skipped) in FILLS.items():
            ranks = bad  # which a step that is skipped leaves as they were
            if not skipped:
                ranks = conformance.make_ranks(case, 2)
                ranks.train(conformance.loss, at)
            ranks.backward(conformance.loss)
            before = ranks.models[0].up.weight.detach().clone()
            ranks.models[1].up.weight.grad[where] = value
            ranks.world.step(ranks.optimizers)
            assert (ranks.optimizers[0].stats.phase == "skipped") == skipped, name
            assert torch.equal(ranks.models[0].up.weight, before) == skipped, name
            ranks.assert_replicas_equal()


def test_kernels_have_the_same_rule(monkeypatch):
    """By what they write to the header; whole steps take the interpreter minutes."""
    pytest.importorskip("triton")
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU then")
    p = torch.nn.Parameter(torch.zeros(64, 96))
    (bucket,) = (optimizer := compopt.RadiusAdamW([p]))._buckets
    for name, (where, value, skipped) in FILLS.items():
        p.grad = torch.ones_like(p)
        p.grad[where] = value
        header = optimizer.ops.encode(bucket, bucket.grads(), Mask(bucket)).header
        assert header.isnan().tolist() == [skipped], name
    assert optimizer.ops.encode(bucket, [None], Mask(bucket)).header.tolist() == [0.0]


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_gradients_in_float16_may_have_a_norm_that_float16_cannot_hold(bad):
    """In a rank's own step, and of the average; some gradients are float32."""
    # norms of 71,000, and float16 ends at 65,504
    start = [torch.zeros(256, 300, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    grads = [[torch.full_like(p, 256 + rank) for p in start] for rank in range(2)]

    def local(params, process_group):
        sgd = torch.optim.SGD(params, lr=1.0)
        options = dict(every=4, growth_steps=0, max_grad_norm=1.0)
        return compopt.LocalSteps(sgd, **options, process_group=process_group)

    def separate(params, process_group):
        sgd = torch.optim.SGD(params, lr=1.0)
        return compopt.Separate(sgd, max_grad_norm=1.0, process_group=process_group)

    if bad is not None:
        grads[1][0][3, 4] = bad
    for make in (local, separate):
        world, params, optimizers = replicas(2, start, make)
        take_step(world, params, optimizers, grads)
        skipped = [optimizer.stats.phase == "skipped" for optimizer in optimizers]
        assert skipped == [bad is not None and make is separate, bad is not None]
        for own, skips in zip(params, skipped, strict=True):
            norm = torch.stack([p.detach().float().norm() for p in own]).norm()
            assert float(norm) == 0 if skips else float(norm) == pytest.approx(1, rel=1e-2)


WARMED = [
    case
    for case in CASES
    if "dense_steps" in inspect.signature(case.cls).parameters and case.cls is not compopt.LocalSteps
]
classes = pytest.mark.parametrize("case", WARMED, ids=lambda case: case.name)


def phases(case, steps: int = 12, **options) -> list[str]:
    ranks, results = (
        Ranks(1, Small, lambda ps, process_group: case.make(ps, process_group=process_group, **options)),
        [],
    )
    for _ in range(steps):
        ranks.train(loss, 1)
        results.append(ranks.optimizers[0].stats.phase)
    return results


def test_every_class_that_compresses_has_it():
    assert {case.cls.__name__ for case in WARMED} >= {
        "RadiusAdamW",
        "ScapeAdamS",
        "SeparateAdam",
        "TagcAdamW",
        "Separate",
    }


@classes
def test_so_many_steps_are_dense(case):
    ramp = {"density_steps": 0} if "density_steps" in case.compressed else {}
    counted = phases(case, dense_steps=6, **ramp)
    assert 5 <= counted.count("dense") <= 7 and "dense" not in counted[7:]


@classes
def test_what_is_no_number_of_steps_is_refused(case):
    params = [nn.Parameter(torch.zeros(64, 64))]
    names = ["dense_steps", *(name for name in ("density_steps",) if name in case.compressed)]
    for name in names:
        for bad in (-1, 2.5, 0.15, "half", float("nan"), True):
            with pytest.raises(ValueError, match=f"{name} must be a number of steps >= 0, got"):
                case.make(params, **{name: bad})


def test_scapes_density_arrives_early_in_a_run():
    p = nn.Parameter(torch.zeros(64, 64))
    (bucket,) = compopt.ScapeAdamS([p], density=0.1)._buckets
    assert density_at(bucket, 0) == 1 and density_at(bucket, 101) == 0.1
    assert 0.1 < density_at(bucket, 50) < 0.5


def test_defaults_are_the_papers_or_none():
    p = nn.Parameter(torch.zeros(64, 64))
    for cls, steps in ((compopt.RadiusAdamW, 1000), (compopt.TagcAdamW, 0)):
        assert cls([p]).param_groups[0]["dense_steps"] == steps


SCALE = 1024.0
MAKERS = {
    "SeparateAdam": lambda params: compopt.SeparateAdam(params, lr=1e-3, payload_dtype=None, simulate=True),
    "Average": lambda params: compopt.Average(torch.optim.AdamW(params, lr=1e-3), simulate=True),
    "LocalSteps": lambda params: compopt.LocalSteps(torch.optim.AdamW(params, lr=1e-3), 3, simulate=True),
}


class Run:
    """A model whose embedding may have sparse gradients, and its scaled steps."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(100, 64), nn.Linear(64, 64)
        self.optimizer = MAKERS[name]([*self.table.parameters(), *self.linear.parameters()])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def backward(self, factor: float = 1.0) -> float:
        """Compute scaled gradients; return the norm of the unscaled ones."""
        self.optimizer.zero_grad()
        loss = self.linear(self.table(torch.arange(8))).square().mean() * factor
        self.scaler.scale(loss).backward()
        grads = [p.grad.to_dense() for p in (*self.table.parameters(), *self.linear.parameters())]
        return float(torch.nn.utils.get_total_norm(grads)) / SCALE

    def step(self, factor: float = 1.0) -> float:
        """A step; how far its norm is from that of the gradients, relative to this."""
        norm = self.backward(factor)
        self.scaler.step(self.optimizer)
        return abs(self.optimizer.stats.grad_norm / norm - 1)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_step_that_raises_leaves_no_scale(name, unscaled):
    run = Run(name)
    assert run.step() < 1e-5
    run.scaler.update()
    run.table.sparse = True
    run.backward()
    if unscaled:
        run.scaler.unscale_(run.optimizer)
    with pytest.raises(TypeError, match="sparse"):
        run.scaler.step(run.optimizer)
    run.scaler.update()
    run.table.sparse = False
    assert run.step() < 1e-5


@pytest.mark.parametrize("name", MAKERS)
def test_too_many_skipped_steps_leave_no_scale(name):
    run = Run(name)
    run.optimizer.max_skipped = 1
    run.backward(float("inf"))
    with pytest.raises(FloatingPointError, match="1 steps in a row"):
        run.scaler.step(run.optimizer)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    assert run.step() < 1e-5


@pytest.mark.parametrize("name", MAKERS)
def test_without_any_gradient_there_is_nothing_to_unscale(name):
    run = Run(name)
    run.step()
    run.scaler.update()
    run.optimizer.zero_grad()
    run.optimizer.grad_scale, run.optimizer.found_inf = torch.tensor(SCALE), torch.tensor(0.0)
    run.optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_no_skipped_step_is_tolerated_and_a_good_one_does_not_raise(name):
    run = Run(name)
    run.optimizer.max_skipped = 0
    assert run.step() < 1e-5


COMPILED_MAKES = {
    "Radius": lambda ps: compopt.RadiusAdamW(ps, lr=1e-2, density=0.3, dense_steps=1, interval=2, simulate=True),
    "tracked": lambda ps: compopt.SeparateAdam(ps, lr=1e-2, rank=4, dense_steps=0, payload_dtype=None, simulate=True),
    "around SGD": lambda ps: compopt.Separate(
        torch.optim.SGD(ps, lr=1e-2), projection="gaussian", ratio=8, simulate=True
    ),
}


def trained(make: Callable, around: Callable[[Callable], Callable]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    optimizer = make(model.parameters())
    step = around(optimizer.step)
    for number in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        step()
        optimizer.zero_grad()
    assert optimizer.stats.applied_steps == 4
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("how", ["step", "a function that calls it"])
@pytest.mark.parametrize("name", COMPILED_MAKES)
def test_nothing_of_a_step_is_compiled(name, how):
    def around(step: Callable) -> Callable:
        def calls() -> torch.Tensor:
            scale = torch.ones(3) * 2
            step()
            return scale + 1

        return torch.compile(step if how == "step" else calls, backend="eager")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = trained(COMPILED_MAKES[name], lambda step: step), trained(COMPILED_MAKES[name], around)
    for p, q in zip(plain, compiled, strict=True):
        assert torch.equal(p, q)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= (0 if how == "step" else 2), f"{graphs} pieces of step() were compiled"


# torch.use_deterministic_algorithms' own list of what raises, the operators without a gradient; of cumsum floats only.
REFUSED = {"kthvalue", "histc", "bincount", "put", "put_", "median", "resize_", "nll_loss2d", "ctc_loss"}
OF_FLOATS = {"cumsum", "cumsum_", "cumprod"}


class Called(TorchDispatchMode):
    """Which of these operators were called, and on what."""

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        floats = any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args)
        if name in REFUSED or (name in OF_FLOATS and floats):
            self.found.add(name)
        return func(*args, **kwargs or {})


# of a class that has no such option the line of the table, once
ROWS = [
    (payload_dtype, case)
    for case in [*CASES, *FORMS]
    for payload_dtype in (None, "bfloat16", "int8")
    if payload_dtype is None or ("payload_dtype" in case.bad and not case.sharded)
]


@pytest.mark.parametrize(
    ("payload_dtype", "case"),
    slow_but(lambda payload_dtype, case: payload_dtype == "int8" or case in CASES[::2], ROWS),
    ids=name_of,
)
def test_a_step_calls_nothing_that_determinism_refuses(case, payload_dtype, monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")
    options = {"payload_dtype": payload_dtype} if payload_dtype else {}
    ranks = make_ranks(case, 2, **options)
    called = Called()
    with called:
        ranks.train(loss, 6)
    assert not called.found


def test_selection_by_a_sample_calls_nothing_that_determinism_refuses():
    from compopt._ops.operations import Ops

    x, called = torch.randn(200_000, generator=torch.Generator().manual_seed(0)), Called()
    with called:
        Ops().top_k_positions(x, 2000)
    assert not called.found


@pytest.mark.parametrize(("projection", "uses_qr"), [("gaussian", False), ("tracked", True)])
def test_ranks_compare_what_their_devices_compute_where_they_compute_it(projection, uses_qr, monkeypatch):
    """Only a QR differs between devices: who uses none is not refused for one."""
    from compopt.separate import matrices

    case = next(case for case in CASES if case.name == "SeparateAdam")
    ranks = make_ranks(dataclasses.replace(case, compressed=projecting(projection)), 2)
    first, second = ranks.optimizers
    mine = dict(first.list_fixed_settings())["random matrices"]
    monkeypatch.setattr(
        matrices,
        "orthonormalize_columns",
        lambda bucket, ops, parts, shapes: [torch.linalg.qr(parts[0].view(8, 64).mT).Q[None] * (1 + 2**-20)],
    )
    others = dict(second.list_fixed_settings())["random matrices"]
    assert len(mine) == len(others) == 1
    assert (mine != others) == uses_qr


SHAPE = (50, 7001)
THREADS_MAKES = {
    "Radius": lambda p: compopt.RadiusAdamW(p, density=0.3, interval=3, dense_steps=1, max_grad_norm=1.0),
    "SCAPE": lambda p: compopt.ScapeAdamS(p, density=0.1, dense_steps=2, max_grad_norm=1.0),
    "TAGC": lambda p: compopt.TagcAdamW(p, density=0.1, max_grad_norm=1.0),
    "tracked": lambda p: compopt.SeparateAdam(
        p, projection="tracked", rank=8, max_grad_norm=1.0, payload_dtype=torch.int8, dense_steps=0
    ),
    "gaussian": lambda p: compopt.SeparateAdam(p, projection="gaussian", ratio=16, max_grad_norm=1.0),
}


def train(rank: int, backend: str) -> dict[str, str]:
    import os

    os.environ["COMPOPT_BACKEND"] = backend
    torch.set_num_threads(1 + rank)
    results = {}
    for name, make in THREADS_MAKES.items():
        params = [nn.Parameter(torch.linspace(-1, 1, 50 * 7001).view(SHAPE)), nn.Parameter(torch.zeros(200_001))]
        optimizer = make(params)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        results[name] = hashlib.blake2b(b"".join(p.detach().numpy().tobytes() for p in params)).hexdigest()
    return results


@pytest.mark.parametrize("backend", ["torch"])
def test_replicas_are_equal_to_the_bit(backend):
    one, other = run_ranks(train, 2, backend)
    assert one == other


@pytest.mark.parametrize("n", [0, 1, 65535, 65536, 65537, 500_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_that_clips_is_the_norm(n, dtype):
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(float(reproducible_squared_norm(x)))
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == pytest.approx(float(x.double().square().sum()), rel=1e-6)
    if n:
        assert float(reproducible_squared_norm(x.float() * 1e25)) == pytest.approx(
            float(squared_norm(x.double() * 1e25)), rel=1e-5
        )


@pytest.mark.parametrize("sizes", [(5,), (3, 4), (300_000,), (70_000, 5, 300_000)])
@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_norms_of_few_elements_and_of_many_are_those_in_float64(sizes, scale):
    """Also of numbers whose squares float32 cannot hold; of every tensor its own."""
    random = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, generator=random) * scale for n in sizes]
    expected = torch.stack([x.double().square().sum() for x in xs])
    for mixed in (xs, [*xs[:-1], xs[-1].double()]):  # payloads of buckets of two dtypes
        torch.testing.assert_close(stacked_squared_norms(mixed), expected, rtol=1e-6, atol=0)
    assert not stacked_squared_norms([*xs[:-1], xs[-1] * torch.inf])[-1].isfinite()


RADIUS, SCAPE = all_cases.FORMS[0], all_cases.FORMS[2]
SAME_BITS_CASES = [
    all_cases.Case(RADIUS, "torch", "float32", 2, all_cases.TINY, steps=10),
    all_cases.Case(SCAPE, "torch", "payload int8", 3, all_cases.TINY, steps=10),
    all_cases.Case(SCAPE, "torch", "payload int4", 3, all_cases.TINY, steps=10),
]


@pytest.mark.filterwarnings("ignore:gradients were changed")
@pytest.mark.parametrize("case", SAME_BITS_CASES, ids=lambda case: f"{case.form.name}, {case.precision}")
def test_two_runs_are_equal_and_a_change_is_told_with_its_step(case, monkeypatch):
    before, again = bits_run.run(case), bits_run.run(case)
    assert check.differences(before, again, set()) == []
    assert {"parameters", "messages", "bytes", "phase", "norm", "residual"} <= before.keys()
    assert check.compare_answers({"found": before}, {"raised": "KeyError: 1"}, set()).startswith("now it")

    gradient = bits_run.gradient
    change = lambda name, shape, n, rank, t: gradient(name, shape, n, rank, t) * (2 if t == 7 else 1)  # noqa: E731
    monkeypatch.setattr(bits_run, "gradient", change)
    report = check.differences(before, bits_run.run(case), {"messages"})
    assert "parameters from step 8" in report and not any("messages" in words for words in report)


def test_names_of_cases_tell_them_apart():
    names = [case.name for case in all_cases.cases()]
    assert len(set(names)) == len(names) > 300
