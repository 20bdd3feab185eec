"""The passes that are compiled when the package is installed: which are compiled, when, and which are loaded."""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from compopt._backends import choice as backends
from compopt._backends.native import library

NATIVE = Path(importlib.util.find_spec("compopt_kernels").origin).parent / "native"
build = SimpleNamespace(**runpy.run_path(str(NATIVE / "build_passes.py")))
needs_passes = pytest.mark.skipif(not library.find_objects(), reason="needs the compiled passes")
FAILS = "#!/bin/sh\necho no disk >&2\nexit 1\n"


def program(path: Path, text: str) -> str:
    """A script to be run in place of a compiler."""
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# Compiling


@pytest.mark.parametrize(
    ("machine", "isas"),
    {
        "x86_64": ["avx512", "avx2", "portable"],
        "aarch64": ["neon", "portable"],
        "arm64": ["neon", "portable"],
        "riscv64": ["portable"],
    }.items(),
)
def test_a_kind_of_machine_has_these_instruction_sets(machine, isas):
    assert build.isas_of(machine) == isas
    assert set(isas) <= {*build.TARGETS} == {*library.ISAS}


def test_nothing_is_compiled_for_this_processor_alone():
    """A wheel goes to others."""
    words = [word for flags in (build.FLAGS, *build.TARGETS.values()) for word in flags]
    assert not [word for word in words if "native" in word or word.startswith(("-march", "-mcpu"))]


def test_the_named_compiler_is_taken_or_none(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", f"{program(tmp_path / 'mine', FAILS)} -m64")
    assert build.find_compiler() == [str(tmp_path / "mine"), "-m64"]
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert build.find_compiler() is None
    with pytest.raises(RuntimeError, match=r"PyTorch's operators will run in their place: there is no C compiler"):
        build.compile_passes("portable", tmp_path / "portable.so")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.find_compiler() is None
    program(tmp_path / "clang", FAILS)
    assert build.find_compiler() == [str(tmp_path / "clang")]


# A compiler that takes no time: it writes its options to where the object should be.
WRITES = """#!/bin/sh
all="$*"
while [ "$1" != -o ]; do shift; done
echo "$all" > "$2"
"""


def test_an_object_takes_the_place_of_an_older_one(monkeypatch, tmp_path):
    """What a process has loaded stays as it is; a failure leaves what there was, and says what the compiler said."""
    out = tmp_path / "objects" / "avx2.so"
    monkeypatch.setenv("CC", program(tmp_path / "cc", WRITES))
    build.compile_passes("avx2", out)
    with out.open() as loaded:
        build.compile_passes("avx2", out, ["-g"])
        assert "-g" not in loaded.read().split()
    text = out.read_text()
    assert {*build.FLAGS, *build.TARGETS["avx2"], "-g"} <= {*text.split()}
    assert text.count(".c ") == len([*NATIVE.glob("*.c")])
    monkeypatch.setenv("CC", program(tmp_path / "cc", FAILS))
    with pytest.raises(RuntimeError, match=r"cc could not compile the C passes for avx2: no disk"):
        build.compile_passes("avx2", out)
    assert [*out.parent.iterdir()] == [out] and out.read_text() == text


def test_what_is_older_than_its_sources_is_compiled_again(monkeypatch, tmp_path):
    folder = shutil.copytree(NATIVE, tmp_path / "native", ignore=shutil.ignore_patterns("*.so"))
    here = SimpleNamespace(**runpy.run_path(str(folder / "build_passes.py")))
    monkeypatch.setenv("CC", program(tmp_path / "cc", WRITES))
    assert here.find_stale() == here.ISAS
    assert here.main() is None
    assert here.find_stale() == []
    time = 1 + max((folder / f"{isa}.so").stat().st_mtime for isa in here.ISAS)
    os.utime(folder / "common.h", (time, time))
    assert here.find_stale() == here.ISAS
    os.utime(folder / "portable.so", (time, time))
    assert here.find_stale() == here.ISAS[:-1]
    monkeypatch.setenv("CC", program(tmp_path / "cc", FAILS))
    assert "no disk" in here.main()


def test_without_a_compiler_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("CC", "/none")
    assert build.main() is None
    assert capsys.readouterr().err == f"{build.NO_COMPILER}\n"


# Loading


@pytest.fixture
def by_itself(monkeypatch) -> None:
    for name in ("COMPOPT_BACKEND", "COMPOPT_NATIVE_ISA"):
        monkeypatch.delenv(name, raising=False)
    backends._warn_once.cache_clear()


@needs_passes
@pytest.mark.usefixtures("by_itself")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs several instruction sets")
@pytest.mark.parametrize("has, taken", [(b"avx512 avx2", "avx512"), (b"avx2", "avx2"), (b"", "portable")])
def test_the_best_that_the_processor_has_is_taken(monkeypatch, has, taken):
    paths = []
    processor = SimpleNamespace(processor=lambda: has)

    def note(path: Path):
        paths.append(path)
        return processor if len(paths) == 1 else path.stem

    monkeypatch.setattr(library, "_load", note)
    assert library.load_library() == taken
    assert [path.stem for path in paths] == ["portable", taken], "the portable passes run on all processors"


@needs_passes
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="compares with Linux")
def test_the_processor_has_what_linux_says():
    flags = {word for line in Path("/proc/cpuinfo").read_text().splitlines() for word in line.split()}
    has = [isa for isa in build.ISAS if isa in ("neon", "portable") or {"avx512": "avx512vl"}.get(isa, isa) in flags]
    assert library.list_isas() == has


@needs_passes
@pytest.mark.usefixtures("by_itself")
def test_what_is_not_compiled_is_not_taken(monkeypatch, tmp_path):
    """A compiler that does not know an instruction set leaves the others."""
    shutil.copy(library.find_objects()["portable"], tmp_path)
    (tmp_path / "native").mkdir()
    (tmp_path / "portable.so").rename(tmp_path / "native" / "portable.so")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: found)
    assert library.list_isas() == ["portable"]
    with pytest.raises(ValueError, match="of what is compiled this processor has portable"):
        library.load_library("avx2")


@pytest.mark.usefixtures("by_itself")
@pytest.mark.parametrize("missing", ["package", "objects"])
def test_without_the_passes_it_is_said_once_and_pytorchs_operators_run(monkeypatch, tmp_path, missing):
    found = None if missing == "package" else SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: found)
    with pytest.warns(UserWarning, match=r"compiled passes are not installed; PyTorch's operators run\. When") as said:
        for _ in range(3):
            ops = backends.choose_backend({"cpu"})
    assert (ops.name, len(said)) == ("torch", 1)
    assert ops.reason == "torch: no native, the compiled passes are not installed"
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")
    backends._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose_backend({"cpu"}).name == "torch"


@needs_passes
@pytest.mark.usefixtures("by_itself")
def test_passes_that_cannot_be_loaded_give_way(monkeypatch):
    """Compiled on a machine with another libc."""

    def refuse(path: str):
        raise OSError("version `GLIBC_9.9' not found")

    library._load.cache_clear()
    monkeypatch.setattr(library.ctypes, "CDLL", refuse)
    with pytest.warns(UserWarning, match="native backend is installed but does not run.* `GLIBC_9.9'"):
        assert backends.choose_backend({"cpu"}).name == "torch"
