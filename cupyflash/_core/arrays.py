"""Kinds of array: NumPy and CuPy told apart without importing CuPy."""

import functools
import math
import numbers
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyflash._core import extras
from cupyflash._core.dtypes import FLOATS

METHODS = ("auto", "naive", "safe", "online", "tiled")

# The DLPack device codes of CUDA memory and of CUDA managed memory.
_DLPACK_CUDA = (2, 13)


# Classes of CuPy arrays seen so far: each call on a GPU first looks here.
CUPY_CLASSES: set[type] = set()


def is_cupy(x: Any) -> bool:
    """Whether `x` is a CuPy array; whoever has one has imported CuPy."""
    kind = type(x)
    if kind in CUPY_CLASSES:
        return True
    array = _class_of("cupy", "ndarray")
    if array is None or not isinstance(x, array):
        return False
    CUPY_CLASSES.add(kind)
    return True


def _class_of(module, name):
    """A class of a module that may be imported, or not yet to the end; or None.

    While another thread imports a module, ``sys.modules`` has it without its classes:
    no object can be of one of them.
    """
    return getattr(sys.modules.get(module), name, None)


def lives_on_gpu(x: Any) -> bool:
    """Whether `x` is a CuPy array or another object that exports CUDA memory."""
    if isinstance(x, (np.ndarray, np.generic, numbers.Number, list, tuple)):
        return False
    return is_cupy(x) or _offers_dlpack_cuda(x) or _offers_cuda_interface(x)


def _offers_dlpack_cuda(x):
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and device()[0] in _DLPACK_CUDA


def _offers_cuda_interface(x):
    try:
        return hasattr(x, "__cuda_array_interface__")
    except Exception:  # PyTorch raises here for tensors that it cannot describe
        return False


def adopt(x: Any) -> Any:
    """Return `x` as a NumPy or CuPy array, without a copy if it is an array."""
    if isinstance(x, np.ndarray):
        return np.asarray(x)  # drops subclasses
    if is_cupy(x):
        return x
    if lives_on_gpu(x):
        cupy = import_cupy()
        return cupy.from_dlpack(x) if _offers_dlpack_cuda(x) else cupy.asarray(x)
    _refuse_other_arrays(x)
    return np.asarray(x)


