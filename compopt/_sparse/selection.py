"""What is selected of a bucket in one step: how the largest are found, a tensor at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .._ops.fused import BLOCK
from .._ops.moment import own_x
from .._ops.ops import Ops
from .._state.bits import bits_at, per_tensor
from .._state.buckets import Bucket
from .._state.deal import Deal, Part, assemble, encode
from .._state.masks import Mask, Tensors, bits_by_tensor, stored
from .._wire.requests import AllGather, Asking, Payload
from .._wire.scratch import at_a_time
from .dealing import SLACK, compressed_lengths, forget_next, keep

EXACT_BELOW = 16384  # elements: topk costs less than looking for a threshold
# Of the threshold that would do: what drifts from step to step then still finds enough.
AIM_BELOW = 0.93
LOOKS = 12  # thresholds tried before topk decides


def above(x: Tensor, t: float, ops: Ops) -> Tensor:
    """The positions of |x| > t, ascending, int64."""
    flags = ops.scratch(x, x.numel() + -x.numel() % 8, torch.bool, "flags")
    flags[x.numel() :] = False
    block = at_a_time(BLOCK, x)
    shrunk = ops.scratch(x, min(block, x.numel()))
    for own, x_ in zip(flags[: x.numel()].split(block), x.split(block), strict=True):
        # Several times faster than a comparison.
        own.copy_(torch.hardshrink(x_, t, out=shrunk[: x_.numel()]))
    # Words of 8 flags each: most are 0, and looking at one is looking at 8.
    words = flags.view(torch.int64)
    item = words.nonzero().view(-1)
    hit = words.index_select(0, item).view(torch.bool).nonzero().view(-1)
    return item.index_select(0, hit >> 3).bitwise_left_shift_(3).add_(hit.bitwise_and_(7))


def select(x: Tensor, k: int, how: str, ops: Ops, guess: float = 0.0) -> tuple[Tensor, float]:
    """Positions, ascending, of the k largest |x|, and where to look for them the next time (0:
    nowhere).

    "exact" takes k of them. "sampled" tries thresholds, from ``guess`` or a sample of x on, until
    the count is within 5 % of k; where fewer elements are other than 0, it takes those. A back end
    that finds them faster takes exactly k.
    """
    if (positions := ops.largest_of(x, k)) is not None:
        return positions, 0.0
    if how == "sampled" and x.numel() > EXACT_BELOW and k:
        found = _sampled(x, k, ops, guess)
        if found is not None:
            return found
    return x.abs().topk(k, sorted=False).indices.sort().values, 0.0


def largest(x: Tensor, k: int, ops: Ops) -> Tensor:
    """Positions, ascending, of exactly the k largest |x|, or of all that are not 0 if fewer."""
    n = x.numel()
    if k >= n:
        return torch.arange(n, dtype=torch.int64, device=x.device)
    if (positions := ops.largest_of(x, k)) is not None:
        return positions
    if n > EXACT_BELOW and k <= n // 4:  # of more than that topk would sort nearly all of x anyway
        t = _of_sample(x, min(n, k + k // 2 + n // 1024))
        for _ in range(LOOKS):
            candidates = above(x, t, ops)
            if len(candidates) >= k:
                chosen = x.index_select(0, candidates).abs_().topk(k, sorted=False).indices
                return candidates.index_select(0, chosen).sort().values
            if t == 0:
                return candidates
            t = t / 2 if t > float(torch.finfo(x.dtype).tiny) else 0.0
    return x.abs().topk(k, sorted=False).indices.sort().values


def largest_of_each(parts: Sequence[Tensor], ks: Sequence[int], ops: Ops) -> Tensor:
    """Positions in vectors that lie one after the other in memory: the k largest of each.

    On a CPU ascending, and without those that are 0 where fewer are not. On a device the host asks
    for nothing, so there are k of each, in no order.
    """
    starts = [0, *itertools.accumulate(len(part) for part in parts)]
    if parts[0].device.type == "cpu":
        pairs = zip(parts, ks, starts, strict=False)
        return torch.cat([largest(part, k, ops).add_(start) for part, k, start in pairs])
    sizes = torch._foreach_abs(list(parts))
    found = [
        own.topk(min(k, len(own)), sorted=False).indices for own, k in zip(sizes, ks, strict=True)
    ]
    torch._foreach_add_(found, starts[:-1])
    return torch.cat(found)


def _sampled(x: Tensor, k: int, ops: Ops, guess: float) -> tuple[Tensor, float] | None:
    """About k positions by a threshold, and a guess for the next time; None where no threshold
    tells (equal values).

    A threshold that lets a few times k through will do: among those a second one is cheap. So the
    guess aims below. Counts fall with a power of the threshold: at first guess as in a normal
    distribution, then as two looks show.
    """
    looks: list[tuple[float, float]] = []  # logarithms of threshold and count
    t, power = guess or AIM_BELOW * _of_sample(x, k), min(-0.5, -1.5 * math.log(x.numel() / k))
    for look in range(LOOKS):
        positions = above(x, t, ops)
        count = len(positions)
        if abs(count - k) <= SLACK * k:
            return positions, t * AIM_BELOW * (k / count) ** (1 / power)
        if t == 0 and count < k:
            return positions, 0.0
        if k < count <= 4 * k and (fewer := _largest_of(x, positions, k, ops)):
            return fewer
        if t == 0 or (
            look == 0 and guess and not k / 4 < count < 4 * k
        ):  # a guess too far off, or most of x is 0
            t = AIM_BELOW * (_of_sample(x, k) or float(x.abs().mean()))
            continue
        looks.append((math.log(t), math.log(max(count, 0.5))))
        if len(looks) > 1 and looks[-1][0] != looks[-2][0]:
            power = min(-0.5, (looks[-1][1] - looks[-2][1]) / (looks[-1][0] - looks[-2][0]))
        t *= (k / max(count, 0.5)) ** (1 / power)
    return None


def _largest_of(x: Tensor, positions: Tensor, k: int, ops: Ops) -> tuple[Tensor, float] | None:
    """Of these positions those of about the k largest |x|, and a guess; None where no threshold
    tells.
    """
    values = x.index_select(0, positions)
    t = _of_sample(values, k)
    chosen = positions.index_select(0, above(values, t, ops))
    return (chosen, AIM_BELOW * t) if abs(len(chosen) - k) <= SLACK * k else None


def _of_sample(x: Tensor, k: int) -> float:
    sample = x[:: max(1, x.numel() // 4096)].abs()
    larger = min(sample.numel() - 1, k * sample.numel() // x.numel())
    return float(sample.topk(larger + 1).values[-1])  # kthvalue is not deterministic on CUDA


class Selection:
    """The elements that this rank selects of one bucket in one step, a tensor at a time.

    A back end may have another that selects of all tensors at once.
    """

    def __init__(self, bucket: Bucket, ops: Ops, deal: Deal, rank: int):
        self.bucket, self.ops, self.deal, self.rank = bucket, ops, deal, rank
        self.part: Part = deal.parts[rank]
        self.pieces = {piece.tensor: piece for piece in self.part.pieces}
        # A tensor's positions, counted from where its piece begins.
        self.chosen: dict[int, Tensor] = {}
        self.guesses: dict[int, float] = {}  # where to look in the next step

    def take(self, grads: Tensors) -> None:
        """Select of all tensors, by what line 10 makes of ``grads``, before anything is written."""
        for i, piece in self.pieces.items():
            self.choose(i, own_x(self.bucket, i, piece, grads[i]))

    def choose(self, i: int, x: Tensor) -> None:
        """Select among ``x``, this rank's piece of tensor i."""
        how, wanted = self.bucket.group["selection"], self.pieces[i].wanted
        guess = float(self.bucket.state["threshold"][i])
        self.chosen[i], self.guesses[i] = select(x, wanted, how, self.ops, guess)

    def settle(self) -> None:
        """Keep where to look in the next step."""
        for i, guess in self.guesses.items():
            self.bucket.state["threshold"][i].fill_(guess)

    @cached_property
    def positions(self) -> Tensor:
        """What was selected, as positions among the bits of this rank's range, int64."""
        device = self.bucket.device
        found = [self.chosen[i].long().add_(piece.at) for i, piece in self.pieces.items()]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)

    def message(self) -> Tensor:
        """This rank's bits, coded where codes are smaller."""
        size = self.part.last - self.part.first
        return encode(self.positions, bits_at(self.positions, size), self.deal, self.rank)

    def found(self, messages: Tensor) -> Mask:
        """All ranks' selections."""
        bits, positions = assemble(messages, self.deal, self.rank, self.positions)
        index = per_tensor(positions, compressed_lengths(self.bucket))
        return Mask(self.bucket, bits=bits_by_tensor(self.bucket, bits), positions=index)


def found_next(bucket: Bucket, ops: Ops, selection: Selection, messages: Tensor) -> Mask:
    """All ranks' selections, as the bucket's next mask."""
    return stored(bucket, ops, selection.found(messages), "next_mask")


def keep_masks(
    bucket: Bucket, ops: Ops, mask: Mask, mean: Payload, selection: Selection | None
) -> Asking[None]:
    """After the commit: momenta are on this step's mask now; with a delay, what was selected in it
    is gathered for the next one.
    """
    yield from keep(bucket, ops, mask, mean)
    if selection:
        selection.settle()
    if bucket.group["mask_delay"] == 0:
        return
    yield from forget_next(bucket, ops)
    if selection:
        rows = yield AllGather(selection.message())  # awaited when the next step needs it
        found = yield from ops.commit("scape.found", found_next, bucket, selection, rows)
        bucket.cache["next_mask"] = found
