"""Advice over drawn and written-down situations: what can never be, and what an expert would say."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compopt
from compopt.costmodel import DEVICES, METHODS, advise
from compopt.costmodel.advice import AS_FAST, DENSE, SAME_LOSS, WORTH_IT, _allowed

EXAMPLES = int(os.environ.get("COMPOPT_EXAMPLES", "200"))
powers = st.floats(0, 1)


def between(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers of every size between two."""
    return powers.map(lambda u: low * (high / low) ** u)


situations = st.fixed_dictionaries(
    {
        "model": between(1e3, 1e12).map(round),
        "ranks": st.integers(1, 4096),
        "link_bits_per_s": between(1e6, 4e12),
        "step_s": between(1e-3, 100),
        "device": st.sampled_from(sorted(DEVICES)),
        "loss_budget": st.sampled_from([0.0, 0.01, 0.02, 0.05, 1.0]),
        "latency_s": between(1e-6, 0.1),
        "interference": st.tuples(between(1e-4, 1), between(1e-13, 1e-7)),
    }
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(situations, between(1.1, 100))
def test_no_prediction_is_impossible(situation, factor):
    model = situation.pop("model")
    advice = advise(model, **situation)
    rows = {row.method: row for row in advice.rows}
    for row in advice.rows:
        parts = (row.step.compute, row.step.local, row.step.exchange, row.sent, row.state, row.run, row.run_bytes)
        assert all(part >= 0 and math.isfinite(part) for part in parts)
        assert row.step.total >= situation["step_s"] == row.step.compute
    limit = 1 + situation["loss_budget"]
    may = [row for row in advice.rows if row.ours and row.fits and row.loss is not None and row.loss <= limit + 1e-9]
    if advice.method == DENSE:
        assert advice.situation.machine.ranks == 1 or all(row.run < WORTH_IT for row in may)
    else:
        fastest = max(row.run for row in may)
        assert fastest >= WORTH_IT
        as_fast = [row for row in may if row.run >= max(WORTH_IT, fastest / AS_FAST)]
        least = min(row.loss for row in as_fast)
        assert rows[advice.method] in as_fast and rows[advice.method].loss <= least + SAME_LOSS
    assert str(advise(model, **situation)) == str(advice)  # the same call, the same bytes
    quicker = advise(model, **situation | {"link_bits_per_s": factor * situation["link_bits_per_s"]})
    for row, other in zip(advice.rows, quicker.rows, strict=True):
        assert other.step.total <= row.step.total * (1 + 1e-12)
    widths = {len(line) for line in str(advice).splitlines() if " %  " in line}
    assert len(widths) <= 2  # columns line up; losses and "does not fit" may be longer at the end


LOCAL = "LocalSteps 30"
EXPERT = {  # parameters, ranks, bit/s of a rank, seconds of computation, device: what to do
    "124 M on 4 GPUs over 1 Gbit/s": (124e6, 4, 1e9, 0.3, "a100", LOCAL),
    "350 M on 8 over 100 Mbit/s": (350e6, 8, 1e8, 0.4, "a100", LOCAL),
    "7 B on 64 over 25 Gbit/s": (7e9, 64, 25e9, 2.0, "h100", "tracked 16, int8"),
    "7 B on 64 over 400 Gbit/s": (7e9, 64, 400e9, 2.0, "h100", DENSE),
    "70 B on 512 over 200 Gbit/s": (70e9, 512, 200e9, 10.0, "h100", DENSE),
    "1 B alone": (1e9, 1, 1e9, 1.0, "h100", DENSE),
    "124 M inside one node": (124e6, 8, 2.4e12, 0.1, "h100", DENSE),
    "10 M on two CPUs over 10 Gbit/s": (10e6, 2, 10e9, 0.4, "cpu", DENSE),
    "10 M on two CPUs over 100 Mbit/s": (10e6, 2, 1e8, 0.4, "cpu", LOCAL),
    "1.8 B on 16 across towns, 500 Mbit/s": (1.8e9, 16, 5e8, 1.0, "rtx4090", LOCAL),
}


@pytest.mark.parametrize("words", EXPERT)
def test_the_answer_is_an_experts(words):
    parameters, ranks, link, seconds, device, answer = EXPERT[words]
    advice = advise(round(parameters), ranks=ranks, link_bits_per_s=link, step_s=seconds, device=device)
    assert advice.method == answer, str(advice)


def test_every_row_can_be_pasted():
    for name, method in METHODS.items():
        compile(method.line, name, "eval")
        if "compopt.LocalSteps" in method.line:
            params = [torch.nn.Parameter(torch.zeros(4, 4))]
            line = method.line.replace("lr=...", "lr=1e-3")
            group = eval(line, {"compopt": compopt, "torch": torch, "params": params}).state_dict()["param_groups"][0]
            asked = group["every"], group["every_warmup_steps"], group["payload_dtype"], group["delay"]
            bits = method.options.get("bits", 4)
            assert asked == (method.options["every"], method.growing, f"int{bits}", 0), name


def test_rivals_are_shown_and_never_advised():
    advice = advise(124_000_000, ranks=4, link_bits_per_s=1e8, step_s=0.5, loss_budget=1.0)
    assert {"PowerSGD rank 4", "DDP, bf16 hook", DENSE} <= {row.method for row in advice.rows}
    allowed = [row.method for row in _allowed(advice.situation, advice.rows)]
    assert allowed and all(METHODS[name].ours for name in allowed)


def test_all_of_backward_but_its_last_bucket_hides_communication():
    advice = advise(124_000_000, ranks=4, link_bits_per_s=1e9, step_s=0.9)
    assert advice.situation.overlap_s == pytest.approx(0.9 * 2 / 3 * 0.9)


def test_advice_of_local_steps_says_that_wider_models_lost_more():
    said = {
        size: advise(size, ranks=2, link_bits_per_s=1e8, step_s=0.5).recommendation for size in (1_000_000, 124_000_000)
    }
    assert all("Use LocalSteps" in words for words in said.values())
    assert "At width 512 every=30 was 12 % above" in said[124_000_000] and "width 512" not in said[1_000_000]


def test_what_a_probe_saw_of_interference_is_in_every_step():
    """A tenth of a second of waiting, and a nanosecond a byte that is sent."""
    there = dict(ranks=4, link_bits_per_s=1e10, step_s=1.0)
    plain, met = (advise(124_000_000, interference=seen, **there).rows for seen in ((0.0, 0.0), (0.1, 1e-9)))
    for row, slower in zip(plain, met, strict=True):
        if row.method.startswith("LocalSteps"):
            assert slower.step.exchange > row.step.exchange
        else:
            assert slower.step.exchange == pytest.approx(row.step.exchange + 0.1 + 1e-9 * row.sent)
