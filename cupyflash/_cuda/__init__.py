"""Devices, kernels, launches: shared by all operations on a GPU."""
