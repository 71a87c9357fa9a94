"""Attention on CuPy arrays."""
