"""Radius, from Algorithms 1 and 2 of "Radius: Range-based Gradient Sparsity for Large Foundation Model Pre-training".

Line numbers in the comments are Algorithm 1's. Corrected: the paper has no mask between the threshold and the next
multiple of the interval; here the first step past the start samples one. The mask is taken from the corrected gradient
(line 21), as the text says, not from |G| (line 23).
"""

import torch
from torch import Tensor

from .common import Grads, as_float64, clip_by_global_norm, mean_over_ranks, read_grads, top_k


class RadiusOracle:
    """All ranks of RadiusAdamW at once.

    Args:
        params: initial parameters, the same on every rank; copied.
        ranks: number of ranks N.
        lr, betas, eps, weight_decay: AdamW's. `lr` may be changed between steps.
        density: share of each compressed tensor that is exchanged at a sparse step.
        interval: steps t with t % interval == 0 (t from 1) take a new mask.
        dense_steps: steps t < dense_steps are dense.
        max_grad_norm: global norm above which the averaged gradient is scaled down; None is off.
        compress: per tensor, whether it is compressed; the others are always averaged densely.
        maximize: ascend. The averaged gradient is negated; residuals keep the sign of the gradients.

    Attributes:
        params, m, v: the one copy all ranks share.
        residual: residual[rank][i], zeros where nothing is held back.
        mask: mask[i] boolean, None where there is none (yet).
        phase: "dense", "resample" or "sparse", of the last step.
        t: steps taken.
    """

    def __init__(
        self,
        params: list[Tensor],
        ranks: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        density: float,
        interval: int,
        dense_steps: int,
        max_grad_norm: float | None = None,
        compress: list[bool] | None = None,
        maximize: bool = False,
    ):
        self.params = as_float64(params)
        self.ranks, self.lr, self.betas, self.eps, self.weight_decay = ranks, lr, betas, eps, weight_decay
        self.density, self.interval, self.dense_steps = density, interval, dense_steps
        self.max_grad_norm, self.maximize = max_grad_norm, maximize
        self.compress = [True] * len(params) if compress is None else list(compress)
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.residual = [[torch.zeros_like(p) for p in self.params] for _ in range(ranks)]
        self.mask: list[Tensor | None] = [None] * len(params)
        self.sampled = False
        self.phase = ""
        self.t = 0

    def step(self, grads: Grads) -> None:
        """One step of all ranks; grads[rank][i] is what that rank's backward left."""
        self.t += 1
        grads = read_grads(grads, self.params, self.ranks)
        self.phase = self._phase_of(self.t)
        average = mean_over_ranks([self._exchanged(rank, local) for rank, local in enumerate(grads)])  # lines 4, 9, 14
        if self.maximize:
            average = [-g for g in average]
        average = clip_by_global_norm(average, self.max_grad_norm)  # line 20
        update = [self._corrected(i, g) for i, g in enumerate(average)]  # line 21
        if self.phase == "resample":  # lines 22-24
            self.mask = [
                top_k(u.abs(), self.density) if c else None for u, c in zip(update, self.compress, strict=True)
            ]
            self.sampled = True
        self.params = [w - self.lr * u for w, u in zip(self.params, update, strict=True)]  # line 25

    def _phase_of(self, t: int) -> str:
        if t < self.dense_steps:  # line 3
            return "dense"
        return "resample" if not self.sampled or t % self.interval == 0 else "sparse"  # line 7

    def _exchanged(self, rank: int, grads: list[Tensor]) -> list[Tensor]:
        """Return what this rank puts into the mean; moves the rest to its residual, or the residual back."""
        sent = []
        for i, g in enumerate(grads):
            if self.phase == "dense" or not self.compress[i]:
                sent.append(g)
            elif self.phase == "resample":
                sent.append(self.residual[rank][i] + g)  # line 8
                self.residual[rank][i] = torch.zeros_like(g)  # line 10
            else:
                on = self.mask[i]
                self.residual[rank][i] = self.residual[rank][i] + torch.where(on, 0.0, g)  # line 16
                sent.append(torch.where(on, g, 0.0))  # lines 13, 17
        return sent

    def _corrected(self, i: int, g: Tensor) -> Tensor:
        """Algorithm 2: AdamW's direction, decoupled weight decay included, with the weights of before the step."""
        beta1, beta2 = self.betas
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g.square()
        m_hat = self.m[i] / (1 - beta1**self.t)
        v_hat = self.v[i] / (1 - beta2**self.t)
        return m_hat / (v_hat.sqrt() + self.eps) + self.weight_decay * self.params[i]
