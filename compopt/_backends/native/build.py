"""Builds the C passes of kernels/native as a shared library, caches it and loads it.

A build takes about two seconds with the system's C compiler. The library is cached in
``$XDG_CACHE_HOME/compopt`` (``~/.cache/compopt``). Its name contains a hash of everything it is
built from (sources, compiler and version, C library, processor) and ends in a checksum of the file:
a damaged library, which would end the process, is never loaded. Neither is one that another user
could have written: the cache is used only if the folder and the file belong to this user and
nobody else may write them. Otherwise, and where the cache cannot be written, the process builds the
library in a private folder.

One process of a machine compiles, the others wait for it. Nothing waits for longer than ``LIMIT``,
and what has failed is not tried again in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib.util
import math
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ..._wire.launch import get_rank
from ..._wire.trust import Untrusted, is_own_file, make_own_folder
from ..._wire.warning import warn

# seconds until a process does without the library: its compilations and its waits together
LIMIT = 60.0
BUILDING = "compopt-building-"  # begins the name of a folder in which a library is compiled

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
    """COMPOPT_NATIVE_ISA names an unknown instruction set, or one that this processor lacks."""


class BuildTimeout(RuntimeError):
    """The compiler, or the process that runs it, has not finished within ``LIMIT``."""


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
    if isa not in ("", "portable") and isa not in (here := list_isas(cc)):
        raise UnknownISA(
            f"COMPOPT_NATIVE_ISA={isa} cannot run here: this processor, as {cc} compiles for it, "
            f"has {', '.join(here)}. Name one of these, or unset it."
        )
    return _load(cc, isa)


def _load(cc: str, isa: str) -> ctypes.CDLL:
    library = _load_once(cc, isa)
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


@lru_cache(maxsize=8)
def _load_once(cc: str, isa: str) -> ctypes.CDLL | str:
    """Return the library, or why there is none."""
    try:
        library = _open(cc, isa)
    except (OSError, RuntimeError) as error:
        return str(error)
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
    deadline = time.monotonic() + LIMIT
    try:
        return ctypes.CDLL(str(build_library(cc, isa, _cache_folder(), deadline)))
    except Untrusted as error:
        warn(
            f"the C passes are compiled anew in each process (about two seconds), because {error}, "
            "so another user could replace the cached library. Take away that access, or let "
            "XDG_CACHE_HOME name a folder of your own.",
            get_rank(),
        )
    except BuildTimeout:
        raise
    except (OSError, RuntimeError):
        # there is no home folder, it is full or not writable, or its library does not load here
        pass
    _remove_abandoned_folders(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=BUILDING) as private:
        return ctypes.CDLL(str(build_library(cc, isa, Path(private), deadline)))


def _cache_folder() -> Path:
    """Return the cache folder, created if missing, without symbolic links in its path.

    Raises:
        Untrusted: another user may write it, or rename it by writing one of its parents.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return make_own_folder(home / "compopt")


def build_library(cc: str, isa: str, folder: Path, deadline: float = math.inf) -> Path:
    """Return the library in this folder; compile it if there is none, or none to be trusted.

    Raises BuildTimeout at the ``deadline``, a reading of ``time.monotonic``; RuntimeError if the
    compiler fails; OSError if the folder cannot be written.
    """
    # Not imported: that would need triton.
    package = importlib.util.find_spec("compopt_kernels")
    if package is None or package.origin is None:
        raise RuntimeError("the package compopt_kernels is not installed beside compopt.")
    sources = sorted((Path(package.origin).parent / "native").glob("*.[ch]"))
    made_of = [
        *(path.read_bytes() for path in sources),
        # machines that need different libraries may share a home folder
        cc.encode(),
        _run([cc, "--version"], deadline)[1],
        " ".join(platform.libc_ver()).encode(),
        platform.machine().encode(),
        _processor(),
        str([TARGETS[isa], FLAGS]).encode(),
    ]
    name = f"native-{isa or 'own'}-{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:16]}"
    if (found := _find_library(folder, name)) is not None:
        return found
    with _only_builder(folder / f"{name}.lock", deadline) as is_first:
        # the process that has compiled may have finished since
        if (found := _find_library(folder, name)) is not None:
            return found
        if not is_first:
            raise OSError(errno.ENOENT, "the process that compiled the C passes has failed")
        prefix = f"{BUILDING}{name}-"
        for abandoned in folder.glob(f"{prefix}*"):  # its process was killed
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as private:
            library = Path(private) / "library.so"
            files = [str(path) for path in sources if path.suffix == ".c"]
            _compile(cc, TARGETS[isa], files, library, deadline)
            library.chmod(0o700)
            path = folder / _name_of(name, library)
            os.replace(library, path)
            return path


def _find_library(folder: Path, name: str) -> Path | None:
    """Return the library of this name that can be trusted."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        if is_own_file(path) and path.name == _name_of(name, path):
            return path
    return None


@contextlib.contextmanager
def _only_builder(path: Path, deadline: float) -> Iterator[bool]:
    """Wait until no other process is in this context with the lock file ``path``. Yield True if
    none was, and False where another one has ended meanwhile.

    The system releases the lock of a process that is killed.
    """
    with open(path, "wb") as file:
        waited = False
        while _is_locked(file.fileno()):
            waited = True
            if time.monotonic() > deadline:
                raise BuildTimeout(
                    f"another process has been compiling for {LIMIT:g} s ({path} is its lock)."
                )
            time.sleep(0.05)
        try:  # the process before has removed the file that this one had opened
            waited = waited or not os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            waited = True
        try:
            yield not waited
        finally:
            if not waited:
                path.unlink(missing_ok=True)


def _is_locked(file: int) -> bool:
    """Lock a file for this process. Return True if another one has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # some network file systems have no locks: each process compiles
        return False
    return False


def _remove_abandoned_folders(folder: Path) -> None:
    """Remove the private folders of this user's processes that were killed while they compiled."""
    for path in folder.glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_own and time.time() - found.st_mtime > 2 * LIMIT:  # no build takes so long
                shutil.rmtree(path, ignore_errors=True)


def _compile(
    cc: str, targets: list[list[str]], files: list[str], out: Path, deadline: float
) -> None:
    for target in targets:
        command = [cc, *target, *FLAGS, *files, "-o", str(out), "-lm"]
        status, _, errors = _run(command, deadline, out.parent)
        if not status:
            return
    text = errors.decode(errors="replace").strip()[:500]
    raise RuntimeError(f"{cc} could not build the native backend: {text}")


def _run(
    command: list[str], deadline: float, folder: Path | None = None
) -> tuple[int, bytes, bytes]:
    """Run a compiler, whose temporary files are in ``folder``. Return its exit status, its output
    and its errors.

    At the deadline, and if this process is interrupted, it is killed with the programs it runs.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)} if folder else None,
        start_new_session=True,
    ) as process:
        try:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            output, errors = process.communicate(timeout=left)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise BuildTimeout(
                f"{command[0]} has not finished within {LIMIT:g} s. Look why it hangs; CC names "
                "another compiler, and COMPOPT_BACKEND=torch needs none."
            ) from None
    return process.returncode, output, errors


def _name_of(name: str, path: Path) -> str:
    """Return the file name of a library with these contents."""
    return f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.so"


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"flags {platform.machine()} {platform.processor()}"]
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()
