"""litgpt's `pretrain`, `finetune_full` and `finetune_lora` on two gloo ranks, by its own command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from frameworks import check_resumed, run_framework, write_tiny_model

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
    separate=("compopt.SeparateAdam", dict(dense_steps=3, rank=4)),
    local=("train_litgpt.make", {}),
)


FINETUNE = dict(
    checkpoint_dir="model",
    precision="32-true",
    data=dict(class_path="JSON", init_args=dict(json_path="tiny.json", val_split_fraction=0.2, num_workers=0)),
    devices=2,
    logger_name="csv",
    train=dict(
        save_interval=4,
        log_interval=1,
        global_batch_size=8,
        micro_batch_size=2,
        epochs=4,
        max_steps=8,
        max_seq_length=32,
        lr_warmup_steps=2,
    ),
    eval=dict(interval=4, max_iters=2, max_new_tokens=4),
)


def run_litgpt(
    command: str, folder: Path, name: str, *args: str, clip: float | None = None, **environment: str
) -> dict:
    (folder / "tiny.yaml").write_text(json.dumps(CONFIG if command == "pretrain" else FINETUNE))
    path, options = OURS[name]
    limit = {} if name == "adamw" else {"max_grad_norm": clip}
    optimizer = json.dumps({"class_path": path, "init_args": {"lr": 3e-3, **options, **limit}})
    own = ["--config", "tiny.yaml", "--out_dir", f"out_{name}", "--optimizer", optimizer]
    run = run_framework("train_litgpt.py", folder, command, *own, *args, OPTIMIZER=name, **environment)
    return {**run, "losses": [float(loss) for loss in re.findall(r"val loss (\d+\.\d+)", run["text"])]}


def pretrain(folder: Path, name: str, *args: str, **environment: str) -> dict:
    clip = ["--train.max_norm", "1.0"] if name == "adamw" else []
    return run_litgpt("pretrain", folder, name, *clip, *args, clip=1.0, **environment)


def check_losses(runs: dict[str, dict]) -> None:
    for name, run in runs.items():
        assert run["equal"], name
        assert run["losses"][-1] < run["losses"][0], name
    assert runs["average"]["losses"] == runs["adamw"]["losses"]
    assert abs(runs["average"]["size"] / runs["adamw"]["size"] - 1) < 1e-5


def test_pretrain_with_a_clip_accumulation_evaluation_and_a_killed_run(tmp_path):
    runs = {name: pretrain(tmp_path, name) for name in OURS}
    check_losses(runs)
    for name in ("separate", "local"):
        shutil.rmtree(tmp_path / f"out_{name}")
        pretrain(tmp_path, name, KILLED_IN_STEP="8")  # of 12
        check_resumed(pretrain(tmp_path, name, "--resume", "auto"), runs[name])


@pytest.fixture
def folder(tmp_path) -> Path:
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    write_tiny_model(tmp_path)  # its tokenizer is of use here
    config = Config(**CONFIG["model_config"] | dict(vocab_size=64, padded_vocab_size=64, block_size=256))
    torch.manual_seed(0)
    torch.save(GPT(config).state_dict(), tmp_path / "model/lit_model.pth")
    save_config(config, tmp_path / "model")
    words = [[f"w{(start + i * k) % 60}" for i in range(8)] for start in range(60) for k in (1, 2)]
    rows = [{"instruction": " ".join(row[:4]), "output": " ".join(row[4:])} for row in words]
    (tmp_path / "tiny.json").write_text(json.dumps(rows))
    return tmp_path


def test_finetune_full_with_a_killed_run(folder):
    runs = {name: run_litgpt("finetune_full", folder, name) for name in OURS}
    check_losses(runs)
    for name in ("separate", "local"):
        shutil.rmtree(folder / f"out_{name}")
        run_litgpt("finetune_full", folder, name, KILLED_IN_STEP="6")
        check_resumed(run_litgpt("finetune_full", folder, name, "--resume", "auto"), runs[name])


def test_finetune_lora(folder):
    check_losses({name: run_litgpt("finetune_lora", folder, name) for name in OURS})


def test_finetune_lora_inside_its_fsdp2(folder):
    names = "adamw", "average", "separate"
    no_example = "--eval.max_new_tokens", "32"  # rank 0 alone would generate it, and wait
    check_losses({name: run_litgpt("finetune_lora", folder, name, *no_example, KEEP_FSDP2="1") for name in names})
