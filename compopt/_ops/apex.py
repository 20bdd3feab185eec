"""NVIDIA apex's multi-tensor Adam in place of ``torch._fused_adamw_``, for float32 parameters on
CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .makers import APEX
from .pytorch import Group, Ops

DECOUPLED, CORRECTED = 1, 1  # weight decay as in AdamW; moments divided by 1 - beta^t


class ApexOps(Ops):
    """Dense AdamW steps by ``amp_C.multi_tensor_adam``; the rest is PyTorch's."""

    name = "apex"

    def __init__(self, devices: set[str] | frozenset[str] = frozenset()) -> None:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        super().__init__(devices)
        self._adam, self._apply = amp_C.multi_tensor_adam, multi_tensor_applier

    def adamw(
        self,
        group: Group,
        w: Tensor,
        g: Tensor,
        m: Tensor,
        v: Tensor,
        step: Tensor,
    ) -> None:
        fits = (
            w.device.type == APEX
            and w.dtype == g.dtype == torch.float32
            and w.is_contiguous()
            and g.is_contiguous()
        )
        if not fits:
            return super().adamw(group, w, g, m, v, step)
        overflow = self.scratch(w, 1, torch.int32, "overflow").zero_()
        beta1, beta2 = group["betas"]
        self._apply(
            self._adam,
            overflow,
            [[-g if group["maximize"] else g], [w], [m], [v]],
            float(group["lr"]),
            beta1,
            beta2,
            group["eps"],
            int(step),
            DECOUPLED,
            CORRECTED,
            group["weight_decay"],
        )
