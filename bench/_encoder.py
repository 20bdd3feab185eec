"""mcbench.py's model, a BERT-like encoder, cut for tensor and pipeline parallelism, with the paper's compressors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from compopt.activations import (
    AutoEncoder,
    CompressedRowwiseParallel,
    Compressor,
    Identity,
    PowerSGD,
    Quantize,
    RandomK,
    ReceiveCompressed,
    SendCompressed,
    TopK,
)

Make = Callable[[], Compressor]
MICRO_BATCHES = 4


def compressors(tokens: int, hidden: int) -> dict[str, Make]:
    """The paper's Table 1 for activations of (tokens, hidden): 1 sends 1/20 of the bytes, 2 a tenth, Q 2 and 4 bits."""

    def rank(ratio: int) -> int:
        return max(1, round(tokens * hidden / ratio / (tokens + hidden)))

    return {
        "w/o": Identity,
        "A1": lambda: AutoEncoder(hidden, max(1, round(hidden / 20))),
        "A2": lambda: AutoEncoder(hidden, max(1, round(hidden / 10))),
        "T1": lambda: TopK(1 / 40),  # a position costs as much as a value
        "T2": lambda: TopK(1 / 20),
        "R1": lambda: RandomK(1 / 20),
        "R2": lambda: RandomK(1 / 10),
        "Q1": lambda: Quantize(2),
        "Q2": lambda: Quantize(4),
        "P1": lambda: PowerSGD(rank(20), hidden),
        "P2": lambda: PowerSGD(rank(10), hidden),
    }


class StraightTopK(TopK):
    """Top-K as MCBench's code has it in tensor parallelism: the gradient passes as if nothing had been left out."""

    def exchange(self, x: Tensor, ranks) -> Tensor:
        return x + (super().exchange(x, ranks) - x).detach()


