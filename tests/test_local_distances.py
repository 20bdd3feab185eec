"""``stats.cosine`` and ``stats.spread``: how far apart ranks' pseudo-gradients are, whatever is sent of them."""

from __future__ import annotations

import pytest
import torch
from local_runs import adamw, copies
from problems import gradients, replicas, step, weights

import compopt

CODECS = [None, "bfloat16", "int8", "int4", "int2"]
TOLERANCE = 0.02


def shared_and_own(ranks: int, t: int, opposed: bool) -> list[list[torch.Tensor]]:
    """Gradients that share a part, of the opposite sign on odd ranks where they are ``opposed``."""
    shared = gradients(1, 1000 + t // 8, dtype=torch.float32)[0]
    signs = [-1.0 if opposed and rank % 2 else 1.0 for rank in range(ranks)]
    own = gradients(ranks, t, dtype=torch.float32)
    return [[sign * s + g for s, g in zip(shared, rank, strict=True)] for sign, rank in zip(signs, own, strict=True)]


def true_distances(before: list[torch.Tensor], moved: list[list[torch.Tensor]]) -> tuple[float, float]:
    """Cosine and spread, from where ranks were when they were equal, and where each has gone."""
    flat = torch.stack([torch.cat([(a - p).view(-1) for a, p in zip(before, rank, strict=True)]) for rank in moved])
    ranks, flat = len(moved), flat.double()
    own, mean = float(flat.square().sum(1).mean()), float(flat.mean(0).square().sum())
    return (ranks * mean - own) / ((ranks - 1) * own), ((own - mean) / mean) ** 0.5


@pytest.mark.parametrize("opposed", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("payload", CODECS)
def test_they_are_those_of_the_pseudo_gradients(payload, ranks, opposed):
    moved: list[list[torch.Tensor]] = []

    def make(params, process_group):
        inner = adamw(params)
        inner.register_step_post_hook(lambda *_: moved.append([p.detach().clone() for p in params]))
        return compopt.LocalSteps(inner, 8, every_warmup_steps=0, payload_dtype=payload, process_group=process_group)

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
    assert max(abs(error) for error, _ in found) < TOLERANCE, found
    assert max(abs(error) for _, error in found) < 2 * TOLERANCE, found
