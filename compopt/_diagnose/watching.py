"""All meters together: what they are shown of each step, and what they have found in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .._ops.math import one_thread
from .._wire.comm import Comm
from . import findings
from .findings import Findings
from .methods import Judged
from .sampling import Part
from .shadows import Shadows
from .shares import Shares
from .spreading import Spread
from .stability import DENSITIES, Stability
from .telling import QUANTITIES

# Of AdamS's first moment.
MOMENTUM = 0.9


class Watch:
    """The meters of one diagnosis; ``steps`` were seen."""

    def __init__(
        self,
        parts: Sequence[Part],
        groups: list[dict[str, Any]],
        judged: Mapping[str, Judged],
        start: int,
    ):
        self.parts, self.start, self.steps = parts, start, 0
        self.device = parts[0].param.device
        self.shadows = Shadows(judged, parts, groups, start)
        sizes = [part.numel for part in parts]
        self.stability = {quantity: Stability(sizes) for quantity in QUANTITIES}
        shapes = [(part.rows, part.columns) for part in parts]
        devices = [part.param.device for part in parts]
        self.shares = {quantity: Shares(shapes, devices) for quantity in ("gradient", "update")}
        self.spread = Spread(parts)
        self.moments: list[Tensor | None] = [None] * len(parts)
        self.norms: list[float] = []  # of the gradients

    def see(
        self, weights: list[Tensor], grads: list[Tensor | None], own: Sequence[Tensor | None]
    ) -> None:
        """The next step, in parts; ``own``: what the spread keeps of this rank's gradients.

        On one thread: what is found must not depend on their number, and on tensors of this size
        more are slower where others want the cores too.
        """
        self.steps += 1
        with one_thread():
            updates = self.shadows.see(weights, grads)
            self._carry(grads)
            seen: dict[str, list[Tensor | None]] = {
                "gradient": grads,
                "update": [None if g is None else u for g, u in zip(grads, updates, strict=True)],
                "moment": self.moments,
            }
            for quantity, stability in self.stability.items():
                stability.see(seen[quantity])
            for quantity, shares in self.shares.items():
                shares.see(seen[quantity])
            self.spread.keep(own)
            squares = [float(g.square().sum()) for g in grads if g is not None]
            self.norms.append(sum(squares) ** 0.5)

    def _carry(self, grads: Sequence[Tensor | None]) -> None:
        """The first moments, one step on."""
        for i, g in enumerate(grads):
            m = self.moments[i]
            if g is not None:
                self.moments[i] = g.clone() if m is None else m.lerp_(g, 1 - MOMENTUM)

    @property
    def norm(self) -> float:
        """Of the gradient, mean over the steps after the start."""
        after = self.norms[self.start :]
        return sum(after) / len(after)

    def found(self, comm: Comm, compared: Comm) -> Findings:
        """Everything, the same on all ranks of ``comm``; all of them ask.

        Gradients are compared over the ranks of ``compared``.
        """
        parts = self.parts
        found = findings.of_shadows(self.shadows, self.norm)
        for quantity, stability in self.stability.items():
            found |= findings.of_stability(quantity, stability, parts)
        found |= findings.of_settling(self.stability["update"], DENSITIES[1])
        for quantity, shares in self.shares.items():
            found |= findings.of_shares(quantity, shares, parts)
        if comm.size > 1:
            words = [*map(str, sorted(found)), str(len(self.spread.kept))]
            findings.check_alike(words, self.steps, comm, self.device)
        found |= findings.of_spread(self.spread.found(compared, self.device), parts)
        return findings.merged(found, comm, self.device) if comm.size > 1 else found
