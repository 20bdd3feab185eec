"""Folders and files that nobody but this user can have written: snapshots to resume from."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class Untrusted(Exception):
    """Another user may write a file or folder, or replace it; the message says which and why."""


def make_own_folder(folder: Path) -> Path:
    """Return the folder without symbolic links in its path; create what is missing of it, for this
    user alone.

    Raises:
        Untrusted: another user may write it, or rename it by writing one of its parents.
    """
    folder = folder.resolve()
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raise Untrusted if another user may write a folder, or rename it by writing a parent."""
    check_own(folder)
    user, system = os.geteuid(), {0, os.stat("/").st_uid}
    for path in folder.parents:
        status = path.stat()
        if status.st_uid not in {user, *system}:
            raise Untrusted(f"{path} belongs to the user {status.st_uid}")
        # Only its owner renames an entry of a sticky folder.
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise Untrusted(f"{path} is writable for others ({stat.filemode(status.st_mode)})")


def check_own(path: Path) -> None:
    """Raise Untrusted unless a file or folder belongs to this user, and nobody else may write it.

    A symbolic link is refused too: who writes its target is not known.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise Untrusted(f"{path} is a symbolic link")
    if status.st_uid != os.geteuid():
        raise Untrusted(f"{path} belongs to the user {status.st_uid}")
    if status.st_mode & 0o022:
        raise Untrusted(f"{path} is writable for others ({stat.filemode(status.st_mode)})")
