"""PowerSGD, from Algorithms 1 and 2 of Vogels, Karimireddy and Jaggi (NeurIPS 2019), over any base optimizer.

Two readings are ours, and change no averaged gradient but by rounding: Q is made orthonormal when a step begins (the
space it spans is all that counts), and each rank's error is what its own factors miss, not the averaged ones (equation
of the mean over ranks is the same: see ``test_the_two_errors_have_one_mean``).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .common import Grads, as_float64, mean_over_ranks, read_grads


def gram_schmidt(matrix: Tensor) -> Tensor:
    """Orthonormal columns, one after the other, each freed of those before it twice."""
    columns: list[Tensor] = []
    for column in matrix.unbind(1):
        for _ in range(2):
            for done in columns:
                column = column - (column @ done) * done
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


class PowerSGDOracle:
    """All ranks at once, every tensor a matrix.

    Args:
        params: initial matrices, the same on every rank; copied.
        ranks: number of ranks N.
        base: makes the base optimizer from a list of parameters.
        start: start(i), the Q that tensor i begins with, of shape (columns, r); None for tensors averaged whole.
        averaged_error: Algorithm 2 as printed: errors are distances from the averaged reconstruction.

    Attributes:
        params: the one copy all ranks share. error: error[rank][i]. average: what the base got at the last step.
    """

    def __init__(
        self,
        params: list[Tensor],
        ranks: int,
        base: Callable[[list[Tensor]], torch.optim.Optimizer],
        start: Callable[[int], Tensor | None],
        averaged_error: bool = False,
    ):
        self.params = [p.requires_grad_() for p in as_float64(params)]
        self.ranks, self.base, self.averaged_error = ranks, base(self.params), averaged_error
        self.Q = [start(i) for i in range(len(params))]
        self.error = [[torch.zeros_like(p) for p in self.params] for _ in range(ranks)]
        self.average: list[Tensor] = []

    @torch.no_grad()
    def step(self, grads: Grads) -> None:
        grads = read_grads(grads, self.params, self.ranks)
        self.average = mean_over_ranks(grads)
        for i, Q in enumerate(self.Q):
            if Q is not None:
                self.average[i] = self._compress(i, gram_schmidt(Q), [local[i] for local in grads])
        for p, g in zip(self.params, self.average, strict=True):
            p.grad = g.clone()
        self.base.step()

    def _compress(self, i: int, Q: Tensor, grads: list[Tensor]) -> Tensor:
        deltas = [g + local[i] for g, local in zip(grads, self.error, strict=True)]  # Algorithm 2, line 6
        P = gram_schmidt(torch.stack([delta @ Q for delta in deltas]).mean(0))  # Algorithm 1, lines 3 to 5
        factors = [delta.T @ P for delta in deltas]  # line 6
        self.Q[i] = torch.stack(factors).mean(0)  # line 7
        mean = P @ self.Q[i].T  # line 10
        for rank, (delta, local) in enumerate(zip(deltas, factors, strict=True)):
            self.error[rank][i] = delta - (mean if self.averaged_error else P @ local.T)  # Algorithm 2, line 8
        return mean
