"""Simulated ranks of one process: the ladder's models, all ranks' parameters in one, and an optimizer for each rank.

The model is examples/train_gpt.py's; one backward of ``StackedGPT`` is that of all ranks. Three ways of stepping: where
gradients are averaged whole, one replica stands for all. Classes of compopt step in lockstep (tests/support). The
rivals of _rivals.py call collectives in the middle of a step: their ranks are threads.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
import corpus
from sim import World
from train_gpt import GPT

from compopt import LocalSteps
from compopt.local_steps.rounds import trailing_weight
from compopt.muon import orthogonal

AVERAGED_SHARE = 0.1  # of a run, at its end: the mean of its parameters is evaluated too
VALIDATION_WINDOWS, VALIDATION_BATCH = 1024, 32


@dataclass(frozen=True)
class Size:
    """A rung of the ladder. ``batch`` is that of one rank."""

    layers: int
    width: int
    heads: int
    batch: int = 8
    context: int = 64

    def make(self, seed: int) -> GPT:
        torch.manual_seed(seed)
        return GPT(self.layers, self.width, self.heads, self.context)


SIZES = {
    "0.2M": Size(3, 64, 2),
    "0.4M": Size(3, 96, 3),
    "0.9M": Size(4, 128, 4),
    "1.7M": Size(5, 160, 5),
    "3M": Size(6, 192, 6, batch=32, context=256),
    "35M": Size(11, 512, 8, batch=32, context=256),
    "124M": Size(17, 768, 12, batch=32, context=256),
}


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2 as torch has it, to the bit, in fewer passes over memory."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (positive * grad).mul_(2)


class StackedGPT:
    """``replicas`` copies of a model, their parameters stacked as (replicas, ...) and their products batched.

    ``params`` by name are leaves with gradients of their own; what replica r has is ``params[name][r]``, a view.
    """

    def __init__(self, model: GPT, replicas: int, product_dtype: torch.dtype | None = None):
        self.replicas, self.product_dtype = replicas, product_dtype
        self.heads, self.layers = model.blocks[0].heads, len(model.blocks)
        self.params = {
            name: p.detach().repeat(replicas, *[1] * p.dim()).requires_grad_() for name, p in model.named_parameters()
        }
        for p in self.params.values():
            p.grad = torch.zeros_like(p)

    def views(self, replica: int) -> dict[str, torch.nn.Parameter]:
        """The parameters of one replica, with its gradients: they share memory with the stacked ones."""
        views = {name: torch.nn.Parameter(p.detach()[replica]) for name, p in self.params.items()}
        for name, p in views.items():
            p.grad = self.params[name].grad[replica]
        return views

    def linear(self, name: str, x: Tensor) -> Tensor:
        """(replicas, tokens, in) to (replicas, tokens, out)."""
        weight = self.params[name]
        if self.product_dtype is None:
            return x @ weight.mT
        return (x.to(self.product_dtype) @ weight.to(self.product_dtype).mT).to(x.dtype)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.params[name][:, None]

    def block(self, n: int, x: Tensor, context: int) -> Tensor:
        at, width = f"blocks.{n}.", x.shape[-1]
        qkv = self.linear(at + "qkv.weight", self.norm(at + "norm1.weight", x))
        q, k, v = qkv.view(-1, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.linear(at + "out.weight", mixed)
        up = self.linear(at + "up.weight", self.norm(at + "norm2.weight", x))
        return x + self.linear(at + "down.weight", SquaredReLU.apply(up))

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of each replica, for x and y of shape (replicas, batch, context)."""
        replicas, batch, context = x.shape
        table = self.params["bytes.weight"]
        first = torch.arange(replicas, device=x.device).view(-1, 1) * table.shape[1]
        h = F.embedding(x.reshape(replicas, -1) + first, table.flatten(0, 1))
        h = h + self.params["positions.weight"][:, :context].repeat(1, batch, 1)
        for n in range(self.layers):
            h = self.block(n, h, context)
        logits = self.linear("head.weight", self.norm("norm.weight", h))
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return losses.view(replicas, -1).mean(1)

    def backward(self, x: Tensor, y: Tensor) -> list[float]:
        """The losses; each replica's gradient is that of its own."""
        for p in self.params.values():
            p.grad.zero_()
        losses = self.losses(x, y)
        losses.sum().backward()
        return losses.tolist()


