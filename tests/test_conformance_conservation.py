"""What goes in comes out, for every class on every back end, in float32: gradients are applied or owed."""

from __future__ import annotations

import inspect

import pytest
import torch
from conformance import every
from conservation import TOLERANCE, Ledger
from problems import gradients, replicas, step, weights

import compopt

# A shard of one rank has 146,000 compressed elements, of three ranks 48,000.
SHAPES = [(64, 80), (80,), (128, 64), (260, 512), (10, 10), (65, 81)]  # the last ends within sixteen elements
FEW = SHAPES[:2]  # for Triton's interpreter, which takes seconds for the others


def audit(case, ranks: int, shapes: list[tuple[int, ...]], **said) -> set[str]:
    """Train on noise, with every tensor absent now and then; the phases it went through."""

    def make(params, process_group):
        return case.make(params, process_group=process_group, **{**case.averaging, **said})

    world, params, optimizers = replicas(ranks, weights(shapes, torch.float32), make)
    phases = set()
    for t in range(9):
        grads = gradients(ranks, t, shapes, torch.float32)
        for rank, own in enumerate(grads):
            if t % 3 == 2:
                own[(t + rank) % len(own)] = None  # on this rank
            if t % 4 == 0:
                own[t // 2 % len(own)] = None  # on all
        for own, given in zip(params, grads, strict=True):
            for p, g in zip(own, given, strict=True):
                p.grad = g
        books = Ledger(case, optimizers)
        step(world, params, optimizers, grads)
        phases.add(optimizers[0].stats.phase)
        off = books.check(optimizers)
        assert off < TOLERANCE[torch.float32], f"step {t + 1}, {optimizers[0].stats.phase}: {off:.1e}"
        assert "max_grad_norm" not in said or books.factor < 0.8
    return phases


@every
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_conserved(case, backend, ranks):
    if backend == "triton" and ranks > 1:
        pytest.skip("one rank shows what the kernels do")
    phases = audit(case, ranks, FEW if backend == "triton" else SHAPES)
    assert phases - {"dense"} or case.cls is compopt.AdamS


@every
@pytest.mark.parametrize("payload", ["int8", "int4", "int2"])
def test_what_a_payload_in_codes_rounds_off_is_owed(case, backend, payload):
    if backend == "triton":
        pytest.skip("rounding is not a kernel's work")
    if "payload_dtype" not in inspect.signature(case.cls).parameters:
        pytest.skip("sends what the gradients are")
    try:
        audit(case, 3, SHAPES, payload_dtype=payload)
    except ValueError as error:
        assert "payload_dtype" in str(error)
        pytest.skip("refuses codes")


@every
@pytest.mark.parametrize("payload_dtype", [None, "int8"])
def test_a_clip_takes_what_was_sent_and_nothing_that_is_owed(case, backend, payload_dtype):
    if backend == "triton" and payload_dtype:
        pytest.skip("rounding is not a kernel's work")
    if "max_grad_norm" not in inspect.signature(case.cls).parameters:
        pytest.skip("does not clip")
    # of a norm of 9 to 72 and, of three ranks, 80 to 220
    said = dict(payload_dtype=payload_dtype, max_grad_norm=6.0 if backend == "triton" else 40.0)
    try:
        audit(case, *((1, FEW) if backend == "triton" else (3, SHAPES)), **said)
    except ValueError as error:
        assert payload_dtype and "payload_dtype" in str(error)
        pytest.skip("refuses int8")
