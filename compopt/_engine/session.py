"""The session of one optimizer: its buckets and their state, the ranks it averages with, its
backend, and what is in flight to other ranks.

``CompressedOptimizer`` holds a session, which refers to it weakly, by its ``OptimizerHooks``: both
go when the optimizer is deleted. ``build_buckets`` lays everything out for the groups there are,
and runs again when groups, ranks or a checkpoint come. What belongs to one step is in ``Step``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from .._ops.backends import choose_backend, fall_back_to_torch
from .._ops.operations import Ops
from .._state.buckets import Bucket, make_buckets
from .._state.layouts import Layout
from .._state.offload import Offload
from .._state.shards import cut_evenly
from .._state.tensors import is_accelerator, to_local
from .._wire.collectives import (
    Communicator,
    ProcessGroup,
    connect,
    count_copies,
    count_launched_ranks,
    get_rank,
    is_outdated,
    make_shard_communicators,
)
from .._wire.warning import warn
from .decision import StepDecision
from .hooks import OptimizerHooks
from .options import Group, Setting, structure_of
from .overlap import BackwardOverlap, PostCommitExchanges
from .stats import RunTotals, Stats, WaitRecord, show_summary
from .when import Trial, trial

OFFLOADED = {"residual": ("residual",), "all": ("residual", "master")}


class Role(Enum):
    """What an optimizer does for its parameters."""

    ACTIVE = auto()  # it averages their gradients and steps them
    WRAPPED = auto()  # another optimizer averages for it
    REPLACED = auto()  # an optimizer that was made later has them


class Sync(Enum):
    """Whether this rank may rely on the others."""

    UNVERIFIED = auto()  # the next step begins with a handshake
    VERIFIED = auto()  # a handshake has shown that ranks agree, and it still holds


@dataclass(frozen=True)
class Corrupt:
    """A step was applied in part, for this ``reason``: parameters and state do not fit together."""

    reason: str


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method`` in a form that does not keep its object; a call after that is gone raises
    ReferenceError.

    It is for what the object holds itself. A strong reference would be a cycle, and an optimizer in
    a cycle stays, with its model, until Python's collector runs, at another time on every rank.
    """
    ref, name = weakref.WeakMethod(method), method.__name__

    def call(*args: Any) -> Any:
        alive = ref()
        if alive is None:
            raise ReferenceError(
                f"{name}() belongs to an optimizer that was deleted: ask while it lives."
            )
        return alive(*args)

    return call


