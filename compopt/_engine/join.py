"""Ranks that run out of data at different steps, in ``torch.distributed.algorithms.join.Join``.

A rank that has finished its data goes on to call the steps of the others, without gradients: it
sends its residuals of tensors that have a gradient elsewhere, and zeros for the rest. LocalSteps
takes empty steps, and takes part in exchanges. In every step that averages, ranks gather the
options of their groups, because a rank that has finished no longer calls its scheduler.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from .engine import Engine
from .handshake import gather_json
from .method import Method
from .missing_ranks import run_watching_ranks
from .options import make_comparable

# entries of a group that are not options, and may differ between ranks
LOCAL_ENTRIES = {"params", "param_names"}


class JoinHook:
    """The hooks that a rank without data calls; the interface of torch's ``JoinHook``."""

    def __init__(self, optimizer: Method):
        self._optimizer = optimizer

    @torch.no_grad()
    def main_hook(self) -> None:
        """Take part in a step of the ranks that have data."""
        optimizer, engine = self._optimizer, self._optimizer._engine
        for p in engine.parameters:
            p.grad = None
        engine.has_data = False
        run_watching_ranks(engine, optimizer.take_step)
        for on_step in tuple(engine.step_callbacks):
            on_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the join: all ranks have finished their data."""
        self._optimizer.end_join()


def copy_options_from_ranks_with_data(engine: Engine) -> None:
    """In a join, copy the options of the first rank with data to ranks without data. On all ranks,
    set the ``gradient_factor`` of buckets, which is not 1 if the mean is over ranks with data only.
    """
    if not engine.method.is_joining or engine.comm.size == 1:
        return
    groups = [*engine.method.param_groups]
    if engine.option_groups is not engine.method.param_groups:
        groups += engine.option_groups
    options = [
        {n: make_comparable(v) for n, v in g.items() if n not in LOCAL_ENTRIES} for g in groups
    ]
    options = [{n: v for n, v in g.items() if _is_number(v)} for g in options]
    rows = gather_json([engine.has_data, options], engine.device, engine.comm)
    with_data = [rank_options for has_data, rank_options in rows if has_data]
    if not engine.has_data and with_data:
        for group, rank_options in zip(groups, with_data[0], strict=True):
            for name, value in rank_options.items():
                current = group.get(name)
                if json.loads(json.dumps(make_comparable(current))) == value:
                    continue
                if isinstance(current, Tensor):
                    current.fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value
    factor = 1.0 if engine.divides_by_all else engine.comm.size / max(1, len(with_data))
    for bucket in engine.buckets:
        bucket.gradient_factor = factor


def _is_number(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, int | float)
