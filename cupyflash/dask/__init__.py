"""Softmax, attention and points for Dask arrays: larger than memory, many processes.

The functions of the package for `dask.array.Array`, with NumPy or CuPy chunks. Results
are lazy. You can chunk along any axis, including those that a sum runs over. The plain
function computes each chunk, and the chunks of a row only exchange two numbers per row
(or out and lse of attention), joined in a tree. A worker holds chunks and these
numbers, never a matrix of scores.

Needs Dask: ``pip install "cupyflash[dask]"``.
"""

from cupyflash._core import extras

try:
    import dask.array  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cupyflash.dask needs Dask, which cannot be imported: {error}; "
        f"{extras.command('dask')} installs it"
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
