"""SEPARATE; Algorithm 1 is in separate.py."""

from .separate import Separate, SeparateAdam

__all__ = ["Separate", "SeparateAdam"]
