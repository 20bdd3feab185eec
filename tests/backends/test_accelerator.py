"""Every class on a device that is not the CPU: the same bits, no two devices in a call, no message from host memory.

And the host waits for the device only where it is said here. The device, in fake_device.py, is Python over the CPU;
what is run on it stands in accelerator_run.py. It shows what is asked of a device, not how one behaves.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_GUARD, run_ranks
from torch.utils import backend_registration

if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch has no devices in Python", allow_module_level=True)

import accelerator_run
from accelerator_run import RUNS, SIZE, STEADY
from inside_device_run import CASES as CASES_INSIDE

HERE = Path(__file__).parents[1] / "support"
TOGETHER = 7  # cases a process

# Where the host may wait for the device: module and function of compopt, a case that shows it, and why it does.
LOOKS = {
    # in every step
    "_engine.decision read_scalars": ("AdamS", "the decision: whether the step is applied, its norm"),
    "_engine.exchange sum_over_groups": ("TagcAdamW", "sharded: the norm and the facts of all shards"),
    # in compressed steps of some classes
    "_engine.exchange _read_together": ("TagcAdamW", "how much of each bucket any rank has left: payloads' lengths"),
    "local_steps.local_steps _gradient_norm": ("LocalSteps, rounds", "a rank's own step: its norm"),
    "local_steps.fragment_sync _communicate": ("LocalSteps, rounds", "a round's end: the messages of all ranks"),
    "local_steps.fragment_sync _measure_average": ("LocalSteps, rounds", "a round's end: the norm, what has failed"),
    "local_steps.anchors reset_moments": ("LocalSteps, rounds", "parameters that were not finite: which moments too"),
    "_inside.base_state _are_equal": ("LocalSteps, rounds", "consolidate_state(): which inner state is alike"),
    "_inside.base_state copy_from_rank_0": ("LocalSteps, rounds", "consolidate_state(): inner state that is no mean"),
    "_state.residuals norm": ("RadiusAdamW", "ranks are lost: the warning says how much the others still owe"),
    "separate.projection_reducer commit_state": ("SeparateAdam, adaptive", "each adapt_interval steps: ratio, beta"),
    "radius broadcast_mask": ("RadiusAdamW", "a resample: whether an absent tensor has an old mask"),
    "_engine.step _finish_post_commit": ("RadiusAdamW", "after a resample: whether all ranks have the mask"),
    "_state.masks positions": ("RadiusAdamW", "a new mask, or a loaded one: how many are selected"),
    "_state.bits select_above": ("ScapeAdamS, large", "how many a threshold lets through"),
    "_state.bits _threshold_of_sample": ("ScapeAdamS, large", "a threshold, from a sample"),
    "tagc.sketch __init__": ("TagcAdamW, sketch", "how many elements of each shard are left to peel"),
    "tagc.sketch peel": ("TagcAdamW, sketch", "whether a round of peeling found any"),
    "tagc.sketch encode": ("TagcAdamW, sketch", "which elements no table can hold"),
    "tagc.sketch decode": ("TagcAdamW, sketch", "how many elements a round of peeling gives"),
    "scape.sharded_scape __init__": ("ScapeAdamS, sharded", "where each owner's elements begin"),
    "_state.masks _check_positions": ("RandomK", "positions that are the writer's of an algorithm are checked"),
    # of state in host memory
    "_state.bucket update_masters": ("ScapeAdamS", "offload='all': parameters are compared with masters"),
    "_state.bucket fetch_state": ("ScapeAdamS, sharded", "offloaded masters at positions found on the device"),
    "local_steps.anchor_bucket copy_wide": ("LocalSteps, offloaded", "when they are made: anchors are the parameters"),
    "_engine.engine _fill_state": ("ScapeAdamS", "when it is made: offloaded masters are the parameters"),
    "local_steps.anchor_bucket write_pseudo_gradient": ("LocalSteps, offloaded", "a round's end: parameters"),
    # at the first step, and after state was loaded, lost or moved
    "_engine.handshake compare_optimizers": ("AdamS", "the handshake: checksums of all ranks, compared on the host"),
    "_engine.handshake checksum_values": ("AdamS", "the handshake: parameters are the same on all ranks"),
    "_engine.handshake _checksum_gradients": ("AdamS", "the handshake: gradients are not averaged already"),
    "separate.matrices checksum_projection": ("SeparateAdam", "the handshake: matrices are alike on all ranks, once"),
    "_state.bucket has_residual": ("SeparateAdam", "whether a residual was loaded"),
    "_engine.decision drop_absent": ("SeparateAdam", "which tensors have taken a step, after a load"),
    "radius rebuild_cache": ("RadiusAdamW", "whether a mask was loaded"),
    "scape.scape_masks restore_masks": ("ScapeAdamS", "whether the next mask was loaded"),
    "scape.scape_masks _has_dense_momentum": ("ScapeAdamS, sharded", "whether a mask was loaded"),
    "separate.projecting_optimizer rebuild_cache": ("SeparateAdam, tracked", "whether a basis was loaded"),
    "_engine.decision read_decision": ("TagcAdamW", "a step in which no rank has a gradient of a tensor any more"),
    # when it is asked for
    "_engine.gradients unscale_gradients": ("AdamS", "a GradScaler's scale"),
    "_engine.resharding average_state": ("RadiusAdamW", "consolidate_state() of a residual in host memory"),
    "_engine.resharding gather_shards": ("TagcAdamW", "consolidate_state() of shards, gathered in host memory"),
    "_engine.resharding reshard_state": ("TagcAdamW", "ranks are lost: who owned which shard"),
    "_engine.resharding copy_from_rank_ahead": ("AdamS", "ranks are lost: how far each of the others is"),
    "_engine.handshake gather_json": ("LocalSteps", "ranks are lost: how far the rounds of each are"),
}  # fmt: skip


@functools.cache
def ran(names: tuple[str, ...]) -> dict[str, dict]:
    """Return the results of a process of its own: a device cannot be taken back."""
    (found,) = run_ranks(run_cases, 1, names)
    return found


def run_cases(rank: int, names: tuple[str, ...]) -> dict[str, dict]:
    return accelerator_run.run_all(names)


@pytest.fixture(scope="module", params=RUNS)  # of the module: tests of one case follow each other, in one worker
def name(request) -> str:
    return request.param


@pytest.fixture
def found(name, request) -> dict:
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [other for other in RUNS if other in asked]
    first = names.index(name) // TOGETHER * TOGETHER
    found = ran(tuple(names[first : first + TOGETHER]))[name]
    assert "raised" not in found, found["raised"]
    return found


@pytest.mark.slow
def test_steps_saving_and_faults_have_the_bits_of_the_cpu(name, found):
    assert found["differs"] == []
    if not RUNS[name].averaging and RUNS[name].cls.__name__ != "LocalSteps":
        assert found["refused"]["phase"] == "skipped" and found["refused"]["kept"] and found["failed"] is True
    if found["mended"] is not None:
        phases = found["mended"]["phases"]
        assert found["mended"]["finite"] and "skipped" not in phases[-1] and any("exchanged" in both for both in phases)
    compressed = set(found["phases"]) - {"dense"}
    assert compressed, "no step of this run is compressed"


@pytest.mark.slow
def test_no_operator_is_given_tensors_of_two_devices(found):
    assert found["mixed"] == {}


@pytest.mark.slow
def test_no_message_is_in_host_memory(name, found):
    """But those of local steps whose anchors are there."""
    assert bool(found["hosts"]) == (RUNS[name].compressed.get("offload") == "outer")


@pytest.mark.slow
def test_the_host_waits_only_where_it_is_said(name, found):
    places = {place for looks in found["looks"].values() for place in looks}
    assert places - LOOKS.keys() == set()
    assert {place for place, (case, _) in LOOKS.items() if case == name} - places == set(), "said, and not seen"


def test_every_place_names_a_case_that_shows_it():
    assert {case for case, _ in LOOKS.values()} <= RUNS.keys()


WAITS = {  # of the host in a compressed step: least and most
    "AdamS": (1, 1),
    "Average": (1, 1),
    "Average, Muon": (1, 1),
    "Separate": (1, 1),
    "Separate, several": (1, 1),
    "SeparateAdam": (1, 1),
    "SeparateAdam, tracked": (1, 1),
    "SeparateAdam, adaptive": (1, 2),
    "SeparateAdam, blocks": (1, 1),
    "SeparateAdam, residual in int8": (1, 1),
    "RadiusAdamW": (1, 2),
    "RadiusAdamW, int8, clipped": (1, 1),
    "RadiusAdamW, residual in int8": (1, 5),
    "ScapeAdamS": (1, 1),
    "ScapeAdamS, large": (4, 4),
    "ScapeAdamS, sharded": (5, 5),
    "TagcAdamW": (3, 3),
    "TagcAdamW, large": (3, 3),
    "TagcAdamW, odd": (3, 3),
    "TagcAdamW, updates": (3, 3),
    "TagcAdamW, int2": (3, 3),
    "TagcAdamW, sketch": (11, 21),
    "LocalSteps": (1, 1),
    "LocalSteps, rounds": (1, 3),
    "LocalSteps, fused": (1, 3),
    "LocalSteps, rounds, several": (1, 3),
    "LocalSteps, int4, fragments": (3, 3),
    "LocalSteps, int2": (1, 3),
    "LocalSteps, offloaded": (1, 10),
    "RandomK": (10, 10),
    "RandomK, sharded": (11, 11),
}


def in_docs() -> dict[str, tuple[int, int]]:
    """By class, as docs/backends.md sums it up: the least and the most that its row names."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", (HERE.parents[1] / "docs/backends.md").read_text(), re.M)
    numbers = [(names, [int(n) for n in re.findall(r"\b\d+\b", re.sub("int8", "", text))]) for names, text in rows]
    return {name: (min(found), max(found)) for names, found in numbers for name in re.findall(r"\w+", names) if found}


