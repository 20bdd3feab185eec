"""The native backend: C passes over float32 tensors on a CPU, which read and write the memory of a
step once (see kernels/native).

Other tensors are left to PyTorch's operators. With several threads the tensors of a bucket are
divided among them.

``choice`` makes one for an optimizer on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._engine import reducer
from ..._ops.operations import Fused, Ops
from ..._state.bucket import Bucket
from ..._state.masks import Mask, Tensors
from ..._state.residuals import Residuals
from ..._wire.codec import make_codecs
from ..._wire.payload import Payload
from ...scape import scape
from ...separate import projection_reducer, separate, stacks
from ...separate.projection_options import projects_tracked
from ...tagc import tagc
from .library import (
    ADAMW,
    PACK,
    LibraryOps,
    Memory,
    Options,
    Table,
    address,
    address_in_turn,
    as_float32,
    is_plain,
    is_readable,
    isa_of_library,
    load_library,
    mask_sizes,
    run_pass,
    sizes_of,
)
from .native_lowrank import multiply_stacks, orthonormalize_columns, update_separate, write_dense
from .native_quantization import NativeBlocks, NativeCodec
from .native_selection import find_largest, select_largest
from .native_updates import (
    adamw_numbers,
    average_columns,
    raise_bad_row,
    step_adams,
    step_adamw,
    step_scape,
)

MAX_DECODED = 2**22  # elements of residuals that a pass reads decoded
SPARSE = 16  # with fewer than one in so many selected, positions are read faster than bits


class NativeOps(LibraryOps):
    """The passes of kernels/native, a call for all tensors of a bucket."""

    name = "native"

    def __init__(self) -> None:
        super().__init__()
        self.library = load_library()
        self.isa = isa_of_library(self.library)
        self.codecs = make_codecs(functools.partial(NativeCodec, self.library))
        self.blocks = NativeBlocks(self.library)

    def top_k_mask(self, score: Tensor, k: int) -> Tensor:
        if not is_plain(score) or score.numel() >= 2**31:
            return super().top_k_mask(score, k)
        positions = torch.empty(k, dtype=torch.int32, device="cpu")
        bits = torch.zeros((score.numel() + 7) // 8, dtype=torch.uint8, device="cpu")
        find_largest(self, score, k, positions)
        row = Table(1, chosen=address("positions", positions, k, torch.int32), k=k, at=0)
        mask = address("a mask", bits, len(bits), torch.uint8)
        self.library.encode(row, 1, None, mask, len(bits))
        return bits

    def read_union(
        self, bits: Tensor, values: Tensor, at: Tensor, union: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not is_plain(values) or not is_readable(bits, 0, torch.uint8):
            return super().read_union(bits, values, at, union)
        many, size, read = len(values), len(bits), self.library.read_union
        mask = address("a mask", bits, size, torch.uint8)
        some = address("positions", at, many, torch.int64), address("values", values, many), many
        count = read(mask, size, *some, None, None)
        union = torch.empty(count, dtype=torch.int64, device="cpu")
        out = torch.empty(count, dtype=torch.float32, device="cpu")
        to = address("positions", union, count, torch.int64), address("values", out, count)
        read(mask, size, *some, *to)
        return union, out

    def encode(
        self,
        bucket: Bucket,
        grads: Tensors,
        mask: Mask,
        adds_residuals: bool = False,
        scale: float = 1.0,
        negate: bool = False,
    ) -> Payload:
        is_large = adds_residuals and bucket.numel > MAX_DECODED
        if not can_read(self, bucket) or (is_large and not Residuals(bucket).is_exact):
            return super().encode(bucket, grads, mask, adds_residuals, scale, negate)
        lengths = bucket.lengths
        payload = bucket.make_payload(mask.sizes, bucket.group.get("payload_dtype"))
        header, body = payload.header, payload.body
        if payload.flat.dtype != torch.float32:  # the pass writes float32
            like = bucket.params[0]
            header = self.scratch(like, len(header), torch.float32, "flags")
            if payload.rounding_errors is None:
                body = self.scratch(like, len(body), torch.float32, "payload")
            else:
                body = payload.rounding_errors
        bits, positions = bits_or_positions(mask)
        sizes = [part.numel() for part in payload.parts]
        table = Table(
            len(grads),
            PACK,
            n=lengths,
            g=Memory(as_float32(grads), lengths),
            add=Memory(Residuals(bucket).read_all(), lengths) if adds_residuals else 0,
            index=Memory(positions, sizes),
            mask=Memory(bits, mask_sizes(lengths)),
            k=sizes,
            out=address_in_turn("a message", body, sizes),
            flag=address_in_turn("flags", header, [1] * len(grads)),
        )
        sign = -1.0 if negate else 1.0
        raise_bad_row(bucket, run_pass(self.library.pack, table, lengths, sign, scale))
        if payload.flat.dtype != torch.float32:
            payload.header.copy_(header)
            if payload.rounding_errors is None:
                payload.body.copy_(body)
        return payload.round()

    def compute_adamw(
        self,
        bucket: Bucket,
        indices: list[int],
        weights: list[Tensor],
        values: list[Tensor],
        positions: Tensor | None,
        out: Sequence[list[Tensor]],
    ) -> None:
        state = bucket.state
        moments = state["exp_avg"], state["exp_avg_sq"]
        old = [[column[i] for i in indices] for column in (weights, *moments)]
        begin, end = bucket.shards.own_bits
        firsts = (column[0] for column in (*old, *out))  # columns are of one memory each
        if not is_plain(*firsts, *values) or end - begin >= 2**31:
            return super().compute_adamw(bucket, indices, weights, values, positions, out)
        lengths = sizes_of(old[0])
        steps = torch.stack([state["step"][i] for i in indices])  # a copy, which the pass counts
        w, m, v, new_w, new_m, new_v = (Memory(column, lengths) for column in (*old, *out))
        table = Table(
            len(lengths),
            ADAMW,
            n=lengths,
            w=w,
            m=m,
            v=v,
            step=address_in_turn("a number of steps", steps, [1] * len(lengths)),
            new_w=new_w,
            new_m=new_m,
            new_v=new_v,
            **average_columns(bucket, indices, values, positions),
        )
        bad_row = run_pass(
            self.library.adamw, table, lengths, Options(*adamw_numbers(bucket.group))
        )
        raise_bad_row(bucket, indices[bad_row] if bad_row >= 0 else -1)


def bits_or_positions(mask: Mask) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """Return for each tensor its bits or its positions, whichever is read faster; neither where all
    elements are sent.
    """
    if not mask.has_bits:
        return [None] * len(mask.lengths), mask.positions
    rows = zip(mask.bits, mask.sizes, mask.lengths, strict=True)
    bits = [None if b is None or size * SPARSE <= n else b for b, size, n in rows]
    if all(kept is b for kept, b in zip(bits, mask.bits, strict=True)):
        return bits, [None] * len(bits)
    return bits, [p if b is None else None for p, b in zip(mask.positions, bits, strict=True)]


def can_read(ops: Ops, bucket: Bucket) -> bool:
    """True if passes can read this bucket's gradients and state; offloaded state is on the device
    for one tensor at a time.
    """
    return (
        bucket.device.type == "cpu"
        and bucket.dtype == torch.float32
        and bucket.offload is None
        and not bucket.is_sharded
        and max(bucket.lengths) < 2**31
    )


def can_write(ops: Ops, bucket: Bucket) -> bool:
    """True if passes can also write its parameters."""
    return can_read(ops, bucket) and all(p.is_contiguous() for p in bucket.local_params)


def can_project(ops: Ops, bucket: Bucket) -> bool:
    """True if passes can project this bucket's gradients on tracked columns."""
    return can_read(ops, bucket) and projects_tracked(bucket)


