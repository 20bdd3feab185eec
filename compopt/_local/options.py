"""The options of local steps: what they may be."""

from __future__ import annotations

from typing import Any

from .._engine.options import check_compress, check_payload, require


def check(group: dict[str, Any], offload: str | None) -> None:
    """Raise where an option of a group is out of its range."""
    check_payload(group, owed=True)
    check_compress(group)
    for name, least in LEAST.items():
        good = is_count(group[name]) and group[name] >= least
        require(good, name, group[name], f"an integer >= {least}")
    for name in ("mix", "outer_momentum"):
        require(0 <= group[name] < 1, name, group[name], "in [0, 1)")
    require(group["outer_lr"] > 0, "outer_lr", group["outer_lr"], "> 0")
    cut = any(hasattr(p, "device_mesh") for p in group["params"])
    require(not (cut and group["delay"]), "delay", group["delay"], "0 where parameters are sharded")
    require(offload in (None, "outer"), "offload", offload, "None or 'outer'")
    require(not (cut and offload), "offload", offload, "None where parameters are sharded")
    delay, limit = group["delay"], group["every"] // group["fragments"]
    require(delay <= limit, "delay", delay, f"at most every / fragments, {limit}")


def check_writer(group: dict[str, Any], ours: str) -> None:
    """Raise where fragments were saved by another class."""
    writer = group.get("class", ours)
    if writer != ours:
        raise ValueError(
            f"loaded state dict is of {writer}, and {ours} does not go on from that: build "
            f"{writer}, or load a checkpoint of {ours} or of its inner optimizer."
        )


LEAST = {"every": 1, "fragments": 1, "warmup_steps": 0, "every_warmup_steps": 0, "delay": 0}


def is_count(number: Any) -> bool:
    return not isinstance(number, str) and int(number) == number
