"""What SCAPE's options may be."""

from __future__ import annotations

from .._engine.options import check_steps, require
from .._ops.ops import Group
from .._wire.dtypes import bits_of

OFFLOADS = (None, "residual", "all")
CHOICES: dict[str, tuple[object, ...]] = {
    "mask_delay": (0, 1),
    "selection": ("sampled", "exact"),
    "clip": ("consistent", "scape"),
}


def check_scape(group: Group, sharded: bool) -> None:
    """Raise ValueError where an option of a group cannot be."""
    exact = sharded and bits_of(group["payload_dtype"]) is not None
    require(
        not exact,
        "payload_dtype",
        group["payload_dtype"],
        "None or a floating-point dtype where state is sharded",
    )
    require(0 < group["density"] <= 1, "density", group["density"], "in (0, 1]")
    check_steps(group, "density_warmup_steps")
    for name, words in CHOICES.items():
        said = " or ".join(map(repr, words))
        require(group[name] in words, name, group[name], said)
