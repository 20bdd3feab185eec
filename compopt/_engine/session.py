"""The session of one optimizer: its buckets and their state, the ranks it averages with, its
backend, and the exchanges in flight.

A ``CompressedOptimizer`` owns its session, which refers to it weakly, as an ``OptimizerBase``: both
are freed when the optimizer is deleted. ``build_buckets`` lays out buckets and state for the
current groups; it runs again after groups, ranks or a checkpoint have changed them. Data of a
single step is in ``Step``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from .._ops.backends import choose_backend, fall_back_to_torch
from .._ops.operations import Ops
from .._state.buckets import Bucket, make_buckets
from .._state.offload import Offload
from .._state.shards import cut_evenly
from .._state.tensors import is_accelerator, to_local
from .._wire.collectives import (
    Communicator,
    ProcessGroup,
    connect,
    count_launched_ranks,
    get_rank,
    get_replicate_size,
    is_outdated,
    make_shard_communicators,
)
from .._wire.warning import warn
from .decision import StepDecision
from .dense_start import Trial, begin_trial
from .optimizer_base import OptimizerBase
from .options import OPTIONS_WITHOUT_HANDSHAKE, Group, Setting, select_options
from .overlap import BackwardOverlap, PostCommitExchanges
from .stats import RunTotals, Stats, WaitRecord, show_summary

OFFLOADED = {"residual": ("residual",), "all": ("residual", "master")}


class Role(Enum):
    """The part that an optimizer plays for its parameters."""

    ACTIVE = auto()  # it averages their gradients and steps them
    WRAPPED = auto()  # another optimizer averages for it
    REPLACED = auto()  # a later optimizer holds them


class Handshake(Enum):
    """The result of the last handshake."""

    UNVERIFIED = auto()  # the next step begins with a handshake
    VERIFIED = auto()  # ranks agree, and nothing has changed since


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable that refers weakly to the object of ``method``; once that is deleted, a
    call raises ReferenceError.

    It is for attributes of the object itself. A strong reference would be a cycle, and an optimizer
    in a cycle lives, with its model, until Python's collector runs, at another time on every rank.
    """
    ref, name = weakref.WeakMethod(method), method.__name__

    def call(*args: Any) -> Any:
        alive = ref()
        if alive is None:
            raise ReferenceError(
                f"{name}() belongs to an optimizer that was deleted: call it earlier."
            )
        return alive(*args)

    return call


