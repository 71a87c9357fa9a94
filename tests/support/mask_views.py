"""Mask arrays of many strides, for kernels that read them as bits."""

import numpy as np

# The shape of the memory, and the view of it that is the mask, for 2 entries of 4 heads
# with 150 queries and 170 keys.
VIEWS = {
    "of all": ((2, 4, 150, 170), lambda x: x),
    "of heads": ((4, 150, 170), lambda x: x),
    "of entries": ((2, 1, 150, 170), lambda x: x),
    "shared": ((150, 170), lambda x: x),
    "of keys": ((2, 1, 1, 170), lambda x: x),
    "of queries": ((4, 150, 1), lambda x: x),
    "part": ((4, 160, 190), lambda x: x[:, 4:154, 7:177]),  # rows start anywhere
    "reversed": ((150, 170), lambda x: x[::-1, ::-1]),
    "steps": ((300, 340), lambda x: x[::2, ::2]),
    "transposed": ((2, 1, 170, 150), lambda x: x.swapaxes(-1, -2)),
    "nothing": ((150, 170), lambda x: x & False),
    "a prefix": ((150, 170), lambda x: x & (np.arange(170) < 100)),
}
SHAPES = {"q": (2, 4, 150), "k": (2, 2, 170)}  # without columns


def view(rng, name):
    """A mask of this form that shows three of four keys."""
    shape, of = VIEWS[name]
    return of(rng.random(shape) < 0.75)
