"""Local steps on real ranks: what is on the wire, and when."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import FOREVER, run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._wire import in_flight
from compopt._wire.collectives import Communicator

# Bytes. Messages of 48 bytes, in which gloo's ranks say that they are ready, may arrive in another step than theirs.
HEADERS = 500


def received() -> int:
    """Bytes that this process has received over TCP, as the kernel counts them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            own = os.dup(int(name))
        except OSError:
            continue
        try:
            with socket.socket(fileno=own) as one:
                if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("<Q", info, 128)[0]  # tcpi_bytes_received
        except OSError:
            with contextlib.suppress(OSError):
                os.close(own)
    return total


def stepped(ddp, optimizer, rank: int, t: int) -> int:
    """Train a step; what was received meanwhile."""
    before = received()
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * t + rank))
    optimizer.zero_grad()
    (ddp(x) - x.flip(1)).square().mean().backward()
    optimizer.step()
    return received() - before


def over_gloo(rank: int, options: dict) -> list[tuple[int, float, int, str, int]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = compopt.LocalSteps(torch.optim.AdamW(ddp.parameters(), lr=1e-2), 4, growth_steps=0, **options)
    told = []
    for t in range(12):
        got = stepped(ddp, optimizer, rank, t)
        weights = torch.cat([p.detach().view(-1) for p in model.parameters()]).double()
        stats = optimizer.stats
        told.append((got, float(weights.abs().sum()), stats.steps_into_round, stats.phase, stats.bytes_sent))
    return told


def test_real_ranks_under_ddp_are_equal_when_a_round_ends_and_silent_until_then():
    runs = run_ranks(over_gloo, 2, {})
    for first, second in list(zip(*runs, strict=True))[3:]:  # DDP itself deals its buckets anew at first
        got, checksum, at, phase, sent = first
        if at == 0:
            # half a byte an element and scales; gloo's own headers beside that
            assert 0.9 * sent < got < 1.5 * sent + 3000 and checksum == second[1] and phase == "exchanged"
        else:
            assert (phase, sent) == ("local", 0) and checksum != second[1]
            assert got < HEADERS or at == 1  # the other rank may not have ended the exchange before


def test_real_ranks_apply_a_delayed_exchange_at_the_same_step():
    """Fragments and a delay over gloo end where the simulator's, which has no delays, would."""
    runs = run_ranks(over_gloo, 2, {"delay": 1, "fragments": 2, "payload_dtype": "int8"})
    assert [phase for *_, phase, _ in runs[0]] == ["local", "local", *["exchanged", "local"] * 5]
    assert [told[3] for told in runs[0]] == [told[3] for told in runs[1]]


def train_on(ddp, optimizer, rank: int, steps: int) -> tuple[bool, int]:
    """Return whether replicas are equal after so many steps, and what was received in the last of them."""
    for t in range(steps):
        got = stepped(ddp, optimizer, rank, t)
    weights = torch.cat([p.detach().view(-1) for p in ddp.module.parameters()])
    other = weights.clone()
    torch.distributed.broadcast(other, 0)
    same = torch.tensor([float(torch.equal(weights, other))])
    torch.distributed.all_reduce(same, torch.distributed.ReduceOp.MIN)
    return bool(same), got


def goes_on_with_another(rank: int) -> dict[str, tuple[bool, int] | bool]:
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(), torch.nn.Linear(128, 64)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    adamw = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    optimizer = compopt.LocalSteps(adamw, 4, dense_steps=3, growth_steps=0)
    found: dict = {"start": train_on(ddp, optimizer, rank, 3)}
    found["within a round"] = train_on(ddp, optimizer, rank, 3)
    found["collects"] = ddp.require_backward_grad_sync
    found["end of a round"] = train_on(ddp, optimizer, rank, 1)
    with ddp.no_sync():  # as accumulation does
        ddp(torch.randn(16, 64)).sum().backward()
    optimizer = compopt.SeparateAdam(ddp.parameters(), dense_steps=1)
    found["averaging by another"] = train_on(ddp, optimizer, rank, 4)
    optimizer = compopt.LocalSteps(torch.optim.AdamW(ddp.parameters(), lr=1e-2), 4, growth_steps=0)
    train_on(ddp, optimizer, rank, 4)
    del optimizer
    found["averaging by DDP"] = train_on(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2), rank, 2)
    return found


