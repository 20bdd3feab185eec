"""The twins for readers, examples/simple, equal the classes: parameters and residuals of all ranks, step by step."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_place import in_place
from problems import gradients, replicas, step, weights
from ranks import run_ranks
from simple import local_steps, radius_adamw, scape_adams, separate_adam, tagc_adamw
from torch import Tensor, nn

import compopt

SHAPES = [(64, 80), (80,), (128, 64), (96, 3, 40), (10, 10)]
EQUAL = [(64, 64), (80,), (64, 64), (64, 64), (10, 10), (64, 64)]  # as many elements a rank, in whole words
ADAM = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
STEPS = 9
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12}


class Threads:
    """Stands for ``torch.distributed`` where each thread is a rank."""

    def __init__(self, size: int):
        self.size, self.barrier, self.own = size, threading.Barrier(size), threading.local()
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.ReduceOp = torch.distributed.ReduceOp

    def get_rank(self) -> int:
        return self.own.rank

    def get_world_size(self) -> int:
        return self.size

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.tensors[self.own.rank] = x.clone()
        self.barrier.wait()
        everyone = [*self.tensors]
        self.barrier.wait()
        return everyone

    def all_reduce(self, x: Tensor, op: object = torch.distributed.ReduceOp.SUM) -> None:
        add = torch.bitwise_or if op == torch.distributed.ReduceOp.BOR else torch.add
        x.copy_(functools.reduce(add, self.exchange(x)))

    def reduce(self, x: Tensor, dst: int) -> None:
        total = sum(self.exchange(x))
        x.copy_(total if self.own.rank == dst else torch.full_like(x, float("nan")))

    def broadcast(self, x: Tensor, src: int) -> None:
        x.copy_(self.exchange(x)[src])

    def run(self, function: Callable[[int], object]) -> list:
        """What function(rank) returns on every rank; the first error is raised."""
        results: list = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            self.own.rank = rank
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


def tracked(params, **options):
    return compopt.SeparateAdam(params, rank=4, warmup_steps=3, payload_dtype=None, **ADAM, **options)


def first_bases(optimizer) -> dict[int, Tensor]:
    """The random Q with which the first step after the dense ones begins, for each projected parameter."""
    (bucket,), (group,) = optimizer._buckets, optimizer.param_groups
    group["step"] = group["warmup_steps"]
    stacks, group["step"] = optimizer.reducer(bucket).stacks, 0
    number = {p: i for i, p in enumerate(group["params"])}
    return {number[bucket.params[i]]: Q.clone() for x in stacks for i, Q in zip(x.indices, x.Q, strict=True)}


def local(params, **options):
    rounds = dict(every=3, outer_momentum=0.9, payload_dtype=None, every_warmup_steps=0)
    return compopt.LocalSteps(torch.optim.AdamW(params, **ADAM), **rounds, **options)


RADIUS = dict(ADAM, density=0.3, interval=5, warmup_steps=3)
SCAPE = dict(ADAM, density=0.1, density_warmup_steps=4, max_grad_norm=60.0)
TAGC = dict(ADAM, sparsity=0.9)
# The class, its twin, and the twin's module.
TWINS = {
    "SeparateAdam": (tracked, lambda p: separate_adam.SeparateAdam(p, rank=4, warmup_steps=3, **ADAM), separate_adam),
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
        functools.partial(compopt.ScapeAdamS, warmup_steps=0, **SCAPE),
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
    """What this rank has not sent of a tensor; None where the twin keeps none."""
    if isinstance(twin, separate_adam.SeparateAdam):
        return twin.e.get(p)
    if isinstance(twin, tagc_adamw.TagcAdamW):
        parts = torch.cat(twin.acc).split([q.numel() for q in twin.large])
        return next((part for q, part in zip(twin.large, parts, strict=True) if q is p), None)
    return twin.state[p].get("residual", twin.state[p].get("e")) if isinstance(twin, torch.optim.Optimizer) else None


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_equals_its_class(name, ranks, dtype, monkeypatch):
    make, make_twin, module = TWINS[name]
    shapes = EQUAL if name in ("ScapeAdamS", "TagcAdamW") else SHAPES  # selection depends on where tensors are cut
    world, params, optimizers = replicas(ranks, weights(shapes, dtype), make)
    threads = Threads(ranks)
    monkeypatch.setattr(module, "dist", threads)
    mine = [[nn.Parameter(w.clone()) for w in weights(shapes, dtype)] for _ in range(ranks)]
    twins = threads.run(lambda rank: make_twin(mine[rank][::-1]))  # as buckets are: in the order of backward
    if name == "SeparateAdam":
        for twin, local_params in zip(twins, mine, strict=True):
            bases = {local_params[i]: Q for i, Q in first_bases(optimizers[0]).items()}
            assert bases.keys() == twin.Q.keys()
            twin.Q = bases
    phases = set()
    for t in range(STEPS):
        grads = gradients(ranks, t, shapes, dtype)
        step(world, params, optimizers, grads)
        phases.add(optimizers[0].stats.phase)

        def step_twin(rank: int, grads=grads) -> None:
            for p, g in zip(mine[rank], grads[rank], strict=True):
                p.grad = g.clone()
            twins[rank].step()

        threads.run(step_twin)
        for rank, i in itertools.product(range(ranks), range(len(shapes))):
            assert_close(mine[rank][i], params[rank][i], f"parameter {i} of rank {rank} after step {t + 1}")
    assert len(phases) > 1 or name == "TagcAdamW", phases
    compared = 0
    for rank, i in itertools.product(range(ranks), range(len(shapes))):
        held = optimizers[rank].state[params[rank][i]].get("residual")
        residual = residual_of(twins[rank], mine[rank][i])
        if held is not None and residual is not None:
            assert_close(residual.view(held.shape), held, f"residual {i} of rank {rank}")
            compared += bool(held.any())
    assert compared or name == "LocalSteps"


def assert_close(got: Tensor, wanted: Tensor, what: str) -> None:
    """The distance relative to the tensor, in its root mean square."""
    distance = float((got.detach() - wanted.detach()).norm() / wanted.detach().norm().clamp_min(1e-30))
    assert distance <= CLOSE[wanted.dtype], f"{what}: {distance:.2e}"


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
    text = (Path(__file__).parent.parent / "examples" / "simple" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 150
    assert not re.search(r"^(import|from) compopt", text, re.MULTILINE)
    algorithm, code = text.split('"""', 2)[1:]
    listed = {int(number) for number in re.findall(r"^ {4,6}(\d+)  ", algorithm, re.MULTILINE)}
    lines = " ".join(re.findall(r"[Ll]ines? ([\d, and to]+)", code))
    cited = {int(number) for number in re.findall(r"\d+", lines)}
    for first, last in re.findall(r"(\d+) (?:to|and) (\d+)", lines):
        cited |= set(range(int(first), int(last) + 1))
    assert listed and listed - cited <= {9}, f"lines {listed - cited} are in the docstring only"  # 9: the gradient
