"""The operations that algorithms call, by PyTorch's operators; other backends derive from ``Ops``.

A backend speeds an algorithm up in two ways. It overrides an operation on one tensor, such as
``adamw``. Or it registers a fused implementation of a reference function, such as a paper's
``update``, in its table ``fused``; the algorithm calls the reference by ``run`` or ``run_batched``,
and does not know which backend runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._state.bits import find_positions, make_bits, select_top_k
from .._state.blocks import BlockCodec
from .._state.bucket import Bucket
from .._state.masks import Mask, Tensors
from .._state.residuals import Residuals
from .._wire.codec import PAYLOAD_CODECS
from .._wire.payload import CACHE_ELEMENTS, Payload, Scratch, block_size
from .._wire.requests import RequestGenerator, RunBatched
from . import reference

WIDTH = 65536  # elements of a norm that are added up side by side
FEW = 4 * WIDTH  # elements whose norm a CPU computes in float64 at once
HYPER = ("betas", "eps", "weight_decay", "maximize")
Group = dict[str, Any]
Positions = Sequence[Tensor | None]  # None: everywhere
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


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
    ``keep_unsent`` updates residuals. The update's side: ``adamw``, ``adams``.
    Selection: ``top_k_mask``, ``top_k_positions``. Fused implementations: ``run``, ``run_batched``.
    """

    name = "torch"
    reason = ""  # why it was chosen
    automatic = False  # chosen by itself, not by name
    fused: Mapping[str, Fused] = {}  # by the ``reference_key`` of what they replace
    codecs = PAYLOAD_CODECS  # of payloads
    blocks = BlockCodec()  # of state in 8 bits

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
        fused = self._find_fused(reference, bucket)
        if fused is None or fused.is_batched:
            return reference(bucket, self, *args, **options)
        result: Result = fused.run(bucket, self, *args, **options)
        return result

    def run_batched(
        self,
        reference: Callable[Concatenate[Bucket, Any, Rest], Result],
        bucket: Bucket,
        *args: Rest.args,
        **options: Rest.kwargs,
    ) -> RequestGenerator[Result]:
        """Do the same after ``Agree`` or a post-commit exchange: as ``yield from``. One launch may
        serve all buckets.
        """
        fused = self._find_fused(reference, bucket)
        if fused is None:
            return reference(bucket, self, *args, **options)
        result: Result
        if fused.is_batched:
            result = yield RunBatched(fused, self, (bucket, *args))
        else:
            result = fused.run(bucket, self, *args, **options)
        return result

    def _find_fused(self, reference: Callable[..., Any], bucket: Bucket) -> Fused | None:
        fused = self.fused.get(reference_key(reference))
        return fused if fused is not None and fused.supports(self, bucket) else None

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
        adds_residuals: bool = False,
        scale: float = 1.0,
        negate: bool = False,
    ) -> Payload:
        """Return the bucket's payload: ``grads``, or minus them, plus ``scale`` times the residuals
        if those are added, on the mask.

        ``Mask(bucket)`` sends all elements.
        """
        like = torch.empty(0, dtype=bucket.compute_dtype, device=bucket.device)
        gradient_flags, positions = flag_gradients(grads, like), mask.positions
        payload = bucket.make_payload(mask.sizes, bucket.group.get("payload_dtype"))
        payload.header.copy_(gradient_flags)
        parts = payload.unrounded_parts
        absent: list[Tensor] = []
        to: list[Tensor] = []
        values: list[Tensor] = []
        for part, g, index in zip(parts, grads, positions, strict=True):
            if g is None:
                absent.append(part)
            elif index is not None and part.dtype == g.dtype:
                torch.index_select(g.reshape(-1), 0, index, out=part)
            else:
                g = g.reshape(-1)
                to.append(part)
                values.append(g if index is None else g.index_select(0, index))
        if absent:
            torch._foreach_zero_(absent)
        if to:
            torch._foreach_copy_(to, values)
        if negate:
            payload.unrounded_body.neg_()
        if adds_residuals:
            Residuals(bucket).add_to([*enumerate(parts)], scale, positions)
        return payload.round()

    def write_header(self, payload: Payload, grads: Tensors) -> None:
        """Write a flag for each tensor into the header (see ``flag_gradients``)."""
        payload.header.copy_(flag_gradients(grads, payload.header))

    def decode(self, values: Sequence[Tensor], positions: Positions, out: Sequence[Tensor]) -> None:
        """Write averaged values at these positions (None: everywhere) to each ``out``, and 0
        elsewhere.
        """
        sparse = [x for x, index in zip(out, positions, strict=True) if index is not None]
        if sparse:
            torch._foreach_zero_(sparse)
        self.write_at(out, positions, values)

    def write_at(
        self, xs: Sequence[Tensor], positions: Positions, values: Sequence[Tensor] | None
    ) -> None:
        """Write to each x its ``values``, None for zeros, at its positions, or everywhere."""
        dense: list[tuple[Tensor, Tensor]] = []
        cleared: list[Tensor] = []
        new_values: Tensors = [None] * len(xs) if values is None else [*values]
        for x, index, new in zip(xs, positions, new_values, strict=True):
            x = x.view(-1)
            if index is not None:
                index = self.as_int64(index)
                x.scatter_(0, index, 0 if new is None else new.to(x.dtype))
            elif new is None:
                cleared.append(x)
            elif x.data_ptr() != new.data_ptr() or x.dtype != new.dtype:
                dense.append((x, new))
        if dense:
            torch._foreach_copy_([x for x, _ in dense], [new for _, new in dense])
        if cleared:
            torch._foreach_zero_(cleared)

    def keep_unsent(
        self, bucket: Bucket, indices: list[int], grads: Tensors, mask: Mask, mean: Payload
    ) -> None:
        """Add gradients to the residuals of these tensors, and set residuals on the mask to the
        payload's rounding errors, or 0.
        """
        for batch in Residuals(bucket).batches(indices, write=True):
            positions, es = [mask.positions[i] for i, _ in batch], [e for _, e in batch]
            unsent = [
                (e, g)
                for (i, e), index in zip(batch, positions, strict=True)
                if index is not None and (g := grads[i]) is not None
            ]
            if unsent:
                torch._foreach_add_([e for e, _ in unsent], [g for _, g in unsent])
            errors = mean.rounding_error_parts
            self.write_at(es, positions, [errors[i] for i, _ in batch] if errors else None)

    def as_int64(self, index: Tensor) -> Tensor:
        """Return positions as int64, which scatter requires, in scratch memory."""
        if index.dtype == torch.int64:
            return index
        return self.scratch(index, index.numel(), torch.int64).copy_(index)

    # Updates

    def update_adamw(self, bucket: Bucket, indices: list[int], averages: list[Tensor]) -> None:
        """Do one AdamW step of a bucket's tensors, which count it already, by their averages."""
        state, weights = bucket.state, bucket.weights
        columns = (weights, state["exp_avg"], state["exp_avg_sq"], state["step"])
        w, m, v, steps = ([column[i] for i in indices] for column in columns)
        self.adamw(bucket.group, w, averages, m, v, steps)
        bucket.publish_masters(indices)

    def update_adams(self, bucket: Bucket, indices: list[int], averages: list[Tensor]) -> None:
        """Do the same with AdamS, of averages that are negated when maximizing."""
        weights, momenta, steps = bucket.weights, bucket.state["exp_avg"], bucket.state["step"]
        for i, g in zip(indices, averages, strict=True):
            self.adams(bucket.group, weights[i], g, momenta[i], steps[i])
        bucket.publish_masters(indices)

    def expand_average(
        self, bucket: Bucket, values: list[Tensor], positions: Tensor | None, dtype: torch.dtype
    ) -> list[Tensor]:
        """Return what this rank owns of each tensor's average, as vectors for this step.

        ``values``: these vectors; with ``positions`` those of dense tensors, and last what is at
        these among the rank's own bits of the mask, with 0 elsewhere.
        """
        if positions is None:
            return [x.to(dtype) for x in values]
        layout, (*dense_values, at_positions) = bucket.shards, values
        begin, end = layout.own_bits
        average = bucket.get_memory("average", end - begin, dtype).zero_()
        average.index_copy_(0, positions, at_positions.to(dtype))
        dense = iter(dense_values)
        parts = layout.own_parts_of_mask
        return [next(dense).to(dtype) if at is None else average[slice(*at)] for at in parts]

    def compute_adamw(
        self,
        bucket: Bucket,
        indices: list[int],
        weights: list[Tensor],
        values: list[Tensor],
        positions: Tensor | None,
        out: Sequence[list[Tensor]],
    ) -> None:
        """Write to ``out`` weights and both moments after an AdamW step of this rank's shards of
        these tensors, by an average (see ``expand_average``); all else stays as it is.
        """
        state, dtype = bucket.state, weights[0].dtype
        averages = self.expand_average(bucket, values, positions, dtype)
        for to, column in zip(out, (weights, state["exp_avg"], state["exp_avg_sq"]), strict=True):
            torch._foreach_copy_(to, [column[i] for i in indices])
        steps = torch.stack([state["step"][i] for i in indices]).add_(1).unbind()
        w, m, v = out
        self.adamw(bucket.group, w, [averages[i] for i in indices], m, v, steps)

    def adamw(
        self,
        group: Group,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
    ) -> None:
        """Do one AdamW step of tensors of one dtype, in place; ``steps`` already count it."""
        hyper = {name: group[name] for name in HYPER} | {"lr": float(group["lr"])}
        plain: list[tuple[Tensor, ...]] = []
        for row in zip(weights, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
            if row[0].is_contiguous() and row[1].is_contiguous():
                plain.append(row)
            else:
                reference.adamw_(*row[:4], float(row[4]), **hyper)
        if plain:
            beta1, beta2 = hyper.pop("betas")
            hyper |= {"beta1": beta1, "beta2": beta2, "amsgrad": False}
            hyper["maximize"] = bool(group["maximize"])  # torch's own steps take any value
            w, g, m, v, counts = (list(column) for column in zip(*plain, strict=True))
            torch._fused_adamw_(w, g, m, v, [], counts, **hyper)

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
        beta1, beta2 = group["betas"]
        hyper: Group = {
            "lr": float(group["lr"]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"] if decay else 0.0,
        }
        is_contiguous = w.is_contiguous() and g.is_contiguous() and m.is_contiguous()
        if not (clip == 1 and is_contiguous):
            hyper["betas"] = group["betas"]
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

    def top_k_positions(self, x: Tensor, k: int) -> Tensor:
        """Return the positions, ascending, of exactly the k largest |x|, int64; of all nonzero
        elements where there are fewer.
        """
        return select_top_k(x, k, self._scratch)

    def top_k_of_each(self, parts: Sequence[Tensor], ks: Sequence[int]) -> Tensor:
        """Return the positions of the k largest of each vector, in vectors that are contiguous in
        memory.

        On a CPU positions ascend, and zeros are left out where there are fewer nonzero elements. On
        other devices exactly k of each are selected, in any order: the host does not wait.
        """
        starts = [0, *accumulate(len(part) for part in parts)]
        if parts[0].device.type == "cpu":
            rows = zip(parts, ks, starts, strict=False)
            return torch.cat([self.top_k_positions(x, k).add_(start) for x, k, start in rows])
        magnitudes = torch._foreach_abs(list(parts))
        selected = [
            magnitude.topk(min(k, len(magnitude)), sorted=False).indices
            for magnitude, k in zip(magnitudes, ks, strict=True)
        ]
        torch._foreach_add_(selected, starts[:-1])
        return torch.cat(selected)

    def read_union(
        self, bits: Tensor, values: Tensor, at: Tensor, union: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the positions of all set bits (``union``, if known), ascending, int64, and a
        number for each: these values where they are ``at``, with zeros elsewhere or not, and 0.
        """
        positions = find_positions(bits) if union is None else union
        memory = self.scratch(values, 8 * len(bits), use="x").index_fill_(0, positions, 0)
        return positions, memory.scatter_(0, at, values).index_select(0, positions)


# Whether gradients are finite


def flag_gradients(grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Return for every gradient 1 if it and its squared norm are finite, NaN if they are not (a
    second moment could not hold it), 0 if there is no gradient.

    All backends skip a step by this rule. The square is of the gradient's dtype, at least float32:
    one element of 1e20 is too large, 1e18 is not, and many of 1e18 are.
    """
    given = [g for g in grads if g is not None]
    if not given:
        return like.new_zeros(len(grads))
    dtype = torch.promote_types(given[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(given, 2, dtype=dtype))
    gradient_flags = norms.mul_(0).add_(1).to(like.dtype)
    if len(given) == len(grads):
        return gradient_flags
    rest, zero = iter(gradient_flags.unbind()), gradient_flags.new_zeros(())
    return torch.stack([zero if g is None else next(rest) for g in grads])


# Squared norms


def squared_norm(x: Tensor) -> Tensor:
    """Return |x|^2, in float64."""
    return stacked_squared_norms([x])[0]


def total_norm(xs: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all tensors together, on the device of the first, as
    ``torch.nn.utils.get_total_norm``; in float32 where the norm of float16 tensors overflows.
    """
    norm: Tensor = torch.nn.utils.get_total_norm(xs)
    # in this order: the host waits for float16 tensors only
    if all(x.dtype != torch.float16 for x in xs) or norm.isfinite():
        return norm
    norms = [
        torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in xs
    ]
    norm = torch.linalg.vector_norm(torch.stack([norm.to(xs[0].device) for norm in norms]))
    return norm


def reproducible_squared_norm(x: Tensor) -> Tensor:
    """Return |x|^2 with the same bits for any number of threads and any processor, for what scales
    an update.

    Elements a fixed distance apart are added up in turn, in float32, then halves to halves, in
    float64: elementwise additions and products, which every machine rounds alike.
    """
    if x.device.type != "cpu":
        return squared_norm(x)
    for dtype in (torch.promote_types(x.dtype, torch.float32), torch.float64):
        sums = torch.zeros(min(WIDTH, x.numel()), dtype=dtype, device=x.device)
        memory = torch.empty_like(sums)
        for part in x.split(WIDTH):
            wide, square = part.to(dtype), memory[: part.numel()]
            # not addcmul: a fused one rounds once, not twice
            sums[: part.numel()].add_(torch.mul(wide, wide, out=square))
        sums, n = sums.double(), sums.numel()
        while n > 1:
            half = (n + 1) // 2
            sums[: n - half].add_(sums[half:n])
            n = half
        total = sums[:1].sum()
        if total.isfinite():
            break
    return total


def squared_norms(xs: Sequence[Tensor], reproducible: bool = False) -> list[Tensor]:
    """Return |x|^2 of each, in float64; on one device in a few launches for all."""
    if len({x.device for x in xs}) > 1:
        return [squared for x in xs for squared in stacked_squared_norms([x], reproducible)]
    return list(stacked_squared_norms(xs, reproducible).unbind()) if xs else []


def stacked_squared_norms(xs: Sequence[Tensor], reproducible: bool = False) -> Tensor:
    """Return |x|^2 of each tensor, all on one device, as one vector in float64."""
    if xs[0].device.type == "cpu":
        if reproducible:
            return torch.stack([reproducible_squared_norm(x).double() for x in xs])
        if sum(x.numel() for x in xs) > FEW:
            return squared_norms_on_cpu(xs)
    # a look at float32 results would cost more than float64
    if len(xs) == 1:
        norm: Tensor = torch.linalg.vector_norm(xs[0], dtype=torch.float64)
        return norm.square_().view(1)
    return torch.stack(torch._foreach_norm(list(xs), 2, dtype=torch.float64)).square_()


def squared_norms_on_cpu(xs: Sequence[Tensor]) -> Tensor:
    """Return |x|^2 of each: sums of parts in float32, which are added up in float64; all of it in
    float64 where float32 overflows.
    """
    parts = [x.reshape(-1).split(WIDTH) for x in xs]
    flat = [part for of_one in parts for part in of_one]
    dtype = torch.promote_types(flat[0].dtype, torch.float32)
    squares = torch.stack(torch._foreach_norm(flat, 2, dtype=dtype)).double().square_()
    total = squares.sum()
    if not math.isfinite(total.item()):
        squares = torch.stack(torch._foreach_norm(flat, 2, dtype=torch.float64)).square_()
        total = squares.sum()
    if len(flat) == len(xs):
        return squares
    if len(xs) == 1:
        return total.view(1)
    numbers = [i for i, of_one in enumerate(parts) for _ in of_one]
    at = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return squares.new_zeros(len(xs)).index_add_(0, at, squares)


# Clipping


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor on a gradient of this norm, as in ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def scale_(x: Tensor, factor: float) -> None:
    """Multiply ``x`` by ``factor``, in place. (``_foreach_mul_`` rounds the factor to bfloat16.)"""
    if factor != 1:
        x.mul_(factor)


def scale_all_(xs: list[Tensor], factor: float) -> None:
    """Multiply every tensor by ``factor``, in place."""
    if factor != 1 and xs:
        torch._foreach_mul_(xs, factor)
