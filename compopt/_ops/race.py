"""Which of two back ends is faster here, by some milliseconds of a sparse step."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._state.layouts import Bits, Dense
from .._state.masks import Mask, Tensors
from .._wire.requests import Payload
from .pytorch import Ops
from .reference import top_k

ELEMENTS = 1 << 18  # beyond the cores' own caches, as a model's are
DENSITY = 0.4
ROUNDS = 5
GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "maximize": False,
    "step": 1,
    "density": DENSITY,
    "payload_dtype": None,
}


def times_as_long(ours: Ops, theirs: Ops) -> float:
    """The median of what ``ours`` takes over what ``theirs`` does, in turns; all tensors are
    float32 on the CPU.
    """
    runs = [(ops, trial_bucket()) for ops in (ours, theirs)]
    seconds: list[list[float]] = [[], []]
    with torch.no_grad():
        for turn in range(ROUNDS + 1):
            for taken, (ops, bucket) in zip(seconds, runs, strict=True):
                start = time.perf_counter()
                sparse_step(bucket, ops)
                if turn:  # the first makes scratch memory
                    taken.append(time.perf_counter() - start)
    return float(statistics.median(a / b for a, b in zip(*seconds, strict=True)))


def trial_bucket() -> Bucket:
    """One tensor with a gradient, and a mask chosen at random."""
    random = torch.Generator().manual_seed(0)
    draw = torch.randn(3, ELEMENTS, generator=random, dtype=torch.float32)
    p = torch.nn.Parameter(draw[0].view(512, -1).clone())
    p.grad = draw[1].view(512, -1).clone()
    bucket = Bucket(0, GROUP, [p], ["trial"])
    for name in ("exp_avg", "exp_avg_sq", "residual"):
        bucket.allocate(name, Dense(torch.float32), [{}])
    bucket.allocate("mask", Bits(), [{}])
    bucket.state["mask"][0].copy_(top_k(draw[2], int(DENSITY * ELEMENTS)))
    bucket.state["step"] = [torch.zeros((), dtype=torch.float32)]
    return bucket


def sparse_step(bucket: Bucket, ops: Ops) -> None:
    """What Radius does in a sparse step: read at a mask, and commit."""
    grads, cache = bucket.grads(), bucket.cache
    if "mask" not in cache:
        cache["mask"] = Mask(bucket, bits=bucket.state["mask"], decode=ops.positions)
    mean = ops.encode(bucket, grads, cache["mask"])
    ops.run("radius.update", plain_commit, bucket, mean, "sparse", cache["mask"], grads)


def plain_commit(
    bucket: Bucket, ops: Ops, mean: Payload, phase: str, mask: Mask, grads: Tensors
) -> list[Tensor]:
    """What matters for time of Radius's own commit, of one tensor."""
    state, w = bucket.state, bucket.weights[0]
    m, v, step = state["exp_avg"][0], state["exp_avg_sq"][0], state["step"][0]
    step += 1
    average = ops.decode(mean.parts[0], mask.positions[0], w)
    ops.adamw(bucket.group, w, average, m, v, step)
    if grads[0] is not None:
        state["residual"][0].add_(grads[0])
    return []
