"""The back end of an optimizer: chosen when it is made, and shown as ``optimizer.backend`` and
``backend_reason``.

On an accelerator "triton" where triton is installed and has a driver for it, else, on CUDA devices,
"apex" where NVIDIA's apex is; on the CPU "native" where there is a C compiler and the C passes have
vectors for the processor, or PyTorch's operators have none either; else "torch". The environment
variable COMPOPT_BACKEND names one; it is the only way to get the "triton" of the interpreter. Ranks
that choose differently by themselves all take "torch".
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


def choose(devices: set[str]) -> Ops:
    """The back end for parameters on these types of device ("cuda", "cpu", ...).

    Raises:
        ValueError: COMPOPT_BACKEND or COMPOPT_NATIVE_ISA is none of the names there are.
        RuntimeError: COMPOPT_BACKEND names one that cannot run here.
    """
    asked = os.environ.get("COMPOPT_BACKEND", "auto")
    if asked not in NAMES:
        raise ValueError(f"COMPOPT_BACKEND must be one of {', '.join(NAMES)}, got {asked!r}.")
    if asked == "auto":
        chosen = _fastest(devices)
    else:
        missing = _missing(asked, devices)
        if missing:
            raise RuntimeError(
                f"COMPOPT_BACKEND={asked} cannot run here: {missing}. Unset it, or name another "
                "back end."
            )
        chosen = _make(asked, devices)
        chosen.reason = _said(chosen, "COMPOPT_BACKEND names it")
    chosen.automatic = asked == "auto"
    log.info("back end: %s", chosen.reason)
    return chosen


def give_way(rank: int) -> Ops:
    """PyTorch's operators, where ranks have chosen different back ends by themselves."""
    chosen = _make("torch", set())
    chosen.automatic, chosen.reason = True, "torch: ranks had chosen different back ends"
    warn(
        "ranks have chosen different back ends (a compiler or a processor differs), so all take "
        "PyTorch's operators: COMPOPT_BACKEND=native or torch on all ranks says which.",
        rank,
    )
    log.info("back end: %s", chosen.reason)
    return chosen


def _fastest(devices: set[str]) -> Ops:
    why = []
    for name in ("native",) if devices <= {"cpu"} else ("triton", "apex"):
        if missing := _missing(name, devices) or _interpreted(name):
            why.append(f"no {name}, {missing}")
            continue
        try:
            chosen = _make(name, devices)
        # What was asked for is not given up in silence.
        except UnknownISA:
            raise
        # No compiler, another driver: that only shows when a kernel is built.
        except Exception as error:
            warn(
                f"the {name} back end is installed but does not run, PyTorch's operators take its "
                f"place: {error}",
                connect(None).rank,
            )
            why.append(f"{name} does not run")
            continue
        if is_slower_than_torch(chosen):
            why.append("no native, it has no vectors here (portable) and PyTorch's operators do")
            continue
        chosen.reason = _said(chosen, "the fastest that runs here")
        return chosen
    chosen = _make("torch", devices)
    chosen.reason = _said(chosen, "; ".join(why))
    return chosen


def _said(chosen: Ops, why: str) -> str:
    isa = getattr(chosen, "isa", "")
    return f"{chosen.name}{isa and f' ({isa})'}: {why}"


def is_slower_than_torch(backend: Ops) -> bool:
    """Whether these are C passes without vectors, where PyTorch's operators have some."""
    has_vectors = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX")
    return getattr(backend, "isa", "") == "portable" and has_vectors


def _interpreted(name: str) -> str:
    """Triton's interpreter computes on the CPU, and slowly: it is for tests."""
    return (
        "it is interpreted"
        if name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        else ""
    )


def _missing(name: str, devices: set[str]) -> str:
    """What the back end needs and is not here; nothing where it can be tried."""
    interpreted = _interpreted(name)
    if (lacking := lacks(name, devices)) and not interpreted:
        return lacking
    if name == "native" and devices != {"cpu"}:
        return "not all parameters are on the CPU"
    if name == "native" and compiler() is None:
        return "there is no C compiler ($CC, cc, gcc, clang)"
    needs = {"triton": ["triton"], "apex": ["amp_C", "apex", "apex.optimizers"]}.get(name, [])
    absent = [module for module in needs if not _installed(module)]
    if absent:
        return f"the module {absent[0]} is not installed"
    if name == "triton" and not interpreted and not has_triton_driver():
        return "it has no driver for a device of this machine"
    return ""


def _installed(module: str) -> bool:
    """PyPI has an apex that is something else: NVIDIA's has these submodules."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _make(name: str, devices: set[str]) -> Ops:
    """Imported only when chosen: triton takes a second, and need not be installed."""
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
