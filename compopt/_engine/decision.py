"""The step decision: all ranks apply a step, skip it, or raise.

Every rank decides from numbers that are equal on all ranks: the averaged headers and control fields
of the payloads, and the norm of the average. If ranks hold different parts of the model, or of the
averaged gradient, one more message combines their decisions. ``read_decision`` has the rules for
all cases.

The control fields, whose means over ranks all ranks know:

- in every payload: "stamp", the bucket and the step to which it belongs; "failed", 1 if this rank
  takes part without its gradients.
- in the last bucket's payload: "settings", bits of a checksum of the settings; "stale", 1 if
  gradients were changed after backward had sent them; "unfrozen", 1 if ``requires_grad`` was
  changed; "waits", the wait times of the rank whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from .._ops.norms import squared_norms
from .._wire.collectives import Communicator
from .._wire.in_flight import profiler_range
from .._wire.payload import bits_differ
from .exchange import BucketExchange, sum_over_groups

ELSEWHERE = -1  # the index of a bucket that another rank of the model holds


@dataclass
class StepDecision:
    """The outcome of one step, which all ranks share, and the reasons for it.

    A step with ``non_finite`` gradients is skipped. It fails if ranks are ``mismatched``, if it
    ``has_failed_rank``, or if payloads are ``misplaced``.
    """

    exchanges: list[BucketExchange] = field(default_factory=list)
    # the global L2 norm of the averaged gradient
    norm: float = 0.0
    # the phase of each bucket that has compressed tensors, by its index
    phase_of: dict[int, str] = field(default_factory=dict)
    # the mean over ranks of the last bucket's control fields
    control_means: dict[str, list[float]] = field(default_factory=dict)
    # tensors with a non-finite gradient on some rank
    non_finite: list[str] = field(default_factory=list)
    # ranks have different settings
    mismatched: bool = False
    # a rank could not send its gradients
    has_failed_rank: bool = False
    # indices of buckets whose payload met one of another bucket or step
    misplaced: list[int] = field(default_factory=list)
    # the sum of the replica check, read; None if none was due
    replica_sum: Tensor | None = None
    early_buckets: int = 0  # buckets whose payload from backward was used
    resent: bool = False  # payloads from backward were stale, and were sent again

    @property
    def failed(self) -> bool:
        """True if all ranks must raise."""
        return bool(self.mismatched or self.has_failed_rank or self.misplaced)

    @property
    def applied(self) -> bool:
        """True if the step is neither skipped nor failed."""
        return not (self.non_finite or self.failed)

    def take_error(self, known: Exception | None = None) -> Exception | None:
        """Return why this rank could not send its gradients: ``known``, or an exchange's error.

        The exchanges drop their errors, whose tracebacks refer to them (a reference cycle).
        """
        errors = [exchange.error for exchange in self.exchanges if exchange.error is not None]
        for exchange in self.exchanges:
            exchange.error = None
        return known or (errors[0] if errors else None)


def read_decision(
    exchanges: list[BucketExchange], replica_sum: Tensor | None = None
) -> StepDecision:
    """Decide from the averages of these exchanges. The host waits for the device here.

    ``replica_sum``: of the replica check, which is read too.
    """
    with profiler_range("compopt::decide"):
        squares, fields, replica_sum = read_scalars(exchanges, replica_sum)
    decision, has_dropped = StepDecision(exchanges, replica_sum=replica_sum), False
    for exchange, numbers in zip(exchanges, fields, strict=True):
        bucket, payload = exchange.bucket, exchange.agreement.payload
        gradient_flags, controls = numbers[: len(payload.header)], numbers[len(payload.header) :]
        payload.have_gradients = [flag > 0 for flag in gradient_flags]
        control = exchange.control.split(controls)
        decision.control_means = control  # at the end the last bucket's, with the step's fields
        pairs = zip(bucket.names, gradient_flags, strict=True)
        decision.non_finite += [name for name, flag in pairs if flag != flag]
        decision.has_failed_rank |= control["failed"][0] > 0
        decision.misplaced += [bucket.index] if bits_differ(control["stamp"]) else []
        # NaN counts as a gradient: the step is skipped anyway
        has_dropped |= drop_absent(exchange, [flag != 0 for flag in gradient_flags])
        if any(bucket.compressed):
            decision.phase_of[bucket.index] = exchange.agreement.phase
    if has_dropped:  # the host waits once more
        norms = compute_norms(exchanges)
        again = iter(torch.cat(norms).tolist())
        squares = [sum(islice(again, norm.numel())) for norm in norms]
    total = 0.0
    for exchange, squared in zip(exchanges, squares, strict=True):
        total += squared / exchange.bucket.replicate_size
    decision.mismatched = bits_differ(decision.control_means["settings"])
    decision.norm = total**0.5
    if total != total or total == float("inf"):
        decision.non_finite = decision.non_finite or ["the average over ranks"]
    return decision


DECISION_FIELDS, FAILED = 5, 3  # the numbers of a decision that shards sum, and one of their places


def combine_decisions(
    decision: StepDecision, comms: Sequence[Communicator], device: torch.device
) -> None:
    """Combine ``decision`` with those of all ranks of ``comms``, the dimensions of a mesh. Each
    rank has averaged another part of the gradient.
    """
    if not comms:
        return
    facts = [decision.non_finite, decision.mismatched, decision.has_failed_rank, decision.misplaced]
    fields = [0.0 if decision.non_finite else decision.norm**2, *(float(bool(x)) for x in facts)]
    assert len(fields) == DECISION_FIELDS
    sums = sum_over_groups(comms, fields, device)
    squared, non_finite, mismatched, failed, misplaced = sums
    decision.norm = squared**0.5
    decision.mismatched, decision.has_failed_rank = mismatched > 0, failed > 0
    if non_finite:
        decision.non_finite = decision.non_finite or ["a tensor of another shard"]
    if misplaced:
        decision.misplaced = decision.misplaced or [ELSEWHERE]


def read_scalars(
    exchanges: list[BucketExchange], replica_sum: Tensor | None
) -> tuple[list[float], list[list[float]], Tensor | None]:
    """Read all numbers of the decision from the device, in one copy: the squared norm of each
    average, the header and the control fields of each payload, and ``replica_sum``.
    """
    device, agreements = exchanges[-1].bucket.device, [one.agreement for one in exchanges]
    fields = [agreement.payload.fields.to(device) for agreement in agreements]
    norms = compute_norms(exchanges)
    header = torch.cat(fields) if len(fields) > 1 else fields[0]
    sums = [] if replica_sum is None else [replica_sum.to(device)]
    host = torch.cat([*norms, header.double(), *sums]).cpu()
    numbers: Iterator[float] = iter(host.tolist())
    squares = [sum(islice(numbers, norm.numel())) for norm in norms]
    read = [list(islice(numbers, field.numel())) for field in fields]
    return squares, read, None if replica_sum is None else host[-1:]


def compute_norms(exchanges: list[BucketExchange]) -> list[Tensor]:
    """Return the squared norm of each average, a vector of one or several numbers, on one device;
    those that the generator has not computed, for all buckets together.
    """
    device, agreements = exchanges[-1].bucket.device, [one.agreement for one in exchanges]
    clips = any(exchange.bucket.group.get("max_grad_norm") is not None for exchange in exchanges)
    bodies = [a.payload.body for a in agreements if a.squared_norm is None]
    computed = iter(squared_norms(bodies, clips))
    norms = [next(computed) if a.squared_norm is None else a.squared_norm for a in agreements]
    return [square.to(device).view(-1) for square in norms]


def drop_absent(exchange: BucketExchange, given: list[bool]) -> bool:
    """Set to zero what an average has of the tensors without a gradient on any rank. True if it may
    have something of them.
    """
    agreement, bucket = exchange.agreement, exchange.bucket
    if "residual" not in bucket.state:
        return False
    # Which tensors may have a residual on any rank: those that have taken a step. All ranks need
    # one answer, and a rank that has just joined has no residuals of its own.
    before = bucket.had_gradients or [False] * len(given)
    if not bucket.had_gradients and bucket.group["step"] and bucket.step_counts is not None:
        before = bucket.step_counts.gt(0).tolist()
    bucket.had_gradients = [a or b for a, b in zip(before, given, strict=True)]
    if not any(had and not has for had, has in zip(before, given, strict=True)):
        return False
    if agreement.drop_absent is not None:
        agreement.squared_norm = agreement.drop_absent(given)
        return True
    if agreement.squared_norm is None:
        agreement.payload.clear_parts(given)
    return agreement.squared_norm is None
