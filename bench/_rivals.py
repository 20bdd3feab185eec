"""Published methods that compopt does not have, written from their papers to be measured beside it.

DeMo and SparseLoCo gather what the ranks have chosen, so a rank's link carries (N - 1) times what it hands over, where
a ring all-reduce carries 2 (N - 1) / N times. ``stats.bytes_sent`` is stated as an all-reduce's: N / 2 bytes for each
that is handed over.

Where these differ from the authors' code (bloc97/DeMo, epfml/powersgd, SparseLoCo in tplr):

- Vectors, and matrices of fewer than 4096 elements, are averaged dense, as in compopt. The code of DeMo and SparseLoCo
  compresses vectors too, in pieces of at most 64. In a small model dense vectors are a good part of the bytes.
- What some ranks have sent of a component is divided by the number of all ranks, as in SparseLoCo's paper. The code of
  both divides it by the number of ranks that sent it: ``over_senders=True``.
- DeMo: the momentum sums gradients, in the code gradients times the learning rate, which differs while the rate
  changes. ``k`` is for 64 x 64 elements, so that smaller blocks send fewer; in the code it is for any block. A
  component counts as 48 bits; the code sends a position of 64.
- SparseLoCo: chunks are 4096 elements in a row, in the code 64 x 64. The two bits are a sign and one of two sizes for
  each chunk; in the code one of four levels for each tensor. The sizes are not counted: a bit on 14 with ``k=64``.
- PowerSGD is as torch's hook, with AdamW for the paper's SGD with momentum. The paper sends both factors in a step, as
  this does; the authors' later package sends one of them, in turn: half of the bytes.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SMALL = 4096  # elements: what is smaller, or no matrix, is averaged dense, as in compopt


def handed_back(state, bucket):
    """A hook for DDP: the rank's own gradients. DDP refuses annotations that are strings, as they are in this file."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@functools.cache
