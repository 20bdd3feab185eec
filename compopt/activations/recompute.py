"""Random draws of a forward, repeated when activation checkpointing recomputes that forward.

``codecs`` draws by it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Drawn = TypeVar("Drawn")
# Forwards whose backward has not run: micro-batches in flight.
MAX_FORWARDS = 64


def is_recomputing() -> bool:
    """True inside a backward, in which only activation checkpointing computes a forward."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class _Draw(Generic[Drawn]):
    value: Drawn
    repeated: bool = False
    ambiguous: bool = False


class Replay(Generic[Drawn]):
    """Calls ``draw`` in a forward, and returns the same value when that forward is recomputed.

    A forward is identified by the next number of torch's generator, which checkpointing restores
    before it recomputes. A forward that cannot be identified raises RuntimeError.
    """

    def __init__(self) -> None:
        self._draws: OrderedDict[int, _Draw[Drawn]] = OrderedDict()

    def __call__(self, draw: Callable[[], Drawn]) -> Drawn:
        key = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        if is_recomputing():
            return self._repeat_draw(key)
        # missing in the oldest supported torch
        hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        # A checkpointed forward runs without a graph, or with hooks on saved tensors.
        if torch.is_grad_enabled() and hooks is not None and hooks(True) is None:
            return draw()
        for old in [key for key, drawn in self._draws.items() if drawn.repeated]:
            del self._draws[old]
        self._draws[key] = _Draw(draw(), ambiguous=key in self._draws)
        if len(self._draws) > MAX_FORWARDS:
            self._draws.popitem(last=False)
        return self._draws[key].value

    def _repeat_draw(self, key: int) -> Drawn:
        drawn = self._draws.get(key)
        if drawn is None:
            raise RuntimeError(
                "a compressed activation is recomputed, and its forward is unknown: leave "
                "torch.utils.checkpoint's preserve_rng_state at True, run each backward with the "
                f"compressor of its forward, and run at most {MAX_FORWARDS} forwards before their "
                "backward. Zero-bubble schedules recompute a forward twice; use another one."
            )
        if drawn.ambiguous:
            raise RuntimeError(
                "a compressed activation is recomputed, and two forwards began with its random "
                "state: do not call torch.manual_seed between a forward and its backward."
            )
        drawn.repeated = True
        return drawn.value
