"""What a method is applied to, and what it then costs a step: the words of the table in
``methods.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Workload:
    """The parameters of one model.

    Args:
        parameters: how many.
        compressed: share of them in tensors that are compressed (at least 2-D and 4096 elements).
        side: the smaller side of those tensors, averaged by size. What a projection costs.
        perimeter: sum of (rows + columns) over those tensors. What low-rank factors cost.
        large: share of parameters in matrices that are not attention's. What TAGC compresses by
            default.
    """

    parameters: int
    compressed: float
    side: float
    perimeter: float
    large: float

    @classmethod
    def of_size(cls, parameters: int) -> Workload:
        """A transformer of so many parameters: 64 times as wide as deep, 12 width^2 a layer, two
        thirds in the MLP.
        """
        if parameters < 1:
            raise ValueError(f"parameters must be positive; got {parameters}.")
        width = max(8.0, (64 * parameters / 12) ** (1 / 3))
        return cls(parameters, 0.997, width, 16 * parameters / (12 * width), 2 / 3)

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]]) -> Workload:
        """Read named parameters, `model.named_parameters()`; those not requiring gradients are left
        out.
        """
        named = [(name, p) for name, p in named if p.requires_grad]
        if not named:
            raise ValueError("No parameter requires a gradient: there is nothing to average.")
        total = sum(p.numel() for _, p in named)
        chosen = [(name, p) for name, p in named if p.ndim >= 2 and p.numel() >= 4096]
        size = sum(p.numel() for _, p in chosen)
        side = sum(p.numel() * min(p.shape[-1], p.numel() // p.shape[-1]) for _, p in chosen) / max(
            1, size
        )
        perimeter = sum(p.numel() // p.shape[-1] + p.shape[-1] for _, p in chosen)
        attention = ("attn", "attention", "qkv", "q_proj", "k_proj", "v_proj", "o_proj")
        large = sum(
            p.numel() for name, p in chosen if not any(word in name.lower() for word in attention)
        )
        return cls(total, size / total, side, float(perimeter), large / total)


@dataclass(frozen=True)
class Cost:
    """One method on one workload: amounts a step and a rank, for the whole model.

    Args:
        reduced: bytes handed to all-reduce.
        gathered: bytes every rank holds after gathers, or held before reduce-scatters, that the
            step waits for.
        hidden: such bytes that travel while the next forward and backward run.
        state: bytes of optimizer state.
        traffic: bytes moved in memory beyond a dense AdamW step; negative when there are fewer.
        flops: floating-point operations beyond it.
        every: steps of a round, after whose last all that is reduced goes out at once; None: it
            goes out in every step, from backward on.
        delay: steps of computation behind which a round's exchange travels.
    """

    reduced: float
    gathered: float = 0.0
    hidden: float = 0.0
    state: float = 0.0
    traffic: float = 0.0
    flops: float = 0.0
    every: int | None = None
    delay: int = 0

    @property
    def sent(self) -> float:
        """Bytes a rank hands to collectives in a step, averaged."""
        return self.reduced + self.gathered + self.hidden
