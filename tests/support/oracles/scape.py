"""AdamS and SCAPE, from equation 2 and Algorithm 1 of "SCAPE".

Line numbers in the comments are Algorithm 1's. Corrected: line 20 divides by sqrt(v) + eps; clipping (line 18) rebuilds
m from the clipped gradient, because otherwise it only shrinks v and an outlier makes a larger step (`clip="scape"` is
the printed form).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .common import Grads, as_float64, clip_by_global_norm, mean_over_ranks, read_grads, top_k


class AdamSOracle:
    """AdamS on the dense average of all ranks' gradients.

    Args:
        params, ranks: initial parameters (copied) and number of ranks.
        lr, betas, eps, weight_decay: the optimizer's; weight decay is decoupled. `lr` may be changed between steps.
        maximize: ascend; gradients are negated on entry, so that m (and residuals) carry the negated sign.

    Attributes:
        params, m: the one copy all ranks share. t: steps taken.
    """

    def __init__(
        self,
        params: list[Tensor],
        ranks: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool = False,
    ):
        self.params = as_float64(params)
        self.ranks, self.lr, self.betas, self.eps, self.weight_decay = ranks, lr, betas, eps, weight_decay
        self.maximize = maximize
        self.m = [torch.zeros_like(p) for p in self.params]
        self.t = 0

    def step(self, grads: Grads) -> None:
        """One step of all ranks; grads[rank][i] is what that rank's backward left."""
        self.t += 1
        beta1, _ = self.betas
        average = mean_over_ranks(self._read(grads))
        m = [beta1 * m_prev + (1 - beta1) * g for m_prev, g in zip(self.m, average, strict=True)]
        self._apply(m, average)

    def _read(self, grads: Grads) -> Grads:
        grads = read_grads(grads, self.params, self.ranks)
        return [[-g for g in local] for local in grads] if self.maximize else grads

    def _apply(self, m: list[Tensor], average: list[Tensor]) -> None:
        """Lines 19-21: v from the *previous* m and the averaged gradient, then the weights; m becomes the state."""
        beta1, beta2 = self.betas
        for i, (m_new, g) in enumerate(zip(m, average, strict=True)):
            m_hat, m_prev = m_new / (1 - beta1**self.t), self.m[i]
            v_hat = (beta2 * m_prev.square() + (1 - beta2) * g.square()) / (1 - beta2**self.t)
            update = m_hat / (v_hat.sqrt() + self.eps) + self.weight_decay * self.params[i]
            self.params[i] = self.params[i] - self.lr * update
        self.m = m


class ScapeOracle(AdamSOracle):
    """All ranks of ScapeAdamS at once, replicated form, exact top-k, whole tensors dealt to ranks.

    Args (beyond AdamSOracle's):
        owner: owner[i] is the rank that selects tensor i's mask, from its own |x|.
        density: share of each compressed tensor that is exchanged, or a function from a step t (from 1) to the density
            of the mask *used* at t, in place of the schedule below.
        dense_steps: dense steps, t = 1 .. dense_steps.
        density_steps: after them the k-th step, k from 0, has density max(density, density^(k / this)); 0 is
            the final density at once.
        clip: "consistent" or "scape" (see above), max_grad_norm: global norm of the averaged gradient; None is off.
        compress: per tensor, whether it is compressed.

    Attributes (beyond AdamSOracle's):
        residual: residual[rank][i]. mask: mask[i], used at the last step. next_mask: for the next step.
        phase: "dense" when the last step's masks were all ones because of the dense start, else "sparse".
        average: the averaged gradient of the last step, ghat, before clipping.
    """

    def __init__(
        self,
        params: list[Tensor],
        ranks: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        owner: list[int],
        density: float | Callable[[int], float],
        dense_steps: int = 0,
        density_steps: int = 0,
        clip: str = "consistent",
        max_grad_norm: float | None = None,
        compress: list[bool] | None = None,
        maximize: bool = False,
    ):
        super().__init__(params, ranks, lr, betas, eps, weight_decay, maximize)
        if clip not in ("consistent", "scape"):
            raise ValueError(f"clip is {clip!r}, it must be 'consistent' or 'scape'")
        self.owner, self.density = list(owner), density
        self.dense_steps, self.density_steps = dense_steps, density_steps
        self.clip, self.max_grad_norm = clip, max_grad_norm
        self.compress = [True] * len(params) if compress is None else list(compress)
        self.residual = [[torch.zeros_like(p) for p in self.params] for _ in range(ranks)]
        self.next_mask = self._ones()  # line 5
        self.mask: list[Tensor] = []
        self.average: list[Tensor] = []
        self.phase = ""

    def density_at(self, t: int) -> float:
        """Density of the mask used at step t."""
        if callable(self.density):
            return self.density(t)
        k = t - self.dense_steps - 1
        if k < 0:
            return 1.0
        if self.density_steps == 0:
            return self.density
        return max(self.density, self.density ** (k / self.density_steps))

    def step(self, grads: Grads) -> None:
        """One step of all ranks; grads[rank][i] is what that rank's backward left."""
        self.t += 1
        beta1, _ = self.betas
        x = [  # line 10
            [beta1 * m + (1 - beta1) * g + e for m, g, e in zip(self.m, local, residual, strict=True)]
            for local, residual in zip(self._read(grads), self.residual, strict=True)
        ]
        self.mask = self.next_mask
        self.next_mask = self._select(x, self.density_at(self.t + 1))  # line 15, before x is taken apart
        sparse = any(not on.all() for on in self.mask)
        self.phase = "sparse" if sparse else "dense"
        self.residual = [
            [torch.where(on, 0.0, x_i) for on, x_i in zip(self.mask, local, strict=True)] for local in x
        ]  # lines 11, 12
        payload = [
            [torch.where(on, x_i, 0.0) for on, x_i in zip(self.mask, local, strict=True)] for local in x
        ]  # line 13
        m = mean_over_ranks(payload)  # lines 14, 16
        self.average = [  # line 17
            torch.where(on, (b - beta1 * m_prev) / (1 - beta1), 0.0)
            for on, b, m_prev in zip(self.mask, m, self.m, strict=True)
        ]
        clipped = clip_by_global_norm(self.average, self.max_grad_norm)  # line 18
        if self.clip == "consistent" and self.max_grad_norm is not None:
            m = [
                torch.where(on, beta1 * m_prev + (1 - beta1) * g, 0.0)
                for on, g, m_prev in zip(self.mask, clipped, self.m, strict=True)
            ]
        self._apply(m, clipped)

    def _ones(self) -> list[Tensor]:
        return [torch.ones(p.shape, dtype=torch.bool) for p in self.params]

    def _select(self, x: Grads, density: float) -> list[Tensor]:
        """refresh_mask: each tensor's owner takes the top-k of its own |x|; the others get it by all-gather."""
        ones = self._ones()
        return [
            top_k(x[owner][i].abs(), density) if compress and density < 1 else ones[i]
            for i, (owner, compress) in enumerate(zip(self.owner, self.compress, strict=True))
        ]
