"""What the cost model needs to know of a machine and a script, measured: local speed, and seconds a
step.
"""

from __future__ import annotations

import itertools
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._state.devices import here, synchronize
from .workload import Workload


def measure_local(device: torch.device) -> tuple[float, float]:
    """Bytes a second that one process moves in this device's memory, and FLOPs a second in matrix
    products.
    """
    vector = torch.ones(1 << 23, dtype=torch.float32, device=device)
    copy = torch.empty_like(vector)
    memory = 2 * vector.nbytes / median_seconds(lambda: copy.copy_(vector), device)
    return memory, measure_products(device, torch.float32)


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second in matrix products of that precision."""
    matrix = torch.ones(512, 512, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    return 2 * 512**3 / median_seconds(lambda: torch.mm(matrix, matrix, out=product), device)


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Seconds of one call, after two that are not counted."""
    taken = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


class _EnoughError(BaseException):
    """Ends a profiled script; not an Exception, so that the script does not catch it."""


def profile(script: str, arguments: Sequence[str] = (), steps: int = 12) -> tuple[float, Workload]:
    """Run a training script until its optimizer has stepped `steps` times: median seconds a step,
    and its parameters.

    The first third of the steps is left out. Start it as one process: what it waits for would count
    as computation.

    Raises:
        ValueError: the script ended before enough steps, or there is no such file.
    """
    if not os.path.isfile(script):
        raise ValueError(f"--profile {script}: there is no such file.")
    moments: list[float] = []
    named: dict[int, tuple[str, torch.Tensor]] = {}

    def after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        synchronize(here())
        moments.append(time.perf_counter())
        for group in optimizer.param_groups:
            names = group.get("param_names") or [""] * len(group["params"])
            named.update({id(p): (name, p) for name, p in zip(names, group["params"], strict=True)})
        if len(moments) > steps:
            raise _EnoughError

    hook, argv = register_optimizer_step_post_hook(after_step), sys.argv
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except (_EnoughError, SystemExit):
        pass
    finally:
        hook.remove()
        sys.argv = argv
    if len(moments) <= steps:
        raise ValueError(
            f"--profile {script}: it ended after {len(moments)} optimizer steps, {steps + 1} are "
            "needed."
        )
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return statistics.median(gaps[steps // 3 :]), Workload.of(named.values())
