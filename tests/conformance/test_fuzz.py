"""Anything that the table's classes and forms may be given: no exception, replicas equal to the bit, nothing lost.

Twelve examples of each here, the same each time; ``make fuzz`` draws 3,000 in all, anew.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch
from conformance import AVERAGING, every, every_average
from conservation import TOLERANCE, Ledger, everywhere
from fuzz import LOW, REFUSED, Example, Run, examples
from hypothesis import HealthCheck, given, settings
from table import CASES, FORMS, INT8, Case

from compopt._state import buckets

EXAMPLES = int(os.environ.get("COMPOPT_FUZZ", 0))


def hold(test: Callable[[Run], None], case: Case, lossless: bool, share: float) -> None:
    """Run ``test`` on a share of the examples of this case."""
    all_of_case = EXAMPLES / len(CASES + FORMS + INT8) if EXAMPLES else 6

    @settings(
        max_examples=-int(-all_of_case * share // 1), deadline=None, derandomize=not EXAMPLES, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(examples(case, lossless))
    def holds(example: Example) -> None:
        once(test, example)

    holds()


def once(test: Callable[[Run], None], example: Example) -> None:
    """One example, unless its options are refused as they should be."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("COMPOPT_BACKEND", example.backend)
        patch.setattr(buckets, "BUCKET_BYTES", example.bucket_bytes)
        try:
            run = Run(example)
        except ValueError as error:
            if not any(words in str(error) for words in REFUSED):
                raise
        else:
            test(run)


def assert_replicas_equal(run: Run) -> None:
    for n, (first, *others) in enumerate(run.replicas()):
        assert first.isfinite().all()
        for rank, p in enumerate(others, start=1):
            assert torch.equal(first, p), f"tensor {n} differs between ranks 0 and {rank}"


def may_be_lost(example: Example, stores: int) -> float:
    """Of one step, relative: a sum over ranks is rounded to the dtype on the wire; what each sends is owed again.

    ``stores``: how often residuals were stored since the books were opened.
    """
    wire = example.payload or example.dtype
    in_the_sum = torch.finfo(wire).eps * example.ranks if wire in LOW and example.ranks > 1 else 0.0
    # what is stored in 8 bits is off by less than a step, a 127th of the largest of its block
    step_of_8_bits = 0.0 if example.case.keeps_exactly else 1.001 / 127
    return TOLERANCE[torch.float32] + in_the_sum + stores * step_of_8_bits


@every_average
def test_replicas_are_equal_nothing_is_lost_and_a_saved_run_goes_on(case):
    def test(run: Run) -> None:
        example, other = run.example, None
        for step in range(example.steps):
            run.backward(step)
            books, stores = Ledger(example.case, run.optimizers), 1
            if step and step == example.saved_at:
                if example.consolidated:
                    stores = 2  # the mean, and the step
                    run = run.resumed(consolidated=True)
                    run.backward(step)
                else:
                    other = run.resumed(consolidated=False)
            run.step()
            assert_replicas_equal(run)
            if not (example.case.build and example.dtype in LOW):  # the base's moments are rounded themselves
                assert books.check(run.optimizers) < may_be_lost(example, stores)
            if other:
                other.backward(step)
                other.step()
        for p, q in zip(*(everywhere(r.optimizers[-1]) for r in (run, other)), strict=True) if other else ():
            assert torch.equal(p, q), "the run that was resumed went another way"

    hold(test, case, lossless=False, share=2 / 3)


@pytest.mark.parametrize("case", [case for case in FORMS if case not in AVERAGING], ids=lambda case: case.name)
def test_after_a_round_was_ended_replicas_are_equal_and_a_saved_run_goes_on(case):
    def test(run: Run) -> None:
        example, other = run.example, None
        for step in range(example.steps):
            if step and step == example.saved_at and not example.consolidated:
                other = run.resumed(consolidated=False)
            for one in filter(None, (run, other)):
                one.backward(step)
                one.step()
        for one in filter(None, (run, other)):
            one.world.run([optimizer.end_round for optimizer in one.optimizers])
            assert_replicas_equal(one)
        for p, q in zip(*(everywhere(r.optimizers[-1]) for r in (run, other)), strict=True) if other else ():
            assert torch.equal(p, q), "the run that was resumed went another way"

    hold(test, case, lossless=False, share=2 / 3)


def reference(run: Run) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """The dense optimizer in float64; where parameters of low precision have no masters, in theirs."""
    case = run.example.case
    dtype = run.example.dtype if case.build and run.example.dtype in LOW else torch.float64
    params = [p.detach().to(dtype, copy=True).requires_grad_() for p in everywhere(run.optimizers[0])]
    options = {name: run.example.options[name] for name in ("weight_decay", "maximize")}
    return case.reference(params, lr=case.lr, **options), params


def rounding(example: Example, p: torch.Tensor, steps: int) -> torch.Tensor:
    """Tolerance of parameters: rounded gradients in an update of about lr, and rounded themselves."""
    wire = example.payload or example.dtype
    steps_of_codes = {"int8": 127, "int4": 7, "int2": 1}
    of_gradient = 127 / 400 / steps_of_codes[wire] if wire in steps_of_codes else torch.finfo(wire).eps
    # a step rounds the factor of weight decay, its product and the sum, each by half of eps; masters are exact
    of_step = 1.5 * torch.finfo(example.dtype).eps
    of_parameter = of_step * (steps if example.case.build or example.dtype not in LOW else 1)
    if example.case.build:
        of_gradient = max(of_gradient, torch.finfo(example.dtype).eps)
    if example.case.form == "Muon":  # torch's orthogonalizes in bfloat16: four of its roundings a step
        of_gradient = max(of_gradient, torch.finfo(torch.bfloat16).eps / 8)
    return p.abs() * of_parameter + example.case.lr * steps * 32 * of_gradient


@every
def test_without_loss_it_is_the_dense_optimizer(case):
    def test(run: Run) -> None:
        dense, params = reference(run)
        for step in range(run.example.steps):
            run.backward(step)
            for p, q in zip(params, zip(*map(everywhere, run.optimizers), strict=True), strict=True):
                grads = [r.grad.double() for r in q if r.grad is not None]
                p.grad = (sum(grads) / len(q)).to(p.dtype) if grads else None
            run.step()
            dense.step()
            assert_replicas_equal(run)
            for n, (p, q) in enumerate(zip(params, everywhere(run.optimizers[0]), strict=True)):
                p, q = p.detach().double(), q.detach().double()
                off = (p - q).abs() / rounding(run.example, p, step + 1)
                assert (off <= 1).all(), f"tensor {n} is {float(off.max()):.1f} times as far off after {step + 1} steps"

    hold(test, case, lossless=True, share=1 / 3)
