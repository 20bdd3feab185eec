"""What is selected: who deals with which part of a bucket's mask, how many, and how the largest are found."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache

import torch
from torch import Tensor

from ._buckets import Bucket
from ._masks import WORD, Deal, Part, Piece, assemble, bits_of, count_shared, encode, make_deal, offsets_of, per_tensor
from ._math import kept
from ._ops import Ops

SLACK = 0.05  # a sampled threshold may miss the wanted count by this share of it
EXACT_BELOW = 16384  # elements: topk costs less than looking for a threshold
BLOCK = 131072  # elements that stay in a core's cache between two passes
LOOKS = 12  # thresholds tried before topk decides


@lru_cache(maxsize=256)
def deal(lengths: tuple[int, ...], ranks: int, density: float) -> Deal:
    """Cut the mask of tensors with these lengths (0: not compressed) into one equal range for every rank."""
    offsets = offsets_of(lengths)
    cuts = [offsets[-1] * rank // ranks // WORD * WORD for rank in range(ranks)] + [offsets[-1]]
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for i, (n, offset) in enumerate(zip(lengths, offsets, strict=False)):
        k, stop = kept(density, n), 0
        rank = bisect_right(cuts, offset) - 1
        while stop < n:
            start, stop = stop, min(n, 8 * (cuts[rank + 1] - offset))
            wanted = k * stop // n - k * start // n  # the pieces' add up to the tensor's
            most = math.floor(wanted * (1 + SLACK))
            pieces[rank].append(Piece(i, start, stop, 8 * (offset - cuts[rank]) + start, wanted, most))
            rank += 1
    return make_deal([(cuts[rank], cuts[rank + 1], tuple(pieces[rank])) for rank in range(ranks)])


def select(x: Tensor, k: int, how: str, guess: float, flags: Tensor, scratch: Tensor) -> float:
    """Set ``flags`` where |x| is among the k largest, and return the threshold found (0: none).

    "exact" takes k of them. "sampled" tries thresholds, from ``guess`` or a sample of x on, until the count is within
    5 % of k; where fewer elements are other than 0, it takes those.
    """
    if how == "sampled" and x.numel() > EXACT_BELOW and k:
        t = _threshold(x, k, guess, flags, scratch)
        if t is not None:
            return t
    flags.zero_()
    if k:
        flags[torch.abs(x, out=scratch).topk(k, sorted=False).indices] = True
    return 0.0


def _threshold(x: Tensor, k: int, guess: float, flags: Tensor, scratch: Tensor) -> float | None:
    """A threshold that about k elements exceed, which are then flagged; None when there is none (many equal values).

    Counts fall with a power of the threshold: at first guess as in a normal distribution, then as two looks show.
    """
    looks: list[tuple[float, float]] = []  # logarithms of threshold and count
    t, power = guess or _of_sample(x, k), min(-0.5, -1.5 * math.log(x.numel() / k))
    for look in range(LOOKS):
        for own, x_ in zip(flags.split(BLOCK), x.split(BLOCK), strict=True):
            own.copy_(torch.hardshrink(x_, t, out=scratch[: x_.numel()]))  # several times faster than a comparison
        count = _count(flags)
        if abs(count - k) <= SLACK * k:
            return t * (k / count) ** (1 / power)  # as far as it can be told, what selects k
        if t == 0 and count < k:
            return 0.0
        if t == 0 or (look == 0 and guess and not k / 4 < count < 4 * k):  # a guess too far off, or most of x is 0
            t = _of_sample(x, k) or float(x.abs().mean())
            continue
        looks.append((math.log(t), math.log(max(count, 0.5))))
        if len(looks) > 1 and looks[-1][0] != looks[-2][0]:
            power = min(-0.5, (looks[-1][1] - looks[-2][1]) / (looks[-1][0] - looks[-2][0]))
        t *= (k / max(count, 0.5)) ** (1 / power)
    return None


def _of_sample(x: Tensor, k: int) -> float:
    sample = x[:: max(1, x.numel() // 4096)].abs()
    return float(sample.kthvalue(sample.numel() - min(sample.numel() - 1, k * sample.numel() // x.numel())).values)


def _count(flags: Tensor) -> int:
    """How many are set. Words of 8 flags are added 128 at a time, so that no byte overflows."""
    whole = flags.numel() // 1024 * 1024
    sums = flags[:whole].view(torch.int64).view(128, -1).sum(0)
    rest = int(flags[whole:].sum()) if whole < flags.numel() else 0
    return rest + int(sums.view(torch.uint8).sum())


class Selection:
    """The elements that this rank selects of one bucket in one step, a tensor at a time."""

    def __init__(self, bucket: Bucket, ops: Ops, deal: Deal, rank: int):
        self.bucket, self.ops, self.deal, self.rank = bucket, ops, deal, rank
        self.part: Part = deal.parts[rank]
        self.pieces = {piece.tensor: piece for piece in self.part.pieces}
        self.thresholds: dict[int, float] = {}

    @property
    def flags(self) -> Tensor:
        return self.ops.scratch(
            self.bucket.flat["residual"], 8 * (self.part.last - self.part.first), torch.bool, "flags"
        )

    def take(self, i: int, x: Tensor) -> None:
        """Select among ``x``, this rank's piece of tensor i."""
        piece = self.pieces[i]
        guess = float(self.bucket.state["threshold"][i])  # the last step's
        end = piece.at + x.numel()
        self.flags[end : end + -end % 8] = False
        own, scratch = self.flags[piece.at : end], self.ops.scratch(x, x.numel())
        how = self.bucket.group["selection"]
        self.thresholds[i] = select(x, piece.wanted, how, guess, own, scratch)

    def message(self) -> Tensor:
        return encode(bits_of(self.flags), self.deal, self.rank)


def density_at(h: dict, t: int) -> float:
    """Density of the mask that step t uses: 1 in the warm-up, then falling."""
    k, ramp = t - h["warmup_steps"] - 1, h["density_warmup_steps"]
    return 1.0 if k < 0 else h["density"] if ramp == 0 else max(h["density"], h["density"] ** (k / ramp))


def deal_at(bucket: Bucket, t: int, ranks: int) -> Deal | None:
    """Who selects what of the mask that step t uses; None where that is all ones, or nothing is compressed."""
    lengths, density = compressed_lengths(bucket), density_at(bucket.group, t)
    return deal(lengths, ranks, density) if density < 1 and any(lengths) else None


def compressed_lengths(bucket: Bucket) -> tuple[int, ...]:
    return tuple(n if c else 0 for n, c in zip(bucket.lengths, bucket.compressed, strict=True))


def found(bucket: Bucket, messages: Tensor, deal: Deal) -> tuple[list[Tensor | None], Tensor]:
    """All ranks' selections, as positions in each tensor and as the bucket's bits."""
    bits, positions = assemble(messages, deal)
    return per_tensor(positions, compressed_lengths(bucket)), bits


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


def fill_ones(mask: Tensor, n: int) -> None:
    mask.fill_(255)
    if n % 8:
        mask[-1] = (1 << n % 8) - 1
