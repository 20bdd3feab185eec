"""The operations that algorithms call, by PyTorch's operators; other backends derive from ``Ops``.

A backend speeds an algorithm up in two ways. It overrides an operation on one tensor, such as
``adamw``. Or it registers a fused implementation of a reference function, such as a paper's
``update``, in its table ``fused``; the algorithm calls the reference by ``run``, or requests it by
``RunBatched``, and does not know which backend runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._state.bits import find_positions, make_bits, positions_dtype, unpack_bits
from .._state.buckets import Bucket
from .._state.masks import Mask, Tensors
from .._wire import quantization
from .._wire.payload import CACHE_ELEMENTS, Payload, Scratch, block_size
from .._wire.quantization import QuantizedMean
from . import norms, reference

HYPER = ("betas", "eps", "weight_decay", "maximize")
Group = dict[str, Any]
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


@dataclass(frozen=True)
class AdamWTensors:
    """Contiguous tensors of one dtype, which an AdamW step reads and updates.

    ``steps`` are those before it, one for each tensor.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]


class Fused(NamedTuple):
    """A backend's implementation of a reference function, for the buckets it ``supports``.

    It has the reference's arguments. With ``is_batched`` it is called once for all buckets, with
    the backend and the arguments of each bucket in a list, and returns the list of results.
    """

    supports: Callable[[Any, Bucket], bool]
    run: Callable[..., Any]
    is_batched: bool = False


@cache
def reference_key(reference: Callable[..., Any]) -> str:
    """Return the key of a reference function in ``Ops.fused``: "radius.update" is ``update`` of
    ``compopt/radius.py``.
    """
    return f"{reference.__module__.removeprefix('compopt.')}.{reference.__qualname__}"


