"""Finds the DistributedDataParallels of a new optimizer, at their first forward, wherever in the
program that is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .._engine.base import CompressedOptimizer


def after_backward(callback: Callable[[], None]) -> None:
    """Call it when the running backward has ended, after what was asked for before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class Watch:
    """A forward-pre-hook on all modules, which looks into every module once.

    It goes when DDPs hold all trained parameters of its optimizer; or when each of these has had a
    gradient in a step, so that there is no DDP to wait for; or with the optimizer.
    """

    def __init__(
        self,
        optimizer: CompressedOptimizer,
        hand_over: Callable[[list[nn.Module], CompressedOptimizer], Sequence[nn.Module]],
        taken: Sequence[nn.Module],
    ):
        self._optimizer, self._hand_over = weakref.ref(optimizer), hand_over
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._left = {
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        }
        self._cover(taken)
        if self._left:
            self._look = register_module_forward_pre_hook(self.look)
            # Not a hook of torch's, which could not leave by itself.
            optimizer.told_of_steps.append(self.stepped)
            weakref.finalize(optimizer, self._look.remove)

    def look(self, module: nn.Module, args: object) -> None:
        """The hook: ``module`` is about to run."""
        if torch.compiler.is_compiling() or module in self._seen:
            return
        optimizer = self._optimizer()
        if optimizer is not None:
            self._cover(self._hand_over(list(self._unseen(module)), optimizer))
            self._end()

    def _unseen(self, module: nn.Module) -> Iterator[nn.Module]:
        """``module`` and what is in it, but for what was looked into before."""
        if module not in self._seen:
            self._seen.add(module)
            yield module
            for child in module.children():
                yield from self._unseen(child)

    def stepped(self) -> None:
        """The optimizer has made a step."""
        self._left = {p for p in self._left if p.grad is None}
        self._end()

    def _cover(self, found: Sequence[nn.Module]) -> None:
        for module in found:
            self._left.difference_update(module.parameters())

    def _end(self) -> None:
        optimizer = self._optimizer()
        if not self._left:
            self._look.remove()
            if optimizer is not None and self.stepped in optimizer.told_of_steps:
                optimizer.told_of_steps.remove(self.stepped)
