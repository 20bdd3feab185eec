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
from compopt._local.anchors import copy_wide
from compopt._local.rounds import make_sketch, sum_of_products

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
    assert (a.bytes_sent, a.spread, a.cosine, a.round) == (b.bytes_sent, b.spread, b.cosine, b.round)


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


OF_COSINE, OF_SPREAD = 0.03, 0.1  # how far the cosine may be off, and the spread as a share of it


def shared_and_own(ranks: int, t: int, opposed: bool) -> list[list[torch.Tensor]]:
    """Gradients that share a part, of the opposite sign on odd ranks where they are ``opposed``."""
    shared = gradients(1, 1000 + t // 8, dtype=torch.float32)[0]
    signs = [-1.0 if opposed and rank % 2 else 1.0 for rank in range(ranks)]
    own = gradients(ranks, t, dtype=torch.float32)
    return [[sign * s + g for s, g in zip(shared, rank, strict=True)] for sign, rank in zip(signs, own, strict=True)]


PAYLOADS = [None, "int4", "int2"]


def true_distances(before: list[torch.Tensor], moved: list[list[torch.Tensor]]) -> tuple[float, float]:
    """Cosine and spread, from where ranks were when they were equal, and where each has gone."""
    flat = torch.stack([torch.cat([(a - p).view(-1) for a, p in zip(before, rank, strict=True)]) for rank in moved])
    flat = flat.double()
    products, lengths = flat @ flat.T, torch.outer(flat.norm(dim=1), flat.norm(dim=1))
    off = ~torch.eye(len(moved), dtype=torch.bool)
    own, mean = float(flat.square().sum(1).mean()), float(flat.mean(0).square().sum())
    return float(products[off].sum() / lengths[off].sum()), ((own - mean) / mean) ** 0.5


@pytest.mark.parametrize(
    ("payload", "ranks", "opposed"),
    slow_but(
        lambda *row: row in pairs(PAYLOADS, (2, 4), (False, True)), itertools.product(PAYLOADS, (2, 4), (False, True))
    ),
)
def test_they_are_those_of_the_pseudo_gradients(payload, ranks, opposed):
    moved: list[list[torch.Tensor]] = []

    def make(params, process_group):
        inner = adamw(params)
        inner.register_step_post_hook(lambda *_: moved.append([p.detach().clone() for p in params]))
        return compopt.LocalSteps(inner, 8, growth_steps=0, payload_dtype=payload, process_group=process_group)

    world, params, optimizers = replicas(ranks, weights(dtype=torch.float32), make)
    found = []
    for t in range(48):
        if t % 8 == 0:
            before = copies(params)[0]
        step(world, params, optimizers, shared_and_own(ranks, t, opposed))
        if optimizers[0].stats.phase == "exchanged":
            cosine, spread = true_distances(before, moved[-ranks:])
            stats = optimizers[0].stats
            found.append((stats.cosine - cosine, (stats.spread - spread) / spread))
            assert optimizers[1].stats.cosine == stats.cosine and optimizers[1].stats.spread == stats.spread
    assert len(found) == 6
    assert (cosine < 0) == opposed or ranks > 2
    assert max(abs(error) for error, _ in found) < OF_COSINE, found
    assert max(abs(error) for _, error in found) < OF_SPREAD, found


def distances_of(moved: list[torch.Tensor], samples: list[float], lost: int | None = None) -> list:
    """Return the cosine and spread that every rank reports after a step in which each moves by ``moved``."""

    def make(params, process_group):
        sgd = torch.optim.SGD(params, lr=1.0)
        if process_group.rank == lost:
            sgd.register_step_post_hook(lambda *_: params[0].data[3].fill_(math.inf))
        options = {"weighted": True, "growth_steps": 0, "payload_dtype": None}
        return compopt.LocalSteps(sgd, 1, process_group=process_group, **options)

    world, params, optimizers = replicas(len(moved), [torch.zeros(50, dtype=torch.float64)], make)
    for optimizer, number in zip(optimizers, samples, strict=True):
        optimizer._samples = number
    step(world, params, optimizers, [[m] for m in moved])
    return [(optimizer.stats.cosine, optimizer.stats.spread) for optimizer in optimizers]


def drawn(ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shared, *own = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(ranks + 1))
    return [shared + m for m in own]


@pytest.mark.parametrize("samples", [[1, 1, 1, 1], [1, 2, 5, 0], [0, 0, 0, 0]])
@pytest.mark.filterwarnings("ignore:rank 1 had parameters that are not finite")
@pytest.mark.parametrize("lost", [None, 1])
def test_ranks_have_weights_and_one_may_be_lost(samples, lost):
    moved = drawn(4)
    kept = [rank for rank in range(4) if rank != lost]
    weighed = {rank: samples[rank] if any(samples) else 1 for rank in kept}
    share = {rank: weight / sum(weighed.values()) for rank, weight in weighed.items()}
    mean = sum(share[k] * moved[k] for k in kept)
    pairs = [(share[k] * moved[k], share[n] * moved[n]) for k in kept for n in kept if k != n]
    cosine = sum(a @ b for a, b in pairs) / sum(a.norm() * b.norm() for a, b in pairs)
    apart = sum(share[k] * (moved[k] - mean).square().sum() for k in kept)
    expected = float(cosine), float((apart / mean.square().sum()).sqrt())
    for found in distances_of(moved, samples, lost):
        assert found == pytest.approx(expected, rel=1e-5)


def test_without_another_rank_of_any_weight_there_are_none():
    assert distances_of(drawn(3), [0, 2, 0]) == [(0.0, 0.0)] * 3


def test_ranks_that_move_apart_have_an_average_of_zero():
    (there, *_) = drawn(1)
    for cosine, spread in distances_of([there, -there], [1, 1]):
        assert cosine == pytest.approx(-1) and spread > 1e6


@pytest.mark.parametrize("structured", [False, True])
def test_sketches_of_long_vectors_tell_their_products(structured):
    """Of more elements than a block has; or of which each is 1 in another half."""
    generator = torch.Generator().manual_seed(0)
    shared, *own = (torch.randn(2**20 + 5, generator=generator) for _ in range(3))
    vectors = torch.stack([shared + own[0], own[1] - shared])
    vectors[:, : 2**20] *= 1e-3  # all the length is behind the first block
    vectors[1, 2**20 :] *= -1  # and another direction
    if structured:
        vectors = torch.eye(2).repeat_interleave(2**13, dim=1)
    sketches = torch.stack([make_sketch([(v, 1.0)], 2, (0,), torch.device("cpu")) for v in vectors])
    lengths = vectors.double().norm(dim=1)
    expected = float(vectors.double().sum(0).norm())
    assert sum_of_products(lengths, sketches) ** 0.5 == pytest.approx(expected, rel=0.1)
