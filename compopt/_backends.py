"""The back end of an optimizer: chosen once, when it is made, and shown as ``optimizer.backend``.

On CUDA devices "triton" where triton is installed, else "apex" where NVIDIA's apex is; on the CPU "native" where there
is a C compiler; else "torch". The environment variable COMPOPT_BACKEND names one; it is the only way to get "compile",
which takes a C++ compiler and half a minute, and the "triton" of the interpreter. All ranks have to choose the same.
"""

from __future__ import annotations

import importlib.util
import os
import warnings

from ._native_build import compiler
from ._ops import Ops

NAMES = ("auto", "torch", "native", "triton", "compile", "apex")


def choose(devices: set[str]) -> Ops:
    """The back end for parameters on these types of device ("cuda", "cpu", ...).

    Raises:
        ValueError: COMPOPT_BACKEND is no back end's name.
        RuntimeError: it names one that cannot run here.
    """
    asked = os.environ.get("COMPOPT_BACKEND", "auto")
    if asked not in NAMES:
        raise ValueError(f"COMPOPT_BACKEND must be one of {', '.join(NAMES)}, got {asked!r}.")
    if asked == "auto":
        return _fastest(devices)
    reason = _missing(asked, devices)
    if reason:
        raise RuntimeError(f"COMPOPT_BACKEND={asked} cannot run here: {reason}. Unset it, or name another back end.")
    return _make(asked, devices)


def _fastest(devices: set[str]) -> Ops:
    for name in ("triton", "apex", "native"):
        if not (_missing(name, devices) or _interpreted(name)):
            try:
                return _make(name, devices)
            except Exception as error:  # no compiler, another driver: that only shows when a kernel is built
                warnings.warn(
                    f"the {name} back end is installed but does not run, PyTorch's operators take its place: {error}",
                    stacklevel=2,
                )
    return _make("torch", devices)


def _interpreted(name: str) -> bool:
    """Triton's interpreter computes on the CPU, and slowly: it is for tests."""
    return name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def _missing(name: str, devices: set[str]) -> str:
    """What the back end needs and is not here; nothing where it can be tried."""
    if name in ("apex", "triton") and "cuda" not in devices and not _interpreted(name):
        return "no parameter is on a CUDA device"
    if name == "native" and devices != {"cpu"}:
        return "not all parameters are on the CPU"
    if name == "native" and compiler() is None:
        return "there is no C compiler ($CC, cc, gcc, clang)"
    needs = {"triton": ["triton"], "apex": ["amp_C", "apex", "apex.optimizers"]}.get(name, [])
    absent = [module for module in needs if not _installed(module)]
    return f"the module {absent[0]} is not installed" if absent else ""


def _installed(module: str) -> bool:
    """PyPI has an apex that is something else: NVIDIA's has these submodules."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _make(name: str, devices: set[str]) -> Ops:
    """Imported only when chosen: triton takes a second, and need not be installed."""
    if name == "triton":
        from ._ops_triton import TritonOps as Chosen
    elif name == "native":
        from ._ops_native import NativeOps as Chosen
    elif name == "compile":
        from ._ops_compile import CompiledOps as Chosen
    elif name == "apex":
        from ._ops_apex import ApexOps as Chosen
    else:
        Chosen = Ops
    return Chosen(devices)
