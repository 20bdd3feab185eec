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

``TagcAdamW.algorithm`` returns ``step_zero1_shards``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .._engine.options import require_option
from .._engine.reducer import ShardReducer
from .._ops.norms import clip_factor, scale_all_
from .._ops.operations import Ops
from .._state.bucket import Bucket
from .._state.next_state import NextValues, commit_next
from .._state.residuals import Residuals
from .._state.shards import unshard
from .._wire.codec import GatherCodec, QuantizedCodec, dtype_name
from .._wire.requests import Agree, AllGather, ReadyToCommit, RequestGenerator

UpdateDtype: TypeAlias = torch.dtype | Literal["int8", "int4", "int2"] | None
UPDATE_DTYPES = ("int8", "int4", "int2")

UPDATE_SEED_SALT = 1_000_001  # makes seeds of updates differ from those of payloads


def step_zero1_shards(bucket: Bucket, ops: Ops, reducer: ShardReducer) -> RequestGenerator[None]:
    """Average one bucket by ``reducer``; each rank updates its shard of it with AdamW.

    It is the generator that ``TagcAdamW.algorithm`` returns; the engine runs it up to the gather on
    all ranks, then to the commit.
    """
    mean = yield from reducer.reduce()
    phase, squared, drop_absent = reducer.phase, reducer.squared_norm, reducer.drop_absent
    norm = yield Agree(mean, phase, squared, covers_shard_only=True, drop_absent=drop_absent)

    values = reducer.values
    scale_all_(values, clip_factor(norm, bucket.group["max_grad_norm"]))
    update = ShardedAdamW(bucket, ops)
    update.compute(values, reducer.positions, mean.have_gradients)
    yield from update.gather()
    # from here on state changes
    update.commit(mean.have_gradients)
    reducer.keep_unsent(mean.have_gradients)


class ShardedAdamW:
    """One step of AdamW on the shards of one bucket.

    Ranks gather the new parameters, or updates rounded to ``update_dtype`` or bfloat16. All ranks
    add these updates, the owner too, so that replicas stay equal.
    """

    def __init__(self, bucket: Bucket, ops: Ops):
        self.bucket, self.ops, self.shards = bucket, ops, bucket.shards
        group, state, self.codec = bucket.group, bucket.state, None
        rounded_to = None if bucket.sends_nothing else group.get("update_dtype")
        if rounded_to is not None and "update_residual" not in state:
            raise ValueError(
                f"update_dtype={rounded_to!r} was set in a group of an optimizer that was made "
                "without it, and keeps no update_residual: give it to the constructor, or to one "
                "group of it."
            )
        codec = bucket.codecs[rounded_to]
        if isinstance(codec, QuantizedCodec):
            sizes = [*map(tuple, self.shards.sizes)]
            self.codec = GatherCodec(codec, sizes, bucket.scratch)
        payload = bucket.codecs[group["payload_dtype"]].dtype
        in_half = payload == torch.bfloat16 and bucket.dtype == torch.float32
        is_alone = bucket.sends_nothing
        self.sends_bfloat16_updates = self.codec is None and in_half and not is_alone
        self.sends_updates = self.codec is not None or self.sends_bfloat16_updates

    def compute(
        self, values: list[Tensor], positions: Tensor | None, have_gradients: list[bool]
    ) -> None:
        """Compute what is gathered from an average (see ``Ops.expand_average``); nothing else is
        written.
        """
        bucket, sizes, memory = self.bucket, self.shards.own_sizes, self.bucket.get_memory
        owned = [i for i, size in enumerate(sizes) if size]
        self.stepped = [i for i in owned if have_gradients[i]]
        stay, weights = [i for i in owned if not have_gradients[i]], bucket.weights
        self.gathered = memory("new parameters", self.shards.max_numel, bucket.dtype)
        self.gathered[sum(sizes) :].zero_()
        outs = self.gathered[: sum(sizes)].split(sizes)
        if self.stepped:
            new = [[outs[i] for i in self.stepped]]
            stepped_sizes = [sizes[i] for i in self.stepped]
            for name in ("exp_avg", "exp_avg_sq", "master"):
                if name in bucket.state:
                    flat = memory(f"new {name}", sum(stepped_sizes), weights[0].dtype)
                    bucket.next[name] = [NextValues(self.stepped, flat, may_swap=True)]
                    new.append([*flat.split(stepped_sizes)])
            to, m, v, *masters = new
            out = [*masters, to][0], m, v  # parameters without a master are gathered
            self.ops.compute_adamw(bucket, self.stepped, weights, values, positions, out)
            if masters:
                torch._foreach_copy_(to, masters[0])
        if stay:
            torch._foreach_copy_([outs[i] for i in stay], [weights[i] for i in stay])
        if self.sends_updates and owned:
            torch._foreach_sub_([outs[i] for i in owned], [weights[i] for i in owned])
        if self.codec is not None and self.stepped:
            Residuals(bucket, "update_residual").add_to([(i, outs[i]) for i in self.stepped])

    def gather(self) -> RequestGenerator[None]:
        """Gather the shards of all ranks, and wait until all ranks are ready to commit."""
        bucket, message = self.bucket, self.gathered
        if self.codec is not None:
            message = bucket.get_memory("quantized updates", self.codec.nbytes, torch.uint8)
            seed = (bucket.group["step"], bucket.index, UPDATE_SEED_SALT, self.shards.rank)
            own_updates = self.gathered[: sum(self.shards.own_sizes)]
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
        """Write all parameters, moments and masters of this rank's shard, and step counts."""
        bucket, sizes = self.bucket, self.shards.own_sizes
        params, flats = bucket.local_params, list[Tensor | None]()
        for p in params:
            flats.append(p.detach().view(-1) if p.is_contiguous() else p.reshape(-1).clone())
        unshard(self.shards, self.rows, flats, add=self.sends_updates)
        for p, vector in zip(params, flats, strict=True):
            if vector is not None and not p.is_contiguous():
                p.copy_(vector.view(p.shape))
        bucket.count_steps(have_gradients)
        commit_next(bucket, have_gradients)
        if self.codec is not None and self.stepped:
            errors = self.gathered[: sum(sizes)].split(sizes)  # rounding errors, from ``encode``
            Residuals(bucket, "update_residual").set([(i, errors[i]) for i in self.stepped])


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
