"""Starting in backward, stale payloads, and the transaction, on simulated ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from deep import Deep, loss
from sim import Deadlock, Ranks
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig

import compopt
from compopt._state import buckets


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 40_000)
    build = lambda params, process_group: compopt.RadiusAdamW(  # noqa: E731
        params, lr=1e-2, density=0.3, interval=4, dense_steps=2, process_group=process_group
    )
    return lambda size=2: Ranks(size, Deep, build)


def run_backward(ranks: Ranks) -> None:
    """Do as the DDP hook: all gradients are ready, bucket for bucket, then backward ends."""
    for _, model, optimizer in ranks:
        optimizer.gradients_ready(reversed(list(model.parameters())))
        optimizer.backward_done()


def train(ranks: Ranks, steps: int, between=lambda ranks, step: None, overlap: bool = True) -> None:
    for _ in range(steps):
        ranks.backward(loss)
        if overlap:
            run_backward(ranks)
        between(ranks, ranks.steps)
        ranks.world.step(ranks.optimizers)
        ranks.steps += 1
        ranks.assert_replicas_equal()


def assert_same_parameters(a: Ranks, b: Ranks) -> None:
    for p, q in zip(a.models[0].parameters(), b.models[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_all_buckets_but_the_last_start_in_backward_and_nothing_else_changes(make):
    with_overlap, without = make(), make()
    train(with_overlap, 10)
    train(without, 10, overlap=False)
    stats = with_overlap.optimizers[0].stats
    assert stats.buckets > 2 and stats.early_buckets == stats.buckets - 1
    assert without.optimizers[0].stats.early_buckets == 0
    assert stats.bytes_sent == without.optimizers[0].stats.bytes_sent
    assert_same_parameters(with_overlap, without)


def test_nothing_starts_in_backward_within_a_join(make):
    """A rank without data has no backward."""
    ranks, alone = make(), make()
    train(ranks, 3)
    train(alone, 4)
    for optimizer in ranks.optimizers:
        optimizer._join_config = _JoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=False)
    train(ranks, 1)
    assert alone.optimizers[0].stats.early_buckets > 0 == ranks.optimizers[0].stats.early_buckets
    assert_same_parameters(ranks, alone)


def clip_on_rank_1(ranks: Ranks, step: int) -> None:
    nn.utils.clip_grad_norm_(ranks.models[1].parameters(), 1e-3)


def test_a_gradient_changed_after_backward_on_one_rank_makes_all_ranks_send_again(make):
    changed, without = make(), make()
    train(without, 8, clip_on_rank_1, overlap=False)
    resent = []
    with pytest.warns(UserWarning, match="max_grad_norm") as warned:
        for _ in range(8):
            train(changed, 1, clip_on_rank_1)
            resent.append([optimizer.stats.resent for optimizer in changed.optimizers])
    assert len([w for w in warned if "max_grad_norm" in str(w.message)]) == 1  # rank 0's
    assert resent == [[step == 1] * 2 for step in range(8)]  # then nothing is sent early any more
    assert_same_parameters(changed, without)


def test_gradients_that_were_written_to_but_not_changed_do_not_go_out_again(make):
    """As Hugging Face's Trainer does, which multiplies by 1 to learn a norm."""
    touched, without = make(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            train(touched, 1, lambda ranks, _: [p.grad.mul_(1.0) for m in ranks.models for p in m.parameters()])
            stats = touched.optimizers[0].stats
            sends_early = step in (1, 3, 5)  # not in the first, nor after a broadcast
            assert not stats.resent and (stats.early_buckets > 0) == sends_early
    train(without, 6, overlap=False)
    assert_same_parameters(touched, without)


def test_an_accumulating_backward_that_is_not_synced_makes_the_payload_stale(make):
    ranks, without = make(), make()

    def accumulate(ranks: Ranks, step: int) -> None:
        for rank, model, _ in ranks:
            loss(model, rank, step + 50).backward()

    with pytest.warns(UserWarning):
        train(ranks, 5, accumulate)
    train(without, 5, accumulate, overlap=False)
    assert_same_parameters(ranks, without)


def test_a_loss_that_is_skipped_leaves_no_trace(make):
    ranks, without = make(), make()
    train(ranks, 5)
    train(without, 5)
    ranks.backward(lambda model, rank, step: 100 * loss(model, rank, step))
    run_backward(ranks)  # zero_grad, and no step
    train(ranks, 3)
    train(without, 3)
    assert_same_parameters(ranks, without)


def test_zeroed_gradients_are_not_what_was_sent(make):
    ranks = make()
    train(ranks, 5)
    before = [p.clone() for p in ranks.models[0].parameters()]
    ranks.backward(loss)
    run_backward(ranks)
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.world.step(ranks.optimizers)
    for p, old in zip(ranks.models[0].parameters(), before, strict=True):
        assert torch.equal(p, old)  # as torch's AdamW: no gradient, no step


def test_a_failure_on_the_wire_after_an_early_start_changes_nothing_and_the_next_step_is_right(make):
    ranks, without = make(), make()
    train(ranks, 5)
    train(without, 5)
    ranks.backward(loss)
    ranks.world.failing_everywhere.add(ranks.world.comms[0].started)  # the first bucket, in backward
    run_backward(ranks)
    before = [p.clone() for p in ranks.models[1].parameters()]
    with pytest.raises(compopt.CommunicationError):
        ranks.world.step(ranks.optimizers)
    for p, old in zip(ranks.models[1].parameters(), before, strict=True):
        assert torch.equal(p, old)
    train(ranks, 3)
    train(without, 3)
    assert_same_parameters(ranks, without)


def test_the_gradient_stays_the_ranks_own(make):
    ranks = make()
    train(ranks, 5)
    ranks.backward(loss)
    before = [[p.grad.clone() for p in model.parameters()] for model in ranks.models]
    ranks.world.step(ranks.optimizers)
    for local, model in zip(before, ranks.models, strict=True):
        for g, p in zip(local, model.parameters(), strict=True):
            assert torch.equal(g, p.grad)


def test_the_simulator_reports_ranks_that_would_hang(make):
    ranks = make()
    train(ranks, 3)
    ranks.backward(loss)
    with pytest.raises(Deadlock):
        ranks.world.run([ranks.optimizers[0].step_as_generator()])


def test_an_update_that_raises_stop_iteration_is_an_error(monkeypatch):
    """It must not pass for the end of the generator, and the step for applied."""

    def broken(*_):
        raise StopIteration

    broken.__module__, broken.__qualname__ = "compopt.adams", "update_of_the_test"
    monkeypatch.setattr("compopt.adams.step_adams", broken)
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = compopt.AdamS([p])
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="StopIteration"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0
    with pytest.raises(RuntimeError, match="applied in part"):
        optimizer.step()
