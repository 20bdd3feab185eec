"""The backend of an optimizer: chosen when the optimizer is made, and shown as
``optimizer.backend`` and ``backend_reason``.

On an accelerator "triton" where triton is installed and has a driver for it, else, on CUDA devices,
"apex" where NVIDIA's apex is; on the CPU "native" where there is a C compiler and the C passes have
vectors for the processor, or PyTorch's operators have none either; else "torch". The environment
variable COMPOPT_BACKEND names one; it is the only way to get the "triton" of the interpreter. Where
ranks choose differently by themselves, all fall back to "torch".
"""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from .._wire.comm import connect
from .._wire.warning import warn
from .makers import has_triton_driver, lacks
from .native.build import UnknownISA, compiler
from .pytorch import Ops

NAMES = ("auto", "torch", "native", "triton", "apex")
log = logging.getLogger("compopt")


def choose_backend(devices: set[str]) -> Ops:
    """Return the backend for parameters on these types of device ("cuda", "cpu", ...).

    Raises:
        ValueError: COMPOPT_BACKEND or COMPOPT_NATIVE_ISA is none of the names there are.
        RuntimeError: COMPOPT_BACKEND names one that cannot run here.
    """
    asked = os.environ.get("COMPOPT_BACKEND", "auto")
    if asked not in NAMES:
        raise ValueError(f"COMPOPT_BACKEND must be one of {', '.join(NAMES)}, got {asked!r}.")
    if asked == "auto":
        backend = _choose_fastest(devices)
    else:
        missing = find_missing(asked, devices)
        if missing:
            raise RuntimeError(
                f"COMPOPT_BACKEND={asked} cannot run here: {missing}. Unset it, or name another "
                "back end."
            )
        backend = make_backend(asked, devices)
        backend.reason = _describe_choice(backend, "COMPOPT_BACKEND names it")
    backend.automatic = asked == "auto"
    log.info("back end: %s", backend.reason)
    return backend


def fall_back_to_torch(rank: int) -> Ops:
    """Return PyTorch's operators, where ranks have chosen different backends by themselves."""
    backend = make_backend("torch", set())
    backend.automatic, backend.reason = True, "torch: ranks had chosen different back ends"
    warn(
        "ranks have chosen different back ends (a compiler or a processor differs), so all take "
        "PyTorch's operators: COMPOPT_BACKEND=native or torch on all ranks says which.",
        rank,
    )
    log.info("back end: %s", backend.reason)
    return backend


def _choose_fastest(devices: set[str]) -> Ops:
    """Return the fastest backend that runs here; its ``reason`` says why no faster one does."""
    reasons = []
    for name in ("native",) if devices <= {"cpu"} else ("triton", "apex"):
        missing = find_missing(name, devices)
        if missing or is_interpreted(name):
            reasons.append(f"no {name}, {missing or 'it is interpreted'}")
            continue
        try:
            backend = make_backend(name, devices)
        except UnknownISA:  # COMPOPT_NATIVE_ISA is wrong: what was asked for is not ignored
            raise
        except Exception as error:  # no compiler, another driver: kernels are built here
            warn(
                f"the {name} back end is installed but does not run, PyTorch's operators take its "
                f"place: {error}",
                connect(None).rank,
            )
            reasons.append(f"{name} does not run")
            continue
        if is_slower_than_torch(backend):
            reasons.append(
                "no native, it has no vectors here (portable) and PyTorch's operators do"
            )
            continue
        backend.reason = _describe_choice(backend, "the fastest that runs here")
        return backend
    backend = make_backend("torch", devices)
    backend.reason = _describe_choice(backend, "; ".join(reasons))
    return backend


def _describe_choice(backend: Ops, reason: str) -> str:
    isa = getattr(backend, "isa", "")
    return f"{backend.name}{isa and f' ({isa})'}: {reason}"


def is_slower_than_torch(backend: Ops) -> bool:
    """Whether these are C passes without vectors, where PyTorch's operators have some."""
    has_vectors = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX")
    return getattr(backend, "isa", "") == "portable" and has_vectors


def is_interpreted(name: str) -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU and slowly: it is for tests."""
    return name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def find_missing(name: str, devices: set[str]) -> str:
    """Say what a backend needs that is not here; nothing where it can be tried."""
    if not is_interpreted(name) and (missing := lacks(name, devices)):
        return missing
    if name == "native" and devices != {"cpu"}:
        return "not all parameters are on the CPU"
    if name == "native" and compiler() is None:
        return "there is no C compiler ($CC, cc, gcc, clang)"
    needs = {"triton": ["triton"], "apex": ["amp_C", "apex", "apex.optimizers"]}.get(name, [])
    absent = [module for module in needs if not is_installed(module)]
    if absent:
        return f"the module {absent[0]} is not installed"
    if name == "triton" and not is_interpreted(name) and not has_triton_driver():
        return "it has no driver for a device of this machine"
    return ""


def is_installed(module: str) -> bool:
    """Whether a module can be imported. (PyPI's apex is another one: NVIDIA's has submodules.)"""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def make_backend(name: str, devices: set[str]) -> Ops:
    """Import a backend and make it. (Triton need not be installed, and imports for a second.)"""
    if name == "triton":
        from .triton.backend import TritonOps

        return TritonOps(devices)
    if name == "native":
        from .native.backend import NativeOps

        return NativeOps(devices)
    if name == "apex":
        from .apex import ApexOps

        return ApexOps(devices)
    return Ops(devices)
