"""Warnings, attributed to the line of the user's code that caused them.

Used for all warnings, by ``Engine.warn_once`` and others.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

import torch

# this package and torch, whose schedulers wrap ``step`` and whose scalers call it
SKIPPED = tuple(
    f"{Path(module).resolve().parents[n]}/" for module, n in ((__file__, 1), (torch.__file__, 0))
)
# other installed packages: a trainer, for example, calls step() for the user
INSTALLED = tuple(f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("purelib", "platlib"))


def warn_on_rank_0(message: str, rank: int) -> None:
    """Warn if ``rank``, that of this process, is 0: once for all ranks."""
    if rank == 0:
        warn(message)


def warn(message: str) -> None:
    """Warn, whatever this process's rank is, at the user's line that led here."""
    frame = _find_user_frame()
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get("__name__", "<unknown>"),
        registry=names.setdefault("__warningregistry__", {}),
    )


def user_location() -> tuple[str, int]:
    """Return the file and the line of the user's code that led here."""
    frame = _find_user_frame()
    return frame.f_code.co_filename, frame.f_lineno


def _find_user_frame() -> FrameType:
    """Return the innermost frame outside this package, torch and all installed packages; if there
    is none, the innermost outside this package and torch; else the outermost.
    """
    frame: FrameType | None = sys._getframe(1)
    other: FrameType | None = None
    while frame is not None:
        last, path = frame, str(Path(frame.f_code.co_filename).resolve())
        if not path.startswith(SKIPPED):
            if not path.startswith(INSTALLED):
                return frame
            other = other or frame
        frame = frame.f_back
    return other or last


def warn_at(location: tuple[str, int], message: str) -> None:
    """Warn of something that this file and line began."""
    warnings.warn_explicit(message, UserWarning, *location)
