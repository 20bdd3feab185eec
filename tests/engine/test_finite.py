"""One rule for gradients that make all ranks skip a step, on every backend: the squared norm in float32 overflows."""

from __future__ import annotations

import math

import conformance
import pytest
import torch
from conformance import AVERAGING
from pairs import name_of
from problems import replicas, step
from slow_rows import in_turn

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


@pytest.mark.parametrize(("case", "backend"), in_turn(AVERAGING, ("torch", "native")), ids=name_of)
def test_the_same_gradients_are_too_large_on_every_back_end(case, backend, monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    for at in (1, 4):  # dense, sparse
        bad = conformance.make_ranks(case, 2)
        bad.train(conformance.loss, at)
        for name, (where, value, skipped) in FILLS.items():
            ranks = bad  # which a step that is skipped leaves as they were
            if not skipped:
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


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_gradients_in_float16_may_have_a_norm_that_float16_cannot_hold(bad):
    """In a rank's own step, and of the average; some gradients are float32."""
    # norms of 71,000, and float16 ends at 65,504
    start = [torch.zeros(256, 300, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    grads = [[torch.full_like(p, 256 + rank) for p in start] for rank in range(2)]

    def local(params, process_group):
        sgd = torch.optim.SGD(params, lr=1.0)
        options = dict(every=4, growth_steps=0, max_grad_norm=1.0)
        return compopt.LocalSteps(sgd, **options, process_group=process_group)

    def separate(params, process_group):
        sgd = torch.optim.SGD(params, lr=1.0)
        return compopt.Separate(sgd, max_grad_norm=1.0, process_group=process_group)

    if bad is not None:
        grads[1][0][3, 4] = bad
    for make in (local, separate):
        world, params, optimizers = replicas(2, start, make)
        step(world, params, optimizers, grads)
        skipped = [optimizer.stats.phase == "skipped" for optimizer in optimizers]
        assert skipped == [bad is not None and make is separate, bad is not None]
        for own, skips in zip(params, skipped, strict=True):
            norm = torch.stack([p.detach().float().norm() for p in own]).norm()
            assert float(norm) == 0 if skips else float(norm) == pytest.approx(1, rel=1e-2)
