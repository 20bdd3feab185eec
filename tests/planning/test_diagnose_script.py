"""`compopt-diagnose`: a script that is diagnosed as it is, alone and under torchrun."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from pathlib import Path

import pytest
import torch
from in_place import as_torchrun_would
from ranks import free_port, run_ranks
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from compopt.__main__ import main as commands
from compopt.planning.diagnose import main

SCRIPT = """
import sys, torch, torch.distributed as dist
import beside
from torch import nn
if "ranks" in sys.argv:
    dist.init_process_group("gloo")
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64))
model = nn.parallel.DistributedDataParallel(inner) if "ranks" in sys.argv else inner
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
random = torch.Generator().manual_seed(dist.get_rank() if "ranks" in sys.argv else 0)
for step in range(int(sys.argv[1])):
    if step == 4 and "fails" in sys.argv:
        raise ValueError("the script's own")
    try:
        model(torch.randn(8, 64, generator=random)).square().mean().backward()
        optimizer.step()
    except Exception:
        print("caught")
    optimizer.zero_grad()
    print("step", step, flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def hooks() -> list[int]:
    """How many there are that see every module and every optimizer, but for those of optimizers that are gone."""
    gc.collect()
    everywhere = modules._global_forward_pre_hooks, optimizers._global_optimizer_pre_hooks
    return [len(one) for one in (*everywhere, optimizers._global_optimizer_post_hooks)]


def test_a_script_is_watched_until_enough_was_seen(script, tmp_path, capsys):
    before, argv, path = hooks(), list(sys.argv), list(sys.path)
    words = ["diagnose", "--steps", "6", "--dense", "2", "--plot", str(tmp_path / "seen.png"), script, "100"]
    commands(words)
    report = capsys.readouterr().out
    assert report.count("step ") >= 5 and "step 6" not in report and "caught" not in report
    assert "6 steps of AdamW on 1 rank; methods compress from step 3 on.\n2 tensors looked at" in report
    assert "0.weight" in report and "2.weight" in report and "What it means" in report
    assert (tmp_path / "seen.png").exists()
    assert (hooks(), sys.argv, sys.path) == (before, argv, path)


def diagnose_on_rank(rank: int, script: str, port: int) -> str:
    """The output of a process with torchrun's variables, by which the script makes the process group."""
    torch.distributed.barrier()  # else a rank may be gone while the other still connects
    torch.distributed.destroy_process_group()
    as_torchrun_would(rank, 2)
    os.environ["MASTER_PORT"] = str(port)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        commands(["diagnose", "--steps", "6", "--dense", "2", script, "100", "ranks"])
    return printed.getvalue()


def test_all_ranks_are_watched(script):
    first, second = run_ranks(diagnose_on_rank, 2, script, free_port())
    assert first.count("6 steps of AdamW on 2 ranks") == 1
    assert second.count("step ") >= 5 and "6 steps" not in second and "What it means" not in second


def test_a_script_that_makes_a_process_group_runs_alone_too(script, capsys, monkeypatch):
    """init_process_group without RANK in the environment: the script is the only rank, and nothing is left behind."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before, environment = torch.distributed.init_process_group, dict(os.environ)
    commands(["diagnose", "--steps", "6", "--dense", "2", script, "100", "ranks"])
    report = capsys.readouterr().out
    assert "6 steps of AdamW on 1 rank" in report
    assert torch.distributed.init_process_group is before and dict(os.environ) == environment
    assert not torch.distributed.is_initialized()


def test_a_process_group_that_says_how_is_left_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "train.py"
    call = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
    path.write_text(SCRIPT.replace('dist.init_process_group("gloo")', call).replace("import beside\n", ""))
    commands(["diagnose", "--steps", "6", "--dense", "2", str(path), "100", "ranks"])
    assert "6 steps of AdamW on 1 rank" in capsys.readouterr().out
    torch.distributed.destroy_process_group()


def test_a_script_may_move_to_a_folder_and_print_to_a_file(script, tmp_path, capsys, monkeypatch):
    """The report is printed, and the picture saved, where the command was started."""
    pytest.importorskip("matplotlib")
    (tmp_path / "runs").mkdir()
    moved = tmp_path / "moved.py"
    moves = "import os, sys\nos.chdir('runs')\nsys.stdout = sys.stderr = open('log.txt', 'w')\n"
    moved.write_text(moves + Path(script).read_text())
    monkeypatch.chdir(tmp_path)
    main(["--steps", "4", "--dense", "1", "--plot", "seen.png", "moved.py", "9"])
    assert "4 steps of AdamW" in capsys.readouterr().out and (tmp_path / "seen.png").exists()
    assert "step 2" in (tmp_path / "runs/log.txt").read_text() and Path.cwd() == tmp_path


def test_what_a_script_says_as_it_exits_is_printed(tmp_path, capsys):
    (tmp_path / "train.py").write_text("import sys\nsys.exit('train.bin is missing: run prepare.py first')\n")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "train.py")])
    report = capsys.readouterr().err
    assert "train.bin is missing" in report and "ended after 0 optimizer steps" in report


def test_a_model_that_is_called_inside_step_gives_names(script, capsys):
    """As Lightning calls it, where nothing is validated before."""
    text = Path(script).read_text().replace("        model(", "        closure = lambda: model(")
    Path(script).write_text(text.replace("optimizer.step()", "optimizer.step(closure)"))
    main(["--steps", "4", "--dense", "1", script, "9"])
    report = capsys.readouterr().out
    assert "4 steps of AdamW" in report and "\n  0.weight " in report and "caught" not in report


def test_mistakes_are_told_and_the_scripts_own_are_its_own(script, capsys):
    before = hooks()
    for words, report in {
        ("missing.py",): "missing.py: there is no such file",
        ("--steps", "30", script, "5"): "ended after 5 optimizer steps",
        ("--steps", "30", script, "1"): "ended after 1 optimizer step that could be looked at",
        ("--steps", "5", script, "100"): "steps must be larger than start",
        ("--steps", "20", "--elements", "5", script, "100"): "elements must be an integer",
        ("--plot", "/nowhere/seen.png", "--steps", "4", "--dense", "1", script, "9"): "there is no folder",
    }.items():
        with pytest.raises(SystemExit):
            main(words)
        assert report in capsys.readouterr().err
    with pytest.raises(ValueError, match="the script's own"):
        main([script, "100", "fails"])
    assert hooks() == before and torch.is_grad_enabled()
