"""What users learn of steps: ``stats``, errors, and a line at the first step.

The line says what is compressed, from when on, and how much is sent then. A warning would be wrong,
because nothing is; and a logger alone is not seen, because Python shows no INFO unless asked. So it
goes to the logger "compopt" where that shows INFO, else to stderr. COMPOPT_QUIET=1 silences it, and
so does a level above INFO on the logger.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from .._wire.collectives import Communicator, get_rank
from .._wire.payload import bytes_per_value
from .._wire.requests import CommunicationError
from .decision import StepDecision
from .session import Session
from .stats import Stats
from .weakly import weakly
from .when import FOREVER, ramp_of, start_of

log = logging.getLogger("compopt")


def report(session: Session, decision: StepDecision, sent: int, number: int) -> None:
    """Renew ``stats`` after step ``number`` was applied or skipped; ``sent``: bytes, in it."""
    applied = decision.applied
    phase = "+".join(sorted(set(decision.phase_of.values()))) or "dense"
    gathered = sum(bucket.parameter_bytes for bucket in session.buckets)
    stats = Stats(
        step=number,
        phase=phase if applied else "skipped",
        bytes_sent=sent,
        bytes_dense=sum(bucket.dense_bytes for bucket in session.buckets),
        parameter_bytes=gathered if applied else 0,
        grad_norm=decision.norm,
        early_buckets=decision.early_buckets,
        buckets=len(session.buckets),
        resent=decision.resent,
        skipped=session.stats.skipped + (not applied),
        reason="" if applied else "non-finite gradient: " + ", ".join(decision.non_finite[:3]),
        residual_norm=weakly(session.residual_norm),
        when=session.trial_result,
    )
    session.stats = session.face.add_to_stats(stats, decision)


def error_of_misplaced(session: Session, decision: StepDecision) -> CommunicationError:
    """The error where payloads of different buckets or steps met."""
    where = ", ".join(
        f"bucket {i}, of {session.buckets[i].names[0]}" if i >= 0 else "another shard"
        for i in decision.misplaced
    )
    return CommunicationError(
        f"payloads of different buckets or steps met ({where}): ranks start their "
        "collectives in different order, or are steps apart. Run backward and step() "
        "equally often on all ranks."
    )


def error_of_skips(session: Session, applied: bool) -> FloatingPointError | None:
    """Count consecutive skipped steps; return the error where they are too many."""
    session.consecutive_skips = 0 if applied else session.consecutive_skips + 1
    if session.consecutive_skips < session.face.max_skipped:
        return None
    return FloatingPointError(
        f"{session.consecutive_skips} steps in a row were skipped, the last because of "
        f"{session.stats.reason}: lower the learning rate or look for what makes the loss "
        "overflow (max_skipped is the limit)."
    )


def describe_compression(session: Session, comm: Communicator) -> None:
    """Show the line of the first step, on rank 0, where the class compresses at all."""
    groups = session.option_groups
    if comm.rank == 0 == get_rank() and groups and all("when" in group for group in groups):
        show_line(f"{session.name}: {' '.join(sentences(session, comm))}")


def show_line(text: str) -> None:
    is_quiet = os.environ.get("COMPOPT_QUIET", "0") not in ("", "0") or log.level > logging.INFO
    if is_quiet:
        return
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info(text)
    else:
        print(f"compopt: {text}", file=sys.stderr, flush=True)


def sentences(session: Session, comm: Communicator) -> list[str]:
    tensors = sum(len(bucket.params) for bucket in session.buckets)
    compressing = [bucket for bucket in session.buckets if any(bucket.compressed)]
    compressed = sum(sum(bucket.compressed) for bucket in session.buckets)
    if session.is_single_process:
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
        *share(session, comm),
        *too_long(compressing[0].group, starts[0], ramp),
    ]


def when(starts: list[int], ramp: int) -> str:
    if starts[0] >= FOREVER:
        return "but stay dense, as a trial has found"
    said = " and ".join(f"step {start + 1}" for start in starts)
    return f"from {said} on" + (f", falling to their density over {ramp} steps" if ramp else "")


def share(session: Session, comm: Communicator) -> list[str]:
    """How much a step sends when the start is over, where the class can say that."""
    sent = [session.face.values_sent(bucket, comm.size) for bucket in session.buckets]
    if None in sent:
        return []
    pairs = list(zip(session.buckets, sent, strict=True))
    dense = sum(bucket.numel * bucket.grad_dtype.itemsize for bucket, _ in pairs)
    if not dense:  # no tensor has elements
        return []
    usual = "a reduce-scatter" if session.face.reduces_inside else "an all-reduce"
    values = [bytes_per_value(b.group["payload_dtype"], b.grad_dtype) for b, _ in pairs]
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
