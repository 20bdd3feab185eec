"""`compopt-advise`: what it recommends, what it prints, the sentence of every mistake; command lines of the pages."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import HANG_GUARD, run_ranks
from torch.optim.optimizer import _global_optimizer_post_hooks

import compopt
from compopt.__main__ import main as package_main
from compopt.costmodel import Workload, advise
from compopt.planning import advice_report, advise_command, network_probe
from compopt.planning.advice_decision import pays_below
from compopt.planning.advise_command import main
from compopt.planning.formatting import format_count, format_rate, format_seconds, parse_quantity
from compopt.planning.losses import Measurement
from compopt.planning.measurement import measure_local
from compopt.planning.methods import METHODS
from compopt.planning.network_probe import collective_device
from compopt.planning.prediction import BASELINE
from compopt.planning.scripts import profile_script
from compopt.probe import main as measure

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


def asked(parameters: float = 10e6, ranks: int = 4, link: float = 1e8, step_s: float = 0.1, **options: object):
    options = {"local": FAST, **options}
    return advise(round(parameters), ranks=ranks, link_bits_per_s=link, step_s=step_s, **options)


def test_slow_links_want_compression_and_fast_ones_none():
    slow = asked(link=2e8)
    assert slow.method == "SeparateAdam" and max(row.run for row in slow.rows) > 5
    fast = asked(link=1e13)
    assert fast.method == BASELINE and fast.recommendation.startswith("Stay dense") and "a rank one would" in fast.why
    assert fast.line.startswith("torch.optim.AdamW") and slow.line == "compopt.SeparateAdam(params, lr=...)"


def test_stay_dense_where_compressing_costs_more_than_it_saves():
    advice = advise(10_000_000, ranks=4, link_bits_per_s=10e9, step_s=0.1, local=(1e8, 1e9))
    assert advice.method == BASELINE


def test_one_rank_has_nobody_to_average_with():
    assert "one process" in asked(ranks=1).recommendation
    whole = asked(7e9, ranks=16, memory_bytes=80e9, shard=16, inside_bits_per_s=1e13)
    assert whole.method == BASELINE and "one copy of the model" in whole.why
    assert whole.line.splitlines()[0].startswith("fully_shard(model)") and "waits" not in whole.why
    slow = asked(350e6, ranks=8, link=1e9, step_s=0.4, shard=8)
    assert "A step waits 99 % of its time for the parameters and gradients of that copy: without shard=8" in slow.why


def test_one_of_anything_is_said_in_the_singular():
    advice = asked(350e6, ranks=1, steps=1)
    assert "; 1 rank, each" in str(advice) and "a run of 1 step (given)" in str(advice)
    assert "a run of 1 step takes" in asked(350e6, ranks=8, link=1e9, steps=1).why
    assert "  1 parameter; 2 ranks" in str(asked(1, ranks=2))
    assert "\n1 more method does not fit, or is slower and loses more: --all." in format_all_but_one(advice)


def format_all_but_one(advice):
    return advice_report.format_table(advice.situation, advice.rows[:2], BASELINE)


def test_the_recommended_link_is_where_it_starts_to_pay():
    rate = pays_below(asked(link=1e13).situation)
    assert asked(link=0.9 * rate).method != BASELINE and asked(link=1.3 * rate).method == BASELINE
    assert "Below about" in asked(link=4 * rate).why and "a close call: over half" in asked(link=1.3 * rate).why


def test_the_dense_start_and_overlap_lower_the_gain():
    row = {r.method: r for r in asked(ranks=2).rows}
    assert all(1 < row[name].run < row[name].speedup for name in ("RadiusAdamW", "ScapeAdamS", "SeparateAdam"))
    assert row["ScapeAdamS"].run_bytes > METHODS["ScapeAdamS"].start > row["SeparateAdam"].run_bytes
    hidden, exposed = asked(overlap_s=0.1).rows[0], asked(overlap_s=0.0).rows[0]
    assert hidden.step.total < exposed.step.total


def test_the_loss_budget_and_memory_decide_what_may_be_advised():
    assert asked(loss_budget=0.015).method == "SeparateAdam"
    strict = asked(loss_budget=0.0)  # rank 32 in int4 was measured at .996, once, in a short run: that decides nothing
    assert strict.method == BASELINE and "int4 would take" in strict.why
    least = 8 * 10e6 + METHODS[BASELINE](Workload.of_size(10_000_000), 4).state  # dense fits, residuals do not
    tight = asked(memory_bytes=1.01 * least / 0.6, shard=1)
    fits = {row.method: row.fits for row in tight.rows}
    assert fits[BASELINE] and fits["ScapeAdamS"] and not fits["SeparateAdam"] and not fits["LocalSteps"]
    assert "does not fit" in tight.format(all_rows=True)
    roomy = asked(memory_bytes=1.3 * least / 0.6, shard=1)
    assert roomy.method == "SeparateAdam"  # there is no room for anchors


def measured(loss: float) -> Measurement:
    return Measurement(loss, 1e6, 4, 20)


def test_a_row_is_beaten_by_one_that_fits_and_is_no_slower_with_no_higher_loss():
    row = asked().rows[0]
    rows = [
        dataclasses.replace(row, run_s=seconds, measurement=measured(loss), fits=True)
        for seconds, loss in ((1.0, 1.0), (2.0, 1.01), (3.0, 0.9))
    ]
    assert [advice_report.is_beaten(row, rows) for row in rows] == [False, True, False]
    rows[0] = dataclasses.replace(rows[0], fits=False)
    assert not any(advice_report.is_beaten(row, rows) for row in rows[1:])


def test_an_alternative_over_the_loss_budget_is_named_with_a_but(monkeypatch):
    advice = asked()
    for loss, link in ((1.2, ", but its loss was "), (1.0, "; its loss was ")):
        other = dataclasses.replace(advice.rows[0], measurement=measured(loss), fits=True)
        monkeypatch.setattr(advice_report, "choose_alternative", lambda *_, other=other: other)
        assert link in advice_report.describe_alternative(advice.situation, advice.rows, advice.rows[1])


def test_a_close_call_is_called_one():
    worth = [
        asked(ranks=ranks, link=10 ** (rate / 10), local=(1e10, 1e12)) for rate in range(94, 99) for ranks in (4, 8)
    ]
    worth += [asked(link=10**9.7, local=(7e9, 7e11)), asked(link=2e8)]
    close = [advice for advice in worth if advice.method != BASELINE and best_run(advice) < 1.2]
    assert len({advice.method for advice in close}) == 2 and all("close call" in advice.why for advice in close)
    assert all(("time both" in advice.why) == advice.method.startswith("LocalSteps") for advice in close)
    assert all(("when=" in advice.why) != ("time both" in advice.why) for advice in close)
    sure = [advice for advice in worth if advice.method != BASELINE and best_run(advice) > 1.3]
    assert sure and not any("close call" in advice.why for advice in sure)


def best_run(advice):
    return next(row.run for row in advice.rows if row.method == advice.method)


def test_a_short_run_has_no_loss_that_was_measured():
    short, measured = (asked(350e6, ranks=8, link=1e9, steps=steps).why for steps in (1, 800))
    assert "the losses here say nothing about one of 1." in short and "No run of fewer" not in measured


def test_advice_for_a_billion_ranks_takes_no_longer():
    """A billion ranks, or 100 million steps, took minutes."""
    advice = asked(350e6, ranks=10**9, link=1e9, steps=10**15, memory_bytes=1e8)
    assert advice.rows[0].shard == 100 and advice.situation.steps == 10**15


def test_a_model_that_does_not_fit_is_cut_over_machines():
    there = dict(ranks=512, link_bits_per_s=200e9, step_s=10, device="h100")
    rows = advise(70_000_000_000, ranks_per_node=8, **there).rows
    assert rows[0].shard == 32 and rows[0].shard_s > 0 and rows[0].fits
    text = str(advise(70_000_000_000, ranks_per_node=8, **there))
    assert "Cut over 32 ranks on 4 machines (FSDP2)" in text


def test_a_layout_that_was_asked_for_is_what_is_said_to_be_slow():
    """Without it there is one that keeps the parameters off the link."""
    layout = dict(ranks=8, ranks_per_node=4, link=1e8, step_s=0.9)
    given, free = asked(124e6, shard=8, **layout), asked(124e6, **layout)
    assert given.recommendation.startswith("Change the setup") and free.method == "SeparateAdam"
    assert "no layout" not in given.why and "without shard=8 a copy is cut over as few" in given.why


def test_ranks_of_one_machine_have_the_link_that_was_given():
    one = str(asked(ranks=4, ranks_per_node=4, link=1e8))
    assert "100 Mbit/s a rank inside one (given)" in one
    measured = str(asked(ranks=4, ranks_per_node=4, link=1e8, sources={"link": "measured"}))
    assert "100 Mbit/s a rank inside one (measured)" in measured
    assert "rank inside one (assumed: a100" in str(asked(ranks=4, ranks_per_node=2))


def test_what_was_measured_given_or_assumed_is_said():
    text = str(asked(sources={"link": "measured"}))
    assert "Mbit/s a rank between machines (measured)" in text and "a step (given)" in text
    assert "communication (assumed)" in text and "50 us a message (assumed)" in text
    assert "each in its own machine (assumed)" in text and "10,000 steps (assumed)" in text


def test_a_model_gives_its_own_shapes():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    advice = advise(model, ranks=2, link_bits_per_s=1e6, step_s=0.01, local=FAST)
    total = sum(p.numel() for p in model.parameters())
    assert advice.rows[0].sent == 4 * total and advice.rows[0].state == 8 * total
    assert {row.method for row in advice.rows} == {name for name, m in METHODS.items() if not m.instead_of}


def test_local_speed_is_measured():
    memory, flops = measure_local(torch.device("cpu"))
    assert 1e8 < memory < 1e14 and 1e8 < flops < 1e16


@pytest.mark.parametrize(("text", "value"), [("350M", 350e6), ("1.8b", 1.8e9), ("12000", 12000.0), ("2.5k", 2500.0)])
def test_quantities(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (format_rate(999.7e6), "1,000 Mbit/s"),
        (format_rate(2.5e9), "2.5 Gbit/s"),
        (format_rate(3e15), "3,000 Tbit/s"),
        (format_count(1e12), "1,000 B"),
        (format_count(999_700), "1,000 k"),
        (format_count(123e6), "123 M"),
        (format_seconds(0.9999), "1,000 ms"),
        (format_seconds(99.97e6), "1,157 days"),
        (format_seconds(7e-6), "7 us"),
    ],
)
def test_numbers_for_people_have_no_exponents(text, wanted):
    assert text == wanted


def test_link_rates_are_written_as_tc_writes_them():
    assert parse_quantity("2.5gbit", "bit") == 2.5e9
    assert parse_quantity("1tbit", "bit") == 1e12 and parse_quantity("1T") == 1e12
    for text in ("fast", "0mbit", "100", "-1gbit", "infgbit", "1e400gbit", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="write it like"):
            parse_quantity(text, "bit")


def test_profile_reads_step_time_and_parameters_from_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    before = list(sys.argv)
    began = time.perf_counter()
    seconds, work = profile_script(str(script), ["0.1", "100"], steps=12)
    took = time.perf_counter() - began
    assert 0.01 <= seconds <= took / 4, "a median of eight steps: four of them took as long or longer"
    assert work.parameters == 64 * 64 and work.compressed == 1.0
    assert sys.argv == before
    assert not _global_optimizer_post_hooks  # nothing is left behind
    with pytest.raises(ValueError, match="ended after 3 optimizer steps"):
        profile_script(str(script), ["0.1", "3"])
    with pytest.raises(ValueError, match="no such file"):
        profile_script(str(tmp_path / "none.py"))


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
            "--all",
            "--plot",
            str(picture),
        ]
    )
    printed = capsys.readouterr().out
    names = [name if method.ours else f"{name} *" for name, method in METHODS.items() if not method.instead_of]
    assert all(f" {name}  " in printed for name in names)
    assert "10 M parameters; 4 ranks, each in its own machine (assumed)" in printed
    assert "100 Mbit/s a rank between machines (given)" in printed
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_the_console_profiles_a_script(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    main(["--ranks", "2", "--link", "1gbit", "--profile", str(script), "0.1", "50"])
    assert "4.1 k parameters" in capsys.readouterr().out


def test_a_profiled_script_may_import_its_neighbors_and_make_a_process_group(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "neighbor.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text(f"import neighbor\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n{SCRIPT}")
    main(["--ranks", "2", "--link", "1gbit", "--profile", str(script), "0.1", "50"])
    assert "4.1 k parameters" in capsys.readouterr().out and not torch.distributed.is_initialized()


@pytest.mark.parametrize("made", ["one", "two", "wrapped"])
def test_a_step_with_several_optimizers_is_one(made, tmp_path):
    """Optimizers that step in turn, or inside another; parameters are those of all of them."""
    lines = {
        "one": "[torch.optim.AdamW(model.parameters())]",
        "two": "[torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters())]",
        "wrapped": "[compopt.LocalSteps(compopt.MuonAdamW(model.named_parameters(), lr=0.1), every=2)]",
    }
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, compopt\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))\n"
        f"optimizers = {lines[made]}\n"
        "for step in range(100):\n"
        "    time.sleep(0.05)\n"
        "    model(torch.ones(1, 64)).sum().backward()\n"
        "    for optimizer in optimizers:\n"
        "        optimizer.step()\n"
    )
    seconds, work = profile_script(str(script), steps=6)
    assert seconds >= 0.05
    assert work.parameters == (2 if made == "two" else 3) * (64 * 64 + 64)


def test_a_reader_may_leave_before_the_end(monkeypatch):
    """As `| head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    main(GIVEN)
    sys.stdout.close()


GIVEN = ["--parameters", "10M", "--ranks", "4", "--link", "1gbit", "--step-time", "100"]


def test_a_latency_is_given_or_that_of_a_wan(capsys):
    message = {}
    for words in ([], ["--latency", "5"], ["--wan"]):
        main([*GIVEN, *words])
        message[" ".join(words)] = capsys.readouterr().out
    assert "50 us a message (assumed)" in message[""] and "5 ms a message (given)" in message["--latency 5"]
    assert "30 ms a message (assumed: --wan)" in message["--wan"]


def test_a_loss_budget_is_passed_on(capsys):
    main([*GIVEN, "--loss-budget", "0"])
    assert "makes the run 5 % faster within the loss budget of 0 %" in " ".join(capsys.readouterr().out.split())


def test_rows_that_others_beat_are_shown_when_asked_for(capsys):
    main(GIVEN)
    short = capsys.readouterr().out
    main([*GIVEN, "--all"])
    full = capsys.readouterr().out
    assert "SeparateAdam, Gaussian 16" in full and "SeparateAdam, Gaussian 16" not in short
    assert "more methods do not fit, or are slower and lose more: --all." in short and "--all" not in full


def test_the_layout_and_the_run_are_given(capsys):
    main([*GIVEN, "--ranks-per-node", "2", "--inside", "10gbit", "--steps", "400", "--tokens-per-parameter", "2"])
    message = capsys.readouterr().out
    assert "4 ranks, 2 in a machine or site (given)" in message and "10 Gbit/s a rank inside one (given)" in message
    assert "a run of 400 steps (given), no saves (assumed), 2 tokens per parameter (given)" in message
    main([*GIVEN, "--save-every", "100", "--frozen", "14G"])
    message = capsys.readouterr().out
    assert "a save every 100 (given)" in message and "14 GB frozen; 4 ranks" in message


def test_ranks_of_one_machine_need_no_link(capsys):
    start = [*GIVEN[:2], *GIVEN[6:], "--ranks", "8", "--ranks-per-node", "8"]
    assert "--link" not in start
    main([*start, "--device", "h100"])
    message = capsys.readouterr().out
    assert "Tbit/s a rank inside one (assumed: h100)" in message and "between machines" not in message
    main([*start, "--inside", "10gbit"])
    assert "10 Gbit/s a rank inside one (given)" in capsys.readouterr().out


def test_adapters_are_too_narrow_to_project(capsys):
    main([*GIVEN, "--link", "10mbit", "--parameters", "38M", "--frozen", "13G", "--lora", "8", "--all"])
    printed = capsys.readouterr().out
    assert "38 M parameters; 13 GB frozen" in printed and "rank 32, int4" not in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (GIVEN[:2], "The number of ranks is missing: give --ranks, or --probed FILE."),
        (["--profile", "train.py", *GIVEN], "give --ranks before --profile, whose script gets all that follows"),
        ([*GIVEN[:2], "--ranks", "4"], "The link is missing: give --link, the rate at which one rank sends to other"),
        ([*GIVEN, "--save-every", "0"], "save_every must be positive"),
        ([*GIVEN, "--lora", "16"], "--lora needs --parameters of the adapters, and --frozen of the weights."),
        ([*GIVEN, "--lora", "0", "--frozen", "13G"], "The rank of adapters must be at least 1; got 0."),
        (GIVEN[2:6], "The model is missing"),
        (GIVEN[:6], "The model is missing"),
        ([*GIVEN, "--ranks", "0"], "ranks must be at least 1"),
        ([*GIVEN, "--step-time", "-3"], "compute_s must be positive"),
        ([*GIVEN, "--step-time", "inf"], "compute_s must be positive and finite"),
        ([*GIVEN, "--overlap", "200"], "overlap_s between 0 and compute_s"),
        ([*GIVEN, "--overlap", "nan"], "overlap_s between 0 and compute_s"),
        ([*GIVEN, "--latency", "fast"], "'fast' cannot be read: write milliseconds, such as 400."),
        ([*GIVEN, "--loss-budget", "inf"], "loss_budget must be a share"),
        ([*GIVEN, "--parameters", "inf"], "write it like 350M"),
        ([*GIVEN, "--shard", "3"], "shard must divide the 4 ranks"),
        ([*GIVEN, "--ranks-per-node", "3"], "ranks_per_node must divide the 4 ranks; got 3."),
        (
            [*GIVEN[:2], "--ranks", "12", *GIVEN[4:], "--shard", "4", "--ranks-per-node", "6"],
            "or be a multiple; got 4.",
        ),
        ([*GIVEN, "--latency", "-1"], "latency_s must not be negative"),
        ([*GIVEN, "--latency", "1", "--wan"], "not allowed with argument"),
        ([*GIVEN, "--steps", "0"], "steps must be positive"),
        ([*GIVEN, "--tokens-per-parameter", "nan"], "tokens_per_parameter must be positive"),
        ([*GIVEN, "--plot", "no/such/folder/x.png"], "there is no folder"),
        ([*GIVEN, "--device", "abacus"], "invalid choice"),
        ([*GIVEN, "--link", "quick"], "write it like 100mbit"),
        ([*GIVEN, "--probed", "nowhere.json"], "cannot be read: No such file"),
        ([*GIVEN, "--probed", __file__], "is not what compopt.probe writes"),
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


def probe_on_a_rank(rank: int, folder: str) -> str:
    os.environ.update(WORLD_SIZE="2", RANK=str(rank))
    network_probe.SIZES, network_probe.LEAST_STEP = network_probe.SIZES[:3], 0.01  # a short one
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        measure([f"--out={folder}/probe.json"])
    return printed.getvalue()


def test_a_probe_measures_the_running_ranks_and_advice_reads_its_file(tmp_path, capsys):
    first, second = run_ranks(probe_on_a_rank, 2, str(tmp_path))
    assert "2 ranks, " in first and "GB/s in memory" in first and second == ""
    waits, lost = json.loads((tmp_path / "probe.json").read_text())["interference"]
    assert 0 <= waits < math.inf and 0 <= lost < math.inf  # a share of a step; seconds a byte
    main(["--probed", str(tmp_path / "probe.json"), "--parameters", "10M", "--step-time", "50"])
    printed = capsys.readouterr().out
    assert "; 2 ranks, each" in printed and "a rank between machines (measured)" in printed
    assert "a message (measured)" in printed and "FLOP/s (measured)" in printed


def test_a_named_device_replaces_what_was_probed(tmp_path, capsys):
    probed = {"ranks": 2, "link_bits_per_s": 1e8, "latency_s": 1e-4, "local": [1.5e10, 1e11]}
    (tmp_path / "probe.json").write_text(json.dumps(probed))
    words = ["--probed", str(tmp_path / "probe.json"), "--parameters", "10M", "--step-time", "50", "--overlap", "20"]
    main(words)
    printed = capsys.readouterr().out
    assert "15 GB/s" in printed and "20 ms of it hiding communication (given)" in printed
    main([*words, "--device", "h100"])
    printed = capsys.readouterr().out
    assert "(assumed: h100)" in printed and "15 GB/s" not in printed


def test_a_bandwidth_replaces_the_one_that_was_probed_alone(tmp_path, capsys):
    network = {"ranks": 2, "link_bits_per_s": 1e9, "latency_s": 1e-4, "local": [1e10, 5e10]}
    (tmp_path / "probe.json").write_text(json.dumps(network))
    words = ["--probed", str(tmp_path / "probe.json"), "--parameters", "10M", "--step-time", "100"]
    main([*words, "--memory-bandwidth", "20G"])
    assert "own work at 20 GB/s and 50 GFLOP/s (given)" in capsys.readouterr().out


def test_ranks_meet_on_the_cpu_where_the_device_has_no_collectives(monkeypatch):
    get_device = "compopt.planning.network_probe.get_device"
    monkeypatch.setattr(get_device, lambda: torch.device("mps"))  # whose module has no set_device
    assert collective_device() == torch.device("cpu")


def test_a_probe_alone_says_how_to_start_it(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        measure([])
    assert "start it with torchrun" in capsys.readouterr().err


def test_a_probe_tells_a_missing_folder_before_it_measures(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        measure(["--out", "/nowhere/probe.json"])
    sentence = "--out /nowhere/probe.json: there is no folder /nowhere."
    assert ended.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())


def test_workload_of_a_size_is_about_that_of_a_transformer():
    for size, words in ((100, "-"), (49_000, "-"), (50_000, "up down"), (70_000, "up down qkv"), (200_000, "all")):
        parts = {"-": 0, "up down": 8, "up down qkv": 11, "all": 12}[words]
        work = Workload.of_size(size)  # a tensor of fewer than 4096 elements is sent as it is
        assert work.compressed == pytest.approx(0.997 * parts / 12) and work.large == (2 / 3 if parts else 0.0)
        assert (work.perimeter > 0) == (parts > 0) == (work.tensors > 0)
    work = Workload.of_size(85_000_000)  # GPT-2's twelve layers of 768
    assert work.perimeter == pytest.approx(12 * 16 * 768, rel=0.2)
    # GPTs of the ladder, with the sum of rows and columns of their matrices: small ones are deeper than wide.
    for size, perimeter in ((184_768, 3840), (387_744, 5472), (861_312, 9152)):
        assert Workload.of_size(size).perimeter == pytest.approx(perimeter, rel=0.12)


ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "compopt/planning/advise_command.py",
]
OURS = r"(?:compopt-advise|python -m compopt)\b"
QUOTED, INDENTED = re.compile(rf"`({OURS}[^`]*)`"), re.compile(rf"^    ({OURS}.*)$", re.M)
TARGET = re.compile(r"(?:^    |`)make (\w+)", re.M)


def commands() -> list[str]:
    """Those of ours that say what to compute; a bare name in a sentence is none."""
    texts = [page.read_text() for page in PAGES]
    results = [" ".join(words.split()) for text in texts for of in (QUOTED, INDENTED) for words in of.findall(text)]
    return sorted({line for line in results if "--" in line})


def bash(line: str, folder: Path) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_GUARD
    )


def test_the_pages_name_commands():
    assert any(line.startswith("compopt-advise --parameters") for line in commands())


@pytest.mark.parametrize("line", [line for line in commands() if "--profile" not in line])
def test_it_runs(line, tmp_path, monkeypatch, capsys):
    """In this process; bash starts others below."""
    probed = {"ranks": 2, "link_bits_per_s": 1e8, "latency_s": 1e-4, "local": [1e10, 1e11]}
    (tmp_path / "probe.json").write_text(json.dumps(probed))  # as compopt.probe would
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)
    assert not {"|", "&&", ";", "&", ">"} & set(words), "needs a shell"
    if words[0] == "python":
        package_main(words[3:])
    else:
        advise_command.main(words[1:])
    assert ("Quantize" if "--pipeline" in line else "AdamW+DDP") in capsys.readouterr().out


