"""Calls to devices and to the backends that carry their tensors, by name; calls of a steady step are counted."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import HANG_GUARD

from compopt._backends import choice as backends
from compopt._state import offload
from compopt._state import tensors as devices
from compopt._state.buckets import bucket_bytes
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
    apex = "the module amp_C is not installed" if kind == "cuda" else "no parameter is on a CUDA device"
    reason = f"torch: no triton, it has no driver for a device of this machine; no apex, {apex}"
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


HERE = Path(__file__).parents[1] / "support"
# of a step of 28 tensors in one bucket: launches at most, as they were counted, and waits of the host
MOST = {
    "AdamS": (11, 1),
    "Radius .4, sparse": (11, 1),
    "Radius .4, int8": (36, 1),
    "SCAPE .01": (36, 1),
    "Separate 16": (134, 1),
    "tracked 16, int8": (152, 1),
    "Average, int8": (46, 1),
    "LocalSteps, between": (11, 1),
    "LocalSteps, exchange": (130, 3),  # with the message in front of its payloads
    "MuonAdamW": (88, 0),
    "MuonAdamW, rows": (123, 0),
}


@pytest.fixture(scope="module")
def measured_run() -> dict[str, dict]:
    """By a process in which Triton is not interpreted. Tests of it are long, so that one worker makes the run."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "launches_run.py")]
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_GUARD, cwd=HERE.parents[1], env=environment
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", MOST)
def test_a_steady_step_launches_and_waits_no_more_than_is_said(name, measured_run):
    row = measured_run[name]
    assert row["launches"] <= MOST[name][0] and row["waits"] == MOST[name][1], row
    assert row["buckets"] == (not name.startswith("MuonAdamW"))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["a number is asked for", "a copy is waited for"])
def test_a_wait_that_is_added_is_counted(fault, measured_run):
    assert measured_run[fault]["waits"] == measured_run["AdamS"]["waits"] + 1


@pytest.mark.long
def test_the_replica_check_launches_twice_every_fourth_step_and_waits_for_nothing(measured_run):
    (without, checked) = measured_run["checked"].values()
    more = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(checked, without, strict=True)]
    assert {at for at, (launches, _) in enumerate(more, start=1) if launches} == {4, 8}
    assert all(launches <= 2 and waits == 0 for launches, waits in more)


@pytest.mark.long
def test_every_row_is_said(measured_run):
    faults = {"a number is asked for", "a copy is waited for"}
    assert measured_run.keys() == MOST.keys() | faults | {"buckets", "bucket by bucket", "checked", "TAGC .0125"}


@pytest.mark.long
def test_tagc_waits_three_times_and_launches_a_bucket_at_a_time(measured_run):
    row = measured_run["TAGC .0125"]
    assert row["buckets"] == 1 and row["waits"] == 3, row
    assert row["launches"] <= 87, row  # 8 of a bucket are a topk for each of as many ranks
    more = measured_run["bucket by bucket"]["TAGC .0125"]
    assert more["buckets"] == 3 and more["waits"] == 3, more
    assert more["launches"] - row["launches"] <= 71 * (more["buckets"] - row["buckets"]), more


@pytest.mark.long
@pytest.mark.parametrize("name", ["AdamS", "Radius .4, sparse"])
def test_a_bucket_more_is_one_launch_more(name, measured_run):
    """Of the 100 that there may be at 354.8 M parameters, in 25 buckets."""
    one, more = measured_run[name], measured_run["bucket by bucket"][name]
    assert more["buckets"] > 4 and more["launches"] - one["launches"] <= more["buckets"] - one["buckets"] + 4
    assert one["launches"] + 24 + 4 <= 100


@pytest.mark.long
def test_buckets_of_devices_are_few_and_those_of_cpus_as_they_were(measured_run):
    most, buckets = measured_run["buckets"]["most"], measured_run["buckets"]["all"]
    assert len(buckets) <= 25 and sum(size for _, size in buckets) == 4 * 354_823_168
    assert all(size <= most or count == 1 for count, size in buckets)
    assert 64 * 2**20 <= most <= 128 * 2**20 and bucket_bytes(torch.device("cpu")) == 8 * 2**20
