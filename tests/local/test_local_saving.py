"""Checkpoints of local steps, also through torch.distributed.checkpoint on real ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conformance import Small, through_a_file
from local_runs import adamw, are_equal, copies, end_round, single, train
from problems import gradients, replicas, weights
from problems import step as take_step
from ranks import run_ranks
from sim import World
from slow_rows import in_turn, slow_but
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_map

import compopt


def state_of(optimizer) -> dict:
    return through_a_file(optimizer.state_dict())


WITHIN = [{}, {"fragments": 2}, {"delay": 2, "fragments": 2}, {"delay": 3}]
AT = [2, 4, 5, 8]


@pytest.mark.parametrize(
    ("at", "options"),
    slow_but(lambda at, options: (AT.index(at) + WITHIN.index(options)) % 2, itertools.product(AT, WITHIN)),
)
def test_a_checkpoint_within_a_round_goes_on_to_the_bit(options, at):
    options = {"every": 4, "payload_dtype": "int8", "dense_steps": 1, "growth_steps": 0, **options}

    def make(params, process_group):
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    for t in range(at):
        take_step(world, params, optimizers, single(2, t))
    saved = [state_of(optimizer) for optimizer in optimizers]
    world2, params2, optimizers2 = replicas(2, weights(dtype=torch.float32), make)
    for own, theirs, optimizer, state in zip(params2, params, optimizers2, saved, strict=True):
        for p, q in zip(own, theirs, strict=True):
            p.data.copy_(q)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of another rank's residuals
            optimizer.load_state_dict(state)
    for t in range(at, at + 9):
        take_step(world, params, optimizers, single(2, t))
        take_step(world2, params2, optimizers2, single(2, t))
    for own, theirs in zip(params, params2, strict=True):
        assert all(map(torch.equal, own, theirs))
    assert optimizers[0].stats.round == optimizers2[0].stats.round > 1


def test_consolidated_it_goes_on_with_any_number_of_ranks():
    params, optimizers = train(2, 8, torch.float32, payload_dtype="int8")
    world = optimizers[0].comm.world
    world.consolidate(optimizers)
    state = state_of(optimizers[0])
    more = World(3)
    ranks = [[torch.nn.Parameter(p.detach().clone()) for p in params[0]] for _ in range(3)]
    new = [compopt.LocalSteps(adamw(own), process_group=comm) for own, comm in zip(ranks, more.comms, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in new:
            optimizer.load_state_dict(state)
    for t in range(8, 12):
        take_step(more, ranks, new, gradients(3, t, dtype=torch.float32))
    assert new[0].stats.round == 3 and all(map(torch.equal, ranks[0], ranks[2]))


def resumed(params, optimizers, make) -> tuple[World, list, list]:
    """Replicas made by ``make`` that go on from what every rank of ``optimizers`` saves now."""
    world = World(len(params))
    others = [[torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in rank] for rank in params]
    new = [make(rank, process_group=comm) for rank, comm in zip(others, world.comms, strict=True)]
    for optimizer, saved in zip(new, [state_of(optimizer) for optimizer in optimizers], strict=True):
        optimizer.load_state_dict(saved)
    return world, others, new


def trainable(params, t: int) -> list[list[torch.Tensor | None]]:
    """Gradients of the parameters that require one."""
    grads = gradients(len(params), t, [tuple(p.shape) for p in params[0]], params[0][0].dtype)
    return [
        [g if p.requires_grad else None for p, g in zip(*pair, strict=True)] for pair in zip(params, grads, strict=True)
    ]


@pytest.mark.parametrize("is_open", [True, False])
def test_state_of_a_frozen_layer_may_be_absent_only_if_it_has_not_moved(is_open):
    """torch.distributed.checkpoint leaves it out when it loads, and ranks differ in what was moved."""

    def make(params, process_group):
        return compopt.LocalSteps(adamw(params), every=4, growth_steps=0, process_group=process_group)

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    for t in range(5):
        take_step(world, params, optimizers, trainable(params, t))
    if not is_open:
        end_round(optimizers)
    for rank in params:
        rank[0].requires_grad_(False)
    _, others, new = resumed(params, optimizers, make)
    for optimizer in new:
        saved = state_of(optimizer)
        del saved["state"][0]
        if not is_open:
            optimizer.load_state_dict(saved)
            continue
        with pytest.raises(ValueError, match="lacks parameter 0, which is frozen"):
            optimizer.load_state_dict(saved)
    assert torch.equal(others[0][0], others[1][0]) != is_open


@pytest.mark.parametrize("frozen_at", [1, 2])  # in the averaged start, and at its end
@pytest.mark.parametrize("dtype", [None, "int8"], ids=str)
def test_with_a_frozen_layer_it_is_consolidated_and_saved(frozen_at, dtype):
    def make(params, process_group):
        options = dict(every=4, dense_steps=2, growth_steps=0, payload_dtype="int8", residual_dtype=dtype)
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    for t in range(5):
        if t == frozen_at:
            for rank in params:
                rank[0].requires_grad_(False)
        take_step(world, params, optimizers, trainable(params, t))
    world.consolidate(optimizers)
    world2, others, new = resumed(params, optimizers, make)
    take_step(world, params, optimizers, trainable(params, 5))
    take_step(world2, others, new, trainable(others, 5))
    for rank, other in zip(params, others, strict=True):
        assert all(map(torch.equal, rank, other))


def test_consolidated_a_frozen_layer_keeps_its_bits():
    """Three equal values have a sum that is rounded."""
    params, optimizers = train(3, 4, torch.bfloat16)
    for rank in params:
        rank[0].requires_grad_(False)
    take_step(optimizers[0].comm.world, params, optimizers, trainable(params, 4))
    before = params[0][0].detach().clone()
    optimizers[0].comm.world.consolidate(optimizers)
    assert are_equal(params) and torch.equal(params[0][0], before)


def test_consolidated_the_moments_of_a_layer_that_was_unfrozen_are_the_mean():
    def make(params, process_group):
        return compopt.LocalSteps(adamw(params), every=3, growth_steps=0, process_group=process_group)

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    for t in range(5):
        for rank in params:
            rank[0].requires_grad_(t > 1)
        take_step(world, params, optimizers, trainable(params, t))
    moments = [optimizer.base.state[rank[0]]["exp_avg"] for optimizer, rank in zip(optimizers, params, strict=True)]
    mean = sum(moments) / 2
    assert not torch.equal(*moments)
    world.consolidate(optimizers)
    for m in moments:
        torch.testing.assert_close(m, mean)
    assert torch.equal(*moments)


@pytest.mark.parametrize("at", [6, 8, 9])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_run_that_added_a_group_is_resumed_to_the_bit(at, fragments):
    """The group comes in step 6; the resumed run has it from the beginning."""
    options = dict(every=4, growth_steps=0, payload_dtype="int4", fragments=fragments)
    start = weights(dtype=torch.float32)

    def make(params, process_group):
        params = list(params)
        inner = torch.optim.AdamW(
            [{"params": params[:5]}, {"params": params[5:], "lr": 0.1}][: 1 + (len(params) > 5)], lr=1e-2
        )
        return compopt.LocalSteps(inner, process_group=process_group, **options)

    world, params, optimizers = replicas(2, start, make)
    for t in range(12):
        if t == 5:
            for rank, optimizer in zip(params, optimizers, strict=True):
                rank.append(torch.nn.Parameter(torch.ones(64, 80)))
                optimizer.add_param_group({"params": rank[5:], "lr": 0.1})
        if t == at:
            world2, params2, optimizers2 = resumed(params, optimizers, make)
        take_step(world, params, optimizers, trainable(params, t))
        if t >= at:
            take_step(world2, params2, optimizers2, trainable(params2, t))
    assert all(map(torch.equal, params[0], params2[0])) and all(map(torch.equal, params[1], params2[1]))
    assert not torch.equal(params[0][5], torch.ones(64, 80))


FREEZING = [  # dtype, bytes of a bucket, options, the step that is saved, (step, parameter): frozen, or trained again
    (torch.bfloat16, 200, dict(payload_dtype="int8", fragments=2), 4, [(6, 0), (4, 2), (11, 1)]),
    (torch.bfloat16, 200, dict(payload_dtype="int2", fragments=2, dense_steps=2), 8, [(11, 3), (3, 3), (7, 4)]),
    (torch.bfloat16, 200, dict(payload_dtype="int8"), 5, [(11, 1), (8, 2), (2, 1)]),
    (torch.float32, 8 * 2**20, dict(payload_dtype="int2", fragments=2, delay=1), 8, [(7, 0), (10, 4), (12, 4)]),
    (torch.bfloat16, 200, dict(payload_dtype="int8", fragments=2, dense_steps=2), 6, [(0, 0), (4, 0)]),
    (torch.bfloat16, 8 * 2**20, dict(payload_dtype="int2", fragments=2, delay=1), 7, [(1, 2), (9, 2), (12, 2)]),
    (torch.float32, 200, dict(payload_dtype="int8", fragments=2, delay=1, dense_steps=2), 10, [(2, 1), (8, 2)]),
    (torch.float32, 200, dict(payload_dtype="int4"), 6, [(0, 1), (4, 1), (5, 3)]),
]


@pytest.mark.parametrize(("dtype", "bucket_bytes", "options", "at", "changes"), FREEZING)
def test_a_run_that_froze_layers_is_resumed_to_the_bit(dtype, bucket_bytes, options, at, changes, monkeypatch):
    monkeypatch.setattr("compopt._state.buckets.BUCKET_BYTES", bucket_bytes)
    options = dict(every=4, growth_steps=0, **options)

    def make(params, process_group):
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    def change(params, t: int) -> None:
        for i in (i for when, i in changes if when == t):
            for rank in params:
                rank[i].requires_grad_(not rank[i].requires_grad)

    world, params, optimizers = replicas(2, weights(dtype=dtype), make)
    for t in range(at + 10):
        if t == at:
            world2, params2, optimizers2 = resumed(params, optimizers, make)
        for w, rank, own in [(world, params, optimizers)] + ([(world2, params2, optimizers2)] if t >= at else []):
            change(rank, t)
            take_step(w, rank, own, trainable(rank, t))
    assert all(map(torch.equal, params[0], params2[0])) and all(map(torch.equal, params[1], params2[1]))


DAMAGES = {
    "begun later": lambda saved: saved["state"][0]["outer"].update(begun=torch.tensor(7)),
    "round": lambda saved: saved["state"][0]["outer"].update(round=None),
    "no anchor": lambda saved: saved["state"][0]["outer"].pop("anchor"),
    "anchor": lambda saved: saved["state"][0]["outer"].update(anchor="x"),
    "not finite": lambda saved: saved["state"][0]["outer"]["anchor"].view(-1)[:1].fill_(float("nan")),
    "shape": lambda saved: saved["state"][0]["outer"].update(anchor=torch.zeros(3)),
    "shape that broadcasts": lambda saved: saved["state"][0]["outer"].update(anchor=torch.zeros(80)),
    "optimizer": lambda saved: saved["state"][0]["outer"].update(optimizer={}),
    "moved": lambda saved: saved["state"][0]["outer"].update(has_moved=torch.zeros(2)),
    "due": lambda saved: saved["state"][0]["outer"].pop("is_due"),
    "fragment": lambda saved: saved["state"][0]["outer"].update(fragment=torch.tensor(-2)),
    "another fragment": lambda saved: saved["state"][0]["outer"].update(fragment=torch.tensor(0.5)),
    "begun": lambda saved: saved["state"][0]["outer"].update(begun=torch.tensor(-5)),
    "syncs": lambda saved: saved["state"][0]["outer"]["optimizer"].update(step="x"),
    "exchange": lambda saved: saved["state"][0]["outer"].update(exchange={"apply_at": "x"}),
    "step of the base": lambda saved: saved["state"][0]["base"].update(step="abc"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_nothing_of_it_loaded(damage):
    params, optimizers = train(2, 6, torch.float32, payload_dtype="int8")
    params2, others = train(2, 5, torch.float32, payload_dtype="int8")
    saved = state_of(optimizers[0])
    DAMAGES[damage](saved)
    before = state_of(others[0])
    with pytest.raises(ValueError, match="loaded state"):
        others[0].load_state_dict(saved)
    assert_equal_states(before, state_of(others[0]))
    take_step(others[0].comm.world, params2, others, single(2, 5))
    assert all(map(torch.equal, params2[0], params[0])), "and it goes on as if nothing had been tried"


def assert_equal_states(a, b) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal_states(x, y)
    else:
        assert a == b


def test_anchors_of_another_class_are_refused():
    _, optimizers = train(2, 6, torch.float32)
    saved = state_of(optimizers[0])
    saved["param_groups"][0]["class"] = "DiLoCo"
    with pytest.raises(ValueError, match="is of DiLoCo, and its anchors are nothing that LocalSteps goes on from"):
        optimizers[0].load_state_dict(saved)


@pytest.mark.parametrize("payload", [None, "int4"])
@pytest.mark.parametrize("steps", [8, 10])
def test_consolidated_the_run_that_is_resumed_from_rank_0_is_the_one_that_goes_on(payload, steps):
    """To the bit, and moments too, which were each rank's own."""

    def make(params, process_group):
        options = dict(every=4, growth_steps=0, payload_dtype=payload, fragments=2)
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    world, params, optimizers = replicas(3, weights(dtype=torch.float32), make)
    for t in range(steps):
        take_step(world, params, optimizers, single(3, t))
    end_round(optimizers)
    world.consolidate(optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = state_of(optimizers[0])
    world2, params2, resumed_ = replicas(3, [p.detach() for p in params[0]], make)
    for optimizer in resumed_:
        optimizer.load_state_dict(state)
    for t in range(steps, steps + 6):
        take_step(world, params, optimizers, single(3, t))
        take_step(world2, params2, resumed_, single(3, t))
    for rank, other in zip(params, params2, strict=True):
        assert all(map(torch.equal, rank, other))


def test_from_the_inner_optimizers_own_checkpoint_all_begins_anew():
    """As in an optimizer that is new: from the parameters there are, not from the anchors of before."""
    params, optimizers = train(2, 9, torch.float32)
    new_params, new = train(2, 0, torch.float32)
    start = copies(params)[0]
    for rank, optimizer in zip(params + new_params, optimizers + new, strict=True):
        optimizer.load_state_dict(copy.deepcopy(optimizers[0].inner.state_dict()))
        assert optimizer.stats.round == 0
        for p, q in zip(rank, start, strict=True):
            p.data.copy_(q)
    for t in range(4):
        take_step(optimizers[0].comm.world, params, optimizers, single(2, t))
        take_step(new[0].comm.world, new_params, new, single(2, t))
        assert are_equal(params) == (t == 3) and optimizers[0].stats.round == (t == 3)
    assert all(map(torch.equal, params[0], new_params[0]))


def test_a_state_that_only_some_ranks_keep_stays_as_it_is():
    """A tensor that had a gradient on one rank only; moments of the others become their mean."""
    params, optimizers = train(2, 0, torch.float32, every=100)
    grads = single(2, 0)
    grads[1][2] = None
    take_step(optimizers[0].comm.world, params, optimizers, grads)
    kept = [optimizer.inner.state for optimizer in optimizers]
    before = kept[0][params[0][2]]["exp_avg"].clone()
    mean = (kept[0][params[0][0]]["exp_avg"] + kept[1][params[1][0]]["exp_avg"]) / 2
    optimizers[0].comm.world.consolidate(optimizers)
    assert torch.equal(kept[0][params[0][2]]["exp_avg"], before) and not kept[1][params[1][2]]
    assert torch.equal(kept[0][params[0][0]]["exp_avg"], mean) and torch.equal(kept[1][params[1][0]]["exp_avg"], mean)


def test_a_state_dict_of_one_rank_says_what_it_lacks():
    _, optimizers = train(2, 6, torch.float32)
    with pytest.warns(UserWarning, match=r"incomplete: .*the inner optimizer's state of the other rank"):
        optimizers[0].state_dict()


def lose_rank_1(params, optimizers) -> None:
    params[1][2].data[0, 0] = float("nan")


def fail_exchange(params, optimizers) -> None:
    for world in (optimizers[0].comm.world, optimizers[0].comm.world.beside):
        world.failing_everywhere |= {n + world.comms[0].started for n in range(-3, 3)}


@pytest.mark.parametrize(("trouble", "options"), [(lose_rank_1, {"delay": 2}), (fail_exchange, {"delay": 1})])
def test_an_exchange_in_trouble_is_resumed_as_it_goes_on(trouble, options):
    """Saved where a rank's parameters were not finite when it began, or where it has to be begun again."""
    params, optimizers = train(2, 7, torch.float32, **options)
    world = optimizers[0].comm.world
    trouble(params, optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in (7, 8) if trouble is fail_exchange else (7,):
            with contextlib.suppress(compopt.CommunicationError):
                take_step(world, params, optimizers, single(2, t))
        for some in (world, world.beside):
            some.failing_everywhere.clear()

        def make(params, process_group):
            settings = dict(every=4, growth_steps=0, payload_dtype=None, **options)
            return compopt.LocalSteps(adamw(params), process_group=process_group, **settings)

        world2, params2, optimizers2 = resumed(params, optimizers, make)
        for t in range(9, 16):
            take_step(world, params, optimizers, single(2, t))
            take_step(world2, params2, optimizers2, single(2, t))
    assert all(map(torch.equal, params[0], params2[0])) and all(map(torch.equal, params[1], params2[1]))
    assert all(bool(p.isfinite().all()) for p in params[0])


def test_what_is_done_to_a_frozen_layer_stays_where_an_exchange_is_resumed():
    """The layer is not part of the exchange that is on its way."""
    params, optimizers = train(2, 6, torch.float32, delay=2, payload_dtype="int4")
    world = optimizers[0].comm.world
    for rank in params:
        rank[2].requires_grad_(False)
    for t in range(6, 13):  # once more it follows the others, and from step 12 on another exchange is on its way
        grads = single(2, t)
        for given in grads:
            given[2] = None
        take_step(world, params, optimizers, grads)
    for rank in params:
        rank[2].data.add_(1)
    after = params[0][2].detach().clone()

    def make(params, process_group):
        params[2].requires_grad_(False)
        options = dict(every=4, growth_steps=0, payload_dtype="int4", delay=2)
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    world2, params2, optimizers2 = resumed(params, optimizers, make)
    grads = single(2, 13)
    for given in grads:
        given[2] = None
    take_step(world, params, optimizers, grads)
    take_step(world2, params2, optimizers2, grads)
    assert all(map(torch.equal, params[0], params2[0]))
    assert optimizers2[0].stats.phase == "exchanged" and torch.equal(params2[0][2], after)


def test_a_copy_goes_on_as_the_original():
    options = {"delay": 2, "fragments": 2}
    params, optimizers = train(2, 7, torch.float32, **options)
    expected, _ = train(2, 12, torch.float32, **options)
    twins = copy.deepcopy(list(zip(params, optimizers, strict=True)))
    params, optimizers = zip(*twins, strict=True)
    for t in range(7, 12):
        take_step(optimizers[0].comm.world, params, optimizers, single(2, t))
    for rank, other in zip(params, expected, strict=True):
        assert all(map(torch.equal, rank, other))


@pytest.mark.parametrize(("dense_steps", "steps"), [(0, 4), (3, 2), (3, 4)])
def test_names_in_a_state_dict_are_the_same_throughout_a_run(dense_steps, steps):
    """Those of a run with an averaged start include its residual, which is zero afterwards."""
    options = dict(dense_steps=dense_steps, payload_dtype="int8", delay=1)
    _, optimizers = train(2, steps, torch.float32, **options)
    _, new = train(2, 0, torch.float32, **options)
    state, fresh = quiet_state(optimizers[0]), quiet_state(new[0])
    assert names_of(state) == names_of(fresh)
    residuals = [entry["residual"] for entry in state.values() if "residual" in entry]
    assert bool(residuals) == bool(dense_steps) and any(r.any() for r in residuals) == (steps < dense_steps)


def quiet_state(optimizer) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(optimizer.state_dict()["state"])


def names_of(state: dict) -> object:
    return {key: names_of(value) if isinstance(value, dict) else None for key, value in state.items()}


def test_before_its_first_step_a_state_dict_has_no_rounds_to_load():
    """Only their names, for torch.distributed.checkpoint; nor does a single process have any."""
    params, optimizers = train(2, 0, torch.float32, dense_steps=2, delay=1)
    others, resumed_ = train(2, 0, torch.float32, dense_steps=2, delay=1)
    for optimizer in resumed_:
        optimizer.load_state_dict(state_of(optimizer))
    for t in range(8):
        take_step(optimizers[0].comm.world, params, optimizers, single(2, t))
        take_step(resumed_[0].comm.world, others, resumed_, single(2, t))
    assert all(map(torch.equal, params[0], others[0])) and optimizers[0].stats.round == 1


@pytest.mark.parametrize(("options", "at"), in_turn([{}, {"fragments": 2, "delay": 2}, {"delay": 3}], (2, 4, 5)))
def test_consolidated_within_a_round_nothing_that_ranks_moved_is_lost(options, at):
    """The mean over ranks of parameters, less residuals, is what it was; an exchange on its way is applied."""
    params, optimizers = train(3, at, payload_dtype="int8", outer_lr=1, outer_momentum=0, **options)

    def mean_with_residuals() -> list[torch.Tensor]:
        states = [[quiet_state(optimizer)[i]["outer"] for i in range(len(params[0]))] for optimizer in optimizers]
        ranks = zip(params, states, strict=True)
        owed = [[p - e["optimizer"]["residual"] for p, e in zip(*pair, strict=True)] for pair in ranks]
        return [sum(parts) / 3 for parts in zip(*owed, strict=True)]

    before = mean_with_residuals()
    optimizers[0].comm.world.consolidate(optimizers)
    for p, q in zip(before, mean_with_residuals(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)
    for rank in params[1:]:
        assert all(map(torch.equal, params[0], rank))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is missing
        states = [state_of(optimizer)["state"] for optimizer in optimizers]
    assert_equal_states(states[0], states[2])


def test_consolidated_within_a_round_an_exchange_on_its_way_is_applied():
    _, optimizers = train(2, 5, torch.float32, delay=2)
    optimizers[0].comm.world.consolidate(optimizers)
    entry = optimizers[0].state_dict()["state"][0]["outer"]
    assert int(entry["optimizer"]["step"]) == 1 and not entry["exchange"]["apply_at"] and not entry["is_due"]


def test_an_exchange_ends_what_was_consolidated():
    """``end_round()`` is no step: what each rank then holds back is its own again."""
    _, optimizers = train(2, 6, torch.float32, payload_dtype="int8")
    optimizers[0].comm.world.consolidate(optimizers)
    end_round(optimizers)
    with pytest.warns(UserWarning, match="it lacks the residuals of the other rank"):
        groups = optimizers[0].state_dict()["param_groups"]
    assert groups[0]["residuals"] == "rank 0 of 2"


def test_an_exchange_on_its_way_has_the_rate_of_its_round():
    """The outer rate and momentum have not reached their own while rounds still grow."""
    options = dict(every=8, growth_steps=100, delay=1, payload_dtype="int8")

    def make(params, process_group):
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    at = next(t for t in itertools.count(30) if advance(world, params, optimizers, t)) + 1
    world2, params2, optimizers2 = resumed(params, optimizers, make)
    for t in range(at, at + 2):
        take_step(world, params, optimizers, single(2, t))
        take_step(world2, params2, optimizers2, single(2, t))
    assert all(map(torch.equal, params[0], params2[0]))


def advance(world, params, optimizers, t: int) -> bool:
    """Take step t, the first time all before it; whether an exchange is on its way then."""
    for at in range(optimizers[0].stats.applied_steps, t + 1):
        take_step(world, params, optimizers, single(2, at))
    return bool(quiet_state(optimizers[0])[0]["outer"]["exchange"]["apply_at"])


def test_a_rank_whose_parameters_are_not_finite_spoils_no_mean():
    params, optimizers = train(2, 6, torch.float32)
    params[1][2].data[0, 0] = float("nan")
    optimizers[1].inner.state[params[1][2]]["exp_avg"][0, 0] = float("nan")
    optimizers[0].comm.world.consolidate(optimizers)
    anchor = optimizers[0].state_dict()["state"][2]["outer"]["anchor"]
    assert all(torch.equal(p, q) and bool(p.isfinite().all()) for p, q in zip(*params, strict=True))
    assert not torch.equal(anchor, params[0][2]), "what rank 0 has moved is in it"
    assert bool(optimizers[0].inner.state[params[0][2]]["exp_avg"].isfinite().all())


ROUNDS = [dict(), dict(fragments=2, delay=2), dict(dense_steps=2, delay=1)]
Flat = dict[str, torch.Tensor]


def made(**options) -> tuple[torch.nn.Module, compopt.LocalSteps]:
    torch.manual_seed(0)
    model = DDP(Small(), find_unused_parameters=True)
    options = {"every": 4, "growth_steps": 0, "payload_dtype": "int4", **options}
    return model, compopt.LocalSteps(torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def train_rank(model, optimizer, rank: int, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()


def save(model, optimizer, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model, optimizer, folder: str, key: str = "") -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({f"{key}model": weights, f"{key}optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def flat(model, optimizer) -> Flat:
    """All tensors of model and optimizer, and the step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = copy.deepcopy(optimizer.state_dict()["state"])
    found = {f"p{i}": p.detach().clone() for i, p in enumerate(model.parameters())}

    def add(prefix: str, entry: dict) -> None:
        for name, value in entry.items():
            if isinstance(value, dict):
                add(f"{prefix}.{name}", value)
            else:
                found[f"{prefix}.{name}"] = value

    for place, entry in state.items():
        add(str(place), entry)
    return found


def goes_on(rank: int, before: str | None, after: str, options: dict, steps: tuple[int, int]) -> tuple[Flat, Flat]:
    """Load, train and save; the states that were loaded and saved."""
    model, optimizer = made(**options)
    if before:
        load(model, optimizer, before)
    loaded = flat(model, optimizer)
    train_rank(model, optimizer, rank, range(*steps))
    optimizer.consolidate_state()
    save(model, optimizer, after)
    return loaded, flat(model, optimizer)


def assert_same(a: Flat, b: Flat) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("options", slow_but(lambda options: options == ROUNDS[1], ROUNDS), ids=str)
def test_from_2_ranks_to_3_to_1_within_a_round(options, tmp_path):
    folders = [str(tmp_path / name) for name in "abc"]
    before, then = None, None
    for ranks, folder, steps in zip((2, 3, 1), folders, ((0, 6), (6, 11), (11, 13)), strict=True):
        found = run_ranks(goes_on, ranks, before, folder, options, steps)
        for loaded, saved in found:
            assert_same(saved, found[0][1])
            if then is not None:
                assert_same(loaded, then)
        before, then = folder, found[0][1]
        if ranks > 1:
            anchors = [name for name in then if name.endswith("outer.fragment")]
            assert [int(then[name]) >= 0 for name in anchors].count(True) > 3
            assert any(then[name].any() for name in then if name.endswith("momentum_buffer"))
            assert any(then[name].any() for name in then if "outer.optimizer.residual" in name)


def own_states(rank: int, folder: str, options: dict) -> tuple[Flat, Flat]:
    """The states that each rank goes on to, from memory and from what it alone has saved under its own name."""
    model, optimizer = made(**options)
    train_rank(model, optimizer, rank, range(6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, state = get_state_dict(model, optimizer)
    own = {f"rank {rank} model": weights, f"rank {rank} optimizer": state}
    dcp.save(tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, own), checkpoint_id=folder)
    again, other = made(**options)
    load(again, other, folder, f"rank {rank} ")
    for one in ((model, optimizer), (again, other)):
        train_rank(*one, rank, range(6, 13))
    return flat(model, optimizer), flat(again, other)


@pytest.mark.parametrize("options", slow_but(lambda options: options == ROUNDS[2], ROUNDS), ids=str)
def test_each_rank_goes_on_from_its_own_state_to_the_bit(options, tmp_path):
    """Also while an exchange is on its way."""
    for before, after in run_ranks(own_states, 2, str(tmp_path), options):
        assert_same(before, after)
