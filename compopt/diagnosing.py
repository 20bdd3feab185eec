"""`compopt.diagnose`: which compression a model will bear, from some steps of its own training.

    with compopt.diagnose(model, optimizer) as seen:
        train()  # your own loop, as it is, some dozens of steps
    print(seen)

or, of a script that stays as it is, `compopt-diagnose train.py`, under torchrun where it runs under
torchrun (`torchrun --nproc-per-node 2 -m compopt diagnose train.py`).

The loop stays the user's: nobody else knows how it draws batches, scales, clips, accumulates. A
hook after `optimizer.step()` reads the gradients of some tensors and the weights, and runs the
methods beside the training, on copies. The training is not touched: its parameters, its optimizer's
state and the random numbers are the same to the bit. Ranks exchange some numbers once, at the end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ._diagnose.diagnosis import Diagnosis
from ._diagnose.scripts import CannotError, watch
from ._diagnose.telling import Row
from ._wire.comm import ProcessGroup

__all__ = ["Diagnosis", "Row", "diagnose", "main"]


def diagnose(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int = 60,
    start: int = 10,
    elements: int = 1 << 21,
    process_group: ProcessGroup | None = None,
) -> Diagnosis:
    """Look at a training, and say which method, rank or density it will bear.

    Use it around some dozens of steps of your own loop, with the optimizer that you have::

        with compopt.diagnose(model, optimizer) as seen:
            train()
        print(seen)
        seen.plot("diagnosis.png")  # where matplotlib is installed

    Args:
        model: what is trained, for the names of its tensors; wrapped or not.
        optimizer: any of torch.optim or of this package, as the loop steps it. With one of this
            package each rank looks at its own gradient, with others at the ranks' average.
        steps: how many to look at; the loop may take more, which cost nothing. From 110 on the
            largest elements are also compared over 100 steps.
        start: of these, how many every method averages dense before it compresses.
        elements: of the model that are looked at; of every shape of matrix one is, in part where it
            is larger than its share. Every element takes about 450 bytes of memory.
        process_group: the ranks whose gradients are compared (None: the default group). All of them
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
        ("elements", elements, 4096),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}.")
    if steps < start + 2:
        raise ValueError(
            f"steps must be larger than start by 2 at least; got {steps} and {start}: methods are "
            "judged by the steps after the start."
        )
    return Diagnosis(model, optimizer, steps, start, elements, process_group)


def main(argv: Sequence[str] | None = None, prog: str = "compopt-diagnose") -> None:
    """The command `compopt-diagnose`; ``argv`` are its arguments, by default the process's."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Say which compression a training script will bear, from its first steps. "
        "Where the script runs under torchrun, so does this: torchrun ... -m compopt diagnose.",
    )
    parser.add_argument("--steps", type=int, default=60, help="of its optimizer to look at (60)")
    parser.add_argument(
        "--dense", dest="start", type=int, default=10, help="of these, dense at first (10)"
    )
    parser.add_argument(
        "--elements", type=int, default=1 << 21, help="of the model to look at (2 million)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="save a picture")
    parser.add_argument("script", help="that trains")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args(argv)

    def begin(model: nn.Module, optimizer: Optimizer) -> Diagnosis:
        asked = {name: getattr(options, name) for name in ("steps", "start", "elements")}
        return diagnose(model, optimizer, **asked)

    try:
        seen = watch(options.script, options.arguments, begin)
    except CannotError as error:
        parser.error(str(error))
    if os.environ.get("RANK", "0") != "0":
        return
    print(seen)
    if options.plot:
        try:
            seen.plot(options.plot)
        except ValueError as error:
            parser.error(str(error))
