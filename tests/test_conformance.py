"""What every optimizer here owes its users, over the table of classes, on simulated ranks."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from sim import Ranks
from table import CASES, FORMS, Case
from torch import nn

import compopt

every = pytest.mark.parametrize("case", CASES + FORMS, ids=lambda case: case.name)
ranks_1_2_4 = pytest.mark.parametrize("size", [1, 2, 4])


class Small(nn.Module):
    """Two matrices that are compressed, the rest not; ``idle`` takes part in no loss."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.scale, self.idle = nn.Parameter(torch.ones(64)), nn.Linear(64, 70)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * self.scale


def data(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(16, 64, dtype=dtype, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(model: Small, rank: int, step: int) -> torch.Tensor:
    x = data(rank, step, model.scale.dtype)
    return (model(x) - x.flip(1)).square().mean()


def make_ranks(case: Case, size: int, dtype: torch.dtype = torch.float32, **options) -> Ranks:
    return Ranks(
        size,
        lambda: Small(dtype),
        lambda params, process_group: case.make(params, process_group=process_group, **options),
    )


def snapshot(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of everything a step may change."""
    optimizer.state_dict()  # settles masks that are still on their way
    tensors = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    for entry in optimizer.state.values():
        tensors += [value.clone() for value in entry.values() if isinstance(value, torch.Tensor)]
    return tensors + [torch.tensor(group["step"]) for group in optimizer._option_groups]


def assert_same(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_every_public_optimizer_is_in_the_table():
    public = {getattr(compopt, name) for name in compopt.__all__}
    optimizers = {c for c in public if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert optimizers == {case.cls for case in CASES}


@every
@ranks_1_2_4
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


@every
@pytest.mark.parametrize("size", [1, 2, 3])
def test_replicas_are_equal_to_the_bit_after_every_step(case, size):
    ranks = make_ranks(case, size)
    history = []
    for _ in range(14):
        history += ranks.train(loss, 1)
        ranks.assert_replicas_equal()
    assert history[-1] < history[0]


@every
def test_one_rank_sends_fewer_bytes_than_dense(case):
    ranks = make_ranks(case, 1)
    ranks.train(loss, 9)
    stats = ranks.optimizers[0].stats
    if case.compressed:
        assert 0 < stats.bytes_sent < stats.bytes_dense
        assert stats.phase not in ("dense", "skipped")


@every
@pytest.mark.parametrize("at", [0, 2, 4, 8])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_gradient_on_one_rank_makes_all_skip_and_changes_nothing(case, at, bad):
    ranks = make_ranks(case, 3)
    ranks.train(loss, at)
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    ranks.models[1].up.weight.grad[5, 7] = bad
    ranks.world.step(ranks.optimizers)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert_same(old, snapshot(optimizer))
        assert optimizer.stats.phase == "skipped" and optimizer.stats.skipped == 1
        assert "non-finite" in optimizer.stats.reason

    untroubled = make_ranks(case, 3)
    untroubled.train(loss, at)
    for both in (ranks, untroubled):  # the step after is the step that would have been
        both.train(loss, 3)
    assert_same(snapshot(untroubled.optimizers[0]), snapshot(ranks.optimizers[0]))


@every
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_collective_that_fails_changes_nothing(case, at):
    ranks = make_ranks(case, 2)
    ranks.train(loss, at)
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    ranks.world.failing_everywhere.add(ranks.world.comms[0].started)
    with pytest.raises(compopt.CommunicationError, match=f"step {at + 1} was not applied"):
        ranks.world.step(ranks.optimizers)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert_same(old, snapshot(optimizer))
    ranks.train(loss, 1)
    ranks.assert_replicas_equal()


@every
def test_no_gradient_on_one_rank_counts_as_zeros(case):
    absent, zeros = make_ranks(case, 2), make_ranks(case, 2)
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
    ranks.assert_replicas_equal()
    assert not torch.equal(ranks.models[0].idle.weight, before)


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every
@pytest.mark.parametrize("at", [2, 4, 5, 7])
def test_resumed_on_the_same_ranks_it_continues_to_the_bit(case, at):
    whole = make_ranks(case, 2)
    whole.train(loss, at)
    saved = [
        (copy.deepcopy(model.state_dict()), through_a_file(optimizer.state_dict())) for _, model, optimizer in whole
    ]
    whole.train(loss, 6)

    resumed = make_ranks(case, 2)
    resumed.steps = at
    for (weights, state), (_, model, optimizer) in zip(saved, resumed, strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    resumed.train(loss, 6)
    for a, b in zip(whole.optimizers, resumed.optimizers, strict=True):
        assert_same(snapshot(a), snapshot(b))


@every
def test_consolidated_it_resumes_on_any_number_of_ranks_with_the_mean_residual(case):
    def mean_residual(ranks: Ranks) -> torch.Tensor:
        names = [o.state_dict() and o.averaged_state for o in ranks.optimizers].pop()
        flats = [torch.cat([b.flat[n] for b in o._buckets for n in names]) for o in ranks.optimizers]
        return torch.stack(flats).mean(0)

    ranks = make_ranks(case, 4, torch.float64)
    if not ranks.optimizers[0].averaged_state:
        pytest.skip("keeps no residual")
    ranks.train(loss, 7)
    if case.sharded:  # what is common to all ranks goes to the owner alone, until then
        ranks.world.consolidate(ranks.optimizers)
    wanted = mean_residual(ranks)
    assert wanted.any()
    for size in (2, 3):
        ranks.world.consolidate(ranks.optimizers)
        weights, state = ranks.models[0].state_dict(), through_a_file(ranks.optimizers[0].state_dict())
        ranks = make_ranks(case, size, torch.float64)
        for _, model, optimizer in ranks:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        torch.testing.assert_close(mean_residual(ranks), wanted, rtol=1e-12, atol=1e-15)
    ranks.train(loss, 2)
    ranks.assert_replicas_equal()


@every
def test_a_residual_of_another_rank_is_loaded_with_a_warning(case):
    ranks = make_ranks(case, 2)
    if not ranks.optimizers[0].averaged_state:
        pytest.skip("keeps no residual")
    ranks.train(loss, 7)
    with pytest.warns(UserWarning, match="rank 0 of 2"):
        ranks.optimizers[1].load_state_dict(ranks.optimizers[0].state_dict())


@every
def test_a_checkpoint_that_does_not_fit_is_refused_whole(case):
    ranks = make_ranks(case, 1)
    ranks.train(loss, 7)
    optimizer = ranks.optimizers[0]
    saved, before = optimizer.state_dict(), snapshot(optimizer)
    shorter = {
        **saved,
        "param_groups": [{**saved["param_groups"][0], "params": saved["param_groups"][0]["params"][:-1]}],
    }
    large = ((key, name) for key, entry in saved["state"].items() for name, t in entry.items() if t.numel() > 4096)
    key, name = list(large)[-1]
    cut = {**saved, "state": {**saved["state"], key: {**saved["state"][key], name: torch.zeros(3)}}}
    for broken in (shorter, cut, {**saved, "param_groups": []}):
        with pytest.raises(ValueError, match="loaded"):
            optimizer.load_state_dict(broken)
        assert_same(before, snapshot(optimizer))


@every
def test_closure_scheduler_and_maximize(case):
    def run(maximize: bool) -> tuple[Small, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Small()
        optimizer = case.make(model.parameters(), maximize=maximize)
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
    ranks = make_ranks(case, 2)
    ranks.train(loss, 5)
    extra = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    for optimizer, p in zip(ranks.optimizers, extra, strict=True):
        optimizer.add_param_group({"params": [p], "lr": 0.1})
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        kept = {p: entry for p, entry in optimizer.state.items() if all(p is not e for e in extra)}
        assert sum(len(entry) for entry in kept.values()) + len(kept) + 1 == len(old)
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
    assert not (set(optimizer.state[model.up.weight]) & {"residual", "mask"})


@every
def test_deepcopy_and_pickle_continue_alike(case):
    torch.manual_seed(0)
    model = Small()
    optimizer = case.make(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        optimizer.step()
    for copied_model, copied in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        assert_same(snapshot(optimizer), snapshot(copied))
        copied.zero_grad()
        loss(copied_model, 0, 6).backward()
        copied.step()
    optimizer.zero_grad()
    loss(model, 0, 6).backward()
    optimizer.step()
    assert_same(snapshot(optimizer), snapshot(copied))


@every
def test_low_precision_parameters_have_float32_masters(case):
    if case.build:
        pytest.skip("the optimizer around which it is decides how parameters are kept")
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
    full, half = make_ranks(case, 2), make_ranks(case, 2, payload_dtype=torch.bfloat16)
    for ranks in (full, half):
        ranks.train(loss, 8)
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
    ]
    optimizer = case.make(params)
    for step in range(7):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
        params[3].grad = params[3].grad.t().contiguous().t()
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


@every
def test_bad_options_are_refused_by_name_and_value(case):
    p = nn.Parameter(torch.zeros(64, 64))
    for option, values in case.bad.items():
        for value in values:
            with pytest.raises((ValueError, TypeError), match=option) as caught:
                case.new([p], **{option: value})
            assert repr(value) in str(caught.value)
    with pytest.raises(TypeError, match="complex"):
        case.new([nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64))])
    optimizer = case.new([p])
    p.grad = torch.zeros(64, 64).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()


@every
def test_ranks_that_differ_are_told_which_and_how(case):
    ranks = make_ranks(case, 3)
    ranks.optimizers[2].param_groups[0]["lr"] = 0.25
    ranks.backward(loss)
    with pytest.raises(ValueError, match=r"Rank 0 has .*lr.* rank 2 has .*0\.25"):
        ranks.world.step(ranks.optimizers)

    ranks = make_ranks(case, 3)
    ranks.train(loss, 5)
    ranks.optimizers[1].param_groups[0]["weight_decay"] = 0.75  # later: seen in the payload's control words
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    with pytest.raises(ValueError, match=r"weight_decay.* rank 1 has .*0\.75"):
        ranks.world.step(ranks.optimizers)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert_same(old, snapshot(optimizer))


@every
def test_gradients_that_were_averaged_before_are_refused(case):
    ranks = make_ranks(case, 2)
    ranks.backward(lambda model, rank, step: loss(model, 0, step))
    with pytest.raises(RuntimeError, match=r"compopt\.attach"):
        ranks.world.step(ranks.optimizers)


@every
@pytest.mark.parametrize("at", [2, 4, 6])
def test_survivors_go_on_over_a_smaller_group_from_memory(case, at):
    ranks = make_ranks(case, 3)
    ranks.train(loss, at)
    ranks.backward(loss)
    ranks.world.failing_everywhere.update(range(ranks.world.comms[0].started, ranks.world.comms[0].started + 9))
    before = [p.detach().clone() for p in ranks.models[0].parameters()]
    with pytest.raises(compopt.CommunicationError):
        ranks.world.step(ranks.optimizers)
    assert_same(before, [p.detach() for p in ranks.models[0].parameters()])
    ranks.shrink([0, 2])
    ranks.train(loss, 5)
    ranks.assert_replicas_equal()
    assert ranks.optimizers[0].stats.step == at + 5


@every
def test_endless_skipping_is_an_error(case):
    ranks = make_ranks(case, 2)
    for optimizer in ranks.optimizers:
        optimizer.max_skipped = 3
    with pytest.raises(FloatingPointError, match="3 steps in a row were skipped"):
        ranks.train(lambda model, rank, step: loss(model, rank, step) * float("nan"), 4)


@every
def test_replicas_that_part_are_found(case):
    ranks = make_ranks(case, 3)
    for optimizer in ranks.optimizers:
        optimizer.check_replicas_every = 4
    ranks.train(loss, 5)
    with torch.no_grad():
        ranks.models[2].up.bias[3] += 1e-6
    ranks.train(loss, 2)
    if case.sharded:  # the owner's have taken the place of those that parted
        ranks.assert_replicas_equal()
        return
    with pytest.raises(ValueError, match=r"rank 2 has .*checksum"):
        ranks.train(loss, 1)
