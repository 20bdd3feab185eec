"""Groups hold what users and schedulers put there: it is kept, and never makes ranks differ."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from conformance import Small, every, loss
from pairs import name_of
from sim import Ranks
from slow_rows import in_turn
from table import CASES, FORMS, by_name
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import compopt
from compopt._engine.options import make_comparable


class Setting:
    """Its repr holds an address."""


def anything(rank: int) -> dict:
    """Return what a user may put into a group, unlike on every rank in address, order or value."""
    return {
        "initial_lr": 0.1 + rank,
        "schedule": lambda step: step,
        "tags": {"body", f"rank {rank}"},
        "setting": Setting(),
        "weights": torch.arange(3 + rank),
    }


@every
def test_a_group_may_hold_anything_and_ranks_do_not_differ_by_it(case):
    ranks = Ranks(2, Small, lambda ps, process_group: case.make(ps, process_group=process_group))
    for rank, _, optimizer in ranks:
        optimizer.param_groups[0].update(anything(rank))
    ranks.train(loss, 3)
    for rank, _, optimizer in ranks:  # changed, and no reason for a handshake
        before = optimizer._engine.options.message_options
        optimizer.param_groups[0].update(anything(rank + 1))
        optimizer.apply_changed_options()
        assert optimizer._engine.options.message_options == before
    ranks.train(loss, 1)
    assert all(optimizer.stats.applied_steps == 4 and optimizer.stats.skipped == 0 for optimizer in ranks.optimizers)
    ranks.finish_round(loss)
    ranks.assert_replicas_equal()


@every
def test_what_a_group_holds_survives_a_state_dict_as_torchs_does(case):
    def make(cls=None, **options):
        model = Small()
        return (cls or case.make)(model.parameters(), **options)

    theirs, ours = make(torch.optim.AdamW, lr=0.5), make(lr=0.5)
    held = {"initial_lr": 0.5, "tags": {"body"}, "schedule": [1, 2], "name": "all"}
    for optimizer in (theirs, ours):
        for group in optimizer.param_groups:
            group.update(copy.deepcopy(held))
    for new, old in (make(torch.optim.AdamW), theirs), (make(), ours):
        new.load_state_dict(old.state_dict())
        scheduler = LambdaLR(new, lambda step: 1 / (1 + step), last_epoch=5)
        assert scheduler.base_lrs == [0.5] * len(old.param_groups)
        for group, loaded in zip(new.param_groups, old.param_groups, strict=True):
            assert {key: group.get(key) for key in held} == held
            assert group["schedule"] is not loaded["schedule"]
            assert group["lr"] == pytest.approx(0.5 / 7)
            assert not {"residuals", "class", "format"} & group.keys()


def test_a_checkpoint_of_torchs_adamw_comes_back_as_it_was():
    theirs = torch.optim.AdamW(Small().parameters(), lr=0.5, fused=True)
    ours = by_name["RadiusAdamW"].make(Small().parameters())
    ours.load_state_dict(theirs.state_dict())
    again = torch.optim.AdamW(Small().parameters())
    again.load_state_dict(ours.state_dict())
    assert {key: again.param_groups[0][key] for key in theirs.defaults} == theirs.defaults


def test_names_of_parameters_stay_the_optimizers_own():
    case, saved = by_name["TagcAdamW"], None
    for prefix in ("module.", "other."):
        named = [(prefix + name, p) for name, p in Small().named_parameters()]
        optimizer = case.make(named)
        if saved:
            optimizer.load_state_dict(saved)
        saved = optimizer.state_dict()
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in named]


@pytest.mark.slow
def test_what_is_compared_reads_the_same_in_every_process():
    numpy = pytest.importorskip("numpy")
    values = [numpy.float64(0.25), numpy.int64(3), numpy.bool_(True), torch.tensor(0.25), torch.tensor([1.0, 2.0])]
    assert [make_comparable(v) for v in values] == [0.25, 3, True, 0.25, (1.0, 2.0)]
    assert make_comparable([1, 2]) == make_comparable((1, 2)) and make_comparable({"b": 1, "a": 2}) == make_comparable(
        {"a": 2, "b": 1}
    )
    assert (
        make_comparable(torch.int8) == make_comparable("int8") == "int8"
        and make_comparable(torch.device("cpu")) == "cpu"
        and make_comparable(None) is None
    )
    assert "0x" not in repr(make_comparable([Setting(), loss, Setting, lambda: 0]))
    code = "from compopt._engine.options import make_comparable; print(make_comparable({'a', 'b', 'c', 'd', ('e', 1)}))"
    run = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in "12"
    ]
    assert run[0].stdout == run[1].stdout != b""


@every
def test_a_group_that_the_layout_refuses_leaves_no_trace(case, monkeypatch):
    """As where FSDP2 shards the new parameters over other ranks. Training goes on as if nobody had tried."""

    def refuse_new_groups(optimizer, before=case.cls.before_layout):
        if len(optimizer.option_groups) > groups:
            raise ValueError("of the test")
        before(optimizer)

    runs = [Ranks(2, Small, lambda ps, process_group: case.make(ps, process_group=process_group)) for _ in range(2)]
    groups = len(runs[0].optimizers[0].option_groups)
    monkeypatch.setattr(case.cls, "before_layout", refuse_new_groups)
    for run in runs:
        run.train(loss, 3)
    for optimizer in runs[0].optimizers:
        with pytest.raises((ValueError, TypeError), match=r"of the test|of that one"):  # of one member of several
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64, 65))]})
        assert len(optimizer.option_groups) == groups
    for run in runs:
        run.train(loss, 3)
    for one, other in zip(*(run.models for run in runs), strict=True):
        assert all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("refused", ["check", "layout"])
def test_a_group_that_a_wrapper_refuses_leaves_no_trace_in_its_base(refused, monkeypatch):
    a, b = (nn.Parameter(torch.ones(64, 65)) for _ in range(2))
    base = compopt.AdamS([a])
    optimizer = compopt.Separate(base, simulate=True)
    layout = compopt.Separate.before_layout

    def refuse(self):
        if len(self.option_groups) > 1:
            raise ValueError("of the test")
        layout(self)

    if refused == "layout":
        monkeypatch.setattr(compopt.Separate, "before_layout", refuse)
    with pytest.raises(ValueError):
        optimizer.add_param_group({"params": [b], **({"compopt_rank": 0} if refused == "check" else {})})
    assert b not in base.state and all(p is a for bucket in base._buckets for p in bucket.params)
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    optimizer.step()
    assert torch.equal(b, torch.ones_like(b)) and not torch.equal(a, torch.ones_like(a))


def swap(ranks: Ranks) -> None:
    """Another parameter with the values of one takes its place, in the model and in the groups."""
    for _, model, optimizer in ranks:
        old = model.down.weight
        model.down.weight = new = nn.Parameter(old.detach().clone())
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]


def assert_trains(ranks: Ranks) -> None:
    """The matrix moves, replicas stay equal, and all of the state can be saved and loaded."""
    before = ranks.models[0].down.weight.detach().clone()
    ranks.train(loss, 4)
    ranks.finish_round(loss)
    assert not torch.equal(ranks.models[0].down.weight, before)
    ranks.assert_replicas_equal()
    for optimizer in ranks.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ranks.train(loss, 4)
    ranks.finish_round(loss)
    ranks.assert_replicas_equal()


@pytest.mark.filterwarnings("ignore:this state dict of")
@pytest.mark.parametrize(("case", "change"), in_turn(CASES + FORMS, ("replaced", "appended", "removed")), ids=name_of)
def test_parameters_of_a_running_optimizer_are_those_of_its_groups(case, change):
    def make(params, process_group):
        shapes = [*params]
        matrix = next(p for p in shapes if p.shape == (64, 96))
        others = [p for p in shapes if p is not matrix]
        if change == "removed":  # in front of the others
            return case.make([{"params": others}, {"params": [matrix]}], process_group=process_group)
        return case.make(others if change == "appended" else shapes, process_group=process_group)

    ranks = Ranks(2, Small, make)
    ranks.train(loss, 5)
    ranks.finish_round(loss)
    if change == "replaced":
        swap(ranks)
    for _, model, optimizer in ranks:
        if change == "appended":
            optimizer.param_groups[-1]["params"].append(model.down.weight)
        elif change == "removed":
            (optimizer.base.members[0] if case.several else optimizer).param_groups.pop(0)
    if case.sharded and change != "removed":
        with pytest.raises(ValueError, match=r"cut its state into shards, .* have changed after step 5"):
            ranks.train(loss, 1)
        return
    ranks.train(loss, 1)
    if anchors := getattr(ranks.optimizers[0], "_anchors", None):  # before a state dict is loaded, which makes new ones
        params = {p for group in ranks.optimizers[0].param_groups for p in group["params"]}
        assert {anchored.param for anchored in anchors.tensors} == params
    assert_trains(ranks)


@pytest.mark.filterwarnings("ignore:this state dict of")
@pytest.mark.parametrize("name", ["RadiusAdamW", "TagcAdamW", "Separate", "Average", "LocalSteps"])
def test_parameters_that_are_appended_before_the_first_step_are_trained(name):
    def make(params, process_group):
        return by_name[name].make([p for p in params if p.shape != (64, 96)], process_group=process_group)

    ranks = Ranks(2, Small, make)
    for _, model, optimizer in ranks:
        optimizer.param_groups[-1]["params"].append(model.down.weight)
    assert_trains(ranks)


def test_a_removed_group_takes_its_options_along():
    a, b = (nn.Parameter(torch.ones(64, 65)) for _ in range(2))
    base = torch.optim.SGD([{"params": [a], "compopt_compress": False}, {"params": [b]}], lr=0.1)
    optimizer = compopt.Separate(base, rank=4, dense_steps=0, simulate=True)
    optimizer.param_groups.pop(0)
    b.grad = torch.randn(64, 65)
    optimizer.step()
    assert optimizer._buckets[0].compressed == [True] and not torch.equal(b, torch.ones_like(b))
