"""transformers' Trainer and Lightning's on two gloo ranks: runs that are killed in a step, and resumed."""

from __future__ import annotations

import shutil

import pytest
from frameworks import NAMES, check_resumed, check_runs, run_framework

pytestmark = pytest.mark.slow
# of a package: its script, its checkpoint, the step of 8 or 16 in which a rank is killed
SCRIPTS = {
    "transformers": ("train_trainer.py", "checkpoint-4", "6"),
    "lightning": ("train_lightning.py", "last.ckpt", "11"),
}


@pytest.mark.parametrize("package", SCRIPTS)
def test_a_killed_run_ends_as_one_that_was_not(package, tmp_path):
    pytest.importorskip(package)
    script, checkpoint, step = SCRIPTS[package]
    runs = {name: run_framework(script, tmp_path, name) for name in NAMES}
    check_runs(runs)
    for name in ("separate", "local"):
        shutil.rmtree(tmp_path / f"out_{name}")
        run_framework(script, tmp_path, name, KILLED_IN_STEP=step)
        check_resumed(run_framework(script, tmp_path, name, f"out_{name}/{checkpoint}"), runs[name])
