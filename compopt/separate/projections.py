"""Projections of one tensor: its matrix shape, the projected side, and orthonormal columns.

A tensor is viewed as a matrix H of m rows and d columns. ``p = H R`` with R of shape (d, r) crosses
the network, and ``scale * p R^T`` is its reconstruction. The values of ``projection=`` are:

- "gaussian": R holds independent normal numbers. The reconstruction is unbiased.
- "tracked": R holds orthonormal columns that follow the gradient, see ``stacks``. The
  reconstruction is a contraction: it never enlarges the error. Only the first R is drawn at random.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .._state.tensors import to_local

# Fewer rows than this are not projected. Narrower trailing dimensions are joined to one side.
NARROW = 64
MAX_NUMBERS = 2**22  # random numbers that are drawn for the columns of a tensor of few rows

# Share of a unit vector that is added to each column before Cholesky-QR, so that zero and dependent
# columns become orthonormal as well. Its square is representable beside 1 in float64.
SHIFT = 1e-6


@dataclass(frozen=True, slots=True)
class Projection:
    """Projection of one tensor to r columns.

    ``rows`` and ``columns`` are the tensor as a matrix. Where ``transposes``, H is its transpose,
    so that its rows are projected. ``beta`` is the weight of the old error; the error grows without
    bound below ``least_beta``. ``inflation`` is the squared norm of a reconstruction over that of
    the averaged gradient.
    """

    rows: int
    columns: int
    transposes: bool
    m: int
    d: int
    r: int
    kind: str
    beta: float
    scale: float = 1.0
    inflation: float = 1.0
    least_beta: float = 0.0

    @property
    def is_tracked(self) -> bool:
        return self.kind == "tracked"

    @property
    def random_shape(self) -> tuple[int, int]:
        """Shape of R."""
        return self.d, self.r

    def view_as_matrices(self, stack: Tensor) -> Tensor:
        """View a contiguous stack of tensors as the (k, m, d) matrices H."""
        matrices = stack.view(-1, self.rows, self.columns)
        return matrices.mT if self.transposes else matrices


@lru_cache(maxsize=4096, typed=True)
def plan_projection(
    shape: torch.Size,
    is_dtensor: bool,
    ratio: float,
    kind: str,
    ef_beta: float | str,
    rank: int = 16,
) -> Projection | None:
    """Choose the projection of a tensor of this (local) shape; None where it is sent dense.

    A random projection reduces the smaller side, since the bytes and the variance of a ratio are
    the same and less is drawn and multiplied. In two cases the last dimension is projected. Fewer
    than 64 rows would leave too little (unless a matrix for the columns takes too many random
    numbers). And where rows are sharded, a rank has whole rows, but not whole columns. A tracked
    projection reduces the rows to ``rank``; each shard is a matrix of its own.
    """
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    rows, columns = matrix_shape(shape)
    if kind == "tracked":
        transposes, r = True, min(rank, rows, columns)
        if r * (rows + columns) >= rows * columns:
            return None
    else:
        is_narrow = rows < NARROW
        is_too_wide = is_narrow and columns * math.ceil(columns / ratio) > MAX_NUMBERS
        transposes = rows < columns and (not is_narrow or is_too_wide) and not is_dtensor
        r = math.ceil((rows if transposes else columns) / ratio)
        if r >= (rows if transposes else columns) or (is_too_wide and not transposes):
            return None
    m, d = (columns, rows) if transposes else (rows, columns)

    # A contraction never enlarges the error, so all of the new error is kept: beta = 0.
    scale, inflation, least_beta, best_beta = 1.0, 1.0, 0.0, 0.0
    if kind == "gaussian":
        # w = E |reconstruction - g|^2 / |g|^2 (lemma 4.2). With weight beta of the old error, the
        # squared error grows by beta^2 + (1 - beta)^2 w a step.
        w = (d + 1) / r
        scale, inflation, least_beta, best_beta = 1 / r, 1 + w, (w - 1) / (w + 1), w / (1 + w)
    beta = best_beta if isinstance(ef_beta, str) else ef_beta

    return Projection(rows, columns, transposes, m, d, r, kind, beta, scale, inflation, least_beta)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix.

    The columns are the last dimension, with those before it while it is narrow: the kernel of a
    convolution.
    """
    split = len(shape) - 1
    while split > 1 and math.prod(shape[split:]) < NARROW:
        split -= 1
    return math.prod(shape[:split]), math.prod(shape[split:])


