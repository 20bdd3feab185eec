"""All ranks of a twin (examples/simple) at once: what classes and other tests are compared with."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


class Threads:
    """Stands for ``torch.distributed`` where each thread is a rank."""

    def __init__(self, size: int):
        self.size, self.barrier, self.own = size, threading.Barrier(size), threading.local()
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.ReduceOp = torch.distributed.ReduceOp

    def get_rank(self) -> int:
        return self.own.rank

    def get_world_size(self) -> int:
        return self.size

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.tensors[self.own.rank] = x.clone()
        self.barrier.wait()
        everyone = [*self.tensors]
        self.barrier.wait()
        return everyone

    def all_reduce(self, x: Tensor, op: object = torch.distributed.ReduceOp.SUM) -> None:
        add = torch.bitwise_or if op == torch.distributed.ReduceOp.BOR else torch.add
        x.copy_(functools.reduce(add, self.exchange(x)))

    def reduce(self, x: Tensor, dst: int) -> None:
        total = sum(self.exchange(x))
        x.copy_(total if self.own.rank == dst else torch.full_like(x, float("nan")))

    def broadcast(self, x: Tensor, src: int) -> None:
        x.copy_(self.exchange(x)[src])

    def run(self, function: Callable[[int], object]) -> list:
        """Return function(rank) of every rank; raise the first error."""
        results: list = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            self.own.rank = rank
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


class TwinRanks:
    """``make(parameters)`` of a twin's module on every rank, each a thread.

    Attributes:
        twins: a twin a rank. params: params[rank][i]. Parameters are handed over in the order of backward, the last
        first, as buckets hold them: selections depend on it.
    """

    def __init__(self, module: ModuleType, make: Callable[[list[Tensor]], Any], start: list[Tensor], ranks: int):
        self.module, self.threads = module, Threads(ranks)
        self.all_params = [[nn.Parameter(w.clone()) for w in start] for _ in range(ranks)]
        self.twins = self.run(lambda rank: make(self.all_params[rank][::-1]))

    @property
    def params(self) -> list[Tensor]:
        """Those of the last rank."""
        return self.all_params[-1]

    def run(self, function: Callable[[int], object]) -> list:
        with mock.patch.object(self.module, "dist", self.threads):
            return self.threads.run(function)

    def step(self, grads: list[list[Tensor]]) -> None:
        """One step of all ranks on grads[rank][i]."""

        def step_rank(rank: int) -> None:
            params = self.all_params[rank]
            for p, g in zip(params, grads[rank], strict=True):
                p.grad = g.to(p.dtype, copy=True)
            self.twins[rank].step()

        self.run(step_rank)


def start_separate_adam_alike(ranks: TwinRanks, optimizer: torch.optim.Optimizer) -> None:
    """Give all twins the random Q with which the optimizer's first step after the dense ones begins."""
    (bucket,), (group,) = optimizer._buckets, optimizer.param_groups
    group["step"] = group["dense_steps"]
    stacks, group["step"] = optimizer.make_reducer(bucket).stacks, 0
    number = {p: i for i, p in enumerate(group["params"])}
    bases = {number[bucket.params[i]]: Q for x in stacks for i, Q in zip(x.indices, x.Q, strict=True)}
    for twin, params in zip(ranks.twins, ranks.all_params, strict=True):
        Q_of = {params[i]: Q.to(params[i].dtype, copy=True) for i, Q in bases.items()}
        assert Q_of.keys() == twin.Q.keys() and all(Q.any() for Q in Q_of.values())
        twin.Q = Q_of
