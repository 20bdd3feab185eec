"""RandomK with error feedback: an optimizer of one's own on compopt's engine, complete. `python examples/randomk.py`

docs/writing.md builds it step by step. One bucket on rank n at step t; g is its gradient, e what it has not sent yet::

    1  P <- the same round(density * n) random positions on all ranks      # all, in the dense start
    2  s <- (g + e) at P
    3  s <- mean over ranks of s
    4  s <- s * min(1, max_grad_norm / |s|)
    5  e <- e + g;  e at P <- what rounding took off this rank's s
    6  w <- AdamW by a gradient that is s at P and 0 elsewhere
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from compopt._engine.options import check_adam, check_compression, dense_start_of, require
from compopt._engine.reducer import AdamWUpdate, AllReduceReducer, step_by_average
from compopt._fsdp.fsdp_backward import ReducingOptimizer, step_fsdp_shards
from compopt._ops.norms import clip_factor
from compopt._state.bucket import Bucket
from compopt._state.layouts import Layout
from compopt._state.masks import Mask, selection_size
from compopt._wire.groups import ProcessGroup
from compopt._wire.payload import PayloadDtype
from compopt._wire.requests import Agree, RequestGenerator
from compopt.tagc.zero1_adamw import step_zero1_shards


def randomk(bucket: Bucket, reducer: AllReduceReducer, update: AdamWUpdate) -> RequestGenerator[None]:
    """Lines 1 to 6, one bucket, one step."""
    mean = yield from reducer.reduce()  # line 2 and line 3
    norm = yield Agree(mean, reducer.phase)
    # From here on state may change.
    reducer.clip(clip_factor(norm, bucket.group["max_grad_norm"]))  # line 4
    # Of a tensor without a gradient on any rank all stays as it was.
    step_by_average(bucket, reducer.ops, reducer, update)  # line 5 and line 6


def draw(bucket: Bucket, t: int) -> Mask:
    """Line 1: ascending positions in each compressed tensor; None for what is sent dense."""
    positions: list[Tensor | None] = [None] * len(bucket.params)
    for i in (i for i, compressed in enumerate(bucket.compressed) if compressed):
        n, words = bucket.lengths[i], (bucket.group["seed"], t, bucket.index, i)
        random = torch.Generator().manual_seed(zlib.crc32(repr(words).encode()))
        some = torch.randperm(n, generator=random, device="cpu")[: selection_size(bucket.group["density"], n)]
        positions[i] = some.sort().values.to(bucket.device)
    return Mask(bucket, positions=positions)


class RandomK(ReducingOptimizer):
    """AdamW on gradients of which every step sends a random part; the rest is sent later.

    Args: params, lr, betas, eps, weight_decay, maximize: as in :class:`torch.optim.AdamW`. density: share of a
        compressed tensor that a step sends. seed: its positions follow from it. dense_steps: dense steps at the
        start. max_grad_norm, payload_dtype, process_group, simulate: as in :class:`compopt.RadiusAdamW`.
        sharded: each rank keeps the moments of 1/N of the elements, updates these, and gathers the others.
    State: AdamW's ``exp_avg`` and ``exp_avg_sq``, whole or of this rank's shard; of compressed tensors ``residual``,
        what was not sent yet.
    Raises: ValueError: an option out of its range."""

    rank_local_state = ("residual",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        density: float = 0.1,
        seed: int = 0,
        dense_steps: int = 0,
        max_grad_norm: float | None = None,
        payload_dtype: PayloadDtype = None,
        maximize: bool = False,
        process_group: ProcessGroup | None = None,
        simulate: bool = False,
        sharded: bool = False,
    ):
        self.sharded = sharded
        adamw = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        compression: dict[str, Any] = dict(density=density, seed=seed, dense_steps=dense_steps)
        compression |= dict(max_grad_norm=max_grad_norm, payload_dtype=payload_dtype)
        super().__init__(params, {**adamw, **compression}, process_group, simulate)

    def check_group(self, group: dict[str, Any]) -> None:
        check_adam(group)
        check_compression(group)
        require(0 < group["density"] <= 1, "density", group["density"], "in (0, 1]")

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        return self.list_adamw_state(dtype)

    def make_reducer(self, bucket: Bucket) -> AllReduceReducer:
        t = bucket.group["step"] + 1
        dense = t <= dense_start_of(bucket) or not any(bucket.compressed)
        return AllReduceReducer(bucket, self.ops, Mask(bucket) if dense else draw(bucket, t))  # line 1

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        if self.fsdp_backward is not None:
            return step_fsdp_shards(bucket, self.ops, self.fsdp_backward, AdamWUpdate(self.ops))
        if self.sharded:
            return step_zero1_shards(bucket, self.ops, self.make_reducer(bucket))
        return randomk(bucket, self.make_reducer(bucket), AdamWUpdate(self.ops))


if __name__ == "__main__":
    w, x = torch.nn.Parameter(torch.zeros(64, 64)), torch.randn(1024, 64)
    optimizer = RandomK([w], lr=1e-2, dense_steps=10, simulate=True)
    for _ in range(300):
        w.grad = x.t() @ (x @ w.detach() - x.flip(1)) / len(x)
        optimizer.step()
    loss = (x @ w - x.flip(1)).square().mean()
    print(f"loss {loss:.4f}, {optimizer.stats.bytes_sent} of {optimizer.stats.bytes_dense} bytes a step")
