"""SCAPE: extreme sparse communication by the first moment (Zheng et al., 2026), Algorithm 1.

One bucket on rank n at step t; M is the mask found one step before (all ones at first), e_n the
rank's residual, m the momentum, which is 0 off the mask of the step before::

     9  g_n <- gradient of the loss on this rank's data
    10  x_n <- b1 m + (1 - b1) g_n + e_n
    11  e_n <- x_n off M, 0 on M
    14  b <- mean over ranks of x_n on M
    15  next M <- the largest |x_n|: each rank in its own shard; gathered while ranks train on
    16  G <- (b - b1 m) / (1 - b1) on M                          # line 17: the averaged gradient
    18  G <- G * min(1, max_grad_norm / |G|);  m_old <- m;  m <- b1 m + (1 - b1) G on M, 0 off it
    19  v <- b2 m_old^2 + (1 - b2) G^2
    21  w <- w - lr (mhat / (sqrt(vhat) + eps) + weight_decay w)  # mhat = 0 off M

The payload is (x_n - b1 m) / (1 - b1) = g_n + e_n / (1 - b1) on M, whose mean is G: equivalent,
since m is equal on all ranks, but without the cancellation of line 17; and a payload in bfloat16
rounds G only, not the momentum.

Differences from the paper: its line 20 lacks a square root. As printed (``clip="scape"``), line 18
scales G in v only, so that an outlier makes a *larger* step; by default ("consistent") m is made of
the clipped G too. If a mask is lost in transit, the next step is dense. As in the paper, M depends
on the number of ranks: each rank selects in its shard by its own x_n, not by the mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._engine.decision import StepDecision
from .._engine.engine import weak_method
from .._engine.optimizer import CompressedOptimizer
from .._engine.options import (
    Group,
    TorchOptions,
    check_adam,
    check_compression,
    check_steps,
    check_torch_options,
    require,
    require_choice,
    require_option,
    require_share,
)
from .._engine.stats import Stats
from .._ops.norms import clip_factor, scale_
from .._ops.operations import Ops
from .._state.bits import count_set_bits
from .._state.bucket import Bucket
from .._state.layouts import Bits, Layout, LocalShape, OnMask, Sharded
from .._state.masks import Mask, MaskPartition, sizes_at_density
from .._state.residuals import Residuals
from .._wire.codec import PAYLOAD_CODECS
from .._wire.groups import ProcessGroup, Ranks
from .._wire.payload import Payload, PayloadDtype
from .._wire.requests import Agree, AllReduceMean, RequestGenerator
from .momenta import compute_x_of_slice, gradient_weight, keep_absent_momenta, resize_momenta
from .scape_masks import (
    ScapeStats,
    Selection,
    exchange_masks,
    mask_size_in_values,
    mask_to_send,
    next_mask_partition,
    restore_masks,
    scape_stats,
)
from .sharded_scape import add_common_residual, sharded_scape

if TYPE_CHECKING:
    from typing_extensions import Unpack


def scape(bucket: Bucket, ops: Ops, rank: int, ranks: int) -> RequestGenerator[None]:
    """Algorithm 1, one bucket, one step."""
    mask, partition = mask_to_send(bucket), next_mask_partition(bucket, ranks)
    group, grads = bucket.group, bucket.grads()
    scale = 1 / (1 - group["betas"][0])
    sent = ops.encode(bucket, grads, mask, True, scale, negate=group["maximize"])  # line 10
    mean = yield AllReduceMean(sent)  # line 14
    norm = yield Agree(mean, mask.phase)  # from here on state changes
    clip_factor_in_v = clip_factor(norm, group["max_grad_norm"])  # line 18
    if group["clip"] == "consistent":
        scale_(mean.body, clip_factor_in_v)
        clip_factor_in_v = 1.0
    # lines 10, 11 and 15 to 21
    selection = ops.run(step_scape, bucket, mean, mask, clip_factor_in_v, partition, rank)
    yield from exchange_masks(bucket, mask, mean, selection)  # line 15


def step_scape(
    bucket: Bucket,
    ops: Ops,
    mean: Payload,
    mask: Mask,
    clip_factor_in_v: float,
    partition: MaskPartition | None,
    rank: int,
) -> Selection | None:
    """Do lines 10, 11 and 15 to 21 for every tensor with a gradient on any rank; leave the others.

    ``clip_factor_in_v`` is a factor on G in v alone. Return what this rank has selected of its part
    of the ``partition``, if any.
    """
    selection = Selection(bucket, ops, partition, rank) if partition else None
    group, state, grads = bucket.group, bucket.state, bucket.grads()
    momentum_positions = bucket.cache["momentum_mask"].positions
    have_gradients = mean.have_gradients
    old = resize_momenta(bucket, mean, mask)
    keep_absent_momenta(old, state["exp_avg"], have_gradients)
    residuals, weights = Residuals(bucket).iterate(write=True), bucket.iterate_weights()
    for i, (has_gradient, e, w) in enumerate(zip(have_gradients, residuals, weights, strict=True)):
        piece = selection.slices.get(i) if selection else None
        if not has_gradient:
            if selection and piece:
                selection.select(i, compute_x_of_slice(bucket, i, piece))
            continue
        index, m, step = mask.positions[i], old[i], state["step"][i]
        step += 1
        if e is not None:
            e = e.view(-1)
            if index is not None or piece or momentum_positions[i] is not None:
                m = accumulate_x(group, e, grads[i], m, momentum_positions[i], index)  # line 10
            if selection and piece:
                selection.select(i, e[piece.start : piece.stop])  # line 15
            ops.write_at([e], [index], None)  # line 11
        m = state["exp_avg"][i].copy_(m)
        update_weights(group, ops, w, m, index, mean.parts[i], step, clip_factor_in_v)
        if e is not None and mean.rounding_errors is not None:
            # The residual is 0 on the mask: the rounding error goes there.
            ops.write_at([e], [index], [mean.rounding_error_parts[i].mul_(1 - group["betas"][0])])
        bucket.publish_master(i, w)
    return selection


def accumulate_x(
    group: Group,
    e: Tensor,
    g: Tensor | None,
    m: Tensor,
    momentum_positions: Tensor | None,
    index: Tensor | None,
) -> Tensor:
    """Turn the flat residual e of a tensor into line 10's x, in place. Return the momentum at
    ``index``.

    ``m`` is the momentum at ``momentum_positions``, and 0 elsewhere. None means all positions.
    """
    beta1: float = group["betas"][0]
    if momentum_positions is None:
        old = m if index is None else m.index_select(0, index)
        e.add_(m, alpha=beta1)
    else:
        momentum_positions = momentum_positions.long()
        rest = e.index_select(0, momentum_positions)
        e.index_fill_(0, momentum_positions, 0)
        # e serves as dense memory: with m written into it, e at ``index`` grows by the momentum.
        before = e.clone() if index is None else e.index_select(0, index)
        e.scatter_(0, momentum_positions, m)
        old = (e if index is None else e.index_select(0, index)).sub(before)
        e.scatter_(0, momentum_positions, rest.add_(m, alpha=beta1))
    if g is not None:
        e.view(g.shape).add_(g, alpha=gradient_weight(group))
    return old


def update_weights(
    group: Group,
    ops: Ops,
    w: Tensor,
    m: Tensor,
    index: Tensor | None,
    g: Tensor,
    step: Tensor,
    clip_factor_in_v: float,
) -> None:
    """Do lines 16 to 21 for one tensor: AdamS with the average ``g`` at ``index`` (None: all
    positions). Off the index weights only decay.
    """
    if index is None:
        g = g.to(w.dtype).view(w.shape)
        return ops.adams(group, w, g, m.view(w.shape), step, clip_factor_in_v)
    if group["weight_decay"]:
        w.mul_(1 - float(group["lr"]) * group["weight_decay"])
    flat = w.reshape(-1)  # a copy where w is not contiguous
    selected = flat.index_select(0, index)
    ops.adams(group, selected, g.to(w.dtype), m, step, clip_factor_in_v, decay=False)
    flat.scatter_(0, ops.as_int64(index), selected)
    if not w.is_contiguous():
        w.copy_(flat.view(w.shape))


class ScapeAdamS(CompressedOptimizer):
    r"""AdamS that averages gradients itself, at a sparse mask of its largest momenta (SCAPE,
    Algorithm 1).

    It replaces ``torch.optim.AdamW`` in a DistributedDataParallel script; at the first forward pass
    it takes over from DDP's all-reduce.

    Args:
        params: parameters, named parameters or groups, as torch takes them. A group may override
            every option below and say ``compress=False`` or ``True``; by default tensors of at
            least 2 dimensions and 4096 elements are compressed, the others are averaged dense in
            the same message.
        lr, betas, eps, weight_decay, maximize: as in :class:`AdamS`, which also
            lists the paper's values; amsgrad and torch_options as there.
        density: share of each compressed tensor's elements that cross the network in a step, in
            (0, 1].
        dense_steps: steps of dense AdamS before compression starts; 15 % of the run is a good
            start.
        density_steps: steps over which the density then falls, exponentially, from 1 to
            ``density``.
        clip: what ``max_grad_norm`` clips: "consistent", momentum and normaliser; "scape", the
            normaliser only, as printed: an outlier then makes a larger step.
        max_grad_norm, payload_dtype, when, process_group, simulate: as in :class:`RadiusAdamW`.
        sharded: each rank keeps the momentum of 1/N of the elements, dense (Algorithm 2). Gradients
            at the mask are reduced to the owner of each element, and updated parameters at the mask
            are gathered: the same bytes, and every rank updates 1/N of the elements. Float32
            masters, where parameters are of lower precision, are not sharded: off the mask they
            decay on every rank, in float32.
        offload: "residual" keeps residuals in host memory (pinned, for an accelerator), 4 bytes per
            element. They pass through two device buffers as large as the largest tensor; copies
            overlap with the work on the tensor between. "all" offloads float32 masters too.

    State of a compressed tensor, in bytes per element: ``residual`` 4, ``exp_avg`` 4 x density (it
    is 0 elsewhere), ``mask`` and ``next_mask`` 1/8 each. Not saved: the
    decoded positions of both masks, 4 x density each, and scratch memory: 1 byte per element of one
    bucket and 4 per element of the largest tensor ("native": 45 bytes per selected element of the
    largest tensor; "triton": 4 bytes per element that this rank selects among in one bucket).

    Raises:
        ValueError: an option is out of its range.
        TypeError: complex parameters, or sparse gradients at a step.
    """

    rank_local_state = ("residual",)
    mask_state = ("next_mask",)
    whole_masters = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        density: float = 0.1,
        dense_steps: int = 0,
        density_steps: int = 100,
        clip: Literal["consistent", "scape"] = "consistent",
        max_grad_norm: float | None = None,
        payload_dtype: PayloadDtype = None,
        when: Literal["always", "auto"] = "always",
        process_group: ProcessGroup | Ranks | None = None,
        simulate: bool = False,
        maximize: bool = False,
        sharded: bool = False,
        offload: Literal["residual", "all"] | None = None,
        **torch_options: Unpack[TorchOptions],
    ):
        check_torch_options(type(self), amsgrad, torch_options)
        choices = (None, "residual", "all")
        require(offload in choices, "offload", offload, "None, 'residual' or 'all'")
        self.sharded, self.offload = sharded, offload
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            density=density,
            dense_steps=dense_steps,
            density_steps=density_steps,
            clip=clip,
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
        check_steps(group, "density_steps")
        require_choice(group, "clip", "consistent", "scape")
        is_float = PAYLOAD_CODECS[group["payload_dtype"]].bits is None
        wanted = "None or a floating-point dtype where state is sharded"
        require_option(is_float or not self.sharded, group, "payload_dtype", wanted)

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        momentum: dict[str, Layout] = {"exp_avg": OnMask(dtype, "mask")}
        if self.sharded:
            common = Sharded(dtype, compressed_only=True, optional=True)
            momentum = {"exp_avg": Sharded(dtype), "common": common}
        return {
            **momentum,
            "residual": LocalShape(dtype, compressed_only=True),
            "mask": Bits(compressed_only=True),
            "next_mask": Bits(compressed_only=True),
        }

    def add_to_stats(self, stats: Stats, decision: StepDecision) -> ScapeStats:
        overlap, ranks = weak_method(self._mask_overlap), self.comm.size
        return scape_stats(stats, self._buckets, decision.applied, ranks, overlap)

    def _mask_overlap(self) -> float:
        """Return the share of all newest masks that was in the masks before them."""
        pairs = self.mask_overlaps().values()
        return sum(shared for shared, _ in pairs) / max(1, sum(size for _, size in pairs))

    def mask_overlaps(self) -> dict[str, tuple[int, int]]:
        """Return for each compressed tensor, by name, how many elements its newest mask shares with
        the one before, and how many it has.

        The newest mask is the next step's. Tensors that have not had two masks are left out.
        """
        self._engine.post_commit.finish()
        overlaps: dict[str, tuple[int, int]] = {}
        for bucket in self._buckets:
            newest, momentum_mask = bucket.cache.get("next_mask"), bucket.cache["momentum_mask"]
            for i, name in enumerate(bucket.names):
                positions = momentum_mask.positions[i]
                if newest and newest.bits[i] is not None and positions is not None:
                    overlaps[name] = int(count_set_bits(newest.bits[i], positions)), newest.sizes[i]
        return overlaps

    def _consolidate(self) -> None:
        """Replace residuals by their mean, and move the common residual into them."""
        super()._consolidate()
        for bucket in self._buckets:
            add_common_residual(bucket)

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        if self.sharded:
            return sharded_scape(bucket, self.ops)
        return scape(bucket, self.ops, self.comm.rank, self.comm.size)

    def estimate_values_sent(self, bucket: Bucket, ranks: int) -> float:
        values = sum(sizes_at_density(bucket, bucket.group["density"]))
        gathered = values / ranks if self.sharded else 0  # updated parameters
        return values + gathered + mask_size_in_values(bucket, ranks)

    def rebuild_cache(self, bucket: Bucket) -> None:
        bucket.cache.clear()
        restore_masks(bucket)