class Ops:
    """The torch backend: PyTorch's operators, ``torch._fused_adamw_`` among them.

    The reducer's side: ``encode`` makes a bucket's payload, ``decode`` reads the average, and
    ``write_at`` and ``clear_at`` change residuals. The update's side: ``adamw``, ``adams``.
    Selection: ``top_k_mask``, ``top_k_positions``, ``positions``. Fused implementations: ``run``,
    ``find_batched``.
    """

    name = "torch"
    reason = ""  # why it was chosen
    automatic = False  # chosen by itself, not by name
    fused: Mapping[str, Fused] = {}  # by the ``reference_key`` of what they replace

    def __init__(self) -> None:
        self._scratch = Scratch()

    def run(
        self,
        reference: Callable[Concatenate[Bucket, Any, Rest], Result],
        bucket: Bucket,
        *args: Rest.args,
        **options: Rest.kwargs,
    ) -> Result:
        """Call ``reference(bucket, self, *args)``, or its fused implementation if that supports the
        bucket.
        """
        fused = self.fused.get(reference_key(reference))
        if fused is not None and not fused.is_batched and fused.supports(self, bucket):
            result: Result = fused.run(bucket, self, *args, **options)
            return result
        return reference(bucket, self, *args, **options)

    def find_batched(self, reference: Callable[..., Any], bucket: Bucket) -> Fused | None:
        """Return the implementation of ``reference`` that serves all buckets in one launch."""
        fused = self.fused.get(reference_key(reference))
        if fused is None or not fused.is_batched or not fused.supports(self, bucket):
            return None
        return fused

    def scratch(
        self, like: Tensor, n: int, dtype: torch.dtype | None = None, use: str = ""
    ) -> Tensor:
        """Return n elements of memory beside ``like``, contents undefined, valid until the next
        call for the same ``use``.
        """
        return self._scratch(use, n, dtype or like.dtype, like.device)

    # Payloads

    def encode(
        self,
        bucket: Bucket,
        grads: Tensors,
        mask: Mask,
        residuals: Iterable[Tensor | None] | None = None,
        scale: float = 1.0,
        negate: bool = False,
    ) -> Payload:
        """Return the bucket's payload: ``grads``, or minus them, plus ``scale * residuals``, on the
        mask.

        ``Mask(bucket)`` sends all elements.
        """
        payload = empty_payload(bucket, mask)
        self.write_header(payload, grads)
        rows = zip(
            payload.unrounded_parts,
            grads,
            mask.positions,
            residuals or [None] * len(grads),
            strict=True,
        )
        for part, g, index, residual in rows:
            if g is None:
                part.zero_()
            elif index is None:
                part.copy_(g.reshape(-1))
            elif part.dtype == g.dtype:
                torch.index_select(g.reshape(-1), 0, index, out=part)
            else:
                part.copy_(g.reshape(-1).index_select(0, index))
            if negate:
                part.neg_()
            if residual is not None:
                residual = residual.view(-1)
                selected = residual if index is None else residual.index_select(0, index)
                part.add_(selected, alpha=scale)
        return payload.round()

    def write_header(self, payload: Payload, grads: Tensors) -> None:
        """Write a mark for each tensor into the header (see ``norms.gradient_marks``)."""
        payload.header.copy_(norms.gradient_marks(grads, payload.header))

    def add_residuals(
        self, bucket: Bucket, grads: Tensors, residuals: Tensors, out: Tensors
    ) -> Tensor:
        """Write ``grad + residual`` into every ``out``; return the marks of all gradients."""
        rows = [
            (sums, residual.reshape(sums.shape), None if g is None else g.reshape(sums.shape))
            for g, residual, sums in zip(grads, residuals, out, strict=True)
            if sums is not None and residual is not None
        ]
        # On a CPU one after the other: each stays in the cache.
        for batch in [rows] if bucket.device.type != "cpu" else [[row] for row in rows]:
            torch._foreach_copy_(
                [sums for sums, _, _ in batch], [residual for _, residual, _ in batch]
            )
            pairs = [(sums, g) for sums, _, g in batch if g is not None]
            if pairs:
                torch._foreach_add_([sums for sums, _ in pairs], [g for _, g in pairs])
        wide = torch.promote_types(bucket.dtype, torch.float32)
        return norms.gradient_marks(grads, torch.empty(0, dtype=wide, device=bucket.device))

    def decode(self, values: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
        """Return averaged values at ``index`` (None: everywhere) as a dense tensor like ``like``, 0
        elsewhere, in scratch memory.
        """
        if index is None and values.dtype == like.dtype:
            return values.view(like.shape)
        dense = self.scratch(like, like.numel())
        if index is None:
            dense.copy_(values)
        else:
            dense.zero_().scatter_(0, self.as_int64(index), values.to(dense.dtype))
        return dense.view(like.shape)

    def write_at(self, x: Tensor, index: Tensor | None, values: Tensor) -> None:
        """Write ``values`` to ``x`` at ``index``, or everywhere."""
        if index is None:
            x.view(-1).copy_(values)
        else:
            x.view(-1).scatter_(0, self.as_int64(index), values.to(x.dtype))

    def clear_at(self, x: Tensor, index: Tensor) -> None:
        """Set ``x`` to 0 at ``index``."""
        x.view(-1).scatter_(0, self.as_int64(index), 0)

    def as_int64(self, index: Tensor) -> Tensor:
        """Return positions as int64, which scatter requires, in scratch memory."""
        if index.dtype == torch.int64:
            return index
        return self.scratch(index, index.numel(), torch.int64).copy_(index)

    # int8, int4 and int2

    def quantized_mean_factory(
        self, bucket: Bucket
    ) -> Callable[[Payload, int, int], QuantizedMean] | None:
        """Return a function that makes the mean of the bucket's quantized payloads; None: that of
        ``QuantizedMean``.
        """
        return None

    quantize, dequantize = (
        staticmethod(quantization.quantize_chunk),
        staticmethod(quantization.dequantize_chunk),
    )

    # Updates

    def adamw(self, group: Group, w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> None:
        """Do one AdamW step in place; ``step`` already counts it."""
        hyper = {name: group[name] for name in HYPER}
        if not (w.is_contiguous() and g.is_contiguous()):
            return reference.adamw_(w, g, m, v, float(step), lr=float(group["lr"]), **hyper)
        adamw_batched_(group, AdamWTensors([w], [g], [m], [v], [step]))

    def adamw_each(self, group: Group, tensors: AdamWTensors) -> None:
        """Do one AdamW step of every tensor in place; ``steps`` already count it."""
        lists = tensors.weights, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.steps
        if all(x.is_contiguous() for some in lists[:2] for x in some):
            return adamw_batched_(group, tensors)
        for w, g, m, v, step in zip(*lists, strict=True):
            self.adamw(group, w, g, m, v, step)

    def compute_adamw_weights(self, group: Group, tensors: AdamWTensors, out: list[Tensor]) -> None:
        """Write to ``out`` the weights after an AdamW step, and nothing else."""
        old = tensors.weights, tensors.exp_avgs, tensors.exp_avg_sqs
        m = self._scratch_like(tensors.exp_avgs, "exp_avg ahead")
        v = self._scratch_like(tensors.exp_avg_sqs, "exp_avg_sq ahead")
        for to, source in zip((out, m, v), old, strict=True):
            torch._foreach_copy_(to, source)
        steps = list(torch._foreach_add(tensors.steps, 1))
        adamw_batched_(group, AdamWTensors(out, tensors.grads, m, v, steps))

    def update_adamw_moments(self, group: Group, tensors: AdamWTensors) -> None:
        """Update moments and step counts as an AdamW step does, and leave the weights."""
        torch._foreach_add_(tensors.steps, 1)
        weights = self._scratch_like(tensors.weights, "ahead")
        adamw_batched_(group, replace(tensors, weights=weights))

    def _scratch_like(self, tensors: list[Tensor], use: str) -> list[Tensor]:
        """Return scratch memory for vectors of these sizes."""
        sizes = [x.numel() for x in tensors]
        return list(self.scratch(tensors[0], sum(sizes), use=use).split(sizes))

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
        """Do one AdamS step in place; ``step`` already counts it.

        It is an AdamW step whose second moment before it is the square of the first; on a CPU in
        blocks that stay in the cache.
        """
        (beta1, beta2), correction = group["betas"], group["bias_correction"]
        hyper: Group = {
            "lr": float(group["lr"]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"] if decay else 0.0,
        }
        is_contiguous = w.is_contiguous() and g.is_contiguous() and m.is_contiguous()
        if not (clip == 1 and correction == "scape" and is_contiguous):
            hyper |= {"betas": group["betas"], "bias_correction": correction}
            return reference.adams_(w, g, m, float(step), clip=clip, **hyper)
        hyper |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        # separate memory: g may be scratch memory too
        block = block_size(CACHE_ELEMENTS, m.view(-1))
        square = self.scratch(m, min(block, m.numel()), use="square")
        for w_, g_, m_ in zip(*(x.view(-1).split(block) for x in (w, g, m)), strict=True):
            v = torch.mul(m_, m_, out=square[: m_.numel()])
            torch._fused_adamw_([w_], [g_], [m_], [v], [], [step], **hyper)

    # Selection

    def top_k_mask(self, score: Tensor, k: int) -> Tensor:
        """Return the packed mask of the k elements of largest magnitude."""
        positions = score.reshape(-1).topk(k, sorted=False).indices
        return make_bits(positions, (score.numel() + 7) // 8)

    def top_k_positions(self, x: Tensor, k: int) -> Tensor | None:
        """Return the positions, ascending, of the k largest |x|, int64; None if the search for a
        threshold is cheaper.
        """
        return None

    def positions(self, bits: Tensor, n: int, size: int | None = None) -> Tensor:
        """Return the selected positions of a packed mask, ascending.

        ``size``: the number of positions, if it is known.
        """
        return unpack_bits(bits)[:n].nonzero().view(-1).to(positions_dtype([n]))

    def find_set_bits(self, bits: Tensor) -> Tensor:
        """Return the positions of all set bits, ascending, int64."""
        return find_positions(bits)


def empty_payload(bucket: Bucket, mask: Mask, marks: Sequence[float] = ()) -> Payload:
    """Return a payload for what is on the mask, with these ``marks`` in its header, if any."""
    return bucket.make_payload(mask.sizes, bucket.group.get("payload_dtype"), marks=marks)


def adamw_batched_(group: Group, tensors: AdamWTensors) -> None:
    """Do one AdamW step in one launch; ``steps`` already count it."""
    hyper = {name: group[name] for name in HYPER}
    beta1, beta2 = hyper.pop("betas")
    hyper |= {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2, "amsgrad": False}
    hyper["maximize"] = bool(group["maximize"])  # torch's own steps take any value
    weights, grads = tensors.weights, tensors.grads
    moments = tensors.exp_avgs, tensors.exp_avg_sqs
    torch._fused_adamw_(weights, grads, *moments, [], tensors.steps, **hyper)
