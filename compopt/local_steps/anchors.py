"""Anchors: parameters as of the last sync, the same on all ranks, and the outer optimizer that
steps them.

An anchor has its parameter's shape, in float32 where the parameter is of lower precision, on its
device or in host memory. A parameter has one from its first local step on. The anchors of a
fragment are next to each other in memory, in buckets, and so are their residuals: a sync is a
few operators on all of them.

``LocalSteps`` makes them, and ``fragment_sync`` steps them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_not

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._engine.engine import Engine
from .._engine.handshake import VALUES, checksum_values
from .._engine.optimizer import CompressedOptimizer
from .._engine.options import Group, Setting, check_base_group
from .._engine.resharding import copy_from_rank_ahead, write_tensors
from .._engine.signals import defer_signals
from .._ops.operations import Ops, choose_backend
from .._state.residuals import Residuals
from .._state.tensors import HOST, distribute_like, to_local
from .._wire.collectives import Communicator, get_replicate_size
from .._wire.payload import Scratch
from .anchor_bucket import (
    KEPT_BYTES,
    AnchorBucket,
    AnchoredTensor,
    copy_wide,
    cut_uniform_runs,
    write_params,
)
from .rounds import trailing_weight


class Anchors:
    """The anchors of parameters, and the outer optimizer that has them for its parameters.

    ``fragments[i]`` is the fragment of parameter i, -1 if it has no anchor yet. Each fragment is a
    group of the outer optimizer. Parameters that are added or trained later are in fragments from
    number ``count`` on.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        fragments: Sequence[int],
        options: Group,
        make_outer: MakeOuter | None,
        ops: Ops,
        on_host: bool,
        residual_dtype: str | None = None,
    ):
        self._residual_dtype, self._trailing_share = residual_dtype, options["average_anchors"]
        self.count, self._payload_dtype = options["fragments"], options["payload_dtype"]
        self._on_host, self.is_delayed = on_host, options["delay"] > 0
        # "auto" is a rate of the default outer optimizer only
        self._is_default = make_outer is None
        self._keeps_length = options["outer_lr"] == "auto" and self._is_default
        if make_outer is None:
            are_plain = not any(hasattr(p, "device_mesh") for p in params)  # SGD fuses no DTensors
            make_outer = partial(make_sgd, options, are_plain)
        self.ops = choose_backend({HOST.type}) if on_host else ops
        self.outer: Optimizer
        self.tensors: list[AnchoredTensor] = []  # in the order of the outer optimizer's parameters
        self.buckets: list[AnchorBucket] = []
        # the options of each fragment's messages; "step" counts its syncs, not steps
        self.groups: dict[int, Group] = {}
        self._known: set[int] = set()  # ids of the parameters with an anchor
        self.are_in_params = False
        self._ranks: tuple[int, list[Communicator]] = 1, []  # see ``note_ranks``
        self._scratch = Scratch()
        for number in sorted(set(fragments) - {-1}):
            members = [p for p, n in zip(params, fragments, strict=True) if n == number]
            self._add_fragment(number, members, None if self.tensors else make_outer)

    def _add_fragment(
        self, number: int, params: Sequence[Tensor], make_outer: MakeOuter | None = None
    ) -> None:
        """Make anchors of these parameters, and add them to the outer optimizer as a group.

        SGD's momentum buffers are created now, not in its first step, so that a rank that joins
        later has as many tensors as the others.
        """
        group: Group = {"payload_dtype": self._payload_dtype, "step": 0}
        added: dict[int, AnchoredTensor] = {}
        for run in cut_uniform_runs(reversed(params)):  # as buckets follow each other in backward
            flat, parts = copy_wide(run, self._on_host)
            tensors = [
                AnchoredTensor(p, number, nn.Parameter(distribute_like(p.detach(), part)), part)
                for p, part in zip(run, parts, strict=True)
            ]
            bucket = AnchorBucket(len(self.buckets), group, flat, tensors, self._residual_dtype)
            added.update((id(t.param), t) for t in tensors)
            bucket.codecs, bucket.blocks = self.ops.codecs, self.ops.blocks
            bucket.scratch = self._scratch
            if self._trailing_share is not None:
                bucket.keep_trailing_mean()
            self.buckets.append(bucket)
        self.note_ranks(*self._ranks)
        self.groups[number] = group
        self.tensors += [added[id(p)] for p in params]
        self._known.update(added)
        members: list[Tensor] = [added[id(p)].anchor for p in params]
        if make_outer is None:
            self.outer.add_param_group({"params": members})
        else:
            self.outer = call_make_outer(make_outer, members)
        defaults = self.outer.defaults
        if self._is_sgd and defaults["momentum"] and not defaults["dampening"]:
            for anchor in members:
                self.outer.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor.detach())

    @property
    def _is_sgd(self) -> bool:
        return isinstance(self.outer, torch.optim.SGD)

    @contextmanager
    def _grow_rates(self, progress: float) -> Iterator[None]:
        """Give an outer SGD rates between plain averaging of parameters (``progress`` 0: learning
        rate 1, momentum 0) and its own (1) within the block. Where ``outer_lr`` is "auto", what
        adds up under the momentum keeps its length.
        """
        groups = self.outer.param_groups if self._is_sgd else []
        rates = [(group, group["lr"], group["momentum"]) for group in groups]
        for group, lr, momentum in rates:
            # SGD updates its momentum buffer only if momentum is not zero
            least = torch.finfo(torch.float64).tiny if momentum else 0.0
            momentum = max(momentum * progress, least)
            rate = 1 - momentum if self._keeps_length else 1 + (lr - 1) * progress
            group.update(lr=rate, momentum=momentum)
        try:
            yield
        finally:
            for group, lr, momentum in rates:
                group.update(lr=lr, momentum=momentum)

    def use_pytorch(self, ops: Ops) -> None:
        """Quantize by PyTorch's operators, because ranks have chosen different backends."""
        self.ops = ops
        for bucket in self.buckets:
            bucket.codecs, bucket.blocks = ops.codecs, ops.blocks

    @torch.no_grad()
    def note_training(self, params: Sequence[Tensor]) -> None:
        """Note that trainable parameters among ``params`` may move. Those without an anchor become
        a new fragment.
        """
        if not self._known.issuperset(map(id, params)) and (
            new := [p for p in params if p.requires_grad and id(p) not in self._known]
        ):
            self._add_fragment(max(self.count, 1 + max(self.groups)), new)
        for t in self.tensors:
            if not t.has_moved:
                t.has_moved = t.param.requires_grad

    # The other ranks

    @torch.no_grad()
    def add_fragments(self, params: Sequence[Tensor], fragments: Sequence[int]) -> None:
        """Add the fragments that another rank has begun to train, in a step that failed here.

        ``fragments``: of that rank's ``params``, -1 where one has no anchor.
        """
        for number in sorted({*fragments} - self.groups.keys() - {-1}):
            self._add_fragment(
                number, [p for p, n in zip(params, fragments, strict=True) if n == number]
            )

    def note_ranks(self, ranks: int, shards: list[Communicator]) -> None:
        """Note the number of ranks, and those that hold the other parts of this rank's model.
        Payloads share memory where messages of other ranks tell what was in it.
        """
        self._ranks = ranks, shards
        size = max([sum(bucket.lengths) for bucket in self.buckets], default=0)
        for bucket in self.buckets:
            bucket.shared_size = size if ranks > 1 else 0
            bucket.replicate_size = get_replicate_size(bucket.tensors[0].param, shards)

    def list_values(self, engine: Engine) -> list[Setting]:
        """Return the checksum of each anchor, and of each parameter that never had one."""
        anchors = [(f"anchor {i}", t.anchor) for i, t in enumerate(self.tensors)]
        values = [*anchors, *self._list_untrained(engine)]
        return [(name, {VALUES: checksum_values(to_local(x.detach()))}) for name, x in values]

    def list_equal_tensors(self, engine: Engine) -> list[Tensor]:
        """Return the tensors that are equal on all ranks even within a round."""
        return [
            *(b.flat_anchors for b in self.buckets),
            *(p for _, p in self._list_untrained(engine)),
        ]

    def _list_untrained(self, engine: Engine) -> list[tuple[str, Tensor]]:
        trained = {t.param for t in self.tensors}
        buckets = engine.frozen_buckets
        named = (pair for b in buckets for pair in zip(b.names, b.params, strict=True))
        return [(name, p) for name, p in named if p not in trained]

    def checksum(self) -> int:
        """Compute a number above 0 that is equal for equal anchors."""
        checksums = [checksum_values(bucket.flat_anchors) for bucket in self.buckets]
        return zlib.crc32(repr(checksums).encode()) or 1

    def catch_up(self, engine: Engine, is_new: bool) -> bool:
        """Copy anchors from a rank that is ahead. On a rank that is new or lacks a sync, the
        parameters of the fragments that were synced become their anchors, without residuals; others
        keep what they moved.

        Returns whether any became its anchor.
        """
        groups = [*self.groups.values()]
        counts = torch.tensor([g["step"] for g in groups], dtype=torch.int64, device="cpu")
        states = [sorted(self.outer.state.get(t.anchor, {}).items()) for t in self.tensors]
        moments = [to_local(x) for state in states for _, x in state if torch.is_tensor(x)]
        means = [b.trailing_mean for b in self.buckets if b.trailing_mean is not None]
        tensors = [counts, *(bucket.flat_anchors for bucket in self.buckets), *means, *moments]
        count = -1 if is_new else self.applied_syncs
        copied = copy_from_rank_ahead(
            engine.comm, engine.device, tensors, count, len(groups), "sync"
        )
        if copied is None or not copied[1]:
            return False
        with defer_signals():
            engine.damage = "rebind() was interrupted while it wrote a sync of another rank"
            write_tensors(tensors, copied[1])
            for group, step in zip(groups, counts.tolist(), strict=True):
                if is_new or group["step"] != step:
                    self._become_anchors(group)
                group["step"] = step
            engine.damage = ""
        return True

    def _become_anchors(self, group: Group) -> None:
        """Write the anchors of a fragment to its parameters, and forget its residuals."""
        for bucket in self.buckets:
            if bucket.group is group:
                write_params(bucket.tensors)
                Residuals(bucket).clear()
                for t in bucket.tensors:
                    t.has_moved = False

    def differ_from_params(self, tolerance: float = 0.0) -> bool:
        """Return True if any parameter is not its anchor, in the parameter's dtype.

        ``tolerance``: relative to the largest value of the anchor.
        """
        for t in self.tensors:
            p = to_local(t.param.detach())
            start = t.local_anchor.to(p.device, p.dtype)
            if p.numel() and not (p - start).abs().amax() <= tolerance * start.abs().amax():
                return True
        return False

    # In the model

    @contextmanager
    def put_into_params(self, underway: Collection[int], average: bool) -> Iterator[None]:
        """Write anchors to the parameters that may have moved, or their trailing means to all
        that have one (``average``); restore these after the block.

        Within another such block nothing is done. ``underway``: fragments with a sync in
        flight.
        """
        if self.are_in_params:
            yield
            return
        moved = [
            t
            for t in self.tensors
            if average or t.has_moved or (t.is_sent and t.fragment in underway)
        ]
        values = [(p, p.clone()) for p in (to_local(t.param.detach()) for t in moved)]
        write_params(moved, trailing=average)
        self.are_in_params = True
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in values:
                    p.copy_(value)
            self.are_in_params = False

    @torch.no_grad()
    def update_trailing_means(
        self, buckets: Sequence[AnchorBucket], steps: float, step: float
    ) -> None:
        """Take the new anchors of a sync, after ``steps`` steps of a round, into their trailing
        mean.
        """
        if self._trailing_share is not None:
            weight = trailing_weight(self._trailing_share, steps, step)
            for bucket in buckets:
                if bucket.trailing_mean is not None:
                    bucket.trailing_mean.lerp_(bucket.flat_anchors, weight)

    def end_sync(self, buckets: Sequence[AnchorBucket]) -> None:
        """Free the memory of a sync of these buckets; a small model on a CPU keeps it."""
        size = sum(8 * sum(bucket.lengths) for bucket in self.buckets)  # values and rounding errors
        keeps = size <= KEPT_BYTES and all(b.device.type == "cpu" for b in buckets)
        self._scratch = self._scratch if keeps else Scratch()
        for bucket in self.buckets:
            bucket.scratch = self._scratch
        for bucket in buckets:
            vars(bucket).pop("payload", None)
            bucket.pseudo_gradient = None
            if not keeps:
                bucket.release_memory()

    # Fragments

    def list_buckets(self, fragments: Collection[int]) -> list[AnchorBucket]:
        """Return the buckets of these fragments."""
        return [bucket for bucket in self.buckets if bucket.tensors[0].fragment in fragments]

    def list_pseudo_gradients(self) -> dict[AnchoredTensor, Tensor]:
        """Return what had moved when a sync began, if it is delayed and in flight."""
        found: dict[AnchoredTensor, Tensor] = {}
        for bucket in self.buckets:
            if (flat := bucket.pseudo_gradient) is not None:
                for t, d in zip(bucket.sent, bucket.view_sent(flat), strict=True):
                    found[t] = distribute_like(t.anchor.detach(), d)
        return found

    @property
    def applied_syncs(self) -> int:
        """The number of syncs that were applied to anchors, counted by fragment."""
        return sum(group["step"] for group in self.groups.values())

    def step_outer(
        self, buckets: Sequence[AnchorBucket], progress: float, ranks: int, is_late: bool
    ) -> list[Tensor]:
        """Do line 4 of the module ``local_steps``, and feed back what rounding has taken off.

        Returns what the rank has moved since the sync began, if it ``is_late``.
        """
        moved: list[Tensor] = []
        of_ranks = ranks if self._keeps_length else None
        # torch's SGD steps one tensor like the other: a bucket at a time it needs less memory
        steps = [[bucket] for bucket in buckets] if self._is_default else [buckets]
        with self._grow_rates(progress):
            for together in steps:
                for bucket in together:
                    bucket.keep_unsent()
                    if is_late:
                        moved += bucket.compute_moved_since()
                    bucket.set_gradients(of_ranks, copies=len(together) > 1)
                if any(bucket.is_averaged for bucket in together):
                    self.outer.step()
                for t in (t for bucket in together for t in bucket.tensors):
                    t.anchor.grad = None
        for group in {id(bucket.group): bucket.group for bucket in buckets}.values():
            group["step"] += 1
        return moved


