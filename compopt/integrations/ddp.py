"""DistributedDataParallel, with nothing to change in the script.

DDP would average gradients itself, densely. A comm hook that returns each DDP bucket as it is
prevents that, and tells the optimizer which gradients backward has finished. It is registered by
``attach``, or by a forward-pre-hook that every new optimizer sets on all modules (see ``_watch``).

An optimizer that is made over parameters of another replaces it at once, on every rank alike: the
one before may still be alive on some ranks. Optimizers over different parameters share a DDP.
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
from .._engine.session import Role
from ._watch import ModuleWatch, call_after_backward

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
        RuntimeError: DDP has a comm hook of somebody else's already, wraps another DDP, or is in
            its ``join()``.
    """
    if not hand_over_gradients(model.modules(), optimizer, time.monotonic_ns()):
        raise ValueError(
            "model holds no DistributedDataParallel with parameters of this optimizer: wrap it "
            "first, or pass the wrapped model."
        )


def hand_over_gradients(
    modules: Iterable[nn.Module], optimizer: CompressedOptimizer, since: int
) -> list[DDP]:
    """Give ``optimizer`` the gradients of the DDPs among ``modules`` that hold parameters of it;
    return these DDPs.

    ``since``: when it was asked for. Of optimizers over the same parameters the latest wins.
    """
    params = parameters_of(optimizer)
    ddps = [m for m in modules if isinstance(m, DDP) and not params.isdisjoint(m.parameters())]
    for ddp in ddps:
        _check_handover(ddp, optimizer)
        if ddp not in _handovers:
            _handovers[ddp] = Handover(ddp)
        _handovers[ddp].add_optimizer(optimizer, since)
    return ddps


def parameters_of(optimizer: CompressedOptimizer) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}


