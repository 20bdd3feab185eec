"""The C passes for 64-bit ARM in an emulator, against those of this machine, to the bit: make neon.

Needs a cross compiler and an emulator (Debian: gcc-aarch64-linux-gnu, qemu-user); on an ARM machine neither.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kernels" / "native"))
import build_passes

from compopt._backends.native import library

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "kernels" / "native"
FLAGS = [flag for flag in build_passes.FLAGS if flag not in ("-shared", "-fPIC")]
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def missing() -> str:
    """Return the tools that are needed and missing here."""
    if platform.machine() == "aarch64":
        return "" if build_passes.find_compiler() else "a C compiler"
    return ", ".join(name for name in (CROSS, EMULATOR) if not shutil.which(name))


def build_and_run(compiler: list[str], target: list[str], before: list[str], folder: Path) -> tuple[str, str]:
    """The instruction set that the driver was built for, and the checksum of its results."""
    program = folder / f"driver{len(list(folder.iterdir()))}"
    files = [str(ROOT / "tests" / "vectors_driver.c"), *map(str, sorted(NATIVE.glob("*.c")))]
    words = [
        *compiler,
        *target,
        *FLAGS,
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{NATIVE}",
        *files,
        "-o",
        str(program),
        "-lm",
    ]
    subprocess.run(words, check=True, timeout=300)
    done = subprocess.run([*before, str(program)], capture_output=True, text=True, check=True, timeout=300)
    isa, checksum = done.stdout.split()
    return isa, checksum


def checksums(isas: list[str]) -> dict[str, str]:
    """Of these instruction sets of this machine, and of NEON."""
    local, results = build_passes.find_compiler(), {}
    with tempfile.TemporaryDirectory() as folder:
        for isa in isas:
            built, results[isa] = build_and_run(local, build_passes.TARGETS[isa], [], Path(folder))
            assert built == isa
        if "neon" not in results:
            built, results["neon"] = build_and_run([CROSS], ["-static"], [EMULATOR], Path(folder))
            assert built == "neon"
    return results


def main() -> None:
    if missing():
        sys.exit(f"not here: {missing()}")
    results = checksums(library.list_isas())
    print("\n".join(f"{isa:<16}{checksum}" for isa, checksum in results.items()))
    if len(set(results.values())) > 1:
        sys.exit("they differ")


if __name__ == "__main__":
    main()
