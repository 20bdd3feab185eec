"""What is looked at of a model: of every shape of matrix one tensor or more, of large ones a part.

All meters look at the same parts, each as a float32 matrix of rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._lowrank.projections import as_matrix
from .._state.tensors import is_compressed, local

LEAST = 4096  # elements of a part


@dataclass(frozen=True)
class Part:
    """A tensor, and what is looked at of it: rows and columns at equal distances.

    ``weight``: how many elements of the model each of its elements stands for. ``group``: the
    tensor's place in the optimizer's groups.
    """

    name: str
    param: Tensor
    group: int
    rows: int
    columns: int
    weight: float

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the whole tensor."""
        return as_matrix(local(self.param).shape)

    @property
    def numel(self) -> int:
        """Elements that are looked at."""
        return self.rows * self.columns

    @property
    def whole(self) -> bool:
        """Whether all of it is looked at."""
        return (self.rows, self.columns) == self.matrix

    def of(self, tensor: Tensor) -> Tensor:
        """Its part of a tensor that is shaped like the parameter: a copy, in float32."""
        rows, columns = self.matrix
        whole = local(tensor.detach()).reshape(rows, columns)
        cut = whole[:: rows // self.rows, :: columns // self.columns]
        copy = torch.empty(self.rows, self.columns, dtype=torch.float32, device=cut.device)
        return copy.copy_(cut[: self.rows, : self.columns])


@dataclass
class Candidate:
    """A tensor that may be looked at."""

    name: str
    param: Tensor
    group: int


def candidates(groups: Sequence[dict[str, Any]], names: dict[int, str]) -> list[Candidate]:
    """The tensors of an optimizer's groups that a method would compress.

    ``names``: of parameters, by their ids.
    """
    found = []
    for number, group in enumerate(groups):
        given = group.get("param_names") or [""] * len(group["params"])
        for place, (p, own) in enumerate(zip(group["params"], given, strict=True)):
            name = clean(names.get(id(p)) or own or f"group {number}, tensor {place}")
            enough = p.dim() >= 2 and local(p).numel() >= LEAST
            trained = p.requires_grad and p.is_floating_point()
            if enough and trained and is_compressed(p, group, name):
                found.append(Candidate(name, p, number))
    return found


def clean(name: str) -> str:
    """A parameter's name without what DistributedDataParallel and torch.compile put before it."""
    return ".".join(word for word in name.split(".") if word not in ("module", "_orig_mod"))


def sample(found: Sequence[Candidate], elements: int) -> list[Part]:
    """About ``elements`` elements in all, dealt among shapes: of each as many tensors as fit, from
    evenly spaced layers; of one that does not fit, a part.
    """
    shapes: dict[tuple[int, int], list[Candidate]] = {}
    for candidate in found:
        shapes.setdefault(as_matrix(local(candidate.param).shape), []).append(candidate)
    parts, left = [], elements
    by_size = sorted(shapes.items(), key=lambda item: math.prod(item[0]))
    for number, ((rows, columns), same) in enumerate(by_size):
        share = max(LEAST, left // (len(by_size) - number))
        count = min(len(same), max(1, share // (rows * columns)))
        cut = cut_to(rows, columns, share)
        weight = len(same) * rows * columns / (count * math.prod(cut))
        for i in range(count):
            one = same[(2 * i + 1) * len(same) // (2 * count)]
            parts.append(Part(one.name, one.param, one.group, *cut, weight))
        left -= count * math.prod(cut)
    order = {id(candidate.param): place for place, candidate in enumerate(found)}
    return sorted(parts, key=lambda part: order[id(part.param)])


def cut_to(rows: int, columns: int, limit: int) -> tuple[int, int]:
    """Rows and columns of a part of at most ``limit`` elements: the longer side is cut first."""
    side = min(rows, columns)
    if rows * columns <= limit:
        return rows, columns
    if side * side > limit:
        return math.isqrt(limit), math.isqrt(limit)
    return (limit // side, side) if columns == side else (side, limit // side)
