"""The softmax family on NumPy arrays."""
