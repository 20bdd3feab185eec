"""TAGC: transformer-aware gradient compression (Polyakov, Dukhanov and Spirin, EuroMLSys 2025),
Algorithm 1 with AdamW.

One shard of a bucket on rank n, owned by rank d; g_n is the rank's gradient of it, acc_n what it
held back so far::

     1  g_n <- g_n + acc_n
     2  g_n, acc_n <- the largest (1 - sparsity) of |g_n|, 0 elsewhere;  what was zeroed
     3  index_n <- where g_n is not zero, a bit an element
     4  index <- bitwise or over ranks of index_n
     5  code_n <- compress(g_n, index)
     6  reduce(code_n) to rank d
     8  on rank d:
     9      code <- mean over ranks of code_n
    10      G <- decompress(index, code)
        G <- G * min(1, max_grad_norm / |G|);  AdamW on the shard with G
        parameters <- all shards, gathered

The paper stops at line 10: the rest is what a sharded AdamW does with it. All shards of a bucket go
through these lines together, and buckets overlap: while one is on the wire the next is sparsified
and indexed (section 3.3).

Where we differ from the authors' code: the or is exact at any number of ranks (they add fields of 1
or 4 bits, which carry into their neighbours), at *least* ``sparsity`` is zeroed, of each shard, and
nothing is estimated. Updated parameters are gathered before anything is written, so a step is all
or nothing here too.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._engine.base import CompressedOptimizer
from ._engine.decision import StepDecision
from ._engine.inside import Inside, applied, check_inside, is_inside
from ._engine.options import check_adam, check_compression, require, take_torchs
from ._engine.stats import Stats
from ._engine.update import AdamW
from ._engine.when import chosen, dense_steps
from ._ops.norms import clip_factor
from ._ops.operations import Ops
from ._sharded.adamw import commit, gather, updated
from ._sharded.choice import ATTENTION, is_pattern
from ._sharded.inside import averaged, keep_unsent, parcel_of
from ._sharded.stats import tagc_stats
from ._sharded.updates import UpdateDtype, check_gathers, check_updates
from ._sparse.codes import CODES
from ._sparse.rows import CodedRows, Rows
from ._sparse.sparsify import sparsify
from ._sparse.union import union_of
from ._state.buckets import Bucket
from ._state.layouts import Dense, Layout, Sharded, Unsharded
from ._state.masks import sizes_at_density
from ._wire.collectives import ProcessGroup
from ._wire.payload import PayloadDtype, bytes_per_value, quantized_bits
from ._wire.requests import Agree, BitOr, Commit, ReduceScatterMean, RequestGenerator


def tagc(
    bucket: Bucket,
    ops: Ops,
) -> RequestGenerator[None]:
    """Algorithm 1, all shards of one bucket, one step."""
    max_norm = bucket.group["max_grad_norm"]
    sent = Rows(bucket, ops)
    if sparsifies(bucket):
        left = sparsify(bucket, ops)  # lines 1 and 2
        bits = yield BitOr(left.bits)  # lines 3 and 4
        union = yield from union_of(bucket.shards, bits, ops, bucket.cache)
        sent = CodedRows(bucket, ops, left, union)

    sent.pack()  # line 5
    row = yield ReduceScatterMean(sent.flat, sent.sizes)  # lines 6 and 9
    mean = sent.mean(row)
    average = sent.decode(mean)  # line 10
    norm = yield Agree(mean, sent.phase, average.squared_norm(), sharded=True)

    average.clip(clip_factor(norm, max_norm))
    present = bucket.present(mean)
    new = updated(bucket, ops, average, present)
    gathered = yield from gather(bucket, ops, new)
    yield Commit()
    # from here on state changes
    commit(bucket, ops, average, present, new, gathered)
    sent.hold_back(present)  # line 2


def sparsifies(bucket: Bucket) -> bool:
    """Whether the dense start is over, and there is anything to compress."""
    h = bucket.group
    return h["step"] >= dense_steps(bucket) and bucket.shards.offsets[-1] > 0


class TagcAdamW(CompressedOptimizer):
    r"""AdamW with sharded state on gradients that are sparsified, and reduced to the owner of each
    shard (TAGC).

    Swap it for ``torch.optim.AdamW`` in a DistributedDataParallel script; its first forward hands
    its all-reduce over. Each rank keeps the moments of 1/N of the elements, and their float32
    masters where parameters are of lower precision; updated parameters are gathered at the end of
    the step. Where ``fully_shard`` cuts the parameters over these ranks it works in the place of
    FSDP2's reduce-scatter, and FSDP gathers (docs/fsdp.md).

    Args:
        params: parameters, named parameters or groups, as torch takes them. A group may override
            every option below and say ``compress=False`` or ``True``.
        lr, betas, eps, weight_decay, maximize: as in :class:`torch.optim.AdamW`, with its defaults.
        foreach, fused, capturable: accepted and ignored: the back end chooses how to compute.
        amsgrad, differentiable: False; True is refused.
        sparsity: share of each shard's compressed elements that is held back, at least, in [0, 1).
            The union over ranks of what is left is sent, so bytes grow with the number of ranks.
        codec: "compact" sends the values at the union as they are. "sketch", the paper's, sends a
            count sketch, in float32 at least. Where it can be decoded it is larger: a table needs
            1.22 cells for an element.
        sketch_ratio: the sketch has a cell for every so many compressed elements of the shard, at
            least 1. The paper takes 2, 4 and 10 at sparsity 0.8, 0.9 and 0.9875. What does not fit
            is sent as it is, and counted.
        select: a regular expression; tensors whose name it matches somewhere are compressed. It
            needs ``named_parameters()``. None: tensors of at least 2 dimensions and 4096 elements,
            but not the projections to queries, keys and values where the parameters are named
            customarily (the paper's selection).
        warmup_steps: steps of plain AdamW before compression starts, or as a float in (0, 1) a
            share of ``total_steps``. None: 15 % of ``total_steps``, or none.
        total_steps: how many steps the run has, where shares are to be taken of it.
        max_grad_norm: clip the averaged gradient, all groups together, to this L2 norm (None: no
            clipping). Not the same as ``clip_grad_norm_`` before ``step()``, which sees the local
            gradient.
        payload_dtype: dtype of gradients on the wire (None: the gradient's), as a name, "bfloat16",
            or as the torch.dtype of that name; groups keep the name. What rounding to a narrower
            one takes off compressed tensors is kept in ``residual``. With "bfloat16" float32
            parameters are gathered as their updates in bfloat16: half as many bytes.
        update_dtype: "int8", "int4" or "int2": what a step adds to parameters is gathered in codes
            of so many bits, with a scale for 128 of them, in place of the parameters. What rounding
            takes off is kept by the owner, in ``update_residual``, and added to the next update.
            For float32 parameters. None: as they are, or as ``payload_dtype`` says.
        when: "always", or "auto": time dense and compressed steps at the start, and stay dense
            where compression does not pay (see ``stats.when``).
        process_group: the ranks to average over. None: the default group, or one process where
            there is none.
        simulate: compress on one process too, to see what many would do. Else, without other ranks,
            a step is plain AdamW: nothing is selected, rounded or held back.

    State: ``exp_avg`` and ``exp_avg_sq`` of this rank's part of each tensor, as vectors that may be
    empty, ``residual``, as large as the parameter, of compressed tensors, and with ``update_dtype``
    ``update_residual``, of this rank's part as the moments are. After
    :meth:`consolidate_state` a state dict holds the moments of all parts, in the parameters'
    shapes. A CPU keeps memory for the exchange between steps: 4 bytes an element, and 4 for each
    that this rank owns.

    Raises:
        ValueError: an option out of its range; ``select`` without names.
        TypeError: complex parameters, or sparse gradients at a step.
    """

    sharded = True
    averaged_state = ("residual",)
    sent_once = ("update_residual",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        sparsity: float = 0.9875,
        codec: Literal["compact", "sketch"] = "compact",
        sketch_ratio: float = 10,
        select: str | None = None,
        warmup_steps: int | float | None = None,
        total_steps: int | None = None,
        max_grad_norm: float | None = None,
        payload_dtype: PayloadDtype = None,
        update_dtype: UpdateDtype = None,
        when: Literal["always", "auto"] = "always",
        process_group: ProcessGroup | None = None,
        simulate: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ):
        take_torchs(amsgrad, foreach, capturable, differentiable, fused)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            sparsity=sparsity,
            codec=codec,
            sketch_ratio=sketch_ratio,
            select=select,
            warmup_steps=chosen(warmup_steps, total_steps, 0),
            total_steps=total_steps,
            max_grad_norm=max_grad_norm,
            payload_dtype=payload_dtype,
            update_dtype=update_dtype,
            when=when,
            maximize=maximize,
        )
        super().__init__(params, defaults, process_group, simulate)

    def check_group(self, group: dict[str, Any]) -> None:
        check_adam(group)
        check_compression(group)
        if quantized_bits(group["payload_dtype"]):
            raise ValueError(
                f"payload_dtype={group['payload_dtype']!r} is not for TagcAdamW: its payload must "
                "be exact; use 'bfloat16'."
            )
        check_updates(group)
        require(0 <= group["sparsity"] < 1, "sparsity", group["sparsity"], "in [0, 1)")
        require(group["sketch_ratio"] >= 1, "sketch_ratio", group["sketch_ratio"], ">= 1")
        require(
            group["codec"] in CODES,
            "codec",
            group["codec"],
            " or ".join(map(repr, CODES)),
        )
        require(
            group["select"] is None or is_pattern(group["select"]),
            "select",
            group["select"],
            "None or a regular expression",
        )
        if group["select"] is not None and group["params"] and "param_names" not in group:
            raise ValueError(
                f"select={group['select']!r} chooses by name, and these parameters have none: pass "
                "named_parameters()."
            )

    def is_compressed(self, p: Tensor, group: dict[str, Any], name: str) -> bool:
        if group["compress"] is not None or group["select"] is None:
            chosen = group["compress"] is None and ATTENTION.search(name)
            return super().is_compressed(p, group, name) and not chosen
        return bool(re.search(group["select"], name))

    def before_layout(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        inside = is_inside(params, self._session.group)
        check_inside("TagcAdamW", self.reduces_inside, inside, self.param_groups)
        check_gathers(inside, self.param_groups)
        self.reduces_inside, self.sharded = inside, not inside

    def after_layout(self) -> None:
        if not self.reduces_inside:
            return
        if self.inside is None:
            session = self._session
            self.inside = Inside(session, partial(parcel_of, session), averaged, keep_unsent)
        self.inside.forget_layouts()

    def state_specs(self, dtype: torch.dtype) -> dict[str, Layout]:
        moments, owed = (Sharded, Dense) if self.sharded else (Dense, Unsharded)
        specs: dict[str, Layout] = {
            "exp_avg": moments(dtype),
            "exp_avg_sq": moments(dtype),
            "residual": owed(dtype, compressed_only=True),
        }
        if any(group["update_dtype"] for group in self.param_groups):
            specs["update_residual"] = Sharded(dtype, optional=True)
        return specs

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        if self.inside is not None:
            return applied(bucket, self.ops, self.inside, AdamW(self.ops))
        return tagc(bucket, self.ops)

    def values_sent(self, bucket: Bucket, ranks: int) -> float:
        """The union, were the ranks' choices independent; the index, and the parameters back."""
        union = 1 - bucket.group["sparsity"] ** ranks
        compressed = sum(bucket.compressed_lengths)
        back = bucket.numel / ranks if self.sharded else 0.0  # else FSDP gathers them
        if rounded := bucket.group["update_dtype"]:
            payload = bytes_per_value(bucket.group["payload_dtype"], bucket.grad_dtype)
            back *= bytes_per_value(rounded, bucket.grad_dtype) / payload
        return sum(sizes_at_density(bucket, union)) + compressed / 32 + back

    def add_to_stats(self, stats: Stats, decision: StepDecision) -> Stats:
        if self.inside is not None:
            return tagc_stats(
                super().add_to_stats(stats, decision),
                (one.count for one in self.inside.of_step.values()),
            )
        counts = [bucket.cache.get("counts", (None, 0)) for bucket in self._buckets]
        lengths = [sum(bucket.compressed_lengths) for bucket in self._buckets]
        return tagc_stats(stats, ((n, *c) for n, c in zip(lengths, counts, strict=True)))
