"""timm's train.py on two gloo ranks. The wheel has it not: TIMM_TRAIN=FOLDER/train.py, of a clone."""

from __future__ import annotations

import os

import pytest
from frameworks import NAMES, check_resumed, check_runs, run_framework

pytest.importorskip("timm")
SCRIPT = os.environ.get("TIMM_TRAIN", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SCRIPT, reason="TIMM_TRAIN does not name timm's train.py")]
ARGUMENTS = (
    "--data-dir data --device cpu --device-modules timm_optimizers --model vit_tiny_patch16_224 --num-classes 4 "
    "--model-kwargs embed_dim=64 depth=2 num_heads=2 img_size=32 patch_size=16 --img-size 32 --batch-size 8 "
    "--workers 1 --no-prefetcher --no-aug --lr 1e-3 --epochs 3 --warmup-epochs 1 --sched cosine --weight-decay 0.01 "
    "--grad-accum-steps 2 --output out"
)


def test_its_script_with_clip_accumulation_evaluation_and_a_killed_run(tmp_path):
    from PIL import Image

    for i, colour in enumerate([(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0)]):
        for split, size in ("train", 16), ("validation", 4):
            folder = tmp_path / "data" / split / str(i)
            folder.mkdir(parents=True)
            for j in range(size):
                noise = Image.effect_noise((32, 32), 10 + 4 * j).convert("RGB")
                Image.blend(noise, Image.new("RGB", (32, 32), colour), 0.3).save(folder / f"{j}.png")

    def train(name: str, *args: str, **environment: str) -> dict:
        clip = ["--clip-grad", "1.0"] if name == "adamw" else []
        arguments = *ARGUMENTS.split(), "--opt", name, "--experiment", name, *clip, *args
        return run_framework(SCRIPT, tmp_path, *arguments, **environment)

    runs = {name: train(name) for name in NAMES}
    check_runs(runs)
    for name in ("separate", "local"):
        train(name, "--experiment", f"{name}_killed", KILLED_IN_STEP="6")  # of 6
        again = train(name, "--resume", f"out/{name}_killed/last.pth.tar", "--experiment", "again")
        check_resumed(again, runs[name])
