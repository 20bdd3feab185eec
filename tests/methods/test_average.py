"""Average: whole gradients around any optimizer, against an oracle of lines 1 to 5."""

from __future__ import annotations

import pytest
import torch
from oracles import AverageOracle
from problems import COMPRESSED, gradients, replicas, step, weights

import compopt

RANKS, STEPS = 3, 5


def oracle(payload_dtype: torch.dtype | None, max_grad_norm: float | None = None) -> list[torch.Tensor]:
    """Three ranks in float64."""
    one = AverageOracle(weights(), RANKS, sgd, payload_dtype, max_grad_norm)
    for t in range(STEPS):
        one.step(gradients(RANKS, t))
    return one.params


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(ranks: int = RANKS, **options):
    def make(params, process_group):
        return compopt.Average(sgd(params), process_group=process_group, **options)

    world, params, optimizers = replicas(ranks, weights(), make)
    for t in range(STEPS):
        step(world, params, optimizers, gradients(ranks, t))
    return params, optimizers


@pytest.mark.parametrize("norm", [None, 3.0])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_it_is_lines_1_to_5(dtype, norm):
    params, _ = train(payload_dtype=dtype, max_grad_norm=norm)
    close = 1e-7 if dtype and norm else 1e-12  # the norm is that of a message in this dtype
    for p, q in zip(params[0], oracle(dtype, norm), strict=True):
        torch.testing.assert_close(p, q, rtol=close, atol=close)


def test_int8_stays_near_and_owes_what_it_drops():
    exact, _ = train()
    rounded, optimizers = train(payload_dtype=torch.int8)
    norms = [optimizer.stats.residual_norm() for optimizer in optimizers]
    assert all(norm > 0 for norm in norms) and len(set(norms)) == RANKS
    for p, q, compressed in zip(rounded[0], exact[0], COMPRESSED, strict=True):
        assert not torch.equal(p, q)
        assert float((p - q).detach().norm() / q.detach().norm()) < (0.01 if compressed else 0.02)
    assert optimizers[0].stats.bytes_sent < 0.3 * optimizers[0].stats.bytes_dense * 4 / 8


@pytest.mark.parametrize("fused", [False, True])
def test_a_base_gets_the_average_in_the_order_of_the_parameters_memory(fused):
    start = torch.randn(8, 4, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    alone = torch.nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([alone], lr=0.1)

    def make(params, process_group):
        return compopt.Average(torch.optim.AdamW(params, lr=0.1, fused=fused), process_group=process_group)

    world, params, optimizers = replicas(2, [start], make)
    for t in range(3):
        grads = gradients(2, t, [tuple(start.shape)])
        step(world, params, optimizers, grads)
        alone.grad = torch.stack([g for (g,) in grads]).mean(0)
        adamw.step()
    assert not params[0][0].is_contiguous()
    torch.testing.assert_close(params[0][0], alone)
