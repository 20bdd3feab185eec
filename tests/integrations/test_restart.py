"""The recipe for restarts, as the pages have it: how torchrun is called, how checkpoints are saved and loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from ranks import HANG_GUARD
from torch import nn

import compopt

ROOT = Path(__file__).parents[2]
DOCS = {page.name: page.read_text() for page in (ROOT / "docs").glob("*.md")}
PRIVATE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
LOAD, *_ = re.findall(r"^```python\n(.*?)^```$", DOCS["reliability.md"], re.M | re.S)
SAVE, *_ = re.findall(r"^```python\n(.*?)^```$", DOCS["checkpoints.md"], re.M | re.S)

SCRIPT = """
import os, signal
import torch, torch.distributed as dist
import compopt

dist.init_process_group("gloo")
rank, path = dist.get_rank(), "checkpoint.pt"
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 80))
optimizer = compopt.SeparateAdam(model.parameters(), dense_steps=2)
{load}
first = optimizer.param_groups[0]["step"]
for step in range(first, 12):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 2:
{save}
    if step == 7 and rank == 1 and first == 0:
        os.kill(os.getpid(), signal.SIGKILL)
os.write(1, f"rank {{rank}} began after step {{first}} and ended after {{step + 1}}\\n".encode())
del model
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_rank_is_restarted_from_the_checkpoint(tmp_path):
    """The survivor has named what happened, and what comes next."""
    (tmp_path / "train.py").write_text(SCRIPT.format(load=LOAD, save=textwrap.indent(SAVE, 8 * " ")))
    lines = re.findall(r"^    (export .*|torchrun .*)$", DOCS["reliability.md"], re.M)[:2]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_GUARD)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} began after step 6 and ended after 12" for rank in (0, 1)]
    assert "CommunicationError" not in done.stderr or "torchrun starts all ranks again" in done.stderr


def test_every_page_restarts_in_the_same_way():
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py"), ROOT / "README.md"]
    texts = {file.name: file.read_text() for file in files}
    restarting = [name for name, text in texts.items() if re.search(r"torchrun .*--max-restarts", text)]
    assert {"reliability.md", "elastic.md", "elastic.py"} <= {*restarting}
    assert [name for name in restarting if PRIVATE_STORE not in texts[name]] == []


def test_a_checkpoint_that_is_cut_short_leaves_the_one_before(tmp_path, monkeypatch):
    model, path = nn.Module(), str(tmp_path / "checkpoint.pt")
    model.module = nn.Linear(64, 80)
    optimizer = compopt.SeparateAdam(model.module.parameters())
    names = {"os": os, "torch": torch, "optimizer": optimizer, "model": model, "rank": 0, "path": path}
    exec(SAVE, names)
    before = {name: p.clone() for name, p in model.module.state_dict().items()}

    def interrupted(value: object, file: str) -> None:
        Path(file).write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    nn.init.zeros_(model.module.weight)
    with pytest.raises(KeyboardInterrupt):
        exec(SAVE, names)
    exec(LOAD, names)
    assert torch.equal(model.module.weight, before["weight"])


def test_whatever_is_saved_is_renamed():
    """Also in the examples."""
    texts = {file.name: file.read_text() for file in (ROOT / "examples").glob("*.py")} | DOCS
    saves = {name: len(re.findall(r"^ *torch\.save\(", text, re.M)) for name, text in texts.items()}
    saving = {name: count for name, count in saves.items() if count}
    assert saving.keys() == {"checkpoints.md", "nanogpt.py", "train_gpt.py"}
    assert {name: texts[name].count("os.replace(") for name in saving} == saving
