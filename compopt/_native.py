"""The C passes of kernels/native, compiled for this machine by the system's C compiler and called through ctypes.

The library is built once, in about two seconds, and kept in ``$XDG_CACHE_HOME/compopt`` (``~/.cache/compopt``) under a
name that follows from the sources, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

# No contraction: whether a processor has fused multiply-add must not show in the bits, which all ranks share.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC"]
TARGETS = [["-march=native"], []]  # some compilers know no native architecture
KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double, "-": None}
SIGNATURES = {  # what a function returns and takes: p memory, n a size, d a number
    "pack": "- pnndd",
    "scape": "- pnnpppn",
    "adams": "- pp",
    "adamw": "- pnnp",
    "largest": "d pnndpp",
    "room_for": "n n",
    "encode": "- pnpp",
    "decode": "n pnppnp",
    "positions": "n pnnp",
}


def compiler() -> str | None:
    """The C compiler: what $CC names, else cc, gcc or clang; None where there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The library, built if it is not there yet. RuntimeError where there is no compiler, or it fails."""
    cc = compiler()
    if cc is None:
        raise RuntimeError("the native back end needs a C compiler: install gcc or clang, or name another back end.")
    library = ctypes.CDLL(str(_built(cc)))
    for name, signature in SIGNATURES.items():
        result, arguments = signature.split()
        function = getattr(library, name)
        function.restype, function.argtypes = KINDS[result], [KINDS[kind] for kind in arguments]
    return library


def _built(cc: str) -> Path:
    package = importlib.util.find_spec("compopt_kernels").origin  # not imported: that would need triton
    sources = sorted((Path(package).parent / "native").glob("*.[ch]"))
    about = [*(path.read_bytes() for path in sources), cc.encode(), _processor(), str([TARGETS, FLAGS]).encode()]
    name = f"native-{hashlib.sha256(b'|'.join(about)).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compopt"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # ranks build at once: each moves a whole file there
            files = [str(path) for path in sources if path.suffix == ".c"]
            for target in TARGETS:
                words = [cc, *target, *FLAGS, *files, "-o", f"{own}/{name}", "-lm"]
                done = subprocess.run(words, capture_output=True, text=True, timeout=120)
                if not done.returncode:
                    break
            else:
                raise RuntimeError(f"{cc} could not build the native back end: {done.stderr.strip()[:500]}")
            os.replace(f"{own}/{name}", folder / name)
    return folder / name


def _processor() -> bytes:
    """What tells processors apart whose instructions differ: a home folder may be shared by many machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"flags {platform.machine()} {platform.processor()}"]
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()


def at(tensor: Tensor | None) -> int:
    """Where a tensor's memory begins, 0 for None. It is contiguous, and must outlive the call.

    A tensor of no elements has no memory, and is still something else than none: it gets an address nobody reads.
    """
    return 0 if tensor is None else tensor.data_ptr() or 8


def addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    """The same for many, without a call for each."""
    return [0 if t is None else t.data_ptr() or 8 for t in tensors]


class Table:
    """Rows of a C struct: the columns in the order of its fields, a number of 8 bytes a row or one for all rows."""

    def __init__(self, rows: int, **columns: Sequence[int] | int):
        width = len(columns)
        self._numbers = array("q", bytes(8 * rows * width))
        for place, column in enumerate(columns.values()):
            if column != 0:
                self._numbers[place::width] = array("q", [column] * rows if isinstance(column, int) else column)
        self._as_parameter_ = ctypes.c_void_p(self._numbers.buffer_info()[0])


class Options:
    """Numbers of one C struct, all of them double."""

    def __init__(self, *numbers: float):
        self._numbers = array("d", numbers)
        self._as_parameter_ = ctypes.c_void_p(self._numbers.buffer_info()[0])


def over_rows(lengths: Sequence[int], call: Callable[[int, int, int], None]) -> None:
    """``call(first, last, thread)`` for all rows of a table, on as many threads as PyTorch has."""
    threads = min(torch.get_num_threads(), len(lengths))
    if threads == 1:
        return call(0, len(lengths), 0)
    total, cuts, done = sum(lengths), [0], 0
    for i, n in enumerate(lengths):
        done += n
        if done * threads >= total * len(cuts):
            cuts.append(i + 1)
    ranges = list(zip(cuts, [*cuts[1:-1], len(lengths)], strict=False))
    list(_pool(threads).map(lambda item: call(*item[1], item[0]), enumerate(ranges)))


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "compopt")
