"""The model, the data and the ranks of the conformance tests, and what a step may change."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace

import pytest
import torch
from sim import Ranks
from slow_rows import slow_but
from table import CASES, DERIVED, FORMS, INT8, Case, by_name, in_int8, projecting
from torch import nn

from compopt._state.residuals import Residuals

every = pytest.mark.parametrize("case", CASES + FORMS, ids=lambda case: case.name)
EVERY_FORM = CASES + FORMS + INT8 + DERIVED
every_form = pytest.mark.parametrize("case", EVERY_FORM, ids=lambda case: case.name)
# those whose every step averages gradients, and leaves replicas equal; test_local_steps.py: rounds
AVERAGING = [case for case in CASES + FORMS if not case.averaging]
every_average = pytest.mark.parametrize("case", AVERAGING, ids=lambda case: case.name)


def some_average(*fast: str):
    """Return ``every_average`` for a long test: the classes that are not named run in `make slow`."""
    rows = slow_but(lambda case: case.name in fast, AVERAGING)
    return pytest.mark.parametrize("case", rows, ids=lambda case: case.name)


def every_form_at(*at: int):
    """Every class and every form with one of these steps in turn; with the others in `make slow`."""
    shown = {case.name: at[n % len(at)] for n, case in enumerate(CASES + FORMS)}
    rows = slow_but(lambda case, n: n == shown[case.name], itertools.product(CASES + FORMS, at))
    rows += [pytest.param(case, at[n % len(at)]) for n, case in enumerate(INT8 + DERIVED)]
    names = [f"{row.values[1]}-{row.values[0].name}" for row in rows]
    return pytest.mark.parametrize(("case", "at"), rows, ids=names)


def other(name: str, form: str, **options) -> Case:
    case = by_name[name]
    return replace(case, form=form, compressed={**case.compressed, **options})


def projected(name: str, projection: str, **options) -> Case:
    compressed = projecting(projection, dense_steps=2, **options)
    whole = projecting(projection, ratio=1, rank=2**20)
    return replace(by_name[name], form=projection, compressed=compressed, lossless=whole)


TRACKED = projected("SeparateAdam", "tracked")
# forms that send otherwise than the lines of the table, for the tests that look at what is sent
OTHERS = [
    other("TagcAdamW", "sketch", codec="sketch", sketch_ratio=4),
    TRACKED,
    projected("Separate", "tracked"),
]
TRACKED_IN_INT8 = replace(in_int8(TRACKED), form="tracked, residual in int8")


class Small(nn.Module):
    """Two matrices that are compressed, the rest not; ``idle`` takes part in no loss."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.scale, self.idle = nn.Parameter(torch.ones(64)), nn.Linear(64, 70)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * self.scale


def data(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(16, 64, dtype=dtype, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(model: Small, rank: int, step: int) -> torch.Tensor:
    x = data(rank, step, model.scale.dtype)
    return (model(x) - x.flip(1)).square().mean()


def make_ranks(case: Case, size: int, dtype: torch.dtype = torch.float32, **options) -> Ranks:
    return Ranks(
        size,
        lambda: Small(dtype),
        lambda params, process_group: case.make(params, process_group=process_group, **options),
    )


def snapshot(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of everything a step may change."""
    optimizer.state_dict()  # settles masks that are still on their way
    tensors = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    for entry in optimizer.state.values():
        tensors += [value.clone() for value in entry.values() if isinstance(value, torch.Tensor)]
    return tensors + [torch.tensor(group["step"]) for group in optimizer.option_groups]


def mean_residual(ranks: Ranks) -> torch.Tensor:
    """The mean over ranks of what they hold back, of all tensors."""
    names = [o.state_dict() and o.rank_local_state for o in ranks.optimizers].pop()
    rows = [[Residuals(b, n).read_all() for b in o._buckets for n in names] for o in ranks.optimizers]
    flats = [torch.cat([e.view(-1) for bucket in row for e in bucket if e is not None]) for row in rows]
    return torch.stack(flats).mean(0)


def assert_same(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
