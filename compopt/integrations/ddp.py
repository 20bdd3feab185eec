"""DistributedDataParallel, with nothing to change in the script.

DDP would average gradients itself, densely. A comm hook that hands each DDP bucket back as it is
stops that and tells the optimizer which gradients backward has finished. It is registered by
``attach``, or by a forward-pre-hook that every new optimizer sets on all modules (see ``_watch``).

An optimizer that is made over parameters of another takes its place at once, on every rank alike:
the one before may still be alive on some of them. Optimizers over different parameters share a DDP.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel as DDP

from .._engine import base
from .._engine.base import CompressedOptimizer
from ._watch import Watch, after_backward

_handovers: weakref.WeakKeyDictionary[DDP, Handover] = weakref.WeakKeyDictionary()


def attach(model: nn.Module, optimizer: CompressedOptimizer) -> None:
    """Let ``optimizer`` average the gradients of ``model`` (a DDP, or a module that holds one)
    instead of DDP.

    Not needed where the optimizer exists before the first forward: it then finds the DDP by itself.
    Another compopt optimizer over some of the same parameters is replaced: from then on its
    ``step()`` raises.

    Raises:
        ValueError: no DDP in ``model`` holds the optimizer's parameters, or DDP and the optimizer
            have different ranks.
        RuntimeError: DDP has a comm hook of somebody else's already, or is in its ``join()``.
    """
    if not hand_over(model.modules(), optimizer, time.monotonic_ns()):
        raise ValueError(
            "model holds no DistributedDataParallel with parameters of this optimizer: wrap it "
            "first, or pass the wrapped model."
        )


def hand_over(
    modules: Iterable[nn.Module], optimizer: CompressedOptimizer, since: int
) -> list[DDP]:
    """The DDPs among ``modules`` that hold parameters of ``optimizer``, which from now on has their
    gradients.

    ``since``: when it was asked for, which says who replaces whom.
    """
    ours = params_of(optimizer)
    found = [m for m in modules if isinstance(m, DDP) and not ours.isdisjoint(m.parameters())]
    for ddp in found:
        _check(ddp, optimizer)
        if ddp not in _handovers:
            _handovers[ddp] = Handover(ddp)
        _handovers[ddp].add(optimizer, since)
    return found


def params_of(optimizer: CompressedOptimizer) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}


class Handover:
    """One DDP whose gradients go to compopt optimizers (several may share its parameters)."""

    def __init__(self, ddp: DDP):
        self._ddp = weakref.ref(ddp)
        self._since: dict[weakref.ref[CompressedOptimizer], int] = {}
        # Autograd's number of the backward that was last heard of.
        self._backward = -1
        # Which parameters required a gradient when they were last looked at.
        self._trained: list[bool] = []
        # Those with a hook of ours.
        self._heard: set[Tensor] = set()
        # DDP does not collect gradients: ranks step on their own.
        self._idle = False
        advice = "compopt needs that place: remove the other hook, or train with torch.optim."
        # Ours is there in a copy.
        ddp._comm_hooks[:] = [(hook, state) for hook, state in ddp._comm_hooks if hook is not _hook]
        if ddp._comm_hooks:
            raise RuntimeError(
                "this DistributedDataParallel has a comm hook already "
                f"({ddp._comm_hooks[0][0].__qualname__}); {advice}"
            )
        try:
            ddp.register_comm_hook(self, _hook)
        except RuntimeError as error:
            raise RuntimeError(
                f"this DistributedDataParallel has a comm hook already; {advice}"
            ) from error

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A DDP that is saved or copied takes no optimizer along: the copy's hook has none."""
        return type(None), ()

    @property
    def ddp(self) -> DDP:
        """The DDP, which is there as long as it is trained."""
        ddp = self._ddp()
        assert ddp is not None
        return ddp

    def add(self, optimizer: CompressedOptimizer, since: int) -> None:
        """Give ``optimizer`` its gradients, in place of those that hold the same parameters for
        less long.
        """
        if optimizer._engine.alone:
            return
        ours = params_of(optimizer)
        for ref, its_since in list(self._since.items()):
            other = ref()
            if other is None or other._engine.alone:
                del self._since[ref]
            elif other is not optimizer and not ours.isdisjoint(params_of(other)):
                if its_since > since:
                    optimizer.retire()
                    return
                del self._since[ref]
                other.retire()
        this = weakref.ref(self)
        if not any(ref() is optimizer for ref in self._since):
            optimizer.told_of_steps.append(lambda: _let(this, Handover.stepped))
        self._since[weakref.ref(optimizer, lambda _: _let(this, Handover.wake))] = since
        self._trained = []
        self.listen()
        optimizer.take_over()

    def optimizers(self) -> Iterator[CompressedOptimizer]:
        return (optimizer for ref in list(self._since) if (optimizer := ref()) is not None)

    @property
    def by_parameter(self) -> bool:
        """Whether buckets may start at any time in backward: neither DDP nor another optimizer does
        there.
        """
        ddp = self.ddp
        return (
            not (ddp.find_unused_parameters or ddp.static_graph)
            and len(list(self.optimizers())) == 1
        )

    def listen(self) -> None:
        """Hear of every gradient as it is finished: sooner than of DDP's buckets of 25 MB."""
        ref = weakref.ref(self)

        def finished(p: Tensor) -> None:
            handover = ref()
            ddp = None if handover is None else handover._ddp()
            if handover is None or ddp is None:
                return
            if handover.by_parameter and (ddp.require_backward_grad_sync or handover._idle):
                handover.finished([p])

        for p in self.ddp.parameters():
            if p.requires_grad and p not in self._heard:
                self._heard.add(p)
                p.register_post_accumulate_grad_hook(finished)

    def finished(self, params: list[Tensor]) -> None:
        """Backward has finished ``params``."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._begin()
            # DDP queues its own last callback, which writes p.grad, after this one: so queue again
            # from inside it.
            after_backward(lambda: after_backward(self._backward_done))
        for optimizer in self.optimizers():
            if self._idle:
                optimizer.handed_over()
            optimizer.gradients_ready(params)

    def stepped(self) -> None:
        """An optimizer has stepped: where the next step is a rank's own, DDP copies no gradients
        into its buckets and back, as within its ``no_sync()``.
        """
        averages = any(optimizer.averages_gradients for optimizer in self.optimizers())
        if averages:
            self.wake()
        elif self.by_parameter:
            self._idle, self.ddp.require_backward_grad_sync = True, False

    def wake(self) -> None:
        """DDP collects gradients again: an optimizer averages them, or none of ours is left."""
        if self._idle:
            self._idle, self.ddp.require_backward_grad_sync = False, True

    def _begin(self) -> None:
        """Look, once in a backward, whether everything that is trained has somebody who averages
        it.
        """
        ddp = self.ddp
        _refuse_join(ddp)
        trained = [p.requires_grad for p in ddp.parameters()]
        if trained != self._trained:
            self._check_cover()
            self.listen()
            self._trained = trained

    def _backward_done(self) -> None:
        for optimizer in self.optimizers():
            optimizer.backward_done()

    def _check_cover(self) -> None:
        ddp = self.ddp
        ours = {p for optimizer in self.optimizers() for p in params_of(optimizer)}
        left = [
            name
            for name, p in ddp.module.named_parameters()
            if p.requires_grad and p not in ours and name not in ddp.parameters_to_ignore
        ]
        if left:
            raise RuntimeError(
                f"{len(left)} parameters of this DistributedDataParallel belong to no compopt "
                f"optimizer ({', '.join(left[:3])}, ...), and nobody would average their "
                "gradients: give them to the optimizer (compress=False keeps them dense) or set "
                "requires_grad=False."
            )


# DDP wants these names, and compares annotations with classes: here they would be strings.
def _hook(state, bucket):  # type: ignore[no-untyped-def]
    return _give_back(state, bucket)


def _give_back(handover: Handover | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Give DDP its bucket back unaveraged; average it as DDP would when no optimizer of ours is
    left.
    """
    optimizers = [] if handover is None else list(handover.optimizers())
    if handover is None or not optimizers:
        group = _get_default_group() if handover is None else handover.ddp.process_group
        return allreduce_hook(group, bucket)
    if not handover.by_parameter:
        handover.finished(bucket.parameters())
    for optimizer in optimizers:
        optimizer.handed_over()
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _let(handover: weakref.ref[Handover], do: Callable[[Handover], None]) -> None:
    """Unless its DDP is gone."""
    alive = handover()
    if alive is not None and alive._ddp() is not None:
        do(alive)


