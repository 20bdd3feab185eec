"""SpeechBrain's Brain on two gloo ranks."""

from __future__ import annotations

import shutil

import pytest
from frameworks import NAMES, check_runs, run_framework

pytest.importorskip("speechbrain")
pytestmark = pytest.mark.slow


def test_a_brain_with_clip_accumulation_evaluation_and_a_resumed_run(tmp_path):
    runs = {name: run_framework("train_speech.py", tmp_path, name) for name in NAMES}
    check_runs(runs)
    for name in ("separate", "local"):
        for checkpoint in sorted((tmp_path / f"out_{name}").iterdir())[2:]:
            shutil.rmtree(checkpoint)
        again = run_framework("train_speech.py", tmp_path, name)
        assert again["losses"] == runs[name]["losses"][2:], name
        assert again["size"] == runs[name]["size"], name
