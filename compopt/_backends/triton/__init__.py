"""Triton kernels: a launch for all tensors of a bucket, or of all buckets."""
