"""The Triton backend: a bucket's step in a few launches, without a dense copy of the average and
without a host wait.

It works on tensors of the device that Triton has a driver for; on CPU tensors in Triton's
interpreter (TRITON_INTERPRET=1), for tests. Tensors on other devices are left to PyTorch's
operators.

``choice`` makes one for an optimizer on an accelerator.
"""

from __future__ import annotations

import functools

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._engine import reducer
from ..._ops.operations import Fused
from ..._state.bucket import Bucket
from ..._state.masks import Mask, Tensors
from ..._state.residuals import Residuals
from ..._wire.codec import QuantizedCodec, QuantizedMean, make_codecs
from ..._wire.payload import Payload
from ..._wire.quantization import noise_offset, noise_table
from ...scape import scape
from ...separate import separate, stacks
from .tables import (
    KernelOps,
    addresses,
    block_offsets,
    blocks_of,
    flatten,
    gradients_key,
    make_key,
    mask_key,
    payload_key,
)
from .triton_lowrank import (
    can_orthonormalize,
    can_project,
    multiply_stacks,
    orthonormalize_columns,
    update_separate,
)
from .triton_updates import step_adams, step_adamw, step_scape

MAX_MESSAGE_BYTES = 2**31  # kernels count the bytes of messages in 32 bits


