"""``ProjectingOptimizer``: the part of an optimizer that Separate and SeparateAdam share.

It chooses the projection of every tensor, keeps the residuals and the bases of tracked tensors, and
makes the reducer of a bucket at each step.

Adaptive ratios are G-SEPARATE, Algorithm 3. With c_i the cosine between the gradient of tensor i
and its reconstruction, averaged over ranks, and c the mean of these over tensors, every
``adapt_interval`` steps::

    6  ratio_i <- max(2, ratio_i (1 + c_i - c));  beta_i <- the same, between 0.90 and 0.99

Tensors that are reconstructed worse than the mean get more columns. Two things differ from the
paper: beta stays above ``Projection.least_beta``, and "auto" follows the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from .._engine.options import Group, Setting, dense_start_of
from .._fsdp.fsdp_backward import ReducingOptimizer
from .._fsdp.fsdp_bucket import PendingState
from .._state.bucket import Bucket
from .._state.layouts import Layout, PaddedVector
from .._state.next_state import NextValues
from .._state.residuals import Residuals
from .._state.tensors import to_local
from .._wire.collectives import connect
from .._wire.warning import warn_on_rank_0
from .matrices import MatrixSource, RandomMatrices, checksum_projection
from .projection_options import check_options, is_reset_step
from .projection_reducer import ProjectionReducer
from .projections import Projection, is_dtensor, plan_projection
from .stacks import ProjectedStack

Plan = list[Projection | None]  # one for each tensor of a bucket; None: sent dense
PLAN_OPTIONS = ("projection", "rank", "ratio", "ef_beta", "adapted")


class ProjectingOptimizer(ReducingOptimizer):
    """An optimizer on gradients that are averaged through a projection."""

    rank_local_state = ("residual",)
    _warned_of_beta = False

    def check_group(self, group: Group) -> None:
        check_options(group)

    # Buckets and their state

    def before_layout(self) -> None:
        self._matrices = MatrixSource()
        self._has_drawn_bases = False  # in this step
        self._cosines: dict[Tensor, float] = {}  # those of this step, until ``after_commit``
        self._params_with_basis: set[Tensor] = set()  # whose basis a step has computed
        # the number of each tensor in the model, and in its group
        self._numbers: dict[Tensor, tuple[int, int]] = {}
        for group in self.option_groups:
            for index, p in enumerate(group["params"]):
                self._numbers[p] = len(self._numbers), index
        super().before_layout()
        if self.replaces_reduce_scatter and any(group["adaptive"] for group in self.option_groups):
            raise ValueError(
                "adaptive=True compares gradients with their reconstructions, and inside FSDP no "
                "rank has these whole: leave it out."
            )

    def after_layout(self) -> None:
        """Warn once of an ``ef_beta`` with which the error grows without bound."""
        super().after_layout()
        for bucket in self._buckets:
            for name, q in zip(bucket.names, self._plan_compressed(bucket), strict=True):
                if q is not None and q.beta < q.least_beta and not self._warned_of_beta:
                    self._warned_of_beta = True
                    warn_on_rank_0(
                        f"ef_beta={q.beta} lets the error of {name} grow without end at "
                        f"ratio={bucket.group['ratio']}: use 'auto', or a number above "
                        f"{q.least_beta:.4f}.",
                        connect(self._engine.process_group).rank,
                    )

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {"residual": self.choose_residual_layout(dtype, compressed_only=True)}

    def bucket_layouts(self, bucket: Bucket) -> dict[str, Layout]:
        layouts = super().bucket_layouts(bucket)
        if bucket.group["projection"] != "tracked":
            return layouts

        # the closure must not reference the optimizer: layouts outlive it
        group, numbers, unsharded = bucket.group, self._numbers, self.replaces_reduce_scatter

        def basis_size(p: Tensor) -> int:
            q = plan_tensor(p, group, numbers[p][1], unsharded)
            return 0 if q is None else q.m * q.r

        dtype = bucket.compute_dtype
        basis = PaddedVector(dtype, basis_size, unsharded, compressed_only=True, optional=True)
        return {**layouts, "basis": basis}

    @property
    def has_new_layout(self) -> bool:  # type: ignore[override]
        """True if ``projection`` or ``rank`` was changed: bases have another size, or none."""
        for bucket in self._buckets:
            layout, stored = self.bucket_layouts(bucket).get("basis"), bucket.state.get("basis")
            if (layout is None) != (stored is None):
                return True
            for i, basis in enumerate(stored or ()):
                if basis is None or to_local(bucket.params[i]).shape != bucket.shapes[i]:
                    continue  # the step raises an error that names the parameter
                if layout is not None and layout.numel(bucket.get_tensor_info(i)) != basis.numel():
                    return True
        return False

    def rebuild_cache(self, bucket: Bucket) -> None:
        """Mark the tensors whose basis has been computed by a step: it is not zero."""
        for p, basis in zip(bucket.params, bucket.state.get("basis", ()), strict=False):
            if basis is not None and bool(basis.any()):
                self._params_with_basis.add(p)
            else:
                self._params_with_basis.discard(p)

    def list_fixed_settings(self) -> list[Setting]:
        used = {(b.group["projection"], b.device) for b in self._buckets if any(b.compressed)}
        checksums = {
            f"{kind} {dev.type}": checksum_projection(kind, dev, self.ops) for kind, dev in used
        }
        return [*super().list_fixed_settings(), ("random matrices", checksums)]

    def estimate_values_sent(self, bucket: Bucket, ranks: int) -> float:
        # Inside FSDP2 lengths are those of shards, a ``ranks``-th of the global tensor's.
        parts = ranks if self.replaces_reduce_scatter else 1
        total = 0.0
        for n, q in zip(bucket.lengths, self._plan_compressed(bucket), strict=True):
            if q is not None:  # a tracked tensor sends P and p
                n = q.r * (q.m + q.d) if q.is_tracked else q.r * q.m
            total += n if q is None else n / parts
        return total

    # The projections of a bucket

    def _plan_compressed(self, bucket: Bucket) -> Plan:
        """Plan the projections after the dense start."""
        options = *map(bucket.group.get, PLAN_OPTIONS), self.replaces_reduce_scatter
        known: tuple[tuple[object, ...], Plan] | None = bucket.cache.get("plan")
        if known is None or known[0] != options:
            tensors = zip(bucket.model_params, bucket.shapes, bucket.compressed, strict=True)
            unsharded = self.replaces_reduce_scatter
            plan = [
                plan_tensor(p, bucket.group, self._numbers[p][1], unsharded, shape) if c else None
                for p, shape, c in tensors
            ]
            known = bucket.cache["plan"] = options, plan
        return known[1]

    def _plan_next_step(self, bucket: Bucket) -> Plan:
        """Plan the projections of the coming step; none in the dense start."""
        if bucket.group["step"] < dense_start_of(bucket):
            return [None] * len(bucket.params)
        return self._plan_compressed(bucket)

    def reduces_as_matrix(self, bucket: Bucket, i: int) -> bool:
        if not bucket.compressed[i] or bucket.group["step"] < dense_start_of(bucket):
            return False
        p = bucket.params[i]
        return plan_tensor(p, bucket.group, self._numbers[p][1], unsharded=True) is not None

    # The reducer of the coming step

    def make_reducer(self, bucket: Bucket) -> ProjectionReducer:
        group, plan = bucket.group, self._plan_next_step(bucket)
        stacks = self._make_stacks(bucket, plan)
        t = group["step"] + 1
        adapts = any(plan) and group["adaptive"] and t % group["adapt_interval"] == 0
        return ProjectionReducer(
            bucket,
            self.ops,
            stacks,
            self._make_draw(bucket, plan),
            norm_is_reproducible=any(
                group["max_grad_norm"] is not None for group in self.option_groups
            ),
            params_with_basis=self._params_with_basis,
            on_cosines=self._cosines.update if adapts else None,
        )

    def _make_stacks(self, bucket: Bucket, plan: Plan) -> list[ProjectedStack]:
        """Return a stack of each run of neighbours with one projection."""
        grads, residuals = bucket.grads(), Residuals(bucket)
        known: tuple[Plan, list[tuple[range, Projection]]] | None = bucket.cache.get("runs")
        if known is None or known[0] is not plan:
            known = bucket.cache["runs"] = plan, find_runs(plan, bucket.params)
        stacks = []
        for indices, projection in known[1]:
            of_stack = grads[indices.start : indices.stop]
            stacks.append(ProjectedStack(indices, projection, of_stack, residuals.stack(indices)))
        if stacks and bucket.group["projection"] == "tracked":
            self._read_bases(bucket, plan, stacks)
        return stacks

    def _read_bases(self, bucket: Bucket, plan: Plan, stacks: list[ProjectedStack]) -> None:
        """Set Q of tracked stacks: the basis of the last step, at first random numbers, which are
        valid until the next draw.
        """
        has_basis = [p in self._params_with_basis for p in bucket.model_params]
        drawn: Plan = [
            None if q is None or has else replace(q, m=q.d, d=q.m)
            for q, has in zip(plan, has_basis, strict=True)
        ]
        random: RandomMatrices = []
        if any(drawn):
            random, self._has_drawn_bases = self._make_draw(bucket, drawn)(), True
        for stack in stacks:
            flags, m = [has_basis[i] for i in stack.indices], stack.projection.m
            if all(flags):
                stack.Q = bucket.stack_state("basis", stack.indices).view(len(flags), m, -1)
                continue
            bases = [
                bucket.state["basis"][i] if has else random[i]
                for i, has in zip(stack.indices, flags, strict=True)
            ]
            stack.Q = torch.stack([Q.view(m, -1) for Q in bases if Q is not None])

    def _make_draw(self, bucket: Bucket, plan: Plan) -> Callable[[], RandomMatrices]:
        """Return a function that draws the random matrices of the coming step, without a reference
        to the optimizer.
        """
        # FSDP2 may reduce tensors of other optimizers with these, which are not projected
        numbers = [self._numbers.get(p, (0, 0))[0] for p in bucket.model_params]
        seed, t = bucket.group["seed"], bucket.group["step"] + 1
        return partial(self._matrices.draw, bucket, numbers, plan, seed, t)

    # After the commit

    def after_commit(self) -> None:
        """Adapt ratio and beta where this step has computed cosines (Algorithm 3, line 6)."""
        super().after_commit()
        if self._has_drawn_bases:
            self._matrices.release_memory()
            self._has_drawn_bases = False
        if not self._cosines:
            return
        mean = sum(self._cosines.values()) / len(self._cosines)
        for group in self.option_groups:
            adapted = []
            for index, p in enumerate(group["params"]):
                ratio, beta = adapted_options(group, index)
                if p in self._cosines:
                    growth = 1 + (self._cosines[p] - mean)
                    ratio = max(2.0, ratio * growth)
                    if not isinstance(beta, str):
                        shape, kind = to_local(p).shape, group["projection"]
                        q = plan_projection(shape, is_dtensor(p), ratio, kind, beta)
                        least_beta = q.least_beta if q else 0.0
                        beta = max(min(beta * growth, 0.99), 0.90, least_beta)
                adapted.append((ratio, beta))
            group["adapted"] = adapted
        self._cosines.clear()

    # Inside FSDP2

    def squared_norm_factors(self, bucket: Bucket) -> list[float]:
        """Return the factor from the squared norm of a reconstruction to that of the average."""
        return [1.0 if q is None else 1 / q.inflation for q in self._plan_next_step(bucket)]

    def write_residual(self, bucket: Bucket, i: int, pending: PendingState, factor: float) -> None:
        """Do line 5 for tensor i; ``factor`` has clipped the average."""
        residuals, group = Residuals(bucket), bucket.group
        pending.write_to(residuals, i, factor)
        if is_reset_step(group, group["step"] + 1):
            residuals.scale([i], 0)
        for name, value in pending.others.items():
            stored = bucket.state[name][i] if name in bucket.state else None
            # otherwise ``rank`` or ``projection`` was changed after backward
            if stored is not None and stored.numel() == value.numel():
                bucket.next.setdefault(name, []).append(NextValues([i], value.unsqueeze(0)))
                self._params_with_basis.add(bucket.params[i])


def find_runs(plan: Plan, params: Sequence[Tensor]) -> list[tuple[range, Projection]]:
    """Return the runs of neighbours with one shape and projection, without those sent dense."""
    runs = []
    for (projection, _), run in groupby(range(len(plan)), lambda i: (plan[i], params[i].shape)):
        members = list(run)
        if projection is not None:
            runs.append((range(members[0], members[-1] + 1), projection))
    return runs


def plan_tensor(
    p: Tensor, group: Group, index: int, unsharded: bool, shape: torch.Size | None = None
) -> Projection | None:
    """Plan the projection of a tensor at this place in its group.

    ``unsharded`` plans for the global tensor, of which this rank may hold a shard only. ``shape``:
    of this rank's part, as it was when its bucket was made; the step refuses another one.
    """
    ratio, beta = adapted_options(group, index)
    local = to_local(p).shape if shape is None else shape
    shape, sharded = (p.shape, False) if unsharded else (local, is_dtensor(p))
    return plan_projection(shape, sharded, ratio, group["projection"], beta, group["rank"])


def adapted_options(group: Group, index: int) -> tuple[float, float | str]:
    """Return ratio and ef_beta of a tensor: adapted ones, else those of its group."""
    if group["adapted"]:
        ratio, beta = group["adapted"][index]
        return ratio, beta
    return group["ratio"], group["ef_beta"]
