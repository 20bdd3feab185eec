"""Where a warning points."""

from __future__ import annotations

import sys
from pathlib import Path

OURS = str(Path(__file__).parents[1])


def users_line() -> int:
    """The ``stacklevel``, for whoever calls this, of the nearest caller outside of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(OURS) or "/torch/" in frame.f_code.co_filename
    ):
        level, frame = level + 1, frame.f_back
    return level
