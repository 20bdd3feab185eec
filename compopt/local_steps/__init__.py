"""Local steps, as DiLoCo takes them; the class is in local_steps.py."""

from .local_steps import LocalSteps

__all__ = ["LocalSteps"]
