"""One step: what comes before the exchange and after it, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._state.buckets import Bucket
from .._wire.comm import Comm
from .._wire.control import Words
from .._wire.pending import profiler_range
from .._wire.requests import CommunicationError
from . import frozen, gradients
from .decision import StepDecision
from .engine import Engine
from .face import Group
from .missing_ranks import RankLeft, explain_failure, post_lost_masks
from .peers import (
    describe_optimizer,
    raise_failure,
    raise_mismatch,
    verify_peers,
    warn_if_without_gradients,
)
from .refusals import misplaced, watch_skips
from .reporting import report
from .settings import bits_of, list_settings, structure_of
from .signals import defer_signals
from .telling import tell
from .turns import Turns


def step(engine: Engine) -> Turns[None]:
    """Take a step, as a generator that yields each collective it is about to wait for (the
    simulator's turns).
    """
    refuse(engine)
    comm = engine.look_around()  # first: state may have to be cut anew
    running = Step(engine, comm, engine.steps + 1)
    try:
        decision = yield from running.exchange()
        if decision is not None:
            running.commit(decision)
    except GeneratorExit:
        raise
    except BaseException as error:
        running.undo(error)
        if not isinstance(error, CommunicationError | RankLeft):
            raise
        number = running.number
        if running.over:
            raise CommunicationError(
                f"step {number} was applied, what followed it failed: {error}"
            ) from error
        why = (
            f"{error}. Make a new process group on all ranks and call rebind()"
            if isinstance(error, RankLeft)
            else f"{error}{explain_failure(engine)}"
        )
        raise CommunicationError(
            f"step {number} was not applied on rank {comm.rank}: {why}"
        ) from error
    finally:
        running.problem = None  # whose frames hold this


def refuse(engine: Engine) -> None:
    """Raise where the optimizer may not be stepped."""
    if engine.retired:
        raise RuntimeError(
            f"this {engine.name} was replaced: an optimizer made later holds its "
            "parameters and has their gradients now. Step that one, or call "
            "compopt.attach(ddp_model, optimizer) to have this one back."
        )
    engine.refuse_half_step()


class Step:
    """The step that is running, of all parameter groups or of some ``groups``."""

    def __init__(
        self, engine: Engine, comm: Comm, number: int, groups: Sequence[Group] | None = None
    ):
        self.engine, self.comm, self.number, self._groups = engine, comm, number, groups
        # why this rank cannot send its gradients
        self.problem: Exception | None = None
        # what had to be agreed on is done: what is raised now leaves the ranks level
        self.over = False
        # the scale that was taken off the gradients
        self.scale: float | None = None

    @property
    def groups(self) -> Sequence[Group]:
        return self.engine.option_groups if self._groups is None else self._groups

    @property
    def buckets(self) -> list[Bucket]:
        if self._groups is None:
            return self.engine.buckets
        stepped = {id(group) for group in self._groups}
        return [bucket for bucket in self.engine.buckets if id(bucket.group) in stepped]

    def exchange(self) -> Turns[StepDecision | None]:
        """Run until all ranks have decided whether to commit; None where there is nothing to
        exchange.
        """
        engine = self.engine
        if frozen.reset_from_outside(engine):
            engine.rebuild()
        self.problem = self._prepare()
        yield from self._finish_post_commit()
        if not engine.peers.verified:
            yield from self.verify_peers()
        if not self.buckets:
            return None
        decision = yield from self._agree()
        if decision.agreed["unfrozen"][0] > 0:
            # on some rank other parameters require a gradient now
            yield from self.verify_peers()
            if not self.buckets:
                return None
            decision = yield from self._agree()
        self._tell_of_changes(decision)
        yield from self._refuse(decision)
        return decision

    def commit(self, decision: StepDecision) -> None:
        """Apply the step, or skip it, and report it."""
        engine, comm = self.engine, self.comm
        self._apply(decision)
        if decision.applied:
            warn_if_without_gradients(engine, decision)
        if decision.applied and not engine.told:
            engine.told = True
            tell(engine, comm)
        sent, engine.counted = comm.bytes_sent - engine.counted, comm.bytes_sent
        report(engine, decision, sent, engine.steps)
        self._time(decision)
        if too_many := watch_skips(engine, decision.applied):
            raise too_many

    def undo(self, error: BaseException) -> None:
        """What is left to do where the step has raised."""
        engine = self.engine
        if not self.over and self.scale is not None:
            gradients.scale_back(engine, self.scale)
        if not self.over or isinstance(error, CommunicationError):
            # ranks may be a step apart now: the next one begins with a handshake
            engine.peers.verified = False

    # Before the exchange

    def _prepare(self) -> Exception | None:
        """Make gradients what will be sent.

        What goes wrong here is told by all ranks, when they agree.
        """
        engine = self.engine
        try:
            gradients.check(engine)
            self.scale = gradients.unscale(engine)
            engine.face.before_exchange()
            for bucket in engine.buckets:
                bucket.renew_masters()
        except Exception as error:
            return error
        return None

    def _finish_post_commit(self) -> Turns[None]:
        """Wait for what followed the last step, and find out whether a handshake is due."""
        engine = self.engine
        post_commit = engine.runtime.post_commit
        yield from post_commit.finish_in_turns()
        if post_commit.lost and not post_commit.unconfirmed:
            post_lost_masks(engine)
        yield from post_commit.confirm(self.comm, engine.device)
        for bucket in engine.buckets:
            bucket.gathered = {}
        # nothing is sent that could say so
        alone = not self.buckets and frozen.changed(engine)
        peers = engine.peers
        if post_commit.lost or alone or peers.structure != structure_of(engine):
            peers.verified = post_commit.lost = False

    def verify_peers(self) -> Turns[None]:
        engine = self.engine
        engine.runtime.overlap.discard()
        has_problem = self.problem is not None
        had_gradients = yield from verify_peers(engine, self.comm, has_problem)
        if frozen.changed(engine):  # and on all ranks alike
            yield from frozen.follow(engine, self.comm)
            engine.face.before_exchange()
        # without any gradient, the next step begins with a handshake too
        exempt = engine.face.reduces_inside or engine.has_pseudo_gradients
        engine.peers.verified = had_gradients or exempt

    # The exchange

    def _agree(self) -> Turns[StepDecision]:
        engine, comm = self.engine, self.comm
        every = engine.face.check_replicas_every
        settings: list[Any] = [*list_settings(engine)]
        if every and self.number % every == 0:
            settings += describe_optimizer(engine)
        words: dict[str, Words] = {"settings": bits_of(settings)}
        unfrozen = frozen.changed(engine)
        words["unfrozen"] = [float(unfrozen)]
        problem = self.problem
        if unfrozen:  # all ranks hear of a problem, and nothing is applied
            problem = RuntimeError("other parameters require a gradient than before")
        runtime = engine.runtime
        return (yield from runtime.agree(self.buckets, comm, words, engine.shards, problem))

    def _tell_of_changes(self, decision: StepDecision) -> None:
        if decision.resent:
            self.engine.warn_once(
                "resent",
                "gradients were changed between backward and step() (a clip, an unscale, another "
                "backward?), so what was sent during backward had to be sent again. From now on "
                "nothing is sent before step(): clip with max_grad_norm= instead to keep "
                "communication behind backward.",
                self.comm.rank,
            )

    def _refuse(self, decision: StepDecision) -> Turns[None]:
        """Raise where ranks found that they cannot go on as they are; all of them do."""
        engine = self.engine
        if decision.misplaced:
            raise misplaced(engine, decision)
        if decision.unsent:
            self.problem = decision.take_error(self.problem)
            problem = self.problem
            failure = "" if problem is None else f"{type(problem).__name__}: {problem}"
            del problem  # its frames hold this one
            try:
                yield from raise_failure(engine, self.comm, failure)
            except CommunicationError:
                if self.problem is None:
                    raise
                raise self.problem from None
        if decision.mismatched:
            yield from raise_mismatch(engine, self.comm)

    # After it

    def _apply(self, decision: StepDecision) -> None:
        """Commit a step that is to be applied, and count it: as a whole, whatever signals come
        meanwhile.
        """
        engine = self.engine
        with defer_signals():
            if decision.applied:
                engine.handed_over = False
                try:
                    engine.half_step = f"step {self.number} was interrupted"
                    self._commit(decision)
                except BaseException as error:
                    engine.half_step = _half(self.number, engine.runtime.committing, error)
                    for bucket in engine.buckets:
                        bucket.cache.clear()  # it follows from state, and may be wrong
                    raise
                engine.half_step = ""
            engine.peers.structure = structure_of(engine)
            self.over = True

    def _commit(self, decision: StepDecision) -> None:
        engine = self.engine
        with profiler_range("compopt::commit"):
            engine.runtime.commit(decision)
            engine.face.committed()
        for group in self.groups:
            group["step"] += 1
        if engine.trial is not None and engine.trial.found:
            engine.trial.keep()
            engine.found, engine.trial = engine.trial.found, None

    def _time(self, decision: StepDecision) -> None:
        """Take the step's time, where a trial goes on."""
        engine = self.engine
        trial = engine.trial
        if engine.dense:
            return  # without other ranks there is nothing to compare
        if trial and trial.watch(decision.phase_of, decision.applied, engine.device):
            # with the next step's handshake all ranks compare their times
            engine.peers.verified = False


def _half(number: int, bucket: Bucket | None, error: BaseException) -> str:
    where = (
        "after its buckets"
        if bucket is None
        else f"in bucket {bucket.index} ({bucket.names[0]}, ...)"
    )
    return f"step {number} was applied in part: {type(error).__name__} was raised {where} ({error})"
