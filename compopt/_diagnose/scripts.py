"""A training script that is diagnosed without a change to it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .diagnosis import Diagnosis


class _EnoughError(BaseException):
    """Ends a script; not an Exception, so that the script does not catch it."""


class CannotError(BaseException):
    """Why a script cannot be diagnosed; its own errors are not this."""


class _Script:
    """What a running script shows: its modules, and the first optimizer that it steps."""

    def __init__(self, begin: Callable[[nn.Module, Optimizer], Diagnosis]):
        self.begin, self.modules = begin, dict[int, nn.Module]()
        self.found: Diagnosis | None = None

    def called(self, module: nn.Module, args: object) -> None:
        """Outer modules are called before what they hold."""
        if self.found is None:
            self.modules.setdefault(id(module), module)

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self.found is None:
            try:
                self.found = self.begin(self.model_of(optimizer), optimizer).__enter__()
            except ValueError as error:
                raise CannotError(str(error)) from error
            self.modules.clear()

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self.found is not None and self.found.steps == self.found.limit:
            # here, while the script's process group is there
            try:
                self.found.finish()
            except RuntimeError as error:
                raise CannotError(str(error)) from error
            raise _EnoughError

    def model_of(self, optimizer: Optimizer) -> nn.Module:
        """The module that holds most of an optimizer's parameters, the outermost of those."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        most, model = -1, nn.Module()
        for module in self.modules.values():
            held = sum(id(p) in mine for p in module.parameters())
            if held > most:
                most, model = held, module
        return model


def watch(
    script: str, arguments: Sequence[str], begin: Callable[[nn.Module, Optimizer], Diagnosis]
) -> Diagnosis:
    """Run a script until enough steps of the first optimizer that it steps were seen.

    Raises CannotError where there is no such file, the script ended before, or there is nothing to
    look at.
    """
    if not os.path.isfile(script):
        raise CannotError(f"{script}: there is no such file.")
    running, argv, path = _Script(begin), sys.argv, list(sys.path)
    hooks = [
        register_module_forward_pre_hook(running.called),
        register_optimizer_step_pre_hook(running.before_step),
        register_optimizer_step_post_hook(running.after_step),
    ]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except (_EnoughError, SystemExit):
        pass
    finally:
        for hook in hooks:
            hook.remove()
        if running.found is not None:
            running.found.leave()
        sys.argv, sys.path[:] = argv, path
    if running.found is None or not running.found.rows:
        steps = running.found.steps if running.found else 0
        raise CannotError(
            f"{script} ended after {steps} optimizer steps that could be looked at: give it more, "
            "or lower --steps."
        )
    return running.found
