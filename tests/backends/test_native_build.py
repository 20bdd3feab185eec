"""The kept library: built once, checked before it is loaded, built anew where it is damaged or cannot be loaded."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import HANG_GUARD

from compopt._backends import choice as backends
from compopt._backends.native import build

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C compiler")


# A compiler in place of the real one, once that has built the library: it hands out the same file in no time, as
# writable as a compiler's output is with umask 0.
COPIES = """#!/bin/sh
[ "$1" = --version ] && exec {real} --version
while [ "$1" != -o ]; do shift; done
exec install -m 777 {library} "$2"
"""


def program(path: Path, text: str) -> str:
    """A script to be run in place of a compiler."""
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> str:
    """A compiler that takes no time: what the real one builds, which is not for speed here, it builds once."""
    folder, real = tmp_path_factory.mktemp("quick"), build.find_compiler()
    unoptimised = program(folder / "unoptimised", f'#!/bin/sh\nexec {real} "$@" -O0\n')
    library = build.build_library(unoptimised, "", folder)
    return program(folder / "cc", COPIES.format(real=real, library=library))


@pytest.fixture
def cache(monkeypatch, tmp_path, quick) -> Path:
    """A cache of this test's own."""
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", quick)
    build._load_once.cache_clear()
    backends._warn_of_failure.cache_clear()
    yield tmp_path / "compopt"
    build._load_once.cache_clear()


def built(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return build.build_library(build.find_compiler(), "", folder)


def test_a_compiler_that_fails_gives_way(monkeypatch, cache):
    monkeypatch.setenv("CC", program(cache.parent / "cc", "#!/bin/sh\necho no disk >&2\nexit 1\n"))
    with pytest.warns(UserWarning, match="native backend is installed but does not run.* no disk"):
        assert backends.choose_backend({"cpu"}).name == "torch"
    assert not list(cache.glob("*"))


def test_the_library_is_built_once(cache):
    first = built(cache)
    stamp = first.stat().st_mtime_ns
    assert built(cache) == first and first.stat().st_mtime_ns == stamp
    assert [p.name for p in cache.iterdir()] == [first.name]


STEP = "import torch, compopt; o = compopt.AdamS([torch.nn.Parameter(torch.zeros(3))]); print(o.backend)"


@pytest.mark.parametrize("is_empty", [pytest.param(True, marks=pytest.mark.slow), False], ids=["empty", "changed"])
def test_a_damaged_library_is_never_loaded(cache, is_empty):
    """Truncated it would end the process with SIGBUS, of zero length never be built again: seen from outside, here."""
    whole = built(cache)
    contents = whole.read_bytes()
    middle = len(contents) // 2
    other = contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]
    whole.write_bytes(b"" if is_empty else other)
    assert built(cache).read_bytes() == contents
    whole.write_bytes(contents[: middle // 4096 * 4096])
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=HANG_GUARD)
    assert (done.returncode, done.stdout.strip()) == (0, "native"), done.stderr
    assert built(cache).read_bytes() == contents


def test_what_cannot_be_loaded_or_kept_is_built_for_this_process_alone(monkeypatch, cache):
    """A library made for another libc; a home where nothing can be written."""
    loads, real = [], ctypes.CDLL

    def refuse(path: str):
        loads.append(path)
        if path.startswith(str(cache)):
            raise OSError("version `GLIBC_9.9' not found")
        return real(path)

    monkeypatch.setattr(build.ctypes, "CDLL", refuse)
    assert backends.choose_backend({"cpu"}).name == "native"
    assert len(loads) == 2 and not Path(loads[1]).exists()
    build._load_once.cache_clear()
    monkeypatch.setattr(build.ctypes, "CDLL", real)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert backends.choose_backend({"cpu"}).name == "native"


@pytest.mark.parametrize("part", ["compiler", "libc", "processor", "isa"])
def test_the_name_says_what_it_was_made_of(monkeypatch, cache, part):
    cc, first = build.find_compiler(), built(cache).name
    if part == "isa":
        assert build.build_library(cc, "portable", cache).name.startswith("native-portable-")
        return
    if part == "compiler":
        message = '[ "$1" = --version ] && echo cc 99 && exit'
        cc = program(cache / "cc", f'#!/bin/sh\n{message}\nexec {cc} "$@"\n')
    elif part == "libc":
        monkeypatch.setattr(build.platform, "libc_ver", lambda: ("musl", "1.2"))
    else:
        monkeypatch.setattr(build, "_processor", lambda: b"flags: fpu")
    assert build.build_library(cc, "", cache).name != first


OTHER = 4242  # a user id that is not ours
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


def plant(folder: Path) -> Path:
    """A library that somebody else has put into the cache: its name is right, its contents are theirs."""
    ours = built(folder)
    ours.rename(planted := folder / "planted")
    planted.write_bytes(b"\x7fELF and what follows")
    named = folder / build._name_of(ours.name.rsplit("-", 1)[0], planted)
    return planted.rename(named)


@pytest.mark.parametrize(
    "fault",
    ["group may write", "others may write", pytest.param("another owner", marks=needs_root), "symlink", "folder"],
)
def test_a_file_that_another_user_could_have_written_is_built_anew(cache, fault):
    planted = plant(cache)
    contents = planted.read_bytes()
    if fault == "another owner":
        os.chown(planted, OTHER, -1)
    elif fault == "symlink":
        planted.rename(elsewhere := cache.parent / "elsewhere")
        planted.symlink_to(elsewhere)
    elif fault == "folder":
        planted.unlink()
        planted.mkdir()
    else:
        planted.chmod(0o720 if fault == "group may write" else 0o702)
    ours = built(cache)
    assert ours != planted and ours.read_bytes() != contents
    assert built(cache) == ours, "and it is kept"


def test_a_file_of_the_same_name_is_replaced_if_another_user_could_have_written_it(cache):
    ours = built(cache)
    ours.chmod(0o777)
    assert built(cache) == ours
    assert ours.stat().st_mode & 0o022 == 0


def test_nobody_else_may_write_what_is_kept_whatever_the_umask(monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent / "new" / "home"))
    before = os.umask(0)
    try:
        assert backends.choose_backend({"cpu"}).name == "native"
    finally:
        os.umask(before)
    new = cache.parent / "new"
    (kept,) = (new / "home" / "compopt").iterdir()
    for path in (new, new / "home", kept.parent, kept):
        assert path.stat().st_mode & 0o022 == 0, path


