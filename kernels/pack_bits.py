"""Booleans as bits and back. References: ``math.pack_bits``, ``math.unpack_bits``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import BLOCK, inlined, on


@inlined
def to_bytes(flags, BLOCK: tl.constexpr):
    """BLOCK numbers, 0 or 1, as BLOCK / 8 bytes, the first in the lowest bit."""
    eight = tl.reshape(flags.to(tl.int32), [BLOCK // 8, 8])
    return tl.sum(eight << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


@triton.jit
def _pack(mask, bits, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    flags = tl.load(mask + i, mask=i < n, other=0) != 0
    at = start // 8 + tl.arange(0, BLOCK // 8)
    tl.store(bits + at, to_bytes(flags, BLOCK), mask=at < (n + 7) // 8)


@triton.jit
def _unpack(bits, mask, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bytes_ = tl.load(bits + (i >> 3), mask=i < n, other=0).to(tl.int32)
    tl.store(mask + i, ((bytes_ >> (i & 7).to(tl.int32)) & 1).to(tl.uint8), mask=i < n)


def pack_bits(mask: Tensor, block: int = BLOCK) -> Tensor:
    """n booleans as ceil(n/8) bytes, the first element in the lowest bit."""
    n = mask.numel()
    bits = torch.empty((n + 7) // 8, dtype=torch.uint8, device=mask.device)
    if n:
        with on(mask.device):
            _pack[(triton.cdiv(n, block),)](
                mask.reshape(-1).view(torch.uint8), bits, n, BLOCK=block
            )
    return bits


def unpack_bits(bits: Tensor, n: int, block: int = BLOCK) -> Tensor:
    """ceil(n/8) bytes as n booleans."""
    mask = torch.empty(n, dtype=torch.uint8, device=bits.device)
    if n:
        with on(bits.device):
            _unpack[(triton.cdiv(n, block),)](bits, mask, n, BLOCK=block)
    return mask.view(torch.bool)
