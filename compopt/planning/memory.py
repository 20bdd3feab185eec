"""`compopt.memory`: the bytes that an optimizer holds, and takes at its peak, before it has taken a
step.

State that there is already is counted. What a wrapped optimizer makes in its first step is counted
of a stand-in for each tensor, which takes a step on zeros; anchors and what belongs to them are
computed. The peak is an estimate: bench/memory.py has counted what a step takes beside the state,
on CPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._engine.optimizer import CompressedOptimizer
from .._inside.base_state import make_first_state
from .._inside.bases import describe_members, list_members
from .._inside.wrapper import Wrapper
from .._state.layouts import LocalShape, TensorInfo
from .._state.residuals import residual_layout
from .._state.tensors import to_local
from .._wire.codec import PAYLOAD_CODECS
from ..local_steps import LocalSteps
from ..local_steps.anchors import call_make_outer
from ..scape import ScapeAdamS
from ..tagc import TagcAdamW
from .formatting import format_quantity

# Bytes an element that a step takes beside the state at its worst moment (bench/memory.csv: "most"
# less "saved"; of ScapeAdamS less what it holds in its dense start), where payloads are floats and
# where they are quantized.
STEP_BYTES = {
    "AdamS": (4.7, 10.3),
    "Average": (4.4, 10.3),
    "RadiusAdamW": (6.1, 10.8),
    "SeparateAdam": (4.7, 10.2),
    "Separate": (4.7, 10.2),
    "LocalSteps": (10.3, 3.1),
}
DELAYED_BYTES = 4.0  # of LocalSteps with a delay: what had moved
OUTER_GRADIENTS = 4.0  # of an outer optimizer of the user's, which steps all anchors at once
MUON_BYTES = 2.7  # of the step of MuonAdamW


@dataclass(frozen=True)
class Memory:
    """Bytes of an optimizer on this rank, beside parameters and gradients.

    ``parameters``: the number of elements that it trains. ``state``: bytes by kind, the largest
    first, as they are between steps. ``peak``: an estimate of the most in a step, state included.
    """

    name: str
    parameters: int
    state: Mapping[str, int]
    peak: int

    @property
    def held(self) -> int:
        """The bytes of all state."""
        return sum(self.state.values())

    def __str__(self) -> str:
        rows = [*self.state.items(), ("held", self.held), ("peak, about", self.peak)]
        width = max(len(name) for name, _ in rows)
        lines = [
            f"  {name:<{width}}  {format_quantity(size):>9}B  {size / max(1, self.parameters):6.2f}"
            for name, size in rows
        ]
        count = format_quantity(self.parameters).strip()
        title = f"{self.name}: {count} trainable parameters on this rank; bytes, and per parameter"
        return "\n".join([title, *lines])


def memory(optimizer: Optimizer) -> Memory:
    """Return the bytes that an optimizer of this package or of torch holds on this rank, and those
    at its peak, also before its first step::

        print(compopt.memory(optimizer))

    Make the optimizer where it will train: with its process group, and inside FSDP2 over a model
    that is sharded. On one process nothing is sent, and ``LocalSteps`` has no anchors, unless it is
    made with ``simulate=True``.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    count = sum(to_local(p).numel() for p in params)
    sizes: Counter[str] = Counter()
    for name, size in _list_state(optimizer):
        sizes[name] += size
    state = {name: size for name, size in sizes.most_common() if size}
    peak = sum(sizes.values()) + round(_count_step_bytes(optimizer, count, sizes))
    return Memory(_describe(optimizer), count, state, peak)


def _describe(optimizer: Optimizer) -> str:
    around = f" around {describe_members(optimizer.base)}" if isinstance(optimizer, Wrapper) else ""
    return describe_members(optimizer) + around


# State


def _list_state(optimizer: Optimizer) -> Iterator[tuple[str, int]]:
    """Yield the kind and the bytes of each part of the state."""
    is_local = isinstance(optimizer, LocalSteps) and _takes_rounds(optimizer)
    seen: set[tuple[int, int]] = set()
    members = list_members(optimizer.base) if isinstance(optimizer, Wrapper) else [optimizer]
    if isinstance(optimizer, Wrapper):
        skipped = {"residual"} if is_local else set()  # of the averaged start
        for entry in optimizer.state.values():
            yield from _count_entry(entry, seen, skipped | {"base", "outer"})
    for member in members:
        for group in member.param_groups:
            for p in group["params"]:
                if entry := member.state.get(p):
                    yield from _count_entry(entry, seen)
                else:
                    yield from _count_entry(make_first_state(member, p, group), set())
    if is_local:
        assert isinstance(optimizer, LocalSteps)
        yield from _list_anchors(optimizer, seen)


