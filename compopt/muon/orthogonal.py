"""Matrices in batches: those that a tensor's rows are, stacks of one shape, a Newton-Schulz
iteration on a stack, and rows that are normalized.

Matrices and those of the transposed shape are one stack in the iteration, as wide ones.

``MuonAdamW`` (``muon``) calls them, once for each stack in a step.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._engine.options import Group
from .._state.tensors import take_local_part, to_local, without_autocast


class Slice(NamedTuple):
    """Matrices of one shape: ``matrices`` of ``rows`` rows each, from a row of a tensor on;
    of a stack of matrices, in each.
    """

    p: Tensor
    start: int
    matrices: int
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.p.shape[-1]

    @property
    def numel(self) -> int:
        return self.p.numel() // self.p.shape[-2] * self.matrices * self.rows

    def view_rows(self, x: Tensor) -> Tensor:
        """Return a view of these rows of x, which has the tensor's rows."""
        return x.narrow(-2, self.start, self.matrices * self.rows)


def cut_rows(p: Tensor, rows: Sequence[int]) -> list[Slice]:
    """Divide a tensor whose matrices have so many rows; neighbours of one shape are one slice."""
    slices, start = [], 0
    for each, run in itertools.groupby(rows):
        slices.append(Slice(p, start, len(list(run)), each))
        start += slices[-1].matrices * each
    return slices


def make_batches(slices: Iterable[Slice], most: int) -> list[list[list[Slice]]]:
    """Divide slices into batches, equally on all ranks: one shape of matrices and its transpose,
    and no more than ``most`` elements if they are several. A batch has its slices by shape.
    """
    sides: dict[tuple[int, int], list[Slice]] = {}
    for one in slices:
        sides.setdefault(one.shape, []).append(one)
    batches: list[list[list[Slice]]] = []
    kind, numel = (0, 0), 0
    for shape in sorted(sides, key=lambda shape: (min(shape), max(shape), *shape)):
        begins_side = True
        for one in sides[shape]:
            size = one.numel
            if kind != (min(shape), max(shape)) or numel + size > most:
                batches.append([])
                kind, numel, begins_side = (min(shape), max(shape)), 0, True
            if begins_side:
                batches[-1].append([])
            batches[-1][-1].append(one)
            numel, begins_side = numel + size, False
    return batches


