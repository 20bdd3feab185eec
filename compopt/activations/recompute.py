"""What a forward drew, kept so that activation checkpointing draws it again when it computes that
forward anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Drawn = TypeVar("Drawn")
# Forwards in flight at most: micro-batches whose backward has not come.
KEPT = 64


def recomputing() -> bool:
    """Whether this code runs inside a backward: only activation checkpointing computes a forward
    there.
    """
    return torch._C._current_graph_task_id() != -1


def _may_be_recomputed() -> bool:
    """Whether checkpointing may stand around this code: it computes without a graph, or takes over
    what is saved.
    """
    if not torch.is_grad_enabled():
        return True
    # Not in every torch we support.
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is None or hooks(True) is not None


@dataclass
class _Draw(Generic[Drawn]):
    value: Drawn
    repeated: bool = False
    ambiguous: bool = False


class Replay(Generic[Drawn]):
    """Calls ``draw`` in a forward, and gives the same answer when that forward is computed again.

    A forward is known by the next number of torch's own generator, which checkpointing sets back
    before it computes again. A forward that cannot be told from another raises instead of being
    given a wrong answer.
    """

    def __init__(self) -> None:
        self._draws: OrderedDict[int, _Draw[Drawn]] = OrderedDict()

    def __call__(self, draw: Callable[[], Drawn]) -> Drawn:
        key = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        if recomputing():
            return self._again(key)
        if not _may_be_recomputed():
            return draw()
        for old in [key for key, drawn in self._draws.items() if drawn.repeated]:
            del self._draws[old]
        self._draws[key] = _Draw(draw(), ambiguous=key in self._draws)
        if len(self._draws) > KEPT:
            self._draws.popitem(last=False)
        return self._draws[key].value

    def _again(self, key: int) -> Drawn:
        drawn = self._draws.get(key)
        if drawn is None:
            raise RuntimeError(
                "a compressed activation is computed again, and which forward it belongs to is "
                "not known: leave torch.utils.checkpoint's preserve_rng_state at True, call the "
                "forward with the codec that this backward belongs to, and have no more than "
                f"{KEPT} forwards wait for their backward."
            )
        if drawn.ambiguous:
            raise RuntimeError(
                "a compressed activation is computed again, and two forwards that it could belong "
                "to began with the same random state: do not call torch.manual_seed between "
                "forwards whose backward has not come."
            )
        drawn.repeated = True
        return drawn.value