def dct_basis(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal rows of the DCT-II."""
    n = torch.arange(side, dtype=dtype)
    basis = torch.cos(math.pi * (n + 0.5) * n[:, None] / side) * math.sqrt(2 / side)
    return basis.index_fill(0, torch.tensor(0), math.sqrt(1 / side)).to(device)


class Processes:
    """The collectives of a rival, among the ranks of the default process group."""

    def __init__(self) -> None:
        self.size = dist.get_world_size()

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return what all ranks have handed over, rank by rank."""
        row = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(row, x)
        return row

    def mean(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x.div_(self.size)


class Rival(torch.optim.Optimizer):
    """The common part of the rivals: tensors that are compressed and those that are not, and the bytes of a step.

    ``group`` has the collectives; None: those of the default process group.
    """

    def __init__(self, params: list, group: Processes | None = None, **defaults: float):
        super().__init__(params, defaults)
        self.group = group or Processes()
        self.ranks = self.group.size
        self.stats = SimpleNamespace(phase="compressed", bytes_sent=0)

    def compressed(self, p: Tensor) -> bool:
        return p.dim() >= 2 and p.numel() >= SMALL

    def gather(self, *parts: Tensor) -> list[tuple[Tensor, ...]]:
        """Return what all ranks have handed over, rank by rank."""
        return list(zip(*(self.group.gather(part) for part in parts), strict=True))

    def mean_of_chosen(self, like: Tensor, where: Tensor, values: Tensor) -> Tensor:
        """The mean of what ranks have chosen in each row: over all ranks, or ``over_senders`` of the element."""
        total, senders = torch.zeros_like(like), torch.zeros_like(like)
        for place, value in self.gather(where.to(torch.int32), values):
            total.scatter_add_(1, place.long(), value)
            senders.scatter_add_(1, place.long(), torch.ones_like(value))
        return total / (senders.clamp(min=1) if self.defaults["over_senders"] else self.ranks)

    def mean(self, x: Tensor) -> Tensor:
        """The dense mean over ranks."""
        self.stats.bytes_sent += 4 * x.numel()
        return self.group.mean(x)

    def count(self, values: int, bits: int) -> None:
        """So many values were handed to a gather."""
        self.stats.bytes_sent += math.ceil(values * bits / 8 * self.ranks / 2)


class DeMo(Rival):
    """Decoupled momentum (2411.19870), Algorithm 1: the largest DCT components of the momentum, every step.

    Blocks of 64 x 64, ``k`` components of each with a 16-bit position and a float32 value; what is sent leaves the
    momentum; the update is the sign of the ranks' mean.
    """

    BLOCK = 64

    def __init__(
        self, params: list, lr: float, k: int = 32, decay: float = 0.999, over_senders: bool = False, **options: Any
    ):
        defaults = {"lr": lr, "k": k, "decay": decay, "over_senders": over_senders, "weight_decay": 0.0}
        super().__init__(params, **defaults | options)

    def sides(self, shape: torch.Size) -> tuple[int, int]:
        """Of a matrix's blocks: the largest that divide its own and are at most 64."""
        rows, columns = (max(n for n in range(1, self.BLOCK + 1) if side % n == 0) for side in shape)
        return rows, columns

    def blocks(self, x: Tensor) -> Tensor:
        """(blocks, rows, columns) of a matrix."""
        rows, columns = self.sides(x.shape)
        return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(0, 1)

    def whole(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        rows, columns = self.sides(shape)
        return blocks.view(shape[0] // rows, shape[1] // columns, rows, columns).transpose(1, 2).reshape(shape)

    @torch.no_grad()
    def step(self) -> None:
        self.stats.bytes_sent = 0
        for h in self.param_groups:
            for p in h["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.mul_(h["decay"]).add_(p.grad)
                average = self.exchange(m, h["k"]) if self.compressed(p) else self.whole_of(m)
                p.mul_(1 - h["lr"] * h["weight_decay"]).sub_(average.sign_(), alpha=h["lr"])

    def whole_of(self, m: Tensor) -> Tensor:
        average = self.mean(m)
        m.zero_()
        return average

    def exchange(self, m: Tensor, k: int) -> Tensor:
        """The mean of the ranks' largest components, k of 64 x 64; they leave ``m``."""
        rows, columns = (dct_basis(side, m.dtype, m.device) for side in self.sides(m.shape))
        components = (rows @ self.blocks(m) @ columns.T).flatten(1)
        share = components.shape[1] / self.BLOCK**2
        where = components.abs().topk(max(1, round(k * share)), dim=1).indices
        values = components.gather(1, where)
        self.count(values.numel(), 16 + 32)
        mine = torch.zeros_like(components).scatter_(1, where, values)
        m.sub_(self.decode(mine, m.shape))
        return self.decode(self.mean_of_chosen(components, where, values), m.shape)

    def decode(self, components: Tensor, shape: torch.Size) -> Tensor:
        rows, columns = (dct_basis(side, components.dtype, components.device) for side in self.sides(shape))
        return self.whole(rows.T @ components.unflatten(1, (len(rows), len(columns))) @ columns, shape)


class AroundAdamW(Rival):
    """AdamW, on gradients that are averaged for the first ``dense`` steps; afterwards as the subclass does."""

    def __init__(self, params: list, lr: float, group: Processes | None, dense: int, adamw: dict, **options: Any):
        self.inner = torch.optim.AdamW(params, lr=lr, fused=True, **adamw)
        super().__init__(self.inner.param_groups, group, **options)
        self.dense, self.steps = dense, 0

    @property
    def params(self) -> list[Tensor]:
        return [p for h in self.inner.param_groups for p in h["params"]]

    @torch.no_grad()
    def step(self) -> None:
        for local, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = local["lr"]
        self.stats.bytes_sent, start = 0, self.steps < self.dense
        self.stats.phase = "dense" if start else "compressed"
        self.steps += 1
        if start:
            for p in self.params:
                p.grad.copy_(self.mean(p.grad))
        self.step_inner(start)

    def step_inner(self, start: bool) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict:
        return super().state_dict() | {"inner": self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, saved: dict) -> None:
        super().load_state_dict({name: saved[name] for name in ("state", "param_groups")})
        self.inner.load_state_dict(saved["inner"])
        self.steps = saved["steps"]


class PowerSGD(AroundAdamW):
    """Two thin factors a matrix, with error feedback and a warm start (1905.13727), as torch's hook makes them.

    The hook needs the buckets of DDP; this needs ``group`` alone, so that ranks can be threads.
    """

    def __init__(self, params: list, lr: float, rank: int = 4, group: Processes | None = None, dense: int = 0, **adamw):
        super().__init__(params, lr, group, dense, adamw, rank=rank)

    def step_inner(self, start: bool) -> None:
        for number, p in enumerate(self.params if not start else ()):
            p.grad.copy_(self.low_rank_mean(number, p) if self.compressed(p) else self.mean(p.grad))
        self.inner.step()

    def low_rank_mean(self, number: int, p: Tensor) -> Tensor:
        state, rank = self.state[p], self.defaults["rank"]
        if not state:
            random = torch.Generator().manual_seed(number)
            state["q"] = torch.randn(p.shape[1], rank, generator=random).to(p)
            state["residual"] = torch.zeros_like(p)
        residuals = p.grad + state["residual"]
        left = torch.linalg.qr(self.mean(residuals @ torch.linalg.qr(state["q"]).Q)).Q
        state["q"] = self.mean(residuals.T @ left)
        average = left @ state["q"].T
        state["residual"] = residuals - average
        return average


class SparseLoCo(AroundAdamW):
    """Local AdamW steps, then the largest of what was moved in 2 bits, with error feedback (2508.15706, Algorithm 1).

    Chunks of 4096, ``k`` of each: a 12-bit position, a sign and one of two sizes. The first ``dense`` steps average
    gradients, which the paper's do not; ``first`` are the steps of the round after them, by default ``every``.
    """

    CHUNK = 4096

    def __init__(
        self,
        params: list,
        lr: float,
        every: int = 15,
        k: int = 64,
        group: Processes | None = None,
        dense: int = 0,
        first: int | None = None,
        ef: float = 0.95,
        outer_lr: float = 1.0,
        over_senders: bool = False,
        **adamw: Any,
    ):
        options = dict(every=every, k=k, ef=ef, outer_lr=outer_lr, over_senders=over_senders)
        super().__init__(params, lr, group, dense, adamw, **options)
        self.first = every if first is None else first
        self.anchor = [p.detach().clone() for p in self.params]

    def step_inner(self, start: bool) -> None:
        self.inner.step()
        if start:
            for a, p in zip(self.anchor, self.params, strict=True):
                a.copy_(p)
        elif (self.steps - self.dense - self.first) % self.defaults["every"] == 0:
            for a, p in zip(self.anchor, self.params, strict=True):
                self.exchange(a, p)

    def state_dict(self) -> dict:
        return super().state_dict() | {"anchor": self.anchor}

    def load_state_dict(self, saved: dict) -> None:
        super().load_state_dict(saved)
        self.anchor = [a.clone() for a in saved["anchor"]]

    def exchange(self, anchor: Tensor, p: Tensor) -> None:
        h = self.defaults
        moved = anchor - p
        if self.compressed(p):
            moved = self.sparse_mean(self.state[p].setdefault("residual", torch.zeros_like(p)), moved)
        else:
            moved = self.mean(moved)
        anchor.sub_(moved, alpha=h["outer_lr"])
        p.copy_(anchor)

    def sparse_mean(self, e: Tensor, moved: Tensor) -> Tensor:
        e.mul_(self.defaults["ef"]).add_(moved)
        chunks = torch.nn.functional.pad(e.flatten(), (0, -e.numel() % self.CHUNK)).view(-1, self.CHUNK)
        where = chunks.abs().topk(self.defaults["k"], dim=1).indices
        values = self.in_two_bits(chunks.gather(1, where))
        self.count(values.numel(), 12 + 2)
        sent = torch.zeros_like(chunks).scatter_(1, where, values)
        e.sub_(sent.flatten()[: e.numel()].view_as(e))
        return self.mean_of_chosen(chunks, where, values).flatten()[: e.numel()].view_as(e)

    @staticmethod
    def in_two_bits(x: Tensor) -> Tensor:
        """A sign, and for each chunk the mean size of the values above its mean size and of those below."""
        size = x.abs()
        large = size > size.mean(1, keepdim=True)
        high = (size * large).sum(1, keepdim=True) / large.sum(1, keepdim=True).clamp(min=1)
        low = (size * ~large).sum(1, keepdim=True) / (~large).sum(1, keepdim=True).clamp(min=1)
        return torch.where(large, high, low) * x.sign()