@pytest.fixture
def loaded(monkeypatch) -> list[Path]:
    """The paths of the libraries that were loaded."""
    paths, load = [], ctypes.CDLL
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: paths.append(Path(path)) or load(path))
    return paths


@pytest.mark.parametrize(
    "fault",
    [
        "group may write",
        "others may write",
        "others may write, sticky",
        pytest.param("another owner", marks=needs_root),
        "parent: others may write",
        pytest.param("parent: another owner", marks=needs_root),
        pytest.param("parent: another owner, sticky", marks=needs_root),
        "symlink to a folder that others may write",
    ],
)
def test_a_folder_where_another_user_may_write_is_not_used(monkeypatch, cache, loaded, fault):
    kept = built(cache)
    changed = cache.parent if fault.startswith("parent") else cache
    if "another owner" in fault:
        os.chown(changed, OTHER, -1)
        changed.chmod(0o1755 if "sticky" in fault else 0o755)
    elif fault.startswith("symlink"):
        cache.rename(changed := cache.parent / "shared")
        changed.chmod(0o777)
        cache.symlink_to(changed)
    else:
        changed.chmod(0o775 if "group" in fault else 0o1777 if "sticky" in fault else 0o777)
    with pytest.warns(UserWarning, match=f"compiled anew.*{changed} .*XDG_CACHE_HOME"):
        assert backends.choose_backend({"cpu"}).name == "native"
    (path,) = loaded
    assert changed not in path.parents and not path.exists()
    assert kept.name == path.name


@pytest.mark.parametrize("case", ["sticky parent", "symlink to a folder of our own"])
def test_a_folder_where_nobody_else_may_write_is_used(cache, loaded, case):
    kept = built(cache)
    if case == "sticky parent":
        cache.parent.chmod(0o1777)
    else:
        cache.rename(elsewhere := cache.parent / "elsewhere")
        cache.symlink_to(elsewhere)
    assert backends.choose_backend({"cpu"}).name == "native"
    assert loaded == [kept.resolve()]


def test_it_is_loaded_with_another_default_dtype(cache):
    torch.set_default_dtype(torch.float64)
    try:
        assert backends.choose_backend({"cpu"}).name == "native"
    finally:
        torch.set_default_dtype(torch.float32)


# Where nothing can be kept


def in_cache_it_fails(compiler: str, cache: Path) -> str:
    """A compiler that finds the disk of the cache full."""
    full = f'case "$*" in *{cache}/*) echo No space left on device >&2; exit 1;; esac'
    return program(cache.parent / "full", f'#!/bin/sh\n{full}\nexec {compiler} "$@"\n')


@pytest.mark.parametrize("fault", ["no home", "full disk"])
def test_without_a_home_or_room_in_it_the_library_is_built_for_this_process_alone(monkeypatch, cache, loaded, fault):
    if fault == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # the user has no entry
    else:
        monkeypatch.setenv("CC", in_cache_it_fails(os.environ["CC"], cache))
    assert backends.choose_backend({"cpu"}).name == "native"
    assert [path.exists() for path in loaded] == [False]
    assert not list(cache.glob("*"))


