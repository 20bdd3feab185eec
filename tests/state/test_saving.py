"""State dicts: residuals, several buckets, float32 masters, copies; what a rank takes over; what is incomplete."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import fsdp_models
import pytest
import torch
from conformance import every, loss, make_ranks, some_average, through_a_file
from problems import gradients, replicas, step, weights
from ranks import run_ranks
from sim import SimCommunicator, SimPending, World
from test_fsdp_inside import around, separate
from torch import Tensor, nn

import compopt
from compopt._state import buckets

SHAPES = [(64, 80), (80,), (128, 64), (70, 80)]
COMPRESSED = (0, 2, 3)
RADIUS = functools.partial(compopt.RadiusAdamW, lr=1e-2, density=0.3, interval=100, dense_steps=0)
TAGC = functools.partial(compopt.TagcAdamW, lr=1e-2, density=0.1)
SCAPE = functools.partial(compopt.ScapeAdamS, lr=1e-2, density=0.2, density_steps=0)
SHARDED_SCAPE = functools.partial(SCAPE, sharded=True, dense_steps=0)


class Run:
    def __init__(self, make, ranks: int = 2, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self.world, self.params, self.optimizers = replicas(ranks, weights(SHAPES, dtype), make)
        self.t = 0

    def gradients(self) -> list[list[Tensor]]:
        return gradients(self.world.size, self.t, SHAPES, self.dtype)

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            step(self.world, self.params, self.optimizers, self.gradients())
            self.t += 1
        return self

    def residuals(self, rank: int) -> list[Tensor]:
        state = self.optimizers[rank].state_dict()["state"]
        return [state[i]["residual"].clone() for i in COMPRESSED]

    def held(self, rank: int) -> list[Tensor]:
        """The same, while masks are on their way that will not come."""
        optimizer = self.optimizers[rank]
        return [optimizer.state[self.params[rank][i]]["residual"].clone() for i in COMPRESSED]

    def describe_residuals(self, rank: int) -> str:
        return self.optimizers[rank].state_dict()["param_groups"][0]["residuals"]


@pytest.mark.parametrize("make", [RADIUS, TAGC, SCAPE], ids=["Radius", "TAGC", "SCAPE"])
def test_residuals_of_every_bucket_become_their_mean(make, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 20_000)
    run = Run(make, 3).train(3)
    assert len(run.optimizers[0]._buckets) > 2
    before = [run.residuals(rank) for rank in range(3)]
    assert [run.describe_residuals(rank) for rank in range(3)] == [f"rank {rank} of 3" for rank in range(3)]
    run.world.consolidate(run.optimizers)
    for rank in range(3):
        for results, *local in zip(run.residuals(rank), *before, strict=True):
            torch.testing.assert_close(results, torch.stack(local).mean(0))
        assert run.describe_residuals(rank) == "mean"
    run.train(1)
    assert [run.describe_residuals(rank) for rank in range(3)] == [f"rank {rank} of 3" for rank in range(3)]


def test_what_was_loaded_after_consolidation_is_not_the_mean():
    run = Run(RADIUS).train(3)
    local = [copy.deepcopy(optimizer.state_dict()) for optimizer in run.optimizers]
    run.world.consolidate(run.optimizers)
    for optimizer, state in zip(run.optimizers, local, strict=True):
        optimizer.load_state_dict(state)
    assert [run.describe_residuals(rank) for rank in range(2)] == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "torch"])
def test_a_saved_residual_is_what_was_held_back_and_nothing_of_what_was_sent(dtype):
    run = Run(RADIUS, dtype=dtype).train(3)
    for rank, optimizer in enumerate(run.optimizers):
        state = optimizer.state_dict()["state"]
        for i in COMPRESSED:
            mask, residual = state[i]["mask"], state[i]["residual"]
            held = sum(gradients(2, t, SHAPES, dtype)[rank][i] for t in (1, 2))
            torch.testing.assert_close(residual, held.masked_fill(mask, 0))


@pytest.mark.parametrize("make", [RADIUS, TAGC, SCAPE], ids=["Radius", "TAGC", "SCAPE"])
def test_masters_of_bfloat16_parameters_go_on_from_a_checkpoint_to_the_bit(make):
    whole = Run(make, dtype=torch.bfloat16).train(4)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in whole.optimizers]
    reached = [[p.detach().clone() for p in local] for local in whole.params]
    resumed = Run(make, dtype=torch.bfloat16)
    resumed.t = 4
    for optimizer, state, local, held in zip(resumed.optimizers, saved, resumed.params, reached, strict=True):
        for p, w in zip(local, held, strict=True):
            p.data.copy_(w)
        optimizer.load_state_dict(state)
    for run in (whole, resumed):
        run.train(4)
    for mine, theirs, local, others in zip(
        whole.optimizers, resumed.optimizers, whole.params, resumed.params, strict=True
    ):
        for p, q in zip(local, others, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(mine.state[p]["master"], theirs.state[q]["master"])


def test_a_state_dict_says_who_wrote_it_and_counts_each_tensors_steps():
    run = Run(RADIUS).train(2)
    grads = gradients(2, 2, SHAPES, torch.float32)
    for local in grads:
        local[2] = None
    step(run.world, run.params, run.optimizers, grads)
    saved = copy.deepcopy(run.optimizers[0].state_dict())
    assert saved["param_groups"][0]["class"] == "RadiusAdamW"
    assert [int(saved["state"][i]["step"]) for i in range(4)] == [3, 3, 2, 3]
    again = Run(RADIUS)
    again.optimizers[0].load_state_dict(saved)
    assert [int(again.optimizers[0].state[p]["step"]) for p in again.params[0]] == [3, 3, 2, 3]


def test_a_copy_averages_over_the_same_group_and_one_with_a_group_is_not_pickled():
    run = Run(RADIUS).train(1)
    (comm, _), (optimizer, _) = run.world.comms, run.optimizers
    assert copy.deepcopy(optimizer).comm is optimizer.comm
    assert optimizer._engine.process_group is comm
    with pytest.raises(TypeError, match="cannot be pickled: save its state_dict"):
        pickle.dumps(optimizer)


def test_a_copy_has_the_limits_that_users_have_set():
    optimizer = compopt.SeparateAdam([nn.Parameter(torch.zeros(64, 64))])
    optimizer.max_skipped, optimizer.check_replicas_every = 7, 5
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.max_skipped, other.check_replicas_every) == (7, 5)


@pytest.mark.parametrize("make", [RADIUS, TAGC, SCAPE, SHARDED_SCAPE], ids=["Radius", "TAGC", "SCAPE", "sharded SCAPE"])
def test_consolidation_between_a_backward_and_its_step_sends_residuals_once(make, monkeypatch):
    """Payloads that were sent during backward hold the residuals of before: they are sent again."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 20_000)
    early, late = Run(make, dtype=torch.float64).train(6), Run(make, dtype=torch.float64).train(6)
    for run in (early, late):
        for params, optimizer, grads in zip(run.params, run.optimizers, run.gradients(), strict=True):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
            if run is early:
                optimizer._engine.ddp_left_gradients = True  # as DDP's hook says
                optimizer.gradients_ready(reversed(params))
                optimizer.backward_done()
        run.world.consolidate(run.optimizers)
        run.world.step(run.optimizers)
        run.t += 1
        run.train(2)
    for p, q in zip(early.params[0], late.params[0], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_state_loads_as_the_saved_options_need_it():
    """They replace those of the constructor, as in torch: state that only they need is loaded too."""
    tracked = functools.partial(compopt.SeparateAdam, rank=4, dense_steps=0)
    random = functools.partial(compopt.SeparateAdam, projection="gaussian", ratio=4)
    updates = functools.partial(TAGC, update_dtype="int2")
    for make, other, name in ((tracked, random, "basis"), (updates, TAGC, "update_residual")):
        run, again = Run(make).train(4), Run(other)
        run.world.consolidate(run.optimizers)
        saved = copy.deepcopy(run.optimizers[0].state_dict())
        for optimizer in again.optimizers:
            optimizer.load_state_dict(saved)
        again.world.consolidate(again.optimizers)
        loaded = again.optimizers[0].state_dict()["state"]
        pairs = [(loaded[i][name], saved["state"][i][name]) for i in COMPRESSED]
        assert all(torch.equal(*pair) for pair in pairs) and any(pair[0].any() for pair in pairs)
    fresh = Run(TAGC).optimizers[0]
    del saved["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="lacks exp_avg"):
        fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["update_dtype"] is None


def test_a_sharded_optimizer_does_not_go_to_more_ranks():
    run, more = Run(TAGC).train(1), Run(TAGC, 3)
    with pytest.raises(ValueError, match="cannot go from 2 to 3 ranks, because its state is sharded"):
        run.optimizers[0].rebind(more.world.comms[0])


@pytest.mark.parametrize("make", [RADIUS, SCAPE], ids=["Radius", "SCAPE"])
def test_a_rank_that_is_level_keeps_what_it_owes_when_another_takes_the_step_over(make):
    run = Run(make, 3).train(3)
    for optimizer in run.optimizers:
        optimizer.state_dict()
    started = run.world.comms[0].started
    run.world.failing.update((1, started + n) for n in range(9))
    with pytest.raises(compopt.CommunicationError, match="not applied on rank 1"):
        run.train(1)
    run.t += 1
    unsent = run.held(2)
    comms = Run(make, 3).world
    with pytest.warns(UserWarning, match="rank 1 had not applied step 4"):
        comms.run([functools.partial(o.rebind, comm) for o, comm in zip(run.optimizers, comms.comms, strict=True)])
    run.world = comms
    for results, kept in zip(run.residuals(2), unsent, strict=True):
        assert torch.equal(results, kept) and kept.any()
    assert not any(results.any() for results in run.residuals(1))
    run.train(2)
    for p, q in zip(run.params[1], run.params[0], strict=True):
        assert torch.equal(p, q)


def test_what_does_not_fit_is_refused_and_nothing_is_loaded():
    run = Run(RADIUS).train(2)
    optimizer = run.optimizers[0]
    good = copy.deepcopy(optimizer.state_dict())
    newer, older, short, flat = (copy.deepcopy(good) for _ in range(4))
    newer["param_groups"][0]["format"] = 3
    older["param_groups"][0]["format"] = 1
    short["state"][0]["residual"] = torch.zeros(3)
    flat["state"][2]["exp_avg"] = torch.zeros(64, 64)
    for bad, report in ((newer, "format 3"), (older, "format 1"), (short, "3 elements"), (flat, "4096 elements")):
        with pytest.raises(ValueError, match=f"loaded state.*{report}"):
            optimizer.load_state_dict(bad)
    for i, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, good["state"][i][name]) for name, value in entry.items())


