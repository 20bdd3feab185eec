"""Assignment of parameters to buckets, in reverse order of registration, in which backward finishes
them; tensors of one shape become neighbours.

``Engine`` calls ``make_buckets``; ``anchor_bucket`` cuts anchors by ``bucket_bytes`` too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._wire.payload import Scratch
from .bucket import Bucket
from .tensors import CompressionRule, get_grad_dtype, is_compressed, largest_part_numel

# Bytes of parameters: enough for the link's bandwidth, few enough to overlap with backward. On a
# device every bucket costs launches and host waits.
BUCKET_BYTES, DEVICE_BUCKET_BYTES = 8 * 2**20, 128 * 2**20
# Buckets are joined while they send at most the largest size of a bucket, on CPUs this part of it,
# 0.5 MiB. There a training step of 10 M parameters took 480, 454 and 444 ms at 1 Gbit/s with parts
# of 0, 1/16 and 1/8 (6, 2 and 1 buckets), and 492, 493 and 533 ms at 100 Mbit/s: with one bucket
# nothing leaves during backward.
JOINED_PART_ON_CPU = 1 / 16

# Parameters of one group, with their names.
UniformParams = tuple[dict[str, Any], list[Tensor], list[str]]


def make_buckets(
    groups: Iterable[dict[str, Any]],
    compression_rule: CompressionRule | None = None,
    included: Container[Tensor] | None = None,
    bytes_sent: Callable[[Bucket], float] | None = None,
) -> list[Bucket]:
    """Assign the parameters of all groups to buckets, the last registered first: of about 8 MiB on
    CPUs, 128 MiB on other devices; larger where these send little: less than 0.5 or 128 MiB.

    ``compression_rule`` decides which parameters are compressed, by default :func:`is_compressed`.
    ``included`` are the parameters to assign, by default all that require a gradient.
    ``bytes_sent`` estimates what a bucket sends, by default as much as its gradients.
    """
    runs: list[UniformParams] = []
    scratch = Scratch()

    def make(index: int, run: UniformParams) -> Bucket:
        return Bucket(index, *run, compression_rule, scratch)

    for of_group in reversed(list(_uniform_runs(groups, included))):
        pieces = list(_cut_by_bytes(of_group))
        if bytes_sent is not None and len(pieces) > 1:
            sent = []
            for bucket in (make(0, piece) for piece in pieces):
                bucket.lengths = [largest_part_numel(p) for p in bucket.params]
                sent.append(bytes_sent(bucket))
            pieces = _join_by_bytes(pieces, sent, joined_bytes(pieces[0][1][0].device))
        runs += [_sort_by_shape(piece, compression_rule or is_compressed) for piece in pieces]
    return [make(index, run) for index, run in enumerate(runs)]


def _cut_by_bytes(run: UniformParams) -> Iterator[UniformParams]:
    """Cut parameters, the last first, into buckets by their bytes."""
    group, params, names = run
    piece: UniformParams = (group, [], [])
    size = 0
    for p, name in zip(reversed(params), reversed(names), strict=True):
        nbytes = largest_part_numel(p) * p.element_size()
        if piece[1] and size + nbytes > bucket_bytes(p.device):
            yield piece
            piece, size = (group, [], []), 0
        piece[1].append(p)
        piece[2].append(name)
        size += nbytes
    yield piece


def _join_by_bytes(
    pieces: list[UniformParams], sent: list[float], most: float
) -> list[UniformParams]:
    """Join neighbours while they send at most ``most`` bytes together."""
    joined: list[UniformParams] = []
    total = 0.0
    for (group, params, names), size in zip(pieces, sent, strict=True):
        if joined and total + size <= most:
            joined[-1] = group, [*joined[-1][1], *params], [*joined[-1][2], *names]
            total += size
        else:
            joined.append((group, params, names))
            total = size
    return joined


def _sort_by_shape(run: UniformParams, compression_rule: CompressionRule) -> UniformParams:
    """Make neighbours of compressed tensors of one shape; the tensors that are not compressed
    follow them. Shapes are global: all ranks have the same order, though shards may be uneven.
    """
    group, params, names = run
    places: dict[torch.Size, int] = {}
    keys = []
    for p, name in zip(params, names, strict=True):
        compressed = compression_rule(p, group, name)
        place = places.setdefault(p.shape, len(places)) if compressed else 0
        keys.append((not compressed, place))
    order = sorted(range(len(params)), key=keys.__getitem__)
    return group, [params[i] for i in order], [names[i] for i in order]


def bucket_bytes(device: torch.device) -> int:
    """Return the largest size of a bucket of several tensors on this device."""
    return BUCKET_BYTES if device.type == "cpu" else DEVICE_BUCKET_BYTES


def joined_bytes(device: torch.device) -> float:
    """Return how much joined buckets send at most."""
    return bucket_bytes(device) * (JOINED_PART_ON_CPU if device.type == "cpu" else 1)


def _uniform_runs(
    groups: Iterable[dict[str, Any]], included: Container[Tensor] | None
) -> Iterator[UniformParams]:
    """Split each group by dtypes, device and placements, with a name for every parameter."""
    for number, group in enumerate(groups):
        all_names = group.get("param_names") or [
            f"parameter {i} of group {number}" for i in range(len(group["params"]))
        ]
        runs: dict[tuple[object, ...], UniformParams] = {}
        for p, name in zip(group["params"], all_names, strict=True):
            if not (p.requires_grad if included is None else p in included):
                continue
            mesh, placements = getattr(p, "device_mesh", None), getattr(p, "placements", None)
            key = (p.dtype, get_grad_dtype(p), p.device, mesh, placements)
            run = runs.setdefault(key, (group, [], []))
            run[1].append(p)
            run[2].append(name)
        yield from runs.values()
