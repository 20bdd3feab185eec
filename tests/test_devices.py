"""What is asked of devices and of the backends that carry their tensors, by the names that other machines have."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from compopt._ops import backends
from compopt._state import devices
from compopt._wire.comm import Comm

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    "said, device, backend",
    [
        ("cpu:gloo", "cpu", "gloo"),  # of init_process_group() too, whose get_backend() is "undefined"
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,xpu:xccl", "xpu:0", "xccl"),
        ("cpu:mpi,cuda:mpi", "cuda:1", "mpi"),
        ("cuda:nccl", "cpu", ""),
    ],
)
def test_what_a_group_can_do_follows_from_the_backend_of_the_tensors_device(monkeypatch, said, device, backend):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: said)
    comm, device = Comm(alone=True), torch.device(device)
    assert comm.backend_of(device) == backend
    assert comm.has_or(device) == (backend in ("gloo", "mpi"))
    assert not comm.can_look_up(device)  # without a board
    comm.board = object()
    assert comm.can_look_up(device) == (backend == "gloo")


def test_the_cpu_and_tensors_without_numbers_are_no_accelerators():
    for device in (CPU, META, torch.device("lazy")):
        assert not devices.is_accelerator(device) and not devices.has_streams(device)
        devices.synchronize(device)
        tensor = torch.ones(3)
        assert devices.pinned(tensor, device) is tensor
    assert devices.is_accelerator(torch.device("cuda")) and devices.has_streams(torch.device("xpu:1"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_without_an_accelerator_the_cpu_is_where_one_would_train():
    assert devices.here() == CPU


@pytest.mark.parametrize("kind", ["xpu", "cuda", "meta"])
def test_why_kernels_are_not_taken_on_other_devices(monkeypatch, kind):
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "_installed", lambda module: module == "triton")
    monkeypatch.setattr(backends, "has_triton_driver", lambda: False)
    apex = "the module amp_C is not installed" if kind == "cuda" else "no parameter is on a CUDA device"
    reason = f"torch: no triton, it has no driver for a device of this machine; no apex, {apex}"
    assert backends.choose({kind}).reason == reason


def test_triton_is_tried_on_whatever_device_it_has_a_driver_for(monkeypatch):
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "_installed", lambda module: True)
    monkeypatch.setattr(backends, "has_triton_driver", lambda: True)
    made = []
    monkeypatch.setattr(backends, "_make", lambda name, kinds: made.append((name, kinds)) or backends.Ops())
    backends.choose({"xpu"})
    assert made == [("triton", {"xpu"})]
