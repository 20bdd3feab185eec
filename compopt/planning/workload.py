"""The parameters of a model, as far as costs depend on them.

``prediction``, ``methods`` and ``diagnosis`` take one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from .._state.tensors import MIN_COMPRESSED_NUMEL
from ..separate.projections import plan_projection
from ..tagc.tagc import ATTENTION


@dataclass(frozen=True)
class Workload:
    """The parameters of one model.

    Args:
        parameters: their number.
        compressed: share of them in tensors that are compressed (at least 2-D and 4096 elements).
        side: the smaller side of those tensors, averaged by size. What a projection costs.
        perimeter: sum of (rows + columns) over those tensors. What low-rank factors cost.
        large: share of parameters in those of them that TAGC compresses by default: without
            attention's queries, keys and values.
        columns: of the perimeter, the sum of the columns, which FSDP2 leaves whole; None: half.
        tensors: number of tensors that are compressed.
        matrices: of those, rows, columns and number of each shape; empty where shapes are not
            known.
        frozen_bytes: bytes of parameters that require no gradient.
    """

    parameters: int
    compressed: float
    side: float
    perimeter: float
    large: float
    columns: float | None = None
    tensors: float = 0.0
    matrices: tuple[tuple[float, float, float], ...] = ()
    frozen_bytes: float = 0.0

    @classmethod
    def of_size(cls, parameters: int) -> Workload:
        """A transformer of so many parameters: 64 times as wide as deep, but of four layers at
        least, 12 width^2 a layer, two thirds in the MLP.
        """
        if parameters < 1:
            raise ValueError(f"parameters must be positive; got {parameters}.")
        width = max(8.0, min((64 * parameters / 12) ** (1 / 3), (parameters / 48) ** 0.5))
        layers = parameters / (12 * width**2)
        # Rows and columns of a layer, in widths: qkv, out, up, down.
        shapes = [(3, 1), (1, 1), (4, 1), (1, 4)]
        shapes = [(r, c) for r, c in shapes if r * c * width**2 >= MIN_COMPRESSED_NUMEL]
        perimeter = sum(r + c for r, c in shapes) * width * layers
        columns = sum(c for _, c in shapes) * width * layers
        compressed = 0.997 * sum(r * c for r, c in shapes) / 12
        large = sum(r * c for r, c in shapes if r * c == 4) / 12
        return cls(parameters, compressed, width, perimeter, large, columns, len(shapes) * layers)

    @classmethod
    def of_adapters(cls, parameters: int, rank: int, frozen_bytes: float) -> Workload:
        """LoRA adapters of this rank on square matrices of a transformer whose weights take
        ``frozen_bytes``, 2 bytes each: pairs of rank x width and width x rank.
        """
        if rank < 1:
            raise ValueError(f"The rank of adapters must be at least 1; got {rank}.")
        width = cls.of_size(round(frozen_bytes / 2)).side
        pairs = parameters / (2 * rank * width)
        compressed = 1.0 if rank * width >= MIN_COMPRESSED_NUMEL else 0.0
        sides, tensors = pairs * (rank + width), 2 * pairs
        return cls(
            parameters,
            compressed,
            min(rank, width),
            perimeter=2 * compressed * sides,
            large=compressed,
            columns=compressed * sides,
            tensors=compressed * tensors,
            matrices=((rank, width, pairs), (width, rank, pairs)) if compressed else (),
            frozen_bytes=frozen_bytes,
        )

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]]) -> Workload:
        """Read named parameters, `model.named_parameters()`. Those that require no gradient only
        take memory.
        """
        given = list(named)
        named = [(name, p) for name, p in given if p.requires_grad]
        if not named:
            raise ValueError("No parameter requires a gradient: there is nothing to average.")
        total = sum(p.numel() for _, p in named)
        chosen = [
            (name, p) for name, p in named if p.ndim >= 2 and p.numel() >= MIN_COMPRESSED_NUMEL
        ]
        size = sum(p.numel() for _, p in chosen)
        rows = [p.numel() // p.shape[-1] for _, p in chosen]
        columns = [p.shape[-1] for _, p in chosen]
        sides = [min(pair) for pair in zip(rows, columns, strict=True)]
        side = sum(p.numel() * d for (_, p), d in zip(chosen, sides, strict=True)) / max(1, size)
        large = sum(p.numel() for name, p in chosen if not ATTENTION.search(name))
        return cls(
            total,
            size / total,
            side,
            perimeter=float(sum(rows) + sum(columns)),
            large=large / total,
            columns=float(sum(columns)),
            tensors=len(chosen),
            matrices=tuple(
                (r, c, k) for (r, c), k in Counter(zip(rows, columns, strict=True)).items()
            ),
            frozen_bytes=float(sum(p.nbytes for _, p in given if not p.requires_grad)),
        )

    def count_factors(self, rank: int, least_gain: float = 1.0) -> tuple[float, float]:
        """The elements of the matrices that a rank makes smaller by this factor, and those of their
        factors.

        Others are too narrow to become smaller: they are not projected.
        """
        if not self.matrices:
            return self.parameters * self.compressed, rank * self.perimeter
        elements = factors = 0.0
        for rows, columns, count in self.matrices:
            values = min(rank, rows, columns) * (rows + columns)
            if least_gain * values < rows * columns:
                elements, factors = elements + count * rows * columns, factors + count * values
        return elements, factors

    def count_random(self, ratio: float) -> tuple[float, float, float]:
        """The elements of the matrices that SeparateAdam projects at random, the values it sends of
        them, and the multiplications of one projection.
        """
        if not self.matrices:
            elements = self.parameters * self.compressed
            return elements, elements / ratio, elements * self.side / ratio
        elements = values = products = 0.0
        for rows, columns, count in self.matrices:
            shape = torch.Size((math.ceil(rows), math.ceil(columns)))
            q = plan_projection(shape, False, ratio, "gaussian", "auto")
            if q is not None:
                elements += count * rows * columns
                values += count * q.m * q.r
                products += count * q.m * q.d * q.r
        return elements, values, products

    def split(self, share: float) -> tuple[float, float]:
        """This share of the parameters, and the rest."""
        return self.parameters * share, self.parameters * (1 - share)

    def shard(self, shard: int) -> Workload:
        """The part of one rank where FSDP2 cuts the rows of each tensor over ``shard`` ranks."""
        if shard == 1:
            return self
        columns = self.perimeter / 2 if self.columns is None else self.columns
        perimeter = (self.perimeter - columns) / shard + columns
        return replace(
            self,
            parameters=max(1, self.parameters // shard),
            perimeter=perimeter,
            columns=columns,
            matrices=tuple((r / shard, c, k) for r, c, k in self.matrices),
            frozen_bytes=self.frozen_bytes / shard,
        )
