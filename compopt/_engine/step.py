"""One step: prepare the gradients, exchange them, decide, commit.

Every bucket's generator runs up to its ``Agree`` without changing anything that outlives the step.
Then all ranks decide, on numbers that each of them holds alike, whether the step is applied; all
generators are resumed, or all are closed.

What was sent in backward (see ``overlap``) may be stale: a clip or an unscale has changed the
gradients since. A control field of the last bucket says whether it is so on any rank; all ranks
then send all other buckets again. That takes no collective of its own, and no rank does it alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch

from .._state.buckets import Bucket
from .._wire.collectives import Communicator, get_rank, profiler_range
from .._wire.payload import FieldValues, encode_bits
from .._wire.requests import CommunicationError
from . import gradients
from .decision import StepDecision, combine_decisions, error_of_misplaced, read_decision
from .exchange import Exchange, ExchangeSchedule
from .missing_ranks import RankLeft, explain_failure, post_lost_masks
from .options import Group
from .overlap import resume_together
from .peers import (
    describe_optimizer,
    raise_failure,
    raise_mismatch,
    verify_peers,
    warn_if_without_gradients,
)
from .resharding import follow_requires_grad
from .session import Corrupt, Role, Session, Sync
from .signals import defer_signals
from .stats import describe_compression, show_line
from .turns import Turns


def step_in_turns(session: Session) -> Turns[None]:
    """Take a step, as a generator that yields each collective it is about to wait for."""
    check_can_step(session)
    comm = session.connect_ranks()  # first: state may have to be cut anew
    step = Step(session, comm, session.steps + 1)
    try:
        decision = yield from step.exchange()
        if decision is not None:
            step.commit(decision)
    except GeneratorExit:
        raise
    except BaseException as error:
        step.undo(error)
        if not isinstance(error, CommunicationError | RankLeft):
            raise
        if step.is_complete:
            raise CommunicationError(
                f"step {step.number} was applied, what followed it failed: {error}"
            ) from error
        why = (
            f"{error}. Make a new process group on all ranks and call rebind()"
            if isinstance(error, RankLeft)
            else f"{error}{explain_failure(session)}"
        )
        raise CommunicationError(
            f"step {step.number} was not applied on rank {comm.rank}: {why}"
        ) from error
    finally:
        step.problem = None  # whose frames hold this


def check_can_step(session: Session) -> None:
    """Raise where the optimizer may not be stepped."""
    if session.role is Role.REPLACED:
        raise RuntimeError(
            f"this {session.name} was replaced: an optimizer made later holds its "
            "parameters and has their gradients now. Step that one, or call "
            "compopt.attach(ddp_model, optimizer) to have this one back."
        )
    session.check_sound()


class Step:
    """The step that is running, of all parameter groups or of some ``groups``."""

    def __init__(
        self,
        session: Session,
        comm: Communicator,
        number: int,
        groups: Sequence[Group] | None = None,
    ):
        self.session, self.comm, self.number, self._groups = session, comm, number, groups
        # why this rank cannot send its gradients
        self.problem: Exception | None = None
        # applied or skipped: what is raised now leaves the ranks level
        self.is_complete = False
        # the scale of a GradScaler that was taken off the gradients
        self.scale: float | None = None
        self.committing: Bucket | None = None

    @property
    def groups(self) -> Sequence[Group]:
        return self.session.option_groups if self._groups is None else self._groups

    @property
    def buckets(self) -> list[Bucket]:
        if self._groups is None:
            return self.session.buckets
        stepped = {id(group) for group in self._groups}
        return [bucket for bucket in self.session.buckets if id(bucket.group) in stepped]

    def exchange(self) -> Turns[StepDecision | None]:
        """Run until all ranks have decided whether to commit; None where there is nothing to
        exchange.
        """
        session = self.session
        if session.has_foreign_state:
            session.rebuild_buckets()
        self.problem = self._prepare_gradients()
        yield from self._finish_post_commit()
        if session.sync is not Sync.VERIFIED:
            yield from self.verify_peers()
        if not self.buckets:
            return None
        decision = yield from self._exchange_buckets()
        if decision.agreed["unfrozen"][0] > 0:
            # on some rank other parameters require a gradient now
            yield from self.verify_peers()
            if not self.buckets:
                return None
            decision = yield from self._exchange_buckets()
        if decision.resent:
            session.warn_once(
                "stale gradients",
                "gradients were changed between backward and step() (a clip, an unscale, another "
                "backward?), so what was sent during backward had to be sent again. From now on "
                "nothing is sent before step(): clip with max_grad_norm= instead to keep "
                "communication behind backward.",
                self.comm.rank,
            )
        yield from self._raise_if_failed(decision)
        return decision

    def commit(self, decision: StepDecision) -> None:
        """Apply the step, or skip it, and report it."""
        self._complete(decision)
        if decision.applied:
            warn_if_without_gradients(self.session, decision)
        self._report(decision)

    def undo(self, error: BaseException) -> None:
        """Leave things as they were before the step, which has raised ``error``."""
        session = self.session
        if not self.is_complete and self.scale is not None:
            gradients.scale_back(session, self.scale)
        if not self.is_complete or isinstance(error, CommunicationError):
            session.unverify()  # ranks may be a step apart now

    # Before the exchange

    def _prepare_gradients(self) -> Exception | None:
        """Bring gradients into the form in which they are sent.

        Returns what goes wrong, which all ranks learn in the exchange.
        """
        session = self.session
        try:
            gradients.check(session)
            self.scale = gradients.unscale(session)
            session.optimizer.before_exchange()
            for bucket in session.buckets:
                bucket.update_masters()
        except Exception as error:
            return error
        return None

    def _finish_post_commit(self) -> Turns[None]:
        """Wait for what followed the last commit, and find out whether a handshake is due."""
        session, post_commit = self.session, self.session.post_commit
        yield from post_commit.finish_in_turns()
        if post_commit.lost and not post_commit.unconfirmed:
            post_lost_masks(session)
        yield from post_commit.confirm(self.comm, session.device)
        for bucket in session.buckets:
            bucket.gathered_state = {}
        # without buckets no payload could say so
        is_unfrozen = not self.buckets and session.has_other_trainable
        has_new_structure = session.verified_structure != session.structure
        if post_commit.lost or is_unfrozen or has_new_structure:
            post_commit.lost = False
            session.unverify()

    def verify_peers(self) -> Turns[None]:
        """Compare ranks, and lay out what all of them found to require a gradient now."""
        session = self.session
        session.overlap.discard()
        had_gradients = yield from verify_peers(session, self.comm, self.problem is not None)
        if session.has_other_trainable:  # and on all ranks alike
            yield from follow_requires_grad(session, self.comm)
            session.optimizer.before_exchange()
        # without any gradient, the next step begins with a handshake too
        is_exempt = session.optimizer.reduces_inside or session.has_pseudo_gradients
        is_verified = had_gradients or is_exempt
        session.sync = Sync.VERIFIED if is_verified else Sync.UNVERIFIED

    # The exchange

    def _exchange_buckets(self) -> Turns[StepDecision]:
        """Exchange all buckets, and decide.

        Raises CommunicationError, with nothing applied, when a collective failed.
        """
        session, comm, buckets = self.session, self.comm, self.buckets
        schedules: list[ExchangeSchedule] = []
        try:
            schedules.append(session.overlap.take_schedule(buckets, session.algorithm, comm))
            decision = yield from self._run_schedule(schedules)
            is_sharded = any(exchange.agreement.sharded for exchange in decision.exchanges)
            _note_late_error(decision, is_sharded)
            groups = (
                [comm, *session.shard_communicators] if is_sharded else session.shard_communicators
            )
            yield from combine_decisions(decision, groups, buckets[-1].device)
            session.overlap.is_stopped |= decision.resent
            if decision.applied and is_sharded:
                yield from _gather_parameters(decision)
        except GeneratorExit:
            raise
        except Exception:
            for schedule in schedules:
                schedule.abandon()
            raise
        except BaseException:  # whoever interrupts does not want to wait for collectives
            for schedule in schedules:
                schedule.leave()
            raise
        if not decision.applied:
            for exchange in decision.exchanges:
                exchange.close()
        return decision

    def _run_schedule(self, schedules: list[ExchangeSchedule]) -> Turns[StepDecision]:
        """Run the schedule, and one more where what was sent in backward is stale on any rank."""
        (schedule,) = schedules
        stale = schedule.measure_staleness()
        any_stale: FieldValues = [0.0]
        if stale:
            device = schedule.buckets[-1].device
            any_stale = torch.cat([one.to(device) for one in stale]).amax(0, keepdim=True)
        schedule.terms.problem = self.problem
        schedule.terms.fields = {"stale": any_stale, **self._control_fields(schedule)}
        yield from schedule.run()
        exchanges = schedule.exchanges
        decision = read_decision(exchanges)
        if decision.agreed["stale"][0] == 0 or len(exchanges) == 1:
            decision.early_buckets = len(stale)
            return decision
        for exchange in exchanges[:-1]:
            exchange.abandon()
        again = ExchangeSchedule(schedule.buckets[:-1], schedule.terms.algorithm, self.comm)
        schedules.append(again)
        yield from again.run()
        decision = read_decision([*again.exchanges, exchanges[-1]])
        decision.resent = True
        return decision

    def _control_fields(self, schedule: ExchangeSchedule) -> dict[str, FieldValues]:
        """What ranks agree on beside the gradients, by name."""
        session, every = self.session, self.session.optimizer.check_replicas_every
        settings: list[object] = [*session.settings]
        if every and self.number % every == 0:
            settings += describe_optimizer(session)
        checksum = zlib.crc32(repr(settings).encode())
        # the mean over ranks of these bits shows any difference
        fields: dict[str, FieldValues] = {"settings": encode_bits(checksum, 16)}
        comm = self.comm
        fields["waits"] = session.waits.field_for(self.number, comm.rank, comm.size)
        is_unfrozen = session.has_other_trainable
        fields["unfrozen"] = [float(is_unfrozen)]
        if is_unfrozen:  # all ranks learn of a problem, and nothing is applied
            problem = RuntimeError("other parameters require a gradient than before")
            schedule.terms.problem = problem
        return fields

    def _raise_if_failed(self, decision: StepDecision) -> Turns[None]:
        """Raise, on all ranks, where these cannot go on as they are."""
        session = self.session
        if decision.misplaced:
            raise error_of_misplaced(decision, session.buckets)
        if decision.unsent:
            self.problem = problem = decision.take_error(self.problem)
            failure = "" if problem is None else f"{type(problem).__name__}: {problem}"
            del problem  # its frames hold this one
            try:
                yield from raise_failure(session, self.comm, failure)
            except CommunicationError:
                if self.problem is None:
                    raise
                raise self.problem from None
        if decision.mismatched:
            yield from raise_mismatch(session, self.comm)

    # After it

    def _complete(self, decision: StepDecision) -> None:
        """Apply or skip the step, as a whole, whatever signals arrive meanwhile."""
        session = self.session
        with defer_signals():
            if decision.applied:
                session.has_local_gradients = False
                sync = session.sync
                try:
                    session.sync = Corrupt(f"step {self.number} was interrupted")
                    with profiler_range("compopt::commit"):
                        self._commit(decision)
                except BaseException as error:
                    session.sync = self._explain_corruption(error)
                    for bucket in session.buckets:
                        bucket.cache.clear()  # it is derived from state, and may be wrong
                    raise
                session.sync = sync
            session.verified_structure = session.structure
            self.is_complete = True

    def _commit(self, decision: StepDecision) -> None:
        """Let every bucket apply the step, and count it."""
        session = self.session
        for exchange in decision.exchanges:
            self.committing = exchange.bucket
            session.post_commit.commit_bucket(exchange, decision.norm)
        self.committing = None
        resume_together(decision.exchanges, session.post_commit.commit_bucket)
        session.optimizer.committed()
        for group in self.groups:
            group["step"] += 1
        if session.trial is not None and session.trial.found:
            session.trial.keep()
            session.trial_result, session.trial = session.trial.found, None

    def _explain_corruption(self, error: BaseException) -> Corrupt:
        bucket = self.committing
        where = (
            "after its buckets"
            if bucket is None
            else f"in bucket {bucket.index} ({bucket.names[0]}, ...)"
        )
        kind = type(error).__name__
        return Corrupt(
            f"step {self.number} was applied in part: {kind} was raised {where} ({error})"
        )

    def _report(self, decision: StepDecision) -> None:
        """Update ``stats``, and tell the user what is due."""
        session, applied = self.session, decision.applied
        if applied:
            self._show_first_line()
        sent = self.comm.bytes_sent - session.bytes_reported
        session.bytes_reported = self.comm.bytes_sent
        session.waits.note_field(self.number, self.comm.size, decision.agreed["waits"][0])
        session.update_stats(decision, sent)
        trial = None if session.is_single_process else session.trial
        if trial and trial.watch(decision.phase_of, applied, session.device):
            session.unverify()  # with the next step's handshake all ranks compare their times
        session.count_skips(applied)

    def _show_first_line(self) -> None:
        """Show once, on rank 0, what is compressed, where the class compresses at all."""
        session, comm, groups = self.session, self.comm, self.session.option_groups
        compresses = bool(groups) and all("when" in group for group in groups)
        is_due = session.is_first("compression") and compresses
        if not (is_due and comm.rank == 0 == get_rank()):
            return
        if session.is_single_process:
            text = (
                "there are no other ranks, so every step is the base's and nothing is sent "
                "(simulate=True compresses all the same)."
            )
        else:
            optimizer, buckets = session.optimizer, session.buckets
            values_sent = [optimizer.values_sent(bucket, comm.size) for bucket in buckets]
            usual = "a reduce-scatter" if optimizer.reduces_inside else "an all-reduce"
            text = describe_compression(buckets, values_sent, usual)
        show_line(f"{session.name}: {text}")


def _note_late_error(decision: StepDecision, is_sharded: bool) -> None:
    """Note that this rank failed after it had sent everything, and so could not say so.

    With sharded state one more message follows before anything is written. Without it the other
    ranks apply the step, and it is not applied here, as where a collective fails on one rank only.
    """
    if decision.unsent or all(exchange.error is None for exchange in decision.exchanges):
        return
    error = None if is_sharded else decision.take_error()
    if error is not None:
        raise error
    decision.unsent = True


def _gather_parameters(decision: StepDecision) -> Turns[None]:
    """Resume sharded generators with the norm, and wait until each has gathered its updated
    parameters.
    """
    exchanges: list[Exchange] = decision.exchanges
    for exchange in exchanges:
        exchange.resume(decision.norm)
    while waiting := [exchange for exchange in exchanges if not exchange.is_ready_to_commit]:
        for exchange in waiting:
            yield exchange.in_flight
            exchange.resume(exchange.in_flight.wait())


@torch.no_grad()
def start_in_backward(session: Session, params: Iterable[torch.Tensor]) -> None:
    """Start the exchanges that backward has made ready by finishing ``params``, but for the last.

    They start in the order of their buckets, on all ranks alike.
    """
    if session.sync is not Sync.VERIFIED or session.has_grad_scaler or session.comm.size == 1:
        return
    overlap = session.overlap
    if overlap.is_idle and (
        session.verified_structure != session.structure or session.has_other_trainable
    ):
        return
    for p in params:
        if p in session.bucket_of:
            overlap.note_finished(p, session.bucket_of[p])
    overlap.start_ready(session.buckets, session.algorithm, session.comm)
