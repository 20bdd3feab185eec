"""The choice of an optimizer's backend, which ``optimizer.backend`` and ``backend_reason`` show.

On an accelerator it is "triton" if triton is installed and has a driver, else "apex" on CUDA
devices with NVIDIA's apex. On the CPU it is "native" if the C passes are compiled, and they are
vectorized for the processor, or PyTorch's operators are not. Otherwise it is "torch". The
environment variable COMPOPT_BACKEND names a backend; only it selects "triton" on Triton's
interpreter. If ranks choose differently, all fall back to "torch".

Backends import the methods whose steps they replace, and stand above them: an optimizer finds this
choice in ``operations.backend_choices``.

``compopt/__init__.py`` registers it; ``Engine.build_buckets`` asks for the choice.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import lru_cache

import torch

from .._ops.operations import Ops, backend_choices
from .._wire.groups import get_rank
from .._wire.warning import warn_on_rank_0
from .native.library import UnknownISA, find_objects

NAMES = ("auto", "torch", "native", "triton", "apex")
NOT_COMPILED = "the compiled passes are not installed"
log = logging.getLogger("compopt")


def choose_backend(devices: set[str]) -> Ops:
    """Return the backend for parameters on these types of device ("cuda", "cpu", ...).

    Raises:
        ValueError: COMPOPT_BACKEND or COMPOPT_NATIVE_ISA is not a valid name.
        RuntimeError: COMPOPT_BACKEND names a backend that cannot run here.
    """
    asked = os.environ.get("COMPOPT_BACKEND", "auto")
    if asked not in NAMES:
        raise ValueError(f"COMPOPT_BACKEND must be one of {', '.join(NAMES)}, got {asked!r}.")
    if asked == "auto":
        backend = _choose_fastest(devices)
    else:
        missing = explain_missing_backend(asked, devices)
        if missing:
            raise RuntimeError(
                f"COMPOPT_BACKEND={asked} cannot run here: {missing}. Unset it, or name another "
                "backend."
            )
        backend = make_backend(asked)
        backend.reason = _describe_choice(backend, "COMPOPT_BACKEND names it")
    backend.automatic = asked == "auto"
    log.info("backend: %s", backend.reason)
    return backend


def _choose_fastest(devices: set[str]) -> Ops:
    """Return the fastest backend that runs here; its ``reason`` says why no faster one does."""
    reasons = []
    for name in ("native",) if devices <= {"cpu"} else ("triton", "apex"):
        missing = explain_missing_backend(name, devices)
        if missing == NOT_COMPILED:
            _warn_once(
                "the compiled passes are not installed; PyTorch's operators run. When compopt was "
                "installed there was no C compiler, or it failed (pip install -v says which). "
                "Install gcc or clang, then compopt again with --force-reinstall --no-deps "
                "--no-cache-dir; or set COMPOPT_BACKEND=torch."
            )
        if missing or is_interpreted(name):
            reasons.append(f"no {name}, {missing or 'it is interpreted'}")
            continue
        try:
            backend = make_backend(name)
        except UnknownISA:  # an explicit COMPOPT_NATIVE_ISA is not ignored
            raise
        except Exception as error:  # another libc or driver, no compiler: kernels are built here
            _warn_once(
                f"the {name} backend is installed but does not run, PyTorch's operators take its "
                f"place: {error}"
            )
            reasons.append(f"{name} does not run ({error})")
            continue
        has_vectors = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX")
        if getattr(backend, "isa", "") == "portable" and has_vectors:
            reasons.append(
                "no native, it has no vectors here (portable) and PyTorch's operators do"
            )
            continue
        backend.reason = _describe_choice(backend, "the fastest that runs here")
        return backend
    backend = make_backend("torch")
    backend.reason = _describe_choice(backend, "; ".join(reasons))
    return backend


@lru_cache
def _warn_once(message: str) -> None:
    """Warn at the first call: a backend is chosen whenever buckets are made."""
    warn_on_rank_0(message, get_rank())


def _describe_choice(backend: Ops, reason: str) -> str:
    isa = getattr(backend, "isa", "")
    return f"{backend.name}{isa and f' ({isa})'}: {reason}"


def is_interpreted(name: str) -> bool:
    """True if kernels run in Triton's interpreter, on the CPU and slowly, for tests."""
    return name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def explain_missing_backend(name: str, devices: set[str]) -> str:
    """Return the missing requirement of a backend; an empty string if it can be tried."""
    if name == "native":
        if devices != {"cpu"}:
            return "not all parameters are on the CPU"
        return "" if find_objects() else NOT_COMPILED
    if name == "apex" and "cuda" not in devices:
        return "no parameter is on a CUDA device"
    if name == "triton" and devices <= {"cpu"} and not is_interpreted(name):
        return "no parameter is on an accelerator"
    needs = {"triton": ["triton"], "apex": ["amp_C", "apex", "apex.optimizers"]}.get(name, [])
    absent = [module for module in needs if not is_installed(module)]
    if absent:
        return f"the module {absent[0]} is not installed"
    if name == "triton" and not is_interpreted(name) and not has_triton_driver():
        return "it has no driver for a device of this machine"
    return ""


def is_installed(module: str) -> bool:
    """True if a module can be imported. (PyPI's apex is another one: NVIDIA's has submodules.)"""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def has_triton_driver() -> bool:
    """True if Triton, which is installed, has a driver for a device of this machine."""
    from triton.backends import backends

    return any(backend.driver.is_active() for backend in backends.values())


def make_backend(name: str) -> Ops:
    """Import a backend and make it. (Triton need not be installed, and imports for a second.)"""
    if name == "triton":
        from .triton.triton_ops import TritonOps

        return TritonOps()
    if name == "native":
        from .native.native_ops import NativeOps

        return NativeOps()
    if name == "apex":
        from .apex import ApexOps

        return ApexOps()
    return Ops()


backend_choices.append(choose_backend)
