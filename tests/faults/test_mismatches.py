"""Ranks that differ are refused in the step in which they meet, and told which parameter or option, and both values."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from conformance import Small, assert_same, every_average, loss, make_ranks, snapshot, some_average
from pairs import name_of
from sim import Deadlock, World
from table import CASES, FORMS, Case, by_name
from torch import nn

import compopt
from compopt._engine import handshake

# The handshake is one for all classes: of each kind one, replicated, low-rank, sharded, around a base, in rounds.
KINDS = "RadiusAdamW", "SeparateAdam", "TagcAdamW", "Separate", "LocalSteps, rounds"
some = pytest.mark.parametrize("case", [case for case in CASES + FORMS if case.name in KINDS], ids=name_of)


def refused(a, b, *words: str) -> None:
    """Both ranks raise the same ValueError, with all of these words."""
    world = World(2)
    heard = []
    for rank, make in enumerate((a, b)):
        torch.manual_seed(0)
        optimizer = make(world.comms[rank])
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, rank + 1.0)
        before = snapshot(optimizer)
        heard.append((optimizer, before))

    def listen(optimizer):
        with pytest.raises(ValueError, match="ranks differ, and nothing was applied") as caught:
            optimizer.step()
        messages.append(str(caught.value))

    messages: list[str] = []
    world.run([partial(listen, optimizer) for optimizer, _ in heard])
    assert len(messages) == 2 and messages[0] == messages[1]
    for word in ("ank 0 has", "rank 1 has", *words):
        assert word in messages[0], messages[0]
    for optimizer, before in heard:
        assert_same(before, snapshot(optimizer))


def small(case: Case, dtype=torch.float32, **options):
    return lambda group: case.make(Small(dtype).named_parameters(), process_group=group, **options)


@some
def test_other_parameters(case):
    def other(order=lambda named: named, width=96):
        def make(group):
            model = Small()
            model.up = nn.Linear(64, width)
            return case.make(order(list(model.named_parameters())), process_group=group)

        return make

    def names(make) -> list[str]:  # a class around several optimizers has them in these optimizers' order
        return [name for group in make(World(1).comms[0]).param_groups for name in group["param_names"]]

    backwards, shorter = other(lambda named: named[::-1]), other(lambda named: named[:-1])
    (first, *_), (last, *_) = names(small(case)), names(backwards)
    refused(small(case), backwards, f"parameter 0: rank 0 has {first}, rank 1 has {last}. ")
    wider = next(name for name in names(small(case)) if name.startswith("up."))
    a, b = {"up.weight": ("(96, 64)", "(97, 64)"), "up.bias": ("(96,)", "(97,)")}[wider]
    refused(small(case), other(width=97), f"{wider}, shape: rank 0 has {a}, rank 1 has {b}. Build the same")
    refused(small(case), small(case, torch.float64), "dtype: rank 0 has torch.float32, rank 1 has torch.float64. ")
    place, a, b = next(
        (n, a, b)
        for n, (a, b) in enumerate(zip(names(small(case)), [*names(shorter), "nothing"], strict=True))
        if a != b
    )
    refused(small(case), shorter, f"parameter {place}: rank 0 has {a}, rank 1 has {b}")
    refused(small(case), lambda group: case.make([{"params": []}], process_group=group), "nothing")


def test_another_shape_is_told_before_the_values_that_differ_with_it():
    def wider(group):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65))
        return compopt.SeparateAdam(model.named_parameters(), process_group=group)

    def narrower(group):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        return compopt.SeparateAdam(model.named_parameters(), process_group=group)

    refused(narrower, wider, "1.weight, shape: rank 0 has (64, 64), rank 1 has (65, 64). Build the same model")


@some
def test_other_values(case):
    def moved(group):
        model = Small()
        with torch.no_grad():
            model.down.bias[5] += 1e-3
        return case.make(model.named_parameters(), process_group=group)

    refused(
        small(case), moved, "down.bias, checksum of its values: rank 0 has", "Start all ranks from the same weights"
    )


@some
def test_other_options(case):
    """Learning rate and decay of every class: test_conformance_faults.py."""
    for name, value in {"seed": 7, "density": 0.25, "ratio": 4, "every": 9}.items():
        if name in inspect.signature(case.cls).parameters:
            words = f"{name}: rank 0 has", f"rank 1 has {value}. Make them equal."
            refused(small(case), small(case, **{name: value}), *words)


@some
def test_replicas_checked_on_some_ranks_only(case):
    def checking(group):
        optimizer = small(case)(group)
        optimizer.check_replicas_every = 1
        return optimizer

    refused(small(case), checking, "check_replicas_every: rank 0 has 100, rank 1 has 1")


@some
def test_another_kind_of_device(case):
    """Operators round otherwise there, so replicas would drift apart; here a rank only says that it has one."""

    def on_a_gpu(group):
        optimizer = small(case)(group)
        settings = optimizer.list_fixed_settings
        assert ("device", "cpu") in settings()
        optimizer.list_fixed_settings = lambda: [(n, "cuda" if n == "device" else value) for n, value in settings()]
        return optimizer

    refused(small(case), on_a_gpu, "device: rank 0 has 'cpu', rank 1 has 'cuda'")


def raised_by_both(case: Case, error: type[Exception], match: str) -> None:
    """Both ranks raise this, and have not stepped."""
    ranks = make_ranks(case, 2)
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    raised = []

    def listen(optimizer):
        with pytest.raises(error, match=match):
            optimizer.step()
        raised.append(optimizer)

    ranks.world.run([partial(listen, optimizer) for optimizer in ranks.optimizers])
    assert len(raised) == 2
    for one, optimizer in zip(before, ranks.optimizers, strict=True):
        assert_same(one, snapshot(optimizer))


@pytest.fixture
def lie(monkeypatch):
    """False numbers that rank 1 writes into its message of the handshake."""
    lies: dict[str, int] = {}
    true = handshake.Checksums

    def write(*read, **written):
        return true(*read, **written | (lies if written.get("rank") == 1 else {}))

    monkeypatch.setattr(handshake, "Checksums", write)
    return lies


@some
def test_another_version_is_told_before_all_that_differs_with_it(case, monkeypatch, lie):
    """In a message of one size, whatever else a version writes into it."""
    versions, encode = iter(["0.1.0", "0.2.0"]), handshake.encode_versions

    def encode_next():
        monkeypatch.setattr(compopt, "__version__", next(versions))
        return encode()

    monkeypatch.setattr(handshake, "encode_versions", encode_next)
    monkeypatch.setattr(torch, "__version__", "2.13.1+cpu")
    lie.update(rank=0, description=1)
    raised_by_both(
        case, ValueError, r"Rank 0 has torch 2\.13, compopt 0\.1\.0, rank 1 has torch 2\.13, compopt 0\.2\.0"
    )


def test_a_release_of_torch_counts_and_nothing_less(monkeypatch):
    found = []
    for version in ("2.13.0+cpu", "2.13.1+cu128", "2.12.1+cpu"):
        monkeypatch.setattr(torch, "__version__", version)
        found.append(handshake.encode_versions())
    assert found[0] == found[1] != found[2] and {*map(len, found)} == {handshake.VERSION_WORDS}
    monkeypatch.setattr(compopt, "__version__", "0.1.0.dev1234+g0123456789abcdef")
    assert len(handshake.encode_versions()) == handshake.VERSION_WORDS


@some
def test_two_ranks_of_one_number(case, lie):
    lie["rank"] = 0
    raised_by_both(case, ValueError, "call themselves rank 0, 0, instead of 0 to 1, and nothing was applied")


@some
def test_a_rank_that_does_not_fall_back_to_the_common_backend(case, lie):
    """Others fall back once."""
    lie["backend"] = 1
    with pytest.warns(UserWarning, match="ranks have chosen different backends"):
        raised_by_both(case, ValueError, "ranks differed in an option")


def test_a_message_that_cannot_be_read(monkeypatch):
    ranks = make_ranks(by_name["SeparateAdam"], 2)
    texts = iter(["{}", "{"])
    monkeypatch.setattr(handshake.json, "dumps", lambda value: next(texts))
    gathering = [partial(handshake.gather_json, 0, torch.device("cpu"), comm) for comm in ranks.world.comms]
    with pytest.raises(compopt.CommunicationError, match="a rank has sent a message that cannot be read"):
        ranks.world.run(gathering)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_another_class(number):
    a, b = CASES[number], CASES[number - 1]
    refused(small(a), small(b), a.name, b.name)


@every_average
def test_another_count_of_steps(case):
    """One rank was resumed from another checkpoint, with another rate of a scheduler: the count says more."""
    states = {}
    for steps in (3, 5):
        ranks = make_ranks(case, 1)
        ranks.train(loss, steps)
        for group in ranks.optimizers[0].param_groups:
            group["lr"] /= steps
        states[steps] = ranks.optimizers[0].state_dict()

    def resumed(steps):
        def make(group):
            optimizer = case.make(Small().parameters(), process_group=group)
            optimizer.load_state_dict(states[steps])
            return optimizer

        return make

    words = "Rank 0 has taken 3 steps, rank 1 has taken 5 (group 0): call step() equally often on all ranks"
    refused(resumed(3), resumed(5), words)


@every_average
def test_options_changed_on_all_ranks_between_steps_are_taken(case):
    """Also those that change what is sent."""
    ranks = make_ranks(case, 2)
    ranks.train(loss, 6)
    for option, value in {"density": 0.2, "ratio": 4, "interval": 3, "lr": 1e-4, "weight_decay": 0.5}.items():
        for optimizer in ranks.optimizers:
            for group in optimizer.option_groups + optimizer.param_groups:
                if option in group:
                    group[option] = value
        ranks.train(loss, 3)
        ranks.assert_replicas_equal()


@pytest.mark.parametrize("option", ["density", "interval"])
def test_payloads_of_different_lengths_never_meet(option):
    """An option that decides what is sent, changed on one rank: it then asks before it sends (gloo would abort)."""
    ranks = make_ranks(next(case for case in CASES if case.cls is compopt.RadiusAdamW), 2)
    ranks.train(loss, 6)
    ranks.optimizers[1].param_groups[0][option] = {"density": 0.2, "interval": 1}[option]
    ranks.backward(loss)
    with pytest.raises(Deadlock):  # the other rank has not come
        ranks.world.run([ranks.optimizers[0].step])
    assert ranks.world.asked
    with pytest.raises(AssertionError, match=r"different collectives.*AllGather.*AllReduceMean"):
        ranks.world.run([ranks.optimizers[1].step])


@some_average("RadiusAdamW", "SeparateAdam", "TagcAdamW")
def test_a_rank_that_cannot_send_in_the_first_step_is_told_by_all(case):
    """It raises its own error; the others do not wait for it."""
    ranks = make_ranks(case, 3)
    ranks.backward(loss)
    p = next(p for p in ranks.models[1].parameters() if p.grad is not None)
    p.grad = p.grad.to_sparse()
    messages = []

    def listen(optimizer):
        with pytest.raises((compopt.CommunicationError, TypeError, RuntimeError), match="sparse") as caught:
            optimizer.step()
        messages.append((type(caught.value) is compopt.CommunicationError, str(caught.value)))

    ranks.world.run([partial(listen, optimizer) for optimizer in ranks.optimizers])
    assert sorted(is_told for is_told, _ in messages) == [False, True, True]
    assert all("the gradients of rank 1 (" in message for is_told, message in messages if is_told)
    ranks.train(loss, 2)
    ranks.assert_replicas_equal()
