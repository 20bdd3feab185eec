"""Counts of the benchmarks: memory as torch allocates it, and bytes of one rank among made-up ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from sim import World
from torch import nn

import compopt

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from _fake_ranks import fake_ranks
from memory import Allocations, bytes_in


def test_allocations_are_seen_while_held_and_at_their_most():
    before = torch.zeros(1000)
    with Allocations() as results:
        held = torch.empty(500)
        with results.mark("first"):
            torch.empty(3000).add_(before.sum())
        with results.mark("second"):
            more = torch.empty(250)
    assert results.before == {"first": 2000, "second": 2000}
    assert 2000 + 12000 <= results.most["first"] < 2000 + 12000 + 100  # and a sum
    assert results.held == 3000 == bytes_in([held, held.view(5, 100), more])


def a_model() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 60))
    return [(name, nn.Parameter(p.detach().clone())) for name, p in model.named_parameters()]


CASES = {
    "Radius": ("RadiusAdamW", dict(density=0.4, interval=100, dense_steps=1)),
    "Radius, int8": ("RadiusAdamW", dict(density=0.4, interval=100, dense_steps=1, payload_dtype=torch.int8)),
    "SCAPE": ("ScapeAdamS", dict(density=0.1, density_steps=0)),
    "SCAPE, sharded": ("ScapeAdamS", dict(density=0.1, density_steps=0, sharded=True)),
    "SEPARATE": ("SeparateAdam", dict(projection="gaussian", ratio=8)),
}


def gradients(params: list[tuple[str, nn.Parameter]], rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    for _, p in params:
        p.grad = torch.randn(p.shape, generator=generator) if step else torch.zeros_like(p)


@pytest.mark.parametrize("name", CASES)
def test_one_rank_of_two_hands_over_what_two_simulated_ranks_do(name):
    cls, options = CASES[name]
    world, ranks = World(2), [a_model(), a_model()]
    simulated = [
        getattr(compopt, cls)(params, process_group=comm, **options)
        for params, comm in zip(ranks, world.comms, strict=True)
    ]
    with fake_ranks(2) as comm:
        single = a_model()
        optimizer = getattr(compopt, cls)(single, process_group=comm, **options)
        comm.follow(optimizer)
        for step in range(4):
            for rank, params in enumerate(ranks):
                gradients(params, rank, step)
            gradients(single, 0, step)
            comm.reset()
            world.step(simulated)
            optimizer.step()
            assert optimizer.stats.bytes_sent == simulated[0].stats.bytes_sent
        assert optimizer.stats.phase == simulated[0].stats.phase != "dense"
    if "int8" in name:  # of the first stage half goes to oneself, the header to each; then the own half to the other
        words = 4 * (len(single) + len(optimizer._buckets[-1].control.numbers))
        assert comm.received["header"] == pytest.approx(words) and comm.handed["header"] == pytest.approx(2 * words)
        row = 128 + 4  # values that share a scale: halves are cut between two of them
        assert abs(comm.received.total() - optimizer.stats.bytes_sent) < row + 16
        return
    assert comm.handed.total() == pytest.approx(optimizer.stats.bytes_sent)
    local = 0.5 if "sharded" in name else 0  # half of what is reduced to owners stays here
    for kind in ("payload", "header", "masks", "gathered"):
        stays = local * comm.handed[kind] if kind in ("payload", "header") else 0
        assert comm.received[kind] == pytest.approx(comm.handed[kind] - stays, rel=0.02)


def test_what_grows_with_ranks():
    """An all-reduce's bytes at a rank tend to twice the message, a gather's to all messages, headers to one a rank."""
    received = {}
    for ranks in (2, 32):
        for name in ("SCAPE", "SCAPE, sharded"):
            cls, options = CASES[name]
            with fake_ranks(ranks) as comm:
                params = a_model()
                optimizer = getattr(compopt, cls)(params, process_group=comm, **options)
                comm.follow(optimizer)
                for step in range(4):
                    gradients(params, 0, step)
                    comm.reset()
                    optimizer.step()
            received[name, ranks] = comm
    few, many = received["SCAPE", 2], received["SCAPE", 32]
    assert many.sent["payload"] == pytest.approx(2 * 31 / 32 * many.handed["payload"])
    assert many.received["masks"] == 31 * many.handed["masks"] and many.handed["masks"] < few.handed["masks"] / 8
    assert many.handed["header"] == few.handed["header"]
    few, many = received["SCAPE, sharded", 2], received["SCAPE, sharded", 32]
    assert many.handed["header"] == 16 * few.handed["header"]
