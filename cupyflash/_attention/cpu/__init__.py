"""Attention on NumPy arrays."""
