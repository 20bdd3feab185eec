"""Inside FSDP2: an optimizer averages in place of FSDP's own reduce-scatter, in backward.

    fully_shard(model)                                  # ZeRO-3 over all ranks
    optimizer = compopt.TagcAdamW(model.named_parameters(), lr=3e-4)

Where FSDP cuts the parameters over the optimizer's own ranks, each of its reduce-scatters comes
here as soon as backward has the gradients, and what comes of it are FSDP's gradients: whoever clips
or looks at them when backward has ended does so as ever. In ``step()`` all ranks agree, and this
rank's shards are updated. What a method owes changes then; of a step that is not applied nothing
does. FSDP gathers parameters itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .._ops.clipping import clip_factor
from .._ops.norms import squared_norm
from .._ops.ops import Ops
from .._state.buckets import Bucket
from .._wire.comm import Comm, ProcessGroup, connect
from .._wire.meshes import is_cut_over
from .._wire.pending import Pending
from .._wire.requests import Agree, AllReduceMean, Asking, Commit, Read
from .bases import Base
from .engine import Engine

# whose gradients a row holds, in order, and along which dimension each is cut
Params = list[tuple[Tensor, int]]


class Reduced(Protocol):
    """The parameters of one reduce-scatter, as a method sees them."""

    @property
    def phase(self) -> str:
        """What the step that comes is."""

    def commit(self, norm: float) -> None:
        """The step is applied; ``norm``: of the averaged gradient, before a clip."""

    def drop(self) -> None:
        """The step has ended: what was not applied is not owed."""


R = TypeVar("R", bound=Reduced)


class Inside(Generic[R]):
    """What an optimizer does in the backward of FSDP, between two steps.

    ``make`` lays out one reduce-scatter's parameters, of gradients in a dtype. ``averaged(those,
    ops, rows, out, again)`` is the mean over ranks of this rank's row of ``rows``, into ``out``;
    ``again``: an earlier backward belongs to the same step.
    """

    def __init__(
        self,
        engine: Engine,
        make: Callable[[Params, torch.dtype], R],
        averaged: Callable[[R, Ops, Tensor, Tensor, bool], Asking[None]],
    ):
        self.engine, self.make, self.averaged = engine, make, averaged
        self.reduced: dict[tuple[Tensor, ...], R] = {}
        self.flows: list[Flow] = []
        self.norm = 0.0  # of the step that is being committed

    @property
    def phase(self) -> str:
        """What the step that comes is."""
        phases = [one.phase for one in self.reduced.values()]
        return next((phase for phase in phases if phase != "dense"), "dense")

    @property
    def dense_bytes(self) -> int:
        """What FSDP would have handed over."""
        buckets = self.engine.buckets
        return sum(p.numel() * b.grad_dtype.itemsize for b in buckets for p in b.params)

    def reduce(self, params: Params, rows: Tensor, out: Tensor, at_once: bool) -> None:
        """Begin FSDP's reduce-scatter of ``rows``, a row a rank, into ``out``; end it ``at_once``,
        or in ``finish``.

        Collectives start in the order of calls, which is the same on all ranks: with each call
        those before it come one further.
        """
        engine = self.engine
        key = tuple(p for p, _ in params)
        if key not in self.reduced:
            self.reduced[key] = self.make(params, rows.dtype)
        again = any(p.grad is not None for p in key)
        for flow in self.flows:
            flow.proceed()
        asking = self.averaged(self.reduced[key], engine.ops, rows, out, again)
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

    def check(self) -> None:
        """Raise where a step cannot be taken from what FSDP's backward has left."""
        if self.engine.scaled:
            raise RuntimeError(
                f"{self.engine.name} averages inside FSDP's backward, where it does not know a "
                "GradScaler's scale: train in bfloat16, without a scaler."
            )

    def commit(self) -> None:
        """The step is applied."""
        for one in self.reduced.values():
            one.commit(self.norm)

    def drop(self) -> None:
        """The step has ended."""
        for one in self.reduced.values():
            one.drop()


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


def applied(
    bucket: Bucket, ops: Ops, inside: Inside[R], base: Base, scales: Sequence[float] | None = None
) -> Asking[None]:
    """The step: ``base`` takes this rank's shards of the gradient that backward has left.

    ``scales``: what is multiplied with the squared norm of each, where that is larger than of what
    was averaged.
    """
    grads = bucket.grads()
    message = bucket.payload([0] * len(grads), None)
    ops.mark(message, grads)
    mean = yield AllReduceMean(message)
    squared = torch.zeros(1, dtype=torch.float64, device=bucket.device)
    for g, scale in zip(grads, scales or [1.0] * len(grads), strict=True):
        if g is not None:
            squared += squared_norm(g.reshape(-1)) * scale
    norm = yield Agree(mean, inside.phase, squared, sharded=True)

    factor = clip_factor(norm, bucket.group["max_grad_norm"])
    present = bucket.present(mean)
    yield Commit()
    # from here on state changes
    inside.norm = norm
    for i in (i for i, here in enumerate(present) if here):
        g = grads[i]
        bucket.state["step"][i].add_(1)
        ghat = base.room(bucket, i, g if factor == 1 else None)
        if g is None:
            ghat.zero_()
        elif ghat.data_ptr() != g.data_ptr():
            ghat.copy_(g).mul_(factor)
        base.take(bucket, i, ghat, True)


def place_of(p: Tensor, engine: Engine) -> tuple[Bucket, int]:
    """The bucket that holds its state, and which of the bucket's tensors it is."""
    bucket = engine.bucket_of[p]
    return bucket, next(i for i, other in enumerate(bucket.params) if other is p)


def is_inside(params: Sequence[Tensor], group: ProcessGroup | Comm | None) -> bool:
    """Whether FSDP cuts the parameters over the ranks of ``group``, to average with.

    Raises ValueError where it does so with some, and the rest are not FSDP's.
    """
    if not any(hasattr(p, "device_mesh") for p in params):
        return False
    comm = connect(group)
    cut = [is_cut_over(p, comm) for p in params]
    if any(cut) and not all(cut):
        raise ValueError(
            f"{cut.count(False)} of {len(cut)} parameters are not among those that FSDP cuts over "
            "the ranks of this optimizer: call fully_shard on the whole model before the optimizer "
            "is made, or give the others an optimizer of their own."
        )
    return all(cut)


def check_inside(name: str, was: bool, inside: bool, groups: Sequence[dict[str, object]]) -> None:
    """Raise ValueError where an optimizer cannot average inside FSDP, or cannot any more."""
    if inside and any(group["when"] == "auto" for group in groups):
        raise ValueError(
            "when='auto' times dense steps of its own, and here FSDP reduces: compare two runs."
        )
    if was and not inside:
        raise ValueError(
            f"FSDP cuts the parameters over the ranks this {name} was made with: make FSDP and the "
            "optimizer anew for others, and load a checkpoint."
        )