def test_the_page_sums_up_how_often_the_host_waits():
    page = in_docs()
    classes = {name.split(",")[0] for name in WAITS} - {"RandomK"}  # an example's
    assert classes <= page.keys()
    for name in classes:
        bounds = [bound for case, bound in WAITS.items() if case.split(",")[0] == name]
        assert page[name] == (min(least for least, _ in bounds), max(most for _, most in bounds)), name


@pytest.mark.slow
def test_the_docs_say_how_often(name, found):
    steps = [sum(looks.values()) / SIZE for phase, looks in found["looks"].items() if phase.startswith("steady")]
    least, most = WAITS[name]
    assert len(steps) == STEADY and min(steps) >= least and max(steps) <= most, steps


@functools.cache
def ran_inside() -> dict[str, dict]:
    command = [sys.executable, str(HERE / "inside_device_run.py")]
    child = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD, cwd=HERE.parents[1])
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES_INSIDE)
def test_a_reduce_scatter_has_the_bits_of_the_cpu_and_the_host_reads_only_how_large_the_union_is(name):
    results = ran_inside()[name]
    assert results["differs"] == [] and results["mixed"] == {}
    assert results["looks"] == {} and results["reads"] == 2 * results["steps"]
    assert results["owed"] == (name in ("float32", "rounded"))
