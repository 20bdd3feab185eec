"""Inside FSDP2: an optimizer averages in place of FSDP's own reduce-scatter, in backward.

    fully_shard(model)                                  # ZeRO-3 over all ranks
    optimizer = compopt.TagcAdamW(model.named_parameters(), lr=3e-4)

Where FSDP cuts the parameters over the optimizer's own ranks, each of its reduce-scatters comes
here as soon as backward has the gradients, and what comes of it are FSDP's gradients: whoever clips
or looks at them when backward has ended does so as ever. In ``step()`` all ranks agree, and this
rank's shards are updated. Residuals change then: of a step that is not applied, or a gradient that
is discarded, they stay as they were. FSDP gathers parameters itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .._ops.norms import clip_factor, squared_norm
from .._ops.operations import Ops
from .._state.buckets import Bucket, local
from .._wire.collectives import (
    Communicator,
    PendingCollective,
    ProcessGroup,
    connect,
    is_sharded_over,
)
from .._wire.requests import Agree, AllReduceMean, Commit, ReadToHost, RequestGenerator
from .session import Session
from .update import Update

# whose gradients a row holds, in order, and along which dimension each is cut
Params = list[tuple[Tensor, int]]


class Reduced(Protocol):
    """The parameters of one reduce-scatter, as a method sees them."""

    @property
    def phase(self) -> str:
        """The phase of the coming step."""


@dataclass
class Unsent:
    """What the backwards of one step have not sent of a parameter's gradient.

    ``rest``: what becomes of ``residual`` where the step is applied. ``basis``: what a tracked
    projection then begins with.
    """

    rest: Tensor
    residual: Tensor
    basis: Tensor | None = None

    def replace_residual(self, current: Tensor, factor: float) -> None:
        """Commit ``rest``; ``factor`` of the difference where the average was clipped by that.

        A checkpoint, or another layout, may have replaced ``residual`` since: what this step has
        not sent is then added to the ``current`` one.
        """
        if current is not self.residual:
            current.add_(self.rest.sub_(self.residual), alpha=factor)
        elif factor == 1:
            current.copy_(self.rest)
        else:
            current.lerp_(self.rest, factor)


R = TypeVar("R", bound=Reduced)
Held = dict[Tensor, Unsent]  # of each parameter whose gradient a backward has reduced


class Inside(Generic[R]):
    """What an optimizer does in the backward of FSDP, between two steps.

    ``lay_out`` lays out one reduce-scatter's parameters, of gradients in a dtype.
    ``averaged(those, ops, rows, out, held)`` averages this rank's row of ``rows`` over ranks into
    ``out``. It sends the residual too, but of parameters that are ``held`` by an earlier backward
    of this step, and notes there what it has not sent. ``on_commit(bucket, i, unsent, factor)``
    keeps that, where the step is applied.
    """

    def __init__(
        self,
        session: Session,
        lay_out: Callable[[Params, torch.dtype], R],
        averaged: Callable[[R, Ops, Tensor, Tensor, Held], RequestGenerator[None]],
        on_commit: Callable[[Bucket, int, Unsent, float], None],
    ):
        self.session, self.lay_out = session, lay_out
        self.averaged, self.on_commit = averaged, on_commit
        # whatever is laid out anew between a backward and its step, this is committed
        self.held: Held = {}
        self.of_step: dict[tuple[Tensor, ...], R] = {}  # reduced since the last step
        self.flows: list[Flow] = []
        self._layouts: dict[tuple[Tensor, ...], R] = {}
        self._backward = -1  # the running one

    @property
    def phase(self) -> str:
        """The phase of the coming step."""
        phases = [one.phase for one in self.of_step.values()]
        return next((phase for phase in phases if phase != "dense"), "dense")

    @property
    def dense_bytes(self) -> int:
        """What FSDP would have handed over."""
        buckets = self.session.buckets
        return sum(p.numel() * b.grad_dtype.itemsize for b in buckets for p in b.params)

    def forget_layouts(self) -> None:
        """Lay out anew: parameters came, were frozen, or have their state elsewhere."""
        self._layouts = {}

    def reduce(
        self, params: Params, rows: Tensor, out: Tensor, at_once: bool, backward: int
    ) -> None:
        """Begin FSDP's reduce-scatter of ``rows``, a row a rank, into ``out``; end it ``at_once``,
        or in ``finish``.

        ``backward``: the number of the running one. Collectives start in the order of calls, which
        is the same on all ranks: with each call those before it come one further.
        """
        session = self.session
        key = tuple(p for p, _ in params)
        if backward != self._backward:
            self._backward = backward
            self.finish()  # what a backward has left that raised
            self._forget_discarded()
        if key not in self._layouts:
            self._layouts[key] = self.lay_out(params, rows.dtype)
        self.of_step[key] = self._layouts[key]
        for flow in self.flows:
            flow.proceed()
        asking = self.averaged(self._layouts[key], session.ops, rows, out, self.held)
        self.flows.append(Flow(asking, session.comm))
        self.flows = [flow for flow in self.flows if flow.pending is not None]
        if at_once or any(p.grad is not None for p in key):
            self.finish()

    def _forget_discarded(self) -> None:
        """A backward begins: gradients that are gone since the one before will not be applied, and
        what was not sent of them is not held back.

        Where they were set to zero all ranks ask each other: a shard may be 0 by itself.
        """
        self.held = {p: unsent for p, unsent in self.held.items() if p.grad is not None}
        if self.held:
            session = self.session
            some = any(bool(local(p.grad).any()) for p in self.held if p.grad is not None)
            word = torch.tensor([float(some)], dtype=torch.float32, device=session.device)
            pending = session.comm.start(AllReduceMean(word))
            pending.wait()
            if not word.item():
                self.held = {}

    def finish(self) -> None:
        """Wait for everything that has begun."""
        flows, self.flows = self.flows, []
        while flows:
            for flow in flows:
                flow.proceed()
            flows = [flow for flow in flows if flow.pending is not None]

    def check(self) -> None:
        """Raise where a step cannot be taken from what FSDP's backward has left."""
        if self.session.has_grad_scaler:
            raise RuntimeError(
                f"{self.session.name} averages inside FSDP's backward, where it does not know a "
                "GradScaler's scale: train in bfloat16, without a scaler."
            )

    def commit(self, bucket: Bucket, i: int, norm: float) -> None:
        """The step is applied to tensor i; ``norm``: of all averaged gradients, before a clip."""
        unsent = self.held.get(bucket.params[i])
        if unsent is not None and norm > 0:  # else they were set to zero before the step
            factor = clip_factor(norm, bucket.group["max_grad_norm"])
            self.on_commit(bucket, i, unsent, factor)

    def drop(self) -> None:
        """The step has ended: what was not applied is not held back."""
        self.held, self.of_step = {}, {}


