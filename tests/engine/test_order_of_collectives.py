"""The order in which collectives start, two real ranks: the same whatever backward finishes first, or a sentence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deep import Deep, loss
from ranks import run_ranks
from sim import Ranks
from slow_rows import in_turn
from table import projecting
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._state import buckets as _buckets
from compopt._wire.collectives import PendingCollective

SPARSE = dict(lr=1e-2, density=0.3, interval=3, dense_steps=1)
TRACKED = projecting("tracked", lr=1e-2)
MAKERS = {
    "Radius": (compopt.RadiusAdamW, SPARSE),
    "Radius, int8": (compopt.RadiusAdamW, {**SPARSE, "payload_dtype": torch.int8}),
    "SCAPE": (compopt.ScapeAdamS, dict(lr=1e-3, density=0.2, density_steps=0)),
    "AdamS": (compopt.AdamS, dict(lr=1e-3)),
    "tracked": (compopt.SeparateAdam, TRACKED),
    "tracked, int8": (compopt.SeparateAdam, {**TRACKED, "payload_dtype": torch.int8}),
    "TAGC": (compopt.TagcAdamW, dict(lr=1e-2, density=0.2)),
}


class Branches(nn.Module):
    """Six branches, of which each rank takes the one or the other first: so backward finishes them in that order."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))

    def forward(self, x: torch.Tensor, backwards: bool) -> torch.Tensor:
        order = list(self.branches)[::-1] if backwards else list(self.branches)
        return sum(branch(x).tanh().square().mean() for branch in order)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(100 * step + rank))


def another_order_on_one_rank(rank: int) -> dict[str, list[float]]:
    _buckets.BUCKET_BYTES = 40_000
    results = {}
    for name, (cls, options) in MAKERS.items():
        ends = []
        for alike in (True, False):
            torch.manual_seed(0)
            net = Branches()
            model, optimizer = DDP(net), cls(net.parameters(), **options)
            overlapped = 0
            for step in range(5):
                model(batch(step, rank), backwards=rank == 1 and not alike).backward()
                optimizer.step()
                overlapped += optimizer.stats.early_buckets
                optimizer.zero_grad()
            ends.append(nn.utils.parameters_to_vector(net.parameters()).detach())
        theirs = ends[1].clone()
        dist.broadcast(theirs, 0)
        results[name] = [float((ends[1] - theirs).abs().max()), float((ends[0] - ends[1]).abs().max()), overlapped]
    return results


def test_ranks_that_finish_gradients_in_another_order_start_the_same_collectives():
    for results in run_ranks(another_order_on_one_rank, 2):
        for name, (between_ranks, between_runs, overlapped) in results.items():
            assert between_ranks == 0, f"{name}: replicas differ"
            assert between_runs < 1e-6, f"{name}: not what ranks of one order get"
            assert overlapped > 0, name


def deep(monkeypatch, name: str) -> Ranks:
    monkeypatch.setattr(_buckets, "BUCKET_BYTES", 33_300)  # two layers

    cls, options = MAKERS[name]
    return Ranks(2, Deep, lambda params, process_group: cls(params, process_group=process_group, **options))


@pytest.mark.parametrize(("name", "begun"), in_turn(MAKERS, ((1, 3), (0, 8), (2, 1))), ids=str)
def test_ranks_of_which_one_began_fewer_buckets_in_backward(monkeypatch, name, begun):
    ranks, without = deep(monkeypatch, name), deep(monkeypatch, name)
    for step in range(5):
        for one in (ranks, without):
            one.backward(loss)
        for (_, model, optimizer), layers in zip(ranks, begun, strict=True):
            optimizer.gradients_ready(list(model.parameters())[::-1][: 2 * 2 * layers])
            optimizer.backward_done()
        if step == 3:  # all go out again, on both ranks, however many had
            for one in (ranks, without):
                one.models[0].layers[7].bias.grad.data[3] += 0.5
        for one in (ranks, without):
            one.world.step(one.optimizers)
            one.steps += 1
        ranks.assert_replicas_equal()
    for p, q in zip(ranks.models[0].parameters(), without.models[0].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("swapped", ["buckets", "steps"])
def test_payloads_of_different_buckets_or_steps_are_told_apart(monkeypatch, swapped):
    """Of equal length, so that nobody else would notice."""
    ranks = deep(monkeypatch, "AdamS")
    ranks.train(loss, 1)
    before = [p.detach().clone() for p in ranks.models[0].parameters()]
    ranks.backward(loss)
    optimizer = ranks.optimizers[1]
    if swapped == "buckets":
        first, second = optimizer._buckets[:2]
        optimizer._buckets[:2] = [second, first]
    else:
        for bucket in optimizer._buckets:
            bucket.group = {**bucket.group, "step": bucket.group["step"] + 1}
    with pytest.raises(compopt.CommunicationError, match=r"payloads of different buckets or steps met \(bucket 0, of "):
        ranks.world.step(ranks.optimizers)
    for p, old in zip(ranks.models[0].parameters(), before, strict=True):
        assert torch.equal(p, old)


class Work:
    """A collective in flight, with the error that waiting for it raises."""

    def __init__(self, error: Exception | None):
        self.error = error

    def wait(self) -> None:
        if self.error:
            raise self.error


def test_only_what_torch_distributed_raises_is_a_failed_collective():
    """Gloo raises RuntimeError, too; what we make of the result is no business of the wire's."""
    for error in (RuntimeError("Connection closed by peer"), dist.DistBackendError("NCCL"), dist.DistNetworkError("")):
        with pytest.raises(compopt.CommunicationError, match="a mean failed"):
            PendingCollective("a mean", Work(error), lambda: None).wait()

    def ours():
        raise RuntimeError("self.size(-1) must be divisible by 4")

    with pytest.raises(RuntimeError, match="divisible by 4") as caught:
        PendingCollective("a mean", Work(None), ours).wait()
    assert not isinstance(caught.value, compopt.CommunicationError)
