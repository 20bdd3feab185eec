"""capturable=True: a steady step does not wait for the device, and has the bits of one that does.

The cases, and what is done with them, stand in late_runs.py.
"""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import late_runs
import pytest
import torch
from late_runs import CASES, SIZE, STEPS, TRITONS
from sim import Ranks
from torch.utils import backend_registration

import compopt
from compopt._state import buckets
from compopt._state.devices import Passed
from compopt._wire.requests import CommunicationError

HERE = Path(__file__).parent
devices_in_python = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices in Python",
)
# steps that wait, counted from 0: a resample, and the one after it, which asks whether all ranks have the new mask
WAITING = {
    "RadiusAdamW": {1, 2, 4, 5},
    "RadiusAdamW, int8, clipped": {1, 2, 4, 5},
    "SeparateAdam, tracked": {1},  # the first step that finds bases
    "Separate, tracked": {1},
    "Average, absent": {*range(1, STEPS)},  # which of what this rank has no gradient of has one elsewhere
}
ROUNDS = {"SeparateAdam, clipped"}  # the clip's factor is a number of the device, and error feedback rounds twice


def assert_all_is_well(found: dict, rounds: bool = False) -> None:
    assert found["far" if rounds else "differs"] == [], "steps that have other bits than with capturable=False"
    assert found["kept"] == [True, "skipped"]
    assert found["skipped"] == [1, 1] and len(set(found["phases"])) == 1 and len(set(found["bytes"])) == 1
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-6 if rounds else 1e-14)
    assert found["steps"] == STEPS and sum(found["late"]) >= 2, found["late"]


@functools.cache
def ran() -> dict[str, dict]:
    command = [sys.executable, str(HERE / "late_runs.py")]
    child = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=HERE.parent)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@devices_in_python
@pytest.mark.parametrize("name", CASES)
def test_on_a_device_steps_are_the_same_and_nobody_waits(name):
    found = ran()[name]
    assert "raised" not in found, found["raised"]
    assert_all_is_well(found, name in ROUNDS)
    assert found["mixed"] == {}
    waits = {number for number, n in enumerate(found["waits"]) if n}
    assert waits - {0} == WAITING.get(name, set()), found["waits"]


@devices_in_python
def test_on_a_device_what_needs_the_host_is_refused():
    authors, rate, plain, momentum = ran()["refused"]
    assert "base AdamW cannot leave a step undone on the device" in plain and "fused=True" in plain
    assert "base SGD cannot leave a step undone on the device" in momentum
    assert "bias_correction='adams' takes step counts on the host" in authors
    assert "lr is a tensor of the device" in rate and "capturable=False" in rate


