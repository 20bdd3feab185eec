"""RadiusAdamW against Algorithm 1 written on dense tensors, and what is the class's own."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from oracles import RadiusOracle
from oracles import kernels as reference
from problems import COMPRESSED, gradients, replicas, step, weights
from torch import nn

import compopt


def make(ranks: int, **options):
    start = weights()
    world, params, optimizers = replicas(ranks, start, functools.partial(compopt.RadiusAdamW, **options))
    return world, start, params, optimizers


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        dict(density=0.4, interval=7, dense_steps=4),
        dict(density=0.1, interval=5, dense_steps=0, max_grad_norm=1.0),
        dict(density=0.01, interval=4, dense_steps=3, maximize=True),
    ],
    ids=["plain", "clipped", "damped"],
)
def test_equals_the_oracle(ranks, options):
    hyper = dict(lr=3e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    world, start, params, optimizers = make(ranks, **hyper, **options)
    oracle = RadiusOracle(start, ranks, compress=COMPRESSED, **hyper, **options)
    phases = set()
    for t in range(24):
        grads = gradients(ranks, t)
        step(world, params, optimizers, grads)
        oracle.step(grads)
        phases.add(oracle.phase)
        assert optimizers[0].stats.phase == oracle.phase
        for i, wanted in enumerate(oracle.params):
            torch.testing.assert_close(params[-1][i].detach(), wanted, rtol=1e-11, atol=1e-12)
    assert phases >= {"resample", "sparse"}
    for rank, optimizer in enumerate(optimizers):
        optimizer.state_dict()
        for i, p in enumerate(params[rank]):
            if COMPRESSED[i]:
                torch.testing.assert_close(
                    optimizer.state[p]["residual"], oracle.residual[rank][i], rtol=1e-11, atol=1e-12
                )
                assert torch.equal(
                    reference.unpack_bits(optimizer.state[p]["mask"], p.numel()), oracle.mask[i].view(-1)
                )


def test_the_schedule_resamples_at_once_after_warm_up_and_then_at_multiples_of_the_interval():
    world, _, params, optimizers = make(1, density=0.3, interval=4, dense_steps=6)
    phases = []
    for t in range(14):
        step(world, params, optimizers, gradients(1, t))
        phases.append(optimizers[0].stats.phase[0])
    assert "".join(phases) == "dddddr" + "s" + "r" + "sss" + "r" + "ss"


def test_all_ranks_take_rank_0s_mask_and_a_lost_one_makes_the_next_step_resample():
    world, _, params, optimizers = make(2, density=0.3, interval=100, dense_steps=0)
    step(world, params, optimizers, gradients(2, 0))
    for pending in (
        exchange.in_flight for optimizer in optimizers for exchange in optimizer._session.post_commit.exchanges
    ):
        world.failing_everywhere.add(pending.number)
    step(world, params, optimizers, gradients(2, 1))
    assert optimizers[0].stats.phase == "resample"
    step(world, params, optimizers, gradients(2, 2))
    assert optimizers[1].stats.phase == "sparse"
    masks = [optimizer.state[local[0]]["mask"] for local, optimizer in zip(params, optimizers, strict=True)]
    assert torch.equal(*masks) and masks[0].any()


def test_state_takes_four_bytes_and_one_bit_an_element_beside_adamws():
    p = nn.Parameter(torch.zeros(256, 256))
    optimizer = compopt.RadiusAdamW([p])
    held = {name: t.numel() * t.element_size() / p.numel() for name, t in optimizer.state[p].items() if t.dim()}
    assert held == {"exp_avg": 4, "exp_avg_sq": 4, "residual": 4, "mask": 1 / 8}


def test_a_checkpoint_of_adamw_is_taken_over_and_given_back():
    torch.manual_seed(0)
    p, q = (nn.Parameter(torch.ones(64, 80)) for _ in range(2))
    dense, ours = torch.optim.AdamW([p], lr=1e-2), compopt.RadiusAdamW([q], lr=1e-2, density=0.5, dense_steps=6)
    for t in range(4):
        p.grad = torch.randn(64, 80, generator=torch.Generator().manual_seed(t))
        dense.step()
    q.data.copy_(p)
    ours.load_state_dict(dense.state_dict())
    assert ours.param_groups[0]["step"] == 4
    for optimizer in (dense, ours):  # step 5 is dense: the same
        p.grad = q.grad = torch.randn(64, 80, generator=torch.Generator().manual_seed(9))
        optimizer.step()
    torch.testing.assert_close(p, q)
    back = torch.optim.AdamW([q], lr=1e-2)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    back.step()
    ours.step()
    assert float(back.state[q]["step"]) == 6
