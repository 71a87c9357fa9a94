"""Moves and casts of arrays of every dtype.

bfloat16 is moved and cast by its bits: not every CuPy has kernels for it.
"""

from typing import Any

import numpy as np

from cupyflash._core import arrays


def bits(x: Any) -> Any:
    """A view that any kernel can copy: bfloat16 as integers."""
    return x.view(np.uint16) if arrays.dtype_name(x) == "bfloat16" else x


def contiguous(xp: Any, x: Any) -> Any:
    """`x` in C order, without a copy where it is."""
    return x if x.flags.c_contiguous else xp.ascontiguousarray(bits(x)).view(x.dtype)


def joined(xp: Any, parts: list[Any], axis: int) -> Any:
    """The parts along an axis, as a new array."""
    return xp.concatenate([bits(x) for x in parts], axis=axis).view(parts[0].dtype)


def add(total: Any, part: Any) -> None:
    """Add an array of the same or a narrower dtype, in place."""
    if arrays.dtype_name(part) == "bfloat16":
        part = (bits(part).astype(np.uint32) << 16).view(np.float32)
    total += part


def cast(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """`x` rounded to nearest in a dtype, float32 if that is bfloat16."""
    if dtype.name != "bfloat16" or x.dtype == dtype:
        return x.astype(dtype, copy=False)
    wide = contiguous(xp, x).view(np.uint32)
    odd = (wide >> 16) & 1
    rounded = ((wide + (0x7FFF + odd)) >> 16).astype(np.uint16)
    return xp.where(xp.isnan(x), np.uint16(0x7FC0), rounded).view(dtype)
