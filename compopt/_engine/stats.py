"""What users learn of steps: ``stats``, and a line at the first step.

The line says what is compressed, from when on, and how much is sent then. A warning would be wrong,
because nothing is; and a logger alone is not seen, because Python shows no INFO unless asked. So it
goes to the logger "compopt" where that shows INFO, else to stderr. COMPOPT_QUIET=1 silences it, and
so does a level above INFO on the logger.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .._state.buckets import Bucket
from .._wire.payload import bytes_per_value
from .when import FOREVER, ramp_of, start_of

log = logging.getLogger("compopt")


@dataclass
class Stats:
    """The last step, as this rank saw it.

    ``bytes_sent`` is what this rank handed to collectives since the step before, ``bytes_dense``
    what DDP would have. ``parameter_bytes`` is the part of it that went into gathering updated
    parameters, where state is sharded. ``grad_norm`` is the number that ``max_grad_norm`` clips by:
    of the average over ranks, before the clip. ``when`` is what ``when="auto"`` has found out, with
    the seconds of a step of each kind. ``phase`` is what the compressed tensors did: "dense",
    "skipped" (nothing was applied), or a phase of the class.
    """

    step: int = 0
    phase: str = "none"
    bytes_sent: int = 0
    bytes_dense: int = 0
    parameter_bytes: int = 0
    grad_norm: float = 0.0
    early_buckets: int = 0
    buckets: int = 0
    resent: bool = False
    skipped: int = 0
    reason: str = ""
    when: str = ""
    residual_norm: Callable[[], float] = field(default=lambda: 0.0, repr=False)


def show_line(text: str) -> None:
    """Show one line to the user, unless that is silenced."""
    if os.environ.get("COMPOPT_QUIET", "0") not in ("", "0") or log.level > logging.INFO:
        return
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info(text)
    else:
        print(f"compopt: {text}", file=sys.stderr, flush=True)


def describe_compression(
    buckets: Sequence[Bucket], values_sent: Sequence[float | None], collective: str
) -> str:
    """Describe what is compressed of ``buckets``, from when on, and how much is sent then.

    ``values_sent``: of each bucket in a compressed step. ``collective``: the dense step's.
    """
    tensors = sum(len(bucket.params) for bucket in buckets)
    compressing = [bucket for bucket in buckets if any(bucket.compressed)]
    if not compressing:
        return (
            f"none of {tensors} tensors is compressed: what has fewer than 2 dimensions or 4096 "
            "elements is averaged dense (compress=True in a parameter group compresses it)."
        )
    compressed = sum(sum(bucket.compressed) for bucket in buckets)
    starts = sorted({start_of(bucket.group) for bucket in compressing})
    ramp = max(ramp_of(bucket.group) for bucket in compressing)
    start = " and ".join(f"step {start + 1}" for start in starts)
    when = f"from {start} on" + (f", falling to their density over {ramp} steps" if ramp else "")
    if starts[0] >= FOREVER:
        when = "but stay dense, as a trial has found"
    text = f"{compressed} of {tensors} tensors are compressed, {when}."
    text += _describe_bytes(buckets, values_sent, collective)
    total = compressing[0].group.get("total_steps")
    if total is not None and starts[0] + ramp >= total:
        text += (
            f" The start takes {starts[0] + ramp} steps and the run {total} (total_steps): lower "
            "warmup_steps, or density_warmup_steps."
        )
    return text


def _describe_bytes(
    buckets: Sequence[Bucket], values_sent: Sequence[float | None], collective: str
) -> str:
    """Compare a compressed step's bytes with a dense one's; nothing where a class cannot tell."""
    dense = sum(bucket.numel * bucket.grad_dtype.itemsize for bucket in buckets)
    counts = [count for count in values_sent if count is not None]
    if len(counts) < len(buckets) or not dense:
        return ""
    sizes = [bytes_per_value(b.group["payload_dtype"], b.grad_dtype) for b in buckets]
    compressed = sum(count * size for count, size in zip(counts, sizes, strict=True))
    first = sum(bucket.numel * size for bucket, size in zip(buckets, sizes, strict=True))
    return (
        f" A step then sends {compressed / dense:.1%} of the bytes of {collective} of the "
        f"gradients, a dense one before it {first / dense:.0%}."
    )
