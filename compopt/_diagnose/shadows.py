"""Methods, run on the gradients of a training that goes on without them.

Each takes its steps from the weights that the training has, with lr 1, on copies of the parts: so a
step is the method's update of them, and what it carries from step to step are its moments and what
it holds back. Nothing it does reaches the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .methods import ADAMS, ADAMS_BETAS, DENSE, Judged, named
from .sampling import Part

TINY = 1e-30


class Shadow:
    """One method, and its updates in the last step."""

    def __init__(
        self, judged: Judged, parts: Sequence[Part], groups: list[dict[str, Any]], start: int
    ):
        self.params = [
            torch.zeros(
                part.rows, part.columns, dtype=torch.float32, device=part.param.device
            ).requires_grad_()
            for part in parts
        ]
        tensors = [(part.group, part.name, p) for part, p in zip(parts, self.params, strict=True)]
        self.judged, self.optimizer = judged, judged.make(named(groups, tensors), start)
        # of SCAPE's residual, which is in units of the momentum
        self.unit = 1 - ADAMS_BETAS[0] if judged.cls in ADAMS else 1.0

    @torch.no_grad()
    def step(self, weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Its updates at these weights and gradients, which it leaves as they are; valid until the
        next step.
        """
        for p, w, g in zip(self.params, weights, grads, strict=True):
            p.copy_(w)
            p.grad = g
        for _ in self.optimizer.step_in_turns():  # not step(): that has hooks that others see
            pass
        for p, w in zip(self.params, weights, strict=True):
            p.grad = None
            p.sub_(w)
        return [p.detach() for p in self.params]

    def residual(self) -> float:
        """The norm of what it holds back, in units of the gradient."""
        return self.optimizer.stats.residual_norm() / self.unit


class Shadows:
    """All methods beside AdamW: what each step's update has of AdamW's, and what is held back."""

    def __init__(
        self,
        judged: Mapping[str, Judged],
        parts: Sequence[Part],
        groups: list[dict[str, Any]],
        start: int,
    ):
        self.parts, self.start, self.step = parts, start, 0
        self.adamw = Shadow(DENSE, parts, groups, start)
        self.shadows = {name: Shadow(one, parts, groups, start) for name, one in judged.items()}
        # of every step after the start: of each part, and last of the whole
        self.cosines: dict[str, list[list[float]]] = {name: [] for name in judged}
        self.lengths: dict[str, list[float]] = {name: [] for name in judged}
        self.residuals: dict[str, list[float]] = {name: [] for name in judged}

    def see(self, weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The next step of all; AdamW's updates."""
        self.step += 1
        updates = self.adamw.step(weights, grads)
        own = [self._products(u, u) for u in updates]
        for name, shadow in self.shadows.items():
            theirs = shadow.step(weights, grads)
            if self.step <= self.start:
                continue
            pairs = zip(theirs, updates, strict=True)
            found = torch.stack([self._products(a, b) for a, b in pairs]).tolist()
            self._keep(name, found, torch.stack(own).tolist())
            self.residuals[name].append(shadow.residual())
        return updates

    @staticmethod
    def _products(a: Tensor, b: Tensor) -> Tensor:
        """<a, b> and |a|^2, on the host."""
        a, b = a.reshape(-1), b.reshape(-1)
        return torch.stack([torch.dot(a, b), torch.dot(a, a)]).double().cpu()

    def _keep(self, name: str, found: list[list[float]], own: list[list[float]]) -> None:
        whole, cosines = [0.0, 0.0, 0.0], []
        for part, (dot, square), (_, dense) in zip(self.parts, found, own, strict=True):
            cosines.append(dot / max(TINY, (square * dense) ** 0.5))
            for i, value in enumerate((dot, square, dense)):
                whole[i] += part.weight * value
        cosines.append(whole[0] / max(TINY, (whole[1] * whole[2]) ** 0.5))
        self.cosines[name].append(cosines)
        self.lengths[name].append((whole[1] / max(TINY, whole[2])) ** 0.5)
