"""The line of the first step, once, on rank 0: what is compressed, from when on, and how much is sent then."""

from __future__ import annotations

import inspect
import logging
import re

import pytest
import torch
from conformance import OTHERS, Small, loss, make_ranks
from sim import Ranks
from table import CASES, FORMS, GAUSSIAN
from torch import nn

import compopt
from compopt._engine.stats import describe_compression

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
    ranks = two(compopt.RadiusAdamW, lambda: nn.ParameterList([nn.Parameter(torch.zeros(0, 5))]))
    for rank, optimizer in enumerate(ranks.optimizers):
        optimizer.param_groups[0]["compress"] = True
        ranks.models[rank][0].grad = torch.zeros(0, 5)
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
