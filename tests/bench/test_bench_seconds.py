"""Seconds of the ladder's runs: step times of real ranks, composed in the order in which a run takes its steps."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import _ladder_runs
import _ladder_seconds
import ladder
from _ladder_ranks import SIZES, Size, Text
from _ladder_runs import BASELINES, ROWS, Training
from _ladder_seconds import (
    ALONE,
    TIMED,
    Timing,
    burst_of,
    compose,
    job_of,
    list_kinds,
    make_runner,
    seconds_of_kinds,
    tabulate,
)
from ladder import README_ROWS, draw_readme, readme_lines

pytestmark = pytest.mark.slow

TINY, RANKS, STEPS = Size(1, 64, 2, batch=2, context=16), 2, 40
SIZES["tiny"] = TINY
PARAMETERS = sum(p.numel() for p in TINY.make(0).parameters())
OTHERS = {"ranks": 4, "tokens": 20, "products": "float32"}


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 300)
    return str(tmp_path / "text")


def kind_of(phase: str) -> str:
    return phase if phase in ("dense", "local", "exchanged") else "compressed"


# The order of steps


@pytest.mark.parametrize("row", [row for row in TIMED if row not in BASELINES])
def test_steps_are_of_the_kinds_that_the_run_takes(row, text):
    tokens = STEPS * RANKS * TINY.batch * TINY.context / PARAMETERS
    run = ROWS[row].start("tiny", ranks=RANKS, tokens=tokens, products="float32")
    training, kinds = Training(run, data=text), []
    while not training.is_over:
        before = training.ranks.bytes_sent
        training.advance()
        kinds.append(kind_of(training.ranks.optimizers[0].stats.phase))
    if row.startswith("LocalSteps") and kinds[-1] == "local":  # the round is ended after the last step
        assert training.ranks.bytes_sent > before
        kinds[-1] = "exchanged"
    assert list_kinds(row, STEPS) == kinds
    assert len(set(kinds)) == 2


def test_rounds_grow_over_the_whole_run():
    """As LocalSteps documents them: 1 + 29 t / 1000 steps of a round that begins after t."""
    kinds, ends, begun = list_kinds("LocalSteps(Muon) 30", 1000), [], 0
    while begun < 1000:
        begun = min(1000, begun + 1 + 29 * begun // 1000)
        ends.append(begun)
    assert [n + 1 for n, kind in enumerate(kinds) if kind == "exchanged"] == ends


def test_an_evaluation_is_at_the_seconds_of_all_steps_up_to_it():
    line = {"row": "PowerSGD 4", "steps": 100, "evals": [{"step": 5}, {"step": 10}, {"step": 100}]}
    seconds = [point["seconds"] for point in compose(line, {"dense": 3.0, "compressed": 0.5})]
    assert seconds == pytest.approx([15, 30, 30 + 45])


# Step times


def test_times_are_medians_over_blocks_of_means_over_ranks():
    fast = {
        "seconds": [1.0, 1.0, 4.0] + [1.0, 1.0, 5.0] + [9.0, 9.0, 9.0],
        "phases": ["local", "local", "exchanged"] * 3,
    }
    slow = {
        "seconds": [2.0, 2.0, 2.0] + [2.0, 2.0, 3.0] + [9.0, 9.0, 9.0],
        "phases": ["local", "local", "exchanged"] * 3,
    }
    assert seconds_of_kinds([fast, slow], 3) == {"local": 1.5, "exchanged": 4.0}
    start = {"seconds": [5.0, 1.0, 1.0, 1.0], "phases": ["dense", "projected", "projected", "projected"]}
    assert seconds_of_kinds([start], 2) == {"dense": 5.0, "compressed": 1.0}
    assert seconds_of_kinds([{"seconds": [1.0, 3.0], "phases": []}], 2) == {"dense": 2.0}


def test_local_steps_are_timed_once_for_all_lengths_of_rounds():
    assert job_of("LocalSteps(Muon) 140") == job_of("LocalSteps(Muon) 30") == "LocalSteps(Muon) 30"
    assert job_of("LocalSteps(AdamW) 140") == "LocalSteps(AdamW) 30"
    assert job_of("SeparateAdam") == "SeparateAdam"


def test_little_passes_ahead_of_the_rate():
    assert [burst_of(rate) for rate in ("10mbit", "100mbit", "1gbit", "unshaped")] == [8192, 12500, 125_000, None]


def time_rows(rank: int, path: str, products: str) -> dict[str, dict]:
    steps, text = 9, Text(TINY, RANKS, 0, path)
    found = {}
    for job in [base + ALONE for base in BASELINES] + list(dict.fromkeys(map(job_of, TIMED))):
        runner = make_runner(job, "tiny", products, steps, lambda: tuple(part[rank] for part in text.next()))
        runner.block(steps)
        runner.block(steps)
        params = torch.cat([p.detach().flatten() for p in runner.model.parameters()])
        found[job] = runner.result() | {
            "checksum": params.double().sum().item(),
            "finite": params.isfinite().all().item(),
        }
    return found


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_real_ranks_take_the_steps_of_every_row(products, text):
    real = run_ranks(time_rows, RANKS, text, products)
    for row in TIMED:
        results = [rank[job_of(row)] for rank in real]
        seconds = seconds_of_kinds(results, 9)
        assert set(list_kinds(row, 1000)) <= set(seconds), row
        assert all(result["finite"] for result in results)
        assert results[0]["checksum"] == results[1]["checksum"], row  # a block ends with an exchange
        if job_of(row).startswith("LocalSteps"):
            assert results[0]["phases"] == (["local"] * 8 + ["exchanged"]) * 2
    for base in BASELINES:
        one, other = (rank[base + ALONE] for rank in real)
        assert one["checksum"] != other["checksum"] and one["phases"] == []


# The table


def a_line(row: str, size: str, losses: list[float], **others) -> dict:
    run = ROWS[row].start(size, **OTHERS)._replace(**others)
    evals = [{"step": 10 * (n + 1), "train_loss": loss, "val_loss": loss} for n, loss in enumerate(losses)]
    known = {"parameters": 1_000_000, "steps": 40, "val_loss": losses[-1], "share": 0.05, "seconds": 1.0}
    return run._asdict() | known | {"evals": evals}


LOSSES = {
    "DDP + AdamW": [3.0, 2.0, 1.6, 1.5],
    "DDP + Muon": [2.8, 1.6, 1.4, 1.3],
    "LocalSteps(Muon) 30, int4, 800": [3.0, 1.8, 1.6, 1.4],
    "SeparateAdam": [3.0, 2.1, 1.7, 1.5],
    "PowerSGD 4": [3.0, 2.2, 1.9, 1.7],
}
SECONDS = {"dense": 1.0, "compressed": 0.25, "local": 0.2, "exchanged": 0.3}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Runs of a size that no real ones are kept of, and step times at two rates."""
    lines = [a_line(row, "35M", losses) for row, losses in LOSSES.items()]
    lines.append(a_line("DDP + AdamW", "35M", [3.0, 2.5, 2.2, 2.1], lr=1.0))  # worse
    timings = [
        Timing(row, "35M", 4, rate, "float32")._asdict() | {"seconds": SECONDS, "compute": 0.2}
        for row in LOSSES
        for rate in ("1gbit", "100mbit")
    ]
    for module, name, content in ((_ladder_runs, "ladder", lines), (_ladder_seconds, "time_to_loss-ladder", timings)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in content))
        monkeypatch.setattr(module, "KEPT", path)
    monkeypatch.setattr(ladder, "RESULTS", tmp_path)
    return tmp_path