class PowerBySequence(Compressor):
    """PowerSGD as MCBench's code has it: factors of every sequence of a batch, each with a basis of its own."""

    summable = True

    def __init__(self, rank: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("start", torch.randn(hidden, rank, generator=torch.Generator().manual_seed(0)))
        self.basis = None

    def compress(self, x: Tensor, ranks=None) -> tuple[Tensor, Tensor]:
        known = self.basis is not None and len(self.basis) == len(x)
        basis = self.basis if known else self.start.expand(len(x), -1, -1)
        with torch.no_grad():
            columns = torch.linalg.qr(x @ basis).Q
        values = x.transpose(1, 2) @ columns
        if self.training:
            self.basis = values.detach()
        return values, columns

    def decompress(self, values: Tensor, side: Tensor, shape) -> Tensor:
        return side @ values.transpose(1, 2)


def variants(tokens: int, hidden: int, sequence: int) -> dict[str, tuple[Make, dict]]:
    """One thing otherwise than in the table above: how MCBench's code has it, or an option of ours."""
    table = compressors(tokens, hidden)
    rank = max(1, round(sequence * hidden / 10 / (sequence + hidden)))
    return {
        "8 bits": (lambda: Quantize(8), {}),
        "4 bits back too": (lambda: Quantize(4, gradient_bits=4), {}),
        "8 bits back too": (lambda: Quantize(8, gradient_bits=8), {}),
        "Q1, one scale": (lambda: Quantize(2, scale="tensor"), {}),
        "Q1, 2-bit gradient": (lambda: Quantize(2, gradient_bits=2), {}),
        "Q1, random rounding": (lambda: Quantize(2, stochastic=True), {}),
        "T1, gradient past it": (lambda: StraightTopK(1 / 40), {}),
        "P2, by sequence": (lambda: PowerBySequence(rank, hidden), {}),
        **{f"{name}, bias inside": (table[name], {"bias_inside": True}) for name in ("A1", "T1", "R1", "Q1", "P2")},
        **{f"{name}, 100 steps later": (table[name], {"warmup": 100}) for name in ("A1", "T1")},
    }


class Block(nn.Module):
    """One post-norm transformer layer, as in BERT. Heads are counted from what is local, so that it can be cut."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.head_width, self.causal = width // heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            m(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for m in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = self.norm1(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Embed(nn.Module):
    """(batch, tokens, inputs) to (batch, tokens, width), with learned positions."""

    def __init__(self, inputs: int, tokens: int, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) + self.position


class Head(nn.Module):
    """Scores of `outputs` classes, of the whole input or, with pool=False, of every token."""

    def __init__(self, width: int, outputs: int, pool: bool) -> None:
        super().__init__()
        self.pool, self.project = pool, nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x.mean(1) if self.pool else x)


def encoder(
    inputs: int, outputs: int, tokens: int, width: int, layers: int, heads: int, pool: bool = True, causal: bool = False
) -> nn.Sequential:
    """The whole model: embedding, layers and head. With causal=True a token sees only those before it."""
    blocks = (Block(width, heads, causal) for _ in range(layers))
    return nn.Sequential(Embed(inputs, tokens, width), *blocks, Head(width, outputs, pool))


def pairs(mesh: DeviceMesh) -> list[dist.ProcessGroup | None]:
    """For each stage boundary the group of its two ranks that this rank belongs to, where it does."""
    mine: list[dist.ProcessGroup | None] = [None] * (mesh["pp"].size() - 1)
    for boundary in range(len(mine)):
        for ranks in mesh.mesh[boundary : boundary + 2].t().tolist():  # every rank makes every group
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine[boundary] = group
    return mine


def cut(model: nn.Sequential, mesh: DeviceMesh, make: Make, micro_batch: int) -> nn.Module:
    """This rank's part of `model` on a mesh of dimensions ("pp", "tp"): its stage, its shards, its compressors.

    As in the paper, the last half of the layers is compressed: their two all-reduces each, and the boundaries that
    lead into them.
    """
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    layers = len(model) - 2
    tokens, width = model[0].position.shape
    first, last = stage * layers // stages, (stage + 1) * layers // stages
    for i in range(first, last):
        row = CompressedRowwiseParallel(make) if i >= layers // 2 else RowwiseParallel()
        column = ColwiseParallel()
        plan = {"query": column, "key": column, "value": column, "out": row, "up": column, "down": row}
        if mesh["tp"].size() > 1:
            parallelize_module(model[i + 1], mesh["tp"], plan)
    part: nn.Module = model[(0 if stage == 0 else first + 1) : (len(model) if stage == stages - 1 else last + 1)]
    groups = pairs(mesh) if make().straight_through else [None] * stages
    # A boundary is known by the layer it leads into; both of its sides must say the same.
    if stage > 0 and first >= layers // 2:
        part = ReceiveCompressed(part, make(), (micro_batch, tokens, width), pair=groups[stage - 1])
    if stage < stages - 1 and last >= layers // 2:
        part = SendCompressed(part, make(), pair=groups[stage])
    return part


class Trainer:
    """This rank's part of one model, with its schedule and optimizer."""

    def __init__(
        self, model: nn.Sequential, mesh: DeviceMesh, make: Make, micro_batch: int, loss: Callable, lr: float
    ) -> None:
        self.part = cut(model, mesh, make, micro_batch)
        self.first = mesh["pp"].get_local_rank() == 0
        self.last = mesh["pp"].get_local_rank() == mesh["pp"].size() - 1
        group, size = mesh["pp"].get_group(), mesh["pp"].size()
        self.stage = PipelineStage(self.part, mesh["pp"].get_local_rank(), size, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(self.stage, MICRO_BATCHES, loss_fn=loss)
        # One parameter at a time: torch's multi-tensor update refuses a mix of DTensors and plain tensors.
        self.optimizer = torch.optim.AdamW(self.part.parameters(), lr=lr, foreach=False)

    def run(self, x, y, train: bool = True):
        """One batch through the pipeline; the last stage gets the scores."""
        call = self.schedule.step if train else self.schedule.eval
        return call(*((x,) if self.first else ()), **({"target": y} if self.last else {}))

    def step(self, x, y) -> None:
        self.run(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()
