"""Plain float64 references, and what judges the exponentials."""
