"""The hooks through which an engine drives its optimizer.

A class must define its state (``state_layouts``), the step of one bucket (``algorithm``) and the
checks of its options (``check_group``). Most other hooks have a default; the base classes define
the rest (``CompressedOptimizer``, ``Wrapper``).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._state.bucket import Bucket
from .._state.layouts import Layout, LocalShape, Sharded
from .._state.tensors import is_compressed
from .._wire.requests import RequestGenerator
from .decision import StepDecision
from .options import ComparedGroups, Group, Setting, absolute_rates
from .stats import Stats


class Method(Optimizer):
    """The attributes and methods that classes of optimizers override."""

    _engine: Any  # the ``Engine``, which imports this file
    # state that differs from rank to rank, of which only the mean over ranks matters
    rank_local_state: tuple[str, ...] = ()
    # sharded error feedback, which only the owner of a shard has; consolidate_state() gathers it
    owner_only_state: tuple[str, ...] = ()
    # of a wrapper: what constructors of its base take; all else in the base's groups is learned
    given_options: set[str] = set()
    # masks that the next step chooses anew if they are all zero
    mask_state: tuple[str, ...] = ()
    # ZeRO-1: each rank keeps the state of its shards, and the step gathers parameters. False inside
    # FSDP2, where parameters are shards already, and state has the size of the shard
    sharded = False
    # FSDP2 shards the parameters over this optimizer's ranks, and the optimizer replaces its
    # reduce-scatter
    replaces_reduce_scatter = False
    # the ``FSDPBackward``, which then averages gradients in backward; its file imports this one
    fsdp_backward: Any = None
    # the coming step averages gradients over ranks
    averages_gradients = True
    # options were changed such that state has to be laid out again
    has_new_layout = False
    # float32 masters are not sharded with other state: weights off the mask decay on every rank
    whole_masters = False
    # set by torch's Join: whether it is enabled, and whether this optimizer is the first in it
    _join_config: Any = None
    # state in host memory: "residual", "all" (masters too), or None
    offload: str | None = None
    # what residuals are stored in between steps: "int8", or None for numbers as they are computed
    residual_dtype: str | None = None
    # compress in a single process too
    simulate = False
    # consecutive skipped steps after which step() raises; users may set it
    max_skipped = 100
    # seconds after which step() raises if ranks have not come to it; None: at the timeout of the
    # process group. Users may set it
    patience: float | None = None
    # steps within which ranks compare all parameters, a part at a time; 0: never. Users may set it
    check_replicas_every = 100

    @property
    def has_equal_replicas(self) -> bool:
        """True if parameters are equal on all ranks between steps."""
        return not self.replaces_reduce_scatter

    @property
    def residual_buckets(self) -> list[Bucket]:
        """The buckets that hold this rank's residuals."""
        buckets: list[Bucket] = self._engine.buckets
        return buckets

    @property
    def is_joining(self) -> bool:
        """True within a ``Join`` of torch, where ranks may run out of data."""
        return self._join_config is not None and bool(self._join_config.enable)

    def read_options(self) -> None:
        """Read options that were changed in groups of another optimizer."""

    def lay_out_new_parameters(self) -> None:
        """Lay out state anew if ``param_groups`` hold other parameters by now."""

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        """Return the layout of each state, by name; ``dtype`` is that of the computation."""
        raise NotImplementedError

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        """Return the generator that steps one bucket."""
        raise NotImplementedError

    def reduces_as_matrix(self, bucket: Bucket, i: int) -> bool:
        """Return True if the coming step's reducer needs tensor i in its shape, not as a vector
        with its elements in any order.
        """
        return False

    def check_group(self, group: Group) -> None:
        """Raise ValueError if an option of ``group`` is invalid; normalize options in place."""
        raise NotImplementedError

    def is_compressed(self, p: Tensor, group: Group, name: str) -> bool:
        """Return the group's ``compress``; by default True for tensors of at least 2
        dimensions and 4096 elements."""
        return is_compressed(p, group)

    def before_layout(self) -> None:
        """Called before buckets and state are laid out, first in the constructor, and again after
        groups, ranks or a checkpoint have changed.
        """

    def after_layout(self) -> None:
        """Called after buckets and state are laid out."""

    def rebuild_cache(self, bucket: Bucket) -> None:
        """Rebuild ``bucket.cache`` from the bucket's state, which was just laid out or loaded."""

    def estimate_values_sent(self, bucket: Bucket, ranks: int) -> float | None:
        """Estimate how many values a compressed step sends of a bucket; None if unknown."""
        return None

    def values_in_payload(self, bucket: Bucket, ranks: int) -> float | None:
        """Estimate how many values a payload has, without parameters that are gathered later."""
        return self.estimate_values_sent(bucket, ranks)

    def before_exchange(self) -> None:
        """Called at the start of a step, after gradients are unscaled."""
        if self.fsdp_backward is not None:
            self.fsdp_backward.check()

    def after_commit(self) -> None:
        """Called after all buckets have committed a step, before it is counted."""

    def add_to_stats(self, stats: Stats, decision: StepDecision) -> Stats:
        """Return ``stats`` of the step that has just ended, with additions of the class."""
        if self.fsdp_backward is not None:
            stats.bytes_dense = self.fsdp_backward.dense_bytes
        return stats

    def on_fallback(self) -> None:
        """Called when all ranks fall back to PyTorch's operators."""

    @property
    def option_groups(self) -> list[Group]:
        """The groups with the options of this class: ``param_groups``, unless it wraps another
        optimizer.
        """
        return self.param_groups

    @property
    def compared_groups(self) -> list[ComparedGroups]:
        """The groups whose options ranks compare, first those of ``option_groups``."""
        return [("group", self.param_groups, self.defaults)]

    # ranks have taken equally many steps, at equal rates
    ranks_step_together = True

    def list_running_settings(self) -> list[Setting]:
        """Return what ranks compare beside options, and may change from step to step."""
        return []

    def list_fixed_settings(self) -> list[Setting]:
        """Return what ranks compare beside options. It changes only with options and layout."""
        sharded = " (sharded)" if self.sharded else ""
        # backends round differently, and select differently among equal values
        return [
            ("class", type(self).__name__ + sharded),
            ("backend", self._engine.ops.name),
            # so do PyTorch's operators on two kinds of devices
            ("device", self._engine.device.type),
        ]

    def check_groups(self, numbers: Container[int]) -> None:
        """Check the options of the groups of these numbers."""
        for number, group in enumerate(self.option_groups):
            if number in numbers:
                self.check_group({**group, **absolute_rates(group), "params": []})

    def lay_out_changed_state(self) -> None:
        """Lay out state again if new options need state of another kind or size (``rank``)."""
        engine = self._engine
        engine.option_groups = self.option_groups
        has_new_layout = engine.has_new_options and self.has_new_layout
        if has_new_layout or engine.has_foreign_state(self.state):
            engine.rebuild_buckets()

    def apply_changed_options(self) -> None:
        """Lay out state again where parameters or options were changed; check nothing."""
        self.lay_out_new_parameters()
        self.read_options()
        self._engine.options.refresh(self.compared_groups)
        self.lay_out_changed_state()

    def bucket_layouts(self, bucket: Bucket) -> dict[str, Layout]:
        """Return the layouts of a bucket's state: the class's, and masters for low precision."""
        low = bucket.dtype.itemsize < 4
        layouts = self.state_layouts(torch.float32 if low else bucket.dtype)
        if not low:
            return layouts
        layout = Sharded if self.sharded and not self.whole_masters else LocalShape
        return {**layouts, "master": layout(torch.float32)}

    def take_step(self) -> None:
        """Take a step, without the hooks of ``step()``."""
        raise NotImplementedError

    def find_end_of_round(self) -> str:
        """Return which rank waits in ``end_round()`` for this one; empty if none does."""
        return ""

    def answer_end_of_round(self, kind: int) -> None:
        """Tell ranks that wait in ``end_round()`` which call this one is in: a kind of message.
        Raises CommunicationError on all ranks.
        """
        raise NotImplementedError

    def end_join(self) -> None:
        """Called on all ranks when the last one has finished its data."""
        raise NotImplementedError

    def save_without_hooks(self) -> dict[str, Any]:
        """Return the state dict, without hooks, and without what only ``state_dict()`` adds."""
        raise NotImplementedError

    def load_without_hooks(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; call no hooks."""
        raise NotImplementedError
