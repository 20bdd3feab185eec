"""TRL's SFTTrainer and GRPOTrainer, on two gloo ranks."""

from __future__ import annotations

import shutil

import pytest
from frameworks import NAMES, check_resumed, check_runs, run_framework

pytest.importorskip("trl")
pytestmark = pytest.mark.slow


def test_sft_with_clip_accumulation_evaluation_and_a_killed_run(tmp_path):
    runs = {name: run_framework("train_trl.py", tmp_path, name, "sft") for name in NAMES}
    check_runs(runs)
    norms = zip(runs["average"]["norms"], runs["adamw"]["norms"], strict=True)
    assert all(abs(a - b) < 1e-3 for a, b in norms)
    for name in ("separate", "local"):
        shutil.rmtree(tmp_path / f"out_sft_{name}")
        run_framework("train_trl.py", tmp_path, name, "sft", KILLED_IN_STEP="6")
        again = run_framework("train_trl.py", tmp_path, name, "sft", f"out_sft_{name}/checkpoint-4")
        check_resumed(again, runs[name])


def test_grpo_generates_with_the_model_that_it_trains(tmp_path):
    runs = {name: run_framework("train_trl.py", tmp_path, name, "grpo") for name in NAMES}
    for name, run in runs.items():
        run["losses"] = [-reward for reward in run["rewards"]]
        assert run["equal"], name
    check_runs({name: run for name, run in runs.items() if name != "local"})
