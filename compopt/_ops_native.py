"""C passes over float32 tensors on a CPU: a bucket's step reads and writes its memory once (see kernels/native).

Other tensors are left to PyTorch's operators. With several threads the tensors of a bucket are dealt to them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ._buckets import Bucket, local
from ._masks import Deal
from ._math import kept
from ._native import Options, Table, addresses, at, load, over_rows
from ._ops import Ops, Tensors
from ._requests import Payload
from ._selection_native import CHOICE, NativeSelection

SCAPE = ("n", "w", "e", "g", "held", "holding", "old", "index", "k", "mean", "m", "step", *CHOICE)  # scape.c's struct
NOT_SELECTING = dict.fromkeys(CHOICE, 0)
SPARSE = 16  # with fewer than one in so many selected, positions are read faster than bits


class NativeOps(Ops):
    """A call for all tensors of a bucket."""

    name = "native"

    def __init__(self, devices: set[str] = frozenset()) -> None:
        super().__init__(devices)
        self.library = load()

    @staticmethod
    def reads(bucket: Bucket) -> bool:
        """Whether passes can read this bucket's gradients and state."""
        return (
            bucket.device.type == "cpu" and bucket.dtype == torch.float32 and bucket.offload is None
            and bucket.shards is None and max(bucket.lengths) < 2**31
        )  # fmt: skip

    def fuses(self, bucket: Bucket) -> bool:
        return self.reads(bucket) and all(local(p).is_contiguous() for p in bucket.params)

    def pack(
        self, bucket: Bucket, grads: Tensors, index: Tensors | None = None, add: Tensors | None = None,
        scale: float = 1.0, negate: bool = False, bits: Tensors | None = None,
    ) -> Payload:  # fmt: skip
        nothing: Tensors = [None] * len(grads)
        index, add = index or nothing, list(add or nothing)
        if not self.reads(bucket):
            return super().pack(bucket, grads, index, add, scale, negate)
        payload, own = self.message(bucket, index), flattened(grads)
        exact = payload.flat.dtype == torch.float32
        flat = payload.flat if exact else self.scratch(bucket.params[0], len(payload.flat), use="payload")
        bits = [None if i is None or i.numel() * SPARSE <= n else b
                for i, n, b in zip(index, bucket.lengths, bits or nothing, strict=True)]  # fmt: skip
        sizes = [part.numel() for part in payload.parts]
        starts = accumulate(sizes[:-1], initial=len(payload.header) + len(payload.control))
        table = Table(
            len(grads),
            n=bucket.lengths,
            g=addresses(own),
            add=addresses(add),
            index=addresses(i if b is None else None for i, b in zip(index, bits, strict=True)),
            mask=addresses(bits),
            k=sizes,
            out=[at(flat) + 4 * start for start in starts],
            mark=[at(flat) + 4 * i for i in range(len(grads))],
        )
        sign = -1.0 if negate else 1.0
        over_rows(bucket.lengths, lambda first, last, _: self.library.pack(table, first, last, sign, scale))
        if not exact:
            payload.header.copy_(flat[: len(grads)])
            payload.body.copy_(flat[-len(payload.body) :] if len(payload.body) else payload.body)
        return payload

    def radius_commit(self, bucket: Bucket, mean: Payload, phase: str, grads: Tensors, index: Tensors) -> list[Tensor]:
        """Radius, lines 10, 15, 16 and 21 to 25, for all tensors; returns line 22's masks."""
        h, state, present, own, values = (
            bucket.group, bucket.state, bucket.present(mean), flattened(grads), whole(mean)
        )  # fmt: skip
        scores, weights = self.scores(bucket, phase), bucket.weights
        compressed = [c and phase != "dense" for c in bucket.compressed]
        table = Table(
            len(grads),
            n=bucket.lengths,
            w=addresses(weights),
            m=addresses(state["exp_avg"]),
            v=addresses(state["exp_avg_sq"]),
            step=addresses(step if here else None for step, here in zip(state["step"], present, strict=True)),
            mean=addresses(values),
            mask=addresses(state["mask"]) if phase == "sparse" else 0,
            index=0,
            k=[part.numel() for part in values],
            residual=addresses(e if c else None for e, c in zip(state["residual"], compressed, strict=True)),
            g=addresses(own),
            score=addresses(map(scores.get, range(len(grads)))),
            ahead=0,
            moments=0,
        )
        for i, score in scores.items():
            if not present[i]:
                moments = (state[name][i] for name in ("exp_avg", "exp_avg_sq", "step"))
                score.copy_(self.adamw_update(h, weights[i], *moments).abs_().view(-1))
        hyper = adamw_options(h)
        over_rows(bucket.lengths, lambda first, last, _: self.library.adamw(table, first, last, hyper))
        self.owe_again(bucket, mean, index)
        return [self.top_k(x, kept(h["density"], len(x))) for x in scores.values()]

    def adamw_ahead(
        self, group: dict, w: Tensor, g: Tensor, index: Tensor | None, m: Tensor, v: Tensor, step: Tensor, out: Tensor
    ) -> None:
        if not plain(w, g, m, v, out):
            return super().adamw_ahead(group, w, g, index, m, v, step, out)
        self._adamw_part(group, w, g, index, m, v, step, at(out), 0)

    def adamw_moments(
        self, group: dict, w: Tensor, g: Tensor, index: Tensor | None, m: Tensor, v: Tensor, step: Tensor
    ) -> None:
        if not plain(w, g, m, v):
            return super().adamw_moments(group, w, g, index, m, v, step)
        self._adamw_part(group, w, g, index, m, v, step, 0, 1)

    def _adamw_part(
        self, group: dict, w: Tensor, g: Tensor, index: Tensor | None, m: Tensor, v: Tensor, step: Tensor, ahead: int,
        moments: int,
    ) -> None:  # fmt: skip
        index = None if index is None else index.int()
        table = Table(
            1, n=w.numel(), w=at(w), m=at(m), v=at(v), step=at(step), mean=at(g), mask=0, index=at(index), k=g.numel(),
            residual=0, g=0, score=0, ahead=ahead, moments=moments,
        )  # fmt: skip
        self.library.adamw(table, 0, 1, adamw_options(group))

    def add_up(self, bucket: Bucket, grads: Tensors, add: Tensors, out: Tensors) -> Tensor:
        marks = torch.empty(len(grads))
        if not plain(*(x for x in (*grads, *add, *out) if x is not None)):
            return super().add_up(bucket, grads, add, out)
        table = Table(
            len(grads),
            n=bucket.lengths,
            g=addresses(grads),
            add=addresses(add),
            index=[at(marks) if to is None else 0 for to in out],  # of positions, of which there are none
            mask=0,
            k=[0 if to is None else n for n, to in zip(bucket.lengths, out, strict=True)],
            out=addresses(out),
            mark=[at(marks) + 4 * i for i in range(len(grads))],
        )
        over_rows(bucket.lengths, lambda first, last, _: self.library.pack(table, first, last, 1.0, 1.0))
        return marks

    def largest_of(self, x: Tensor, k: int) -> Tensor | None:
        if not plain(x) or x.numel() >= 2**31:
            return None
        out = torch.empty(k, dtype=torch.int32)
        self.largest(x, k, 0.0, at(out))
        return out.long()

    @staticmethod
    def scape_selection(bucket: Bucket, ops: NativeOps, deal: Deal, rank: int) -> NativeSelection:
        return NativeSelection(bucket, ops, deal, rank)

    def scape_commit(
        self, bucket: Bucket, mean: Payload, index: Tensors, bits: list[Tensor], old: list[Tensor], factor: float,
        selection: NativeSelection | None,
    ) -> None:  # fmt: skip
        """SCAPE, lines 10, 11 and 16 to 21, for all tensors, and line 15 where a selection is given.

        ``index``: what was exchanged; ``old``: the momenta of before, where they were held. None is everywhere.
        """
        state, present, held = bucket.state, bucket.present(mean), bucket.cache["held"]
        new, own = state["exp_avg"], flattened(bucket.grads())
        if old is new and any(i is not None for i in (*index, *held)):  # places change: not in the same memory
            old = list(bucket.flat["exp_avg"].clone().split([m.numel() for m in new]))
        room, most = selection.room if selection else 0, max(sizes_of(index))
        self._scape(bucket, mean, present, factor, room, most, {
            "e": addresses(state["residual"]),
            "g": addresses(own),
            "held": addresses(held),
            "holding": sizes_of(held),
            "old": addresses(old),
            "index": addresses(index),
            "k": sizes_of(index),
            **(selection.columns(present) if selection else NOT_SELECTING),
        })  # fmt: skip
        for i, here in enumerate(present):
            if not here:
                if new[i] is not old[i]:
                    new[i].copy_(old[i].view_as(new[i]))
                if selection:
                    selection.take_one(i, None)

    def adams_commit(self, bucket: Bucket, mean: Payload) -> None:
        if not self.fuses(bucket):
            return super().adams_commit(bucket, mean)
        momenta = addresses(bucket.state["exp_avg"])
        nothing = dict.fromkeys(("e", "g", "held", "holding", "index", "k"), 0)
        self._scape(bucket, mean, bucket.present(mean), 1.0, 0, 0, {**nothing, "old": momenta, **NOT_SELECTING})

    def _scape(
        self, bucket: Bucket, mean: Payload, present: list[bool], factor: float, room: int, most: int, own: dict
    ) -> None:
        """The pass over all tensors; ``own``: the columns that are not the same for every algorithm."""
        state, values, weights = bucket.state, whole(mean), [local(p) for p in bucket.params]
        steps = addresses(step if here else None for step, here in zip(state["step"], present, strict=True))
        common = {
            "n": bucket.lengths, "w": addresses(weights), "mean": addresses(values),
            "m": addresses(state["exp_avg"]), "step": steps,
        }  # fmt: skip
        columns = common | own
        table = Table(len(present), **{name: columns[name] for name in SCAPE})
        hyper, threads = self.adams_options(bucket.group, factor), torch.get_num_threads()
        scratch = at(self.scratch(state["step"][0], threads * room, torch.int32, "candidates"))
        gathered = at(self.scratch(state["step"][0], 3 * threads * most, torch.float32, "gathered"))
        over_rows(
            bucket.lengths,
            lambda first, last, thread: self.library.scape(
                table, first, last, hyper, scratch + 4 * room * thread, gathered + 12 * most * thread, most
            ),
        )

    def adams(
        self, group: dict, w: Tensor, g: Tensor, m: Tensor, step: Tensor, clip: float = 1.0, decay: bool = True
    ) -> None:
        if not plain(w, g, m):
            return super().adams(group, w, g, m, step, clip, decay)
        before = array("f", [float(step) - 1])  # the pass counts it up
        columns = dict.fromkeys(SCAPE, 0) | {
            "n": w.numel(), "w": at(w), "old": at(m), "mean": at(g), "m": at(m), "step": before.buffer_info()[0]
        }  # fmt: skip
        self.library.adams(Table(1, **columns), self.adams_options(group, clip, decay))

    @staticmethod
    def adams_options(h: dict, clip: float, decay: bool = True) -> Options:
        beta1, beta2 = h["betas"]
        alpha, weight_decay = (beta1 - 1) if h["maximize"] else (1 - beta1), h["weight_decay"] if decay else 0.0
        authors = float(h["bias_correction"] == "adams")
        return Options(float(h["lr"]), beta1, beta2, h["eps"], weight_decay, clip, alpha, authors)

    def largest(self, x: Tensor, k: int, guess: float, out: int) -> float:
        """The positions of the k largest |x|, ascending, as int32 to address ``out``; returns a guess for next time."""
        scratch = self.scratch(x, 2 * self.library.room_for(k), torch.int32, "candidates")
        return self.library.largest(at(x), x.numel(), k, guess, at(scratch), out)

    def top_k(self, score: Tensor, k: int) -> Tensor:
        """The packed mask of the k elements of largest magnitude."""
        if not plain(score) or score.numel() >= 2**31:
            return super().top_k(score, k)
        found, bits = torch.empty(k, dtype=torch.int32), torch.zeros((score.numel() + 7) // 8, dtype=torch.uint8)
        self.largest(score, k, 0.0, at(found))
        self.library.encode(Table(1, chosen=at(found), k=k, at=0), 1, None, at(bits))
        return bits

    def set_bits_of(self, bits: Tensor) -> Tensor:
        return self.positions(bits, 8 * bits.numel()).long()

    def positions(self, bits: Tensor, n: int, size: int | None = None) -> Tensor:
        if not bits.is_contiguous() or bits.device.type != "cpu" or n >= 2**31:
            return super().positions(bits, n, size)
        n = min(n, 8 * bits.numel())
        room = self.library.positions(at(bits), n, 0, None) if size is None else size
        out = torch.empty(room, dtype=torch.int32)
        return out[: self.library.positions(at(bits), n, room, at(out))]


def adamw_options(h: dict) -> Options:
    (beta1, beta2), sign = h["betas"], -1.0 if h["maximize"] else 1.0
    return Options(float(h["lr"]), beta1, beta2, h["eps"], h["weight_decay"], sign)


def plain(*tensors: Tensor) -> bool:
    """Whether passes can read and write these."""
    return all(x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() for x in tensors)


def sizes_of(index: Tensors) -> list[int]:
    return [0 if i is None else i.numel() for i in index]


def flattened(tensors: Tensors) -> Tensors:
    """Passes walk over memory: what is laid out otherwise is copied."""
    return [None if t is None else t.contiguous() for t in tensors]


def whole(payload: Payload) -> Sequence[Tensor]:
    """The averaged values in float32."""
    if payload.flat.dtype == torch.float32:
        return payload.parts
    return payload.body.float().split([len(part) for part in payload.parts])
