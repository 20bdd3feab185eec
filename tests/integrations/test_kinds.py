"""Kinds of training that cut across frameworks, on two real ranks: each without loss beside DDP + AdamW, and with
SeparateAdam and LocalSteps(MuonAdamW). docs/frameworks.md lists them.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import Net, apart, batch, vector
from ranks import run_ranks
from slow_rows import selected, slow_but
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import compopt
from compopt._state import buckets

STEPS = range(7)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def lossless(model: nn.Module) -> torch.optim.Optimizer:
    return compopt.Average(adamw(model))


def separate(model: nn.Module) -> torch.optim.Optimizer:
    return compopt.SeparateAdam(model.parameters(), lr=1e-2, rank=4, dense_steps=2)


def local(model: nn.Module) -> torch.optim.Optimizer:
    return compopt.LocalSteps(compopt.MuonAdamW(model.named_parameters(), lr=1e-2), every=3, growth_steps=0)


def end_round(optimizer: torch.optim.Optimizer) -> None:
    getattr(optimizer, "end_round", lambda: None)()


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


# Compiled, recomputed


def whole_step_compiled(make: Make) -> nn.Module:
    net = Net()
    model, optimizer = DDP(net), make(net)
    if not isinstance(optimizer, torch.optim.AdamW):  # Dynamo does not run the hook that finds the model
        compopt.attach(model, optimizer)

    def train(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(train, backend="eager")
    for step in STEPS:
        compiled(batch(step))
        optimizer.zero_grad()
    return net


def compiled_autograd(make: Make) -> nn.Module:
    net = Net()
    model, optimizer = torch.compile(DDP(net), backend="eager"), make(net)
    with torch._dynamo.config.patch(compiled_autograd=True, optimize_ddp="python_reducer"):
        for step in STEPS:
            model(batch(step)).square().mean().backward()
            update(optimizer)
    return net


class Recomputed(Net):
    reentrant = False

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: x + layer(x).tanh(), x, use_reentrant=self.reentrant)
        return self.norm(x + self.branch(x))


def recomputed(make: Make, reentrant: bool, syncs_all: bool, **options: Any) -> nn.Module:
    net = Recomputed()
    net.reentrant = reentrant
    model, optimizer = DDP(net, **options), make(net)
    for step in STEPS:
        for micro in range(3):
            with contextlib.nullcontext() if syncs_all or micro == 2 else model.no_sync():
                model(batch(step, micro).requires_grad_()).square().mean().backward()
        update(optimizer)
    return net


# Models that change


class Adapted(nn.Module):
    """A frozen matrix with an adapter, twice."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.ParameterList(nn.Parameter(torch.randn(96, 96) / 10, requires_grad=False) for _ in range(2))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(48, 96) / 10) for _ in range(2))
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(96, 48)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = x + (x @ (frozen + up @ down).T).tanh()
        return x

    @torch.no_grad()
    def merge(self) -> None:
        for number, (frozen, down, up) in enumerate(zip(self.frozen, self.down, self.up, strict=True)):
            frozen.add_(up @ down)
            down.copy_(torch.randn(48, 96, generator=torch.Generator().manual_seed(number)) / 10)
            up.zero_()


def relora(make: Make) -> nn.Module:
    net = Adapted()
    model, optimizer = DDP(net), make(net)
    for step in STEPS:
        (model(batch(step)) - 1).square().mean().backward()
        update(optimizer)
        if step == 3:
            end_round(optimizer)
            net.merge()
            optimizer.state.clear()
            getattr(optimizer, "restart_from_loaded_weights", lambda: None)()
    return net


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(64, 96), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embed(x).mean(1)) @ self.embed.weight.T  # a tied head


def words(step: int, most: int) -> torch.Tensor:
    seed = 100 * step + dist.get_rank()
    return torch.randint(most, (8, 12), generator=torch.Generator().manual_seed(seed))


def embeddings_resized(make: Make) -> nn.Module:
    net = Words()
    model, optimizer = DDP(net), make(net)
    for step in STEPS:
        if step == 4:
            end_round(optimizer)
            larger = nn.Embedding(80, 96)
            with torch.no_grad():
                larger.weight[64:] = 0.1
                larger.weight[:64] = net.embed.weight
            old, net.embed = net.embed.weight, larger
            for group in optimizer.param_groups:
                group["params"] = [larger.weight if p is old else p for p in group["params"]]
            optimizer.state.pop(old, None)
            model = DDP(net)
        model(words(step, 64 if step < 4 else 80)).logsumexp(1).mean().backward()
        update(optimizer)
    return net


def pruned(make: Make) -> nn.Module:
    net = Net()
    model, optimizer = DDP(net), make(net)
    for step in STEPS:
        model(batch(step)).square().mean().backward()
        update(optimizer)
        if step == 2:
            end_round(optimizer)
            for layer in net.layers:
                prune.l1_unstructured(layer, "weight", amount=0.5)
    assert all(int((layer.weight == 0).sum()) >= 96 * 48 for layer in net.layers)
    return net


def masked_after_each_step(make: Make) -> nn.Module:
    net = Net()
    model, optimizer = DDP(net), make(net)
    masks = [(layer.weight.detach().abs() > 0.05).to(layer.weight.dtype) for layer in net.layers]
    for step in STEPS:
        model(batch(step)).square().mean().backward()
        update(optimizer)
        end_round(optimizer)  # the average has anchors' weights in it, so masks follow
        with torch.no_grad():
            for layer, mask in zip(net.layers, masks, strict=True):
                layer.weight.mul_(mask)
    return net