class Handover:
    """One DDP whose gradients go to compopt optimizers (several may share its parameters)."""

    def __init__(self, ddp: DDP):
        self._ddp = weakref.ref(ddp)
        self._since: dict[weakref.ref[CompressedOptimizer], int] = {}
        self._backward = -1  # autograd's number of the last backward
        self._required_grad: list[bool] = []  # of each parameter, in the last backward
        self._hooked: set[Tensor] = set()  # parameters with a hook of ours
        self._is_idle = False  # DDP does not collect gradients: ranks step on their own
        advice = "compopt needs that place: remove the other hook, or train with torch.optim."
        # in a copy of a DDP there is ours
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
        """Leave the optimizers behind where a DDP is saved or copied: the copy's hook has none."""
        return type(None), ()

    @property
    def ddp(self) -> DDP:
        """The DDP, which exists as long as it is trained."""
        ddp = self._ddp()
        assert ddp is not None
        return ddp

    # Optimizers

    def add_optimizer(self, optimizer: CompressedOptimizer, since: int) -> None:
        """Give ``optimizer`` the gradients, in place of older ones over the same parameters."""
        if optimizer._session.role is Role.WRAPPED:
            return
        params = parameters_of(optimizer)
        for ref, since_then in list(self._since.items()):
            other = ref()
            if other is None or other._session.role is Role.WRAPPED:
                del self._since[ref]
            elif other is not optimizer and not params.isdisjoint(parameters_of(other)):
                if since_then > since:
                    optimizer.retire()
                    return
                del self._since[ref]
                other.retire()
        this = weakref.ref(self)
        if not any(ref() is optimizer for ref in self._since):
            optimizer.told_of_steps.append(lambda: _call_if_alive(this, Handover.on_step))

        def on_deletion(_: object) -> None:
            _call_if_alive(this, Handover.collect_gradients)

        self._since[weakref.ref(optimizer, on_deletion)] = since
        self._required_grad = []
        self.register_parameter_hooks()
        optimizer.take_over()

    def optimizers(self) -> Iterator[CompressedOptimizer]:
        return (optimizer for ref in list(self._since) if (optimizer := ref()) is not None)

    # Backward

    @property
    def is_by_parameter(self) -> bool:
        """Whether exchanges may start at any time in backward: neither DDP nor another optimizer
        starts any there.
        """
        ddp = self.ddp
        return (
            not (ddp.find_unused_parameters or ddp.static_graph)
            and len(list(self.optimizers())) == 1
        )

    def register_parameter_hooks(self) -> None:
        """Hear of every gradient as it is finished: sooner than of DDP's buckets of 25 MB."""
        ref = weakref.ref(self)

        def on_gradient(p: Tensor) -> None:
            handover = ref()
            ddp = None if handover is None else handover._ddp()
            if handover is None or ddp is None:
                return
            collects = ddp.require_backward_grad_sync or handover._is_idle
            if handover.is_by_parameter and collects:
                handover.on_gradients_ready([p])

        for p in self.ddp.parameters():
            if p.requires_grad and p not in self._hooked:
                self._hooked.add(p)
                p.register_post_accumulate_grad_hook(on_gradient)

    def on_gradients_ready(self, params: list[Tensor]) -> None:
        """Tell the optimizers that backward has finished ``params``."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._on_backward_begin()
            # DDP queues its own last callback, which writes p.grad, after this one: so queue again
            # from inside it
            call_after_backward(lambda: call_after_backward(self._on_backward_end))
        for optimizer in self.optimizers():
            if self._is_idle:
                optimizer.handed_over()
            optimizer.gradients_ready(params)

    def _on_backward_begin(self) -> None:
        """Check, once in a backward, that every trainable parameter belongs to an optimizer."""
        ddp = self.ddp
        _refuse_join(ddp)
        required_grad = [p.requires_grad for p in ddp.parameters()]
        if required_grad != self._required_grad:
            self._check_all_owned()
            self.register_parameter_hooks()
            self._required_grad = required_grad

    def _on_backward_end(self) -> None:
        for optimizer in self.optimizers():
            optimizer.backward_done()

    def _check_all_owned(self) -> None:
        ddp = self.ddp
        owned = {p for optimizer in self.optimizers() for p in parameters_of(optimizer)}
        unowned = [
            name
            for name, p in ddp.module.named_parameters()
            if p.requires_grad and p not in owned and name not in ddp.parameters_to_ignore
        ]
        if unowned:
            raise RuntimeError(
                f"{len(unowned)} parameters of this DistributedDataParallel belong to no compopt "
                f"optimizer ({', '.join(unowned[:3])}, ...), and nobody would average their "
                "gradients: give them to the optimizer (compress=False keeps them dense) or set "
                "requires_grad=False."
            )

    # Between steps

    def on_step(self) -> None:
        """Let DDP be idle where the next step is a rank's own: it then copies no gradients into its
        buckets and back, as within its ``no_sync()``.
        """
        averages = any(optimizer.averages_gradients for optimizer in self.optimizers())
        if averages:
            self.collect_gradients()
        elif self.is_by_parameter:
            self._is_idle, self.ddp.require_backward_grad_sync = True, False

    def collect_gradients(self) -> None:
        """Let DDP collect gradients again: an optimizer averages them, or none of ours is left."""
        if self._is_idle:
            self._is_idle, self.ddp.require_backward_grad_sync = False, True


# DDP wants these names, and compares annotations with classes: here they would be strings.
def _hook(state, bucket):  # type: ignore[no-untyped-def]
    return _return_bucket(state, bucket)


def _return_bucket(
    handover: Handover | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Return DDP's bucket as it is; averaged, as by DDP, where no optimizer of ours is left."""
    optimizers = [] if handover is None else list(handover.optimizers())
    if handover is None or not optimizers:
        group = _get_default_group() if handover is None else handover.ddp.process_group
        return allreduce_hook(group, bucket)
    if not handover.is_by_parameter:
        handover.on_gradients_ready(bucket.parameters())
    for optimizer in optimizers:
        optimizer.handed_over()
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _call_if_alive(ref: weakref.ref[Handover], method: Callable[[Handover], None]) -> None:
    handover = ref()
    if handover is not None and handover._ddp() is not None:
        method(handover)


def _check_handover(ddp: DDP, optimizer: CompressedOptimizer) -> None:
    """Raise where ``ddp`` cannot leave its gradients to ``optimizer``."""
    _refuse_join(ddp)
    if any(isinstance(m, DDP) for m in ddp.module.modules()):
        raise RuntimeError(
            "a DistributedDataParallel wraps another one, and both collect the same gradients: "
            "wrap the model once."
        )
    if optimizer._session.role is Role.WRAPPED:
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


def _on_optimizer_made(optimizer: CompressedOptimizer) -> None:
    """Take over the DDPs that already leave gradients to an optimizer; find all others at their
    first forward.
    """
    now = time.monotonic_ns()
    integrated = hand_over_gradients(list(_handovers), optimizer, now)
    ModuleWatch(optimizer, functools.partial(hand_over_gradients, since=now), integrated)


base.constructed.append(_on_optimizer_made)
