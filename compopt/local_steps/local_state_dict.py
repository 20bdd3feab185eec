"""Anchors, the outer optimizer and the running round in a state dict: under "outer" in the entry of
each parameter, because torch.distributed.checkpoint keeps nothing beside those entries.

torch.distributed.checkpoint also loads only into entries that exist. So entries have the same names
from the first state dict on. Before a parameter has an anchor its ``fragment`` is -1, and its other
values mean nothing.

``AnchoredWrapper`` saves and loads by it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .._engine.checkpoint import check_entry, warn_of_lost_residuals
from .._engine.options import is_number
from .._inside.base_state import read_entry, save_entry
from .._state.layouts import LocalShape, TensorInfo
from .._state.residuals import Residuals
from .._state.tensors import distribute_like, to_local
from .anchor_bucket import AnchoredTensor
from .anchors import Anchors
from .fragment_sync import FragmentSync, RunningSync, SyncContribution
from .rounds import RoundCounts

Entry = dict[str, Any]


# Saving


def save_rounds(
    params: Iterable[Tensor], sync: FragmentSync, options: dict[str, Any], counts: RoundCounts
) -> list[Entry | None]:
    """Return the entry of every parameter, None of those without an anchor."""
    anchors, running, entries = sync.anchors, sync.running, {}
    squares = zip(running.tensors, running.squares.tolist(), strict=True) if running else ()
    square_of = dict(squares)
    states, pseudo_gradients = _save_states(anchors), anchors.list_pseudo_gradients()
    for bucket, i, t in ((b, i, t) for b in anchors.buckets for i, t in enumerate(b.tensors)):
        numbers = {
            "step": options["step"],
            **asdict(counts),
            **{name: getattr(t, name) for name in ("fragment", "has_moved", "is_sent")},
            "is_due": t.fragment in sync.due,
        }
        anchor = t.anchor.detach()
        syncs = anchors.groups[t.fragment]["step"] if t.fragment >= 0 else 0
        entry = {
            "anchor": anchor,
            "optimizer": {
                "step": torch.tensor(syncs, dtype=torch.float32, device="cpu"),
                "residual": distribute_like(anchor, Residuals(bucket).read(i)),
                "base": states[t.anchor],
            },
        }
        if t.trailing_mean is not None:
            entry["average"] = distribute_like(anchor, t.trailing_mean)
        if options["delay"] or running is not None:
            underway: tuple[float, ...] = 0, 0, 0.0
            if running is not None and t.fragment in running.fragments:
                steps = running.contribution.steps
                underway = running.apply_at, steps, square_of[t]
            d = pseudo_gradients.get(t)
            entry["exchange"] = {
                "pseudo_gradient": torch.zeros_like(anchor) if d is None else d,
                **_as_tensors(dict(zip(("apply_at", "steps", "squared"), underway, strict=True))),
            }
        entries[t.param] = {**entry, **_as_tensors(numbers)}
    return [entries.get(p) for p in params]


def _save_states(anchors: Anchors) -> dict[Tensor, Entry]:
    """Return the state of every anchor: its residual, and the outer optimizer's under "base"."""
    outer, entries = anchors.outer, {}
    saved = outer.state_dict()
    for group, numbers in zip(outer.param_groups, saved["param_groups"], strict=True):
        for anchor, number in zip(group["params"], numbers["params"], strict=True):
            entries[anchor] = save_entry(outer, anchor, group, saved["state"].get(number))
    return entries


def _as_tensors(numbers: dict[str, float]) -> dict[str, Tensor]:
    """Return numbers as tensors, because flattened state dicts hold no booleans."""
    return {
        name: torch.tensor(
            number, dtype=torch.float64 if isinstance(number, float) else torch.int64, device="cpu"
        )
        for name, number in numbers.items()
    }


# Loading


def split_rounds(saved: dict[str, Any], name: str) -> tuple[dict[str, Any], list[Entry | None]]:
    """Return the state dict without what is under "outer", and that of every parameter.

    Raises ValueError if another class than ``name`` saved anchors.
    """
    groups = saved["param_groups"]
    state = {key: dict(e) if isinstance(e, dict) else e for key, e in saved["state"].items()}
    outer = {key: e.pop("outer", None) for key, e in state.items() if isinstance(e, dict)}
    entries = [outer.get(key) or None for group in groups for key in group["params"]]
    written_by = groups[0].get("class", name)
    if any(entries) and written_by != name:
        raise ValueError(
            f"loaded state dict is of {written_by}, and its anchors are nothing that {name} goes "
            f"on from: load a checkpoint of {name}."
        )
    return {**saved, "state": state}, entries