def can_write_dense(ops: Ops, bucket: Bucket) -> bool:
    """True if a pass can write this bucket's gradients and residuals to a payload."""
    return can_project(ops, bucket) and Residuals(bucket).is_exact


def can_update_factored(ops: Ops, bucket: Bucket) -> bool:
    """True if passes can update parameters by products of narrow matrices."""
    return can_write(ops, bucket) and projects_tracked(bucket)


def can_select(ops: Ops, bucket: Bucket) -> bool:
    """True if passes can add the residuals of this bucket to its gradients, and select."""
    is_small = sum(bucket.lengths) < 2**30  # positions in a mask are int32 here
    return bucket.device.type == "cpu" and bucket.compute_dtype == torch.float32 and is_small


NativeOps.fused = {
    tagc.select_largest: Fused(can_select, select_largest),
    stacks.multiply: Fused(can_project, multiply_stacks),
    projection_reducer.write_dense: Fused(can_write_dense, write_dense),
    stacks.orthonormalize_columns: Fused(can_project, orthonormalize_columns),
    separate.update_tensors: Fused(can_update_factored, update_separate),
    reducer.step_adamw: Fused(can_write, step_adamw),
    reducer.step_adams: Fused(can_write, step_adams),
    scape.step_scape: Fused(can_write, step_scape),
}
