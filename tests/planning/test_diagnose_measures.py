"""`compopt.diagnose` measures what an oracle finds; `compopt-diagnose`: a script that is diagnosed as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import math
import os
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from in_place import as_torchrun_would
from ranks import free_port, run_ranks
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from watched import FEW, noise, watch

from compopt.__main__ import main as commands
from compopt.planning.candidates import CANDIDATES, Candidate, CandidateRuns, adam_options
from compopt.planning.diagnose import main
from compopt.planning.diagnosis import summarize_stability, weighted_mean
from compopt.planning.gradient_statistics import TopKStability, crop_shape, find_eligible_tensors, sample_tensors
from compopt.planning.methods import Workload


def brute_force(rows: list[torch.Tensor], density: float, lag: int, every: int) -> tuple[float, float]:
    k, overlaps, norms = round(density * len(rows[0])), [], []
    for t in range(lag, len(rows)):
        if lag > 1 and (t + 1) % every:
            continue
        now, before = (set(rows[s].abs().argsort(descending=True)[:k].tolist()) for s in (t, t - lag))
        overlaps.append(len(now & before) / k)
        of = [math.sqrt(sum(float(rows[t][i]) ** 2 for i in chosen)) for chosen in (before, now)]
        norms.append(of[0] / of[1])
    return sum(overlaps) / len(overlaps), sum(norms) / len(norms)


def test_stability_is_what_sets_say():
    random = torch.Generator().manual_seed(0)
    rows, x = [], torch.randn(200, generator=random)
    for _ in range(121):
        x = 0.9 * x + 0.4 * torch.randn(200, generator=random)
        rows.append(x.clone())
    meter = TopKStability([200])
    for x in rows:
        meter.record_step([x])
    for density in (0.4, 0.1, 0.01):
        for lag in (1, 10, 100):
            results = [sum(v) / len(v) for v in (meter.overlaps[density, lag, 0], meter.norms[density, lag, 0])]
            assert results == pytest.approx(brute_force(rows, density, lag, 10), abs=1e-6)
    assert len(meter.masks) <= 11  # every tenth of the last 100 steps, and the last


def test_known_sets_have_known_overlaps():
    """Three of the ten largest are others from step to step; between them nobody has a gradient."""
    meter = TopKStability([100], densities=(0.1,))
    for step in range(3):
        x = torch.zeros(100)
        x[3 * step : 3 * step + 10] = 1
        meter.record_step([x])
    meter.record_step([None])
    meter.record_step([x])
    assert meter.overlaps[0.1, 1, 0] == pytest.approx([0.7, 0.7])
    assert meter.norms[0.1, 1, 0] == pytest.approx([math.sqrt(0.7)] * 2)


def test_masks_settle_from_the_first_third_of_the_steps_to_the_last():
    meter = TopKStability([4096, 4096])
    for i, shift in enumerate((0.0, 0.125)):
        meter.overlaps[0.1, 1, i] = [shift, shift, 0.5, 0.5, 0.75 + shift, 0.75 + shift]
    results = summarize_stability(meter, parts_of(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))))
    assert (results["settling", "first"], results["settling", "last"]) == (0.0625, 0.8125)


def test_names_are_those_of_the_model_within_its_wrappers():
    compiled = nn.Sequential(OrderedDict(_orig_mod=nn.Sequential(nn.Linear(64, 64))))
    wrapped = nn.Sequential(OrderedDict(module=compiled))
    assert [part.name for part in parts_of(wrapped)] == ["0.weight"]


def test_of_a_large_tensor_some_elements_are_compared():
    meter = TopKStability([1 << 17])
    meter.record_step([torch.arange(float(1 << 17))])
    (mask,) = meter.masks[1]
    assert mask.shape[1] == 1 << 15 and mask[:, -300:].all() and mask.sum(1).tolist() == [13107, 3277, 328]


def parts_of(model: nn.Module, elements: int = 1 << 20) -> list:
    named = {id(p): name for name, p in model.named_parameters()}
    return sample_tensors(find_eligible_tensors([{"params": list(model.parameters())}], named), elements)


def test_residuals_are_in_units_of_the_gradient():
    rows = noise(8)
    records = watch(rows, {"SCAPE": FEW["SCAPE 0.1"], "dense": Candidate("AdamS", {}, "AdamW+DDP")})
    run = records.runs.runs["SCAPE"]
    assert run.residual_norm() == pytest.approx(run.optimizer.stats.residual_norm() / 0.1)
    assert {row.method: row.share for row in records.rows}["dense"] == 1.0


def test_bytes_are_those_on_the_network():
    """An all-reduce sends each value twice; TAGC's reduce-scatter and gather send each once, and its bitmaps go there
    and back.
    """
    work = Workload(parameters=1000, compressed=1.0, side=10, perimeter=20, large=0.8)
    union = 1 - 0.9**2  # of two ranks' selections
    sent = 4 * (union * 800 + 200) + 2 * 800 / 8 + 4 * 1000
    assert CANDIDATES["TAGC 0.1"].share_of_bytes(work, 2) == pytest.approx(sent / (2 * 4 * 1000))
    mask = 1000 / 8 / 20  # a broadcast, every 20 steps
    sent = 2 * 4 * 1000 * (0.4 * 19 / 20 + 1 / 20) + mask
    assert CANDIDATES["Radius 0.4"].share_of_bytes(work, 2) == pytest.approx(sent / (2 * 4 * 1000))


def updates_of(rows: list[torch.Tensor], betas: tuple[float, float] = (0.9, 0.999)) -> list[torch.Tensor]:
    """AdamW's, written down again in float64."""
    m, v, results = torch.zeros_like(rows[0]).double(), torch.zeros_like(rows[0]).double(), []
    for t, g in enumerate(rows, 1):
        m, v = betas[0] * m + (1 - betas[0]) * g.double(), betas[1] * v + (1 - betas[1]) * g.double() ** 2
        results.append(m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + 1e-8))
    return results