def parametrized(make: Make) -> nn.Module:
    net = Net()
    parametrizations.weight_norm(net.layers[0])
    parametrizations.orthogonal(net.layers[1])
    parametrizations.spectral_norm(net.layers[2])
    model, optimizer = DDP(net), make(net)
    for step in STEPS:
        model(batch(step)).square().mean().backward()
        update(optimizer)
    return net


def averaged_over_time(make: Make) -> nn.Module:
    """Of LocalSteps the average of ranks' own steps differs: it keeps one of its anchors."""
    net = Net()
    model, optimizer = DDP(net), make(net)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in STEPS:
        model(batch(step)).square().mean().backward()
        update(optimizer)
        if getattr(optimizer, "round_is_open", False):
            continue
        ema.update_parameters(net)
    return ema


# Data


def scaled_by_tokens(make: Make) -> nn.Module:
    """The sum of losses over this rank's tokens, by the number of all: counted by a collective in between."""
    net = Net()
    model, optimizer = DDP(net), make(net)
    for step in STEPS:
        x = batch(step)[: 2 + (3 * step + dist.get_rank()) % 6]
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        (model(x).square().mean(1).sum() * dist.get_world_size() / count).backward()
        update(optimizer)
    return net


def empty_batches(make: Make) -> nn.Module:
    net = Net()
    model, optimizer = DDP(net), make(net)
    for step in STEPS:
        x = batch(step)[: 0 if step % 3 == dist.get_rank() else 8]
        (model(x).square().sum() / 768).backward()
        update(optimizer)
    return net


def experts(make: Make, zeros: bool) -> nn.Module:
    """The last expert never has a token, the second on one rank at a time; ``zeros``: then its gradient is zero."""
    net = Net()
    del net.branch
    for layer in net.layers:
        layer.bias.requires_grad_(False)

    def forward(x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        y = x
        for n, layer in enumerate(net.layers):
            if n in chosen or zeros:
                y = y + layer(x if n in chosen else x[:0]).sum(0)
        return net.norm(y)

    net.forward = forward
    model, optimizer = DDP(net, find_unused_parameters=not zeros), make(net)
    for step in STEPS:
        chosen = [0, 2, 3, 4] if step % 2 == dist.get_rank() else [0, 1, 2, 3, 4]
        model(batch(step), chosen).square().mean().backward()
        update(optimizer)
    return net


def collectives_of_a_thread(make: Make) -> nn.Module:
    """On a group of its own, while backward sends."""
    group, sums = dist.new_group(), []
    net = Net()
    model, optimizer = DDP(net), make(net)

    def work() -> None:
        for _ in range(200):
            x = torch.ones(1000) * (1 + dist.get_rank())
            dist.all_reduce(x, group=group)
            sums.append(float(x.mean()))

    thread = threading.Thread(target=work)
    thread.start()
    for step in STEPS:
        model(batch(step)).square().mean().backward()
        update(optimizer)
    thread.join()
    assert sums == [3.0] * 200
    dist.destroy_process_group(group)
    return net


KINDS: dict[str, Callable[[Make], nn.Module]] = {
    "the whole step compiled": whole_step_compiled,
    "compiled autograd": compiled_autograd,
    "reentrant checkpointing": lambda make: recomputed(make, True, False),
    "reentrant checkpointing, every backward synced": lambda make: recomputed(make, True, True),
    "checkpointing": lambda make: recomputed(make, False, False),
    "checkpointing, static graph": lambda make: recomputed(make, False, True, static_graph=True),
    "ReLoRA": relora,
    "embeddings resized": embeddings_resized,
    "pruned": pruned,
    "masked after each step": masked_after_each_step,
    "parametrized": parametrized,
    "an average over time": averaged_over_time,
    "scaled by tokens": scaled_by_tokens,
    "empty batches": empty_batches,
    "experts without a gradient": lambda make: experts(make, False),
    "experts with zeros": lambda make: experts(make, True),
    "collectives of a thread": collectives_of_a_thread,
}


def train_kinds(rank: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """For each kind: how far from AdamW the lossless run ends, and from each other the replicas of the others."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    buckets.BUCKET_BYTES = 160_000  # several
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        found = results[name] = {}
        for make in (adamw, lossless, separate, local):
            torch.manual_seed(0)
            torch._dynamo.reset()
            made: list[torch.optim.Optimizer] = []

            def noted(net: nn.Module, make: Make = make, made: list = made) -> torch.optim.Optimizer:
                made.append(make(net))
                return made[0]

            net = KINDS[name](noted)
            end_round(made[0])
            found[make.__name__] = vector(net)
            if make in (separate, local):
                found[make.__name__] = apart(net), bool(vector(net).isfinite().all()), made[0].stats.applied_steps
            gc.collect()
        found["from AdamW"] = float((found.pop("lossless") - found.pop("adamw")).abs().max())
    return results


FAST = ["experts without a gradient", "empty batches"]


@pytest.fixture(scope="module")
def kinds(request):
    return run_ranks(train_kinds, 2, selected(request, "name"))


@pytest.mark.parametrize("name", slow_but(lambda name: name in FAST, KINDS))
def test_a_kind_of_training_is_right(kinds, name):
    for rank in kinds:
        found = dict(rank[name])
        assert found.pop("from AdamW") < 1e-9, "Average(AdamW) is not DDP + AdamW"
        assert found == dict.fromkeys(("separate", "local"), (0.0, True, len(STEPS)))
