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

When backward ends FSDP's gradients are G, and whoever clips or looks at them does so as ever. Then,
in ``step()``, all ranks agree, AdamW takes G, and acc_n is kept. Of a step that is not applied
nothing is. FSDP gathers parameters itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._engine.engine import Engine
from .._ops.clipping import clip_factor
from .._ops.norms import squared_norm
from .._ops.ops import Ops
from .._sparse.sparsify import largest_of_shards
from .._sparse.union import union_of
from .._state.buckets import Bucket
from .._wire.comm import Comm
from .._wire.pending import Pending
from .._wire.requests import Agree, AllReduceMean, Asking, BitOr, Commit, Read, ReduceScatterMean
from .parcels import Parcel, same_options
from .sending import AtUnion, Everything

# Options that decide what is sent of a parameter.
ALIKE = ("sparsity", "codec", "sketch_ratio", "payload_dtype", "warmup_steps", "total_steps")


def averaged(parcel: Parcel, ops: Ops, rows: Tensor, out: Tensor, again: bool) -> Asking[None]:
    """One reduce-scatter: the mean over ranks of this rank's row of ``rows`` into ``out``.

    ``again``: an earlier backward belongs to the same step.
    """
    x = parcel.add_up(rows, again)  # line 1
    plain = parcel.as_they_are(rows)
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
    parcel.ahead, parcel.sent = x, sent.counts


def applied(bucket: Bucket, ops: Ops, phase: str) -> Asking[None]:
    """The step: AdamW on this rank's shard, with the gradient that backward left there."""
    h, grads = bucket.group, bucket.grads()
    message = bucket.payload([0] * len(grads), None)
    ops.mark(message, grads)
    mean = yield AllReduceMean(message)
    there = [squared_norm(g.reshape(-1)) for g in grads if g is not None]
    squared = sum(there, torch.zeros(1, dtype=torch.float64, device=bucket.device))
    norm = yield Agree(mean, phase, squared, sharded=True)

    factor = clip_factor(norm, h["max_grad_norm"])
    present = bucket.present(mean)
    yield Commit()
    # from here on state changes
    state = bucket.state
    for i, g in enumerate(grads):
        if not present[i]:
            continue
        w, m, v = bucket.weight(i), state["exp_avg"][i], state["exp_avg_sq"][i]
        step = state["step"][i]
        step += 1
        if w.numel():
            g = torch.zeros_like(w) if g is None else g.to(w.dtype)
            ops.adamw(h, w, g * factor if factor < 1 else g, m, v, step)
            bucket.publish(i)


class Flow:
    """One reduce-scatter on its way."""

    def __init__(self, asking: Asking[None], comm: Comm):
        self.asking, self.comm = asking, comm
        self.pending: Pending | None = comm.start(next(asking))

    def proceed(self) -> None:
        """Wait for the collective on its way, and start the next, if any."""
        assert self.pending is not None
        answer = self.pending.wait()
        if isinstance(answer, Pending):
            self.pending = answer
            return
        try:
            request = self.asking.send(answer)
        except StopIteration:
            self.pending = None
            return
        if isinstance(request, Read):
            self.pending = Pending("a number of the device", None, request.tensor.tolist)
        else:
            self.pending = self.comm.start(request)


class Inside:
    """What TAGC does for one optimizer in the backward of FSDP, between two steps."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.parcels: dict[tuple[Tensor, ...], Parcel] = {}
        self.flows: list[Flow] = []

    @property
    def phase(self) -> str:
        """What the step that comes is."""
        sparse = any(parcel.sparsifies for parcel in self.parcels.values())
        return "sparse" if sparse else "dense"

    def reduce(
        self, params: list[tuple[Tensor, int]], rows: Tensor, out: Tensor, at_once: bool
    ) -> None:
        """Begin FSDP's reduce-scatter of ``rows``, a row a rank, into ``out``; end it ``at_once``,
        or in ``finish``.

        ``params``: whose gradients a row holds, in order, and along which dimension each is cut.
        Collectives start in the order of calls, which is the same on all ranks: with each call
        those before it come one further.
        """
        engine = self.engine
        parcel = self.parcel(params)
        again = any(p.grad is not None for p, _ in params)
        for flow in self.flows:
            flow.proceed()
        asking = averaged(parcel, engine.ops, rows, out, again)
        self.flows.append(Flow(asking, engine.comm))
        self.flows = [flow for flow in self.flows if flow.pending is not None]
        if at_once or again:
            self.finish()

    def finish(self) -> None:
        """Wait for everything that has begun."""
        flows, self.flows = self.flows, []
        while flows:
            for flow in flows:
                flow.proceed()
            flows = [flow for flow in flows if flow.pending is not None]

    def parcel(self, params: list[tuple[Tensor, int]]) -> Parcel:
        """Where these parameters lie in a row."""
        key = tuple(p for p, _ in params)
        if key not in self.parcels:
            self.parcels[key] = self._parcel(params)
        return self.parcels[key]

    def _parcel(self, params: list[tuple[Tensor, int]]) -> Parcel:
        given, groups = [], []
        for p, dim in params:
            residual = None
            bucket = self.engine.bucket_of.get(p)
            if bucket is not None:
                i = next(i for i, other in enumerate(bucket.params) if other is p)
                if bucket.compressed[i]:
                    residual = bucket.state["residual"][i]
                    groups.append(bucket.group)
            given.append((p, dim, residual))
        comm = self.engine.comm
        group = same_options(groups or self.engine.option_groups[:1], ALIKE)
        return Parcel(given, group, comm.rank, comm.size)

    def check(self) -> None:
        """Raise where a step cannot be taken from what FSDP's backward has left."""
        if self.engine.scaled:
            raise RuntimeError(
                "TagcAdamW averages inside FSDP's backward, where it does not know a GradScaler's "
                "scale: train in bfloat16, without a scaler."
            )

    def counts(self) -> Iterator[tuple[int, int | None, int]]:
        """Of each reduce-scatter: elements compressed, sent of these (None: all), leftovers."""
        return ((sum(one.counts), *one.sent) for one in self.parcels.values())

    @property
    def dense_bytes(self) -> int:
        """What FSDP would have handed over."""
        return sum(
            p.numel() * bucket.grad_dtype.itemsize
            for bucket in self.engine.buckets
            for p in bucket.params
        )

    def commit(self) -> None:
        """The step is applied."""
        for parcel in self.parcels.values():
            parcel.commit()

    def drop(self) -> None:
        """The step has ended: what was not applied is not owed."""
        for parcel in self.parcels.values():
            parcel.ahead = None
