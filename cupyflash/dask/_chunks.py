"""Dask arrays as the functions of this package need them."""

import math
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array

from cupyflash._core import arrays

_SPLIT_EVERY = 4  # as Dask's own reductions


def adopted(num_needed: int, /, **given: Any) -> dict[str, da.Array]:
    """The arguments that are there, as Dask arrays of known shapes, chunks of one kind.

    The first `num_needed` must be there. Other arrays become one chunk; scalars are of
    the kind of the first argument.
    """
    _, found = arrays.adopt_all(
        num_needed,
        **{n: x._meta if isinstance(x, da.Array) else x for n, x in given.items()},
    )
    found = {name: x for name, x in found.items() if x is not None}
    for name, x in found.items():
        if isinstance(given[name], da.Array):
            x = given[name]
        else:
            x = da.from_array(x, chunks=-1, asarray=False)
        if any(math.isnan(n) for n in x.shape):
            raise ValueError(
                f"{name} has axes of unknown length {x.shape}; call "
                f"{name}.compute_chunk_sizes() first"
            )
        found[name] = x
    return found


def split_every(given: int | None) -> int:
    """How many states are joined at once."""
    every = dask.config.get("split_every", _SPLIT_EVERY) if given is None else given
    every = arrays.index("split_every", every, "an int of 2 or more")
    if every < 2:
        raise ValueError(f"split_every must be 2 or more, got {every}")
    return every


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


def rechunk(x: da.Array, chunks: Any) -> da.Array:
    """`x` in other chunks, of the same kind."""
    return _of_kind(x._meta, x.rechunk(chunks))


def unified(*pairs: Any) -> list[da.Array]:
    """Arrays, each followed by its axes, in the chunks that all of them share."""
    _, found = da.core.unify_chunks(*pairs, warn=False)
    return [_of_kind(x._meta, y) for x, y in zip(pairs[::2], found, strict=True)]


def _of_kind(like, x):
    """`x` with chunks of the kind of `like`: Dask makes empty arrays NumPy's."""
    if type(x._meta) is type(like):
        return x
    return x.map_blocks(
        lambda block: np.empty_like(like, shape=block.shape), dtype=x.dtype, meta=like
    )
