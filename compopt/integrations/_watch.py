"""Finds the modules that an optimizer integrates with, at their first forward, wherever in the
program that is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .._engine.base import CompressedOptimizer


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call it when the running backward has ended, after what was queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class ModuleWatch:
    """A forward-pre-hook on all modules, which looks into every module once.

    ``integrate`` is called with new modules, and returns those that it has integrated. The hook is
    removed when these hold all trainable parameters of the optimizer; or when each of the others
    has had a gradient in a step, so that there is no module to wait for; or with the optimizer.
    """

    def __init__(
        self,
        optimizer: CompressedOptimizer,
        integrate: Callable[[list[nn.Module], CompressedOptimizer], Sequence[nn.Module]],
        integrated: Sequence[nn.Module] = (),
    ):
        self._optimizer, self._integrate = weakref.ref(optimizer), integrate
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._remaining = {
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        }
        self._remove_parameters_of(integrated)
        if self._remaining:
            self._hook = register_module_forward_pre_hook(self.on_forward)
            # not a hook of torch's, which could not remove itself
            optimizer.told_of_steps.append(self.on_step)
            weakref.finalize(optimizer, self._hook.remove)

    def on_forward(self, module: nn.Module, args: object) -> None:
        """Look into ``module``, which is about to run."""
        if torch.compiler.is_compiling() or module in self._seen:
            return
        optimizer = self._optimizer()
        if optimizer is not None:
            new = list(self._unseen_modules(module))
            self._remove_parameters_of(self._integrate(new, optimizer))
            self._end_if_complete()

    def on_step(self) -> None:
        """Stop waiting for modules of parameters that have a gradient without one."""
        self._remaining = {p for p in self._remaining if p.grad is None}
        self._end_if_complete()

    def _unseen_modules(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield ``module`` and the modules in it, but for what was looked into before."""
        if module not in self._seen:
            self._seen.add(module)
            yield module
            for child in module.children():
                yield from self._unseen_modules(child)

    def _remove_parameters_of(self, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            self._remaining.difference_update(module.parameters())

    def _end_if_complete(self) -> None:
        optimizer = self._optimizer()
        if not self._remaining:
            self._hook.remove()
            if optimizer is not None and self.on_step in optimizer.told_of_steps:
                optimizer.told_of_steps.remove(self.on_step)
