"""A rank that is killed inside FSDP2, or behind DDP in a site: the others raise and are as they were, and fewer ranks
go on from the checkpoint. Parameters are gathered, and residuals stored, in int8.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import cut, make, train, whole
from lossy import limit_waits, run_lossy
from ranks import FOREVER
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._engine.fsdp_backward import FSDPBackward
from compopt._state.tensors import to_local
from compopt.integrations import _fsdp_gather

pytestmark = pytest.mark.slow

TIMEOUT = 5  # seconds: a rank that waits for another survivor hears of a death no sooner
OPTIONS = dict(lr=1e-2, rank=4, dense_steps=2, residual_dtype="int8")


def connect(file: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=FOREVER)


def begin_inside() -> tuple[nn.Module, compopt.SeparateAdam]:
    model = cut(make())
    return model, compopt.SeparateAdam(model.parameters(), gather_dtype="int8", **OPTIONS)


def begin_in_sites() -> tuple[nn.Module, compopt.SeparateAdam]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = DDP(make(), process_group=mesh.get_group("shard"))
    return model, compopt.SeparateAdam(model.parameters(), process_group=mesh.get_group("replicate"), **OPTIONS)


def begin_without_sites() -> tuple[nn.Module, compopt.SeparateAdam]:
    model = DDP(make())
    return model, compopt.SeparateAdam(model.parameters(), **OPTIONS)


def save(model: nn.Module, optimizer: compopt.SeparateAdam, folder: str) -> None:
    optimizer.consolidate_state()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: compopt.SeparateAdam, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def held(optimizer: compopt.SeparateAdam) -> list[torch.Tensor]:
    """Copies of all that this rank holds and a step may change. A module has gathered parameters after an error."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return [to_local(x.detach()).clone() for x in (*params, *state)]


def kill_in_call(holder: object, name: str, number: int) -> None:
    """This process ends in a call of a function, of which there were ``number`` before."""
    function, calls = getattr(holder, name), iter(range(number))

    def call(*args):
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    setattr(holder, name, call)


INSIDE: dict[str, Callable[[], None]] = {  # three modules are gathered in forward, two of them in backward again
    "a gather in forward": lambda: kill_in_call(_fsdp_gather, "gather_into", 1),
    "a gather in backward": lambda: kill_in_call(_fsdp_gather, "gather_into", 3),
    "a reduce-scatter": lambda: kill_in_call(FSDPBackward, "reduce", 1),
    "the step": lambda: kill_in_call(compopt.SeparateAdam, "step", 0),
}
IN_SITES: dict[str, Callable[[], None]] = {
    "DDP's average": lambda: kill_in_call(torch.Tensor, "backward", 0),
    "the step": INSIDE["the step"],
}


KINDS = {
    "inside": (begin_inside, begin_inside, INSIDE),
    "sites": (begin_in_sites, begin_without_sites, IN_SITES),
}


def survive(rank: int, _: None, file: str, kind: str, folder: str, when: str, dying: int) -> dict[str, object]:
    ranks, (begin, begin_again, deaths) = dist.get_world_size(), KINDS[kind]
    model, optimizer = begin()
    train(model, optimizer, range(4), rank)
    save(model, optimizer, folder)
    train(model, optimizer, range(4, 6), rank)
    limit_waits(TIMEOUT)
    before = held(optimizer)
    if rank == dying:
        deaths[when]()
    results: dict[str, object] = {}
    try:
        train(model, optimizer, range(6, 7), rank)
    except RuntimeError as error:
        results["error"] = f"{type(error).__name__}: {error}"
    results["as it was"] = all(map(torch.equal, before, held(optimizer)))
    dist.destroy_process_group()
    connect(file + "2", rank - (rank > dying), ranks - 1)
    model, optimizer = begin_again()
    load(model, optimizer, folder)
    residuals = [entry["residual"] for entry in optimizer.state.values() if "residual" in entry]
    results["residual"] = sum(int(stored.sum()) for stored in residuals)
    train(model, optimizer, range(4, 7), dist.get_rank())
    return {**results, "sum": float(whole(model).sum())}


def check(answers: dict[int, dict[str, object]], when: str) -> None:
    for answer in answers.values():
        assert answer["as it was"] and "error" in answer, answer
        if when == "the step":
            assert str(answer["error"]).startswith("CommunicationError: step 7 was not applied"), answer
    assert len({(answer["sum"], answer["residual"]) for answer in answers.values()}) == 1, answers
    assert answers[0]["residual"]


@pytest.mark.parametrize("when", INSIDE)
def test_a_rank_that_is_killed_inside_fsdp2(when, tmp_path):
    check(run_lossy(survive, 3, "inside", str(tmp_path), when, 1, dying=1, begin=connect), when)


@pytest.mark.parametrize("when", IN_SITES)
def test_a_rank_that_is_killed_in_a_site(when, tmp_path):
    check(run_lossy(survive, 4, "sites", str(tmp_path), when, 3, dying=3, begin=connect), when)
