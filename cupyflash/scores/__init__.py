"""Score and mask functions for `attention`, to use as they are or as a starting point.

Each one is a plain function, or returns one, to pass to `attention` as ``score=`` or
``mask=``. Functions that take numbers close over them, and a different number does not
recompile anything. Arrays go into ``score_arrays=`` or ``mask_arrays=`` under the
names after ``*``. Positions count along the keys: `query_offset` has been added to i.

Functions that close over numbers can be sent to other processes by cloudpickle, which
Dask uses, but not by pickle: there, send the numbers and make the function again.
"""

from cupyflash.scores._masks import (
    dilated_window,
    document,
    neighborhood_2d,
    prefix_lm,
    sliding_window,
)
from cupyflash.scores._scores import (
    alibi,
    debye,
    soft_nearest_neighbor,
    softcap,
    t5_bias,
)

__all__ = [
    "alibi",
    "debye",
    "dilated_window",
    "document",
    "neighborhood_2d",
    "prefix_lm",
    "sliding_window",
    "soft_nearest_neighbor",
    "softcap",
    "t5_bias",
]
