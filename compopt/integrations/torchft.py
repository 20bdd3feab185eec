"""Ranks that leave and join while the others train: compopt inside torchft.

torchft keeps the quorum (a lighthouse process), the heartbeats, the process group of each quorum,
and the way to a joiner. compopt keeps the exchange, its residuals, and what a failed step means.

A quorum is asked for at the start of a round (with other classes than ``LocalSteps``, of a step).
There joiners enter: they load the state of a peer, with residuals of zero. ``LocalSteps`` asks once
more right before an exchange, of those that are left, so that a rank which has died within the
round costs no exchange. An exchange that fails is repeated with the ranks that are left: what they
have moved, or their gradients, are not lost.

All replica groups meet in the same quorums, because each asks in the same states: at most once for
each number of steps, and again after a failure, which all of them see.
"""

from __future__ import annotations

import copy
import datetime
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from .._engine.engine import weak_method
from .._engine.missing_ranks import RankLeft
from .._engine.optimizer import CompressedOptimizer
from .._engine.options import Group
from .._state.tensors import distribute_like, to_local
from .._wire.groups import ProcessGroup, Ranks, is_initialized
from .._wire.in_flight import forget_group, looking_after
from .._wire.requests import CommunicationError
from ..local_steps import LocalSteps
from ..local_steps.rounds import LocalStats
from ._quorum_waits import AdaptiveTimeout, ConnectTimeout, check_store
from .ddp import attach

log = logging.getLogger(__name__)

LOCAL = "part of this rank"  # in place of a DTensor, which no transport sends

# what a failed exchange and a quorum that did not come raise
FAILURES = (CommunicationError, RankLeft, TimeoutError)


class VotedDown(CommunicationError):
    """Another rank of this replica group could not reach its peers."""


class Manager(Protocol):
    """The methods of ``torchft.Manager`` that are called here."""

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None: ...
    def start_quorum(
        self, *, shrink_only: bool = False, timeout: datetime.timedelta | None = None
    ) -> None: ...
    def errored(self) -> Any: ...
    def report_error(self, e: Exception) -> None: ...
    def should_commit(self) -> bool: ...
    def current_step(self) -> int: ...
    def participating_rank(self) -> int | None: ...
    def num_participants(self) -> int: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state_dict: dict[str, int]) -> None: ...
    def shutdown(self) -> None: ...