def test_seconds_to_the_loss_of_ddp_with_adamw(kept):
    lines = tabulate(_ladder_runs.kept(), _ladder_seconds.kept(), "35M", **OTHERS)
    assert [line["rate"] for line in lines] == ["100mbit"] * 5 + ["1gbit"] * 5
    by_row = {line["row"]: line for line in lines[:5]}
    assert by_row["DDP + AdamW"]["loss"] == 1.5
    assert by_row["DDP + AdamW"]["seconds_to_adamw"] == 40 and by_row["DDP + AdamW"]["to_adamw"] == 1
    assert by_row["DDP + Muon"]["seconds_to_adamw"] == pytest.approx(25)  # halfway from 1.6 to 1.4
    assert by_row["SeparateAdam"]["to_adamw"] == pytest.approx((10 * 1.0 + 30 * 0.25) / 40)
    assert by_row["PowerSGD 4"]["seconds_to_adamw"] is by_row["PowerSGD 4"]["to_adamw"] is None
    local = by_row["LocalSteps(Muon) 30, int4, 800"]
    exchanges = list_kinds("LocalSteps(Muon) 30, int4, 800", 40).count("exchanged")
    assert local["run_seconds"] == pytest.approx(40 * 0.2 + exchanges * 0.1)
    assert local["network_percent"] == pytest.approx(100 * (1 - 0.2 * 40 / local["run_seconds"]))
    assert by_row["DDP + AdamW"]["compute_percent"] == pytest.approx(20)


def test_a_rate_without_ddp_with_adamw_has_no_table(kept):
    timings = {timing: line for timing, line in _ladder_seconds.kept().items() if timing.row != "DDP + AdamW"}
    assert tabulate(_ladder_runs.kept(), timings, "35M", **OTHERS) == []


def test_the_command_shows_what_is_kept_and_says_never(kept, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ladder.py", "seconds", "--show", "--size", "35M", "--products", "float32"])
    ladder.main()
    printed = capsys.readouterr().out
    assert printed.count("PowerSGD 4 never reaches 1.500: its lowest loss is 1.700.") == 2
    rows = list(csv.DictReader((kept / "time_to_loss-35M.csv").open()))
    assert len(rows) == 10 and [row["to_adamw"] for row in rows if row["row"] == "PowerSGD 4"] == ["", ""]


def test_the_picture_of_the_readme_needs_the_rows_of_the_ladder_and_their_times(kept, tmp_path):
    lines = readme_lines()
    assert {line["row"] for line in lines} == set(LOSSES) == set(README_ROWS)
    assert lines[-1]["to_adamw"] == pytest.approx(1.7 / 1.5, abs=1e-4)
    assert lines[0]["evals"][-1]["seconds"] == pytest.approx(40)
    draw_readme(tmp_path / "ladder.png")
    path = _ladder_seconds.KEPT
    path.write_text("".join(line for line in path.open() if "PowerSGD" not in line))
    with pytest.raises(LookupError, match="PowerSGD 4"):
        readme_lines()


def test_the_runs_of_the_readme_picture_are_kept_and_timed():
    assert set(README_ROWS) <= {line["row"] for line in readme_lines()}
