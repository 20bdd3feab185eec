"""Calls to devices and to the backends that carry their tensors, by the names that other machines have."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

from compopt._ops import backends
from compopt._state import offload
from compopt._state import tensors as devices
from compopt._wire.collectives import Communicator

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    "backends, device, backend",
    [
        ("cpu:gloo", "cpu", "gloo"),  # of init_process_group() too, whose get_backend() is "undefined"
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,xpu:xccl", "xpu:0", "xccl"),
        ("cpu:mpi,cuda:mpi", "cuda:1", "mpi"),
        ("cuda:nccl", "cpu", ""),
    ],
)
def test_what_a_group_can_do_follows_from_the_backend_of_the_tensors_device(monkeypatch, backends, device, backend):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    comm, device = Communicator(single_process=True), torch.device(device)
    assert comm.get_backend(device) == backend
    assert comm.has_bitwise_or(device) == (backend in ("gloo", "mpi"))
    assert not comm.can_poll_store(device)  # without a store
    comm.store = object()
    assert comm.can_poll_store(device) == (backend == "gloo")


def test_the_cpu_and_tensors_without_numbers_are_no_accelerators():
    for device in (CPU, META, torch.device("lazy")):
        assert not devices.is_accelerator(device) and not devices.has_streams(device)
        devices.synchronize(device)
        tensor = torch.ones(3)
        assert devices.pin(tensor, device) is tensor
    assert devices.is_accelerator(torch.device("cuda")) and devices.has_streams(torch.device("xpu:1"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_without_an_accelerator_the_cpu_is_where_one_would_train():
    assert devices.get_device() == CPU


def test_where_there_is_none_it_is_not_asked_which(monkeypatch):
    """torch 2.6 raises."""

    def raises():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    assert devices.get_device() == CPU


@pytest.mark.parametrize("kind", ["xpu", "cuda", "meta"])
def test_why_kernels_are_not_taken_on_other_devices(monkeypatch, kind):
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "is_installed", lambda module: module == "triton")
    monkeypatch.setattr(backends, "has_triton_driver", lambda: False)
    reason = "torch: no triton, it has no driver for a device of this machine"
    assert backends.choose_backend({kind}).reason == reason


def test_triton_is_tried_on_whatever_device_it_has_a_driver_for(monkeypatch):
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "is_installed", lambda module: True)
    monkeypatch.setattr(backends, "has_triton_driver", lambda: True)
    made = []
    monkeypatch.setattr(backends, "make_backend", lambda name: made.append(name) or backends.Ops())
    backends.choose_backend({"xpu"})
    assert made == ["triton"]


class Said:
    """Stands for a device's module and its streams: what was asked of them, in order."""

    def __init__(self):
        self.log, self.current = [], "work"

    def Stream(self, device):
        return OneOf(self, f"stream {sum(word.startswith('Stream') for word in self.log)}")

    def current_stream(self, device):
        return OneOf(self, "work")

    @contextlib.contextmanager
    def stream(self, stream):
        self.current = stream.name
        yield
        self.current = "work"


class OneOf:
    def __init__(self, module, name):
        self.module, self.name = module, name
        module.log.append(f"Stream {name}")

    def wait_event(self, event):
        self.module.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.module.log.append(f"{self.name} records")
        return f"what {self.name} has done"

    def synchronize(self):
        self.module.log.append(f"the host waits for {self.name}")


class Target:
    """A tensor that says on which stream it is copied to."""

    def __init__(self, module):
        self.module = module

    def copy_(self, source, non_blocking):
        self.module.log.append(f"copy of {source} on {self.module.current}" if non_blocking else "a copy that waits")


def test_streams_of_any_device_are_asked_in_torch_cudas_words(monkeypatch):
    module = Said()
    monkeypatch.setattr(offload, "get_device_module", lambda device: module)
    streams = offload.DeviceStreams(torch.device("xpu:1"))
    assert set(streams.streams) == {"in", "out"} and streams.streams["in"].name != streams.streams["out"].name
    into, out = (streams.streams[name].name for name in ("in", "out"))

    def log(action) -> list[str]:
        module.log.clear()
        action()
        return [word for word in module.log if not word.startswith("Stream")]

    assert log(lambda: streams.copy("in", Target(module), "x", None)) == [f"copy of x on {into}", f"{into} records"]
    expected = [f"{out} waits for an event", f"copy of y on {out}", f"{out} records"]
    assert log(lambda: streams.copy("out", Target(module), "y", "an event")) == expected
    assert streams.copy("out", Target(module), "y", None) == f"what {out} has done"
    assert log(streams.record_work) == ["work records"] and streams.record_work() == "what work has done"
    assert log(lambda: streams.delay_work("an event")) == ["work waits for an event"]
    assert log(streams.finish) == [f"the host waits for {into}", f"the host waits for {out}"]
