"""Axes and strides as plain numbers."""

from collections.abc import Sequence

import numpy as np

from cupyflash._core import arrays


def normalize_axes(axis, ndim: int) -> tuple[int, ...]:
    """`axis` (None, int or tuple) as sorted non-negative ints; AxisError, TypeError."""
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = [arrays.index("axis", a, "None, an int or a tuple of ints") for a in given]
    if ndim == 0 and axes in ([0], [-1]):
        return ()  # as NumPy's reductions of a scalar, and SciPy's, have it
    # The same errors as NumPy's own functions, and in their words.
    found = [np.lib.array_utils.normalize_axis_index(a, ndim, "axis") for a in axes]
    if len(set(found)) < len(found):
        raise ValueError(f"repeated axis in `axis` argument, got {tuple(axes)}")
    return tuple(sorted(found))


def whole_vectors(columns: int, itemsize: int) -> int:
    """Columns of a row padded to whole 16-byte vectors."""
    vector = 16 // itemsize
    return -(-columns // vector) * vector


def element_strides(x) -> tuple[int, ...]:
    """Strides of an array in elements; ValueError for a field of a structured array."""
    steps = zip(x.shape, x.strides, strict=True)
    if any(n > 1 and s % x.itemsize for n, s in steps):
        raise ValueError(
            f"an array of {arrays.dtype_name(x)} has strides of {x.strides} bytes, "
            f"which are not multiples of {x.itemsize} (a field of a structured "
            "array?); pass a contiguous copy"
        )
    return tuple(s // x.itemsize for s in x.strides)


def address_range(x) -> tuple[int, int]:
    """First byte of an array and the one past its last, from the pointer of `x`."""
    if x.size == 0:
        return 0, 0
    steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    return sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps) + x.itemsize


def collapse(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbouring axes that are one axis to every operand.

    Parameters
    ----------
    shape : the common shape of the operands
    strides : for each operand its strides, one number an axis

    Returns
    -------
    shape : tuple of int
        Without axes of length one; empty for a single element.
    strides : list of tuple of int
        For each operand, of the new shape.
    """
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis, n in enumerate(shape):
        if n == 1:
            continue
        steps = [s[axis] for s in strides]
        pairs = list(zip(merged, steps, strict=True))
        if sizes and all(m[-1] == n * step for m, step in pairs):
            sizes[-1] *= n
            for m, step in pairs:
                m[-1] = step
        else:
            sizes.append(n)
            for m, step in pairs:
                m.append(step)
    return tuple(sizes), [tuple(m) for m in merged]
