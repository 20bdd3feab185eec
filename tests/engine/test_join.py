"""Uneven data: torch's Join with DDP and an optimizer of every class, and a mean that loses nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from conformance import Small
from ranks import run_ranks
from slow_rows import slow_but
from table import CASES, FORMS, by_name
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt

BATCHES = {2: (5, 3), 3: (5, 3, 0)}


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.flip(1)).square().mean()


def are_equal(params) -> bool:
    """Return True if all ranks hold the same."""
    mine = torch.cat([p.detach().double().view(-1) for p in params])
    other = mine.clone()
    dist.broadcast(other, 0)
    same = torch.tensor(float(torch.equal(mine, other)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def every_class(rank: int, batches: tuple[int, ...], names: list[str]) -> dict[str, tuple[bool, bool, int]]:
    """Replicas equal after a Join, and after some more steps without one; and how many steps were taken."""
    results = {}
    for case in (case for case in [*CASES, *FORMS] if case.name in names):
        torch.manual_seed(0)
        ddp = DDP(Small(), find_unused_parameters=True)
        optimizer = case.make(ddp.parameters())
        with Join([ddp, optimizer]):
            for step in range(batches[rank]):
                optimizer.zero_grad()
                loss_of(ddp, batch(rank, step)).backward()
                optimizer.step()
        after, steps = are_equal(ddp.parameters()), optimizer.option_groups[0]["step"]
        for step in range(2):
            optimizer.zero_grad()
            loss_of(ddp, batch(rank, 10 + step)).backward()
            optimizer.step()
        if isinstance(optimizer, compopt.LocalSteps):
            optimizer.end_round()
        results[case.name] = after, are_equal(ddp.parameters()), steps
        del optimizer, ddp
    return results


@pytest.mark.parametrize(
    ("ranks", "cases"),
    slow_but(lambda ranks, cases: (ranks, cases) == (3, CASES), itertools.product((2, 3), (CASES, FORMS))),
    ids=lambda value: value if isinstance(value, int) else ("classes", "forms")[value is FORMS],
)
def test_every_class_ends_with_equal_replicas_however_much_data_ranks_have(ranks, cases):
    names = [case.name for case in cases]
    for results in run_ranks(every_class, ranks, BATCHES[ranks], names):
        assert results == dict.fromkeys(names, (True, True, 5))


class Linear(nn.Module):
    """Its loss is linear: the gradient is what it is called with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.p = nn.Parameter(torch.randn(64, 96, dtype=torch.float64))

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return (self.p * g).sum()


def make(name: str, params, **options):
    sgd = torch.optim.SGD(params, lr=1.0)
    if name == "LocalSteps":
        rounds = {"every": 2, "growth_steps": 0, "outer_lr": 1, "outer_momentum": 0, **options}
        return compopt.LocalSteps(sgd, payload_dtype="int4", **rounds)
    if name == "Separate":
        return compopt.Separate(sgd, rank=4, dense_steps=0, **options)
    return compopt.Average(sgd, payload_dtype="int4", **options)


FORMS_OF = [("Average", {}), ("Separate", {}), ("LocalSteps", {}), ("LocalSteps", {"fragments": 2, "delay": 1})]


def books(rank: int, batches: tuple[int, ...], with_ddp: bool, divide: bool) -> list[float]:
    """Return the relative distance of what all ranks moved and hold back from their gradients."""
    results = []
    for name, options in FORMS_OF:
        if name == "LocalSteps" and not divide:
            continue
        linear = Linear()
        p, model = linear.p, DDP(linear) if with_ddp else linear
        start = p.detach().clone()
        optimizer = make(name, model.parameters(), **options)
        total, active = torch.zeros_like(p), 0
        with Join([model, optimizer] if with_ddp else [optimizer], divide_by_initial_world_size=divide):
            for step in range(batches[rank]):
                optimizer.zero_grad()
                g = torch.randn(64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(99 * step + rank))
                active = len(batches) if divide else sum(n > step for n in batches)
                total += g / active
                model(g).backward()
                optimizer.step()
        assert name != "LocalSteps" or are_equal([p]), "the join has left a round open"
        for step in range(10, 12):  # after the join: every gradient counts once
            optimizer.zero_grad()
            g = torch.randn(64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(99 * step + rank))
            total += g / len(batches)
            model(g).backward()
            optimizer.step()
        if name == "LocalSteps":
            optimizer.end_round()
        entry = optimizer.state_dict()["state"][0]
        residual = entry["outer"]["optimizer"]["residual"] if name == "LocalSteps" else entry["residual"]
        residuals = residual.double() / len(batches)
        for tensor in (total, residuals):
            dist.all_reduce(tensor)
        error = (start - p.detach() + residuals - total).norm() / total.norm()
        results.append(float(error))
        del model, optimizer, linear, p
    return results


@pytest.mark.filterwarnings("ignore:.*is incomplete")
@pytest.mark.parametrize(
    ("with_ddp", "divide"), slow_but(lambda ddp, _: ddp, [(True, True), (False, True), (True, False)])
)
def test_nothing_that_a_rank_computed_is_lost(with_ddp, divide):
    """The gradients of all ranks have moved the parameters, but for the residuals."""
    for errors in run_ranks(books, 3, BATCHES[3], with_ddp, divide):
        assert len(errors) == (4 if divide else 2) and max(errors) < 1e-12


