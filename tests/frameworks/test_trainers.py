"""transformers' Trainer and Lightning's on two gloo ranks: runs that are killed in a step, and resumed."""

from __future__ import annotations

import shutil

import pytest
from frameworks import check_resumed, run_framework

pytestmark = pytest.mark.slow
# of a package: its script, its checkpoint, the step of 8 or 16 in which a rank is killed, and the optimizer
SCRIPTS = {
    "transformers": ("train_trainer.py", "checkpoint-4", "6", "local"),
    "lightning": ("train_lightning.py", "last.ckpt", "11", "separate"),
}


@pytest.mark.parametrize("package", SCRIPTS)
def test_a_killed_run_ends_as_one_that_was_not(package, tmp_path):
    pytest.importorskip(package)
    script, checkpoint, step, name = SCRIPTS[package]
    undisturbed = run_framework(script, tmp_path, name)
    shutil.rmtree(tmp_path / f"out_{name}")
    run_framework(script, tmp_path, name, KILLED_IN_STEP=step)
    check_resumed(run_framework(script, tmp_path, name, f"out_{name}/{checkpoint}"), undisturbed)
