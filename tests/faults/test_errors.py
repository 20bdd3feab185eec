"""An error on one rank, in its step or its backward: all hear of it at once, nothing is applied, training goes on."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import FOREVER, run_ranks
from table import CASES, FORMS, Case
from test_lifetime import TRACKED
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._state import buckets

INT8 = Case(
    compopt.RadiusAdamW,
    compressed=dict(density=0.4, interval=5, dense_steps=3, payload_dtype=torch.int8),
    lossless={},
    reference=torch.optim.AdamW,
    form="int8",
)
KINDS = [case for case in [*CASES, *FORMS, TRACKED, INT8] if not case.averaging]
ROUNDS = next(case for case in FORMS if case.form == "rounds")  # steps of a rank's own, and exchanges after them
WAYS = [
    *((case, ("while packing", "in backward")[n % 2]) for n, case in enumerate(KINDS)),
    *((case, "between two exchanges") for case in (TRACKED, CASES[4])),
    (CASES[0], "sparse gradient"),
]
FAILING, STEPS = 5, 8


def fail(optimizer, bucket: int, after: int, error: BaseException) -> None:
    """Its algorithm raises once, in the bucket with this number, when it has had so many answers."""
    algorithm, left = optimizer._session.algorithm, [error]

    def failing(b):
        generator, answer, had = algorithm(b), None, 0
        while True:
            if left and b.index == bucket and had == after:
                generator.close()
                raise left.pop()
            try:
                answer = yield generator.send(answer)
            except StopIteration:
                return
            had += 1

    optimizer._session.algorithm = failing


def fail_to_encode(bucket, error: Exception) -> None:
    """It raises once, where it would write what it sends."""

    def failing(*args):
        del bucket.encode
        raise error

    bucket.encode = failing


def training(case: Case, **options) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 64))
    model = DDP(net, process_group=options.get("process_group"))
    return net, model, case.make(net.parameters(), **options)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().mean().backward()


def attempt(optimizer: torch.optim.Optimizer) -> str:
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def flat(net: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def one_rank_fails(rank: int) -> dict[str, dict]:
    buckets.BUCKET_BYTES = 20_000
    results = {}
    for case, way in WAYS:
        net, model, optimizer = training(case)
        report = {}
        for step in range(STEPS):
            fails = step == FAILING and rank == 1
            if fails and way != "sparse gradient":
                where = 0 if way == "in backward" else len(optimizer._buckets) - 1
                after = int(way == "between two exchanges")
                fail(optimizer, where, after, RuntimeError("no memory left"))
            backward(model, optimizer, step, rank)
            if fails and way == "sparse gradient":
                net[0].weight.grad = net[0].weight.grad.to_sparse()
            before = flat(net)
            message = attempt(optimizer)
            if message:
                report[step] = [message, torch.equal(before, flat(net))]
        results[f"{case.name}, {way}"] = {"told": report, "end": float(flat(net).double().sum()),
                                        "steps": optimizer._option_groups[0]["step"]}  # fmt: skip
    results["exchange"] = one_exchange_fails(rank)
    results["interrupted"] = one_rank_is_interrupted(rank)
    return results


def one_exchange_fails(rank: int) -> list[tuple[str, str, int, float]]:
    """A round of three steps ends with step 5, where rank 1 cannot send what it moved."""
    net, model, optimizer = training(ROUNDS, growth_steps=0)
    report = []
    for step in range(7):
        if step == 4 and rank == 1:
            fail_to_encode(optimizer._anchors.buckets[-1], RuntimeError("no memory left"))
        backward(model, optimizer, step, rank)
        message = attempt(optimizer)
        report.append(
            (message, optimizer.stats.phase, optimizer._option_groups[0]["step"], float(flat(net).double().sum()))
        )
    return report


def one_rank_is_interrupted(rank: int) -> list[str]:
    """Before it has sent anything, and it goes on: what it sends then must not meet what the other waits for."""
    group = dist.new_group(timeout=FOREVER)
    net, model, optimizer = training(CASES[0], process_group=group)
    for step in range(3):
        backward(model, optimizer, step, rank)
        optimizer.step()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
    if rank == 1:
        fail(optimizer, len(optimizer._buckets) - 1, 0, KeyboardInterrupt())
    backward(model, optimizer, 3, rank)
    before, message = flat(net), []
    try:
        optimizer.step()
    except KeyboardInterrupt:
        message.append("interrupted")
        message.append(attempt(optimizer))
    except compopt.CommunicationError as error:
        message.append(str(error))
    return [*message, torch.equal(before, flat(net))]


def test_all_ranks_hear_of_an_error_of_one_before_any_timeout_and_go_on():
    first, second = run_ranks(one_rank_fails, 2)
    for case, way in WAYS:
        report = [results[f"{case.name}, {way}"] for results in (first, second)]
        assert report[0]["end"] == report[1]["end"] and report[0]["steps"] == report[1]["steps"] == STEPS - 1, case.name
        for rank, one in enumerate(report):
            ((message, unchanged),) = one["told"].values()
            assert list(one["told"]) == [FAILING] and unchanged, f"{case.name}, {way}"
            why = "TypeError: " if way == "sparse gradient" else "RuntimeError: no memory left"
            if rank == 1:
                assert message.startswith(why)
            else:
                where = f"step {FAILING + 1} was not applied on rank 0: the gradients of rank 1 ({why}"
                assert message.startswith(f"CommunicationError: {where}"), message
    for rank, report in enumerate((first["exchange"], second["exchange"])):
        message, phases, steps, _ = zip(*report, strict=True)
        assert steps == tuple(range(1, 8)), "a rank's own step stands"
        assert phases[5:] == ("exchanged", "local") and not any(message[:4] + message[5:]), (
            "tried again after the next step"
        )
        assert f"step 5 was taken on rank {rank}, but not the exchange" in message[4] or rank == 1
        assert "no memory left" in message[4]
    ends = [[end for *_, end in results["exchange"]] for results in (first, second)]
    assert [a == b for a, b in zip(*ends, strict=True)] == [True, True, False, False, False, True, False]
    *message, unchanged = second["interrupted"]
    assert message[0] == "interrupted" and "step 4 was not applied on rank 1" in message[1] and unchanged
    assert "step 4 was not applied on rank 0" in first["interrupted"][0] and first["interrupted"][1]