def import_cupy() -> Any:
    """CuPy, for an array in CUDA memory; or an ImportError that says what to do."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"an array in CUDA memory needs CuPy, which cannot be imported: "
            f"{error}; {extras.CUDA} installs it"
        ) from error
    return cupy


def is_scalar(x: Any) -> bool:
    """Whether `x` is a Python or NumPy scalar, which goes with either kind of array."""
    return isinstance(x, (numbers.Number, np.bool_, np.generic))


def _describe(x):
    if is_cupy(x):
        return f"a CuPy array on device {x.device.id}"
    return "a NumPy array" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"


# What distinguishes an array type from a file or an image that can be read as one.
_ARRAY_PROTOCOLS = (
    "__array_namespace__", "__array_function__", "__array_ufunc__", "__dlpack__",
)  # fmt: skip

# What to write instead, by the package of the type.
_INSTEAD = {
    "dask": "use cupyflash.dask, which has softmax, log_softmax, logsumexp, attention, "
    "merge_attention_states and points for Dask arrays, or pass x.compute()",
    "xarray": "use xarray.apply_ufunc(f, x, ...), or pass x.values",
    "pandas": "pass x.to_numpy()",
    "sparse": "pass x.todense()",
    "torch": "pass x.numpy(force=True)",
}


def _refuse_other_arrays(x):
    """Refuse host arrays of other libraries: they would become NumPy arrays."""
    parts = x if isinstance(x, (list, tuple)) else (x,)
    for part in parts:
        if isinstance(part, (np.ndarray, np.generic, numbers.Number, list, tuple)):
            continue
        kind = type(part)
        if any(hasattr(kind, protocol) for protocol in _ARRAY_PROTOCOLS):
            package = kind.__module__.partition(".")[0]
            instead = _INSTEAD.get(package, "pass numpy.asarray(x)")
            raise TypeError(
                f"{package}.{kind.__name__} would silently become a NumPy array; "
                f"{instead}"
            )


def refuse_lossy(name: str, x: Any) -> None:
    """Refuse arrays whose mask or unit would be lost, with a TypeError."""
    # Who has a masked array has imported numpy.ma, which takes NumPy a while.
    masked = _class_of("numpy.ma", "MaskedArray")
    if masked is not None and isinstance(x, masked):
        if name == "out":  # of which filled() is a copy
            raise TypeError(
                "out is a masked array, whose mask would not follow the result; pass "
                "out.data, and then set out.mask"
            )
        raise TypeError(
            f"{name} is a masked array, whose mask would be lost; pass {name}.filled() "
            "with a value, and the mask as a separate argument"
        )
    if isinstance(x, np.ndarray) and hasattr(x, "unit"):
        raise TypeError(
            f"{name} is a {type(x).__name__}, whose unit would be lost; pass "
            f"{name}.value or numpy.asarray({name})"
        )


def _adopt_as(name, x):
    """`x` adopted, or an error that names it."""
    refuse_lossy(name, x)
    try:
        return adopt(x)
    except ValueError as error:  # rows of a list that are not of one length
        raise ValueError(f"{name} cannot be made an array: {error}") from None
    except (TypeError, BufferError) as error:  # what another library does not export
        raise TypeError(f"{name} cannot be made an array: {error}") from None


def adopt_all(num_needed: int = 1, /, **given: Any) -> tuple[Any, dict[str, Any]]:
    """Adopt the arrays of one call; return their namespace and them by name.

    The first name decides between NumPy and CuPy. The first `num_needed` must be there;
    another that is ``None`` stays ``None``. Scalars join either kind. Kinds and devices
    are never mixed.
    """
    for name in list(given)[:num_needed]:
        if given[name] is None:
            raise TypeError(f"{name} must be an array, got None; it is not optional")
    arrays = {
        name: x if x is None or is_scalar(x) else _adopt_as(name, x)
        for name, x in given.items()
    }
    first = next(iter(arrays))
    if is_scalar(arrays[first]):
        # A scalar alone is a NumPy array; to go with GPU arrays it must be moved
        # explicitly.
        arrays[first] = np.asarray(arrays[first])
    on_gpu = is_cupy(arrays[first])
    for name, x in arrays.items():
        if x is None or is_scalar(x):
            continue
        if is_cupy(x) != on_gpu:
            cpu_name = name if on_gpu else first
            gpu_name = first if on_gpu else name
            raise TypeError(
                f"{first} is {_describe(arrays[first])} but {name} is "
                f"{_describe_given(given[name], x)}; pass both as CuPy arrays "
                f"(cupy.asarray({cpu_name})) or both as NumPy arrays "
                f"(cupy.asnumpy({gpu_name}))"
            )
        if on_gpu and x.data.device_id != arrays[first].data.device_id:
            raise ValueError(
                f"{first} is on device {arrays[first].data.device_id} but {name} is "
                f"on device {x.data.device_id}; move one of them first"
            )
        if on_gpu:
            _check_places(name, x)
    xp = sys.modules["cupy"] if on_gpu else np
    for name, x in arrays.items():
        if is_scalar(x):
            # A kernel writes the value on the GPU: nothing crosses from the host.
            arrays[name] = full(xp, x, arrays[first])
    return xp, arrays


def _check_places(name, x):
    """Refuse elements of a GPU array that kernels cannot read: each whole, in place."""
    size = x.itemsize
    if math.gcd(size, x.data.ptr, *x.strides) == size and x.dtype.isnative:
        return
    if not x.dtype.isnative:
        raise ValueError(
            f"{name} has the byte order of dtype {x.dtype.str!r}, which kernels cannot "
            f"read; convert it to {x.dtype.newbyteorder('=').str!r}"
        )
    if x.size and x.data.ptr % size:
        raise ValueError(
            f"{name} starts {x.data.ptr % size} bytes past a multiple of {size}, the "
            f"size of {dtype_name(x)}, which kernels cannot read; pass a copy"
        )
    if any(n > 1 and s % size for n, s in zip(x.shape, x.strides, strict=True)):
        raise ValueError(
            f"{name} of {dtype_name(x)} has strides of {x.strides} bytes, which are "
            f"not multiples of {size} (a field of a structured array?); pass a "
            "contiguous copy"
        )


def _describe_given(given, adopted):
    if isinstance(given, (np.ndarray, list, tuple)) or is_cupy(adopted):
        return _describe(adopted) if is_cupy(adopted) else _describe(given)
    return f"a {type(given).__name__} in host memory"


def sum_to(x, shape):
    """The sum over the axes along which `shape` was broadcast to that of `x`."""
    extra = x.ndim - len(shape)
    if extra > 0:
        x = x.sum(axis=tuple(range(extra)))
    stretched = tuple(
        a for a, (n, m) in enumerate(zip(shape, x.shape, strict=True)) if n != m
    )
    return x.sum(axis=stretched, keepdims=True) if stretched else x


def broadcast_view(name: str, x: Any, shape: tuple[int, ...], meaning: str = "") -> Any:
    """`x` as a view of `shape`, which it must not enlarge; ValueError."""
    if x.ndim > len(shape) or any(
        n not in (1, m) for n, m in zip(x.shape[::-1], shape[::-1], strict=False)
    ):
        target = f"{meaning} = {shape}" if meaning else f"{shape}"
        raise ValueError(
            f"{name} has shape {x.shape}, which does not broadcast to {target}"
        )
    xp = sys.modules["cupy"] if is_cupy(x) else np
    return xp.broadcast_to(x, shape)


def full(xp, value, like):
    """A 0-d array of `value` on the device of `like`."""
    if xp is np:
        return np.asarray(value)
    with like.device:
        return xp.full((), value, dtype=np.asarray(value).dtype)


def dtype_name(x: Any) -> str:
    """The name of an array's dtype, such as "bfloat16"."""
    return _name(x.dtype)


