"""TAGC (Polyakov, Dukhanov and Spirin, EuroMLSys 2025), Algorithm 1 with AdamW, for reading: gradients are sparsified,
and reduced to the owner of each shard at the union of the ranks' selections. Moments are sharded, as in ZeRO-1.

All compressed tensors are one vector, cut into one shard per rank. On rank n, for the shard that rank d owns; g_n is
this rank's gradient of it, acc_n its residual, D the density. Lines are the paper's, which stops at line 10::

     1  g_n <- g_n + acc_n
     2  g_n, acc_n <- the largest D of |g_n|, 0 elsewhere;  the rest of g_n
     3  index_n <- where g_n is not zero, one bit per element
     4  index <- bitwise or over ranks of index_n
     5  code_n <- g_n at the index
     6  reduce(code_n) to rank d
     8  on rank d:
     9      code <- mean over ranks of code_n
    10      G <- code at the index, 0 elsewhere
        AdamW steps the shard by G
        parameters <- all shards, gathered

It equals ``compopt.TagcAdamW`` with the same arguments for parameters in the order of backward, the last of the model
first, where shards are whole words of 64 elements: there the class cuts. Its ``codec="sketch"`` encodes line 5 as the
paper does. If it has the names of parameters, it does not compress projections to queries, keys and values (section
3.2). It shards the moments of dense tensors, too.

Run it: torchrun --nproc-per-node 2 examples/simple/tagc_adamw.py
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class TagcAdamW:
    """Tensors of fewer than 2 dimensions or 4096 elements are averaged whole, and stepped on every rank."""

    def __init__(self, params, density: float = 0.0125, **adamw):
        self.params = list(params)
        self.large = [p for p in self.params if p.dim() >= 2 and p.numel() >= 4096]
        self.dense = [p for p in self.params if p.dim() < 2 or p.numel() < 4096]
        self.density, self.bytes_sent = density, 0
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.shard = self.cut([p.detach() for p in self.large])[self.rank].clone()  # the one this rank owns
        self.acc = [torch.zeros_like(shard) for shard in self.cut(self.large)]
        self.adamw = torch.optim.AdamW([self.shard, *self.dense], **adamw)

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """All tensors as one vector, in one shard per rank."""
        return list(torch.cat([tensor.flatten() for tensor in tensors]).tensor_split(self.ranks))

    @torch.no_grad()
    def step(self) -> None:
        for d, g in enumerate(self.cut([p.grad for p in self.large])):
            self.reduce_shard(d, g)
        for p in self.dense:
            self.count(p)
            dist.all_reduce(p.grad)
            p.grad /= self.ranks
        self.adamw.step()
        self.gather_shards()

    def reduce_shard(self, d: int, g: Tensor) -> None:
        """Lines 1 to 10."""
        g = g + self.acc[d]  # line 1
        kept = max(1, math.floor(round(self.density * len(g), 6)))
        largest = g.abs().topk(kept).indices
        self.acc[d] = g.index_fill(0, largest, 0)  # line 2
        g = g - self.acc[d]
        index = pack_bits(g != 0)  # line 3
        self.count(index)
        dist.all_reduce(index, op=dist.ReduceOp.BOR)  # line 4
        union = unpack_bits(index)[: len(g)]
        code = g[union]  # line 5
        self.count(code)
        dist.reduce(code, dst=d)  # line 6
        if d == self.rank:  # line 8
            G = torch.zeros_like(g)
            G[union] = code / self.ranks  # lines 9 and 10
            self.shard.grad = G

    def gather_shards(self) -> None:
        shards = self.cut(self.large)
        shards[self.rank] = self.shard.clone()
        self.count(self.shard)
        for d, shard in enumerate(shards):
            dist.broadcast(shard, src=d)
        flat = torch.cat(shards).split([p.numel() for p in self.large])
        for p, part in zip(self.large, flat, strict=True):
            p.copy_(part.view(p.shape))

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def count(self, x: Tensor) -> None:
        self.bytes_sent += x.numel() * x.element_size()


def pack_bits(mask: Tensor) -> Tensor:
    """Eight booleans per byte."""
    padded = nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_bits(index: Tensor) -> Tensor:
    return (index.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten()


def main(steps: int = 200) -> None:
    """Learn to write this file: predict each byte from the 8 bytes before it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same start on all ranks
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)
    )  # fmt: skip
    optimizer = TagcAdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(dist.get_rank())  # other data on each rank
    for step in range(1, steps + 1):
        at = torch.randint(len(text) - 8, (64, 1)) + torch.arange(9)
        loss = nn.functional.cross_entropy(model(text[at[:, :8]]), text[at[:, 8]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (steps // 4) == 0 and dist.get_rank() == 0:
            dense = 4 * step * sum(p.numel() for p in model.parameters())
            print(f"step {step}: loss {loss:.3f}, {optimizer.bytes_sent:,} bytes sent, DDP sends {dense:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
