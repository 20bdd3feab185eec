"""What algorithms compute with: PyTorch's own operators here, kernels in ``triton``, and so on.

``backends`` chooses. An algorithm packs what it sends, and commits by ``run``: the paper's own
lines, or what the back end has registered in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._state.bits import positions_of
from .._state.buckets import Bucket
from .._state.masks import Mask, Tensors
from .._wire import coded
from .._wire.quantised_mean import QuantisedMean
from .._wire.requests import Asking, Payload, Together
from .._wire.scratch import Scratch
from . import fused, math, norms

Group = dict[str, Any]
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


class Faster(NamedTuple):
    """What a back end does in place of a reference, and for which buckets."""

    takes: Callable[[Any, Bucket], bool]  # asked with the back end
    run: Callable[..., Any]  # called as the reference is


class Ops:
    """PyTorch's own operators, ``torch._fused_adamw_`` among them.

    A bucket's messages: ``pack``, ``mark`` and ``marks``, ``add_up``.
    What travels as codes: ``job``, ``encode``, ``decode``.
    A bucket's commit: ``run``.
    One tensor: ``expand``, ``put``, ``clear_``, ``adamw`` and what goes with it, ``adams``.
    What is selected: ``top_k``, ``largest_of``, ``positions``, ``set_bits_of``.
    Memory that is used again: ``scratch``.
    """

    name = "torch"
    reason = ""  # why it was chosen
    automatic = False  # chosen by itself, not by name
    # By the names that algorithms give to ``run``.
    faster: Mapping[str, Faster] = {}
    # The same for all buckets at once: called with the back end and their ``Together``.
    together: Mapping[str, Faster] = {}

    def __init__(self, devices: set[str] | frozenset[str] = frozenset()) -> None:
        self._scratch = Scratch()

    def job(self, bucket: Bucket) -> Callable[[Payload, int, int], QuantisedMean] | None:
        """What averages the bucket's int8 and int4 payloads; None: ``QuantisedMean`` itself."""
        return None

    encode, decode = staticmethod(coded.encode), staticmethod(coded.decode)

    def run(
        self,
        name: str,
        reference: Callable[Concatenate[Bucket, Any, Rest], Result],
        bucket: Bucket,
        *args: Rest.args,
        **options: Rest.kwargs,
    ) -> Result:
        """``reference(bucket, self, *args)``, or what is registered as ``name`` if it takes the
        bucket.
        """
        faster = self.faster.get(name)
        if faster is not None and faster.takes(self, bucket):
            result: Result = faster.run(bucket, self, *args, **options)
            return result
        return reference(bucket, self, *args, **options)

    def commit(
        self,
        name: str,
        reference: Callable[Concatenate[Bucket, Any, Rest], Result],
        bucket: Bucket,
        *args: Rest.args,
        **options: Rest.kwargs,
    ) -> Asking[Result]:
        """As ``run``, or for all buckets together what is registered as ``name`` in ``together``.
        Only after ``Agree``.
        """
        faster = self.together.get(name)
        if faster is None or not faster.takes(self, bucket):
            return self.run(name, reference, bucket, *args, **options)
        result: Result = yield Together(name, functools.partial(faster.run, self), bucket, args)
        return result

    def scratch(
        self, like: Tensor, n: int, dtype: torch.dtype | None = None, use: str = ""
    ) -> Tensor:
        """n elements of memory beside ``like``, contents undefined, valid until the next call for
        the same ``use``.
        """
        return self._scratch(use, n, dtype or like.dtype, like.device)

    def pack(
        self,
        bucket: Bucket,
        grads: Tensors,
        mask: Mask | None = None,
        add: Iterable[Tensor | None] | None = None,
        scale: float = 1.0,
        negate: bool = False,
    ) -> Payload:
        """The bucket's message: ``grads``, or minus them, plus ``scale * add``, on the mask."""
        mask = mask or Mask(bucket)
        payload = empty_message(bucket, mask)
        self.mark(payload, grads)
        extras = add or [None] * len(grads)
        rows = zip(payload.exact, grads, mask.positions, extras, strict=True)
        for part, g, i, extra in rows:
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
                extra = extra.view(-1)
                part.add_(extra if i is None else extra.index_select(0, i), alpha=scale)
        return payload.round()

    def mark(self, payload: Payload, grads: Tensors) -> None:
        """Write the header."""
        payload.header.copy_(self.marks(grads, payload.header))

    @staticmethod
    def marks(grads: Tensors, like: Tensor) -> Tensor:
        """For every gradient 1 if it is finite, NaN if it is not, 0 if there is none."""
        return norms.marks(grads, like)

    def add_up(self, bucket: Bucket, grads: Tensors, add: Tensors, out: Tensors) -> Tensor:
        """``out = grad + add``, flat, where there is an ``out``; returns the marks of all gradients
        (see ``mark``).
        """
        rows = [
            (to, more.reshape(-1), None if g is None else g.reshape(-1))
            for g, more, to in zip(grads, add, out, strict=True)
            if to is not None and more is not None
        ]
        # a CPU takes one after the other, which is in its cache then
        for some in [rows] if bucket.device.type != "cpu" else [[row] for row in rows]:
            torch._foreach_copy_([to for to, _, _ in some], [more for _, more, _ in some])
            there = [(to, g) for to, _, g in some if g is not None]
            if there:
                torch._foreach_add_([to for to, _ in there], [g for _, g in there])
        exact = torch.promote_types(bucket.dtype, torch.float32)
        return self.marks(grads, torch.empty(0, dtype=exact, device=bucket.device))

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
            dense.zero_().scatter_(0, self.wide(index), values.to(dense.dtype))
        return dense.view(like.shape)

    def put(self, x: Tensor, index: Tensor | None, values: Tensor) -> None:
        """``x = values`` at ``index``, or everywhere."""
        if index is None:
            x.view(-1).copy_(values)
        else:
            x.view(-1).scatter_(0, self.wide(index), values.to(x.dtype))

    def clear_(self, x: Tensor, index: Tensor) -> None:
        """``x = 0`` at ``index``."""
        x.view(-1).scatter_(0, self.wide(index), 0)

    def wide(self, index: Tensor) -> Tensor:
        """Positions as int64, which scatter wants, in scratch memory."""
        if index.dtype == torch.int64:
            return index
        return self.scratch(index, index.numel(), torch.int64).copy_(index)

    def adamw(
        self,
        group: Group,
        w: Tensor,
        g: Tensor,
        m: Tensor,
        v: Tensor,
        step: Tensor,
    ) -> None:
        """One AdamW step in place; ``step`` is already counted up."""
        fused.adamw_(group, w, g, m, v, step)

    def adamw_ahead(
        self,
        group: Group,
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
        copies = [
            self.scratch(x, x.numel(), use=use).copy_(x)
            for x, use in ((w, "w"), (m, "m"), (v, "v"))
        ]
        w, m, v = copies
        self.adamw(group, w, self.expand(g, index, w), m, v, step + 1)
        out.copy_(w)

    def adamw_moments(
        self,
        group: Group,
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
        """One AdamS step in place; ``step`` is already counted up."""
        fused.adams_(group, w, g, m, step, clip, decay, self._scratch)

    def top_k(self, score: Tensor, k: int) -> Tensor:
        """The packed mask of the k elements of largest magnitude."""
        return math.top_k(score, k)

    def largest_of(self, x: Tensor, k: int) -> Tensor | None:
        """The positions, ascending, of the k largest |x|, int64; None where looking for a threshold
        is cheaper.
        """
        return None

    def positions(self, bits: Tensor, n: int, size: int | None = None) -> Tensor:
        """The selected positions of a packed mask, ascending.

        ``size``: how many, where that is known.
        """
        return math.positions(bits, n)

    def set_bits_of(self, bits: Tensor) -> Tensor:
        """The positions of all set bits, ascending, int64."""
        return positions_of(bits)


def empty_message(bucket: Bucket, mask: Mask, marks: Sequence[float] = ()) -> Payload:
    """A payload for what is on the mask, and these ``marks`` in its header, if any."""
    return bucket.payload(mask.sizes, bucket.group.get("payload_dtype"), marks=marks)
