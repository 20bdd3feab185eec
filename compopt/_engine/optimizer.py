"""The interface that all classes share with torch.optim: groups, closure, hooks, state and
checkpoints.

Classes override the methods of ``Method``. The data between steps is in the engine.

Every class derives from ``CompressedOptimizer``: ``RadiusAdamW``, ``Wrapper``,
``ReducingOptimizer`` and the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .._ops.operations import Ops
from .._state.bucket import Bucket
from .._wire.collectives import Communicator, check_process_group, notify_join
from .._wire.groups import ProcessGroup, Ranks
from .._wire.requests import CommunicationError
from . import checkpoint, meetings, missing_ranks, resharding
from .engine import Engine
from .join import JoinHook, copy_options_from_ranks_with_data
from .method import Method
from .options import (
    TRIAL_OPTIONS,
    Group,
    check_tensors,
    refuse_unsupported,
)
from .stats import Stats
from .step import exchange_and_commit, start_in_backward

# called with every new optimizer, by the integrations
construction_callbacks: list[Callable[[CompressedOptimizer], None]] = []
# called with an optimizer that is given to torch's Join, by the integrations
join_callbacks: list[Callable[[CompressedOptimizer], None]] = []
_has_integrations: ContextVar[bool] = ContextVar("compopt integrations", default=True)


@contextmanager
def without_integrations() -> Iterator[None]:
    """Make optimizers in this block that another one steps: no integration searches for their
    model.
    """
    token = _has_integrations.set(False)
    try:
        yield
    finally:
        _has_integrations.reset(token)


class CompressedOptimizer(Method):
    """Base of the optimizers that average their own gradients, compressed.

    A step is all or nothing. If any rank has a non-finite gradient, all ranks skip the step. If a
    collective fails, :class:`CommunicationError` is raised. In both cases parameters, state and
    step counts do not change on this rank. A rank that had received everything when a collective
    failed may have applied the step; :meth:`rebind` then copies its state to the others.
    """

    _engine: Engine

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        process_group: ProcessGroup | Ranks | Communicator | None = None,
        simulate: bool = False,
    ):
        check_process_group(process_group)
        self.simulate = simulate
        self._engine = Engine(self, process_group)
        trial_options = TRIAL_OPTIONS if "when" in defaults else {}
        defaults = {**defaults, **trial_options, "compress": None, "step": 0}
        self._check_defaults(defaults)  # before parameters, as torch
        super().__init__(params, defaults)
        self._engine.build_buckets()
        if _has_integrations.get():
            for on_construction in construction_callbacks:
                on_construction(self)

    def _check_defaults(self, defaults: dict[str, Any]) -> None:
        self.check_group({**defaults, "params": []})

    # Public attributes

    @property
    def stats(self) -> Stats:
        """Numbers of the last step."""
        return self._engine.stats

    @property
    def comm(self) -> Communicator:
        """The ranks to average over. They are connected anew if the default process group is
        another one than before (``Engine.refresh_ranks``).
        """
        return self._engine.refresh_ranks()

    @property
    def ops(self) -> Ops:
        """The kernels in use."""
        return self._engine.ops

    @property
    def backend(self) -> str:
        """The name of the kernels in use, chosen once at construction."""
        return self.ops.name

    @property
    def backend_reason(self) -> str:
        """A sentence on why this backend was chosen."""
        return self.ops.reason

    @property
    def step_callbacks(self) -> list[Callable[[], None]]:
        """Functions that integrations have called after every step."""
        return self._engine.step_callbacks

    @property
    def _buckets(self) -> list[Bucket]:
        return self._engine.buckets

    # Stepping

    # excluded from torch.compile; torch.compiler.disable would import the compiler at once
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average gradients over ranks, compressed, and update parameters. All ranks must call it.

        Raises CommunicationError if a collective failed, ValueError if ranks differ in settings,
        RuntimeError if the gradients were averaged before. The step is then not applied on this
        rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.is_joining:
            notify_join(self)
        engine = self._engine
        take_step = partial(missing_ranks.run_watching_ranks, engine, self.take_step)
        if engine.run_step is None:
            take_step()
        else:
            engine.run_step(take_step)
        for on_step in tuple(self.step_callbacks):
            on_step()
        return loss

    def take_step(self) -> None:
        """Take a step, without the hooks of ``step()``."""
        exchange_and_commit(self._engine)

    # step() unscales and skips instead of GradScaler, so that all ranks agree
    _step_supports_amp_scaling = True

    def rebind(self, process_group: ProcessGroup | Ranks | Communicator | None = None) -> None:
        """Continue over another group, from memory, after ranks were lost or the group was made
        anew.

        All ranks of the new group must call it. Exchanges in flight are dropped: the next step
        chooses new masks. If only some ranks applied the failed step, the others copy it from
        those: afterwards ``param_groups[0]["step"]`` is the same everywhere. The residuals of lost
        ranks are lost, those of the others stay; a warning says so.

        Raises ValueError if ranks are more than one step apart, or if sharded state would go to
        more ranks; CommunicationError if ranks fail again.
        """
        try:
            self._rebind(process_group)
        except CommunicationError as error:
            raise CommunicationError(
                f"rebind() of {self._engine.name} failed on rank {self.comm.rank}: {error}. Make "
                "a new process group of the ranks that are left, and call rebind() again on all of "
                "them."
            ) from None

    @torch.no_grad()
    def _rebind(self, process_group: ProcessGroup | Ranks | Communicator | None = None) -> None:
        resharding.rebind_optimizer(self._engine, process_group)

    # Join: ranks that run out of data

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what torch's ``Join`` calls on a rank that has finished its data.

        Args:
            kwargs: of ``Join``. ``divide_by_initial_world_size=False`` averages over the ranks that
                have data; by default, as in DDP, over all.

        Raises ValueError inside FSDP2, whose own collectives every rank has to call.
        """
        if self.replaces_reduce_scatter:
            raise ValueError(
                "Join cannot stand in for FSDP2's collectives: give all ranks equally many batches "
                "(drop_last=True)."
            )
        self._engine.divides_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        for on_join in join_callbacks:
            on_join(self)
        return JoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives of torch's ``Join``."""
        return self._engine.device

    @property
    def join_process_group(self) -> Any:
        """The process group of the optimizer, for torch's ``Join``."""
        return self.comm.group

    def end_join(self) -> None:
        """End a ``Join``: from now on all ranks have data again. Copy the options of a rank that
        had data last, because its scheduler may have stepped since its last step.
        """
        engine = self._engine
        copy_options_from_ranks_with_data(self._engine)
        self._join_config, engine.has_data, engine.divides_by_all = None, True, True
        for bucket in engine.buckets:
            bucket.gradient_factor = 1.0

    # Calls of the integrations

    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        """Start the exchanges of complete buckets: backward has finished ``params``."""
        start_in_backward(self._engine, params)

    def backward_done(self) -> None:
        """End the exchanges of a backward: it has finished all gradients."""
        self._engine.overlap.on_backward_end()

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked, its state created.

        All ranks must do so at the same step.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_new_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        try:
            self._lay_out_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            self.forget_group(group)
            raise

    def forget_group(self, group: Group) -> None:
        """Drop the state of a group that was removed."""
        for p in group["params"]:
            self.state.pop(p, None)
        self._engine.rebuild_buckets()

    def lay_out_new_parameters(self) -> None:
        """Lay out state anew if ``param_groups`` hold other parameters by now: Accelerate puts
        FSDP2's shards in their place, and torch's optimizers step what is appended to a group.
        """
        # more groups: new ones of a base
        groups = self.param_groups[: len(self.option_groups)]
        params = chain.from_iterable(map(itemgetter("params"), groups))
        if self._engine.parameters != set(params):
            self._replace_parameters()
            for on_construction in construction_callbacks:
                on_construction(self)

    def _replace_parameters(self) -> None:
        """Rebuild buckets where groups hold new tensors; the tensors that stay keep their state.

        Raises ValueError if their state is cut into shards, which would have to be cut anew.
        """
        if self.sharded:
            for group in self.param_groups:
                self._forget_shards(group)
        params = {p for group in self.param_groups for p in group["params"]}
        for p in self._engine.parameters - params:
            self.state.pop(p, None)
        self._engine.rebuild_buckets()

    def _forget_shards(self, group: Group) -> None:
        """Drop the shards of a group whose parameters have changed.

        Raises ValueError if a step has filled shards of parameters that stay.
        """
        engine = self._engine
        layout = [*engine.buckets, *engine.frozen_buckets]
        buckets = [bucket for bucket in layout if bucket.group is group]
        before, now = {p for bucket in buckets for p in bucket.params}, {*group["params"]}
        if before == now:
            return
        if engine.steps and before & now:
            raise ValueError(
                f"{engine.name} has cut its state into shards, and the parameters of a group have "
                f"changed after step {engine.steps}: add parameters by add_param_group(), or make "
                "the optimizer anew and load a consolidated checkpoint."
            )
        for bucket in buckets:
            for entry in bucket.entries:
                for name in bucket.sharded_names:
                    entry.pop(name, None)

    def _check_new_group(self, group: Group) -> None:
        """Raise if a group is invalid."""
        check_tensors(group)
        refuse_unsupported(group)
        self.check_group(group)

    def _lay_out_group(self, group: Group) -> None:
        """Lay out a group that was added after the optimizer was made."""
        if self._engine.is_built:
            group["step"] = self.option_groups[0]["step"]
            self._engine.rebuild_buckets()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, without communication. Every state has its parameter's
        shape; masks are booleans.

        Residuals are the mean over ranks right after :meth:`consolidate_state`, else this rank's
        own. The groups record which, under ``residuals``, and the ``class`` and ``format``. A
        warning says once if state of other ranks is missing.
        """
        self._engine.check_has_shards()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._make_state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def _make_state_dict(self) -> dict[str, Any]:
        """Return all that ``state_dict()`` saves; warn if state of other ranks is missing."""
        saved = self.save_without_hooks()
        checkpoint.warn_of_missing_state(self._engine)
        return saved

    def save_without_hooks(self) -> dict[str, Any]:
        checkpoint.settle_for_saving(self._engine)
        self.apply_changed_options()
        with checkpoint.without_hooks(self):  # they are given the complete state dict
            saved: dict[str, Any] = super().state_dict()
        checkpoint.complete_state_dict(self._engine, saved)
        return saved

    def state_for_joiner(self) -> dict[str, Any]:
        """Return what a rank that joins has to load before all ranks ``rebind()``.

        It is a copy, made without communication, on any one rank. It has the moments of this rank,
        with ``LocalSteps`` also anchors and the place in the round, and zeros for residuals: what
        this rank has yet to send it sends itself. Take it between rounds: a rank that joins within
        one would send what this one has moved again.

        Raises ValueError if this rank has only a shard of the state.
        """
        return checkpoint.make_state_for_joiner(self._engine)

    @torch.inference_mode(False)  # its memory is used in later steps
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class or of ``torch.optim.AdamW``. All ranks must load.

        Unlike torch's it preserves dtypes: masks stay bits, residuals keep their precision. It
        loads all entries of groups, except the names of parameters.

        Raises ValueError, with nothing loaded, if the checkpoint does not fit.
        """
        self.lay_out_new_parameters()
        state_dict = state_dict.copy()  # as torch: hooks may change it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.load_without_hooks(checkpoint.drop_absent_values(state_dict))
        self._engine.end_rebind()  # left by a rebind that failed
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def load_without_hooks(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; call no hooks."""
        engine = self._engine
        engine.settle_state()
        engine.overlap.discard()
        checkpoint.load_state(self._engine, state_dict)
        engine.consolidated_at = None
        engine.rebuild_buckets()
        engine.consecutive_skips, engine.damage = 0, ""
        engine.peers_verified = False

    @torch.inference_mode(False)  # its memory is used in later steps
    @torch.no_grad()
    def consolidate_state(self, patience: float | None = None) -> None:
        """Replace each rank's residuals by their mean over ranks, and gather sharded state. All
        ranks must call it, before ``state_dict``.

        Only the mean ever reaches the model, so training continues as before, and a checkpoint
        restores on any number of ranks.

        Args:
            patience: seconds to wait until all ranks have called it. None: rank 0 waits 10, the
                others half an hour for rank 0, which may evaluate before.

        Raises CommunicationError, with nothing changed, if some ranks have not called it, or are in
        ``step()`` instead; also if a rank dies meanwhile, when some residuals may be means already
        on some ranks; ValueError if ranks consolidate different optimizers.
        """
        engine = self._engine
        engine.check_has_shards()
        checkpoint.settle_for_saving(engine)
        engine.refresh_ranks()
        meetings.wait_for_all_to_consolidate(self._engine, patience)
        try:
            self._consolidate()
        except CommunicationError as error:
            raise CommunicationError(
                f"consolidate_state() failed on rank {engine.comm.rank} after step "
                f"{engine.steps}: {error}. Do not save. Make a new process group of the ranks "
                "that are left and call rebind(), or load a checkpoint."
            ) from None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Call ``consolidate_state()``, under the name that Lightning and Fabric call on all ranks
        before they save (from ``torch.distributed.optim.ZeroRedundancyOptimizer``).

        ``to`` is ignored: every rank gets the complete state.
        """
        self.consolidate_state()

    def _consolidate(self) -> None:
        checkpoint.consolidate(self._engine)

    def average_shares(self) -> None:
        """After a resume on other ranks, replace by their mean what each snapshot gave to one rank
        alone (see ``Snapshots``).
        """
        self._consolidate()

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        self._engine.check_has_shards()
        if self._engine.process_group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be pickled: save its state_dict() "
                "instead."
            )
        checkpoint.settle_for_saving(self._engine)
        return self._copyable_attributes()

    def _copyable_attributes(self) -> dict[str, Any]:
        """Return the attributes that a copy is made from; the rest is rebuilt."""
        return {
            **super().__getstate__(),
            "sharded": self.sharded,
            "offload": self.offload,
            "residual_dtype": self.residual_dtype,
            "simulate": self.simulate,
            "max_skipped": self.max_skipped,
            "check_replicas_every": self.check_replicas_every,
            "patience": self.patience,
            "_parameters": self._engine.parameters,
            "_trainable": self._engine.trainable,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore_copy(state, None)

    def _restore_copy(
        self, contents: dict[str, Any], group: ProcessGroup | Ranks | Communicator | None
    ) -> None:
        """Become a copy of the optimizer with these contents."""
        contents = dict(contents)
        self._engine = Engine(self, group, contents.pop("_parameters"), contents.pop("_trainable"))
        super().__setstate__(contents)
        self._engine.build_buckets()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedOptimizer:
        self._engine.check_has_shards()
        checkpoint.settle_for_saving(self._engine)
        new = type(self).__new__(type(self))
        new._restore_copy(
            copy.deepcopy(self._copyable_attributes(), memo), self._engine.process_group
        )
        return new
