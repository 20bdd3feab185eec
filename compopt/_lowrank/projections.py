"""Random projections of gradients: how each tensor is projected, and the matrices that all ranks
draw alike.

A tensor is seen as a matrix of m rows and d columns, H; ``H R`` with R of shape (d, r) crosses the
network, and ``scale * (H R) R^T`` is its reconstruction. The smaller side of a tensor is the one
projected: as many bytes and as much variance for the same ratio, with less to draw and to multiply.
Unless it has fewer than 64 rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from .._ops.math import one_thread
from .._ops.ops import Ops
from .._state.buckets import Bucket, local
from .._wire.requests import Payload
from .._wire.scratch import Scratch

Plan = list[
    "Projection | None"
]  # for each tensor of a bucket how it is projected; None: sent whole
KINDS = ("gaussian", "orthonormal", "tracked")
# last dimensions smaller than this (a convolution's kernel) are joined with those before them
NARROW = 64
LARGEST = 2**22  # numbers drawn for a tensor of few rows
GOLDEN, FIRST, SECOND = (
    c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # splitmix64


@dataclass(frozen=True, slots=True)
class Projection:
    """How one tensor is projected.

    ``rows`` and ``columns`` are the tensor as a matrix; ``of_rows``: its rows are projected, not
    its columns. ``r`` is what remains of the projected dimension, ``beta`` the weight of the old
    error."""

    rows: int
    columns: int
    of_rows: bool
    r: int
    kind: str
    beta: float

    @property
    def d(self) -> int:
        return self.rows if self.of_rows else self.columns

    @property
    def m(self) -> int:
        return self.columns if self.of_rows else self.rows

    @property
    def scale(self) -> float:
        """Makes the Gaussian's reconstruction unbiased, the orthonormal one the nearest there is (a
        contraction).
        """
        return 1 / self.r if self.kind == "gaussian" else 1.0

    def matrix(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor as the (m, d) matrix whose columns are projected."""
        matrix = tensor.view(self.rows, self.columns)
        return matrix.t() if self.of_rows else matrix

    def of_part(self, part: Tensor) -> Tensor:
        """Its part of a payload as the (m, r) matrix H R.

        Values of one size follow each other: they share scales.
        """
        return (
            part.view(self.r, self.m).t() if self.kind == "tracked" else part.view(self.m, self.r)
        )


