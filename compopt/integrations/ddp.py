"""DistributedDataParallel, with nothing to change in the script.

DDP would average gradients itself, densely. A comm hook that hands each DDP bucket back as it is stops that and tells
the optimizer which gradients backward has finished. It is registered by ``attach``, or by a forward-pre-hook that every
new optimizer sets on all modules, and that removes itself once it has met the DDP holding its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from .. import _base
from .._base import CompressedOptimizer

_handovers: weakref.WeakKeyDictionary[DDP, Handover] = weakref.WeakKeyDictionary()


def attach(model: nn.Module, optimizer: CompressedOptimizer) -> None:
    """Let ``optimizer`` average the gradients of ``model`` (a DDP, or a module that holds one) instead of DDP.

    Not needed where the optimizer exists before the first forward: it then finds the DDP by itself.

    Raises:
        ValueError: no DDP in ``model`` holds the optimizer's parameters, or DDP and the optimizer have different ranks.
        RuntimeError: DDP has a comm hook of somebody else's already.
    """
    if not _attach_all(model, optimizer):
        raise ValueError(
            "model holds no DistributedDataParallel with parameters of this optimizer: wrap it first, or pass the "
            "wrapped model."
        )


def _attach_all(model: nn.Module, optimizer: CompressedOptimizer) -> bool:
    ours = {p for group in optimizer.param_groups for p in group["params"]}
    found = [m for m in model.modules() if isinstance(m, DDP) and not ours.isdisjoint(m.parameters())]
    for ddp in found:
        if ddp not in _handovers:
            _handovers[ddp] = Handover(ddp, optimizer)
        _handovers[ddp].add(optimizer)
    return bool(found)


class Handover:
    """One DDP whose gradients go to compopt optimizers (several may share its parameters)."""

    def __init__(self, ddp: DDP, first: CompressedOptimizer):
        _check_ranks(ddp, first)
        self._ddp = weakref.ref(ddp)
        self._optimizers: list[weakref.ref[CompressedOptimizer]] = []
        self._in_backward = False
        self._covered = False
        advice = "compopt needs that place: remove the other hook, or train with torch.optim."
        if ddp._comm_hooks:
            raise RuntimeError(
                f"this DistributedDataParallel has a comm hook already ({ddp._comm_hooks[0][0].__qualname__}); {advice}"
            )
        try:
            ddp.register_comm_hook(self, _hook)
        except RuntimeError as error:
            raise RuntimeError(f"this DistributedDataParallel has a comm hook already; {advice}") from error

    def add(self, optimizer: CompressedOptimizer) -> None:
        if all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
            self._covered = False
            if len(self._optimizers) == 1:
                self._listen()
        optimizer._handed_over = True

    def _listen(self) -> None:
        """Hear of every gradient as it is finished: sooner than of DDP's buckets of 25 MB."""
        ref = weakref.ref(self)

        def finished(p: Tensor) -> None:
            handover = ref()
            if handover is not None and handover.by_parameter and handover._ddp().require_backward_grad_sync:
                handover.finished([p])

        for p in self._ddp().parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(finished)

    @property
    def by_parameter(self) -> bool:
        """Whether buckets may start at any time in backward: neither DDP nor another optimizer does there."""
        ddp = self._ddp()
        return not (ddp.find_unused_parameters or ddp.static_graph) and len(self._optimizers) == 1

    def optimizers(self) -> Iterator[CompressedOptimizer]:
        return (optimizer for ref in self._optimizers if (optimizer := ref()) is not None)

    def finished(self, params: list[Tensor]) -> None:
        """Backward has finished ``params``."""
        if not self._covered:
            self._check_cover()
        if not self._in_backward:
            self._in_backward = True
            # DDP queues its own last callback, which writes p.grad, after this one: so queue again from inside it.
            _after_backward(lambda: _after_backward(self._backward_done))
        for optimizer in self.optimizers():
            optimizer.gradients_ready(params)

    def _backward_done(self) -> None:
        self._in_backward = False
        for optimizer in self.optimizers():
            optimizer.backward_done()

    def _check_cover(self) -> None:
        ours = {p for optimizer in self.optimizers() for group in optimizer.param_groups for p in group["params"]}
        left = [name for name, p in self._ddp().module.named_parameters() if p.requires_grad and p not in ours]
        if left:
            raise RuntimeError(
                f"{len(left)} parameters of this DistributedDataParallel belong to no compopt optimizer "
                f"({', '.join(left[:3])}, ...), and nobody would average their gradients: give them to the optimizer "
                "(compress=False keeps them dense) or set requires_grad=False."
            )
        self._covered = True


def _hook(state, bucket):  # DDP requires these names and no other annotations
    """Give DDP its bucket back unaveraged; average it as DDP would when no optimizer of ours is left."""
    if next(state.optimizers(), None) is None:
        return allreduce_hook(state._ddp().process_group, bucket)
    if not state.by_parameter:
        state.finished(bucket.parameters())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _after_backward(callback) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _check_ranks(ddp: DDP, optimizer: CompressedOptimizer) -> None:
    theirs = dist.get_process_group_ranks(ddp.process_group)
    group = getattr(optimizer.comm, "group", None)
    ours = dist.get_process_group_ranks(group) if group is not None else theirs
    if set(ours) != set(theirs):
        raise ValueError(
            f"process_group of the optimizer has ranks {ours}, DistributedDataParallel's has {theirs}: "
            "give both the same group."
        )


def _watch(optimizer: CompressedOptimizer) -> None:
    """Attach ``optimizer`` at the first forward of the DDP that holds its parameters."""
    ref = weakref.ref(optimizer)

    def look(module: nn.Module, args: object) -> None:
        found = ref()
        if found is None or found._acquainted or _attach_all(module, found):
            handle.remove()

    handle = register_module_forward_pre_hook(look)


_base.constructed.append(_watch)
