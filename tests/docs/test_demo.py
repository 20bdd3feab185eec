"""examples/demo.py and `make demo`: what it installs, computes and says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_GUARD
from test_examples import load

import compopt

ROOT = Path(__file__).parents[2]
# Stands for Python, and for .venv/bin/python, which it "makes"; prints arguments. An index answers if $REACHED is 0.
PYTHON = """#!/bin/sh
echo "called $*"
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  *urlopen*) exit $REACHED ;;
esac
"""


def made(folder: Path, target: str, answers: bool = True, *words: str) -> list[str]:
    """Return what `make TARGET` says and calls in an empty folder."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        if not (folder / name).exists():  # a newer one would be installed again
            shutil.copy(ROOT / name, folder)
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    command = ["make", "--no-print-directory", target, f"PYTHON={folder}/python", *words]
    environment = os.environ | {"REACHED": "0" if answers else "1", "MAKEFLAGS": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_GUARD)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def installs(lines: list[str]) -> list[str]:
    return [line.split("constraints.txt ")[1] for line in lines if "pip install" in line]


def test_make_demo_first_says_what_it_will_do_and_how_long(tmp_path):
    lines = made(tmp_path, "demo")
    first = " ".join(lines[: next(i for i, line in enumerate(lines) if line.startswith("called"))])
    assert "two processes" in first and "minutes" in first and "MB" in first
    assert lines[-1] == "called examples/demo.py"
    again = made(tmp_path, "demo")
    assert "minutes" in " ".join(again) and "MB" not in " ".join(again) and installs(again) == []


def test_make_demo_installs_torch_for_cpus_and_the_demo_alone(tmp_path):
    index = "--index-url https://download.pytorch.org/whl/cpu torch"
    assert installs(made(tmp_path, "demo")) == [index, "--editable .[demo]"]
    assert installs(made(tmp_path, ".venv/ready")) == ["--quiet --editable .[dev]"]


def test_make_asks_the_registry_where_no_index_answers_or_is_named(tmp_path):
    for number, (answers, words) in enumerate(((False, []), (True, ["TORCH_INDEX="]))):
        folder = tmp_path / str(number)
        folder.mkdir()
        lines = made(folder, "demo", answers, *words)
        assert installs(lines) == ["torch", "--editable .[demo]"]
        assert any("from your package registry" in line for line in lines)


def result(ranks: int, dense: float, compressed: float | None, ms: float = 50.0, val: float = 2.0) -> dict:
    """A run of 100 steps, half of them dense where there are compressed ones."""
    mean = dense if compressed is None else (dense + compressed) / 2
    evals = [{"step": 50, "bytes": 50 * dense, "val_loss": 3.0}, {"step": 100, "bytes": 100 * mean, "val_loss": val}]
    sizes = {"dense": dense, "compressed": compressed}
    return {"config": {"ranks": ranks, "steps": 100}, "evals": evals, "bytes_per_step": sizes, "step_ms": ms}


def test_demo_computes_step_times_by_hand(tmp_path):
    demo = load("demo")
    # 1 250 000 bytes on 2 ranks: a ring sends each byte once, 10 Mbit, 100 ms at 100 Mbit/s; on 4 ranks 1.5 times.
    assert demo.step_ms(result(2, 1_250_000, None), 100e6) == pytest.approx(150.0)
    assert demo.step_ms(result(4, 1_250_000, None), 100e6) == pytest.approx(200.0)
    assert demo.step_ms(result(2, 1_250_000, 125_000), 100e6) == pytest.approx(60.0)
    both = {"dense": result(2, 1_250_000, None), "ours": result(2, 1_250_000, 125_000)}
    head, dense, ours = demo.table(both).splitlines()
    assert head.endswith("at 100 Mbit/s") and dense.split()[-2:] == ["150", "(1.00)"]
    figures = "ours 2.000 (1.00) 0.12 (0.10) 69 (0.55) 50 (1.00) 50 (0.98) 51 (0.85) 60 (0.40)"
    assert " ".join(ours.split()) == figures
    demo.plot(both, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_demo_says_what_was_saved_and_on_which_links():
    demo = load("demo")
    runs = {"dense": result(2, 1_250_000, None), "slower": result(2, 1_250_000, 125_000, ms=55.0, val=2.1)}
    runs |= {"quicker": result(2, 1_250_000, 125_000, ms=49.0), "more": result(2, 1_250_000, 2_500_000, val=1.9)}
    slower, quicker, more = demo.sentences(runs)
    # 56.25 MB are saved in 100 steps, 450 Mbit, and 0.5 s lost: at 900 Mbit/s both are level.
    assert slower.startswith(
        "slower: 55% of AdamW's bytes in all, 1.050 of its loss; it pays on links below 900 Mbit/s"
    )
    assert "55%" in quicker and "pays on every link" in quicker
    assert "150%" in more and "0.950" in more and "pays on no link" in more


def test_demo_has_every_class_that_is_recommended():
    demo = load("demo")
    classes = {"SeparateAdam", "LocalSteps", "RadiusAdamW", "ScapeAdamS", "TagcAdamW"}
    assert classes < set(compopt.__all__) and set(demo.RUNS) == {"DDP + AdamW", *classes}


def test_demo_says_which_run_failed(tmp_path, monkeypatch):
    demo = load("demo")
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    monkeypatch.setattr(demo, "LAUNCHER", [sys.executable])
    monkeypatch.setattr(demo, "SCRIPT", tmp_path / "absent.py")
    with pytest.raises(RuntimeError, match=r"'DDP \+ AdamW' ended with exit code 2.*repeat it alone.*absent.py"):
        demo.train("DDP + AdamW", [], limit=HANG_GUARD)
    (tmp_path / "absent.py").write_text("import time; time.sleep(1e6)")
    with pytest.raises(RuntimeError, match="was stopped after 1 s"):
        demo.train("DDP + AdamW", [], limit=1)


def test_examples_are_short_and_formatted_like_all_else():
    for script in ("demo.py", "train_gpt.py"):
        text = (ROOT / "examples" / script).read_text()
        assert len(text.splitlines()) <= 165 and "fmt: skip" not in text
