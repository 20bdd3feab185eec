"""How a launch is laid out: blocks of several tensors, and a table that says where each tensor's
data lie.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Elements a program: the interpreter pays by the program, a GPU wants many.
BLOCK = 4096 if INTERPRETED else 1024
# Numbers in front of the table that hold for all its rows.
HEAD = 10
HEAD_ = tl.constexpr(HEAD)
# The field of a row that says how many elements the tensor has.
N = tl.constexpr(0)
# What kernels call. The interpreter would set up the whole language anew at every call of a jitted
# function.
inlined = (lambda function: function) if INTERPRETED else triton.jit
# Blocks whose numbers are added up at a time.
PART = 2048
TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


class Blocks:
    """Tensors of these lengths, cut into blocks of ``size`` elements (a power of 2); none spans two
    tensors.

    ``where``: a row for each block, of the tensor's number and the block's first element.
    ``per_tensor``: how many blocks each has. ``bounds``: for each tensor the number of its first
    block; at last, how many there are. ``firsts``: ``starts`` where everything is selected.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, size: int | None = None):
        self.lengths, self.size = tuple(lengths), size or BLOCK
        self.per_tensor = [-(-n // self.size) for n in lengths]
        per_tensor = torch.tensor(self.per_tensor, dtype=torch.int64)
        firsts = per_tensor.cumsum(0) - per_tensor
        number = torch.arange(len(lengths), dtype=torch.int64).repeat_interleave(per_tensor)
        self.count = number.numel()
        start = (torch.arange(self.count, dtype=torch.int64) - firsts[number]) * self.size
        self.where = upload(torch.stack([number, start], 1), device)
        self.firsts = upload(start, device)
        end = torch.tensor([self.count], dtype=torch.int64)
        self.bounds = upload(torch.cat([firsts, end]), device)

    def run(self, kernel: triton.JITFunction, *arguments: object, **constants: object) -> None:
        """Launch the kernel on every block; nothing to do where all tensors are empty.

        Ranks have to compute the same bits, also where their memory's layout, or a gradient that is
        missing, makes them run variants of a kernel: so no multiplication and addition are fused
        into one rounding.
        """
        if self.count:
            with on(self.where.device):
                kernel[(self.count,)](
                    self.where, *arguments, BLOCK=self.size, enable_fp_fusion=False, **constants
                )

    def starts(self, counts: Tensor) -> Tensor:
        """From a number for each block, int32, the sum of those before it in its tensor, int64."""
        starts = torch.empty(self.count, dtype=torch.int64, device=counts.device)
        if self.count:
            with on(counts.device):
                _starts[(len(self.lengths),)](counts, self.bounds, starts, PART=PART)
        return starts


Cell = Tensor | int | None


class Table:
    """What a kernel has to know of each tensor: addresses (0: there is none) and integers.

    It keeps no tensor, and holds for as long as all of them stay where they are. ``constants``:
    what the kernel is compiled for.
    """

    def __init__(
        self, rows: Iterable[Iterable[Cell]], device: torch.device, **constants: object
    ) -> None:
        cells = [
            0 if cell is None else cell if isinstance(cell, int) else cell.data_ptr()
            for row in rows
            for cell in row
        ]
        self.cells = torch.tensor(cells, dtype=torch.int64)
        self.device, self.constants = device, constants
        self._head: list[float] = []
        self._host: Tensor | None = None
        self._on_device: Tensor | None = None

    def under(self, head: Sequence[float] = ()) -> Tensor:
        """On the device, behind the numbers of ``head``, as float64.

        The same memory as before where they are the same: a kernel may not write there.
        """
        if self._on_device is None or self._head != list(head):
            self._on_device = self.copy(head)
        return self._on_device

    def copy(self, head: Sequence[float] = ()) -> Tensor:
        """The same in memory of its own, where a kernel may write."""
        if self._host is None or self._head != list(head):
            fixed = torch.tensor([*head, *[0.0] * (HEAD - len(head))], dtype=torch.float64)
            host = torch.cat([fixed.view(torch.int64), self.cells])
            self._host = host if self.device.type == "cpu" else host.pin_memory()
            self._head, self._on_device = list(head), None
        if self.device.type == "cpu":
            return self._host.clone()
        return self._host.to(self.device, non_blocking=True)


def table(
    rows: Iterable[Iterable[Cell]], device: torch.device, head: Sequence[float] = ()
) -> Tensor:
    """A table for one launch, on the device."""
    return Table(rows, device).copy(head)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    current: contextlib.AbstractContextManager[object] = torch.get_device_module(device).device(
        device
    )
    return current


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: the allocator keeps the pinned copy for as long as it
    is read.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def alignment(blocks: Blocks, *columns: Sequence[Tensor | None]) -> int:
    """16 where all lengths and all addresses in these columns are multiples of it, else 1."""
    return alignment_of(blocks.lengths, *columns)


def alignment_of(lengths: Sequence[int], *columns: Sequence[Tensor | None]) -> int:
    """The same of the lengths of what begins anew at each of them."""
    cells = [t.data_ptr() for column in columns for t in column if t is not None]
    return 16 if all(number % 16 == 0 for number in (*lengths, *cells)) else 1


@lru_cache(maxsize=1024)
def cut(lengths: tuple[int, ...], device: torch.device, size: int | None = None) -> Blocks:
    """The blocks of these lengths; the same object for the same: its tables stay on the device."""
    return Blocks(lengths, device, size)


@triton.jit
def _starts(counts, bounds, starts, PART: tl.constexpr):
    """A program a tensor."""
    first, last = tl.load(bounds + tl.program_id(0)), tl.load(bounds + tl.program_id(0) + 1)
    before = tl.zeros([], tl.int64)
    for part in range(tl.cdiv(last - first, PART)):
        i = first + part * PART + tl.arange(0, PART)
        own = tl.load(counts + i, mask=i < last, other=0)
        tl.store(starts + i, before + (tl.cumsum(own, 0) - own).to(tl.int64), mask=i < last)
        before += tl.sum(own, 0).to(tl.int64)


@inlined
def scalar(table, i):
    """Number i of the table's head, float64."""
    return tl.load(table + i).to(tl.float64, bitcast=True)


@inlined
def own_block(where, table, FIELDS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1):
    """This program's block, its tensor's row in the table, its elements, and which of them there
    are.

    ``ALIGN``, here and below: what lengths and addresses are multiples of; 16 lets a thread load
    four numbers at once.
    """
    block = tl.program_id(0).to(tl.int64)
    row = table + HEAD_ + tl.load(where + 2 * block) * FIELDS
    i = tl.multiple_of(tl.load(where + 2 * block + 1), ALIGN) + tl.arange(0, BLOCK)
    return block, row, i, i < tl.multiple_of(tl.load(row + N), ALIGN)


@inlined
def given(cell, i):
    """Whether a cell of the table is other than 0, for all elements i (a block: the interpreter
    wants it so).
    """
    return tl.full(i.shape, 0, tl.int64) + cell != 0


@inlined
def read(row, FIELD: tl.constexpr, i, there, TYPE: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Elements i of the tensor at the address in this field; 0 where it has none."""
    address = tl.load(row + FIELD)
    pointer = tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN)
    return tl.load(pointer + i, mask=there & given(address, i), other=0)


@inlined
def write(row, FIELD: tl.constexpr, i, there, values, TYPE: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Store to the tensor at the address in this field, if there is one."""
    address = tl.load(row + FIELD)
    pointer = tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN)
    tl.store(pointer + i, values.to(TYPE), mask=there & given(address, i))


@inlined
def selected(row, FIELD: tl.constexpr, i, there):
    """1 where the packed mask at this field has a bit, or where there is no mask; int32."""
    address = tl.load(row + FIELD)
    bytes_ = tl.load(
        address.to(tl.pointer_type(tl.uint8)) + (i >> 3), mask=there & given(address, i), other=255
    )
    return tl.where(there, (bytes_.to(tl.int32) >> (i & 7).to(tl.int32)) & 1, 0)


@inlined
def rank(chosen, starts, block):
    """How many elements of the tensor are selected before each of the block's, given those before
    the block.
    """
    return tl.load(starts + block) + tl.cumsum(chosen, 0).to(tl.int64) - chosen