def test_ddp_collects_gradients_only_where_somebody_averages_them():
    """Nor does it exchange buffers while ranks step on their own; afterwards all is as it was."""
    for found in run_ranks(goes_on_with_another, 2):
        assert found["start"][0] and found["start"][1] > 0
        assert not found["within a round"][0] and found["within a round"][1] < HEADERS, "buffers alone are 1 KB"
        assert not found["collects"]
        assert found["end of a round"][0] and found["end of a round"][1] > 0
        assert found["averaging by another"][0] and found["averaging by DDP"][0]
        assert found["averaging by DDP"][1] > 4 * (64 * 128 * 2), "dense, by DDP itself"


def waits_apart(rank: int) -> float:
    from compopt._wire.collectives import Communicator
    from compopt._wire.groups import get_timeout

    comm = Communicator()
    timeout = get_timeout(comm.with_own_group().group).total_seconds()
    torch.distributed.barrier()  # the other rank has connected: the group may be destroyed
    return timeout


def test_what_runs_beside_others_waits_as_long_as_they_do():
    assert run_ranks(waits_apart, 2) == [FOREVER.total_seconds()] * 2  # as ranks.py says of the default group


def open_resources() -> tuple[int, int, int]:
    """Files and threads of this process, and its process groups."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(groups)


def loads_again_and_again(rank: int) -> list[tuple[int, int, int]]:
    before = open_resources()
    p = torch.nn.Parameter(torch.ones(50, 100))
    adamw = torch.optim.AdamW([p], lr=1e-2)
    optimizer = compopt.LocalSteps(adamw, 4, delay=2, growth_steps=0)

    def train_on(steps: int) -> None:
        for t in range(steps):
            p.grad = torch.randn(50, 100, generator=torch.Generator().manual_seed(100 * t + rank))
            optimizer.step()

    train_on(5)
    once = open_resources()
    for _ in range(10):
        optimizer.load_state_dict(optimizer.state_dict())
        train_on(1)
    often = open_resources()
    torch.distributed.barrier()
    del optimizer
    time.sleep(in_flight.QUIET + 0.1)  # until then its group may have tensors to free
    gc.collect()
    after = open_resources()
    p.data.fill_(1.0)
    optimizer = compopt.LocalSteps(adamw, 4, delay=2, growth_steps=0)
    train_on(6)  # over a group of its own
    return [before, once, often, after]


def test_delayed_exchanges_have_one_process_group_which_goes_with_the_optimizer():
    for before, once, often, after in run_ranks(loads_again_and_again, 2):
        assert once[2] == often[2] == before[2] + 1 and after[2] == before[2]
        assert often[0] <= once[0] + 2 and often[1] <= once[1] + 2, "ten loads open no files, and start no threads"


def loads_while_an_exchange_is_on_its_way(rank: int) -> torch.Tensor:
    p = torch.nn.Parameter(torch.ones(50, 100))
    sgd = torch.optim.SGD([p], lr=1e-2)
    optimizer = compopt.LocalSteps(sgd, 4, delay=3, growth_steps=0)

    def train_on(steps) -> None:
        for t in steps:
            p.grad = torch.randn(50, 100, generator=torch.Generator().manual_seed(100 * t + rank))
            optimizer.step()

    train_on(range(4))  # the exchange has begun
    torch.distributed.barrier()
    if rank == 1:  # comes further than rank 0: to the second half of the payload
        running = optimizer._sync.running
        while running.waiting and (running.waiting.has_next or "AllGather" in running.waiting.description):
            optimizer.gradients_ready([p])
            time.sleep(0.01)
    torch.distributed.barrier()
    optimizer.load_state_dict(optimizer.state_dict())
    train_on(range(4, 9))
    optimizer.end_round()
    return p.detach()


def test_a_load_waits_for_what_is_on_the_wire():
    first, second = run_ranks(loads_while_an_exchange_is_on_its_way, 2)
    assert torch.equal(first, second) and not torch.equal(first, torch.ones(50, 100))


class Layers(torch.nn.ModuleDict):
    """Two matrices in numbered layers, which are Muon's."""

    def __init__(self):
        super().__init__({"0": torch.nn.Linear(64, 96), "1": torch.nn.Linear(96, 64)})

    def forward(self, x):
        return self["1"](self["0"](x).relu())


