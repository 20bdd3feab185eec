"""Triton kernels: a bucket's step in a few launches, without a dense copy of what was averaged, and
without waiting.

Works on tensors of the device that Triton has a driver for; on CPU tensors in Triton's interpreter
(TRITON_INTERPRET=1), to see that it is right. What lies on other devices is left to PyTorch's
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.devices import pinned
from ..._state.masks import Mask, Tensors
from ..._wire.quantised_mean import QuantisedMean
from ..._wire.requests import Payload
from ..ops import Faster, Group, empty_message
from .commits import adams_commits, radius_commits
from .factored import separate_commits
from .masks import cleared, counted, found_next, stored
from .means import TritonMean
from .places import addresses, bits_places, known, message, read_places
from .scape import scape_commits
from .selection import TritonSelection
from .tables import KernelOps, blocks_of, flattened, starts_of


class TritonOps(KernelOps):
    """The kernels of ``compopt_kernels``, a launch for all tensors of a bucket."""

    name = "triton"

    def pack(
        self,
        bucket: Bucket,
        grads: Tensors,
        mask: Mask | None = None,
        add: Iterable[Tensor | None] | None = None,
        scale: float = 1.0,
        negate: bool = False,
    ) -> Payload:
        if not takes(self, bucket):
            return super().pack(bucket, grads, mask, add, scale, negate)
        mask = mask or Mask(bucket)
        payload = empty_message(bucket, mask, [float(g is not None) for g in grads])
        blocks, starts = blocks_of(bucket), starts_of(bucket, mask)
        more = [None] * len(grads) if add is None else list(add)
        own: Tensors = grads

        def table() -> kernels.Table:
            nonlocal own  # copies have to live until the kernel has been launched
            own = flattened(grads)
            return kernels.compact_table(
                blocks, mask.bits, own, payload.exact, payload.header, more
            )

        read = known(read_places(grads), bits_places(bucket, mask), addresses(more))
        key = known(bucket, read, message(payload))
        kernels.compact_known(
            blocks,
            self.tables(("pack", bucket.index), key, table),
            starts,
            payload.header,
            scale,
            -1.0 if negate else 1.0,
        )
        return payload.round()

    def mark(self, payload: Payload, grads: Tensors) -> None:
        device = payload.flat.device
        there = {g.device for g in grads if g is not None}
        if device.type != self.device or there - {device}:
            return super().mark(payload, grads)
        marks = torch.tensor([float(g is not None) for g in grads], dtype=payload.header.dtype)
        payload.header.copy_(pinned(marks, device), non_blocking=True)
        own = flattened(grads)
        blocks = kernels.cut(tuple(0 if g is None else g.numel() for g in own), device)
        none = [None] * len(own)
        kernels.compact(blocks, none, blocks.firsts, own, none, payload.header, none, 0.0, 1.0)

    def adams(
        self,
        group: Group,
        w: Tensor,
        g: Tensor,
        m: Tensor,
        step: Tensor,
        clip: float = 1.0,
        decay: bool = True,
    ) -> None:
        if w.device.type != self.device or not all(x.is_contiguous() for x in (w, g, m)):
            return super().adams(group, w, g, m, step, clip, decay)
        blocks = kernels.cut((w.numel(),), w.device)
        row = kernels.ScapeRow(w.numel(), None, None, m, g, w, m, step, 1)
        kernels.scape(
            blocks,
            blocks.firsts,
            blocks.firsts,
            [row],
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"] if decay else 0.0,
            bias_correction=group["bias_correction"],
            clip=clip,
        )

    def job(self, bucket: Bucket) -> Callable[[Payload, int, int], QuantisedMean] | None:
        return TritonMean if takes(self, bucket) else None


def takes(ops: KernelOps, bucket: Bucket) -> bool:
    """Whether kernels can read and write this bucket."""
    return bucket.device.type == ops.device and bucket.offload is None


TritonOps.faster = {"scape.selection": Faster(takes, TritonSelection)}
TritonOps.together = {
    "adams.commit": Faster(takes, adams_commits),
    "radius.commit": Faster(takes, radius_commits),
    "scape.commit": Faster(takes, scape_commits),
    "separate.commit": Faster(takes, separate_commits),
    "scape.found": Faster(takes, found_next),
    "mask.stored": Faster(takes, stored),
    "mask.cleared": Faster(takes, cleared),
    "mask.counted": Faster(takes, counted),
}
