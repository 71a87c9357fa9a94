"""Kernels by wgmma and TMA, for sm_90a."""
