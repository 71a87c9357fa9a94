"""Dask arrays as the functions of this package need them."""

import math
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array

from cupyflash._core import arrays


def of(name: str, x: Any) -> da.Array:
    """`x` as a Dask array whose shape is known; other arrays become one chunk."""
    if not isinstance(x, da.Array):
        x = x if hasattr(x, "dtype") else np.asarray(x)
        return da.from_array(x, chunks=-1, asarray=False)
    if any(math.isnan(n) for n in x.shape):
        raise ValueError(
            f"{name} has axes of unknown length {x.shape}; call "
            f"{name}.compute_chunk_sizes() first"
        )
    return x


def stand_in(x: da.Array) -> Any:
    """A NumPy array of the shape and dtype of `x`, without its memory.

    The plain functions check it, so that errors and dtypes are theirs.
    """
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def meta(x: da.Array, ndim: int, dtype: Any) -> Any:
    """An empty array of the kind of the chunks of `x`."""
    return meta_from_array(x._meta, ndim, dtype=dtype)


def namespace(x: Any) -> Any:
    """NumPy or CuPy, whose array a chunk is."""
    return arrays.import_cupy() if arrays.is_cupy(x) else np


def result_dtype(problem: Any) -> np.dtype:
    """Of what a function of the softmax family returns."""
    return arrays.to_dtype(problem.dtypes["out"])
