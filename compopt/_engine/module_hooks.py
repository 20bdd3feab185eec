"""Functions that several integrations use: modules found at their first forward, callbacks after
backward, groups that may be destroyed, equal first parameters, and rounds of local steps that end
before an evaluation or a save.

``ddp``, ``fsdp_modules`` and the trainers' callbacks find modules by it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.module import register_module_forward_pre_hook

from .._state.tensors import to_local
from .._wire.requests import Broadcast
from .engine import Engine
from .exchange import exchange_one
from .optimizer import CompressedOptimizer


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has ended, after earlier callbacks."""
    torch.autograd.Variable._execution_engine.queue_callback(
        partial(_call_outside_dynamo, callback)
    )


@_disable_dynamo
def _call_outside_dynamo(callback: Callable[[], None]) -> None:
    """Call ``callback``, which Dynamo would trace if the running backward was compiled."""
    callback()


class Backward:
    """The running backward, as hooks of its gradients see it."""

    def __init__(self) -> None:
        self._number = -1  # given by autograd

    def is_new(self, at_end: Callable[[], None]) -> bool:
        """Return True in the first call in a backward; ``at_end`` is then called at its end."""
        before, self._number = self._number, torch._C._current_graph_task_id()
        if self._number == before:
            return False
        # queued again by itself, to run after those of DDP and FSDP2, which write p.grad
        call_after_backward(lambda: call_after_backward(at_end))
        return True


def list_parameters(optimizer: CompressedOptimizer) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}


@torch.no_grad()
def copy_first_parameters(engine: Engine) -> None:
    """Set the parameters to those of the first rank of the optimizer's group."""
    for bucket in [*engine.buckets, *engine.frozen_buckets]:
        for p in bucket.params:
            local = to_local(p.detach())  # may have gaps, or other strides on other ranks
            local.copy_(exchange_one(engine.comm, Broadcast(local.contiguous())))


def end_open_rounds(optimizers: Iterable[Any]) -> None:
    """End the open rounds of ``optimizers``. All ranks must call it."""
    for optimizer in optimizers:
        if hasattr(optimizer, "end_round"):
            optimizer.end_round()


class ModuleWatch:
    """A forward-pre-hook on all modules, which inspects every module once.

    ``integrate`` is called with new modules, and returns those that it has integrated. The hook is
    removed when these hold all trainable parameters of the optimizer; or when each of the others
    has had a gradient in a step, so that no module is left to find; or with the optimizer. It stays
    while ``expects_more`` is true of the optimizer.
    """

    def __init__(
        self,
        optimizer: CompressedOptimizer,
        integrate: Callable[[list[nn.Module], CompressedOptimizer], Sequence[nn.Module]],
        integrated: Sequence[nn.Module] = (),
        expects_more: Callable[[CompressedOptimizer], bool] = lambda _: False,
    ):
        self._optimizer, self._integrate = weakref.ref(optimizer), integrate
        self._expects_more = expects_more
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._remaining = {p for p in list_parameters(optimizer) if p.requires_grad}
        self._remaining -= {p for module in integrated for p in module.parameters()}
        self.is_active = bool(self._remaining) or expects_more(optimizer)
        if self.is_active:
            self._hook = register_module_forward_pre_hook(self.on_forward)
            # torch's own step hooks could not remove themselves
            optimizer.step_callbacks.append(self.on_step)
            weakref.finalize(optimizer, self._hook.remove)

    def on_forward(self, module: nn.Module, args: object) -> None:
        """Inspect ``module``, which is about to run, and the modules in it."""
        if torch.compiler.is_compiling() or (optimizer := self._optimizer()) is None:
            return
        optimizer.lay_out_new_parameters()
        if module not in self._seen:
            new = [one for one in module.modules() if one not in self._seen]
            self._seen.update(new)
            for integrated in self._integrate(new, optimizer):
                self._remaining.difference_update(integrated.parameters())
            self._end_if_complete()

    def on_step(self) -> None:
        """Stop waiting for parameters that have a gradient without such a module."""
        optimizer = self._optimizer()
        params = frozenset() if optimizer is None else optimizer._engine.parameters
        self._remaining = {p for p in self._remaining if p.grad is None and p in params}
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        optimizer = self._optimizer()
        if self._remaining or (optimizer is not None and self._expects_more(optimizer)):
            return
        self.is_active = False
        self._hook.remove()
        if optimizer is not None and self.on_step in optimizer.step_callbacks:
            optimizer.step_callbacks.remove(self.on_step)
