"""TAGC: transformer-aware gradient compression (Polyakov, Dukhanov and Spirin, EuroMLSys 2025),
Algorithm 1 with AdamW.

One shard of a bucket on rank n, owned by rank d; g_n is the rank's gradient of it, acc_n its
residual, D the density, 1 - the paper's sparsity::

     1  g_n <- g_n + acc_n
     2  g_n, acc_n <- the largest D of |g_n|, 0 elsewhere;  the rest of g_n
     3  index_n <- where g_n is not zero, one bit per element
     4  index <- bitwise or over ranks of index_n
     5  code_n <- compress(g_n, index)
     6  reduce(code_n) to rank d
     8  on rank d:
     9      code <- mean over ranks of code_n
    10      G <- decompress(index, code)
        G <- G * min(1, max_grad_norm / |G|);  AdamW on the shard with G
        parameters <- all shards, gathered

Line numbers are the paper's, which stops at line 10; the rest is a sharded AdamW. All shards of a
bucket go through these lines together, and buckets overlap: while one is on the wire the next is
sparsified and indexed (section 3.3).

Differences from the authors' code: the bitwise or is exact at any number of ranks (theirs adds
fields of 1 or 4 bits, which carry into their neighbours), at *most* D of each shard is
left, and nothing is estimated. Updated parameters are gathered before anything is written, so a
step is all or nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._engine.decision import StepDecision
from .._engine.options import (
    Group,
    ResidualDtype,
    TorchOptions,
    check_adam,
    check_compression,
    check_torch_options,
    dense_start_of,
    is_numeric,
    read_int8,
    require_choice,
    require_option,
    require_share,
)
from .._engine.reducer import AdamWUpdate, OwnerReducer, ReduceScatterReducer
from .._engine.stats import Stats
from .._fsdp.fsdp_backward import GatherDtype, ReducingOptimizer, step_fsdp_shards
from .._ops.norms import stacked_squared_norms
from .._ops.operations import Ops, flag_gradients
from .._state.bits import make_bits, unpack_bits
from .._state.bucket import Bucket
from .._state.layouts import Layout, Sharded
from .._state.masks import Tensors, sizes_at_density
from .._state.residuals import Residuals
from .._wire.codec import PAYLOAD_CODECS
from .._wire.groups import ProcessGroup, Ranks
from .._wire.payload import Payload, PayloadDtype
from .._wire.requests import BitOr, Phase, ReadToHost, RequestGenerator
from .sketch import Sketch
from .zero1_adamw import UpdateDtype, check_gathers, check_updates, step_zero1_shards

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The usual names of projections to queries, keys and values. The projection after the attention is
# treated as any linear layer (section 3.2).
ATTENTION = re.compile(
    r"(^|[._])"
    r"((w?(q|k|v|kv|qk|qkv)|query|key|value|query_key_value|c_attn)(_proj|_lin)?(\.weight)?"
    r"|in_proj_weight)$",
    re.IGNORECASE,
)


def tagc(bucket: Bucket, ops: Ops) -> RequestGenerator[None]:
    """Algorithm 1 with AdamW, all shards of one bucket, one step: lines 1 to 10 in
    ``UnionReducer``, the rest in ``step_zero1_shards``.
    """
    return step_zero1_shards(bucket, ops, choose_reducer(bucket, ops))


def choose_reducer(bucket: Bucket, ops: Ops) -> DenseStart | UnionReducer:
    """Return the reducer of this step: dense in the dense start, or where nothing is compressed."""
    is_dense = bucket.group["step"] < dense_start_of(bucket) or not bucket.shards.mask_bytes
    return DenseStart(bucket, ops) if is_dense else UnionReducer(bucket, ops)


class DenseStart(ReduceScatterReducer):
    """All tensors dense."""

    phase: Phase = "dense"

    def keep_unsent(self, have_gradients: list[bool]) -> None:
        self.bucket.cache["union_and_leftovers"] = None, 0
        super().keep_unsent(have_gradients)


class UnionReducer(OwnerReducer):
    """Lines 1 to 10, all shards of one bucket: sends compressed tensors at the union of the ranks'
    selections, the others dense.

    ``codec="compact"`` sends the values at the union, in its order; "sketch" encodes them.
    """

    phase: Phase = "sparse"
    selected: Selected  # by this rank's
    union: Tensor  # the positions that any rank has selected, ascending
    counts: list[int]  # how many of them each rank owns
    sketch: Sketch | None = None

    def __init__(self, bucket: Bucket, ops: Ops):
        sent_dense = [i for i, c in enumerate(bucket.compressed) if not c]
        super().__init__(bucket, ops, sent_dense, sends_residuals=False)  # which have none

    def reduce(self) -> RequestGenerator[Payload]:
        group, layout, ops = self.bucket.group, self.layout, self.ops
        pairs = zip(layout.compressed_counts, layout.bits, strict=True)
        density = group["density"]
        ks = [count_selected(density, n) if density < 1 else end - a for n, (a, end) in pairs]
        self.selected = ops.run(select_largest, self.bucket, self.grads, ks)  # lines 1 to 3
        positions, values, bits, gradient_flags = self.selected
        union_bits = yield BitOr(bits)  # line 4
        if bits.device.type == "cpu":
            self.union, at_union = ops.read_union(union_bits, values, positions)
            self.counts = layout.count_by_rank(self.union)
        else:  # the host needs the counts for the lengths of payloads
            flags = unpack_bits(union_bits)
            sums = [flags[begin:end].sum() for begin, end in layout.bits]
            self.counts = yield ReadToHost(torch.stack(sums))
            union = flags.nonzero_static(size=sum(self.counts)).view(-1)
            self.union, at_union = ops.read_union(union_bits, values, positions, union)
        encoded, dtype = [*at_union.split(self.counts)], group["payload_dtype"]  # line 5
        if group["codec"] == "sketch":
            # a new one for every bucket and step
            seed = 1_000_003 * group["step"] + self.bucket.index
            self.sketch = Sketch(layout, self.union, self.counts, group["sketch_ratio"], seed)
            encoded, dtype = self.sketch.encode(at_union), self.bucket.compute_dtype
        mean = yield from self.average(gradient_flags, dtype, encoded)  # lines 6 and 9
        first = sum(self.counts[: layout.rank])
        self.positions = self.union[first : first + self.counts[layout.rank]] - layout.own_bits[0]
        self.values = mean.parts
        if self.sketch is not None:  # line 10
            self.values = [*mean.parts[:-1], self.sketch.decode(mean.parts[-1])]
            self.squared_norm = stacked_squared_norms(self.values)
        return mean

    def drop_absent(self, given: list[bool]) -> Tensor | None:
        super().drop_absent(given)
        if self.positions is not None:
            tensors = self.layout.tensors_at(self.positions + self.layout.own_bits[0])
            has_gradient = torch.tensor(given, dtype=torch.bool, device=tensors.device)
            self.values[-1].masked_fill_(~has_gradient.index_select(0, tensors), 0)
        return None if self.sketch is None else stacked_squared_norms(self.values)

    def keep_unsent(self, have_gradients: list[bool]) -> None:
        """Do line 2: the residual is the values that were not sent, and rounding errors."""
        bucket, (positions, sent, *_) = self.bucket, self.selected
        leftovers = 0 if self.sketch is None else self.sketch.leftovers
        bucket.cache["union_and_leftovers"] = len(self.union), leftovers
        if self.owner_payloads[0].rounding_errors is not None:
            errors = [payload.rounding_error_parts[-1] for payload in self.owner_payloads]
            inputs = positions, torch.cat(errors), self.union, bucket.shards.mask_bytes
            sent = sent - self.ops.look_up(*inputs)
        if not all(have_gradients):
            has_gradient = torch.tensor(have_gradients, dtype=torch.bool, device=sent.device)
            sent = sent * has_gradient.index_select(0, self.layout.tensors_at(positions))
        rows = zip(self.grads, have_gradients, strict=True)
        grads = [g if has_gradient else None for g, has_gradient in rows]
        hold_back(bucket, grads, positions, sent)
        bucket.cache["has_residual"] = True


# Passes over all compressed tensors of a bucket


class Selected(NamedTuple):
    """A rank's selection: the ``values`` at ``positions`` in the mask, and their ``bits``.

    On an accelerator the positions of a shard are in no order, and some values may be 0, which have
    no bit. ``gradient_flags``: of all gradients.
    """

    positions: Tensor
    values: Tensor
    bits: Tensor
    gradient_flags: Tensor


def select_largest(bucket: Bucket, ops: Ops, grads: Tensors, ks: list[int]) -> Selected:
    """Do lines 1 to 3: add residuals, and select the ``ks[r]`` largest elements of each shard.

    Zeros are not sent: gradients of embeddings are mostly 0, and so are gaps between tensors.
    """
    layout = bucket.shards
    like = torch.empty(0, dtype=bucket.compute_dtype, device=bucket.device)
    x = ops.mask_scratch(like, layout.mask_bytes)
    for gap in layout.gaps:
        gap.view_in(x).zero_()
    columns = zip(layout.views_in_mask_order(x), Residuals(bucket).read_all(), grads, strict=True)
    rows = [(sums, e, g) for sums, e, g in columns if sums is not None and e is not None]
    # on a CPU one after the other: each stays in the cache
    for batch in [rows] if x.device.type != "cpu" else [[row] for row in rows]:
        torch._foreach_copy_([sums for sums, *_ in batch], [e.view(s.shape) for s, e, _ in batch])
        pairs = [(sums, g.reshape(sums.shape)) for sums, _, g in batch if g is not None]
        if pairs:
            torch._foreach_add_([sums for sums, _ in pairs], [g for _, g in pairs])
    gradient_flags = flag_gradients(grads, x[:0])
    positions = ops.top_k_of_each([x[begin:end] for begin, end in layout.bits], ks)
    values = x.index_select(0, positions)
    wanted = None
    if x.device.type != "cpu":  # without a host wait: zeros stay selected, but set no bit
        wanted = values != 0
    elif not values.all():
        positions, values = positions[values != 0], values[values != 0]
    return Selected(
        positions, values, make_bits(positions, layout.mask_bytes, wanted), gradient_flags
    )


def hold_back(bucket: Bucket, grads: Tensors, positions: Tensor, sent: Tensor) -> None:
    """Do line 2: add gradients to residuals, and subtract what was sent at these positions."""
    at = bucket.shards.map_to_tensors(positions)
    with Residuals(bucket).open() as opened:
        pairs = [(e, g) for i, e in opened.pairs if (g := grads[i]) is not None]
        if pairs:
            torch._foreach_add_([e for e, _ in pairs], [g for _, g in pairs])
        opened.flat.index_add_(0, at, sent, alpha=-1)


def count_selected(density: float, n: int) -> int:
    """Return how many of n elements to keep: at most ``density``, but one if there are any."""
    return min(n, max(1, math.floor(round(float(density) * n, 6))))


@dataclass
class TagcStats(Stats):
    """Adds what TAGC did in the last step.

    ``density``: share of the compressed elements in the union of the ranks' selections.
    ``leftovers``: elements, over all shards, that the sketch could not decode, and that were sent
    as values.
    """

    density: float = 1.0
    leftovers: int = 0


class TagcAdamW(ReducingOptimizer):
    r"""AdamW with sharded state on gradients that are sparsified, and reduced to the owner of each
    shard (TAGC).

    It replaces ``torch.optim.AdamW`` in a DistributedDataParallel script; at the first forward pass
    it takes over from DDP's all-reduce. Each rank keeps the moments of 1/N of the elements, and
    float32 masters if parameters are of lower precision; the step gathers updated parameters at its
    end. If ``fully_shard`` shards the parameters over these ranks, it replaces FSDP2's
    reduce-scatter, and FSDP2 gathers parameters (docs/fsdp.md).

    Args:
        params: parameters, named parameters or groups, as torch takes them. A group may override
            every option below and say ``compress=False`` or ``True``.
        lr, betas, eps, weight_decay, maximize: as in :class:`torch.optim.AdamW`, with its defaults.
        amsgrad, torch_options: ``foreach``, ``fused`` and ``capturable`` are ignored: the backend
            decides how to compute. ``amsgrad=True`` and ``differentiable=True`` are refused.
        density: share of each shard's compressed elements that a rank selects, at most, in (0, 1]:
            1 - the paper's sparsity of 0.9875. Ranks send the union of their selections, so bytes
            grow with the number of ranks.
        codec: "compact" sends the values at the union. "sketch", the paper's, sends a count sketch,
            in float32 at least. A sketch that can be decoded is larger: it needs 1.22 cells per
            element.
        sketch_ratio: compressed elements of the shard per cell of the sketch, at least 1. The paper
            takes 2, 4 and 10 at density 0.2, 0.1 and 0.0125. Elements that do not fit are sent as
            values, and counted.
        select: a regular expression; tensors with a match in their name are compressed. It needs
            ``named_parameters()``. None: tensors of at least 2 dimensions and 4096 elements, except
            projections to queries, keys and values with one of the usual names (the paper's
            selection).
        dense_steps: steps of plain AdamW before compression starts; 15 % of the run is a good
            start.
        max_grad_norm, when, process_group, simulate: as in :class:`RadiusAdamW`.
        payload_dtype: dtype of gradients on the wire (None: the gradient's), as a name, "bfloat16",
            or as the torch.dtype of that name; groups keep the name. Rounding errors of compressed
            tensors are added to ``residual``. With "bfloat16" float32 parameters are gathered as
            their updates in bfloat16: half as many bytes.
        update_dtype: "int8", "int4" or "int2": ranks gather quantized updates in place of float32
            parameters, with a scale for each 128 values. The owner keeps the rounding error in
            ``update_residual``, and adds it to the next update. None: parameters are gathered, or
            updates in ``payload_dtype``. Inside FSDP2, which gathers parameters: ``gather_dtype``.
        gather_dtype: as in :class:`SeparateAdam`.
        residual_dtype: as in :class:`SeparateAdam`.

    State: ``exp_avg`` and ``exp_avg_sq`` of this rank's shard of each tensor, as vectors that may
    be empty; for compressed tensors ``residual``, as large as the parameter; with ``update_dtype``
    ``update_residual``, of this rank's shards. After :meth:`consolidate_state` a state dict holds
    the moments of all shards, in the parameters' shapes. A CPU keeps memory for the exchange
    between steps: 4 bytes per element, and 12 per element that this rank owns.

    Raises:
        ValueError: an option is out of its range; ``select`` without names.
        TypeError: complex parameters, or sparse gradients at a step.
    """

    sharded = True
    rank_local_state = ("residual",)
    owner_only_state = ("update_residual",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        density: float = 0.0125,
        codec: Literal["compact", "sketch"] = "compact",
        sketch_ratio: float = 10,
        select: str | None = None,
        dense_steps: int = 0,
        max_grad_norm: float | None = None,
        payload_dtype: PayloadDtype = None,
        update_dtype: UpdateDtype = None,
        gather_dtype: GatherDtype = None,
        residual_dtype: ResidualDtype = None,
        when: Literal["always", "auto"] = "always",
        process_group: ProcessGroup | Ranks | None = None,
        simulate: bool = False,
        maximize: bool = False,
        **torch_options: Unpack[TorchOptions],
    ):
        check_torch_options(type(self), amsgrad, torch_options)
        self.residual_dtype = read_int8("residual_dtype", residual_dtype)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            density=density,
            codec=codec,
            sketch_ratio=sketch_ratio,
            select=select,
            dense_steps=dense_steps,
            max_grad_norm=max_grad_norm,
            payload_dtype=payload_dtype,
            update_dtype=update_dtype,
            when=when,
            maximize=maximize,
        )
        self.gather_dtype = read_int8("gather_dtype", gather_dtype)
        super().__init__(params, defaults, process_group, simulate)

    def check_group(self, group: Group) -> None:
        check_adam(group)
        check_compression(group)
        if PAYLOAD_CODECS[group["payload_dtype"]].bits:
            raise ValueError(
                f"payload_dtype={group['payload_dtype']!r} is not for TagcAdamW: its payload must "
                "be exact; use 'bfloat16'."
            )
        check_updates(group)
        # what was never sent has moments of 0
        require_option(float(group["eps"]) > 0, group, "eps", "> 0")
        require_share(group, "density")
        ratio = group["sketch_ratio"]
        is_ratio = is_numeric(ratio) and 1 <= ratio < math.inf
        require_option(is_ratio, group, "sketch_ratio", "finite and >= 1")
        require_choice(group, "codec", "compact", "sketch")
        select = group["select"]
        try:
            is_pattern = select is None or isinstance(re.compile(select).pattern, str)
        except (TypeError, re.error):
            is_pattern = False
        require_option(is_pattern, group, "select", "None or a regular expression")
        if select is not None and group["params"] and "param_names" not in group:
            raise ValueError(
                f"select={select!r} selects by name, and these parameters have none: pass "
                "named_parameters()."
            )

    def is_compressed(self, p: Tensor, group: Group, name: str) -> bool:
        if group["compress"] is not None or group["select"] is None:
            is_attention = group["compress"] is None and ATTENTION.search(name)
            return super().is_compressed(p, group, name) and not is_attention
        return bool(re.search(group["select"], name))

    def before_layout(self) -> None:
        super().before_layout()
        check_gathers(self.replaces_reduce_scatter, self.param_groups)

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        layouts = self.list_adamw_state(dtype)
        if any(group["update_dtype"] for group in self.param_groups):
            layouts["update_residual"] = Sharded(dtype, optional=True)
        return layouts

    def make_reducer(self, bucket: Bucket) -> DenseStart | UnionReducer:
        return choose_reducer(bucket, self.ops)

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        if self.fsdp_backward is not None:
            return step_fsdp_shards(bucket, self.ops, self.fsdp_backward, AdamWUpdate(self.ops))
        return tagc(bucket, self.ops)

    def estimate_values_sent(self, bucket: Bucket, ranks: int) -> float:
        gathered = bucket.numel / ranks if self.sharded else 0.0  # otherwise FSDP2 gathers them
        if update_dtype := bucket.group["update_dtype"]:
            payload = PAYLOAD_CODECS[bucket.group["payload_dtype"]].bytes_per_value(
                bucket.grad_dtype
            )
            gathered *= PAYLOAD_CODECS[update_dtype].bytes_per_value(bucket.grad_dtype) / payload
        return self.values_in_payload(bucket, ranks) + gathered

    def values_in_payload(self, bucket: Bucket, ranks: int) -> float:
        """Estimate the union, as if ranks selected independently, and the index."""
        union = 1 - (1 - bucket.group["density"]) ** ranks
        return sum(sizes_at_density(bucket, union)) + sum(bucket.compressed_lengths) / 32

    def add_to_stats(self, stats: Stats, decision: StepDecision) -> Stats:
        stats, buckets = super().add_to_stats(stats, decision), self._buckets
        if self.fsdp_backward is not None:
            buckets = [bucket for bucket, _ in self.fsdp_backward.buckets_since_step.values()]
        total = sent = leftovers = 0
        for bucket in buckets:
            n = sum(bucket.shards.compressed_counts)
            union, left = bucket.cache.get("union_and_leftovers", (None, 0))
            total, sent = total + n, sent + (n if union is None else union)
            leftovers += left
        return TagcStats(**vars(stats), density=sent / max(1, total), leftovers=leftovers)
