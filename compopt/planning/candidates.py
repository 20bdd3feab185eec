"""The methods that `compopt.diagnose` compares, and how each of them runs beside a training.

A candidate is one of the package's classes at a setting that a user would try first. A
`CandidateRun` steps it on copies of the sampled tensors, from the weights that the training has and
with lr 1, so that a step is the method's update. Between steps it keeps its moments and its
residual. Nothing that it does reaches the training.

``Diagnosis`` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._engine.optimizer import CompressedOptimizer, without_integrations
from .._wire.collectives import Communicator
from ..adams import AdamS
from ..radius import RadiusAdamW
from ..scape.scape import ScapeAdamS
from ..separate.separate import SeparateAdam
from ..tagc.tagc import TagcAdamW
from .gradient_statistics import SampledTensor
from .methods import FLOAT, METHODS
from .workload import Workload

CLASSES: Mapping[str, Callable[..., CompressedOptimizer]] = MappingProxyType(
    {cls.__name__: cls for cls in (AdamS, RadiusAdamW, ScapeAdamS, SeparateAdam, TagcAdamW)}
)
ADAMS_CLASSES = ("AdamS", "ScapeAdamS")
# AdamS's authors train with these.
ADAMS_BETAS = (0.9, 0.95)
# Keeps a cosine finite where an update is zero.
TINY = 1e-30


@dataclass(frozen=True)
class Candidate:
    """A class and its options.

    Args:
        class_name: a key of `CLASSES`.
        options: its keyword arguments.
        cost_row: its row in the cost model's ``METHODS``; "": no formula counts its bytes.
        cost_options: the options of that row's formula, where they are not ``options``.
        simulate: compress although there is no other rank.
    """

    class_name: str
    options: dict[str, Any]
    cost_row: str = ""
    cost_options: dict[str, Any] | None = None
    simulate: bool = True

    @property
    def line(self) -> str:
        """The constructor call."""
        words = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"compopt.{self.class_name}(params, lr=...{words})"

    def share_of_bytes(self, work: Workload, ranks: int) -> float | None:
        """Bytes on the network in a compressed step over those of a dense one; None without a
        formula.
        """
        if not self.cost_row:
            return None
        options = self.options if self.cost_options is None else self.cost_options
        cost = METHODS[self.cost_row](work, ranks, **options)
        return cost.as_all_reduced / (FLOAT * work.parameters)

    def make_optimizer(self, groups: Iterable[dict[str, Any]], start: int) -> CompressedOptimizer:
        """Construct the optimizer; it is dense for ``start`` steps."""
        options = dict(self.options)
        if self.class_name != "AdamS":
            options |= {"dense_steps": start, "simulate": self.simulate}
        if self.class_name == "ScapeAdamS":
            options |= {"density_steps": 0}
        if self.class_name in ADAMS_CLASSES:
            groups = [{**group, "betas": ADAMS_BETAS} for group in groups]
        made: CompressedOptimizer = construct_silently(
            CLASSES[self.class_name], groups, lr=1.0, **options
        )
        return made


def construct_silently(make: Callable[..., Any], params: Any, **options: Any) -> Any:
    """An optimizer of this package without other ranks, hooks or messages."""
    with without_integrations():
        made = make(params, process_group=Communicator(single_process=True), **options)
    made._engine.warned.add("compression")
    return made


def radius_mask(density: float, interval: int) -> Candidate:
    return Candidate("RadiusAdamW", {"density": density, "interval": interval}, "RadiusAdamW")


# The class is plain AdamW where there is no other rank.
ADAMW = Candidate("SeparateAdam", {}, "AdamW+DDP", simulate=False)
# The first word of a name is the method, the rest its setting.
CANDIDATES: Mapping[str, Candidate] = MappingProxyType(
    {
        **{
            f"tracked {rank}, int8": Candidate("SeparateAdam", {"rank": rank}, "SeparateAdam")
            for rank in (4, 8, 16, 32)
        },
        "tracked 16, int4": Candidate(
            "SeparateAdam",
            {"rank": 16, "payload_dtype": "int4"},
            "SeparateAdam",
            {"rank": 16, "bits": 4},
        ),
        **{
            f"Gaussian {ratio}": Candidate(
                "SeparateAdam",
                {"projection": "gaussian", "ratio": ratio},
                "SeparateAdam, Gaussian 16",
                {"ratio": ratio},
            )
            for ratio in (8, 16)
        },
        **{f"Radius {density}": radius_mask(density, 20) for density in (0.5, 0.4, 0.2)},
        "Radius 0.4, interval 100": radius_mask(0.4, 100),
        **{
            f"SCAPE {density}": Candidate("ScapeAdamS", {"density": density}, "ScapeAdamS")
            for density in (0.1, 0.01)
        },
        **{
            f"TAGC {density}": Candidate("TagcAdamW", {"density": density}, "TagcAdamW")
            for density in (0.1, 0.0125)
        },
        "AdamS, dense": Candidate("AdamS", {}, "AdamW+DDP"),
    }
)


def adam_options(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """AdamW's options, from an optimizer's groups; torch's defaults where these have no betas."""
    options = []
    for group in groups:
        betas = group.get("betas", ())
        like_adam = len(betas) == 2 and all(0 <= float(beta) < 1 for beta in betas)
        options.append(
            {
                "betas": tuple(map(float, betas)) if like_adam else (0.9, 0.999),
                "eps": float(group.get("eps", 1e-8)) if like_adam else 1e-8,
                "weight_decay": float(group.get("weight_decay", 0.0)) if like_adam else 0.0,
                "maximize": bool(group.get("maximize", False)),
            }
        )
    return options


