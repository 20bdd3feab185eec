"""What algorithms compute with: PyTorch's own operators here, kernels in ``triton``, and so on.

``backends`` chooses. The functions here also walk the tensors of a bucket, so that an algorithm
reads as its paper does."""

from __future__ import annotations

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._state.masks import positions_of, set_bits_
from .._wire.requests import Payload
from .._wire.scratch import Scratch
from . import math

HYPER = ("betas", "eps", "weight_decay", "maximize")
# elements: a few vectors of them stay in a core's own cache between one pass and the next
BLOCK = 131072
Tensors = list[Tensor | None]


class Ops:
    """PyTorch's own operators, ``torch._fused_adamw_`` among them, with scratch memory that is used
    again.
    """

    name = "torch"
    reason = ""  # why it was chosen
    automatic = False  # chosen by itself, not by name

    def __init__(self, devices: set[str] = frozenset()) -> None:
        self._scratch = Scratch()

    def fuses(self, bucket: Bucket) -> bool:
        """Whether kernels commit this bucket as a whole (``radius_commit``)."""
        return False

    def scratch(
        self, like: Tensor, n: int, dtype: torch.dtype | None = None, use: str = ""
    ) -> Tensor:
        """n elements of memory beside ``like``, contents undefined, valid until the next call for
        the same ``use``.
        """
        return self._scratch(use, n, dtype or like.dtype, like.device)

    @staticmethod
    def message(bucket: Bucket, index: Tensors) -> Payload:
        """An empty payload for what is at ``index``, all where a tensor has none."""
        lengths = [
            n if i is None else i.numel() for n, i in zip(bucket.lengths, index, strict=True)
        ]
        return bucket.payload(lengths, bucket.group.get("payload_dtype"))

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
        """The bucket's message: ``grads``, or minus them, plus ``scale * add``, at ``index`` where
        a tensor has one.

        ``bits``: the packed masks that ``index`` was decoded from, for kernels that read these.
        """
        index = index or [None] * len(grads)
        payload = self.message(bucket, index)
        self.mark(payload, grads)
        for part, g, i, extra in zip(
            payload.exact, grads, index, add or [None] * len(grads), strict=True
        ):
            if g is None:
                part.zero_()
            elif i is None:
                part.copy_(g.reshape(-1))
            elif part.dtype == g.dtype:
                torch.index_select(g.reshape(-1), 0, i, out=part)
            else:
                math.gather(g, i, part)
            if negate:
                part.neg_()
            if extra is not None:
                part.add_(
                    extra.view(-1) if i is None else extra.view(-1).index_select(0, i), alpha=scale
                )
        return payload.round()

    @classmethod
    def mark(cls, payload: Payload, grads: Tensors) -> None:
        """Write the header."""
        payload.header.copy_(cls.marks(grads, payload.header))

    @staticmethod
    def marks(grads: Tensors, like: Tensor) -> Tensor:
        """For every gradient 1 if it is finite, NaN if it is not, 0 if there is none."""
        zero = like.new_zeros(())
        return torch.stack(
            [zero if g is None else math.finite_or_nan(g).to(zero.dtype) for g in grads]
        )

    def expand(self, values: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
        """An averaged gradient as a dense tensor like ``like``, zero where nothing was exchanged.

        Scratch memory.
        """
        if index is None and values.dtype == like.dtype:
            return values.view(like.shape)
        dense = self.scratch(like, like.numel())
        if index is None:
            dense.copy_(values)
        else:
            self.scatter(values, index, dense)
        return dense.view(like.shape)

    def scatter(self, values: Tensor, index: Tensor, out: Tensor) -> None:
        out.zero_().scatter_(0, self._wide(index), values.to(out.dtype))

    def put(self, x: Tensor, index: Tensor | None, values: Tensor) -> None:
        """``x = values`` at ``index``, or everywhere."""
        if index is None:
            x.view(-1).copy_(values)
        else:
            x.view(-1).scatter_(0, self._wide(index), values.to(x.dtype))

    def clear_(self, x: Tensor, index: Tensor) -> None:
        x.view(-1).scatter_(0, self._wide(index), 0)

    def _wide(self, index: Tensor) -> Tensor:
        """Positions as int64, which scatter wants, in scratch memory."""
        return (
            index
            if index.dtype == torch.int64
            else self.scratch(index, index.numel(), torch.int64).copy_(index)
        )

    def adamw(self, group: dict, w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> None:
        """One AdamW step in place; ``step`` is already counted up."""
        hyper = {name: group[name] for name in HYPER}
        if not (w.is_contiguous() and g.is_contiguous()):
            return math.adamw_(w, g, m, v, float(step), lr=float(group["lr"]), **hyper)
        beta1, beta2 = hyper.pop("betas")
        torch._fused_adamw_(
            [w],
            [g],
            [m],
            [v],
            [],
            [step],
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            amsgrad=False,
            **hyper,
        )

    def adamw_and_add(
        self,
        group: dict,
        w: Tensor,
        g: Tensor,
        m: Tensor,
        v: Tensor,
        step: Tensor,
        residual: Tensor,
        add: Tensor | None,
    ) -> None:
        """``adamw``, and ``residual += add`` (None: nothing): a fused back end does both in one
        pass.

        w, m and v must not depend on ``add``, not even by rounding: it is this rank's own.
        """
        if add is not None:
            residual.add_(add)
        self.adamw(group, w, g, m, v, step)

    def adamw_ahead(
        self,
        group: dict,
        w: Tensor,
        g: Tensor,
        index: Tensor | None,
        m: Tensor,
        v: Tensor,
        step: Tensor,
        out: Tensor,
    ) -> None:
        """Into ``out`` what AdamW would make of ``w`` by ``g`` at ``index``; w, m, v and ``step``
        stay as they are.
        """
        w, m, v = (
            self.scratch(x, x.numel(), use=use).copy_(x)
            for x, use in ((w, "w"), (m, "m"), (v, "v"))
        )
        self.adamw(group, w, self.expand(g, index, w), m, v, step + 1)
        out.copy_(w)

    def adamw_moments(
        self,
        group: dict,
        w: Tensor,
        g: Tensor,
        index: Tensor | None,
        m: Tensor,
        v: Tensor,
        step: Tensor,
    ) -> None:
        """Of such a step all but the update of ``w``."""
        step += 1
        self.adamw(group, self.scratch(w, w.numel(), use="w"), self.expand(g, index, w), m, v, step)

    def add_up(self, bucket: Bucket, grads: Tensors, add: Tensors, out: Tensors) -> Tensor:
        """``out = grad + add``, flat, where there is an ``out``; returns the marks of all gradients
        (see ``mark``).
        """
        for g, more, to in zip(grads, add, out, strict=True):
            if to is not None:
                to.copy_(more.reshape(-1))
            if to is not None and g is not None:
                to.add_(g.reshape(-1))
        exact = torch.promote_types(bucket.dtype, torch.float32)
        return self.marks(grads, torch.empty(0, dtype=exact, device=bucket.device))

    @staticmethod
    def adamw_update(group: dict, w: Tensor, m: Tensor, v: Tensor, step: Tensor) -> Tensor:
        """What AdamW subtracts from ``w``, over the learning rate."""
        return math.adamw_update(
            w,
            m,
            v,
            max(float(step), 1.0),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
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
        """One AdamS step in place, in blocks that stay in the cache; ``step`` is already counted
        up.

        It is an AdamW step whose second moment, before it, is the square of the first.
        """
        lr, eps, weight_decay = (
            float(group["lr"]),
            group["eps"],
            group["weight_decay"] if decay else 0.0,
        )
        plain = (
            clip == 1
            and group["bias_correction"] == "scape"
            and all(x.is_contiguous() for x in (w, g, m))
        )
        if not plain:
            names = ("betas", "bias_correction")
            hyper = {name: group[name] for name in names} | {
                "lr": lr,
                "eps": eps,
                "weight_decay": weight_decay,
            }
            return math.adams_(w, g, m, float(step), clip=clip, **hyper)
        beta1, beta2 = group["betas"]
        square = self.scratch(
            m, min(BLOCK, m.numel()), use="square"
        )  # of its own: g may be scratch too
        for w_, g_, m_ in zip(*(x.view(-1).split(BLOCK) for x in (w, g, m)), strict=True):
            v = torch.mul(m_, m_, out=square[: m_.numel()])
            torch._fused_adamw_(
                [w_],
                [g_],
                [m_],
                [v],
                [],
                [step],
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                amsgrad=False,
                weight_decay=weight_decay,
                eps=eps,
                maximize=False,
            )

    def adams_commit(self, bucket: Bucket, mean: Payload) -> None:
        """AdamS for every tensor that has a gradient on any rank."""
        state, weights = bucket.state, bucket.weights
        for i, here in enumerate(bucket.present(mean)):
            if here:
                w, step = weights[i], state["step"][i]
                step += 1
                self.adams(
                    bucket.group, w, self.expand(mean.parts[i], None, w), state["exp_avg"][i], step
                )
                bucket.publish(i)

    def scores(self, bucket: Bucket, phase: str) -> dict[int, Tensor]:
        """Memory for the sizes of the updates of each tensor, by its number, whose mask is chosen
        by them.
        """
        chosen = [i for i, c in enumerate(bucket.compressed) if c and phase == "resample"]
        lengths = [bucket.lengths[i] for i in chosen]
        flat = self.scratch(bucket.flat["exp_avg"], sum(lengths), use="score")
        return dict(zip(chosen, flat.split(lengths), strict=True))

    def owe_again(self, bucket: Bucket, mean: Payload, index: Tensors) -> None:
        """What rounding took off what was sent into the residuals, which are 0 there."""
        if mean.dropped is not None:
            for i, here in enumerate(bucket.present(mean)):
                if here and bucket.compressed[i]:
                    self.put(bucket.state["residual"][i], index[i], mean.dropped_parts[i])

    def scape_moment(
        self,
        h: dict,
        e: Tensor,
        g: Tensor | None,
        held: Tensor | None,
        m: Tensor,
        index: Tensor | None,
        selecting: bool,
        owed: bool = False,
    ) -> Tensor:
        """Make the residual ``e``, flat, SCAPE's x = b1 m + (1 - b1) g + e (line 10), where
        somebody needs it.

        ``m`` is the momentum at ``held``, ``index`` what was exchanged (None: everywhere);
        ``selecting``: this rank selects from x now; e is 0 at ``held`` unless ``owed``. Returns the
        momentum at ``index``."""
        beta1, wanted = h["betas"][0], index is not None or selecting
        if held is None:
            old = m if index is None else m.index_select(0, index)
            if wanted:
                e.add_(m, alpha=beta1)
        elif owed:  # e holds m for a moment, and shows what of it is at the mask
            held, at = held.long(), slice(None) if index is None else index.long()
            before, own = e[at].clone(), e[held]
            e[at] = 0
            e[held] = m
            old = e[at].clone()
            e[at] = before
            e[held] = own.add_(m, alpha=beta1)
        else:  # the same, but e is 0 where m is not
            held = held.long()
            before = e.clone() if index is None else e.index_select(0, index)
            e.scatter_(0, held, m)
            old = (e if index is None else e.index_select(0, index)).sub(before)
            e.scatter_(0, held, beta1 * m)
        if g is not None and wanted:
            e.view(g.shape).add_(g, alpha=(beta1 - 1) if h["maximize"] else (1 - beta1))
        return old

    def scape_update(
        self,
        h: dict,
        e: Tensor | None,
        w: Tensor,
        index: Tensor | None,
        g: Tensor,
        m: Tensor,
        step: Tensor,
        factor: float,
    ) -> None:
        """SCAPE, lines 11 and 16 to 21: what was sent is no longer owed; m and w follow the average
        ``g`` at ``index``.

        ``e`` is None for a tensor that is not compressed; ``factor`` multiplies g in v alone.
        """
        if index is None:
            if e is not None:
                e.zero_()
            return self.adams(h, w, self.expand(g, None, w), m.view(w.shape), step, factor)
        where = self._wide(index)
        e.scatter_(0, where, 0)
        if h["weight_decay"]:
            w.mul_(1 - float(h["lr"]) * h["weight_decay"])
        flat = w.reshape(-1)  # a copy where w is not contiguous
        selected = flat.index_select(0, index)
        self.adams(h, selected, g.to(w.dtype), m, step, factor, decay=False)
        flat.scatter_(0, where, selected)
        if not w.is_contiguous():
            w.copy_(flat.view(w.shape))

    def above(self, x: Tensor, t: float) -> Tensor:
        """The positions of |x| > t, ascending, int64."""
        flags = self.scratch(x, x.numel() + -x.numel() % 8, torch.bool, "flags")
        flags[x.numel() :] = False
        shrunk = self.scratch(x, min(BLOCK, x.numel()))
        for own, x_ in zip(flags[: x.numel()].split(BLOCK), x.split(BLOCK), strict=True):
            own.copy_(
                torch.hardshrink(x_, t, out=shrunk[: x_.numel()])
            )  # several times faster than a comparison
        words = flags.view(
            torch.int64
        )  # of 8 flags each: most are 0, and looking at one is looking at 8
        item = words.nonzero().view(-1)
        hit = words.index_select(0, item).view(torch.bool).nonzero().view(-1)
        return item.index_select(0, hit >> 3).bitwise_left_shift_(3).add_(hit.bitwise_and_(7))

    def largest_of(self, x: Tensor, k: int) -> Tensor | None:
        """The positions, ascending, of the k largest |x|, int64; None where looking for a threshold
        is cheaper.
        """
        return None

    def bits(self, positions: Tensor, size: int) -> Tensor:
        """``size`` bytes with the bits at these positions set."""
        bits = torch.empty(size, dtype=torch.uint8, device=positions.device)
        set_bits_(bits, positions)
        return bits

    top_k = staticmethod(math.top_k)
    set_bits_of = staticmethod(positions_of)  # their positions, int64

    def positions(self, bits: Tensor, n: int, size: int | None = None) -> Tensor:
        """The selected positions of a packed mask, ascending.

        ``size``: how many, where that is known.
        """
        return math.positions(bits, n)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor on a gradient of norm ``norm``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
