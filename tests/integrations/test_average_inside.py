"""Average inside FSDP2: real fully_shard over the ranks that average, on gloo processes."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import apart, cut, loss, make, train
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


def uses_the_backend(rank: int) -> bool:
    """Quantized means are computed by the backend where it has them, as under DDP."""
    model = cut(make(dtype=torch.float32))
    optimizer = average(model, payload_dtype="int8")
    optimizer.zero_grad()
    loss(model, 0, rank, torch.float32).backward()
    buckets = [bucket for bucket, _ in optimizer.fsdp_backward.buckets_since_step.values()]
    return bool(buckets) and all(bucket.codecs is optimizer.ops.codecs for bucket in buckets)


def all_of(rank: int) -> dict[str, float]:
    return {
        "unrounded": beside_sgd(rank),
        "backend": float(not uses_the_backend(rank)),
        **{dtype: beside_sgd(rank, payload_dtype=dtype) for dtype in ("bfloat16", "int8")},
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_fsdp_with_rounded_gradients(ranks):
    for results in run_ranks(all_of, ranks):
        rounded = {name: results.pop(name) for name in ("bfloat16", "int8")}
        assert max(results.values()) < 1e-12, results
        assert all(0 < far < 0.05 for far in rounded.values()), rounded
