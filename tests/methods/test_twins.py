"""The optimizers of examples: the twins for readers equal the classes, and RandomK equals its pseudo-code."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conservation import Ledger
from in_place import in_place
from pairs import pairs
from problems import SHAPES, gradients, replicas, step, weights
from randomk import RandomK, draw
from ranks import HANG_GUARD, run_ranks
from simple import local_steps, radius_adamw, scape_adams, separate_adam, tagc_adamw
from slow_rows import slow_but
from table import DERIVED
from torch import Tensor
from twins import Threads, TwinRanks, start_separate_adam_alike

import compopt

TWIN_SHAPES = [(64, 80), (80,), (128, 64), (96, 3, 40), (10, 10)]
EQUAL = [(64, 64), (80,), (64, 64), (64, 64), (10, 10), (64, 64)]  # as many elements a rank, in whole words
ADAM = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
STEPS = 9
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12}


def tracked(params, **options):
    return compopt.SeparateAdam(params, rank=4, dense_steps=3, payload_dtype=None, **ADAM, **options)


def local(params, **options):
    rounds = dict(every=3, outer_momentum=0.9, payload_dtype=None, growth_steps=0)
    return compopt.LocalSteps(torch.optim.AdamW(params, **ADAM), **rounds, **options)


RADIUS = dict(ADAM, density=0.3, interval=5, dense_steps=3)
SCAPE = dict(ADAM, density=0.1, density_steps=4, max_grad_norm=60.0)
TAGC = dict(ADAM, density=0.1)
# The class, its twin, and the twin's module.
TWINS = {
    "SeparateAdam": (tracked, lambda p: separate_adam.SeparateAdam(p, rank=4, dense_steps=3, **ADAM), separate_adam),
    "RadiusAdamW": (
        functools.partial(compopt.RadiusAdamW, **RADIUS),
        lambda p: radius_adamw.RadiusAdamW(p, **RADIUS),
        radius_adamw,
    ),
    "RadiusAdamW, clipped": (
        functools.partial(compopt.RadiusAdamW, **RADIUS, max_grad_norm=60.0),
        lambda p: radius_adamw.RadiusAdamW(p, **RADIUS, max_grad_norm=60.0),
        radius_adamw,
    ),
    "ScapeAdamS": (
        functools.partial(compopt.ScapeAdamS, dense_steps=0, **SCAPE),
        lambda p: scape_adams.ScapeAdamS(p, **SCAPE),
        scape_adams,
    ),
    "TagcAdamW": (functools.partial(compopt.TagcAdamW, **TAGC), lambda p: tagc_adamw.TagcAdamW(p, **TAGC), tagc_adamw),
    "LocalSteps": (
        local,
        lambda p: local_steps.LocalSteps(torch.optim.AdamW(p, **ADAM), every=3),
        local_steps,
    ),
}


def residual_of(twin, p: Tensor) -> Tensor | None:
    """This rank's residual of a tensor; None where the twin keeps none."""
    if isinstance(twin, separate_adam.SeparateAdam):
        return twin.e.get(p)
    if isinstance(twin, tagc_adamw.TagcAdamW):
        parts = torch.cat(twin.acc).split([q.numel() for q in twin.large])
        return next((part for q, part in zip(twin.large, parts, strict=True) if q is p), None)
    return twin.state[p].get("residual", twin.state[p].get("e")) if isinstance(twin, torch.optim.Optimizer) else None


PAIRS = pairs(TWINS, (2, 4), CLOSE)  # the other rows with `make slow`


@pytest.mark.parametrize(
    ("name", "ranks", "dtype"),
    slow_but(lambda *row: row in PAIRS, itertools.product(TWINS, (2, 4), CLOSE)),
    ids=str,
)
def test_a_twin_equals_its_class(name, ranks, dtype):
    make, make_twin, module = TWINS[name]
    shapes = EQUAL if name in ("ScapeAdamS", "TagcAdamW") else TWIN_SHAPES  # selection depends on where tensors are cut
    world, params, optimizers = replicas(ranks, weights(shapes, dtype), make)
    twins = TwinRanks(module, make_twin, weights(shapes, dtype), ranks)
    if name == "SeparateAdam":
        start_separate_adam_alike(twins, optimizers[0])
    phases = set()
    for t in range(STEPS):
        grads = gradients(ranks, t, shapes, dtype)
        step(world, params, optimizers, grads)
        twins.step(grads)
        phases.add(optimizers[0].stats.phase)
        for rank, i in itertools.product(range(ranks), range(len(shapes))):
            assert_close(twins.all_params[rank][i], params[rank][i], f"parameter {i} of rank {rank} after step {t + 1}")
        if name == "SeparateAdam":  # whose averages are the twin's gradients
            norm = torch.stack([p.grad.norm() for p in twins.params]).norm()
            assert optimizers[0].stats.grad_norm == pytest.approx(float(norm), rel=CLOSE[dtype])
    assert len(phases) > 1 or name == "TagcAdamW", phases
    compared = 0
    for rank, i in itertools.product(range(ranks), range(len(shapes))):
        held = optimizers[rank].state[params[rank][i]].get("residual")
        residual = residual_of(twins.twins[rank], twins.all_params[rank][i])
        if held is not None and residual is not None:
            assert_close(residual.view(held.shape), held, f"residual {i} of rank {rank}")
            compared += bool(held.any())
    assert compared or name == "LocalSteps"