def comes_and_goes(rank: int, options: dict) -> dict:
    """Three ranks; in the middle of a round the last one is gone; later there is a new one in its place."""

    def make(group) -> tuple[DDP, compopt.LocalSteps]:
        torch.manual_seed(0)
        ddp = DDP(Layers(), process_group=group)
        muon = compopt.MuonAdamW(ddp.module.named_parameters(), lr=1e-2)
        options_ = dict(every=4, growth_steps=0, payload_dtype="int4", process_group=group, **options)
        return ddp, compopt.LocalSteps(muon, **options_)

    def train(ddp, optimizer, steps: int) -> None:
        for t in range(steps):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * t + rank))
            optimizer.zero_grad()
            losses.append((ddp(x) - x.flip(1)).square().mean())
            losses[-1].backward()
            optimizer.step()

    def rebind(ddp, optimizer, group) -> DDP:
        optimizer.rebind(group)
        ddp = DDP(ddp.module, process_group=group, init_sync=False)
        compopt.attach(ddp, optimizer)
        return ddp

    losses = []
    ddp, optimizer = make(dist.group.WORLD)
    train(ddp, optimizer, 5)
    pair, alone, three = dist.new_group([0, 1]), dist.new_group([2]), dist.new_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank < 2:
            before = [p.detach().clone() for p in ddp.parameters()]
            for _ in range(2):  # the second one has nothing to do
                ddp = rebind(ddp, optimizer, pair)
            kept = all(map(torch.equal, before, ddp.parameters()))
            train(ddp, optimizer, 4)
            before = [p.detach().clone() for p in ddp.parameters()]
        else:
            ddp, optimizer = make(alone)
        ddp = rebind(ddp, optimizer, three)
        if rank < 2:
            kept = kept and all(map(torch.equal, before, ddp.parameters()))
        train(ddp, optimizer, 6)
    optimizer.end_round()
    return {
        "kept": rank == 2 or kept,
        "sum": sum(float(p.detach().double().sum()) for p in ddp.parameters()),
        "step": optimizer.option_groups[0]["step"],
        "falls": rank == 2 or bool(losses[-1] < losses[0]),
    }


@pytest.mark.parametrize("options", [{}, {"delay": 2}, {"delay": 1, "fragments": 2}], ids=str)
def test_ranks_go_and_come_within_a_round_of_muon(options):
    """With a delay an exchange is on its way where the first rank goes: it is given up, and repeated."""
    results = run_ranks(comes_and_goes, 3, options)
    assert all(result["kept"] and result["falls"] for result in results)
    assert len({(result["sum"], result["step"]) for result in results}) == 1


def name_as_newer_torch(ranks: list[int], use_hashed_name: bool) -> str:
    """As torch 2.14 does, also where an older one runs: all groups that this process makes are counted."""
    world = dist.distributed_c10d._world
    name = f"{'_'.join(map(str, ranks))} {world.group_count}" if use_hashed_name else str(world.group_count)
    world.group_count += 1
    return name


def groups_of_some_and_of_all(rank: int) -> list[float]:
    dist.distributed_c10d._process_group_name = name_as_newer_torch
    limit, sums = timedelta(seconds=20), []
    pair = dist.new_group([0, 1], timeout=limit)
    for _ in range(2):
        own = Communicator(pair).with_own_group() if rank < 2 else None
        for group in (own.group if own else None, dist.new_group(timeout=limit)):
            if group is not None:
                one = torch.ones(1)
                dist.all_reduce(one, group=group)
                sums.append(float(one))
    return sums


def test_a_group_of_some_ranks_leaves_the_names_of_later_groups_equal():
    """Ranks that are not in it wait under the same name; and the second one of the same ranks has another name."""
    assert run_ranks(groups_of_some_and_of_all, 3) == [[2, 3, 2, 3], [2, 3, 2, 3], [3, 3]]
