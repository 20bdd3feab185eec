"""What advice on activations is about: layers spread over ranks, and the links between those."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .data_parallel import Machine
from .devices import Speed
from .model_parallel import dtype_of

# Micro-batches times stages, which the schedule goes through one by one.
MOST = 1 << 14


@dataclass(frozen=True)
class Layers:
    """The layers of one model, and how it is fed.

    Args:
        hidden: width, numbers of a token.
        layers: how many.
        sequence: tokens of a sequence.
        micro_batch: sequences of a micro-batch.
        micro_batches: of a step.
        activation_bytes: of a number, 2 or 4.
    """

    hidden: int
    layers: int
    sequence: int
    micro_batch: int
    micro_batches: int
    activation_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "sequence", "micro_batch", "micro_batches"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} must be a positive number; got {getattr(self, name)}.")
        dtype_of(self.activation_bytes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the activation of a micro-batch."""
        return self.micro_batch, self.sequence, self.hidden

    @property
    def flops(self) -> float:
        """Of all layers, forward and backward, of one micro-batch (Narayanan et al. 2021, nothing
        recomputed).
        """
        tokens = self.micro_batch * self.sequence
        return self.layers * tokens * (72 * self.hidden**2 + 12 * self.sequence * self.hidden)


@dataclass(frozen=True)
class Grid:
    """What the advice on activations is about.

    Args:
        work: the layers.
        tensor, pipeline: ranks that share a layer; stages.
        inside, between: links of a rank to those that share its layers, and to the next stage.
        compute_s: seconds that a rank computes in a step.
        speed: of a rank, for the compressors' own work.
        loss_budget: share of the accuracy that may be lost.
        sources: of each number whether it was given, measured or assumed.
    """

    work: Layers
    tensor: int
    pipeline: int
    inside: Machine
    between: Machine
    compute_s: float
    speed: Speed
    loss_budget: float
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.work.hidden % self.tensor:
            raise ValueError(
                f"tensor must divide the width, {self.work.hidden}; got {self.tensor}."
            )
        if self.pipeline > min(self.work.layers, self.work.micro_batches):
            raise ValueError(
                f"pipeline must be no more than the {self.work.layers} layers and the "
                f"{self.work.micro_batches} micro-batches of a step; got {self.pipeline}."
            )
        if self.pipeline * self.work.micro_batches > MOST:
            raise ValueError(
                f"pipeline times micro_batches must be at most {MOST}; got {self.pipeline} times "
                f"{self.work.micro_batches}."
            )
        if not 0 < self.compute_s < math.inf:
            raise ValueError(f"compute_s must be positive and finite; got {self.compute_s}.")
