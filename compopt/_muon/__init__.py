"""Muon's arithmetic. README.md lists the files, and what they may import."""
