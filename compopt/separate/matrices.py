"""Random matrices of a step, the same bits on all ranks: R of Gaussian projections, and the first
bases of tracked ones.

They are drawn by hashing a counter in integers (splitmix64) and looking up 16 bits at a time in a
table of Gaussian quantiles. Unlike ``torch.randn``, this gives the same bits on every device,
machine and torch version.

``ProjectingOptimizer`` has a ``MatrixSource``, from which ``ProjectionReducer`` draws.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._ops.operations import Ops
from .._state.bucket import Bucket
from .._wire.payload import Scratch
from .projections import Projection
from .stacks import orthonormalize_columns

# splitmix64's three factors, as signed numbers
GOLDEN, FIRST, SECOND = (
    c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)

CounterKey = tuple[tuple[int, int], ...]  # (number, words) of each tensor of a bucket
RandomMatrices = list[Tensor | None]  # one for each tensor of a bucket; None: nothing is drawn


class MatrixSource:
    """Draws matrices from (seed, step, number of the tensor), into one buffer for all buckets."""

    def __init__(self) -> None:
        self._buffer = Scratch()
        self._quantiles: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._counters: dict[int, tuple[tuple[CounterKey, torch.device], Tensor]] = {}

    def release_memory(self) -> None:
        """Free the memory that draws reuse."""
        self._buffer, self._counters = Scratch(), {}

    def draw(
        self,
        bucket: Bucket,
        numbers: Sequence[int],
        plan: Sequence[Projection | None],
        seed: int,
        step: int,
    ) -> RandomMatrices:
        """Draw R of each projected tensor, valid until the next call."""
        counts = [0 if q is None else math.prod(q.random_shape) for q in plan]
        words = [(count + 3) // 4 for count in counts]  # a word holds four numbers of 16 bits
        if not any(words):
            return [None] * len(plan)
        key = tuple(zip(numbers, words, strict=True))
        values = self._draw_normal(bucket, key, seed, step)
        matrices: RandomMatrices = []
        parts = torch.split(values, [4 * n for n in words])
        for q, part, count in zip(plan, parts, counts, strict=True):
            R = None if q is None else part[:count].view(q.random_shape)
            matrices.append(R)
        return matrices

    def _draw_normal(self, bucket: Bucket, key: CounterKey, seed: int, step: int) -> Tensor:
        """Draw four normal numbers for every word of the bucket."""
        # a counter for every word, unique in the model: the tensor's number above bit 40, the
        # position below
        device = bucket.device
        entry = self._counters.get(bucket.index)
        if entry is None or entry[0] != (key, device):
            counters = [
                torch.arange(words, dtype=torch.int64, device=device).add_(number << 40)
                for number, words in key
            ]
            entry = (key, device), torch.cat(counters).mul_(GOLDEN)
            self._counters[bucket.index] = entry
        counter = entry[1]

        # splitmix64's finalizer: every bit of the input affects every bit of the output
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
        x = self._buffer("words", len(counter), torch.int64, device)
        torch.add(counter, int.from_bytes(digest, "little", signed=True), out=x)
        shifted = self._buffer("shifted", len(counter), torch.int64, device)
        for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
            torch.bitwise_right_shift(x, shift, out=shifted)
            # the arithmetic shift copies the sign bit
            shifted.bitwise_and_(2 ** (64 - shift) - 1)
            x.bitwise_xor_(shifted).mul_(factor)

        # each 16 bits select a quantile
        index = self._buffer("index", 4 * len(x), torch.int32, device)
        index.copy_(x.view(torch.int16)).add_(2**15)
        dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        if (dtype, device) not in self._quantiles:
            self._quantiles[dtype, device] = gaussian_quantiles().to(device, dtype)
        values = self._buffer("values", len(index), dtype, device)
        return torch.index_select(self._quantiles[dtype, device], 0, index, out=values)


def gaussian_quantiles() -> Tensor:
    """Return 2^16 equally likely values of mean 0 and variance 1.

    They are multiples of 2^-16, so that no rounding can differ between machines.
    """
    half = torch.special.ndtri(
        (torch.arange(2**15, dtype=torch.float64, device="cpu") + 0.5) / 2**16
    )
    half = half.div_(half.square().mean().sqrt()).mul_(2**16).round_().div_(2**16)
    return torch.cat([half, -half])


def checksum_projection(kind: str, device: torch.device, ops: Ops) -> str:
    """Return a checksum of the matrices that this device and backend compute for one kind of
    projection.

    Ranks compare it in the handshake, since ranks whose arithmetic differs must not train together.
    Random numbers are the same everywhere; orthonormal columns may differ between devices.
    """
    group = {"projection": kind, "payload_dtype": None, "rank": 8}
    bucket = Bucket(0, group, [torch.empty(64, 64, dtype=torch.float32, device=device)], ["probe"])
    q = Projection(64, 64, False, m=64, d=64, r=8, kind=kind, beta=0.0)
    (R,) = MatrixSource().draw(bucket, [0], [q], seed=0, step=1)
    if R is not None and q.is_tracked:
        by_columns = R.mT.contiguous().view(-1)
        (R,) = ops.run(orthonormalize_columns, bucket, [by_columns], [(1, 64, 8)])
    text = "" if R is None else str(R.tolist())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
