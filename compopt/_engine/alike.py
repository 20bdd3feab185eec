"""Whether something else averages the gradients as well: then they are the same on all ranks, to
the bit.

The handshake compares all of them. Between handshakes a code of a few of them rides in every step's
payload: where the code is the same on all ranks, the next step begins with a handshake, which looks
at all and refuses. So a model that is wrapped by DistributedDataParallel again, in the middle of a
run, is noticed within two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._ops.samples import NOTHING, code
from .._wire.control import differ

TENSORS = 8  # the largest of the last bucket: what every step looks at


class Alike:
    """What is known of it."""

    def __init__(self) -> None:
        self.differed = False  # gradients did, in a step
        # the same data on purpose, or the sample is of tensors that see no data
        self.accepted = False
        self.suspected = False

    def note(self, mean: list[float]) -> bool:
        """From the mean over ranks of :func:`sample`: whether a handshake has to look at all
        gradients.
        """
        if mean[-1] > 0:
            return False
        same = not differ(mean[:-1])
        self.differed = self.differed or not same
        self.accepted = self.accepted and same
        self.suspected = same and not self.accepted
        return self.suspected

    def refuses(self, same: bool, handed_over: bool) -> bool:
        """In a handshake: whether gradients that are the ``same`` on all ranks show that somebody
        averages them.

        From the first step on, with gradients that DDP has ``handed_over``, the ranks' data is the
        same on purpose.
        """
        self.accepted, self.suspected = same or self.suspected, False
        return same and (self.differed or not handed_over)


def sample(
    grads: Sequence[Tensor | None],
    device: torch.device,
    code: Callable[[Sequence[Tensor]], Tensor] = code,
) -> Tensor:
    """The ``code`` of some of these gradients, on their device: nobody waits for it.

    Where there are none, that there is nothing to compare.
    """
    there = [g for g in grads if g is not None and g.numel()]
    largest = sorted(there, key=Tensor.numel, reverse=True)[:TENSORS]
    if not largest:
        return torch.tensor(NOTHING, dtype=torch.float32, device=device)
    return code([g.detach() for g in largest])
