"""AdamW on this rank's shard of a bucket, and its updated parameters on all ranks.

A step is computed into buffers and gathered before anything is written, so that it is applied on
all ranks or on none.

With ``update_dtype`` the updates, rounded, are gathered in place of the parameters. Error feedback
of a shard with update u and residual e, which only its owner computes::

    sent <- quantize(u + e)       # 8, 4 or 2 bits each, a scale for 128 of them
    e <- u + e - sent             # ``update_residual``, on the owner alone
    w <- w + sent                 # on all ranks, the owner too: replicas stay equal

So w + e is the sum of all unrounded updates, and e is the last rounding error: parameters are never
further from the unrounded ones than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .._engine.options import require_option
from .._engine.reducer import ShardReducer
from .._ops.operations import AdamWTensors, Ops, clip_factor
from .._state.buckets import Bucket
from .._state.residuals import Residuals
from .._state.shards import unshard
from .._state.tensors import to_local
from .._wire.codec import GatherCodec, QuantizedCodec, dtype_name
from .._wire.requests import Agree, AllGather, ReadyToCommit, RequestGenerator

UpdateDtype: TypeAlias = torch.dtype | Literal["int8", "int4", "int2"] | None
UPDATE_DTYPES = ("int8", "int4", "int2")

UPDATE_SEED_SALT = 1_000_001  # makes seeds of updates differ from those of payloads


def step_zero1_shards(bucket: Bucket, ops: Ops, reducer: ShardReducer) -> RequestGenerator[None]:
    """Average one bucket by ``reducer``; each rank updates its shard of it with AdamW."""
    update = ShardedAdamW(bucket, ops)
    mean = yield from reducer.reduce()
    norm = yield Agree(mean, reducer.phase, reducer.squared_norm(), covers_shard_only=True)

    have_gradients = mean.have_gradients
    reducer.clip(clip_factor(norm, bucket.group["max_grad_norm"]))
    update.compute(reducer.read_owned_parts(update.dtype), have_gradients)
    yield from update.gather()
    # from here on state changes
    update.commit(have_gradients)
    reducer.feed_back(have_gradients)


class ShardedAdamW:
    """One step of AdamW on the shards of one bucket.

    Ranks gather the new parameters, or updates rounded to ``update_dtype`` or bfloat16. All ranks
    add these updates, the owner too, so that replicas stay equal.
    """

    def __init__(self, bucket: Bucket, ops: Ops):
        self.bucket, self.ops, self.shards = bucket, ops, bucket.shards
        self.weights = bucket.weights
        self.dtype = self.weights[0].dtype  # to which gradients are converted
        group, state = bucket.group, bucket.state
        rounded_to = None if bucket.is_single_process else group.get("update_dtype")
        if rounded_to is not None and "update_residual" not in state:
            raise ValueError(
                f"update_dtype={rounded_to!r} was set in a group of an optimizer that was made "
                "without it, and keeps no update_residual: give it to the constructor, or to one "
                "group of it."
            )
        codec, self.codec = bucket.codecs[rounded_to], None
        if isinstance(codec, QuantizedCodec):
            sizes = [tuple(self.shards.sizes(rank)) for rank in range(self.shards.ranks)]
            self.codec = GatherCodec(codec, sizes, bucket.scratch)
        payload = bucket.codecs[group["payload_dtype"]].dtype
        in_half = payload == torch.bfloat16 and bucket.dtype == torch.float32
        is_alone = bucket.is_single_process
        self.sends_bfloat16_updates = self.codec is None and in_half and not is_alone
        self.sends_updates = self.codec is not None or self.sends_bfloat16_updates

    def compute(self, grads: Sequence[Tensor], have_gradients: list[bool]) -> None:
        """Compute from averaged ``grads`` what is gathered; nothing else is written."""
        bucket, self.grads = self.bucket, grads
        owned = [i for i, w in enumerate(self.weights) if w.numel()]
        self.stepped = [i for i in owned if have_gradients[i]]
        stay = [i for i in owned if not have_gradients[i]]
        sizes = self.shards.sizes(self.shards.rank)
        self.gathered = bucket.get_memory("new parameters", self.shards.max_numel, bucket.dtype)
        self.gathered[sum(sizes) :].zero_()
        outs = self.gathered[: sum(sizes)].split(sizes)
        if self.stepped:
            to = [outs[i] for i in self.stepped]
            self.new = self._make_memory(to)
            self.ops.compute_adamw(bucket.group, self._list_tensors(), self.new)
            if bucket.dtype != self.dtype:
                torch._foreach_copy_(to, self.new.weights)
        if stay:
            torch._foreach_copy_([outs[i] for i in stay], [self.weights[i] for i in stay])
        if self.sends_updates and owned:
            torch._foreach_sub_([outs[i] for i in owned], [self.weights[i] for i in owned])
        if self.codec is not None and self.stepped:
            Residuals(bucket, "update_residual").add_to([(i, outs[i]) for i in self.stepped])

    def gather(self) -> RequestGenerator[None]:
        """Gather the shards of all ranks, and wait until all ranks are ready to commit."""
        bucket, message = self.bucket, self.gathered
        if self.codec is not None:
            message = bucket.get_memory("quantized updates", self.codec.nbytes, torch.uint8)
            seed = (bucket.group["step"], bucket.index, UPDATE_SEED_SALT, self.shards.rank)
            own_updates = self.gathered[: sum(self.shards.sizes(self.shards.rank))]
            self.codec.encode(own_updates, self.shards.rank, message, seed)
        elif self.sends_bfloat16_updates:
            message = self.gathered.bfloat16()
        self.rows = message.unsqueeze(0)
        if self.shards.ranks > 1:
            bucket.parameter_bytes = message.nbytes
            memory = bucket.get_memory(
                "gathered", self.shards.ranks * message.numel(), message.dtype
            )
            self.rows = yield AllGather(message, memory.view(self.shards.ranks, -1))
        if self.codec is not None:
            numel = self.shards.max_numel
            updates = bucket.get_memory("updates", self.shards.ranks * numel, bucket.dtype)
            updates = updates.view(self.shards.ranks, numel)
            self.codec.decode(self.rows, updates)
            self.rows = updates
        yield ReadyToCommit()

    def commit(self, have_gradients: list[bool]) -> None:
        """Write moments and masters of this rank's shard, step counts, and all parameters."""
        bucket, state = self.bucket, self.bucket.state
        elsewhere = [i for i, has_gradient in enumerate(have_gradients) if has_gradient]
        elsewhere = [i for i in elsewhere if i not in self.stepped]
        if elsewhere:
            torch._foreach_add_([state["step"][i] for i in elsewhere], 1)
        if self.stepped:
            torch._foreach_copy_([state["step"][i] for i in self.stepped], self.new.steps)
            for name, memory in self.memory.items():
                if memory.numel() == bucket.flat[name].numel():
                    bucket.store_state(name, memory)
                else:
                    parts = memory.split([self.weights[i].numel() for i in self.stepped])
                    torch._foreach_copy_([state[name][i] for i in self.stepped], list(parts))
        if self.codec is not None and self.stepped:
            sizes = self.shards.sizes(self.shards.rank)
            errors = self.gathered[: sum(sizes)].split(sizes)  # rounding errors, from ``encode``
            Residuals(bucket, "update_residual").set([(i, errors[i]) for i in self.stepped])
        params = [to_local(p.detach()) for p in bucket.params]
        flats: list[Tensor | None] = []
        for p in params:
            flats.append(p.view(-1) if p.is_contiguous() else p.reshape(-1).clone())
        unshard(self.shards, self.rows, flats, add=self.sends_updates)
        for p, flat in zip(params, flats, strict=True):
            if flat is not None and not p.is_contiguous():
                p.copy_(flat.view(p.shape))

    def _list_tensors(self) -> AdamWTensors:
        """Return the tensors of the shards that are updated here."""
        state = self.bucket.state
        columns = (self.weights, self.grads, state["exp_avg"], state["exp_avg_sq"], state["step"])
        return AdamWTensors(*([column[i] for i in self.stepped] for column in columns))

    def _make_memory(self, to: list[Tensor]) -> AdamWTensors:
        """Return memory for what this step updates, until the commit: for weights ``to``, or that
        of masters.
        """
        sizes, names = [len(x) for x in to], ["exp_avg", "exp_avg_sq"]
        if "master" in self.bucket.state:  # parameters without one are gathered
            names.append("master")
        self.memory = {
            name: self.bucket.get_memory(f"new {name}", sum(sizes), self.dtype) for name in names
        }
        exp_avgs, exp_avg_sqs, *masters = (list(x.split(sizes)) for x in self.memory.values())
        steps = list(torch.empty(len(to), dtype=torch.float32, device=to[0].device).unbind())
        grads = [self.grads[i] for i in self.stepped]
        return AdamWTensors([*masters, to][0], grads, exp_avgs, exp_avg_sqs, steps)


