"""Commits of all buckets in one launch: several buckets, two groups, and the same numbers as bucket by bucket."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from sim import World
from slow_rows import slow_but

import compopt
from compopt._state import buckets

SCAPE = {"dense_steps": 1, "density_steps": 2, "density": 0.05}
OPTIONS = {
    "AdamS": {},
    "RadiusAdamW": {"dense_steps": 2, "interval": 4, "density": 0.3},
    "ScapeAdamS": SCAPE,
    "ScapeAdamS, bits": SCAPE | {"density": 0.4},
    "ScapeAdamS, rounded": SCAPE | {"payload_dtype": "bfloat16", "max_grad_norm": 3.0},
    "SeparateAdam": {"rank": 5, "dense_steps": 2, "payload_dtype": None, "maximize": True},
    # one step: where a number differs in its last bit int8 may take the next level
    "SeparateAdam, rounded": {"rank": 5, "dense_steps": 5, "max_grad_norm": 20.0},
    "SeparateAdam, clipped": {
        "rank": 5,
        "dense_steps": 3,
        "payload_dtype": None,
        "max_grad_norm": 20.0,
        "ef_beta": 0.3,
    },
}

SLOW = ["ScapeAdamS, rounded", "SeparateAdam", "SeparateAdam, rounded"]


SHAPES = [*((64, 70 + k) for k in range(4)), (37,)]  # a bucket a matrix
IN_PAIRS = [(96, 64)] * 4  # two matrices a bucket, of which each of two ranks selects of one; of 2 blocks each


def train(case: str, backend: str, ranks: int = 1, steps: int = 5, shapes: list = SHAPES) -> list[torch.Tensor]:
    """Parameters of rank 0 after some steps of several buckets in two groups."""
    size = 20_000 if shapes is SHAPES else 50_000
    small = mock.patch.multiple(buckets, BUCKET_BYTES=size, JOINED_PART_ON_CPU=0)
    with mock.patch.dict("os.environ", COMPOPT_BACKEND=backend), small:
        return train_buckets(case, ranks, steps, shapes)


trained = functools.cache(train)


def train_buckets(case: str, ranks: int, steps: int, shapes: list) -> list[torch.Tensor]:
    world, random = World(ranks), torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=random) for shape in shapes]
    models = [[torch.nn.Parameter(x.clone()) for x in start] for _ in range(ranks)]
    optimizers = [make(case, params, comm) for params, comm in zip(models, world.comms, strict=True)]
    assert all(len(optimizer._buckets) > 1 for optimizer in optimizers)
    for step in range(steps):
        for params in models:
            for p in params:
                p.grad = torch.randn(p.shape, generator=random)
            if step == 3:
                params[2].grad = None  # on all ranks: it stays as it is
        world.step(optimizers)
    return [p.detach() for p in models[0]]


def make(case: str, params: list[torch.nn.Parameter], comm: object) -> torch.optim.Optimizer:
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:]}] if len(params) == len(SHAPES) else params
    name, simulate = case.split(",")[0], {} if case == "AdamS" else {"simulate": True}
    return getattr(compopt, name)(groups, lr=0.01, process_group=comm, **simulate, **OPTIONS[case])


@pytest.fixture
def interpreted() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU then")


@pytest.mark.parametrize("case", slow_but(lambda case: case not in SLOW, OPTIONS))
def test_buckets_and_groups_step_as_one_after_the_other(interpreted, case):
    ours, theirs = (trained(case, backend) for backend in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_where_there_is_little_room_a_few_buckets_select_at_a_time(monkeypatch, interpreted):
    from compopt._ops.triton import triton_selection

    together = trained("ScapeAdamS", "triton")
    monkeypatch.setattr(triton_selection, "ROOM", 4 * 64 * 73)  # one bucket's
    apart = train("ScapeAdamS", "triton")
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@pytest.mark.parametrize("case", [pytest.param("ScapeAdamS", marks=pytest.mark.slow), "ScapeAdamS, bits"])
def test_what_other_ranks_select_is_read_for_all_buckets_together(interpreted, case):
    ours, theirs = (train(case, backend, ranks=2, steps=4) for backend in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_a_rank_selects_of_the_last_tensors_of_several_buckets(interpreted):
    ours, theirs = (train("ScapeAdamS", backend, 2, 6, IN_PAIRS) for backend in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
