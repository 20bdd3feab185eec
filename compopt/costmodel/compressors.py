"""The compressors of activations that are compared, and what they cost in accuracy where that was
measured.

What they send and compute is not here: their own code says it (``counting.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..activations import AutoEncoder, PowerSGD, Quantize, RandomK, TopK
from ..activations.codecs import Compressor

# Percent of digits told apart without compression, on what the rows below were measured on.
UNCOMPRESSED = 94.3
MEASURED_ON = (
    "digits by a 4-layer encoder of width 64, fine-tuned for 300 steps at tensor 2 x pipeline 2, "
    "layers and boundary compressed, three seeds"
)


def _rank(tokens: int, hidden: int, ratio: int) -> int:
    return max(1, min(hidden, round(tokens * hidden / ratio / (tokens + hidden))))


@dataclass(frozen=True)
class Kind:
    """One row: a compressor, by its settings for so many tokens and that width.

    Args:
        codec: its class.
        settings: its arguments for (tokens, hidden).
        label: its name in bench/results/mcbench-quality.csv.
        accuracy: percent on `MEASURED_ON`, the mean; None: not measured.
        options: its keyword arguments.
    """

    codec: Callable[..., Compressor]
    settings: Callable[[int, int], tuple[float, ...]]
    label: str
    accuracy: float | None
    options: dict[str, int] = field(default_factory=dict)

    def text(self, tokens: int, hidden: int) -> str:
        """How it is made in Python."""
        words = [f"{value:g}" for value in self.settings(tokens, hidden)]
        words += [f"{name}={value}" for name, value in self.options.items()]
        return f"{getattr(self.codec, '__name__', '')}({', '.join(words)})"

    def make(self, tokens: int, hidden: int) -> Compressor:
        """One without memory, to be counted."""
        with torch.device("meta"):
            return self.codec(*self.settings(tokens, hidden), **self.options)


def _share(value: float) -> Callable[[int, int], tuple[float, ...]]:
    return lambda tokens, hidden: (value,)


def _code(ratio: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda tokens, hidden: (hidden, max(1, round(hidden / ratio)))


def _factors(ratio: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda tokens, hidden: (_rank(tokens, hidden, ratio), hidden)


COMPRESSORS: dict[str, Kind] = {
    "AutoEncoder, 1/20": Kind(AutoEncoder, _code(20), "A1", 76.7),
    "AutoEncoder, 1/10": Kind(AutoEncoder, _code(10), "A2", 86.4),
    # A position takes as many bytes as a value of 32 bits.
    "TopK, 1/40": Kind(TopK, _share(1 / 40), "T1", 83.6),
    "TopK, 1/20": Kind(TopK, _share(1 / 20), "T2", 91.9),
    "RandomK, 1/20": Kind(RandomK, _share(1 / 20), "R1", 58.9),
    "RandomK, 1/10": Kind(RandomK, _share(1 / 10), "R2", 77.4),
    "PowerSGD, 1/20": Kind(PowerSGD, _factors(20), "P1", 18.5),
    "PowerSGD, 1/10": Kind(PowerSGD, _factors(10), "P2", 38.4),
    "Quantize, 2 bits": Kind(Quantize, _share(2), "Q1", 93.3),
    "Quantize, 4 bits": Kind(Quantize, _share(4), "Q2", 94.1),
    "Quantize, 8 bits": Kind(Quantize, _share(8), "8 bits", 94.1),
    # A gradient of as few bits returns in the payload's place.
    "Quantize, 4 both ways": Kind(
        Quantize, _share(4), "4 bits back too", 93.9, {"gradient_bits": 4}
    ),
    "Quantize, 8 both ways": Kind(
        Quantize, _share(8), "8 bits back too", 94.2, {"gradient_bits": 8}
    ),
}
"""By name; a new compressor is one line here."""
