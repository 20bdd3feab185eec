"""sentence-transformers on two gloo ranks: features gathered through autograd, several backwards for one step."""

from __future__ import annotations

import shutil

import pytest
from frameworks import NAMES, check_resumed, check_runs, run_framework

pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.slow


def test_a_cached_loss_over_the_features_of_all_ranks(tmp_path):
    runs = {name: run_framework("train_sentences.py", tmp_path, name) for name in NAMES}
    check_runs(runs)
    assert runs["separate"]["sent"][-1] < 0.2 * runs["average"]["sent"][-1]  # once in a step
    shutil.rmtree(tmp_path / "out_separate")
    run_framework("train_sentences.py", tmp_path, "separate", KILLED_IN_STEP="6")
    again = run_framework("train_sentences.py", tmp_path, "separate", "out_separate/checkpoint-4")
    check_resumed(again, runs["separate"])
