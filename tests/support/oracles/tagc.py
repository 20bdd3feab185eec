"""TAGC, from Algorithm 1 of "TAGC: Optimizing Gradient Communication in Distributed Transformer Training".

The sketch is lossless where it can be peeled (section 2.2), so there is one oracle for both codecs. Line numbers in the
comments are Algorithm 1's. What follows line 10 is AdamW of a sharded optimizer: elementwise, so the shards do not show
but in the thresholds. Corrected: the or over ranks is exact, and at most `density` of a shard is left.
"""

from fractions import Fraction

import torch
from torch import Tensor

from .common import Grads, as_float64, clip_by_global_norm, mean_over_ranks, read_grads


class TagcOracle:
    """All ranks of TagcAdamW at once.

    Args:
        params: initial parameters, the same on every rank; copied.
        ranks: number of ranks N.
        lr, betas, eps, weight_decay: AdamW's. `lr` may be changed between steps.
        shards: the cuts: each shard is a list of (tensor, first element, last element + 1) of flattened tensors. Every
            element of a compressed tensor is in one of them.
        density: share of a shard that is left, at most; a decimal as it was written.
        dense_steps: steps t <= dense_steps are dense.
        max_grad_norm: global norm above which the averaged gradient is scaled down; None is off.
        compress: per tensor, whether it is compressed; the others are averaged densely.
        maximize: ascend.

    Attributes:
        params, m, v: the one copy all ranks share. residual: residual[rank][i], the accumulator.
        union: union[i] boolean, what was sent of compressed tensor i at the last step. t: steps taken.
    """

    def __init__(
        self,
        params: list[Tensor],
        ranks: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        shards: list[list[tuple[int, int, int]]],
        density: float,
        dense_steps: int = 0,
        max_grad_norm: float | None = None,
        compress: list[bool] | None = None,
        maximize: bool = False,
    ):
        self.params = as_float64(params)
        self.ranks, self.lr, self.betas, self.eps, self.weight_decay = ranks, lr, betas, eps, weight_decay
        self.shards, self.density, self.dense_steps = shards, density, dense_steps
        self.max_grad_norm, self.maximize = max_grad_norm, maximize
        self.compress = [True] * len(params) if compress is None else list(compress)
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.residual = [[torch.zeros_like(p) for p in self.params] for _ in range(ranks)]
        self.union: list[Tensor] = []
        self.t = 0

    def step(self, grads: Grads) -> None:
        """One step of all ranks; grads[rank][i] is what that rank's backward left."""
        self.t += 1
        grads = read_grads(grads, self.params, self.ranks)
        if self.t > self.dense_steps:
            grads = [self._sparsified(rank, local) for rank, local in enumerate(grads)]
            self.union = [torch.stack([g != 0 for g in same]).any(0) for same in zip(*grads, strict=True)]  # line 4
        average = clip_by_global_norm(mean_over_ranks(grads), self.max_grad_norm)  # lines 5 to 10
        beta1, beta2 = self.betas
        for i, g in enumerate(average):
            g = -g if self.maximize else g
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * g.square()
            m_hat, v_hat = self.m[i] / (1 - beta1**self.t), self.v[i] / (1 - beta2**self.t)
            update = m_hat / (v_hat.sqrt() + self.eps) + self.weight_decay * self.params[i]
            self.params[i] = self.params[i] - self.lr * update

    def _sparsified(self, rank: int, grads: list[Tensor]) -> list[Tensor]:
        """Lines 1 and 2, and what of them is sent."""
        sums = [g + acc if c else g for g, acc, c in zip(grads, self.residual[rank], self.compress, strict=True)]
        left = [torch.zeros_like(x).view(-1) if c else x for x, c in zip(sums, self.compress, strict=True)]
        for shard in self.shards:
            pieces = [sums[i].flatten()[a:b] for i, a, b in shard]
            x = torch.cat(pieces)
            kept = Fraction(str(self.density)) * len(x) // 1  # rounded down
            x[x.abs().argsort()[: len(x) - int(kept)]] = 0.0
            for (i, a, b), piece in zip(shard, x.split([len(piece) for piece in pieces]), strict=True):
                left[i][a:b] = piece
        left = [x.view(s.shape) for x, s in zip(left, sums, strict=True)]
        self.residual[rank] = [
            s - x if c else torch.zeros_like(s) for s, x, c in zip(sums, left, self.compress, strict=True)
        ]
        return left
