"""SEPARATE, from Algorithm 1 of "SEPARATE: A Simple Low-rank Projection for Gradient Compression".

Corrected: beta weights the *old* error. As printed (step 5, equation 5) it weights the new one, and the error diverges
at the ratios and betas the paper uses.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .common import Grads, as_float64, mean_over_ranks, read_grads


class SeparateOracle:
    """All ranks of Separate(base) at once.

    Args:
        params: initial parameters, the same on every rank; copied.
        ranks: number of ranks N.
        base: makes the base optimizer from a list of parameters, e.g. `lambda ps: torch.optim.AdamW(ps, lr=1e-3)`.
        random: random(t, i) is the matrix R of step t (from 1) for tensor i, of shape (c, r) with c the tensor's last
            dimension and r = ceil(c / ratio); unit-variance Gaussian, or orthonormal columns times sqrt(r), since the
            reconstruction is always p R^T / r.
        ef_beta: weight of the old error, or "auto": w / (1 + w) with w = (c + 1) / r, for each matrix.
        reset_interval: after step t the errors are cleared when t % reset_interval == 0; None is never.
        dense_steps: dense steps, t = 1 .. dense_steps.
        max_grad_norm: None is off; else clips what is averaged: g + e, whose squared norm is estimated by |p|^2 / r.
            Every rank's gradient then counts as clipped by that factor, and only so much of what it sent has arrived.
        compress: per tensor, whether it is projected; the others are averaged densely.

    Attributes:
        params: the one copy all ranks share. error: error[rank][i]. average: what the base got at the last step.
        norm: of what was averaged, before the clip.
        phase: "dense" or "projected". base: the torch optimizer. t: steps taken.
    """

    def __init__(
        self,
        params: list[Tensor],
        ranks: int,
        base: Callable[[list[Tensor]], torch.optim.Optimizer],
        random: Callable[[int, int], Tensor],
        ef_beta: float | str = "auto",
        reset_interval: int | None = 128,
        dense_steps: int = 0,
        max_grad_norm: float | None = None,
        compress: list[bool] | None = None,
    ):
        self.params = [p.requires_grad_() for p in as_float64(params)]
        self.ranks, self.base, self.random = ranks, base(self.params), random
        self.ef_beta, self.reset_interval, self.dense_steps = ef_beta, reset_interval, dense_steps
        self.max_grad_norm = max_grad_norm
        self.compress = [True] * len(params) if compress is None else list(compress)
        self.error = [[torch.zeros_like(p) for p in self.params] for _ in range(ranks)]
        self.average: list[Tensor] = []
        self.norm = 0.0
        self.phase = ""
        self.t = 0

    @torch.no_grad()
    def step(self, grads: Grads) -> None:
        """One step of all ranks; grads[rank][i] is what that rank's backward left."""
        self.t += 1
        grads = read_grads(grads, self.params, self.ranks)
        self.phase = "dense" if self.t <= self.dense_steps else "projected"
        self.average = mean_over_ranks(grads)
        squares = [float(a.square().sum()) for a in self.average]
        sent = {}
        if self.phase == "projected":
            for i, compressed in enumerate(self.compress):
                if compressed:
                    self.average[i], squares[i], sent[i] = self._exchange(i, [local[i] for local in grads])
        self.norm, factor = sum(squares) ** 0.5, 1.0
        if self.max_grad_norm is not None:
            factor = min(1.0, self.max_grad_norm / (self.norm + 1e-6))
            self.average = [a * factor for a in self.average]
        for i, local in sent.items():
            self._feed_back(i, [g[i] for g in grads], local, factor)
        for p, g in zip(self.params, self.average, strict=True):
            p.grad = g.clone()
        self.base.step()
        if self.reset_interval is not None and self.t % self.reset_interval == 0:
            self.error = [[torch.zeros_like(p) for p in self.params] for _ in range(self.ranks)]

    def beta(self, i: int, r: int) -> float:
        """Weight of tensor i's old error when it is projected to r columns."""
        if self.ef_beta != "auto":
            return self.ef_beta
        w = (self.params[i].shape[-1] + 1) / r  # E|reconstruction - h|^2 / |h|^2 of a Gaussian projection
        return w / (1 + w)

    def _exchange(self, i: int, grads: list[Tensor]) -> tuple[Tensor, float, list[Tensor]]:
        """Steps 1-4 for one tensor: the averaged reconstruction, the squared norm, each rank's reconstruction."""
        shape = self.params[i].shape
        R = self.random(self.t, i).to(torch.float64)
        c, r = R.shape
        if c != shape[-1]:
            raise ValueError(f"random({self.t}, {i}) has {c} rows, tensor {i} has last dimension {shape[-1]}")
        projections = []
        for rank, g in enumerate(grads):
            h = (g + self.error[rank][i]).reshape(-1, c)  # step 1
            projections.append(h @ R)  # step 2
        mean = torch.stack(projections).mean(0)  # step 3
        owns = [(p @ R.T / r).reshape(shape) for p in projections]
        return (mean @ R.T / r).reshape(shape), float(mean.square().sum()) / r, owns  # step 4

    def _feed_back(self, i: int, grads: list[Tensor], sent: list[Tensor], factor: float) -> None:
        """Step 5: beta e + (1 - beta) (h - own), where nothing is clipped."""
        beta = self.beta(i, self.random(self.t, i).shape[1])
        for rank, (g, local) in enumerate(zip(grads, sent, strict=True)):
            old = self.error[rank][i]
            clipped = old + factor * g  # what is to arrive, of which factor * own has
            self.error[rank][i] = beta * old + (1 - beta) * (clipped - factor * local)
