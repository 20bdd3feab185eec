"""The example scripts through their real command lines: a tiny model, a few steps, one process and two; the demo."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from in_place import EXAMPLES, as_torchrun_would, example
from ranks import HANG_GUARD, run_ranks

import compopt

TINY = """--layers 1 --width 32 --heads 2 --context 16 --batch 4 --lr 1e-2 --steps 6 --eval-every 3
          --density 0.1 --dense-share 0.34 --interval 4 --every 2"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PHASES = {  # of the six steps: two are dense, and Radius compresses from the second on
    "adamw": {"dense": 6},
    "radius": {"dense": 1, "resample": 2, "sparse": 3},
    "adams": {"dense": 6},
    "scape": {"dense": 2, "sparse": 4},
    "separate": {"dense": 2, "projected": 4},
    "tracked": {"dense": 2, "projected": 4},
    "local": {"rounded": 2, "local": 2, "exchanged": 2},
    "tagc": {"dense": 2, "sparse": 4},
    "powersgd": {"dense": 2, "sparse": 4},
    "topk": {"dense": 2, "sparse": 4},
}


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_text(folder: Path) -> None:
    (folder / "text").write_bytes(b"to be, or not to be, that is the question: " * 1000)


def options(folder: Path, optimizer: str) -> list[str]:
    """A short run on a short text; its results go to a file in `folder`, named after the optimizer."""
    files = ["--data", str(folder / "text"), "--out", str(folder / f"{optimizer}.json")]
    return ["--optimizer", optimizer, *TINY.split(), *files]


def one_fast(first: str, *others: str) -> list:
    """A run of training for each; all but the first are for `make slow`."""
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


