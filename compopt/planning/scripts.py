"""Running a training script under hooks, for `compopt-advise --profile` and `compopt-diagnose`."""

from __future__ import annotations

import functools
import itertools
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._state.tensors import get_device, synchronize
from .formatting import format_number_of
from .workload import Workload


class StopScriptError(BaseException):
    """Ends a script; not an Exception, so that the script does not catch it."""


class ScriptError(ValueError):
    """The reason why a script cannot be watched; not raised for the script's own errors."""


def run_script(script: str, arguments: Sequence[str], hooks: Sequence[Any]) -> None:
    """Run a script as Python would, until it ends or a hook raises `StopScriptError`.

    Args:
        script: the file.
        arguments: of the script.
        hooks: handles of registered hooks, removed at the end.
    """
    argv, path, folder = sys.argv, list(sys.path), os.getcwd()
    streams = sys.stdout, sys.stderr
    try:
        if not os.path.isfile(script):
            raise ScriptError(f"{script}: there is no such file.")
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        with default_process_group():
            runpy.run_path(script, run_name="__main__")
    except StopScriptError:
        pass
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)  # as Python does
    finally:
        for hook in hooks:
            hook.remove()
        sys.argv, sys.path[:] = argv, path
        sys.stdout, sys.stderr = streams
        with suppress(OSError):  # the folder may be gone
            os.chdir(folder)


def hook_first_optimizer(after_step: Callable[[Optimizer], None]) -> list[Any]:
    """Call ``after_step`` after every step of the optimizer that is the first to begin one, but of
    no other: several may step in turn, or inside one another.
    """
    first: list[Optimizer] = []

    def before_any(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not first:
            first.append(optimizer)

    def after_any(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer is first[0]:
            after_step(optimizer)

    return [
        register_optimizer_step_pre_hook(before_any),
        register_optimizer_step_post_hook(after_any),
    ]


@contextmanager
def default_process_group() -> Iterator[None]:
    """Let a script call `init_process_group` without a launcher: it is then the only rank.

    This holds where RANK is not set and the call names no store, rank or method of its own. RANK,
    WORLD_SIZE and LOCAL_RANK are set from then on; at the end they and the group are gone.
    """
    distributed: Any = dist
    init_process_group = distributed.init_process_group
    single_process = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    added: dict[str, str] = {}

    @functools.wraps(init_process_group)
    def init_single_process(*args: Any, **options: Any) -> None:
        method = options.get("init_method", "env://") if len(args) < 2 else args[1]
        is_specified = "RANK" in os.environ or len(args) > 2 or options.keys() & {"store", "rank"}
        if is_specified or method not in (None, "env://"):
            init_process_group(*args, **options)
            return
        added.update({k: v for k, v in single_process.items() if k not in os.environ})
        os.environ.update(added)
        options |= {
            "init_method": None,
            "store": distributed.HashStore(),
            "rank": 0,
            "world_size": 1,
        }
        init_process_group(*args[:1], **options)

    distributed.init_process_group = init_single_process
    try:
        yield
    finally:
        distributed.init_process_group = init_process_group
        for name in added:
            os.environ.pop(name, None)
        if added and dist.is_initialized():
            dist.destroy_process_group()


def profile_script(
    script: str, arguments: Sequence[str] = (), steps: int = 12
) -> tuple[float, Workload]:
    """Run a training script until its first optimizer has stepped `steps` times: median seconds a
    step, and the parameters of all its optimizers.

    The first third of the steps is left out. Start it as one process: waiting for others would
    count as computation.
    """
    moments: list[float] = []
    named: dict[int, tuple[str, torch.Tensor]] = {}

    def after_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            names = group.get("param_names") or [""] * len(group["params"])
            named.update({id(p): (name, p) for name, p in zip(names, group["params"], strict=True)})

    def after_step(optimizer: Optimizer) -> None:
        synchronize(get_device())
        moments.append(time.perf_counter())
        if len(moments) > steps:
            raise StopScriptError

    hooks = [register_optimizer_step_post_hook(after_any_step), *hook_first_optimizer(after_step)]
    run_script(script, arguments, hooks)
    if len(moments) <= steps:
        count = format_number_of(len(moments), "optimizer step")
        raise ScriptError(f"{script} ended after {count}; --profile needs {steps + 1}.")
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return statistics.median(gaps[steps // 3 :]), Workload.of(named.values())
