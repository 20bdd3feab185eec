"""The promises of every optimizer here in other settings than DDP, over the table of classes: inside FSDP2 on real
ranks, and as the outer optimizer of local steps on simulated ones.

With sharded state a class is a form of the table, which takes all tests of conformance. Nothing is lost inside FSDP2:
test_inside_conservation.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conformance import OTHERS
from fsdp_models import apart, cut, loss, make, train, whole
from local_runs import adamw, are_equal
from problems import gradients, replicas, step, weights
from ranks import run_ranks
from table import CASES, FORMS, Case
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import compopt

STEPS = range(4)  # two of a dense start, one without residuals, one that sends those of the step before
INSIDE = {case.name: case for case in CASES + FORMS + OTHERS if case.works_inside}
OUTER = [case for case in CASES + FORMS if case.works_outside]
every_outer = pytest.mark.parametrize("case", OUTER, ids=lambda case: case.name)


def test_a_reducer_works_in_every_setting():
    """The class of docs/writing.md, by its one line in the table."""
    assert {case.form for case in FORMS if case.cls.__name__ == "RandomK"} == {"", "sharded"}
    assert "RandomK" in INSIDE and "RandomK" in [case.name for case in OUTER]


# Inside FSDP2


@functools.cache
def reference_run(rank: int, reference: Callable[..., torch.optim.Optimizer], lr: float) -> torch.nn.Module:
    """The reference that several classes are compared with, trained once."""
    model = cut(make())
    train(model, reference(model.parameters(), lr=lr), STEPS, rank, clip=0.5)
    return model


def beside_the_reference(rank: int, name: str) -> float:
    """Losslessly, beside FSDP2 and the reference: how far parameters are apart, over how far they went."""
    case = INSIDE[name]
    ours, theirs = cut(make()), reference_run(rank, case.reference, case.lr)
    optimizer = case.make(ours.parameters(), **case.lossless)
    train(ours, optimizer, STEPS, rank, clip=0.5)
    assert optimizer.fsdp_backward is not None
    return apart(ours, theirs) / apart(make(), theirs)


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of everything that a step may change."""
    optimizer.state_dict()  # settles masks that are still on their way
    kept = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return [whole(model), *(getattr(value, "_local_tensor", value).clone() for value in kept)]


def skips(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """An inf in one rank's gradient: nothing changes on any rank, and training goes on."""
    before, phase = held(model, optimizer), optimizer.stats.phase
    optimizer.zero_grad()
    (loss(model, 4, rank) * (float("inf") if rank == 1 else 1)).backward()
    optimizer.step()
    unchanged = optimizer.stats.phase == "skipped" and all(map(torch.equal, before, held(model, optimizer)))
    train(model, optimizer, range(5, 7), rank)
    return unchanged and optimizer.stats.phase == phase and bool(whole(model).isfinite().all())


def compressed(rank: int, name: str) -> tuple[str, float, bool]:
    """Compressed and clipped: the phase, the distance to the parameters of a run that is clipped from outside, and
    whether that run skips a step."""
    case = INSIDE[name]
    runs = []
    for limit, outside in ((0.5, None), (None, 0.5)):
        model = cut(make())
        torch.manual_seed(0)
        optimizer = case.make(model.parameters(), max_grad_norm=limit)
        train(model, optimizer, STEPS, rank, clip=outside)
        runs.append(whole(model))
    far = float((runs[0] - runs[1]).abs().max())
    return optimizer.stats.phase, far, skips(rank, model, optimizer)


def all_inside(rank: int) -> dict[str, tuple[float, str, float, bool]]:
    return {name: (beside_the_reference(rank, name), *compressed(rank, name)) for name in INSIDE}


@pytest.mark.long
def test_inside_fsdp2_lossless_equals_the_reference_a_clip_one_from_outside_and_all_skip_together():
    for answers in run_ranks(all_inside, 2):
        for name, (far, phase, clipped, skipped) in answers.items():
            assert skipped, name
            assert far < 1e-9, (name, far)
            assert phase != "dense", name
            if INSIDE[name].method != "separate":  # whose clip takes from residuals too
                assert clipped < 1e-12, (name, clipped)


SAVED = ("TagcAdamW", "SeparateAdam, tracked", "Average")  # a form for each way to keep what is owed


def saved(rank: int, folder: str, write: bool) -> dict[str, tuple[float, list[float]]]:
    """A run that goes on, and one from its checkpoint: how far apart they end, and what is kept for the next step."""
    results = {}
    for name in SAVED:
        case = INSIDE[name]
        first, second = cut(make()), cut(make())
        optimizer, other = (case.make(model.parameters()) for model in (first, second))
        place = f"{folder}/{name}"
        if write:
            train(first, optimizer, range(4), rank)
            optimizer.consolidate_state()
            weights, state = get_state_dict(first, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place)
        weights, state = get_state_dict(second, other)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=place)
        set_state_dict(second, other, model_state_dict=weights, optim_state_dict=state)
        entries = other.state.values()
        kept = [float(entry[n].sum()) for entry in entries for n in ("residual", "basis") if n in entry]
        for model, one in ((first, optimizer), (second, other)):
            train(model, one, range(4, 7), rank)
        results[name] = (apart(first, second) if write else 0.0), kept
    return results


