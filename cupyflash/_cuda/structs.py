"""Structs of kernel parameters, passed by value."""

from typing import Any

import cupy
import numpy as np

# CuPy's own wrapper of such an argument, which it would otherwise make at each launch;
# NumPy lists the fields of a struct for it, which takes up to 40 us.
_by_value = getattr(
    cupy.cuda.function, "CNumpyArray", lambda x: x.view(f"V{x.dtype.itemsize}")
)


def pack(fields: dict[str, Any], dtype: np.dtype):
    """A struct of kernel parameters as one argument of a call, passed by value."""
    return _by_value(_record(fields, dtype))


def pack_bytes(fields: dict[str, Any], dtype: np.dtype) -> bytes:
    """A struct of kernel parameters as one argument of `Launch.enqueue`."""
    return _record(fields, dtype).tobytes()


def _record(fields, dtype):
    record = np.zeros(1, dtype)
    for name, value in fields.items():
        record[name] = value
    return record
