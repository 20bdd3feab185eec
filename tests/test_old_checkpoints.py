"""Checkpoints of earlier versions load, and their runs go on as they would have (tests/data/write_checkpoints.py)."""

from __future__ import annotations

import functools
import gzip
import sys
from pathlib import Path

import pytest
import torch
from problems import gradients, replicas, step

DATA = Path(__file__).parent / "data"
sys.path.insert(0, str(DATA))
from write_checkpoints import AFTER, BEFORE, FORMS, PAYLOADS, SHAPES, made_of, make  # noqa: E402

every = pytest.mark.parametrize("form", [*FORMS, *PAYLOADS])


@functools.cache
def written() -> dict:
    results = {}
    for name in ("of_0_1_0", "of_0_1_0_payloads"):
        with gzip.open(DATA / f"{name}.pt.gz") as file:
            results |= torch.load(file, weights_only=True)
    return results


@every
def test_a_run_of_0_1_0_goes_on(form):
    saved, dtype = written()[form], made_of(form)[2]
    world, params, optimizers = make(form, saved["params"])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.5  # the checkpoint's is another
        optimizer.load_state_dict(saved["optimizer"])
        assert optimizer._option_groups[0]["step"] == BEFORE and optimizer.param_groups[0]["lr"] != 0.5
    for t in range(BEFORE, BEFORE + AFTER):
        step(world, params, optimizers, gradients(2, t, SHAPES, dtype))
    close = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    for own in params:
        for p, wanted in zip(own, saved["after"], strict=True):
            torch.testing.assert_close(p.detach(), wanted, **close)


@every
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_loads_on_any_number_of_ranks(form, ranks):
    saved, (cls, options, dtype) = written()[form], made_of(form)
    world, params, optimizers = replicas(
        ranks,
        saved["params"],
        lambda own, process_group: cls(
            [{"params": [(f"layer{n}.weight", p) for n, p in enumerate(own)], "compress": True}],
            process_group=process_group,
            **options,
        ),
    )
    for optimizer in optimizers:
        optimizer.load_state_dict(saved["optimizer"])
    for t in range(3):
        step(world, params, optimizers, gradients(ranks, t, SHAPES, dtype))
    assert optimizers[0].stats.step == BEFORE + 3 and optimizers[0].stats.skipped == 0
    for own in params[1:]:
        assert all(map(torch.equal, own, params[0]))
