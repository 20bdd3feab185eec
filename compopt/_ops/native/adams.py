"""AdamS and SCAPE by a C pass (kernels/native/scape.c)."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from ..._state.buckets import Bucket, local
from ..._state.masks import Deal
from ..._wire.requests import Payload
from ..ops import Ops, Tensors
from .adamw import refuse, state_of, steps_of, whole
from .selection import CHOICE, NativeSelection
from .tables import Options, Table, addresses, at, floats, over_rows, plain, sizes_of

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
)  # scape.c's struct
NOT_SELECTING = dict.fromkeys(CHOICE, 0)
NOT_COMPRESSED = dict.fromkeys(("e", "g", "held", "holding", "index", "k"), 0)


class AdamSPasses(Ops):
    """What of ``Ops`` is AdamS; ``self.library`` is there."""

    @staticmethod
    def scape_selection(bucket: Bucket, ops: Ops, deal: Deal, rank: int) -> NativeSelection:
        return NativeSelection(bucket, ops, deal, rank)

    def scape_commit(
        self,
        bucket: Bucket,
        mean: Payload,
        index: Tensors,
        bits: list[Tensor],
        old: list[Tensor],
        factor: float,
        selection: NativeSelection | None,
    ) -> None:
        """SCAPE, lines 10, 11 and 16 to 21, for all tensors, and line 15 where a selection is
        given.

        ``index``: what was exchanged; ``old``: the momenta of before, where they were held. None is
        everywhere."""
        state, present, held, lengths = (
            bucket.state,
            bucket.present(mean),
            bucket.cache["held"],
            bucket.lengths,
        )
        new, own = state["exp_avg"], floats(bucket.grads())
        if old is new and any(
            i is not None for i in (*index, *held)
        ):  # places change: not in the same memory
            flat = bucket.flat["exp_avg"]
            before = bucket.memory("the momentum of before", flat.numel(), flat.dtype).copy_(flat)
            old = list(before.split([m.numel() for m in new]))
        room, most = selection.room if selection else 0, max(sizes_of(index))
        holding, k = sizes_of(held), sizes_of(index)
        before = [
            n if i is None else size for n, i, size in zip(lengths, held, holding, strict=True)
        ]
        self._scape(
            bucket,
            mean,
            present,
            index,
            factor,
            room,
            most,
            {
                "e": state_of(bucket, "residual"),
                "g": addresses("gradients", own, lengths),
                "held": addresses("positions of the momentum", held, holding, torch.int32),
                "holding": holding,
                "old": addresses("the momentum of before", old, before),
                "index": addresses("positions", index, k, torch.int32),
                "k": k,
                **(selection.columns(present) if selection else NOT_SELECTING),
            },
        )
        for i, here in enumerate(present):
            if not here:
                if new[i] is not old[i]:
                    new[i].copy_(old[i].view_as(new[i]))
                if selection:
                    selection.take_one(i, None)

    def adams_commit(self, bucket: Bucket, mean: Payload) -> None:
        if not self.fuses(bucket):
            return super().adams_commit(bucket, mean)
        everywhere: Tensors = [None] * len(bucket.lengths)
        own = NOT_COMPRESSED | NOT_SELECTING | {"old": state_of(bucket, "exp_avg")}
        self._scape(bucket, mean, bucket.present(mean), everywhere, 1.0, 0, 0, own)

    def _scape(
        self,
        bucket: Bucket,
        mean: Payload,
        present: list[bool],
        index: Tensors,
        factor: float,
        room: int,
        most: int,
        own: dict,
    ) -> None:
        """The pass over all tensors; ``own``: the columns that are not the same for every
        algorithm.
        """
        state, weights, lengths = bucket.state, [local(p) for p in bucket.params], bucket.lengths
        taking = zip(lengths, index, state["exp_avg"], present, strict=True)
        sent = [
            m.numel() if not here else n if i is None else i.numel() for n, i, m, here in taking
        ]
        values = [v if here else None for v, here in zip(whole(mean), present, strict=True)]
        columns = own | {
            "n": lengths,
            "w": addresses("parameters", weights, lengths),
            "mean": addresses("an averaged gradient", values, sent),
            "m": addresses("exp_avg", state["exp_avg"], sent),
            "step": steps_of(bucket, present),
        }
        table = Table(len(present), **{name: columns[name] for name in SCAPE})
        hyper, threads, like = (
            self.adams_options(bucket.group, factor),
            torch.get_num_threads(),
            state["step"][0],
        )
        candidates = self.scratch(like, threads * room, torch.int32, "candidates")
        scratch = at("candidates", candidates, threads * room, torch.int32)
        gathered = self.scratch(like, threads * most, torch.float32, "sent")
        sent_before = at("what was sent", gathered, threads * most)
        refuse(
            bucket,
            over_rows(
                lengths,
                lambda first, last, thread: self.library.scape(
                    table,
                    first,
                    last,
                    hyper,
                    scratch + 4 * room * thread,
                    sent_before + 4 * most * thread,
                ),
            ),
        )

    def adams(
        self,
        group: dict,
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
    def adams_options(h: dict, clip: float, decay: bool = True) -> Options:
        beta1, beta2 = h["betas"]
        alpha, weight_decay = (
            (beta1 - 1) if h["maximize"] else (1 - beta1),
            h["weight_decay"] if decay else 0.0,
        )
        authors = float(h["bias_correction"] == "adams")
        return Options(float(h["lr"]), beta1, beta2, h["eps"], weight_decay, clip, alpha, authors)
