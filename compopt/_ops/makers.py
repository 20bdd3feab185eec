"""What only some makers' accelerators have: kernels beside PyTorch's own.

The rest of the package asks ``_state/devices.py``, and takes every accelerator alike.
"""

from __future__ import annotations

# The type of device that apex's kernels are built for: NVIDIA's, and AMD's under the same name.
APEX = "cuda"


def lacks(name: str, devices: set[str]) -> str:
    """Why a back end's kernels are not for these types of device; nothing where they may be."""
    if name == "apex" and APEX not in devices:
        return "no parameter is on a CUDA device"
    if name == "triton" and devices <= {"cpu"}:
        return "no parameter is on an accelerator"
    return ""


def has_triton_driver() -> bool:
    """Whether Triton, which is installed, has a driver for a device of this machine."""
    from triton.backends import backends

    return any(backend.driver.is_active() for backend in backends.values())


def triton_device() -> str:
    """The type of device that Triton compiles for here: "cuda" for NVIDIA's and AMD's, or "xpu".

    Raises what its driver raises, where it cannot be built.
    """
    from triton.runtime import driver

    kind: str = driver.active.get_active_torch_device().type
    return kind
