"""Statistics of a training's gradients, on a sample of the model's tensors.

- `SampledTensor`: a tensor of the model, or evenly spaced rows and columns of it, as a float32
  matrix. Of every shape of matrix at least one tensor is sampled.
- `TopKStability`: whether the largest elements stay the same (Radius's Figure 1, SCAPE's Figure 6).
- `SubspaceNorms`: the share of a matrix's norm that columns of a tracked projection keep.
- `GradientSpread`: how far the gradients of ranks lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._lowrank.projections import matrix_shape, orthonormalize_each
from .._state.tensors import is_compressed, to_local
from .._wire.collectives import Communicator
from .._wire.requests import AllReduceMean

# Elements of the smallest tensor that is compressed, and of the smallest sample.
LEAST_ELEMENTS = 4096

# Sampling


@dataclass(frozen=True)
class SampledTensor:
    """A tensor, and the rows and columns that are sampled of it, at equal distances.

    Args:
        name: in the model.
        param: the parameter.
        group: the number of its group in the optimizer.
        rows, columns: how many are sampled.
        weight: elements of the model that each sampled element stands for.
    """

    name: str
    param: Tensor
    group: int
    rows: int
    columns: int
    weight: float

    @property
    def full_shape(self) -> tuple[int, int]:
        """Rows and columns of the tensor as a matrix."""
        return matrix_shape(to_local(self.param).shape)

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def is_complete(self) -> bool:
        return (self.rows, self.columns) == self.full_shape

    def extract(self, tensor: Tensor) -> Tensor:
        """Copy the sampled elements of a tensor of the parameter's shape, in float32."""
        rows, columns = self.full_shape
        matrix = to_local(tensor.detach()).reshape(rows, columns)
        cut = matrix[:: rows // self.rows, :: columns // self.columns]
        copy = torch.empty(self.rows, self.columns, dtype=torch.float32, device=cut.device)
        return copy.copy_(cut[: self.rows, : self.columns])


@dataclass
class EligibleTensor:
    """A tensor that a method would compress."""

    name: str
    param: Tensor
    group: int


def find_eligible_tensors(
    groups: Sequence[dict[str, Any]], names: dict[int, str]
) -> list[EligibleTensor]:
    """The tensors in an optimizer's groups that a method would compress.

    ``names`` maps the ids of parameters to their names in the model.
    """
    tensors = []
    for number, group in enumerate(groups):
        group_names = group.get("param_names") or [""] * len(group["params"])
        for place, (p, group_name) in enumerate(zip(group["params"], group_names, strict=True)):
            name = names.get(id(p)) or group_name or f"group {number}, tensor {place}"
            name = strip_wrapper_prefixes(name)
            is_large = p.dim() >= 2 and to_local(p).numel() >= LEAST_ELEMENTS
            is_trainable = p.requires_grad and p.is_floating_point()
            if is_large and is_trainable and is_compressed(p, group, name):
                tensors.append(EligibleTensor(name, p, number))
    return tensors


def strip_wrapper_prefixes(name: str) -> str:
    """A parameter's name without the prefixes of DistributedDataParallel and torch.compile."""
    return ".".join(word for word in name.split(".") if word not in ("module", "_orig_mod"))


def sample_tensors(eligible: Sequence[EligibleTensor], elements: int) -> list[SampledTensor]:
    """Sample about ``elements`` elements, shared out among the shapes of matrices.

    Of each shape as many tensors as fit, from evenly spaced layers; a tensor that does not fit is
    sampled in part.
    """
    shapes: dict[tuple[int, int], list[EligibleTensor]] = {}
    for tensor in eligible:
        shapes.setdefault(matrix_shape(to_local(tensor.param).shape), []).append(tensor)
    sampled, left = [], elements
    by_size = sorted(shapes.items(), key=lambda item: math.prod(item[0]))
    for number, ((rows, columns), same) in enumerate(by_size):
        share = max(LEAST_ELEMENTS, left // (len(by_size) - number))
        count = min(len(same), max(1, share // (rows * columns)))
        cut = crop_shape(rows, columns, share)
        weight = len(same) * rows * columns / (count * math.prod(cut))
        for i in range(count):
            one = same[(2 * i + 1) * len(same) // (2 * count)]
            sampled.append(SampledTensor(one.name, one.param, one.group, *cut, weight))
        left -= count * math.prod(cut)
    order = {id(tensor.param): place for place, tensor in enumerate(eligible)}
    return sorted(sampled, key=lambda tensor: order[id(tensor.param)])


def crop_shape(rows: int, columns: int, limit: int) -> tuple[int, int]:
    """Rows and columns of at most ``limit`` elements; the longer side is cut first."""
    side = min(rows, columns)
    if rows * columns <= limit:
        return rows, columns
    if side * side > limit:
        return math.isqrt(limit), math.isqrt(limit)
    return (limit // side, side) if columns == side else (side, limit // side)


# The largest elements

DENSITIES = (0.4, 0.1, 0.01)
LAGS = (1, 10, 100)
# Steps between two masks that are kept for the longer lags.
MASK_INTERVAL = 10
# Elements of one tensor that are compared.
STABILITY_ELEMENTS = 1 << 15


class TopKStability:
    """Overlap of the largest elements of a quantity between steps.

    For a quantity x and a density d, let A(t) be the positions of the round(d n) largest |x| of a
    tensor at step t. ``overlaps`` holds, for every (density, lag, tensor) and step, the share of
    A(t) that was in A(t - lag); ``norms`` the norm of x(t) on A(t - lag) over its norm on A(t).

    Args:
        sizes: elements of each sampled tensor.
        densities: shares of the elements.
    """

    def __init__(self, sizes: Sequence[int], densities: Sequence[float] = DENSITIES):
        self.densities = densities
        self.strides = [max(1, size // STABILITY_ELEMENTS) for size in sizes]
        self.step = 0
        # By step: for every tensor a mask of shape (densities, elements).
        self.masks: dict[int, list[Tensor | None]] = {}
        self.overlaps: dict[tuple[float, int, int], list[float]] = {}
        self.norms: dict[tuple[float, int, int], list[float]] = {}

    def record_step(self, values: Sequence[Tensor | None]) -> None:
        """Compare the quantity with earlier steps; None where a tensor has no gradient."""
        self.step += 1
        now: list[Tensor | None] = []
        for i, value in enumerate(values):
            if value is None:
                now.append(None)
                continue
            x = value.reshape(-1)[:: self.strides[i]].abs()
            now.append(chosen := top_k_masks(x, self.densities))
            for lag in LAGS:
                before = self.masks.get(self.step - lag, [None] * len(values))[i]
                if before is not None:
                    self._compare(i, lag, x, chosen, before)
        self.masks[self.step] = now
        self._drop_old_masks()

    def _drop_old_masks(self) -> None:
        # The next step compares itself with masks that are newer than this.
        expired = self.step - max(LAGS)
        for step in list(self.masks):
            if step <= expired or (step < self.step and step % MASK_INTERVAL):
                del self.masks[step]

    def _compare(self, i: int, lag: int, x: Tensor, now: Tensor, before: Tensor) -> None:
        squares = x.double().square()
        shared = (now & before).sum(1) / now.sum(1)
        fresh = (squares * now).sum(1)
        old = ((squares * before).sum(1) / fresh.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        sums = torch.stack([shared.double(), old]).tolist()
        for density, overlap, norm in zip(self.densities, *sums, strict=True):
            self.overlaps.setdefault((density, lag, i), []).append(overlap)
            self.norms.setdefault((density, lag, i), []).append(norm)


def top_k_masks(x: Tensor, densities: Sequence[float]) -> Tensor:
    """A row for every density: the mask of the round(density n) largest of x >= 0."""
    counts = [round(density * x.numel()) for density in densities]
    positions = x.topk(max(counts)).indices
    masks = torch.zeros(len(counts), x.numel(), dtype=torch.bool, device=x.device)
    for row, count in zip(masks, counts, strict=True):
        row[positions[:count]] = True
    return masks


# Tracked columns

RANKS = (4, 8, 16, 32, 64)


class SubspaceNorms:
    """The share of a matrix's norm that columns of a tracked projection keep, by rank.

    This is the power iteration of `SeparateAdam`'s tracked projection, without rounding and without
    error feedback. Columns are orthonormalized one after the other, so the first r columns of one
    iteration are those of an iteration of rank r.

    ``kept`` holds the shares of every step by (rank, tensor).
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], devices: Sequence[torch.device]):
        most = max(RANKS)
        generator = torch.Generator().manual_seed(0)
        random = [
            torch.randn(columns, min(most, rows, columns), dtype=torch.float32, generator=generator)
            for rows, columns in shapes
        ]
        bases = zip(orthonormalize_each(random), devices, strict=True)
        self.bases = [basis.to(device) for basis, device in bases]
        self.kept: dict[tuple[int, int], list[float]] = {}

    def record_step(self, matrices: Sequence[Tensor | None]) -> None:
        """Project the next step's matrices; None where a tensor has no gradient."""
        present = {i: matrix for i, matrix in enumerate(matrices) if matrix is not None}
        columns = orthonormalize_each([matrix @ self.bases[i] for i, matrix in present.items()])
        projected = [matrix.t() @ R for matrix, R in zip(present.values(), columns, strict=True)]
        bases = orthonormalize_each(projected)
        for (i, matrix), p, basis in zip(present.items(), projected, bases, strict=True):
            self.bases[i] = basis
            squares = p.double().square().sum(0).cumsum(0).tolist()
            total = float(matrix.double().square().sum())
            for rank in RANKS if total else ():
                share = squares[min(rank, len(squares)) - 1] / total
                self.kept.setdefault((rank, i), []).append(min(1.0, share**0.5))


# Ranks

# Elements that are kept of all tensors together, for each step.
SPREAD_ELEMENTS = 1 << 15
# Steps that are kept.
SPREAD_STEPS = 64


class GradientSpread:
    """Elements of this rank's own gradients, step for step, to be compared with other ranks' at the
    end.

    Among N gradients the mean cosine of a pair is ``(N^2 |mean|^2 - sum |g|^2) / ((N - 1) sum
    |g|^2)``, for gradients of equal norm. The norm ratio is a rank's norm, as a root mean square,
    over the mean's. On a single process two consecutive batches stand for two ranks.
    """

    def __init__(self, sampled: Sequence[SampledTensor]):
        share = max(1, SPREAD_ELEMENTS // len(sampled))
        self.strides = [max(1, tensor.numel // share) for tensor in sampled]
        # By step: a row of every tensor.
        self.rows: list[list[Tensor]] = []

    def record_step(self, rows: Sequence[Tensor | None]) -> None:
        """Keep rows that `subsample` returned; a step in which one is missing is left out."""
        present = [row for row in rows if row is not None]
        if len(self.rows) < SPREAD_STEPS and len(present) == len(rows):
            self.rows.append(present)

    def subsample(self, i: int, grad: Tensor) -> Tensor:
        return grad.reshape(-1)[:: self.strides[i]].cpu().clone()

    def compute(self, comm: Communicator, device: torch.device) -> list[tuple[float, float]]:
        """Cosine and norm ratio of each tensor; collective, after equally many steps."""
        if len(self.rows) < 2:
            return []
        return [
            cosine_and_norm_ratio([step[i] for step in self.rows], comm, device)
            for i in range(len(self.strides))
        ]


def cosine_and_norm_ratio(
    steps: list[Tensor], comm: Communicator, device: torch.device
) -> tuple[float, float]:
    """Cosine and norm ratio of one tensor's gradients, means over steps."""
    rows = torch.stack(steps).double()
    if comm.size > 1:
        size = comm.size
        mean = mean_over_ranks(rows, comm, device)
        squares = mean_over_ranks(rows.square().sum(1), comm, device)
    else:
        size, mean = 2, (rows[1:] + rows[:-1]) / 2
        squares = (rows[1:].square().sum(1) + rows[:-1].square().sum(1)) / 2
    of_mean, of_one = float(mean.square().sum()), float(squares.sum())
    if not of_mean or not of_one:
        return 0.0, 1.0
    cosine = (size * of_mean / of_one - 1) / (size - 1)
    return cosine, (of_one / of_mean) ** 0.5


def mean_over_ranks(tensor: Tensor, comm: Communicator, device: torch.device) -> Tensor:
    sent = tensor.float().to(device).contiguous()
    comm.start(AllReduceMean(sent)).wait()
    return sent.to(tensor)