def test_private_folders_of_killed_builds_are_removed_by_a_later_one(monkeypatch, cache):
    places = [cache.parent / "tmp" / f"{build.BUILDING}{name}" for name in ("killed", "running")]
    for place in places:
        place.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(places[0].parent))
    os.utime(places[0], times=(0, time.time() - 3 * build.LIMIT))
    monkeypatch.setenv("CC", in_cache_it_fails(os.environ["CC"], cache))
    assert backends.choose_backend({"cpu"}).name == "native"
    assert list(places[0].parent.iterdir()) == [places[1]]


# A compiler that hangs; several processes

HANGS = """#!/bin/sh
[ "$1" = {answers} -o -e {repaired} ] && exec {quick} "$@"
echo $$ >> {calls}
sleep 600 &
echo $! >> {sleeping}
wait
"""


@pytest.fixture
def hanging(monkeypatch, cache, quick, request) -> tuple[Path, Path, Path]:
    """Files of a compiler that hangs: its calls, and the processes it runs; if the third exists, it does not hang."""
    answers = getattr(request, "param", "--version")
    files = {name: cache.parent / name for name in ("calls", "sleeping", "repaired")}
    text = HANGS.format(answers=answers, quick=quick, **files)
    monkeypatch.setenv("CC", program(cache.parent / "hangs", text))
    yield tuple(files.values())
    for pid in files["sleeping"].read_text().split():
        if is_running(pid):
            os.kill(int(pid), signal.SIGKILL)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition) -> None:
    end = time.monotonic() + 60  # of what takes milliseconds, or one start of Python
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("hanging", ["nothing", "--version"], indirect=True)
def test_a_compiler_that_hangs_is_ended_once_and_said_once(monkeypatch, cache, hanging):
    monkeypatch.setattr(build, "LIMIT", 0.3)
    calls, sleeping, _ = hanging
    with pytest.warns(UserWarning, match=r"hangs has not finished within 0.3 s.* COMPOPT_BACKEND=torch") as said:
        for _ in range(3):
            assert backends.choose_backend({"cpu"}).name == "torch"
    assert len(said) == len(calls.read_text().split()) == 1
    wait_until(lambda: not any(map(is_running, sleeping.read_text().split())))
    assert not list(cache.glob("*"))


def lock(folder: Path, name: str):
    """The lock of a process that compiles the library of this name."""
    folder.mkdir(exist_ok=True)
    file = (folder / f"{name}.lock").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@pytest.mark.parametrize("ends", ["built", "failed", "killed"])
def test_a_process_waits_for_the_one_that_compiles(monkeypatch, cache, loaded, ends):
    ours = built(cache)
    contents, name = ours.read_bytes(), ours.name.rsplit("-", 1)[0]
    ours.unlink()
    running, waits = lock(cache, name), []

    def end(seconds: float) -> None:
        waits.append(seconds)
        if ends == "built":
            ours.write_bytes(contents)
            ours.chmod(0o700)
        if ends != "killed":
            os.unlink(running.name)
        running.close()

    monkeypatch.setattr(build, "time", SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=end))
    assert backends.choose_backend({"cpu"}).name == "native"
    assert len(waits) == 1
    assert [path.exists() for path in loaded] == [ends == "built"], "else it is built for this process alone"
    loaded.clear()
    build._load_once.cache_clear()
    assert backends.choose_backend({"cpu"}).name == "native"
    assert loaded == [ours] == list(cache.iterdir())


def test_a_process_that_has_waited_for_too_long_does_without(monkeypatch, cache):
    name = built(cache).name.rsplit("-", 1)[0]
    for path in cache.iterdir():
        path.unlink()
    monkeypatch.setattr(build, "LIMIT", 0.1)
    with lock(cache, name), pytest.warns(UserWarning, match=r"another process has been compiling for 0.1 s"):
        assert backends.choose_backend({"cpu"}).name == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose_backend({"cpu"}).name == "torch", "as before: ranks have agreed on it"


def test_where_files_cannot_be_locked_each_process_compiles(monkeypatch, cache, loaded):
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(build.fcntl, "flock", refuse)
    assert backends.choose_backend({"cpu"}).name == "native"
    assert loaded == list(cache.iterdir())


COMPILE = (
    "from compopt._backends.native import build; build.build_library(build.find_compiler(), '', build._cache_folder())"
)


@pytest.mark.slow
def test_a_build_that_was_killed_leaves_nothing_behind_once_another_one_has_run(cache, hanging):
    calls, _, repaired = hanging
    killed = subprocess.Popen([sys.executable, "-c", COMPILE])
    wait_until(calls.exists)
    killed.kill()
    killed.wait()
    os.killpg(int(calls.read_text()), signal.SIGKILL)
    assert len(list(cache.iterdir())) == 2, "its lock and its folder"
    other = cache / f"{build.BUILDING}native-avx2-of-another-machine"
    other.mkdir()
    repaired.touch()
    ours = built(cache)
    assert {*cache.iterdir()} == {ours, other}
