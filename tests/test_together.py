"""Commits of all buckets in one launch: several buckets, two groups, and the same numbers as bucket by bucket."""

from __future__ import annotations

import pytest
import torch

import compopt
from compopt._state import buckets

OPTIONS = {"AdamS": {}, "RadiusAdamW": {"warmup_steps": 2, "interval": 4, "density": 0.3}}


def trained(name: str, backend: str, monkeypatch) -> list[torch.Tensor]:
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 20_000)
    random = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64, 70 + k, generator=random)) for k in range(4)]
    params += [torch.nn.Parameter(torch.randn(37, generator=random))]
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:]}]
    optimizer = getattr(compopt, name)(groups, lr=0.01, simulate=True, **OPTIONS[name]) if name != "AdamS" else None
    optimizer = optimizer or compopt.AdamS(groups, lr=0.01)
    assert len(optimizer._buckets) == 4
    for step in range(6):
        for p in params:
            p.grad = torch.randn(p.shape, generator=random)
        if step == 3:
            params[2].grad = None  # on all ranks: it stays as it is
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("name", OPTIONS)
def test_buckets_and_groups_step_as_one_after_the_other(monkeypatch, name):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU then")
    ours, theirs = (trained(name, backend, monkeypatch) for backend in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