def top_k(rows: list[torch.Tensor], density: float, start: int) -> tuple[list[torch.Tensor], list[float]]:
    """Return what one rank of TAGC's sends of each gradient, and the norms of what it holds back."""
    held, sent, norms = torch.zeros_like(rows[0]), [], []
    for t, g in enumerate(rows):
        h = g + held
        if t >= start:
            mask = torch.zeros(h.numel(), dtype=torch.bool)
            mask[h.flatten().abs().argsort(descending=True)[: h.numel() - math.ceil((1 - density) * h.numel())]] = True
            held = h * ~mask.view_as(h)
            h = h - held
            norms.append(float(held.norm()))
        sent.append(h)
    return sent, norms


def test_what_a_method_keeps_and_holds_back_is_what_an_oracle_finds():
    rows, start = noise(20), 3
    candidate = Candidate("TagcAdamW", {"density": 0.25})
    records = watch(rows, {"top-k": candidate}, start, betas=(0.8, 0.99))
    sent, norms = top_k(rows, 0.25, start)
    pairs = zip(updates_of(sent, (0.8, 0.99))[start:], updates_of(rows, (0.8, 0.99))[start:], strict=True)
    cosines = [float((a * b).sum() / a.norm() / b.norm()) for a, b in pairs]
    assert records.rows[0].kept == pytest.approx(sum(cosines) / len(cosines), abs=1e-4)
    assert records.findings["kept", "top-k", "weight"] == pytest.approx(records.rows[0].kept, abs=1e-6)
    assert (records.rows[0].least, records.rows[0].most) == (records.findings["kept", "top-k", "weight"],) * 2
    assert records.runs.residuals["top-k"] == pytest.approx(norms, rel=1e-4)
    gradient = sum(float(g.norm()) for g in rows[start:]) / len(rows[start:])
    half = len(norms) // 2
    assert records.rows[0].residual == pytest.approx(max(norms[half:]) / gradient, rel=1e-4)
    assert records.findings["growth", "top-k"] == pytest.approx(max(norms[half:]) / max(norms[:half]), rel=1e-4)
    assert records.rows[0].grows == (max(norms[half:]) / max(norms[:half]) > 1.2)


def test_a_residual_that_shrinks_has_not_grown():
    rows = [0.8**t * g for t, g in enumerate(noise(20))]
    records = watch(rows, {"top-k": Candidate("TagcAdamW", {"density": 0.25})})
    _, norms = top_k(rows, 0.25, 3)
    half = len(norms) // 2
    growth = max(norms[half:]) / max(norms[:half])
    assert growth < 0.9 and records.findings["growth", "top-k"] == pytest.approx(growth, rel=1e-4)


