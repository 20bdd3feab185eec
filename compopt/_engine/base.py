"""The interface that every optimizer here shares with torch.optim: groups, closure, hooks, state,
checkpoints.

Classes differ in their ``hooks``. The rest is in the session.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from .._ops.operations import Ops
from .._state.buckets import Bucket
from .._wire.collectives import Communicator, PendingCollective, ProcessGroup
from . import loading, missing_ranks, recovery, saving
from .hooks import OptimizerHooks
from .options import Group, Setting, check_tensors, name_groups, refuse
from .session import Role, Session, Sync
from .stats import Stats
from .step import start_in_backward, step_in_turns
from .when import OPTIONS

# told of every new optimizer (integrations.ddp listens)
constructed: list[Callable[[CompressedOptimizer], None]] = []
_has_integrations: ContextVar[bool] = ContextVar("compopt: optimizers are announced", default=True)


@contextmanager
def without_integrations() -> Iterator[None]:
    """Optimizers made in this block are stepped by another one: no integration looks for a model
    with their parameters.
    """
    token = _has_integrations.set(False)
    try:
        yield
    finally:
        _has_integrations.reset(token)


class CompressedOptimizer(Optimizer, OptimizerHooks):
    """Base of the optimizers that average their own gradients, compressed.

    A step is all or nothing: when any rank has a non-finite gradient all ranks skip it, and when a
    collective fails :class:`CommunicationError` is raised; parameters, state and step counts are
    then as they were.
    """

    _session: Session

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        process_group: ProcessGroup | Communicator | None = None,
        simulate: bool = False,
    ):
        self.simulate = simulate
        self._session = Session(self, process_group)
        trial = OPTIONS if "when" in defaults else {}
        defaults = {**defaults, **trial, "compress": None, "step": 0}
        self._check_defaults(defaults)
        super().__init__(params, defaults)
        self._session.build_buckets()
        for tell in constructed if _has_integrations.get() else ():
            tell(self)

    def _check_defaults(self, defaults: dict[str, Any]) -> None:
        """Bad options are told before bad parameters, as torch does."""
        self.check_group({**defaults, "params": []})

    # What users read

    @property
    def stats(self) -> Stats:
        """What the last step did."""
        return self._session.stats

    @property
    def comm(self) -> Communicator:
        """The ranks this optimizer averages over; connected when first needed."""
        return self._session.comm

    @property
    def ops(self) -> Ops:
        """The kernels in use."""
        return self._session.ops

    @property
    def backend(self) -> str:
        """Their name; they are chosen once at construction."""
        return self.ops.name

    @property
    def backend_reason(self) -> str:
        """Why these, in words."""
        return self.ops.reason

    @property
    def told_of_steps(self) -> list[Callable[[], None]]:
        """Called after every step: integrations that wait for one."""
        return self._session.step_callbacks

    @property
    def _buckets(self) -> list[Bucket]:
        return self._session.buckets

    def _settle(self) -> None:
        self._session.settle_state()

    # Stepping

    # torch.compile leaves it as it is. (torch.compiler.disable imports the compiler, at once.)
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average gradients over ranks, compressed, and update parameters. All ranks must call it.

        Raises CommunicationError when a collective failed, ValueError when ranks differ in
        settings, RuntimeError when the gradients were averaged before; in each case nothing was
        applied.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        missing_ranks.run_step(self._session, self.step_in_turns())
        for tell in tuple(self.told_of_steps):
            tell()
        return loss

    def step_in_turns(self) -> Generator[PendingCollective, None, None]:
        """The step as a generator, which yields each collective it is about to wait for."""
        yield from step_in_turns(self._session)

    # GradScaler then leaves unscaling and skipping to step(): all ranks agree
    _step_supports_amp_scaling = True

    def rebind(self, process_group: ProcessGroup | Communicator | None = None) -> None:
        """Go on over another group, from memory: after ranks were lost, or the group was made anew.

        All ranks of the new group call it. What was on its way is given up: masks on the wire are
        chosen again by the next step. Ranks on which the step that failed was not applied, while it
        was on others, take it over from those: afterwards ``param_groups[0]["step"]`` is the same
        everywhere. The residuals of ranks that are gone are lost, those here stay; a warning says
        so.

        Raises ValueError when ranks are more than one step apart, or sharded state would have to go
        to more ranks; CommunicationError when ranks fail again.
        """
        for _ in self.rebind_in_turns(process_group):
            pass

    @torch.no_grad()
    def rebind_in_turns(
        self, process_group: ProcessGroup | Communicator | None = None
    ) -> Generator[PendingCollective, None, None]:
        yield from recovery.rebind(self._session, process_group)

    # What the integrations say

    def take_over(self) -> None:
        """From now on the gradients of a DDP come here as they are."""
        self._session.role = Role.ACTIVE

    def retire(self) -> None:
        """Another optimizer has these parameters now: from here on ``step()`` says so."""
        self._session.replace()

    def handed_over(self) -> None:
        """DDP has given back gradients of this backward, not averaged."""
        self._session.has_local_gradients = True

    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        """Backward has finished these parameters: start complete buckets, all but the last."""
        start_in_backward(self._session, params)

    def backward_done(self) -> None:
        """The backward that started buckets has ended."""
        self._session.overlap.on_backward_end()

    # Groups

    def _settings(self) -> list[Setting]:
        sharded = " (sharded)" if self.sharded else ""
        return [
            ("class", type(self).__name__ + sharded),
            *name_groups("group", self._option_groups, self._known_options),
            # two backends round differently, and select differently among equals
            ("backend", self.backend),
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked, its state created.

        All ranks must do so at the same step.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._admit(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._lay_out(group)

    def _admit(self, group: Group) -> None:
        """Raise where a group cannot be taken as it is."""
        check_tensors(group)
        refuse(group)
        self.check_group(group)

    def _lay_out(self, group: Group) -> None:
        """Make room for a group that has come after the optimizer was made."""
        if self._session.is_built:
            group["step"] = self._option_groups[0]["step"]
            self._session.rebuild_buckets()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and never communicates. Every state has its parameter's shape: masks are
        booleans.

        Residuals are the mean over ranks right after :meth:`consolidate_state`, else this rank's
        own; the groups say which, under ``residuals``, and which ``class`` wrote them in which
        ``format``. Where other ranks hold something that would be missing, one warning says so.
        """
        saved = self._saved()
        saving.warn_of_what_is_missing(self._session)
        return saved

    def _saved(self) -> dict[str, Any]:
        session = self._session
        saving.come_to_rest(session)
        if session.has_foreign_state:
            session.rebuild_buckets()
        saved: dict[str, Any] = super().state_dict()
        saving.complete(session, saved)
        return saved

    def _signature(self, group: Group) -> dict[str, Any]:
        return saving.signature(self._session, group)

    def _groups_of(self, state_dict: dict[str, Any]) -> list[Group]:
        return loading.groups_of(self._session, state_dict)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but dtypes are kept: masks stay bits, residuals as precise as they were. All
        ranks must load.

        Of groups everything is taken over, but the names of parameters.

        Also takes a checkpoint of ``torch.optim.AdamW``. Raises ValueError, with nothing loaded,
        when it does not fit.
        """
        session = self._session
        session.settle_state()
        session.overlap.discard()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        loading.load(session, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
        session.consolidated_at = None
        session.rebuild_buckets()
        session.sync, session.consecutive_skips = Sync.UNVERIFIED, 0

    @torch.no_grad()
    def consolidate_state(self, patience: float | None = None) -> None:
        """Replace each rank's residuals by their mean over ranks, and gather sharded state. All
        ranks must call it, before ``state_dict``.

        Only the mean ever reaches the model, so training goes on as before, and a checkpoint
        restores on any number of ranks.

        Args:
            patience: seconds to wait until all ranks have called it. None: rank 0 waits 10, the
                others half an hour for rank 0, which may evaluate before.

        Raises CommunicationError, with nothing changed, when ranks did not come, or are in
        ``step()`` instead; ValueError when they consolidate different optimizers.
        """
        saving.come_to_rest(self._session)
        missing_ranks.meet_to_consolidate(self._session, patience)
        for _ in self.consolidate_in_turns():
            pass

    def consolidate_state_dict(self, to: int = 0) -> None:
        """``consolidate_state()``, under the name that Lightning and Fabric call on all ranks
        before they save, after ``torch.distributed.optim.ZeroRedundancyOptimizer``.

        ``to``: taken for their sake. The state is whole on every rank.
        """
        self.consolidate_state()

    def consolidate_in_turns(self) -> Generator[PendingCollective, None, None]:
        yield from saving.consolidate(self._session)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        if self._session.group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be pickled: save its state_dict() "
                "instead."
            )
        saving.come_to_rest(self._session)
        return self._contents()

    def _contents(self) -> dict[str, Any]:
        """What a copy is made from; the rest is rebuilt."""
        return {**super().__getstate__(), **saving.contents(self._session)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._revive(state, None)

    def _revive(self, contents: dict[str, Any], group: ProcessGroup | Communicator | None) -> None:
        """Become a copy of what had these contents."""
        contents = dict(contents)
        self._session = Session(
            self, group, contents.pop("_parameters"), contents.pop("_trainable")
        )
        super().__setstate__(contents)
        self._session.build_buckets()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedOptimizer:
        saving.come_to_rest(self._session)
        new = type(self).__new__(type(self))
        new._revive(copy.deepcopy(self._contents(), memo), self._session.group)
        return new
