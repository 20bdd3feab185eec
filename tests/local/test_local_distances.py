"""``stats.cosine`` and ``stats.spread``: how far apart ranks' pseudo-gradients are, estimated from sketches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from local_runs import adamw, copies
from pairs import pairs
from problems import gradients, replicas, step, weights
from slow_rows import slow_but

import compopt
from compopt._local.rounds import make_sketch, sum_of_products

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
