"""The twins for readers, examples/simple, equal the classes: parameters and residuals of all ranks, step by step."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from in_place import in_place
from pairs import pairs
from problems import gradients, replicas, step, weights
from ranks import run_ranks
from simple import local_steps, radius_adamw, scape_adams, separate_adam, tagc_adamw
from slow_rows import slow_but
from torch import Tensor
from twins import Threads, TwinRanks, start_separate_adam_alike

import compopt

SHAPES = [(64, 80), (80,), (128, 64), (96, 3, 40), (10, 10)]
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
    shapes = EQUAL if name in ("ScapeAdamS", "TagcAdamW") else SHAPES  # selection depends on where tensors are cut
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
    """PowerSGD keeps h - ghat, the distance from the averaged reconstruction, where line 6 has h - R p^T."""
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


def run_all(rank: int, names: list[str]) -> list[str]:
    printed = []
    for name in names:
        with in_place() as output:
            importlib.import_module(f"simple.{name}").main(steps=40)
        printed.append(output.getvalue())
    return printed


@pytest.mark.parametrize(
    "names", [NAMES[::4], pytest.param(NAMES[1:4], marks=pytest.mark.slow)], ids=["main", "others"]
)
def test_twins_train_in_two_processes(names):
    """Rank 0 prints losses, from log(256) down, and bytes, fewer than DDP's; the other rank prints nothing."""
    printed, silent = run_ranks(run_all, 2, names)
    assert silent == [""] * len(names)
    for name, text in zip(names, printed, strict=True):
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
