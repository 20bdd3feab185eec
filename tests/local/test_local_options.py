"""Options of LocalSteps that do not go together, and what ``stats`` counts of rounds."""

from __future__ import annotations

import pytest
import torch
from local_runs import adamw, are_equal, end_round, train
from problems import gradients, step, weights

import compopt


def test_a_delay_ends_before_the_next_exchange_of_its_fragment():
    params = [torch.nn.Parameter(w) for w in weights()]
    compopt.LocalSteps(adamw(params), 30, fragments=2, delay=15)
    with pytest.raises(ValueError, match=r"delay.*at most every / fragments, 15"):
        compopt.LocalSteps(adamw(params), 30, fragments=2, delay=16)


def test_stats_count_rounds_from_the_end_of_the_averaged_start():
    params, optimizers = train(2, 0, dense_steps=3, every=4)
    found = []
    for t in range(9):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
        stats = optimizers[0].stats
        found.append((stats.round, stats.steps_into_round))
    assert found == [(0, 0), (0, 0), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]


def test_steps_are_counted_by_parameter_as_in_the_averaged_start():
    params, optimizers = train(2, 6, dense_steps=2)
    grads = gradients(2, 6)
    grads[0][1], grads[1][2][0, 0] = None, float("nan")
    step(optimizers[0].comm.world, params, optimizers, grads)
    counts = [[int(optimizer.state[p]["step"]) for p in own] for optimizer, own in zip(optimizers, params, strict=True)]
    assert counts[0] == [7, 6, *[7] * (len(counts[0]) - 2)] and set(counts[1]) == {6}


def test_the_averaged_start_leaves_no_residual_in_memory():
    params, optimizers = train(2, 2, torch.float32, dense_steps=2, payload_dtype="int4")
    assert optimizers[0].state[params[0][0]]["residual"].any()
    step(optimizers[0].comm.world, params, optimizers, gradients(2, 2, dtype=torch.float32))
    assert not any(optimizers[0].state[p].get("residual", torch.empty(0)).numel() for p in params[0])


def test_stats_count_the_bytes_of_a_step():
    params, optimizers = train(2, 0, every=2)
    found = []
    for t in range(7):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
        found.append(optimizers[0].stats.bytes_sent)
    end_round(optimizers)
    found.append(optimizers[0].stats.bytes_sent)
    exchange = found[3]
    # the first step begins with a handshake; a round that is ended counts to the step before
    assert found[1:] == [exchange, 0, exchange, 0, exchange, 0, exchange] and 0 < found[0] < 100 < exchange


def test_the_bytes_of_a_round_that_is_ended_count_to_those_of_the_step_before():
    params, optimizers = train(2, 10, every=8, fragments=2)
    step(optimizers[0].comm.world, params, optimizers, gradients(2, 10))
    step(optimizers[0].comm.world, params, optimizers, gradients(2, 11))  # fragment 1 is exchanged
    sent = optimizers[0].stats.bytes_sent
    total = optimizers[0].comm.bytes_sent
    end_round(optimizers)
    assert sent > 0 and optimizers[0].stats.bytes_sent == sent + optimizers[0].comm.bytes_sent - total > sent


def test_rounds_too_short_for_a_delay_have_none():
    """Of one step, with two fragments: they are exchanged together, and applied at once."""
    params, optimizers = train(2, 0, every=8, fragments=2, delay=2, growth_steps=100)
    for t in range(3):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
        assert optimizers[0].stats.phase == "exchanged" and are_equal(params)


@pytest.mark.parametrize("at", [2, 3])
def test_ending_a_round_after_an_exchange_leaves_stats_as_they_were(at):
    params, optimizers = train(2, 2, every=2)
    if at == 3:
        step(optimizers[0].comm.world, params, optimizers, gradients(2, 2))
        end_round(optimizers)
    before = {name: value for name, value in vars(optimizers[0].stats).items() if not callable(value)}
    end_round(optimizers)
    assert before == {name: value for name, value in vars(optimizers[0].stats).items() if not callable(value)}


def test_an_exchange_sends_its_fragment_alone():
    """Two of about equal bytes; a message in front has 8 KB."""
    sent = {}
    for fragments in (1, 2):
        params, optimizers = train(2, 8, every=8, fragments=fragments)
        before = optimizers[0].comm.bytes_sent
        for t in range(8, 16):
            step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
            sent.setdefault(fragments, []).append(optimizers[0].stats.bytes_sent)
        assert sum(sent[fragments]) == optimizers[0].comm.bytes_sent - before
    (whole,) = filter(None, sent[1])
    parts = [n for n in sent[2] if n]
    assert len(parts) == 2 and sum(parts) < whole + 10_000 and max(parts) < 0.8 * whole


def momentum_of(optimizer: compopt.LocalSteps) -> float:
    return optimizer.state_dict()["param_groups"][0]["outer_momentum"]


def test_the_outer_momentum_is_smaller_with_a_muon_inside():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    muon = torch.optim.Muon([model[0].weight])
    rest = torch.optim.AdamW([model[0].bias, *model[1].parameters()])
    both = compopt.MuonAdamW(model.named_parameters())
    for inner, wanted in ((rest, 0.9), (muon, 0.6), ([muon, rest], 0.6), (both, 0.6)):
        assert momentum_of(compopt.LocalSteps(inner)) == wanted
    assert momentum_of(compopt.LocalSteps(muon, outer_momentum=0.25)) == 0.25


@pytest.mark.parametrize("inner", [None, 5])
def test_what_is_no_optimizer_inside_is_refused_in_a_sentence(inner):
    with pytest.raises(TypeError, match="must be a torch optimizer, got"):
        compopt.LocalSteps(inner)