def test_no_shell_has_a_command_of_this_name():
    """bash has a builtin `compopt`: a command of that name cannot be run."""
    assert bash("type -t compopt", ROOT).stdout.strip() == "builtin"
    assert bash("type -t compopt-advise", ROOT).stdout.strip() == "file"


@pytest.mark.slow
def test_python_m_compopt_names_its_commands_and_version(tmp_path, capsys):
    assert bash("python -m compopt --version", tmp_path).stdout.strip() == f"compopt {compopt.__version__}"
    with pytest.raises(SystemExit):
        package_main(["advise", "--help"])
    assert "python -m compopt advise" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        package_main(["advize"])
    assert ended.value.code == 2 and "invalid choice: 'advize'" in capsys.readouterr().err


@pytest.mark.parametrize("target", sorted({name for page in PAGES for name in TARGET.findall(page.read_text())}))
def test_make_has_every_target_that_is_named(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["links", pytest.param("activations", marks=pytest.mark.slow)])
def test_a_page_shows_what_the_command_prints(name, tmp_path):
    page = (ROOT / f"docs/{name}.md").read_text()
    command = re.search(r"^    (compopt-advise .*)$", page, re.M)[1]
    printed = bash(command, tmp_path).stdout.strip().splitlines()
    assert len(printed) > 20
    first, *_, last = shown = ["    " + line if line else "" for line in printed]
    quoted = page[page.index(first) : page.index(last) + len(last)]
    for part in quoted.split("    ...\n"):  # lines that the page leaves out
        assert part.rstrip("\n") in "\n".join(shown)
