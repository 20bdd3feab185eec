"""A rank that cannot take part inside FSDP2, in backward or in the step: all ranks raise, none has changed anything."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from fsdp_models import Two, apart, cut, loss, make, whole
from ranks import catch_message, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import compopt
from compopt._engine import meetings
from compopt._fsdp.fsdp_bucket import ReduceScatterBucket

CLASSES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "tracked": lambda m: compopt.SeparateAdam(m.named_parameters(), lr=1e-2, rank=4, dense_steps=1),
    "int8": lambda m: compopt.Average(torch.optim.SGD(m.parameters(), lr=1e-3), payload_dtype="int8"),
    "tagc": lambda m: compopt.TagcAdamW(
        [{"params": [*m.named_parameters()], "compress": True}], lr=1e-3, density=0.2, dense_steps=1
    ),
}
MESSAGE = "no memory left"


class Fails:
    """Make this rank's next reduction fail before its request number ``at``, once; None: when it is written."""

    def __init__(self, optimizer: torch.optim.Optimizer, at: int | None):
        self.optimizer, self.at, self.has_failed = optimizer, at, False
        self.make_reducer, self.write_shard = optimizer.make_reducer, ReduceScatterBucket.write_shard

    def __enter__(self) -> None:
        if self.at is None:
            ReduceScatterBucket.write_shard = self.fail
        else:
            self.optimizer.make_reducer = self.make

    def __exit__(self, *_: object) -> None:
        vars(self.optimizer).pop("make_reducer", None)
        ReduceScatterBucket.write_shard = self.write_shard
        assert self.has_failed

    def fail(self, *_: object) -> None:
        self.has_failed = True
        raise MemoryError(MESSAGE)

    def make(self, bucket: ReduceScatterBucket) -> object:
        reducer = self.make_reducer(bucket)
        if not self.has_failed:
            reducer.reduce = lambda reduce=reducer.reduce: self.reduce(reduce())
        return reducer

    def reduce(self, requests: Generator) -> Generator:
        answer = None
        for number in range(100):
            if number == self.at:
                self.fail()
            try:
                request = requests.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield request


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    entries = [v for entry in state.values() for v in entry.values() if isinstance(v, Tensor)]
    return [whole(model), *(v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for v in entries)]


def fails_once(rank: int, name: str, at: int | None) -> dict[str, object]:
    """A backward in which rank 1 fails, and its step; the step again; then another backward, beside a twin."""
    models = [cut(make(Two, torch.float32)) for _ in range(2)]
    optimizer, twin = (CLASSES[name](model) for model in models)
    for model, one in zip(models, (optimizer, twin), strict=True):
        for step in range(3):
            one.zero_grad()
            loss(model, step, rank, torch.float32).backward()
            one.step()
    before = state_of(models[0], optimizer)
    optimizer.zero_grad()
    value = loss(models[0], 3, rank, torch.float32)
    if rank == 1:
        with Fails(optimizer, at):
            value.backward()
    else:
        value.backward()
    error = MemoryError if rank == 1 else compopt.CommunicationError
    told = catch_message(error, optimizer.step)
    after = state_of(models[0], optimizer)
    optimizer.step()
    skipped = optimizer.stats.skipped, state_of(models[0], optimizer)
    for model, one in zip(models, (optimizer, twin), strict=True):
        one.zero_grad()
        loss(model, 4, rank, torch.float32).backward()
        one.step()
    return {
        "told": told,
        "unchanged": all(map(torch.equal, before, after)) and all(map(torch.equal, before, skipped[1])),
        "skipped": skipped[0],
        "apart": apart(*models),
    }


def all_fail_once(rank: int) -> dict[str, dict[str, object]]:
    cases = [("tracked", 0), ("tracked", 1), ("tracked", 2), ("int8", 0), ("tagc", 1), ("tagc", None)]
    return {f"{name} {at}": fails_once(rank, name, at) for name, at in cases}


def test_all_ranks_raise_and_go_on_when_one_fails_in_backward():
    of_ranks = run_ranks(all_fail_once, 2)
    for name, case in ((name, case) for rank in of_ranks for name, case in rank.items()):
        assert MESSAGE in case["told"], name
        assert case["unchanged"], name
        assert case["skipped"] == 1 and case["apart"] == 0, name
    sentence = (
        f"step 4 was not applied on rank 0: the gradients of rank 1 (MemoryError: {MESSAGE}) could not be sent, and "
        "nothing was applied: correct the error of that rank, and repeat zero_grad(), backward and step() on all ranks."
    )
    assert {case["told"] for case in of_ranks[0].values()} == {sentence}


