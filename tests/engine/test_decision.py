"""The decision of all ranks about a step exchanged in several buckets, and how they notice changed gradients."""

from __future__ import annotations

import math

import pytest
import torch
from deep import Deep, loss
from sim import Ranks, World
from torch import nn

import compopt
from compopt._engine.decision import StepDecision, combine_decisions
from compopt._engine.exchange import StalenessCheck
from compopt._state import buckets as _buckets
from compopt._state.bucket import Bucket
from compopt._wire.payload import bits_differ, encode_bits, encode_stamp


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(_buckets, "BUCKET_BYTES", 40_000)

    def build(size: int = 2, **options) -> Ranks:
        message = {"lr": 1e-2, "density": 0.3, "interval": 100, "dense_steps": 0, **options}
        return Ranks(
            size,
            lambda: Deep(6),
            lambda ps, process_group: compopt.RadiusAdamW(ps, process_group=process_group, **message),
        )

    return build


def parameters(ranks: Ranks, rank: int = 0) -> torch.Tensor:
    return nn.utils.parameters_to_vector(ranks.models[rank].parameters()).detach()


def mean_norm(ranks: Ranks) -> float:
    grads = [torch.cat([p.grad.view(-1) for p in model.parameters()]) for model in ranks.models]
    return float(torch.stack(grads).mean(0).double().norm())


def test_one_norm_over_all_buckets(make):
    ranks = make()
    assert len(ranks.optimizers[0]._buckets) > 2
    ranks.backward(loss)
    norm = mean_norm(ranks)
    ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[0].stats.grad_norm == pytest.approx(norm, rel=1e-5)


def test_what_several_ranks_hold_of_a_model_counts_once(make):
    ranks = make()
    for optimizer in ranks.optimizers:
        for bucket in optimizer._buckets:
            bucket.replicate_size = 4
    ranks.backward(loss)
    norm = mean_norm(ranks)
    ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[0].stats.grad_norm == pytest.approx(norm / 2, rel=1e-5)


@pytest.mark.parametrize("layer", range(6))
def test_a_bad_gradient_in_any_bucket_stops_all(make, layer):
    ranks = make()
    ranks.train(loss, 2)
    before = parameters(ranks)
    ranks.backward(loss)
    ranks.models[1].layers[layer].weight.grad[3, 3] = float("nan")
    ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[0].stats.phase == "skipped"
    assert torch.equal(parameters(ranks), before) and torch.equal(parameters(ranks, 1), before)


def test_an_average_that_the_wire_cannot_hold_is_not_applied(make):
    """Each gradient is finite; as float16 it is not."""
    ranks = make(payload_dtype=torch.float16)
    ranks.train(loss, 1)
    before = parameters(ranks)
    ranks.backward(loss)
    for model in ranks.models:
        model.layers[2].weight.grad.fill_(1e5)
    ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[1].stats.phase == "skipped" and torch.equal(parameters(ranks), before)
    ranks.train(loss, 1)
    assert not torch.equal(parameters(ranks), before)


def run_backward(ranks: Ranks) -> None:
    for _, model, optimizer in ranks:
        optimizer.gradients_ready(reversed(list(model.parameters())))
        optimizer.backward_done()


@pytest.mark.filterwarnings("ignore:gradients were changed")
@pytest.mark.parametrize("layer", [5, 3, 2])
@pytest.mark.parametrize("how", ["value", "none"])
def test_a_change_in_any_bucket_that_left_early_makes_all_send_again(make, layer, how):
    ours, plain = make(), make()
    for t in range(5):  # ranks make their acquaintance, then hear of the mask: nothing leaves before
        for ranks in (ours, plain):
            ranks.backward(loss)
            if ranks is ours:
                run_backward(ranks)
            if t == 3:
                weight = ranks.models[1].layers[layer].weight
                weight.grad = None if how == "none" else weight.grad
                if how == "value":
                    weight.grad.data[0, 0] += 1
            ranks.world.step(ranks.optimizers)
            ranks.steps += 1
        stats = ours.optimizers[0].stats
        assert (stats.resent, stats.early_buckets) == (t == 3, stats.buckets - 1 if t == 2 else 0)
        assert torch.equal(parameters(ours), parameters(plain))


