"""mcbench.py's model, a BERT-like encoder, cut for tensor and pipeline parallelism, the paper's compressors, and tasks.

The tasks, digits and text that come with Python packages, measure what compression does to quality. One process
computes what tensor parallelism of 2 and a pipeline of 2 stages compute: two partial products added through the
compressor, and a stage boundary in the middle. test_activations.py holds ranks to these formulas.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

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
    drop_compressors,
)

Make = Callable[[], Compressor]
MICRO_BATCHES = 4


def compressors(tokens: int, hidden: int) -> dict[str, Make]:
    """The paper's Table 1 for activations of (tokens, hidden), and more bits.

    1 sends 1/20 of the bytes, 2 a tenth, Q 2 and 4 bits.
    """

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
        "8 bits": lambda: Quantize(8),
        "4 bits back too": lambda: Quantize(4, gradient_bits=4),
        "8 bits back too": lambda: Quantize(8, gradient_bits=8),
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


# Tasks

SMALL = {"width": 64, "layers": 4, "heads": 4}
BATCH = 32


class Split(nn.Module):
    """A row-parallel linear layer of two ranks. Its bias is added after the exchange."""

    def __init__(self, whole: nn.Linear, make: Make) -> None:
        super().__init__()
        self.whole, self.compressor = whole, make()

    def forward(self, x: Tensor) -> Tensor:
        (left, right), (first, second) = x.chunk(2, -1), self.whole.weight.chunk(2, 1)
        parts = F.linear(left, first), F.linear(right, second)
        if self.compressor.summable:
            total = self.compressor(parts[0] + parts[1])
        else:
            total = self.compressor(parts[0]) + self.compressor(parts[1])
        return total + self.whole.bias


class Boundary(nn.Module):
    """Two pipeline stages meet: only the payload goes on, and its gradient back, or the gradient beside it."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.compressor = make()

    def forward(self, x: Tensor) -> Tensor:
        compressor = self.compressor
        if not compressor.enabled or (compressor.straight_through and not compressor.fits_payload()):
            return compressor(x)
        values, side = compressor.compress(x)
        return compressor.decompress(values, side, x.shape)


def compressed(model: nn.Sequential, make: Make) -> nn.Sequential:
    """The model with the last half of its layers, and the boundary that leads into them, compressed."""
    blocks = list(model)[1:-1]
    half = len(blocks) // 2
    for block in blocks[half:]:
        block.out, block.down = Split(block.out, make), Split(block.down, make)
    return nn.Sequential(model[0], *blocks[:half], Boundary(make), *blocks[half:], model[-1])


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 8 x 8 digits as 16 patches of 2 x 2: train and test inputs (images, 16, 4) and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 16
    patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(images), 16, 4)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1285], order[1285:]
    return patches[train], labels[train], patches[test], labels[test]


def pretrained(seed: int, make: Make | None = None) -> nn.Sequential:
    """A digit encoder that has learned, without labels, to fill in blank patches: through compressors, if any."""
    torch.manual_seed(seed)
    x = digits()[0]
    model = encoder(4, 4, 16, **SMALL, pool=False)
    model = model if make is None else compressed(model, make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(600):
        batch = x[torch.randint(len(x), (BATCH,))]
        blank = torch.rand(BATCH, 16, 1) < 0.4
        F.mse_loss(model(batch * ~blank) * blank, batch * blank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def up_and_down(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """6.5 % of the steps up, the others down to nothing, as in the paper's fine-tuning."""
    up = max(1, round(0.065 * steps))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / up, (steps - t) / (steps - up)))


def digit_accuracy(make: Make, seed: int, steps: int, start: nn.Sequential, parity: bool = False) -> float:
    """Accuracy, %, on unseen digits (or their parity) after `steps` compressed steps from `start`."""
    torch.manual_seed(seed + 100)
    model = encoder(4, 2 if parity else 10, 16, **SMALL)
    model[:-1].load_state_dict(start[:-1].state_dict())
    return _fine_tuned(compressed(model, make), seed, steps, parity)


def later_accuracy(start: nn.Sequential, seed: int, steps: int, parity: bool, keep: bool = False) -> float:
    """The same from a model that was pre-trained through compressors, which are dropped first, or kept."""
    torch.manual_seed(seed + 100)
    head = encoder(4, 2 if parity else 10, 16, **SMALL)[-1]
    model = copy.deepcopy(start) if keep else drop_compressors(copy.deepcopy(start))
    return _fine_tuned(nn.Sequential(*model[:-1], head), seed, steps, parity)


def _fine_tuned(model: nn.Sequential, seed: int, steps: int, parity: bool) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, y, test_x, test_y = digits()
    y, test_y = (y % 2, test_y % 2) if parity else (y, test_y)
    schedule = up_and_down(optimizer, steps)
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(x), (BATCH,), generator=random)
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = [
            (model(a).argmax(-1) == b).sum() for a, b in zip(test_x.split(BATCH), test_y.split(BATCH), strict=True)
        ]
    return 100 * float(sum(right)) / len(test_x)


def text_batch(text: Tensor, random: torch.Generator, tokens: int = 32) -> tuple[Tensor, Tensor]:
    """Bytes of real text, one-hot (batch, tokens, 128), and for each the byte that follows."""
    starts = torch.randint(len(text) - tokens, (BATCH, 1), generator=random)
    window = text[starts + torch.arange(tokens + 1)]
    return F.one_hot(window[:, :-1], 128).float(), window[:, 1:]


def text_accuracy(make: Make, seed: int, steps: int) -> float:
    """Share, %, of the bytes of unseen text foretold correctly, after `steps` compressed steps from nothing."""
    torch.manual_seed(seed + 200)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long().clamp_max(127)
    train, test = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 - 1 :]
    model = compressed(encoder(128, 128, 32, **SMALL, pool=False, causal=True), make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = up_and_down(optimizer, steps)
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = text_batch(train, random)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    random = torch.Generator().manual_seed(1)
    model.eval()
    with torch.no_grad():
        batches = [text_batch(test, random) for _ in range(16)]
        return 100 * sum(float((model(x).argmax(-1) == y).float().mean()) for x, y in batches) / len(batches)
