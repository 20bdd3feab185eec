"""Calls of a steady step on an accelerator, as bench/launches.py counts them: a wait that is added shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import HANG_GUARD

from compopt._state.buckets import bucket_bytes

pytestmark = pytest.mark.long
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
    "MuonAdamW": (93, 0),
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


@pytest.mark.parametrize("name", MOST)
def test_a_steady_step_launches_and_waits_no_more_than_is_said(name, measured_run):
    row = measured_run[name]
    assert row["launches"] <= MOST[name][0] and row["waits"] == MOST[name][1], row
    assert row["buckets"] == (name != "MuonAdamW")


@pytest.mark.parametrize("fault", ["a number is asked for", "a copy is waited for"])
def test_a_wait_that_is_added_is_counted(fault, measured_run):
    assert measured_run[fault]["waits"] == measured_run["AdamS"]["waits"] + 1


def test_the_replica_check_launches_twice_every_fourth_step_and_waits_for_nothing(measured_run):
    (without, checked) = measured_run["checked"].values()
    more = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(checked, without, strict=True)]
    assert {at for at, (launches, _) in enumerate(more, start=1) if launches} == {4, 8}
    assert all(launches <= 2 and waits == 0 for launches, waits in more)


def test_every_row_is_said(measured_run):
    faults = {"a number is asked for", "a copy is waited for"}
    assert measured_run.keys() == MOST.keys() | faults | {"buckets", "bucket by bucket", "checked", "TAGC .0125"}


def test_tagc_waits_three_times_and_launches_a_bucket_at_a_time(measured_run):
    row = measured_run["TAGC .0125"]
    assert row["buckets"] == 1 and row["waits"] == 3, row
    assert row["launches"] <= 87, row  # 8 of a bucket are a topk for each of as many ranks


@pytest.mark.parametrize("name", ["AdamS", "Radius .4, sparse", "SCAPE .01"])
def test_a_bucket_more_is_one_launch_more(name, measured_run):
    """Of the 100 that there may be at 354.8 M parameters, in 25 buckets."""
    one, more = measured_run[name], measured_run["bucket by bucket"][name]
    assert more["buckets"] > 4 and more["launches"] - one["launches"] <= more["buckets"] - one["buckets"] + 4
    assert one["launches"] + 24 + 4 <= 100


def test_buckets_of_devices_are_few_and_those_of_cpus_as_they_were(measured_run):
    most, buckets = measured_run["buckets"]["most"], measured_run["buckets"]["all"]
    assert len(buckets) <= 25 and sum(size for _, size in buckets) == 4 * 354_823_168
    assert all(size <= most or count == 1 for count, size in buckets)
    assert 64 * 2**20 <= most <= 128 * 2**20 and bucket_bytes(torch.device("cpu")) == 8 * 2**20