class Flow:
    """One reduce-scatter on its way."""

    def __init__(self, asking: RequestGenerator[None], comm: Communicator):
        self.asking, self.comm = asking, comm
        self.pending: PendingCollective | None = comm.start(next(asking))

    def proceed(self) -> None:
        """Wait for the collective on its way, and start the next, if any."""
        assert self.pending is not None
        answer = self.pending.wait()
        if isinstance(answer, PendingCollective):
            self.pending = answer
            return
        try:
            request = self.asking.send(answer)
        except StopIteration:
            self.pending = None
            return
        if isinstance(request, ReadToHost):
            self.pending = PendingCollective("a number of the device", None, request.tensor.tolist)
        else:
            self.pending = self.comm.start(request)


def applied(
    bucket: Bucket,
    ops: Ops,
    inside: Inside[R],
    update: Update,
    scales: Sequence[float] | None = None,
) -> RequestGenerator[None]:
    """The step: ``update`` takes this rank's shards of the gradient that backward has left.

    ``scales``: what is multiplied with the squared norm of each, where that is larger than of what
    was averaged.
    """
    grads = bucket.grads()
    message = bucket.payload([0] * len(grads), None)
    ops.write_header(message, grads)
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
    for i in (i for i, here in enumerate(present) if here):
        inside.commit(bucket, i, norm)
        g = grads[i]
        bucket.state["step"][i].add_(1)
        ghat = update.memory_for(bucket, i, g if factor == 1 else None)
        if g is None:
            ghat.zero_()
        elif ghat.data_ptr() != g.data_ptr():
            ghat.copy_(g).mul_(factor)
        update.apply(bucket, i, ghat)


def place_of(p: Tensor, session: Session) -> tuple[Bucket, int]:
    """The bucket that holds its state, and which of the bucket's tensors it is."""
    bucket = session.bucket_of[p]
    return bucket, next(i for i, other in enumerate(bucket.params) if other is p)


def is_inside(params: Sequence[Tensor], group: ProcessGroup | Communicator | None) -> bool:
    """Whether FSDP cuts the parameters over the ranks of ``group``, to average with.

    Raises ValueError where it does so with some, and the rest are not FSDP's.
    """
    if not any(hasattr(p, "device_mesh") for p in params):
        return False
    comm = connect(group)
    cut = [is_sharded_over(p, comm) for p in params]
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
