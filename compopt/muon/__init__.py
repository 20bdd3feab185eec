"""Muon, with AdamW for what it does not take; the class is in muon.py."""

from .muon import MuonAdamW

__all__ = ["MuonAdamW"]
