"""Layouts and shards: how much each keeps of a tensor, the way into a state dict and back, real ranks' shards."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ddp_models import Net, batch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._engine import engine
from compopt._state import buckets
from compopt._state.layouts import Bits, Layout, LocalShape, OnMask, PaddedVector, Sharded, TensorInfo
from compopt._state.shards import cut_evenly
from compopt._wire.collectives import Communicator
from compopt._wire.requests import BitOr, ReduceScatterMean

SHAPE, N = (3, 7), 21  # bits that are no whole bytes
MASK = torch.arange(N) % 3 == 1
PARAM = torch.zeros(SHAPE)
LAYOUTS: dict[str, tuple[Layout, int]] = {
    "dense": (LocalShape(torch.float32), N),
    "bits": (Bits(), 3),
    "on a mask": (OnMask(torch.float32, "mask"), int(MASK.sum())),
    "sharded": (Sharded(torch.float32), 9),
    "prefix": (PaddedVector(torch.float32, lambda p: p.shape[0] + 2), 5),
}
every = pytest.mark.parametrize("name", LAYOUTS)


def packed(mask: torch.Tensor) -> torch.Tensor:
    return Bits().compact(mask, TensorInfo(PARAM, True), {})


def kept(name: str, member: TensorInfo) -> torch.Tensor:
    """Some state, as it is kept."""
    layout, n = LAYOUTS[name]
    state = packed(MASK) if name == "bits" else torch.arange(1, n + 1).to(layout.dtype)
    return state.view(layout.stored_shape(member, state))


@every
def test_so_many_elements_are_kept(name):
    layout, n = LAYOUTS[name]
    held = torch.zeros(n) if name == "on a mask" else None
    assert layout.numel(TensorInfo(PARAM, True, (4, 13)), held) == n


@every
def test_into_a_state_dict_and_back_nothing_is_lost(name):
    layout, _ = LAYOUTS[name]
    member = TensorInfo(PARAM, True, (4, 13))
    state = kept(name, member)
    whole = layout.expand(state, member, {"mask": packed(MASK)})
    assert whole.shape == (() if name == "scalar" else SHAPE)
    compact = layout.compact(whole, member, {"mask": MASK.view(SHAPE)})
    assert compact.numel() == layout.expected_numel(compact, TensorInfo(PARAM, True), {"mask": packed(MASK)})
    assert torch.equal(layout.cut_shard(compact, member), state)
    again = layout.cut_shard(layout.compact(state, member, {"mask": packed(MASK)}), member)
    assert torch.equal(again, state)  # what is kept already stays as it is


def test_what_is_whole_lies_where_it_belongs():
    member = TensorInfo(PARAM, True, (4, 13))
    shard = LAYOUTS["sharded"][0].expand(kept("sharded", member), member, {}).view(-1)
    assert shard[:4].eq(0).all() and shard[13:].eq(0).all() and shard[4] == 1 and shard[12] == 9
    prefix = LAYOUTS["prefix"][0].expand(kept("prefix", member), member, {}).view(-1)
    assert prefix[:5].tolist() == [1, 2, 3, 4, 5] and prefix[5:].eq(0).all()
    momentum = LAYOUTS["on a mask"][0]
    whole = momentum.expand(kept("on a mask", member), member, {"mask": packed(MASK)}).view(-1)
    assert torch.equal(whole.ne(0), MASK) and whole[1] == 1
    assert torch.equal(Bits().expand(packed(MASK), member, {}).view(-1), MASK)


def test_a_momentum_of_what_is_not_compressed_and_a_shard_of_what_is_frozen_are_whole():
    momentum, plain = OnMask(torch.float32, "mask"), TensorInfo(PARAM, False)
    state = torch.rand(SHAPE)
    assert momentum.stored_shape(plain) == SHAPE and momentum.numel(plain, torch.zeros(99)) == N
    assert momentum.expand(state, plain, {}) is state and momentum.compact(state, plain, {}) is state
    shard = Sharded(torch.float32)
    assert shard.numel(plain) == N and shard.expand(state.view(-1), plain, {}).shape == SHAPE


def test_a_prefix_of_another_length_begins_anew():
    layout, n = LAYOUTS["prefix"]
    assert layout.cut_shard(torch.ones(n + 1), TensorInfo(PARAM, True)).tolist() == [0.0] * n


CLASSES = {
    "tagc": functools.partial(compopt.TagcAdamW, density=0.1, dense_steps=2),
    "early": functools.partial(compopt.TagcAdamW, density=0.1, dense_steps=2),
    "sketch": functools.partial(compopt.TagcAdamW, density=0.1, codec="sketch", sketch_ratio=4),
    "scape": functools.partial(compopt.ScapeAdamS, density=0.1, density_steps=0, sharded=True),
}


def test_every_element_has_one_owner_and_shards_are_equal():
    lengths, compressed = [64 * 65, 80, 0, 5781, 1, 4097], [True, False, True, True, False, True]
    for ranks in (1, 2, 3, 7, 64):
        cut = cut_evenly(lengths, compressed, 0, ranks)
        for i, n in enumerate(lengths):
            edges = [cut.ranges[r][i] for r in range(ranks)]
            assert [e for start, stop in edges for e in range(start, stop)] == list(range(n))
        shares = cut.compressed_counts
        assert max(shares) - sum(shares) / ranks <= 128


def sent() -> int:
    """Bytes this process has written to any file so far: sockets, here."""
    with open("/proc/self/io") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("wchar"))


def requests(rank: int) -> dict:
    comm, results = Communicator(), {}
    sizes = [5, 0, 3]
    row = comm.start(ReduceScatterMean(torch.arange(8.0) * (rank + 1), sizes)).wait()
    results["row"] = row.tolist()
    low = comm.start(ReduceScatterMean(torch.full((8,), 1.0 + rank / 128, dtype=torch.bfloat16), sizes)).wait()
    results["in float32"] = low.dtype == torch.float32
    bits = torch.randint(0, 256, (1001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
    union = comm.start(BitOr(bits.clone())).wait()
    Communicator.has_bitwise_or = lambda self, device: False  # as on NCCL
    pending = comm.start(BitOr(bits.clone())).wait()  # the first of two collectives leads to the second
    results["or"] = torch.equal(union, pending.wait())
    rows = [
        torch.randint(0, 256, (1001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(r)) for r in range(3)
    ]
    results["or"] &= torch.equal(union, rows[0] | rows[1] | rows[2])

    n = 300_000
    before = sent()
    comm.start(ReduceScatterMean(torch.ones(n), [n // 3] * 3)).wait()
    dist.barrier()
    moved = sent()
    dist.reduce_scatter_tensor(torch.empty(n // 3), torch.ones(n))
    dist.barrier()
    results["ours"], results["gloo's"] = ((b - a) / (4 * n) for a, b in ((before, moved), (moved, sent())))
    return results


def test_requests_of_shards_over_gloo():
    """A reduce-scatter moves (N - 1) / N of the bytes; gloo's own moves an all-reduce's."""
    answers = run_ranks(requests, 3)
    assert [answer["row"] for answer in answers] == [[0.0, 2.0, 4.0, 6.0, 8.0], [], [10.0, 12.0, 14.0]]
    for answer in answers:
        assert answer["or"] and answer["in float32"]
        assert 2 / 3 <= answer["ours"] < 1.01 * 2 / 3 and answer["gloo's"] > 1.9 * 2 / 3


def trained(rank: int) -> dict[str, list]:
    torch.manual_seed(0)
    buckets.BUCKET_BYTES = 80_000
    results = {}
    for name, make in CLASSES.items():
        model = DDP(Net())
        if name == "early":  # made when there were no other ranks yet
            engine.connect, connect = lambda group: Communicator(single_process=True), engine.connect
            engine.is_outdated, is_outdated = lambda comm: False, engine.is_outdated
            optimizer = make(model.named_parameters(), lr=1e-2)
            engine.connect, engine.is_outdated = connect, is_outdated
        else:
            optimizer = make(model.named_parameters(), lr=1e-2)
        losses = []
        for step in range(10):
            loss = model(batch(step)).square().mean()
            (loss * (float("inf") if step == 6 and rank == 1 else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        stats = optimizer.stats
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        held = sum(entry["exp_avg"].numel() for entry in optimizer.state.values()) / len(mine)
        results[name] = [torch.equal(mine, theirs), losses[-1] < losses[0], stats.phase, stats.skipped,
                       stats.early_buckets == stats.buckets - 1, held]  # fmt: skip
    return results


def test_under_ddp_shards_start_in_backward_and_replicas_stay_equal():
    for answer in run_ranks(trained, 2):
        for name in CLASSES:
            *rest, held = answer[name]
            assert rest == [True, True, "sparse", 1, True] and abs(held - 0.5) < 0.02, name
