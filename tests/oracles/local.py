"""Local steps, from the pseudo-code of the project's design: each rank steps for itself, then ranks average what they
moved. Shares no code with the package; a codec is a function (differences, errors) -> (mean, errors) of one fragment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Codec = Callable[[int, list[list[Tensor]]], list[Tensor]]  # (exchange, a list a rank) -> the mean


def plain(exchange: int, differences: list[list[Tensor]]) -> list[Tensor]:
    return [sum(ds) / len(ds) for ds in zip(*differences, strict=True)]


def train(
    ranks: int,
    start: list[Tensor],
    gradients: Callable[[int, int], list[list[Tensor]]],
    steps: int,
    every: int,
    inner: Callable[[list[Tensor]], torch.optim.Optimizer],
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    parts: list[list[int]] | None = None,
    delay: int = 0,
    codecs: list[Codec] | None = None,
) -> list[list[Tensor]]:
    """Every rank's tensors after ``steps`` steps. ``parts``: the numbers of the tensors of each fragment."""
    parts = parts or [list(range(len(start)))]
    codecs = codecs or [plain] * len(parts)
    w = [[torch.nn.Parameter(x.clone()) for x in start] for _ in range(ranks)]
    optimizers = [inner(own) for own in w]
    anchor, v = [x.clone() for x in start], [torch.zeros_like(x) for x in start]
    on_its_way: dict[int, tuple[int, list[list[Tensor]], list[Tensor]]] = {}  # when applied, w then, the mean
    exchanges = [0] * len(parts)

    def apply(p: int) -> None:
        _, begun, mean = on_its_way.pop(p)
        for place, i in enumerate(parts[p]):
            v[i] = outer_momentum * v[i] + mean[place]
            step = mean[place] + outer_momentum * v[i] if outer_momentum else mean[place]
            new = anchor[i] - outer_lr * step
            for k in range(ranks):
                with torch.no_grad():
                    since = w[k][i] - begun[k][place]
                    w[k][i].copy_(new + since)
            anchor[i] = new

    for t in range(1, steps + 1):
        for own, optimizer, given in zip(w, optimizers, gradients(ranks, t - 1), strict=True):
            for p, g in zip(own, given, strict=True):
                p.grad = g.clone()
            optimizer.step()
        for p in [p for p, (when, _, _) in on_its_way.items() if when == t]:
            apply(p)
        for p, part in enumerate(parts):
            if t % every == p * every // len(parts):
                begun = [[own[i].detach().clone() for i in part] for own in w]
                differences = [[anchor[i] - x for i, x in zip(part, own, strict=True)] for own in begun]
                on_its_way[p] = t + delay, begun, codecs[p](exchanges[p], differences)
                exchanges[p] += 1
                if delay == 0:
                    apply(p)
    return [[p.detach() for p in own] for own in w]


def train_rounds(
    start: list[Tensor],
    counts: list[list[int]],
    gradients: Callable[[int, int], list[Tensor]],
    inner: Callable[[list[Tensor]], torch.optim.Optimizer],
    weights: list[list[float]] | None = None,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
) -> list[Tensor]:
    """All ranks' tensors after rounds in which rank k takes ``counts[round][k]`` steps, and has that weight or one of
    ``weights``. ``gradients(rank, t)``: of the rank's step t, from 0.
    """
    ranks = len(counts[0])
    w = [[torch.nn.Parameter(x.clone()) for x in start] for _ in range(ranks)]
    optimizers, taken = [inner(own) for own in w], [0] * ranks
    anchor, v = [x.clone() for x in start], [torch.zeros_like(x) for x in start]
    for steps, weigh in zip(counts, weights or counts, strict=True):
        for k in range(ranks):
            for _ in range(steps[k]):
                for p, g in zip(w[k], gradients(k, taken[k]), strict=True):
                    p.grad = g.clone()
                optimizers[k].step()
                taken[k] += 1
        for i in range(len(start)):
            moved = sum(weigh[k] * (anchor[i] - w[k][i].detach()) for k in range(ranks)) / sum(weigh)
            v[i] = outer_momentum * v[i] + moved
            anchor[i] = anchor[i] - outer_lr * (moved + outer_momentum * v[i])
            for k in range(ranks):
                w[k][i].data.copy_(anchor[i])
    return anchor
