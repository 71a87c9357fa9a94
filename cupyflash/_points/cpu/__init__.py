"""Points on NumPy arrays."""
