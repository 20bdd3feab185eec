"""Means to watch a run: its first line, totals, its summary, TensorBoard's event files, torch.profiler's ranges."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import io
import json
import logging
import os
import re
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import local_runs
import problems
import pytest
import torch
import torch.distributed as dist
from conformance import OTHERS, Small, loss, make_ranks
from in_place import as_torchrun_would
from ranks import run_ranks
from sim import Ranks
from table import CASES, FORMS, GAUSSIAN, by_name, local_adamw
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

import compopt
from compopt._engine.stats import WaitRecord, describe_compression, format_bytes

NAMES = "bytes_sent", "run_bytes_sent", "run_share", "wait_seconds", "straggler_seconds"


def train(rank: int, optimizer, model, steps: int, seconds: float = 0.0) -> list:
    """The stats of each step."""
    records = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, 96, generator=generator)).square().mean().backward()
        time.sleep(seconds * rank)
        optimizer.step()
        optimizer.zero_grad()
        records.append(optimizer.stats)
    return records


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96))


def totals_of_classes(rank: int) -> dict[str, tuple]:
    results = {}
    for case in [*CASES, *FORMS]:
        model = DDP(net())
        optimizer = case.make(model.parameters())
        records = train(rank, optimizer, model, 6)
        results[case.name] = (
            [one.bytes_sent for one in records],
            [one.bytes_dense for one in records],
            [one.wait_seconds for one in records],
            json.loads(json.dumps(optimizer.stats.as_dict())),
        )
    return results


def test_every_class_has_flat_stats_and_totals_of_its_run():
    for results in run_ranks(totals_of_classes, 2):
        for name, (sent, dense, waited, stats) in results.items():
            assert all(isinstance(value, int | float | str) for value in stats.values()), name
            assert set(NAMES) <= stats.keys(), name
            assert (stats["run_steps"], stats["run_bytes_sent"], stats["run_bytes_dense"]) == (6, sum(sent), sum(dense))
            assert stats["run_share"] == sum(sent) / sum(dense) and sum(dense) > 0, name
            assert stats["run_wait_seconds"] == pytest.approx(sum(waited)) and sum(waited) > 0, name


def with_a_slow_rank(rank: int) -> tuple[float, float]:
    """Return this rank's waits, and for whom, in steps for which rank 1 takes so much longer as counts anywhere."""
    model = DDP(net())
    optimizer = compopt.SeparateAdam(model.parameters())
    train(rank, optimizer, model, 2)
    began = time.perf_counter()
    before = dataclasses.replace(train(rank, optimizer, model, 4)[-1].run)
    slow = torch.tensor(max(0.05, time.perf_counter() - began))  # as long as four steps
    dist.all_reduce(slow, dist.ReduceOp.MAX)
    after = train(rank, optimizer, model, 12, float(slow))[-1].run
    waits = after.wait_seconds - before.wait_seconds, after.straggler_seconds - before.straggler_seconds
    return tuple(seconds / float(slow) for seconds in waits)


def test_waiting_for_a_slow_rank_is_told_from_waiting_for_the_network():
    (fast, fast_for_ranks), (_, slow_for_ranks) = run_ranks(with_a_slow_rank, 2)
    assert fast > 10 > slow_for_ranks, "of 12 steps"
    assert fast_for_ranks > 0.75 * fast


def test_ranks_tell_each_other_their_waits_in_turns():
    """Against the definition, over 12 steps of three ranks."""
    waits = [0.5, 0.25, 1.0]
    ranks = [WaitRecord() for _ in waits]
    for step in range(1, 13):
        report = [rank.make_field(step, i, 3)[0] for i, rank in enumerate(ranks)]
        for rank, seconds in zip(ranks, waits, strict=True):
            rank.note_field(step, 3, sum(report) / 3)
            rank.add_wait(seconds)
            waited, for_ranks = rank.take_step()
            assert waited == seconds
            if step > 6:  # everyone has had a turn
                assert for_ranks == seconds - 0.25
    assert ranks[0].mean_of_rank == {0: 0.5, 1: 0.25, 2: 1.0}


