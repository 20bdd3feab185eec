"""Triton kernels of compopt, imported as ``compopt_kernels``. Each file is named as its reference in ``compopt/_math.py``."""
