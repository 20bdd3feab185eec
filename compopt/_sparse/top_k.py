"""The largest elements of a vector, by magnitude.

On a CPU ``torch.topk`` takes 20 to 30 passes over a large vector. A threshold takes one: a sample
of the vector tells where to look.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._ops.operations import Ops
from .._wire.payload import CACHE_ELEMENTS, block_size

EXACT_BELOW = 16384  # elements: of fewer, topk costs less than the search for a threshold
MAX_LOOKS = 12  # thresholds tried before topk decides


def select_top_k(x: Tensor, k: int, ops: Ops) -> Tensor:
    """Return the positions, ascending, of exactly the k largest |x|; of all nonzero elements where
    there are fewer.
    """
    n = x.numel()
    if k >= n:
        return torch.arange(n, dtype=torch.int64, device=x.device)
    if (positions := ops.top_k_positions(x, k)) is not None:
        return positions
    if n > EXACT_BELOW and k <= n // 4:  # for larger k topk would sort nearly all of x anyway
        threshold = _threshold_of_sample(x, min(n, k + k // 2 + n // 1024))
        for _ in range(MAX_LOOKS):
            candidates = select_above(x, threshold, ops)
            if len(candidates) >= k:
                largest = x.index_select(0, candidates).abs_().topk(k, sorted=False).indices
                return candidates.index_select(0, largest).sort().values
            if threshold == 0:
                return candidates
            tiny = float(torch.finfo(x.dtype).tiny)
            threshold = threshold / 2 if threshold > tiny else 0.0
    return _select_by_sort(x, k)


def select_top_k_of_each(parts: Sequence[Tensor], ks: Sequence[int], ops: Ops) -> Tensor:
    """Return the positions of the k largest of each vector, in vectors that are contiguous in
    memory.

    On a CPU positions ascend, and zeros are left out where there are fewer nonzero elements. On
    other devices exactly k of each are selected, in any order: the host does not wait.
    """
    starts = [0, *itertools.accumulate(len(part) for part in parts)]
    if parts[0].device.type == "cpu":
        rows = zip(parts, ks, starts, strict=False)
        return torch.cat([select_top_k(part, k, ops).add_(start) for part, k, start in rows])
    magnitudes = torch._foreach_abs(list(parts))
    selected = [
        magnitude.topk(min(k, len(magnitude)), sorted=False).indices
        for magnitude, k in zip(magnitudes, ks, strict=True)
    ]
    torch._foreach_add_(selected, starts[:-1])
    return torch.cat(selected)


def select_above(x: Tensor, threshold: float, ops: Ops) -> Tensor:
    """Return the positions, ascending, of |x| > threshold, int64."""
    flags = ops.scratch(x, x.numel() + -x.numel() % 8, torch.bool, "flags")
    flags[x.numel() :] = False
    block = block_size(CACHE_ELEMENTS, x)
    shrunk = ops.scratch(x, min(block, x.numel()))
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
