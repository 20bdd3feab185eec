"""The promises of every optimizer here, over the table of classes, on simulated ranks: its steps.

What it saves is in test_conformance_saving.py, what befalls it in test_conformance_faults.py.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from conformance import EVERY_FORM, Small, data, every, loss, make_ranks, snapshot
from pairs import name_of
from slow_rows import in_turn
from table import CASES
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
