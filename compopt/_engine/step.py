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

from collections.abc import Iterable

import torch

from .._state.bucket import Bucket
from .._wire.collectives import Communicator, get_rank, profiler_range
from .._wire.payload import FieldValues, encode_bits
from .._wire.requests import AllReduceMean, Answer, CommunicationError, ReadyToCommit, RunBatched
from . import handshake
from .decision import StepDecision, combine_decisions, read_decision
from .exchange import (
    BucketExchange,
    CollectiveGenerator,
    ExchangeSchedule,
    exchange_one,
    run_batched_requests,
)
from .gradients import check_gradients, drop_scale, scale_gradients, unscale_gradients
from .join import copy_options_from_ranks_with_data
from .missing_ranks import RankLeft, explain_failed_step, post_lost_masks
from .optimizer_base import OptimizerBase
from .resharding import lay_out_trainable_parameters
from .session import Session
from .signals import defer_signals
from .stats import describe_compression, show_line


def exchange_and_commit(optimizer: OptimizerBase) -> CollectiveGenerator[None]:
    """Take a step, as a generator that yields each collective it is about to wait for."""
    session, step = optimizer._session, None
    try:
        session.check_can_step()
        comm = session.connect_ranks(optimizer)  # first: state may have to be resharded
        if optimizer._join_config is not None:
            yield from copy_options_from_ranks_with_data(optimizer)
        step = Step(optimizer, comm, session.steps + 1)
        decision = yield from step.exchange()
        if decision is not None:
            step.commit(decision)
        if optimizer.fsdp_backward is not None:
            optimizer.fsdp_backward.end_step()
    except BaseException as error:
        if step is not None and not isinstance(error, GeneratorExit):
            step.undo()
        drop_scale(optimizer)
        if not isinstance(error, CommunicationError | RankLeft):
            raise
        number = session.steps + 1 if step is None else step.number
        raise explain_failed_step(session, number, error) from error
    finally:
        # drop the exception: its traceback refers to this frame (a reference cycle)
        if step is not None:
            step.problem = None


