"""NVIDIA apex's multi-tensor Adam, on CUDA; the smallest backend.

``choice`` takes it where the user asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._ops.operations import Group, Ops

# the type of device that apex is built for: NVIDIA's, and AMD's under the same name
APEX_DEVICE = "cuda"


class ApexOps(Ops):
    """Dense AdamW steps in float32 by NVIDIA apex's multi-tensor Adam, on CUDA; the rest is
    PyTorch's.
    """

    name = "apex"

    def __init__(self) -> None:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        super().__init__()
        self._adam, self._apply = amp_C.multi_tensor_adam, multi_tensor_applier

    def adamw(self, group: Group, *columns: Sequence[Tensor]) -> None:
        rows = list(zip(*columns, strict=True))
        apex_rows = [row for row in rows if all(map(is_apex_tensor, row[:4]))]
        others = [row for row in rows if not all(map(is_apex_tensor, row[:4]))]
        if others:
            super().adamw(group, *zip(*others, strict=True))
        if not apex_rows:
            return
        weights, grads, exp_avgs, exp_avg_sqs, steps = zip(*apex_rows, strict=True)
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        decoupled, corrected = 1, 1  # weight decay as in AdamW; moments divided by 1 - beta^t
        if group["maximize"]:
            grads = torch._foreach_neg(grads)
        overflow = self.scratch(weights[0], 1, torch.int32, "overflow").zero_()
        counts = torch.stack(steps).tolist()
        for count in set(counts):  # one launch for all tensors that have taken as many steps
            lists = [
                [x for x, n in zip(column, counts, strict=True) if n == count]
                for column in (grads, weights, exp_avgs, exp_avg_sqs)
            ]
            hyper = float(group["lr"]), beta1, beta2, group["eps"], int(count), decoupled, corrected
            self._apply(self._adam, overflow, lists, *hyper, decay)


def is_apex_tensor(x: Tensor) -> bool:
    return x.device.type == APEX_DEVICE and x.dtype == torch.float32 and x.is_contiguous()
