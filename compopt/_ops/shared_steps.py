"""Steps that the references of updates and their fused implementations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._state.bucket import Bucket
from .._state.masks import Mask, MaskSlice, Tensors
from .._wire.payload import Payload
from .operations import Group

# TAGC


class Selected(NamedTuple):
    """A rank's selection: the ``values`` at ``positions`` in the mask, and their ``bits``.

    On an accelerator the positions of a shard are in no order, and some values may be 0, which have
    no bit. ``gradient_flags``: of all gradients.
    """

    positions: Tensor
    values: Tensor
    bits: Tensor
    gradient_flags: Tensor


# Averages that were sent on a mask


class MaskedAverage(Protocol):
    """The reducer of one bucket, as fused implementations of a step by its average use it."""

    bucket: Bucket
    grads: Tensors
    mask: Mask
    mean: Payload

    @property
    def changes_residual(self) -> bool:
        """True if the step changes residuals."""

    def note_residual(self, have_gradients: list[bool]) -> None:
        """Note whether residuals may be non-zero after this step."""

    def keep_unsent(self, have_gradients: list[bool]) -> None:
        """Set the residuals of tensors with a gradient on any rank."""


# SCAPE


def gradient_weight(group: Group) -> float:
    """Return the factor on a rank's own gradient in line 10: 1 - b1, negative when maximizing."""
    beta1: float = group["betas"][0]
    return (beta1 - 1) if group["maximize"] else (1 - beta1)


def compute_x_of_slice(bucket: Bucket, i: int, piece: MaskSlice) -> Tensor:
    """Return line 10's x = b1 m + e on a slice of tensor i without a gradient, in new memory."""
    momentum_positions, m = bucket.cache["momentum_mask"].positions[i], bucket.state["exp_avg"][i]
    beta1, start, stop = bucket.group["betas"][0], piece.start, piece.stop
    x = bucket.fetch_state("residual", i, slice(start, stop))
    if momentum_positions is None:
        return x.add_(m[start:stop], alpha=beta1)
    device, dtype = momentum_positions.device, momentum_positions.dtype
    edges = torch.tensor([start, stop], dtype=dtype, device=device)
    first, last = torch.searchsorted(momentum_positions, edges).tolist()
    return x.index_add_(0, momentum_positions[first:last] - start, m[first:last], alpha=beta1)


def resize_momenta(bucket: Bucket, mean: Payload, mask: Mask) -> list[Tensor]:
    """Allocate momenta as large as the mask, contents undefined. Return the old ones, which are on
    the mask of the step before; in other memory, if positions change.
    """
    old, flat = bucket.state["exp_avg"], bucket.flat["exp_avg"]
    rows = zip(mean.have_gradients, mask.sizes, bucket.sizes["exp_avg"], strict=True)
    sizes = [size if has_gradient else old_size for has_gradient, size, old_size in rows]
    is_moved = bucket.resize_state("exp_avg", sizes) is not old
    if not is_moved and (mask.is_sparse or bucket.cache["momentum_mask"].is_sparse):
        copy = bucket.get_memory("old momenta", flat.numel(), flat.dtype).copy_(flat)
        return [part.view_as(m) for part, m in zip(copy.split(sizes), old, strict=True)]
    return old


def keep_absent_momenta(old: list[Tensor], new: list[Tensor], have_gradients: list[bool]) -> None:
    """Copy the momenta of tensors without a gradient on any rank from ``old`` to ``new``."""
    for before, after, has_gradient in zip(old, new, have_gradients, strict=True):
        if not has_gradient and after is not before:
            after.copy_(before.view_as(after))


# SEPARATE with a tracked projection: averaged gradients that are products of narrow matrices


def is_tracked(bucket: Bucket) -> bool:
    """True if the bucket's matrices are projected on tracked columns, and nothing is float64."""
    group = bucket.group
    sent = bucket.codecs[group.get("payload_dtype")].dtype or bucket.grad_dtype
    return group.get("projection") == "tracked" and torch.float64 not in (sent, bucket.dtype)


class Factored(NamedTuple):
    """A stack of tensors, as contiguous matrices of ``rows`` rows.

    Their averaged gradients are ``R p^T``, R of shape (k, rows, r), p of k matrices (columns, r)
    in turn, stored column by column; ``sent`` is this rank's part of p, as the other ranks have
    received it.
    """

    indices: range
    rows: int
    columns: int
    R: Tensor
    p: Tensor
    sent: Tensor


class FactoredAverages(Protocol):
    """The reducer of one bucket, as a fused implementation of lines 4 and 5 uses it."""

    def list_factored(self, mean: Payload) -> list[Factored]:
        """Return the stacks of tensors whose averaged gradient is a product."""

    def list_dense(self, indices: Sequence[int]) -> list[int]:
        """Return those of ``indices`` that are in no stack."""

    def keep_unsent_dense(self, indices: Sequence[int], mean: Payload, factor: float) -> None:
        """Update the residuals of tensors that were sent dense."""

    def error_share(self, factor: float) -> float:
        """Return the weight of the new error of a product, where ``factor`` clips the average."""