def moved(run: Run, survivors: list[int]) -> None:
    """These ranks go on over a group of their own."""
    run.world = World(len(survivors))
    run.optimizers, run.params = ([of[rank] for rank in survivors] for of in (run.optimizers, run.params))
    run.world.run([functools.partial(o.rebind, comm) for o, comm in zip(run.optimizers, run.world.comms, strict=True)])


@pytest.mark.filterwarnings("error:.*ranks are gone")
def test_an_equal_group_loses_nobody_and_two_steps_apart_is_too_far():
    run = Run(RADIUS).train(2)
    moved(run, [0, 1])
    run.train(1)
    run.optimizers[1].param_groups[0]["step"] += 2
    with pytest.raises(ValueError, match=r"ranks have taken \[3, 5\] steps"):
        moved(run, [0, 1])


@pytest.mark.filterwarnings("ignore:.*ranks are gone")
def test_masters_whose_owner_is_gone_are_what_parameters_are():
    run = Run(TAGC, 3, torch.bfloat16).train(2)
    moved(run, [0, 2])
    for i, p in enumerate(run.params[0]):
        masters = [o.state[local[i]]["master"] for o, local in zip(run.optimizers, run.params, strict=True)]
        assert torch.equal(torch.cat(masters).bfloat16(), p.detach().view(-1))


