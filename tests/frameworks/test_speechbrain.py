"""SpeechBrain's Brain on two gloo ranks."""

from __future__ import annotations

import shutil

import pytest
from frameworks import NAMES, check_resumed, check_runs, run_framework

pytest.importorskip("speechbrain")
pytestmark = pytest.mark.slow


def test_a_brain_with_clip_accumulation_evaluation_and_a_killed_run(tmp_path):
    runs = {name: run_framework("train_speech.py", tmp_path, name) for name in NAMES}
    check_runs(runs)
    for name in ("separate", "local"):
        shutil.rmtree(tmp_path / f"out_{name}")
        run_framework("train_speech.py", tmp_path, name, KILLED_IN_STEP="12")  # of 16
        again = run_framework("train_speech.py", tmp_path, name)
        check_resumed(again, runs[name])
