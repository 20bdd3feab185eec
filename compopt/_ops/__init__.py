"""Arithmetic of a step, and the backends that compute it: see README.md in this folder."""
