"""Launches: a compiled kernel, its grid, and its arguments in the driver's format."""

import ctypes
import functools
import struct
from collections.abc import Sequence
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


current_stream = cupy.cuda.get_current_stream

# Launch functions of the driver. CuPy's own launch makes an object for each argument,
# which takes as long as the launch.
_driver = cupy.cuda.driver
_launch_kernel = getattr(_driver, "launchKernel", None)
DriverError = _driver.CUDADriverError
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
    launch.argtypes = (ctypes.c_void_p,) * 4
    return launch


class _LaunchOverlapping:
    """Like launchKernel, for a kernel that itself waits for the previous one."""

    def __init__(self, kernel, gx, gy, gz, bx, by, bz, smem):
        self._kernel, self._launch = kernel, _launch_kernel_ex()
        self._shape = (gx, gy, gz), (bx, by, bz), smem
        # Driver structs that no thread is using.
        self._configs: list[Any] = []

    def __call__(self, stream, arguments, extra):
        try:
            config, address = found = self._configs.pop()
        except IndexError:
            config = _DriverLaunchConfig(*self._shape, 0, ctypes.pointer(_OVERLAPS), 1)
            address = ctypes.addressof(config)
            found = config, address
        config.stream = stream
        status = self._launch(address, self._kernel, arguments, extra)
        if status:
            raise DriverError(status)
        self._configs.append(found)


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
        self._start: Any = None  # what launches, and its first arguments
        # Memory for arguments that no thread is using.
        self._free: list[Any] = []

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
        if self._start is None and not self._prepare():
            self(*[np.frombuffer(x, f"V{len(x)}") if isinstance(x, bytes) else x
                   for x in args])  # fmt: skip
            return
        try:
            memory = self._free.pop()
        except IndexError:
            memory = argument_memory(args, len(args), [range(len(args))])
        write, buffer, first, address = memory
        write(buffer, first, *args)
        stream = current_stream(self.device_id).ptr
        try:
            start, *first = self._start
            start(*first, stream, address, 0)
        except DriverError as error:
            self.start_again(error, stream, address)
        self._free.append(memory)

    def starter(self) -> tuple[Any, ...] | None:
        """The driver's launch: a function and its arguments before the last three.

        These are the stream, the address of a list of addresses of arguments, and 0.
        Errors go to `start_again`. None before the first `enqueue`, and if this CuPy
        has no such function.
        """
        return self._start

    def start_again(self, error, stream, address):
        """Launch after an error that may have its reason in the thread, or raise it."""
        if error.status in _DOES_NOT_FIT:
            raise DoesNotFitError(f"{self.variant.source}: {error}") from None
        if error.status != _INVALID_CONTEXT:
            raise error
        # This thread uses the device for the first time.
        cupy.cuda.runtime.setDevice(self.device_id)
        start, *first = self._start
        start(*first, stream, address, 0)

    def _load(self):
        compiler.get_kernels(self.of_call, self.device_id)
        self._kernel = compiler.get_kernel(self.variant, self.device_id)
        return self._kernel

    def _prepare(self):
        """Prepare the driver's launch function; False if this CuPy lacks it."""
        if _launch_kernel is None:
            return False
        shape = (*self.grid, 1, 1)[:3] + (*self.block, 1, 1)[:3]
        arguments = self._load().ptr, *shape, self.variant.smem
        if self.overlaps and not self.variant.cooperative:
            self._start = (_LaunchOverlapping(*arguments),)
        else:
            launch = _launch_cooperative if self.variant.cooperative else _launch_kernel
            self._start = launch, *arguments
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


def argument_memory(values, num_varying, launches):
    """Memory for the arguments of launches that follow each other, as the driver reads.

    `launches` has the position of each argument of a launch among `values`, which are
    like those of all calls. The first `num_varying` change from call to call, the
    others are written here. Returns (what writes those that change, the memory, where
    in it they start, and for each launch the address of its list of addresses). For one
    call at a time, since other threads run while the driver reads.
    """
    words = [-(-len(x) // 8) if isinstance(x, bytes) else 1 for x in values]
    formats = [f"{8 * n}s" if isinstance(x, bytes) else "n"
               for x, n in zip(values, words, strict=True)]  # fmt: skip
    addresses = [place for places in launches for place in places]
    # Python finds the memory of a bytearray faster than that of an array.
    memory = bytearray(8 * (len(addresses) + sum(words)))
    table = np.frombuffer(memory, np.int64)
    starts = 8 * (len(addresses) + np.cumsum([0, *words]))
    table[: len(addresses)] = table.ctypes.data + starts[addresses]
    lists = table.ctypes.data + 8 * np.cumsum([0, *map(len, launches)])[:-1]
    struct.pack_into(
        "".join(formats[num_varying:]), memory, starts[num_varying],
        *values[num_varying:],
    )  # fmt: skip
    write = struct.Struct("".join(formats[:num_varying])).pack_into
    return write, memory, 8 * len(addresses), *lists.tolist()


def empty(shape, dtype: str):
    """Uninitialized memory from CuPy's current allocator, on the current device."""
    return cupy.empty(shape, arrays.to_dtype(dtype))