class Stateful(Protocol):
    """A scheduler, or the position in the data."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def make_manager(group: ProcessGroup, min_replicas: int = 1, **options: Any) -> Manager:
    """Return a ``torchft.Manager`` for this process, whose quorums are synchronous.

    The environment names the lighthouse (TORCHFT_LIGHTHOUSE). Under torchrun the ranks of this
    launch are one replica group; a process that was started alone is one by itself.

    Args:
        group: of torchft, ``torchft.ProcessGroupGloo(timeout=...)``.
        min_replicas: the replica groups without which nobody trains.
        options: others of ``torchft.Manager``, as ``timeout`` and ``replica_id``.
    """
    if "lighthouse_addr" not in options and "TORCHFT_LIGHTHOUSE" not in os.environ:
        raise ValueError(
            "TORCHFT_LIGHTHOUSE is not set: start `torchft_lighthouse --min_replicas 1`, and set "
            "it to the address that this prints, as http://host:29510, on all machines."
        )
    try:
        torchft: Any = importlib.import_module("torchft")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "torchft is not installed: pip install 'compopt[torchft]'."
        ) from error
    given: dict[str, Any] = {"rank": 0, "world_size": 1, "store_addr": "localhost"}
    store = None
    if "MASTER_ADDR" in os.environ:
        given = {}
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "localhost", 0, is_master=True, wait_for_workers=False
        )
        given["store_port"] = store.port
    manager: Any = torchft.Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=min_replicas,
        use_async_quorum=False,
        **{**given, **options},
    )
    manager._own_store = store  # lives as long
    return manager  # type: ignore[no-any-return]


class FaultTolerant:
    """A model and an optimizer that train with whichever replica groups are there::

        group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=60))
        ft = FaultTolerant(make_manager(group), group, optimizer, model, scheduler=scheduler)
        for step in ft.steps(1000):
            optimizer.zero_grad()
            model(batch(step)).backward()
            optimizer.step()

    ``optimizer`` is made with ``process_group=compopt.Ranks(None, 0, 1)``: a replica group is alone
    until the first quorum. Replica groups may begin with unlike parameters: the first quorum makes
    them equal. Make this object last: peers wait for a group that has a manager.

    Args:
        manager: a ``torchft.Manager`` with ``use_async_quorum=False``, as ``make_manager`` returns.
        group: the manager's process group, of torchft.
        optimizer: of this package, unsharded; ``LocalSteps`` with ``fragments=1``, ``delay=0`` and
            rounds of ``every`` steps.
        model: what a joiner loads, with its buffers.
        stateful: other objects with ``state_dict()`` and ``load_state_dict()`` that a joiner takes
            over: the scheduler, the position in the data.
        patience: seconds to go on asking for a quorum that does not come, before an error.
        timeout: seconds for the first exchanges, and for a joiner to load its state. Later
            exchanges have less: it adapts to those that were seen.
        join_timeout: that of the lighthouse (``--join_timeout_ms``) in seconds. Who waits for so
            long makes it give a quorum to the first of the others that asks, without the rest. So a
            joiner asks anew three times as often.

    Raises:
        ValueError: the optimizer's state cannot be given to a joiner.
    """

    def __init__(
        self,
        manager: Manager,
        group: ProcessGroup,
        optimizer: CompressedOptimizer,
        model: nn.Module,
        *,
        patience: float = 1800.0,
        timeout: float = 60.0,
        join_timeout: float = 60.0,
        **stateful: Stateful,
    ):
        check_optimizer(optimizer)
        if isinstance(model, DistributedDataParallel):  # now: ranks compare their settings after it
            attach(model, optimizer)
        self.manager, self.group, self.optimizer, self.model = manager, group, optimizer, model
        self.patience, self.stateful = patience, stateful
        self.exchange_timeout = AdaptiveTimeout(timeout, least=5.0)
        self.quorum_timeout = AdaptiveTimeout(timeout, least=10.0)
        self.connect_timeout, self.join_timeout = ConnectTimeout(timeout), join_timeout
        self.generation: int | None = None  # of the ranks that torchft has connected
        self._bound: int | None = None  # of those that the optimizer averages over
        self._met_at = -1  # the steps at which the last quorum was asked for
        # what was loaded since the last step began: options of the groups, and ``stateful``
        self._from_peer: tuple[list[Group], dict[str, Any]] | None = None
        self._bytes_before = 0  # sent over earlier ranks
        self._has_others = is_initialized() and dist.get_world_size() > 1  # in its replica group
        self._local = optimizer if isinstance(optimizer, LocalSteps) else None
        self._note_connects()
        manager.register_state_dict_fn("compopt", self._load_from_peer, self._save_for_joiner)
        optimizer._engine.run_step = weak_method(self._run_step)

    @property
    def step(self) -> int:
        """The number of steps that the optimizer has taken; a joiner's is that of its peers."""
        return self.optimizer._engine.steps

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has handed to collectives, over all ranks so far."""
        return self._bytes_before + self.optimizer.comm.bytes_sent

    def steps(self, until: int) -> Iterator[int]:
        """Yield the number of the coming step, from 0, until so many were taken; then end the round
        that is open.
        """
        while self.step < until:
            self.begin_step()
            if self.step < until:  # a joiner may come at the end
                yield self.step
        local = self._local
        if local is not None and local.round_is_open and not self._meet(shrink_only=True):
            self._exchange(local.end_round, self.step)

    def begin_step(self) -> None:
        """Meet the other replica groups if a round begins, or with other classes a step; joiners
        enter here. ``steps`` calls it.
        """
        if self._from_peer is not None:
            self._restore_from_peer(*self._from_peer)
        is_first = self._met_at < 0
        if is_first or not (self._met_at == self.step or self._is_within_round()):
            self._meet(shrink_only=False)
        if is_first and self.manager.current_step() == 0:
            # in every quorum before the first commit all would load the state of one
            self.manager.should_commit()
        self._from_peer = None

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint for the case that all replica groups are gone, without
        communication.
        """
        return {"compopt": self._save_for_joiner(), "manager": self.manager.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, before the first step."""
        self._load_from_peer(state_dict["compopt"])
        self.manager.load_state_dict(state_dict["manager"])

    def shutdown(self) -> None:
        """Leave the quorum, after the last step: peers then need no time-out to see it."""
        self.manager.shutdown()

    # A step

    def _is_within_round(self) -> bool:
        stats = self.optimizer.stats
        return isinstance(stats, LocalStats) and stats.steps_into_round > 0

    def _run_step(self, take_step: Callable[[], None]) -> None:
        """Take a step; if ranks are lost in it, take it with those that are left."""
        if self._met_at < 0:
            raise RuntimeError("there was no quorum yet: call begin_step(), or loop over steps().")
        step = self.step
        if self._local is not None and not self._local.exchange_is_due:
            # ranks may still have to compare their settings
            self._exchange(take_step, step + 1, is_commit=False)
        elif self._met_at == step or not self._meet(shrink_only=True):
            self._return_to(step)
            self._exchange(take_step, step + 1)
        # else it has a peer's state now, to which these gradients do not belong

    def _return_to(self, step: int) -> None:
        """Take back the count of a step that rebind() has adopted from peers that were already in
        it: their exchange has failed and they end their round, while this rank takes the step.
        """
        if self.step != step:
            for group in self.optimizer._engine.option_groups:
                group["step"] = step

    def _exchange(self, exchange: Callable[[], None], target: int, is_commit: bool = True) -> None:
        """Take a step, or end a round; repeat it with the ranks that are left until this rank has
        taken ``target`` steps, and its round has ended.

        ``is_commit``: it exchanges what ranks have computed, on which they vote.
        """
        began = time.monotonic()
        failure = self._attempt(exchange)
        if is_commit and not failure:
            self.exchange_timeout.add(time.monotonic() - began)
        is_commit |= bool(failure)
        while failure:
            self._note_failure(failure)
            if self._meet(shrink_only=True):
                return
            # a rank that has applied the exchange has shared it in rebind()
            failure = ""
            if self.step < target:
                failure = self._attempt(exchange)
            elif self._local is not None and self._local.round_is_open:
                failure = self._attempt(self._local.end_round)
        if is_commit:
            self.manager.should_commit()

    def _attempt(self, exchange: Callable[[], None]) -> str:
        """Return why other ranks have failed an exchange; empty if they have not."""
        try:
            with self._limit(self.exchange_timeout.seconds):
                exchange()
        except FAILURES as error:  # not kept: its traceback holds what is in flight
            return str(error) or type(error).__name__
        return ""

    def _limit(self, seconds: float) -> Any:
        """Return a context in which no collective is waited for any longer."""

        def give_up() -> None:
            raise RankLeft(f"no answer within {seconds:.1f} s")

        return looking_after(seconds, give_up)

    def _note_failure(self, failure: str, was_voted: bool = False) -> None:
        """Let the next quorum connect ranks anew, and let peers that wait for this rank see it."""
        log.warning("step %s was not exchanged: %s", self.step, failure)
        self.optimizer._engine.forget_in_flight()
        forget_group(self.group)  # its connections close when nothing refers to it
        self.group.abort()
        if was_voted:
            self.manager.report_error(CommunicationError(failure))
        else:
            self._vote_no(failure)

    def _vote_no(self, failure: str) -> None:
        """Let the other ranks of this replica group see that this one has failed."""
        self.manager.report_error(CommunicationError(failure))
        try:
            self.manager.should_commit()
        except (RuntimeError, TimeoutError) as unanswered:
            log.warning("the vote on it failed: %s", unanswered)

    # Quorums

    def _meet(self, shrink_only: bool) -> bool:
        """Ask for a quorum until there is one, and bind the optimizer to its ranks. Returns whether
        this rank has loaded the state of a peer.
        """
        deadline = time.monotonic() + self.patience
        begins_round = self._local is not None and not shrink_only
        self._from_peer, commits = None, self.manager.state_dict()
        is_in_last = self._bound is not None
        while True:
            try:
                self._ask_for_quorum(shrink_only, is_in_last)
                break
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                # who was left out of the last quorum gets no answer from one that only shrinks
                shrink_only = is_in_last = False
                if self._has_others:  # all ranks of this replica group ask anew, or none
                    self._vote_no("no quorum yet")
                continue
            except (CommunicationError, RankLeft) as error:
                if time.monotonic() > deadline:
                    raise
                failure, was_voted = str(error), isinstance(error, VotedDown)
            self._note_failure(failure, was_voted)
            self._bound = None
            if begins_round:  # peers may go on without this rank: it asks as one that is behind
                self.manager.load_state_dict({**commits, "step": max(0, commits["step"] - 1)})
        self._met_at = self.step
        return self._from_peer is not None

    def _ask_for_quorum(self, shrink_only: bool, is_in_last: bool) -> None:
        """Ask for a quorum, once; load the state of a peer if this rank is behind."""
        manager, began = self.manager, time.monotonic()
        limit = None
        if shrink_only:
            limit = datetime.timedelta(seconds=self.quorum_timeout.seconds)
        elif not is_in_last:  # it may wait for a whole round of the others
            limit = datetime.timedelta(seconds=self.join_timeout / 3)
        try:
            manager.start_quorum(shrink_only=shrink_only, timeout=limit)
        except BaseException as error:
            ended: Future[None] = Future()
            ended.set_result(None)
            vars(manager)["_quorum_future"] = ended  # else the next call raises the error
            if type(error) is RuntimeError:  # of torchft's servers
                raise CommunicationError(f"no quorum: {error}") from error
            raise
        if (failed := manager.errored()) is not None:
            raise CommunicationError(f"the quorum failed: {str(failed).splitlines()[0]}")
        if shrink_only:
            self.quorum_timeout.add(time.monotonic() - began)
        if self._bound != self.generation:
            self._bind()

    def _bind(self) -> None:
        """Average over the ranks of the last quorum."""
        manager, optimizer, generation = self.manager, self.optimizer, self.generation
        rank, size = manager.participating_rank(), manager.num_participants()
        if rank is None:
            raise CommunicationError("this replica group is not in the quorum")
        self._bytes_before += optimizer.comm.bytes_sent
        self._bound = None  # until all have met
        ranks = Ranks(self.group, rank, size, lambda: self.generation)
        with self._limit(self.exchange_timeout.first):  # a joiner loads its state meanwhile
            optimizer.rebind(ranks)
            if self._local is not None:  # else its next local step would
                self._local.run_handshake()
        if self._has_others and not manager.should_commit():
            raise VotedDown("another rank of this replica group could not reach its peers")
        self._bound = generation
        log.info("step %s: rank %s of %s replica groups", self.step, rank, size)

    def _note_connects(self) -> None:
        """Note when torchft connects other ranks, and give them less time than for an exchange."""
        reconfigure = self.group.reconfigure  # type: ignore[attr-defined]

        def connect(options: Any) -> Any:
            self.generation = int(options.uuid)
            with self.connect_timeout.applied_to(self.group):
                check_store(options.handles, self.connect_timeout.seconds)
                connected = reconfigure(options)
            # to the peer that a joiner loads from, which may have died meanwhile
            seconds = self.connect_timeout.seconds
            vars(self.manager)["_connect_timeout"] = datetime.timedelta(seconds=seconds)
            return connected

        self.group.reconfigure = connect  # type: ignore[attr-defined]

    # The state of a joiner

    def _save_for_joiner(self) -> dict[str, Any]:
        """Return copies of everything: torchft sends them while training goes on."""
        model = _mark_local_parts(self.model.state_dict())
        others = {name: one.state_dict() for name, one in self.stateful.items()}
        # before the first step there is none, and torch.optim.Muon would communicate to make one
        state = _mark_local_parts(self.optimizer.state_for_joiner()) if self.step else None
        return {**copy.deepcopy({"model": model, **others}), "optimizer": state}

    def _load_from_peer(self, saved: Mapping[str, Any]) -> None:
        own = self.model.state_dict()
        loaded = {name: _to_dtensors(value, own[name]) for name, value in saved["model"].items()}
        self.model.load_state_dict(loaded)
        if (optimizer := saved["optimizer"]) is not None:
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            entries = optimizer["state"].items()
            state = {key: _to_dtensors(entry, params[key]) for key, entry in entries}
            self.optimizer.load_state_dict({**optimizer, "state": state})
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        self._from_peer = groups, {name: saved[name] for name in self.stateful}
        self._restore_from_peer(*self._from_peer)

    def _restore_from_peer(self, groups: list[Group], stateful: dict[str, Any]) -> None:
        """Load what the loop moves on after ``optimizer.step()``, in which it may have been loaded:
        options that a scheduler sets, the scheduler, the position in the data.
        """
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(options)
        for name, one in self.stateful.items():
            one.load_state_dict(copy.deepcopy(stateful[name]))


def check_optimizer(optimizer: CompressedOptimizer) -> None:
    """Raise ValueError if ranks cannot join ``optimizer`` while others train."""
    name = type(optimizer).__name__
    if optimizer.sharded:
        raise ValueError(
            f"{name} cuts its state into shards, one a rank: a rank that is lost takes its part "
            "along. Use a class or an option without shards, or Snapshots (docs/elastic.md)."
        )
    options = optimizer._engine.option_groups[0]
    for option, needed in (("round_seconds", None), ("fragments", 1), ("delay", 0)):
        if option in options and options[option] != needed:
            raise ValueError(
                f"{name} has {option}={options[option]!r}, so there is no step after which all "
                f"parameters are equal, and a rank can join: set {option}={needed}."
            )


def _mark_local_parts(state: Any) -> Any:
    """Return values in which this rank's part is marked, and stands for the DTensor."""
    return tree_map(lambda x: {LOCAL: to_local(x)} if hasattr(x, "to_local") else x, state)


def _to_dtensors(state: Any, p: Tensor) -> Any:
    """Return values with DTensors like ``p`` for the marked parts."""

    def is_marked(value: Any) -> bool:
        return isinstance(value, dict) and LOCAL in value

    def restore(value: Any) -> Any:
        return distribute_like(p, value[LOCAL]) if is_marked(value) else value

    return tree_map(restore, state, is_leaf=is_marked)
