"""TAGC inside FSDP2: Algorithm 1 (see ``tagc.py``) in place of FSDP's own reduce-scatter.

In backward, as soon as FSDP has the gradients of some parameters, for each rank's shard of them::

     1  g_n <- g_n + acc_n
     2  g_n, acc_n <- the largest (1 - sparsity) of |g_n|, 0 elsewhere;  what was zeroed
     3  index_n <- where g_n is not zero, a bit an element
     4  index <- bitwise or over ranks of index_n
     5  code_n <- compress(g_n, index)
     6  reduce(code_n) to rank d, whose shard it is
     8  on rank d:
     9      code <- mean over ranks of code_n
    10      G <- decompress(index, code)

AdamW takes G in ``step()``, and acc_n is kept then (see ``_engine.inside``). Of a further backward
in the same step acc_n is left out of line 1: it has been sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._engine.inside import Held, Params, Unsent, place_of
from .._engine.session import Session
from .._ops.operations import Ops
from .._sparse.sparsify import largest_of_shards
from .._sparse.union import union_of
from .._state.buckets import Bucket
from .._state.fsdp_rows import columns_of
from .._wire.requests import BitOr, ReduceScatterMean, RequestGenerator
from .parcels import Parcel, same_options
from .sending import AtUnion, Everything

# Options that decide what is sent of a parameter.
ALIKE = ("sparsity", "codec", "sketch_ratio", "payload_dtype", "warmup_steps", "total_steps")


def averaged(
    parcel: Parcel, ops: Ops, rows: Tensor, out: Tensor, held: Held
) -> RequestGenerator[None]:
    """One reduce-scatter: average this rank's row of ``rows`` over ranks into ``out``."""
    x = parcel.add_up(rows, held)  # line 1
    plain = columns_of(rows, parcel.as_they_are)
    sent = Everything(parcel, x)
    if parcel.sparsifies:
        h, shards = parcel.group, parcel.shards
        chosen = largest_of_shards(x.view(-1), shards, parcel.counts, h["sparsity"], ops)
        left, _, bits = chosen  # lines 2 and 3
        index = yield BitOr(bits.clone())  # line 4
        union = yield from union_of(shards, index, ops, parcel.cache)
        sent = AtUnion(parcel, x, left, bits, union)

    message = sent.message(plain, rows.dtype)  # line 5
    mean = yield ReduceScatterMean(message, sent.sizes)  # lines 6 and 9
    parcel.deliver(out, mean[: parcel.plain], sent.decode(mean[parcel.plain :]))  # line 10
    sent.hold_back()  # line 2
    parcel.note_unsent(x, held)
    parcel.sent = sent.counts


def keep_unsent(bucket: Bucket, i: int, unsent: Unsent, factor: float) -> None:
    """Line 2, where the step is applied. A clip takes nothing from what was sent."""
    unsent.replace_residual(bucket.state["residual"][i], 1.0)


def parcel_of(session: Session, params: Params, _: torch.dtype) -> Parcel:
    """Where these parameters lie in a row."""
    given, groups = [], []
    for p, dim in params:
        residual = None
        if p in session.bucket_of:
            bucket, i = place_of(p, session)
            if bucket.compressed[i]:
                residual = bucket.state["residual"][i]
                groups.append(bucket.group)
        given.append((p, dim, residual))
    group = same_options(groups or session.option_groups[:1], ALIKE)
    parcel = Parcel(given, group, session.comm.rank, session.comm.size)
    parcel.exact = any(p not in session.bucket_of for p, _ in params)
    return parcel
