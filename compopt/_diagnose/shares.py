"""How much of a matrix a few columns that follow it keep: the share of its norm.

The power iteration of the package's tracked projection, without rounding and without what was held
back. With columns made orthonormal one after the other, the first r of them are those of an
iteration of rank r: one iteration gives all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._lowrank.orthonormal import orthonormal

RANKS = (4, 8, 16, 32, 64)


class Shares:
    """Of one quantity, a matrix of this many rows and columns after the other."""

    def __init__(self, shapes: Sequence[tuple[int, int]], devices: Sequence[torch.device]):
        most = max(RANKS)
        random = torch.Generator().manual_seed(0)
        drawn = [
            torch.randn(columns, min(most, rows, columns), dtype=torch.float32, generator=random)
            for rows, columns in shapes
        ]
        bases = zip(orthonormal(drawn), devices, strict=True)
        self.bases = [basis.to(device) for basis, device in bases]
        self.kept: dict[tuple[int, int], list[float]] = {}  # rank, part: of each step

    def see(self, matrices: Sequence[Tensor | None]) -> None:
        """The matrices at the next step; None where there is no gradient."""
        here = {i: matrix for i, matrix in enumerate(matrices) if matrix is not None}
        columns = of_each([matrix @ self.bases[i] for i, matrix in here.items()])
        sent = [matrix.t() @ R for matrix, R in zip(here.values(), columns, strict=True)]
        for (i, matrix), p, basis in zip(here.items(), sent, of_each(sent), strict=True):
            self.bases[i] = basis
            squares = p.double().square().sum(0).cumsum(0)
            self._keep(i, squares.tolist(), float(matrix.double().square().sum()))

    def _keep(self, i: int, squares: list[float], whole: float) -> None:
        """``squares``: of the norms that the first columns keep."""
        for rank in RANKS if whole else ():
            share = squares[min(rank, len(squares)) - 1] / whole
            self.kept.setdefault((rank, i), []).append(min(1.0, share**0.5))


def of_each(matrices: list[Tensor]) -> list[Tensor]:
    """Orthonormal columns of each; those on one device together."""
    found: dict[int, Tensor] = {}
    for device in {matrix.device for matrix in matrices}:
        here = [i for i, matrix in enumerate(matrices) if matrix.device == device]
        found.update(zip(here, orthonormal([matrices[i] for i in here]), strict=True))
    return [found[i] for i in range(len(matrices))]
