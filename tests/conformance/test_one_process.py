"""Without other ranks a step is the base's: nothing is selected, projected, rounded or held back."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from conformance import Small, loss, make_ranks
from pairs import name_of, pairs
from ranks import FOREVER, run_ranks
from sim import Ranks, World
from table import CASES, FORMS, Case
from torch import nn

import compopt

COMPRESSING = [case for case in CASES + FORMS if "simulate" in inspect.signature(case.cls).parameters]
every = pytest.mark.parametrize("case", COMPRESSING, ids=lambda case: case.name)
# whose steps average gradients; what a rank moved since the last round is in its parameters, and owed to nobody
AVERAGING = [case for case in COMPRESSING if not case.averaging]
ROUNDS = [case.name for case in COMPRESSING if case.averaging]
every_average = pytest.mark.parametrize("case", AVERAGING, ids=lambda case: case.name)
DTYPES = {"its own": {}, "bfloat16": {"payload_dtype": torch.bfloat16}, "int8": {"payload_dtype": torch.int8}}


def alone(make, steps: int = 8, **options) -> tuple[nn.Module, torch.optim.Optimizer, list[str]]:
    torch.manual_seed(0)
    model = Small()
    optimizer, phases = make(model.parameters(), **options), []
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        optimizer.step()
        phases.append(optimizer.stats.phase if hasattr(optimizer, "stats") else "")
    return model, optimizer, phases


def held_back(optimizer: torch.optim.Optimizer) -> float:
    """Everything that a rank's state owes or has chosen, by its size."""
    optimizer.state_dict()
    masks = ("next_mask",) if "SCAPE" in str(type(optimizer).__doc__) else ("mask",)  # SCAPE's own mask is all ones
    names = (*optimizer.rank_local_state, *masks, "basis")
    kept = [entry[name].double() for entry in optimizer.state.values() for name in names if name in entry]
    return sum(float(tensor.abs().sum()) for tensor in kept)


@pytest.mark.parametrize(
    ("group", "dtype", "case"),
    pairs(["none", "of one"], DTYPES, COMPRESSING, where=lambda _, dtype, case: not (dtype == "int8" and case.sharded)),
    ids=name_of,
)
def test_one_process_steps_as_the_base(case: Case, dtype: str, group: str):
    options = DTYPES[dtype] | ({"process_group": World(1).comms[0]} if group == "of one" else {})
    model, optimizer, phases = alone(case.make, **options)
    shared = {name: case.compressed[name] for name in ("betas", "weight_decay") if name in case.compressed}
    wanted, *_ = alone(case.reference, lr=case.lr, **shared)
    for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert set(phases) == {"dense"}
    assert held_back(optimizer) == 0
    assert optimizer.stats.residual_norm() == 0


@every
def test_asked_to_one_process_compresses(case: Case):
    *_, phases = alone(case.make, simulate=True)
    assert set(phases[4:]).isdisjoint({"dense"})
    _, copied, phases = alone(
        lambda params, **options: copy.deepcopy(case.make(params, **options)), steps=0, simulate=True
    )
    assert copied.simulate


@every_average
def test_what_is_owed_is_sent_by_the_first_step_of_a_rank_that_is_left_alone(case: Case):
    """Residuals of a rank go out with its next step, which is dense, though the group is now one."""
    ranks = make_ranks(case, 2)
    ranks.train(loss, 7)
    with pytest.warns(UserWarning, match="are gone"):
        ranks.shrink([1])
    (optimizer,) = ranks.optimizers
    assert optimizer.stats.residual_norm() > 0
    twin = copy.deepcopy(optimizer)
    for entry in twin.state.values():
        if "residual" in entry:
            entry["residual"].zero_()
    twin.load_state_dict(twin.state_dict())  # the same, but that it owes nothing
    pairs = list(zip(groups(optimizer), groups(twin), strict=True))
    for p, q in pairs:
        p.grad = torch.full_like(p, 0.01)
        q.grad = p.grad.clone()
    for one in (optimizer, twin):
        one.step()
        assert one.stats.phase == "dense" and one.stats.residual_norm() == 0
    moved = [float((p - q).detach().abs().max()) for p, q in pairs]
    unbiased = optimizer._option_groups[0].get("projection") == "gaussian"
    assert (max(moved) > 0) != unbiased  # what a Gaussian projection leaves is noise, and nothing that is owed


