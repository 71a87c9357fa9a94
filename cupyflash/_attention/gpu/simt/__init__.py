"""Kernels for any GPU and any option."""
