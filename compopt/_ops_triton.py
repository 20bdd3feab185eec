"""Triton kernels: a bucket's step in a few launches, without a dense copy of what was averaged, and without waiting.

Works on CUDA tensors; on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1), to see that it is right. What lies
on other devices is left to PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Iterable

import compopt_kernels as kernels
import torch
from torch import Tensor

from ._buckets import Bucket, local, upload
from ._math import kept
from ._ops import HYPER, Ops, Tensors
from ._requests import Payload


class TritonOps(Ops):
    """The kernels of ``compopt_kernels``, a launch for all tensors of a bucket."""

    name = "triton"

    def __init__(self, devices: set[str] = frozenset()) -> None:
        super().__init__(devices)
        self._blocks: dict[int, kernels.Blocks] = {}
        device = "cpu" if kernels.INTERPRETED else "cuda"
        kernels.pack_bits(
            torch.ones(8, dtype=torch.bool, device=device)
        )  # a machine that cannot build one says so here

    def fuses(self, bucket: Bucket) -> bool:
        return bucket.device.type == ("cpu" if kernels.INTERPRETED else "cuda")

    def blocks(self, bucket: Bucket) -> kernels.Blocks:
        if bucket.index not in self._blocks:
            self._blocks[bucket.index] = kernels.Blocks(bucket.lengths, bucket.device)
        return self._blocks[bucket.index]

    def starts(self, bucket: Bucket, bits: Tensors) -> Tensor:
        """For each block how many elements of its tensor are selected before it; no mask: all are."""
        blocks = self.blocks(bucket)
        return blocks.firsts if all(b is None for b in bits) else kernels.count(blocks, bits)

    def pack(
        self, bucket: Bucket, grads: Tensors, index: Tensors | None = None, add: Tensors | None = None,
        scale: float = 1.0, negate: bool = False, bits: Tensors | None = None,
    ) -> Payload:  # fmt: skip
        if not self.fuses(bucket):
            return super().pack(bucket, grads, index, add, scale, negate)
        nothing: Tensors = [None] * len(grads)
        index = index or nothing
        bits = [None if i is None else b for b, i in zip(bits or nothing, index, strict=True)]
        lengths = [n if i is None else i.numel() for n, i in zip(bucket.lengths, index, strict=True)]
        payload = bucket.payload(lengths, bucket.group.get("payload_dtype"))
        payload.starts = self.starts(bucket, bits)
        present = [0.0 if g is None else 1.0 for g in grads]
        payload.header.copy_(upload(present, payload.flat.dtype, bucket.device))
        kernels.compact(
            self.blocks(bucket), bits, payload.starts, flattened(grads), payload.parts, payload.header.split(1),
            add or nothing, scale, -1.0 if negate else 1.0,
        )  # fmt: skip
        return payload

    def radius_commit(self, bucket: Bucket, mean: Payload, phase: str, grads: Tensors, index: Tensors) -> list[Tensor]:
        """Radius, lines 10, 15, 16 and 21 to 25, for all tensors; returns line 22's masks."""
        h, state, present = bucket.group, bucket.state, bucket.present(mean)
        compressed = [c and phase != "dense" for c in bucket.compressed]
        scored = [i for i, c in enumerate(compressed) if c and phase == "resample"]
        lengths = [bucket.lengths[i] for i in scored]
        scores = self.scratch(bucket.flat["exp_avg"], sum(lengths), use="score").split(lengths)
        score, weights, own = dict(zip(scored, scores, strict=True)), contiguous_weights(bucket), flattened(grads)
        rows = [
            kernels.AdamWRow(
                n, state["mask"][i] if phase == "sparse" else None, mean.parts[i], weights[i],
                state["exp_avg"][i], state["exp_avg_sq"][i], state["step"][i], int(present[i]),
                state["residual"][i] if compressed[i] else None, own[i], score.get(i), published(bucket, i),
            )
            for i, n in enumerate(bucket.lengths)
        ]  # fmt: skip
        count_up(bucket, present)
        kernels.adamw(
            self.blocks(bucket), mean.starts, rows, lr=float(h["lr"]), **{name: h[name] for name in HYPER}
        )  # fmt: skip
        bring_back(bucket, weights, present)
        return self.largest(scores, [kept(h["density"], n) for n in lengths])

    def largest(self, xs: Iterable[Tensor], ks: Iterable[int]) -> list[Tensor]:
        """For each tensor the packed mask of its k elements of largest magnitude."""
        rows = [
            kernels.TopKRow(x.numel(), k, x, torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device))
            for x, k in zip(xs, ks, strict=True)
        ]
        if rows:
            kernels.top_k(kernels.Blocks([row.n for row in rows], rows[0].x.device), rows)
        return [row.bits for row in rows]


def flattened(tensors: Tensors) -> Tensors:
    """A kernel walks over memory: what is laid out otherwise is copied."""
    return [None if t is None else t.reshape(-1) for t in tensors]


def contiguous_weights(bucket: Bucket) -> list[Tensor]:
    return [w.contiguous() for w in bucket.weights]


def published(bucket: Bucket, i: int) -> Tensor | None:
    """The parameter that the kernel brings the updated master to; None where there is no master, or a copy is due."""
    p = local(bucket.params[i].detach())
    return p if "master" in bucket.state and p.is_contiguous() else None


def bring_back(bucket: Bucket, weights: list[Tensor], present: list[bool]) -> None:
    """Copies of weights to where they came from, and masters to parameters, where the kernel could not."""
    for i, (ours, theirs) in enumerate(zip(weights, bucket.weights, strict=True)):
        if present[i] and ours.data_ptr() != theirs.data_ptr():
            theirs.copy_(ours)
        if present[i] and published(bucket, i) is None:
            bucket.publish(i)


def count_up(bucket: Bucket, present: list[bool]) -> None:
    steps = [step for step, here in zip(bucket.state["step"], present, strict=True) if here]
    if steps:
        torch._foreach_add_(steps, 1)
