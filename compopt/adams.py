"""AdamS: momentum as the normaliser (Zhang, Wang and Chen, EMNLP 2025; equation 2 of SCAPE).

One bucket at step t; G is the average over ranks of the gradient::

    v <- b2 m^2 + (1 - b2) G^2                     # m before this step; v is not stored
    m <- b1 m + (1 - b1) G
    w <- w - lr (mhat / (sqrt(vhat) + eps) + weight_decay w)

with mhat = m / (1 - b1^t), vhat = v / (1 - b2^t), as in SCAPE. The code of AdamS's authors uses m^2
/ (1 - b1^t)^2 in place of m^2 and does not correct for b2: with b2 = 0.999 its first step is 31
times the learning rate.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ._engine.optimizer import CompressedOptimizer
from ._engine.options import Group, TorchOptions, check_adam, check_compress, check_torch_options
from ._engine.reducer import AllReduceReducer, step_adams
from ._ops.operations import Ops
from ._state.buckets import Bucket
from ._state.layouts import Layout, LocalShape
from ._wire.collectives import ProcessGroup
from ._wire.requests import Agree, RequestGenerator


def adams(bucket: Bucket, ops: Ops) -> RequestGenerator[None]:
    """Equation 2, one bucket, one step."""
    reducer = AllReduceReducer(bucket, ops)
    mean = yield from reducer.reduce()
    yield Agree(mean, reducer.phase)  # from here on state changes
    if bucket.group["maximize"]:
        mean.body.neg_()
    yield from ops.run_batched(step_adams, bucket, reducer)


class AdamS(CompressedOptimizer):
    r"""AdamS (equation 2 of SCAPE): AdamW's accuracy at half its state, on gradients averaged
    dense.

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
        process_group: the ranks to average over. None: the default group, or a single process
            where there is none.

    State: ``exp_avg``, as large as the parameter.

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
        process_group: ProcessGroup | None = None,
        maximize: bool = False,
        **torch_options: Unpack[TorchOptions],
    ):
        check_torch_options(type(self), amsgrad, torch_options)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
        )
        super().__init__(params, defaults, process_group)

    def check_group(self, group: Group) -> None:
        check_adam(group)
        check_compress(group)

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {"exp_avg": LocalShape(dtype)}

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        return adams(bucket, self.ops)
