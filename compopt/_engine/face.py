"""What the engine asks of the optimizer that it drives."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._state.layouts import Layout
from .._wire.requests import Asking
from .stats import Stats
from .verdicts import Verdict

Group = dict[str, Any]  # one of torch's parameter groups: "params", and options by name


class Face(Protocol):
    """Torch's groups and state, and what a class of optimizers says of itself.

    ``CompressedOptimizer`` has a default for all of it but ``algorithm``, ``state_specs`` and
    ``check_group``; what each means is said there."""

    averaged_state: tuple[str, ...]
    chosen_state: tuple[str, ...]
    sharded: bool
    whole_masters: bool
    offload: str | None
    max_skipped: int
    check_replicas_every: int

    @property
    def param_groups(self) -> list[Group]: ...

    @property
    def state(self) -> MutableMapping[Tensor, Any]: ...

    @property
    def _option_groups(self) -> list[Group]: ...

    @property
    def _known_options(self) -> set[str]: ...

    def algorithm(self, bucket: Bucket) -> Asking[None]: ...

    def state_specs(self, dtype: torch.dtype) -> dict[str, Layout]: ...

    def _specs(self, bucket: Bucket) -> dict[str, Layout]: ...

    def _settings(self) -> list[Any]: ...

    def check_group(self, group: Group) -> None: ...

    def is_compressed(self, p: Tensor, group: Group, name: str) -> bool: ...

    def before_layout(self) -> None: ...

    def after_layout(self) -> None: ...

    def restore(self, bucket: Bucket) -> None: ...

    def tidy(self, bucket: Bucket) -> None: ...

    def before_exchange(self) -> None: ...

    def committed(self) -> None: ...

    def add_to_stats(self, stats: Stats, verdict: Verdict) -> Stats: ...

    def gave_way(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
