"""The hooks through which a session drives its optimizer.

A class of optimizers defines which state it keeps (``state_specs``), how one bucket steps
(``algorithm``), and checks its options (``check_group``). All other hooks have a default.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._state.layouts import Dense, Layout, Sharded
from .._state.tensors import is_compressed
from .._wire.requests import RequestGenerator
from .decision import StepDecision
from .options import Group, Setting
from .stats import Stats


class Averager(Protocol):
    """Averages gradients in backward, in place of FSDP's reduce-scatter: see ``inside``."""

    @property
    def dense_bytes(self) -> int:
        """The bytes that FSDP would send in a step."""

    def check(self) -> None:
        """Raise where the gradients of this step are not what backward averaged."""


class OptimizerHooks:
    """What a class of optimizers defines, beside torch's groups and state."""

    defaults: dict[str, Any]
    param_groups: list[Group]
    state: defaultdict[Tensor, Any]

    # per-rank state of which only the mean over ranks ever matters
    averaged_state: tuple[str, ...] = ()
    # sharded state that its owner alone sends, once
    sent_once: tuple[str, ...] = ()
    # masks that the next step chooses anew where they are lost (all zero)
    chosen_state: tuple[str, ...] = ()
    # each rank keeps state of its own shard only, and parameters are gathered in the step
    sharded = False
    # FSDP cuts the parameters over the ranks to average with, and this optimizer averages in place
    # of its reduce-scatter
    reduces_inside = False
    inside: Averager | None = None  # which then averages in backward
    # though state is sharded: every rank updates all masters
    whole_masters = False
    # what of the state lives in host memory: "residual", "all" (masters too), or nothing
    offload: str | None = None
    # compress also where there is no other rank: one process then shows what many do
    simulate = False
    # steps skipped in a row after which step() raises; set it on the optimizer to change it
    max_skipped = 100
    # every so many steps a checksum of the parameters rides in the payload; 0: never
    check_replicas_every = 0

    @property
    def averages_gradients(self) -> bool:
        """Whether the step that comes averages gradients over ranks; else it is a rank's own, and
        nobody has to collect them.
        """
        return True

    @property
    def has_equal_replicas(self) -> bool:
        """Whether parameters are the same on all ranks between steps."""
        return not self.reduces_inside

    def state_specs(self, dtype: torch.dtype) -> dict[str, Layout]:
        raise NotImplementedError

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        raise NotImplementedError

    def reduces_as_matrix(self, bucket: Bucket, i: int) -> bool:
        """Whether the coming step's reducer needs tensor i in its shape; else it takes a vector,
        whatever the order of its elements.
        """
        return False

    def check_group(self, group: Group) -> None:
        raise NotImplementedError

    def is_compressed(self, p: Tensor, group: Group, name: str) -> bool:
        """Whether ``p`` is compressed: what its group says, else matrices and larger of at least
        4096 elements.
        """
        return is_compressed(p, group)

    def before_layout(self) -> None:
        """Called before buckets and state are laid out, at first and whenever groups, ranks or a
        checkpoint come.
        """

    def after_layout(self) -> None:
        """Called when they are laid out."""

    def restore(self, bucket: Bucket) -> None:
        """Rebuild what ``bucket.cache`` derives from state, after it was set from outside."""

    def tidy(self, bucket: Bucket) -> None:
        """Bring state that is kept in a cheaper form during training to what it means, before it is
        read.
        """

    def values_sent(self, bucket: Bucket, ranks: int) -> float | None:
        """About how many values a compressed step sends of a bucket; None where nobody knows."""
        return None

    def before_exchange(self) -> None:
        """Called at the start of a step, when the gradients are what will be sent."""
        if self.inside is not None:
            self.inside.check()

    def committed(self) -> None:
        """Called when all buckets have committed a step, before it is counted."""

    def add_to_stats(self, stats: Stats, decision: StepDecision) -> Stats:
        """``stats`` of the step that has just ended, with more where a class knows more."""
        if self.inside is not None:
            stats.bytes_dense = self.inside.dense_bytes
        return stats

    def on_fallback(self) -> None:
        """Called when all ranks go on with PyTorch's operators."""

    @property
    def _option_groups(self) -> list[Group]:
        """The groups that hold the options of this class: ``param_groups``, unless it wraps another
        optimizer's.
        """
        return self.param_groups

    @property
    def _known_options(self) -> set[str]:
        """The names of these options.

        Whatever else a group holds is the user's, and nothing here looks at it.
        """
        return set(self.defaults)

    def _settings(self) -> list[Setting]:
        """What must be the same on all ranks, step for step; more of it where a class has more."""
        raise NotImplementedError

    def _specs(self, bucket: Bucket) -> dict[str, Layout]:
        """The state of a bucket's tensors: the class's, and masters of low precision."""
        low = bucket.dtype.itemsize < 4
        specs = self.state_specs(torch.float32 if low else bucket.dtype)
        if not low:
            return specs
        layout = Sharded if self.sharded and not self.whole_masters else Dense
        return {**specs, "master": layout(torch.float32)}

    # Torch's

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def _saved(self) -> dict[str, Any]:
        """The state dict, without a word of what it may lack."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError
