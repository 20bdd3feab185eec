"""The prepared run on a GPU, small and on the CPU: so that it works the first time that a GPU is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_GUARD

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import gpu


def test_all_parts_fit_in_nine_minutes():
    assert sum(part.limit for part in gpu.parts(is_dry=False).values()) <= 9 * 60


def test_a_part_that_hangs_is_stopped_and_one_that_fails_is_told(tmp_path):
    hangs = gpu.Part([sys.executable, "-c", "import time; print('{\"row\": 1}', flush=True); time.sleep(999)"], 1.0)
    result = gpu.run(hangs, tmp_path / "out.txt", tmp_path)
    assert result["ended"] == "stopped after 1 s" and result["code"] < 0 and result["rows"] == [{"row": 1}]
    fails = gpu.Part([sys.executable, "-c", 'print(\'{"row": "a", "failed": "why"}\'); 1 / 0'], 60)
    result = gpu.run(fails, tmp_path / "out.txt", tmp_path)
    assert result["failed"] == ["a"] and result["code"] == 1


@pytest.mark.slow
def test_the_whole_run_on_a_cpu(tmp_path):
    command = ["bash", str(gpu.BENCH / "gpu.sh"), str(tmp_path), "--dry"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["parts"].keys() == gpu.parts(is_dry=True).keys() and summary["machine"]["commit"]
    rows = {name: len(part["rows"]) for name, part in summary["parts"].items()}
    assert rows["correct"] == rows["ranks"] >= 17 and rows["kernels"] == 21 and rows["steps-tiny"] == 12
    assert rows["fsdp"] == 4 and rows["train"] == 7 and rows["tests"] == 1
