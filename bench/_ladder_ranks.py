"""Simulated ranks of one process: the replicas of a stacked model, each stepped by an optimizer of its own.

Three ways of stepping. Where replicas are equal and gradients are averaged whole, one replica stands for all. Classes
of compopt step in lockstep (tests/support). The rivals of _rivals.py call collectives in the middle of a step: their
ranks are threads.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _ladder_model import StackedGPT
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from sim import World

import compopt.muon
from compopt._ops.backends import choose_backend
from compopt._ops.operations import Ops
from compopt._state.residuals import Residuals
from compopt._state.tensors import MIN_COMPRESSED_NUMEL
from compopt.integrations._fsdp_gather import GatherLayout, Shard

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

    def step_all(self) -> None:
        self.optimizers[0].step()

    def sent_in_step(self) -> int:
        return sum(p[0].numel() * 4 for p in self.model.params.values())


class RoundedReplica(OneReplica):
    """FSDP2 with gathers in int8: the model computes with rounded parameters, cut and encoded as ranks cut them."""

    def __init__(self, model: StackedGPT, make: Make, ranks: int):
        # what the model has are the gathered parameters, and the optimizer steps these, with the same gradients
        self.shards = {name: nn.Parameter(p.detach().clone()) for name, p in model.views(0).items()}
        for name, p in self.shards.items():
            p.grad = model.params[name].grad[0]
        Ranks.__init__(self, model, [make(self.shards, None)])
        self.number_of_ranks = ranks
        self.gather()

    def step_all(self) -> None:
        super().step_all()
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        for name, p in self.shards.items():
            gathered = self.model.params[name][0]
            gathered.copy_(p)
            if p.dim() < 2 or p.numel() < MIN_COMPRESSED_NUMEL:
                continue
            for part in gathered.chunk(self.number_of_ranks):
                layout = GatherLayout([Shard(part.numel(), part.dtype, True)], 1, 8, self.ops)
                flat = part.view(-1)
                layout.decode(layout.encode(flat).unsqueeze(0), flat.unsqueeze(0))

    @functools.cached_property
    def ops(self) -> Ops:
        return choose_backend({p.device.type for p in self.shards.values()})

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"shards": {name: p.detach() for name, p in self.shards.items()}}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        for name, p in self.shards.items():
            p.copy_(saved["shards"][name])


class Lockstep(Ranks):
    """Optimizers of compopt; each rank runs until it waits for the others."""

    def __init__(self, model: StackedGPT, make: Make, ranks: int):
        self.world = World(ranks)
        super().__init__(model, [make(model.views(rank), comm) for rank, comm in enumerate(self.world.comms)])

    def step_all(self) -> None:
        self.world.step(self.optimizers)

    def finish(self) -> None:
        if hasattr(self.optimizers[0], "end_round_as_generator"):
            before = self.sent_in_step()  # stats then count the last step again
            self.world.run([optimizer.end_round_as_generator() for optimizer in self.optimizers])
            self.bytes_sent += self.sent_in_step() - before


class AlikeLockstep(Lockstep):
    """Ranks that take the same step: what Muon has orthogonalized for one is not computed again for the others."""

    def step_all(self) -> None:
        compute, known = compopt.muon.orthogonalize, []

        def look_up(update: Tensor, *options: Any) -> Tensor:
            for other, result in known:
                if torch.equal(other, update):
                    return result
            known.append((update.clone(), compute(update, *options)))
            return known[-1][1]

        with patch.object(compopt.muon, "orthogonalize", look_up):
            super().step_all()


class WithoutFeedback(Lockstep):
    """Local steps that forget what rounding drops."""

    def step_all(self) -> None:
        super().step_all()
        for optimizer in self.optimizers:
            for bucket in optimizer._anchors.buckets:
                Residuals(bucket).clear()


class WithAveragedMomentum(Lockstep):
    """Local steps that average Muon's momentum too, exactly, in every exchange. Its bytes are not counted."""

    @torch.no_grad()
    def step_all(self) -> None:
        super().step_all()
        if not self.sent_in_step():
            return
        states = [o.base.state.values() for o in self.optimizers]
        for alike in zip(*states, strict=True):
            if "momentum_buffer" in alike[0]:
                buffers = [state["momentum_buffer"] for state in alike]
                torch._foreach_copy_(buffers, [torch.stack(buffers).mean(0)] * len(buffers))


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