@functools.cache
def _name(dtype):
    return dtype.name  # which NumPy puts together anew each time, in some 5 us


def to_dtype(name: str) -> np.dtype:
    """The dtype called `name`; bfloat16 is ml_dtypes', imported only when asked for."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                f"bfloat16 needs the package ml_dtypes: {extras.command('bf16')}"
            ) from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def float_dtype(argument: str, dtype: Any) -> np.dtype:
    """The dtype meant by a ``dtype=`` argument, which must be a floating one."""
    if isinstance(dtype, str) and dtype in FLOATS:
        return to_dtype(dtype)
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"{argument} must be one of {', '.join(FLOATS)}, got {dtype!r}"
        ) from None
    if found.name not in FLOATS:
        raise TypeError(
            f"{argument} must be one of {', '.join(FLOATS)}, got {found.name}"
        )
    return found


def check_bool(name: str, value: Any) -> bool:
    """`value`, Python's or NumPy's True or False, as Python's; or a TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return bool(value)


def real_number(name: str, value: Any) -> float:
    """`value` as a float; a TypeError for what is not a real number of the host."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (numbers.Real, np.floating, np.integer)
    ):
        raise TypeError(f"{name} must be a real number, got {_describe(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for float64 (at most 1.8e308)") from None


def finite_number(name: str, value: Any) -> float:
    """The same, finite; or a ValueError."""
    number = real_number(name, value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def index(name: str, value: Any, accepted: str) -> int:
    """`value` as an int; a TypeError for what is none, such as True and 1.0."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a `value` that is not one of some strings."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
        )


def check_method(method: Any) -> str:
    check_choice("method", method, METHODS)
    return method


