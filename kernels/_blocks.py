"""Launches over several tensors: blocks of their elements, and a table of their addresses."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# elements a program: the interpreter's cost is per program, a GPU needs many
BLOCK = 4096 if INTERPRETED else 1024
# numbers in front of the table that apply to all rows
HEAD = 10
HEAD_ = tl.constexpr(HEAD)
# the field of a row with the number of elements of the tensor
N = tl.constexpr(0)
# For functions that kernels call. The interpreter would set up the whole language again at every
# call of a jitted function.
inlined = (lambda function: function) if INTERPRETED else triton.jit
# blocks whose counts are added up at a time
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

    ``where``: a row for each block, the tensor's number and the block's first element.
    ``per_tensor``: the number of blocks of each tensor. ``bounds``: the number of each tensor's
    first block; at last, the number of all. ``firsts``: each block's first element.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, size: int | None = None):
        self.lengths, self.size = tuple(lengths), size or BLOCK
        self.per_tensor = [-(-n // self.size) for n in lengths]
        per_tensor = torch.tensor(self.per_tensor, dtype=torch.int64, device="cpu")
        firsts = per_tensor.cumsum(0) - per_tensor
        number = torch.arange(len(lengths), dtype=torch.int64, device="cpu").repeat_interleave(
            per_tensor
        )
        self.count = number.numel()
        start = (
            torch.arange(self.count, dtype=torch.int64, device="cpu") - firsts[number]
        ) * self.size
        self.where = upload(torch.stack([number, start], 1), device)
        self.firsts = upload(start, device)
        end = torch.tensor([self.count], dtype=torch.int64, device="cpu")
        self.bounds = upload(torch.cat([firsts, end]), device)

    def launch(self, kernel: triton.JITFunction, *arguments: object, **constants: object) -> None:
        """Launch the kernel on every block, if there is one.

        Ranks must compute the same bits, also where their memory layout or a missing gradient makes
        them run variants of a kernel: so multiplications and additions are not fused.
        """
        if self.count:
            with on(self.where.device):
                kernel[(self.count,)](
                    self.where, *arguments, BLOCK=self.size, enable_fp_fusion=False, **constants
                )

    def prefix_sums(self, counts: Tensor) -> Tensor:
        """Return for each block the sum, int64, of the int32 counts before it in its tensor."""
        starts = torch.empty(self.count, dtype=torch.int64, device=counts.device)
        if self.count:
            with on(counts.device):
                _starts[(len(self.lengths),)](counts, self.bounds, starts, PART=PART)
        return starts


Cell = Tensor | int | None


class Table:
    """Rows of addresses (0: no tensor) and integers, one row for each tensor.

    A table keeps no tensor alive, and is valid while all stay in place. ``constants``: what the
    kernel is compiled for.
    """

    def __init__(
        self, rows: Iterable[Iterable[Cell]], device: torch.device, **constants: object
    ) -> None:
        cells = [
            0 if cell is None else cell if isinstance(cell, int) else cell.data_ptr()
            for row in rows
            for cell in row
        ]
        self.cells = torch.tensor(cells, dtype=torch.int64, device="cpu")
        self.device, self.constants = device, constants
        self._head: list[float] = []
        self._host: Tensor | None = None
        self._on_device: Tensor | None = None

    def with_head(self, head: Sequence[float] = ()) -> Tensor:
        """Return the table on the device, behind the numbers of ``head``, as float64.

        Calls with the same head return the same memory: a kernel may not write there.
        """
        if self._on_device is None or self._head != list(head):
            self._on_device = self.writable_copy(head)
        return self._on_device

    def writable_copy(self, head: Sequence[float] = ()) -> Tensor:
        """Return the same in new memory, where a kernel may write."""
        if self._host is None or self._head != list(head):
            fixed = torch.tensor(
                [*head, *[0.0] * (HEAD - len(head))], dtype=torch.float64, device="cpu"
            )
            host = torch.cat([fixed.view(torch.int64), self.cells])
            self._host = host if self.device.type == "cpu" else host.pin_memory()
            self._head, self._on_device = list(head), None
        if self.device.type == "cpu":
            return self._host.clone()
        return self._host.to(self.device, non_blocking=True)


def addresses_in_turn(stack: Tensor) -> list[int]:
    """Return the addresses of the tensors of a stack."""
    first, step = stack.data_ptr(), stack.stride(0) * stack.element_size()
    return [first + n * step for n in range(len(stack))]


def upload_table(
    rows: Iterable[Iterable[Cell]], device: torch.device, head: Sequence[float] = ()
) -> Tensor:
    """Return a table for one launch, on the device."""
    return Table(rows, device).writable_copy(head)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make the tensors' device the current one, on which Triton launches."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    current: contextlib.AbstractContextManager[object] = torch.get_device_module(device).device(
        device
    )
    return current


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without a host wait: the allocator keeps the pinned copy while it is
    read.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def alignment(blocks: Blocks, *columns: Sequence[Tensor | None]) -> int:
    """Return 16 if all lengths and all addresses in these columns are multiples of it, else 1."""
    return alignment_of(blocks.lengths, *columns)


def alignment_of(lengths: Sequence[int], *columns: Sequence[Cell]) -> int:
    """Return the same for rows of these lengths that follow each other."""
    cells = [
        cell if isinstance(cell, int) else cell.data_ptr()
        for column in columns
        for cell in column
        if cell is not None
    ]
    return 16 if all(number % 16 == 0 for number in (*lengths, *cells)) else 1


@lru_cache(maxsize=1024)
def make_blocks(lengths: tuple[int, ...], device: torch.device, size: int | None = None) -> Blocks:
    """Return the blocks of these lengths; cached, so that they stay on the device."""
    return Blocks(lengths, device, size)


def log_decays(betas: Sequence[float]) -> list[float]:
    """Return the logarithm of each beta, by which kernels compute beta^step."""
    return [math.log(beta) if beta else -math.inf for beta in betas]


@triton.jit
def _starts(counts, bounds, starts, PART: tl.constexpr):
    """Run one program for each tensor."""
    first, last = tl.load(bounds + tl.program_id(0)), tl.load(bounds + tl.program_id(0) + 1)
    before = tl.zeros([], tl.int64)
    for part in range(tl.cdiv(last - first, PART)):
        i = first + part * PART + tl.arange(0, PART)
        size = tl.load(counts + i, mask=i < last, other=0)
        tl.store(starts + i, before + (tl.cumsum(size, 0) - size).to(tl.int64), mask=i < last)
        before += tl.sum(size, 0).to(tl.int64)


@inlined
def load_scalar(table, i):
    """Load number i of the table's head, float64."""
    return tl.load(table + i).to(tl.float64, bitcast=True)


