"""Builds the C passes of kernels/native as a shared library, caches it and loads it.

A build takes about two seconds with the system's C compiler. The library is cached in
``$XDG_CACHE_HOME/compopt`` (``~/.cache/compopt``). Its name contains a hash of everything it is
built from (sources, compiler and version, C library, processor) and ends in a checksum of the file:
a damaged library, which would end the process, is never loaded. Neither is one that another user
could have written: the cache is used only if the folder and the file belong to this user and
nobody else may write them. Otherwise the process builds the library in a private folder.
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
from functools import lru_cache
from pathlib import Path

from ..._wire.collectives import connect
from ..._wire.trust import Untrusted, is_own_file, make_own_folder
from ..._wire.warning import warn

# No contraction: whether a processor has fused multiply-add must not show in the bits, which all
# ranks share.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC"]
# Ways to compile for an instruction set, tried in turn: some compilers know no native architecture.
TARGETS = {
    "": [["-march=native"], []],  # all that this processor has
    "avx512": [["-march=native"]],
    "avx2": [
        ["-march=x86-64-v3", "-mtune=native"],
        ["-mavx2", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt"],
    ],
    "neon": [["-march=native"], []],
    "portable": [["-DPORTABLE"]],
}
INCLUDED = {"avx512": {"avx512", "avx2"}, "avx2": {"avx2"}, "neon": {"neon"}, "portable": set()}
KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double, "s": ctypes.c_char_p}
SIGNATURES = {  # result and arguments of each function: p memory, n a size, d a number, s a string
    "isa": "s",
    "pack": "n pnndd",
    "scape": "n pnnppp",
    "adams": "n pp",
    "adamw": "n pnnp",
    "largest": "d pnndpp",
    "room_for": "n n",
    "encode": "n pnppn",
    "decode": "n pnppnp",
    "positions": "n pnnp",
    "quantize": "n pnnp",
    "mean_of_codes": "n pnnpp",
    "dequantize": "n pnnn",
}


class UnknownISA(ValueError):
    """COMPOPT_NATIVE_ISA names an unknown instruction set, or one that this processor lacks."""


def find_compiler() -> str | None:
    """Return the C compiler: $CC, else cc, gcc or clang; None where there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def load_library() -> ctypes.CDLL:
    """Return the library, built if it is not there yet: for all that the processor has, or for the
    instruction set that COMPOPT_NATIVE_ISA names.

    Raises RuntimeError where there is no compiler, or it fails; ValueError where COMPOPT_NATIVE_ISA
    names what this processor does not have.
    """
    cc = find_compiler()
    if cc is None:
        raise RuntimeError(
            "the native backend needs a C compiler: install gcc or clang, or name another backend."
        )
    isa = os.environ.get("COMPOPT_NATIVE_ISA", "")
    if isa not in TARGETS:
        names = ", ".join(name for name in TARGETS if name)
        raise UnknownISA(f"COMPOPT_NATIVE_ISA must be one of {names}, got {isa!r}.")
    return _load(cc, isa)


@lru_cache(maxsize=8)
def _load(cc: str, isa: str) -> ctypes.CDLL:
    if isa not in ("", "portable") and isa not in (here := list_isas(cc)):
        raise UnknownISA(
            f"COMPOPT_NATIVE_ISA={isa} cannot run here: this processor, as {cc} compiles for it, "
            f"has {', '.join(here)}. Name one of these, or unset it."
        )
    library = _open(cc, isa)
    for name, signature in SIGNATURES.items():
        result, *arguments = signature.split()
        function = getattr(library, name)
        function.restype, function.argtypes = (
            KINDS[result],
            [KINDS[kind] for kind in "".join(arguments)],
        )
    return library


def list_isas(cc: str) -> list[str]:
    """Return the instruction sets that this machine can run."""
    has = isa_of_library(_load(cc, ""))
    return [isa for isa in TARGETS if isa in INCLUDED[has] or isa == "portable"]


def isa_of_library(library: ctypes.CDLL) -> str:
    """Return the instruction set that a library was built for."""
    isa: bytes = library.isa()
    return isa.decode()


def _open(cc: str, isa: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(build_library(cc, isa, _cache_folder())))
    except Untrusted as error:
        warn(
            f"the C passes are compiled anew in each process (about two seconds), because {error}, "
            "so another user could replace the cached library. Take away that access, or let "
            "XDG_CACHE_HOME name a folder of your own.",
            connect(None).rank,
        )
    except OSError:  # the cache is not writable, or its library does not load on this machine
        pass
    with tempfile.TemporaryDirectory() as private:
        return ctypes.CDLL(str(build_library(cc, isa, Path(private))))


def _cache_folder() -> Path:
    """Return the cache folder, created if missing, without symbolic links in its path.

    Raises:
        Untrusted: another user may write it, or rename it by writing one of its parents.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return make_own_folder(home / "compopt")


def build_library(cc: str, isa: str, folder: Path) -> Path:
    """Return the library in this folder; compile it if there is none, or none to be trusted."""
    # Not imported: that would need triton.
    package = importlib.util.find_spec("compopt_kernels")
    if package is None or package.origin is None:
        raise RuntimeError("the package compopt_kernels is not installed beside compopt.")
    sources = sorted((Path(package.origin).parent / "native").glob("*.[ch]"))
    made_of = [
        *(path.read_bytes() for path in sources),
        # machines that need different libraries may share a home folder
        cc.encode(),
        subprocess.run([cc, "--version"], capture_output=True, timeout=600).stdout,
        " ".join(platform.libc_ver()).encode(),
        platform.machine().encode(),
        _processor(),
        str([TARGETS[isa], FLAGS]).encode(),
    ]
    name = f"native-{isa or 'own'}-{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:16]}"
    for path in sorted(folder.glob(f"{name}-*.so")):
        if is_own_file(path) and path.name == _name_of(name, path):
            return path
    # Ranks build at the same time: each compiles in a folder of its own and moves the result.
    with tempfile.TemporaryDirectory(dir=folder) as private:
        library = Path(private) / "library.so"
        _compile(cc, TARGETS[isa], [str(path) for path in sources if path.suffix == ".c"], library)
        library.chmod(0o700)
        path = folder / _name_of(name, library)
        os.replace(library, path)
    return path


def _compile(cc: str, targets: list[list[str]], files: list[str], out: Path) -> None:
    for target in targets:
        words = [cc, *target, *FLAGS, *files, "-o", str(out), "-lm"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        if not done.returncode:
            return
    raise RuntimeError(f"{cc} could not build the native backend: {done.stderr.strip()[:500]}")


def _name_of(name: str, path: Path) -> str:
    """Return the file name of a library with these contents."""
    return f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.so"


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"flags {platform.machine()} {platform.processor()}"]
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()
