"""compopt: torch.optim optimizers that average gradients over slow links, compressed."""

from ._base import Stats
from ._requests import CommunicationError
from .integrations.ddp import attach
from .radius import RadiusAdamW

__version__ = "0.1.0"
__all__ = ["CommunicationError", "RadiusAdamW", "Stats", "attach"]
