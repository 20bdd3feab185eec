"""What goes in comes out, in float32 on the back end that is chosen by itself: absent tensors, and a dense start anew.

The gradient that was applied is read off the first moment, G = (m' - b1 m) / (1 - b1), and r is the mean over ranks of
what they hold back. Then G + r' = mean g + r, for SCAPE m' + r' = b1 m + (1 - b1) mean g + r; where no rank has a
gradient, m' = m and r' = r.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from problems import gradients, replicas, step, weights
from table import projecting
from torch import Tensor

import compopt

SHAPES = [(64, 64), (80,), (130, 129), (6, 40, 48), (10, 10)]  # 4096 elements, more than 16,384, and not compressed
HELD = (0, 2, 3)


def around_adamw(params, process_group, **options):
    return compopt.Separate(torch.optim.AdamW(params, lr=1e-3), process_group=process_group, **options)


RADIUS = dict(density=0.3, interval=4, warmup_steps=0)
SCAPE = dict(density=0.1, density_warmup_steps=3, lr=1e-3)
SEPARATE = dict(ratio=8, projection="orthonormal")
TRACKED = projecting("tracked")
INT8 = dict(payload_dtype=torch.int8)
FORMS = {
    "Radius": (compopt.RadiusAdamW, RADIUS),
    "Radius, int8": (compopt.RadiusAdamW, {**RADIUS, **INT8}),
    "SCAPE": (compopt.ScapeAdamS, SCAPE),
    "SCAPE, int8": (compopt.ScapeAdamS, {**SCAPE, **INT8}),
    "SCAPE, no delay": (compopt.ScapeAdamS, {**SCAPE, "mask_delay": 0}),
    "SCAPE, by PyTorch's operators": (compopt.ScapeAdamS, SCAPE),
    "SCAPE, sharded": (compopt.ScapeAdamS, {**SCAPE, "sharded": True}),
    "orthonormal": (compopt.SeparateAdam, SEPARATE),
    "tracked": (compopt.SeparateAdam, TRACKED),
    "tracked, int8": (compopt.SeparateAdam, {**TRACKED, **INT8}),
    "tracked, AdamW": (around_adamw, TRACKED),
    "TAGC": (compopt.TagcAdamW, dict(sparsity=0.9)),
    "TAGC, sketch": (compopt.TagcAdamW, dict(sparsity=0.9, codec="sketch")),
}
every = pytest.mark.parametrize("form", FORMS)


class Run:
    """Ranks of one form, and their books of every step."""

    def __init__(self, form: str, ranks: int = 2, **options):
        make, own = FORMS[form]
        self.form, self.ranks, self.t = form, ranks, 0
        start = weights(SHAPES, torch.float32)
        backend = "torch" if "operators" in form else "auto"
        with mock.patch.dict(os.environ, COMPOPT_BACKEND=backend):
            self._build(make, start, {**own, **options})

    def _build(self, make, start: list[Tensor], options: dict) -> None:
        self.world, self.params, self.optimizers = replicas(
            self.ranks, start, lambda params, process_group: make(params, process_group=process_group, **options)
        )

    def books(self) -> tuple[list[Tensor], list[Tensor]]:
        """m and r of every tensor, in float64; nothing where there is none yet."""
        sharded, found = self.optimizers[0].sharded, ([], [])
        saved = [optimizer.state_dict() for optimizer in self.optimizers]
        for n, shape in enumerate(SHAPES):
            entries = [s["state"][n] for s in saved]
            moments = [s.get("base", s)["state"].get(n, {}).get("exp_avg", torch.zeros(shape)) for s in saved]
            own = [sum(e.get(name, torch.zeros(shape)).double() for e in entries) for name in ("residual", "common")]
            found[0].append(sum(m.double() for m in moments) if sharded else moments[0].double())
            found[1].append(own[0] / self.ranks + own[1])
        return found

    def step(self, absent: dict[int, list[int]] | None = None) -> None:
        """A step in which ranks lack gradients: rank -> tensors. The books are kept."""
        grads = gradients(self.ranks, self.t, SHAPES, torch.float32)
        for rank, tensors in (absent or {}).items():
            for n in tensors:
                grads[rank][n] = None
        before = self.books()
        step(self.world, self.params, self.optimizers, grads)
        self.t += 1
        assert self.optimizers[0].stats.phase != "skipped"
        beta = self.optimizers[0].param_groups[0]["betas"][0]
        for n, (m, r, m_, r_) in enumerate(zip(*before, *self.books(), strict=True)):
            if "int8" in self.form and n not in HELD:
                continue  # what rounding takes off it is kept nowhere
            there = [g[n].double() for g in grads if g[n] is not None]
            if not there:
                assert torch.equal(m_, m), f"tensor {n} has no gradient, and its momentum moved in step {self.t}"
                left, right = r_, r
            elif self.form.startswith("SCAPE"):
                left, right = m_ + r_, beta * m + (1 - beta) * sum(there) / self.ranks + r
            else:
                left, right = (m_ - beta * m) / (1 - beta) + r_, sum(there) / self.ranks + r
            size = max(1.0, float(right.abs().max()))
            error = float((left - right).abs().max()) / size
            assert error < 1e-5, f"tensor {n} in step {self.t}, {self.optimizers[0].stats.phase}: {error:.1e}"

    def residual(self, n: int) -> Tensor:
        return self.books()[1][n]


@every
def test_every_gradient_is_applied_or_owed(form):
    run = Run(form, 3)
    for _ in range(7):
        run.step()
    assert all(run.residual(n).abs().max() > 0.1 for n in HELD)


@every
def test_a_tensor_that_no_rank_has_a_gradient_for_keeps_momentum_and_what_it_owes(form):
    run, most = Run(form), 0.0
    for t in range(12):  # absent for a step in every phase, and for two in a row
        everywhere = [0, 2] if t in (3, 7, 8) else [3] if t in (4, 6) else []
        before = [run.residual(n) for n in everywhere]
        run.step(dict.fromkeys(range(2), everywhere))
        for n, owed in zip(everywhere, before, strict=True):
            assert torch.equal(run.residual(n), owed)
            most = max(most, float(owed.abs().max()))
    assert most > 0.1


@every
def test_a_tensor_that_one_rank_has_no_gradient_for(form):
    run = Run(form, 3)
    for t in range(9):
        run.step({t % 3: [0, 3], (t + 1) % 3: [2] if t % 2 else []})


def dense_from_now_on(run: Run) -> None:
    for optimizer in run.optimizers:
        for group in optimizer._option_groups:
            group["warmup_steps"] = 10**6


@every
def test_a_dense_step_sends_what_compressed_ones_left_and_absent_tensors_go_on_owing(form):
    run = Run(form)
    for _ in range(6):
        run.step()
    dense_from_now_on(run)
    if form.startswith("SCAPE") and form != "SCAPE, no delay":
        run.step()  # on the mask that was found one step ago
    owed = run.residual(2)
    assert owed.abs().max() > 0.1
    run.step({0: [2], 1: [2]})
    assert run.optimizers[0].stats.phase == "dense"
    assert torch.equal(run.residual(2), owed)
    rounding = 0.2 if "int8" in form else 0.0  # what it takes off is owed anew
    assert all(run.residual(n).abs().max() <= rounding for n in (0, 3))
    run.step()  # it is back
    assert all(run.residual(n).abs().max() <= rounding for n in HELD)
    run.step()


def test_an_unbiased_projection_owes_nothing_in_a_dense_step():
    run = Run("orthonormal", projection="gaussian")
    for _ in range(4):
        grads = gradients(2, run.t, SHAPES, torch.float32)
        step(run.world, run.params, run.optimizers, grads)
        run.t += 1
    dense_from_now_on(run)
    (m, _), grads = run.books(), gradients(2, run.t, SHAPES, torch.float32)
    step(run.world, run.params, run.optimizers, grads)
    for n, (old, new) in enumerate(zip(m, run.books()[0], strict=True)):
        mean = (grads[0][n].double() + grads[1][n].double()) / 2
        torch.testing.assert_close((new - 0.9 * old) / 0.1, mean, rtol=0, atol=2e-5)
        assert not run.residual(n).any()