class Step:
    """The running step."""

    session: Session

    def __init__(self, optimizer: OptimizerBase, comm: Communicator, number: int):
        self.optimizer, self.session = optimizer, optimizer._session
        self.comm, self.number = comm, number
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
        if not session.peers_verified:
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
                session.ddp_left_gradients = False
                try:
                    session.damage = f"step {self.number} was interrupted"
                    with profiler_range("compopt::commit"):
                        self._commit_buckets(decision)
                except BaseException as error:
                    bucket, kind = self.committing, type(error).__name__
                    where = "after its buckets"
                    if bucket is not None:
                        where = f"in bucket {bucket.index} ({bucket.names[0]}, ...)"
                    session.damage = (
                        f"step {self.number} was applied in part: {kind} was raised {where} "
                        f"({error})"
                    )
                    for bucket in session.buckets:
                        bucket.cache.clear()  # derived from state, which may be wrong
                    raise
                session.damage = ""
            # read again: a commit may have adapted options, alike on all ranks
            session.options.refresh(self.optimizer._compared_groups)
            session.verified_message_options = session.options.message_options
            self.is_complete = True
        is_read = self.optimizer.fsdp_backward is None
        if decision.applied and is_read and session.has_data and self.comm.size > 1:
            handshake.warn_if_without_gradients(session, decision)
        self._report(decision)

    def undo(self) -> None:
        """Restore gradients and scale after an error has ended the step."""
        if self.is_complete:
            return
        if self.scale is not None:
            scale_gradients(self.session, self.scale)
        self.session.peers_verified = False  # ranks may be a step apart now

    # Before the exchange

    def _apply_changed_options(self) -> Exception | None:
        """Check options that may have been changed in groups, and lay out state for them.

        Returns an error instead of raising it, as ``_prepare_gradients``.
        """
        optimizer = self.optimizer
        optimizer.lay_out_new_parameters()
        try:
            optimizer.check_changed_options()
        except (TypeError, ValueError) as error:
            return error
        optimizer.lay_out_changed_state()
        return None

    def _prepare_gradients(self) -> Exception | None:
        """Bring gradients into the form in which they are sent.

        Returns an error instead of raising it: all ranks learn of it in the exchange.
        """
        session = self.session
        try:
            check_gradients(session)
            self.scale = unscale_gradients(self.optimizer)
            self.optimizer.before_exchange()
            for bucket in session.buckets:
                if "master" in bucket.state:
                    bucket.update_masters()
        except Exception as error:
            return error
        return None

    def _finish_post_commit(self) -> CollectiveGenerator[None]:
        """Wait for the exchanges after the last commit, and find out whether a handshake is due."""
        session, post_commit = self.session, self.session.post_commit
        if post_commit.exchanges:
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
            session.peers_verified = False

    def verify_peers(self) -> CollectiveGenerator[None]:
        """Run the handshake, and lay out the parameters that require a gradient now."""
        session = self.session
        session.overlap.discard()
        optimizer, has_problem = self.optimizer, self.problem is not None
        had_gradients = yield from handshake.verify_peers(optimizer, self.comm, has_problem)
        session.replica_checksum = 0  # the handshake has compared all parameters
        if session.trainable_has_changed:  # the same on all ranks: the handshake has compared it
            yield from lay_out_trainable_parameters(optimizer, self.comm)
            optimizer.before_exchange()
        # without gradients to compare, the next step begins with a handshake too
        session.peers_verified = had_gradients or optimizer.replaces_reduce_scatter

    # The exchange

    def _exchange_buckets(self) -> CollectiveGenerator[StepDecision]:
        """Exchange all buckets, and decide.

        Raises CommunicationError, with nothing applied, when a collective failed.
        """
        session, comm, buckets = self.session, self.comm, self.buckets
        schedules: list[ExchangeSchedule] = []
        try:
            begun = session.overlap.schedule and session.overlap.take_schedule()
            schedules.append(begun or ExchangeSchedule(buckets, session.algorithm, comm))
            decision = yield from self._run_schedule(schedules)
            exchanges = decision.exchanges
            covers_shard_only = any(one.agreement.covers_shard_only for one in exchanges)
            comms = session.shard_communicators
            if covers_shard_only:
                comms = [comm, *comms]
            has_error = any(exchange.error is not None for exchange in exchanges)
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
        replica_sum = self._sum_replicas()
        # the settings, and what the last step has summed
        checksum = self.optimizer.checksum_settings() ^ session.replica_checksum
        schedule.inputs.last_fields = {
            "stale": any_stale,
            "waits": session.waits.make_field(self.number, comm.rank, comm.size),
            "unfrozen": [float(is_unfrozen)],
            "settings": encode_bits(checksum, 16),
        }
        yield from schedule.run()
        decision = read_decision(exchanges, replica_sum)
        session.replica_checksum = handshake.checksum_sum(decision.replica_sum)
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

    def _sum_replicas(self) -> torch.Tensor | None:
        """Sum the part of the parameters that ranks compare in this step, if one is due."""
        optimizer, comm = self.optimizer, self.comm
        due = handshake.find_part(self.number, optimizer.check_replicas_every)
        if due is None or comm.size == 1 or not optimizer.has_equal_replicas:
            return None
        buckets = [*self.session.buckets, *self.session.frozen_buckets]
        return handshake.sum_part([p for bucket in buckets for p in bucket.local_params], *due)

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
            repeats = "call step() again"
            if self.optimizer.fsdp_backward is not None:  # which has averaged in backward
                repeats = "repeat zero_grad(), backward and step()"
            try:
                yield from handshake.raise_failure(session, self.comm, failure, repeats)
            except CommunicationError:
                if self.problem is None:
                    raise
                raise self.problem from None
        if decision.mismatched:
            yield from handshake.raise_mismatch(self.optimizer, self.comm, in_step=True)

    # After it

    def _commit_buckets(self, decision: StepDecision) -> None:
        """Let every bucket apply the step, and count it."""
        session = self.session
        for exchange in decision.exchanges:
            self.committing = exchange.bucket
            self._commit_bucket(exchange, decision.norm)
        self.committing = None
        run_batched_requests(decision.exchanges, self._commit_bucket)
        self.optimizer.after_commit()
        for group in session.option_groups:
            group["step"] += 1
        if session.trial is not None and session.trial.result:
            session.trial.record_result()
            session.trial_result, session.trial = session.trial.result, None

    def _commit_bucket(self, exchange: BucketExchange, answer: Answer) -> None:
        """Resume the generator of one bucket, which applies the step. It stops at a ``RunBatched``,
        which the caller runs for all buckets, or at a post-commit exchange.
        """
        try:
            # Unsharded: resumed at Agree with the norm. Sharded: at ReadyToCommit, which has
            # no answer.
            exchange.resume_and_start_next(answer)
        except StopIteration:
            return
        except CommunicationError:
            pass
        if not isinstance(exchange.request, RunBatched):
            self.session.post_commit.add(exchange)

    def _report(self, decision: StepDecision) -> None:
        """Update ``stats``; after the first step show a line."""
        session, comm, applied = self.session, self.comm, decision.applied
        if applied and "compression" not in session.warned:
            self._show_first_line()
        session.waits.note_field(self.number, comm.size, decision.control_means["waits"][0])
        session.update_stats(self.optimizer, decision, session.take_bytes_sent())
        trial = None if session.sends_nothing else session.trial
        if trial and trial.time_step(decision.phase_of, applied, session.device):
            session.peers_verified = False  # the next step's handshake compares ranks' times
        if not applied or session.consecutive_skips:
            session.count_skips(applied, self.optimizer.max_skipped)

    def _show_first_line(self) -> None:
        """Show on rank 0 what is compressed, if the class compresses."""
        session, comm, optimizer = self.session, self.comm, self.optimizer
        session.warned.add("compression")
        groups = session.option_groups
        compresses = bool(groups) and all("when" in group for group in groups)
        if not compresses or not comm.rank == 0 == get_rank():
            return
        text = (
            "there are no other ranks, so every step is the base's and nothing is sent "
            "(simulate=True compresses all the same)."
        )
        if not session.sends_nothing:
            values = [optimizer.estimate_values_sent(b, comm.size) for b in session.buckets]
            in_fsdp = optimizer.replaces_reduce_scatter
            text = describe_compression(session.buckets, values, in_fsdp)
        show_line(f"{session.name}: {text}")


