"""Folders and files that another user could have written are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compopt.integrations._snapshot_files import Untrusted, check_own, make_own_folder

OTHER = 4242  # a user id that is not ours
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.mark.parametrize(
    "fault", ["group may write", "others may write", pytest.param("another owner", marks=needs_root), "symlink"]
)
def test_a_file_that_another_user_could_have_written_is_refused(tmp_path, fault):
    path = tmp_path / "file"
    path.touch(0o600)
    check_own(path)
    if fault == "another owner":
        os.chown(path, OTHER, -1)
    elif fault == "symlink":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.chmod(0o620 if fault == "group may write" else 0o602)
    with pytest.raises(Untrusted, match=str(path)):
        check_own(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    """One of our own, in another one."""
    return make_own_folder(tmp_path / "above" / "own")


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
def test_a_folder_where_another_user_may_write_is_refused(folder, fault):
    changed = folder.parent if fault.startswith("parent") else folder
    if "another owner" in fault:
        os.chown(changed, OTHER, -1)
        changed.chmod(0o1755 if "sticky" in fault else 0o755)
    elif fault.startswith("symlink"):
        folder.rename(changed := folder.parent / "shared")
        changed.chmod(0o777)
        folder.symlink_to(changed)
    else:
        changed.chmod(0o775 if "group" in fault else 0o1777 if "sticky" in fault else 0o777)
    with pytest.raises(Untrusted, match=f"^{changed} "):
        make_own_folder(folder)


def test_a_folder_where_nobody_else_may_write_is_used(folder):
    folder.parent.chmod(0o1777)
    assert make_own_folder(folder) == folder
    folder.rename(elsewhere := folder.parent / "elsewhere")
    folder.symlink_to(elsewhere)
    assert make_own_folder(folder) == elsewhere


def test_nobody_else_may_write_what_is_made_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = make_own_folder(tmp_path / "new" / "own")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]