class Session:
    """The data of one optimizer between steps."""

    def __init__(
        self,
        optimizer: OptimizerBase,
        group: ProcessGroup | Communicator | None,
        parameters: frozenset[Tensor] = frozenset(),
        trainable: frozenset[Tensor] = frozenset(),
    ):
        self._optimizer = weakref.ref(optimizer)
        self.role = Role.ACTIVE
        self.warned: set[str] = set()  # keys of warnings and lines that were shown

        # the other ranks
        self.group = group
        self.connection: Communicator | None = None
        self.handshake = Handshake.UNVERIFIED
        # why parameters and state are inconsistent (a step was applied in part), or empty
        self.corrupt = ""
        # the options that decide what is sent, which all ranks had in the last step
        self.verified_message_options = ""
        # the ranks that hold the other parts of this rank's model, by dimensions of its mesh
        self.shard_communicators: list[Communicator] = []
        self.posted_note = ""  # the kind of note that this rank has left for the others

        # buckets and backend
        self.parameters = parameters  # all, of all groups
        self.trainable = trainable  # those that require a gradient: buckets hold them
        self.is_built = False
        self.buckets: list[Bucket] = []
        self.frozen_buckets: list[Bucket] = []  # without memory, never exchanged
        self.bucket_of: dict[Tensor, Bucket] = {}
        self.offload = Offload(())
        self.ops = Ops()
        # buckets from before a rebind, until their shards are resharded, and the number of ranks
        self.buckets_to_reshard: list[Bucket] | None = None
        self.size_before_rebind = 0

        # in flight
        self.algorithm = weak_method(optimizer.algorithm)
        self.post_commit = PostCommitExchanges()
        self.overlap = BackwardOverlap(self.post_commit)
        self.has_local_gradients = False  # DDP did not average those of the coming step
        self.has_grad_scaler = False  # a GradScaler drives the steps
        self.has_data = True  # False in a Join once this rank has finished its data
        self.divides_by_all = True  # in a Join: the mean is over all ranks, not those with data

        # results
        self.stats = Stats()
        self.totals = RunTotals()
        self.waits = WaitRecord()
        self.bytes_reported = 0  # bytes sent by the connection that stats have counted
        self.consecutive_skips = 0
        # the step at which residuals became their mean over ranks
        self.consolidated_at: int | None = None
        self.trial: Trial | None = None  # the running trial of when="auto"
        self.trial_result = ""
        self.step_callbacks: list[Callable[[], None]] = []  # called after every step

    @property
    def optimizer(self) -> OptimizerBase:
        """Return the optimizer; raise ReferenceError if it was deleted."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("the optimizer of this session was deleted: keep a reference.")
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
        """The number of applied steps."""
        groups = self.option_groups
        return int(groups[0]["step"]) if groups else 0

    @property
    def device(self) -> torch.device:
        """The device of messages beside payloads."""
        return self.buckets[0].device if self.buckets else torch.device("cpu")

    @property
    def is_single_process(self) -> bool:
        """True if there are no other ranks, so that steps are the base optimizer's."""
        has_one_rank = self.connection is not None and self.connection.size == 1
        return has_one_rank and not self.optimizer.simulate

    @property
    def is_joining(self) -> bool:
        """True within a ``Join`` of torch, where ranks may run out of data."""
        config = self.optimizer._join_config
        return config is not None and bool(config.enable)

    @property
    def settings(self) -> list[Setting]:
        """The settings that must be equal on all ranks in every step."""
        return self.optimizer._settings()

    @property
    def message_options(self) -> str:
        """The options that decide what is sent, and so the lengths of messages."""
        sizing = self.optimizer._known_options - OPTIONS_WITHOUT_HANDSHAKE
        return repr([select_options(group, sizing) for group in self.option_groups])

    @property
    def has_foreign_state(self) -> bool:
        """True if ``optimizer.state`` was replaced, and no longer refers to the buckets' state."""
        state = self.optimizer.state
        return any(
            state.get(p) is not entry
            for bucket in self.buckets
            for p, entry in zip(bucket.params, bucket.entries, strict=True)
        )

    @property
    def has_new_options(self) -> bool:
        """True if options that decide what is sent were changed since the last step."""
        return self.verified_message_options != self.message_options

    def apply_changed_options(self) -> None:
        """Lay out state again if new options need state of another kind or size (``rank``)."""
        self.optimizer.lay_out_new_parameters()
        self.optimizer.read_options()
        has_new_layout = self.has_new_options and self.optimizer.has_new_layout
        if self.has_foreign_state or has_new_layout:
            self.rebuild_buckets()

    @property
    def trainable_has_changed(self) -> bool:
        """True if other parameters require a gradient than those in buckets."""
        return any(p.requires_grad != (p in self.trainable) for p in self.parameters)

    def claim_first(self, key: str) -> bool:
        """Return True at the first call with ``key``."""
        is_first = key not in self.warned
        self.warned.add(key)
        return is_first

    def warn_once(self, key: str, message: str, rank: int) -> None:
        """Warn at the first call with ``key``, if ``rank`` is 0."""
        if self.claim_first(key):
            warn(message, rank)

    def unverify(self) -> None:
        """Begin the next step with a handshake."""
        self.handshake = Handshake.UNVERIFIED

    def check_has_shards(self) -> None:
        """Raise RuntimeError if a ``rebind`` failed before this rank had its shards."""
        if self.optimizer.sharded and self.buckets_to_reshard is not None:
            raise RuntimeError(
                f"rebind() of {self.name} failed before ranks had exchanged their shards: make a "
                "new process group and call rebind() again, or load a checkpoint on all ranks."
            )

    def check_sound(self) -> None:
        """Raise RuntimeError if a step was applied in part."""
        if self.corrupt:
            raise RuntimeError(
                f"{self.corrupt}: parameters and state are inconsistent. Load a "
                "checkpoint, of the model and with load_state_dict() of this optimizer, on all "
                "ranks."
            )

    def update_stats(self, decision: StepDecision, bytes_sent: int, is_step: bool = True) -> None:
        """Set ``stats`` after a step was applied or skipped, and add them to the run's totals.

        ``is_step``: False for an exchange that follows the step.
        """
        applied, phases = decision.applied, sorted(set(decision.phase_of.values()))
        self.totals.skipped += is_step and not applied
        waited, waited_for_ranks = self.waits.take_step()
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
            skipped=self.totals.skipped,
            reason="" if applied else f"non-finite gradient: {', '.join(decision.non_finite[:3])}",
            residual_norm=weak_method(self.residual_norm),
            when=self.trial_result,
            wait_seconds=waited,
            straggler_seconds=waited_for_ranks,
        )
        stats = self.optimizer.add_to_stats(stats, decision)
        self.totals.add_exchange(stats, is_step)
        stats.run = replace(self.totals)
        self.stats = stats
        if self.comm.size > 1 and self.claim_first("summary") and get_rank() == 0:
            # when the optimizer is deleted, or the program ends
            weakref.finalize(self.optimizer, show_summary, self.name, self.totals)

    def count_skips(self, is_applied: bool) -> None:
        """Count consecutive skipped steps.

        Raises FloatingPointError if they reach ``max_skipped``.
        """
        self.consecutive_skips = 0 if is_applied else self.consecutive_skips + 1
        if not is_applied and self.consecutive_skips >= self.optimizer.max_skipped:
            raise FloatingPointError(
                f"{self.consecutive_skips} steps in a row were skipped, the last because of "
                f"{self.stats.reason}: lower the learning rate or look for what makes the loss "
                "overflow (max_skipped is the limit)."
            )

    # Buckets

    def build_buckets(self) -> None:
        """Lay out buckets and state for the current groups, and copy the existing state."""
        optimizer, connection = self.optimizer, self.connection
        optimizer.before_layout()
        groups = self.option_groups
        self.ops = choose_backend({p.device.type for group in groups for p in group["params"]})
        self.stats = Stats(
            skipped=self.totals.skipped,
            run=self.stats.run,
            residual_norm=weak_method(self.residual_norm),
        )
        self.bytes_reported = connection.bytes_sent if connection else 0
        self.unverify()
        self.verified_message_options = ""
        self.post_commit = PostCommitExchanges()
        self.overlap = BackwardOverlap(self.post_commit)
        # a known parameter whose requires_grad has changed moves in lay_out_trainable_parameters
        params = [p for group in groups for p in group["params"]]
        new = {p for p in params if p not in self.parameters and p.requires_grad}
        self.trainable = frozenset(new | self.trainable & set(params))
        self.parameters = frozenset(params)
        self.buckets = make_buckets(groups, optimizer.is_compressed, self.trainable)
        not_trainable = self.parameters - self.trainable
        self.frozen_buckets = make_buckets(groups, optimizer.is_compressed, not_trainable)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.trial = begin_trial(groups, self.buckets)
        self.offload = Offload(OFFLOADED.get(optimizer.offload or "", ()))
        # inside FSDP2 the mesh is that of the optimizer's own ranks: no others hold shards
        on_mesh = () if optimizer.replaces_reduce_scatter else self.buckets
        params_on_mesh = (p for bucket in on_mesh for p in bucket.params)
        self.shard_communicators = make_shard_communicators(params_on_mesh)
        self.is_built = True
        for bucket in self.buckets:
            bucket.is_single_process = self.is_single_process
            bucket.replicate_size = get_replicate_size(bucket.params[0], self.shard_communicators)
            bucket.offload = self.offload if self.offload.names else None
            if optimizer.sharded:
                comm = self.comm
                bucket.shards = cut_evenly(bucket.lengths, bucket.compressed, comm.rank, comm.size)
            bucket.mean_factory = self.ops.quantized_mean_factory(bucket)
            self._fill_state(bucket)
            optimizer.rebuild_cache(bucket)
        optimizer.after_layout()

    def _fill_state(self, bucket: Bucket) -> None:
        """Allocate the bucket's state, copy ``optimizer.state`` into it, and make
        ``optimizer.state`` show views of it.
        """
        layouts, state = self.optimizer._bucket_layouts(bucket), self.optimizer.state
        entries = [
            {name: to_local(value) for name, value in state.get(p, {}).items()}
            for p in bucket.params
        ]
        for name, layout in layouts.items():
            bucket.allocate(name, layout, entries)
        # the number of steps of each tensor, on the device as torch's own optimizers keep it
        device = bucket.device if is_accelerator(bucket.device) else "cpu"
        counts = torch.zeros(len(entries), dtype=torch.float32, device=device)
        for count, old in zip(counts.unbind(), entries, strict=True):
            if "step" in old:
                count.copy_(old["step"])
        bucket.set_step_counts(counts)
        for i, (p, old) in enumerate(zip(bucket.params, entries, strict=True)):
            info, entry = bucket.get_tensor_info(i), {"step": bucket.state["step"][i]}
            if "master" in layouts:
                old.setdefault("master", to_local(p.detach()))
            for name, layout in layouts.items():
                view = bucket.state[name][i]
                if view is None:
                    continue
                if name in old:
                    view.copy_(layout.cut_shard(old[name], info).view(view.shape))
                entry[name] = layout.view_for_user(view, info)
            state[p] = entry
        bucket.entries = [state[p] for p in bucket.params]

    def rebuild_buckets(self) -> None:
        """Lay out buckets and state again, over the same ranks."""
        self.settle_state()
        self.overlap.discard()
        self.build_buckets()

    def settle_state(self) -> None:
        """Wait for the exchanges after the last commit, and for copies of offloaded state."""
        self.post_commit.finish()
        self.offload.finish()

    def residual_norm(self) -> float:
        """Return the L2 norm of all residuals of this rank."""
        self.settle_state()
        flats = [b.flat["residual"] for b in self.buckets if "residual" in b.flat]
        return float(sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in flats) ** 0.5)

    def use_pytorch(self) -> None:
        """Fall back to PyTorch's operators, because ranks have chosen different backends."""
        optimizer = self.optimizer
        self.ops = fall_back_to_torch(self.comm.rank)
        for bucket in self.buckets:
            bucket.mean_factory = self.ops.quantized_mean_factory(bucket)
            optimizer.rebuild_cache(bucket)
        optimizer.on_fallback()

    def forget_masks(self) -> None:
        """Clear all masks: the next step chooses new ones."""
        for bucket in self.buckets:
            for name in self.optimizer.mask_state:
                bucket.flat[name].zero_()
                bucket.cache.pop(name, None)

    # Ranks

    @property
    def comm(self) -> Communicator:
        """The ranks to average over; connected when first needed."""
        if self.connection is None:
            is_wrapped = self.role is Role.WRAPPED
            self.connection = (
                Communicator(single_process=True) if is_wrapped else connect(self.group)
            )
            self.connection.on_wait = self.waits.add_wait
        return self.connection

    def follow_default_group(self) -> Communicator:
        """Connect again if the default process group is another one now, and return the ranks.

        Without a group the optimizer is a single process until torch.distributed is initialized,
        which may be after a checkpoint was loaded. Everything public that needs the ranks begins
        with this call.
        """
        follows_default = self.group is None and self.role is not Role.WRAPPED
        if self.connection is not None and follows_default and is_outdated(self.connection):
            self.settle_state()
            self.overlap.discard()
            self.connection = None  # shards are laid out for the ranks of the new group
            self.build_buckets()
        return self.comm

    def connect_ranks(self) -> Communicator:
        """Connect the ranks of the coming step, and tell buckets if there is only one.

        Warns once if a launcher has started several processes that are not connected.
        """
        comm = self.follow_default_group()
        size, is_wrapped = count_launched_ranks(), self.role is Role.WRAPPED
        if size > 1 and comm.size == 1 and self.group is None and not is_wrapped:
            self.warn_once(
                "missing group",
                f"WORLD_SIZE is {size}, but torch.distributed is not initialized: every process "
                "trains by itself, and nothing is averaged. Add this line before training: "
                "torch.distributed.init_process_group()",
                get_rank(),
            )
        for bucket in self.buckets:
            if bucket.is_single_process != self.is_single_process:
                bucket.is_single_process = self.is_single_process
                # Recompute: residuals may hold rounding errors from when there were other ranks.
                bucket.cache.pop("has_residual", None)
        return comm

    def connect_to(self, group: ProcessGroup | Communicator | None) -> None:
        """Average over another group from now on."""
        self.group, self.connection = group, None
        self.build_buckets()

    def begin_rebind(self) -> int:
        """Return the number of ranks before this rebind, or before the first that failed."""
        size = self.connection.size if self.connection else 0
        self.size_before_rebind = self.size_before_rebind or size
        return self.size_before_rebind

    def end_rebind(self) -> None:
        """Forget the ranks and buckets from before the rebind."""
        self.buckets_to_reshard, self.size_before_rebind = None, 0

    def forget_in_flight(self) -> None:
        """Drop all exchanges in flight without waiting: their group is gone."""
        self.post_commit.forget()
        self.overlap.forget()

    def mark_replaced(self) -> None:
        """Note that a later optimizer holds the parameters; send nothing more."""
        self.role = Role.REPLACED
        self.overlap.discard()
        self.post_commit.finish()
