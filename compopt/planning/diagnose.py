"""`compopt.diagnose`: which compression a model tolerates, from some steps of its own training.

    with compopt.diagnose(model, optimizer) as seen:
        train()  # your own loop, as it is, some dozens of steps
    print(seen)

or, for a script that stays as it is, `compopt-diagnose train.py`, under torchrun where it runs
under torchrun (`torchrun --nproc-per-node 2 -m compopt diagnose train.py`).

The loop remains the user's, with its own batches, scaling, clipping and accumulation. A
hook after `optimizer.step()` reads the weights and gradients of some tensors and runs the methods
beside the training, on copies. Parameters, optimizer state and random numbers of the training are
the same to the bit. Ranks exchange some numbers once, at the end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from .._state.tensors import MIN_COMPRESSED_NUMEL
from .._wire.groups import ProcessGroup, Ranks
from .diagnosis import Diagnosis
from .diagnosis_report import Row
from .formatting import format_number_of, print_report
from .scripts import ScriptError, StopScriptError, hook_first_optimizer, run_script

__all__ = ["Diagnosis", "Row", "diagnose", "main"]


def diagnose(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int = 60,
    start: int = 10,
    elements: int = 1 << 21,
    process_group: ProcessGroup | Ranks | None = None,
) -> Diagnosis:
    """Look at a training, and say which method, rank or density it tolerates.

    Use it around some dozens of steps of your own loop, with the optimizer that you have::

        with compopt.diagnose(model, optimizer) as seen:
            train()
        print(seen)
        seen.plot("diagnosis.png")  # where matplotlib is installed

    Args:
        model: the model, wrapped or not; it gives the names of the tensors.
        optimizer: any of torch.optim or of this package, as the loop steps it. With one of this
            package each rank looks at its own gradient, with others at the ranks' average.
        steps: how many to look at; the loop may take more, which cost nothing. From 110 on the
            largest elements are also compared over 100 steps.
        start: of these, how many every method averages dense before it compresses.
        elements: elements of the model to sample; of every shape of matrix one tensor is sampled,
            in part where it is larger than its share. Every element takes about 450 bytes of
            memory.
        process_group: the ranks whose findings are averaged (None: the default group). All of them
            must come to the end of the block after equally many steps.

    Raises:
        ValueError: an option out of its range, or no tensor that would be compressed.
        RuntimeError: at the end of the block, where too few steps were seen, or ranks have seen
            different ones.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise ValueError(
            "compopt.diagnose takes a model and its optimizer, in this order; got "
            f"{type(model).__name__} and {type(optimizer).__name__}."
        )
    for name, value, least in (
        ("steps", steps, 4),
        ("start", start, 1),
        ("elements", elements, MIN_COMPRESSED_NUMEL),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}.")
    if steps < start + 2:
        raise ValueError(
            f"steps must be larger than start by 2 at least; got {steps} and {start}: methods are "
            "judged by the steps after the start."
        )
    return Diagnosis(model, optimizer, steps, start, elements, process_group)


# The command


class _ScriptWatcher:
    """Global hooks that see a running script's modules and the first optimizer that it steps."""

    def __init__(self, options: dict[str, Any]):
        self.options, self.modules = options, dict[int, nn.Module]()
        self.diagnosis: Diagnosis | None = None
        self.error: Exception | None = None

    def before_forward(self, module: nn.Module, args: object) -> None:
        """Note a module; outer ones are called before the modules that they hold."""
        if self.diagnosis is None:
            self.modules.setdefault(id(module), module)

    def after_step(self, optimizer: Optimizer) -> None:
        with self._stop_on_error():
            if self.diagnosis is None:
                # Only now: Lightning calls the model inside step().
                mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
                # The outermost of the modules that hold most of these parameters.
                model = max(
                    self.modules.values(),
                    key=lambda module: sum(id(p) in mine for p in module.parameters()),
                    default=nn.Module(),
                )
                self.diagnosis = diagnose(model, optimizer, **self.options).__enter__()
                self.diagnosis.after_step(optimizer, (), {})
                self.modules.clear()
            if self.diagnosis.steps < self.diagnosis.limit:
                return
            # The script's process group still exists here.
            self.diagnosis.finish()
        raise StopScriptError

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError) as error:
            self.error = error
            raise StopScriptError from error


def diagnose_script(script: str, arguments: Sequence[str], options: dict[str, Any]) -> Diagnosis:
    """Run a script until enough steps of its first optimizer were recorded.

    Raises ScriptError where there is no such file, the script ended before, or no tensor would be
    compressed.
    """
    watcher = _ScriptWatcher(options)
    hooks = [
        register_module_forward_pre_hook(watcher.before_forward),
        *hook_first_optimizer(watcher.after_step),
    ]
    try:
        run_script(script, arguments, hooks)
    finally:
        if watcher.diagnosis is not None:
            watcher.diagnosis.remove_hook()
    if watcher.error is not None:
        raise ScriptError(str(watcher.error))
    if watcher.diagnosis is None or not watcher.diagnosis.rows:
        steps = watcher.diagnosis.steps if watcher.diagnosis else 0
        count = format_number_of(steps, "optimizer step")
        raise ScriptError(
            f"{script} ended after {count} that could be looked at: give it more, or lower --steps."
        )
    return watcher.diagnosis


def main(argv: Sequence[str] | None = None, prog: str = "compopt-diagnose") -> None:
    """Run the command `compopt-diagnose`; ``argv`` are its arguments, by default the process's."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Say which compression a training script tolerates, from its first steps. "
        "Where the script runs under torchrun, so does this: torchrun ... -m compopt diagnose.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=60, help="of its optimizer to look at (60)")
    add("--dense", dest="start", type=int, default=10, help="of these, dense at first (10)")
    add("--elements", type=int, default=1 << 21, help="of the model to look at (2 million)")
    add("--plot", metavar="FILE.png", help="save a picture")
    add("script", help="that trains")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args(argv)
    settings = {name: getattr(options, name) for name in ("steps", "start", "elements")}
    try:
        diagnosis = diagnose_script(options.script, options.arguments, settings)
    except ScriptError as error:
        parser.error(str(error))
    if os.environ.get("RANK", "0") != "0":
        return
    print_report(str(diagnosis))
    if options.plot:
        try:
            diagnosis.plot(options.plot)
        except ValueError as error:
            parser.error(str(error))
