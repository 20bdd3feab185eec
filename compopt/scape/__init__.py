"""SCAPE; Algorithm 1 is in scape.py, Algorithm 2 in sharded_scape.py."""

from .scape import ScapeAdamS
from .scape_masks import ScapeStats

__all__ = ["ScapeAdamS", "ScapeStats"]
