"""Gradients averaged dense, around any torch optimizer.

One bucket on rank n at one step; g_n is its local gradient, e_n its residual (rounding errors)::

    1  h_n <- g_n + e_n
    2  q_n <- h_n, rounded to payload_dtype
    3  G <- mean over ranks of q_n
    4  G <- G * min(1, max_grad_norm / |G|)                # to the base optimizer
    5  e_n <- h_n - q_n

Without a ``payload_dtype`` nothing is rounded, and e_n stays 0.
"""

from __future__ import annotations

from typing import Any

import torch

from ._engine.options import (
    Group,
    ResidualDtype,
    check_compress,
    check_payload_and_clip,
    read_int8,
)
from ._engine.reducer import (
    AllReduceReducer,
    Reducer,
    ReduceScatterReducer,
    Update,
    step_by_average,
)
from ._fsdp.fsdp_backward import GatherDtype, ReducingOptimizer, step_fsdp_shards
from ._inside.bases import OneOrSeveral
from ._inside.wrapper import Wrapper
from ._ops.norms import clip_factor
from ._ops.operations import Ops
from ._state.bucket import Bucket
from ._state.layouts import Layout
from ._wire.groups import ProcessGroup, Ranks
from ._wire.payload import PayloadDtype
from ._wire.requests import Agree, RequestGenerator


def average(bucket: Bucket, ops: Ops, update: Update) -> RequestGenerator[None]:
    """Lines 1 to 5, one bucket, one step; ``update`` takes G."""
    reducer = AllReduceReducer(bucket, ops)
    mean = yield from reducer.reduce()  # lines 1 to 3
    norm = yield Agree(mean, reducer.phase)

    # from here on state changes
    factor = clip_factor(norm, bucket.group["max_grad_norm"])  # line 4
    step_by_average(bucket, ops, reducer, update, factor)  # line 5 too


class Average(Wrapper, ReducingOptimizer):
    """Any torch optimizer, on gradients that are averaged dense::

        adamw = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = compopt.Average(adamw, payload_dtype="int8")

    It does what DistributedDataParallel does, with fewer bytes, and applies a step on all ranks or
    on none. ``param_groups`` are the base's own, so LR schedulers act on it; ``state_dict()`` holds
    the base's under "base". While the base steps, ``p.grad`` is the averaged gradient (None if no
    rank had one); before and after it is this rank's own.

    Args:
        base: an optimizer over the model's parameters, or a list of several over disjoint ones; it
            may be of this package (AdamS), which then averages nothing itself.
        payload_dtype: dtype on the wire (None: the gradient's), as a name, "int8", or as the
            torch.dtype of that name; groups keep the name. "int4" sends half a byte a value and
            "int2" a quarter. What rounding takes off stays in ``residual``, and is sent with the
            next gradient.
        gather_dtype: as in :class:`SeparateAdam`.
        max_grad_norm: clips the averaged gradient to this L2 norm.
        residual_dtype: as in :class:`SeparateAdam`.
        process_group: the ranks to average over. None: the default group, or one process where
            there is none.
        simulate: round in a single process too, to see the effect. Otherwise a step without other
            ranks is the base's.

    State beside the base's: ``residual``, as large as the parameter. A CPU keeps memory for the
    exchange between steps, 4 bytes per element, and as much for rounding errors.

    Raises:
        TypeError: base is no optimizer, or one that evaluates the model more than once a step
            (LBFGS).
        ValueError: base compresses by itself; two of several have the same parameters; an option
            out of its range.
    """

    rank_local_state = ("residual",)

    def __init__(
        self,
        base: OneOrSeveral,
        *,
        payload_dtype: PayloadDtype = None,
        gather_dtype: GatherDtype = None,
        max_grad_norm: float | None = None,
        residual_dtype: ResidualDtype = None,
        process_group: ProcessGroup | Ranks | None = None,
        simulate: bool = False,
    ):
        self.residual_dtype = read_int8("residual_dtype", residual_dtype)
        options: dict[str, Any] = dict(payload_dtype=payload_dtype, max_grad_norm=max_grad_norm)
        self.gather_dtype = read_int8("gather_dtype", gather_dtype)
        super().__init__(base, options, process_group, simulate)

    def check_group(self, group: Group) -> None:
        check_payload_and_clip(group, keeps_all_errors=True)
        check_compress(group)

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {"residual": self.choose_residual_layout(dtype)}

    def make_reducer(self, bucket: Bucket) -> Reducer:
        """Return the reducer that is used inside FSDP2.

        A reduce-scatter carries floats only; quantized values use an all-reduce, of which each rank
        keeps its part.
        """
        if bucket.codecs[bucket.group["payload_dtype"]].bits:
            return AllReduceReducer(bucket, self.ops)
        return ReduceScatterReducer(bucket, self.ops)

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        if self.fsdp_backward is not None:
            return step_fsdp_shards(bucket, self.ops, self.fsdp_backward, self._update)
        return average(bucket, self.ops, self._update)
