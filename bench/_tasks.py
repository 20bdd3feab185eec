"""Tasks of mcbench.py, which measure what compression does to quality: digits and text that come with Python packages.

One process computes what tensor parallelism of 2 and a pipeline of 2 stages compute: two partial products added
through the compressor, and a stage boundary in the middle. tests/test_activations_ranks.py holds ranks to these
formulas.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from _encoder import Make, encoder
from torch import Tensor, nn

from compopt.activations import drop_compressors, set_compression

SMALL = {"width": 64, "layers": 4, "heads": 4}
BATCH = 32


class Split(nn.Module):
    """A row-parallel linear layer of two ranks. Its bias is added after the exchange, or inside it."""

    def __init__(self, whole: nn.Linear, make: Make, bias_inside: bool) -> None:
        super().__init__()
        self.whole, self.compressor, self.bias_inside = whole, make(), bias_inside

    def forward(self, x: Tensor) -> Tensor:
        (left, right), (first, second) = x.chunk(2, -1), self.whole.weight.chunk(2, 1)
        parts = F.linear(left, first, self.whole.bias if self.bias_inside else None), F.linear(right, second)
        if self.compressor.summable:
            total = self.compressor(parts[0] + parts[1])
        else:
            total = self.compressor(parts[0]) + self.compressor(parts[1])
        return total if self.bias_inside else total + self.whole.bias


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


def compressed(model: nn.Sequential, make: Make, bias_inside: bool = False) -> nn.Sequential:
    """The model with the last half of its layers, and the boundary that leads into them, compressed."""
    blocks = list(model)[1:-1]
    half = len(blocks) // 2
    for block in blocks[half:]:
        block.out, block.down = Split(block.out, make, bias_inside), Split(block.down, make, bias_inside)
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


def digit_accuracy(
    make: Make,
    seed: int,
    steps: int,
    start: nn.Sequential,
    parity: bool = False,
    bias_inside: bool = False,
    warmup: int = 0,
) -> float:
    """Accuracy, %, on unseen digits (or their parity) after `steps` steps from `start`, all but `warmup` compressed."""
    torch.manual_seed(seed + 100)
    model = encoder(4, 2 if parity else 10, 16, **SMALL)
    model[:-1].load_state_dict(start[:-1].state_dict())
    return _fine_tuned(compressed(model, make, bias_inside), seed, steps, parity, warmup)


def later_accuracy(start: nn.Sequential, seed: int, steps: int, parity: bool, keep: bool = False) -> float:
    """The same from a model that was pre-trained through compressors, which are dropped first, or kept."""
    torch.manual_seed(seed + 100)
    head = encoder(4, 2 if parity else 10, 16, **SMALL)[-1]
    model = copy.deepcopy(start) if keep else drop_compressors(copy.deepcopy(start))
    return _fine_tuned(nn.Sequential(*model[:-1], head), seed, steps, parity)


def _fine_tuned(model: nn.Sequential, seed: int, steps: int, parity: bool, warmup: int = 0) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, y, test_x, test_y = digits()
    y, test_y = (y % 2, test_y % 2) if parity else (y, test_y)
    schedule = up_and_down(optimizer, steps)
    random = torch.Generator().manual_seed(seed)
    for step in range(steps):
        set_compression(model, step >= warmup)
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
