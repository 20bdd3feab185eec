"""What ranks compare in every step: options, and what else must be equal on all of them."""

from __future__ import annotations

import zlib
from itertools import chain
from operator import itemgetter

from .._state.tensors import to_local
from .engine import Engine
from .options import Setting


def list_settings(engine: Engine) -> list[Setting]:
    """Return all that must be equal on all ranks in every step."""
    snapshot, method = engine.options, engine.method
    compared = method.compared_groups
    snapshot.refresh(compared)
    options: list[Setting] = []
    groups = chain.from_iterable(map(itemgetter(1), compared))
    for seen, group in zip(snapshot.groups, groups, strict=True):
        steps = {"step": group["step"]} if "step" in group else {}
        running = {**seen.rates, **steps} if method.ranks_step_together else {}
        options.append((seen.name, {**seen.fixed, **running}))
    # the class first: it explains differences of the others
    first, *others = method.list_fixed_settings()
    return [first, *options, *others, *method.list_running_settings()]


def checksum_settings(engine: Engine) -> int:
    """Return a number that is equal on ranks with equal settings."""
    snapshot, method = engine.options, engine.method
    if snapshot.checksum is None:
        fixed = [*method.list_fixed_settings(), *(seen.fixed for seen in snapshot.groups)]
        snapshot.checksum = zlib.crc32(repr(fixed).encode())
    running: list[object] = [*method.list_running_settings()]
    if method.ranks_step_together:
        running += [*map(itemgetter("step"), engine.option_groups), snapshot.rates]
    return zlib.crc32(repr(running).encode(), snapshot.checksum)


def check_changed_options(engine: Engine) -> None:
    """Check the options of groups that have changed since their last check."""
    snapshot = engine.options
    snapshot.refresh(engine.method.compared_groups)
    if not snapshot.unchecked:
        return
    engine.method.read_options()
    snapshot.refresh(engine.method.compared_groups)
    engine.method.check_groups(snapshot.unchecked)
    if engine.has_new_options:
        _refuse_changed_compression(engine)
    snapshot.unchecked.clear()


def _refuse_changed_compression(engine: Engine) -> None:
    """Raise ValueError if a group selects other tensors than when state was laid out: it would
    be saved as complete, and lack theirs.
    """
    for bucket in [*engine.buckets, *engine.frozen_buckets]:
        tensors = zip(bucket.params, bucket.names, bucket.shapes, bucket.compressed, strict=True)
        for p, name, shape, compressed in tensors:
            if to_local(p).shape != shape:
                continue  # the step raises an error that names the parameter
            if engine.method.is_compressed(p, bucket.group, name) != compressed:
                choice = bucket.group.get("compress")
                raise ValueError(
                    f"compress={choice!r} would change whether {name} is compressed, for which "
                    "state is laid out: set it back, and choose it when the optimizer is made."
                )
