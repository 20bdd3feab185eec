"""What an optimizer says once, at its first step: what it compresses, from when on, and how much is
sent then.

A warning would be wrong, for nothing is; and a logger alone is not seen, for Python shows no INFO
unless somebody asks. So it goes to the logger "compopt" where that shows INFO, else to stderr.
COMPOPT_QUIET=1 silences it, and so does a level above INFO on the logger.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from .._wire.comm import Comm, rank_here
from .._wire.dtypes import bytes_of_value
from .when import FOREVER, ramp_of, start_of

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("compopt")


def tell(engine: Engine, comm: Comm) -> None:
    """Say it, on rank 0, where the class compresses at all."""
    groups = engine.option_groups
    if comm.rank == 0 == rank_here() and groups and all("when" in group for group in groups):
        say(f"{engine.name}: {' '.join(sentences(engine, comm))}")


def say(text: str) -> None:
    quiet = os.environ.get("COMPOPT_QUIET", "0") not in ("", "0") or log.level > logging.INFO
    if quiet:
        return
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info(text)
    else:
        print(f"compopt: {text}", file=sys.stderr, flush=True)


def sentences(engine: Engine, comm: Comm) -> list[str]:
    tensors = sum(len(bucket.params) for bucket in engine.buckets)
    compressing = [bucket for bucket in engine.buckets if any(bucket.compressed)]
    compressed = sum(sum(bucket.compressed) for bucket in engine.buckets)
    if engine.dense:
        return [
            "there are no other ranks, so every step is the base's and nothing is sent "
            "(simulate=True compresses all the same)."
        ]
    if not compressed:
        return [
            f"none of {tensors} tensors is compressed: what has fewer than 2 dimensions or 4096 "
            "elements is averaged dense (compress=True in a parameter group compresses it)."
        ]
    starts = sorted({start_of(bucket.group) for bucket in compressing})
    ramp = max(ramp_of(bucket.group) for bucket in compressing)
    return [
        f"{compressed} of {tensors} tensors are compressed, {when(starts, ramp)}.",
        *share(engine, comm),
        *too_long(compressing[0].group, starts[0], ramp),
    ]


def when(starts: list[int], ramp: int) -> str:
    if starts[0] >= FOREVER:
        return "but stay dense, as a trial has found"
    said = " and ".join(f"step {start + 1}" for start in starts)
    return f"from {said} on" + (f", falling to their density over {ramp} steps" if ramp else "")


def share(engine: Engine, comm: Comm) -> list[str]:
    """How much a step sends when the start is over, where the class can say that."""
    sent = [engine.face.values_sent(bucket, comm.size) for bucket in engine.buckets]
    if None in sent:
        return []
    pairs = list(zip(engine.buckets, sent, strict=True))
    dense = sum(bucket.numel * bucket.grad_dtype.itemsize for bucket, _ in pairs)
    if not dense:  # no tensor has elements
        return []
    usual = "a reduce-scatter" if engine.face.reduces_inside else "an all-reduce"
    values = [bytes_of_value(b.group["payload_dtype"], b.grad_dtype) for b, _ in pairs]
    then = sum(n * size for (_, n), size in zip(pairs, values, strict=True) if n is not None)
    first = sum(bucket.numel * size for (bucket, _), size in zip(pairs, values, strict=True))
    return [
        f"A step then sends {then / dense:.1%} of the bytes of {usual} of the gradients, a dense "
        f"one before it {first / dense:.0%}."
    ]


def too_long(group: dict[str, Any], start: int, ramp: int) -> list[str]:
    total = group.get("total_steps")
    if total is None or start + ramp < total:
        return []
    return [
        f"The start takes {start + ramp} steps and the run {total} (total_steps): lower "
        "warmup_steps, or density_warmup_steps."
    ]