class TritonOps(KernelOps):
    """The kernels of ``compopt_kernels``, a launch for all tensors of a bucket."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__()
        self.codecs = make_codecs(functools.partial(TritonCodec, self.device))

    def write_header(self, payload: Payload, grads: Tensors) -> None:
        self.write_flags(payload, grads, grads)

    def write_flags(self, payload: Payload, grads: Tensors, checked: Tensors) -> None:
        """Write the flags of these gradients, as if all that are not ``checked`` were finite."""
        device = payload.flat.device
        if device.type != self.device or {g.device for g in grads if g is not None} - {device}:
            return super().write_header(payload, grads)
        present = tuple(g is not None for g in grads)
        dtype = payload.header.dtype
        flags = self.tables(
            ("flags", present, dtype),
            (device,),
            lambda: kernels.upload(torch.tensor(present, dtype=dtype, device="cpu"), device),
        )
        payload.header.copy_(flags)
        lengths = tuple(0 if g is None else g.numel() for g in checked)
        blocks, none = kernels.make_blocks(lengths, device), [None] * len(checked)
        flat: list[Tensor | None] = []  # copies in it have to live until the kernel was launched

        def table() -> kernels.Table:
            flat.extend(flatten(checked))
            return kernels.compact_table(blocks, none, flat, none, payload.header, none)

        key = make_key(gradients_key(checked), dtype, device)  # -1 is no address on any device
        rows = self.tables(("check", lengths), key, table)
        kernels.compact_with_table(blocks, rows, blocks.firsts, payload.header, 0.0, 1.0)

    def encode(
        self,
        bucket: Bucket,
        grads: Tensors,
        mask: Mask,
        adds_residuals: bool = False,
        scale: float = 1.0,
        negate: bool = False,
    ) -> Payload:
        can_read = updates_residuals if adds_residuals else is_supported
        if not can_read(self, bucket):
            return super().encode(bucket, grads, mask, adds_residuals, scale, negate)
        flags, dtype = [float(g is not None) for g in grads], bucket.group.get("payload_dtype")
        payload = bucket.make_payload(mask.sizes, dtype, gradient_flags=flags)
        blocks, offsets = blocks_of(bucket), block_offsets(self.tables, bucket, mask)
        to_add = Residuals(bucket).stored if adds_residuals else [None] * len(grads)
        flat: list[Tensor | None] = []  # copies in it have to live until the kernel was launched

        def table() -> kernels.Table:
            flat.extend(flatten(grads))
            return kernels.compact_table(
                blocks, mask.bits, flat, payload.unrounded_parts, payload.header, to_add
            )

        inputs = make_key(gradients_key(grads), mask_key(bucket, mask), addresses(to_add))
        key = make_key(bucket, inputs, payload_key(payload))
        rows = self.tables(("encode payload", bucket.index), key, table)
        sign = -1.0 if negate else 1.0
        kernels.compact_with_table(blocks, rows, offsets, payload.header, scale, sign)
        return payload.round()


class TritonCodec(QuantizedCodec):
    """``_wire.codec.QuantizedCodec``, with means by kernels where they support the payload."""

    def __init__(self, device: str, bits: int):
        super().__init__(bits)
        self.device = device

    def make_mean(self, payload: Payload, rank: int, ranks: int) -> QuantizedMean:
        mean = TritonMean(payload, rank, ranks)
        if payload.flat.device.type == self.device and mean.is_supported:
            return mean
        return super().make_mean(payload, rank, ranks)


class TritonMean(QuantizedMean):
    """``_wire.codec.QuantizedMean``, with the same messages, by a launch or two for each stage;
    communicators call its stages.
    """

    @property
    def is_supported(self) -> bool:
        """False for int2, values in float64, and messages too large for kernels."""
        size = max(self.payload.body.numel(), self.ranks * self.to_owners.nbytes)
        is_float32 = self.payload.flat.dtype == torch.float32
        return self.bits in (8, 4) and is_float32 and size < MAX_MESSAGE_BYTES

    @property
    def _programs(self) -> kernels.Programs:
        cuts = tuple(
            (c.start, c.first_row, c.stop - c.start, tuple(map(tuple, c.spans)))
            for c in self.layout.chunks
        )
        return kernels.make_programs(cuts, self.payload.flat.device)

    def _noise(self, stage: int) -> tuple[Tensor, int]:
        table = noise_table(torch.float32, self.payload.flat.device)
        return table, noise_offset((*self.seed, self.rank, stage))

    def _offsets(self, words: int) -> tuple[int, int]:
        """Return the bytes of a message in front of its scales, and of its codes."""
        return 4 * words, 4 * (words + self.layout.max_rows)

    def encode_for_owners(self) -> Tensor:
        flat, body, rounding_errors = self.payload.flat, self.payload.body, self.rounding_errors
        if self.payload.addend is not None:
            body.add_(self.payload.addend)
        shape = self.ranks, self.to_owners.nbytes
        out = torch.empty(shape, dtype=torch.uint8, device=flat.device)
        self.to_owners.split(out)[0].copy_(flat[: self.fields])
        noise, offsets = self._noise(1), self._offsets(self.fields)
        kernels.quantize(self._programs, body, rounding_errors, *noise, out, *offsets, self.bits)
        return out

    def average_own_chunk(self, received: Tensor) -> Tensor:
        received = received.contiguous()
        kernels.mean_of_headers(received, self.payload.flat[: self.fields])
        out = torch.empty(self.of_mean.nbytes, dtype=torch.uint8, device=received.device)
        kernels.mean_of_codes(
            self._programs,
            self.rank,
            received,
            self.rounding_errors,
            *self._noise(2),
            out,
            *self._offsets(self.fields),
            self._offsets(0)[1],
            self.bits,
        )
        return out

    def decode_mean(self, gathered: Tensor) -> None:
        body, codes_at = self.payload.body, self._offsets(0)[1]
        kernels.dequantize(self._programs, gathered, body, codes_at, self.bits)


def is_supported(ops: TritonOps, bucket: Bucket) -> bool:
    """True if kernels can read and write this bucket; offloaded state is not on the device."""
    return bucket.device.type == ops.device and bucket.offload is None


def updates_residuals(ops: TritonOps, bucket: Bucket) -> bool:
    """True if kernels can also write its residuals, which are stored as numbers."""
    return is_supported(ops, bucket) and Residuals(bucket).is_exact


def can_update_factored(ops: TritonOps, bucket: Bucket) -> bool:
    """True if kernels can update parameters by products of narrow matrices."""
    return updates_residuals(ops, bucket) and bucket.group["projection"] == "tracked"


TritonOps.fused = {
    reducer.step_adamw: Fused(updates_residuals, step_adamw, is_batched=True),
    reducer.step_adams: Fused(is_supported, step_adams, is_batched=True),
    scape.step_scape: Fused(is_supported, step_scape),
    separate.update_tensors: Fused(can_update_factored, update_separate, is_batched=True),
    stacks.multiply: Fused(can_project, multiply_stacks),
    stacks.orthonormalize_columns: Fused(can_orthonormalize, orthonormalize_columns),
}
