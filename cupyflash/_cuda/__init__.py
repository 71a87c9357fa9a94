"""Devices, kernels, launches: what both operations share on a GPU."""