def groups(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("cls", [compopt.RadiusAdamW, compopt.TagcAdamW])
def test_what_rounding_took_off_is_sent_too(cls, dtype):
    """In the dense start nothing else is owed."""
    if cls is compopt.TagcAdamW and dtype == torch.int8:
        pytest.skip("sharded classes send no int8")
    start = lambda ps, process_group: cls(ps, dense_steps=100, payload_dtype=dtype, process_group=process_group)  # noqa: E731
    ranks = Ranks(2, Small, start)
    ranks.train(loss, 3)
    with pytest.warns(UserWarning, match="are gone"):
        ranks.shrink([0])
    (optimizer,) = ranks.optimizers
    before = optimizer.stats.residual_norm()
    ranks.train(loss, 1)
    assert before > 0 and optimizer.stats.residual_norm() == 0


@every_average
def test_a_checkpoint_of_two_ranks_goes_on_alone_and_sends_what_it_owes(case: Case):
    ranks = make_ranks(case, 2)
    ranks.train(loss, 7)
    ranks.world.consolidate(ranks.optimizers)
    other = Small()
    optimizer = case.make(other.parameters(), process_group=World(1).comms[0])
    optimizer.load_state_dict(ranks.optimizers[0].state_dict())
    residuals = optimizer.stats.residual_norm()
    loss(other, 0, 9).backward()
    optimizer.step()
    assert residuals > 0 and optimizer.stats.residual_norm() == 0 and optimizer.stats.phase == "dense"


@every
def test_a_checkpoint_of_one_process_goes_on_over_two_ranks(case: Case):
    _, optimizer, _ = alone(case.make)
    ranks = make_ranks(case, 2)
    for one in ranks.optimizers:
        one.load_state_dict(optimizer.state_dict())
    ranks.steps = 8
    ranks.train(loss, 4)
    ranks.finish_round(loss)
    ranks.assert_replicas_equal()
    assert ranks.optimizers[0].stats.phase != "dense"


def test_a_trial_does_not_time_what_cannot_be_compared():
    (*_, phases) = alone(compopt.RadiusAdamW, steps=3, when="auto", dense_steps=1)
    _, optimizer, _ = alone(compopt.RadiusAdamW, steps=3, when="auto", dense_steps=1)
    assert set(phases) == {"dense"} and not any(optimizer._session.trial._seconds.values())


def met(rank: int, folder: str) -> dict[str, tuple[list[str], bool]]:
    """Steps of every class alone, then with the ranks that have come; whether they end equal."""
    dist.barrier()
    dist.destroy_process_group()
    results = {}
    for n, case in enumerate(COMPRESSING):
        torch.manual_seed(0)
        model = Small()
        optimizer, phases = case.make(model.parameters()), []
        for step in range(9):
            if step == 4:
                place = f"file://{folder}/{n}"
                dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=FOREVER)
            optimizer.zero_grad()
            loss(model, rank if step >= 4 else 0, step).backward()
            optimizer.step()
            phases.append(optimizer.stats.phase)
        if hasattr(optimizer, "end_round"):
            optimizer.end_round()  # within a round ranks differ
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        results[case.name] = phases, torch.equal(mine, theirs)
        if case is not COMPRESSING[-1]:
            del optimizer
            dist.destroy_process_group()
    return results


def test_ranks_that_come_later_make_it_compress(tmp_path):
    for results in run_ranks(met, 2, str(tmp_path)):
        for name, (phases, equal) in results.items():
            rounds = name in ROUNDS  # whose steps after the start are of each rank's own
            assert phases[:4] == ["dense"] * 4, name
            assert set(phases[6:]).isdisjoint({"dense"}) and ("exchanged" in phases[6:]) == rounds, name
            assert equal, name


def group_of_one(rank: int) -> list[str]:
    *_, phases = alone(compopt.RadiusAdamW, dense_steps=1, interval=2)
    *_, asked = alone(compopt.RadiusAdamW, dense_steps=1, interval=2, simulate=True)
    return [phases[-1], asked[-1]]


def test_a_real_group_of_one_is_one_process():
    assert run_ranks(group_of_one, 1) == [["dense", "resample"]]
