"""Moves and casts of arrays of every dtype.

bfloat16 is moved and cast by its bits: not every CuPy has kernels for it.
"""

import functools
from typing import Any

import numpy as np

from cupyflash._core import arrays, strides


def bits(x: Any) -> Any:
    """A view that any kernel can copy: bfloat16 as integers."""
    return x.view(np.uint16) if arrays.dtype_name(x) == "bfloat16" else x


def contiguous(xp: Any, x: Any) -> Any:
    """`x` in C order, without a copy where it is."""
    if x.flags.c_contiguous:
        return x
    if arrays.is_cupy(x) and (found := _copied_by_rows(xp, x)) is not None:
        return found
    return xp.ascontiguousarray(bits(x)).view(x.dtype)


def _copied_by_rows(cupy, x):
    """`x` in C order, if all that lies together in it is equally far apart; or None.

    CUDA copies whole rows three times as fast as CuPy's kernel copies elements.
    """
    shape, ((pitch, *steps),) = strides.collapse(x.shape, [x.strides])
    if len(shape) != 2 or steps != [x.itemsize] or not 0 < pitch < 1 << 31:
        return None
    found, size = cupy.empty(x.shape, x.dtype), shape[1] * x.itemsize
    runtime = cupy.cuda.runtime
    runtime.memcpy2DAsync(
        found.data.ptr, size, x.data.ptr, pitch, size, shape[0],
        runtime.memcpyDeviceToDevice, cupy.cuda.get_current_stream().ptr,
    )  # fmt: skip
    return found


def joined(xp: Any, parts: list[Any], axis: int) -> Any:
    """The parts along an axis, as a new array."""
    return xp.concatenate([bits(x) for x in parts], axis=axis).view(parts[0].dtype)


def add(total: Any, part: Any) -> None:
    """Add an array of the same or a narrower dtype, in place."""
    if arrays.dtype_name(part) != "bfloat16":
        total += part
    elif arrays.is_cupy(part):
        _kernels()[0](total, bits(part), total)
    else:
        total += (bits(part).astype(np.uint32) << 16).view(np.float32)


def cast(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """`x` rounded to nearest in a dtype, float32 if that is bfloat16."""
    if dtype.name != "bfloat16" or x.dtype == dtype:
        return x.astype(dtype, copy=False)
    if arrays.is_cupy(x):
        return _kernels()[1](x).view(dtype)
    wide = contiguous(xp, x).view(np.uint32)
    odd = (wide >> 16) & 1
    rounded = ((wide + (0x7FFF + odd)) >> 16).astype(np.uint16)
    return xp.where(xp.isnan(x), np.uint16(0x7FC0), rounded).view(dtype)


@functools.cache
def _kernels():
    """add and cast of bfloat16 in one pass over memory each."""
    from cupy import ElementwiseKernel

    add = ElementwiseKernel(
        "float32 total, uint16 x",
        "float32 sum",
        "sum = total + __uint_as_float(static_cast<unsigned int>(x) << 16)",
        "cupyflash_add_bfloat16",
    )
    cast = ElementwiseKernel(
        "float32 x",
        "uint16 y",
        """
        const unsigned int bits = __float_as_uint(x);
        y = isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16
        """,
        "cupyflash_cast_bfloat16",
    )
    return add, cast
