"""Anchors, the outer optimizer and the running round in a state dict: under "outer" in the entry of
each parameter, because torch.distributed.checkpoint keeps nothing beside those entries.

It also loads only what is there already. So entries have the same names from the first state dict
on. Before a parameter has an anchor its ``fragment`` is -1, and the rest means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._state.tensors import distribute_like, to_local
from .anchors import Anchored, Anchors
from .exchange import Contribution, Exchange
from .rounds import COUNTS, check_counts, is_count

Entry = dict[str, Any]


# Saving


def save_rounds(
    params: Iterable[Tensor],
    anchors: Anchors,
    options: dict[str, Any],
    due: frozenset[int],
    exchange: Exchange | None,
) -> list[Entry | None]:
    """Return the entry of every parameter, None of those without an anchor."""
    states = anchors.outer._saved()["state"]
    exchanges = {
        t.anchor: group["step"]
        for group in anchors.outer._option_groups
        for t in anchors.tensors
        if any(t.anchor is p for p in group["params"])
    }
    entries: dict[Tensor, Entry] = {}
    for place, t in enumerate(anchors.tensors):
        numbers = {
            **{name: options[name] for name in COUNTS},
            "fragment": t.fragment,
            "has_moved": t.has_moved,
            "is_sent": t.anchor.requires_grad,
            "is_due": t.fragment in due,
            "exchanges": exchanges[t.anchor],
            "outer_share": anchors.outer_share,
        }
        entry = {"anchor": t.anchor.detach(), "optimizer": states.get(place, {})}
        if options["delay"] or exchange is not None:
            entry["exchange"] = _save_exchange(t, exchange)
        entries[t.param] = {**entry, **_as_tensors(numbers)}
    return [entries.get(p) for p in params]


def _save_exchange(t: Anchored, exchange: Exchange | None) -> Entry:
    """Return the part of the parameter in the exchange on its way."""
    d = t.anchor.grad
    numbers: dict[str, float] = {"is_underway": False, "apply_at": 0, "mix": 0.0, "squared": 0.0}
    numbers.update(Contribution()._asdict())
    if exchange is not None and t.fragment in exchange.fragments:
        numbers = {**exchange.state_dict(), "is_underway": True}
    return {
        "pseudo_gradient": torch.zeros_like(t.anchor.detach()) if d is None else d,
        **_as_tensors({**numbers, "has_gradient": d is not None}),
    }


def _as_tensors(numbers: dict[str, float]) -> dict[str, Tensor]:
    """Return tensors of them: flattened state dicts hold no booleans."""
    return {
        name: torch.tensor(
            number, dtype=torch.float64 if isinstance(number, float) else torch.int64
        )
        for name, number in numbers.items()
    }


# Loading


def split_rounds(saved: dict[str, Any]) -> tuple[dict[str, Any], SavedRounds]:
    """Return the state dict without what is under "outer", and that."""
    state, keys = {}, [key for group in saved["param_groups"] for key in group["params"]]
    for key, entry in saved["state"].items():
        is_entry = isinstance(entry, dict)
        state[key] = {k: v for k, v in entry.items() if k != "outer"} if is_entry else entry
    found = [saved["state"].get(key) for key in keys]
    entries = [entry.get("outer") or None if isinstance(entry, dict) else None for entry in found]
    return {**saved, "state": state}, SavedRounds(entries)


@dataclass(frozen=True)
class SavedRounds:
    """Entries of a state dict under "outer", one for each parameter, None where it has none."""

    entries: Sequence[Entry | None]

    def check(self) -> None:
        """Raise ValueError, KeyError or TypeError if a number in an entry is impossible."""
        _ = self.fragments, self.due, self.exchange
        for entry in filter(None, self.entries):
            check_counts({name: _read_number(entry, name) for name in COUNTS})
            _read_count(entry, "exchanges")

    @property
    def fragments(self) -> list[int]:
        """The fragment of every parameter, -1 where it has no anchor."""
        return [-1 if e is None else _read_count(e, "fragment", least=-1) for e in self.entries]

    @property
    def counts(self) -> dict[str, float]:
        first = next(e for e in self.entries if e is not None)
        return {name: _read_number(first, name) for name in COUNTS}

    @property
    def due(self) -> frozenset[int]:
        """The fragments that wait for an exchange."""
        return frozenset(_read_count(e, "fragment") for e in self._anchored if bool(e["is_due"]))

    @property
    def exchange(self) -> dict[str, Any] | None:
        """The exchange on its way."""
        parts = [
            e for e in self._anchored if "exchange" in e and bool(e["exchange"]["is_underway"])
        ]
        if not parts:
            return None
        first = parts[0]["exchange"]
        return {
            "fragments": frozenset(_read_count(e, "fragment") for e in parts),
            "apply_at": _read_count(first, "apply_at"),
            "mix": float(first["mix"]),
            "squared": float(first["squared"]),
            "contribution": Contribution(*(_read_number(first, n) for n in Contribution._fields)),
        }

    @property
    def _anchored(self) -> list[Entry]:
        """The entries of parameters with an anchor, in the order of ``Anchors.tensors``."""
        numbered = zip(self.fragments, self.entries, strict=True)
        pairs = sorted(
            ((n, e) for n, e in numbered if e is not None and n >= 0), key=lambda pair: pair[0]
        )
        return [e for _, e in pairs]

    @torch.no_grad()
    def load_into(self, anchors: Anchors, residuals: str) -> None:
        """Load anchors that were made for ``fragments``, and their outer optimizer.

        ``residuals``: whose residuals the state dict has, as its groups say.
        """
        entries, saved = self._anchored, anchors.outer._saved()
        for t, entry in zip(anchors.tensors, entries, strict=True):
            _load_anchor(t, entry)
        saved.pop("base", None)  # entries have it too
        saved["state"] = {place: entry["optimizer"] for place, entry in enumerate(entries)}
        for group in saved["param_groups"]:
            count = _read_count(entries[group["params"][0]], "exchanges")
            group.update(step=count, residuals=residuals)
        anchors.outer.load_state_dict(saved)
        anchors.set_outer_share(float(entries[0]["outer_share"]))


def _load_anchor(t: Anchored, entry: Entry) -> None:
    exchange = entry.get("exchange", {})
    tensors = [entry["anchor"], exchange.get("pseudo_gradient", entry["anchor"])]
    for value in tensors:
        if value.shape != t.param.shape:
            raise ValueError(
                f"an anchor has shape {tuple(value.shape)}, its parameter {tuple(t.param.shape)}"
            )
    anchor, d = map(to_local, tensors)
    if not bool(anchor.isfinite().all()):
        raise ValueError("an anchor is not finite")
    to_local(t.anchor.detach()).copy_(anchor)
    t.has_moved = bool(entry["has_moved"])
    t.anchor.requires_grad_(bool(entry["is_sent"]))
    if exchange and bool(exchange["has_gradient"]):
        t.anchor.grad = distribute_like(
            t.anchor.detach(), d.to(to_local(t.anchor).device, copy=True)
        )


def _read_number(entry: Entry, name: str) -> float:
    value = entry[name]
    number: float = value.item() if isinstance(value, Tensor) else value
    return number


def _read_count(entry: Entry, name: str, least: int = 0) -> int:
    number = _read_number(entry, name)
    if not is_count(number, least):
        raise ValueError(f"{name} is {number!r}")
    return int(number)
