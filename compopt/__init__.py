"""compopt: torch.optim optimizers that average gradients over slow links, compressed."""

import importlib
from types import ModuleType

from ._engine.stats import Stats
from ._wire.requests import CommunicationError
from .adams import AdamS
from .average import Average
from .integrations import fsdp as _fsdp  # noqa: F401  (looks at every new optimizer)
from .integrations.ddp import attach
from .local_steps import LocalSteps
from .muon import MuonAdamW
from .planning.diagnose import diagnose
from .radius import RadiusAdamW
from .scape import ScapeAdamS
from .separate import Separate, SeparateAdam
from .tagc import TagcAdamW

__version__ = "0.1.0"
__all__ = [
    "AdamS",
    "Average",
    "CommunicationError",
    "LocalSteps",
    "MuonAdamW",
    "RadiusAdamW",
    "ScapeAdamS",
    "Separate",
    "SeparateAdam",
    "Stats",
    "TagcAdamW",
    "attach",
    "diagnose",
]


def __getattr__(name: str) -> ModuleType:
    """Import the modules that no optimizer needs when they are first used."""
    if name in ("activations", "costmodel"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
