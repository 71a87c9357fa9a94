"""The softmax family on CuPy arrays."""
