"""Shards in real processes: what crosses the sockets, and sharded classes under DistributedDataParallel."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from ddp_models import Net, batch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._engine import session
from compopt._state import buckets
from compopt._state.shards import cut_evenly
from compopt._wire.collectives import Communicator
from compopt._wire.requests import BitOr, ReduceScatterMean

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
            session.connect, connect = lambda group: Communicator(single_process=True), session.connect
            session.is_outdated, is_outdated = lambda comm: False, session.is_outdated
            optimizer = make(model.named_parameters(), lr=1e-2)
            session.connect, session.is_outdated = connect, is_outdated
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