def _count_entry(
    entry: Mapping[str, Any], seen: set[tuple[int, int]], skipped: Set[str] = frozenset()
) -> Iterator[tuple[str, int]]:
    """Yield the bytes of the tensors of an entry, but for single numbers; each memory once."""
    for name, value in entry.items():
        if name not in skipped and isinstance(value, Tensor) and value.dim():
            local = to_local(value.detach())
            memory = local.data_ptr(), local.nbytes
            if memory not in seen:
                seen.add(memory)
                yield name, local.nbytes


def _takes_rounds(optimizer: LocalSteps) -> bool:
    """True if anchors are there, or will be made in the first local step."""
    return optimizer._anchors is not None or optimizer.comm.size > 1 or optimizer.simulate


def _list_anchors(optimizer: LocalSteps, seen: set[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Yield the anchors, their residuals and averages, and the state of the outer optimizer."""
    if (anchors := optimizer._anchors) is None:
        yield from _compute_anchors(optimizer)
        return
    for bucket in anchors.buckets:
        yield "anchor", bucket.flat_anchors.nbytes
        yield "outer residual", bucket.flat["residual"].nbytes
        if bucket.trailing_mean is not None:
            yield "average of anchors", bucket.trailing_mean.nbytes
    for entry in anchors.outer.state.values():
        for name, size in _count_entry(entry, seen):
            yield f"outer {name}", size


def _compute_anchors(optimizer: LocalSteps) -> Iterator[tuple[str, int]]:
    """Yield what ``_list_anchors`` will count."""
    options, of_outer = optimizer._options, _find_outer_state(optimizer)
    for p in (p for p in optimizer._params if p.requires_grad):
        dtype, n = torch.promote_types(p.dtype, torch.float32), to_local(p).numel()
        layout = residual_layout(LocalShape(dtype), optimizer.residual_dtype)
        residual = layout.numel(TensorInfo(p, True)) * layout.dtype.itemsize
        yield "anchor", n * dtype.itemsize
        yield "outer residual", residual
        if options["average_anchors"] is not None:
            yield "average of anchors", n * dtype.itemsize
        for name in of_outer:
            yield f"outer {name}", n * dtype.itemsize


def _find_outer_state(optimizer: LocalSteps) -> list[str]:
    """Return the names of the outer optimizer's state that is as large as an anchor."""
    if optimizer._make_outer is None:
        return ["momentum_buffer"] if optimizer._options["outer_momentum"] else []
    stand_in = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float32, device="cpu"))
    outer = call_make_outer(optimizer._make_outer, [stand_in])
    entry = make_first_state(outer, stand_in, outer.param_groups[0])
    return [name for name, x in entry.items() if isinstance(x, Tensor) and x.numel() == 4]


# The peak


def _count_step_bytes(optimizer: Optimizer, count: int, sizes: Mapping[str, int]) -> float:
    """Return the bytes that a step takes beside the state."""
    of_muon = MUON_BYTES * count if "Muon" in _describe(optimizer) else 0.0
    if not isinstance(optimizer, CompressedOptimizer):
        return of_muon
    if optimizer.comm.size == 1 and not optimizer.simulate:
        return of_muon
    if optimizer.replaces_reduce_scatter:  # residuals of a backward, until step()
        return of_muon + sizes.get("residual", 0)
    return of_muon + count * _find_step_bytes(optimizer)


def _find_step_bytes(optimizer: CompressedOptimizer) -> float:
    """Return the bytes an element of messages and scratch memory at the worst moment."""
    ranks, options = optimizer.comm.size, optimizer.option_groups[0]
    if isinstance(optimizer, TagcAdamW):
        return 8.8 + 16 / ranks
    if isinstance(optimizer, ScapeAdamS):
        return 8.6 + 18.9 / ranks if optimizer.sharded else 8.4
    floats, quantized = STEP_BYTES.get(optimizer._engine.name, (6.1, 10.8))
    name = options.get("payload_dtype")
    dtype = PAYLOAD_CODECS[name if name != "auto" else "int8"]
    if options.get("projection") == "gaussian":
        return floats
    found = quantized if dtype.bits else floats
    if isinstance(optimizer, LocalSteps):
        found += DELAYED_BYTES if options["delay"] else 0.0
        found += OUTER_GRADIENTS if optimizer._make_outer is not None else 0.0
    return found
