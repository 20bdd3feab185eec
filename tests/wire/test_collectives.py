"""Calls to a backend that averages and gathers by itself, as NCCL; on torch's fake group."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from _fake_ranks import fake_ranks

from compopt._wire.codec import PAYLOAD_CODECS
from compopt._wire.collectives import Communicator, bitwise_or_rows
from compopt._wire.payload import Payload
from compopt._wire.requests import AllGather, AllReduceMean

SINGLE = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@pytest.fixture
def called(monkeypatch) -> list:
    results = []

    def noted(name: str, call):
        @functools.wraps(call)
        def note(*args, **options):
            results.append((name, *[a for a in args if not isinstance(a, torch.Tensor | list)]))
            return call(*args, **options)

        return note

    for name in ("all_reduce", "all_gather", SINGLE):
        monkeypatch.setattr(dist, name, noted(name, getattr(dist, name)))
    return results


@pytest.mark.parametrize("backend, mean", [("nccl", 8.0), ("gloo", 2.0), ("xccl", 2.0)])
def test_a_mean_is_the_backends_where_it_has_one(monkeypatch, backend, mean, called):
    monkeypatch.setattr(Communicator, "get_backend", lambda comm, device: backend)
    with fake_ranks(4):
        answer = Communicator().start(AllReduceMean(torch.full((3,), 8.0))).wait()  # a sum leaves this rank's numbers
    assert answer.tolist() == [mean] * 3
    assert called == [("all_reduce", dist.ReduceOp.AVG)] if backend == "nccl" else [("all_reduce",)]


@pytest.mark.parametrize("backend, name", [("nccl", SINGLE), ("xccl", SINGLE), ("gloo", "all_gather")])
def test_a_gather_is_into_one_tensor_where_the_backend_can(monkeypatch, backend, name, called):
    monkeypatch.setattr(Communicator, "get_backend", lambda comm, device: backend)
    payload = Payload(torch.ones(300), 1, 0, [299], PAYLOAD_CODECS["int8"], torch.empty(299), (1,))
    with fake_ranks(4):
        rows = Communicator().start(AllGather(torch.arange(6.0).view(2, 3))).wait()
        answer = Communicator().start(AllReduceMean(payload)).wait()
        while answer is not payload:
            answer = answer.wait()
    assert rows.shape == (4, 2, 3) and called == [(name,)] * 2
    if name == SINGLE:
        assert torch.equal(rows, torch.arange(6.0).view(2, 3).expand(4, 2, 3))


@pytest.mark.parametrize("ranks", range(1, 10))
def test_the_or_of_rows_leaves_none_out(ranks):
    rows = torch.zeros(ranks, 12, dtype=torch.uint8)
    rows[torch.arange(ranks), torch.arange(ranks)] = 1 << torch.arange(ranks).to(torch.uint8) % 8
    assert torch.equal(bitwise_or_rows(rows), rows.sum(0, dtype=torch.uint8))
