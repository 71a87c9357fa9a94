"""Kernels by float64 tensor cores."""
