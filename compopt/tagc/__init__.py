"""TAGC; its lines are in tagc.py."""

from .tagc import TagcAdamW

__all__ = ["TagcAdamW"]
