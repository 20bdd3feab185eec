"""What is said to the user while a program goes on."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

import torch

OURS = tuple(
    f"{Path(module).resolve().parents[n]}/" for module, n in ((__file__, 1), (torch.__file__, 0))
)
# A trainer, say, that calls step() for the user.
INSTALLED = tuple(f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("purelib", "platlib"))


def warn(message: str, rank: int) -> None:
    """Warn where ``rank`` is 0, once for all ranks, at the line of the user's that led here.

    However many frames of this package, of torch (schedulers wrap ``step``, scalers call it) and of
    other installed packages are between.
    """
    if rank != 0:
        return
    frame = _users_frame()
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
    """The file and the line of the user's that led here."""
    frame = _users_frame()
    return frame.f_code.co_filename, frame.f_lineno


def _users_frame() -> FrameType:
    """The innermost frame of neither; where all are, of another package; else the outermost."""
    frame: FrameType | None = sys._getframe(1)
    other: FrameType | None = None
    while frame is not None:
        last, path = frame, str(Path(frame.f_code.co_filename).resolve())
        if not path.startswith(OURS):
            if not path.startswith(INSTALLED):
                return frame
            other = other or frame
        frame = frame.f_back
    return other or last
