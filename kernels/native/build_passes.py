"""Compiles the C passes of this folder as shared objects, one for each instruction set that
machines of this kind may have: ``avx512.so``, ``avx2.so``, ... setup.py does it at installation.

    python kernels/native/build_passes.py    # those that are older than their sources: make kernels

``compopt/_backends/native/library.py`` loads the best one that the processor has.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent

# No contraction: whether a processor has fused multiply-add must not show in the bits, which all
# ranks share.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC"]
AVX2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mpopcnt"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"]
# What a processor must have, as ``processor`` of isa.c asks it; never what this one has, because a
# wheel goes to others. Without the last two options some compilers use half of a register.
TARGETS = {
    "avx512": [*AVX2, *AVX512, "-mtune=skylake-avx512", "-mprefer-vector-width=512"],
    "avx2": AVX2,
    "neon": [],
    "portable": ["-DPORTABLE"],
}
NO_COMPILER = (
    "The C passes are not compiled, and PyTorch's operators will run in their place: there is no C "
    "compiler ($CC, cc, gcc, clang)."
)


def isas_of(machine: str) -> list[str]:
    """Return the instruction sets that a kind of machine may have."""
    if machine in ("x86_64", "AMD64"):
        return ["avx512", "avx2", "portable"]
    return ["neon", "portable"] if machine in ("aarch64", "arm64") else ["portable"]


ISAS = isas_of(platform.machine())


def find_compiler() -> list[str] | None:
    """Return the command of the C compiler: $CC where that is set, else cc, gcc or clang; None
    where there is none.
    """
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        program, *options = shlex.split(name)
        if found := shutil.which(program):
            return [found, *options]
    return None


def compile_passes(isa: str, out: Path, flags: Sequence[str] = (), sources: Path = HERE) -> None:
    """Compile the passes for an instruction set.

    Raises RuntimeError where there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(NO_COMPILER)
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_suffix(".new")  # a process may have loaded what is there
    files = [str(path) for path in sorted(sources.glob("*.c"))]
    command = [*compiler, *TARGETS[isa], *FLAGS, *flags, *files, "-o", str(new), "-lm"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        errors = done.stderr.strip()[:2000]
        raise RuntimeError(f"{compiler[0]} could not compile the C passes for {isa}: {errors}")
    os.replace(new, out)


def find_stale(folder: Path = HERE) -> list[str]:
    """Return the instruction sets whose object is missing, or older than a source."""
    newest = max(path.stat().st_mtime for path in (*folder.glob("*.[ch]"), Path(__file__)))
    objects = {isa: folder / f"{isa}.so" for isa in ISAS}
    return [
        isa for isa, path in objects.items() if not path.exists() or path.stat().st_mtime < newest
    ]


def main() -> str | None:
    """Return what is wrong, if anything is."""
    if find_compiler() is None:
        print(NO_COMPILER, file=sys.stderr)
        return None
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda isa: compile_passes(isa, HERE / f"{isa}.so"), find_stale()))
    except RuntimeError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
