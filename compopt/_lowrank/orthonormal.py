"""Orthonormal columns that span a matrix's own: by QR on a CPU, by Cholesky on other devices.

On a device QR is a kernel for each column of each matrix. The Cholesky factor of A^T A gives the
same columns in a few products for all matrices of a shape, and takes a CPU 2 to 7 times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.reference import one_thread

# Of a column's length: what is added of a unit vector, so that columns which are zero, or depend on
# each other, become orthonormal as well. In float64 its square is left of 1.
SHIFT = 1e-6


def columns_of(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span those of a matrix, or of each of several; in float32 at least.

    On a CPU on one thread: with several the last bits depend on their number, and it is hardly
    faster.
    """
    exact = torch.promote_types(matrices.dtype, torch.float32)
    if matrices.device.type != "cpu":
        return by_cholesky(matrices).to(exact)
    with one_thread():
        columns: Tensor = torch.linalg.qr(matrices.to(exact)).Q
    return columns


def by_cholesky(matrices: Tensor) -> Tensor:
    """The same in float64, without waiting for the device.

    Twice: what rounding leaves of dependent columns the first time is taken off the second. Nobody
    learns whether a factor was found: of numbers that are not finite there is none, and a step with
    such is not applied.
    """
    lengths = torch.linalg.vector_norm(matrices, dim=-2, keepdim=True, dtype=torch.float64)
    columns: Tensor = matrices / lengths.clamp_min_(torch.finfo(torch.float64).tiny)
    columns.diagonal(dim1=-2, dim2=-1).add_(SHIFT)
    for _ in range(2):
        factor = torch.linalg.cholesky_ex(columns.mT @ columns).L
        columns = torch.linalg.solve_triangular(factor.mT, columns, upper=True, left=False)
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
