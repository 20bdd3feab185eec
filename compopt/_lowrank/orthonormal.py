"""Orthonormal columns that span a matrix's own."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.math import one_thread


def columns_of(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span those of a matrix, or of each of several; in float32 at least.

    On one thread: with several the last bits depend on their number, and it is hardly faster.
    """
    exact = torch.promote_types(matrices.dtype, torch.float32)
    with one_thread():
        columns: Tensor = torch.linalg.qr(matrices.to(exact)).Q
    return columns


def orthonormal(matrices: list[Tensor]) -> list[Tensor]:
    """The same for each of several matrices, those of equal shape together.

    Zeros give unit vectors. Every rank finds its own, of equal matrices, so they must be equal to
    the bit.
    """
    found: dict[int, Tensor] = {}
    for shape in {matrix.shape for matrix in matrices}:
        same = [i for i, matrix in enumerate(matrices) if matrix.shape == shape]
        columns = columns_of(torch.stack([matrices[i] for i in same]))
        found.update(zip(same, columns, strict=True))
    return [found[i] for i in range(len(matrices))]