def test_what_is_on_its_way_over_a_group_that_is_gone_is_let_go(monkeypatch):
    run, let_go = Run(RADIUS).train(1), []
    tails = [exchange.in_flight for optimizer in run.optimizers for exchange in optimizer._engine.post_commit.exchanges]
    assert tails
    monkeypatch.setattr(SimPending, "untrack", lambda pending: let_go.append(pending))
    moved(run, [0, 1])
    assert all(pending in let_go for pending in tails)


def test_a_warning_at_load_points_at_the_line_that_loads():
    p = nn.Parameter(torch.ones(80, 80))
    optimizer = compopt.RadiusAdamW([p])
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"residuals": "rank 1 of 3", "step": 5}
    saved["state"][0]["residual"] = torch.ones(80, 80)
    with pytest.warns(UserWarning, match="holds the residuals of rank 1 of 3") as results:
        optimizer.load_state_dict(saved)
    assert [warning.filename for warning in results] == [__file__]


def test_what_does_not_fit_is_told_by_its_name_where_it_has_one():
    def make(width: int):
        return compopt.RadiusAdamW(torch.nn.Linear(width, 80).named_parameters())

    optimizer, other = make(70), make(90)
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    other.step()
    with pytest.raises(ValueError, match=r"of parameter 0 \(weight\) has 7200 elements, 5600 are needed"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("make", [compopt.RadiusAdamW, compopt.Separate, compopt.LocalSteps])
def test_hooks_are_given_the_whole_state_dict_as_by_torch(make):
    w = nn.Parameter(torch.ones(64, 80))
    adamw = torch.optim.AdamW([w])
    optimizer = make([w]) if make is compopt.RadiusAdamW else make(adamw)
    w.grad = torch.ones_like(w)
    optimizer.step()
    expected, seen = optimizer.state_dict(), []
    optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("before"))
    optimizer.register_state_dict_post_hook(lambda optimizer, saved: seen.append(copy.deepcopy(saved)))
    optimizer.register_state_dict_post_hook(lambda optimizer, saved: {"packed": saved})
    saved = optimizer.state_dict()
    assert seen[0] == "before" and len(seen) == 2
    for name, value in expected["state"][0].items():
        found = seen[1]["state"][0][name]
        assert type(value) is type(found) and getattr(value, "dtype", None) == getattr(found, "dtype", None)
    assert seen[1]["param_groups"] == expected["param_groups"] and seen[1].keys() == expected.keys()

    seen.clear()
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, saved: seen.append(saved.pop("packed")) or seen[0])
    optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("after"))
    optimizer.load_state_dict(saved)
    assert seen == [saved["packed"], "after"]  # which the hook took from a copy
    optimizer.load_state_dict({"packed": torch.optim.AdamW([w]).state_dict()})  # the base's alone
    assert len(seen) == 4 and seen[-1] == "after"


