"""Triton kernels: a bucket's step in a few launches, without a dense copy of what was averaged, and
without waiting.

Works on CUDA tensors; on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1), to see that it
is right. What lies on other devices is left to PyTorch's operators."""

from __future__ import annotations

from collections.abc import Iterable

import compopt_kernels as kernels
import torch
from torch import Tensor

from .._state.buckets import Bucket, local, upload
from .._state.masks import Deal, Part, code_of
from .._wire.requests import Payload
from .math import kept
from .ops import HYPER, Ops, Tensors


class TritonOps(Ops):
    """The kernels of ``compopt_kernels``, a launch for all tensors of a bucket."""

    name = "triton"

    def __init__(self, devices: set[str] = frozenset()) -> None:
        super().__init__(devices)
        self.device = "cpu" if kernels.INTERPRETED else "cuda"
        kernels.pack_bits(
            torch.ones(8, dtype=torch.bool, device=self.device)
        )  # where none can be built, raise now

    def fuses(self, bucket: Bucket) -> bool:
        return bucket.device.type == self.device and bucket.offload is None

    @staticmethod
    def blocks(bucket: Bucket) -> kernels.Blocks:
        return kernels.cut(tuple(bucket.lengths), bucket.device)

    def starts(self, bucket: Bucket, bits: Tensors) -> Tensor:
        """For each block: how many elements of its tensor are selected before it."""
        blocks = self.blocks(bucket)
        return blocks.firsts if all(b is None for b in bits) else kernels.count(blocks, bits)

    def pack(
        self,
        bucket: Bucket,
        grads: Tensors,
        index: Tensors | None = None,
        add: Tensors | None = None,
        scale: float = 1.0,
        negate: bool = False,
        bits: Tensors | None = None,
    ) -> Payload:
        if not self.fuses(bucket):
            return super().pack(bucket, grads, index, add, scale, negate)
        nothing: Tensors = [None] * len(grads)
        index = index or nothing
        bits = [None if i is None else b for b, i in zip(bits or nothing, index, strict=True)]
        payload = self.message(bucket, index)
        payload.starts = self.starts(bucket, bits)
        present = [0.0 if g is None else 1.0 for g in grads]
        marks = upload(present, payload.exact[0].dtype, bucket.device)
        marks.add_(overflows(grads, marks))
        kernels.compact(
            self.blocks(bucket),
            bits,
            payload.starts,
            flattened(grads),
            payload.exact,
            marks.split(1),
            add or nothing,
            scale,
            -1.0 if negate else 1.0,
        )
        payload.header.copy_(marks)
        return payload.round()

    def radius_commit(
        self, bucket: Bucket, mean: Payload, phase: str, grads: Tensors, index: Tensors
    ) -> list[Tensor]:
        """Radius, lines 10, 15, 16 and 21 to 25, for all tensors; returns line 22's masks."""
        h, state, present = bucket.group, bucket.state, bucket.present(mean)
        compressed = [c and phase != "dense" for c in bucket.compressed]
        scores, weights, own = (
            self.scores(bucket, phase),
            contiguous_weights(bucket),
            flattened(grads),
        )
        rows = [
            kernels.AdamWRow(
                n,
                state["mask"][i] if phase == "sparse" else None,
                mean.parts[i],
                weights[i],
                state["exp_avg"][i],
                state["exp_avg_sq"][i],
                state["step"][i],
                int(present[i]),
                state["residual"][i] if compressed[i] else None,
                own[i],
                scores.get(i),
                published(bucket, i),
            )
            for i, n in enumerate(bucket.lengths)
        ]
        count_up(bucket, present)
        kernels.adamw(
            self.blocks(bucket),
            mean.starts,
            rows,
            lr=float(h["lr"]),
            **{name: h[name] for name in HYPER},
        )
        bring_back(bucket, weights, present)
        self.owe_again(bucket, mean, index)
        return self.largest(scores.values(), [kept(h["density"], len(x)) for x in scores.values()])

    @staticmethod
    def scape_selection(bucket: Bucket, ops: TritonOps, deal: Deal, rank: int) -> ScapeSelection:
        return ScapeSelection(bucket, ops, deal, rank)

    def scape_commit(
        self,
        bucket: Bucket,
        mean: Payload,
        index: Tensors,
        bits: list[Tensor],
        old: list[Tensor],
        factor: float,
        selection: ScapeSelection | None,
    ) -> None:
        """SCAPE, lines 10, 11 and 16 to 21, for all tensors, and line 15 where a selection is
        given.

        ``index``: what was exchanged (None: everything), and ``bits``, its masks; ``old``: the
        momenta, where they were held until now."""
        h, state, present = bucket.group, bucket.state, bucket.present(mean)
        new, masks = state["exp_avg"], state["mask"]
        bits = [None if i is None else b for b, i in zip(bits, index, strict=True)]
        held = [None if i is None else m for m, i in zip(masks, bucket.cache["held"], strict=True)]
        if old is new and any(
            b is not None for b in (*bits, *held)
        ):  # places change: not in the same memory
            old = list(bucket.flat["exp_avg"].clone().split([m.numel() for m in new]))
        held_starts = self.starts(bucket, held)
        if selection:
            selection.take(bucket.grads(), held, old, held_starts)
        weights, own = contiguous_weights(bucket), flattened(bucket.grads())
        count_up(bucket, present)
        rows = [
            kernels.ScapeRow(
                n,
                bits[i],
                held[i],
                old[i],
                mean.parts[i],
                weights[i],
                new[i],
                state["step"][i],
                int(present[i]),
                state["residual"][i],
                own[i],
                published(bucket, i),
            )
            for i, n in enumerate(bucket.lengths)
        ]
        kernels.scape(
            self.blocks(bucket),
            mean.starts,
            held_starts,
            rows,
            lr=float(h["lr"]),
            betas=h["betas"],
            eps=h["eps"],
            weight_decay=h["weight_decay"],
            bias_correction=h["bias_correction"],
            clip=factor,
            maximize=h["maximize"],
        )
        for i, here in enumerate(present):
            if not here and new[i] is not old[i]:
                new[i].copy_(old[i].view_as(new[i]))
        bring_back(bucket, weights, present)

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

    def positions(self, bits: Tensor, n: int, size: int | None = None) -> Tensor:
        """As the reference; where ``size`` is not known this waits for the device."""
        if bits.device.type != self.device:
            return super().positions(bits, n, size)
        blocks = kernels.cut((n,), bits.device)
        size = int(kernels.unpack_bits(bits, n).sum()) if size is None else size
        return kernels.positions(blocks, [bits], kernels.count(blocks, [bits]), [size])[0]

    def largest(self, xs: Iterable[Tensor], ks: Iterable[int]) -> list[Tensor]:
        """For each tensor the packed mask of its k elements of largest magnitude."""
        rows = [
            kernels.TopKRow(
                x.numel(),
                k,
                x,
                torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device),
            )
            for x, k in zip(xs, ks, strict=True)
        ]
        if rows:
            kernels.top_k(kernels.cut(tuple(row.n for row in rows), rows[0].x.device), rows)
        return [row.bits for row in rows]


