"""Triton kernels: a launch for all tensors of a bucket."""
