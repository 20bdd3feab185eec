"""README.md is short and its links work; docs/launch.md runs as it stands; docs/settings.md counts bytes rightly."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import HANG_GUARD, free_port, run_ranks
from torch import nn

import compopt

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LAUNCH = (ROOT / "docs" / "launch.md").read_text()
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
LINK = re.compile(r"\]\(([^)#]+)\)")


def script() -> str:
    (text,) = re.findall(r"## A complete `train.py`\n\n```python\n(.*?)```", LAUNCH, re.S)
    return text


def launches() -> list[str]:
    """The lines that start train.py: on one machine, on the first of two, on the second."""
    return re.findall(r"^    (.*torchrun .* train\.py)$", LAUNCH, re.M)


def start(line: str, folder: Path, text: str) -> subprocess.Popen:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    (folder / "train.py").write_text(text)
    return subprocess.Popen(["bash", "-c", line], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=HANG_GUARD)
        assert process.returncode == 0, output
        return output
    finally:
        process.terminate()


def check(output: str) -> None:
    """It learned, and at the end sent little."""
    steps = re.findall(r"^(\d+) loss ([\d.]+), ([\d.]+)% of the bytes$", output, re.M)
    assert [int(step) for step, _, _ in steps] == [50, 100, 150, 200]
    assert float(steps[-1][1]) < 0.8 * float(steps[0][1]) and float(steps[-1][2]) < 20


def test_the_command_for_one_machine_starts_two_ranks(tmp_path):
    """Those for two machines, below, train the script."""
    # One write a line: torchrun's ranks write unbuffered into the same pipe.
    text = 'import os; os.write(1, f\'{os.environ["RANK"]} {os.environ["WORLD_SIZE"]}\\n\'.encode())'
    output = finish(start(launches()[0], tmp_path, text))
    assert sorted(output.splitlines()) == ["0 2", "1 2"]


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_for_two_machines_train_on_this_one(tmp_path):
    here = {"10.0.0.1": "127.0.0.1", "eth0": "lo", "29500": str(free_port())}
    lines = [re.sub("|".join(map(re.escape, here)), lambda of: here[of[0]], line) for line in launches()[1:]]
    assert [re.findall(r"--node-rank (\d)", line) for line in lines] == [["0"], ["1"]]
    first, second = (start(line, tmp_path, script()) for line in lines)
    check(finish(first))
    assert finish(second) == ""


def test_the_readme_is_short_and_its_links_lead_somewhere():
    lines = README.splitlines()
    assert len(lines) <= 110 and max(len(line) for line in lines if not line.startswith(("|", "!"))) <= 100
    assert len(script().splitlines()) <= 25
    assert [target for target in LINK.findall(README) if not (ROOT / target).exists()] == []


def test_the_readme_starts_two_sites_as_the_page_does():
    lines = re.findall(r"^    (GLOO.*torchrun .*\\\n.* train\.py)$", README, re.M)
    assert [re.sub(r"\s*\\\s*", " ", line) for line in lines] == launches()[1:]


def test_every_measured_figure_of_the_readme_is_next_to_a_link_to_its_table():
    """In its paragraph, its list item, or the paragraph behind its table."""
    blocks = re.split(r"\n\n(?!\|)|\n(?=- |\d\. )", re.sub(r"^(    .*|\| .* \|)$", "", README, flags=re.M))
    figures = [block for block in blocks if re.search(r"\d %|\d\.\d{3}|bytes per parameter|Mbit/s:", block)]
    assert len(figures) > 5
    assert [block for block in figures if "(bench/RESULTS.md#" not in block] == []


@pytest.mark.parametrize(
    ("address", "wanted"), [("", []), ("https://a.b/", ["https://a.b/docs/x.md", "https://a.b/p"])]
)
def test_a_package_index_shows_no_relative_link(address, wanted):
    described = runpy.run_path(str(ROOT / "setup.py"))["described"]
    assert LINK.findall(described("[x](docs/x.md) and\n![p](p)\n", address)) == wanted
    assert all(target.startswith("http") for target in LINK.findall(described(README, address)))
    assert described("[kept](https://c.d)", address) == "[kept](https://c.d)"


def share(rank: int) -> float:
    """Of a dense step's bytes, for the four matrices of a GPT block of width 128."""
    sizes = [(128, 384), (128, 128), (128, 512), (512, 128)]
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = compopt.SeparateAdam(params, projection="tracked", rank=16, payload_dtype="int8", dense_steps=1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    assert optimizer.stats.phase == "projected"
    return optimizer.stats.bytes_sent / optimizer.stats.bytes_dense


def test_the_stated_share_of_bytes_is_what_is_counted():
    rows = dict(re.findall(r"^\| (128|768|4096) \| ([\d.]+) %", SETTINGS, re.M))
    assert len(rows) == 3
    for width, percent in rows.items():  # rank * (rows + columns) values of 1 + 4 / 128 bytes, of 4 * rows * columns
        by_formula = 100 * 16 * 16 * int(width) * (1 + 4 / 128) / (4 * 12 * int(width) ** 2)
        assert float(percent) == pytest.approx(by_formula, rel=0.04)
    counted = float(re.search(r"\(([\d.]+) % counted", SETTINGS)[1])
    assert [round(100 * of, 1) for of in run_ranks(share, 2)] == [counted, counted]
