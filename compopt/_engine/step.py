"""One step: prepare the gradients, exchange them, decide, commit.

Every bucket's generator runs up to its ``Agree`` without changing anything that outlives the step.
Then all ranks decide, on numbers that each of them holds alike, whether the step is applied; all
generators are resumed, or all are closed.

A payload that was sent in backward (see ``overlap``) may be stale: a clip or an unscale has changed
the gradients since. A control field of the last bucket reports whether any rank has a stale
payload; all ranks then send all other buckets again. No extra collective is needed, and no rank
resends alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from .._state.buckets import Bucket
from .._wire.collectives import Communicator, get_rank, profiler_range
from .._wire.payload import FieldValues, encode_bits
from .._wire.requests import AllReduceMean, CommunicationError
from .collective_generators import CollectiveGenerator, exchange_one
from .decision import StepDecision, combine_decisions, read_decision
from .exchange import BucketExchange, ExchangeSchedule
from .gradients import check_gradients, restore_scale, unscale_gradients
from .handshake import (
    describe_optimizer,
    raise_failure,
    raise_mismatch,
    verify_peers,
    warn_if_without_gradients,
)
from .join import copy_options_from_ranks_with_data
from .missing_ranks import RankLeft, explain_failure, post_lost_masks
from .options import absolute_rates
from .overlap import run_batched_requests
from .resharding import lay_out_trainable_parameters
from .session import Handshake, Role, Session
from .signals import defer_signals
from .stats import describe_compression, show_line


def exchange_and_commit(session: Session) -> CollectiveGenerator[None]:
    """Take a step, as a generator that yields each collective it is about to wait for."""
    check_can_step(session)
    comm = session.connect_ranks()  # first: state may have to be resharded
    yield from copy_options_from_ranks_with_data(session)
    step = Step(session, comm, session.steps + 1)
    try:
        decision = yield from step.exchange()
        if decision is not None:
            step.commit(decision)
    except GeneratorExit:
        raise
    except BaseException as error:
        step.undo()
        if not isinstance(error, CommunicationError | RankLeft):
            raise
        why = (
            f"{error}. Make a new process group on all ranks and call rebind()"
            if isinstance(error, RankLeft)
            else f"{error}{explain_failure(session)}"
        )
        raise CommunicationError(
            f"step {step.number} was not applied on rank {comm.rank}: {why}"
        ) from error
    finally:
        # drop the exception: its traceback refers to this frame (a reference cycle)
        step.problem = None


def check_can_step(session: Session) -> None:
    """Raise RuntimeError if the optimizer was replaced, or its state is incomplete."""
    if session.role is Role.REPLACED:
        raise RuntimeError(
            f"this {session.name} was replaced: an optimizer made later holds its "
            "parameters and has their gradients now. Step that one, or call "
            "compopt.attach(ddp_model, optimizer) to have this one back."
        )
    session.check_sound()
    session.check_has_shards()


class Step:
    """The running step."""

    def __init__(self, session: Session, comm: Communicator, number: int):
        self.session, self.comm, self.number = session, comm, number
        # why this rank cannot send its gradients
        self.problem: Exception | None = None
        # all ranks have applied or skipped this step: a later error needs no undo
        self.is_complete = False
        # the scale of a GradScaler, by which the gradients were divided
        self.scale: float | None = None
        self.committing: Bucket | None = None

    @property
    def buckets(self) -> list[Bucket]:
        return self.session.buckets

    def exchange(self) -> CollectiveGenerator[StepDecision | None]:
        """Run until all ranks have decided whether to commit.

        Returns None if there is nothing to exchange.
        """
        session = self.session
        self.problem = self._apply_changed_options() or self._prepare_gradients()
        yield from self._finish_post_commit()
        if session.handshake is not Handshake.VERIFIED:
            yield from self.verify_peers()
        if not self.buckets:
            return None
        decision = yield from self._exchange_buckets()
        if decision.control_means["unfrozen"][0] > 0:
            # requires_grad has changed on some rank
            yield from self.verify_peers()
            if not self.buckets:
                return None
            decision = yield from self._exchange_buckets()
        if decision.resent:
            session.warn_once(
                "stale gradients",
                "gradients were changed between backward and step() (a clip, an unscale, another "
                "backward?), so payloads sent during backward had to be sent again. From now on "
                "nothing is sent before step(): clip with max_grad_norm= instead to keep "
                "communication behind backward.",
                self.comm.rank,
            )
        yield from self._raise_if_failed(decision)
        return decision

    def commit(self, decision: StepDecision) -> None:
        """Apply or skip the step as a whole, and report it. Signals are deferred meanwhile."""
        session = self.session
        with defer_signals():
            if decision.applied:
                session.has_local_gradients = False
                try:
                    session.corrupt = f"step {self.number} was interrupted"
                    with profiler_range("compopt::commit"):
                        self._commit_buckets(decision)
                except BaseException as error:
                    bucket, kind = self.committing, type(error).__name__
                    where = "after its buckets"
                    if bucket is not None:
                        where = f"in bucket {bucket.index} ({bucket.names[0]}, ...)"
                    session.corrupt = (
                        f"step {self.number} was applied in part: {kind} was raised {where} "
                        f"({error})"
                    )
                    for bucket in session.buckets:
                        bucket.cache.clear()  # derived from state, which may be wrong
                    raise
                session.corrupt = ""
            session.verified_message_options = session.message_options
            self.is_complete = True
        if decision.applied:
            warn_if_without_gradients(session, decision)
        self._report(decision)

    def undo(self) -> None:
        """Restore gradients and scale after an error has ended the step."""
        if self.is_complete:
            return
        if self.scale is not None:
            restore_scale(self.session, self.scale)
        self.session.unverify()  # ranks may be a step apart now

    # Before the exchange

    def _apply_changed_options(self) -> Exception | None:
        """Check options that may have been changed in groups, and lay out state for them.

        Returns an error instead of raising it, as ``_prepare_gradients``.
        """
        session = self.session
        try:
            session.optimizer.read_options()
            for group in session.option_groups:
                checked = {**group, **absolute_rates(group), "params": []}
                session.optimizer.check_group(checked)
        except (TypeError, ValueError) as error:
            return error
        session.apply_changed_options()
        return None

    def _prepare_gradients(self) -> Exception | None:
        """Bring gradients into the form in which they are sent.

        Returns an error instead of raising it: all ranks learn of it in the exchange.
        """
        session = self.session
        try:
            check_gradients(session)
            self.scale = unscale_gradients(session)
            session.optimizer.before_exchange()
            for bucket in session.buckets:
                bucket.update_masters()
        except Exception as error:
            return error
        return None

    def _finish_post_commit(self) -> CollectiveGenerator[None]:
        """Wait for the exchanges after the last commit, and find out whether a handshake is due."""
        session, post_commit = self.session, self.session.post_commit
        for exchange in post_commit.exchanges:
            yield exchange.in_flight
        post_commit.finish()
        if post_commit.lost and not post_commit.unconfirmed:
            post_lost_masks(session)
        if post_commit.unconfirmed and self.comm.size > 1:
            # tell all ranks whether any has lost a mask that all must have
            flag = [float(post_commit.lost)]
            lost = torch.tensor(flag, dtype=torch.float32, device=session.device)
            mean = yield from exchange_one(self.comm, AllReduceMean(lost))
            post_commit.lost = float(mean) > 0
        post_commit.unconfirmed = False
        for bucket in session.buckets:
            bucket.gathered_state = {}
        # without buckets there is no payload to report it
        is_unfrozen = not self.buckets and session.trainable_has_changed
        if post_commit.lost or is_unfrozen or session.has_new_options:
            post_commit.lost = False
            session.unverify()

    def verify_peers(self) -> CollectiveGenerator[None]:
        """Run the handshake, and lay out the parameters that require a gradient now."""
        session = self.session
        session.overlap.discard()
        had_gradients = yield from verify_peers(session, self.comm, self.problem is not None)
        if session.trainable_has_changed:  # the same on all ranks: the handshake has compared it
            yield from lay_out_trainable_parameters(session, self.comm)
            session.optimizer.before_exchange()
        # without gradients to compare, the next step begins with a handshake too
        is_verified = had_gradients or session.optimizer.replaces_reduce_scatter
        session.handshake = Handshake.VERIFIED if is_verified else Handshake.UNVERIFIED

    # The exchange

    def _exchange_buckets(self) -> CollectiveGenerator[StepDecision]:
        """Exchange all buckets, and decide.

        Raises CommunicationError, with nothing applied, when a collective failed.
        """
        session, comm, buckets = self.session, self.comm, self.buckets
        schedules: list[ExchangeSchedule] = []
        try:
            schedules.append(session.overlap.take_schedule(buckets, session.algorithm, comm))
            decision = yield from self._run_schedule(schedules)
            covers_shard_only = any(
                exchange.agreement.covers_shard_only for exchange in decision.exchanges
            )
            comms = session.shard_communicators
            if covers_shard_only:
                comms = [comm, *comms]
            has_error = any(exchange.error is not None for exchange in decision.exchanges)
            if has_error and not decision.has_failed_rank:
                # This rank failed after it had sent everything. With sharded state one more message
                # reports it before anything is written. Otherwise the other ranks apply the step
                # and this one does not, as when a collective fails on one rank only.
                error = None if covers_shard_only else decision.take_error()
                if error is not None:
                    raise error
                decision.has_failed_rank = True
            yield from combine_decisions(decision, comms, buckets[-1].device)
            session.overlap.is_stopped |= decision.resent
            if decision.applied and covers_shard_only:
                yield from _run_to_commit(decision)
        except GeneratorExit:
            raise
        except BaseException as error:
            for schedule in schedules:
                schedule.abandon(waits=isinstance(error, Exception))  # not after an interrupt
            raise
        if not decision.applied:
            for exchange in decision.exchanges:
                exchange.close()
        return decision

    def _run_schedule(self, schedules: list[ExchangeSchedule]) -> CollectiveGenerator[StepDecision]:
        """Run the only one of ``schedules``. If any rank's payloads from backward are stale, append
        a second one, which sends them again: the caller abandons both if something raises.
        """
        (schedule,) = schedules
        session, comm, exchanges = self.session, self.comm, schedule.exchanges
        stale = [one.measure_staleness() for one in exchanges if one.in_backward]
        any_stale: FieldValues = [0.0]
        if stale:
            device = schedule.buckets[-1].device
            any_stale = torch.cat([one.to(device) for one in stale]).amax(0, keepdim=True)
        is_unfrozen = session.trainable_has_changed
        schedule.inputs.problem = self.problem
        if is_unfrozen:  # all ranks learn of a problem, and nothing is applied
            schedule.inputs.problem = RuntimeError(
                "other parameters require a gradient than before"
            )
        schedule.inputs.fields = self._make_control_fields(any_stale, is_unfrozen)
        yield from schedule.run()
        decision = read_decision(exchanges)
        if decision.control_means["stale"][0] == 0 or len(exchanges) == 1:
            decision.early_buckets = len(stale)
            return decision
        for exchange in exchanges[:-1]:
            exchange.abandon()
        again = ExchangeSchedule(schedule.buckets[:-1], schedule.inputs.algorithm, comm)
        schedules.append(again)
        yield from again.run()
        decision = read_decision([*again.exchanges, exchanges[-1]])
        decision.resent = True
        return decision

    def _make_control_fields(
        self, any_stale: FieldValues, is_unfrozen: bool
    ) -> dict[str, FieldValues]:
        """Return the control fields of the last bucket's payload (see ``decision``)."""
        session, comm = self.session, self.comm
        settings: list[object] = [*session.settings]
        every = session.optimizer.check_replicas_every
        if every and self.number % every == 0:
            settings += describe_optimizer(session)
        return {
            "stale": any_stale,
            # the mean over ranks of these bits shows any difference
            "settings": encode_bits(zlib.crc32(repr(settings).encode()), 16),
            "waits": session.waits.make_field(self.number, comm.rank, comm.size),
            "unfrozen": [float(is_unfrozen)],
        }

    def _raise_if_failed(self, decision: StepDecision) -> CollectiveGenerator[None]:
        """Raise the same error on all ranks if the step failed."""
        session = self.session
        if decision.misplaced:
            where = ", ".join(
                f"bucket {i}, of {session.buckets[i].names[0]}" if i >= 0 else "another shard"
                for i in decision.misplaced
            )
            raise CommunicationError(
                f"payloads of different buckets or steps met ({where}): ranks start their "
                "collectives in different order, or are steps apart. Run backward and step() "
                "equally often on all ranks."
            )
        if decision.has_failed_rank:
            self.problem = problem = decision.take_error(self.problem)
            failure = "" if problem is None else f"{type(problem).__name__}: {problem}"
            del problem  # its traceback refers to this frame (a reference cycle)
            try:
                yield from raise_failure(session, self.comm, failure)
            except CommunicationError:
                if self.problem is None:
                    raise
                raise self.problem from None
        if decision.mismatched:
            yield from raise_mismatch(session, self.comm)

    # After it

    def _commit_buckets(self, decision: StepDecision) -> None:
        """Let every bucket apply the step, and count it."""
        session = self.session
        for exchange in decision.exchanges:
            self.committing = exchange.bucket
            session.post_commit.commit_bucket(exchange, decision.norm)
        self.committing = None
        run_batched_requests(decision.exchanges, session.post_commit.commit_bucket)
        session.optimizer.after_commit()
        for group in session.option_groups:
            group["step"] += 1
        if session.trial is not None and session.trial.result:
            session.trial.record_result()
            session.trial_result, session.trial = session.trial.result, None

    def _report(self, decision: StepDecision) -> None:
        """Update ``stats``, and show the first line once on rank 0."""
        session, comm, applied = self.session, self.comm, decision.applied
        groups, buckets, optimizer = session.option_groups, session.buckets, session.optimizer
        compresses = bool(groups) and all("when" in group for group in groups)
        is_due = applied and session.claim_first("compression") and compresses
        if is_due and comm.rank == 0 == get_rank():
            text = (
                "there are no other ranks, so every step is the base's and nothing is sent "
                "(simulate=True compresses all the same)."
            )
            if not session.is_single_process:
                values_sent = [optimizer.values_sent(bucket, comm.size) for bucket in buckets]
                in_fsdp = optimizer.replaces_reduce_scatter
                text = describe_compression(buckets, values_sent, in_fsdp)
            show_line(f"{session.name}: {text}")
        sent = comm.bytes_sent - session.bytes_reported
        session.bytes_reported = comm.bytes_sent
        session.waits.note_field(self.number, comm.size, decision.control_means["waits"][0])
        session.update_stats(decision, sent)
        trial = None if session.is_single_process else session.trial
        if trial and trial.time_step(decision.phase_of, applied, session.device):
            session.unverify()  # ranks compare their times in the next step's handshake
        session.count_skips(applied)


