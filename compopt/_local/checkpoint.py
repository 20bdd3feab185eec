"""Anchors, the outer optimizer and the running round in a state dict: under "outer" in the entry of
each parameter, because torch.distributed.checkpoint keeps nothing beside those entries.

torch.distributed.checkpoint also loads only into entries that exist. So entries have the same names
from the first state dict on. Before a parameter has an anchor its ``fragment`` is -1, and its other
values mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .._engine.options import is_number
from .._state.tensors import distribute_like, to_local
from .exchange import Contribution, FragmentSync
from .rounds import RoundCounts

Entry = dict[str, Any]


# Saving


def save_rounds(
    params: Iterable[Tensor], sync: FragmentSync, options: dict[str, Any], counts: RoundCounts
) -> list[Entry | None]:
    """Return the entry of every parameter, None of those without an anchor."""
    outer, exchange = sync.anchors.outer, sync.in_flight
    exchanges = [group["step"] for group in outer._option_groups for _ in group["params"]]
    states, entries = outer._saved()["state"], {}
    for place, t in enumerate(sync.anchors.tensors):
        numbers = {
            "step": options["step"],
            **asdict(counts),
            "fragment": t.fragment,
            "has_moved": t.has_moved,
            "is_sent": t.anchor.requires_grad,
            "is_due": t.fragment in sync.due,
            "exchanges": exchanges[place],
        }
        entry = {"anchor": t.anchor.detach(), "optimizer": states.get(place, {})}
        if options["delay"] or exchange is not None:
            underway: dict[str, float] = dict(is_underway=False, apply_at=0, steps=0, squared=0.0)
            if exchange is not None and t.fragment in exchange.fragments:
                steps, squared = exchange.contribution.steps, float(exchange.squared)
                underway = dict(
                    is_underway=True, apply_at=exchange.apply_at, steps=steps, squared=squared
                )
            d = t.anchor.grad
            entry["exchange"] = {
                "pseudo_gradient": torch.zeros_like(t.anchor.detach()) if d is None else d,
                **_as_tensors(underway),
            }
        entries[t.param] = {**entry, **_as_tensors(numbers)}
    return [entries.get(p) for p in params]


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
    state, keys = {}, [key for group in groups for key in group["params"]]
    for key, entry in saved["state"].items():
        is_entry = isinstance(entry, dict)
        state[key] = {k: v for k, v in entry.items() if k != "outer"} if is_entry else entry
    saved_entries = [saved["state"].get(key) for key in keys]
    entries = [
        entry.get("outer") or None if isinstance(entry, dict) else None for entry in saved_entries
    ]
    written_by = groups[0].get("class", name)
    if any(entries) and written_by != name:
        raise ValueError(
            f"loaded state dict is of {written_by}, and its anchors are nothing that {name} goes "
            f"on from: load a checkpoint of {name}."
        )
    return {**saved, "state": state}, entries


@dataclass
class SavedRounds:
    """The content of such entries.

    ``fragments``: of every parameter, -1 where it has no anchor. ``anchored``: the entries of those
    that have one, in the order of ``Anchors.tensors``. ``due``: the fragments that wait for an
    exchange. ``exchange``: the arguments of ``FragmentSync.start`` for the one in flight. ``sync``:
    what was loaded from entries.
    """

    step: int
    counts: RoundCounts
    fragments: list[int]
    anchored: list[Entry]
    due: frozenset[int]
    exchange: dict[str, Any] | None
    sync: FragmentSync | None = None

    @property
    def is_open(self) -> bool:
        """True if parameters differed from rank to rank."""
        return self.exchange is not None or any(bool(e["has_moved"]) for e in self.anchored)

    @torch.no_grad()
    def load_into(self, sync: FragmentSync, residuals: str) -> None:
        """Load anchors that were made for ``fragments``, their outer optimizer, and what is due.

        ``residuals``: whose residuals the state dict has, as its groups say.
        """
        anchors, entries = sync.anchors, self.anchored
        saved = anchors.outer._saved()
        for t, entry in zip(anchors.tensors, entries, strict=True):
            exchange = entry.get("exchange", {})
            tensors = [entry["anchor"], exchange.get("pseudo_gradient", entry["anchor"])]
            for value in tensors:
                if value.shape != t.param.shape:
                    raise ValueError(
                        f"an anchor has shape {tuple(value.shape)}, its parameter "
                        f"{tuple(t.param.shape)}"
                    )
            anchor, d = map(to_local, tensors)
            if not bool(anchor.isfinite().all()):
                raise ValueError("an anchor is not finite")
            to_local(t.anchor.detach()).copy_(anchor)
            t.has_moved = bool(entry["has_moved"])
            t.anchor.requires_grad_(bool(entry["is_sent"]))
            if exchange and bool(exchange["is_underway"]) and t.anchor.requires_grad:
                d = d.to(to_local(t.anchor).device, copy=True)
                t.anchor.grad = distribute_like(t.anchor.detach(), d)
        saved.pop("base", None)  # entries have it too
        saved["state"] = {place: entry["optimizer"] for place, entry in enumerate(entries)}
        for group in saved["param_groups"]:
            count = _read_number(entries[group["params"][0]], "exchanges")
            group.update(step=count, residuals=residuals)
        anchors.outer.load_state_dict(saved)
        sync.due, self.sync = self.due, sync


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
    exchange: dict[str, Any] | None = None
    if parts := [e for e in anchored if "exchange" in e and bool(e["exchange"]["is_underway"])]:
        first = parts[0]["exchange"]
        exchange = {
            "fragments": frozenset(_read_number(e, "fragment") for e in parts),
            "apply_at": _read_number(first, "apply_at"),
            "squared": torch.tensor(float(first["squared"]), dtype=torch.float64, device="cpu"),
            "contribution": Contribution(steps=_read_number(first, "steps")),
        }
    return SavedRounds(step, counts, fragments, anchored, due, exchange)


def _read_counts(entry: Entry) -> tuple[int, RoundCounts]:
    """Return the step and the counts of an entry."""
    step, begun = _read_number(entry, "step"), _read_number(entry, "begun")
    if begun > step:
        raise ValueError(f"begun is {begun}, and step {step}")
    _read_number(entry, "exchanges")
    others = [
        _read_number(entry, name, is_whole=False) for name in ("mean_step", "weight", "seconds")
    ]
    return step, RoundCounts(_read_number(entry, "round"), begun, *others)


def _read_number(entry: Entry, name: str, least: int = 0, is_whole: bool = True) -> Any:
    value = entry[name]
    number = value.item() if isinstance(value, Tensor) else value
    is_good = is_number(number) and least <= number < math.inf
    if not is_good or (is_whole and int(number) != number):
        raise ValueError(f"{name} is {number!r}")
    return int(number) if is_whole else number
