"""What ``payload_dtype`` may be: how values travel.

People write a torch.dtype or its name; a group keeps the name, which any checkpoint can hold.
Whoever reads it takes either.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

PayloadDtype: TypeAlias = (
    torch.dtype
    | Literal["float64", "float32", "bfloat16", "float16", "int8", "int4", "int2"]
    | None
)

# Rounded to so many bits, with a scale for every row: for the wire only.
BITS = {"int8": 8, "int4": 4, "int2": 2}
FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# In words.
KNOWN = ", ".join(map(repr, [*BITS, *list(FLOATS)[::-1]]))


def name_of(given: object) -> object:
    """The name of a torch.dtype; what is none is returned as it is."""
    return str(given).removeprefix("torch.") if isinstance(given, torch.dtype) else given


def known(given: object) -> bool:
    """Whether values can travel so; None: as the gradients are."""
    name = name_of(given)
    return name is None or (isinstance(name, str) and (name in BITS or name in FLOATS))


def bits_of(given: object) -> int | None:
    """How many bits values are rounded to; None where they travel as floating-point numbers."""
    name = name_of(given)
    return BITS.get(name) if isinstance(name, str) else None


def bytes_of_value(given: object, of_gradients: torch.dtype) -> float:
    """Bytes that a value takes on the wire, with its part of a scale where it is rounded."""
    bits = bits_of(given)
    return (dtype_of(given) or of_gradients).itemsize if bits is None else bits / 8 + 4 / 128


def dtype_of(given: object) -> torch.dtype | None:
    """The dtype that values travel in, where it is a floating-point one."""
    name = name_of(given)
    return FLOATS.get(name) if isinstance(name, str) else None
