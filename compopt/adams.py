"""AdamS: momentum as the normaliser (Zhang, Wang and Chen, EMNLP 2025; equation 2 of SCAPE).

One bucket at step t; G is the average over ranks of the gradient, as :class:`Average` computes it::

    v <- b2 m^2 + (1 - b2) G^2                     # m before this step; v is not stored
    m <- b1 m + (1 - b1) G
    w <- w - lr (mhat / (sqrt(vhat) + eps) + weight_decay w)

with mhat = m / (1 - b1^t), vhat = v / (1 - b2^t), as in SCAPE. The code of AdamS's authors uses m^2
/ (1 - b1^t)^2 in place of m^2 and does not correct for b2: with b2 = 0.999 its first step is 31
times the learning rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._engine.optimizer import CompressedOptimizer
from ._engine.options import (
    Group,
    ResidualDtype,
    TorchOptions,
    check_adam,
    check_compress,
    check_payload_and_clip,
    check_torch_options,
    read_int8,
)
from ._engine.reducer import AllReduceReducer, step_adams
from ._ops.norms import clip_factor
from ._ops.operations import Ops
from ._state.bucket import Bucket
from ._state.layouts import Layout, LocalShape
from ._state.residuals import residual_layout
from ._wire.groups import ProcessGroup, Ranks
from ._wire.payload import PayloadDtype
from ._wire.requests import Agree, RequestGenerator

if TYPE_CHECKING:
    from typing_extensions import Unpack


def adams(bucket: Bucket, ops: Ops) -> RequestGenerator[None]:
    """Equation 2, one bucket, one step."""
    reducer = AllReduceReducer(bucket, ops)
    mean = yield from reducer.reduce()
    norm = yield Agree(mean, reducer.phase)  # from here on state changes
    reducer.clip(clip_factor(norm, bucket.group["max_grad_norm"]))
    if bucket.group["maximize"]:
        mean.body.neg_()
    yield from ops.run_batched(step_adams, bucket, reducer)


class AdamS(CompressedOptimizer):
    r"""AdamS (equation 2 of SCAPE): AdamW's accuracy at half its state, on gradients averaged
    dense, and rounded if a ``payload_dtype`` is given.

    It replaces ``torch.optim.AdamW`` in any script; under DistributedDataParallel it averages
    gradients itself.

    Args:
        params: parameters, named parameters or groups, as torch takes them.
        lr, eps, weight_decay, maximize: as in :class:`torch.optim.AdamW`, with its defaults.
            Weight decay is decoupled. SCAPE's authors train Llama 500M with lr 3e-4 and
            weight_decay 0.1, GPT 345M with 1.5e-4 and 0.01.
        betas: decay of the momentum, and weight of the previous momentum's square in the
            normaliser. SCAPE uses (0.9, 0.95) for Llama, AdamW's default for GPT.
        amsgrad, torch_options: ``foreach``, ``fused`` and ``capturable`` are ignored: the backend
            decides how to compute. ``amsgrad=True`` and ``differentiable=True`` are refused.
        payload_dtype, residual_dtype, max_grad_norm, process_group, simulate: as in
            :class:`Average`.

    State: ``exp_avg``, as large as the parameter; ``residual``, as large, if a group has a payload
    dtype.

    Raises:
        ValueError: an option is out of its range.
        TypeError: complex parameters, or sparse gradients at a step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        max_grad_norm: float | None = None,
        payload_dtype: PayloadDtype = None,
        residual_dtype: ResidualDtype = None,
        process_group: ProcessGroup | Ranks | None = None,
        simulate: bool = False,
        maximize: bool = False,
        **torch_options: Unpack[TorchOptions],
    ):
        check_torch_options(type(self), amsgrad, torch_options)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            payload_dtype=payload_dtype,
            maximize=maximize,
        )
        self.residual_dtype = read_int8("residual_dtype", residual_dtype)
        super().__init__(params, defaults, process_group, simulate)

    def check_group(self, group: Group) -> None:
        check_adam(group)
        check_payload_and_clip(group, keeps_all_errors=True)
        check_compress(group)

    @property
    def rank_local_state(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the names of residuals: they are kept if any group has a payload dtype."""
        is_rounded = any(group["payload_dtype"] is not None for group in self.param_groups)
        return ("residual",) if is_rounded else ()

    @property
    def has_new_layout(self) -> bool:  # type: ignore[override]
        return any(name not in b.state for b in self._buckets for name in self.rank_local_state)

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        layout = residual_layout(LocalShape(dtype, optional=True), self.residual_dtype)
        return {"exp_avg": LocalShape(dtype), **dict.fromkeys(self.rank_local_state, layout)}

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        return adams(bucket, self.ops)
