"""Conservation: over ranks, gradients equal what was applied plus the residuals.

The gradient that an optimizer applied is read off its first moment, G = (m' - b1 m) / (1 - b1), so this knows nothing
of how it was exchanged. ``m`` and what is owed, ``r``, the mean over ranks of the residuals, are taken before a step
and after it, whole, also where each rank keeps a shard only::

    SCAPE      m' + r' = b1 m + (1 - b1) mean g + r             # sharded: what ranks have in common belongs to r
    SEPARATE   r' = b r + (1 - b) (mean g + r - G), where it projects with a weight b of the old error
               G = g, r' = 0: the first step of one rank alone, after Gaussian projections, whose error is noise
    all other  G + r' = mean g + r

A payload that rounds is held to this where there is a residual to keep what is lost, that is, of compressed tensors.

Where the average is clipped by a factor f, SEPARATE holds as if every gradient had been f g: all of that is applied or
owed. Of the other classes what was applied, over f, is in the books: what the clip took off what was sent is gone.
"""

from __future__ import annotations

import torch
from table import Case
from torch import Tensor

from compopt._ops.norms import clip_factor
from compopt._wire.codec import dtype_name
from compopt.separate.projection_options import is_reset_step

Optimizers = list[torch.optim.Optimizer]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}  # of what ``Ledger.check`` returns


def everywhere(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def moments(optimizers: Optimizers) -> list[Tensor]:
    """The first moment of every tensor, whole, in float64; of Muon's matrices its momentum, such a mean too."""
    first = optimizers[0]
    saved = first.state_dict()  # settles what is on its way
    if first.sharded:
        return combined(optimizers, "exp_avg")
    entries = [saved["state"].get(n, {}) for n in range(len(everywhere(first)))]
    entries = [entry.get("base", entry) for entry in entries]
    results = [
        entry.get("exp_avg", entry.get("momentum_buffer", torch.zeros_like(p)))
        for entry, p in zip(entries, everywhere(first), strict=True)
    ]
    return [m.to(torch.float64, copy=True) for m in results]


def mean_residuals(optimizers: Optimizers) -> list[Tensor]:
    """Return what all ranks together hold back of every tensor, as it counts in a mean; zeros where nothing can be."""
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    zeros = [torch.zeros_like(p, dtype=torch.float64) for p in everywhere(optimizers[0])]
    results = [torch.stack([s[n].get("residual", zero).double() for s in states]) for n, zero in enumerate(zeros)]
    return [local.mean(0) + common for local, common in zip(results, combined(optimizers, "common"), strict=True)]


def largest_stored(optimizers: Optimizers, n: int) -> float:
    """Return the largest number of each rank's residual of tensor ``n``, their mean: in the mean over ranks of the
    residuals these may cancel, but what 8 bits are off by does not.
    """
    held = [optimizer.state_dict()["state"].get(n, {}).get("residual") for optimizer in optimizers]
    return sum(float(r.abs().max()) for r in held if r is not None) / len(held)


def combined(optimizers: Optimizers, name: str) -> list[Tensor]:
    """A state of every tensor of which each rank keeps a shard, put together in float64; zeros where there is none."""
    results = []
    for replicas in zip(*map(everywhere, optimizers), strict=True):
        entries = [optimizer.state[p] for optimizer, p in zip(optimizers, replicas, strict=True)]
        whole = torch.zeros_like(replicas[0], dtype=torch.float64)
        if all(name in entry for entry in entries):
            whole.copy_(torch.cat([entry[name].view(-1) for entry in entries]).view(whole.shape))
        results.append(whole)
    return results


class Ledger:
    """The books of one step: opened before it, checked after it on the optimizers that took it.

    ``previous``: those of the step before, at whose end nothing else has happened since.
    """

    def __init__(self, case: Case, optimizers: Optimizers, previous: Ledger | None = None):
        self.case = case
        self.m, self.r = previous.end if previous else (moments(optimizers), mean_residuals(optimizers))
        self.alone = len(optimizers) == 1 and not optimizers[0].simulate  # then nothing is projected
        grads = [[p.grad for p in everywhere(optimizer)] for optimizer in optimizers]
        self.g = [self._mean(each) for each in zip(*grads, strict=True)]
        self.weights = self._weights_of_old_errors(optimizers[0])

    @staticmethod
    def _mean(grads: tuple[Tensor | None, ...]) -> Tensor | None:
        there = [g.double() for g in grads if g is not None]
        return sum(there) / len(grads) if there else None

    def _weights_of_old_errors(self, first: torch.optim.Optimizer) -> list[float | None]:
        """SEPARATE's, of the tensors that the coming step projects."""
        plans = {}
        if self.case.method == "separate" and not self.alone:
            plans = dict(pair for b in first._buckets for pair in zip(b.params, first._plan_next_step(b), strict=True))
        return [plans[p].beta if plans.get(p) else None for p in everywhere(first)]

    def check(self, optimizers: Optimizers) -> float:
        """The largest relative difference between the two sides, over all tensors of which they can be told."""
        first, worst = optimizers[0], 0.0
        self.factor = clip_factor(first.stats.grad_norm, first.option_groups[0].get("max_grad_norm"))
        groups = [group for group, local in zip(first.option_groups, first.param_groups, strict=True)
                  for _ in local["params"]]  # fmt: skip
        adams = [group for group in first.param_groups for _ in group["params"]]
        self.end = moments(optimizers), mean_residuals(optimizers)
        for n, (p, m, r) in enumerate(zip(everywhere(first), *self.end, strict=True)):
            rounds = bool(groups[n].get("payload_dtype")) and groups[n]["payload_dtype"] != dtype_name(p.dtype)
            if p.numel() and ("residual" in first.state[p] or not rounds):
                left, right = self._sides(n, groups[n], adams[n], m, r, rounds)
                sizes = [float(x.abs().max()) for x in (self.m[n], self.r[n], m, r, left, right)]
                if not self.case.keeps_exactly:
                    sizes.append(largest_stored(optimizers, n))
                worst = max(worst, float((left - right).abs().max()) / (max(sizes) + 1e-300))
        return worst

    def _sides(self, n: int, group: dict, adam: dict, m_: Tensor, r_: Tensor, rounds: bool) -> tuple[Tensor, Tensor]:
        m, r, g, weight = self.m[n], self.r[n], self.g[n], self.weights[n]
        reset = "reset_interval" in group and is_reset_step(group, group["step"])
        f = self.factor
        if g is None:  # no rank had a gradient
            return torch.stack([m_, r_]), torch.stack([m, r * (not reset)])
        beta = adam["betas"][0] if "betas" in adam else adam["momentum"]
        sign = -1 if adam.get("maximize") else 1
        if self.case.method == "scape":
            sent = m_.where(m_ == 0, beta * m + (m_ - beta * m) / f)  # as it would be, not clipped; 0 off the mask
            return sent + r_, beta * m + sign * (1 - beta) * g + r
        applied = sign * (m_ - beta * m) / (1 - beta)
        if self.case.method == "separate":
            g = f * g
        else:
            applied = applied / f
        if reset and (weight is not None or rounds):
            return r_, torch.zeros_like(r)
        if self.alone and group.get("projection") == "gaussian":
            return torch.stack([applied, r_]), torch.stack([g, torch.zeros_like(r)])
        if weight is not None:
            return r_, weight * r + (1 - weight) * (g + r - applied)
        return applied + r_, g + r
