"""The base class of optimizers whose reducer averages gradients under DDP and inside FSDP2."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .._engine.optimizer import CompressedOptimizer
from .._engine.options import Setting
from .._engine.reducer import Reducer
from .._state.bucket import Bucket
from .._state.layouts import GlobalShape, Layout, LocalShape, Sharded
from .._state.residuals import Residuals, residual_layout
from .._wire.collectives import connect, is_sharded_over
from .fsdp_backward import FSDPBackward, PendingState

GatherDtype = torch.dtype | Literal["int8"] | None


class ReducingOptimizer(CompressedOptimizer):
    """An optimizer whose reducer averages gradients inside FSDP2 as well.

    Where FSDP2 shards the parameters over the optimizer's ranks, ``fsdp_backward`` takes the
    place of its reduce-scatter, and a subclass's ``algorithm`` must return ``step_fsdp_shards``.
    """

    fsdp_backward: FSDPBackward | None = None
    # the dtype of FSDP2's parameter gathers (None: its own), and whether an integration has set it
    gather_dtype: str | None = None
    has_gathers = False

    def make_reducer(self, bucket: Bucket) -> Reducer:
        """Return the reducer of a bucket for the coming step."""
        raise NotImplementedError

    def list_adamw_state(self, dtype: torch.dtype) -> dict[str, Layout]:
        """Return the layouts of AdamW's moments and of the residuals of compressed tensors."""
        moments = Sharded if self.sharded else LocalShape
        residual = self.choose_residual_layout(dtype, compressed_only=True)
        return {"exp_avg": moments(dtype), "exp_avg_sq": moments(dtype), "residual": residual}

    def choose_residual_layout(self, dtype: torch.dtype, compressed_only: bool = False) -> Layout:
        """Return the layout of residuals: whole inside FSDP2, although it shards parameters."""
        layout = GlobalShape if self.replaces_reduce_scatter else LocalShape
        return residual_layout(layout(dtype, compressed_only=compressed_only), self.residual_dtype)

    def write_residual(self, bucket: Bucket, i: int, pending: PendingState, factor: float) -> None:
        """Write the residual of tensor i when a step inside FSDP2 is applied, and put other new
        state into ``bucket.next``.

        ``factor``, which clipped the average, is ignored here: all that was sent counts as sent.
        (With projections the clip changes the residual: see ``ProjectingOptimizer``.)
        """
        pending.write_to(Residuals(bucket), i, 1.0)

    def before_exchange(self) -> None:
        super().before_exchange()
        if self.gather_dtype is not None and not self.has_gathers:
            raise ValueError(
                f"gather_dtype={self.gather_dtype!r} is for parameters that FSDP2 gathers, and no "
                "module that fully_shard wraps holds these: call fully_shard before the optimizer "
                "is made, or leave gather_dtype out. (TagcAdamW without FSDP2 sends updates in "
                "update_dtype.)"
            )

    def _settings(self) -> list[Setting]:
        return [*super()._settings(), ("gather_dtype", self.gather_dtype)]

    def _copyable_attributes(self) -> dict[str, Any]:
        return {**super()._copyable_attributes(), "gather_dtype": self.gather_dtype}

    def before_layout(self) -> None:
        super().before_layout()
        params = [p for group in self._option_groups for p in group["params"]]
        flags = [False]  # of each parameter: whether FSDP2 shards it over the optimizer's ranks
        if any(hasattr(p, "device_mesh") for p in params):
            comm = connect(self._engine.process_group)
            flags = [is_sharded_over(p, comm) for p in params]
        fsdp_shards_params = all(flags)
        if any(flags) and not fsdp_shards_params:
            raise ValueError(
                f"{flags.count(False)} of {len(flags)} parameters are not among those that FSDP2 "
                "shards over the ranks of this optimizer: call fully_shard on the whole model "
                "before the optimizer is made, or give the others an optimizer of their own."
            )
        if fsdp_shards_params and any(group.get("when") == "auto" for group in self._option_groups):
            raise ValueError(
                "when='auto' compares compressed steps with dense ones of its own, and inside "
                "FSDP it takes no dense ones: leave it out, and compare two runs."
            )
        if self.replaces_reduce_scatter and not fsdp_shards_params:
            raise ValueError(
                f"FSDP2 shards the parameters over the ranks this {type(self).__name__} was made "
                "with: make FSDP and the optimizer anew for others, and load a checkpoint."
            )
        self.replaces_reduce_scatter = fsdp_shards_params
        if fsdp_shards_params:  # FSDP2 has sharded the state
            self.sharded = False

    def after_layout(self) -> None:
        super().after_layout()
        if self.replaces_reduce_scatter and self.fsdp_backward is None:
            self.fsdp_backward = FSDPBackward(self._engine)
        if self.fsdp_backward is not None:
            self.fsdp_backward.forget_units()
