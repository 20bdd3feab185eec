"""One step: prepare the gradients, exchange them, decide, commit.

Every bucket's generator runs up to its ``Agree`` without changing anything that outlives the step.
Then all ranks decide, on numbers that each of them holds alike, whether the step is applied; all
generators are resumed, or all are closed.

A payload that was sent in backward (see ``overlap``) may be stale: a clip or an unscale has changed
the gradients since. A control field of the last bucket reports whether any rank has a stale
payload; all ranks then send all other buckets again. No extra collective is needed, and no rank
resends alone.

``CompressedOptimizer.take_step`` calls ``exchange_and_commit``, a hook of backward
``start_in_backward``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .._state.bucket import Bucket
from .._wire.collectives import Communicator
from .._wire.groups import get_rank
from .._wire.in_flight import profiler_range
from .._wire.payload import FieldValues, encode_bits
from .._wire.requests import AllReduceMean, Answer, CommunicationError, ReadyToCommit, RunBatched
from . import handshake
from .decision import (
    DECISION_FIELDS,
    FAILED,
    StepDecision,
    combine_decisions,
    read_decision,
)
from .engine import Engine
from .exchange import (
    BucketExchange,
    ExchangeSchedule,
    exchange_one,
    run_batched_requests,
    tell_failure,
)
from .gradients import check_gradients, drop_scale, scale_gradients, unscale_gradients
from .join import copy_options_from_ranks_with_data
from .meetings import compare_begun_exchanges
from .missing_ranks import RankLeft, explain_failed_step, post_lost_masks
from .resharding import lay_out_trainable_parameters
from .settings import check_changed_options, checksum_settings
from .signals import defer_signals
from .stats import describe_compression, show_line


def exchange_and_commit(engine: Engine) -> None:
    """Take a step: exchange all buckets, decide, and commit or skip."""
    step = None
    try:
        engine.check_can_step()
        comm = engine.connect_ranks()  # first: state may have to be resharded
        if engine.method._join_config is not None:
            copy_options_from_ranks_with_data(engine)
        step = Step(engine, comm, engine.steps + 1)
        decision = step.exchange()
        if decision is not None:
            step.commit(decision)
        if engine.method.fsdp_backward is not None:
            engine.method.fsdp_backward.end_step()
    except BaseException as error:
        if step is not None:
            step.undo()
        drop_scale(engine)
        if not isinstance(error, CommunicationError | RankLeft):
            raise
        if step is not None:
            step.tell_shards()
        number = engine.steps + 1 if step is None else step.number
        raise explain_failed_step(engine, number, error) from error
    finally:
        # drop the exception: its traceback refers to this frame (a reference cycle)
        if step is not None:
            step.problem, step.schedules = None, []


class Step:
    """The running step."""

    def __init__(self, engine: Engine, comm: Communicator, number: int):
        self.engine, self.method = engine, engine.method
        self.comm, self.number = comm, number
        # why this rank cannot send its gradients
        self.problem: Exception | None = None
        # all ranks have applied or skipped this step: a later error needs no undo
        self.is_complete = False
        # the scale of a GradScaler, by which the gradients were divided
        self.scale: float | None = None
        self.committing: Bucket | None = None
        self.schedules: list[ExchangeSchedule] = []  # of this step, to abandon if it fails
        self.is_told = False  # the other shards of this model know how the step ends here

    @property
    def buckets(self) -> list[Bucket]:
        return self.engine.buckets

    def exchange(self) -> StepDecision | None:
        """Run until all ranks have decided whether to commit.

        Returns None if there is nothing to exchange.
        """
        engine = self.engine
        self.problem = self._check_and_lay_out() or self._prepare_gradients()
        self._finish_post_commit()
        for bucket in engine.buckets:
            bucket.gathered_state = {}  # of before this step
        if not engine.peers_verified:
            self.run_handshake()
        if not self.buckets:
            return None
        decision = self._exchange_buckets()
        if decision.control_means["unfrozen"][0] > 0:
            # requires_grad has changed on some rank
            self.run_handshake()
            if not self.buckets:
                return None
            decision = self._exchange_buckets()
        if decision.resent:
            engine.warn_once_on_rank_0(
                "stale gradients",
                "gradients were changed between backward and step() (a clip, an unscale, another "
                "backward?), so payloads sent during backward had to be sent again. From now on "
                "nothing is sent before step(): clip with max_grad_norm= instead to keep "
                "communication behind backward.",
            )
        self._raise_if_failed(decision)
        return decision

    def commit(self, decision: StepDecision) -> None:
        """Apply or skip the step as a whole, and report it. Signals are deferred meanwhile."""
        engine = self.engine
        with defer_signals():
            if decision.applied:
                engine.ddp_left_gradients = False
                try:
                    engine.damage = f"step {self.number} was interrupted"
                    with profiler_range("compopt::commit"):
                        self._commit_buckets(decision)
                except BaseException as error:
                    bucket, kind = self.committing, type(error).__name__
                    where = "after its buckets"
                    if bucket is not None:
                        where = f"in bucket {bucket.index} ({bucket.names[0]}, ...)"
                    engine.damage = (
                        f"step {self.number} was applied in part: {kind} was raised {where} "
                        f"({error})"
                    )
                    for bucket in engine.buckets:
                        bucket.cache.clear()  # derived from state, which may be wrong
                    raise
                engine.damage = ""
            # read again: a commit may have adapted options, alike on all ranks
            engine.options.refresh(self.method.compared_groups)
            engine.verified_message_options = engine.options.message_options
            self.is_complete = True
        reduces_here = self.method.fsdp_backward is None
        if decision.applied and reduces_here and engine.has_data and self.comm.size > 1:
            handshake.warn_if_without_gradients(engine, decision)
        self._report(decision)

    def undo(self) -> None:
        """Restore gradients and scale after an error has ended the step."""
        if self.is_complete:
            return
        if self.scale is not None:
            scale_gradients(self.engine, self.scale)
        self.engine.peers_verified = False  # ranks may be a step apart now

    # Before the exchange

    def _check_and_lay_out(self) -> Exception | None:
        """Check options that may have been changed in groups, and lay out state for them.

        Returns an error instead of raising it, as ``_prepare_gradients``.
        """
        engine, problem = self.engine, None
        self.method.lay_out_new_parameters()
        try:
            check_changed_options(engine)
        except (TypeError, ValueError) as error:
            problem = error
        # what was begun in backward is given up, and not all ranks may have begun
        if engine.has_new_options and engine.peers_verified and not engine.backwards_are_alike:
            compare_begun_exchanges(engine)
        if problem is None:
            self.method.lay_out_changed_state()
        return problem

    def _prepare_gradients(self) -> Exception | None:
        """Bring gradients into the form in which they are sent.

        Returns an error instead of raising it: all ranks learn of it in the exchange.
        """
        engine = self.engine
        try:
            check_gradients(engine)
            self.scale = unscale_gradients(engine)
            self.method.before_exchange()
            for bucket in engine.buckets:
                if "master" in bucket.state:
                    bucket.update_masters()
        except Exception as error:
            return error
        return None

    def _finish_post_commit(self) -> None:
        """Wait for the exchanges after the last commit, and find out whether a handshake is due."""
        engine, post_commit = self.engine, self.engine.post_commit
        if post_commit.exchanges:
            post_commit.finish()
        if post_commit.lost and not post_commit.unconfirmed:
            post_lost_masks(engine)
        if post_commit.unconfirmed and self.comm.size > 1:
            # tell all ranks whether any has lost a mask that all must have
            flag = [float(post_commit.lost)]
            lost = torch.tensor(flag, dtype=torch.float32, device=engine.device)
            mean = exchange_one(self.comm, AllReduceMean(lost))
            post_commit.lost = float(mean) > 0
        post_commit.unconfirmed = False
        # without buckets there is no payload to report it
        is_unfrozen = not self.buckets and engine.trainable_has_changed
        if post_commit.lost or is_unfrozen or engine.has_new_options:
            post_commit.lost = False
            engine.peers_verified = False

    def run_handshake(self) -> None:
        """Run the handshake, and lay out the parameters that require a gradient now."""
        engine = self.engine
        engine.overlap.discard()
        had_gradients = handshake.compare_optimizers(engine, self.comm, self.problem is not None)
        engine.replica_checksum = 0  # the handshake has compared all parameters
        if engine.trainable_has_changed:  # the same on all ranks: the handshake has compared it
            lay_out_trainable_parameters(engine, self.comm)
            self.method.before_exchange()
        # without gradients to compare, the next step begins with a handshake too
        engine.peers_verified = had_gradients or self.method.replaces_reduce_scatter

    def tell_shards(self) -> None:
        """Tell the other ranks of this model that this one could not reach its peers."""
        engine = self.engine
        if engine.shard_communicators and not (self.is_told or self.method.sharded):
            comms, device = engine.shard_communicators, engine.device
            tell_failure(comms, DECISION_FIELDS, FAILED, device)

    # The exchange

    def _exchange_buckets(self) -> StepDecision:
        """Exchange all buckets, and decide.

        Raises CommunicationError, with nothing applied, when a collective failed.
        """
        engine, comm, buckets = self.engine, self.comm, self.buckets
        try:
            begun = engine.overlap.schedule and engine.overlap.take_schedule()
            self.schedules = [begun or ExchangeSchedule(buckets, engine.algorithm, comm)]
            decision = self._run_schedule(self.schedules[0])
            exchanges = decision.exchanges
            covers_shard_only = any(one.agreement.covers_shard_only for one in exchanges)
            comms = engine.shard_communicators
            if covers_shard_only:
                comms = [comm, *comms]
            self.is_told = True
            has_error = any(exchange.error is not None for exchange in exchanges)
            if has_error and not decision.has_failed_rank:
                # This rank failed after it had sent everything. With sharded state one more message
                # reports it before anything is written. Otherwise the other ranks apply the step
                # and this one does not, as when a collective fails on one rank only.
                error = None if covers_shard_only else decision.take_error()
                if error is not None:
                    raise error
                decision.has_failed_rank = True
            combine_decisions(decision, comms, buckets[-1].device)
            engine.overlap.is_stopped |= decision.resent
            if decision.applied and covers_shard_only:
                _run_to_commit(decision)
        except BaseException as error:
            for schedule in self.schedules:
                schedule.abandon(waits=isinstance(error, Exception))  # not after an interrupt
            raise
        if not decision.applied:
            for exchange in decision.exchanges:
                exchange.close()
        return decision

    def _run_schedule(self, schedule: ExchangeSchedule) -> StepDecision:
        """Run a schedule to its end, with the control fields of the step, and decide. If any rank's
        payloads from backward were stale, all ranks send them again.
        """
        engine, comm, exchanges = self.engine, self.comm, schedule.exchanges
        stale = [one.measure_staleness() for one in exchanges if one.in_backward]
        any_stale: FieldValues = [0.0]
        if stale:
            device = schedule.buckets[-1].device
            any_stale = torch.cat([one.to(device) for one in stale]).amax(0, keepdim=True)
        is_unfrozen = engine.trainable_has_changed
        schedule.inputs.problem = self.problem
        if is_unfrozen:  # all ranks learn of a problem, and nothing is applied
            schedule.inputs.problem = RuntimeError(
                "other parameters require a gradient than before"
            )
        replica_sum = self._sum_replicas()
        # the settings, and what the last step has summed
        checksum = checksum_settings(engine) ^ engine.replica_checksum
        schedule.inputs.last_fields = {
            "stale": any_stale,
            "waits": engine.waits.make_field(self.number, comm.rank, comm.size),
            "unfrozen": [float(is_unfrozen)],
            "settings": encode_bits(checksum, 16),
        }
        schedule.run()
        decision = read_decision(exchanges, replica_sum)
        engine.replica_checksum = handshake.checksum_sum(decision.replica_sum)
        if decision.control_means["stale"][0] > 0 and len(exchanges) > 1:
            return self._send_again(schedule)
        decision.early_buckets = len(stale)
        return decision

    def _send_again(self, schedule: ExchangeSchedule) -> StepDecision:
        """Exchange all buckets of ``schedule`` but the last again, and decide anew."""
        *stale, last = schedule.exchanges
        for exchange in stale:
            exchange.abandon()
        again = ExchangeSchedule(schedule.buckets[:-1], schedule.inputs.algorithm, self.comm)
        self.schedules.append(again)
        again.run()
        decision = read_decision([*again.exchanges, last])
        decision.resent = True
        return decision

    def _sum_replicas(self) -> torch.Tensor | None:
        """Sum the part of the parameters that ranks compare in this step, if one is due."""
        method = self.method
        due = handshake.find_part(self.number, method.check_replicas_every)
        if due is None or self.comm.size == 1 or not method.has_equal_replicas:
            return None
        buckets = [*self.engine.buckets, *self.engine.frozen_buckets]
        return handshake.sum_part([p for bucket in buckets for p in bucket.local_params], *due)

    def _raise_if_failed(self, decision: StepDecision) -> None:
        """Raise the same error on all ranks if the step failed."""
        engine = self.engine
        if decision.misplaced:
            where = ", ".join(
                f"bucket {i}, of {engine.buckets[i].names[0]}" if i >= 0 else "another shard"
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
            if self.method.fsdp_backward is not None:  # which has averaged in backward
                repeats = "repeat zero_grad(), backward and step()"
            try:
                handshake.raise_failure(engine, self.comm, failure, repeats)
            except CommunicationError:
                if self.problem is None:
                    raise
                raise self.problem from None
        if decision.mismatched:
            handshake.raise_mismatch(self.engine, self.comm, in_step=True)

    # After it

    def _commit_buckets(self, decision: StepDecision) -> None:
        """Let every bucket apply the step, and count it."""
        engine = self.engine
        for exchange in decision.exchanges:
            self.committing = exchange.bucket
            self._commit_bucket(exchange, decision.norm)
        self.committing = None
        run_batched_requests(decision.exchanges, self._commit_bucket)
        self.method.after_commit()
        for group in engine.option_groups:
            group["step"] += 1
        if engine.trial is not None and engine.trial.result:
            engine.trial.record_result()
            engine.trial_result, engine.trial = engine.trial.result, None

    def _commit_bucket(self, exchange: BucketExchange, answer: Answer) -> None:
        """Resume the generator of one bucket, which applies the step. It stops at a ``RunBatched``,
        which the caller runs for all buckets, or at a post-commit exchange. One that could not
        start is not in flight, by which ``post_commit.add`` knows it.
        """
        try:
            # Resumed with the norm at Agree, or at ReadyToCommit, which ignores it; with its result
            # at RunBatched.
            exchange.resume_and_start_next(answer)
        except StopIteration:
            return
        except CommunicationError:
            pass
        if not isinstance(exchange.request, RunBatched):
            self.engine.post_commit.add(exchange)

    def _report(self, decision: StepDecision) -> None:
        """Update ``stats``; after the first step show a line."""
        engine, comm, applied = self.engine, self.comm, decision.applied
        if applied and "compression" not in engine.warned:
            self._show_first_line()
        engine.overlap.on_step_end()
        engine.waits.note_field(self.number, comm.size, decision.control_means["waits"][0])
        engine.update_stats(decision)
        trial = None if engine.sends_nothing else engine.trial
        if trial and trial.time_step(decision.phase_of, applied, engine.device):
            engine.peers_verified = False  # the next step's handshake compares ranks' times
        if not applied or engine.consecutive_skips:
            engine.count_skips(applied, self.method.max_skipped)

    def _show_first_line(self) -> None:
        """Show on rank 0 what is compressed, if the class compresses."""
        engine, comm, method = self.engine, self.comm, self.method
        engine.warned.add("compression")
        groups = engine.option_groups
        compresses = bool(groups) and all("when" in group for group in groups)
        if not compresses or not comm.rank == 0 == get_rank():
            return
        text = (
            "there are no other ranks, so every step is the base's and nothing is sent "
            "(simulate=True compresses all the same)."
        )
        if not engine.sends_nothing:
            values = [method.estimate_values_sent(b, comm.size) for b in engine.buckets]
            in_fsdp = method.replaces_reduce_scatter
            text = describe_compression(engine.buckets, values, in_fsdp)
        show_line(f"{engine.name}: {text}")


def _run_to_commit(decision: StepDecision) -> None:
    """Resume sharded generators with the norm, and wait until each has gathered its updated
    parameters.
    """
    exchanges: list[BucketExchange] = decision.exchanges
    for exchange in exchanges:
        exchange.resume_and_start_next(decision.norm)
    while waiting := [e for e in exchanges if not isinstance(e.request, ReadyToCommit)]:
        for exchange in waiting:
            exchange.resume_and_start_next(exchange.in_flight.wait())


@torch.no_grad()
def start_in_backward(engine: Engine, params: Iterable[torch.Tensor]) -> None:
    """Start the exchanges of all buckets that are ready, except the last, in their order.

    ``params``: those whose gradients backward has just finished.
    """
    comm = engine.refresh_ranks()
    if not engine.peers_verified or engine.damage or engine.has_grad_scaler or comm.size == 1:
        return
    if engine.method.is_joining:  # a rank without data has no backward
        return
    overlap = engine.overlap
    if overlap.is_idle:
        engine.options.refresh(engine.method.compared_groups)
        if engine.has_new_options or engine.trainable_has_changed:
            return
    finished = [(p, engine.bucket_of[p]) for p in params if p in engine.bucket_of]
    restarts = engine.backwards_are_alike
    overlap.start_ready(finished, engine.buckets, engine.algorithm, comm, restarts)
