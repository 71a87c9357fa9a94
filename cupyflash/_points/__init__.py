"""Reductions over all pairs of two clouds of points."""
