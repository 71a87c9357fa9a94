"""Softmax, attention and points of Dask arrays: more than memory, many processes.

The functions of the package, for `dask.array.Array` with NumPy or CuPy chunks. Results
are lazy. Chunks may lie along any axes, those that a sum runs over included: each chunk
is computed by the plain function, and what the chunks of a row have to tell each other
is a state of two numbers, or out and lse of attention, joined along a tree. A worker
holds chunks and states, never a matrix of scores.

Needs Dask: ``pip install "cupyflash[dask]"``.
"""

from cupyflash._core import extras

try:
    import dask.array  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cupyflash.dask takes Dask, which cannot be imported: {error}; "
        f"{extras.command('dask')} brings it"
    ) from error

from cupyflash.dask import points
from cupyflash.dask._attention import attention, merge_attention_states
from cupyflash.dask._softmax import log_softmax, logsumexp, softmax

__all__ = [
    "attention",
    "log_softmax",
    "logsumexp",
    "merge_attention_states",
    "points",
    "softmax",
]