class Text:
    """Training batches of every rank, and the validation windows; ``steps`` of them can be skipped."""

    def __init__(self, size: Size, ranks: int, seed: int, path: str | None):
        train, self.validation = corpus.load(path, corpus.LIMIT if path is None else 2**40)
        self.ranks = [
            corpus.batches(train, size.batch, size.context, seed=1000 * seed + 1 + rank) for rank in range(ranks)
        ]
        self.context = size.context

    def next(self) -> tuple[Tensor, Tensor]:
        """Of shape (ranks, batch, context)."""
        inputs, targets = zip(*(next(batches) for batches in self.ranks), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def windows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the same windows for every run, evenly spaced over the validation text."""
        length = self.context + 1
        count = min(VALIDATION_WINDOWS, len(self.validation) // length)
        starts = torch.arange(count) * ((len(self.validation) - length) // max(1, count - 1))
        for some in starts.split(VALIDATION_BATCH):
            window = self.validation[some[:, None] + torch.arange(length)].long()
            yield window[:, :-1], window[:, 1:]


@torch.no_grad()
def validate(model: StackedGPT, text: Text, device: torch.device) -> float:
    """The mean loss of replica 0."""
    one = StackedGPT.__new__(StackedGPT)
    one.__dict__ |= model.__dict__ | {"replicas": 1, "params": {n: p.detach()[:1] for n, p in model.params.items()}}
    results = [(one.losses(x[None].to(device), y[None].to(device)).item(), len(x)) for x, y in text.windows()]
    return math.fsum(loss * n for loss, n in results) / sum(n for _, n in results)


# Ranks

Views = dict[str, nn.Parameter]
Make = Callable[[Views, Any], torch.optim.Optimizer]  # from a replica's parameters and its communicator or group


class Ranks:
    """The replicas of a model and their optimizers; ``bytes_sent`` by rank 0 so far."""

    def __init__(self, model: StackedGPT, optimizers: list[torch.optim.Optimizer]):
        self.model, self.optimizers, self.bytes_sent = model, optimizers, 0

    def step(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        self.step_all()
        self.bytes_sent += self.sent_in_step()

    def step_all(self) -> None:
        raise NotImplementedError

    def sent_in_step(self) -> int:
        return self.optimizers[0].stats.bytes_sent

    def finish(self) -> None:
        """Make replicas equal after the last step."""

    def use_average(self) -> AbstractContextManager[bool]:
        """Show the mean of the run's end in replica 0; False where none is kept."""
        return nullcontext(False)

    def state_dict(self) -> dict[str, Any]:
        return {
            "params": {name: p.detach() for name, p in self.model.params.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "bytes_sent": self.bytes_sent,
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, p in self.model.params.items():
            p.copy_(saved["params"][name])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.bytes_sent = saved["bytes_sent"]


class OneReplica(Ranks):
    """DDP: gradients are averaged whole, so that one replica with everyone's batches is all of them."""

    def __init__(self, model: StackedGPT, make: Make, ranks: int):
        super().__init__(model, [make(model.views(0), None)])
        self.average, self.steps = {name: p.detach().clone() for name, p in model.params.items()}, 0

    def step_all(self) -> None:
        self.optimizers[0].step()
        self.steps += 1
        weight = trailing_weight(AVERAGED_SHARE, 1, self.steps)
        torch._foreach_lerp_([*self.average.values()], [p.detach() for p in self.model.params.values()], weight)

    @contextmanager
    def use_average(self) -> Iterator[bool]:
        last = {name: p.detach().clone() for name, p in self.model.params.items()}
        self._write(self.average)
        yield True
        self._write(last)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, p in self.model.params.items():
            p.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"average": self.average, "steps": self.steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.average, self.steps = saved["average"], saved["steps"]

    def sent_in_step(self) -> int:
        return sum(p[0].numel() * 4 for p in self.model.params.values())


class Lockstep(Ranks):
    """Optimizers of compopt; each rank runs until it waits for the others."""

    def __init__(self, model: StackedGPT, make: Make, ranks: int):
        self.world = World(ranks)
        super().__init__(model, [make(model.views(rank), comm) for rank, comm in enumerate(self.world.comms)])

    def step_all(self) -> None:
        self.world.step(self.optimizers)

    def finish(self) -> None:
        if hasattr(self.optimizers[0], "end_round"):
            before = self.sent_in_step()  # stats then count the last step again
            self.world.run([optimizer.end_round for optimizer in self.optimizers])
            self.bytes_sent += self.sent_in_step() - before

    @contextmanager
    def use_average(self) -> Iterator[bool]:
        optimizer = self.optimizers[0]
        is_kept = isinstance(optimizer, LocalSteps)
        with optimizer.use_anchors(average=True) if is_kept else nullcontext():
            yield is_kept


class AlikeLockstep(Lockstep):
    """Ranks that take the same step: what Muon has orthogonalized for one is not computed again for the others."""

    def step_all(self) -> None:
        compute, known = orthogonal.orthogonalize, []

        def look_up(update: Tensor, *options: Any) -> Tensor:
            for other, result in known:
                if torch.equal(other, update):
                    return result
            known.append((update.clone(), compute(update, *options)))
            return known[-1][1]

        with patch.object(orthogonal, "orthogonalize", look_up):
            super().step_all()


class Threads(Ranks):
    """Optimizers of _rivals.py; a rank is a thread that waits for the others in every exchange."""

    def __init__(self, model: StackedGPT, make: Make, ranks: int):
        groups = ThreadGroup.make(ranks)
        self.pool = ThreadPoolExecutor(ranks, initializer=torch.set_num_threads, initargs=(1,))
        super().__init__(model, [make(model.views(rank), group) for rank, group in enumerate(groups)])

    def step_all(self) -> None:
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))


class ThreadGroup:
    """Collectives among threads, one of them this rank; sums are in the order of ranks."""

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier):
        self.rank, self.size, self.slots, self.barrier = rank, size, slots, barrier

    @classmethod
    def make(cls, size: int) -> list[ThreadGroup]:
        slots, barrier = [None] * size, threading.Barrier(size)
        return [cls(rank, size, slots, barrier) for rank in range(size)]

    def gather(self, x: Tensor) -> list[Tensor]:
        self.slots[self.rank] = x.clone()
        self.barrier.wait(60)
        gathered = list(self.slots)
        self.barrier.wait(60)
        return gathered

    def mean(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather(x)).sum(0) / self.size