def is_dtensor(p: Tensor) -> bool:
    return to_local(p) is not p


def orthonormalize(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return orthonormal columns that span those of the matrices of each stack, in at least
    float32.

    A column of zeros becomes a unit vector. A row of zeros stays one, so that what has no gradient
    on any rank does not move; unless all rows are zeros. Equal matrices give columns that are equal
    to the bit, as all ranks need. A CPU uses QR, on one thread: with more threads the last bits
    depend on their number, and it is hardly faster. Other devices use Cholesky-QR, since QR
    launches a kernel for each column. On a CPU Cholesky-QR takes 2 to 7 times as long.
    """
    by_index: dict[int, Tensor] = {}
    shapes = [stack.shape[1:] for stack in stacks]
    groups = [[i for i, x in enumerate(shapes) if x == shape] for shape in dict.fromkeys(shapes)]
    together = [
        stacks[group[0]] if len(group) == 1 else torch.cat([stacks[i] for i in group])
        for group in groups
    ]
    for group, columns in zip(groups, _orthonormalize_each(together), strict=True):
        parts = columns.split([len(stacks[i]) for i in group])
        by_index.update(zip(group, parts, strict=True))
    return [by_index[i] for i in range(len(stacks))]


def _orthonormalize_each(stacks: list[Tensor]) -> list[Tensor]:
    if stacks and stacks[0].device.type != "cpu":
        return orthonormalize_by_cholesky(stacks)
    with one_thread():
        columns = [
            torch.linalg.qr(stack.to(torch.promote_types(stack.dtype, torch.float32))).Q
            for stack in stacks
        ]
        for Q, stack in zip(columns, stacks, strict=True):
            keep_zeros_(Q, stack)
        return columns


def keep_zeros_(columns: Tensor, stack: Tensor) -> None:
    """Set the rows of orthonormal columns to zero that are zeros in ``stack``, unless all of a
    matrix is.

    A factorization leaves rounding errors there, in the first r rows, and AdamW divides an average
    by its own size.
    """
    r = stack.shape[-1]
    is_kept = stack[..., :r, :].any(-1, keepdim=True)
    is_kept |= ~stack.flatten(-2).any(-1)[..., None, None]
    columns[..., :r, :].mul_(is_kept)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread alone: results do not depend on the number of threads."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def orthonormalize_by_cholesky(stacks: list[Tensor]) -> list[Tensor]:
    """Run Cholesky-QR twice, in float64, without a host wait.

    Matrices of one rank are factorized together, whatever their number of rows.

    The second pass removes what rounding left of dependent columns. Factorization errors are not
    checked: they come from non-finite numbers, and a step with such is not applied.
    """
    lengths = [
        torch.linalg.vector_norm(stack, dim=-2, keepdim=True, dtype=torch.float64)
        for stack in stacks
    ]
    torch._foreach_clamp_min_(lengths, torch.finfo(torch.float64).tiny)
    columns = [stack / length for stack, length in zip(stacks, lengths, strict=True)]
    for stack in columns:
        stack.diagonal(dim1=-2, dim2=-1).add_(SHIFT)
    for r in {stack.shape[-1] for stack in columns}:
        chosen = [i for i, stack in enumerate(columns) if stack.shape[-1] == r]
        for _ in range(2):
            products = _divide_by_factors([columns[i] for i in chosen])
            for i, product in zip(chosen, products, strict=True):
                columns[i] = product
    dtype = torch.promote_types(stacks[0].dtype, torch.float32)
    results = [torch.empty_like(x, dtype=dtype) for x in columns]
    torch._foreach_copy_(results, columns)
    for Q, stack in zip(results, stacks, strict=True):
        keep_zeros_(Q, stack)
    return results


def _divide_by_factors(columns: list[Tensor]) -> list[Tensor]:
    """Return C L^-T for each stack C of r columns, with L the Cholesky factor of C^T C."""
    sizes, r = [len(stack) for stack in columns], columns[0].shape[-1]
    grams = columns[0].new_empty(sum(sizes), r, r)
    for stack, gram in zip(columns, grams.split(sizes), strict=True):
        torch.bmm(stack.mT, stack, out=gram)
    factors = torch.linalg.cholesky_ex(grams).L
    identity = torch.eye(r, dtype=grams.dtype, device=grams.device).expand_as(grams)
    inverse = torch.linalg.solve_triangular(factors.mT, identity, upper=True)
    return [
        torch.bmm(stack, each) for stack, each in zip(columns, inverse.split(sizes), strict=True)
    ]