def test_a_part_counts_for_what_it_stands_for():
    """The whole's cosine is that of the layers put together, each as often as its weight says."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(80, 64, bias=False))
    parts = [dataclasses.replace(part, weight=w) for part, w in zip(parts_of(model), (1.0, 9.0), strict=True)]
    runs = CandidateRuns({"one": FEW["Radius 0.4"]}, parts, adam_options([{"betas": (0.9, 0.99)}]), 1)
    for a, b in zip(noise(5, 64, 64), noise(5, 64, 80), strict=True):
        weights, grads = [torch.zeros(64, 64), torch.zeros(64, 80)], [a, b * (torch.rand(64, 80) < 0.5)]
        dense = [u.clone() for u in runs.record_step(weights, grads)]
    theirs = [p.detach() for p in runs.runs["one"].params]
    dots, squares, local = (
        [float((x * y).sum()) for x, y in zip(*pair, strict=True)]
        for pair in ((theirs, dense), (theirs, theirs), (dense, dense))
    )
    wanted = (dots[0] + 9 * dots[1]) / math.sqrt((squares[0] + 9 * squares[1]) * (local[0] + 9 * local[1]))
    assert runs.cosines["one"][-1][-1] == pytest.approx(wanted, rel=1e-5)
    assert weighted_mean(parts, {0: 1.0, 1: 0.0}) == pytest.approx(4096 / (4096 + 9 * 5120))


def test_what_sends_everything_keeps_everything():
    whole = {"whole": Candidate("RadiusAdamW", {"density": 1.0}), "other": Candidate("TagcAdamW", {"density": 1.0})}
    for row in watch(noise(12), whole).rows:
        assert row.kept == pytest.approx(1, abs=1e-6) and row.residual == pytest.approx(0, abs=1e-6)
        assert not row.grows


def test_the_order_follows_the_gradients():
    """Of rank 4, tracked columns lose nothing; of few elements other than 0, nor do those that select."""
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(128, 4, generator=random), torch.randn(4, 128, generator=random)
    low = watch([left @ torch.randn(4, 4, generator=random) @ right for _ in range(20)], dict(CANDIDATES))
    assert low.order[0].startswith("tracked") and low.rows[0].kept > 0.999
    few = torch.rand(128, 128, generator=random) < 0.05
    sparse = watch([few * torch.randn(128, 128, generator=random) for _ in range(20)], dict(CANDIDATES))
    assert sparse.findings["kept", "Radius 0.2", ""] > 0.99 > sparse.findings["kept", "tracked 4, int8", ""]
    assert sparse.findings["overlap", "0.01", "10", ""] < 1
    assert "Start with compopt.SeparateAdam" in str(low)


def test_maximize_and_weight_decay_are_the_optimizers_own():
    """Radius selects by the update, decay and all; a training upwards is judged as it goes."""
    rows = noise(12)
    one = {"radius": Candidate("RadiusAdamW", {"density": 0.2, "interval": 50})}
    kept = {
        name: watch(rows, one, **options).rows[0].kept
        for name, options in {"down": {}, "up": {"maximize": True}, "decayed": {"weight_decay": 10.0}}.items()
    }
    assert kept["down"] == pytest.approx(kept["up"], abs=1e-6) and kept["down"] != pytest.approx(
        kept["decayed"], abs=1e-3
    )


def test_every_shape_is_looked_at_and_large_ones_in_part():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)), nn.Embedding(5000, 64))
    parts = parts_of(model, 60_000)
    assert [part.name for part in parts] == ["0.weight", "1.weight", "2.weight", "3.weight", "4.weight", "5.weight"] + [
        "6.weight"
    ]
    assert (parts[-1].rows, parts[-1].columns) == (553, 64) and not parts[-1].is_complete
    assert sum(part.numel for part in parts) <= 60_000
    assert sum(part.weight * part.numel for part in parts) == pytest.approx(6 * 64 * 64 + 5000 * 64)
    few = parts_of(model, 16_000)  # one layer of the six, from their middle
    assert [part.name for part in few] == ["3.weight", "6.weight"] and few[0].weight == 6
    some = parts_of(model, 30_000)  # three of the six, evenly spaced
    assert [part.name for part in some] == ["1.weight", "3.weight", "5.weight", "6.weight"]
    for sampled in (few, some):
        assert sum(part.weight * part.numel for part in sampled) == pytest.approx(6 * 64 * 64 + 5000 * 64)
    large_first = parts_of(nn.Sequential(nn.Linear(80, 80, bias=False), nn.Linear(64, 64, bias=False)))
    assert [part.name for part in large_first] == ["0.weight", "1.weight"]
    counted = torch.arange(5000.0).view(-1, 1).expand(5000, 64)
    cut = parts[-1].extract(counted)
    assert torch.equal(cut[:, 0], torch.arange(553.0) * (5000 // 553))


def test_the_longer_side_is_cut_first():
    assert crop_shape(100, 50, 5000) == (100, 50)
    assert crop_shape(1000, 50, 5000) == (100, 50) and crop_shape(50, 1000, 5000) == (50, 100)
    assert crop_shape(1000, 2000, 5000) == (70, 70)


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
    """Count the hooks that see every module and every optimizer, but for those of optimizers that are gone."""
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
