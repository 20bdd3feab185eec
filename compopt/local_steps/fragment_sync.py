"""The sync of fragments: lines 2 to 5 of the module ``local_steps``, and what each rank announces
before its payloads.

A sync has the stages of a step: read, exchange, agree, commit. Nothing that outlives the sync is
written before the commit. All ranks decide on the same numbers, so a sync is applied on all of them
or on none.

An announcement, of which all are gathered, has what must be equal on all ranks, the rank's weight
in the mean, and the norm of its pseudo-gradient.

Ranks of unequal weights send their pseudo-gradients times ``ranks * weight / sum of weights``. The
plain mean of these is the weighted mean, so payloads need no weights.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from .._engine import handshake
from .._engine.engine import Engine
from .._engine.exchange import sum_over_groups, tell_failure
from .._engine.join import copy_options_from_ranks_with_data
from .._engine.missing_ranks import RankLeft
from .._engine.settings import checksum_settings
from .._engine.signals import defer_signals
from .._ops.norms import stacked_squared_norms
from .._wire.collectives import Communicator
from .._wire.in_flight import PendingCollective
from .._wire.requests import (
    AllGather,
    AllReduceMean,
    CallsDiffer,
    CommunicationError,
    EncodeError,
    RankSilent,
)
from .anchor_bucket import AnchorBucket, AnchoredTensor, write_params
from .anchors import Anchors, check_outer_rates
from .rounds import RoundCounts, outer_progress

ANNOUNCEMENT_BYTES = 8 * handshake.MESSAGE
ANCHOR_PARTS = 8  # the replica check compares one of these at each sync


class SyncContribution(NamedTuple):
    """A rank's contribution to a sync, or the mean of all: the weight in the average, and the steps
    and seconds since the last sync that was applied. ``is_last``: 1 if the rank waits in
    ``end_round()``. ``has_failed``: 1 if it could not begin. Their means are shares of the ranks.
    """

    weight: float = 1.0
    steps: float = 0
    seconds: float = 0.0
    is_last: float = 0.0
    has_failed: float = 0.0


class Announcement(NamedTuple):
    """The announcements of all ranks, before payloads: of each number a vector over ranks."""

    applied_syncs: Tensor
    settings: Tensor  # their checksum
    anchors: Tensor  # a checksum of the anchors; 0: not to be compared
    weight: Tensor  # from here on ``SyncContribution``
    steps: Tensor
    seconds: Tensor
    is_last: Tensor
    has_failed: Tensor
    squared_norm: Tensor  # of the pseudo-gradient
    anchor_sum: Tensor  # of a part of the anchors, as ``handshake.sum_part`` returns it

    def take_mean(self) -> SyncContribution:
        """Return the mean of the contributions."""
        own = self.weight, self.steps, self.seconds, self.is_last, self.has_failed
        return SyncContribution(*(float(values.mean()) for values in own))


class Pause:
    """Stands in place of a collective: what follows waits for ranks of this site, which may be in
    backward and wait for this one. So it has to be in ``step()``.
    """

    is_ready = is_lockstep = False


@dataclass(eq=False)
class RunningSync:
    """A sync from its beginning to its end: what this rank sends, then what all ranks have
    announced, then what they have decided.
    """

    fragments: frozenset[int]
    # the step after which it is applied; 0: at once
    apply_at: int
    contribution: SyncContribution  # this rank's
    buckets: list[AnchorBucket]
    # the squared norm of each tensor of this rank's pseudo-gradient, over all shards
    squares: Tensor
    # all communication up to the decision, as a generator, which runs beside training
    collectives: Generator[PendingCollective | Pause, None, None] | None = None
    waiting: PendingCollective | Pause | None = None  # what the generator waits for
    error: Exception | None = None  # what the generator raised while it was polled
    problem: Exception | None = None  # why this rank could not send anything
    is_decided: bool = False

    # known when announcements have arrived
    # this rank's parameters are not finite: it sends zeros, and takes the mean of the others
    is_lost: bool = False
    # the mean of all contributions; its ``is_last`` is 1 if every rank waits in ``end_round()``
    mean: SyncContribution = field(default_factory=SyncContribution)
    scale: float = 1.0  # of what this rank sends: its weight over the mean of the weights
    mean_norm: float = 0.0  # of the pseudo-gradients, by the weights of the ranks

    # known when it is decided
    is_finite: bool = True  # the mean of the pseudo-gradients is finite
    # the norm of that mean over ``mean_norm``; None if nothing has moved
    step_length: float | None = None
    # the parameters that have new anchors; None if the sync was not applied
    received: list[AnchoredTensor] | None = None

    @property
    def is_empty(self) -> bool:
        """True if no rank has stepped, and all wait in ``end_round()``."""
        return self.mean.is_last == 1 and not self.mean.steps

    @property
    def tensors(self) -> list[AnchoredTensor]:
        return [t for bucket in self.buckets for t in bucket.tensors]

    def note_lengths(self, norms: Sequence[float], means: Sequence[float]) -> None:
        """Note how much longer or shorter than the ranks' pseudo-gradients their mean is.

        ``norms``: of the tensors of that mean. ``means``: of those of the ranks.
        """
        if self.mean_norm:
            self.step_length = math.hypot(*norms) / self.mean_norm
        lengths = (n / mean if mean else 1.0 for n, mean in zip(norms, means, strict=True))
        for bucket in self.buckets:
            bucket.step_lengths = [*islice(lengths, len(bucket.tensors))]

    def poll(self) -> None:
        """Communicate as far as possible without waiting; ``finish`` raises an error."""
        while not self.is_decided and self.error is None:
            if self.waiting is not None and not self.waiting.is_ready:
                return
            try:
                self._advance()
            except Exception as error:
                self.error = error

    def finish(self, in_turns: bool = True) -> None:
        """Communicate up to the decision; unless ranks may take turns, only as far as no simulated
        rank would wait for another.
        """
        while not self.is_decided:
            if self.error is not None:
                raise self.error
            if not in_turns and getattr(self.waiting, "is_lockstep", False):
                return
            self._advance()

    def _advance(self) -> None:
        assert self.collectives is not None
        self.waiting = next(self.collectives, None)
        self.is_decided = self.waiting is None


class FragmentSync:
    """Anchors, and the sync of their fragments, one at a time.

    ``LocalSteps`` adds fragments to those that are ``due``. ``prepare_sync`` begins their sync,
    which backward polls where there is a delay, and ``perform_sync`` ends it: it is applied on all
    ranks, or on none. If it fails, or ``cancel`` gives it up (in a rebind), its fragments are due
    again.

    ``engine``: that of the inner steps.
    """

    def __init__(self, engine: Engine, anchors: Anchors):
        self.engine, self.anchors = engine, anchors
        self.due: frozenset[int] = frozenset()
        self.running: RunningSync | None = None
        self.steps_given_up = 0.0  # of the round whose sync was given up, and is due again
        self.are_equal = False  # ranks have compared their anchors, and nothing has failed since
        self.is_comparing = False  # settings show checksums of the anchors
        self._connection: Communicator | None = None  # that of the engine, when last seen
        self._comm: Communicator | None = None
        self.shards: list[Communicator] = []

    @property
    def comm(self) -> Communicator:
        """The ranks of exchanges; until ``connect`` those of the engine."""
        return self._comm or self.engine.comm

    def connect(self) -> None:
        """Choose the communicators of syncs: those of the engine. Delayed syncs run beside
        training, so they get process groups of their own.
        """
        engine = self.engine
        if self._connection is engine.comm:
            return
        # before new groups are made: torch names them by the number of those that there are
        self._connection, self._comm, self.shards = None, None, []
        comm, shards = engine.comm, engine.shard_communicators
        if self.anchors.is_delayed:
            comm, shards = comm.with_own_group(), [one.with_own_group() for one in shards]
        self._comm, self.shards, self._connection = comm, shards, engine.comm
        self.are_equal = False
        self.anchors.note_ranks(comm.size, engine.shard_communicators)

    @torch.no_grad()
    def prepare_sync(
        self, counts: RoundCounts, steps: int, apply_at: int = 0, is_last: bool = False
    ) -> None:
        """Read what the fragments that are due have moved in a round of ``steps`` steps, and begin
        their sync.
        """
        engine, fragments = self.engine, self.due
        copy_options_from_ranks_with_data(self.engine)
        buckets = self.anchors.list_buckets(fragments)
        is_as_before = all(t.has_moved == t.is_sent for b in buckets for t in b.tensors)
        for t in (t for bucket in buckets for t in bucket.tensors):
            t.is_sent, t.has_moved = t.has_moved, False
        try:
            squares, problem = self._read_movement(buckets, keeps=apply_at > 0)
            has_failed: float = problem is not None
            if self.shards:  # norms are those of all shards
                numbers = [*squares.tolist(), has_failed]
                *sums, has_failed = sum_over_groups(self.shards, numbers, engine.device)
                squares = squares.new_tensor(sums)
        except BaseException:
            self._undo(buckets)
            raise
        self.due = frozenset()
        weight = counts.weight if engine.option_groups[0]["weighted"] else 1.0
        contribution = SyncContribution(weight, steps, counts.seconds, is_last, has_failed > 0)
        running = RunningSync(fragments, apply_at, contribution, buckets, squares, problem=problem)
        del problem  # its traceback refers to this frame (a reference cycle)
        self.begin_sync(running, is_as_before)
        if apply_at:
            running.poll()

    def _read_movement(
        self, buckets: Sequence[AnchorBucket], keeps: bool
    ) -> tuple[Tensor, Exception | None]:
        """Write pseudo-gradients to payloads (line 2). Returns the squared norm of each tensor; or
        zeros, and the error of this rank, which it announces.
        """
        try:
            return torch.cat([bucket.read_movement(keeps) for bucket in buckets]), None
        except Exception as error:  # out of memory, most likely
            count = sum(len(bucket.tensors) for bucket in buckets)
            zeros = torch.zeros(count, dtype=torch.float64, device="cpu")
            return zeros.to(self.engine.device), error

    def begin_sync(self, running: RunningSync, is_as_before: bool = False) -> None:
        """Make a sync, whose pseudo-gradients are in the payloads, the running one. Nothing is sent
        until it is polled or finished.

        ``is_as_before``: the last sync was of the same tensors.
        """
        self.running = running
        # after one that was given up ranks may differ in what they have sent before
        starts_at_once = running.apply_at > 0 and is_as_before and not self.steps_given_up
        running.collectives = self._communicate(running, starts_at_once)

    @torch.no_grad()
    def perform_sync(self, counts: RoundCounts) -> RunningSync:
        """Wait for the sync in flight, and apply it, unless the average is not finite; return it.

        If it fails, on all ranks, nothing is applied.
        """
        running = self.running
        assert running is not None
        with self._cancel_on_error():
            running.finish()
            with defer_signals():
                running.received = self._apply(running, counts)
        self.running, self.are_equal, self.steps_given_up = None, True, 0.0
        return running

    def _apply(self, running: RunningSync, counts: RoundCounts) -> list[AnchoredTensor] | None:
        """Do lines 4 and 5, if all ranks have decided to. Returns the parameters that received new
        anchors: those that were sent, or all if this rank's are not finite.
        """
        engine, buckets, mean = self.engine, running.buckets, running.mean
        if running.is_empty or not running.is_finite:
            self._undo(buckets, have_moved=not running.is_empty)
            return None
        options, is_lost = engine.option_groups[0], running.is_lost
        is_late = running.apply_at > 0 and not is_lost
        engine.damage = f"the sync before step {engine.steps + 1} was interrupted"
        progress = outer_progress(options, mean.steps, mean.seconds)
        by_time = options["round_seconds"] is not None
        step = counts.mean_step + mean.steps if by_time else options["step"]
        moved = self.anchors.step_outer(buckets, progress, self.comm.size, is_late)  # line 4
        received = [t for t in running.tensors if t.is_sent or is_lost]
        write_params(received, moved)  # line 5
        engine.damage, engine.consolidated_at = "", None
        self.anchors.end_sync(buckets)
        self.anchors.update_trailing_means(buckets, mean.steps, step)
        counts.weight = 0.0
        if by_time:
            counts.begin_round(counts.round + 1, engine.steps, counts.mean_step + mean.steps)
        return received

    def _undo(self, buckets: Sequence[AnchorBucket], have_moved: bool = True) -> None:
        """Undo what ``prepare_sync`` has done for a sync that is not applied."""
        self.anchors.end_sync(buckets)
        for t in (t for bucket in buckets for t in bucket.tensors):
            t.has_moved |= t.is_sent and have_moved

    def decide_running(self) -> None:
        """Wait until the sync in flight is decided, and leave it to be applied later."""
        if self.running is not None:
            with self._cancel_on_error():
                self.running.finish()

    @contextlib.contextmanager
    def _cancel_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.are_equal = False  # a sync may be missing here, or elsewhere
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give up what is in flight; its fragments are due again."""
        running, self.running = self.running, None
        if running is not None and running.collectives is not None:
            running.collectives.close()
            running.problem = None  # its traceback refers to this frame (a reference cycle)
            for bucket in running.buckets:
                bucket.release_memory()  # what was abandoned may still write to it
            self._undo(running.buckets)
            self.due |= running.fragments
            self.steps_given_up = running.contribution.steps

    def drain(self) -> None:
        """Wait for collectives in flight, because the next sync uses the same group."""
        if self.running is not None and self._connection is not None:
            with contextlib.suppress(Exception):
                self.running.finish(in_turns=False)

    # The communication of a sync

    def _communicate(
        self, running: RunningSync, starts_at_once: bool
    ) -> Generator[PendingCollective | Pause, None, None]:
        """Exchange announcements and payloads, up to the decision. Yield what has to be waited for
        next: with a delay backward goes on with it only when that is ready.

        Payloads start when announcements have arrived: ranks then know that payloads fit, and all
        weights.
        With a delay payloads start at once, to travel while training goes on, unless other tensors
        are sent than before; weights are then equal.
        """
        started: list[PendingCollective] = []
        is_told = False
        if self._connection is not self.engine.comm:  # loaded or copied, perhaps on this rank alone
            yield Pause()
            self.connect()
        try:
            gathering = self._announce(running)
            if starts_at_once:
                running.is_lost = not math.isfinite(float(running.squares.sum()))
                started = self._start_payloads(running)
            yield gathering
            rows = gathering.wait()
            assert isinstance(rows, Tensor)
            rows = handshake.unpack_messages(rows.cpu(), len(Announcement._fields))
            announced = Announcement(*rows.contiguous().view(torch.float64).unbind(1))
            sent = [bucket.payload.lengths for bucket in running.buckets] if started else []
            if (complain := self._find_complaint(announced, sent)) is not None:
                yield Pause()
                complain(running)
            self._read_contributions(running, announced)
            if running.is_empty:
                return
            if not starts_at_once:
                started = self._start_payloads(running)
            while started:
                answers = []
                for pending in started:
                    yield pending
                    answers.append(pending.wait())
                started = [one for one in answers if isinstance(one, PendingCollective)]
            if self.shards:
                yield Pause()
            is_told = True
            if self._measure_average(running):
                yield Pause()
                self._raise_failure(running)
        except BaseException as error:
            # after an interrupt, in a new group, or of other ranks nothing may arrive
            may_arrive = isinstance(error, Exception) and not isinstance(error, CallsDiffer)
            for pending in started:
                pending.drain() if may_arrive else pending.untrack()
            if self.shards and not is_told and isinstance(error, RankSilent | RankLeft):
                yield Pause()
                tell_failure(self.shards, 2 + len(running.tensors), 1, self.engine.device)
            raise

    def _announce(self, running: RunningSync) -> PendingCollective:
        """Start the gather of announcements; that of a rank which cannot make its own says so."""
        try:
            announcement = self._make_announcement(running)
        except Exception as error:
            running.problem = error
            numbers = [0.0, 0.0, 0.0, *SyncContribution(has_failed=1.0), 0.0, 0.0]
            fields = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            announcement = handshake.pack_message(handshake.SYNC, fields)
        return self.comm.start(AllGather(announcement.to(self.engine.device)))

    def _make_announcement(self, running: RunningSync) -> Tensor:
        """Return the message with this rank's ``Announcement``."""
        engine, anchors, device = self.engine, self.anchors, self.engine.device
        engine.options.refresh(engine.method.compared_groups)
        are_sent = bytes(t.is_sent for t in running.tensors)
        checksum = zlib.crc32(are_sent, checksum_settings(engine))
        values = 0 if self.are_equal else anchors.checksum()
        numbers = [anchors.applied_syncs, checksum, values, *running.contribution]
        sent = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(device)
        every, tensors = self.engine.method.check_replicas_every, anchors.list_equal_tensors(engine)
        total = handshake.sum_part(tensors if every else [], anchors.applied_syncs, ANCHOR_PARTS)
        squared = running.squares.to(device).sum().view(1)
        return handshake.pack_message(handshake.SYNC, torch.cat([sent, squared, total.to(device)]))

    def _find_complaint(
        self, announced: Announcement, sent: list[list[int]]
    ) -> Callable[[RunningSync], None] | None:
        """Return the function that raises, on all ranks, if a rank could not begin or ranks differ;
        it asks them why. Raises if one lacks a sync. ``sent``: see ``_raise_difference``.
        """
        if announced.has_failed.any():
            return self._raise_failure
        syncs, settings, values = announced.applied_syncs, announced.settings, announced.anchors
        if (syncs != syncs[0]).any():
            raise CommunicationError(
                f"rank {int(syncs.argmin())} lacks a sync that others have applied: call "
                "rebind() on all ranks"
            )
        compared = values[values != 0]
        sums = announced.anchor_sum.contiguous().view(torch.int64)
        have_parted = bool((compared != compared[:1]).any() or (sums != sums[0]).any())
        have_other_settings = bool((settings != settings[self.comm.rank]).any())
        if not (have_parted or have_other_settings):
            return None
        return partial(self._raise_difference, sent=sent, of_anchors=not have_other_settings)

    def _raise_difference(
        self, running: RunningSync, sent: list[list[int]], of_anchors: bool
    ) -> NoReturn:
        """Raise in what ranks differ: in settings, or else in anchors.

        ``sent``: the lengths in each payload that is under way. With a delay they may differ, and
        such payloads never complete; so ranks ask each other over the group of the inner steps.
        """
        engine, comm = self.engine, self.engine.comm
        self.is_comparing = of_anchors
        try:
            first, *others = handshake.gather_json(sent, engine.device, comm)
            try:
                handshake.raise_mismatch(engine, comm, in_step=self.are_equal)
            except ValueError as error:
                if all(other == first for other in others):
                    raise
                raise CallsDiffer(str(error).removesuffix(".")) from None
        finally:
            self.is_comparing = False

    def _read_contributions(self, running: RunningSync, announced: Announcement) -> None:
        """Note what ranks have contributed."""
        running.mean = mean = announced.take_mean()
        weights, squares = announced.weight, announced.squared_norm
        if not mean.weight:  # where no rank has any weight, all have the same
            weights = torch.ones_like(weights)
        running.scale = running.contribution.weight / mean.weight if mean.weight else 1.0
        running.is_lost = not bool(squares[self.comm.rank].isfinite())
        norms = torch.where(squares.isfinite(), squares, 0.0).sqrt()
        running.mean_norm = float(weights @ norms / weights.sum())

    def _start_payloads(self, running: RunningSync) -> list[PendingCollective]:
        """Start the means of all payloads (line 3)."""
        norms = running.squares.sqrt().split([len(bucket.tensors) for bucket in running.buckets])
        pairs = zip(running.buckets, norms, strict=True)
        return [self._start_payload(running, bucket, of_bucket) for bucket, of_bucket in pairs]

    def _start_payload(
        self, running: RunningSync, bucket: AnchorBucket, norms: Tensor
    ) -> PendingCollective:
        """Start the mean of a bucket's payload. If this rank cannot encode it, the payload says so;
        otherwise the others would wait until their timeout.
        """
        try:
            if running.problem is not None:  # of a delayed sync, whose payloads are under way
                raise running.problem
            check_outer_rates(self.anchors.outer)
            payload = bucket.encode(running.scale, running.is_lost, norms)
            return self.comm.start(AllReduceMean(payload))
        except CommunicationError:
            raise
        except Exception as error:
            cause = error.__cause__ if isinstance(error, EncodeError) else None
            running.problem = cause if isinstance(cause, Exception) else error
        return self.comm.start(AllReduceMean(bucket.encode_failure()))

    def _measure_average(self, running: RunningSync) -> bool:
        """Note whether the average is finite, and its length, on all shards. Return True if a rank
        has failed.
        """
        buckets, shards = running.buckets, self.shards
        lengths = [bucket.payload.lengths for bucket in buckets]
        squares = torch.cat(
            [
                stacked_squared_norms(bucket.read_average().split(parts))
                for bucket, parts in zip(buckets, lengths, strict=True)
            ]
        )
        fields = torch.cat([bucket.payload.fields for bucket in buckets]).double()
        numbers = torch.cat([squares, fields]).tolist()  # the host waits for the device
        own, rest = numbers[: len(squares)], iter(numbers[len(squares) :])
        has_failed = False
        means: list[float] = []
        for bucket in buckets:
            bucket.is_averaged = max(islice(rest, len(bucket.tensors))) > 0
            has_failed |= next(rest) > 0
            means += islice(rest, len(bucket.tensors))
        copies = [bucket.replicate_size for bucket in buckets for _ in bucket.tensors]
        is_finite = math.isfinite(sum(own))
        own = [square / n if is_finite else 0.0 for square, n in zip(own, copies, strict=True)]
        facts = [float(not is_finite), float(has_failed), *own]
        non_finite, failed, *sums = sum_over_groups(shards, facts, self.engine.device)
        if not failed:
            running.is_finite = non_finite == 0
            running.note_lengths([math.sqrt(square) for square in sums], means)
        return failed > 0

    def _raise_failure(self, running: RunningSync) -> NoReturn:
        """Raise why a sync failed: this rank's own error, or one that quotes the others'."""
        problem = running.problem
        failure = "" if problem is None else f"{type(problem).__name__}: {problem}"
        try:
            handshake.raise_failure(self.engine, self.comm, failure)
        except CommunicationError:
            if problem is None:
                raise
            raise problem from None
        finally:
            del problem  # its traceback refers to this frame (a reference cycle)
