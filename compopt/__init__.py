"""compopt: torch.optim optimizers that average gradients over slow links, compressed."""

from ._requests import CommunicationError
from ._stats import Stats
from .integrations.ddp import attach
from .radius import RadiusAdamW
from .separate import Separate, SeparateAdam

__version__ = "0.1.0"
__all__ = ["CommunicationError", "RadiusAdamW", "Separate", "SeparateAdam", "Stats", "attach"]
