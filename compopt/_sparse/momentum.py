"""SCAPE's lines: the clip; and on one tensor, x = b1 m + (1 - b1) g + e in the place of the
residual e, and the update of momentum and weights where something was exchanged.
"""

from __future__ import annotations

from torch import Tensor

from .._ops.clipping import clip_factor, scale_
from .._ops.moment import own_share
from .._ops.ops import Group, Ops
from .._state.buckets import Bucket
from .._wire.requests import Payload


def clip(bucket: Bucket, mean: Payload, norm: float) -> float:
    """Line 18: clip the average; returns the factor on G in v alone, where that is asked for."""
    h = bucket.group
    factor = clip_factor(norm, h["max_grad_norm"])
    if h["clip"] == "scape":
        return factor
    scale_(mean.body, factor)
    return 1.0


def make_x(
    h: Group,
    e: Tensor,
    g: Tensor | None,
    held: Tensor | None,
    m: Tensor,
    index: Tensor | None,
    wanted: bool,
    owed: bool,
) -> Tensor:
    """Make the residual ``e``, flat, x where that is ``wanted``; returns the momentum at ``index``
    (None: everywhere).

    ``m`` is the momentum at ``held``, and e is 0 there unless something is ``owed``.
    """
    beta1: float = h["betas"][0]
    if held is None:
        old = m if index is None else m.index_select(0, index)
        if wanted:
            e.add_(m, alpha=beta1)
    elif owed:
        old = _add_to_what_is_owed(e, m, held.long(), index, beta1)
    else:  # e shows what of m is at the mask: it is 0 where m is not
        held = held.long()
        before = e.clone() if index is None else e.index_select(0, index)
        e.scatter_(0, held, m)
        old = (e if index is None else e.index_select(0, index)).sub(before)
        e.scatter_(0, held, beta1 * m)
    if g is not None and wanted:
        e.view(g.shape).add_(g, alpha=own_share(h))
    return old


def _add_to_what_is_owed(
    e: Tensor, m: Tensor, held: Tensor, index: Tensor | None, beta1: float
) -> Tensor:
    """The same where e is not 0 where m is: it holds m for a moment."""
    at = slice(None) if index is None else index.long()
    before, own = e[at].clone(), e[held]
    e[at] = 0
    e[held] = m
    old = e[at].clone()
    e[at] = before
    e[held] = own.add_(m, alpha=beta1)
    return old


def update(
    h: Group,
    ops: Ops,
    e: Tensor | None,
    w: Tensor,
    index: Tensor | None,
    g: Tensor,
    m: Tensor,
    step: Tensor,
    factor: float,
) -> None:
    """Lines 11 and 16 to 21: what was sent is no longer owed; m and w follow the average ``g`` at
    ``index``.

    ``e`` is None for a tensor that is not compressed; ``factor`` multiplies g in v alone.
    """
    if e is not None and index is None:
        e.zero_()
    if e is None or index is None:
        return ops.adams(h, w, ops.expand(g, None, w), m.view(w.shape), step, factor)
    where = ops.wide(index)
    e.scatter_(0, where, 0)  # line 11
    if h["weight_decay"]:
        w.mul_(1 - float(h["lr"]) * h["weight_decay"])
    flat = w.reshape(-1)  # a copy where w is not contiguous
    selected = flat.index_select(0, index)
    ops.adams(h, selected, g.to(w.dtype), m, step, factor, decay=False)
    flat.scatter_(0, where, selected)
    if not w.is_contiguous():
        w.copy_(flat.view(w.shape))