@inlined
def load_options(table):
    """Load the numbers that every head begins with: lr, both betas, eps and the weight decay."""
    lr, beta1, beta2 = load_scalar(table, 0), load_scalar(table, 1), load_scalar(table, 2)
    return lr, beta1, beta2, load_scalar(table, 3), load_scalar(table, 4)


@inlined
def load_step(row, FIELD: tl.constexpr):
    """Load the number of a tensor's step, float64; 1 before the first, which avoids 0 / 0."""
    step = tl.load(tl.load(row + FIELD).to(tl.pointer_type(tl.float32)))
    return tl.maximum(step, 1.0).to(tl.float64)


@inlined
def load_block(where, table, FIELDS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Return this program's block, its tensor's row in the table, its elements, and which of them
    are in range.

    ``ALIGN``, here and below: lengths and addresses are multiples of it; 16 lets a thread load four
    numbers in one instruction.
    """
    block = tl.program_id(0).to(tl.int64)
    row = table + HEAD_ + tl.load(where + 2 * block) * FIELDS
    i = tl.multiple_of(tl.load(where + 2 * block + 1), ALIGN) + tl.arange(0, BLOCK)
    return block, row, i, i < tl.multiple_of(tl.load(row + N), ALIGN)


@inlined
def is_set(cell, i):
    """Compare a cell of the table with 0, as a block like i, which the interpreter requires."""
    return tl.full(i.shape, 0, tl.int64) + cell != 0


@inlined
def load_field(row, FIELD: tl.constexpr, i, in_range, TYPE: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Load elements i of the tensor at the address in this field; 0 without a tensor."""
    address = tl.load(row + FIELD)
    pointer = tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN)
    return tl.load(pointer + i, mask=in_range & is_set(address, i), other=0)


@inlined
def load_tile(
    row, FIELD: tl.constexpr, begin, at, in_range, TYPE: tl.constexpr, ALIGN: tl.constexpr = 1
):
    """Load elements ``at``, in 32 bits, behind element ``begin``; 0 without a tensor."""
    address = tl.load(row + FIELD)
    pointer = tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN) + begin
    return tl.load(pointer + at, mask=in_range & is_set(address, at), other=0)


@inlined
def store_field(
    row, FIELD: tl.constexpr, i, in_range, values, TYPE: tl.constexpr, ALIGN: tl.constexpr = 1
):
    """Store to elements i of the tensor at the address in this field, if there is one."""
    address = tl.load(row + FIELD)
    pointer = tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN)
    tl.store(pointer + i, values.to(TYPE), mask=in_range & is_set(address, i))


@inlined
def load_mask(row, FIELD: tl.constexpr, i, in_range):
    """Load bits i of the packed mask at the address in this field, 1 without a mask; int32."""
    address = tl.load(row + FIELD)
    bytes_ = tl.load(
        address.to(tl.pointer_type(tl.uint8)) + (i >> 3),
        mask=in_range & is_set(address, i),
        other=255,
    )
    return tl.where(in_range, (bytes_.to(tl.int32) >> (i & 7).to(tl.int32)) & 1, 0)


@inlined
def selected_before(chosen, starts, block):
    """Return for each element of the block how many of its tensor are selected before it.

    ``starts``: how many are before each block.
    """
    return tl.load(starts + block) + tl.cumsum(chosen, 0).to(tl.int64) - chosen