class Skipping(nn.Module):
    """A module that one rank alone does not use in some steps."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return (x if self.skips else self.other(x)).sum(1, keepdim=True)


def fails_otherwise(rank: int) -> dict[str, str]:
    """A rank alone has no gradient of some parameters; or cannot begin its step."""
    model = fully_shard(make(Skipping, torch.float32))
    optimizer = CLASSES["tracked"](model)
    results, error = {}, RuntimeError if rank == 1 else compopt.CommunicationError
    model.skips = rank == 1
    loss(model, 0, rank, torch.float32).backward()
    results["unused"] = catch_message(error, optimizer.step)
    optimizer.zero_grad(set_to_none=False)  # the next backward asks all ranks whether they are zeros
    model.skips = False
    loss(model, 1, rank, torch.float32).backward()
    group = optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], "x" if rank == 1 else group["lr"]
    results["option"] = catch_message(ValueError, optimizer.step)
    group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1:  # before the backward, which needs it
        group["rank"] = "x"
    loss(model, 2, rank, torch.float32).backward()
    error = ValueError if rank == 1 else compopt.CommunicationError
    results["needed"] = catch_message(error, optimizer.step)
    optimizer.zero_grad()
    loss(model, 2, rank, torch.float32).backward()
    optimizer.step()
    results["steps"], results["rank"] = str(optimizer._engine.steps), group["rank"]
    model = fully_shard(make(Skipping, torch.float32))
    optimizer = compopt.Separate(torch.optim.SGD(model.parameters(), lr=1e-3), rank=4)
    group = optimizer.param_groups[0]
    if rank == 1:  # in a group of the base, which had none
        group["compopt_rank"] = "x"
    loss(model, 0, rank, torch.float32).backward()
    results["base"] = catch_message(error, optimizer.step)
    results["has it"] = "compopt_rank" in group
    return results


def test_all_ranks_raise_when_one_has_other_gradients_or_cannot_begin_its_step():
    for results in run_ranks(fails_otherwise, 2):
        assert "set_reduce_scatter_unused_params(True)" in results["unused"]
        assert "lr" in results["option"] and "'x'" in results["option"]
        assert "rank must be" in results["needed"] and "'x'" in results["needed"], results["needed"]
        assert results["steps"] == "2" and results["rank"] == 4
        assert "rank must be" in results["base"] and not results["has it"], results["base"]


def reads_in_backward(rank: int, kind: str) -> dict[str, object]:
    """Averages that backward reads, of which the last handshake has not told: on all ranks, or on rank 0 alone."""
    models, norms = [cut(make(Two, torch.float32)) for _ in range(2)], []
    optimizer, twin = map(CLASSES["tracked"], models)
    for model, one in zip(models, (optimizer, twin), strict=True):
        for step in range(3):
            loss(model, step, rank, torch.float32).backward()
            one.step()
            if step < 2 or one is twin or not kind.startswith("kept") or (rank == 1 and kind == "kept on one"):
                one.zero_grad()
            else:
                one.zero_grad(set_to_none=False)
    weight = models[0].flat.weight
    if kind == "hook" or (kind == "hook on one" and rank == 0):
        weight.register_post_accumulate_grad_hook(lambda p: norms.append(float(p.grad.to_local().norm())))
    elif kind == "kept but one" and rank == 1:  # of the module that backward reduces first
        models[0].flat.weight.grad = models[0].flat.bias.grad = None
    told = ""
    if kind.endswith("on one"):
        patience, meetings.PATIENCE_IN_BACKWARD = meetings.PATIENCE_IN_BACKWARD, 0.5
        loss(models[0], 9, rank, torch.float32).backward()
        meetings.PATIENCE_IN_BACKWARD = patience
        told = catch_message(compopt.CommunicationError if rank else RuntimeError, optimizer.step)
        optimizer.zero_grad()
        norms.clear()
    for model, one in zip(models, (optimizer, twin), strict=True):
        loss(model, 3, rank, torch.float32).backward()
        one.step()
    right = [float(weight.grad.to_local().norm())] * (kind == "hook" or (kind == "hook on one" and rank == 0))
    return {"told": told, "read": norms == right, "apart": apart(*models)}


def all_read_in_backward(rank: int) -> dict[str, dict[str, object]]:
    kinds = "hook", "hook on one", "kept", "kept but one", "kept on one"
    return {kind: reads_in_backward(rank, kind) for kind in kinds}


def test_ranks_wait_alike_in_backward_or_are_told_who_has_to_alone():
    for rank, cases in enumerate(run_ranks(all_read_in_backward, 2)):
        for kind, case in cases.items():
            assert case["read"] and case["apart"] == 0, (kind, case)
            assert bool(case["told"]) == kind.endswith("on one")
        for kind, what in (("hook on one", "flat.weight has a hook"), ("kept on one", "has a gradient of before")):
            told = cases[kind]["told"]
            assert f"{what} on rank 0" in told and "rank 1 did not come" in told, told
            assert rank == 0 or "repeat zero_grad(), backward and step() on all ranks" in told, told
