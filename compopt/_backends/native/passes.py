"""Calls of the C passes of kernels/native: tables of numbers and addresses, checked before C reads
them.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..._ops.operations import Ops

# The address of a tensor of no elements: not 0, which means that there is no tensor. Nothing is
# read there.
EMPTY = 8
Tensors = Sequence[Tensor | None]


class LibraryOps(Ops):
    """A backend with the library of C passes."""

    library: ctypes.CDLL


def fits(t: Tensor, least: int, dtype: torch.dtype) -> bool:
    """True if a pass can read ``least`` elements of this dtype at the tensor's address."""
    return t.dtype is dtype and t.is_cpu and t.is_contiguous() and t.numel() >= least


def is_plain(*tensors: Tensor) -> bool:
    """True if passes can read and write these tensors without a copy."""
    return all(fits(t, 0, torch.float32) for t in tensors)


def as_float32(tensors: Tensors) -> list[Tensor | None]:
    """Return the tensors as contiguous float32, which passes read; the others are copied."""
    return [
        t
        if t is None or (t.dtype is torch.float32 and t.is_cpu and t.is_contiguous())
        else t.float().contiguous()
        for t in tensors
    ]


def sizes_of(tensors: Tensors) -> list[int]:
    return [0 if t is None else t.numel() for t in tensors]


def mask_sizes(lengths: Sequence[int]) -> list[int]:
    """Return the bytes of packed masks of these lengths."""
    return [(n + 7) // 8 for n in lengths]


# Addresses


def address(
    what: str, tensor: Tensor | None, least: int, dtype: torch.dtype = torch.float32
) -> int:
    """Return the address of a tensor, 0 for None. The tensor must outlive the call."""
    if tensor is not None and fits(tensor, least, dtype):
        return tensor.data_ptr() or EMPTY
    return addresses(what, (tensor,), (least,), dtype)[0]


def addresses(
    what: str, tensors: Tensors, least: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[int]:
    """Return the addresses of tensors, 0 for None.

    Raises ValueError where the pass cannot read ``least`` elements of a tensor.
    """
    places: list[int] = []
    for t, n in zip(tensors, least, strict=True):
        if t is None:
            places.append(0)
        # ``fits``, without a call
        elif t.dtype is dtype and t.is_cpu and t.is_contiguous() and t.numel() >= n:
            places.append(t.data_ptr() or EMPTY)
        else:
            raise ValueError(
                f"the native backend reads {n} contiguous elements of {dtype} on the CPU as "
                f"{what}, and number {len(places)} is {t.dtype} of shape {tuple(t.shape)} and "
                f"strides {t.stride()} on {t.device}. Nothing was read. Was a parameter or its "
                "state converted after the optimizer was made? Make the optimizer after that."
            )
    return places


def address_in_turn(
    what: str, flat: Tensor, sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[int]:
    """Return the addresses of tensors of these sizes that follow each other from the start of
    ``flat``.
    """
    starts, total = starts_of((*sizes,), dtype.itemsize)
    first = address(what, flat, total, dtype)
    return [first + start for start in starts]


@lru_cache(maxsize=512)
def starts_of(sizes: tuple[int, ...], itemsize: int) -> tuple[list[int], int]:
    """Return the first byte of each of tensors that follow each other, and the sum of their
    sizes.
    """
    starts = [itemsize * start for start in accumulate(sizes, initial=0)]
    return starts[: len(sizes)], sum(sizes)


# Tables


class Memory(NamedTuple):
    """A column of tensors: a pass reads or writes ``counts`` elements of each."""

    tensors: Tensors
    counts: Sequence[int]


Column = int | Sequence[int] | Memory  # one number for all rows, one for each, or tensors


class Table:
    """Rows of a C struct: the columns in the order of its fields, 8 bytes a field."""

    def __init__(self, rows: int, **columns: Sequence[int] | int):
        self._names, self.width = [*columns], len(columns)
        self._numbers = array("q", bytes(8 * rows * self.width))
        for place, column in enumerate(columns.values()):
            if column != 0:
                self._numbers[place :: self.width] = array(
                    "q", [column] * rows if isinstance(column, int) else column
                )
        self.address = self._numbers.buffer_info()[0]
        self._as_parameter_ = ctypes.c_void_p(self.address)
        self.memory: object = None  # tensors, alive until the pass has read them

    def write(self, name: str, column: Sequence[int]) -> None:
        """Write a field of all rows."""
        self._numbers[self._names.index(name) :: self.width] = array("q", column)

    def read_column(self, name: str) -> list[int]:
        """Return a field of all rows, as a pass has left it."""
        return list(self._numbers[self._names.index(name) :: self.width])


class Struct:
    """A C struct of kernels/native, by the names of its fields."""

    def __init__(self, fields: str):
        self._fields = fields.split()

    def table(self, rows: int, **columns: Column) -> Table:
        """Return a table of these columns; the other fields are 0."""
        numbers: dict[str, Sequence[int] | int] = dict.fromkeys(self._fields, 0)
        for name, column in columns.items():
            if name not in numbers:
                raise TypeError(f"the struct of a C pass has no field {name!r}.")
            if isinstance(column, Memory):
                column = addresses(NAMES.get(name, name), *column, DTYPES.get(name, torch.float32))
            numbers[name] = column
        table = Table(rows, **numbers)
        table.memory = columns
        return table


PIECE = Struct("n first g e squares")
SHARD = Struct("pieces many begin size k selected guess positions values")
PACK = Struct("n g add index mask k out flag")
ADAMW = Struct("n w m v step mean mask index base k residual g errors new_w new_m new_v")
SCAPE = Struct("n w e g held holding old index k mean m step guess start stop wanted chosen")
# fields that are not float32, and what error messages call them
DTYPES = {
    **dict.fromkeys(("index", "held", "chosen"), torch.int32),
    "mask": torch.uint8,
}
NAMES = {
    "w": "a parameter",
    "g": "a gradient",
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "e": "a residual",
    "add": "a residual",
    "mean": "an averaged gradient",
    "step": "a number of steps",
    "mask": "a packed mask",
    "index": "positions",
    "held": "positions of the momentum",
    "old": "the momentum of before",
}


class Options:
    """The numbers of one C struct, all of them double."""

    def __init__(self, *numbers: float):
        self._numbers = array("d", numbers)
        self._as_parameter_ = ctypes.c_void_p(self._numbers.buffer_info()[0])


# Threads


def run_over_rows(lengths: Sequence[int], run: Callable[[int, int, int], int]) -> int:
    """Call ``run(first, last, thread)`` for all rows of a table, on as many threads as PyTorch has.

    Return the number of the first row that a pass rejected, -1 if none.
    """
    threads = min(torch.get_num_threads(), len(lengths))
    if threads <= 1:
        return run(0, len(lengths), 0)
    total, cuts, done = sum(lengths), [0], 0
    for i, n in enumerate(lengths):
        done += n
        if done * threads >= total * len(cuts):
            cuts.append(i + 1)
    ranges = list(zip(cuts, [*cuts[1:-1], len(lengths)], strict=False))
    first, last = zip(*ranges, strict=True)
    results = list(_pool(threads).map(run, first, last, range(threads)))
    return min((row for row in results if row >= 0), default=-1)


def per_thread_scratch(ops: Ops, like: Tensor, room: int) -> int:
    """Return the address of memory for ``room`` float32 numbers of each thread."""
    size = torch.get_num_threads() * room
    return address("memory of a pass", ops.scratch(like, size, torch.float32, "passes"), size)


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "compopt")
