"""The random matrices of a step, the same bits on all ranks.

Drawn by hashing a counter in integers (splitmix64) and looking up 16 bits at a time in a table of
Gaussian quantiles: unlike ``torch.randn``, the same on every device, machine and torch version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._wire.payload import Scratch
from .kinds import KINDS
from .orthonormal import columns_of
from .projections import Projection

# splitmix64's three factors, as signed numbers
GOLDEN, FIRST, SECOND = (
    c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)

# Matrices are kept while a payload travels that have a number for so many elements, or fewer;
# others are drawn again: with blocks of a row each they are larger than what they project.
KEPT = 8

Key = tuple[tuple[int, int], ...]  # of each tensor of a bucket its number, and how many words
Drawn = list[Tensor | None]


class Matrices:
    """Draws them, from (seed, step, number of the tensor), into one buffer for all buckets."""

    def __init__(self) -> None:
        self._buffer = Scratch()
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._counters: dict[int, tuple[tuple[Key, torch.device], Tensor]] = {}
        self._kept: dict[int, tuple[tuple[object, ...], Drawn]] = {}

    def draw_once(
        self,
        bucket: Bucket,
        numbers: Sequence[int],
        plan: Sequence[Projection | None],
        seed: int,
        step: int,
    ) -> Drawn:
        """As ``draw``, kept for the bucket's next calls at this step where they are small."""
        there = [q for q in plan if q is not None]
        if KEPT * sum(q.drawn for q in there) > sum(q.m * q.d for q in there):
            return self.draw(bucket, numbers, plan, seed, step)
        wanted = [*numbers], [*plan], seed, step, bucket.dtype, bucket.device
        held = self._kept.pop(bucket.index, None)  # not there while others are drawn in its place
        if held is None or held[0] != wanted:
            use = f"of bucket {bucket.index}"
            held = wanted, self.draw(bucket, numbers, plan, seed, step, use)
        self._kept[bucket.index] = held
        return held[1]

    def draw(
        self,
        bucket: Bucket,
        numbers: Sequence[int],
        plan: Sequence[Projection | None],
        seed: int,
        step: int,
        use: str = "values",
    ) -> Drawn:
        """For each tensor of the bucket that is projected its (d, r) matrix, or with blocks of rows
        a stack of them, valid until the next call for the same ``use``.
        """
        words = [0 if q is None else (q.drawn + 3) // 4 for q in plan]
        if not any(words):
            return [None] * len(plan)
        key = tuple(zip(numbers, words, strict=True))
        values = self._gaussian(bucket, key, seed, step, use)
        parts = torch.split(values, [4 * n for n in words])
        return [
            None if q is None else _matrix(q, part) for q, part in zip(plan, parts, strict=True)
        ]

    def _gaussian(self, bucket: Bucket, key: Key, seed: int, step: int, use: str) -> Tensor:
        """Four normal numbers for every word of the bucket."""
        device, start = bucket.device, self._start(bucket, key)
        x = self._buffer("words", len(start), torch.int64, device)
        torch.add(start, _key(seed, step), out=x)
        _mix(x, self._buffer("shifted", len(start), torch.int64, device))
        index = self._buffer("index", 4 * len(x), torch.int32, device)
        index.copy_(x.view(torch.int16)).add_(2**15)
        dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        values = self._buffer(use, len(index), dtype, device)
        return torch.index_select(self._table(dtype, device), 0, index, out=values)

    def _start(self, bucket: Bucket, key: Key) -> Tensor:
        """A number for every word of the bucket, no two alike: its tensor's number above bit 40,
        its place below.
        """
        wanted = key, bucket.device
        held = self._counters.get(bucket.index)
        if held is None or held[0] != wanted:
            counters = [
                torch.arange(words, dtype=torch.int64, device=bucket.device).add_(number << 40)
                for number, words in key
            ]
            held = wanted, torch.cat(counters).mul_(GOLDEN)
            self._counters[bucket.index] = held
        return held[1]

    def _table(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (dtype, device) not in self._tables:
            self._tables[dtype, device] = gaussian_quantiles().to(device, dtype)
        return self._tables[dtype, device]


def _matrix(q: Projection, numbers: Tensor) -> Tensor:
    R = numbers[: q.drawn]
    R = R.view(q.d, q.r) if q.blocks == 1 else R.view(q.blocks, q.d, q.r)
    q.kind.of_random(R)
    return R


def gaussian_quantiles() -> Tensor:
    """2^16 equally likely values whose mean is 0 and variance 1, as multiples of 2^-16: rounding
    cannot differ.
    """
    half = torch.special.ndtri((torch.arange(2**15, dtype=torch.float64) + 0.5) / 2**16)
    half = half.div_(half.square().mean().sqrt()).mul_(2**16).round_().div_(2**16)
    return torch.cat([half, -half])


@cache
def fingerprint(kind: str, device: torch.device) -> str:
    """A checksum of what this device computes for a kind of projection.

    Ranks whose arithmetic differs must not train together. Numbers are drawn alike everywhere; it
    is the orthonormal columns in which two kinds of device differ.
    """
    bucket = Bucket(0, {}, [torch.empty(64, 64, dtype=torch.float32, device=device)], ["probe"])
    q = Projection(64, 64, False, 8, KINDS[kind], 0.0)
    (R,) = Matrices().draw(bucket, [0], [q], seed=0, step=1)
    if R is not None and q.kind.follows:
        R = columns_of(R)  # as the tracked ones are found, of the ranks' mean
    text = "" if R is None else str(R.tolist())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _key(seed: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _mix(x: Tensor, shifted: Tensor) -> None:
    """splitmix64's finaliser in place: every bit of the input decides about every bit of the
    output.
    """
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        # the shift brings copies of the sign in
        shifted.bitwise_and_(2 ** (64 - shift) - 1)
        x.bitwise_xor_(shifted).mul_(factor)