@lru_cache(maxsize=4096)
def projection(
    shape: torch.Size, sharded: bool, ratio: float, kind: str, ef_beta: float | str, rank: int = 16
) -> Projection | None:
    """How a tensor of this (local) shape is projected; None when it is sent whole.

    Of a sharded tensor the columns are projected, whole on every rank, whatever the shard's number
    of rows. A tracked one's rows are projected to ``rank``: each shard is a matrix of its own."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    split = len(shape) - 1
    while split > 1 and math.prod(shape[split:]) < NARROW:
        split -= 1
    rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
    if kind == "tracked":
        r = min(rank, rows, columns)
        whole = r * (rows + columns) >= rows * columns
        return (
            None
            if whole
            else Projection(rows, columns, True, r, kind, 0.0 if ef_beta == "auto" else ef_beta)
        )
    few = (
        rows < NARROW
    )  # what would be left of so few carries too little: columns then, unless that takes too much
    too_wide = few and columns * math.ceil(columns / ratio) > LARGEST
    of_rows = rows < columns and (not few or too_wide) and not sharded
    d = rows if of_rows else columns
    r = math.ceil(d / ratio)
    if r >= d or (too_wide and not of_rows):
        return None
    return Projection(
        rows, columns, of_rows, r, kind, best_beta(kind, d, r) if ef_beta == "auto" else ef_beta
    )


def variance(d: int, r: int) -> float:
    """w: the mean of |reconstruction - g|^2 over |g|^2, for a Gaussian d x r matrix (SEPARATE,
    lemma 4.2).
    """
    return (d + 1) / r


def least_beta(q: Projection) -> float:
    """Below it the error of error feedback grows without end: its square by beta^2 + (1 - beta)^2 w
    a step.
    """
    w = variance(q.d, q.r)
    return (w - 1) / (w + 1) if q.kind == "gaussian" else 0.0


def best_beta(kind: str, d: int, r: int) -> float:
    """Where that growth is least.

    Projecting on orthonormal columns never enlarges the error: all of it may be kept.
    """
    w = variance(d, r)
    return w / (1 + w) if kind == "gaussian" else 0.0


class Matrices:
    """The projection matrices of a step, the same bits on all ranks, from (seed, step, number of
    the tensor).

    Drawn by hashing a counter in integers (splitmix64) and looking up 16 bits at a time in a table
    of Gaussian quantiles: unlike ``torch.randn``, the same on every device, machine and torch
    version. One buffer for all buckets."""

    def __init__(self) -> None:
        self._buffer = Scratch()
        self._tables: dict[tuple, Tensor] = {}
        self._counters: dict[int, tuple[tuple, Tensor]] = {}

    def draw(
        self,
        bucket: Bucket,
        numbers: Sequence[int],
        plan: Sequence[Projection | None],
        seed: int,
        step: int,
    ) -> list[Tensor | None]:
        """For each tensor of the bucket that is projected its (d, r) matrix, valid until the next
        call.
        """
        words = [0 if q is None else (q.d * q.r + 3) // 4 for q in plan]
        if not any(words):
            return [None] * len(plan)
        start = self._start(bucket, tuple(zip(numbers, words, strict=True)))
        x = torch.add(
            start,
            _key(seed, step),
            out=self._buffer("words", len(start), torch.int64, bucket.device),
        )
        _mix(x, self._buffer("shifted", len(start), torch.int64, bucket.device))
        index = (
            self._buffer("index", 4 * len(x), torch.int32, bucket.device)
            .copy_(x.view(torch.int16))
            .add_(2**15)
        )
        dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        values = self._buffer("values", len(index), dtype, bucket.device)
        torch.index_select(self._table(dtype, bucket.device), 0, index, out=values)
        matrices: list[Tensor | None] = []
        for q, part in zip(plan, values.split([4 * n for n in words]), strict=True):
            matrices.append(None if q is None else part[: q.d * q.r].view(q.d, q.r))
            if q is not None and q.kind == "orthonormal":
                matrices[-1].copy_(columns_of(matrices[-1]))
        return matrices

    def _start(self, bucket: Bucket, key: tuple[tuple[int, int], ...]) -> Tensor:
        """A number for every word of the bucket, no two alike: its tensor's number above bit 40,
        its place below.
        """
        held = self._counters.get(bucket.index)
        if held is None or held[0] != (key, bucket.device):
            counters = [
                torch.arange(words, dtype=torch.int64, device=bucket.device).add_(number << 40)
                for number, words in key
            ]
            held = self._counters[bucket.index] = (
                (key, bucket.device),
                torch.cat(counters).mul_(GOLDEN),
            )
        return held[1]

    def _table(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (dtype, device) not in self._tables:
            self._tables[dtype, device] = gaussian_quantiles().to(device, dtype)
        return self._tables[dtype, device]


def columns_of(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span those of a matrix, or of each of several; in float32 at least.

    On one thread: with several the last bits depend on their number, and it is hardly faster.
    """
    with one_thread():
        return torch.linalg.qr(matrices.to(torch.promote_types(matrices.dtype, torch.float32))).Q


def gaussian_quantiles() -> Tensor:
    """2^16 equally likely values whose mean is 0 and variance 1, as multiples of 2^-16: rounding
    cannot differ.
    """
    half = torch.special.ndtri((torch.arange(2**15, dtype=torch.float64) + 0.5) / 2**16)
    half = half.div_(half.square().mean().sqrt()).mul_(2**16).round_().div_(2**16)
    return torch.cat([half, -half])


@cache
def fingerprint(kind: str) -> str:
    """A checksum of what this machine draws: ranks whose arithmetic differs must not train
    together.
    """
    bucket = Bucket(0, {}, [torch.empty(64, 64, dtype=torch.float32)], ["probe"])
    q = Projection(64, 64, False, 8, kind, 0.0)
    drawn = Matrices().draw(bucket, [0], [q], seed=0, step=1)[0]
    return hashlib.blake2b(str(drawn.tolist()).encode(), digest_size=8).hexdigest()


def is_sharded(p: Tensor) -> bool:
    return local(p) is not p


def _key(seed: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _mix(x: Tensor, shifted: Tensor) -> None:
    """splitmix64's finaliser in place: every bit of the input decides about every bit of the
    output.
    """
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1)).mul_(
            factor
        )  # the shift brings copies of the sign in


