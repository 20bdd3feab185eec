"""Checks of options: every refusal names the argument and its value."""

from __future__ import annotations

from torch import Tensor


def require(good: bool, argument: str, value: object, wanted: str) -> None:
    """Raise a ValueError that names the argument and its value."""
    if not good:
        raise ValueError(f"{argument} must be {wanted}, got {value!r}.")


def check_adam(group: dict) -> None:
    """Check the options that every AdamW-like class has."""
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got {tuple(group['lr'].shape)}.")
    require(float(group["lr"]) >= 0, "lr", group["lr"], ">= 0")
    require(group["eps"] >= 0, "eps", group["eps"], ">= 0")
    require(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], ">= 0")
    betas = group["betas"]
    require(len(betas) == 2 and all(0 <= b < 1 for b in betas), "betas", betas, "two numbers in [0, 1)")


def check_compression(group: dict) -> None:
    """Check the options that every compressing class has."""
    require(group["warmup_steps"] >= 0, "warmup_steps", group["warmup_steps"], ">= 0")
    norm, dtype = group["max_grad_norm"], group["payload_dtype"]
    require(norm is None or norm > 0, "max_grad_norm", norm, "None or > 0")
    require(dtype is None or dtype.is_floating_point, "payload_dtype", dtype, "None or a floating-point dtype")
    require(group["compress"] in (None, True, False), "compress", group["compress"], "None, True or False")


def check_adams(group: dict) -> None:
    """Check the options that AdamS-like classes have."""
    check_adam(group)
    known = ("scape", "adams")
    require(group["bias_correction"] in known, "bias_correction", group["bias_correction"], "'scape' or 'adams'")
