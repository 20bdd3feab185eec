"""Rows of bench/launches.py for a small model, and two of a step that waits: for test_devices.py, as JSON.

A process of its own: here Triton is not interpreted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import launches
from _fake_ranks import fake_ranks
from launches import DEVICE, Counts, counting_device

import compopt
import compopt._state.buckets as dealing
from compopt._backends.triton.triton_ops import TritonOps
from compopt._state.buckets import bucket_bytes, make_buckets

SMALL = dict(width=128, layers=2, words=500, places=64)  # 28 tensors in one bucket, 10 of them compressed
encode = TritonOps.encode


def counted(name: str) -> dict[str, Any]:
    row, counts = launches.count(name, launches.gpt2(**SMALL))
    return row | {"at": dict(counts.at)}


def after(look: Callable[[Any], object]) -> dict[str, Any]:
    """AdamS, where something of each message is looked at when it is made."""

    def looks(*args: Any, **options: Any) -> Any:
        payload = encode(*args, **options)
        look(payload)
        return payload

    TritonOps.encode = looks
    try:
        return counted("AdamS")
    finally:
        TritonOps.encode = encode


def checked_steps(every: int) -> list[tuple[int, int]]:
    """Launches and waits of the first steps of AdamS with this interval of the replica check."""
    counted = []
    with fake_ranks(launches.RANKS), counting_device("triton"), Counts() as counts:
        optimizer = compopt.AdamS(launches.gpt2(**SMALL))
        optimizer.check_replicas_every = every
        for _ in range(9):
            counts.clear()
            optimizer.step()
            counted.append((counts.launches, counts.waits))
    return counted


if __name__ == "__main__":
    results = {name: counted(name) for name in launches.ROWS}
    results["a number is asked for"] = after(lambda payload: float(payload.body.sum()))
    results["a copy is waited for"] = after(lambda payload: payload.header.cpu())
    results["checked"] = {every: checked_steps(every) for every in (0, 100)}
    most, dealing.DEVICE_BUCKET_BYTES = dealing.DEVICE_BUCKET_BYTES, 2**13
    results["bucket by bucket"] = {name: counted(name) for name in ("AdamS", "Radius .4, sparse", "SCAPE .01")}
    dealing.DEVICE_BUCKET_BYTES = most
    buckets = make_buckets([{"params": launches.gpt2()}])
    results["buckets"] = {"most": bucket_bytes(DEVICE), "all": [(len(b.params), 4 * b.numel) for b in buckets]}
    # last: this process keeps its device
    results["TAGC .0125"] = launches.tagc(64, 5, 500, 2**19)
    results["bucket by bucket"]["TAGC .0125"] = launches.tagc(64, 5, 500, 2**15)
    print(json.dumps(results))
