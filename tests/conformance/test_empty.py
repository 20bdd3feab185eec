"""Models and stages of which nothing is left to compress: empty tensors, payloads of no values beside a header."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pairs import name_of, pairs
from ranks import run_ranks
from sim import Ranks
from table import CASES, FORMS, Case, projecting
from torch import nn

import compopt

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


def slope(model: Shapes, rank: int, step: int) -> torch.Tensor:
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
        ours.train(slope, 5)
        ours.assert_replicas_equal()
        assert ours.optimizers[0].stats.skipped == 0 and ours.optimizers[0].stats.applied_steps == 5


@pytest.mark.parametrize("model", MODELS)
def test_rounds_of_local_steps_end(model):
    """Their first exchange is shown with what gradients have, which may be 0 bytes."""

    def make(params, process_group):
        adamw = torch.optim.AdamW(list(params))
        return compopt.LocalSteps(adamw, every=2, growth_steps=0, process_group=process_group)

    ours = Ranks(2, lambda: Shapes(MODELS[model]), make)
    ours.train(slope, 4)
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
                slope(model, rank, step).backward()
                optimizer.step()
            results += [float(p.detach().double().sum()) for p in model.tensors]
    return results


def test_real_ranks_take_them_too():
    one, other = run_ranks(train, 2)
    assert one == other
