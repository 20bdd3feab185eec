"""A tensor without a gradient on one rank, in float32 on the backend chosen by itself: it counts as zeros there.

What the rank owes of the tensor is sent all the same, and its share of the momentum is held back.
"""

from __future__ import annotations

import pytest
import torch
from conformance import every_average
from problems import gradients, replicas, step, weights

SHAPES = [(64, 80), (80,), (260, 520)]


@every_average
@pytest.mark.parametrize("payload", [None, torch.bfloat16], ids=["exact", "bfloat16"])
def test_none_is_as_good_as_zeros(case, payload):
    if payload is not None and "payload_dtype" not in case.bad:
        pytest.skip("sends what the gradients are")
    message = {} if payload is None else {"payload_dtype": payload}

    def make(params, process_group):
        return case.make(params, process_group=process_group, **message)

    runs = [replicas(2, weights(SHAPES, torch.float32), make) for _ in range(2)]
    for t in range(8):
        for zeros, (world, params, optimizers) in zip((False, True), runs, strict=True):
            grads = gradients(2, t, SHAPES, torch.float32)
            if t % 2:
                grads[1][2] = torch.zeros(SHAPES[2]) if zeros else None
            if t % 3 == 1:
                grads[0][0] = torch.zeros(SHAPES[0]) if zeros else None
            step(world, params, optimizers, grads)
    (_, ours, mine), (_, theirs, others) = runs
    for a, b in zip([p for local in ours for p in local], [p for local in theirs for p in local], strict=True):
        assert torch.equal(a, b)
    for one, other in zip(mine, others, strict=True):
        for mine_, theirs_ in zip(one._buckets, other._buckets, strict=True):
            for name in set(mine_.flat) & {"residual"}:
                assert torch.equal(mine_.flat[name], theirs_.flat[name])