def test_skipped_steps_are_counted_and_a_rebuilt_session_goes_on_counting():
    model = net()
    optimizer = by_name["RadiusAdamW"].make(model.parameters())
    train(0, optimizer, model, 2)
    next(model.parameters()).grad = torch.full((96, 96), float("nan"))
    optimizer.step()
    assert (optimizer.stats.run.steps, optimizer.stats.run.skipped) == (3, 1)
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    train(0, optimizer, model, 1)
    assert (optimizer.stats.run.steps, optimizer.stats.run.skipped, optimizer.stats.skipped) == (4, 1, 1)


def test_the_end_of_a_round_counts_no_skipped_step_again():
    params, optimizers = local_runs.train(2, 2)
    not_finite = [[torch.full_like(p, float("nan")) for p in own] for own in params]
    world = optimizers[0].comm.world
    problems.step(world, params, optimizers, not_finite)
    local_runs.end_round(optimizers)
    problems.step(world, params, optimizers, problems.gradients(2, 4))
    runs = [(one.stats.run.steps, one.stats.run.skipped, one.stats.skipped) for one in optimizers]
    assert runs == [(4, 1, 1)] * 2


def small_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(torch.randn(8, 96, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean()


SAVING = [(case.name, case.make) for case in [*CASES, *FORMS]]
SAVING.append(("LocalSteps, delay", lambda params, **options: local_adamw(params, every=4, delay=2, **options)))


@pytest.mark.parametrize("make", [make for _, make in SAVING], ids=[name for name, _ in SAVING])
def test_the_bytes_of_a_save_count_in_the_run_and_in_no_step(make):
    ranks = Ranks(2, net, make)
    ranks.train(small_loss, 6)
    (first, _), before = ranks.optimizers, ranks.optimizers[0].comm.bytes_sent
    steps = first.stats.run.bytes_sent
    assert steps == before and first.stats.run.bytes_of_saves == 0
    last = first.stats.bytes_sent
    ranks.world.consolidate(ranks.optimizers)
    sent, run = first.comm.bytes_sent - before, first.stats.run
    assert (run.bytes_sent, run.bytes_of_saves, first.stats.bytes_sent) == (steps + sent, sent, last)
    assert sent > 0 or not (first.rank_local_state or first.sharded)
    assert first.stats.as_dict()["run_bytes_of_saves"] == sent
    ranks.train(small_loss, 1)
    after = first.stats.run
    assert (after.bytes_of_saves, after.bytes_sent) == (sent, run.bytes_sent + first.stats.bytes_sent)
    worlds = [world for world in (ranks.world, ranks.world.beside) if world]  # delayed exchanges have one of their own
    assert after.bytes_sent == first.comm.bytes_sent == sum(world.comms[0]._bytes_sent for world in worlds)


def test_no_key_of_the_flat_stats_is_a_logger_s_own():
    """Trainers, W&B and Lightning have a "step" and an "epoch" of their own."""
    optimizer = compopt.SeparateAdam(net().parameters())
    assert not {"step", "epoch", "loss", "global_step"} & optimizer.stats.as_dict().keys()
    assert optimizer.stats.as_dict()["applied_steps"] == 0


def test_a_single_process_sends_nothing():
    model = net()
    optimizer = compopt.SeparateAdam(model.parameters())
    stats = train(0, optimizer, model, 2)[-1]
    assert (stats.bytes_sent, stats.run.bytes_sent, stats.run.share) == (0, 0, 0.0)


def summary(rank: int) -> str:
    os.environ["COMPOPT_QUIET"] = "0"
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        model = DDP(net())
        optimizer = compopt.SeparateAdam(model.parameters())
        train(rank, optimizer, model, 24)
        optimizer.consolidate_state()
        del model, optimizer
        gc.collect()
    return printed.getvalue()


def test_rank_0_sums_the_run_up_at_its_end():
    first, second = run_ranks(summary, 2)
    line = first.splitlines()[-1]
    assert (
        line.startswith("compopt: SeparateAdam: 24 steps. Rank 0 sent ")
        and "% of DDP's 1.79 MB, 73.7 kB of them in con" in line
    ), line
    assert second == ""


def rounds(rank: int) -> str:
    os.environ["COMPOPT_QUIET"] = "0"
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        model = DDP(net())
        inner = torch.optim.AdamW(model.parameters())
        optimizer = compopt.LocalSteps(inner, every=3, growth_steps=0, payload_dtype="bfloat16")
        train(rank, optimizer, model, 6)
        assert optimizer.stats.run.bytes_sent < 0.42 * optimizer.stats.run.bytes_dense
        assert optimizer.stats.run.wait_seconds > 0
    return printed.getvalue()


def test_local_steps_say_what_an_exchange_sends():
    first, second = run_ranks(rounds, 2)
    line = "ranks take 3 steps of their own between syncs. A sync sends 5"
    assert line in first.splitlines()[0] and "of the gradients, 1" in first and second == ""


def test_a_model_smaller_than_a_message_has_no_share(capsys):
    def make(params, process_group):
        options = dict(every=30, payload_dtype=None, process_group=process_group)
        return compopt.LocalSteps(torch.optim.AdamW(params), **options)

    Ranks(2, lambda: nn.Linear(96, 1), make).train(small_loss, 1)
    printed = capsys.readouterr().err
    assert "the gradients of a step have 388 bytes: this model is too small" in printed
    assert "%" not in printed


@pytest.mark.parametrize("count, text", [(7, "7 bytes"), (1500, "1.5 kB"), (68_488_416, "68.5 MB"), (2e9, "2 GB")])
def test_bytes_are_shown_with_three_digits(count, text):
    assert format_bytes(count) == text


def scalars(folder: Path) -> dict[str, list[float]]:
    """All scalars of a folder's event files, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    results = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            results[tag] = [event.value for event in events.Scalars(tag)]
    return results


def plain_loop(rank: int, folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    model = DDP(net())
    optimizer = compopt.SeparateAdam(model.parameters())
    writer = SummaryWriter(f"{folder}/{rank}")
    for step in range(4):
        train(rank, optimizer, model, 1)
        for name, value in optimizer.stats.as_dict().items():
            if not isinstance(value, str):
                writer.add_scalar(f"compopt/{name}", value, step)
    writer.close()


def skip_without(*packages: str) -> None:
    """Skip the test where one is missing; it is imported in the ranks alone."""
    if missing := [name for name in packages if find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")


def test_a_plain_loop_writes_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    run_ranks(plain_loop, 2, str(tmp_path))
    results = scalars(tmp_path / "0")
    for name in NAMES:
        assert len(results[f"compopt/{name}"]) == 4, name
    assert min(results["compopt/bytes_sent"]) > 0 and 0 < results["compopt/run_share"][-1] < 1
    assert min(results["compopt/wait_seconds"]) > 0


def trainer_loop(rank: int, folder: str) -> None:
    from hf_models import gpt2, trainer

    from compopt.integrations.hf import CompoptCallback

    as_torchrun_would(rank, 2)
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/logs"
    options = {"optimizer_cls_and_kwargs": (compopt.SeparateAdam, {"lr": 1e-3})}
    run = trainer(Path(folder), gpt2(), [CompoptCallback()], steps=6, report_to=["tensorboard"], **options)
    run.train()
    assert "share" in run.state.log_history[-2]


def test_the_trainer_reports_to_tensorboard(tmp_path):
    skip_without("tensorboard", "transformers", "accelerate")
    run_ranks(trainer_loop, 2, str(tmp_path))
    results = scalars(tmp_path / "logs")
    for name in ("bytes_sent", "share", "wait_seconds", "straggler_seconds", "residual_norm"):
        assert len(results[f"train/{name}"]) == 3, (name, results)
    assert min(results["train/bytes_sent"]) > 0 and min(results["train/wait_seconds"]) > 0


def lightning_loop(rank: int, folder: str) -> None:
    import lightning.pytorch as pl
    from in_place import in_place
    from lightning.pytorch.loggers import TensorBoardLogger

    from compopt.integrations.lightning import CompoptCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return compopt.SeparateAdam(self.parameters())

    as_torchrun_would(rank, 2)
    data = torch.utils.data.DataLoader(torch.randn(64, 96), batch_size=4)
    logger = TensorBoardLogger(folder, name="", version="run")
    with in_place():
        pl.Trainer(
            max_steps=6, accelerator="cpu", devices=2, strategy="ddp", logger=logger, log_every_n_steps=2,
            callbacks=[CompoptCallback()], enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=2,
        ).fit(Module(), data)  # fmt: skip


def test_lightning_s_logger_gets_them_too(tmp_path):
    skip_without("tensorboard", "lightning")
    run_ranks(lightning_loop, 2, str(tmp_path))
    results = scalars(tmp_path)
    for name in NAMES:
        assert len(results[f"compopt/{name}"]) == 3, (name, results.keys())  # not one of each batch of a step


TRACKED = [case for case in OTHERS if case.form == "tracked"]
COMPRESSING = [case for case in CASES + FORMS + TRACKED if "when" in inspect.signature(case.cls).parameters]


def two(cls, make_model=Small, **options) -> Ranks:
    return Ranks(2, make_model, lambda ps, process_group: cls(ps, process_group=process_group, **options))


def heard(capsys, ranks: Ranks, steps: int = 1) -> list[str]:
    capsys.readouterr()
    ranks.train(loss, steps)
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("compopt: ")]


@pytest.mark.parametrize("case", COMPRESSING, ids=lambda case: case.name)
def test_once_on_rank_0_and_true(case, capsys):
    ramp = {"density_steps": 0} if "density_steps" in case.compressed else {}
    often = {"interval": 1000} if case.cls is compopt.RadiusAdamW else {}
    ranks = make_ranks(case, 2, dense_steps=3, **ramp, **often)
    (line,) = heard(capsys, ranks, 8)
    assert "3 of 7 tensors are compressed" in line and "from step" in line
    start = int(re.search(r"from step (\d+) on", line).group(1))
    assert 3 <= start <= 4
    share = float(re.search(r"sends ([\d.]+)% of the bytes", line).group(1)) / 100
    stats = ranks.optimizers[0].stats
    header = 4 * sum(len(b.params) + len(b.control.numbers) for b in ranks.optimizers[0]._buckets)
    sent = (stats.bytes_sent - header) / stats.bytes_dense
    assert stats.phase != "dense" and abs(share - sent) < 0.03 * sent + 0.01, (share, sent)


def test_by_default(capsys):
    (line,) = heard(capsys, two(compopt.SeparateAdam))
    assert "SeparateAdam: 3 of 7 tensors are compressed, from step 11 on" in line
    assert re.search(r"a dense one before it 26%", line)


@pytest.mark.parametrize(
    ("dtype", "payload", "dense"),
    [
        (torch.float64, None, 100),
        (torch.bfloat16, None, 100),
        (torch.float64, "float32", 50),
        (torch.bfloat16, "int8", 52),
    ],
)
def test_shares_are_of_the_gradients_as_they_are(dtype, payload, dense, capsys):
    (line,) = heard(capsys, two(compopt.RadiusAdamW, lambda: Small(dtype), density=0.4, payload_dtype=payload))
    assert f"of the bytes of an all-reduce of the gradients, a dense one before it {dense}%" in line


def test_a_dense_step_inside_fsdp_is_not_quantized():
    """The line promised 26 %; what `fully_shard` shards over the ranks goes by a reduce-scatter of floats."""
    buckets = two(compopt.SeparateAdam).optimizers[0]._buckets
    line = describe_compression(buckets, [0.0 for _ in buckets], in_fsdp=True)
    assert "0.0% of the bytes of FSDP2's reduce-scatter of the gradients, a dense one before it 100%" in line


def test_nothing_to_send_has_no_share(capsys):
    def make(params, **options):
        return compopt.RadiusAdamW([{"params": params, "compress": True}], **options)

    ranks = two(make, lambda: nn.ParameterList([nn.Parameter(torch.zeros(0, 5))]))
    for model in ranks.models:
        model[0].grad = torch.zeros(0, 5)
    capsys.readouterr()
    ranks.world.step(ranks.optimizers)
    line = capsys.readouterr().err
    assert line.startswith("compopt: ") and "%" not in line


def test_the_fall_of_the_density_is_counted(capsys):
    (line,) = heard(capsys, two(compopt.ScapeAdamS, dense_steps=5))
    assert "from step 6 on, falling to their density over 100 steps" in line


def test_that_nothing_will_be_compressed_is_told(capsys):
    ranks = two(compopt.RadiusAdamW, lambda: nn.Linear(8, 8))
    capsys.readouterr()
    ranks.train(lambda model, rank, step: model(torch.randn(2, 8)).sum(), 1)
    assert "none of 2 tensors is compressed" in capsys.readouterr().err


def test_one_process_is_told_that_it_stays_dense(capsys):
    p = nn.Parameter(torch.zeros(64, 64))
    optimizer = compopt.RadiusAdamW([p])
    p.grad = torch.ones_like(p)
    capsys.readouterr()
    optimizer.step()
    assert "no other ranks" in capsys.readouterr().err


def test_dense_classes_and_wrapped_ones_say_nothing(capsys):
    assert heard(capsys, two(compopt.AdamS)) == []
    wrapped = Ranks(
        2, Small, lambda ps, process_group: compopt.Separate(compopt.AdamS(ps), process_group=process_group, **GAUSSIAN)
    )
    assert len(heard(capsys, wrapped)) == 1


def test_it_can_be_silenced(capsys, monkeypatch):
    monkeypatch.setenv("COMPOPT_QUIET", "1")
    assert heard(capsys, two(compopt.RadiusAdamW)) == []
    monkeypatch.delenv("COMPOPT_QUIET")
    log = logging.getLogger("compopt")
    monkeypatch.setattr(log, "level", logging.WARNING)
    assert heard(capsys, two(compopt.RadiusAdamW)) == []


def test_a_logger_that_shows_it_gets_it_and_stderr_does_not(capsys, caplog):
    with caplog.at_level(logging.INFO, logger="compopt"):
        assert heard(capsys, two(compopt.RadiusAdamW)) == []
    assert any("tensors are compressed" in record.message for record in caplog.records)


def test_a_step_that_is_skipped_is_not_the_first(capsys):
    ranks = two(compopt.RadiusAdamW)
    ranks.backward(loss)
    next(ranks.models[0].parameters()).grad.fill_(float("inf"))
    capsys.readouterr()
    ranks.world.step(ranks.optimizers)
    assert "compopt: " not in capsys.readouterr().err
    assert len(heard(capsys, ranks)) == 1


STAGES = ("compopt::encode", "compopt::exchange", "compopt::decide", "compopt::commit")
MAKE = {
    "SeparateAdam": functools.partial(compopt.SeparateAdam, lr=1e-2, rank=4, dense_steps=0),
    "TagcAdamW": functools.partial(compopt.TagcAdamW, lr=1e-2, density=0.1),
}


def optimizer_after_a_step(name: str, rank: int) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 80), nn.Tanh(), nn.Linear(80, 64))
    optimizer = MAKE[name](model.named_parameters())
    torch.manual_seed(1 + rank)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()  # which compares ranks
    return optimizer


def profiled(rank: int, name: str) -> list[tuple[str, float, float]]:
    """The package's ranges of one step: name, start and end in microseconds."""
    optimizer = optimizer_after_a_step(name, rank)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    with mock.patch("torch.autograd.profiler.record_function", wraps=torch.autograd.profiler.record_function) as made:
        optimizer.step()
    assert not any(str(call.args[0]).startswith("compopt::") for call in made.call_args_list), "no profiler runs"
    events = [event for event in profiler.events() if event.name.startswith("compopt::")]
    return [(event.name, event.time_range.start, event.time_range.end) for event in events]


@pytest.mark.parametrize("name", MAKE)
def test_a_step_shows_its_stages_in_order(name):
    for events in run_ranks(profiled, 2, name):
        counts = Counter(stage for stage, _, _ in events)
        assert set(counts) == set(STAGES)
        assert counts["compopt::decide"] == counts["compopt::commit"] == 1
        assert counts["compopt::exchange"] >= 2  # to start a collective, and to wait for it
        starts = {stage: min(start for other, start, _ in events if other == stage) for stage in STAGES}
        assert sorted(STAGES, key=starts.__getitem__) == list(STAGES)
        (decided,) = (end for stage, _, end in events if stage == "compopt::decide")
        assert starts["compopt::commit"] >= decided
