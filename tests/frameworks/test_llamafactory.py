"""LLaMA-Factory's `train` on two gloo ranks, by its configuration file."""

from __future__ import annotations

import json
import shutil

import pytest
from frameworks import NAMES, check_resumed, check_runs, run_framework, write_tiny_model

pytest.importorskip("llamafactory.train.pt.trainer")
pytestmark = pytest.mark.slow
CONFIG = dict(
    model_name_or_path="model",
    stage="pt",
    do_train=True,
    finetuning_type="full",
    template="empty",
    dataset_dir=".",
    dataset="tiny",
    val_size=0.1,
    cutoff_len=32,
    overwrite_cache=True,
    use_cpu=True,
    bf16=False,
    report_to="none",
    ddp_find_unused_parameters=False,
    average_tokens_across_devices=False,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    max_grad_norm=0.5,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=8,
    logging_steps=1,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    seed=1,
)


def test_its_trainer_with_clip_accumulation_evaluation_and_a_killed_run(tmp_path):
    write_tiny_model(tmp_path)
    tiny = {"tiny": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(tiny))
    (tmp_path / "tiny.yaml").write_text(json.dumps(CONFIG))

    def train(name: str, *args: str, **environment: str) -> dict:
        arguments = "tiny.yaml", f"output_dir=out_{name}", *args
        environment |= dict(OPTIMIZER=name, DISABLE_VERSION_CHECK="1")
        return run_framework("train_factory.py", tmp_path, *arguments, **environment)

    runs = {name: train(name) for name in NAMES}
    check_runs(runs)
    for name in ("separate", "local"):
        shutil.rmtree(tmp_path / f"out_{name}")
        train(name, KILLED_IN_STEP="6")
        again = train(name, f"resume_from_checkpoint=out_{name}/checkpoint-4")
        check_resumed(again, runs[name])
