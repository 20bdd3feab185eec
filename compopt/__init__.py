"""compopt: torch.optim optimizers that average gradients over slow links, compressed."""

import importlib
from typing import TYPE_CHECKING

from ._backends import choice as _choice  # noqa: F401  (the backends that optimizers choose from)
from ._engine.stats import Stats
from ._fsdp import fsdp_modules as _fsdp_modules  # noqa: F401  (looks at every new optimizer)
from ._wire.groups import Ranks
from ._wire.requests import CommunicationError
from .adams import AdamS
from .average import Average
from .integrations.ddp import attach
from .local_steps import LocalSteps
from .muon import MuonAdamW
from .radius import RadiusAdamW
from .scape import ScapeAdamS
from .separate import Separate, SeparateAdam
from .tagc import TagcAdamW

if TYPE_CHECKING:
    from . import activations, costmodel, planning  # noqa: F401 (loaded when first used, below)
    from .planning.diagnose import diagnose
    from .planning.memory import memory

__version__ = "0.1.0"
__all__ = [
    "AdamS",
    "Average",
    "CommunicationError",
    "LocalSteps",
    "MuonAdamW",
    "RadiusAdamW",
    "Ranks",
    "ScapeAdamS",
    "Separate",
    "SeparateAdam",
    "Stats",
    "TagcAdamW",
    "attach",
    "diagnose",
    "memory",
]


if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> object:
        """Import what no optimizer needs when it is first used."""
        if name == "diagnose":
            return importlib.import_module(".planning.diagnose", __name__).diagnose
        if name == "memory":
            return importlib.import_module(".planning.memory", __name__).memory
        if name in ("activations", "costmodel", "planning"):
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
