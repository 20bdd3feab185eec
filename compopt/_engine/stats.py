"""What the last step did, for logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


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