def pack(
    bucket: Bucket,
    ops: Ops,
    grads: list[Tensor | None],
    plan: Plan,
    matrices: list[Tensor | None],
    clipped: float,
    cosines: bool,
    agreed: Payload | None,
) -> Payload:
    """The bucket's message: p of every projected tensor, the other gradients whole, the cosines if
    asked for.

    ``agreed``: a payload before this one, whose header and control words are the ranks' mean
    already."""
    residual, dtype = bucket.state["residual"], bucket.group["payload_dtype"]
    held_back = bucket.rounds or (bucket.owes and bucket.group["projection"] != "gaussian")
    if clipped == 1 and not cosines and not any(plan):  # in one pass, where the back end has one
        return ops.pack(bucket, grads, add=residual if held_back else None)
    lengths = [n if q is None else q.m * q.r for n, q in zip(bucket.lengths, plan, strict=True)]
    payload = bucket.payload(lengths + [len(plan)] * cosines, dtype)
    if agreed is None:
        ops.mark(payload, grads)
    else:
        payload.header.copy_(agreed.header)
        payload.control.copy_(agreed.control)
    for i, (g, q, R) in enumerate(zip(grads, plan, matrices, strict=True)):
        part = payload.exact[i]
        if q is not None:
            h = scaled_sum(residual[i], g, clipped, ops)
            if part.dtype == R.dtype:
                torch.mm(q.matrix(h), R, out=q.of_part(part))
            else:
                q.of_part(part).copy_(q.matrix(h) @ R)
        elif g is None:
            part.zero_()
        else:
            part.copy_(g.reshape(-1)).mul_(clipped)
        if q is None and held_back and residual[i] is not None:
            part.add_(residual[i].view(-1))  # what rounding dropped, or a contraction left over
        if cosines:
            payload.exact[-1][i] = 0.0 if q is None or g is None else cosine(g, part, q, R)
    return payload.round()


def scaled_sum(error: Tensor, g: Tensor | None, scale: float, ops: Ops) -> Tensor:
    """``error + scale * g``, contiguous. Scratch memory."""
    h = ops.scratch(error, error.numel()).view(error.shape)
    return h.copy_(error) if g is None else torch.add(error, g, alpha=scale, out=h)


def cosine(g: Tensor, part: Tensor, q: Projection, R: Tensor) -> Tensor:
    """Between this rank's gradient and the reconstruction of what it sends."""
    reconstruction = q.of_part(part).to(R.dtype) @ R.t()
    g = q.matrix(g.contiguous()).to(R.dtype)
    length = torch.linalg.vector_norm(g) * torch.linalg.vector_norm(reconstruction)
    return (g * reconstruction).sum() / length.clamp_min(torch.finfo(R.dtype).tiny)


def reconstruct(
    out: Tensor, part: Tensor, q: Projection | None, R: Tensor | None, factor: float, ops: Ops
) -> None:
    """``factor`` times the averaged gradient, into ``out``, where it may be already."""
    if q is None:
        if out.data_ptr() != part.data_ptr():
            out.view(-1).copy_(part)
        if factor != 1:
            out.mul_(factor)
        return
    p = q.of_part(part).to(R.dtype) * (q.scale * factor)
    if out.dtype == R.dtype:
        torch.mm(p, R.t(), out=q.matrix(out))
    else:
        exact = ops.scratch(R, out.numel()).view(out.shape)
        torch.mm(p, R.t(), out=q.matrix(exact))
        out.copy_(exact)


def grams_of(matrices: list[Tensor | None], alike: bool) -> list[Tensor | None]:
    """R^T R of each matrix; ``alike``: to the bit, whatever the number of threads."""
    with one_thread() if alike else nullcontext():
        return [None if R is None else R.t() @ R for R in matrices]


def squared_norm(mean: Payload, plan: Plan, grams: list[Tensor | None], alike: bool) -> Tensor:
    """|ghat|^2 over the bucket, without reconstructing: |p R^T|^2 is the sum of (p R^T R) * p.

    ``alike``: every rank clips by it, so it must not depend on the number of threads.
    """

    def total(dtype: torch.dtype) -> Tensor:
        squares = [mean.header.new_zeros((), dtype=dtype)]
        for part, q, gram in zip(mean.parts, plan, grams, strict=False):
            if q is None:
                squares.append(part.to(dtype).square().sum())
            else:
                p = q.of_part(part).to(dtype) * q.scale
                squares.append((p @ gram.to(dtype)).mul_(p).sum())
        return torch.stack(squares).sum()

    with one_thread() if alike else nullcontext():
        fast = total(torch.promote_types(mean.flat.dtype, torch.float32))
        return fast if fast.isfinite() else total(torch.float64)