def _run_to_commit(decision: StepDecision) -> CollectiveGenerator[None]:
    """Resume sharded generators with the norm, and wait until each has gathered its updated
    parameters.
    """
    exchanges: list[BucketExchange] = decision.exchanges
    for exchange in exchanges:
        exchange.resume_and_start_next(decision.norm)
    while waiting := [exchange for exchange in exchanges if not exchange.is_ready_to_commit]:
        for exchange in waiting:
            yield exchange.in_flight
            exchange.resume_and_start_next(exchange.in_flight.wait())


@torch.no_grad()
def start_in_backward(session: Session, params: Iterable[torch.Tensor]) -> None:
    """Start the exchanges of all buckets that are ready, except the last, in their order.

    ``params``: those whose gradients backward has just finished.
    """
    comm = session.follow_default_group()
    if (
        session.handshake is not Handshake.VERIFIED
        or session.corrupt
        or session.has_grad_scaler
        or comm.size == 1
    ):
        return
    if session.is_joining:  # a rank without data has no backward
        return
    overlap = session.overlap
    if overlap.is_idle and (session.has_new_options or session.trainable_has_changed):
        return
    finished = [(p, session.bucket_of[p]) for p in params if p in session.bucket_of]
    overlap.start_ready(finished, session.buckets, session.algorithm, comm)
