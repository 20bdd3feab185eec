"""What is judged: the package's own classes, each at settings that a user would try first.

``METHODS`` of the cost model says what each sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from .._engine.base import CompressedOptimizer
from .._engine.owner import making_own
from .._wire.comm import Comm
from ..adams import AdamS
from ..costmodel import METHODS, Workload
from ..radius import RadiusAdamW
from ..scape import ScapeAdamS
from ..separate import SeparateAdam
from ..tagc import TagcAdamW

CLASSES: Mapping[str, Callable[..., CompressedOptimizer]] = MappingProxyType(
    {cls.__name__: cls for cls in (AdamS, RadiusAdamW, ScapeAdamS, SeparateAdam, TagcAdamW)}
)
ADAMS = ("AdamS", "ScapeAdamS")
# of those, as their authors train
ADAMS_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Judged:
    """A method: its class and options; ``cost`` is its row of the cost model, with its options.

    ``simulate``: it compresses although it is alone.
    """

    cls: str
    options: dict[str, Any]
    cost: str = ""
    costs: dict[str, Any] = field(default_factory=dict)
    simulate: bool = True

    @property
    def line(self) -> str:
        """How it is made in Python."""
        words = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"compopt.{self.cls}(params, lr=...{words})"

    def share(self, work: Workload, ranks: int) -> float | None:
        """Of the bytes of a dense step, those of a compressed one; None where nobody counts."""
        if not self.cost:
            return None
        return METHODS[self.cost](work, ranks, **self.costs).sent / (4 * work.parameters)

    def make(self, groups: Iterable[dict[str, Any]], start: int) -> CompressedOptimizer:
        """Alone, after ``start`` dense steps; no integration and no other rank hears of it."""
        options = dict(self.options)
        if self.cls != "AdamS":
            options |= {"warmup_steps": start, "simulate": self.simulate}
        if self.cls == "ScapeAdamS":
            options |= {"density_warmup_steps": 0}
        if self.cls in ADAMS:
            groups = [{**group, "betas": ADAMS_BETAS} for group in groups]
        alone: Any = Comm(alone=True)
        with making_own():
            made = CLASSES[self.cls](groups, lr=1.0, process_group=alone, **options)
        made._engine.told = True  # it has nothing to tell the user
        return made


def tracked(rank: int, payload: str = "int8") -> Judged:
    bits = {"int8": 8, "int4": 4}[payload]
    options = {"rank": rank} | ({"payload_dtype": payload} if bits == 4 else {})
    costs = {"rank": rank, "bits": bits}
    return Judged("SeparateAdam", options, "tracked 16, int8", costs)


def gaussian(ratio: int) -> Judged:
    options = {"projection": "gaussian", "ratio": ratio}
    return Judged("SeparateAdam", options, "SeparateAdam", {"ratio": ratio})


def radius(density: float, interval: int) -> Judged:
    options = {"density": density, "interval": interval}
    return Judged("RadiusAdamW", options, "RadiusAdamW", options)


def scape(density: float) -> Judged:
    return Judged("ScapeAdamS", {"density": density}, "ScapeAdamS", {"density": density})


def tagc(sparsity: float) -> Judged:
    return Judged("TagcAdamW", {"sparsity": sparsity}, "TagcAdamW", {"sparsity": sparsity})


# AdamW itself: that is what the class is without other ranks.
DENSE = Judged("SeparateAdam", {}, "AdamW+DDP", simulate=False)
JUDGED: Mapping[str, Judged] = MappingProxyType(
    {
        **{f"tracked {rank}, int8": tracked(rank) for rank in (4, 8, 16, 32)},
        "tracked 16, int4": tracked(16, "int4"),
        **{f"Gaussian {ratio}": gaussian(ratio) for ratio in (8, 16)},
        **{f"Radius {density}": radius(density, 20) for density in (0.5, 0.4, 0.2)},
        "Radius 0.4, interval 100": radius(0.4, 100),
        **{f"SCAPE {density}": scape(density) for density in (0.1, 0.01)},
        **{f"TAGC {sparsity}": tagc(sparsity) for sparsity in (0.9, 0.9875)},
        "AdamS, dense": Judged("AdamS", {}, "AdamW+DDP"),
    }
)


def of_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What AdamW would be told, of an optimizer's own groups; torch's defaults where they are no
    Adam's.
    """
    found = []
    for group in groups:
        betas = group.get("betas", ())
        like_adam = len(betas) == 2 and all(0 <= float(beta) < 1 for beta in betas)
        found.append(
            {
                "betas": tuple(map(float, betas)) if like_adam else (0.9, 0.999),
                "eps": float(group.get("eps", 1e-8)) if like_adam else 1e-8,
                "weight_decay": float(group.get("weight_decay", 0.0)) if like_adam else 0.0,
                "maximize": bool(group.get("maximize", False)),
            }
        )
    return found


def is_adam(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the optimizer's groups have what AdamW needs."""
    return all("betas" in group for group in groups)


def named(groups: list[dict[str, Any]], tensors: list[tuple[int, str, Tensor]]) -> list[Any]:
    """Groups of an optimizer over these tensors: of each the group it is in, and its name."""
    mine = [[(name, p) for at, name, p in tensors if at == number] for number in range(len(groups))]
    return [{**group, "params": pairs} for group, pairs in zip(groups, mine, strict=True) if pairs]
