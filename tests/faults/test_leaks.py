"""Nothing of an optimizer lives when it is gone and its collectives have ended: real ranks, which make many of them."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import FOREVER, run_ranks
from slow_rows import slow_but
from table import CASES, FORMS
from torch import nn

import compopt
from compopt._wire import collectives

IS_SOAK = "COMPOPT_SOAK" in os.environ  # else a few
OPTIMIZERS = 200 if IS_SOAK else 4  # of each class
REBINDS = 25 if IS_SOAK else 4
CHOSEN = {case.name: case for case in [*CASES, *FORMS]} if IS_SOAK else {case.name: case for case in CASES}


def count_what_lives() -> dict[str, int]:
    """Threads, open files, process groups and tensors of this process, once nothing is in flight any more."""
    for _ in range(1000):
        if not (collectives._unowned or collectives._abandoned):
            break
        gc.collect()
        time.sleep(0.01)
    time.sleep(collectives.FREED_WITHIN)
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map) + len(collectives._abandoned),
        "tensors": sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
        "in flight": len(collectives._in_flight),
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for t in range(steps):
        model.zero_grad()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * t + rank))
        model(x).square().mean().backward()
        optimizer.step()


def made_and_dropped(rank: int, name: str) -> list[dict[str, int]]:
    model, seen = nn.Linear(64, 80), []
    delayed = {"delay": 1} if name == "LocalSteps, rounds" else {}
    for number in range(OPTIMIZERS + 1):
        torch.manual_seed(0)
        model.reset_parameters()  # a round that is dropped leaves unequal ones
        optimizer = CHOSEN[name].make(model.named_parameters(), **delayed)
        train(model, optimizer, rank, 3)
        del optimizer
        if number in (0, OPTIMIZERS):
            dist.barrier()
            seen.append(count_what_lives())
    return seen


@pytest.mark.parametrize("name", slow_but(lambda name: name in ("ScapeAdamS", "SeparateAdam", "LocalSteps"), CHOSEN))
def test_optimizers_that_are_dropped_leave_nothing(name):
    for first, last in run_ranks(made_and_dropped, 2, name):
        assert last == first


def rebound(rank: int, folder: str) -> list[dict[str, int]]:
    """Each time over a group made anew, with a delayed exchange in flight."""
    torch.manual_seed(0)
    model, seen = nn.Linear(64, 80), []
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = compopt.LocalSteps(adamw, every=4, delay=1, fragments=2, growth_steps=0)
    for number in range(REBINDS + 2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{folder}/{number}", rank=rank, world_size=2, timeout=FOREVER)
        optimizer.rebind()
        train(model, optimizer, rank, 4)  # rounds begin with the first step after a rebind
        assert optimizer._sync.running is not None
        if number in (1, REBINDS + 1):
            seen.append(count_what_lives())
    return seen


def test_rebinds_with_an_exchange_in_flight_leave_nothing(tmp_path):
    for first, last in run_ranks(rebound, 2, str(tmp_path)):
        for kind in ("threads", "files", "groups"):
            assert last[kind] <= first[kind], kind  # the running exchange has one
        assert last["tensors"] <= first["tensors"] + 20  # and tensors