def stack_slices(side: Sequence[Slice], of: dict[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Copy a side's matrices, of each tensor's value, to one of shape (number, rows, columns)."""
    matrices = [one.view_rows(of[one.p]).reshape(-1, *one.shape) for one in side]
    counts = [len(each) for each in matrices]
    stack = matrices[0].new_empty((sum(counts), *side[0].shape), dtype=dtype)
    torch._foreach_copy_(stack.split(counts), matrices)
    return stack


def unstack_slices(side: Sequence[Slice], stack: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of weights that this rank has of a side, and those of a stack for them."""
    weights, results, first = [], [], 0
    for one in side:
        is_cut, local = cuts_matrices(one.p), to_local(one.p)
        rows = one.view_rows(one.p if is_cut else local)
        shape = rows.shape
        count = shape.numel() // (stack.shape[1] * stack.shape[2])
        part = stack[first : first + count].view(shape)
        first += count
        weights.append(local if is_cut else rows)
        results.append(take_local_rows(one, part) if is_cut else part)
    return weights, results


def take_local_rows(one: Slice, part: Tensor) -> Tensor:
    """Return what this rank has of a tensor of which a slice is ``part``, and all else zero."""
    if part.shape != one.p.shape:
        whole = part.new_zeros(one.p.shape)
        one.view_rows(whole).copy_(part)
        part = whole
    return take_local_part(one.p, part)


def cuts_matrices(p: Tensor) -> bool:
    """Return True if this rank has a part only of some matrices of a sharded tensor."""
    cuts = [one for one in getattr(p, "placements", ()) if not one.is_replicate()]
    return any(not (one.is_shard() and one.dim < p.ndim - 2) for one in cuts)


# Added to the root mean square of a row, by which it is divided, and to a norm.
ROW_EPS = 1e-8


def orthogonalize_stacks(stacks: list[Tensor], group: Group) -> list[Tensor]:
    """Return stacks of one shape or its transpose orthogonalized, each as it lies. The list of
    stacks is emptied, to free memory, and a stack may be overwritten.
    """
    are_wide = [stack.shape[1] <= stack.shape[2] for stack in stacks]
    counts = [len(stack) for stack in stacks]
    wide = [x if is_wide else x.mT for x, is_wide in zip(stacks, are_wide, strict=True)]
    wide = [torch.cat(wide)] if len(wide) > 1 else wide
    stacks.clear()
    parts = orthogonalize(wide.pop(), group).split(counts)
    return [part if is_wide else part.mT for part, is_wide in zip(parts, are_wide, strict=True)]


def orthogonalize(x: Tensor, group: Group) -> Tensor:
    """Bring the singular values of matrices, at least as wide as high, to about 1.

    A step makes s to a s + b s^3 + c s^5, of all singular values s at once. Overwrites x.
    """
    a, b, c = group["ns_coefficients"]
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=group["eps"]))
    with without_autocast(x):
        for _ in range(group["ns_steps"]):
            gram = torch.bmm(x, x.mT)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def update_row_divisors(x: Tensor, variances: Tensor, beta2: float) -> Tensor:
    """Add the mean squares of rows to ``variances`` (matrices, rows), which are multiplied by beta2
    already. Return what each row is divided by, so that matrices have a norm of 1.

    A correction of averages that began with zeros would change nothing: it is one factor a matrix.
    """
    columns = x.shape[2]
    norms = torch.linalg.vector_norm(x, dim=2, dtype=variances.dtype)
    variances.addcmul_(norms, norms, value=(1 - beta2) / columns)
    divisors = variances.sqrt().add_(ROW_EPS)
    lengths = torch.linalg.vector_norm(norms / divisors, dim=1, keepdim=True)
    return divisors.mul_(lengths.clamp_(min=ROW_EPS))


def scale_of_update(shape: tuple[int, int], rule: str | None, is_normalized: bool = False) -> float:
    """Return the factor of an orthogonal update: ``adjust_lr_fn`` of ``torch.optim.Muon``; if
    matrices have a norm of 1, times that of an orthogonal one.
    """
    norm = math.sqrt(min(shape)) if is_normalized else 1.0
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape)) * norm
    return math.sqrt(max(1.0, shape[0] / shape[1])) * norm


def step_stacks(
    stacks: list[Tensor], sides: Iterator[tuple[Sequence[Slice], Tensor | None]], group: Group
) -> None:
    """Step what is next of the sides and their variances; the list of stacks is emptied."""
    for o in orthogonalize_stacks(stacks, group):
        apply_update(*next(sides), o, group)


def apply_update(side: Sequence[Slice], variances: Tensor | None, o: Tensor, group: Group) -> None:
    """Subtract a stack from weights; with ``variances`` its rows are normalized."""
    stack = o.new_empty(o.shape, dtype=side[0].p.dtype)  # contiguous, too
    if variances is None:
        stack.copy_(o)
    else:
        divisors = update_row_divisors(o, variances, group["muon_beta2"])
        torch.div(o, divisors.unsqueeze(2), out=stack)
    weights, results = unstack_slices(side, stack)
    factor = scale_of_update(side[0].shape, group["adjust_lr_fn"], variances is not None)
    torch._foreach_add_(weights, results, alpha=-group["lr"] * factor)


def choose_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the iteration: bfloat16, as in torch's Muon, if the device has units for
    it; else float32, which is more exact and 3 to 20 times as fast as bfloat16 emulated.
    """
    if device.type == "cuda":
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        has_units = onednn_takes_bfloat16()
        if platform.machine() in ("x86_64", "AMD64"):  # where that may be by emulation
            units = (torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported)
            has_units = has_units and any(unit() for unit in units)
    else:
        has_units = True
    return torch.bfloat16 if has_units else torch.float32


def onednn_takes_bfloat16() -> bool:
    is_available = torch.backends.mkldnn.is_available()
    return is_available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
