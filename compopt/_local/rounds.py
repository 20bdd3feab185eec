"""When which fragment is exchanged: a function of options and step counts alone, the same on all
ranks.

A round of H steps exchanges every fragment once, fragment p of P at step p * H // P of the round;
p = 0 at its last. Rounds grow from 1 step to ``every`` over ``every_warmup_steps``, and the outer
optimizer with them.
"""

from __future__ import annotations

import math
from typing import Any

Group = dict[str, Any]


def length(options: Group, since: int) -> int:
    """Steps of the round that begins ``since`` steps after the averaged start."""
    every: int = options["every"]
    growth: int = options["every_warmup_steps"]
    return every if since >= growth else 1 + (every - 1) * since // growth


def grown(options: Group, steps: int) -> float:
    """How far the outer optimizer has come from averaging parameters, 0, to its own rate and
    momentum, 1, after a round of this many ``steps``: with the logarithm of its length.

    The momentum of long rounds would add up over short ones: a small GPT that ends at 1.56 so ended
    at 2.29 with its own from the first round on.
    """
    every: int = options["every"]
    return 1.0 if steps >= every else math.log(steps) / math.log(every)


def is_due(place: int, at: int, steps: int, fragments: int) -> bool:
    """Whether the fragment at ``place`` is exchanged at step ``at``, from 1, of a round."""
    return at == (place * steps // fragments or steps)


def delay(options: Group, steps: int) -> int:
    """Steps from an exchange's beginning to its application, in a round of this many ``steps``.

    Never more than lie between two exchanges: one is on its way at a time.
    """
    return min(int(options["delay"]), steps // int(options["fragments"]))