# Quantized updates


def check_updates(group: dict[str, Any]) -> None:
    """Raise ValueError if ``update_dtype`` is not a known dtype, or parameters are not float32 or
    float64, to which what it sends can be added.
    """
    given = dtype_name(group["update_dtype"])
    is_known = given is None or given in UPDATE_DTYPES
    wanted = f"None or {', '.join(map(repr, UPDATE_DTYPES))}"
    require_option(is_known, group, "update_dtype", wanted)
    group["update_dtype"] = given
    low = [p.dtype for p in group["params"] if p.dtype.itemsize < 4]
    if given is not None and low:
        raise ValueError(
            f"update_dtype={given!r} is for float32 parameters, to which updates can be added as "
            f"they were sent: these are {low[0]}. Leave it out, or keep parameters in float32 and "
            "use autocast."
        )


def check_gathers(replaces_reduce_scatter: bool, groups: Iterable[dict[str, Any]]) -> None:
    """Raise ValueError if ``update_dtype`` is set inside FSDP2, which gathers parameters itself."""
    given = [group["update_dtype"] for group in groups if group["update_dtype"] is not None]
    if replaces_reduce_scatter and given:
        raise ValueError(
            f"update_dtype={given[0]!r} cannot be followed inside FSDP, which gathers parameters "
            "itself: use gather_dtype='int8'."
        )
