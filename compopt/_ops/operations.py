"""The operations that algorithms call, by PyTorch's operators; other backends derive from ``Ops``.

A backend speeds an algorithm up in two ways. It overrides an operation on one tensor, such as
``adamw``. Or it registers a fused implementation of a reference function, such as a paper's
``update``, in its table ``fused``; the algorithm calls the reference by ``run`` or ``run_batched``,
and does not know which backend runs.

``Engine`` has one for all buckets, ``engine.ops``, and algorithms get it as ``ops``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
from .._wire.payload import CACHE_ELEMENTS, Payload, Scratch, choose_block_size
from .._wire.requests import RequestGenerator, RunBatched
from .._wire.warning import warn_on_rank_0

HYPER = ("betas", "eps", "weight_decay", "maximize")
Group = dict[str, Any]
Positions = Sequence[Tensor | None]  # None: everywhere
Rest = ParamSpec("Rest")
Result = TypeVar("Result")
log = logging.getLogger("compopt")


# Choices of a backend for types of device ("cuda", "cpu", ...); the last one counts.
# ``compopt._backends``, which stands above the methods, adds its own.
backend_choices: list[Callable[[set[str]], Ops]] = [lambda devices: Ops()]


def choose_backend(devices: set[str]) -> Ops:
    """Return the backend for parameters on these types of device."""
    return backend_choices[-1](devices)


def fall_back_to_torch(rank: int) -> Ops:
    """Return PyTorch's operators, where ranks have chosen different backends by themselves."""
    backend = Ops()
    backend.automatic, backend.reason = True, "torch: ranks had chosen different backends"
    warn_on_rank_0(
        "ranks have chosen different backends (compiled passes or a processor differ), so all take "
        "PyTorch's operators: COMPOPT_BACKEND=native or torch on all ranks says which.",
        rank,
    )
    log.info("backend: %s", backend.reason)
    return backend


class Fused(NamedTuple):
    """A backend's implementation of a reference function, for the buckets it ``supports``.

    It has the reference's arguments. With ``is_batched`` it is called once for all buckets, with
    the backend and the arguments of each bucket in a list, and returns the list of results.
    """

    supports: Callable[[Any, Bucket], bool]
    run: Callable[..., Any]
    is_batched: bool = False


class Ops:
    """The torch backend: PyTorch's operators, ``torch._fused_adamw_`` among them.

    The reducer's side: ``encode`` makes a bucket's payload, ``decode`` reads the average, and
    ``keep_unsent`` updates residuals. The update's side: ``adamw``, ``adams``.
    Selection: ``top_k_mask``, ``top_k_positions``. Fused implementations: ``run``, ``run_batched``.
    """

    name = "torch"
    reason = ""  # why it was chosen
    automatic = False  # chosen by itself, not by name
    fused: Mapping[Callable[..., Any], Fused] = {}  # by the reference functions that they replace
    codecs = PAYLOAD_CODECS  # of payloads
    blocks = BlockCodec()  # of state in 8 bits

    def __init__(self) -> None:
        self._scratch = Scratch()

    def run(
        self,
        function: Callable[Concatenate[Bucket, Any, Rest], Result],
        bucket: Bucket,
        *args: Rest.args,
        **options: Rest.kwargs,
    ) -> Result:
        """Call ``function(bucket, self, *args)``, or its fused implementation if that supports the
        bucket. One that serves all buckets at once is left to ``run_batched``.
        """
        fused = self._find_fused(function, bucket)
        if fused is None or fused.is_batched:
            return function(bucket, self, *args, **options)
        result: Result = fused.run(bucket, self, *args, **options)
        return result

    def run_batched(
        self,
        function: Callable[Concatenate[Bucket, Any, Rest], Result],
        bucket: Bucket,
        *args: Rest.args,
        **options: Rest.kwargs,
    ) -> RequestGenerator[Result]:
        """Call it after ``Agree`` or a post-commit exchange, by ``yield from``. One launch may
        serve all buckets.
        """
        fused = self._find_fused(function, bucket)
        if fused is None:
            return function(bucket, self, *args, **options)
        result: Result
        if fused.is_batched:
            result = yield RunBatched(fused, self, (bucket, *args))
        else:
            result = fused.run(bucket, self, *args, **options)
        return result

    def _find_fused(self, function: Callable[..., Any], bucket: Bucket) -> Fused | None:
        fused = self.fused.get(function)
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
        """Do one AdamS step of them, by averages that are negated when maximizing."""
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
                adamw_(*row[:4], float(row[4]), **hyper)
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
            return adams_(w, g, m, float(step), clip=clip, **hyper)
        hyper |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        # separate memory: g may be scratch memory too
        block = choose_block_size(m.view(-1), on_cpu=CACHE_ELEMENTS)
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
        """Return the positions of all set bits (``union``, if known), ascending, int64, and for
        each the value that is ``at`` it, 0 if there is none.
        """
        positions = find_positions(bits) if union is None else union
        return positions, self.look_up(positions, values, at, len(bits))

    def look_up(self, wanted: Tensor, values: Tensor, at: Tensor, mask_bytes: int) -> Tensor:
        """Return for each position in a mask the value that is ``at`` it, 0 if there is none."""
        found = self.mask_scratch(values, mask_bytes).index_fill_(0, wanted, 0)
        return found.scatter_(0, at, values).index_select(0, wanted)

    def mask_scratch(self, like: Tensor, mask_bytes: int) -> Tensor:
        """Return memory for a number for each bit of a mask; contents are undefined."""
        return self.scratch(like, 8 * mask_bytes, use="mask")


# AdamW and AdamS in plain PyTorch, one tensor at a time: the specification of all backends


def adamw_(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """Do one AdamW step in place, ``step`` counted from 1 (Loshchilov and Hutter 2019; Radius,
    Algorithm 2).
    """
    g = -g if maximize else g
    w.mul_(1 - lr * weight_decay)
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    denominator = (v.sqrt() / (1 - betas[1] ** step) ** 0.5).add_(eps)
    w.addcdiv_(m, denominator, value=-lr / (1 - betas[0] ** step))


def update_magnitudes(group: Group, w: Tensor, m: Tensor, v: Tensor, step: Tensor) -> Tensor:
    """Return the magnitude of what AdamW subtracts, over lr: ``mhat / (sqrt(vhat) + eps) +
    weight_decay * w`` (Radius, Algorithm 2, line 5). The host does not wait for ``step``.
    """
    beta1, beta2 = group["betas"]
    steps = step.double().clamp(min=1)
    first, second = 1 - beta1**steps, 1 - beta2**steps
    denominator = (v.sqrt() / second.sqrt()).add_(group["eps"])
    return m.div(denominator).div_(first).add_(w, alpha=group["weight_decay"]).abs_()


def adams_(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    step: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: float = 1.0,
) -> None:
    """Do one AdamS step in place, ``step`` counted from 1 (SCAPE, equation 2): v is made of g and
    the *previous* m.

    ``clip`` multiplies the gradient in v alone (SCAPE's line 18 as printed).
    """
    first, second = 1 - betas[0] ** step, 1 - betas[1] ** step
    old, new = betas[1] / second, (1 - betas[1]) / second  # factors of m^2 and of g^2
    denominator = m.square().mul_(old).addcmul_(g, g, value=new * clip**2).sqrt_().add_(eps)
    m.lerp_(g, 1 - betas[0])
    w.mul_(1 - lr * weight_decay)
    w.addcdiv_(m, denominator, value=-lr / first)


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
