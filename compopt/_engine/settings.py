"""What all ranks must have alike: told in the handshake, and in every step's payload by a few bits
of a checksum.

A group may hold anything beside the options of its class: what a scheduler put there, a name, a
function. Only options that the class knows are compared, and those by what they mean: text that is
the same in every process, whatever the address of an object or the order in which a process walks
through a set.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

from .._wire.payload import encode_bits

if TYPE_CHECKING:
    from .session import Session

# Options that may change from step to step without a word: they change no message's length.
FREE = {"step", "lr", "betas", "eps", "weight_decay", "maximize", "max_grad_norm"}

# Most options are of these types. Whether a value is a number of another kind takes ten times as
# long to tell, and every step looks at every option.
PLAIN = {type(None), bool, int, float, str}


# What a group, a class or a base is called in a message, and its options or its name.
Setting = tuple[str, Any]


def list_settings(session: Session) -> list[Setting]:
    """List what must be the same on all ranks in every step."""
    settings = session.face._settings()
    if not session.has_pseudo_gradients:
        return settings
    return [(f"outer optimizer, {subject}", value) for subject, value in settings]


def settings_of_class(session: Session) -> list[Setting]:
    """List the class, the options of its groups, and its backend."""
    face = session.face
    return [
        ("class", session.name + (" (sharded)" if face.sharded else "")),
        *name_groups("group", session.option_groups, face._known_options),
        # two backends round differently, and select differently among equals
        ("backend", session.ops.name),
    ]


def name_groups(name: str, groups: list[dict[str, Any]], known: Iterable[str]) -> list[Setting]:
    """List the ``known`` options of each group, as ``name`` and its number."""
    return [(f"{name} {number}", known_of(group, known)) for number, group in enumerate(groups)]


def structure_of(session: Session) -> str:
    """The options that decide what is sent, and so the lengths of messages."""
    known = session.face._known_options - FREE
    return repr([known_of(group, known) for group in session.option_groups])


def known_of(group: dict[str, Any], known: Iterable[str]) -> dict[str, object]:
    """Of a group the options that are ``known``, each plain."""
    return {name: plain(group[name]) for name in sorted(known) if name in group}


def plain(value: object) -> object:
    """Numbers, text and tuples of them, whose ``repr`` is the same wherever ``value`` means the
    same.
    """
    if type(value) in PLAIN or isinstance(value, str):
        return value
    if hasattr(value, "tolist"):  # tensors, and what is NumPy's
        return plain(value.tolist())
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")  # as payload_dtype is kept
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, dict):
        return tuple(sorted(((plain(k), plain(v)) for k, v in value.items()), key=repr))
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(plain, value), key=repr))
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    # a function or a class, else of which class it is
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def bits_of(settings: object) -> list[float]:
    """16 bits of a checksum and their complements, as numbers whose mean over ranks shows any
    difference.
    """
    return encode_bits(zlib.crc32(repr(settings).encode()), 16)
