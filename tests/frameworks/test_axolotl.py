"""axolotl's `train` on two gloo ranks: a configuration that names a plug-in."""

from __future__ import annotations

import json
import shutil

import pytest
from frameworks import NAMES, check_resumed, check_runs, run_framework, write_tiny_model

pytest.importorskip("axolotl.cli.train")
pytestmark = pytest.mark.slow
CONFIG = dict(
    base_model="model",
    tokenizer_type="PreTrainedTokenizerFast",
    plugins=["axolotl_plugin.Plugin"],
    datasets=[dict(path="texts.jsonl", ds_type="json", type="completion")],
    val_set_size=0.1,
    dataset_prepared_path="prepared",
    sequence_len=32,
    attn_implementation="sdpa",
    bf16=False,
    fp16=False,
    tf32=False,
    ddp_find_unused_parameters=False,
    optimizer="adamw_torch",
    learning_rate=3e-3,
    lr_scheduler="cosine",
    warmup_steps=2,
    max_grad_norm=0.5,
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=8,
    logging_steps=1,
    save_steps=4,
    eval_steps=4,
    seed=1,
)


def test_a_plugin_with_clip_accumulation_evaluation_and_a_killed_run(tmp_path):
    write_tiny_model(tmp_path)

    def train(name: str, *args: str, **environment: str) -> dict:
        (tmp_path / "tiny.yaml").write_text(json.dumps(CONFIG | {"output_dir": f"out_{name}"}))
        environment |= dict(OPTIMIZER=name, ACCELERATE_USE_CPU="true", AXOLOTL_DO_NOT_TRACK="1")
        return run_framework("-m axolotl.cli.train", tmp_path, "tiny.yaml", *args, **environment)

    runs = {name: train(name) for name in NAMES}
    check_runs(runs)
    norms = zip(runs["average"]["norms"], runs["adamw"]["norms"], strict=True)
    assert all(abs(a - b) < 1e-5 for a, b in norms)
    for name in ("separate", "local"):
        shutil.rmtree(tmp_path / f"out_{name}")
        train(name, KILLED_IN_STEP="6")
        again = train(name, f"--resume_from_checkpoint=out_{name}/checkpoint-4")
        check_resumed(again, runs[name])
