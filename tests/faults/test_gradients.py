"""Gradients that come and go, in odd memory, inf, NaN or too large to square; and errors on one rank."""

from __future__ import annotations

import copy
import itertools
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conformance import AVERAGING, TRACKED, assert_same, every_average, loss, make_ranks, snapshot, some_average
from pairs import name_of
from ranks import FOREVER, run_ranks
from sim import Ranks, World, noting
from slow_rows import in_turn, slow_but
from table import CASES, FORMS, Case, by_name
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._state import buckets

SHAPES = [(0, 5), (), (80, 70), (8, 16, 8, 8), (1, 4096), (64, 64, 0), (3,)]


@every_average
def test_a_step_without_any_gradient_changes_nothing_but_its_count(case):
    ranks = make_ranks(case, 2)
    for at in (3, 1, 1, 2):  # after dense, resampling and sparse steps
        ranks.train(loss, at)
        before = [snapshot(optimizer) for optimizer in ranks.optimizers]
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.world.step(ranks.optimizers)
        for old, optimizer in zip(before, ranks.optimizers, strict=True):
            parameters = sum(len(group["params"]) for group in optimizer.param_groups)
            assert_same(old[:parameters], snapshot(optimizer)[:parameters])
    ranks.train(loss, 2)
    ranks.assert_replicas_equal()


