"""TAGC; its lines are in tagc.py."""

from .tagc import TagcAdamW, TagcStats

__all__ = ["TagcAdamW", "TagcStats"]