def _check(ddp: DDP, optimizer: CompressedOptimizer) -> None:
    """Raise where ``ddp`` cannot leave its gradients to ``optimizer``."""
    _refuse_join(ddp)
    if any(isinstance(m, DDP) for m in ddp.module.modules()):
        raise RuntimeError(
            "a DistributedDataParallel wraps another one, and both collect the same gradients: "
            "wrap the model once."
        )
    if optimizer._engine.alone:
        return
    theirs = dist.get_process_group_ranks(ddp.process_group)
    group = getattr(optimizer.comm, "group", None)
    ours = dist.get_process_group_ranks(group) if group is not None else theirs
    if set(ours) != set(theirs):
        raise ValueError(
            f"process_group of the optimizer has ranks {ours}, DistributedDataParallel's has "
            f"{theirs}: give both the same group."
        )


def _refuse_join(ddp: DDP) -> None:
    if ddp._join_config.enable:
        raise RuntimeError(
            "DistributedDataParallel.join() lets ranks end at different steps, but a compopt "
            "optimizer exchanges in step(), which a rank that has ended no longer calls: leave "
            "join() out and give all ranks as many batches (drop_last=True)."
        )


def _meet(optimizer: CompressedOptimizer) -> None:
    """Take over the DDPs that already leave gradients to an optimizer; find all others at their
    first forward.
    """
    now = time.monotonic_ns()
    taken = hand_over(list(_handovers), optimizer, now)
    Watch(optimizer, functools.partial(hand_over, since=now), taken)


base.constructed.append(_meet)
