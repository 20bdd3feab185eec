"""Shared parts of the sparse methods.

README.md in this folder says what lives here and what it may import.
"""
