"""AdamS and SCAPE by a C pass (kernels/native/scape.c)."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch
from torch import Tensor

from ..._state.buckets import Bucket, local
from ..._state.masks import Mask
from ..._wire.requests import Payload
from ..commits import keep_absent, momenta_apart, owe_again
from ..moment import own_share
from ..ops import Group, Ops
from .adamw import refuse, state_of, steps_of, whole
from .selection import CHOICE, NativeSelection
from .tables import Options, Table, addresses, at, floats, over_rows, plain, sizes_of

# scape.c's struct.
SCAPE = (
    "n",
    "w",
    "e",
    "g",
    "held",
    "holding",
    "old",
    "index",
    "k",
    "mean",
    "m",
    "step",
    *CHOICE,
)
Columns = dict[str, Any]
NOT_SELECTING: Columns = dict.fromkeys(CHOICE, 0)
NOT_COMPRESSED: Columns = dict.fromkeys(("e", "g", "held", "holding", "index", "k"), 0)


class AdamSPasses(Ops):
    """What of ``Ops`` is AdamS."""

    library: ctypes.CDLL

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
        if not plain(w, g, m):
            return super().adams(group, w, g, m, step, clip, decay)
        before, n = array("f", [float(step) - 1]), w.numel()  # the pass counts it up
        columns = dict.fromkeys(SCAPE, 0) | {
            "n": n,
            "w": at("a parameter", w, n),
            "old": at("exp_avg", m, n),
            "mean": at("an averaged gradient", g, n),
            "m": at("exp_avg", m, n),
            "step": before.buffer_info()[0],
        }
        self.library.adams(Table(1, **columns), self.adams_options(group, clip, decay))

    @staticmethod
    def adams_options(h: Group, clip: float, decay: bool = True) -> Options:
        beta1, beta2 = h["betas"]
        weight_decay = h["weight_decay"] if decay else 0.0
        authors = float(h["bias_correction"] == "adams")
        lr, alpha = float(h["lr"]), own_share(h)
        return Options(lr, beta1, beta2, h["eps"], weight_decay, clip, alpha, authors)


def scape_commit(
    bucket: Bucket,
    ops: AdamSPasses,
    mean: Payload,
    mask: Mask,
    old: list[Tensor],
    factor: float,
    selection: NativeSelection | None,
) -> None:
    """SCAPE, lines 10, 11 and 16 to 21, for all tensors, and line 15 where a selection is given.

    ``mask``: what was exchanged; ``old``: the momenta of before, where they were held.
    """
    lengths, present, held = bucket.lengths, bucket.present(mean), bucket.cache["mask"]
    new, own = bucket.state["exp_avg"], floats(bucket.grads())
    if mask.sparse or held.sparse:  # places change: not in the same memory
        old = momenta_apart(bucket, old)
    holding, k = sizes_of(held.positions), sizes_of(mask.positions)
    rows = zip(held.positions, holding, lengths, strict=True)
    before = [n if p is None else size for p, size, n in rows]
    columns = {
        "e": state_of(bucket, "residual"),
        "g": addresses("gradients", own, lengths),
        "held": addresses("positions of the momentum", held.positions, holding, torch.int32),
        "holding": holding,
        "old": addresses("the momentum of before", old, before),
        "index": addresses("positions", mask.positions, k, torch.int32),
        "k": k,
        **(selection.columns(present) if selection else NOT_SELECTING),
    }
    room, most = selection.room if selection else 0, max(k)
    _passes(bucket, ops, mean, mask, factor, room, most, columns)
    keep_absent(old, new, present)
    for i, here in enumerate(present):
        if not here and selection:
            selection.take_one(i, None)
    owe_again(bucket, ops, mean, mask, 1 - bucket.group["betas"][0])


def adams_commit(bucket: Bucket, ops: AdamSPasses, mean: Payload) -> None:
    """AdamS for every tensor that has a gradient on any rank."""
    columns = NOT_COMPRESSED | NOT_SELECTING | {"old": state_of(bucket, "exp_avg")}
    _passes(bucket, ops, mean, Mask(bucket), 1.0, 0, 0, columns)


def _passes(
    bucket: Bucket,
    ops: AdamSPasses,
    mean: Payload,
    mask: Mask,
    factor: float,
    room: int,
    most: int,
    own: Columns,
) -> None:
    """The pass over all tensors; ``own``: the columns that are not the same for every algorithm.

    A thread has memory for ``room`` candidates, and for ``most`` elements that are exchanged.
    """
    state, lengths, present = bucket.state, bucket.lengths, bucket.present(mean)
    weights = [local(p) for p in bucket.params]
    taking = zip(lengths, mask.positions, state["exp_avg"], present, strict=True)
    sent = [m.numel() if not here else n if p is None else p.numel() for n, p, m, here in taking]
    values = [v if here else None for v, here in zip(whole(mean), present, strict=True)]
    columns = own | {
        "n": lengths,
        "w": addresses("parameters", weights, lengths),
        "mean": addresses("an averaged gradient", values, sent),
        "m": addresses("exp_avg", state["exp_avg"], sent),
        "step": steps_of(bucket, present),
    }
    table = Table(len(present), **{name: columns[name] for name in SCAPE})
    hyper, like = ops.adams_options(bucket.group, factor), state["step"][0]
    threads = torch.get_num_threads()
    candidates = ops.scratch(like, threads * room, torch.int32, "candidates")
    choosing = at("candidates", candidates, threads * room, torch.int32)
    before = ops.scratch(like, threads * most, torch.float32, "sent")
    gathered = at("what was sent", before, threads * most)

    def part(first: int, last: int, thread: int) -> int:
        own_choice, own_sent = choosing + 4 * room * thread, gathered + 4 * most * thread
        wrong: int = ops.library.scape(table, first, last, hyper, own_choice, own_sent)
        return wrong

    refuse(bucket, over_rows(lengths, part))
