"""Tensor maps: how TMA finds a tile of q, k or v.

A map holds a pointer, the sizes and strides of up to five axes, and the box that one
instruction loads. CuPy has no function for it, so the driver's own is used.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyflash._core.dtypes import TENSOR_MAP_TYPES
from cupyflash._cuda.device import driver_library
from cupyflash._cuda.structs import MAP

ITEMSIZE = 2  # of the types below
_NO_INTERLEAVE, _PROMOTE_256, _ZEROS_OUTSIDE = 0, 3, 0
# A row of a box is a row of the swizzle: 128 bytes, for bool 64.
BOX_COLUMNS = 64
_COLUMNS = {"float32": 32}
_SWIZZLE_128, _SWIZZLE_64 = 3, 2
_ALIGNMENT = 16  # bytes, of pointers and strides
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAX_STRIDE = 1 << 40
MAX_BATCH_AXES = 2


class Layout(NamedTuple):
    """Sizes, and strides in bytes except for the first axis, innermost first."""

    sizes: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int]


def unsupported_reason(
    ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = ITEMSIZE
) -> str | None:
    """Why a map cannot hold (.., heads, rows, columns), strides in bytes; or None."""
    if ptr % _ALIGNMENT:
        return f"starts {ptr % _ALIGNMENT} bytes past a multiple of {_ALIGNMENT}"
    if shape[-1] > 1 and strides[-1] != itemsize:
        return "has a last axis that is not contiguous"
    for n, step in zip(shape[:-1], strides[:-1], strict=True):
        if n == 1 or step == 0:
            continue
        if step % _ALIGNMENT or not 0 < step < _MAX_STRIDE:
            return f"has a stride of {step} bytes, not a multiple of {_ALIGNMENT} >= 0"
    if shape[-2] > 1 and strides[-2] < shape[-1] * itemsize:
        return "has rows that overlap"
    return None


def layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """The map of (batch axes.., heads, rows, columns), with one or two batch axes.

    Broadcast axes get length 1; the kernel reads them at coordinate 0.
    """
    columns, *rest = shape[::-1]
    sizes, steps = [columns], []
    for n, step in zip(rest, strides[-2::-1], strict=True):
        broadcast = n == 1 or step == 0
        sizes.append(1 if broadcast else n)
        steps.append(_ALIGNMENT if broadcast else step)
    while len(sizes) < 3 + MAX_BATCH_AXES:
        sizes.append(1)
        steps.append(_ALIGNMENT)
    return Layout(tuple(sizes), tuple(steps))  # type: ignore[arg-type]


@functools.cache
def _driver():
    """cuTensorMapEncodeTiled of the CUDA driver."""
    encode = ctypes.CDLL(driver_library()).cuTensorMapEncodeTiled
    encode.restype = ctypes.c_int
    return encode


def _use_the_device():
    """Give this thread a context, before its first driver call."""
    from cupy.cuda import runtime

    runtime.setDevice(runtime.getDevice())


class Encoder:
    """Makes maps of arrays that differ only in their pointer."""

    def __init__(self, dtype: str, where: Layout, box_rows: int, box_heads: int = 1):
        self._encode = _driver()
        # Kernels of one call ask for the same map, one after another.
        self._last: tuple[int | None, Any] = None, None
        self._type = TENSOR_MAP_TYPES[dtype]
        self._sizes = (ctypes.c_uint64 * 5)(*where.sizes)
        self._strides = (ctypes.c_uint64 * 4)(*where.strides)
        columns = _COLUMNS.get(dtype, BOX_COLUMNS)
        self._swizzle = _SWIZZLE_64 if dtype == "bool" else _SWIZZLE_128
        self._box = (ctypes.c_uint32 * 5)(columns, box_rows, box_heads, 1, 1)
        self._steps = (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1)

    def __call__(self, ptr: int) -> Any:
        """The map of the memory at `ptr`."""
        at, found = self._last
        if at != ptr:
            found = self._encoded(ptr)
            self._last = ptr, found
        return found

    def _encoded(self, ptr):
        memory = np.empty(128 + 64, np.uint8)
        start = -memory.ctypes.data % 64  # the driver needs a multiple of 64
        found = memory[start : start + 128]
        arguments = (
            ctypes.c_void_p(memory.ctypes.data + start),
            self._type,
            5,
            ctypes.c_void_p(ptr),
            self._sizes,
            self._strides,
            self._box,
            self._steps,
            _NO_INTERLEAVE,
            self._swizzle,
            _PROMOTE_256,
            _ZEROS_OUTSIDE,
        )
        status = self._encode(*arguments)
        if status == _INVALID_CONTEXT:
            _use_the_device()
            status = self._encode(*arguments)
        if status:
            raise RuntimeError(
                f"cuTensorMapEncodeTiled returned {status} for sizes "
                f"{tuple(self._sizes)} and strides {tuple(self._strides)}"
            )
        return found.view(MAP)


class MappedInputs:
    """A kernel parameter that contains tensor maps, by the pointers of the arrays."""

    _MOST = 256  # sets of pointers that are cached

    def __init__(self, encoders: dict[str, Encoder], pack: Callable[..., Any]):
        self._encoders, self._pack = encoders, pack

    @property
    def reads(self) -> tuple[str, ...]:
        """See Argument of a LaunchSequence."""
        return tuple(self._encoders)

    def bind(self, device_id):
        """See Argument of a LaunchSequence."""
        return functools.lru_cache(self._MOST)(self.make)

    def make(self, *pointers: int) -> Any:
        """The result of `pack` for {name_map: map} and the pointers."""
        encoders = self._encoders.items()
        maps = {
            f"{name}_map": encode(ptr)
            for (name, encode), ptr in zip(encoders, pointers, strict=True)
        }
        return self._pack(maps, pointers)
