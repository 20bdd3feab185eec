"""Gradients averaged whole and rounded on their way, with what rounding takes off owed: lines 1 to 5 of ``Average``."""

from collections.abc import Callable

import torch
from torch import Tensor

from .common import Grads, as_float64


class AverageOracle:
    """All ranks at once. What rounds is PyTorch's conversion.

    Args:
        params: initial tensors, the same on every rank; copied.
        ranks: number of ranks N.
        base: makes the base optimizer from a list of parameters.
        payload_dtype: what gradients are rounded to. None: nothing is rounded.
        max_grad_norm: clips the average.

    Attributes:
        params: the one copy all ranks share. error: error[rank][i], in the dtype of the gradients: a rank adds the two
            in that, and what is nearly half way between two numbers is rounded as the sum says.
    """

    def __init__(
        self,
        params: list[Tensor],
        ranks: int,
        base: Callable[[list[Tensor]], torch.optim.Optimizer],
        payload_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ):
        self.params = [p.requires_grad_() for p in as_float64(params)]
        self.base = base(self.params)
        self.payload_dtype, self.max_grad_norm = payload_dtype, max_grad_norm
        self.error = [[torch.zeros_like(p) for p in params] for _ in range(ranks)]

    def step(self, grads: Grads) -> None:
        for i, p in enumerate(self.params):
            sent = []
            for local, error in zip(grads, self.error, strict=True):
                h = local[i] + error[i]
                sent.append(h.to(self.payload_dtype or h.dtype))
                error[i] = h - sent[-1].to(h.dtype)
            p.grad = (torch.stack(sent).sum(0) / len(sent)).double()
        if self.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.params, self.max_grad_norm)
        self.base.step()