def test_what_leaves_in_backward_is_complete_and_a_second_backward_replaces_it(make):
    ours, plain = make(), make()
    for ranks in (ours, plain):
        ranks.train(loss, 2)
        ranks.backward(loss)
    for _ in range(2):
        for rank, model, optimizer in ours:
            for p in model.parameters():
                p.grad.mul_(2)
            started = ours.world.comms[rank].started
            optimizer.gradients_ready(optimizer._buckets[0].params)
            assert ours.world.comms[rank].started == started + 1, "the other buckets have no gradients yet"
            optimizer.gradients_ready(reversed(list(model.parameters())))
            assert ours.world.comms[rank].started == started + len(optimizer._buckets) - 1
            optimizer.backward_done()
    for model in plain.models:
        for p in model.parameters():
            p.grad.mul_(4)
    for ranks in (ours, plain):
        ranks.world.step(ranks.optimizers)
    stats = ours.optimizers[0].stats
    assert not stats.resent and stats.early_buckets == stats.buckets - 1
    assert torch.equal(parameters(ours), parameters(plain))


def combined(*decisions: StepDecision) -> list[StepDecision]:
    """The decisions of shards of one model, combined."""
    world, device = World(len(decisions)), torch.device("cpu")
    pairs = zip(world.comms, decisions, strict=True)
    world.run([combine_decisions(decision, [comm], device) for comm, decision in pairs])
    return list(decisions)


def test_shards_of_a_model_have_one_norm_and_step_together_or_not_at_all():
    norms = [decision.norm for decision in combined(StepDecision(norm=3.0), StepDecision(norm=4.0))]
    assert norms == [pytest.approx(5.0)] * 2
    for wrong in (dict(non_finite=["w"]), dict(mismatched=True), dict(has_failed_rank=True), dict(misplaced=[1])):
        decisions = combined(StepDecision(norm=3.0), StepDecision(norm=4.0, **wrong))
        assert [decision.applied for decision in decisions] == [False, False]
        assert [decision.failed for decision in decisions] == ["non_finite" not in wrong] * 2


def fingerprint_of(*grads: torch.Tensor) -> tuple[StalenessCheck, list[nn.Parameter]]:
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    return StalenessCheck(Bucket(0, {"compress": None}, params, [""] * len(params))), params


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_changed_gradients_are_noticed(dtype):
    for change in (
        lambda g: g.mul_(2),  # of 512 floats twice as large the bits add up to the same
        lambda g: (g[0].add_(1), g[1].sub_(1)),  # the numbers add up to the same
        lambda g: g[7].neg_(),
        lambda g: g[500].add_(0.5),
    ):
        print_, (p, _) = fingerprint_of(torch.ones(512, dtype=dtype), torch.ones(3, dtype=dtype))
        assert not print_.measure().any()
        change(p.grad.data)
        assert print_.measure().all()
    print_, (p, _) = fingerprint_of(torch.ones(512, dtype=dtype), torch.ones(3, dtype=dtype))
    p.grad.mul_(1)
    assert not print_.measure().any()
    p.grad = None
    assert print_.measure().all()
    print_, (p, _) = fingerprint_of(torch.zeros(512, dtype=dtype), torch.ones(3, dtype=dtype))
    p.grad = None  # zeros count as a gradient, none does not
    assert print_.measure().all()


def mean(*words: list[float]) -> list[float]:
    return [math.fsum(same) / len(words) for same in zip(*words, strict=True)]


def test_numbers_that_differ_in_any_bit_are_told_apart():
    for a in range(8):
        for b in range(8):
            assert bits_differ(mean(encode_bits(a, 3), encode_bits(b, 3))) == (a != b)
    places = [encode_stamp(index, step) for index in range(4) for step in range(4)]
    for a in places:
        for b in places:
            assert bits_differ(mean(a, b)) == (a != b)
    assert len(set(map(tuple, places))) == 16
