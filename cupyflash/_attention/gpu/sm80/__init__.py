"""Kernels by mma.sync, for sm_80 and newer."""
