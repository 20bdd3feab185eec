"""SCAPE's masks where the host does not wait to learn whether a step is applied.

Masks are of one size then, step after step, so a mask that is not taken over has the size of the
one that would have been: which of the two it is, the device alone knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.ops import Group, Ops
from .._state.buckets import Bucket, upload
from .._state.gates import writes_of
from .._state.masks import Mask, cleared, counted
from .._wire.requests import AllGather, Asking, Payload
from .dealing import compressed_lengths
from .selection import Selection, found_next


def stays_on_device(bucket: Bucket, mask: Mask, selection: Selection | None) -> bool:
    """Whether the commit asks the device for nothing: nothing is selected in this step, or as much
    as in the one before.
    """
    held = bucket.cache["mask"]
    if selection is None:
        return not (mask.sparse or held.sparse)
    sizes = getattr(selection, "sizes", None)  # where a back end selects exactly as many
    return bool(mask.sparse and held.sparse and mask.sizes == held.sizes == sizes)


def not_capturable(groups: list[Group], backend: str, sharded: bool) -> str:
    """Why steps would ask the device; nothing where they do not."""
    clips = any(h["clip"] == "scape" and h["max_grad_norm"] for h in groups)
    at_once = any(h["mask_delay"] == 0 for h in groups)
    for there, why in (
        (backend != "triton", "without Triton thresholds are looked for on the host"),
        (sharded, "sharded=True counts on the host what each rank owns"),
        (at_once, "mask_delay=0 counts on the host what two masks share"),
        (clips, "clip='scape' takes its factor on the host"),
    ):
        if there:
            return why
    return ""


def keep_late(
    bucket: Bucket, ops: Ops, mask: Mask, mean: Payload, selection: Selection | None
) -> Asking[None]:
    """``keep_masks`` behind the gates of this step: the masks of before where it is not applied."""
    gates = bucket.behind
    if gates is None:
        raise RuntimeError("this step is not behind a gate: keep_masks() is for it.")
    bucket.cache["owed"] = [owed or mean.dropped is not None for owed in bucket.cache["owed"]]
    if selection is None:
        return
    flat, bits = bucket.flat["next_mask"], bucket.flat["mask"]
    torch.where(bytes_of(bucket, writes_of(gates)), flat, bits, out=bits)
    own = Mask(bucket, bits=bucket.state["mask"], sizes=mask.sizes, decode=ops.positions)
    yield from ops.commit("mask.counted", counted, bucket, own)
    bucket.cache["mask"] = own

    before = flat.clone()
    bucket.cache.pop("next_mask", None)
    yield from ops.commit("mask.cleared", cleared, bucket, "next_mask")
    rows = yield AllGather(selection.message())  # awaited when the next step needs it
    yield from ops.commit("scape.found", found_next, bucket, selection, rows)
    torch.where(gates[0].applied, flat, before, out=flat)
    following = Mask(bucket, bits=bucket.state["next_mask"], sizes=mask.sizes, decode=ops.positions)
    yield from ops.commit("mask.counted", counted, bucket, following)
    bucket.cache["next_mask"] = following


def bytes_of(bucket: Bucket, writes: Tensor) -> Tensor:
    """A number of each tensor for every byte of its mask."""
    sizes = [(n + 7) // 8 for n in compressed_lengths(bucket)]
    if "mask bytes" not in bucket.cache:
        counts = upload([float(size) for size in sizes], torch.int64, bucket.device)
        bucket.cache["mask bytes"] = counts
    return writes.repeat_interleave(bucket.cache["mask bytes"], output_size=sum(sizes))
