"""Muon, from its authors' Newton-Schulz iteration, and NorMuon, from Algorithm 1 of "NorMuon: Making Muon more
efficient and scalable" (2510.05491): each matrix by itself, in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .common import as_float64


class MuonOracle:
    """Muon on tensors of 2 or 3 dimensions, whose rows are several matrices.

    Args:
        params: initial values; copied.
        rows: of each tensor, the rows of each of its matrices; of a stack, of each matrix of the stack.
        normalize: NorMuon. Its update has a root mean square of .2, as the paper's has.
        is_corrected: the mean of squares is divided by 1 - beta2^t, as Adam's is; the paper's is not.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        rows: Sequence[Sequence[int]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        normalize: bool = True,
        beta2: float = 0.95,
        is_corrected: bool = False,
    ):
        self.params, self.rows = as_float64(list(params)), rows
        self.lr, self.weight_decay, self.momentum, self.nesterov = lr, weight_decay, momentum, nesterov
        self.ns_steps, self.normalize, self.beta2, self.is_corrected = ns_steps, normalize, beta2, is_corrected
        self.momenta = [torch.zeros_like(p) for p in self.params]
        self.variances = [torch.zeros_like(p[..., 0]) for p in self.params]
        self.steps = [0] * len(self.params)

    def step(self, grads: Sequence[Tensor | None]) -> None:
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            self.steps[i] += 1
            p, m, v, g = self.params[i], self.momenta[i], self.variances[i], grad.to(torch.float64)
            m += (1 - self.momentum) * (g - m)
            u = (1 - self.momentum) * g + self.momentum * m if self.nesterov else m
            whole = [(p, u, v)] if p.ndim == 2 else [(p[e], u[e], v[e]) for e in range(len(p))]
            for w, of_w, mean_squares in whole:
                first = 0
                for count in self.rows[i]:
                    part = slice(first, first + count)
                    self._step_matrix(w[part], of_w[part], mean_squares[part], self.steps[i])
                    first += count
                assert first == len(w)

    def _step_matrix(self, w: Tensor, u: Tensor, v: Tensor, t: int) -> None:
        """Change w and v in place."""
        o = newton_schulz(u, self.ns_steps)
        m, d = o.shape
        update = 0.2 * max(m, d) ** 0.5 * o
        if self.normalize:
            v.mul_(self.beta2).add_((1 - self.beta2) * (o * o).mean(1))
            divisors = (v / (1 - self.beta2**t) if self.is_corrected else v).sqrt() + 1e-8
            o = o / divisors[:, None]
            norm = o.norm()
            update = 0.2 * (m * d) ** 0.5 / norm * o if norm > 0 else o
        w -= self.lr * (update + self.weight_decay * w)


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    norm = x.norm()
    x = x / norm if norm > 0 else x
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x
