"""Bits: flags packed eight to a byte, the first in the lowest bit; positions of set bits, and of
the largest elements of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .._wire.payload import CACHE_ELEMENTS, Scratch, choose_block_size

# Bytes: ranges of ranks begin at whole words of 64 bits.
WORD = 8
# A word of 8 booleans times this has their bits, the first lowest, in its highest byte.
GATHER_BITS = 0x0102040810204080
# A byte times this is that byte in all 8 of a word.
SPREAD_BYTE = 0x0101010101010101
# Bit i of byte i: 0x8040...01.
ONE_BIT_EACH = -0x7FBFDFEFF7FBFDFF

EXACT_BELOW = 16384  # elements: of fewer, topk costs less than the search for a threshold
MAX_LOOKS = 12  # thresholds tried before topk decides


def positions_dtype(lengths: Sequence[int]) -> torch.dtype:
    """Return the dtype of positions in tensors of these lengths."""
    return torch.int32 if max(lengths) < 2**31 else torch.int64


def byte_offsets(lengths: tuple[int, ...]) -> list[int]:
    """Return the offset of each tensor's bytes in the bucket's mask, and the total."""
    return [0, *accumulate((n + 7) // 8 for n in lengths)]


def split_bytes(total: int, ranks: int) -> list[int]:
    """Return the offset of each rank's range of ``total`` bytes of mask, and the total."""
    return [total * rank // ranks // WORD * WORD for rank in range(ranks)] + [total]


# Bits, flags, positions


def pack_bits(flags: Tensor) -> Tensor:
    """Pack 8 m booleans into m bytes, the first in the lowest bit. Overwrites ``flags``."""
    return flags.view(torch.int64).mul_(GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """Unpack m bytes into 8 m booleans."""
    return bits.long().mul_(SPREAD_BYTE).bitwise_and_(ONE_BIT_EACH).view(torch.uint8).bool()


def find_positions(bits: Tensor) -> Tensor:
    """Return the positions of all set bits, ascending, int64."""
    at = bits.nonzero().view(-1)
    if 2 * at.numel() > bits.numel():
        return unpack_bits(bits).nonzero().view(-1)
    # bytes without set bits, most of them, are not unpacked
    hits = unpack_bits(bits.index_select(0, at)).nonzero().view(-1)
    return at.index_select(0, hits >> 3).bitwise_left_shift_(3).add_(hits.bitwise_and_(7))


def set_bits_(bits: Tensor, positions: Tensor, flags: Tensor | None = None) -> None:
    """Set the bits at ``positions``, where ``flags`` are true, and clear all others."""
    one = torch.ones((), dtype=torch.uint8, device=bits.device) if flags is None else flags.byte()
    bits.zero_().index_add_(0, positions >> 3, one << (positions & 7).to(torch.uint8))


def set_all_bits_(bits: Tensor, n: int) -> None:
    """Set the first n bits, and clear those that follow in the last byte."""
    bits.fill_(255)
    if n % 8:
        bits[-1] = (1 << n % 8) - 1


def make_bits(positions: Tensor, size: int, flags: Tensor | None = None) -> Tensor:
    """Return ``size`` bytes with the bits at these positions set, where ``flags``."""
    bits = torch.empty(size, dtype=torch.uint8, device=positions.device)
    set_bits_(bits, positions, flags)
    return bits


def count_set_bits(bits: Tensor, positions: Tensor) -> Tensor:
    """Count the set bits at ``positions``."""
    shifts = (positions & 7).to(torch.uint8)
    return bits.index_select(0, positions >> 3).bitwise_right_shift_(shifts).bitwise_and_(1).sum()


def split_positions(positions: Tensor, lengths: tuple[int, ...]) -> list[Tensor | None]:
    """Split positions in a bucket's mask by tensor, relative to the tensor's first bit.

    They are int32 where that is wide enough; None for tensors of length 0 (not compressed).
    """
    offsets = byte_offsets(lengths)
    dtype = positions_dtype(lengths)
    cuts = torch.searchsorted(
        positions, 8 * torch.tensor(offsets, dtype=torch.int64, device=positions.device)
    ).tolist()
    local = torch.empty(positions.numel(), dtype=dtype, device=positions.device)
    for offset, a, b in zip(offsets, cuts, cuts[1:], strict=False):
        local[a:b] = positions[a:b] - 8 * offset
    return [local[a:b] if n else None for n, a, b in zip(lengths, cuts, cuts[1:], strict=False)]


# The largest elements, by magnitude


def select_top_k(x: Tensor, k: int, scratch: Scratch) -> Tensor:
    """Return the positions, ascending, of exactly the k largest |x|; of all nonzero elements where
    there are fewer.

    On a CPU ``torch.topk`` takes 20 to 30 passes over a large vector. A threshold takes one: a
    sample of the vector tells where to look.
    """
    n = x.numel()
    if k >= n:
        return torch.arange(n, dtype=torch.int64, device=x.device)
    if n > EXACT_BELOW and k <= n // 4:  # for larger k topk would sort nearly all of x anyway
        threshold = _threshold_of_sample(x, min(n, k + k // 2 + n // 1024))
        for _ in range(MAX_LOOKS):
            candidates = select_above(x, threshold, scratch)
            if len(candidates) >= k:
                largest = x.index_select(0, candidates).abs_().topk(k, sorted=False).indices
                return candidates.index_select(0, largest).sort().values
            if threshold == 0:
                return candidates
            # below the smallest normal number halves may be flushed to 0: look at all nonzero ones
            tiny = float(torch.finfo(x.dtype).tiny)
            threshold = threshold / 2 if threshold > tiny else 0.0
    return _select_by_sort(x, k)


def select_above(x: Tensor, threshold: float, scratch: Scratch) -> Tensor:
    """Return the positions, ascending, of |x| > threshold, int64."""
    flags = scratch("flags", x.numel() + -x.numel() % 8, torch.bool, x.device)
    flags[x.numel() :] = False
    block = choose_block_size(x, on_cpu=CACHE_ELEMENTS)
    shrunk = scratch("", min(block, x.numel()), x.dtype, x.device)
    for flags_, x_ in zip(flags[: x.numel()].split(block), x.split(block), strict=True):
        # hardshrink is several times faster than a comparison
        flags_.copy_(torch.hardshrink(x_, threshold, out=shrunk[: x_.numel()]))
    # Most words of 8 flags are 0, and a look at one word is a look at 8 flags.
    words = flags.view(torch.int64)
    word = words.nonzero().view(-1)
    hits = words.index_select(0, word).view(torch.bool).nonzero().view(-1)
    return word.index_select(0, hits >> 3).bitwise_left_shift_(3).add_(hits.bitwise_and_(7))


def _select_by_sort(x: Tensor, k: int) -> Tensor:
    return x.abs().topk(k, sorted=False).indices.sort().values


def _threshold_of_sample(x: Tensor, k: int) -> float:
    sample = x[:: max(1, x.numel() // 4096)].abs()
    larger = min(sample.numel() - 1, k * sample.numel() // x.numel())
    return float(sample.topk(larger + 1).values[-1])  # kthvalue is not deterministic on CUDA