def test_inside_fsdp2_a_checkpoint_goes_on_to_the_bit_and_on_more_ranks(tmp_path):
    written = run_ranks(saved, 2, str(tmp_path), True)
    read = run_ranks(saved, 3, str(tmp_path), False)
    for name in SAVED:
        assert [results[name][0] for results in written] == [0, 0], name
        assert all(results[name][1] == written[0][name][1] for results in (*written, *read)), name
        assert any(written[0][name][1]), name


# The outer optimizer of local steps


def local_steps(case: Case, ranks: int, dtype: torch.dtype = torch.float32, **options):
    """Simulated ranks whose rounds of 3 steps end with an exchange by this optimizer."""

    def make_local(params, process_group):
        return compopt.LocalSteps(
            adamw(params),
            3,
            every_warmup_steps=0,
            process_group=process_group,
            outer=lambda anchors: case.make(anchors, **options),
        )

    return replicas(ranks, weights(dtype=dtype), make_local)


@every_outer
@pytest.mark.parametrize("ranks", [2, 3])
def test_lossless_it_steps_anchors_by_the_mean_pseudo_gradient(case, ranks):
    world, params, optimizers = local_steps(case, ranks, torch.float64, **case.lossless)
    anchors = [torch.nn.Parameter(w) for w in weights()]
    outer = case.reference(anchors, lr=case.lr)
    w = [[torch.nn.Parameter(x) for x in weights()] for _ in range(ranks)]
    inner = [adamw(local) for local in w]
    for t in range(12):
        grads = gradients(ranks, t)
        step(world, params, optimizers, grads)
        for local, optimizer, given in zip(w, inner, grads, strict=True):
            for p, g in zip(local, given, strict=True):
                p.grad = g.clone()
            optimizer.step()
        if t % 3 == 2:
            for anchor, *local in zip(anchors, *w, strict=True):
                anchor.grad = sum(anchor.detach() - p.detach() for p in local) / ranks
            outer.step()
            for local in w:
                for p, anchor in zip(local, anchors, strict=True):
                    p.data.copy_(anchor.detach())
        for p, q in zip(params[-1], w[-1], strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-12)


@every_outer
def test_compressed_it_ends_rounds_with_equal_replicas_and_resumes_to_the_bit(case):
    world, params, optimizers = local_steps(case, 2)
    phases = []
    for t in range(13):
        step(world, params, optimizers, gradients(2, t, dtype=torch.float32))
        phases.append(optimizers[0]._anchors.outer.stats.phase)
        assert are_equal(params) is (t % 3 == 2)
    assert case.cls is compopt.AdamS or {*phases} - {"dense"}
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    again_world, again, others = local_steps(case, 2)
    for local, theirs, optimizer, state in zip(again, params, others, saved, strict=True):
        for p, q in zip(local, theirs, strict=True):
            p.data.copy_(q.detach())
        optimizer.load_state_dict(state)
    for t in range(13, 20):
        step(world, params, optimizers, gradients(2, t, dtype=torch.float32))
        step(again_world, again, others, gradients(2, t, dtype=torch.float32))
    for local, theirs in zip(again, params, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(local, theirs, strict=True))
