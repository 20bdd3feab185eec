"""`compopt-advise`: what it recommends, what it prints, and the sentence of every mistake."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import os
import sys

import pytest
import torch
from ranks import run_ranks
from torch.optim.optimizer import _global_optimizer_post_hooks

from compopt.advise import advise, main, quantity
from compopt.costmodel import METHODS, Workload
from compopt.costmodel.measure import measure_local, profile

FAST = (1e12, 1e14)  # memory and matrix products that cost nothing beside the links below

SCRIPT = """
import sys, time, torch
model = torch.nn.Linear(64, 64, bias=False)
optimizer = torch.optim.AdamW(model.named_parameters(), lr=float(sys.argv[1]))
for step in range(int(sys.argv[2])):
    time.sleep(0.01)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
"""


def test_slow_links_want_compression_and_fast_ones_none():
    slow = advise(10_000_000, ranks=4, link_bits_per_s=1e8, step_s=0.1, local=FAST)
    assert "Use " in slow.recommendation and max(row.training for row in slow.rows) > 5
    fast = advise(10_000_000, ranks=4, link_bits_per_s=1e13, step_s=0.1, local=FAST)
    assert fast.recommendation.startswith("Stay dense") and "bit/s it would pay" in fast.recommendation


def test_stay_dense_where_compressing_costs_more_than_it_saves():
    advice = advise(10_000_000, ranks=4, link_bits_per_s=10e9, step_s=0.1, local=(1e8, 1e9))
    assert advice.recommendation.startswith("Stay dense")


def test_one_rank_has_nobody_to_average_with():
    assert "one process" in advise(1_000_000, ranks=1, link_bits_per_s=1e6, step_s=0.1, local=FAST).recommendation


def test_the_recommended_link_is_where_it_starts_to_pay():
    advice = advise(10_000_000, ranks=4, link_bits_per_s=1e13, step_s=0.1, local=FAST)
    amount, unit = advice.recommendation.split("about ")[1].split()[:2]
    rate = float(amount) * {"Gbit/s": 1e9, "Mbit/s": 1e6}[unit]
    for factor, words in ((0.9, "Use "), (1.3, "Stay dense")):
        assert advise(
            10_000_000, ranks=4, link_bits_per_s=rate * factor, step_s=0.1, local=FAST
        ).recommendation.startswith(words)


def test_warm_up_and_overlap_lower_the_gain():
    row = {r.method: r for r in advise(10_000_000, ranks=2, link_bits_per_s=1e8, step_s=0.1, local=FAST).rows}
    assert 1 < row["RadiusAdamW"].training < row["RadiusAdamW"].speedup
    assert row["ScapeAdamS"].training == row["ScapeAdamS"].speedup
    hidden = advise(10_000_000, ranks=2, link_bits_per_s=1e8, step_s=0.1, overlap_s=0.1, local=FAST)
    assert hidden.rows[0].step_s < row["AdamW+DDP"].step_s


def test_a_model_gives_its_own_shapes():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    advice = advise(model, ranks=2, link_bits_per_s=1e6, step_s=0.01, local=FAST)
    total = sum(p.numel() for p in model.parameters())
    assert advice.rows[0].sent == 4 * total and advice.rows[0].state == 8 * total
    assert {row.method for row in advice.rows} == set(METHODS)


def test_local_speed_is_measured():
    memory, flops = measure_local()
    assert 1e8 < memory < 1e14 and 1e8 < flops < 1e16


@pytest.mark.parametrize(("text", "value"), [("350M", 350e6), ("1.8b", 1.8e9), ("12000", 12000.0), ("2.5k", 2500.0)])
def test_quantities(text, value):
    assert quantity(text) == value


def test_link_rates_are_written_as_tc_writes_them():
    assert quantity("2.5gbit", "bit") == 2.5e9
    for text in ("fast", "0mbit", "100", "-1gbit"):
        with pytest.raises(argparse.ArgumentTypeError, match="write it like"):
            quantity(text, "bit")


def test_profile_reads_step_time_and_parameters_from_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    before = list(sys.argv)
    seconds, work = profile(str(script), ["0.1", "100"])
    assert 0.01 <= seconds < 0.1 and work.parameters == 64 * 64 and work.compressed == 1.0
    assert sys.argv == before
    assert not _global_optimizer_post_hooks  # nothing is left behind
    with pytest.raises(ValueError, match="ended after 3 optimizer steps"):
        profile(str(script), ["0.1", "3"])
    with pytest.raises(ValueError, match="no such file"):
        profile(str(tmp_path / "none.py"))


def test_the_console_prints_a_table_and_saves_a_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speedup.png"
    main(
        [
            "--parameters",
            "10M",
            "--ranks",
            "4",
            "--link",
            "100mbit",
            "--step-time",
            "100",
            "--plot",
            str(picture),
        ]
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in METHODS) and "10 M parameters on 4 ranks, 100 Mbit/s" in printed
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_the_console_profiles_a_script(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    main(["--ranks", "2", "--link", "1gbit", "--profile", str(script), "0.1", "50"])
    assert "0.004096 M parameters" in capsys.readouterr().out


GIVEN = ["--parameters", "10M", "--ranks", "4", "--link", "1gbit", "--step-time", "100"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (GIVEN[:2], "The network is missing"),
        (GIVEN[2:6], "The model is missing"),
        (GIVEN[:6], "The model is missing"),
        ([*GIVEN, "--ranks", "0"], "ranks must be at least 1"),
        ([*GIVEN, "--step-time", "-3"], "compute_s must be positive"),
        ([*GIVEN, "--overlap", "200"], "overlap_s between 0 and compute_s"),
        ([*GIVEN, "--link", "quick"], "write it like 100mbit"),
        ([*GIVEN, "--probe"], "start it with torchrun"),
    ],
)
def test_mistakes_are_sentences(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert ended.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit):
        main([*GIVEN, "--plot", "x.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


def ask_on_a_rank(rank: int) -> str:
    os.environ.update(WORLD_SIZE="2", RANK=str(rank))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["--probe", "--parameters", "10M", "--step-time", "50"])
    return printed.getvalue()


def test_probe_measures_the_link_between_the_running_ranks_and_one_of_them_prints():
    first, second = run_ranks(ask_on_a_rank, 2)
    assert "on 2 ranks" in first and "AdamW+DDP" in first and second == ""


def test_workload_of_a_size_is_about_that_of_a_transformer():
    work = Workload.of_size(85_000_000)  # GPT-2's twelve layers of 768
    assert work.perimeter == pytest.approx(12 * 16 * 768, rel=0.2)