def weigh(rank: int, batches: tuple[int, ...]) -> float:
    """A rank's share in the average of a round of four steps, of which it has taken fewer if it had less data."""
    linear = Linear()
    sgd = torch.optim.SGD(linear.parameters(), lr=1.0)
    optimizer = compopt.LocalSteps(sgd, 4, weighted=True, growth_steps=0)
    with Join([optimizer]):
        for step in range(batches[rank]):
            g = torch.randn(64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(99 * step + rank))
            optimizer.zero_grad()
            linear(g).backward()
            optimizer.step()
    return optimizer.stats.weight


def test_a_rank_that_has_run_out_of_data_has_the_weight_of_its_own_steps():
    assert run_ranks(weigh, 3, (4, 3, 1)) == pytest.approx([4 / 8, 3 / 8, 1 / 8])


def schedules(rank: int, batches: tuple[int, ...]) -> list[tuple[bool, float, int]]:
    """With a scheduler that only ranks with data step: equal replicas, the last learning rate, calls after steps.

    In two epochs, after which all schedulers are given the same step.
    """
    results = []
    for name in ("RadiusAdamW", "LocalSteps"):
        torch.manual_seed(0)
        ddp = DDP(Small(), find_unused_parameters=True)
        if name == "LocalSteps":
            adamw = torch.optim.AdamW(ddp.parameters(), lr=torch.tensor(0.01))
            optimizer = compopt.LocalSteps(adamw, 2, growth_steps=0)
        else:
            optimizer = by_name[name].make(ddp.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        first, calls = float(scheduler.base_lrs[0]), []
        optimizer.step_callbacks.append(lambda calls=calls: calls.append(1))
        for _ in range(2):
            with Join([ddp, optimizer]):
                for step in range(batches[rank]):
                    optimizer.zero_grad()
                    loss_of(ddp, batch(rank, step)).backward()
                    optimizer.step()
                    scheduler.step()
            scheduler.last_epoch = len(calls)
        results.append((are_equal(ddp.parameters()), first / float(optimizer.param_groups[0]["lr"]), len(calls)))
    return results


def test_a_rank_without_data_follows_the_schedule_of_the_others():
    for results in run_ranks(schedules, 2, BATCHES[2]):
        for same, divisor, calls in results:
            assert same and divisor == pytest.approx(11) and calls == 10


def leaves_out(rank: int, batches: tuple[int, ...]) -> tuple[list[float], float]:
    """The steps of two tensors, of which ranks leave out one once a rank has no data; what is owed of that one."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(64, 96)) for _ in range(2)]
    optimizer = make("Average", params)
    with Join([optimizer]):
        for step in range(batches[rank]):
            optimizer.zero_grad()
            for p in params[: 2 if step < min(batches) else 1]:
                p.grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(99 * step + rank))
            optimizer.step()
    return [float(optimizer.state[p]["step"]) for p in params], float(optimizer.state[params[1]]["residual"].norm())


def test_a_tensor_that_all_ranks_with_data_leave_out_takes_no_step():
    """A rank without data keeps its residual until the next gradient, as outside a join."""
    for steps, residuals in run_ranks(leaves_out, 2, BATCHES[2]):
        assert steps == [5, 3] and residuals > 0


def refusals(rank: int) -> dict[str, str]:
    results = {}

    def catch_message(function) -> str:
        with pytest.raises((RuntimeError, ValueError)) as raised:
            function()
        return str(raised.value)

    def one_step(*joinables_of) -> None:
        torch.manual_seed(0)
        ddp = DDP(Small(), find_unused_parameters=True)
        optimizer = compopt.SeparateAdam(ddp.parameters())
        with Join([{"ddp": ddp, "optimizer": optimizer}[name] for name in joinables_of]):
            loss_of(ddp, batch(rank, 0)).backward()

    results["alone"] = catch_message(lambda: one_step("ddp"))
    results["order"] = catch_message(lambda: one_step("optimizer", "ddp"))
    rounds = make("LocalSteps", [nn.Parameter(torch.ones(4))])
    results["rounds"] = catch_message(lambda: Join([rounds], divide_by_initial_world_size=False))
    timed = compopt.LocalSteps(torch.optim.SGD([nn.Parameter(torch.ones(4))]), round_seconds=1)
    results["timed"] = catch_message(lambda: Join([timed]))
    results["early"] = catch_message(lambda: ends_early(rank))
    return results


def ends_early(rank: int) -> None:
    p = nn.Parameter(torch.ones(64, 96))
    optimizer = make("Average", [p])
    with Join([optimizer], throw_on_early_termination=True):
        for _ in range(2 + rank):
            p.grad = torch.full_like(p, 1.0 + rank)
            optimizer.step()


def test_what_does_not_work_is_refused_with_the_line_to_write():
    for rank, results in enumerate(run_ranks(refusals, 2)):
        assert "write `with Join([ddp_model, optimizer]):`" in results["alone"]
        assert "has to come before its optimizer" in results["order"]
        assert "divide_by_initial_world_size must be True with LocalSteps" in results["rounds"]
        assert "leave Join out, and call end_round() after the loop" in results["timed"]
        assert ("exhausted all inputs" if rank == 0 else "Detected at least one rank") in results["early"]


def test_every_optimizer_is_joinable():
    p = nn.Parameter(torch.ones(4))
    assert all(isinstance(make(name, [p]), Joinable) for name in ("Average", "Separate", "LocalSteps"))
