"""Radius: range-based gradient sparsity (Zheng and Zhang, MLSys 2025), Algorithm 1 with AdamW.

One bucket on rank n at step t; G_n is its local gradient, w its parameters, D the density, T the
interval::

     2  G_n <- gradient of the loss on this rank's data
     3  if t < dense_steps:                                     # dense
     4      G <- mean over ranks of G_n
     7  elif there is no mask yet, or t % T == 0:                # resample
     8      G_n <- G_n + residual
     9      G <- mean over ranks of G_n
    10      residual <- 0
    12  else:                                                    # sparse
    13      sent <- G_n[mask]
    14      sent <- mean over ranks of sent
    15      G <- sent on the mask, 0 off it                      # and line 17
    16      residual <- residual + G_n off the mask, 0 on it
    20  G <- G * min(1, max_grad_norm / |G|)
    21  u <- mhat / (sqrt(vhat) + eps) + weight_decay * w        # Algorithm 2, over all elements
    22  if resampled:
    23      mask <- the round(D * n) largest |u| of each tensor; broadcast
    25  w <- w - lr * u

Differences from the paper: the first step after the dense start resamples (the paper's mask is
undefined until T divides t), and all ranks use rank 0's mask (equal by construction).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._engine.optimizer import CompressedOptimizer
from ._engine.options import (
    Group,
    ResidualDtype,
    TorchOptions,
    check_adam,
    check_compression,
    check_torch_options,
    dense_start_of,
    is_count,
    read_int8,
    require,
    require_option,
    require_share,
)
from ._engine.reducer import AllReduceReducer, step_adamw
from ._ops.norms import clip_factor
from ._ops.operations import Ops, update_magnitudes
from ._state.bucket import Bucket
from ._state.layouts import Bits, Layout, LocalShape
from ._state.masks import Mask, selection_size, sizes_at_density
from ._state.residuals import residual_layout
from ._wire.groups import ProcessGroup, Ranks
from ._wire.payload import Payload, PayloadDtype
from ._wire.requests import Agree, Broadcast, Phase, RequestGenerator

if TYPE_CHECKING:
    from typing_extensions import Unpack


def radius(bucket: Bucket, ops: Ops) -> RequestGenerator[None]:
    """Algorithm 1, one bucket, one step."""
    group, phase = bucket.group, choose_phase(bucket)  # lines 3, 7, 12
    resamples = phase == "resample"
    mask = bucket.cache["mask"] if phase == "sparse" else None
    keeps_mask = mask is not None and not bucket.cache.get("mask_has_residual", True)
    reducer = AllReduceReducer(bucket, ops, mask, keeps_mask)
    mean = yield from reducer.reduce()  # lines 4, 8, 9, 13, 14
    norm = yield Agree(mean, phase)  # from here on state changes
    reducer.clip(clip_factor(norm, group["max_grad_norm"]))  # line 20
    before = [w.clone() for w in compressed_weights(bucket)] if resamples else []
    yield from ops.run_batched(step_adamw, bucket, reducer)  # lines 10, 15 to 17, 21 and 25
    if mean.rounding_errors is not None:
        bucket.cache["mask_has_residual"] = True
    if resamples:
        masks = select_masks(bucket, ops, before)
        del before
        yield from broadcast_mask(bucket, ops, mean, masks)  # line 23


def choose_phase(bucket: Bucket) -> Phase:
    """Return "dense", "resample" or "sparse", the phase of the coming step (lines 3, 7 and 12).

    Step ``dense_steps`` is the first resample step.
    """
    group, t = bucket.group, bucket.group["step"] + 1
    if t < dense_start_of(bucket) or not any(bucket.compressed):
        return "dense"
    return "resample" if "mask" not in bucket.cache or t % group["interval"] == 0 else "sparse"


def compressed_weights(bucket: Bucket) -> list[Tensor]:
    return [bucket.weight(i) for i, compressed in enumerate(bucket.compressed) if compressed]


def select_masks(bucket: Bucket, ops: Ops, weights: list[Tensor]) -> list[Tensor]:
    """Do lines 21 and 23 for all compressed tensors; ``weights`` are those before the step."""
    state, masks = bucket.state, []
    compressed = [i for i, c in enumerate(bucket.compressed) if c]
    for i, w in zip(compressed, weights, strict=True):
        m, v, step = state["exp_avg"][i], state["exp_avg_sq"][i], state["step"][i]
        u = update_magnitudes(bucket.group, w, m, v, step)
        masks.append(ops.top_k_mask(u, selection_size(bucket.group["density"], w.numel())))
    return masks


def broadcast_mask(
    bucket: Bucket, ops: Ops, mean: Payload, masks: list[Tensor]
) -> RequestGenerator[None]:
    """Give all ranks the new mask of rank 0 (line 23). The next step waits for it.

    A tensor without a gradient on any rank keeps its mask, because its residual is zero at the
    positions of the old mask, but not at those of a new one. If it has none, as after a rebind, it
    gets a new one, and sparse steps send residuals too until the next resample.
    """
    state, have_gradients = bucket.state["mask"], mean.have_gradients
    mask_has_residual = mean.rounding_errors is not None
    sizes: list[int | None] = [*sizes_at_density(bucket, bucket.group["density"])]
    new, compressed = [], [i for i, c in enumerate(bucket.compressed) if c]
    for i, bits in zip(compressed, masks, strict=True):
        keeps = not have_gradients[i] and bool(state[i].any())
        new.append(state[i].clone() if keeps else bits)
        sizes[i] = None if keeps else sizes[i]
        mask_has_residual |= bucket.has_residual and not (keeps or have_gradients[i])
    # until the new mask has arrived the bucket has none
    bucket.cache.pop("mask", None)
    bucket.flat["mask"].zero_()
    flat = yield Broadcast(torch.cat(new), confirm=True)
    bucket.flat["mask"].copy_(flat)
    bucket.cache["mask"] = Mask(bucket, bits=state, sizes=sizes)
    bucket.cache["mask_has_residual"] = mask_has_residual


class RadiusAdamW(CompressedOptimizer):
    r"""AdamW that averages gradients itself, in most steps only at a top-k mask shared by all ranks
    (Radius, Algorithm 1).

    It replaces ``torch.optim.AdamW`` in a DistributedDataParallel script; at the first forward pass
    it takes over from DDP's all-reduce.

    Args:
        params: parameters, named parameters or groups, as torch takes them. A group may override
            every option below and say ``compress=False`` or ``True``; by default tensors of at
            least 2 dimensions and 4096 elements are compressed, the others are averaged dense in
            the same message.
        lr, betas, eps, weight_decay, maximize: as in :class:`torch.optim.AdamW`, with its defaults.
        amsgrad, torch_options: ``foreach``, ``fused`` and ``capturable`` are ignored: the backend
            decides how to compute. ``amsgrad=True`` and ``differentiable=True`` are refused.
        density: share of each compressed tensor's elements that cross the network in a sparse step,
            in (0, 1].
        interval: steps from one mask to the next. These *resample* steps are dense, and the step
            after one does not overlap with backward: ranks first confirm that all have the new
            mask.
        dense_steps: steps of plain AdamW before compression starts. The paper uses 15 to 20 % of
            the run.
        max_grad_norm: clip the averaged gradient, of all groups together, to this L2 norm (None: no
            clipping). ``clip_grad_norm_`` before ``step()`` is something else: it clips the local
            gradient.
        payload_dtype: dtype on the wire (None: the gradient's), as a name, "bfloat16", or as the
            torch.dtype of that name; groups keep the name. Rounding errors of compressed tensors
            are added to ``residual``. "int8" sends 1 byte per value and "int4" half a byte, and a
            scale for each 128 values, with unbiased stochastic rounding.
        residual_dtype: as in :class:`SeparateAdam`.
        when: "always", or "auto": time dense and compressed steps at the start, and stay dense
            where compression does not pay (see ``stats.when``).
        process_group: the ranks to average over. None: the default group, or a single process
            where there is none.
        simulate: compress in a single process too, to see the effect of compression. Otherwise a
            step without other ranks is plain AdamW.
        offload: "residual" keeps residuals in host memory (pinned, for an accelerator), 4 bytes per
            element. They pass through two device buffers as large as the largest tensor; copies
            overlap with the work on the tensor between.

    State beside AdamW's two moments, for compressed tensors: ``residual`` (as large as the
    parameter) and ``mask`` (1 bit per element). Positions are decoded when a backend first reads
    them, 4 bytes per selected element.

    Raises:
        ValueError: an option is out of its range.
        TypeError: complex parameters, or sparse gradients at a step.
    """

    rank_local_state = ("residual",)
    mask_state = ("mask",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        density: float = 0.4,
        interval: int = 200,
        dense_steps: int = 1000,
        max_grad_norm: float | None = None,
        payload_dtype: PayloadDtype = None,
        residual_dtype: ResidualDtype = None,
        when: Literal["always", "auto"] = "always",
        process_group: ProcessGroup | Ranks | None = None,
        simulate: bool = False,
        maximize: bool = False,
        offload: Literal["residual"] | None = None,
        **torch_options: Unpack[TorchOptions],
    ):
        check_torch_options(type(self), amsgrad, torch_options)
        require(offload in (None, "residual"), "offload", offload, "None or 'residual'")
        self.offload, self.residual_dtype = offload, read_int8("residual_dtype", residual_dtype)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            density=density,
            interval=interval,
            dense_steps=dense_steps,
            max_grad_norm=max_grad_norm,
            payload_dtype=payload_dtype,
            when=when,
            maximize=maximize,
        )
        super().__init__(params, defaults, process_group, simulate)

    def check_group(self, group: Group) -> None:
        check_adam(group)
        check_compression(group)
        require_share(group, "density")
        require_option(is_count(group["interval"]), group, "interval", "an integer >= 1")

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {
            "exp_avg": LocalShape(dtype),
            "exp_avg_sq": LocalShape(dtype),
            "residual": residual_layout(
                LocalShape(dtype, compressed_only=True), self.residual_dtype
            ),
            "mask": Bits(compressed_only=True),
        }

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        return radius(bucket, self.ops)

    def estimate_values_sent(self, bucket: Bucket, ranks: int) -> float:
        """Return the average over an interval: its resample step is dense."""
        interval: int = bucket.group["interval"]
        sparse = sum(sizes_at_density(bucket, bucket.group["density"]))
        return sparse + (bucket.numel - sparse) / interval

    def rebuild_cache(self, bucket: Bucket) -> None:
        bucket.cache.clear()
        bits = bucket.state["mask"]
        if any(bucket.compressed) and all(b is None or not b.numel() or b.any() for b in bits):
            bucket.cache["mask"] = Mask(bucket, bits=bits)