LEVEL = "is incomplete"


def state_and_warnings(optimizer) -> tuple[dict, list[str]]:
    """A state dict, and the warnings that came with it, all of which must name this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = optimizer.state_dict()
    assert {w.filename for w in caught} <= {__file__}
    return saved, [str(w.message) for w in caught]


@every
@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_nothing_is_missing(case):
    """Before the first step, alone, after consolidation; nor when that is loaded, on another rank."""
    ranks = make_ranks(case, 2)
    for optimizer in ranks.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does, which prepares it
    ranks.optimizers[1].load_state_dict(ranks.optimizers[0].state_dict())
    ranks.train(loss, 7)
    ranks.world.consolidate(ranks.optimizers)
    ranks.optimizers[1].load_state_dict(through_a_file(ranks.optimizers[0].state_dict()))

    single = make_ranks(case, 1)
    single.train(loss, 7)
    single.optimizers[0].load_state_dict(single.optimizers[0].state_dict())


@every
def test_in_a_dense_start_only_shards_are_missing(case):
    ranks = make_ranks(case, 2)
    if "dense_steps" not in case.compressed or case.cls is compopt.LocalSteps:
        pytest.skip("has no dense start")
    ranks.train(loss, 1)
    saved, words = state_and_warnings(ranks.optimizers[0])
    assert len(words) == case.sharded
    assert all("of the moments (exp_avg" in one and "back" not in one for one in words)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks.optimizers[1].load_state_dict(saved)
    assert len(caught) == case.sharded


@every
def test_what_is_missing_is_said_once_by_the_rank_that_saves(case):
    ranks = make_ranks(case, 3)
    ranks.train(loss, 7)
    optimizer = ranks.optimizers[1]
    if not optimizer.rank_local_state:
        assert state_and_warnings(optimizer)[1] == []
        return
    _, words = state_and_warnings(optimizer)
    assert len(words) == 1 and f"{type(optimizer).__name__} is incomplete: it " in words[0]
    assert "it lacks the residuals of the other 2 ranks (residual)" in words[0]
    assert ("holds rank 1's 33% of the moments (exp_avg" in words[0]) == case.sharded
    assert words[0].endswith("Call consolidate_state() on all ranks before rank 0 saves.")
    ranks.train(loss, 1)
    assert state_and_warnings(optimizer)[1] == [] and len(state_and_warnings(ranks.optimizers[0])[1]) == 1


@some_average("ScapeAdamS", "SeparateAdam", "TagcAdamW", "LocalSteps")
def test_a_state_dict_never_communicates(case, monkeypatch):
    """Whenever it is asked for: also with masks on their way, in a trial, after a consolidation."""
    ranks = make_ranks(case, 2)
    started = SimCommunicator.start

    def refused(comm, request):
        raise AssertionError(f"state_dict() started {type(request).__name__}")

    def save() -> None:
        monkeypatch.setattr(SimCommunicator, "start", refused)
        for optimizer in ranks.optimizers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(saved)
        monkeypatch.setattr(SimCommunicator, "start", started)

    save()
    for _ in range(8):
        ranks.train(loss, 1)
        save()
        ranks.world.consolidate(ranks.optimizers)
        save()
    ranks.assert_replicas_equal()


def warnings_inside(rank: int) -> dict[str, list[list[str]]]:
    """Of each class inside FSDP2, before the first step and after a compressed one."""
    results = {}
    for name, make_optimizer in (("TagcAdamW", compopt.TagcAdamW), ("SeparateAdam", separate), ("Separate", around)):
        model = fsdp_models.cut(fsdp_models.make())
        optimizer = make_optimizer(list(model.named_parameters()), dense_steps=0)
        before = state_and_warnings(optimizer)[1]
        fsdp_models.train(model, optimizer, range(2), rank)
        results[name] = [before, state_and_warnings(optimizer)[1]]
    return results


def test_inside_fsdp_only_residuals_are_missing():
    """FSDP's shards, of the moments too, are saved by torch; no optimizer of a rank's own steps there."""
    for results in run_ranks(warnings_inside, 2):
        for name, (before, after) in results.items():
            assert before == [], name
            assert len(after) == 1 and "lacks the residuals of the other rank (residual). Call" in after[0], name