def find_in_buckets(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> str:
    """A parameter as messages name it where it has no name."""
    places = ((g, n, q) for g, group in enumerate(optimizer.param_groups) for n, q in enumerate(group["params"]))
    return next(f"parameter {n} of group {g}" for g, n, q in places if q is p)


@every_average
def test_a_sparse_gradient_on_one_rank_is_refused_by_name_and_all_hear_of_it(case):
    ranks = make_ranks(case, 2)
    ranks.train(loss, 5)
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    kept = ranks.models[1].down.weight.grad
    ranks.models[1].down.weight.grad = kept.to_sparse()
    errors: list[Exception] = []
    ranks.world.run([noting(optimizer.step, errors) for optimizer in ranks.optimizers])
    (theirs,) = (error for error in errors if isinstance(error, compopt.CommunicationError))
    (ours,) = (error for error in errors if isinstance(error, TypeError))
    place = find_in_buckets(ranks.optimizers[1], ranks.models[1].down.weight)
    assert f"sparse gradient for {place}" in str(ours) and "rank 1" in str(theirs)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert_same(old, snapshot(optimizer))
    ranks.models[1].down.weight.grad = kept  # the step can be taken after all
    ranks.world.step(ranks.optimizers)
    ranks.assert_replicas_equal()


@pytest.mark.parametrize(("case", "form"), in_turn(AVERAGING, ("another size", "the same size")), ids=name_of)
def test_a_parameter_that_is_resized_on_one_rank_is_refused_by_name_and_all_hear_of_it(case, form):
    refuse_resized(make_ranks(case, 2), form)


def test_it_is_also_refused_in_the_step_that_plans_projections_anew():
    ranks = make_ranks(by_name["SeparateAdam"], 2, projection="gaussian", adaptive=True, adapt_interval=1)
    refuse_resized(ranks, "another size")


def refuse_resized(ranks: Ranks, form: str) -> None:
    ranks.train(loss, 5)
    ranks.backward(loss)
    weight = ranks.models[1].down.weight
    kept, rows, columns = (weight.data, weight.grad), *weight.shape
    shape = (rows, columns + 8) if form == "another size" else (columns, rows)
    weight.data, weight.grad = torch.ones(shape), torch.ones(shape)
    errors: list[Exception] = []
    ranks.world.run([noting(optimizer.step, errors) for optimizer in ranks.optimizers])
    (theirs,) = (error for error in errors if isinstance(error, compopt.CommunicationError))
    (ours,) = (error for error in errors if isinstance(error, TypeError))
    place = find_in_buckets(ranks.optimizers[1], weight)
    assert f"{place} is torch.float32 of shape {shape} on cpu here, and was torch.float32 of shape" in str(ours)
    assert "the gradients of rank 1 (TypeError: " in str(theirs) and str(ours) in str(theirs)
    weight.data, weight.grad = kept
    ranks.world.step(ranks.optimizers)
    ranks.assert_replicas_equal()


def odd(g: torch.Tensor) -> torch.Tensor:
    """The same numbers, in memory that is strided, shared with more, and not at its beginning."""
    if g.dim() == 0:
        return torch.stack([g + 1, g])[1]
    wide = torch.full((2 * g.shape[0] + 1, *g.shape[1:]), 7.0)
    view = wide[1::2]
    view.copy_(g)
    return view.transpose(0, -1).contiguous().transpose(0, -1) if g.dim() == 3 else view


@some_average("RadiusAdamW", "ScapeAdamS", "SeparateAdam", "TagcAdamW", "Separate")
def test_views_strides_and_empty_tensors_step_as_plain_ones(case):
    def run(form) -> list:
        world, sets, optimizers = World(2), [], []
        for rank in range(2):
            torch.manual_seed(0)
            sets.append([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
            optimizers.append(case.make(sets[rank], process_group=world.comms[rank]))
        for step in range(8):
            for rank, params in enumerate(sets):
                draw = torch.Generator().manual_seed(100 * step + rank)
                for p in params:
                    p.grad = form(torch.randn(p.shape, generator=draw))
            world.step(optimizers)
        for a, b in zip(*sets, strict=True):
            assert torch.equal(a, b)
        return snapshot(optimizers[0])

    for plain, strange in zip(run(lambda g: g), run(odd), strict=True):
        torch.testing.assert_close(plain, strange, rtol=1e-5, atol=1e-6)


VALUES = (float("inf"), float("nan"), -3e38)  # the last is finite, but its square is not
PLACES = ("on the mask", "off the mask", "dense")


def masked(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor:
    """Return where ``p`` is exchanged in the coming step; everywhere while there is no mask."""
    everywhere = [q for group in optimizer.param_groups for q in group["params"]]
    number = next(n for n, q in enumerate(everywhere) if q is p)
    entry = optimizer.state_dict()["state"][number]
    mask = entry.get("next_mask", entry.get("mask"))
    return mask if mask is not None and mask.any() else torch.ones_like(p, dtype=torch.bool)


def spoil(ranks: Ranks, rank: int, place: str, value: float, look: bool) -> None:
    """Put ``value`` into one element of a rank's gradient. Only with ``look`` is a mask in flight awaited."""
    model = ranks.models[rank]
    p = model.up.bias if place == "dense" else model.up.weight
    where = masked(ranks.optimizers[rank], p) if look and place != "dense" else torch.ones_like(p, dtype=torch.bool)
    spots = (where if place != "off the mask" or where.all() else ~where).nonzero()
    p.grad[tuple(spots[7 * len(spots) // 11])] = value


# of the classes that select by masks of the step before, also with masks in flight
SPOILT = [(True, case) for case in AVERAGING] + [(False, case) for case in AVERAGING if case.method == "scape"]


@pytest.mark.parametrize(
    ("look", "case"),
    slow_but(lambda look, case: not look or case.name in ("SeparateAdam", "TagcAdamW"), SPOILT),
    ids=lambda value: {True: "", False: "masks in flight"}.get(value) if isinstance(value, bool) else value.name,
)
def test_every_step_survives_a_bad_gradient_of_every_kind(case, look):
    """Before each of ten steps, dense, resampling and sparse, one spoilt attempt: the run is as if it had not been."""
    ranks, untroubled = make_ranks(case, 3), make_ranks(case, 3)
    kinds = itertools.cycle(itertools.product(VALUES, PLACES))
    for step in range(10):
        value, place = next(kinds)
        ranks.backward(loss)
        before = [snapshot(optimizer) for optimizer in ranks.optimizers] if look else []
        spoil(ranks, step % 3, place, value, look)
        ranks.world.step(ranks.optimizers)
        for optimizer in ranks.optimizers:
            assert (optimizer.stats.phase, optimizer.stats.skipped) == ("skipped", step + 1)
            assert "non-finite gradient: parameter" in optimizer.stats.reason
        for old, optimizer in zip(before, ranks.optimizers, strict=False):
            assert_same(old, snapshot(optimizer))
        ranks.train(loss, 1)
    untroubled.train(loss, 10)
    for a, b in zip(ranks.optimizers, untroubled.optimizers, strict=True):
        assert_same(snapshot(a), snapshot(b))


@every_average
def test_gradients_that_overflow_only_when_added_are_skipped_too(case):
    ranks = make_ranks(case, 4)
    ranks.train(loss, 4)
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    for model in ranks.models:
        model.up.bias.grad.fill_(1.5e38)
    ranks.world.step(ranks.optimizers)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert optimizer.stats.phase == "skipped"
        assert_same(old, snapshot(optimizer))


@some_average("RadiusAdamW", "SeparateAdam", "TagcAdamW")
def test_the_limit_of_skips_counts_steps_in_a_row_and_leaves_the_state_usable(case):
    ranks, untroubled = make_ranks(case, 2), make_ranks(case, 2)
    for optimizer in ranks.optimizers:
        optimizer.max_skipped = 3
    spoilt = lambda model, rank, step: loss(model, rank, step) * (float("inf") if rank else 1.0)  # noqa: E731
    for _ in range(2):
        ranks.train(loss, 2)
        for _ in range(2):
            ranks.backward(spoilt)
            ranks.world.step(ranks.optimizers)
    ranks.backward(spoilt)
    with pytest.raises(FloatingPointError, match="3 steps in a row were skipped") as caught:
        ranks.world.step(ranks.optimizers)
    groups = enumerate(ranks.optimizers[0].param_groups)
    places = {f"parameter {n} of group {g}" for g, group in groups for n in range(len(group["params"]))}
    named = re.findall(r"parameter \d+ of group \d+", str(caught.value))
    assert named and places.issuperset(named)
    for both, steps in (ranks, 2), (untroubled, 6):
        both.train(loss, steps)
    assert_same(snapshot(untroubled.optimizers[1]), snapshot(ranks.optimizers[1]))


@some_average("ScapeAdamS", "TagcAdamW", "LocalSteps")
def test_skips_are_counted_anew_after_a_load(case):
    """The first step after it compares ranks, and is skipped as cleanly as any other."""
    ranks, untroubled = make_ranks(case, 2), make_ranks(case, 2)
    for one in (ranks, untroubled):
        one.train(loss, 4)
    spoilt = lambda model, rank, step: loss(model, rank, step) * (float("nan") if rank else 1.0)  # noqa: E731
    for optimizer in ranks.optimizers:
        optimizer.max_skipped = 3
    for is_loaded in (False, True):
        if is_loaded:
            for optimizer in [*ranks.optimizers, *untroubled.optimizers]:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(2):
            ranks.backward(spoilt)
            before = [snapshot(optimizer) for optimizer in ranks.optimizers]
            ranks.world.step(ranks.optimizers)
            assert all(optimizer.stats.phase == "skipped" for optimizer in ranks.optimizers)
            for old, optimizer in zip(before, ranks.optimizers, strict=True):
                assert_same(old, snapshot(optimizer))
    for one in (ranks, untroubled):
        one.train(loss, 3)
    for a, b in zip(ranks.optimizers, untroubled.optimizers, strict=True):
        assert_same(snapshot(a), snapshot(b))
    for optimizer in ranks.optimizers:
        optimizer.max_skipped = 2
    ranks.backward(spoilt)
    ranks.world.step(ranks.optimizers)
    ranks.backward(spoilt)
    with pytest.raises(FloatingPointError, match="2 steps in a row were skipped"):
        ranks.world.step(ranks.optimizers)


INT8 = Case(
    compopt.RadiusAdamW,
    compressed=dict(density=0.4, interval=5, dense_steps=3, payload_dtype=torch.int8),
    lossless={},
    reference=torch.optim.AdamW,
    form="int8",
)
KINDS = [case for case in [*CASES, *FORMS, TRACKED, INT8] if not case.averaging]
ROUNDS = next(case for case in FORMS if case.form == "rounds")  # steps of a rank's own, and exchanges after them
WAYS = [
    *((case, ("while packing", "in backward")[n % 2]) for n, case in enumerate(KINDS)),
    *((case, "between two exchanges") for case in (TRACKED, CASES[4])),
    (CASES[0], "sparse gradient"),
]
MAIN = [n for n in range(len(WAYS)) if n % 3 == 0 or n >= len(KINDS)]  # the others with `make slow`
FAILING, STEPS = 5, 8


def fail(optimizer, bucket: int, after: int, error: BaseException) -> None:
    """Its algorithm raises once, in the bucket with this number, when it has had so many answers."""
    algorithm, left = optimizer._engine.algorithm, [error]

    def failing(b):
        generator, answer, had = algorithm(b), None, 0
        while True:
            if left and b.index == bucket and had == after:
                generator.close()
                raise left.pop()
            try:
                answer = yield generator.send(answer)
            except StopIteration:
                return
            had += 1

    optimizer._engine.algorithm = failing


def fail_to_encode(bucket, error: Exception) -> None:
    """It raises once, where it would write what it sends."""

    def failing(*args):
        del bucket.encode
        raise error

    bucket.encode = failing


def training(case: Case, **options) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 64))
    model = DDP(net, process_group=options.get("process_group"))
    return net, model, case.make(net.parameters(), **options)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().mean().backward()


def attempt(optimizer: torch.optim.Optimizer) -> str:
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def flat(net: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def one_rank_fails(rank: int, numbers: list[int]) -> dict[str, dict]:
    buckets.BUCKET_BYTES = 20_000
    results = {}
    for case, way in map(WAYS.__getitem__, numbers):
        net, model, optimizer = training(case)
        report = {}
        for step in range(STEPS):
            fails = step == FAILING and rank == 1
            if fails and way != "sparse gradient":
                where = 0 if way == "in backward" else len(optimizer._buckets) - 1
                after = int(way == "between two exchanges")
                fail(optimizer, where, after, RuntimeError("no memory left"))
            backward(model, optimizer, step, rank)
            if fails and way == "sparse gradient":
                net[0].weight.grad = net[0].weight.grad.to_sparse()
            before = flat(net)
            message = attempt(optimizer)
            if message:
                report[step] = [message, torch.equal(before, flat(net))]
        results[f"{case.name}, {way}"] = {"told": report, "end": float(flat(net).double().sum()),
                                        "steps": optimizer.option_groups[0]["step"]}  # fmt: skip
    results["exchange"] = one_exchange_fails(rank)
    results["interrupted"] = one_rank_is_interrupted(rank)
    return results


def one_exchange_fails(rank: int) -> list[tuple[str, str, int, float]]:
    """A round of three steps ends with step 5, where rank 1 cannot send what it moved."""
    net, model, optimizer = training(ROUNDS, growth_steps=0)
    report = []
    for step in range(7):
        if step == 4 and rank == 1:
            fail_to_encode(optimizer._anchors.buckets[-1], RuntimeError("no memory left"))
        backward(model, optimizer, step, rank)
        message = attempt(optimizer)
        report.append(
            (message, optimizer.stats.phase, optimizer.option_groups[0]["step"], float(flat(net).double().sum()))
        )
    return report


def one_rank_is_interrupted(rank: int) -> list[str]:
    """Before it has sent anything, and it goes on: what it sends then must not meet what the other waits for."""
    group = dist.new_group(timeout=FOREVER)
    net, model, optimizer = training(CASES[0], process_group=group)
    for step in range(3):
        backward(model, optimizer, step, rank)
        optimizer.step()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
    if rank == 1:
        fail(optimizer, len(optimizer._buckets) - 1, 0, KeyboardInterrupt())
    backward(model, optimizer, 3, rank)
    before, message = flat(net), []
    try:
        optimizer.step()
    except KeyboardInterrupt:
        message.append("interrupted")
        message.append(attempt(optimizer))
    except compopt.CommunicationError as error:
        message.append(str(error))
    return [*message, torch.equal(before, flat(net))]


@pytest.mark.parametrize(
    "numbers",
    [MAIN, pytest.param([n for n in range(len(WAYS)) if n not in MAIN], marks=pytest.mark.slow)],
    ids=["main", "others"],
)
def test_all_ranks_hear_of_an_error_of_one_before_any_timeout_and_go_on(numbers):
    first, second = run_ranks(one_rank_fails, 2, numbers)
    for case, way in map(WAYS.__getitem__, numbers):
        report = [results[f"{case.name}, {way}"] for results in (first, second)]
        assert report[0]["end"] == report[1]["end"] and report[0]["steps"] == report[1]["steps"] == STEPS - 1, case.name
        for rank, one in enumerate(report):
            ((message, unchanged),) = one["told"].values()
            assert list(one["told"]) == [FAILING] and unchanged, f"{case.name}, {way}"
            why = "TypeError: " if way == "sparse gradient" else "RuntimeError: no memory left"
            if rank == 1:
                assert message.startswith(why)
            else:
                where = f"step {FAILING + 1} was not applied on rank 0: the gradients of rank 1 ({why}"
                assert message.startswith(f"CommunicationError: {where}"), message
    for rank, report in enumerate((first["exchange"], second["exchange"])):
        message, phases, steps, _ = zip(*report, strict=True)
        assert steps == tuple(range(1, 8)), "a rank's own step stands"
        assert phases[5:] == ("exchanged", "local") and not any(message[:4] + message[5:]), (
            "tried again after the next step"
        )
        assert f"step 5 was taken on rank {rank}, but not the sync" in message[4] or rank == 1
        assert "no memory left" in message[4]
    ends = [[end for *_, end in results["exchange"]] for results in (first, second)]
    assert [a == b for a, b in zip(*ends, strict=True)] == [True, True, False, False, False, True, False]
    *message, unchanged = second["interrupted"]
    assert message[0] == "interrupted" and "step 4 was not applied on rank 1" in message[1] and unchanged
    assert "step 4 was not applied on rank 0" in first["interrupted"][0] and first["interrupted"][1]
