"""Anchors in host memory: the same run to the bit, and nothing of the outer optimizer on the device."""

from __future__ import annotations

import copy

import pytest
import torch
from local_runs import train
from problems import gradients, replicas, step, weights
from ranks import run_ranks

import compopt
from compopt._local.anchors import copy_wide

OPTIONS = [
    {},
    {"payload_dtype": "int2", "fragments": 2},
    {"delay": 2, "payload_dtype": "int4"},
    {"fragments": 2, "delay": 1, "dense_steps": 2},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_same_run_to_the_bit(options, dtype):
    runs = [train(3, 19, dtype, every=4, offload=offload, **options) for offload in (None, "outer")]
    for own, theirs in zip(*(params for params, _ in runs), strict=True):
        assert all(map(torch.equal, own, theirs))
    a, b = (optimizers[1].stats for _, optimizers in runs)
    assert (a.bytes_sent, a.spread, a.cosine, a.round) == (b.bytes_sent, b.spread, b.cosine, b.round)


@pytest.mark.parametrize("offload", [None, "outer"])
def test_a_frozen_layer_begins_where_it_is_when_it_is_trained(offload):
    """Its anchor is made then, also where it had none of its own."""

    def make(params, process_group):
        params = list(params)
        params[2].requires_grad_(False)
        adamw = torch.optim.AdamW(params, lr=1e-2)
        return compopt.LocalSteps(
            adamw, 4, growth_steps=0, payload_dtype=None, process_group=process_group, offload=offload
        )

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    for t in range(12):
        if t == 4:
            for own in params:
                own[2].data.fill_(3.0)
                own[2].requires_grad_(True)
        grads = gradients(2, t, dtype=torch.float32)
        for given in grads if t < 4 else ():
            given[2] = None
        step(world, params, optimizers, grads)
    assert all(map(torch.equal, *params))
    assert float((params[0][2].detach() - 3).abs().max()) < 0.2, "eight steps of 1e-2 away from where it was set"


def test_anchors_are_copies_though_the_parameter_is_on_the_host_already():
    p = torch.nn.Parameter(torch.ones(3))
    flat, (view,) = copy_wide([p], on_host=True)
    assert p.data_ptr() not in (flat.data_ptr(), view.data_ptr())


@pytest.mark.parametrize("saved", [None, "outer"])
def test_a_checkpoint_goes_from_one_to_the_other(saved):
    _, optimizers = train(2, 6, torch.float32, offload=saved)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    ends = []
    for offload in (None, "outer"):
        params, others = train(2, 6, torch.float32, offload=offload)
        world = others[0].comm.world
        for optimizer, state in zip(others, states, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
            assert optimizer.offload == offload
        for t in range(6, 11):
            step(world, params, others, gradients(2, t, dtype=torch.float32))
        ends.append([p.detach().clone() for p in params[1]])
    assert all(map(torch.equal, *ends))


def test_a_copy_keeps_it():
    _, optimizers = train(2, 6, torch.float32, offload="outer")
    assert copy.deepcopy(optimizers[0]).offload == "outer"


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="offload must be None or 'outer', got 'all'"):
        compopt.LocalSteps(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]), offload="all")


def without_a_backend_for_the_host(rank):
    """As with NCCL alone: what a group says of its backends is all that is looked at."""
    import torch.distributed as dist

    p = torch.nn.Parameter(torch.ones(5))
    optimizer = compopt.LocalSteps(torch.optim.AdamW([p]), every=2, growth_steps=0, offload="outer")
    asked, dist.get_backend_config = dist.get_backend_config, lambda group: "cuda:nccl"
    try:
        p.grad = torch.full((5,), 1.0 + rank)
        with pytest.raises(ValueError, match="offload='outer' exchanges tensors in host memory"):
            optimizer.step()
    finally:
        dist.get_backend_config = asked


def over_gloo(rank):
    p = torch.nn.Parameter(torch.ones(5))
    adamw = torch.optim.AdamW([p], lr=0.1)
    optimizer = compopt.LocalSteps(adamw, every=2, growth_steps=0, offload="outer", outer_lr=1, outer_momentum=0)
    for _ in range(2):
        p.grad = torch.full((5,), 1.0 if rank else -1.0)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.ones(5), atol=0.05, rtol=0)
    assert optimizer.stats.phase == "exchanged"


@pytest.mark.parametrize("work", [without_a_backend_for_the_host, over_gloo])
def test_on_real_ranks(work):
    run_ranks(work, 2)
