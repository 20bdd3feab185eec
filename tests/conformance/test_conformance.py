"""The promises of every optimizer here, over the table of classes, on simulated ranks: its steps; on one process."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from conformance import EVERY_FORM, Small, data, every, loss, make_ranks, snapshot
from pairs import name_of, pairs
from ranks import FOREVER, run_ranks
from sim import Ranks, World
from slow_rows import in_turn
from table import CASES, FORMS, Case
from torch import nn

import compopt


def test_every_public_optimizer_is_in_the_table():
    public = {getattr(compopt, name) for name in compopt.__all__}
    optimizers = {c for c in public if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert optimizers == {case.cls for case in CASES} | {compopt.MuonAdamW}  # which averages nothing itself


@pytest.mark.parametrize(("case", "size"), in_turn(EVERY_FORM, (2, 4, 1)), ids=name_of)
def test_lossless_equals_the_reference_on_the_averaged_gradient(case, size):
    ranks = make_ranks(case, size, torch.float64, **case.lossless)
    torch.manual_seed(0)
    model = Small(torch.float64)
    reference = case.reference(model.parameters(), lr=case.lr)
    ranks.train(loss, 12)
    for step in range(12):
        reference.zero_grad()
        sum(loss(model, rank, step) / size for rank in range(size)).backward()
        reference.step()
    for p, q in zip(model.parameters(), ranks.models[-1].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("case", "size"), in_turn(EVERY_FORM, (2, 3)), ids=name_of)
def test_replicas_are_equal_to_the_bit_after_every_step(case, size):
    ranks = make_ranks(case, size)
    history = []
    for _ in range(14):
        history += ranks.train(loss, 1)
        if ranks.at_rest:
            ranks.assert_replicas_equal()
    ranks.finish_round(loss)
    ranks.assert_replicas_equal()
    assert history[-1] < history[0]


@every
def test_one_rank_sends_fewer_bytes_than_dense(case):
    ranks = make_ranks(case, 1, **case.averaging)
    ranks.train(loss, 9)
    stats = ranks.optimizers[0].stats
    if case.cls.rank_local_state:  # it compresses
        assert 0 < stats.bytes_sent < stats.bytes_dense
        assert stats.phase not in ("dense", "skipped")


@every
def test_no_gradient_on_one_rank_counts_as_zeros(case):
    absent, zeros = (make_ranks(case, 2, **case.averaging) for _ in range(2))
    for _ in range(8):
        for ranks in (absent, zeros):
            ranks.backward(loss)
        absent.models[1].down.weight.grad = None
        zeros.models[1].down.weight.grad.zero_()
        for ranks in (absent, zeros):
            ranks.world.step(ranks.optimizers)
            ranks.steps += 1
    for p, q in zip(absent.models[0].parameters(), zeros.models[1].parameters(), strict=True):
        assert torch.equal(p, q)


@every
def test_a_parameter_without_gradients_stays_as_it_was(case):
    ranks = make_ranks(case, 2, weight_decay=0.5)
    before = ranks.models[0].idle.weight.clone()
    ranks.train(loss, 8)
    assert torch.equal(ranks.models[0].idle.weight, before)
    assert float(ranks.optimizers[0].state[ranks.models[0].idle.weight]["step"]) == 0


@every
def test_a_layer_unfrozen_later_joins(case):
    ranks = make_ranks(case, 2)

    def with_idle(model, rank, step):
        return loss(model, rank, step) + model.idle(data(rank, step, torch.float32)).square().mean()

    ranks.train(loss, 6)
    before = ranks.models[0].idle.weight.clone()
    ranks.train(with_idle, 6)
    ranks.finish_round(with_idle)
    ranks.assert_replicas_equal()
    assert not torch.equal(ranks.models[0].idle.weight, before)


@every
def test_closure_scheduler_and_maximize(case):
    def run(maximize: bool) -> tuple[Small, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Small()
        exact = case.lossless if case.draws else {}
        optimizer = case.make(model.parameters(), maximize=maximize, **exact)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        for step in range(8):

            def closure():
                optimizer.zero_grad()
                value = (-1 if maximize else 1) * loss(model, 0, step)  # noqa: B023
                value.backward()
                return value

            assert optimizer.step(closure).requires_grad
            schedule.step()
        return model, optimizer

    (down, optimizer), (up, _) = run(False), run(True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(case.lr / 16)
    for p, q in zip(down.parameters(), up.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@every
def test_a_group_added_mid_run_trains_and_disturbs_nothing(case):
    ranks = make_ranks(case, 2, **case.averaging)
    ranks.train(loss, 5)
    extra = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    before, groups = [snapshot(optimizer) for optimizer in ranks.optimizers], len(ranks.optimizers[0].param_groups)
    for optimizer, p in zip(ranks.optimizers, extra, strict=True):
        case.add_group(optimizer, {"params": [p], "lr": 0.1})
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        kept = {p: entry for p, entry in optimizer.state.items() if all(p is not e for e in extra)}
        tensors = sum(isinstance(value, torch.Tensor) for entry in kept.values() for value in entry.values())
        assert tensors + len(kept) + groups == len(old)
    ranks.backward(loss)
    for rank, p in enumerate(extra):
        p.grad = torch.full_like(p, rank + 1.0)
    ranks.world.step(ranks.optimizers)
    assert torch.equal(extra[0], extra[1]) and not torch.equal(extra[0], torch.ones(64, 64))
    ranks.assert_replicas_equal()


@every
def test_groups_may_say_what_is_compressed_and_empty_groups_are_fine(case):
    torch.manual_seed(0)
    model = Small()
    groups = [
        {"params": [model.up.weight], "compress": False},
        {"params": []},
        {"params": [model.down.weight, model.scale]},
    ]
    optimizer = case.make(groups)
    for step in range(7):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        optimizer.step()
    if case.cls not in (
        compopt.AdamS,
        compopt.Average,
        compopt.LocalSteps,
    ):  # they round all
        assert not (set(optimizer.state[model.up.weight]) & {"residual", "mask"})


@every
def test_low_precision_parameters_have_float32_masters(case):
    if not case.keeps_masters:
        pytest.skip("parameters of low precision are the inner optimizer's, or refused")
    ranks = make_ranks(case, 2, torch.bfloat16, lr=1e-4)
    start = ranks.models[0].up.weight.clone()
    ranks.train(loss, 9)
    ranks.assert_replicas_equal()
    owners = list(ranks)[: None if case.sharded and not case.cls.whole_masters else 1]  # shards, in the ranks' order
    parts = [optimizer.state[model.up.weight]["master"].view(-1) for _, model, optimizer in owners]
    master = torch.cat(parts).view(ranks.models[0].up.weight.shape)
    assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), ranks.models[0].up.weight)
    assert not torch.equal(ranks.models[0].up.weight, start)
    assert not torch.equal(master, master.bfloat16().float())


@every
def test_bf16_payloads_halve_the_bytes_and_keep_replicas_equal(case):
    if "payload_dtype" not in inspect.signature(case.cls).parameters:
        pytest.skip("sends what the gradients are")
    full, half = (make_ranks(case, 2, payload_dtype=dtype) for dtype in (None, torch.bfloat16))
    for ranks in (full, half):
        ranks.train(loss, 8)
        ranks.finish_round(loss)
        ranks.assert_replicas_equal()
    few, many = (ranks.optimizers[0].stats for ranks in (half, full))  # updated parameters go as they are
    assert few.bytes_sent - few.parameter_bytes < 0.6 * (many.bytes_sent - many.parameter_bytes)


@every
def test_strange_shapes_and_layouts(case):
    params = [
        nn.Parameter(torch.randn(0, 5)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(8, 16, 8, 8).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(80, 70).t()),
        nn.Parameter(torch.randn(5)[1:2:2]),  # one element, and none, of which memory has only every second
        nn.Parameter(torch.randn(3, 0)[:, ::2]),
    ]
    optimizer = case.make(params)
    for step in range(7):
        for i, p in enumerate(params):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
            p.grad = g if i < 4 else torch.stack([g, g], -1)[..., 0]
        params[3].grad = params[3].grad.t().contiguous().t()
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


COMPRESSING = [case for case in CASES + FORMS if "simulate" in inspect.signature(case.cls).parameters]
every_compressing = pytest.mark.parametrize("case", COMPRESSING, ids=lambda case: case.name)
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


@every_compressing
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
    unbiased = optimizer.option_groups[0].get("projection") == "gaussian"
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


@every_compressing
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
    assert set(phases) == {"dense"} and not any(optimizer._engine.trial._seconds.values())


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