@pytest.fixture
def triton(monkeypatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU then")
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")


@pytest.mark.parametrize("name", TRITONS)
def test_kernels_take_the_same_steps_behind_the_gate(triton, name):
    assert_all_is_well(late_runs.run(name, torch.device("cpu")))


# What becomes of a step that ranks could not take, and what is refused: with kernels, whose device is the CPU here


def made(size: int = SIZE, **options) -> Ranks:
    with mock.patch.object(buckets, "BUCKET_BYTES", late_runs.BYTES):
        return Ranks(size, late_runs.Model, functools.partial(compopt.AdamS, lr=1e-2, capturable=True, **options))


def take(ranks: Ranks, spoiled: bool = False) -> None:
    ranks.backward(late_runs.loss)
    if spoiled:
        late_runs.spoil(ranks)
    ranks.world.step(ranks.optimizers)
    ranks.steps += 1


def all_held(ranks: Ranks) -> list[torch.Tensor]:
    return [x for optimizer in ranks.optimizers for x in late_runs.held(optimizer)]


def test_stats_are_read_when_they_are_asked_for(triton, monkeypatch):
    ranks = made()
    take(ranks)
    monkeypatch.setattr(Passed, "query", lambda passed: False)
    for spoiled in (False, True, True):
        take(ranks, spoiled)
    optimizer = ranks.optimizers[0]
    assert optimizer._engine.stats.step == 1 and len(optimizer._engine.late.coming) == 3
    stats = optimizer.stats
    assert (stats.step, stats.phase, stats.skipped) == (4, "skipped", 2)
    assert "up.weight" in stats.reason or "parameter" in stats.reason
    assert not optimizer._engine.late.coming


def test_steps_that_have_come_are_read_when_the_next_begins(triton):
    ranks = made()
    for spoiled in (False, False, True, False):
        take(ranks, spoiled)
    engine = ranks.optimizers[1]._engine
    assert (engine.stats.step, engine.stats.skipped, len(engine.late.coming)) == (3, 1, 1)


def test_many_skipped_steps_are_told_a_step_later(triton):
    ranks = made()
    for optimizer in ranks.optimizers:
        optimizer.max_skipped = 2
    take(ranks)
    take(ranks, spoiled=True)
    take(ranks, spoiled=True)
    with pytest.raises(FloatingPointError, match="2 steps in a row were skipped, the last because of non-finite"):
        take(ranks)
    take(ranks)
    assert ranks.optimizers[0].stats.phase == "dense"


def test_other_settings_on_a_rank_are_told_a_step_later_and_nothing_is_applied(triton):
    ranks = made()
    take(ranks)
    before = all_held(ranks)
    ranks.optimizers[1].param_groups[0]["lr"] = 0.5
    take(ranks)
    assert late_runs.same(before, all_held(ranks))
    with pytest.raises(ValueError, match=r"step 2 was not applied.*ranks differed in an option"):
        take(ranks)
    assert late_runs.same(before, all_held(ranks))
    ranks.optimizers[1].param_groups[0]["lr"] = 1e-2
    take(ranks)
    take(ranks)
    assert not late_runs.same(before, all_held(ranks)) and ranks.optimizers[0].stats.phase == "dense"
    ranks.assert_replicas_equal()


def test_a_rank_that_cannot_send_says_so_and_the_others_a_step_later(triton):
    ranks = made()
    take(ranks)
    before = all_held(ranks)
    ranks.backward(late_runs.loss)
    grad = ranks.models[1].up.weight.grad
    ranks.models[1].up.weight.grad = grad.to_sparse()
    with pytest.raises(TypeError, match="sparse gradient"):
        ranks.world.step(ranks.optimizers)
    assert late_runs.same(before, all_held(ranks))
    assert [o.param_groups[0]["step"] for o in ranks.optimizers] == [2, 2]
    ranks.models[1].up.weight.grad = grad
    with pytest.raises(CommunicationError, match=r"step 2 was not applied.*a rank could not be sent"):
        ranks.world.step(ranks.optimizers[:1])
    take(ranks)
    ranks.assert_replicas_equal()
    assert not late_runs.same(before, all_held(ranks))


def test_payloads_of_different_buckets_are_told_a_step_later(triton):
    ranks = made()
    take(ranks)
    before = all_held(ranks)
    first, second, *_ = ranks.optimizers[1]._buckets
    first.index, second.index = second.index, first.index
    take(ranks)
    assert late_runs.same(before, all_held(ranks))
    with pytest.raises(CommunicationError, match="payloads of different buckets or steps met"):
        take(ranks)


def test_parameters_that_are_frozen_on_all_ranks_are_followed(triton):
    ranks = made()
    take(ranks)
    for model in ranks.models:
        model.down.weight.requires_grad_(False)
    frozen = ranks.models[0].down.weight.detach().clone()
    take(ranks)
    take(ranks)
    assert torch.equal(frozen, ranks.models[0].down.weight) and ranks.optimizers[0].stats.step == 3
    ranks.assert_replicas_equal()


def test_ranks_that_differ_in_it_are_refused(triton):
    ranks = made()
    ranks.optimizers[1].capturable = False
    with pytest.raises(ValueError, match=r"ranks differ.*capturable"):
        take(ranks)


def test_nothing_is_sent_in_backward(triton):
    ranks = made()
    take(ranks)
    ranks.backward(late_runs.loss)
    for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
        optimizer.gradients_ready(reversed(list(model.parameters())))
        assert optimizer._runtime.early.schedule is None


def test_a_copy_and_a_checkpoint_go_on_with_it(triton):
    ranks = made(1)
    for spoiled in (False, True, False):
        take(ranks, spoiled=spoiled)
    (optimizer,) = ranks.optimizers
    other = copy.deepcopy(optimizer)
    assert other.capturable and other.stats.skipped == 0
    saved = optimizer.state_dict()
    assert not optimizer._engine.late.coming, "a state dict tells of all steps"
    fresh = made(1).optimizers[0]
    fresh.load_state_dict(saved)
    assert fresh.capturable and late_runs.same(late_runs.held(optimizer)[9:], late_runs.held(fresh)[9:])


REFUSED = {
    "copies state to the host": (compopt.RadiusAdamW, dict(offload="residual")),
    "when='auto' times steps": (compopt.RadiusAdamW, dict(when="auto")),
    "clip='local' takes the gradient's norm": (compopt.SeparateAdam, dict(clip="local", max_grad_norm=1.0)),
    "sharded=True counts": (compopt.ScapeAdamS, dict(sharded=True)),
    "mask_delay=0 counts": (compopt.ScapeAdamS, dict(mask_delay=0)),
    "clip='scape' takes": (compopt.ScapeAdamS, dict(clip="scape", max_grad_norm=1.0)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_needs_the_host_is_refused(triton, why):
    p = torch.nn.Parameter(torch.zeros(64, 64))
    with pytest.raises(ValueError, match=f"capturable=True cannot be followed here: .*{why}.*capturable=False"):
        REFUSED[why][0]([p], capturable=True, **REFUSED[why][1])


@pytest.mark.parametrize("cls", [compopt.AdamS, compopt.RadiusAdamW, compopt.SeparateAdam, compopt.ScapeAdamS])
def test_the_cpu_is_refused(monkeypatch, cls):
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")
    with pytest.raises(ValueError, match="capturable=True cannot be followed here: parameters are on cpu"):
        cls([torch.nn.Parameter(torch.zeros(64, 64))], capturable=True)
