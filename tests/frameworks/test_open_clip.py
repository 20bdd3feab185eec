"""open_clip's training, and an optimizer of timm's registry, on two gloo ranks: features gathered through autograd."""

from __future__ import annotations

import pytest
from frameworks import NAMES, check_runs, run_framework

pytest.importorskip("open_clip_train.main")
pytestmark = pytest.mark.slow


def test_training_with_gathered_features_and_cached_backwards(tmp_path):
    runs = {name: run_framework("train_open_clip.py", tmp_path, name) for name in NAMES}
    check_runs(runs)
    arguments = "--epochs", "3", "--resume", "logs/separate/checkpoints/epoch_2.pt"
    again = run_framework("train_open_clip.py", tmp_path, "separate", *arguments, "--name", "again")
    assert again["equal"] and again["losses"][-1] < runs["separate"]["losses"][0]
