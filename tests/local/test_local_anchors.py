"""Anchors: in the model for an evaluation, in host memory; how far pseudo-gradients of ranks are apart."""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import pytest
import torch
from local_runs import adamw, are_equal, copies, end_round, train
from pairs import pairs
from problems import gradients, replicas, step, weights
from ranks import run_ranks
from slow_rows import slow_but

import compopt
from compopt.local_steps.anchor_bucket import copy_wide

OPTIONS = [dict(), dict(fragments=2), dict(delay=2), dict(payload_dtype="int4", fragments=2, delay=1)]


def shown(params, optimizers) -> list[list[torch.Tensor]]:
    found = []
    for own, optimizer in zip(params, optimizers, strict=True):
        with optimizer.use_anchors():
            found.append([p.detach().clone() for p in own])
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("since", [0, 1, 3])
def test_they_are_the_model_as_of_the_last_exchange(since, dtype):
    """Which ``end_round()`` would leave there, and does where the round has just ended."""
    params, optimizers = train(3, 8, dtype)
    at_round = copies(params)
    for t in range(8, 8 + since):
        step(optimizers[0].comm.world, params, optimizers, gradients(3, t, dtype=dtype))
    before = copies(params)
    found = shown(params, optimizers)
    for own in found:
        assert all(map(torch.equal, own, at_round[0]))
    for own, as_it_was in zip(params, before, strict=True):
        assert all(map(torch.equal, own, as_it_was))
    if since == 0:
        end_round(optimizers)
        assert all(map(torch.equal, params[1], found[1]))
    else:
        assert not are_equal(params)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("offload", [None, "outer"])
def test_training_goes_on_as_if_they_had_not_been_shown(options, offload):
    expected, _ = train(2, 23, torch.bfloat16, offload=offload, **options)
    params, optimizers = train(2, 0, torch.bfloat16, offload=offload, **options)
    for t in range(23):
        sent = optimizers[0].comm.bytes_sent
        first, second = shown(params, optimizers)
        assert all(map(torch.equal, first, second)) and optimizers[0].comm.bytes_sent == sent
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t, dtype=torch.bfloat16))
    for own, theirs in zip(params, expected, strict=True):
        assert all(map(torch.equal, own, theirs))


def test_what_is_on_its_way_is_not_shown():
    """Right after an exchange has begun: what is frozen there moves no more, and has not got its anchor yet."""
    params, optimizers = train(2, 4, delay=2)
    for own in params:
        own[2].requires_grad_(False)
    for own in shown(params, optimizers):
        assert all(map(torch.equal, own, weights()))


def test_a_rank_whose_parameters_are_not_finite_shows_anchors_too():
    """It sends nothing in the exchange that has begun."""
    params, optimizers = train(3, 3, delay=2)
    params[1][2].data[0, 0] = torch.nan
    step(optimizers[0].comm.world, params, optimizers, gradients(3, 3))
    for own in shown(params, optimizers):
        assert all(map(torch.equal, own, weights()))


def test_an_error_brings_the_parameters_back():
    params, optimizers = train(2, 6)
    before = copies(params)
    with pytest.raises(KeyboardInterrupt), optimizers[0].use_anchors():
        assert not torch.equal(params[0][0], before[0][0])
        raise KeyboardInterrupt
    assert all(map(torch.equal, params[0], before[0]))
    step(optimizers[0].comm.world, params, optimizers, gradients(2, 6))


def test_within_each_other_they_are_shown_until_the_outermost_ends():
    params, optimizers = train(2, 6)
    before = copies(params)
    with optimizers[0].use_anchors():
        with optimizers[0].use_anchors():
            inner = copies(params)
        assert all(map(torch.equal, params[0], inner[0])) and not torch.equal(params[0][0], before[0][0])
        with pytest.raises(RuntimeError, match=r"leave use_anchors\(\) first"):
            optimizers[0].state_dict()
    assert all(map(torch.equal, params[0], before[0]))


