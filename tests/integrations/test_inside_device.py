"""TAGC inside FSDP2 on a device: the bits of the CPU, and in backward no look at it but for the size of the union."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_GUARD
from torch.utils import backend_registration

if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch has no devices in Python", allow_module_level=True)

from inside_device_run import CASES

HERE = Path(__file__).parents[1] / "support"


@functools.cache
def ran() -> dict[str, dict]:
    command = [sys.executable, str(HERE / "inside_device_run.py")]
    child = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD, cwd=HERE.parents[1])
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_reduce_scatter_has_the_bits_of_the_cpu_and_the_host_reads_only_how_large_the_union_is(name):
    results = ran()[name]
    assert results["differs"] == [] and results["mixed"] == {}
    assert results["looks"] == {} and results["reads"] == 2 * results["steps"]
    assert results["owed"] == (name in ("float32", "rounded"))
