"""Triton kernels of compopt, imported as ``compopt_kernels``. None yet; each file will be named as its
reference in ``compopt/_math.py``."""