class CandidateRun:
    """One method on copies of the sampled tensors."""

    def __init__(
        self,
        candidate: Candidate,
        sampled: Sequence[SampledTensor],
        groups: list[dict[str, Any]],
        start: int,
    ):
        self.params = [
            torch.zeros(t.rows, t.columns, dtype=torch.float32, device=t.param.device)
            for t in sampled
        ]
        named: list[list[tuple[str, Tensor]]] = [[] for _ in groups]
        for tensor, p in zip(sampled, self.params, strict=True):
            named[tensor.group].append((tensor.name, p.requires_grad_()))
        pairs = zip(groups, named, strict=True)
        filled = [{**group, "params": params} for group, params in pairs if params]
        self.optimizer = candidate.make_optimizer(filled, start)
        # SCAPE's residual is in units of the momentum.
        self.residual_unit = 1 - ADAMS_BETAS[0] if candidate.class_name in ADAMS_CLASSES else 1.0

    @torch.no_grad()
    def compute_updates(
        self, weights: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The method's updates at these weights and gradients; valid until the next call."""
        for p, weight, grad in zip(self.params, weights, grads, strict=True):
            p.copy_(weight)
            p.grad = grad
        # step() would call hooks that others have registered.
        self.optimizer.take_step()
        for p, weight in zip(self.params, weights, strict=True):
            p.grad = None
            p.sub_(weight)
        return [p.detach() for p in self.params]

    def residual_norm(self) -> float:
        """The norm of the residual, in units of the gradient."""
        return self.optimizer.stats.residual_norm() / self.residual_unit


class CandidateRuns:
    """All candidates beside AdamW: how much of AdamW's update each keeps, and its residual.

    ``cosines`` holds for every step after the start one value for each tensor, and last one for all
    of them; ``residuals`` the residual's norm.
    """

    def __init__(
        self,
        candidates: Mapping[str, Candidate],
        sampled: Sequence[SampledTensor],
        groups: list[dict[str, Any]],
        start: int,
    ):
        self.sampled, self.start, self.step = sampled, start, 0
        self.adamw = CandidateRun(ADAMW, sampled, groups, start)
        self.runs = {
            name: CandidateRun(candidate, sampled, groups, start)
            for name, candidate in candidates.items()
        }
        self.cosines: dict[str, list[list[float]]] = {name: [] for name in candidates}
        self.residuals: dict[str, list[float]] = {name: [] for name in candidates}

    def record_step(
        self, weights: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Step every candidate, compare after the start; returns AdamW's updates."""
        self.step += 1
        reference = self.adamw.compute_updates(weights, grads)
        dense_squares = [float(dot_products(u, u)[1]) for u in reference]
        for name, run in self.runs.items():
            updates = run.compute_updates(weights, grads)
            if self.step <= self.start:
                continue
            pairs = zip(updates, reference, strict=True)
            products = torch.stack([dot_products(a, b) for a, b in pairs]).tolist()
            cosines, totals = [], [0.0, 0.0, 0.0]
            for tensor, (dot, square), dense in zip(
                self.sampled, products, dense_squares, strict=True
            ):
                # Not a number where no gradient has reached the tensor.
                is_still = square == dense == 0
                cosines.append(math.nan if is_still else dot / max(TINY, (square * dense) ** 0.5))
                for i, value in enumerate((dot, square, dense)):
                    totals[i] += tensor.weight * value
            dot, square, dense = totals
            self.cosines[name].append([*cosines, dot / max(TINY, (square * dense) ** 0.5)])
            self.residuals[name].append(run.residual_norm())
        return reference


def dot_products(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> and |a|^2, on the host."""
    a, b = a.reshape(-1), b.reshape(-1)
    return torch.stack([torch.dot(a, b), torch.dot(a, a)]).double().cpu()
