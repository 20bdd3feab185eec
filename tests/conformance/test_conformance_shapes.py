"""Shapes and sizes, for every class: empty models, every size at which the code takes another way, absent tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from conformance import AVERAGING
from pairs import name_of, pairs
from problems import gradients, replicas, weights
from problems import step as take_step
from ranks import run_ranks
from sim import Ranks
from slow_rows import slow_but
from table import CASES, FORMS, Case, projecting
from torch import nn

import compopt

# Compressed at all; topk in place of a threshold; the table of rounding; a block of a pass; pages of a block.
SIZES = [4096, 16384, 65536, 131072, 2**20]
PROJECTIONS = [
    dataclasses.replace(case, lossless=projecting("tracked", rank=2**20), form="tracked")
    for case in CASES
    if "projection" in case.bad
]
ALL = CASES + FORMS + PROJECTIONS
# One of each kind: what a size changes, backends, selection, shards and quantization see, and not classes.
BY_SIZE = {"RadiusAdamW", "SeparateAdam", "TagcAdamW", "Average", "ScapeAdamS"}
BACKENDS_AND_RANKS = ["auto", "torch"], [2, 1]
on_each = pytest.mark.parametrize("backend", ["torch", "auto"])


class Beside(nn.Module):
    """Matrices of one element less than ``owners * size``, as many, and one more; each is a bucket of its own."""

    def __init__(self, size: int, owners: int):
        super().__init__()
        start = torch.linspace(-1, 1, size * owners + 1)
        self.tensors = nn.ParameterList(start[: size * owners + more].clone().view(1, -1) for more in (-1, 0, 1))


@functools.lru_cache(maxsize=8)
def noise(size: int, rank: int, step: int) -> torch.Tensor:
    """Gaussian, with zeros among it; drawn once for all classes."""
    return torch.randn(size, generator=torch.Generator().manual_seed(10 * step + rank)).clamp_min(-2.5).add(2.5)


def slope(model: Beside, rank: int, step: int) -> torch.Tensor:
    """A loss whose gradients are noise, which begins elsewhere for every tensor."""
    tensors = [*model.tensors]
    drawn = noise(tensors[-1].numel() + len(tensors), rank, step)
    return sum((p * drawn[k : k + p.numel()]).sum() for k, p in enumerate(tensors))


ROWS = [
    (case, *row) for case in ALL for row in pairs(SIZES if case.name in BY_SIZE else SIZES[:1], *BACKENDS_AND_RANKS)
]
MAIN = "RadiusAdamW", "TagcAdamW"  # the others in large sizes with `make slow`


@functools.lru_cache(maxsize=4)
def reference_run(
    reference: Callable[..., torch.optim.Optimizer], lr: float, size: int, owners: int, ranks: int, steps: int
) -> Beside:
    """The reference of several classes, trained once."""
    model = Beside(size, owners)
    optimizer = reference(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(slope(model, rank, step) for rank in range(ranks)) / ranks).backward()
        optimizer.step()
    return model


def groups(parameters) -> list[dict]:
    return [{"params": [p]} for p in parameters]


@pytest.mark.parametrize(
    ("case", "size", "backend", "ranks"),
    slow_but(lambda case, *row: case.name in MAIN or row[0] == SIZES[0], ROWS),
    ids=name_of,
)
def test_what_drops_nothing_equals_the_reference(case, size, backend, ranks, monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    steps = 4 if size < 65536 else 2
    owners = ranks if case.sharded else 1
    has_start = "dense_steps" in case.compressed and case.cls is not compopt.LocalSteps  # which is lossless in it alone
    dense_start = {"dense_steps": 1} if has_start else {}
    ours = Ranks(
        ranks,
        lambda: Beside(size, owners),
        lambda params, process_group: case.new(
            groups(params), lr=case.lr, process_group=process_group, **{**case.lossless, **dense_start}
        ),
    )
    ours.train(slope, steps)
    model = reference_run(case.reference, case.lr, size, owners, ranks, steps)
    for p, q in zip(model.parameters(), ours.models[-1].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-3 * case.lr)
    ours.assert_replicas_equal()


@pytest.mark.parametrize(
    ("share", "what", "backend"),
    pairs(
        [1e-4, 0.01, 0.3, 0.97, 1.0],
        ["gaussian", "log-normal", "equal", "few", "zeros", "sorted", "two sizes"],
        ["torch", "auto"],
    ),
)
def test_the_largest_are_exactly_as_many(what, share, backend, monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    n = 50_001
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    x = {
        "gaussian": x,
        "log-normal": x.mul(3).exp() * x.sign(),
        "equal": torch.full((n,), -2.5),
        "few": torch.where(torch.arange(n) % 97 == 0, x, 0),
        "zeros": torch.zeros(n),
        "sorted": torch.linspace(-1, 3, n),
        "two sizes": torch.where(x > 0, 1.0, -1e-6),
    }[what]
    k = max(1, round(share * n))
    results = compopt.AdamS([nn.Parameter(torch.zeros(1))]).ops.top_k_positions(x, k)
    assert torch.equal(results, results.unique())
    assert len(results) == k or (len(results) < k and len(results) >= int(x.count_nonzero()))
    chosen = x.abs()[results].sort(descending=True).values
    assert torch.equal(chosen, x.abs().sort(descending=True).values[: len(results)])


MODELS = {
    "nothing": [(0,), (0, 5)],
    "one empty matrix": [(0, 5)],
    "a scalar": [()],
    "some": [(64, 1), (5, 0), (64, 64), (3,), ()],
    "odd": [(1,), (0, 7), (5,), (65, 63)],
}
TRACKED = [
    dataclasses.replace(case, compressed=projecting("tracked", dense_steps=2), form="tracked")
    for case in CASES
    if case.cls in (compopt.Separate, compopt.SeparateAdam)
]
DTYPES = [None, torch.int8, "int4", "int2", torch.bfloat16, torch.float16]


def takes(case: Case, dtype: torch.dtype | str | None) -> bool:
    if dtype is None or case.cls is compopt.AdamS:
        return dtype is None
    if dtype == "int2":
        return case.cls in (compopt.Average, compopt.LocalSteps)
    return dtype not in (torch.int8, "int4") or not (case.cls is compopt.TagcAdamW or case.compressed.get("sharded"))


class Shapes(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.tensors = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape in shapes)


def slope_of_model(model: Shapes, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in model.tensors)


@pytest.mark.parametrize(
    ("case", "model", "dtype"),
    pairs(CASES + FORMS + TRACKED, MODELS, DTYPES, where=lambda case, model, dtype: takes(case, dtype)),
    ids=name_of,
)
def test_payloads_without_values_are_averaged_all_the_same(case, model, dtype):
    options = {} if dtype is None else {"payload_dtype": dtype}
    for size, compress in ((1, None), (2, True), (3, None)) if dtype is None else ((2, True),):
        ours = Ranks(
            size,
            lambda: Shapes(MODELS[model]),
            lambda params, process_group: case.make(
                [{"params": list(params), "compress": compress}],  # noqa: B023
                process_group=process_group,
                **options,
            ),
        )
        ours.train(slope_of_model, 5)
        ours.assert_replicas_equal()
        assert ours.optimizers[0].stats.skipped == 0 and ours.optimizers[0].stats.applied_steps == 5


@pytest.mark.parametrize("model", MODELS)
def test_rounds_of_local_steps_end(model):
    """Their first exchange is shown with what gradients have, which may be 0 bytes."""

    def make(params, process_group):
        adamw = torch.optim.AdamW(list(params))
        return compopt.LocalSteps(adamw, every=2, growth_steps=0, process_group=process_group)

    ours = Ranks(2, lambda: Shapes(MODELS[model]), make)
    ours.train(slope_of_model, 4)
    ours.assert_replicas_equal()
    assert ours.optimizers[0].stats.round == 2


def train(rank: int) -> list[float]:
    results = []
    for shapes in MODELS.values():
        for projection in ("gaussian", "tracked"):
            model = Shapes(shapes)
            optimizer = compopt.SeparateAdam(model.parameters(), **projecting(projection, payload_dtype=torch.int8))
            for step in range(2):
                optimizer.zero_grad()
                slope_of_model(model, rank, step).backward()
                optimizer.step()
            results += [float(p.detach().double().sum()) for p in model.tensors]
    return results


def test_real_ranks_take_them_too():
    one, other = run_ranks(train, 2)
    assert one == other


SHAPES = [(64, 80), (80,), (260, 520)]


@pytest.mark.parametrize("case", [case for case in AVERAGING if "payload_dtype" in case.bad], ids=name_of)
def test_none_is_as_good_as_zeros(case):
    """In a rounded payload too, and in what is owed. Exact payloads: test_conformance.py."""

    def make(params, process_group):
        return case.make(params, process_group=process_group, payload_dtype=torch.bfloat16)

    runs = [replicas(2, weights(SHAPES, torch.float32), make) for _ in range(2)]
    for t in range(8):
        for zeros, (world, params, optimizers) in zip((False, True), runs, strict=True):
            grads = gradients(2, t, SHAPES, torch.float32)
            if t % 2:
                grads[1][2] = torch.zeros(SHAPES[2]) if zeros else None
            if t % 3 == 1:
                grads[0][0] = torch.zeros(SHAPES[0]) if zeros else None
            take_step(world, params, optimizers, grads)
    (_, ours, mine), (_, theirs, others) = runs
    for a, b in zip([p for local in ours for p in local], [p for local in theirs for p in local], strict=True):
        assert torch.equal(a, b)
    for one, other in zip(mine, others, strict=True):
        for mine_, theirs_ in zip(one._buckets, other._buckets, strict=True):
            for name in set(mine_.flat) & {"residual"}:
                assert torch.equal(mine_.flat[name], theirs_.flat[name])
