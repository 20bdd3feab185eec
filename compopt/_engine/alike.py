"""Whether something else averages the gradients as well: then they are the same on all ranks, to
the bit.

The handshake compares all of them. Between handshakes a code of a few of them rides in every step's
payload: where the code is the same on all ranks, the next step begins with a handshake, which looks
at all and refuses. So a model that is wrapped by DistributedDataParallel again, in the middle of a
run, is noticed within two steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._wire.control import differ

# the largest tensors of the last bucket, and elements of each: what every step looks at
TENSORS, SAMPLE = 8, 512
BITS = 16  # by accident ranks agree on them once in 65,536 steps, which costs a handshake
WORDS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# odd, its bits like drawn ones: low bits of a sum reach high ones
SPREAD = 0x9E3779B97F4A7C15 - 2**64


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


def sample(grads: list[Tensor | None], device: torch.device) -> Tensor:
    """Bits of a code of some elements, then their complements, then 1 where there is nothing to
    compare.

    Nobody waits for it: it is on the device of the gradients. Zeros only, or a number that is not
    finite, are nothing: those may well be alike on ranks of different data.
    """
    there = [g.detach() for g in grads if g is not None and g.numel()]
    parts = [_some(g.reshape(-1)) for g in sorted(there, key=Tensor.numel, reverse=True)[:TENSORS]]
    if not parts:
        return torch.tensor([0.0] * 2 * BITS + [1.0], dtype=torch.float32, device=device)
    some = torch.cat(parts)
    numbers = some.view(WORDS_OF[some.element_size()]).to(torch.int64)
    places = torch.arange(1, 2 * len(numbers), 2, dtype=torch.int64, device=some.device)
    code = (numbers * places).sum() * SPREAD >> (64 - BITS)
    telling = (some.isfinite().all() & some.any()).float()
    bits = (code >> torch.arange(BITS, dtype=torch.int64, device=some.device) & 1) * telling
    return torch.cat([bits, telling - bits, (1 - telling).view(1)])


def _some(flat: Tensor) -> Tensor:
    return flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE]
