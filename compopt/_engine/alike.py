"""Whether something else averages the gradients as well: then they are the same on all ranks, to
the bit.

The handshake compares all of them. Between handshakes a code of a few of them rides in every step's
payload: where the code is the same on all ranks, the next step begins with a handshake, which looks
at all and refuses. So a model that is wrapped by DistributedDataParallel again, in the middle of a
run, is noticed within two steps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._state.devices import pinned
from .._state.tensors import upload
from .._wire.control import differ

# the largest tensors of the last bucket, and elements of each: what every step looks at
TENSORS, SAMPLE = 8, 512
BITS = 16  # by accident ranks agree on them once in 65,536 steps, which costs a handshake
WORDS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NOTHING = [0.0] * 2 * BITS + [1.0]  # said where there is nothing to compare
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
    there = [g for g in grads if g is not None and g.numel()]
    largest = sorted(there, key=Tensor.numel, reverse=True)[:TENSORS]
    if not largest:
        return torch.tensor(NOTHING, dtype=torch.float32, device=device)
    some = torch.cat([_some(g.detach().reshape(-1)) for g in largest])
    fixed = _fixed(some.numel(), some.device)
    numbers = some.view(WORDS_OF[some.element_size()])
    code = (numbers * fixed.factors).sum(dtype=torch.int64)
    most = torch.linalg.vector_norm(some, float("inf"))
    telling = (most > 0).logical_and_(most < float("inf"))
    said = (code >> fixed.shifts).bitwise_and_(fixed.ones).bitwise_xor_(fixed.flips)
    return torch.where(telling, said, fixed.nothing)


def _some(flat: Tensor) -> Tensor:
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE]


class Fixed(NamedTuple):
    """What a code of so many elements is made with, on their device."""

    factors: Tensor  # an odd one for every place, times SPREAD
    shifts: Tensor  # to bring each of the highest bits of a code down, twice
    ones: Tensor  # 1 for each of these, 0 for the last word
    flips: Tensor  # 1 for their complements
    nothing: Tensor


@lru_cache(maxsize=64)
def _fixed(count: int, device: torch.device) -> Fixed:
    """The same tensors for the same: no step makes them anew."""
    odd = torch.arange(1, 2 * count, 2, dtype=torch.int64, device="cpu").mul_(SPREAD)
    shifts: list[float] = [*range(64 - BITS, 64)] * 2
    return Fixed(
        pinned(odd, device).to(device, non_blocking=True),
        upload([*shifts, 0], torch.int64, device),
        upload([1.0] * 2 * BITS + [0.0], torch.int64, device),
        upload([0.0] * BITS + [1.0] * BITS + [0.0], torch.int64, device),
        upload(NOTHING, torch.float32, device),
    )
