"""FSDP2's parameter gathers in int8, through its custom all-gather.

The message of a rank has its shards of a module's parameters::

    | tensors that are not rounded, as they are | scales, float32 | int8 values |

A matrix is rounded to the nearest of 255 multiples of a scale, which 128 neighbours of its shard
share. Every rank decodes all messages, its own too, and so computes with the same values. The
shards that the optimizer updates are not changed.

``fsdp_modules`` installs it in the modules of an optimizer with ``gather_dtype``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._ops.operations import Ops
from .._state.tensors import MIN_COMPRESSED_NUMEL
from .._wire.codec import GatherCodec, QuantizedCodec
from .._wire.collectives import gather_into
from .._wire.payload import Scratch

WORD = 8  # parts of a message begin at multiples of so many bytes, as views of any dtype need


class TorchAllocation:
    """The memory of a custom collective of FSDP2: torch's own."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class FSDPAllGather(TorchAllocation):
    """The all-gather of one of FSDP2's groups of parameters.

    ``dtype``: "int8", or None for FSDP2's own. It refers to no optimizer: ranks do not collect a
    deleted one at the same time, but have to gather alike.
    """

    def __init__(self, group: Any, dtype: str | None, ops: Ops):
        self._group, self._codec = group, ops.codecs[dtype]
        self._layouts: dict[tuple[Shard, ...], GatherLayout] = {}

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        layout = self._find_layout(input_tensor, group.size())
        if layout is None:
            return gather_into(output_tensor, input_tensor, group, async_op)
        message = layout.encode(input_tensor)
        messages = message.new_empty(group.size() * len(message))
        work = gather_into(messages, message, group, async_op)

        def decode() -> None:
            layout.decode(messages.view(group.size(), -1), output_tensor.view(group.size(), -1))

        if work is None:
            decode()
            return None
        return DecodingWork(work, decode)

    def _find_layout(self, flat: Tensor, ranks: int) -> GatherLayout | None:
        """Return the layout of a message; None where parameters are gathered as they are: those
        that were rounded before, and are gathered again among some of the ranks
        (``reshard_after_forward`` is a number), and those that encode themselves.
        """
        params = self._group.fsdp_params
        if not isinstance(self._codec, QuantizedCodec) or self._group.is_sharded_post_forward:
            return None
        shards = tuple(map(Shard.of, params))
        encode = [hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather") for one in params]
        if any(encode) or not any(shard.is_rounded for shard in shards):
            return None
        if shards not in self._layouts:
            self._layouts = {shards: GatherLayout(shards, ranks, self._codec)}
        return self._layouts[shards]


class DecodingWork(dist.Work):
    """A gather in flight, whose messages ``wait`` decodes."""

    def __init__(self, work: dist.Work, decode: Callable[[], None]):
        super().__init__()
        self._work, self._decode = work, decode

    def wait(self, *timeout: Any) -> bool:
        self._work.wait(*timeout)
        with torch.no_grad():
            self._decode()
        return True


class Shard(NamedTuple):
    """A shard of one parameter in FSDP2's flat input, padded to the length of the other ranks'."""

    numel: int
    dtype: torch.dtype
    is_rounded: bool

    @classmethod
    def of(cls, one: Any) -> Shard:
        """Describe an ``FSDPParam``.

        Floats are rounded that have 2 dimensions and 4096 elements, embeddings too.
        """
        dtype, shape = one.param_dtype or one.orig_dtype, one.sharded_param.shape
        is_large = len(shape) >= 2 and math.prod(shape) >= MIN_COMPRESSED_NUMEL
        return cls(one._sharded_param_data.numel(), dtype, is_large and dtype.is_floating_point)


class FreshMemory(Scratch):
    """Memory that is not reused: gathers run on several streams, and in inference mode."""

    def __call__(self, use: str, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(n, dtype=dtype, device=device)


class GatherLayout:
    """The places of shards in FSDP2's flat tensors, of elements or of bytes, and in a message."""

    def __init__(self, shards: Sequence[Shard], ranks: int, codec: QuantizedCodec):
        # FSDP2 gathers different dtypes as bytes
        self.has_bytes = len({shard.dtype for shard in shards}) > 1
        units = [shard.dtype.itemsize if self.has_bytes else 1 for shard in shards]
        sizes = [unit * shard.numel for unit, shard in zip(units, shards, strict=True)]
        spans = [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]
        self.rounded = [pair for pair in zip(shards, spans, strict=True) if pair[0].is_rounded]
        self.exact = [pair for pair in zip(shards, spans, strict=True) if not pair[0].is_rounded]
        self.exact_bytes = sum(shard.numel * shard.dtype.itemsize for shard, _ in self.exact)
        self.lengths = [shard.numel for shard, _ in self.rounded]
        in_double = any(shard.dtype == torch.float64 for shard, _ in self.rounded)
        self.dtype = torch.float64 if in_double else torch.float32
        lengths = [tuple(self.lengths)] * ranks
        self.codec = GatherCodec(codec, lengths, FreshMemory())
        self.codec_at = align(self.exact_bytes)
        self.nbytes = align(self.codec_at + self.codec.nbytes)

    def encode(self, flat: Tensor) -> Tensor:
        """Return the message of this rank's shards."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=flat.device)
        exact = [flat[span].view(torch.uint8) for _, span in self.exact]
        if exact:
            torch.cat(exact, out=message[: self.exact_bytes])
        values = torch.cat([self._read(flat, *one).to(self.dtype) for one in self.rounded])
        self.codec.encode(values, 0, message[self.codec_at :], None)
        return message

    def decode(self, messages: Tensor, rows: Tensor) -> None:
        """Write the shards of all ranks to ``rows``, which has a row of FSDP2's for each rank."""
        at = 0
        for _, span in self.exact:
            out = rows[:, span].view(torch.uint8)
            out.copy_(messages[:, at : at + out.shape[1]])
            at += out.shape[1]
        is_direct = not self.exact and not self.has_bytes and rows.dtype == self.dtype
        size = len(messages), sum(self.lengths)
        values = rows if is_direct else rows.new_empty(size, dtype=self.dtype)
        self.codec.decode(messages[:, self.codec_at :], values)
        if is_direct:
            return
        for (shard, span), part in zip(self.rounded, values.split(self.lengths, 1), strict=True):
            if self.has_bytes:
                part = part.to(shard.dtype).contiguous().view(torch.uint8)
            rows[:, span].copy_(part)

    def _read(self, flat: Tensor, shard: Shard, span: slice) -> Tensor:
        """Return the values of a shard; bytes are copied, because they may begin anywhere."""
        return flat[span].clone().view(shard.dtype) if self.has_bytes else flat[span]


def align(nbytes: int) -> int:
    return nbytes + -nbytes % WORD
