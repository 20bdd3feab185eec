"""Checkpoints and copies of an optimizer whose state lives in buckets."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch.optim import Optimizer

from .._wire.comm import Comm, ProcessGroup
from . import checkpoint, frozen, loading, moving
from .engine import Engine
from .face import Face, Group
from .turns import Turns


class Saving(Optimizer):
    """What ``CompressedOptimizer`` does of torch.optim's saving, loading, pickling and copying."""

    _engine: Engine

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and never communicates. Every state has its parameter's shape: masks are
        booleans.

        Residuals are the mean over ranks right after :meth:`consolidate_state`, else this rank's
        own; the groups say which, under ``residuals``, and which ``class`` wrote them in which
        ``format``."""
        engine = self._engine
        engine.refuse_half_step()
        engine.settle()
        if frozen.reset_from_outside(engine):
            engine.rebuild()
        saved: dict[str, Any] = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        place = {p: n for n, p in enumerate(params)}
        for bucket in [*engine.buckets, *engine.shelf]:
            layouts = engine.specs(bucket)
            for i, p in enumerate(bucket.params):
                if entry := saved["state"].get(place[p]):
                    saved["state"][place[p]] = checkpoint.spread(bucket, i, layouts, entry)
        for group, own in zip(saved["param_groups"], self.param_groups, strict=True):
            group.update(self._signature(own))
        return saved

    def _signature(self, group: Group) -> dict[str, Any]:
        """What every group of a state dict says of it: whose residuals it holds, who wrote it, and
        how.

        Where parameters have no state, because they were never trained, it also says which.
        """
        signature = {
            "residuals": whose_residuals(self._engine),
            "class": type(self).__name__,
            "format": checkpoint.FORMAT,
        }
        without = frozen.without_state(self._engine, group)
        return {**signature, "without_state": without} if without else signature

    def _groups_of(self, state_dict: dict[str, Any]) -> list[Group]:
        return loading.groups_of(self._engine, state_dict)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but dtypes are kept: masks stay bits, residuals as precise as they were. All
        ranks must load.

        Of groups everything is taken over, but the names of parameters.

        Also takes a checkpoint of ``torch.optim.AdamW``. Raises ValueError, with nothing loaded,
        when it does not fit."""
        engine = self._engine
        engine.settle()
        engine.runtime.early.drop()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        loading.load(engine, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
        engine.consolidated = None
        engine.rebuild()
        engine.half_step = ""

    @torch.no_grad()
    def consolidate_state(self) -> None:
        """Replace each rank's residuals by their mean over ranks. All ranks must call it, before
        ``state_dict``.

        Only the mean ever reaches the model, so training goes on as before, and a checkpoint
        restores on any number of ranks."""
        for _ in self.consolidate_in_turns():
            pass

    def consolidate_in_turns(self) -> Turns[None]:
        engine = self._engine
        engine.refuse_half_step()
        engine.settle()
        for bucket in engine.buckets:
            for name in engine.face.averaged_state:
                if bucket.flat[name].numel():
                    yield from moving.average(bucket.flat[name], bucket.device, engine.comm)
            bucket.gathered = {}
            for name in bucket.sharded:
                bucket.gathered[name] = yield from moving.gather(bucket, name, engine.comm)
        yield from frozen.consolidate(engine, engine.comm)
        engine.consolidated = engine.steps

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        if self._engine.group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be pickled: save its state_dict() "
                "instead."
            )
        self._engine.refuse_half_step()
        self._engine.settle()
        return self._contents()

    def _contents(self) -> dict[str, Any]:
        """What a copy is made from; the rest is rebuilt."""
        engine = self._engine
        own = {"sharded": engine.face.sharded, "offload": engine.face.offload}
        laid_out = {"_met": engine.met, "_trained": engine.trained}
        return {**Optimizer.__getstate__(self), **own, **laid_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._revive(state, None)

    def _revive(self, contents: dict[str, Any], group: ProcessGroup | Comm | None) -> None:
        """Become a copy of what had these contents."""
        contents = dict(contents)
        met, trained = contents.pop("_met"), contents.pop("_trained")
        # CompressedOptimizer, which inherits this, has all that a face needs
        self._engine = Engine(cast(Face, self), group, met, trained)
        Optimizer.__setstate__(self, contents)
        self._engine.build()

    def __deepcopy__(self, memo: dict[int, Any]) -> Saving:
        self._engine.refuse_half_step()
        self._engine.settle()
        new = type(self).__new__(type(self))
        new._revive(copy.deepcopy(self._contents(), memo), self._engine.group)
        return new


def whose_residuals(engine: Engine) -> str:
    """Of which rank a state dict would hold the residuals now; "mean" where of all."""
    face = engine.face
    if not (face.sharded or face.averaged_state):
        return "mean"
    whole = all(bucket.gathered or not bucket.sharded for bucket in engine.buckets)
    comm = engine.comm
    if comm.size == 1 or (whole and engine.consolidated == engine.steps):
        return "mean"
    return f"rank {comm.rank} of {comm.size}"
