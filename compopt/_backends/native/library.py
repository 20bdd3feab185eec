"""The C passes of kernels/native: they are loaded, and called with tables of numbers and addresses,
which are checked before C reads them.

They are compiled when compopt is installed: a shared object for each instruction set, of which the
best one that the processor has is taken.

The other files of this folder fill tables and run passes by it; ``choice`` asks whether there is a
library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..._ops.operations import Ops

ISAS = ("avx512", "avx2", "neon", "portable")  # the fastest first
KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double, "s": ctypes.c_char_p}
SIGNATURES = {  # result and arguments of each function: p memory, n a size, d a number, s a string
    "isa": "s",
    "processor": "s",
    "pack": "n pnndd",
    "scape": "n pnnppp",
    "adamw": "n pnnp",
    "project": "n pnndp",
    "factored": "n pnnpp",
    "orthonormalize": "n pnnp",
    "select_sums": "n pnnpp",
    "set_bits": "n pnp",
    "read_union": "n pnppnpp",
    "largest": "d pnndpp",
    "room_for": "n n",
    "encode": "n pnppn",
    "decode": "n pnppnp",
    "quantize": "n pnnp",
    "round_values": "n pnnp",
    "mean_of_codes": "n pnnpp",
    "dequantize": "n pnnn",
    "encode_blocks": "n pnnp",
    "decode_blocks": "n pnn",
}

# The address of a tensor of no elements: not 0, which means that there is no tensor. Nothing is
# read there.
EMPTY = 8
NUMBER = 4  # bytes of a float32 or int32
Tensors = Sequence[Tensor | None]


# Loading


class UnknownISA(ValueError):
    """COMPOPT_NATIVE_ISA names an unknown instruction set, or one that cannot run here."""


def find_objects() -> dict[str, Path]:
    """Return the shared objects that are installed, the fastest first."""
    package = importlib.util.find_spec("compopt_kernels")  # not imported: that would need triton
    if package is None or package.origin is None:
        return {}
    paths = {isa: Path(package.origin).parent / "native" / f"{isa}.so" for isa in ISAS}
    return {isa: path for isa, path in paths.items() if path.is_file()}


def list_isas() -> list[str]:
    """Return the instruction sets of this processor for which passes are installed, the fastest
    first.
    """
    objects = find_objects()
    if "portable" not in objects:
        return []
    has = _load(objects["portable"]).processor().decode().split()
    return [isa for isa in objects if isa in (*has, "portable")]


def load_library(isa: str = "") -> ctypes.CDLL:
    """Return the passes for this instruction set, else for the one that COMPOPT_NATIVE_ISA names,
    else for the best one of this processor.

    Raises OSError where they cannot be loaded, ValueError where COMPOPT_NATIVE_ISA names what
    cannot run here.
    """
    isa = isa or os.environ.get("COMPOPT_NATIVE_ISA", "")
    if isa not in ("", *ISAS):
        raise UnknownISA(f"COMPOPT_NATIVE_ISA must be one of {', '.join(ISAS)}, got {isa!r}.")
    here = list_isas()
    if not here:
        raise OSError("the C passes are not installed.")
    if isa and isa not in here:
        raise UnknownISA(
            f"COMPOPT_NATIVE_ISA={isa} cannot run here: of what is compiled this processor has "
            f"{', '.join(here)}. Name one of these, or unset it."
        )
    return _load(find_objects()[isa or here[0]])


def isa_of_library(library: ctypes.CDLL) -> str:
    """Return the instruction set that a library was built for."""
    isa: bytes = library.isa()
    return isa.decode()


@lru_cache
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, signature in SIGNATURES.items():
        result, *arguments = signature.split()
        function = getattr(library, name)
        function.restype = KINDS[result]
        function.argtypes = [KINDS[kind] for kind in "".join(arguments)]
    return library


# Tensors that passes read


def is_readable(t: Tensor, least: int, dtype: torch.dtype) -> bool:
    """True if a pass can read ``least`` elements of this dtype at the tensor's address."""
    return t.dtype is dtype and t.is_cpu and t.is_contiguous() and t.numel() >= least


