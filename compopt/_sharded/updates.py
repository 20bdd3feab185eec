"""Updates of sharded parameters as codes: what is added to parameters travels, rounded, in place of
updated parameters.

Error feedback, on the way back to all ranks: of a shard with update u, which its owner finds,
and what it owes, e::

    sent <- codes(u + e)          # 8, 4 or 2 bits each, a scale for 128 of them
    e <- u + e - sent             # ``update_residual``, on the owner alone
    w <- w + sent                 # on all ranks, the owner too: replicas stay equal

So parameters are the unrounded ones less e: never further from them than one rounding of one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .._engine.options import require
from .._ops.operations import Ops
from .._state.buckets import Bucket
from .._wire.payload import QUANTIZED_BITS, dtype_name, packed_bytes, quantized_bits
from .._wire.quantization import Chunk, row_layout

UpdateDtype: TypeAlias = torch.dtype | Literal["int8", "int4", "int2"] | None

USE = 1_000_001  # in seeds: apart from those of payloads


def check_updates(group: dict[str, Any]) -> None:
    """Raise ValueError where ``update_dtype`` is none, or parameters cannot keep what it sends."""
    given = dtype_name(group["update_dtype"])
    known = given is None or given in QUANTIZED_BITS
    require(
        known,
        "update_dtype",
        group["update_dtype"],
        f"None or {', '.join(map(repr, QUANTIZED_BITS))}",
    )
    group["update_dtype"] = given
    low = [p.dtype for p in group["params"] if p.dtype.itemsize < 4]
    if given is not None and low:
        raise ValueError(
            f"update_dtype={given!r} is for float32 parameters, to which updates can be added as "
            f"they were sent: these are {low[0]}. Leave it out, or keep parameters in float32 and "
            "use autocast."
        )


def check_gathers(inside: bool, groups: Iterable[dict[str, Any]]) -> None:
    """Raise ValueError where FSDP gathers parameters, and updates never travel."""
    given = [group["update_dtype"] for group in groups if group["update_dtype"] is not None]
    if inside and given:
        raise ValueError(
            f"update_dtype={given[0]!r} cannot be followed inside FSDP, which gathers parameters "
            "itself: leave it out, and see MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
        )


def update_bits(bucket: Bucket) -> int | None:
    """Return the number of bits that updates are rounded to, or None.

    Raises ValueError if the rounding error would not be kept.
    """
    given = bucket.group.get("update_dtype")
    if bucket.is_single_process or given is None:
        return None
    if "update_residual" not in bucket.state:
        raise ValueError(
            f"update_dtype={given!r} was set in a group of an optimizer that was made without it, "
            "and keeps no update_residual: give it to the constructor, or to one group of it."
        )
    return quantized_bits(given)


class UpdateCodec:
    """Rounds the shards of updates of one bucket: each rank's message holds its scales, then its
    codes, in as many bytes for all.
    """

    def __init__(self, bucket: Bucket, ops: Ops, bits: int):
        self.bucket, self.ops, self.bits, self.shards = bucket, ops, bits, bucket.shards
        sizes = [tuple(self.shards.sizes(rank)) for rank in range(self.shards.ranks)]
        self.chunks = [row_layout(parts, 1).chunks[0] for parts in sizes]
        self.codes_at = 4 * max(chunk.rows for chunk in self.chunks)
        codes = packed_bytes(max(chunk.stop for chunk in self.chunks), bits)
        self.size = max(4, self.codes_at + codes + -codes % 4)

    def add_residual(self, updates: Sequence[Tensor], present: list[bool]) -> None:
        """Add what earlier steps have left of the tensors that this one updates."""
        residual = self.bucket.state["update_residual"]
        some = [i for i, is_present in enumerate(present) if is_present]
        if some:
            torch._foreach_add_([updates[i] for i in some], [residual[i] for i in some])

    def encode(self, updates: Tensor) -> Tensor:
        """This rank's message; its shard of ``updates`` is left with what rounding took off."""
        bucket, chunk = self.bucket, self.chunks[self.shards.rank]
        own_updates = updates[: sum(self.shards.sizes(self.shards.rank))]
        out = bucket.get_memory("codes of updates", self.size, torch.uint8)
        seed = (bucket.group["step"], bucket.index, USE, self.shards.rank)
        scales, codes = self._fields(out, chunk)
        self.ops.quantize(own_updates, chunk, scales, codes, seed, bucket.scratch, self.bits)
        return out

    def decode(self, messages: Tensor) -> Tensor:
        """All ranks' updates, a row each, as long as the largest shard."""
        bucket, max_numel = self.bucket, self.shards.max_numel
        rows = bucket.get_memory("updates", len(messages) * max_numel, bucket.dtype)
        rows = rows.view(len(messages), max_numel)
        for message, chunk, out in zip(messages, self.chunks, rows, strict=True):
            scales, codes = self._fields(message, chunk)
            self.ops.dequantize(scales, codes, chunk, out[: chunk.stop], bucket.scratch, self.bits)
        return rows

    def keep_residual(self, rest: Tensor, present: list[bool]) -> None:
        """Commit what ``encode`` has left of tensors that were updated."""
        sizes = self.shards.sizes(self.shards.rank)
        parts = rest[: sum(sizes)].split(sizes)
        residual = self.bucket.state["update_residual"]
        some = [i for i, is_present in enumerate(present) if is_present]
        if some:
            torch._foreach_copy_([residual[i] for i in some], [parts[i] for i in some])

    def _fields(self, message: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """A rank's scales, and its codes as bytes."""
        scales = message[: 4 * chunk.rows].view(torch.float32)
        return scales, message[self.codes_at :].view(torch.int8)
