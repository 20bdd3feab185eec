"""What Separate and SeparateAdam share: their options, and what follows from them for a bucket at a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._engine.inside import ReducingOptimizer, Unsent
from .._engine.options import Setting
from .._engine.reducer import WholeReducer
from .._engine.when import dense_steps
from .._ops.norms import clip_factor
from .._state.buckets import Bucket
from .._state.layouts import Dense, Layout, Prefix, Unsharded
from .._state.tensors import to_local
from .._wire.collectives import connect
from .._wire.warning import warn
from . import options
from .adaptation import Adaptation, current
from .kinds import KINDS
from .matrices import Drawn, Matrices, fingerprint
from .projections import Plan, Projection, is_sharded, projection
from .reducer import Encoding, ProjectionReducer
from .tensors import ProjectedTensor, WholeTensor
from .tracking import TrackedTensor

Group = dict[str, Any]


class Projecting(ReducingOptimizer):
    """An optimizer on gradients that are averaged through a projection."""

    averaged_state = ("residual",)

    def check_group(self, group: Group) -> None:
        options.check(group)

    def state_specs(self, dtype: torch.dtype) -> dict[str, Layout]:
        layout = Unsharded if self.reduces_inside else Dense
        return {"residual": layout(dtype, compressed_only=True)}

    def _specs(self, bucket: Bucket) -> dict[str, Layout]:
        specs = super()._specs(bucket)
        if not KINDS[bucket.group["projection"]].follows:
            return specs

        # layouts are kept: this must not keep the optimizer, which keeps them
        group, numbers, whole = bucket.group, self._numbers, self.reduces_inside

        def size(p: Tensor) -> int:
            q = projection_of(p, group, numbers[p][1], whole)
            return 0 if q is None else q.m * q.r

        dtype = specs["residual"].dtype
        basis = Prefix(dtype, size, whole, compressed_only=True, optional=True)
        return {**specs, "basis": basis}

    def before_layout(self) -> None:
        self._matrices = Matrices()
        self._adaptation = Adaptation()
        self._with_basis: set[Tensor] = set()  # of which a step has found one
        self._norm = 0.0  # of the local gradient, where that is clipped
        places = [
            (p, place) for group in self._option_groups for place, p in enumerate(group["params"])
        ]
        # of each tensor its number in all, and in its group
        self._numbers = {p: (number, place) for number, (p, place) in enumerate(places)}
        super().before_layout()
        if self.reduces_inside:
            options.check_inside(self._option_groups)

    _warned_of_beta = False

    def after_layout(self) -> None:
        super().after_layout()
        self._warn_of_beta()

    def _warn_of_beta(self) -> None:
        """Once, of one with which the error grows."""
        for bucket in self._buckets:
            for name, q in zip(bucket.names, self._projections_of(bucket), strict=True):
                if q is not None and q.beta < q.least_beta and not self._warned_of_beta:
                    self._warned_of_beta = True
                    warn(
                        f"ef_beta={q.beta} lets the error of {name} grow without end at "
                        f"ratio={bucket.group['ratio']}: use 'auto', or a number above "
                        f"{q.least_beta:.4f}.",
                        connect(self._session.group).rank,
                    )

    def _settings(self) -> list[Setting]:
        return [*super()._settings(), ("random matrices", self._fingerprints())]

    def _fingerprints(self) -> dict[str, str]:
        """What the devices here compute, of each kind of projection that is used on them."""
        used = {(b.group["projection"], b.device) for b in self._buckets if any(b.compressed)}
        return {f"{kind} {device.type}": fingerprint(kind, device) for kind, device in used}

    def values_sent(self, bucket: Bucket, ranks: int) -> float:
        plan = zip(bucket.lengths, self._projections_of(bucket), strict=True)
        # whole, by an all-reduce, which sends twice as much as a reduce-scatter
        parts = ranks / 2 if self.reduces_inside else 1
        return sum(n if q is None else values_of(q) / parts for n, q in plan)

    # How a bucket is projected at the step that comes

    def reducer(self, bucket: Bucket) -> ProjectionReducer:
        h, plan = bucket.group, self._plan(bucket)
        clips = options.clips_locally(h)
        local_factor = clip_factor(self._norm, h["max_grad_norm"]) if clips else 1.0
        sends_residuals = bucket.is_rounded or (bucket.has_residual and KINDS[h["projection"]].owes)
        others = None
        if bucket.is_sharded:
            others = WholeReducer(bucket, self.ops)
            others.sent_whole = [i for i, q in enumerate(plan) if q is None]
            others.sends_residuals = sends_residuals
        adapts = any(plan) and options.adapts(h, h["step"] + 1)
        encoding = Encoding(
            tensors=self._tensors(bucket, plan, local_factor, sends_residuals),
            draw_matrices=self._drawing(bucket, [drawn(q) for q in plan]),
            local_factor=local_factor,
            sends_residuals=sends_residuals,
            norm_is_exact=any(map(options.clips_average, self._option_groups)),
            with_basis=self._with_basis,
            on_cosines=self._adaptation.take if adapts else None,
            others=others,
        )
        return ProjectionReducer(bucket, self.ops, encoding)

    def reduces_as_matrix(self, bucket: Bucket, i: int) -> bool:
        if not bucket.compressed[i] or bucket.group["step"] < dense_steps(bucket):
            return False
        p = bucket.params[i]
        return projection_of(p, bucket.group, self._numbers[p][1], whole=True) is not None

    def _plan(self, bucket: Bucket) -> Plan:
        if bucket.group["step"] < dense_steps(bucket):
            return [None] * len(bucket.params)
        return self._projections_of(bucket)

    def _projections_of(self, bucket: Bucket) -> Plan:
        """How each tensor is projected after the dense start."""
        group, numbers, whole = bucket.group, self._numbers, self.reduces_inside
        return [
            projection_of(p, group, numbers[p][1], whole) if compressed else None
            for p, compressed in zip(bucket.origins, bucket.compressed, strict=True)
        ]

    def _tensors(
        self, bucket: Bucket, plan: Plan, local_factor: float, sends_residuals: bool
    ) -> list[WholeTensor | ProjectedTensor]:
        """How each tensor is sent."""
        grads, residual = bucket.grads(), bucket.state["residual"]
        bases = self.bases(bucket, plan)
        tensors: list[WholeTensor | ProjectedTensor] = []
        for i, (q, g, e) in enumerate(zip(plan, grads, residual, strict=True)):
            if q is not None and e is not None and q.kind.follows:
                tensors.append(TrackedTensor(g, e, local_factor, q, self.ops, bases[i]))
            elif q is not None and e is not None:
                tensors.append(ProjectedTensor(g, e, local_factor, q, self.ops))
            elif bucket.is_sharded:  # sent by another reducer
                tensors.append(WholeTensor(None, None, 1.0, 0, False, False))
            else:
                length = bucket.lengths[i]
                whole = WholeTensor(
                    g, e, local_factor, length, bucket.has_residual, sends_residuals
                )
                tensors.append(whole)
        return tensors

    def _drawing(self, bucket: Bucket, plan: Plan, keep: bool = True) -> Callable[[], Drawn]:
        """What draws the matrices of the coming step; it does not keep the optimizer."""
        numbers = [self._numbers[p][0] for p in bucket.origins]
        seed, t = bucket.group["seed"], bucket.group["step"] + 1
        draw = self._matrices.draw_once if keep else self._matrices.draw
        return lambda: draw(bucket, numbers, plan, seed, t)

    def bases(self, bucket: Bucket, plan: Plan) -> dict[int, Tensor]:
        """What each tracked tensor's last step left; at first random numbers.

        Valid until matrices are drawn.
        """
        tracked = {i: q for i, q in enumerate(plan) if q is not None and q.kind.follows}
        if not tracked:
            return {}
        warm = [p in self._with_basis for p in bucket.origins]
        first: Plan = [None] * len(plan)
        for i, q in tracked.items():
            first[i] = None if warm[i] else replace(q, rows=q.m, columns=q.d)
        random = self._drawing(bucket, first, keep=False)()
        held = bucket.state["basis"]
        found = {i: held[i] if warm[i] else random[i] for i in tracked}
        return {i: Q.view(tracked[i].m, -1) for i, Q in found.items() if Q is not None}

    def restore(self, bucket: Bucket) -> None:
        """A basis that is not zero has been found by a step."""
        for p, basis in zip(bucket.params, bucket.state.get("basis", ()), strict=False):
            if basis is not None and bool(basis.any()):
                self._with_basis.add(p)
            else:
                self._with_basis.discard(p)

    def committed(self) -> None:
        super().committed()
        self._adaptation.adapt(self._option_groups)

    # Inside FSDP2

    def scales(self, bucket: Bucket) -> list[float]:
        """What the squared norms of averaged gradients are multiplied by to be those of what was
        projected.
        """
        return [1.0 if q is None else 1 / q.inflation for q in self._plan(bucket)]

    def keep_unsent(self, bucket: Bucket, i: int, unsent: Unsent, factor: float) -> None:
        """Line 5 of tensor i; ``factor``: that clipped the average, and so what has arrived of the
        error.
        """
        residual, h = bucket.state["residual"][i], bucket.group
        unsent.replace_residual(residual, factor if options.clips_average(h) else 1.0)
        if options.forgets(h, h["step"] + 1):
            residual.zero_()
        for name, value in unsent.state.items():
            bucket.state[name][i].copy_(value.reshape(-1))
            self._with_basis.add(bucket.params[i])

    # Clipping the local gradient: one norm over all buckets, so none of them can be sent before
    # backward has ended

    def _clips_locally(self) -> bool:
        return any(map(options.clips_locally, self._option_groups))

    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        if not self._clips_locally():
            super().gradients_ready(params)

    def before_exchange(self) -> None:
        super().before_exchange()
        if self._clips_locally():
            grads = [g for bucket in self._buckets for g in bucket.grads() if g is not None]
            self._norm = float(torch.nn.utils.get_total_norm(grads))


def projection_of(p: Tensor, h: Group, place: int, whole: bool) -> Projection | None:
    """How a tensor is projected that has this place in its group.

    ``whole``: though this rank has a part of it only.
    """
    ratio, beta = current(h, place)
    shape, sharded = (p.shape, False) if whole else (to_local(p).shape, is_sharded(p))
    return projection(shape, sharded, ratio, h["projection"], beta, h["rank"], h["block_rows"])


def values_of(q: Projection) -> int:
    """How many values are sent of a projected tensor."""
    return q.r * (q.m + q.d) if q.kind.follows else q.r * q.m


def drawn(q: Projection | None) -> Projection | None:
    """The same where random numbers are drawn for it in every step."""
    return None if q is None or q.kind.follows else q
