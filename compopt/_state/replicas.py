"""The replica check: ranks compare their parameters, a part of them every few steps.

Replicas that part do so without an error: code changes a parameter on one rank, or on each by its
own gradient. So ranks compare sums of the parameters' bits. A sum is computed while a step's
exchanges are underway. It reaches the host with the numbers of the decision, for which the host
waits anyway, and the other ranks in the settings' checksum of the next step. No collective, no byte
and no wait is added.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .tensors import to_local

WORD = 8  # bytes that are added as one integer
CHECKS = 25  # at least so many in an interval, if it is long enough
# A part has at least so many bytes, and a tensor counts as at least so many: there are few parts
# where all is small, and few tensors in a part.
PART_BYTES, TENSOR_BYTES = 1 << 20, 1 << 14
CAT_BYTES = 1 << 28  # at most so many are copied to lie next to each other


def find_part(number: int, every: int) -> tuple[int, int] | None:
    """Return how often a part of the parameters was due before step ``number``, and how many parts
    there may be; None if none is due. Parts take turns: all are compared, and ranks have learned of
    it, within ``every`` steps.
    """
    if every < 1:
        return None
    stride = max(1, every // CHECKS)
    parts = max(1, (every - 1) // stride)  # ranks learn of a sum one step later
    return None if number % stride else (number // stride, parts)


def sum_part(tensors: Sequence[Tensor], turn: int, parts: int) -> Tensor:
    """Return the sum of the bits of the part of ``tensors`` whose turn it is, one of at most
    ``parts``, as the bits of one float64.

    Equal tensors have equal sums, in whatever order the words are added: integers wrap around.
    """
    sums = [_sum_words(views) for views in _cut_part(tensors, turn, parts)]
    if not sums:
        return torch.zeros(1, dtype=torch.float64, device="cpu")
    device = sums[0].device
    total = sums[0] if len(sums) == 1 else torch.stack([one.to(device) for one in sums]).sum()
    return total.view(1).view(torch.float64)


def checksum_sum(total: Tensor) -> int:
    """Return a checksum of what ``sum_part`` returned, which is on the host by now."""
    return zlib.crc32(struct.pack("<q", int(total.view(torch.int64))))


def _cut_part(tensors: Sequence[Tensor], turn: int, parts: int) -> Iterator[list[Tensor]]:
    """Yield the bytes of a part, as lists of views that are summed together."""
    sizes = [to_local(p).numel() * p.element_size() for p in tensors]
    rooms = [-(-max(size, TENSOR_BYTES) // WORD) * WORD for size in sizes]
    words = sum(rooms) // WORD
    parts = min(parts, max(1, words * WORD // PART_BYTES))
    first, last = (WORD * (words * n // parts) for n in (turn % parts, turn % parts + 1))
    views: list[Tensor] = []
    start = copied = 0
    for p, size, room in zip(tensors, sizes, rooms, strict=True):
        begin, end = max(first - start, 0), min(last - start, size)
        start += room
        if begin >= end:
            continue
        flat = to_local(p.detach()).contiguous()
        # the strides of a tensor of one element may be anything
        view = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)[begin:end]
        if views and (view.device != views[0].device or copied + end - begin > CAT_BYTES):
            yield views
            views, copied = [], 0
        views.append(view)
        copied += end - begin
    if views:
        yield views


def _sum_words(views: list[Tensor]) -> Tensor:
    """Return the sum of the words that ``views`` of bytes consist of, one after the other."""
    flat = views[0]
    if len(views) > 1 or flat.storage_offset() % WORD:
        flat = torch.cat(views)
    if rest := len(flat) % WORD:
        flat = torch.nn.functional.pad(flat, (0, WORD - rest))
    return flat.view(torch.int64).sum()
