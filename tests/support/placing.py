"""The same values in memory of any shape: strides, padding, poison around them."""

import ml_dtypes
import numpy as np

# How an array may lie in memory.
FORMS = ("plain", "rows", "shifted", "fortran", "swapped", "reversed", "gaps")
# Those that keep the last axis contiguous.
ROW_FORMS = ("plain", "rows", "shifted", "heads")


def place(xp, values, form="plain"):
    """`values` (on the host) as an `xp` array that lies in memory as `form` says."""
    values = np.asarray(values)
    x = empty(xp, values.shape, values.dtype, form)
    if values.size:
        # bfloat16 travels as its bits, so that no cast takes part.
        bits = _bits(values.dtype)
        x.view(bits)[...] = xp.asarray(values.copy().view(bits))
    return x


def empty(xp, shape, dtype, form="plain"):
    """A poisoned array of `shape` that lies in memory as `form` says."""
    dtype = np.dtype(dtype)
    bits = _bits(dtype)
    poison = np.full(1, _poison(dtype)).astype(dtype).view(bits)[0]
    return _shaped(lambda s: xp.full(s, poison, bits), tuple(shape), form).view(dtype)


def _bits(dtype):
    return np.dtype(np.uint16 if dtype == ml_dtypes.bfloat16 else dtype)


def _poison(dtype):
    """What stands between the elements: NaN, or the largest integer."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).max
    return True if dtype.kind == "b" else np.nan


def _shaped(buffer, shape, form):
    """A view of `shape` into what `buffer` makes."""
    ndim = len(shape)
    if ndim == 0 or form == "plain":
        return buffer(shape)
    if form == "rows":  # every axis but the last is padded
        inside = tuple(slice(1, n + 1) for n in shape[:-1])
        wide = (*(n + 2 for n in shape[:-1]), shape[-1] + 5)
        return buffer(wide)[(*inside, slice(0, shape[-1]))]
    if form == "shifted":  # one element past an aligned address
        size = int(np.prod(shape))
        return buffer((size + 1,))[1:].reshape(shape)
    if form == "fortran":
        return buffer(shape[::-1]).transpose()
    if form == "swapped":  # the last two axes exchanged in memory
        if ndim == 1:
            return buffer(shape)
        return buffer((*shape[:-2], shape[-1], shape[-2])).swapaxes(-1, -2)
    if form == "heads":  # the axes before the last reversed in memory
        order = (*range(ndim - 1)[::-1], ndim - 1)
        return buffer(tuple(shape[a] for a in order)).transpose(order)
    if form == "reversed":
        return buffer(shape)[(slice(None, None, -1),) * ndim]
    if form == "gaps":  # every second element of each axis
        wide = tuple(2 * n + 1 for n in shape)
        return buffer(wide)[tuple(slice(1, 2 * n + 1, 2) for n in shape)]
    raise ValueError(form)
