"""One rule for gradients that make all ranks skip a step, on every backend: the squared norm in float32 overflows."""

from __future__ import annotations

import math

import conformance
import pytest
import torch
from conformance import every_average

import compopt
from compopt._state.masks import Mask

FILLS = {  # what is written where, and whether such a step is skipped
    "inf": ((5, 7), math.inf, True),
    "-inf": ((5, 7), -math.inf, True),
    "nan": ((0, 0), math.nan, True),
    "one of 1e25": ((5, 7), 1e25, True),
    "one of 1e20": ((5, 7), -1e20, True),
    "one of 1e18": ((5, 7), 1e18, False),
    "many of 1e18, together": ((slice(None), slice(None)), 1e18, True),
    "many of 1e16": ((slice(None), slice(None)), -1e16, False),
}


@every_average
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_same_gradients_are_too_large_on_every_back_end(case, backend, monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    for at in (1, 4):  # dense, sparse
        for name, (where, value, skipped) in FILLS.items():
            ranks = conformance.make_ranks(case, 2)
            ranks.train(conformance.loss, at)
            ranks.backward(conformance.loss)
            before = ranks.models[0].up.weight.detach().clone()
            ranks.models[1].up.weight.grad[where] = value
            ranks.world.step(ranks.optimizers)
            assert (ranks.optimizers[0].stats.phase == "skipped") == skipped, name
            assert torch.equal(ranks.models[0].up.weight, before) == skipped, name
            ranks.assert_replicas_equal()


def test_kernels_have_the_same_rule(monkeypatch):
    """By what they write to the header; whole steps take the interpreter minutes."""
    pytest.importorskip("triton")
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU then")
    p = torch.nn.Parameter(torch.zeros(64, 96))
    (bucket,) = (optimizer := compopt.RadiusAdamW([p]))._buckets
    for name, (where, value, skipped) in FILLS.items():
        p.grad = torch.ones_like(p)
        p.grad[where] = value
        header = optimizer.ops.encode(bucket, bucket.grads(), Mask(bucket)).header
        assert header.isnan().tolist() == [skipped], name
    assert optimizer.ops.encode(bucket, [None], Mask(bucket)).header.tolist() == [0.0]
