"""Gradients that change after they were sent in backward, two real ranks: every way is seen, and all send again."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._engine.exchange import StalenessCheck
from compopt._state import buckets

STEPS = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 64, generator=generator, dtype=torch.float64)


def penalty_on_one_layer(net, model, step):
    """The same on all ranks, so that DDP, which does not average it, has the same mean."""
    model(batch(step)).backward()
    net.layers[3].weight.square().sum().mul(0.1).backward()


def clamped_through_data(net, model, step):
    model(batch(step)).backward()
    for p in net.parameters():
        p.grad.data.mul_(0.25)


def one_element_through_data(net, model, step):
    model(batch(step)).backward()
    net.layers[4].weight.grad.data[5, 7] = 0.125


def replaced(net, model, step):
    model(batch(step)).backward()
    net.layers[5].weight.grad = net.layers[5].weight.grad * 0.5


def halve(p):
    p.grad.mul_(0.5)


def hook_of_the_users(net, model, step):
    if step == 0:
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(halve)
    model(batch(step)).backward()


def several_backwards(net, model, step):
    model(batch(step)).backward()
    model(batch(step + 50)).backward()


WAYS = [penalty_on_one_layer, clamped_through_data, one_element_through_data, replaced, hook_of_the_users,
        several_backwards]  # fmt: skip


def train(way, make) -> tuple[torch.Tensor, list[bool]]:
    torch.manual_seed(0)
    net = Net().double()
    model = DDP(net)
    optimizer = make(net.parameters())
    resent = []
    for step in range(STEPS):
        if isinstance(optimizer, compopt.RadiusAdamW) and step == 0:
            compopt.attach(model, optimizer)  # its hooks come before the user's
        way(net, model, step)
        optimizer.step()
        resent.append(getattr(getattr(optimizer, "stats", None), "resent", False))
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(net.parameters()).detach(), resent


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = Net(), Net()


def actor_and_critic(make) -> torch.Tensor:
    """One optimizer over two DDPs: the critic's gradients are clipped before the actor's backward."""
    torch.manual_seed(0)
    both = Two().double()
    actor, critic = DDP(both.actor), DDP(both.critic)
    optimizer = make(both.parameters())
    for ddp in (actor, critic) if make is lossless else ():
        compopt.attach(ddp, optimizer)
    for step in range(STEPS):
        critic(batch(step)).backward()
        for p in both.critic.parameters():
            p.grad.mul_(0.1)
        actor(batch(step + 50)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(both.parameters()).detach()


def lossless(params):
    return compopt.RadiusAdamW(params, lr=1e-2, density=1.0, interval=100, dense_steps=100)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def all_ways(rank: int) -> dict[str, list]:
    buckets.BUCKET_BYTES = 70_000
    warnings.simplefilter("ignore")
    results = {}
    for way in WAYS:
        (wanted, _), (got, resent) = train(way, adamw), train(way, lossless)
        results[way.__name__] = [float((wanted - got).abs().max()), resent]
    results["actor_and_critic"] = [float((actor_and_critic(adamw) - actor_and_critic(lossless)).abs().max()), []]
    return results


def test_every_change_is_seen():
    for results in run_ranks(all_ways, 2):
        for name, (distance, resent) in results.items():
            assert distance < 1e-9, f"{name}: not DDP + AdamW"
            if name not in ("several_backwards", "actor_and_critic"):
                assert resent == [False, True, False, False, False], name
            elif name == "several_backwards":
                assert not any(resent), "the second replaced the first"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 512, 1023, 4096, 65537])
def test_a_fingerprint_tells_any_change_of_one_element_and_of_all(dtype, n):
    p = nn.Parameter(torch.zeros(n, dtype=dtype))
    (bucket,) = buckets.make_buckets([{"params": [p]}])
    original = torch.randn(n + 1, generator=torch.Generator().manual_seed(n)).to(dtype)[1:]  # not at a word's start
    p.grad = original.clone()
    before = StalenessCheck(bucket)

    def is_noticed(change) -> bool:
        p.grad = original.clone()
        change(p.grad)
        return bool(before.measure())

    assert not is_noticed(lambda g: g.mul_(1.0))
    smallest = torch.finfo(dtype).eps
    assert all(is_noticed(lambda g, i=i: g[i].mul_(1 + smallest)) for i in {0, n // 2, n - 1})
    for factor in (0.5, 2.0, -1.0, 0.0):
        assert is_noticed(lambda g, factor=factor: g.mul_(factor)), factor
    p.grad = None
    assert bool(before.measure())