def assert_close(got: Tensor, wanted: Tensor, what: str) -> None:
    """The distance relative to the tensor, in its root mean square."""
    distance = float((got.detach() - wanted.detach()).norm() / wanted.detach().norm().clamp_min(1e-30))
    assert distance <= CLOSE[wanted.dtype], f"{what}: {distance:.2e}"


def test_powersgds_error_has_the_same_mean_and_is_larger_on_every_rank():
    """PowerSGD keeps h - ghat, the distance from the averaged reconstruction, where line 6 has h - P b^T."""
    errors, averages = {}, {}
    for keeps_distance in (False, True):
        threads = Threads(3)
        e = [torch.zeros(64, 80, dtype=torch.float64) for _ in range(3)]
        first = torch.randn(80, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        Q = [first.clone() for _ in range(3)]

        def average(rank: int, grads: list, e=e, Q=Q, keeps_distance=keeps_distance) -> Tensor:
            h = grads[rank][0] + e[rank]
            ghat = separate_adam.average_low_rank(grads[rank][0], e[rank], Q[rank])
            if keeps_distance:
                e[rank].copy_(h - ghat)
            return ghat

        with mock.patch.object(separate_adam, "dist", threads):
            for t in range(20):
                everyone = threads.run(functools.partial(average, grads=gradients(3, t, [(64, 80)])))
        errors[keeps_distance], averages[keeps_distance] = e, everyone[0]
    torch.testing.assert_close(averages[False], averages[True], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(sum(errors[False]), sum(errors[True]), rtol=1e-7, atol=1e-9)
    assert all(ours.norm() < theirs.norm() for ours, theirs in zip(errors[False], errors[True], strict=True))


NAMES = ["separate_adam", "radius_adamw", "scape_adams", "tagc_adamw", "local_steps"]


def run_all(rank: int) -> list[str]:
    printed = []
    for name in NAMES:
        with in_place() as output:
            importlib.import_module(f"simple.{name}").main(steps=40)
        printed.append(output.getvalue())
    return printed


def test_twins_train_in_two_processes():
    """Rank 0 prints losses, from log(256) down, and bytes, fewer than DDP's; the other rank prints nothing."""
    printed, silent = run_ranks(run_all, 2)
    assert silent == [""] * len(NAMES)
    for name, text in zip(NAMES, printed, strict=True):
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
        sent, dense = (int(number.replace(",", "")) for number in re.findall(r"([\d,]{5,})", text)[-2:])
        assert len(losses) == 4 and losses[-1] < 4, f"{name}: {losses}"
        assert 0 < sent < 0.8 * dense, f"{name}: {sent} of {dense}"


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_is_short_and_plain(name):
    text = (Path(__file__).parents[2] / "examples" / "simple" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 150
    assert not re.search(r"^(import|from) compopt", text, re.MULTILINE)
    algorithm, code = text.split('"""', 2)[1:]
    listed = {int(number) for number in re.findall(r"^ {4,6}(\d+)  ", algorithm, re.MULTILINE)}
    lines = " ".join(re.findall(r"[Ll]ines? ([\d, and to]+)", code))
    cited = {int(number) for number in re.findall(r"\d+", lines)}
    for first, last in re.findall(r"(\d+) (?:to|and) (\d+)", lines):
        cited |= set(range(int(first), int(last) + 1))
    assert listed and listed - cited <= {9}, f"lines {listed - cited} are in the docstring only"  # 9: the gradient


CASE = next(case for case in DERIVED if case.cls is RandomK)
H = dict(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, density=0.2, dense_steps=2)


def absent(grads: list[list[torch.Tensor]], t: int) -> list[list[torch.Tensor | None]]:
    """Every tensor lacks a gradient now and then, on one rank or on all."""
    for rank, local in enumerate(grads):
        if t % 3 == 2:
            local[(t + rank) % len(local)] = None
        if t % 4 == 0:
            local[t // 2 % len(local)] = None
    return grads


class Oracle:
    """Lines 2 to 6 in float64, a tensor at a time; only the positions are the example's."""

    def __init__(self, ranks: int, start: list[torch.Tensor], limit: float | None):
        self.w = [w.clone() for w in start]
        self.m, self.v = ([torch.zeros_like(w) for w in start] for _ in "mv")
        self.e = [[torch.zeros_like(w) for w in start] for _ in range(ranks)]
        self.steps, self.limit = [0] * len(start), limit

    def step(self, grads: list[list[torch.Tensor | None]], index: list[torch.Tensor | None]) -> None:
        means = []
        for i, at in enumerate(index):
            residuals = [e[i] + (0 if g[i] is None else g[i]) for e, g in zip(self.e, grads, strict=True)]
            selected = torch.ones_like(self.w[i]) if at is None else torch.zeros_like(self.w[i])
            if at is not None:
                selected.view(-1)[at] = 1
            means.append((sum(residuals) / len(residuals) * selected, residuals, selected))
        norm = sum(float(s.square().sum()) for s, _, _ in means) ** 0.5
        factor = 1.0 if self.limit is None else min(1.0, self.limit / (norm + 1e-6))
        for i, (s, residuals, selected) in enumerate(means):
            if any(local[i] is not None for local in grads):
                for e, rest in zip(self.e, residuals, strict=True):
                    e[i] = rest * (1 - selected)
                self._adamw(i, s * factor)

    def _adamw(self, i: int, g: torch.Tensor) -> None:
        (b1, b2), self.steps[i] = H["betas"], self.steps[i] + 1
        self.m[i] = b1 * self.m[i] + (1 - b1) * g
        self.v[i] = b2 * self.v[i] + (1 - b2) * g * g
        mhat, vhat = self.m[i] / (1 - b1 ** self.steps[i]), self.v[i] / (1 - b2 ** self.steps[i])
        self.w[i] = (1 - H["lr"] * H["weight_decay"]) * self.w[i] - H["lr"] * mhat / (vhat.sqrt() + H["eps"])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("limit", [None, 5.0])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_follows_its_pseudo_code(ranks, limit, sharded):
    start, options = weights(), dict(H, max_grad_norm=limit, sharded=sharded)
    world, params, optimizers = replicas(ranks, start, lambda p, **o: RandomK(p, **options, **o))
    oracle, (bucket,) = Oracle(ranks, start, limit), optimizers[0]._buckets
    for t in range(10):
        grads = absent(gradients(ranks, t), t)
        drawn = [None] * len(SHAPES) if t < 2 else draw(bucket, t + 1).positions
        in_order = {id(p): at for p, at in zip(bucket.params, drawn, strict=True)}
        oracle.step(grads, [in_order[id(p)] for p in params[0]])
        step(world, params, optimizers, grads)
        for local in params:
            torch.testing.assert_close([p.detach() for p in local], oracle.w, rtol=1e-9, atol=1e-11)


def test_positions_are_alike_on_ranks_and_others_in_every_step():
    _, _, optimizers = replicas(2, weights(), lambda p, **o: RandomK(p, **H, **o))
    (first,), (second,) = (optimizer._buckets for optimizer in optimizers)
    for t in range(3, 6):
        masks = draw(first, t), draw(second, t), draw(first, t + 1)
        for n, a, b, later in zip(first.lengths, *(mask.positions for mask in masks), strict=True):
            if a is not None:
                assert torch.equal(a, b) and not torch.equal(a, later)
                assert len(a) == round(0.2 * n) == len(a.unique()) and torch.equal(a, a.sort().values)


@pytest.mark.parametrize("payload_dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bfloat16_parameters_conserve_gradients_too(backend, ranks, payload_dtype):
    """Sums over ranks in bfloat16 round once more, and no residual holds that: at one rank nothing is lost."""
    if backend == "triton" and ranks > 1:
        pytest.skip("one rank shows what the kernels do")
    shapes = [(64, 80), (80,)]

    def make(params, **options):
        return CASE.make(params, payload_dtype=payload_dtype, **options)

    world, params, optimizers = replicas(ranks, weights(shapes, torch.bfloat16), make)
    for t in range(6):
        grads = absent(gradients(ranks, t, shapes, torch.bfloat16), t)
        for local, given in zip(params, grads, strict=True):
            for p, g in zip(local, given, strict=True):
                p.grad = g
        books = Ledger(CASE, optimizers)
        step(world, params, optimizers, grads)
        exact = ranks == 1 or payload_dtype in ("int8", "int4")
        assert books.check(optimizers) < (2e-5 if exact else 2**-7), t
        for p, entry in optimizers[0].state.items():
            assert torch.equal(entry["master"].bfloat16(), p.detach())
        assert all(torch.equal(p, q) for local in params[1:] for p, q in zip(params[0], local, strict=True))


def test_a_dense_step_sends_what_compressed_ones_held_back():
    world, params, optimizers = replicas(2, weights(), lambda p, **o: RandomK(p, **H, **o))
    for t in range(4):
        step(world, params, optimizers, gradients(2, t))
    assert optimizers[0].stats.residual_norm() > 0
    for optimizer in optimizers:
        optimizer.param_groups[0]["dense_steps"] = 100
    step(world, params, optimizers, gradients(2, 4))
    assert optimizers[0].stats.phase == "dense" and optimizers[0].stats.residual_norm() == 0


@pytest.mark.slow
def test_the_file_runs():
    file = Path(__file__).parents[2] / "examples" / "randomk.py"
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=HANG_GUARD)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split(",")[0].removeprefix("loss ")) < 0.5 and "of 16384 bytes" in done.stdout
