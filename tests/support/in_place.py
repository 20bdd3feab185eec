"""Scripts run inside a process that is there already: what a test of many would spend on importing torch, it saves."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"


def as_torchrun_would(rank: int, size: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "MASTER_PORT": "29500"}


@contextlib.contextmanager
def in_place():
    """The process group exists already, and stays; what is printed is collected."""
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield printed


def example(name: str, *options: str) -> str:
    """Return what examples/NAME.py prints with these options."""
    sys.path.insert(0, str(EXAMPLES))
    with in_place() as printed, mock.patch.object(sys, "argv", [name, *options]):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()
