"""What goes in comes out: over ranks, gradients equal what was applied and what is owed.

The gradient that an optimizer applied is read off its first moment, G = (m' - b1 m) / (1 - b1), so this knows nothing
of how it was exchanged. ``m`` and the mean ``r`` over ranks of the residuals are taken before a step and after it::

    AdamS      G = mean g
    Radius     G + r' = mean g + r
    SCAPE      m' + r' = b1 m + (1 - b1) mean g + r
    SEPARATE   r' = b r + (1 - b) (mean g + r - G), where it projects with a weight b of the old error; else G = mean g
"""

from __future__ import annotations

import torch
from table import Case
from torch import Tensor

from compopt._projecting import resets

LAWS = ("adamw", "radius", "scape", "separate")  # of Case.method; a method without one is not held to any


def held_to_one(case: Case, optimizer: torch.optim.Optimizer) -> bool:
    """Whether this says what the case conserves: not where moments are cut into shards, and a rank sees its own."""
    return case.method in LAWS and not optimizer.sharded


def everywhere(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    saved = optimizer.state_dict()
    state = saved["base"]["state"] if "base" in saved else saved["state"]
    zeros = [torch.zeros_like(p) for p in everywhere(optimizer)]
    return [state.get(n, {}).get("exp_avg", zero).clone() for n, zero in enumerate(zeros)]


def mean_residuals(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    zeros = [torch.zeros_like(p) for p in everywhere(optimizers[0])]
    found = [[s[n].get("residual", zero) for s in states] for n, zero in enumerate(zeros)]
    return [torch.stack(each).mean(0) for each in found]


class Ledger:
    """The books of one step: opened before it, checked after it."""

    def __init__(self, case: Case, optimizers: list[torch.optim.Optimizer]):
        self.case, self.optimizers = case, optimizers
        self.m, self.r = moments(optimizers[0]), mean_residuals(optimizers)
        ranks = [[p.grad for p in everywhere(optimizer)] for optimizer in optimizers]
        self.g = [self._mean(each) for each in zip(*ranks, strict=True)]
        self.weights = self._weights_of_old_errors()

    @staticmethod
    def _mean(grads: tuple[Tensor | None, ...]) -> Tensor | None:
        there = [g for g in grads if g is not None]
        return sum(there) / len(grads) if there else None

    def _weights_of_old_errors(self) -> dict[Tensor, float]:
        """SEPARATE's, for the tensors that the coming step projects; 0 at a reset stands for r' = 0."""
        if self.case.method != "separate":
            return {}
        first = self.optimizers[0]
        pairs = [pair for b in first._buckets for pair in zip(b.params, first._plan(b), strict=True)]
        return {p: q.beta for p, q in pairs if q is not None}

    def check(self) -> float:
        """The largest relative difference between the two sides, over all tensors."""
        first, worst = self.optimizers[0], 0.0
        group = first._option_groups[0]
        reset = "reset_interval" in group and resets(group, group["step"])
        after, residuals = moments(first), mean_residuals(self.optimizers)
        for p, g, m, r, m_, r_ in zip(everywhere(first), self.g, self.m, self.r, after, residuals, strict=True):
            if g is None:  # no rank had a gradient
                left, right = torch.cat([m_, r_]) if m.dim() else m_ + r_, torch.cat([m, r]) if m.dim() else m + r
                if reset:
                    left, right = m_, m
            else:
                left, right = self._sides(p, g, m, r, m_, r_, bool(reset))
            if left.numel():
                size = max(float(x.abs().max()) for x in (g if g is not None else m, m, r, m_, r_)) + 1e-300
                worst = max(worst, float((left - right).abs().max()) / size)
        return worst

    def _sides(self, p: Tensor, g: Tensor, m: Tensor, r: Tensor, m_: Tensor, r_: Tensor, reset: bool) -> tuple:
        beta1 = next(group for group in self.optimizers[0].param_groups if "betas" in group)["betas"][0]
        if self.case.method == "scape":
            return m_ + r_, beta1 * m + (1 - beta1) * g + r
        applied = (m_ - beta1 * m) / (1 - beta1)
        if self.case.method == "radius":
            return applied + r_, g + r
        if p in self.weights and not reset:
            beta = self.weights[p]
            return r_, beta * r + (1 - beta) * (g + r - applied)
        return (torch.zeros_like(r_) + r_, torch.zeros_like(r)) if p in self.weights else (applied, g)
