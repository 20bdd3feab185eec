"""Rows of bench/launches.py for a small model, and two of a commit that waits: for test_launches.py, as JSON.

A process of its own: here Triton is not interpreted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import launches
from _hollow import DEVICE

import compopt.adams
from compopt._state.buckets import bucket_bytes, make_buckets

SMALL = dict(width=128, layers=2, words=500, places=64)  # 28 tensors in one bucket, 10 of them compressed
commit = compopt.adams.commit


def counted(name: str) -> dict[str, Any]:
    row, counts = launches.count(name, launches.gpt2(**SMALL))
    return row | {"at": dict(counts.at)}


def after(look: Callable[[Any], object]) -> dict[str, Any]:
    """AdamS, where the commit looks at something first."""

    def looks(bucket: Any, ops: Any, mean: Any) -> None:
        look(mean)
        commit(bucket, ops, mean)

    compopt.adams.commit = looks
    try:
        return counted("AdamS")
    finally:
        compopt.adams.commit = commit


if __name__ == "__main__":
    found = {name: counted(name) for name in launches.ROWS}
    found["a number is asked for"] = after(lambda mean: float(mean.body.sum()))
    found["a copy is waited for"] = after(lambda mean: mean.header.cpu())
    buckets = make_buckets([{"params": launches.gpt2()}])
    found["buckets"] = {"most": bucket_bytes(DEVICE), "all": [(len(b.params), 4 * b.numel) for b in buckets]}
    print(json.dumps(found))