def _run_to_commit(decision: StepDecision) -> CollectiveGenerator[None]:
    """Resume sharded generators with the norm, and wait until each has gathered its updated
    parameters.
    """
    exchanges: list[BucketExchange] = decision.exchanges
    for exchange in exchanges:
        exchange.resume_and_start_next(decision.norm)
    while waiting := [e for e in exchanges if not isinstance(e.request, ReadyToCommit)]:
        for exchange in waiting:
            yield exchange.in_flight
            exchange.resume_and_start_next(exchange.in_flight.wait())


@torch.no_grad()
def start_in_backward(optimizer: OptimizerBase, params: Iterable[torch.Tensor]) -> None:
    """Start the exchanges of all buckets that are ready, except the last, in their order.

    ``params``: those whose gradients backward has just finished.
    """
    session: Session = optimizer._session
    comm = session.refresh_ranks(optimizer)
    if not session.peers_verified or session.damage or session.has_grad_scaler or comm.size == 1:
        return
    if optimizer.is_joining:  # a rank without data has no backward
        return
    overlap = session.overlap
    if overlap.is_idle:
        session.options.refresh(optimizer._compared_groups)
        if session.has_new_options or session.trainable_has_changed:
            return
    finished = [(p, session.bucket_of[p]) for p in params if p in session.bucket_of]
    overlap.start_ready(finished, session.buckets, session.algorithm, comm)