def check_out_is_array(out: Any) -> None:
    """Refuse an `out` that would be copied into an array, or that is read-only."""
    if out is None or isinstance(out, np.ndarray) or is_cupy(out):
        return  # of which NumPy's say themselves whether they are read-only
    if not lives_on_gpu(out):
        raise TypeError(f"out must be a NumPy or CuPy array, got {_describe(out)}")
    if _offers_cuda_interface(out) and out.__cuda_array_interface__["data"][1]:
        raise ValueError(_READ_ONLY)


_READ_ONLY = "out is read-only; pass a writable array"


def overlaps_itself(x: Any) -> bool:
    """Whether two elements of an array share a byte."""
    if x.size == 0:
        return False
    # If each axis steps over everything that the narrower ones reach, no two overlap.
    reach = x.itemsize
    for step, n in sorted(
        (abs(s), n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1
    ):
        if step < reach:
            break
        reach += (n - 1) * step
    else:
        return False
    # Else two elements that meet differ in a first axis: one has index 0 there, without
    # loss, and the other a larger one; the later axes are free for both.
    x = _addresses(x)
    while x.ndim:
        if _share_memory(x[:1], x[1:], max_work=1_000_000):
            return True
        x = x[0, ...]  # a view, also of one element: the memory may be a GPU's
    return False


def check_out(
    out: Any, shape: tuple[int, ...], dtypes: tuple[str, ...], inputs
) -> None:
    """Refuse an `out` of another shape or dtype, read-only, or self-overlapping.

    `inputs` maps names to the arrays that `out` must not share memory with.
    """
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    if dtype_name(out) not in dtypes:
        raise TypeError(f"out must be {' or '.join(dtypes)}, got {dtype_name(out)}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(_READ_ONLY)
    if overlaps_itself(out):
        raise ValueError(
            "out is a view whose elements share memory, such as a broadcast one; pass "
            "an array in which each element has its own memory"
        )
    for name, x in inputs.items():
        if x is not None and share_memory(out, x):
            raise ValueError(f"out shares memory with {name}; pass a separate array")


class _Addresses:
    """The addresses of an array, as NumPy reads them; memory is never accessed."""

    def __init__(self, x):
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data.ptr, False),
            "shape": x.shape,
            "strides": x.strides,
            "typestr": f"|V{x.itemsize}",
        }


def _addresses(x):
    return np.asarray(_Addresses(x)) if is_cupy(x) else x


def share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays of one kind share an element."""
    if is_cupy(a) and a.data.device_id != b.data.device_id:
        return False
    return _share_memory(_addresses(a), _addresses(b))


def _share_memory(a, b, max_work=10_000):
    if a.size == 0 or b.size == 0:
        return False
    # The exact answer can take long; then the bounds decide.
    try:
        # NumPy's types know two special values of max_work only.
        return np.shares_memory(a, b, max_work=max_work)  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return np.may_share_memory(a, b)


def same_view(a: Any, b: Any) -> bool:
    """Whether two arrays are the same elements in the same order and dtype."""
    pointer = (lambda x: x.data.ptr) if is_cupy(a) else (lambda x: x.ctypes.data)
    return (
        pointer(a) == pointer(b)
        and a.shape == b.shape
        and _steps(a) == _steps(b)
        and a.dtype == b.dtype
    )


def _steps(x):
    """The strides that are ever taken: those of axes of one element may be any."""
    return [s for n, s in zip(x.shape, x.strides, strict=True) if n > 1]


def blocks_of(x: np.ndarray) -> Iterator[np.ndarray]:
    """All numbers of `x`, as vectors of up to 2^16; what is broadcast comes once."""
    once = tuple(slice(None if stride else 1) for stride in x.strides)
    blocks: Any = np.nditer(
        x[once], ("external_loop", "buffered", "zerosize_ok"), buffersize=1 << 16
    )
    yield from (block for block in blocks if block.size)
