"""Average inside FSDP2: real fully_shard over the ranks that average, on gloo processes."""

from __future__ import annotations

import pytest
import torch
from inside import apart, cut, loss, make, train, whole
from ranks import run_ranks
from torch import nn

import compopt


def average(model: nn.Module, **options) -> compopt.Average:
    return compopt.Average(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), **options)


def beside_sgd(rank: int, **options) -> float:
    """Beside FSDP2 and torch's SGD, both clipped from outside: the distance, over the way that SGD went."""
    ours, theirs = cut(make()), cut(make())
    optimizer = average(ours, **options)
    train(ours, optimizer, range(6), rank, clip=0.5)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=1e-3, momentum=0.9), range(6), rank, clip=0.5)
    return apart(ours, theirs) / apart(make(), theirs)


def clipped(rank: int) -> float:
    """By max_grad_norm, beside a clip from outside."""
    ours, theirs = cut(make()), cut(make())
    train(ours, average(ours, max_grad_norm=0.5), range(4), rank)
    train(theirs, average(theirs), range(4), rank, clip=0.5)
    return apart(ours, theirs)


def skipped(rank: int, payload_dtype: str) -> bool:
    """An inf in one rank's gradient: nothing changes on any rank."""
    model = cut(make())
    optimizer = average(model, payload_dtype=payload_dtype)
    train(model, optimizer, range(2), rank)
    kept = [state["residual"] for state in optimizer.state.values()]
    before = [whole(model), *(x.clone() for x in kept)]
    optimizer.zero_grad()
    (loss(model, 2, rank) * (float("inf") if rank == 1 else 1)).backward()
    optimizer.step()
    unchanged = all(map(torch.equal, before, [whole(model), *kept]))
    skipped_there = optimizer.stats.phase == "skipped"
    train(model, optimizer, range(3, 5), rank)
    return skipped_there and unchanged and optimizer.stats.phase == "rounded" and bool(whole(model).isfinite().all())


def uses_the_backend(rank: int) -> bool:
    """Quantized means are computed by the backend where it has them, as under DDP."""
    model = cut(make(dtype=torch.float32))
    optimizer = average(model, payload_dtype="int8")
    optimizer.zero_grad()
    loss(model, 0, rank, torch.float32).backward()
    buckets = [bucket for bucket, _ in optimizer.inside.reduced.values()]
    has_mean = [bucket.make_mean is not None for bucket in buckets]
    return bool(buckets) and has_mean == [optimizer.ops.quantized_mean(bucket) is not None for bucket in buckets]


def all_of(rank: int) -> dict[str, float]:
    return {
        "unrounded": beside_sgd(rank),
        "max_grad_norm": clipped(rank),
        "backend": float(not uses_the_backend(rank)),
        **{f"skipped, {dtype}": float(not skipped(rank, dtype)) for dtype in ("bfloat16", "int4")},
        **{dtype: beside_sgd(rank, payload_dtype=dtype) for dtype in ("bfloat16", "int8")},
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_fsdp_with_rounded_gradients(ranks):
    for found in run_ranks(all_of, ranks):
        rounded = {name: found.pop(name) for name in ("bfloat16", "int8")}
        assert max(found.values()) < 1e-12, found
        assert all(0 < far < 0.05 for far in rounded.values()), rounded
