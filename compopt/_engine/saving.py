"""Checkpoints and copies of an optimizer whose state lives in buckets."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import torch
from torch.optim import Optimizer

from .._wire.comm import Pending
from . import checkpoint, frozen


class Saving:
    """What ``CompressedOptimizer`` does of torch.optim's ``state_dict``, ``load_state_dict``,
    pickling and copying.
    """

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and never communicates. Every state has its parameter's shape: masks are
        booleans.

        Residuals are the mean over ranks right after :meth:`consolidate_state`, else this rank's
        own; the groups say which, under ``residuals``, and which ``class`` wrote them in which
        ``format``."""
        self._refuse_half_step()
        self._settle()
        if frozen.reset_from_outside(self):
            self._rebuild()
        saved = super().state_dict()
        place = {
            p: n for n, p in enumerate(p for group in self.param_groups for p in group["params"])
        }
        for bucket in [*self._buckets, *self._shelf]:
            for i, p in enumerate(bucket.params):
                if entry := saved["state"].get(place[p]):
                    saved["state"][place[p]] = checkpoint.spread(
                        bucket, i, self._specs(bucket), entry
                    )
        for group, own in zip(saved["param_groups"], self.param_groups, strict=True):
            group.update(self._signature(own))
        return saved

    def _settle(self) -> None:
        """Wait for what was sent behind the last commit, and make the state readable."""
        self._runtime.settle()
        for bucket in self._buckets:
            self.tidy(bucket)
        self._offload.finish()

    def _whose_residuals(self) -> str:
        own = self.sharded or self.averaged_state
        whole = all(bucket.gathered or not bucket.sharded for bucket in self._buckets)
        same = (
            not own
            or self.comm.size == 1
            or (whole and self._consolidated == self._option_groups[0]["step"])
        )
        return "mean" if same else f"rank {self.comm.rank} of {self.comm.size}"

    def _signature(self, group: dict[str, Any]) -> dict[str, Any]:
        """What every group of a state dict says of it: whose residuals it holds, who wrote it, and
        how.

        Where parameters have no state, because they were never trained, it also says which.
        """
        signature = {
            "residuals": self._whose_residuals(),
            "class": type(self).__name__,
            "format": checkpoint.FORMAT,
        }
        without = frozen.without_state(self, group)
        return {**signature, "without_state": without} if without else signature

    def _groups_of(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        return checkpoint.groups_of(self, state_dict)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but dtypes are kept: masks stay bits, residuals as precise as they were. All
        ranks must load.

        Of groups everything is taken over, but the names of parameters.

        Also takes a checkpoint of ``torch.optim.AdamW``. Raises ValueError, with nothing loaded,
        when it does not fit."""
        self._settle()
        self._runtime.drop_early()
        checkpoint.load(self, state_dict)
        self._consolidated = None
        self._rebuild()
        self._half_step = ""

    @torch.no_grad()
    def consolidate_state(self) -> None:
        """Replace each rank's residuals by their mean over ranks. All ranks must call it, before
        ``state_dict``.

        Only the mean ever reaches the model, so training goes on as before, and a checkpoint
        restores on any number of ranks."""
        for _ in self.consolidate_in_turns():
            pass

    def consolidate_in_turns(self) -> Generator[Pending, None, None]:
        self._refuse_half_step()
        self._settle()
        for bucket in self._buckets:
            for name in self.averaged_state:
                if bucket.flat[name].numel():
                    yield from checkpoint.average(bucket.flat[name], bucket.device, self.comm)
            bucket.gathered = {}
            for name in bucket.sharded:
                bucket.gathered[name] = yield from checkpoint.gather(bucket, name, self.comm)
        yield from frozen.consolidate(self, self.comm)
        self._consolidated = self._option_groups[0]["step"]

    _consolidated: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be pickled: save its state_dict() "
                "instead."
            )
        self._refuse_half_step()
        self._settle()
        return self._contents()

    def _contents(self) -> dict[str, Any]:
        """What a copy is made from; the rest is rebuilt."""
        own = {name: getattr(self, name) for name in ("sharded", "offload", "_met", "_trained")}
        return {**Optimizer.__getstate__(self), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._group = None
        self._build()

    def __deepcopy__(self, memo: dict) -> Saving:
        self._refuse_half_step()
        self._settle()
        new = type(self).__new__(type(self))
        Optimizer.__setstate__(new, copy.deepcopy(self._contents(), memo))
        new._group = self._group
        new._build()
        return new
