"""Weights whose gradient is exactly 0 on all ranks do not move in any class, weight decay apart, as under AdamW.

Padding of an embedding, tokens that never occur, inputs and units that are always 0. AdamW divides an average by its
own size, so an error of rounding of 1e-8 of a gradient moves such a weight as far as others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from sim import World
from slow_rows import slow_but
from torch import Tensor

import compopt

STEPS, SHAPE, LENGTH = 9, (90, 72), 50  # a row of the matrix shares blocks of 128 values with its neighbours
ROWS, COLUMNS = [0, 2, 3, 9, 40, 89], [0, 5, 71]
ZERO_ROWS = torch.zeros(SHAPE, dtype=torch.bool).index_fill_(0, torch.tensor(ROWS), True)
ZERO_COLUMNS = torch.zeros(SHAPE, dtype=torch.bool).index_fill_(1, torch.tensor(COLUMNS), True)
Make = Callable[..., torch.optim.Optimizer]


def separate(params: list[Tensor], **options) -> torch.optim.Optimizer:
    return compopt.Separate(torch.optim.AdamW(params, lr=1e-3, weight_decay=0), **options)


def average(params: list[Tensor], **options) -> torch.optim.Optimizer:
    return compopt.Average(torch.optim.AdamW(params, lr=1e-3, weight_decay=0), **options)


def local_steps(params: list[Tensor], **options) -> torch.optim.Optimizer:
    inner = torch.optim.AdamW(params, lr=1e-3, weight_decay=0)
    return compopt.LocalSteps(inner, every=2, dense_steps=1, growth_steps=0, **options)


def own(cls: type) -> Make:
    return lambda params, **options: cls(params, lr=1e-3, weight_decay=0, **options)


ADAM = own(compopt.SeparateAdam)
TRACKED = {"rank": 4, "dense_steps": 1}
CASES: dict[str, tuple[Make, dict]] = {
    f"{name}, {payload}, {residual}": (make, {**options, "payload_dtype": payload, "residual_dtype": residual})
    for name, make, options, payloads in (
        ("SeparateAdam", ADAM, TRACKED, (None, "int8", "int4", "bfloat16")),
        ("Separate", separate, TRACKED, (None, "int4")),
        ("Average", average, {}, ("int8", "int4", "int2", "bfloat16")),
        ("LocalSteps", local_steps, {}, ("int8", "int4", "int2")),
        ("LocalSteps, later", local_steps, {"fragments": 2, "delay": 1}, ("int2",)),
        ("AdamS", own(compopt.AdamS), {}, ("int2",)),
        ("RadiusAdamW", own(compopt.RadiusAdamW), {"interval": 3, "density": 0.5, "dense_steps": 1}, (None, "int4")),
        ("TagcAdamW", own(compopt.TagcAdamW), {"density": 0.1, "dense_steps": 1}, (None,)),
    )
    for payload in payloads
    for residual in (None, "int8")
}
SCAPE = {"density": 0.2, "dense_steps": 1, "density_steps": 1}
CASES["ScapeAdamS"] = own(compopt.ScapeAdamS), SCAPE
CASES["ScapeAdamS, sharded"] = own(compopt.ScapeAdamS), {**SCAPE, "sharded": True}
for updates in ("int8", "int4", "int2"):
    CASES[f"TagcAdamW, updates in {updates}"] = own(compopt.TagcAdamW), {"density": 0.1, "update_dtype": updates}


def move(make: Make, shape: tuple[int, int], zero: Tensor, lr_scale: float, **options) -> list[Tensor]:
    """Return what a matrix and a vector have moved in STEPS, with gradients that are 0 at ``zero`` of the matrix and
    in every third element of the vector."""
    world, generator = World(2), torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator), torch.randn(LENGTH, generator=generator)]
    params = [[torch.nn.Parameter(x.clone()) for x in start] for _ in range(world.size)]
    groups = [[dict(params=own_params)] for own_params in params]
    optimizers = [make(group, process_group=comm, **options) for group, comm in zip(groups, world.comms, strict=True)]
    for step in range(STEPS):
        for rank, (matrix, vector) in enumerate(params):
            matrix.grad, vector.grad = (lr_scale * torch.randn(x.shape, generator=generator) for x in start)
            matrix.grad[zero] = 0
            vector.grad[::3] = 0
            if rank and step % 4 == 2:
                matrix.grad = None
        world.step(optimizers)
    return [p.detach() - x for p, x in zip(params[0], start, strict=True)]


def is_fast(case: str, backend: str) -> bool:
    stores_numbers = not case.endswith((", int8", ", bfloat16, None")) or case == "SeparateAdam, int8, int8"
    return (case, backend) == ("SeparateAdam, None, None", "torch") or (backend == "native" and stores_numbers)


EACH = slow_but(is_fast, itertools.product(CASES, ["torch", "native", "triton"]))


@pytest.mark.parametrize(("case", "backend"), EACH, indirect=["backend"])
def test_what_has_no_gradient_does_not_move(case, backend):
    make, options = CASES[case]
    zero = ZERO_ROWS | ZERO_COLUMNS
    for scale in (1e-3, 1.0):
        matrix, vector = move(make, SHAPE, zero, scale, **options)
        assert not matrix[zero].any(), float(matrix[zero].abs().max())
        assert not vector[::3].any()
        assert matrix[~zero].count_nonzero() > 0.9 * (~zero).sum() and vector[1::3].all()


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize(("shape", "zero"), [(SHAPE, ZERO_ROWS), (SHAPE[::-1], ZERO_ROWS.T)], ids=["tall", "wide"])
def test_a_random_projection_keeps_zeros_along_the_longer_side(shape, zero, backend):
    options = {"projection": "gaussian", "ratio": 4, "payload_dtype": "int8", "dense_steps": 1}
    for make in (ADAM, separate):
        matrix, vector = move(make, shape, zero, 1e-2, **options)
        assert not matrix[zero].any() and matrix[~zero].all() and not vector[::3].any()
