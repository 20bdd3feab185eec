"""litgpt's `pretrain` on two gloo ranks, by its own command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from frameworks import run_framework

pytest.importorskip("litgpt")
pytestmark = pytest.mark.slow
SIZES = dict(n_layer=2, n_embd=64, n_head=4, block_size=32, vocab_size=16, padded_vocab_size=48, intermediate_size=128)
CONFIG = dict(
    model_name="tiny",
    model_config=dict(**SIZES, name="tiny", norm_class_name="RMSNorm", bias=False, mlp_class_name="LLaMAMLP"),
    precision="32-true",
    data="train_litgpt.Repeats",
    devices=2,
    logger_name="csv",
    train=dict(
        save_interval=6,
        log_interval=1,
        global_batch_size=8,
        micro_batch_size=2,
        max_tokens=3072,
        max_norm=1e9,
        min_lr=1e-4,
        lr_warmup_steps=2,
    ),
    eval=dict(interval=4, max_iters=2),
)
OURS = dict(
    adamw=("torch.optim.AdamW", {}),
    average=("train_litgpt.make", {}),
    separate=("compopt.SeparateAdam", dict(dense_steps=3, rank=4, max_grad_norm=1.0)),
    local=("train_litgpt.make", {}),
)


def pretrain(folder: Path, name: str, *args: str) -> dict:
    (folder / "tiny.yaml").write_text(json.dumps(CONFIG))
    path, options = OURS[name]
    optimizer = json.dumps({"class_path": path, "init_args": {"lr": 3e-3, **options}})
    clip = ["--train.max_norm", "1.0"] if name == "adamw" else []
    own = ["--config", "tiny.yaml", "--out_dir", f"out_{name}", "--optimizer", optimizer]
    run = run_framework("train_litgpt.py", folder, "pretrain", *own, *clip, *args, OPTIMIZER=name)
    return {**run, "losses": [float(loss) for loss in re.findall(r"val loss (\d+\.\d+)", run["text"])]}


def test_pretrain_with_a_clip_accumulation_evaluation_and_a_resumed_run(tmp_path):
    runs = {name: pretrain(tmp_path, name) for name in OURS}
    for name, run in runs.items():
        assert run["equal"], name
        assert run["losses"][-1] < run["losses"][0], name
    assert runs["average"]["losses"] == runs["adamw"]["losses"]
    assert abs(runs["average"]["size"] / runs["adamw"]["size"] - 1) < 1e-5
    for folder in ("final", "step-00000012"):
        shutil.rmtree(tmp_path / "out_separate" / folder)
    again = pretrain(tmp_path, "separate", "--resume", "auto")
    assert again["losses"][-1] < runs["separate"]["losses"][0]  # litgpt begins its data anew, if it is not its own
