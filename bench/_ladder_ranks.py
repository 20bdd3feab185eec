"""Simulated ranks of one process: the replicas of a stacked model, each stepped by an optimizer of its own.

Three ways of stepping. Where replicas are equal and gradients are averaged whole, one replica stands for all. Classes
of compopt step in lockstep (tests/sim.py). The rivals of _rivals.py call collectives in the middle of a step: their
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from sim import World

import compopt.muon
from compopt._ops.backends import choose_backend
from compopt._state.residuals import Residuals
from compopt._state.tensors import MIN_COMPRESSED_NUMEL
from compopt.integrations._fsdp_gather import GatherLayout, Shard

Views = dict[str, nn.Parameter]
Make = Callable[[Views, Any], torch.optim.Optimizer]  # from a replica's parameters and its communicator or group


class Ranks:
    """The replicas of a model and their optimizers; ``bytes_sent`` by rank 0 so far."""

    def __init__(self, model: StackedGPT, optimizers: list[torch.optim.Optimizer]):
        self.model, self.optimizers, self.bytes_sent = model, optimizers, 0

    def params_of(self, model: StackedGPT, replica: int) -> Views:
        """Return what the optimizer of a replica steps."""
        return model.views(replica)

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
        super().__init__(model, [make(self.params_of(model, 0), None)])

    def step_all(self) -> None:
        self.optimizers[0].step()

    def sent_in_step(self) -> int:
        return sum(p[0].numel() * 4 for p in self.model.params.values())


class Lockstep(Ranks):
    """Optimizers of compopt; each rank runs until it waits for the others."""

    def __init__(self, model: StackedGPT, make: Make, ranks: int):
        self.world = World(ranks)
        super().__init__(model, [make(self.params_of(model, rank), comm) for rank, comm in enumerate(self.world.comms)])

    def step_all(self) -> None:
        self.world.step(self.optimizers)

    def finish(self) -> None:
        if hasattr(self.optimizers[0], "end_round_as_generator"):
            before = self.sent_in_step()  # stats then count the last step again
            self.world.run([optimizer.end_round_as_generator() for optimizer in self.optimizers])
            self.bytes_sent += self.sent_in_step() - before


class RoundedGathers(Ranks):
    """Mixed in: FSDP2 with gathers in int8. Replicas compute with rounded parameters, cut and encoded as ranks cut
    them; optimizers step the exact ones, with the same gradients.
    """

    def __init__(self, model: StackedGPT, make: Make, ranks: int):
        self.exact: list[Views] = []
        self.number_of_ranks = ranks
        super().__init__(model, make, ranks)
        self.gather()

    def params_of(self, model: StackedGPT, replica: int) -> Views:
        exact = {name: nn.Parameter(p.detach().clone()) for name, p in model.views(replica).items()}
        for name, p in exact.items():
            p.grad = model.params[name].grad[replica]
        self.exact.append(exact)
        return exact

    def step_all(self) -> None:
        super().step_all()
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Give all replicas the parameters that ranks gather, which are alike on all."""
        matrices = {}
        for name, p in self.exact[0].items():
            self.model.params[name].copy_(p)
            if p.dim() >= 2 and p.numel() >= MIN_COMPRESSED_NUMEL:
                matrices[name] = self.cut(p)
        flat = torch.cat([*matrices.values()], 1)
        self.layout.decode(torch.stack([self.layout.encode(row) for row in flat]), flat)
        parts = flat.split([rows.shape[1] for rows in matrices.values()], 1)
        for name, part in zip(matrices, parts, strict=True):
            p = self.exact[0][name]
            self.model.params[name].copy_(part.flatten()[: p.numel()].view_as(p))

    def cut(self, p: Tensor) -> Tensor:
        """Return the shards of a matrix, a row each, padded as FSDP2 pads them."""
        numel = -(-len(p) // self.number_of_ranks) * p[0].numel()
        rows = p.new_zeros(self.number_of_ranks, numel)
        rows.view(-1)[: p.numel()] = p.flatten()
        return rows

    @functools.cached_property
    def layout(self) -> GatherLayout:
        large = [p for p in self.exact[0].values() if p.dim() >= 2 and p.numel() >= MIN_COMPRESSED_NUMEL]
        shards = [Shard(self.cut(p).shape[1], p.dtype, True) for p in large]
        ops = choose_backend({p.device.type for p in large})
        return GatherLayout(shards, self.number_of_ranks, 8, ops)

    def state_dict(self) -> dict[str, Any]:
        exact = [{name: p.detach() for name, p in views.items()} for views in self.exact]
        return super().state_dict() | {"exact": exact}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        for views, values in zip(self.exact, saved["exact"], strict=True):
            for name, p in views.items():
                p.copy_(values[name])


class RoundedReplica(RoundedGathers, OneReplica):
    """FSDP2 with gathers in int8 and an optimizer that averages gradients whole."""


class RoundedLockstep(RoundedGathers, Lockstep):
    """FSDP2 with gathers in int8 and an optimizer of compopt."""


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
