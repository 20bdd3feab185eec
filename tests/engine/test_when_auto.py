"""when="auto": dense where compressed steps are not faster; nothing that was held back is lost on the way."""

from __future__ import annotations

import inspect

import pytest
import torch
from pairs import name_of
from sim import Ranks
from slow_rows import in_turn
from table import CASES, by_name
from torch import nn

import compopt
from compopt._engine import options as _options
from compopt._engine import trial as _when

COMPRESSING = [case for case in CASES if "when" in inspect.signature(case.cls).parameters]
every = pytest.mark.parametrize("case", COMPRESSING, ids=lambda case: case.name)
STEPS = 40


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(x) - x.roll(1, 1)).square().mean()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def train(case, dense: float, compressed: float, monkeypatch, size: int = 2, **options) -> Ranks:
    """Ranks that believe their steps to take these seconds."""
    now = [0.0]
    monkeypatch.setattr(_when.time, "perf_counter", lambda: now[0])
    ranks = Ranks(size, make_model, lambda ps, process_group: case.make(ps, process_group=process_group, **options))
    ranks.phases = []

    def one_step() -> None:
        group = ranks.optimizers[0]._option_groups[0]
        ahead = group["step"] + (case.cls is compopt.RadiusAdamW)  # which counts its dense steps from 1
        now[0] += dense if ahead < _options.count_dense_steps(group) else compressed
        ranks.train(loss, 1)
        ranks.phases.append(ranks.optimizers[0].stats.phase)

    ranks.one_step = one_step
    return ranks


@pytest.mark.parametrize(("case", "seconds"), in_turn(COMPRESSING, (1.1, 0.97)), ids=name_of)
def test_it_stays_dense_where_compressed_steps_are_not_clearly_faster(case, seconds, monkeypatch):
    ranks = train(case, 1.0, seconds, monkeypatch, when="auto")
    for _ in range(STEPS):
        ranks.one_step()
    assert set(ranks.phases[:11]) == {"dense"} and set(ranks.phases[-5:]) == {"dense"}
    assert set(ranks.phases) != {"dense"}
    for optimizer in ranks.optimizers:
        assert optimizer.stats.when.startswith(
            f"dense: a compressed step took {1000 * seconds:.1f} ms, a dense one 1000.0 ms"
        )
        assert optimizer.stats.residual_norm() == 0
        again = case.make(make_model().parameters(), when="auto")
        again.load_state_dict(optimizer.state_dict())
        assert again._session.trial is None and again._option_groups[0]["pays"] is False
        assert again._option_groups[0]["dense_steps"] == case.compressed["dense_steps"]
    ranks.assert_replicas_equal()


@every
def test_it_compresses_where_that_is_faster(case, monkeypatch):
    ranks = train(case, 1.0, 0.9, monkeypatch, when="auto")
    for _ in range(STEPS):
        ranks.one_step()
    assert "dense" not in ranks.phases[14:] and ranks.optimizers[1].stats.when.startswith("compressed: ")
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("name", ["RadiusAdamW", "TagcAdamW"])
def test_what_was_held_back_goes_out_with_the_first_dense_step(name, monkeypatch):
    """Its gradient in the first moment is that of the step plus the residual."""
    ranks = train(by_name[name], 1.0, 1.1, monkeypatch, size=1, when="auto")
    optimizer, p = ranks.optimizers[0], ranks.models[0][0].weight
    while not (optimizer.stats.when and optimizer.stats.phase == "dense"):
        saved = optimizer.state_dict()["state"][0]
        before, residual = saved["exp_avg"].clone(), saved["residual"].clone()
        ranks.one_step()
    assert residual.abs().max() > 0 and optimizer.stats.residual_norm() == 0
    expected = before.view(p.shape).lerp(p.grad + residual, 0.1)
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["exp_avg"].view(p.shape), expected)


def two_groups(case, now: list[float], monkeypatch, **options) -> Ranks:
    """The first layer's group says "always", the second's "auto"; a step takes longer where the second compresses."""
    monkeypatch.setattr(_when.time, "perf_counter", lambda: now[0])

    def make(params, process_group):
        params = list(params)
        groups = [{"params": params[:2], "when": "always", **options}, {"params": params[2:], "when": "auto"}]
        return case.make(groups, process_group=process_group)

    return Ranks(2, make_model, make)


IN_GROUPS = [case for case in COMPRESSING if case.name != "Separate"]


@pytest.mark.parametrize(("case", "dense_steps"), in_turn(IN_GROUPS, (0, 5)), ids=name_of)
def test_only_groups_that_say_auto_are_tried(case, dense_steps, monkeypatch):
    now = [0.0]
    ranks = two_groups(case, now, monkeypatch, dense_steps=dense_steps)
    for _ in range(STEPS + 1):
        always, auto = ranks.optimizers[0].param_groups
        ahead = auto["step"] + (case.cls is compopt.RadiusAdamW)
        now[0] += 1.0 if ahead < _options.count_dense_steps(auto) else 1.1
        ranks.train(loss, 1)
    for optimizer in ranks.optimizers:
        assert optimizer.stats.when.startswith("dense: a compressed step took 1100.0 ms, a dense one 1000.0 ms")
        always, auto = optimizer.param_groups
        assert (always["when"], always["dense_steps"], always["pays"]) == ("always", dense_steps, None)
        assert (auto["when"], auto["dense_steps"], auto["pays"]) == ("auto", case.compressed["dense_steps"], False)
        last, first = optimizer._buckets[0], optimizer._buckets[-1]
        assert last.group is auto and optimizer.stats.phase not in ("dense", "skipped")
        assert optimizer.sharded or (last.flat["residual"].any(), first.flat["residual"].any()) == (False, True)
    ranks.assert_replicas_equal()


@every
def test_where_the_ranks_cannot_compare_their_times_no_step_is_half_taken(case, monkeypatch):
    """The exchange of times comes before anything of its step: what says "not applied" was not applied."""
    ranks = train(case, 1.0, 1.1, monkeypatch, when="auto")
    while not ranks.optimizers[0]._session.trial.compute_medians():
        ranks.one_step()
    for optimizer in ranks.optimizers:
        optimizer.state_dict()  # waits for masks
    started = ranks.world.comms[0].started + ranks.optimizers[0]._session.post_commit.unconfirmed
    ranks.world.failing_everywhere.add(started)
    before = [p.detach().clone() for p in ranks.models[0].parameters()]
    step = ranks.optimizers[0]._option_groups[0]["step"]
    with pytest.raises(compopt.CommunicationError, match=rf"step {step + 1} was not applied"):
        ranks.one_step()
    assert all(map(torch.equal, before, ranks.models[0].parameters()))
    assert all(o._option_groups[0]["step"] == step and o._option_groups[0]["pays"] is None for o in ranks.optimizers)
    for _ in range(3):
        ranks.one_step()
    assert all(optimizer.stats.when.startswith("dense: ") for optimizer in ranks.optimizers)
    assert ranks.optimizers[0].stats.phase == "dense"
    ranks.assert_replicas_equal()


def test_a_model_with_nothing_to_compress_is_not_tried():
    optimizer = compopt.RadiusAdamW([nn.Parameter(torch.zeros(9))], when="auto")
    assert optimizer._session.trial is None


def test_it_says_what_it_cannot_take():
    with pytest.raises(ValueError, match="when must be 'always' or 'auto', got 'sometimes'"):
        compopt.RadiusAdamW(make_model().parameters(), when="sometimes")
