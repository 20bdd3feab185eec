"""What is selected: who deals with which part of a bucket's mask, how many, and how the largest are
found.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .._engine.when import dense_steps
from .._ops.math import kept
from .._ops.ops import Ops
from .._state.buckets import Bucket
from .._state.masks import (
    Deal,
    Part,
    Piece,
    assemble,
    count_shared,
    cut_bytes,
    encode,
    make_deal,
    offsets_of,
    per_tensor,
)

SLACK = 0.05  # a sampled threshold may miss the wanted count by this share of it
EXACT_BELOW = 16384  # elements: topk costs less than looking for a threshold
AIM_BELOW = (
    0.93  # of the threshold that would do: what drifts from step to step then still finds enough
)
LOOKS = 12  # thresholds tried before topk decides


@lru_cache(maxsize=256)
def deal(lengths: tuple[int, ...], ranks: int, density: float) -> Deal:
    """Cut the mask of tensors with these lengths (0: not compressed) into one equal range for every
    rank.
    """
    offsets = offsets_of(lengths)
    cuts = cut_bytes(offsets[-1], ranks)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for i, (n, offset) in enumerate(zip(lengths, offsets, strict=False)):
        k, stop = kept(density, n), 0
        rank = bisect_right(cuts, offset) - 1
        while stop < n:
            start, stop = stop, min(n, 8 * (cuts[rank + 1] - offset))
            wanted = k * stop // n - k * start // n  # the pieces' add up to the tensor's
            most = math.floor(wanted * (1 + SLACK))
            pieces[rank].append(
                Piece(i, start, stop, 8 * (offset - cuts[rank]) + start, wanted, most)
            )
            rank += 1
    return make_deal([(cuts[rank], cuts[rank + 1], tuple(pieces[rank])) for rank in range(ranks)])


def select(x: Tensor, k: int, how: str, ops: Ops, guess: float = 0.0) -> tuple[Tensor, float]:
    """Positions, ascending, of the k largest |x|, and where to look for them the next time (0:
    nowhere).

    "exact" takes k of them. "sampled" tries thresholds, from ``guess`` or a sample of x on, until
    the count is within 5 % of k; where fewer elements are other than 0, it takes those. A back end
    that finds them faster takes exactly k."""
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
            candidates = ops.above(x, t)
            if len(candidates) >= k:
                chosen = x.index_select(0, candidates).abs_().topk(k, sorted=False).indices
                return candidates.index_select(0, chosen).sort().values
            if t == 0:
                return candidates
            t = t / 2 if t > float(torch.finfo(x.dtype).tiny) else 0.0
    return x.abs().topk(k, sorted=False).indices.sort().values


def _sampled(x: Tensor, k: int, ops: Ops, guess: float) -> tuple[Tensor, float] | None:
    """About k positions by a threshold, and a guess for the next time; None where no threshold
    tells (equal values).

    A threshold that lets a few times k through will do: among those a second one is cheap. So the
    guess aims below. Counts fall with a power of the threshold: at first guess as in a normal
    distribution, then as two looks show."""
    looks: list[tuple[float, float]] = []  # logarithms of threshold and count
    t, power = guess or AIM_BELOW * _of_sample(x, k), min(-0.5, -1.5 * math.log(x.numel() / k))
    for look in range(LOOKS):
        positions = ops.above(x, t)
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
    chosen = positions.index_select(0, ops.above(values, t))
    return (chosen, AIM_BELOW * t) if abs(len(chosen) - k) <= SLACK * k else None


def _of_sample(x: Tensor, k: int) -> float:
    sample = x[:: max(1, x.numel() // 4096)].abs()
    return float(
        sample.kthvalue(
            sample.numel() - min(sample.numel() - 1, k * sample.numel() // x.numel())
        ).values
    )


class Selection:
    """The elements that this rank selects of one bucket in one step, a tensor at a time."""

    def __init__(self, bucket: Bucket, ops: Ops, deal: Deal, rank: int):
        self.bucket, self.ops, self.deal, self.rank = bucket, ops, deal, rank
        self.part: Part = deal.parts[rank]
        self.pieces = {piece.tensor: piece for piece in self.part.pieces}
        self.chosen: dict[
            int, Tensor
        ] = {}  # a tensor's positions, counted from where its piece begins
        self.guesses: dict[int, float] = {}  # where to look in the next step

    def take(self, i: int, x: Tensor) -> None:
        """Select among ``x``, this rank's piece of tensor i."""
        how, wanted = self.bucket.group["selection"], self.pieces[i].wanted
        guess = float(self.bucket.state["threshold"][i])
        self.chosen[i], self.guesses[i] = select(x, wanted, how, self.ops, guess)

    @cached_property
    def positions(self) -> Tensor:
        """What was selected, as positions among the bits of this rank's range, int64."""
        device = self.bucket.device
        found = [self.chosen[i].long().add_(piece.at) for i, piece in self.pieces.items()]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)

    def message(self) -> Tensor:
        size = self.part.last - self.part.first
        return encode(self.positions, self.ops.bits(self.positions, size), self.deal, self.rank)

    def found(self, messages: Tensor) -> tuple[list[Tensor | None], Tensor]:
        """All ranks' selections, as positions in each tensor and as the bucket's bits."""
        bits, positions = assemble(messages, self.deal, self.rank, self.positions)
        return per_tensor(positions, compressed_lengths(self.bucket)), bits


def density_at(h: dict, t: int) -> float:
    """Density of the mask that step t uses: 1 in the warm-up, then falling."""
    k, ramp = t - dense_steps(h) - 1, h["density_warmup_steps"]
    return (
        1.0
        if k < 0
        else h["density"]
        if ramp == 0
        else max(h["density"], h["density"] ** (k / ramp))
    )


def deal_at(bucket: Bucket, t: int, ranks: int) -> Deal | None:
    """Who selects what of the mask that step t uses; None where that is all ones, or nothing is
    compressed.
    """
    lengths, density = compressed_lengths(bucket), density_at(bucket.group, t)
    return deal(lengths, ranks, density) if density < 1 and any(lengths) else None


def compressed_lengths(bucket: Bucket) -> tuple[int, ...]:
    return tuple(n if c else 0 for n, c in zip(bucket.lengths, bucket.compressed, strict=True))


def keep_mask(bucket: Bucket, i: int, index: Tensor | None, bits: Tensor) -> None:
    """Note that the momentum of tensor i is now on ``index``, or everywhere."""
    mask, held = bucket.state["mask"][i], bucket.cache["held"][i]
    if index is not None:
        if bucket.group["mask_delay"] == 0 and held is not None:
            bucket.cache["shared"][i] = int(count_shared(bits, held)), len(index)
        mask.copy_(bits)
    elif held is not None:
        fill_ones(mask, bucket.lengths[i])
    bucket.cache["held"][i] = index


def keep_masks(
    bucket: Bucket, present: list[bool], index: list[Tensor | None], masks: list[Tensor | None]
) -> None:
    """The same for all compressed tensors that are ``present``, at once where all masks are those
    of one step ago.
    """
    ours = [i for i, compressed in enumerate(bucket.compressed) if compressed]
    if masks is bucket.state["next_mask"] and all(
        present[i] and index[i] is not None for i in ours
    ):
        bucket.flat["mask"].copy_(bucket.flat["next_mask"])
        bucket.cache["held"] = list(index)
        return
    for i in ours:
        if present[i]:
            keep_mask(bucket, i, index[i], masks[i])


def fill_ones(mask: Tensor, n: int) -> None:
    mask.fill_(255)
    if n % 8:
        mask[-1] = (1 << n % 8) - 1