class ScapeSelection:
    """What this rank selects of one bucket in one step: exactly as many as are wanted, so that all
    sizes are known.

    The counterpart of ``selection.Selection``, for all tensors at once.
    """

    def __init__(self, bucket: Bucket, ops: TritonOps, deal: Deal, rank: int):
        self.bucket, self.ops, self.deal = bucket, ops, deal
        self.part: Part = deal.parts[rank]
        self.bits = torch.empty(
            self.part.last - self.part.first, dtype=torch.uint8, device=bucket.device
        )

    def take(
        self,
        grads: Tensors,
        held: Tensors | None = None,
        old: Tensors | None = None,
        starts: Tensor | None = None,
    ) -> None:
        """Select, by line 10's x.

        ``old``: the momenta, at ``held``, and ``starts`` of that; None: the optimizer's.
        """
        bucket, state, pieces = self.bucket, self.bucket.state, self.part.pieces
        if held is None:
            held = [
                None if i is None else m
                for m, i in zip(state["mask"], bucket.cache["held"], strict=True)
            ]
            old, starts = state["exp_avg"], self.ops.starts(bucket, held)
        sizes = [piece.stop - piece.start for piece in pieces]
        xs = self.ops.scratch(bucket.flat["residual"], sum(sizes), use="x").split(sizes)
        own = {
            piece.tensor: (x, piece.start, piece.stop) for piece, x in zip(pieces, xs, strict=True)
        }
        rows = [
            kernels.ScapeRow(
                n,
                None,
                held[i],
                old[i],
                None,
                None,
                None,
                None,
                0,
                state["residual"][i],
                g,
                None,
                *own.get(i, (None, 0, 0)),
            )
            for i, (n, g) in enumerate(zip(bucket.lengths, flattened(grads), strict=True))
        ]
        h = bucket.group
        kernels.moment(
            self.ops.blocks(bucket), starts, rows, betas=h["betas"], maximize=h["maximize"]
        )
        wanted = [
            kernels.TopKRow(x.numel(), piece.wanted, x, self.bits[piece.at // 8 :])
            for piece, x in zip(pieces, xs, strict=True)
        ]
        if wanted:
            kernels.top_k(kernels.cut(tuple(sizes), bucket.device), wanted)

    def message(self) -> Tensor:
        """This rank's bits, coded where codes are smaller."""
        if self.deal.coded:
            return kernels.encode(self.bits, self.deal.length, *code_of(self.part))
        return torch.nn.functional.pad(self.bits, (0, self.deal.length - self.bits.numel()))

    def found(self, messages: Tensor) -> tuple[Tensors, Tensor]:
        """All ranks' selections, as positions in each tensor and as the bucket's bits."""
        deal, bucket = self.deal, self.bucket
        words = torch.zeros((deal.parts[-1].last + 3) // 4, dtype=torch.int32, device=bucket.device)
        bits = words.view(torch.uint8)[: deal.parts[-1].last]
        if deal.coded:
            rows = []
            for message, part in zip(messages, deal.parts, strict=True):
                upper, row_bits, low = code_of(part)
                rows.append(kernels.CodeRow(upper, message, 8 * part.first, row_bits, low))
            kernels.decode(rows, words)
        else:
            torch.cat(
                [m[: p.last - p.first] for m, p in zip(messages, deal.parts, strict=True)], out=bits
            )
        sizes = [0] * len(bucket.lengths)
        for piece in (piece for part in deal.parts for piece in part.pieces):
            sizes[piece.tensor] += piece.wanted
        ours = [i for i, size in enumerate(sizes) if bucket.compressed[i]]
        masks = bits.split([0 if m is None else len(m) for m in bucket.state["mask"]])
        blocks = kernels.cut(tuple(bucket.lengths[i] for i in ours), bucket.device)
        own = [masks[i] for i in ours]
        found = kernels.positions(blocks, own, kernels.count(blocks, own), [sizes[i] for i in ours])
        index = dict(zip(ours, found, strict=True))
        return [index.get(i) for i in range(len(sizes))], bits


def flattened(tensors: Tensors) -> Tensors:
    """A kernel walks over memory: what is laid out otherwise is copied."""
    return [None if t is None else t.reshape(-1) for t in tensors]


def overflows(grads: Tensors, like: Tensor) -> Tensor:
    """NaN for each gradient whose squared norm is not finite, as ``math.finite_or_nan``, else 0."""
    some = [g for g in grads if g is not None]
    wide = torch.promote_types(some[0].dtype, torch.float32) if some else like.dtype
    norms = iter(torch._foreach_norm(some, 2, dtype=wide) if some else ())
    return torch.stack(
        [like.new_zeros(()) if g is None else next(norms).to(like.dtype) for g in grads]
    ).mul_(0)


def contiguous_weights(bucket: Bucket) -> list[Tensor]:
    return [w.contiguous() for w in bucket.weights]


def published(bucket: Bucket, i: int) -> Tensor | None:
    """The parameter that the kernel brings the updated master to; None where there is no master, or
    a copy is due.
    """
    p = local(bucket.params[i].detach())
    return p if "master" in bucket.state and p.is_contiguous() else None


def bring_back(bucket: Bucket, weights: list[Tensor], present: list[bool]) -> None:
    """Copies of weights to where they came from, and masters to parameters, where the kernel could
    not.
    """
    for i, (ours, theirs) in enumerate(zip(weights, bucket.weights, strict=True)):
        if present[i] and ours.data_ptr() != theirs.data_ptr():
            theirs.copy_(ours)
        if present[i] and published(bucket, i) is None:
            bucket.publish(i)


def count_up(bucket: Bucket, present: list[bool]) -> None:
    steps = [step for step, here in zip(bucket.state["step"], present, strict=True) if here]
    if steps:
        torch._foreach_add_(steps, 1)