CALLS = {
    "step": lambda optimizer: optimizer.step(),
    "end_round": lambda optimizer: optimizer.end_round(),
    "rebind": lambda optimizer: optimizer.rebind(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict({}),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("call", CALLS)
def test_what_needs_the_ranks_own_parameters_is_refused_meanwhile(call):
    params, optimizers = train(2, 6)
    before = copies(params)
    with optimizers[0].use_anchors(), pytest.raises(RuntimeError, match=r"leave use_anchors\(\) first"):
        CALLS[call](optimizers[0])
    assert all(map(torch.equal, params[0], before[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizers[0].state_dict()


def test_frozen_layers():
    """One moved in the round before it was frozen; what is done to another, which did not, stays."""
    params, optimizers = train(2, 4)
    at_round = copies(params)
    for own in params:
        own[3].requires_grad_(False)
        own[3].data.fill_(3.0)
    for t in (4, 5):
        grads = gradients(2, t)
        for given in grads:
            given[3] = None
        step(optimizers[0].comm.world, params, optimizers, grads)
    for own in params:
        own[2].requires_grad_(False)
    for own in shown(params, optimizers):
        assert bool((own[3] == 3).all())
        assert all(torch.equal(own[i], at_round[0][i]) for i in (0, 1, 2, 4))


def test_a_layer_that_was_never_trained_is_shown_as_it_is():
    params = [torch.nn.Parameter(w, requires_grad=i != 2) for i, w in enumerate(weights())]
    optimizer = compopt.LocalSteps(adamw(params), 4, growth_steps=0, simulate=True)
    for t in range(6):
        for p, g in zip(params, gradients(1, t)[0], strict=True):
            p.grad = g if p.requires_grad else None
        optimizer.step()
    with optimizer.use_anchors():
        assert torch.equal(params[2], weights()[2])


def test_without_other_ranks_the_model_is_shown():
    model = torch.nn.Linear(4, 4)
    optimizer = compopt.LocalSteps(adamw(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    with optimizer.use_anchors():
        assert torch.equal(model.weight, before)
        optimizer.state_dict()


OFFLOAD_OPTIONS = [
    {},
    {"payload_dtype": "int2", "fragments": 2},
    {"delay": 2, "payload_dtype": "int4"},
    {"fragments": 2, "delay": 1, "dense_steps": 2},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OFFLOAD_OPTIONS, ids=str)
def test_it_is_the_same_run_to_the_bit(options, dtype):
    runs = [train(3, 19, dtype, every=4, offload=offload, **options) for offload in (None, "outer")]
    for own, theirs in zip(*(params for params, _ in runs), strict=True):
        assert all(map(torch.equal, own, theirs))
    a, b = (optimizers[1].stats for _, optimizers in runs)
    assert (a.bytes_sent, a.step_length, a.round) == (b.bytes_sent, b.step_length, b.round)


@pytest.mark.parametrize("offload", [None, "outer"])
def test_a_frozen_layer_begins_where_it_is_when_it_is_trained(offload):
    """Its anchor is made then, also where it had none of its own."""

    def make(params, process_group):
        params = list(params)
        params[2].requires_grad_(False)
        adamw = torch.optim.AdamW(params, lr=1e-2)
        return compopt.LocalSteps(
            adamw, 4, growth_steps=0, payload_dtype=None, process_group=process_group, offload=offload
        )

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    for t in range(12):
        if t == 4:
            for own in params:
                own[2].data.fill_(3.0)
                own[2].requires_grad_(True)
        grads = gradients(2, t, dtype=torch.float32)
        for given in grads if t < 4 else ():
            given[2] = None
        step(world, params, optimizers, grads)
    assert all(map(torch.equal, *params))
    assert float((params[0][2].detach() - 3).abs().max()) < 0.2, "eight steps of 1e-2 away from where it was set"


def test_anchors_are_copies_though_the_parameter_is_on_the_host_already():
    p = torch.nn.Parameter(torch.ones(3))
    flat, (view,) = copy_wide([p], on_host=True)
    assert p.data_ptr() not in (flat.data_ptr(), view.data_ptr())


@pytest.mark.parametrize("saved", [None, "outer"])
def test_a_checkpoint_goes_from_one_to_the_other(saved):
    _, optimizers = train(2, 6, torch.float32, offload=saved)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    ends = []
    for offload in (None, "outer"):
        params, others = train(2, 6, torch.float32, offload=offload)
        world = others[0].comm.world
        for optimizer, state in zip(others, states, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
            assert optimizer.offload == offload
        for t in range(6, 11):
            step(world, params, others, gradients(2, t, dtype=torch.float32))
        ends.append([p.detach().clone() for p in params[1]])
    assert all(map(torch.equal, *ends))


def test_a_copy_keeps_it():
    _, optimizers = train(2, 6, torch.float32, offload="outer")
    assert copy.deepcopy(optimizers[0]).offload == "outer"


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="offload must be None or 'outer', got 'all'"):
        compopt.LocalSteps(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]), offload="all")


def without_a_backend_for_the_host(rank):
    """As with NCCL alone: what a group says of its backends is all that is looked at."""
    import torch.distributed as dist

    p = torch.nn.Parameter(torch.ones(5))
    optimizer = compopt.LocalSteps(torch.optim.AdamW([p]), every=2, growth_steps=0, offload="outer")
    asked, dist.get_backend_config = dist.get_backend_config, lambda group: "cuda:nccl"
    try:
        p.grad = torch.full((5,), 1.0 + rank)
        with pytest.raises(ValueError, match="offload='outer' exchanges tensors in host memory"):
            optimizer.step()
    finally:
        dist.get_backend_config = asked


def over_gloo(rank):
    p = torch.nn.Parameter(torch.ones(5))
    adamw = torch.optim.AdamW([p], lr=0.1)
    optimizer = compopt.LocalSteps(adamw, every=2, growth_steps=0, offload="outer", outer_lr=1, outer_momentum=0)
    for _ in range(2):
        p.grad = torch.full((5,), 1.0 if rank else -1.0)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.ones(5), atol=0.05, rtol=0)
    assert optimizer.stats.phase == "exchanged"


@pytest.mark.parametrize("work", [without_a_backend_for_the_host, over_gloo])
def test_on_real_ranks(work):
    run_ranks(work, 2)


def shared_and_own(ranks: int, t: int, opposed: bool) -> list[list[torch.Tensor]]:
    """Gradients that share a part, of the opposite sign on odd ranks where they are ``opposed``."""
    shared = gradients(1, 1000 + t // 8, dtype=torch.float32)[0]
    signs = [-1.0 if opposed and rank % 2 else 1.0 for rank in range(ranks)]
    own = gradients(ranks, t, dtype=torch.float32)
    return [[sign * s + g for s, g in zip(shared, rank, strict=True)] for sign, rank in zip(signs, own, strict=True)]


PAYLOADS = [None, "int4", "int2"]


def flat_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.detach().view(-1) for x in tensors])


@pytest.mark.parametrize(
    ("payload", "ranks", "opposed"),
    slow_but(
        lambda *row: row in pairs(PAYLOADS, (2, 4), (False, True)), itertools.product(PAYLOADS, (2, 4), (False, True))
    ),
)
def test_the_step_length_is_the_averages_over_that_of_what_ranks_have_moved(payload, ranks, opposed):
    """Ranks take the average as it is, so that it can be seen from outside."""
    moved: list[list[torch.Tensor]] = []

    def make(params, process_group):
        inner = adamw(params)
        inner.register_step_post_hook(lambda *_: moved.append([p.detach().clone() for p in params]))
        options = dict(growth_steps=0, payload_dtype=payload, outer_lr=1.0, outer_momentum=0.0)
        return compopt.LocalSteps(inner, 8, process_group=process_group, **options)

    world, params, optimizers = replicas(ranks, weights(dtype=torch.float32), make)
    found = []
    for t in range(48):
        if t % 8 == 0:
            before = flat_of(copies(params)[0])
        step(world, params, optimizers, shared_and_own(ranks, t, opposed))
        if optimizers[0].stats.phase == "exchanged":
            own = [before - flat_of(rank) for rank in moved[-ranks:]]
            applied = (before - flat_of(params[0])).norm() / sum(x.norm() / ranks for x in own)
            found.append(optimizers[0].stats.step_length / float(applied))
            assert optimizers[1].stats.step_length == optimizers[0].stats.step_length
    assert len(found) == 6
    assert found == pytest.approx([1.0] * 6, rel=1e-4)


def lengths_of(moved: list[torch.Tensor], samples: list[float], lost: int | None = None) -> list[float]:
    """Return the step length that every rank reports after a step in which each moves by ``moved``."""

    def make(params, process_group):
        sgd = torch.optim.SGD(params, lr=1.0)
        if process_group.rank == lost:
            sgd.register_step_post_hook(lambda *_: params[0].data[3].fill_(math.inf))
        options = {"weighted": True, "growth_steps": 0, "payload_dtype": None}
        return compopt.LocalSteps(sgd, 1, process_group=process_group, **options)

    world, params, optimizers = replicas(len(moved), [torch.zeros(50, dtype=torch.float64)], make)
    step(world, params, optimizers, [[m] for m in moved], samples)
    return [optimizer.stats.step_length for optimizer in optimizers]


def drawn(ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shared, *own = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(ranks + 1))
    return [shared + m for m in own]


@pytest.mark.parametrize("samples", [[1, 1, 1, 1], [1, 2, 5, 0], [0, 0, 0, 0]])
@pytest.mark.filterwarnings("ignore:rank 1 had parameters that are not finite")
@pytest.mark.parametrize("lost", [None, 1])
def test_ranks_have_weights_and_one_may_be_lost(samples, lost):
    """A lost one counts as zero, in the average and in the mean of lengths."""
    moved = drawn(4)
    share = [weight / sum(samples) if any(samples) else 0.25 for weight in samples]
    kept = [share[k] * moved[k] for k in range(4) if k != lost]
    expected = float(sum(kept).norm() / sum(x.norm() for x in kept))
    assert lengths_of(moved, samples, lost) == pytest.approx([expected] * 4, rel=1e-5)


def test_ranks_that_move_apart_have_a_length_of_zero():
    (there, *_) = drawn(1)
    assert max(lengths_of([there, -there], [1, 1])) < 1e-6


@pytest.mark.parametrize("payload", [None, "int4"])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_auto_gives_each_tensor_the_length_that_ranks_have_moved_it(payload, momentum):
    """By hand, from what ranks have moved and the average that arrives; a tensor that all move alike is not stretched,
    and none by more than the square root of the number of ranks."""
    moved: list[list[torch.Tensor]] = []

    def make(params, process_group):
        sgd = torch.optim.SGD(params, lr=1.0)
        sgd.register_step_post_hook(lambda *_: moved.append([p.detach().clone() for p in params]))
        options = dict(growth_steps=0, outer_lr="auto", outer_momentum=momentum, payload_dtype=payload)
        return compopt.LocalSteps(sgd, 1, process_group=process_group, **options)

    start = [torch.zeros(40, 30), torch.zeros(300), torch.zeros(64, 5)]
    world, params, optimizers = replicas(3, start, make)
    generator = torch.Generator().manual_seed(0)
    velocity = [torch.zeros_like(x) for x in start]
    for _ in range(3):
        before = copies(params)[0]
        alike = torch.randn(300, generator=generator)
        gs = [
            [torch.randn(40, 30, generator=generator), alike, torch.randn(64, 5, generator=generator)] for _ in range(3)
        ]
        gs[0][2] = -gs[1][2] - gs[2][2]  # the average is zero, or what rounding leaves
        step(world, params, optimizers, gs)
        own = [[a - p for a, p in zip(before, rank, strict=True)] for rank in moved[-3:]]
        for i, (was, v) in enumerate(zip(before, velocity, strict=True)):
            mean = sum(rank[i] for rank in own) / 3
            length = float(mean.norm() / sum(rank[i].norm() / 3 for rank in own))
            mean = mean / min(1.0, max(length, 3**-0.5))
            v.mul_(momentum).add_(mean)
            wanted = was - (1 - momentum) * (mean + momentum * v)
            error = float((params[0][i].detach() - wanted).norm() / own[0][i].norm())
            assert error < (0.5 if payload else 1e-5), (i, error)
            if payload and i == 0 and momentum == 0:  # int4 rounds directions, and the length stays
                applied = float((was - params[0][i].detach()).norm())
                assert applied == pytest.approx(float(sum(rank[0].norm() / 3 for rank in own)), rel=1e-3)
        assert are_equal(params)


def test_auto_weighs_ranks():
    """Of two ranks that move at right angles one has four times the weight: the average is (1.6, .2), of 1.6 + .2."""

    def make(params, process_group):
        options = dict(weighted=True, growth_steps=0, outer_lr="auto", outer_momentum=0.0, payload_dtype=None)
        return compopt.LocalSteps(torch.optim.SGD(params, lr=1.0), 1, process_group=process_group, **options)

    world, params, optimizers = replicas(2, [torch.zeros(2)], make)
    step(world, params, optimizers, [[torch.tensor([2.0, 0.0])], [torch.tensor([0.0, 1.0])]], (4, 1))
    mean = torch.tensor([1.6, 0.2])
    wanted = -1.8 * mean / mean.norm()
    torch.testing.assert_close(params[0][0].detach(), wanted)


def test_the_average_of_anchors_is_the_mean_by_a_power_of_the_step():
    """Of share 2 / (p + 2): anchors count by s^p over the steps s in which they were the last ones."""
    params, optimizers = train(2, 0, every=4, growth_steps=20, average_anchors=0.5)
    world, weight, total = optimizers[0].comm.world, 0.0, 0.0
    for t in range(41):
        step(world, params, optimizers, gradients(2, t))
        if optimizers[0].stats.phase == "exchanged":
            begun = t + 1 - optimizers[0].stats.round_steps
            share = (t + 1) ** 3 - begun**3  # the integral of s^2, up to the step of this exchange
            weight, total = weight + share, total + share * flat_of(shown(params, optimizers)[0])
    before = copies(params)
    with optimizers[1].use_anchors(average=True):
        torch.testing.assert_close(flat_of(params[1]), total / weight, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(p, q) for p, q in zip(params[1], before[1], strict=True))


def test_the_average_of_anchors_is_resumed_to_the_bit_and_must_be_kept_to_be_used():
    options = dict(every=4, average_anchors=0.3, payload_dtype="int4")
    params, optimizers = train(2, 18, **options)
    resumed, others = train(2, 0, **options)
    for rank in range(2):
        for p, q in zip(resumed[rank], params[rank], strict=True):
            p.data.copy_(q)
        others[rank].load_state_dict(optimizers[rank].state_dict())
    for t in range(18, 30):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
        step(others[0].comm.world, resumed, others, gradients(2, t))
    for own, optimizer, theirs, other in zip(params, optimizers, resumed, others, strict=True):
        with optimizer.use_anchors(average=True), other.use_anchors(average=True):
            assert all(map(torch.equal, own, theirs))
    _, (plain, _) = train(2, 5)
    with pytest.raises(ValueError, match="average must be False without average_anchors="), plain.use_anchors(True):
        pass