def start(launcher: list[str], folder: Path, optimizer: str) -> subprocess.Popen:
    """Start train_gpt.py."""
    write_text(folder)
    command = [*launcher, str(EXAMPLES / "train_gpt.py"), *options(folder, optimizer)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> None:
    """Wait for a process that `start` began, and leave none behind."""
    try:
        output, _ = process.communicate(timeout=HANG_GUARD)
        assert process.returncode == 0, f"{process.args}: {output}"
    finally:
        process.terminate()


def check(folder: Path, optimizer: str, ranks: int) -> None:
    """Look at all a run wrote."""
    result = json.loads((folder / f"{optimizer}.json").read_text())
    assert (result["config"]["ranks"], result["config"]["optimizer"]) == (ranks, optimizer)
    first, last = result["evals"]
    assert (first["step"], last["step"]) == (3, 6)
    assert last["val_loss"] < first["val_loss"] < 6 and last["train_loss"] < first["train_loss"] < 6
    assert 0 < first["seconds"] < last["seconds"] and result["step_ms"] > 0
    phases = PHASES[optimizer] if ranks > 1 else {"dense": 6}
    assert result["phases"] == phases
    dense, sizes = 4 * result["parameters"], result["bytes_per_step"]
    if ranks == 1 and optimizer != "adamw":  # whose bytes examples/baselines.py counts
        assert last["bytes"] == sizes["dense"] == 0
        return
    parameters = dense / ranks if optimizer == "tagc" else 0  # what gathers them, in every step
    rounded = {"tracked": (0.25, 0.27), "local": (0.13, 0.14)}  # to int8 and int4, from the first step
    least, most = rounded.get(optimizer, (1, 1.02))
    assert least * dense <= sizes["dense"] - parameters <= most * dense
    if phases == {"dense": 6}:
        assert 6 * dense <= last["bytes"] <= 1.02 * 6 * dense and sizes["compressed"] is None
    else:
        assert first["bytes"] < last["bytes"] < 6 * (dense + parameters)
        assert 0 < sizes["compressed"] - parameters < 0.5 * dense


@pytest.mark.slow
def test_train_gpt_on_one_process(tmp_path):
    """There is nobody to send less to: every step is dense."""
    finish(start([sys.executable], tmp_path, "radius"))
    check(tmp_path, "radius", ranks=1)


@pytest.mark.slow
@pytest.mark.long
def test_train_gpt_under_torchrun(tmp_path):
    finish(start(TORCHRUN, tmp_path, "radius"))
    check(tmp_path, "radius", ranks=2)


def one_after_the_other(rank: int, folder: str, ranks: int, optimizers: list[str]) -> None:
    as_torchrun_would(rank, ranks)
    for optimizer in optimizers:
        example("train_gpt", *options(Path(folder), optimizer))


@pytest.mark.parametrize(("ranks", "optimizers"), [(1, ["radius"]), (2, [name for name in PHASES if name != "radius"])])
def test_train_gpt_in_processes_that_are_there(ranks, optimizers, tmp_path):
    """The tests before have seen what it takes to start them."""
    write_text(tmp_path)
    run_ranks(one_after_the_other, ranks, str(tmp_path), ranks, optimizers)
    for optimizer in optimizers:
        check(tmp_path, optimizer, ranks)


def in_two_parts(rank: int, folder: str, name: str, whole: list[str], first: list[str], then: list[str]) -> None:
    """A run, and the same in two parts; what each has printed."""
    as_torchrun_would(rank, 2)
    printed = []
    for options in (whole, first, then):
        printed.append(example(name, *options))
        dist.barrier()  # rank 0 has written its checkpoint
    Path(folder, f"{rank}").write_text(json.dumps(printed))


def printed_losses(folder: Path) -> list[list[str]]:
    """Of the whole run, the first part and the second, the lines of rank 0 with validation losses."""
    printed = json.loads((folder / "0").read_text())
    return [[line for line in text.splitlines() if "val" in line] for text in printed]


@pytest.mark.parametrize(
    "optimizer", ["LocalSteps", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SeparateAdam", "AdamW"))]
)
def test_nanogpt_resumes_where_it_stopped(optimizer, tmp_path):
    write_text(tmp_path)
    small = "--n_layer=1 --n_head=2 --n_embd=64 --block_size=16 --eval_interval=10 --warmup_iters=2 --eval_iters=2"
    same = [*small.split(), f"--optimizer={optimizer}", f"--data={tmp_path / 'text'}", "--min_lr=2e-3"]
    whole, parts = ([*same, f"--out_dir={tmp_path / name}"] for name in ("whole", "parts"))
    runs = [*whole, "--max_iters=20"], [*parts, "--max_iters=10"], [*parts, "--max_iters=20", "--init_from=resume"]
    run_ranks(in_two_parts, 2, str(tmp_path), "nanogpt", *runs)
    undisturbed, first, then = printed_losses(tmp_path)
    assert [line.split()[1] for line in undisturbed] == ["0:", "10:", "20:"]
    assert undisturbed[:2] == first and undisturbed[1:] == then
    saved = [torch.load(tmp_path / name / "ckpt.pt")["model"] for name in ("whole", "parts")]
    torch.testing.assert_close(*saved, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["SeparateAdam", "LocalSteps", "AdamW"])
def test_nanogpt_without_clipping(optimizer, tmp_path, monkeypatch):
    """`grad_clip = 0.0`, as nanoGPT has it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    write_text(tmp_path)
    small = "--n_layer=1 --n_head=2 --n_embd=64 --block_size=16 --eval_interval=1 --max_iters=1 --eval_iters=1"
    files = [f"--data={tmp_path / 'text'}", f"--out_dir={tmp_path}"]
    printed = example("nanogpt", *small.split(), *files, f"--optimizer={optimizer}", "--grad_clip=0.0")
    assert "step 1: train loss" in printed


def test_nanogpt_tells_its_settings(monkeypatch, capsys):
    for words in (["--help"], ["--max_iters=3", "-h"]):
        monkeypatch.setattr(sys, "argv", ["nanogpt", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / "nanogpt.py"), run_name="__main__")
        printed = capsys.readouterr().out
        assert not ended.value.code and "--learning_rate=0.002" in printed and "torchrun" in printed
    with pytest.raises(ValueError, match="optimizer must be SeparateAdam, LocalSteps or AdamW; got Adam"):
        example("nanogpt", "--optimizer=Adam")


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        (
            "train_gpt",
            ["--steps", "0"],
            "steps, eval-every, batch, context, layers, heads and width must be at least 1",
        ),
        ("train_gpt", ["--eval-every", "0"], "must be at least 1"),
        ("demo", ["--steps", "1"], "--steps must be at least 2; got 1"),
    ],
)
def test_scripts_refuse_numbers_in_a_sentence(name, words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


SMALL = "--layers 1 --width 64 --heads 2 --context 16 --batch 4 --steps 8 --eval-every 4 --every 3"


def stop_and_resume(rank: int, folder: str, whole: list[str], rest: list[str]) -> None:
    """A run, and again what follows its first checkpoint."""
    as_torchrun_would(rank, 2)
    save, first = torch.save, Path(folder, "rest")

    def save_and_keep_first(saved, path):
        save(saved, path)
        if not first.exists():
            save(saved, first)

    with mock.patch.object(torch, "save", save_and_keep_first):
        example("train_gpt", *whole)
    dist.barrier()
    example("train_gpt", *rest)


@pytest.mark.parametrize(
    "optimizer", ["tracked", *(pytest.param(name, marks=pytest.mark.slow) for name in ("local", "adamw"))]
)
def test_train_gpt_resumes_where_it_stopped(optimizer, tmp_path):
    write_text(tmp_path)
    same = ["--optimizer", optimizer, "--data", str(tmp_path / "text"), *SMALL.split()]
    names = "whole", "rest"
    run_ranks(stop_and_resume, 2, str(tmp_path), *([*same, "--checkpoint", str(tmp_path / name)] for name in names))
    whole, resumed = (torch.load(tmp_path / name) for name in names)
    torch.testing.assert_close(resumed["model"], whole["model"], rtol=0, atol=0)
    losses, again = ([now["val_loss"] for now in run["run"][0]] for run in (whole, resumed))
    assert len(losses) == 2 and again == losses
    assert [len(run["run"][2]) for run in (whole, resumed)] == [8, 8]  # seconds of steps


def test_corpus_is_the_same_everywhere_and_its_parts_are_apart(tmp_path):
    corpus = load("corpus")
    train, val = corpus.load()
    again, _ = corpus.load()
    assert torch.equal(train, again) and train.dtype == torch.uint8
    assert 0.04 < len(val) / (len(train) + len(val)) < 0.06 and len(train) > 1_000_000
    numbers = tmp_path / "numbers"  # 4-byte counters: no two chunks share one
    numbers.write_bytes(torch.arange(50_000, dtype=torch.int32).numpy().tobytes())
    parts = [set(part.view(torch.int32).tolist()) for part in corpus.load(str(numbers))]
    assert not parts[0] & parts[1] and len(parts[0] | parts[1]) == 50_000


def test_batches_differ_between_ranks_and_repeat_with_the_seed():
    corpus = load("corpus")
    data = torch.arange(200, dtype=torch.uint8)
    x, y = next(corpus.batches(data, batch=4, context=8, seed=0))
    assert x.shape == (4, 8) and torch.equal(x + 1, y)
    assert torch.equal(x, next(corpus.batches(data, 4, 8, seed=0))[0])
    assert not torch.equal(x, next(corpus.batches(data, 4, 8, seed=1))[0])
    with pytest.raises(ValueError, match="context 200"):
        next(corpus.batches(data, 4, 200, seed=0))


def test_corpus_too_short_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes"):
        load("corpus").load(str(tmp_path / "short"))


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
    (folder / "kernels/native").mkdir(parents=True, exist_ok=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "kernels/native/build_passes.py"):
        if not (folder / name).exists():  # a newer one would be installed again
            shutil.copy(ROOT / name, folder / name)
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
    assert classes < set(compopt.__all__) and set(demo.RUNS) == {"DDP + AdamW", "LocalSteps(MuonAdamW)", *classes}


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