class Session:
    """What one optimizer has between steps."""

    def __init__(
        self,
        optimizer: OptimizerHooks,
        group: ProcessGroup | Communicator | None,
        parameters: frozenset[Tensor] = frozenset(),
        trainable: frozenset[Tensor] = frozenset(),
    ):
        self._optimizer = weakref.ref(optimizer)
        self.role = Role.ACTIVE
        self.warned: set[str] = set()  # of what the user was told, by keys

        # the other ranks
        self.group = group
        self.connection: Communicator | None = None
        self.sync: Sync | Corrupt = Sync.UNVERIFIED
        # the options that decide what is sent, which all ranks had in the last step
        self.verified_structure = ""
        # the ranks that hold the other parts of this rank's model, by dimensions of its mesh
        self.shard_communicators: list[Communicator] = []
        self.posted_note = ""  # the kind of note that this rank has left for the others

        # buckets and backend
        self.parameters = parameters  # of all groups
        self.trainable = trainable  # those that buckets hold
        self.is_built = False
        self.buckets: list[Bucket] = []
        self.shelf: list[Bucket] = []  # frozen parameters: without memory, never exchanged
        self.bucket_of: dict[Tensor, Bucket] = {}
        self.offload = Offload(())
        self.ops = Ops()
        # buckets of before a rebind, while their shards are not yet cut again
        self.unmoved_buckets: list[Bucket] | None = None

        # in flight
        self.algorithm = weak_method(optimizer.algorithm)
        self.post_commit = PostCommitExchanges()
        self.overlap = BackwardOverlap(self.post_commit)
        self.has_local_gradients = False  # DDP has left those of the coming step as they are
        self.has_grad_scaler = False  # a GradScaler drives the steps
        # gradients are those of local steps, which may well be alike on all ranks
        self.has_pseudo_gradients = False

        # what was done
        self.stats = Stats()
        self.run = RunTotals()
        self.waits = WaitRecord()
        self.bytes_reported = 0  # of those that the connection has sent
        self.consecutive_skips = 0
        # the step at which residuals became their mean over ranks
        self.consolidated_at: int | None = None
        self.trial: Trial | None = None  # of when="auto"
        self.trial_result = ""
        self.step_callbacks: list[Callable[[], None]] = []  # called after every step

    @property
    def optimizer(self) -> OptimizerHooks:
        """The optimizer."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("this session's optimizer was deleted: use it while that lives.")
        return optimizer

    @property
    def name(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__

    @property
    def option_groups(self) -> list[Group]:
        """The groups that hold the options of the class."""
        return self.optimizer._option_groups

    @property
    def steps(self) -> int:
        """Steps applied so far."""
        groups = self.option_groups
        return int(groups[0]["step"]) if groups else 0

    @property
    def device(self) -> torch.device:
        """The device of messages beside payloads."""
        return self.buckets[0].device if self.buckets else torch.device("cpu")

    @property
    def is_single_process(self) -> bool:
        """Whether there are no other ranks, so that steps are the base optimizer's."""
        is_alone = self.connection is not None and self.connection.size == 1
        return is_alone and not self.optimizer.simulate

    @property
    def settings(self) -> list[Setting]:
        """What must be the same on all ranks in every step."""
        settings = self.optimizer._settings()
        if not self.has_pseudo_gradients:
            return settings
        return [(f"outer optimizer, {subject}", value) for subject, value in settings]

    @property
    def structure(self) -> str:
        """The options that decide what is sent, and so the lengths of messages."""
        return structure_of(self.option_groups, self.optimizer._known_options)

    @property
    def has_foreign_state(self) -> bool:
        """Whether ``optimizer.state`` was replaced, by a trainer that begins anew, and no longer
        shows the buckets.
        """
        state = self.optimizer.state
        return any(
            state.get(p) is not entry
            for bucket in self.buckets
            for p, entry in zip(bucket.params, bucket.entries, strict=True)
        )

    @property
    def has_other_trainable(self) -> bool:
        """Whether other parameters require a gradient than those that buckets hold."""
        return any(p.requires_grad != (p in self.trainable) for p in self.parameters)

    def is_first(self, key: str) -> bool:
        """Whether ``key`` comes here for the first time."""
        is_first = key not in self.warned
        self.warned.add(key)
        return is_first

    def warn_once(self, key: str, message: str, rank: int) -> None:
        """Warn, where this was not done for ``key`` before; on ``rank`` 0 only."""
        if self.is_first(key):
            warn(message, rank)

    def unverify(self) -> None:
        """Let the next step begin with a handshake."""
        if self.sync is Sync.VERIFIED:
            self.sync = Sync.UNVERIFIED

    def check_sound(self) -> None:
        """Raise where a step was applied in part."""
        if isinstance(self.sync, Corrupt):
            raise RuntimeError(
                f"{self.sync.reason}: parameters and state no longer belong together. Load a "
                "checkpoint, of the model and with load_state_dict() of this optimizer, on all "
                "ranks."
            )

    def update_stats(self, decision: StepDecision, bytes_sent: int, is_step: bool = True) -> None:
        """Let ``stats`` be those of a step that was applied or skipped, or without ``is_step`` of
        an exchange after it, and add them to the run's totals.
        """
        applied, phases = decision.applied, sorted(set(decision.phase_of.values()))
        # an outer optimizer's waits are reported by its LocalSteps
        is_outer = self.has_pseudo_gradients
        waited, waited_for_ranks = (0.0, 0.0) if is_outer else self.waits.take_step()
        stats = Stats(
            step=self.steps,
            phase=("+".join(phases) or "dense") if applied else "skipped",
            bytes_sent=0 if self.is_single_process else bytes_sent,
            bytes_dense=sum(bucket.dense_bytes for bucket in self.buckets),
            parameter_bytes=applied * sum(bucket.parameter_bytes for bucket in self.buckets),
            grad_norm=decision.norm,
            early_buckets=decision.early_buckets,
            buckets=len(self.buckets),
            resent=decision.resent,
            skipped=self.stats.skipped + (not applied),
            reason="" if applied else f"non-finite gradient: {', '.join(decision.non_finite[:3])}",
            residual_norm=weak_method(self.residual_norm),
            when=self.trial_result,
            wait_seconds=waited,
            straggler_seconds=waited_for_ranks,
        )
        stats = self.optimizer.add_to_stats(stats, decision)
        if is_step:
            self.run.add(stats)
        else:
            self.run.add_exchange(stats)
        stats.run = replace(self.run)
        self.stats = stats
        has_summary = self.comm.size > 1 and not is_outer
        if has_summary and self.is_first("summary") and get_rank() == 0:
            # when the optimizer is deleted, or the program ends
            weakref.finalize(self.optimizer, show_summary, self.name, self.run)

    def count_skips(self, is_applied: bool) -> None:
        """Count consecutive skipped steps.

        Raises FloatingPointError where they are too many.
        """
        self.consecutive_skips = 0 if is_applied else self.consecutive_skips + 1
        if self.consecutive_skips >= self.optimizer.max_skipped:
            raise FloatingPointError(
                f"{self.consecutive_skips} steps in a row were skipped, the last because of "
                f"{self.stats.reason}: lower the learning rate or look for what makes the loss "
                "overflow (max_skipped is the limit)."
            )

    # Buckets

    def build_buckets(self) -> None:
        """Lay out buckets and state for the current groups; copy in the state that is there."""
        optimizer, connection = self.optimizer, self.connection
        optimizer.before_layout()
        groups = self.option_groups
        self.ops = choose_backend({p.device.type for group in groups for p in group["params"]})
        self.stats = Stats(run=self.stats.run, residual_norm=weak_method(self.residual_norm))
        self.bytes_reported = connection.bytes_sent if connection else 0
        self.unverify()
        self.verified_structure = ""
        self.post_commit = PostCommitExchanges()
        self.overlap = BackwardOverlap(self.post_commit)
        self._note_parameters()
        self.buckets = make_buckets(groups, optimizer.is_compressed, self.trainable)
        self.shelf = make_buckets(groups, optimizer.is_compressed, self.parameters - self.trainable)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.trial = trial(groups, self.buckets)
        self.offload = Offload(OFFLOADED.get(optimizer.offload or "", ()))
        # inside FSDP the optimizer's own ranks hold the other parts
        parted = () if optimizer.reduces_inside else self.buckets
        self.shard_communicators = make_shard_communicators(
            p for bucket in parted for p in bucket.params
        )
        self.is_built = True
        for bucket in self.buckets:
            self._fill_bucket(bucket)
        optimizer.after_layout()

    def _note_parameters(self) -> None:
        """Note parameters that are new; those noted before stay in buckets, or not, whatever they
        require now.
        """
        params = [p for group in self.option_groups for p in group["params"]]
        new = {p for p in params if p not in self.parameters and p.requires_grad}
        self.trainable = frozenset(new | self.trainable & set(params))
        self.parameters = frozenset(params)

    def _fill_bucket(self, bucket: Bucket) -> None:
        optimizer = self.optimizer
        bucket.is_single_process = self.is_single_process
        bucket.copies = count_copies(bucket.params[0], self.shard_communicators)
        bucket.offload = self.offload if self.offload.names else None
        if optimizer.sharded:
            comm = self.comm
            bucket.shards = cut_evenly(bucket.lengths, bucket.compressed, comm.rank, comm.size)
        bucket.make_mean = self.ops.quantized_mean(bucket)
        self._fill_state(bucket)
        optimizer.restore(bucket)

    def _fill_state(self, bucket: Bucket) -> None:
        """Allocate the bucket's state, copy in what ``optimizer.state`` holds so far, and make that
        show views of it.
        """
        layouts, state = self.layouts_of(bucket), self.optimizer.state
        held = [
            {name: to_local(value) for name, value in state.get(p, {}).items()}
            for p in bucket.params
        ]
        for name, layout in layouts.items():
            bucket.allocate(name, layout, held)
        bucket.set_step_counts(_count_steps(bucket, held))
        for i, (p, old) in enumerate(zip(bucket.params, held, strict=True)):
            member, entry = bucket.get_member(i), {"step": bucket.state["step"][i]}
            if "master" in layouts:
                old.setdefault("master", to_local(p.detach()))
            for name, layout in layouts.items():
                view = bucket.state[name][i]
                if view is None:
                    continue
                if name in old:
                    view.copy_(layout.cut_shard(old[name], member).view(view.shape))
                entry[name] = layout.view_for_user(view, member)
            state[p] = entry
        bucket.entries = [state[p] for p in bucket.params]

    def rebuild_buckets(self) -> None:
        """Lay out anew, over the same ranks."""
        self.settle_state()
        self.overlap.discard()
        self.build_buckets()

    def layouts_of(self, bucket: Bucket) -> dict[str, Layout]:
        """The state of a bucket's tensors, by name."""
        return self.optimizer._specs(bucket)

    def settle_state(self) -> None:
        """Wait for what follows the last commit, and bring state into a readable form."""
        self.post_commit.finish()
        for bucket in self.buckets:
            self.optimizer.tidy(bucket)
        self.offload.finish()

    def residual_norm(self) -> float:
        """The L2 norm of all residuals of this rank."""
        self.settle_state()
        flats = [b.flat["residual"] for b in self.buckets if "residual" in b.flat]
        return float(sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in flats) ** 0.5)

    def use_pytorch(self) -> None:
        """Use PyTorch's operators from now on: ranks have chosen different backends."""
        optimizer = self.optimizer
        for bucket in self.buckets:
            optimizer.tidy(bucket)
        self.ops = fall_back_to_torch(self.comm.rank)
        for bucket in self.buckets:
            bucket.make_mean = self.ops.quantized_mean(bucket)
            optimizer.restore(bucket)
        optimizer.on_fallback()

    def forget_masks(self) -> None:
        """Choose masks anew in the next step, on all ranks alike."""
        optimizer = self.optimizer
        for bucket in self.buckets:
            optimizer.tidy(bucket)
            for name in optimizer.chosen_state:
                bucket.flat[name].zero_()
                bucket.cache.pop(name, None)

    # Ranks

    @property
    def comm(self) -> Communicator:
        """The ranks to average over; connected when first needed.

        Without a process group this process is alone, until there is one: torch.distributed may be
        initialised after a checkpoint was loaded.
        """
        if self._have_others_come():
            self.settle_state()
            self.overlap.discard()
            self.connection = None  # state is cut for the ranks there are now
            self.build_buckets()
        if self.connection is None:
            is_wrapped = self.role is Role.WRAPPED
            self.connection = (
                Communicator(single_process=True) if is_wrapped else connect(self.group)
            )
            self.connection.on_wait = self.waits.add
        return self.connection

    def _have_others_come(self) -> bool:
        if self.connection is None or self.group is not None or self.role is Role.WRAPPED:
            return False
        return is_outdated(self.connection)

    def connect_ranks(self) -> Communicator:
        """Connect the ranks of the coming step; buckets learn whether there are others."""
        comm = self.comm
        self._warn_of_missing_group(comm)
        for bucket in self.buckets:
            if bucket.is_single_process != self.is_single_process:
                bucket.is_single_process = self.is_single_process
                bucket.cache.pop("has_residual", None)  # what rounding took off is owed too
        return comm

    def _warn_of_missing_group(self, comm: Communicator) -> None:
        """Warn once where a launcher has started several processes, and each trains by itself."""
        size, is_wrapped = count_launched_ranks(), self.role is Role.WRAPPED
        if size > 1 and comm.size == 1 and self.group is None and not is_wrapped:
            self.warn_once(
                "missing group",
                f"WORLD_SIZE is {size}, but torch.distributed is not initialized: every process "
                "trains by itself, and nothing is averaged. Add this line before training: "
                "torch.distributed.init_process_group()",
                get_rank(),
            )

    def connect_to(self, group: ProcessGroup | Communicator | None) -> None:
        """Average over another group from now on."""
        self.group, self.connection = group, None
        self.build_buckets()

    def forget_in_flight(self) -> None:
        """Give up everything that is in flight, without waiting: its group is gone."""
        self.post_commit.forget()
        self.overlap.forget()

    def wrap(self) -> None:
        """Another optimizer wraps this one, and averages for it."""
        self.role, self.connection = Role.WRAPPED, None

    def replace(self) -> None:
        """Another optimizer has these parameters now: nothing more is sent from here."""
        self.role = Role.REPLACED
        self.overlap.discard()
        self.post_commit.finish()


def _count_steps(bucket: Bucket, held: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """How many steps each tensor has taken; as torch's own optimizers keep it, on the device."""
    device = bucket.device if is_accelerator(bucket.device) else "cpu"
    counts = torch.zeros(len(held), dtype=torch.float32, device=device)
    for count, old in zip(counts.unbind(), held, strict=True):
        if "step" in old:
            count.copy_(old["step"])
    return counts
