"""How far the gradients of ranks lie apart.

Of N gradients the mean cosine between two is ``(N^2 |mean|^2 - sum |g|^2) / ((N - 1) sum |g|^2)``,
their norms taken as alike, and the norm ratio is a rank's norm, root mean square, over the mean's.
Ranks are compared at the end, once, by the elements that were kept. Without other ranks two
batches in a row stand for two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._wire.comm import Comm
from .._wire.requests import AllReduceMean
from .sampling import Part

ELEMENTS = 1 << 15  # kept of all parts together, of each step
STEPS = 64  # that are kept; later ones are not looked at


class Spread:
    """Elements of this rank's own gradients, step for step."""

    def __init__(self, parts: Sequence[Part]):
        share = max(1, ELEMENTS // len(parts))
        self.strides = [max(1, part.numel // share) for part in parts]
        self.kept: list[list[Tensor]] = []  # of every step, of every part

    def see(self, grads: Sequence[Tensor | None]) -> None:
        """This rank's gradients of all parts; a step in which one is missing is left out."""
        self.keep([None if g is None else self.of(i, g) for i, g in enumerate(grads)])

    def keep(self, rows: Sequence[Tensor | None]) -> None:
        """What `of` has given of each part."""
        here = [row for row in rows if row is not None]
        if len(self.kept) < STEPS and len(here) == len(rows):
            self.kept.append(here)

    def of(self, i: int, grad: Tensor) -> Tensor:
        return grad.reshape(-1)[:: self.strides[i]].cpu().clone()

    def found(self, comm: Comm, device: torch.device) -> list[tuple[float, float]]:
        """Cosine and norm ratio of each part; all ranks ask, with equally many steps seen."""
        if len(self.kept) < 2:
            return []
        return [
            between([step[i] for step in self.kept], comm, device) for i in range(len(self.strides))
        ]


def between(steps: list[Tensor], comm: Comm, device: torch.device) -> tuple[float, float]:
    """Cosine and norm ratio of one part, means over steps."""
    rows = torch.stack(steps).double()
    if comm.size > 1:
        size, own = comm.size, rows
        mean = reduced(own, comm, device)
        squares = reduced(own.square().sum(1), comm, device)
    else:
        size, mean = 2, (rows[1:] + rows[:-1]) / 2
        squares = (rows[1:].square().sum(1) + rows[:-1].square().sum(1)) / 2
    of_mean, of_one = float(mean.square().sum()), float(squares.sum())
    if not of_mean or not of_one:
        return 0.0, 1.0
    cosine = (size * of_mean / of_one - 1) / (size - 1)
    return cosine, (of_one / of_mean) ** 0.5


def reduced(tensor: Tensor, comm: Comm, device: torch.device) -> Tensor:
    """The mean over ranks."""
    sent = tensor.float().to(device).contiguous()
    comm.start(AllReduceMean(sent)).wait()
    return sent.to(tensor)
