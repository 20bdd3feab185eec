"""The engine of one optimizer: its buckets and their state, the ranks it averages with, its
backend, and the exchanges in flight.

``engine.method`` is the optimizer, of which an engine knows the hooks of ``Method`` alone.
``build_buckets`` lays out buckets and state for the current groups; it runs again after groups,
ranks or a checkpoint have changed them. Data of a single step is in ``Step``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from enum import Enum, auto
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor

from .._ops.operations import Ops, choose_backend, fall_back_to_torch
from .._state.bucket import Bucket
from .._state.buckets import make_buckets
from .._state.layouts import Layout
from .._state.offload import Offload
from .._state.residuals import Residuals
from .._state.shards import cut_evenly
from .._state.tensors import is_accelerator, to_local
from .._wire.codec import PAYLOAD_CODECS
from .._wire.collectives import (
    Communicator,
    connect,
    get_replicate_size,
    is_outdated,
    make_shard_communicators,
)
from .._wire.groups import ProcessGroup, Ranks, count_launched_ranks, get_rank
from .._wire.warning import warn, warn_on_rank_0
from .decision import StepDecision
from .method import Method
from .options import Group, OptionSnapshot
from .overlap import BackwardOverlap, PostCommitExchanges
from .stats import RunTotals, Stats, WaitRecord, show_summary
from .trial import Trial, begin_trial

OFFLOADED = {"residual": ("residual",), "all": ("residual", "master")}
requires_grad = attrgetter("requires_grad")


class Role(Enum):
    """The part that an optimizer plays for its parameters."""

    ACTIVE = auto()  # it averages their gradients and steps them
    WRAPPED = auto()  # another optimizer averages for it
    REPLACED = auto()  # a later optimizer holds them


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
                f"{name}() belongs to an optimizer that was deleted: keep a reference to it."
            )
        return alive(*args)

    return call


class Engine:
    """The data of one optimizer between steps."""

    def __init__(
        self,
        method: Method,
        group: ProcessGroup | Ranks | Communicator | None,
        parameters: frozenset[Tensor] = frozenset(),
        trainable: frozenset[Tensor] = frozenset(),
    ):
        # the optimizer, whose hooks the engine calls; weak, because the engine is the optimizer's
        self.method: Method = weakref.proxy(method)
        self.name = type(method).__name__
        self.role = Role.ACTIVE
        # when it was made, or attached to a DDP: a time whose order all ranks share
        self.attached_at = 0
        self.warned: set[str] = set()  # keys of warnings and lines that were shown

        # the other ranks
        self.process_group = group
        self.connection: Communicator | None = None
        # no other ranks, and no ``simulate``: steps are the base optimizer's
        self.sends_nothing = False
        self.peers_verified = False  # else the next step begins with a handshake
        # why parameters and state are inconsistent (a step was applied in part), or empty
        self.damage = ""
        # the groups that hold the options of the class, and the options as last read
        self.option_groups: list[Group] = []
        self.options = OptionSnapshot()
        # the options that decide what is sent, which all ranks had in the last step
        self.verified_message_options = ""
        # the ranks that hold the other parts of this rank's model, by dimensions of its mesh, and
        # those of its site, among which DDP averages
        self.shard_communicators: list[Communicator] = []
        self.site: Communicator | None = None
        # of the parameters that the last step has summed, if the replica check was due; else 0
        self.replica_checksum = 0
        # what takes each step, in place of the engine: an integration that repeats those that fail
        self.run_step: Callable[[Callable[[], None]], None] | None = None
        self.absent_ranks = ""  # which ranks had not come, when this rank last looked
        self.posted_note = ""  # the kind of note that this rank has left for the others

        # buckets and backend
        self.parameters = parameters  # all, of all groups
        self.trainable = trainable  # those that require a gradient: buckets hold them
        self._requires_grad: dict[Tensor, bool] = {}  # of all, when they were laid out
        self.is_built = False
        self.buckets: list[Bucket] = []
        self.frozen_buckets: list[Bucket] = []  # without memory, never exchanged
        self.bucket_of: dict[Tensor, Bucket] = {}
        self.dense_bytes = 0  # of the gradients in buckets, which DDP would all-reduce
        self.offload = Offload(())
        self.ops = Ops()
        # buckets from before a rebind, until their shards are resharded, and the number of ranks
        self.buckets_to_reshard: list[Bucket] | None = None
        self.size_before_rebind = 0

        # in flight
        self.algorithm = weak_method(method.algorithm)  # schedules hold it, and the engine them
        self.post_commit = PostCommitExchanges()
        self.overlap = BackwardOverlap(self.post_commit)
        self.ddp_left_gradients = False  # DDP did not average those of the coming step
        # ranks run equally many backwards, as under DDP; under HSDP a replica may leave one out
        self.backwards_are_alike = True
        # inside FSDP2: averages are read in backward, by the last handshake, or ranks agreed since
        self.waits_in_backward = False
        self.has_grad_scaler = False  # a GradScaler drives the steps
        self.has_data = True  # False in a Join once this rank has finished its data
        self.divides_by_all = True  # in a Join: the mean is over all ranks, not those with data

        # results
        self.stats = Stats()
        self.totals = RunTotals()
        self.waits = WaitRecord()
        self.bytes_reported = 0  # bytes sent by the connection that `take_bytes_sent` has returned
        self.consecutive_skips = 0
        # the step at which residuals became their mean over ranks
        self.consolidated_at: int | None = None
        self.trial: Trial | None = None  # the running trial of when="auto"
        self.trial_result = ""
        self.step_callbacks: list[Callable[[], None]] = []  # called after every step
        self._weak_residual_norm = weak_method(self.residual_norm)

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
    def has_new_options(self) -> bool:
        """True if options that decide what is sent were changed since the last step."""
        return self.verified_message_options != self.options.message_options

    @property
    def trainable_has_changed(self) -> bool:
        """True if other parameters require a gradient than those in buckets."""
        known = self._requires_grad
        return any(map(is_not, map(requires_grad, known), known.values()))

    def has_foreign_state(self, state: Mapping[Tensor, Any]) -> bool:
        """Return True if the optimizer's ``state`` was replaced: it does not show the buckets."""
        for bucket in self.buckets:
            if not all(map(is_, map(state.get, bucket.params), bucket.entries)):
                return True
        return False

    def claim_first(self, key: str) -> bool:
        """Return True at the first call with ``key``."""
        is_first = key not in self.warned
        self.warned.add(key)
        return is_first

    def warn_once(self, key: str, message: str) -> None:
        """Warn on this rank at the first call with ``key``."""
        if self.claim_first(key):
            warn(message)

    def warn_once_on_rank_0(self, key: str, message: str) -> None:
        """Warn at the first call with ``key``, if this rank is the first."""
        if self.claim_first(key):
            warn_on_rank_0(message, self.comm.rank)

    def check_has_shards(self) -> None:
        """Raise RuntimeError if a ``rebind`` failed before this rank had its shards."""
        if self.buckets_to_reshard is not None:
            raise RuntimeError(
                f"rebind() of {self.name} failed before ranks had exchanged their shards: make a "
                "new process group and call rebind() again, or load a checkpoint on all ranks."
            )

    def check_sound(self) -> None:
        """Raise RuntimeError if a step was applied in part."""
        if self.damage:
            raise RuntimeError(
                f"{self.damage}: parameters and state are inconsistent. Load a "
                "checkpoint, of the model and with load_state_dict() of this optimizer, on all "
                "ranks."
            )

    def check_can_step(self) -> None:
        """Raise RuntimeError if the optimizer was replaced, or its state is incomplete."""
        if self.role is Role.REPLACED:
            raise RuntimeError(
                f"this {self.name} was replaced: an optimizer made later holds its parameters and "
                "has their gradients now. Step that one, or call compopt.attach(ddp_model, "
                "optimizer) to have this one back."
            )
        if self.damage or self.buckets_to_reshard is not None:
            self.check_sound()
            self.check_has_shards()

    def update_stats(self, decision: StepDecision, is_step: bool = True) -> None:
        """Set ``stats`` after a step was applied or skipped, and add them to the run's totals.

        ``is_step``: False for an exchange that follows the step.
        """
        applied, totals, method = decision.applied, self.totals, self.method
        totals.skipped += is_step and not applied
        bytes_sent = self.take_bytes_sent()
        waited, waited_for_ranks = self.waits.take_step()
        phases = "+".join(sorted({*decision.phase_of.values()})) or "dense"
        stats = Stats(
            applied_steps=self.steps,
            phase=phases if applied else "skipped",
            bytes_sent=bytes_sent,
            bytes_dense=self.dense_bytes,
            parameter_bytes=applied * sum(map(attrgetter("parameter_bytes"), self.buckets)),
            grad_norm=decision.norm,
            early_buckets=decision.early_buckets,
            buckets=len(self.buckets),
            resent=decision.resent,
            skipped=totals.skipped,
            reason="" if applied else f"non-finite gradient: {', '.join(decision.non_finite[:3])}",
            residual_norm=self._weak_residual_norm,
            when=self.trial_result,
            wait_seconds=waited,
            straggler_seconds=waited_for_ranks,
        )
        stats = method.add_to_stats(stats, decision)
        totals.add_exchange(stats, is_step)
        stats.run = replace(totals)
        self.stats = stats
        is_shown = "summary" not in self.warned and self.comm.size > 1
        if is_shown and self.claim_first("summary") and get_rank() == 0:
            # when the optimizer is deleted, or the program ends
            baseline = "FSDP2" if method.replaces_reduce_scatter else "DDP"
            weakref.finalize(self, show_summary, self.name, totals, baseline)

    def take_bytes_sent(self) -> int:
        """Return the bytes that the connection has sent since the last call."""
        before, self.bytes_reported = self.bytes_reported, self.comm.bytes_sent
        return self.bytes_reported - before

    def count_save(self) -> None:
        """Add to the run's totals what a ``consolidate_state()`` that ends now has sent."""
        sent = self.take_bytes_sent()
        if not self.sends_nothing:
            self.totals.add_save(sent, self.waits.take_seconds())
            self.stats.run = replace(self.totals)

    def count_skips(self, is_applied: bool, limit: int) -> None:
        """Count consecutive skipped steps; raise FloatingPointError if they reach ``limit``."""
        self.consecutive_skips = 0 if is_applied else self.consecutive_skips + 1
        if self.consecutive_skips >= limit:
            raise FloatingPointError(
                f"{self.consecutive_skips} steps in a row were skipped, the last because of "
                f"{self.stats.reason}: lower the learning rate or look for what makes the loss "
                "overflow (max_skipped is the limit)."
            )

    # Buckets

    @torch.inference_mode(False)  # its memory is used in later steps
    @torch.no_grad()
    def build_buckets(self) -> None:
        """Lay out buckets and state for the current groups, and copy the existing state."""
        connection, method = self.connection, self.method
        method.before_layout()
        self.option_groups = groups = method.option_groups
        self.ops = choose_backend({p.device.type for group in groups for p in group["params"]})
        self.stats = Stats(
            skipped=self.totals.skipped,
            run=self.stats.run,
            residual_norm=self._weak_residual_norm,
        )
        self.bytes_reported = connection.bytes_sent if connection else 0
        self.peers_verified = False
        self.verified_message_options = ""
        self.options.checksum = None
        self.post_commit = PostCommitExchanges()
        self.overlap = BackwardOverlap(self.post_commit)
        self._assign_parameters(groups)
        self.trial = begin_trial(groups, self.buckets)
        self.offload = Offload(OFFLOADED.get(method.offload or "", ()))
        self._connect_shards()
        self.is_built = True
        self.sends_nothing = connection is not None and self._is_alone(connection)
        for bucket in self.buckets:
            self._prepare_bucket(bucket)
            self._fill_state(bucket, method.bucket_layouts(bucket), method.state)
            method.rebuild_cache(bucket)
        method.after_layout()

    def _assign_parameters(self, groups: list[Group]) -> None:
        """Assign the parameters of ``groups`` to buckets, and those that require no gradient to
        frozen ones. A known parameter whose ``requires_grad`` has changed moves in
        ``lay_out_trainable_parameters``.
        """
        method, params = self.method, [p for group in groups for p in group["params"]]
        new = {p for p in params if p not in self.parameters and p.requires_grad}
        self.trainable = frozenset(new | self.trainable & set(params))
        self.parameters = frozenset(params)
        self._requires_grad = {p: p in self.trainable for p in params}
        self.buckets = make_buckets(
            groups,
            method.is_compressed,
            self.trainable,
            lambda bucket: estimate_bytes_sent(method, bucket),
        )
        not_trainable = self.parameters - self.trainable
        self.frozen_buckets = make_buckets(groups, method.is_compressed, not_trainable)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.dense_bytes = sum(bucket.dense_bytes for bucket in self.buckets)

    def _connect_shards(self) -> None:
        """Connect the ranks that hold the other parts of this rank's model, and those of its
        site.
        """
        # inside FSDP2 the mesh is that of the optimizer's own ranks: no others hold shards
        on_mesh = () if self.method.replaces_reduce_scatter else self.buckets
        params_on_mesh = (p for bucket in on_mesh for p in bucket.params)
        self.shard_communicators = make_shard_communicators(params_on_mesh)
        if self.site is not None and self.site.size > 1:
            self.shard_communicators.append(self.site)

    def _prepare_bucket(self, bucket: Bucket) -> None:
        """Tell a bucket of the ranks, of the backend's codecs, and which shards are its own."""
        bucket.sends_nothing = self.sends_nothing
        bucket.replicate_size = get_replicate_size(bucket.params[0], self.shard_communicators)
        bucket.offload = self.offload if self.offload.names else None
        if self.method.sharded:
            comm = self.comm
            bucket.shards = cut_evenly(bucket.lengths, bucket.compressed, comm.rank, comm.size)
        bucket.codecs, bucket.blocks = self.ops.codecs, self.ops.blocks

    def _fill_state(
        self, bucket: Bucket, layouts: dict[str, Layout], state: MutableMapping[Tensor, Any]
    ) -> None:
        """Allocate the bucket's state, copy ``state``, the optimizer's, into it, and make that show
        views of it.
        """
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
        buckets = [b for b in self.method.residual_buckets if "residual" in b.flat]
        return math.sqrt(sum(Residuals(bucket).norm() ** 2 for bucket in buckets))

    def use_pytorch(self) -> None:
        """Fall back to PyTorch's operators, because ranks have chosen different backends."""
        self.ops = fall_back_to_torch(self.comm.rank)
        self.options.checksum = None
        for bucket in self.buckets:
            bucket.codecs, bucket.blocks = self.ops.codecs, self.ops.blocks
            self.method.rebuild_cache(bucket)
        self.method.on_fallback()

    def forget_masks(self, names: Iterable[str]) -> None:
        """Clear the masks of these names: the next step chooses new ones."""
        for bucket in self.buckets:
            for name in names:
                bucket.flat[name].zero_()
                bucket.cache.pop(name, None)

    # Ranks

    @property
    def comm(self) -> Communicator:
        """The ranks to average over, as connected at the first call. They stay after another
        default process group was made: see ``refresh_ranks``.
        """
        if self.connection is None:
            is_wrapped = self.role is Role.WRAPPED
            self.connection = (
                Communicator(single_process=True) if is_wrapped else connect(self.process_group)
            )
            self.connection.on_wait = self.waits.add_wait
            self.connection.counts_alone = self.method.simulate
        return self.connection

    def refresh_ranks(self) -> Communicator:
        """Connect again if the default process group is another one now, and return the ranks.

        Without a group the optimizer is a single process until torch.distributed is initialized,
        which may be after a checkpoint was loaded. Everything public that needs the ranks begins
        with this call.
        """
        connection = self.connection
        if connection is None:
            return self.comm
        follows_default = self.process_group is None and self.role is not Role.WRAPPED
        if follows_default and is_outdated(connection):
            self.settle_state()
            self.overlap.discard()
            self.connection = None  # shards are laid out for the ranks of the new group
            self.build_buckets()
            return self.comm
        return connection

    def connect_ranks(self) -> Communicator:
        """Connect the ranks of the coming step, and tell buckets if there is only one.

        Warns once if a launcher has started several processes that are not connected.
        """
        comm = self.refresh_ranks()
        if comm.size == 1 and self.process_group is None and self.role is not Role.WRAPPED:
            self._warn_if_not_connected()
        sends_nothing = self._is_alone(comm)
        if sends_nothing != self.sends_nothing:
            self.sends_nothing = sends_nothing
            for bucket in self.buckets:
                bucket.sends_nothing = sends_nothing
                # Recompute: residuals may hold rounding errors from when there were other ranks.
                bucket.cache.pop("has_residual", None)
        return comm

    def _is_alone(self, comm: Communicator) -> bool:
        """True if there is one rank, and it is not to go on as one of several."""
        return comm.size == 1 and not (self.method.simulate or comm.may_grow)

    def _warn_if_not_connected(self) -> None:
        if (size := count_launched_ranks()) > 1 and self.claim_first("missing group"):
            warn_on_rank_0(
                f"WORLD_SIZE is {size}, but torch.distributed is not initialized: every process "
                "trains by itself, and nothing is averaged. Add this line before training: "
                "torch.distributed.init_process_group()",
                get_rank(),
            )

    def switch_group(self, group: ProcessGroup | Ranks | Communicator | None) -> None:
        """Average over another group from now on."""
        self.process_group, self.connection = group, None
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


def estimate_bytes_sent(method: Method, bucket: Bucket) -> float:
    """Estimate the bytes of a bucket's payload in a compressed step."""
    values = method.values_in_payload(bucket, 2)
    size = PAYLOAD_CODECS[bucket.group.get("payload_dtype")].bytes_per_value(bucket.grad_dtype)
    return size * (bucket.numel if values is None else values)
