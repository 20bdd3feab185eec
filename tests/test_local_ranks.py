"""Local steps on real ranks: what is on the wire, and when."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time

import torch
from ranks import run_ranks

import compopt


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


def over_gloo(rank: int, options: dict) -> list[tuple[int, float, int, str, int]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = compopt.LocalSteps(torch.optim.AdamW(ddp.parameters(), lr=1e-2), 4, every_warmup_steps=0, **options)
    told = []
    for t in range(12):
        time.sleep(0.1)  # of an exchange gloo has a last word
        before = received()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * t + rank))
        optimizer.zero_grad()
        (ddp(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        got = received() - before
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
            assert got == 0 or at == 1  # the other rank may not have ended the exchange before


def test_real_ranks_apply_a_delayed_exchange_at_the_same_step():
    """Fragments and a delay over gloo end where the simulator's, which has no delays, would."""
    runs = run_ranks(over_gloo, 2, {"delay": 1, "fragments": 2, "payload_dtype": "int8"})
    assert [phase for *_, phase, _ in runs[0]] == ["local", "local", *["exchanged", "local"] * 5]
    assert [told[3] for told in runs[0]] == [told[3] for told in runs[1]]


def waits_apart(rank: int) -> float:
    from compopt._wire.comm import Comm, timeout_of

    return timeout_of(Comm().apart().group).total_seconds()


def test_what_runs_beside_others_waits_as_long_as_they_do():
    assert run_ranks(waits_apart, 2) == [20.0, 20.0]  # as tests/ranks.py says of the default group
