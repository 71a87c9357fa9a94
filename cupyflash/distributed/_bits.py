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
    """Add an array in place; see `summed`."""
    _add(total, part, total)


def summed(xp: Any, a: Any, b: Any, dtype: np.dtype) -> Any:
    """a + b as a new array: of 16 bits in float32, and rounded once."""
    out = xp.empty(a.shape, dtype)
    _add(a, b, out)
    return out


def _add(a, b, out):
    """Write a + b to an array, which may be one of them."""
    dtypes = [arrays.dtype_name(x) for x in (a, b, out)]
    if not _NARROW.intersection(dtypes):
        np.add(a, b, out=out, casting="same_kind")
    elif arrays.is_cupy(out) and set(dtypes) <= _FORMATS.keys():
        _in_one_pass(_sum_kernel, dtypes, a, b, out)
    else:
        xp = arrays.import_cupy() if arrays.is_cupy(out) else np
        found = cast(xp, _widened(a) + _widened(b), out.dtype)
        bits(out)[...] = bits(found)


def _widened(x):
    """16-bit numbers in float32, others as they are."""
    if arrays.dtype_name(x) == "bfloat16":
        return (bits(x).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32) if arrays.dtype_name(x) == "float16" else x


def cast(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """`x` in a dtype, rounded to nearest; float32 if one of them is bfloat16."""
    if x.dtype == dtype:
        return x
    dtypes = arrays.dtype_name(x), dtype.name
    if "bfloat16" not in dtypes:
        return x.astype(dtype)
    if arrays.is_cupy(x) and set(dtypes) <= _FORMATS.keys():
        found = xp.empty(x.shape, dtype)
        _in_one_pass(_cast_kernel, dtypes, x, found)
        return found
    if dtypes[0] == "bfloat16":
        return _widened(x).astype(dtype, copy=False)
    x = x.astype(np.float32, copy=False)
    wide = contiguous(xp, x).view(np.uint32)
    odd = (wide >> 16) & 1
    rounded = ((wide + (0x7FFF + odd)) >> 16).astype(np.uint16)
    return xp.where(xp.isnan(x), np.uint16(0x7FC0), rounded).view(dtype)


# --- kernels of CuPy

# Each number is an integer of 16 or 32 bits; two of them are loaded and stored as one.
_FORMATS = {
    "float32": ("of_float32", 32),
    "float16": ("of_float16", 16),
    "bfloat16": ("of_bfloat16", 16),
}
_NARROW = {"float16", "bfloat16"}
_PREAMBLE = """
struct of_float32 {
  static constexpr int bits = 32;
  static __device__ float load(unsigned int x) { return __uint_as_float(x); }
  static __device__ unsigned int store(float x) { return __float_as_uint(x); }
};
struct of_float16 {
  static constexpr int bits = 16;
  static __device__ float load(unsigned int x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(static_cast<unsigned short>(x)));
    return wide;
  }
  static __device__ unsigned int store(float x) {
    unsigned short narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
    return narrow;
  }
};
struct of_bfloat16 {
  static constexpr int bits = 16;
  static __device__ float load(unsigned int x) { return __uint_as_float(x << 16); }
  static __device__ unsigned int store(float x) {
    const unsigned int bits = __float_as_uint(x);
    return isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};
template <typename format>
__device__ float load(unsigned long long word, int n) {
  return format::load(static_cast<unsigned int>(word >> (n * format::bits)));
}
template <typename format>
__device__ unsigned long long store(float x, int n) {
  return static_cast<unsigned long long>(format::store(x)) << (n * format::bits);
}
"""


def _in_one_pass(make, dtypes, *operands):
    """Call a kernel over arrays, two numbers at a time where they lie like that."""
    numbers = 2 if all(map(_lies_in_pairs, operands)) else 1
    words = (x.view(f"u{numbers * x.itemsize}") for x in operands)
    make(tuple(dtypes), numbers)(*words)


def _lies_in_pairs(x):
    """Whether all pairs of neighbours in the last axis are words of twice the size."""
    pair = 2 * x.itemsize
    return (
        x.ndim > 0
        and x.shape[-1] % 2 == 0
        and x.strides[-1] == x.itemsize
        and all(n % pair == 0 for n in (*x.strides[:-1], x.data.ptr))
    )


@functools.cache
def _sum_kernel(dtypes, numbers):
    """y = a + b in float32."""
    return _kernel(
        "add", dtypes, numbers, ("a", "b"), "load<{}>(a, {n}) + load<{}>(b, {n})"
    )


@functools.cache
def _cast_kernel(dtypes, numbers):
    """y = a."""
    return _kernel("cast", dtypes, numbers, ("a",), "load<{}>(a, {n})")


def _kernel(name, dtypes, numbers, operands, expression):
    """A kernel of words of `numbers` numbers each; the last dtype is that of y."""
    from cupy import ElementwiseKernel

    formats, sizes = zip(*(_FORMATS[dtype] for dtype in dtypes), strict=True)
    words = [f"uint{numbers * size}" for size in sizes]
    terms = (
        f"store<{formats[-1]}>({expression.format(*formats, n=n)}, {n})"
        for n in range(numbers)
    )
    return ElementwiseKernel(
        ", ".join(f"{word} {x}" for word, x in zip(words, operands, strict=False)),
        f"{words[-1]} y",
        f"y = {' | '.join(terms)}",
        f"cupyflash_{name}_{'_'.join(dtypes)}_{numbers}",
        preamble=_PREAMBLE,
    )
