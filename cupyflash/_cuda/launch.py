"""Launches: a compiled kernel, its grid, and its arguments in the driver's format."""

import ctypes
import functools
import struct
from collections.abc import Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import cupy
import numpy as np

from cupyflash._core import arrays
from cupyflash._cuda import compiler
from cupyflash._cuda.device import driver_library
from cupyflash._cuda.kernel import LaunchConfig, Variant

# Null pointers in a kernel's parameter list. Of all representations of 0, CuPy passes
# this one fastest.
NULL = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, 0), 0)


_current_stream = cupy.cuda.get_current_stream

# Launch functions of the driver. CuPy's own launch makes an object for each argument,
# which takes as long as the launch.
_driver = cupy.cuda.driver
_launch_kernel = getattr(_driver, "launchKernel", None)
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
# CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, _COOPERATIVE_LAUNCH_TOO_LARGE and
# _INVALID_CLUSTER_SIZE
_DOES_NOT_FIT = (701, 720, 912)


class DoesNotFitError(RuntimeError):
    """The device cannot hold the blocks of a launch that must run together."""


def _launch_cooperative(*args):
    """Like launchKernel, but without its last parameter."""
    _driver.launchCooperativeKernel(*args[:-1])


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is 64 bytes; here its first number."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int * 16),
    )


class _DriverLaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_OVERLAPS = _LaunchAttribute(6, 0, (ctypes.c_int * 16)(1))


