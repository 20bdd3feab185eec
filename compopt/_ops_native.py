"""C passes over float32 tensors on a CPU: a bucket's step reads and writes its memory once (see kernels/native).

Other tensors are left to PyTorch's operators. With several threads the tensors of a bucket are dealt to them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from ._buckets import Bucket, local
from ._masks import Deal
from ._math import kept
from ._native import Table, at, load
from ._ops import Ops, Tensors
from ._requests import Payload
from ._selection_native import NativeSelection

SPARSE = 16  # with fewer than one in so many selected, positions are read faster than bits


class NativeOps(Ops):
    """A call for all tensors of a bucket."""

    name = "native"

    def __init__(self, devices: set[str] = frozenset()) -> None:
        super().__init__(devices)
        self.library = load()

    def fuses(self, bucket: Bucket) -> bool:
        return (
            bucket.device.type == "cpu" and bucket.dtype == torch.float32 and bucket.offload is None
            and bucket.shards is None and max(bucket.lengths) < 2**31
            and all(local(p).is_contiguous() for p in bucket.params)
        )  # fmt: skip

    def over_rows(self, bucket: Bucket, call: Callable[[int, int, int], None]) -> None:
        """``call(first, last, thread)`` for all rows of a bucket, on as many threads as PyTorch has."""
        threads = min(torch.get_num_threads(), len(bucket.lengths))
        if threads == 1:
            return call(0, len(bucket.lengths), 0)
        total, cuts, done = sum(bucket.lengths), [0], 0
        for i, n in enumerate(bucket.lengths):
            done += n
            if done * threads >= total * len(cuts):
                cuts.append(i + 1)
        ranges = list(zip(cuts, [*cuts[1:-1], len(bucket.lengths)], strict=False))
        list(_pool(threads).map(lambda item: call(*item[1], item[0]), enumerate(ranges)))

    def pack(
        self, bucket: Bucket, grads: Tensors, index: Tensors | None = None, add: Tensors | None = None,
        scale: float = 1.0, negate: bool = False, bits: Tensors | None = None,
    ) -> Payload:  # fmt: skip
        add = list(add or [None] * len(grads))
        if not self.fuses(bucket):
            return super().pack(bucket, grads, index, add, scale, negate)
        index, grads = index or [None] * len(grads), flattened(grads)
        lengths = [n if i is None else i.numel() for n, i in zip(bucket.lengths, index, strict=True)]
        payload = bucket.payload(lengths, bucket.group.get("payload_dtype"))
        exact = payload.flat.dtype == torch.float32
        flat = payload.flat if exact else self.scratch(bucket.params[0], len(payload.flat), use="payload")
        mark, out, rows = at(flat), at(flat) + 4 * (len(payload.header) + len(payload.control)), []
        for r, (n, k, g, i, more) in enumerate(zip(bucket.lengths, lengths, grads, index, add, strict=True)):
            mask = bits[r] if bits and i is not None and k * SPARSE > n else None
            rows += (n, at(g), at(more), at(i) if mask is None else 0, at(mask), k, out, mark + 4 * r)
            out += 4 * k
        table = Table(rows)
        sign = -1.0 if negate else 1.0
        self.over_rows(bucket, lambda first, last, _: self.library.pack(table, first, last, sign, scale))
        if not exact:
            payload.header.copy_(flat[: len(grads)])
            payload.body.copy_(flat[-len(payload.body) :] if len(payload.body) else payload.body)
        return payload

    def radius_commit(self, bucket: Bucket, mean: Payload, phase: str, grads: Tensors, index: Tensors) -> list[Tensor]:
        """Radius, lines 10, 15, 16 and 21 to 25, for all tensors; returns line 22's masks."""
        h, state, present = bucket.group, bucket.state, bucket.present(mean)
        compressed = [c and phase != "dense" for c in bucket.compressed]
        scored = [i for i, c in enumerate(compressed) if c and phase == "resample"]
        lengths = [bucket.lengths[i] for i in scored]
        scores = self.scratch(bucket.flat["exp_avg"], sum(lengths), use="score").split(lengths)
        score, weights, own = dict(zip(scored, scores, strict=True)), bucket.weights, flattened(grads)
        values, rows = whole(mean), []
        for i, n in enumerate(bucket.lengths):
            mask = state["mask"][i] if phase == "sparse" else None
            rows += (
                n, at(weights[i]), at(state["exp_avg"][i]), at(state["exp_avg_sq"][i]),
                at(state["step"][i] if present[i] else None), at(values[i]), at(mask), 0, len(values[i]),
                at(state["residual"][i] if compressed[i] else None), at(own[i]), at(score.get(i)), 0, 0,
            )  # fmt: skip
        for i in scored:
            if not present[i]:
                moments = (state[name][i] for name in ("exp_avg", "exp_avg_sq", "step"))
                score[i].copy_(self.adamw_update(h, weights[i], *moments).abs_().view(-1))
        table, hyper = Table(rows), adamw_options(h)
        self.over_rows(bucket, lambda first, last, _: self.library.adamw(table, first, last, hyper))
        if mean.dropped is not None:  # by rounding, of what was sent: it is owed again
            for i in (i for i, here in enumerate(present) if here and bucket.compressed[i]):
                self.put(state["residual"][i], index[i], mean.dropped_parts[i])
        return [self.top_k(x, kept(h["density"], n)) for x, n in zip(scores, lengths, strict=True)]

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
        row = (w.numel(), at(w), at(m), at(v), at(step), at(g), 0, at(index), g.numel(), 0, 0, 0, ahead, moments)
        self.library.adamw(Table(row), 0, 1, adamw_options(group))

    def add_up(self, bucket: Bucket, grads: Tensors, add: Tensors, out: Tensors) -> Tensor:
        marks, rows = torch.empty(len(grads)), []
        if not plain(*(x for x in (*grads, *add, *out) if x is not None)):
            return super().add_up(bucket, grads, add, out)
        for r, (n, g, more, to) in enumerate(zip(bucket.lengths, grads, add, out, strict=True)):
            nothing = at(marks) if to is None else 0  # positions, none of them
            rows += (n, at(g), at(more), nothing, 0, 0 if to is None else n, at(to), at(marks) + 4 * r)
        table = Table(rows)
        self.over_rows(bucket, lambda first, last, _: self.library.pack(table, first, last, 1.0, 1.0))
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
        h, state, present, held = bucket.group, bucket.state, bucket.present(mean), bucket.cache["held"]
        new, weights = state["exp_avg"], [local(p) for p in bucket.params]
        own, values = flattened(bucket.grads()), whole(mean)
        if old is new and any(i is not None for i in (*index, *held)):  # places change: not in the same memory
            old = list(bucket.flat["exp_avg"].clone().split([m.numel() for m in new]))
        rows = []
        for i, (n, here) in enumerate(zip(bucket.lengths, present, strict=True)):
            step, chosen = state["step"][i] if here else None, selection.row(i) if selection and here else (0,) * 5
            rows += (
                n, at(weights[i]), at(state["residual"][i]), at(own[i]), at(held[i]), size(held[i]), at(old[i]),
                at(index[i]), size(index[i]), at(values[i]), at(new[i]), at(step), *chosen,
            )  # fmt: skip
        table, hyper = Table(rows), self.adams_options(h, factor)
        threads, most = torch.get_num_threads(), max((size(i) for i in index), default=0)
        room = selection.room if selection else 0
        scratch = at(self.scratch(bucket.flat["residual"], threads * room, torch.int32, "candidates"))
        gathered = at(self.scratch(bucket.flat["residual"], 3 * threads * most, use="gathered"))
        self.over_rows(
            bucket,
            lambda first, last, thread: self.library.scape(
                table, first, last, hyper, scratch + 4 * room * thread, gathered + 12 * most * thread, most
            ),
        )
        for i, here in enumerate(present):
            if not here:
                if new[i] is not old[i]:
                    new[i].copy_(old[i].view_as(new[i]))
                if selection:
                    selection.take_one(i, None)

    def adams(
        self, group: dict, w: Tensor, g: Tensor, m: Tensor, step: Tensor, clip: float = 1.0, decay: bool = True
    ) -> None:
        if not plain(w, g, m):
            return super().adams(group, w, g, m, step, clip, decay)
        before = array("f", [float(step) - 1])  # the pass counts it up
        row = (w.numel(), at(w), 0, 0, 0, 0, at(m), 0, 0, at(g), at(m), before.buffer_info()[0], 0, 0, 0, 0, 0)
        self.library.adams(Table(row), self.adams_options(group, clip, decay))

    @staticmethod
    def adams_options(h: dict, clip: float, decay: bool = True) -> Table:
        beta1, beta2 = h["betas"]
        alpha, weight_decay = (beta1 - 1) if h["maximize"] else (1 - beta1), h["weight_decay"] if decay else 0.0
        authors = float(h["bias_correction"] == "adams")
        return Table([float(h["lr"]), beta1, beta2, h["eps"], weight_decay, clip, alpha, authors], "d")

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
        self.library.encode(Table([at(found), k, 0]), 1, None, at(bits))
        return bits

    def set_bits_of(self, bits: Tensor) -> Tensor:
        return self.positions(bits, 8 * bits.numel()).long()

    def positions(self, bits: Tensor, n: int, size: int | None = None) -> Tensor:
        if not bits.is_contiguous() or bits.device.type != "cpu" or n >= 2**31:
            return super().positions(bits, n, size)
        size = self.library.positions(at(bits), bits.numel(), None) if size is None else size
        out = torch.empty(size, dtype=torch.int32)
        self.library.positions(at(bits), bits.numel(), at(out))
        return out


def adamw_options(h: dict) -> Table:
    (beta1, beta2), sign = h["betas"], -1.0 if h["maximize"] else 1.0
    return Table([float(h["lr"]), beta1, beta2, h["eps"], h["weight_decay"], sign], "d")


def plain(*tensors: Tensor) -> bool:
    """Whether passes can read and write these."""
    return all(x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() for x in tensors)


def size(index: Tensor | None) -> int:
    return 0 if index is None else index.numel()


def flattened(tensors: Tensors) -> Tensors:
    """Passes walk over memory: what is laid out otherwise is copied."""
    return [None if t is None else t.contiguous() for t in tensors]


def whole(payload: Payload) -> Sequence[Tensor]:
    """The averaged values in float32."""
    if payload.flat.dtype == torch.float32:
        return payload.parts
    return payload.body.float().split([len(part) for part in payload.parts])


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "compopt")
