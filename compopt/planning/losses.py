"""Losses that were measured, over tuned data-parallel AdamW's, and the measurement that is nearest
to a training.

``advice`` looks a method's loss up in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .formatting import format_count

# Chinchilla's ratio, where the length of a training is not given.
TOKENS_PER_PARAMETER = 20.0
# Tokens per parameter of the shortest runs whose losses decide. In shorter ones two settings differ
# by less than two seeds do.
SETTLED = 4.0


@dataclass(frozen=True)
class Measurement:
    """One final loss.

    Args:
        ratio: over AdamW's in the same training; the mean over seeds.
        parameters, ranks, tokens: of the model; that trained; for each parameter.
        source: where it was measured.
    """

    ratio: float
    parameters: float
    ranks: int
    tokens: float
    source: str = "bench/results"

    @property
    def conditions(self) -> str:
        """Size, ranks and length of the training, in words."""
        words = f"{format_count(self.parameters)} parameters, {self.ranks} ranks, "
        words += f"{self.tokens:.2g} tokens per parameter"
        return words if self.source == "bench/results" else f"{words}; {self.source}"

    def distance(self, parameters: float, ranks: int, tokens: float) -> float:
        """Return the distance to a training, in factors of ten (size, length) and four (ranks)."""
        return (
            abs(math.log10(parameters / self.parameters))
            + abs(math.log10(tokens / self.tokens))
            + abs(math.log(ranks / self.ranks, 4))
        )


# Parameters of the GPTs of bench/: widths 64, 96 and 128 in ladder.py; width 128 also for 800,
# 2,000 and 8,000 steps, and width 512 for 1,500.
GPT_0_2M, GPT_0_4M, GPT_0_9M, GPT_13M = 184_768, 387_744, 861_312, 12_882_432
SHORT, MEDIUM, LONG = 0.95, 4.8, 9.5
WIDE_SHORT = 0.12
DILOCO = "DiLoCo at H = 30, arXiv 2503.09799"
MULOCO = "DiLoCo at H = 30, arXiv 2505.23725"


def measured_here(short: float, long: float, wide: float) -> tuple[Measurement, ...]:
    """After 800 and 8,000 steps of the small model, and 1,500 of the wide one, on two ranks."""
    return (
        Measurement(short, GPT_0_9M, 2, SHORT),
        Measurement(long, GPT_0_9M, 2, LONG),
        Measurement(wide, GPT_13M, 2, WIDE_SHORT),
    )


def measured_by_size(
    table: Mapping[float, Mapping[int, float]], source: str = "bench/results"
) -> tuple[Measurement, ...]:
    """Return ratios by size and workers; all of these runs train 20 tokens per parameter."""
    return tuple(
        Measurement(ratio, parameters, ranks, TOKENS_PER_PARAMETER, source)
        for parameters, row in table.items()
        for ranks, ratio in row.items()
    )


LOSSES: dict[str, tuple[Measurement, ...]] = {
    # Two seeds at length: .995 and 1.005.
    "SeparateAdam": (
        *measured_here(1.008, 1.0, 1.017),
        *measured_by_size({GPT_0_2M: {4: 1.009}, GPT_0_9M: {4: 1.002}}),
    ),
    "SeparateAdam, rank 32, int4": (Measurement(0.996, GPT_0_9M, 2, SHORT),),
    "SeparateAdam, rank 16, int4": (Measurement(1.012, GPT_0_9M, 2, SHORT),),
    "SeparateAdam, rank 8, int4": (Measurement(1.023, GPT_0_9M, 2, SHORT),),
    "SeparateAdam, rank 4, int8": (Measurement(1.053, GPT_0_9M, 2, SHORT),),
    "SeparateAdam, Gaussian 16": measured_here(1.142, 1.062, 1.116),
    "LocalSteps": (
        Measurement(1.017, GPT_0_9M, 4, MEDIUM),
        Measurement(1.120, GPT_13M, 2, WIDE_SHORT),
        *measured_by_size({GPT_0_2M: {4: 1.016}}),
        *measured_by_size(
            {
                35e6: {2: 1.007, 4: 1.020, 8: 1.039},
                550e6: {2: 1.002, 4: 1.007, 8: 1.017},
                2.4e9: {2: 0.999, 4: 1.003, 8: 1.011},
            },
            DILOCO,
        ),
        *measured_by_size(
            {
                150e6: {16: 1.053},
                416e6: {16: 1.047},
                914e6: {16: 1.034},
                3.1e9: {16: 1.033},
                15e9: {16: 1.010},
            },
            MULOCO,
        ),
    ),
    "LocalSteps, every=140, int2": (
        *measured_by_size({GPT_0_2M: {4: 1.055}}),
        Measurement(1.041, GPT_0_9M, 4, MEDIUM),
        Measurement(1.082, GPT_13M, 2, WIDE_SHORT),
    ),
    # No rows of the table: advice_report.describe_muon names their losses.
    "LocalSteps(MuonAdamW)": measured_by_size(
        {GPT_0_2M: {4: 0.978}, GPT_0_4M: {2: 0.988, 4: 0.986, 8: 0.997}, GPT_0_9M: {4: 0.998}}
    ),
    "Separate(MuonAdamW)": measured_by_size({GPT_0_2M: {4: 0.968}, GPT_0_9M: {4: 0.984}}),
    # A new mask every 100 steps.
    "RadiusAdamW": measured_here(1.022, 1.0, 1.028),
    "ScapeAdamS": measured_here(1.167, 1.051, 1.211),
    # Payloads and updates in fewer bits ended within .2 % of this.
    "TagcAdamW": measured_here(1.030, 1.0, 1.035),
    "PowerSGD rank 4": (
        *measured_here(1.058, 1.006, 1.054),
        *measured_by_size({GPT_0_2M: {4: 1.061}}),
    ),
}
"""By method; bench/RESULTS.md says how ours were measured. A new measurement is one line here."""


def nearest_measurement(
    key: str, parameters: float, ranks: int, tokens: float
) -> Measurement | None:
    """The measurement of a method that is nearest to a training; None where there is none.

    Local steps lose more with every worker, so they need a measurement with at least as many.
    """
    known: Sequence[Measurement] = LOSSES.get(key, ())
    if key.startswith("LocalSteps"):
        known = [m for m in known if ranks <= m.ranks]
    return min(known, key=lambda m: m.distance(parameters, ranks, tokens), default=None)


def is_settled(key: str) -> bool:
    """True if a method was measured in more than short runs, so that its loss may decide."""
    return any(m.tokens >= SETTLED for m in LOSSES.get(key, ()))
