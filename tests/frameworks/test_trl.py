"""TRL's SFTTrainer and GRPOTrainer, on two gloo ranks."""

from __future__ import annotations

import shutil

import pytest
from frameworks import NAMES, check_runs, run_framework

pytest.importorskip("trl")
pytestmark = pytest.mark.slow


def test_sft_with_clip_accumulation_evaluation_and_a_resumed_run(tmp_path):
    runs = {name: run_framework("train_trl.py", tmp_path, name, "sft") for name in NAMES}
    check_runs(runs)
    norms = zip(runs["average"]["norms"], runs["adamw"]["norms"], strict=True)
    assert all(abs(a - b) < 1e-3 for a, b in norms)
    folder = tmp_path / "out_sft_separate"
    shutil.rmtree(folder / "checkpoint-8")
    again = run_framework("train_trl.py", tmp_path, "separate", "sft", folder / "checkpoint-4")
    assert again["size"] == runs["separate"]["size"]


def test_grpo_generates_with_the_model_that_it_trains(tmp_path):
    runs = {name: run_framework("train_trl.py", tmp_path, name, "grpo") for name in NAMES}
    for name, run in runs.items():
        run["losses"] = [-reward for reward in run["rewards"]]
        assert run["equal"], name
    check_runs({name: run for name, run in runs.items() if name != "local"})
