"""Loads the C passes of kernels/native, which are compiled when compopt is installed: a shared
object for each instruction set, of which the best one that the processor has is taken.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import lru_cache
from pathlib import Path

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
