"""Statistics of a training's gradients and updates, on a sample of the model's tensors, which
`compopt-diagnose` (`diagnosis.py`) takes and reads.

- `SampledTensor`: a tensor of the model, or evenly spaced rows and columns of it, as a float32
  matrix. Of every shape of matrix at least one tensor is sampled.
- `TopKStability`: whether the largest elements stay the same (Radius's Figure 1, SCAPE's Figure 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._state.tensors import MIN_COMPRESSED_NUMEL, is_compressed, to_local
from ..separate.projections import matrix_shape

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


def find_eligible_tensors(
    groups: Sequence[dict[str, Any]], names: dict[int, str]
) -> list[SampledTensor]:
    """The tensors in an optimizer's groups that a method would compress, each as a whole.

    ``names`` maps the ids of parameters to their names in the model.
    """
    tensors = []
    for number, group in enumerate(groups):
        group_names = group.get("param_names") or [""] * len(group["params"])
        for place, (p, group_name) in enumerate(zip(group["params"], group_names, strict=True)):
            name = names.get(id(p)) or group_name or f"group {number}, tensor {place}"
            # Without the prefixes of DistributedDataParallel and torch.compile.
            name = ".".join(word for word in name.split(".") if word not in ("module", "_orig_mod"))
            is_large = p.dim() >= 2 and to_local(p).numel() >= MIN_COMPRESSED_NUMEL
            is_trainable = p.requires_grad and p.is_floating_point()
            if is_large and is_trainable and is_compressed(p, group, name):
                shape = matrix_shape(to_local(p).shape)
                tensors.append(SampledTensor(name, p, number, *shape, weight=1.0))
    return tensors


def sample_tensors(eligible: Sequence[SampledTensor], elements: int) -> list[SampledTensor]:
    """Sample about ``elements`` elements, shared out among the shapes of matrices.

    Of each shape as many tensors as fit, from evenly spaced layers; a tensor that does not fit is
    sampled in part.
    """
    shapes: dict[tuple[int, int], list[SampledTensor]] = {}
    for tensor in eligible:
        shapes.setdefault((tensor.rows, tensor.columns), []).append(tensor)
    sampled, left = [], elements
    by_size = sorted(shapes.items(), key=lambda item: math.prod(item[0]))
    for number, ((rows, columns), same) in enumerate(by_size):
        share = max(MIN_COMPRESSED_NUMEL, left // (len(by_size) - number))
        count = min(len(same), max(1, share // (rows * columns)))
        n, m = crop_shape(rows, columns, share)
        weight = len(same) * rows * columns / (count * n * m)
        for i in range(count):
            one = same[(2 * i + 1) * len(same) // (2 * count)]
            sampled.append(replace(one, rows=n, columns=m, weight=weight))
        left -= count * n * m
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
            squares = x.double().square()
            fresh = (squares * chosen).sum(1).clamp_min(torch.finfo(torch.float64).tiny)
            for lag in LAGS:
                before = self.masks.get(self.step - lag, [None] * len(values))[i]
                if before is None:
                    continue
                shared = (chosen & before).sum(1) / chosen.sum(1)
                old = ((squares * before).sum(1) / fresh).sqrt()
                sums = torch.stack([shared.double(), old]).tolist()
                for density, overlap, norm in zip(self.densities, *sums, strict=True):
                    self.overlaps.setdefault((density, lag, i), []).append(overlap)
                    self.norms.setdefault((density, lag, i), []).append(norm)
        self.masks[self.step] = now
        # The next step compares itself with masks that are newer than this.
        expired = self.step - max(LAGS)
        for step in list(self.masks):
            if step <= expired or (step < self.step and step % MASK_INTERVAL):
                del self.masks[step]


def top_k_masks(x: Tensor, densities: Sequence[float]) -> Tensor:
    """A row for every density: the mask of the round(density n) largest of x >= 0."""
    counts = [round(density * x.numel()) for density in densities]
    positions = x.topk(max(counts)).indices
    masks = torch.zeros(len(counts), x.numel(), dtype=torch.bool, device=x.device)
    for row, count in zip(masks, counts, strict=True):
        row[positions[:count]] = True
    return masks
