"""Options, matrices, local clipping and adaptation of the optimizers that project gradients
(SEPARATE).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._engine.base import CompressedOptimizer
from .._engine.options import check_compression, require
from .._engine.weakly import weakly
from .._engine.when import dense_steps
from .._ops.ops import clip_factor
from .._state.buckets import Bucket, local
from .._state.layouts import Dense, Layout, Prefix
from .projections import (
    KINDS,
    Matrices,
    Plan,
    Projection,
    fingerprint,
    is_sharded,
    least_beta,
    projection,
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """How one bucket is projected at one step.

    ``plan`` says how each tensor is (None: averaged whole), ``draw`` makes the random matrices,
    ``bases`` gives what tracked tensors begin with (None: others), ``clipped`` is the factor on the
    local gradient, ``found`` takes the cosines of Algorithm 3 at a step that adapts to them.
    ``clips``: the averaged gradient is clipped by its norm."""

    plan: Plan
    draw: Callable[[], list[Tensor | None]]
    bases: list[Tensor | None]
    clipped: float
    found: Callable[[dict[Tensor, float]], None] | None
    clips: bool


class Projecting(CompressedOptimizer):
    """The options that Separate and SeparateAdam share, and what follows from them for a bucket at
    a step.
    """

    averaged_state = ("residual",)

    def check_group(self, group: dict) -> None:
        check_compression(group)
        beta, reset = group["ef_beta"], group["reset_interval"]
        require(group["ratio"] >= 1, "ratio", group["ratio"], ">= 1")
        require(
            beta == "auto" or (not isinstance(beta, str) and 0 <= beta <= 1),
            "ef_beta",
            beta,
            '"auto" or in [0, 1]',
        )
        good = reset in (None, "auto") or (
            not isinstance(reset, str) and reset >= 1 and int(reset) == reset
        )
        require(good, "reset_interval", reset, 'None, "auto" or an integer >= 1')
        rank = group["rank"]
        require(rank >= 1 and int(rank) == rank, "rank", rank, "an integer >= 1")
        tracked = group["projection"] == "tracked"
        require(
            not (tracked and group["adaptive"]), "adaptive", True, "False with projection='tracked'"
        )
        require(
            group["projection"] in KINDS,
            "projection",
            group["projection"],
            " or ".join(map(repr, KINDS)),
        )
        require(
            group["adapt_interval"] >= 1,
            "adapt_interval",
            group["adapt_interval"],
            "an integer >= 1",
        )
        require(
            group["clip"] in ("local", "reconstructed"),
            "clip",
            group["clip"],
            "'local' or 'reconstructed'",
        )
        if (
            group["clip"] == "local"
            and group["max_grad_norm"] is not None
            and any(map(is_sharded, group["params"]))
        ):
            raise ValueError(
                "max_grad_norm with clip='local' would clip every shard by itself: call "
                "clip_grad_norm_ before step()."
            )

    def state_specs(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {"residual": Dense(dtype, compressed_only=True)}

    def _specs(self, bucket: Bucket) -> dict[str, Layout]:
        specs = super()._specs(bucket)
        if bucket.group["projection"] != "tracked":
            return specs

        # buckets keep layouts, and must not keep their optimizer
        projection_of, group = weakly(self._projection), bucket.group

        def size(p: Tensor) -> int:
            q: Projection | None = projection_of(p, group)
            return 0 if q is None else q.m * q.r

        dtype = specs["residual"].dtype
        return {**specs, "basis": Prefix(dtype, size, compressed_only=True, optional=True)}

    def exchange(self, bucket: Bucket) -> Exchange:
        """How ``bucket`` is projected at the step that comes."""
        h = bucket.group
        t, plan = h["step"] + 1, self._plan(bucket)
        numbers = [self._numbers[p][0] for p in bucket.params]
        adapts = h["adaptive"] and t % h["adapt_interval"] == 0 and any(plan)

        drawn = [None if q is None or q.kind == "tracked" else q for q in plan]
        matrices = self._matrices

        def draw() -> list[Tensor | None]:
            return matrices.draw(bucket, numbers, drawn, h["seed"], t)

        clipped = clip_factor(self._norm, h["max_grad_norm"]) if h["clip"] == "local" else 1.0
        bases = self._bases(bucket, numbers, plan, t)
        clips = any(
            g["clip"] == "reconstructed" and g["max_grad_norm"] is not None
            for g in self._option_groups
        )
        return Exchange(plan, draw, bases, clipped, self._cosines.update if adapts else None, clips)

    def _bases(self, bucket: Bucket, numbers: list[int], plan: Plan, t: int) -> list[Tensor | None]:
        """What each tracked tensor's last step left; at first random numbers.

        Valid until matrices are drawn.
        """
        tracked = [q is not None and q.kind == "tracked" for q in plan]
        warm = bucket.cache["warm"]
        first = [
            replace(q, rows=q.m, columns=q.d) if yes and not w else None
            for q, yes, w in zip(plan, tracked, warm, strict=True)
        ]
        drawn = self._matrices.draw(bucket, numbers, first, bucket.group["seed"], t)
        return [
            None
            if not yes
            else bucket.state["basis"][i].view(plan[i].m, plan[i].r)
            if warm[i]
            else drawn[i]
            for i, yes in enumerate(tracked)
        ]

    def restore(self, bucket: Bucket) -> None:
        """A basis that is not zero has been found by a step."""
        bases = bucket.state.get("basis", [None] * len(bucket.params))
        bucket.cache["warm"] = [basis is not None and bool(basis.any()) for basis in bases]

    def _plan(self, bucket: Bucket) -> Plan:
        h = bucket.group
        if h["step"] < dense_steps(h):
            return [None] * len(bucket.params)
        return [
            self._projection(p, h) if c else None
            for p, c in zip(bucket.params, bucket.compressed, strict=True)
        ]

    def _projection(self, p: Tensor, h: dict) -> Projection | None:
        ratio, beta = h["ratio"], h["ef_beta"]
        if h["adapted"]:
            ratio, beta = h["adapted"][self._numbers[p][1]]
        return projection(local(p).shape, is_sharded(p), ratio, h["projection"], beta, h["rank"])

    def before_layout(self) -> None:
        self._matrices = Matrices()
        self._norm = 0.0  # of the local gradient, where that is clipped
        self._cosines: dict[Tensor, float] = {}
        places = [
            (p, place) for group in self._option_groups for place, p in enumerate(group["params"])
        ]
        self._numbers = {
            p: (number, place) for number, (p, place) in enumerate(places)
        }  # in all, and in its group

    def after_layout(self) -> None:
        """Warn, once, of a beta with which the error grows."""
        for bucket in self._buckets:
            group = bucket.group
            for name, p, compressed in zip(
                bucket.names, bucket.params, bucket.compressed, strict=True
            ):
                q = self._projection(p, group) if compressed else None
                if q is not None and q.beta < least_beta(q) and not self._warned_of_beta:
                    self._warned_of_beta = True
                    warnings.warn(
                        f"ef_beta={q.beta} lets the error of {name} grow without end at "
                        f"ratio={group['ratio']}: use 'auto', or a number above "
                        f"{least_beta(q):.4f}.",
                        stacklevel=5,
                    )

    _warned_of_beta = False

    def _settings(self) -> list:
        return [*super()._settings(), {kind: fingerprint(kind) for kind in KINDS}]

    # Clipping the local gradient: one norm over all buckets, so none of them can be sent before
    # backward has ended

    def _clips_locally(self) -> bool:
        return any(
            h["clip"] == "local" and h["max_grad_norm"] is not None for h in self._option_groups
        )

    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        if not self._clips_locally():
            super().gradients_ready(params)

    def before_exchange(self) -> None:
        if self._clips_locally():
            grads = [g for bucket in self._buckets for g in bucket.grads() if g is not None]
            self._norm = float(torch.nn.utils.get_total_norm(grads))

    # Algorithm 3, step 6: more columns where the reconstruction is worse than on average, fewer
    # where it is better

    def committed(self) -> None:
        if not self._cosines:
            return
        mean = sum(self._cosines.values()) / len(self._cosines)
        for group in self._option_groups:
            adapted = group["adapted"] or [(group["ratio"], group["ef_beta"])] * len(
                group["params"]
            )
            group["adapted"] = [
                (ratio, beta)
                if p not in self._cosines
                else self._adapt(p, group, ratio, beta, self._cosines[p] - mean)
                for p, (ratio, beta) in zip(group["params"], adapted, strict=True)
            ]
        self._cosines.clear()

    @staticmethod
    def _adapt(
        p: Tensor, group: dict, ratio: float, beta: float | str, better: float
    ) -> tuple[float, float | str]:
        """The next ratio and beta of a tensor whose cosine is ``better`` than the mean."""
        ratio = max(2.0, ratio * (1 + better))
        if beta != "auto":
            q = projection(local(p).shape, is_sharded(p), ratio, group["projection"], beta)
            beta = max(min(beta * (1 + better), 0.99), 0.90, least_beta(q) if q else 0.0)
        return ratio, beta


def resets(h: dict, t: int) -> bool:
    """Whether the error is forgotten after step t: "auto" never forgets what a contraction has
    left.
    """
    interval = h["reset_interval"]
    if interval == "auto":
        interval = None if h["projection"] == "tracked" else 128
    return interval is not None and t % interval == 0