def assign_to_fragments(groups: list[Group], fragments: int) -> list[int]:
    """Return the fragment of every parameter, -1 if it is frozen.

    Each group is cut, in order, into ``fragments`` parts of about equal bytes. Fragment i has part
    i of every group, so the parameters of one layer mostly stay together.
    """
    assigned: list[int] = []
    for group in groups:
        sizes = [p.numel() * p.element_size() * p.requires_grad for p in group["params"]]
        total, before = max(1, sum(sizes)), 0
        for p, size in zip(group["params"], sizes, strict=True):
            place = (2 * before + size) * fragments // (2 * total + 1)
            assigned.append(place if p.requires_grad else -1)
            before += size
    return assigned


def reset_moments(inner: Optimizer, tensors: Iterable[AnchoredTensor]) -> None:
    """Zero the state of these parameters in ``inner`` that is not finite."""
    state = inner.state
    for t in tensors:
        for value in state.get(t.param, {}).values():
            if isinstance(value, Tensor) and not bool(to_local(value).isfinite().all()):
                value.zero_()


MakeOuter = Callable[[list[Tensor]], Optimizer]


GROUP = "outer optimizer, group"  # in messages


def make_sgd(options: Group, fused: bool, anchors: list[Tensor]) -> torch.optim.SGD:
    """Make DiLoCo's outer optimizer: SGD with Nesterov's momentum. Its options are ``outer_lr`` and
    ``outer_momentum``.
    """
    lr, momentum = options["outer_lr"], options["outer_momentum"]
    lr = 1 - momentum if lr == "auto" else lr
    return torch.optim.SGD(anchors, lr, momentum, nesterov=momentum > 0, fused=fused or None)


def call_make_outer(make_outer: MakeOuter, anchors: list[Tensor]) -> Optimizer:
    """Return the outer optimizer over these anchors.

    Raises TypeError or ValueError, which names ``outer``, where that is no function of a list of
    anchors, raises one, or returns what cannot step them.
    """
    try:
        outer = make_outer(anchors)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"outer must make an optimizer over a list of anchors, and it failed: {error}. E.g. "
            "outer=lambda anchors: torch.optim.SGD(anchors, lr=0.7)."
        ) from error
    if isinstance(outer, CompressedOptimizer) or not isinstance(outer, Optimizer):
        raise TypeError(
            f"outer must make an optimizer of torch, got {type(outer).__name__}. LocalSteps itself "
            "averages what ranks have moved: pass payload_dtype= to it."
        )
    stepped = [p for group in outer.param_groups for p in group["params"]]
    if len(stepped) != len(anchors) or any(map(is_not, stepped, anchors)):
        raise ValueError("outer must step all parameters that it is given, in their order.")
    check_outer_rates(outer)
    return outer


def check_outer_rates(outer: Optimizer) -> None:
    """Raise ValueError if a step of the outer optimizer would make anchors NaN."""
    for group in outer.param_groups:
        check_base_group(group, "outer optimizer")