def is_plain(*tensors: Tensor) -> bool:
    """True if passes can read and write these tensors without a copy."""
    return all(is_readable(t, 0, torch.float32) for t in tensors)


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
    if tensor is not None and is_readable(tensor, least, dtype):
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
        # ``is_readable``, without a call
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
    """Rows of a C struct: a column for each of its ``fields``, in their order, 8 bytes a field.

    By default the fields are those that are given; others are 0.
    """

    def __init__(self, rows: int, fields: str = "", /, **columns: Column):
        names = fields.split() or [*columns]
        self._places, self._rows = {name: place for place, name in enumerate(names)}, rows
        self.width = len(names)
        self._numbers = array("q", bytes(8 * rows * self.width))
        self.address = self._numbers.buffer_info()[0]
        self._as_parameter_ = ctypes.c_void_p(self.address)
        self.tensors: list[Tensors] = []  # alive until a pass has read them
        self.write(**columns)

    def write(self, **columns: Column) -> None:
        """Write fields of all rows."""
        for name, column in columns.items():
            if name not in self._places:
                raise TypeError(f"the struct of a C pass has no field {name!r}.")
            if isinstance(column, Memory):
                self.tensors.append(column.tensors)
                column = addresses(NAMES.get(name, name), *column, DTYPES.get(name, torch.float32))
            elif isinstance(column, int):
                column = [column] * self._rows
            self._numbers[self._places[name] :: self.width] = array("q", column)

    def read_column(self, name: str) -> list[int]:
        """Return a field of all rows, as a pass has left it."""
        return list(self._numbers[self._places[name] :: self.width])


# The fields of structs of C, in their order.
PACK = "n g add index mask k out flag"
ADAMW = "n w m v step mean mask index base k residual g errors new_w new_m new_v"
SCAPE = "n w e g held holding old index k mean m step guess start stop wanted chosen"
# Fields that are not float32, and what error messages call them.
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
    "x": "columns",
    **dict.fromkeys(("R", "p", "sent", "right", "out"), "a factor"),
}


class Options:
    """The numbers of one C struct, all of them double."""

    def __init__(self, *numbers: float):
        self._numbers = array("d", numbers)
        self._as_parameter_ = ctypes.c_void_p(self._numbers.buffer_info()[0])


# Threads


class ThreadMemory(NamedTuple):
    """Memory of a pass from the address ``first`` on: ``room`` numbers for each thread."""

    first: int
    room: int


class LibraryOps(Ops):
    """A backend with the library of C passes."""

    library: ctypes.CDLL

    def thread_memory(self, room: int, use: str = "passes") -> ThreadMemory:
        """Return memory of undefined contents, valid until the next call for this ``use``."""
        size = torch.get_num_threads() * room
        memory = self._scratch(use, size, torch.float32, torch.device("cpu"))
        return ThreadMemory(address("memory of a pass", memory, size), room)


def run_pass(
    function: Callable[..., int],
    table: Table,
    lengths: Sequence[int],
    *arguments: object,
    own: Sequence[ThreadMemory] = (),
) -> int:
    """Call ``function(table, first, last, *arguments, *memory)`` for all rows of a table, on as
    many threads as PyTorch has; the memory is a thread's ``own``.

    Return the number of the first row that the pass rejected, -1 if none.
    """

    def run(first: int, last: int, thread: int) -> int:
        memory = [start + NUMBER * room * thread for start, room in own]
        return function(table, first, last, *arguments, *memory)

    total = sum(lengths)
    threads = min(torch.get_num_threads(), len(lengths), total)
    if threads <= 1:
        rejected = run(0, len(lengths), 0)
    else:
        cuts, done = [0], 0
        for i, n in enumerate(lengths):
            done += n
            if done * threads >= total * len(cuts):
                cuts.append(i + 1)
        ends = [*cuts[1:-1], len(lengths)]
        results = _pool(threads).map(run, cuts, ends, range(threads))
        rejected = min((row for row in results if row >= 0), default=-1)
    table.tensors.clear()
    return rejected


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "compopt")
