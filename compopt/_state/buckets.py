"""Buckets: the parameters whose gradients travel in one payload.

A bucket holds parameters of one group, dtype and device, in reverse order of registration (the
order in which backward finishes them). What is kept of them is in ``kept``; here are the memory and
the messages of its steps, and how parameters are dealt into buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._wire.payload import (
    ControlFields,
    Payload,
    PayloadDtype,
    Scratch,
    float_dtype,
    quantized_bits,
)
from .buckets import Bucket
from .tensors import CompressionRule, get_grad_dtype, is_compressed, pin, to_local, upload

# with what papers ask of one tensor of a bucket
__all__ = [
    "BUCKET_BYTES",
    "Bucket",
    "bucket_bytes",
    "grad_dtype",
    "is_compressed",
    "local",
    "make_buckets",
    "upload",
]

# of parameters: large enough for the link's bandwidth, small enough to overlap with backward
BUCKET_BYTES = 8 * 2**20
# on a device every bucket is launches and waits for its turn
DEVICE_BUCKET_BYTES = 128 * 2**20


class Bucket(Bucket):
    """Tensors of one group, dtype and device, whose gradients travel together.

    ``index`` is its place in the order in which buckets are exchanged.
    """

    def __init__(
        self,
        index: int,
        group: dict[str, Any],
        params: list[Tensor],
        names: list[str],
        chosen: CompressionRule | None = None,
        scratch: Scratch | None = None,
    ):
        super().__init__(group, params, names, chosen)
        self.index = index
        self.scratch = scratch or Scratch()  # all buckets of an optimizer share it
        self.control = (
            ControlFields()
        )  # what its payloads carry beside the header; set by the runtime
        self.parameter_bytes = 0  # handed over in the last step to gather updated parameters
        self.withheld = False  # this rank takes part in an exchange without its gradients
        # the back end's way to average int8 and int4, where it has one
        self.make_mean: Callable[[Payload, int, int], Any] | None = None
        self._held: dict[str, Tensor] = {}

    @property
    def dense_bytes(self) -> int:
        """Bytes of the bucket's gradient uncompressed: what DDP would hand to its all-reduce."""
        return self.numel * self.grad_dtype.itemsize

    @property
    def rounds(self) -> bool:
        """Whether what is sent of tensors that have a residual is rounded.

        They owe again what that takes off.
        """
        if self.alone or all(e is None for e in self.state.get("residual", ())):
            return False
        given = self.group.get("payload_dtype")
        sent = float_dtype(given) or self.grad_dtype
        return quantized_bits(given) is not None or torch.promote_types(sent, self.wide) != sent

    def sent_as(self, asked: PayloadDtype) -> PayloadDtype:
        """On the wire. Where there is no wire what is owed is added without rounding."""
        if not self.alone:
            return asked
        return self.wide if self.owes else None

    def grads(self) -> list[Tensor | None]:
        """This rank's gradients; None where backward left none."""
        if self.withheld:
            return [None] * len(self.params)
        grads = [p.grad for p in self.params]
        if not self.distributed:
            return grads
        return [None if g is None else to_local(g) for g in grads]

    # Messages

    def payload(
        self,
        lengths: list[int],
        sent_as: PayloadDtype,
        use: int = 0,
        marks: Sequence[float] = (),
    ) -> Payload:
        """An empty payload with ``lengths[i]`` elements for tensor i, and these ``marks`` in its
        header, if any.

        The next one for this ``use`` has its memory. ``sent_as``: on the wire; as the gradients
        where it is None. int8 and int4 are for the wire only, see ``quantized_mean``.
        """
        sent_as = self.sent_as(sent_as)
        size = len(self.params) + len(self.control) + sum(lengths)
        bits = quantized_bits(sent_as)
        seed = (self.group["step"], self.index, use) if bits else None
        dtype = self.wide if seed else float_dtype(sent_as) or self.grad_dtype
        message = self._memory(f"message {use}", size, dtype)
        dropped = None
        if seed or self.rounds:
            dropped = self._memory(f"dropped {use}", sum(lengths), self.wide)
        words = len(self.params), len(self.control)
        payload = Payload(
            message, *words, lengths, seed, dropped, self.scratch, bits or 8, self.make_mean
        )
        self._write_control(payload, marks)
        return payload

    def payloads(
        self, lengths: list[list[int]], sent_as: PayloadDtype
    ) -> tuple[list[Payload], Tensor]:
        """Empty payloads, one a rank, and the memory they lie in.

        That for rank r has ``lengths[r]`` elements.
        """
        dtype = float_dtype(self.sent_as(sent_as)) or self.grad_dtype
        header, control = len(self.params), len(self.control)
        bodies = [sum(row) for row in lengths]
        sizes = [header + control + body for body in bodies]
        flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        dropped: Sequence[Tensor | None] = [None] * len(lengths)
        if self.rounds and torch.promote_types(dtype, self.wide) != dtype:
            dropped = self.memory("dropped", sum(bodies), self.wide).split(bodies)
        rows = [
            Payload(row, header, control, parts, dropped=rest)
            for row, parts, rest in zip(flat.split(sizes), lengths, dropped, strict=True)
        ]
        self._write_control(rows[0])
        first, *others = [row.control for row in rows]
        if others and len(first):
            torch._foreach_copy_(others, [first] * len(others))
        return rows, flat

    def _write_control(self, payload: Payload, marks: Sequence[float] = ()) -> None:
        if marks or self.control:
            numbers = torch.tensor([*marks, *self.control.numbers], dtype=payload.flat.dtype)
            words = payload.flat[len(payload.header) - len(marks) :][: len(numbers)]
            words.copy_(pin(numbers, self.device), non_blocking=True)
        for at, words in self.control.on_device:
            payload.control[at].copy_(words)

    def present(self, payload: Payload) -> list[bool]:
        """For each tensor, whether any rank had a gradient for it (after averaging)."""
        marks = payload.header.tolist() if payload.marks is None else payload.marks
        return [mark > 0 for mark in marks]

    # Memory of a step

    def memory(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for one step, contents undefined.

        A CPU keeps it for the next: new pages cost more than copies. On a GPU nothing is kept: its
        allocator is quick, and memory is dear.
        """
        if self.device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=self.device)
        return self._memory(name, size, dtype)

    def let_go(self) -> None:
        """Use memory anew: somebody else may still write to what was used so far."""
        self._held = {}

    def _memory(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory kept under ``name``, made anew where it does not fit."""
        held = self._held.get(name)
        if held is None or held.numel() != size or held.dtype != dtype:
            held = self._held[name] = torch.empty(size, dtype=dtype, device=self.device)
        return held


# Dealing

# parameters of one group, with their names, before they are a bucket
Run = tuple[dict[str, Any], list[Tensor], list[str]]


def make_buckets(
    groups: Iterable[dict[str, Any]],
    chosen: CompressionRule | None = None,
    wanted: Container[Tensor] | None = None,
) -> list[Bucket]:
    """Deal the parameters of all groups into buckets, the last registered first: of about 8 MiB on
    CPUs, 128 MiB on other devices.

    ``chosen(p, group, name)`` says whether a parameter is compressed; by default
    :func:`is_compressed` does. ``wanted``: only these; by default those that require a gradient.
    """
    dealt: list[Run] = []
    for group, params, names in reversed(list(_uniform_runs(groups, wanted))):
        size = 0
        for p, name in zip(reversed(params), reversed(names), strict=True):
            nbytes = to_local(p).numel() * p.element_size()
            if size == 0 or size + nbytes > bucket_bytes(p.device):
                dealt.append((group, [], []))
                size = 0
            dealt[-1][1].append(p)
            dealt[-1][2].append(name)
            size += max(nbytes, 1)
    scratch = Scratch()
    return [Bucket(index, *bucket, chosen, scratch) for index, bucket in enumerate(dealt)]


def bucket_bytes(device: torch.device) -> int:
    """How large a bucket on this device may become, but for a tensor that is larger."""
    return BUCKET_BYTES if device.type == "cpu" else DEVICE_BUCKET_BYTES


def _uniform_runs(
    groups: Iterable[dict[str, Any]], wanted: Container[Tensor] | None
) -> Iterator[Run]:
    """Each group cut by dtypes, device and layout, with a name for every parameter."""
    for number, group in enumerate(groups):
        given = group.get("param_names") or [
            f"parameter {i} of group {number}" for i in range(len(group["params"]))
        ]
        runs: dict[tuple[object, ...], Run] = {}
        for p, name in zip(group["params"], given, strict=True):
            if not (p.requires_grad if wanted is None else p in wanted):
                continue
            mesh, placements = getattr(p, "device_mesh", None), getattr(p, "placements", None)
            alike = (p.dtype, get_grad_dtype(p), p.device, mesh, placements)
            run = runs.setdefault(alike, (group, [], []))
            run[1].append(p)
            run[2].append(name)
        yield from runs.values()