@functools.cache
def _launch_kernel_ex():
    """cuLaunchKernelEx of the CUDA driver, which CuPy lacks."""
    launch = ctypes.CDLL(driver_library()).cuLaunchKernelEx
    launch.argtypes = (
        ctypes.POINTER(_DriverLaunchConfig),
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    return launch


def _launch_overlapping(kernel, gx, gy, gz, bx, by, bz, smem, stream, arguments, extra):
    """Like launchKernel, for a kernel that itself waits for the previous one."""
    config = _DriverLaunchConfig(
        (gx, gy, gz), (bx, by, bz), smem, stream, ctypes.pointer(_OVERLAPS), 1
    )
    status = _launch_kernel_ex()(config, kernel, arguments, extra)
    if status:
        raise _driver.CUDADriverError(status)


class Launch:
    """One kernel with everything but its arguments; compiled at the first call.

    A launch that `overlaps` may start before the previous kernel of the stream ends; it
    calls griddepcontrol_wait, and so must the previous one unless it is the first of a
    call. The first launch of a call loads the kernels `of_call`, all at once.
    """

    def __init__(
        self, config: LaunchConfig, device_id: int, of_call: Sequence[Variant] = ()
    ):
        self.variant = config.variant
        self.of_call = of_call
        self.overlaps = config.overlaps
        self.grid = config.grid
        self.block = config.block
        self.device_id = device_id
        self._kernel = None
        self._enqueue = None
        # Argument lists that no thread is using.
        self._lists: list[Any] = []

    def __call__(self, *args):
        """Enqueue on the current stream of the current device; any types of CuPy's."""
        kernel = self._kernel
        if kernel is None:
            kernel = self._load()
        kernel(
            self.grid,
            self.block,
            args,
            self.variant.smem,
            enable_cooperative_groups=self.variant.cooperative,
        )

    def enqueue(self, *args):
        """Like a call, for arguments that are 64-bit integers or bytes; faster.

        Integers are pointers or numbers, and bytes are structs passed by value. Their
        kinds and sizes are the same in each call.
        """
        if self._enqueue is None and not self._prepare():
            self(*[np.frombuffer(x, f"V{len(x)}") if isinstance(x, bytes) else x
                   for x in args])  # fmt: skip
            return
        try:
            arguments = self._lists.pop()
        except IndexError:
            arguments = _argument_list(args)
        write, address = arguments
        write(*args)
        self._enqueue_at(address)
        self._lists.append(arguments)

    def picking(self, places, fixed):
        """`enqueue` with the arguments at these places among the values of a call.

        The value of a place in `fixed` is the one there, and written only once.
        """
        lists: list[Any] = []
        pick = _picker([place for place in places if place not in fixed])
        written = {n: fixed[place] for n, place in enumerate(places) if place in fixed}

        def enqueue(values):
            try:
                write, address = arguments = lists.pop()
            except IndexError:
                if self._enqueue is None:  # the first call
                    self.enqueue(*[fixed[n] if n in fixed else values[n]
                                   for n in places])  # fmt: skip
                    return
                write, address = arguments = _argument_list(pick(values), written)
            write(*pick(values))
            try:
                self._enqueue(_current_stream(self.device_id).ptr, address, 0)
            except _driver.CUDADriverError:
                self._enqueue_at(address)
            lists.append(arguments)

        return enqueue

    def _enqueue_at(self, address):
        """Launch with the arguments whose addresses start at `address`."""
        try:
            self._enqueue(_current_stream(self.device_id).ptr, address, 0)
        except _driver.CUDADriverError as error:
            if error.status in _DOES_NOT_FIT:
                raise DoesNotFitError(f"{self.variant.source}: {error}") from None
            if error.status != _INVALID_CONTEXT:
                raise
            # This thread uses the device for the first time.
            cupy.cuda.runtime.setDevice(self.device_id)
            self._enqueue(_current_stream(self.device_id).ptr, address, 0)

    def _load(self):
        compiler.get_kernels(self.of_call, self.device_id)
        self._kernel = compiler.get_kernel(self.variant, self.device_id)
        return self._kernel

    def _prepare(self):
        """Prepare the driver's launch function; False if this CuPy lacks it."""
        if _launch_kernel is None:
            return False
        launch = _launch_kernel
        if self.variant.cooperative:
            launch = _launch_cooperative
        elif self.overlaps:
            launch = _launch_overlapping
        self._enqueue = functools.partial(
            launch,
            self._load().ptr,
            *(*self.grid, 1, 1)[:3],
            *(*self.block, 1, 1)[:3],
            self.variant.smem,
        )
        return True


def describe(launch: Launch) -> dict[str, Any]:
    """A launch in words, for explain()."""
    variant = launch.variant
    return {
        "source": f"cuda_src/{variant.source}",
        "grid": launch.grid,
        "block": launch.block,
        **({"cluster": variant.cluster} if variant.cluster > 1 else {}),
        "shared memory": variant.smem,
        "defines": " ".join(f"{name}={value}" for name, value in variant.defines),
    }


def _picker(places):
    """The function that takes these of the values of a call."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[place] for place in places]


def _argument_list(varying, fixed=MappingProxyType({})):
    """Memory for arguments, after the address of each, in the driver's format.

    Returns what writes arguments like `varying`, and where the addresses start; those
    of `fixed`, by position, are written. For one launch at a time, since other threads
    run while the driver reads it.
    """
    # In memory the fixed ones come last; the driver finds them by address.
    args = (*varying, *fixed.values())
    order = [n for n in range(len(args)) if n not in fixed] + list(fixed)
    words = [-(-len(x) // 8) if isinstance(x, bytes) else 1 for x in args]
    formats = [f"{8 * n}s" if isinstance(x, bytes) else "q"
               for x, n in zip(args, words, strict=True)]  # fmt: skip
    count, num_varying = len(args), len(varying)
    # Python finds the memory of a bytearray faster than that of an array.
    memory = bytearray(8 * (count + sum(words)))
    table = np.frombuffer(memory, np.int64)
    address = table.ctypes.data
    starts = count + np.cumsum([0, *words])
    table[order] = address + 8 * starts[:-1]

    def writer(formats, at):  # which holds the memory
        form = struct.Struct("".join(formats))
        return functools.partial(form.pack_into, memory, 8 * int(at))

    writer(formats[num_varying:], starts[num_varying])(*fixed.values())
    return writer(formats[:num_varying], count), address


def empty(shape, dtype: str):
    """Uninitialized memory from CuPy's current allocator, on the current device."""
    return cupy.empty(shape, arrays.to_dtype(dtype))