@dataclass
class SavedRounds:
    """The content of the entries under "outer".

    ``fragments``: of every parameter, -1 where it has no anchor. ``anchored``: the entries of those
    that have one, in the order of ``Anchors.tensors``. ``due``: the fragments that wait for a
    sync. ``running``: the one in flight. ``sync``: what was loaded from entries.
    """

    step: int
    counts: RoundCounts
    fragments: list[int]
    anchored: list[Entry]
    due: frozenset[int]
    running: RunningSync | None
    sync: FragmentSync | None = None

    @property
    def is_open(self) -> bool:
        """True if parameters differed from rank to rank."""
        return self.running is not None or any(bool(e["has_moved"]) for e in self.anchored)

    @torch.no_grad()
    def load_into(self, sync: FragmentSync, residuals: str) -> None:
        """Load anchors that were made for ``fragments``, their outer optimizer, and what is due.

        ``residuals``: whose residuals the state dict has, as its groups say.
        """
        anchors, entries = sync.anchors, dict(zip(sync.anchors.tensors, self.anchored, strict=True))
        for number, (t, entry) in enumerate(entries.items()):
            _check_tensors(number, t, entry)
        saved = anchors.outer.state_dict()
        bases = [read_entry(entry["optimizer"].get("base", {})) for entry in entries.values()]
        saved["state"] = {number: base for number, base in enumerate(bases) if base}
        anchors.outer.load_state_dict(copy.deepcopy(saved))  # torch's would share its tensors
        for t, entry in entries.items():
            to_local(t.anchor.detach()).copy_(to_local(entry["anchor"]))
            if t.trailing_mean is not None:  # a checkpoint may have none: it begins at the anchor
                mean = entry["average" if "average" in entry else "anchor"]
                t.trailing_mean.copy_(to_local(mean))
            t.has_moved, t.is_sent = bool(entry["has_moved"]), bool(entry["is_sent"])
            anchors.groups[t.fragment]["step"] = _read_number(entry["optimizer"], "step")
        saved_residuals = {t: to_local(entries[t]["optimizer"]["residual"]) for t in entries}
        for bucket in anchors.buckets:
            new = [saved_residuals[t] for t in bucket.tensors]
            Residuals(bucket).set(list(enumerate(new)))
        warn_of_lost_residuals(sync.engine, residuals, saved_residuals.values())
        sync.due, self.sync = self.due, sync
        if (running := self.running) is None:
            return
        running.buckets = anchors.list_buckets(running.fragments)
        for bucket in running.buckets:
            values = bucket.make_sync_payload()
            parts = bucket.view_sent(values)
            for part, t in zip(parts, bucket.sent, strict=True):
                part.copy_(to_local(entries[t]["exchange"]["pseudo_gradient"]))
            bucket.pseudo_gradient = values.clone()
        squares = [float(entries[t]["exchange"]["squared"]) for t in running.tensors]
        running.squares = torch.tensor(squares, dtype=torch.float64, device="cpu")


def _check_tensors(number: int, t: AnchoredTensor, entry: Entry) -> None:
    """Raise ValueError if the tensors of an entry do not fit, or are damaged."""
    anchor = entry["anchor"]
    exchange: Entry = entry.get("exchange", {})
    names = ((entry, "average"), (exchange, "pseudo_gradient"))
    for value in (anchor, *(found[name] for found, name in names if name in found)):
        if value.shape != t.param.shape:
            raise ValueError(
                f"an anchor has shape {tuple(value.shape)}, its parameter {tuple(t.param.shape)}"
            )
    if not bool(to_local(anchor).isfinite().all()):
        raise ValueError("an anchor is not finite")
    info, layouts = TensorInfo(t.anchor, True), {"residual": LocalShape(t.anchor.dtype)}
    check_entry(f"parameter {number}", info, layouts, entry["optimizer"], "LocalSteps")


def read_rounds(entries: Sequence[Entry | None]) -> SavedRounds | None:
    """Read entries, one for each parameter; None if there are none.

    Raises ValueError, KeyError, TypeError or RuntimeError if a number in one is impossible.
    """
    known = [entry for entry in entries if entry is not None]
    if not known:
        return None
    numbers = [_read_counts(entry) for entry in known]  # the same in all, and all are checked
    step, counts = numbers[0]
    fragments = [-1 if e is None else _read_number(e, "fragment", least=-1) for e in entries]
    pairs = [(n, e) for n, e in zip(fragments, entries, strict=True) if e is not None and n >= 0]
    anchored = [entry for _, entry in sorted(pairs, key=lambda pair: pair[0])]
    due = frozenset(_read_number(e, "fragment") for e in anchored if bool(e["is_due"]))
    running = None
    if parts := [e for e in anchored if "exchange" in e and bool(e["exchange"]["apply_at"])]:
        first = parts[0]["exchange"]
        on_way = frozenset(_read_number(e, "fragment") for e in parts)
        contribution = SyncContribution(steps=_read_number(first, "steps"))
        # buckets and squares are known when anchors are loaded
        running = RunningSync(on_way, _read_number(first, "apply_at"), contribution, [], Tensor())
    return SavedRounds(step, counts, fragments, anchored, due, running)


def _read_counts(entry: Entry) -> tuple[int, RoundCounts]:
    """Return the step and the counts of an entry."""
    step, begun = _read_number(entry, "step"), _read_number(entry, "begun")
    if begun > step:
        raise ValueError(f"begun is {begun}, and step {step}")
    names = "mean_step", "weight", "seconds"
    others = [_read_number(entry, name, is_whole=False) for name in names]
    return step, RoundCounts(_read_number(entry, "round"), begun, *others)


def _read_number(entry: Entry, name: str, least: int = 0, is_whole: bool = True) -> Any:
    value = entry[name]
    number = value.item() if isinstance(value, Tensor) else value
    is_good = is_number(number) and least <= number < math.inf
    if not is_good or (is_whole and int(number) != number):
        raise ValueError(f"{name} is {number!r}")
    return int(number) if is_whole else number
