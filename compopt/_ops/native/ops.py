"""C passes over float32 tensors on a CPU: a bucket's step reads and writes its memory once (see
kernels/native).

Other tensors are left to PyTorch's operators. With several threads the tensors of a bucket are
dealt to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..._state.buckets import Bucket, local
from ..._state.masks import Mask, Tensors
from ..._wire.quantised_mean import QuantisedMean
from ..._wire.requests import Payload
from ..ops import Faster, Ops, empty_message
from .adams import AdamSPasses, adams_commit, scape_commit
from .adamw import AdamWPasses, masks_of, radius_commit, refuse
from .build import isa_of, load
from .means import NativeMean, decode, encode
from .selection import NativeSelection, SelectionPasses
from .tables import Table, addresses, along, at, fits, floats, over_rows, plain

SPARSE = 16  # with fewer than one in so many selected, positions are read faster than bits


class NativeOps(AdamWPasses, AdamSPasses, SelectionPasses):
    """A call for all tensors of a bucket."""

    name = "native"

    def __init__(self, devices: set[str] | frozenset[str] = frozenset()) -> None:
        super().__init__(devices)
        self.library = load()
        self.isa = isa_of(self.library)
        self.encode = functools.partial(encode, self.library)
        self.decode = functools.partial(decode, self.library)

    def job(self, bucket: Bucket) -> Callable[[Payload, int, int], QuantisedMean] | None:
        return functools.partial(NativeMean, self.library) if bucket.device.type == "cpu" else None

    def pack(
        self,
        bucket: Bucket,
        grads: Tensors,
        mask: Mask | None = None,
        add: Iterable[Tensor | None] | None = None,
        scale: float = 1.0,
        negate: bool = False,
    ) -> Payload:
        if not reads(self, bucket):  # what is offloaded passes by, a tensor at a time
            return super().pack(bucket, grads, mask, add, scale, negate)
        mask, lengths = mask or Mask(bucket), bucket.lengths
        payload, own = empty_message(bucket, mask), floats(grads)
        owed = list(add) if add else [None] * len(grads)
        head, body = self._exact(bucket, payload)
        bits, positions = bits_or_positions(mask)
        sizes = [part.numel() for part in payload.parts]
        first, mark = at("a message", body, sum(sizes)), at("marks", head, len(grads))
        table = Table(
            len(grads),
            n=lengths,
            g=addresses("gradients", own, lengths),
            add=addresses("what is owed", owed, lengths),
            index=addresses("positions", positions, sizes, torch.int32),
            mask=masks_of(bits, lengths),
            k=sizes,
            out=[first + 4 * start for start in accumulate(sizes[:-1], initial=0)],
            mark=[mark + 4 * i for i in range(len(grads))],
        )
        sign = -1.0 if negate else 1.0
        passed = over_rows(lengths, lambda a, b, _: self.library.pack(table, a, b, sign, scale))
        refuse(bucket, passed)
        if payload.flat.dtype != torch.float32:
            payload.header.copy_(head)
            if payload.dropped is None:
                payload.body.copy_(body)
        return payload.round()

    def _exact(self, bucket: Bucket, payload: Payload) -> tuple[Tensor, Tensor]:
        """Where header and body are written in float32: in the message, if it is of that."""
        if payload.flat.dtype == torch.float32:
            return payload.header, payload.body
        like, body = bucket.params[0], payload.dropped
        head = self.scratch(like, len(payload.header), torch.float32, "marks")
        if body is None:
            body = self.scratch(like, len(payload.body), torch.float32, "payload")
        return head, body

    def add_up(self, bucket: Bucket, grads: Tensors, add: Tensors, out: Tensors) -> Tensor:
        if not plain(*(x for x in (*grads, *add, *out) if x is not None)):
            return super().add_up(bucket, grads, add, out)
        lengths = bucket.lengths
        marks = torch.empty(len(grads), dtype=torch.float32)
        none = torch.empty(0, dtype=torch.int32)  # positions of what has no ``out``
        table = Table(
            len(grads),
            n=lengths,
            g=addresses("gradients", grads, lengths),
            add=addresses("what is owed", add, lengths),
            index=addresses(
                "positions",
                [none if to is None else None for to in out],
                [0] * len(out),
                torch.int32,
            ),
            mask=0,
            k=[0 if to is None else n for n, to in zip(lengths, out, strict=True)],
            out=addresses("sums", out, lengths),
            mark=along("marks", marks, [1] * len(grads)),
        )
        refuse(bucket, over_rows(lengths, lambda a, b, _: self.library.pack(table, a, b, 1.0, 1.0)))
        return marks

    def set_bits_of(self, bits: Tensor) -> Tensor:
        return self.positions(bits, 8 * bits.numel()).long()

    def positions(self, bits: Tensor, n: int, size: int | None = None) -> Tensor:
        if not fits(bits, 0, torch.uint8) or n >= 2**31:
            return super().positions(bits, n, size)
        n = min(n, 8 * bits.numel())
        mask = at("a mask", bits, (n + 7) // 8, torch.uint8)
        room = self.library.positions(mask, n, 0, None) if size is None else size
        out = torch.empty(room, dtype=torch.int32)
        return out[: self.library.positions(mask, n, room, at("positions", out, room, torch.int32))]


def bits_or_positions(
    mask: Mask,
) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """For each tensor one of the two, whichever is read faster; neither where it is taken whole."""
    if not mask.has_bits:
        return [None] * len(mask.lengths), mask.positions
    rows = zip(mask.bits, mask.sizes, mask.lengths, strict=True)
    bits = [None if b is None or size * SPARSE <= n else b for b, size, n in rows]
    if all(read is b for read, b in zip(bits, mask.bits, strict=True)):
        return bits, [None] * len(bits)
    return bits, [p if b is None else None for p, b in zip(mask.positions, bits, strict=True)]


def reads(ops: Ops, bucket: Bucket) -> bool:
    """Whether passes can read this bucket's gradients and state."""
    return (
        bucket.device.type == "cpu"
        and bucket.dtype == torch.float32
        and bucket.offload is None
        and not bucket.cut
        and max(bucket.lengths) < 2**31
    )


def writes(ops: Ops, bucket: Bucket) -> bool:
    """Whether they can also write its parameters."""
    return reads(ops, bucket) and all(local(p).is_contiguous() for p in bucket.params)


NativeOps.faster = {
    "radius.commit": Faster(writes, radius_commit),
    "scape.commit": Faster(writes, scape_commit),
    "scape.selection": Faster(writes, NativeSelection),
    "adams.commit": Faster(writes, adams_commit),
}
