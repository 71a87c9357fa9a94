"""The reductions of points on CuPy arrays."""
