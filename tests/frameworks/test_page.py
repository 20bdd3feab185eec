"""The blocks of docs/frameworks.md run as they stand, each in its own process, where the framework is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_GUARD

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs/frameworks.md"
TITAN = "from torchtitan.models.llama3.config_registry import llama3_8b\n"
# package: the section of the page, lines before its first block, lines after it, arguments
BLOCKS = {
    "torchtitan": ("torchtitan", TITAN, "assert my_config().optimizer.make", []),
    "litgpt": ("litgpt", "", "", ["pretrain", "--help"]),
    "axolotl": ("axolotl", "", "assert issubclass(Plugin, BasePlugin)", []),
    "llamafactory": ("LLaMA-Factory", "", "", ["--help"]),
    "timm": (
        "timm",
        "import torch\nfrom timm.optim import create_optimizer_v2\n",
        "print(create_optimizer_v2(torch.nn.Linear(8, 8), 'separate', lr=0.1, max_grad_norm=1.0))",
        [],
    ),
    "open_clip_train": ("open_clip", "", "", ["--help"]),
    "speechbrain": (
        "SpeechBrain",
        "import compopt, speechbrain as sb, torch\nMyBrain, modules = sb.Brain, {'m': torch.nn.Linear(8, 8)}\n",
        "brain.init_optimizers(); assert isinstance(brain.optimizer, compopt.SeparateAdam)",
        [],
    ),
}


def read_blocks(section: str) -> list[str]:
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("package", BLOCKS)
def test_the_first_block_of_a_section_runs(package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    section, before, after, arguments = BLOCKS[package]
    block = read_blocks(section)[0].replace(", ...)", ")")
    (tmp_path / "my_optimizers.py").write_text(read_blocks("timm")[0])
    (tmp_path / "mine.py").write_text(before + block + after)
    command = [sys.executable, "mine.py", *arguments]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_GUARD)
    assert run.returncode == 0, run.stderr[-3000:]
