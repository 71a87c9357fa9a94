"""A module that stands in for CuPy: its arrays lie in host memory, its kernels are C++.

It has what cupyflash and its tests call, and no more. Operations on arrays are NumPy's.
"""

import contextlib
import ctypes
import functools
import os
import sys
import types

import numpy as np

from . import compile as compile_cpp
from .memory import Memory, array_at, check_all


class MemoryPointer:
    """A place in device memory."""

    def __init__(self, mem, offset, ptr=None):
        self.mem = mem
        self.ptr = (mem.ptr if ptr is None else ptr) + offset
        self.device_id = 0
        self.device = _DEVICE

    def __add__(self, offset):
        return MemoryPointer(self.mem, offset, self.ptr)

    def memset_async(self, value, size, stream=None):
        ctypes.memset(self.ptr, value, size)

    memset = memset_async


class UnownedMemory:
    """Memory of someone else."""

    def __init__(self, ptr, size, owner, device_id=0):
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


def alloc(size):
    """New memory, poisoned."""
    return MemoryPointer(Memory(size), 0)


def _host(x):
    """What NumPy works with in place of `x`."""
    if isinstance(x, ndarray):
        return x._host
    if isinstance(x, (list, tuple)):
        return type(x)(map(_host, x))
    if isinstance(x, dict):
        return {name: _host(value) for name, value in x.items()}
    return x


def _device(x):
    """Results of NumPy as arrays of the device; scalars are arrays of no axes."""
    if isinstance(x, (np.ndarray, np.generic)):
        return _wrapped(np.asarray(x))
    if isinstance(x, tuple):
        return tuple(map(_device, x))
    if isinstance(x, list):
        return list(map(_device, x))
    return x


def _wrapped(x):
    made = object.__new__(ndarray)
    made._host = x if _is_ours(x) else _copied(x)
    return made


def _copied(x):
    """`x` in memory of the device, its axes in the order that they have."""
    order = sorted(range(x.ndim), key=lambda a: -abs(x.strides[a]))
    ordered = x.transpose(order)
    memory = Memory(x.nbytes)
    target = array_at(memory.ptr, ordered.shape, x.dtype, None, memory)
    if x.size:
        _words(target)[...] = _words(np.ascontiguousarray(ordered))
    return target.transpose(np.argsort(order)) if x.ndim else target.reshape(())


def _words(x):
    """Bits, which travel without a cast."""
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def _is_ours(x):
    """Whether an array of NumPy lies in memory of the device."""
    while isinstance(x, np.ndarray):
        x = x.base
    return x is not None and hasattr(x, "owner")


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of the emulated device."""

    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if isinstance(shape, int) else tuple(map(int, shape))
        dtype = np.dtype(dtype)
        if memptr is None:
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            memptr = alloc(size)
        if order == "F" and strides is None:
            self._host = array_at(memptr.ptr, shape[::-1], dtype, None, memptr.mem).T
            return
        self._host = array_at(memptr.ptr, shape, dtype, strides, memptr.mem)
        if memptr.ptr == 0:
            self._null = True

    @property
    def data(self):
        ptr = self._host.__array_interface__["data"][0]
        return MemoryPointer(self._host, 0, 0 if hasattr(self, "_null") else ptr)

    @property
    def _c_contiguous(self):  # a part of the key of plans
        return self._host.flags.c_contiguous

    @property
    def device(self):
        return _DEVICE

    @property
    def base(self):
        return None if self._host.base is None else self._host.base

    @property
    def T(self):
        return _wrapped(self._host.T)

    def get(self, *_, **__):
        return np.array(self._host, order="K")

    def item(self, *args):
        return self._host.item(*args)

    def tolist(self):
        return self._host.tolist()

    def set(self, values):
        self._host[...] = values

    def copy(self, order="C"):
        return _wrapped(self._host.copy(order))

    def astype(self, dtype, order="K", copy=True):
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return _wrapped(self._host.astype(dtype, order))

    def __getattr__(self, name):
        if name in ("_host", "_null") or name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._host, name)
        if not callable(found):
            return _device(found) if isinstance(found, np.ndarray) else found

        @functools.wraps(found)
        def method(*args, **kwargs):
            return _device(found(*_host(args), **_host(kwargs)))

        return method

    def __getitem__(self, key):
        key = _host(key)
        keys = key if isinstance(key, tuple) else (key,)
        if not any(k is Ellipsis for k in keys):
            keys = (*keys, Ellipsis)  # so that one element is a view, too
        return _wrapped(self._host[keys])

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("an array of the host is no value for one of the device")
        self._host[_host(key)] = _host(value)

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if any(isinstance(x, np.ndarray) and x.ndim for x in inputs):
            raise TypeError("an array of the host beside one of the device")
        out = kwargs.pop("out", None)
        if out is not None:
            kwargs["out"] = _host(out)
        with np.errstate(all="ignore"):
            found = getattr(ufunc, method)(*_host(inputs), **_host(kwargs))
        return out[0] if out is not None else _device(found)

    def __array_function__(self, function, types, args, kwargs):
        with np.errstate(all="ignore"):
            return _device(function(*_host(args), **_host(kwargs)))

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (self[n] for n in range(len(self)))

    def __bool__(self):
        return bool(self._host)

    def __int__(self):
        return int(self._host)

    def __float__(self):
        return float(self._host)

    def __index__(self):
        return self._host.__index__()

    def __repr__(self):
        return repr(self._host)


def asarray(x, dtype=None, order=None, **_):
    if isinstance(x, ndarray) and (dtype is None or x.dtype == dtype):
        return x
    return _wrapped(np.array(_host(x), dtype, order=order or "K"))


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def _filled(value):
    def make(shape, dtype=float, order="C"):
        x = ndarray(shape, dtype, order=order)
        x._host[...] = value
        return x

    return make


def full(shape, value, dtype=None):
    value = _host(value)
    x = ndarray(shape, np.asarray(value).dtype if dtype is None else dtype)
    x._host[...] = value
    return x


def asnumpy(x):
    return x.get() if isinstance(x, ndarray) else np.asarray(x)


def from_dlpack(x):
    return asarray(x)


class Device:
    """The one device."""

    def __init__(self, device_id=0):
        self.id = device_id

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def use(self):
        pass

    def synchronize(self):
        pass

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return self.id


_DEVICE = Device(0)


class Stream:
    """A stream; each call is done when it comes back."""

    def __init__(self, null=True, non_blocking=False, ptds=False):
        self.ptr, self.done = 0, True
        self.device_id = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        pass


Stream.null = Stream()
Stream.ptds = Stream.null


class CompileException(Exception):
    pass


class CUDADriverError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"CUDA driver error {status}")
        self.status = status


class KernelError(RuntimeError):
    """What a kernel did that no kernel may do."""


# Kernels by the number that stands for them.
_kernels = {}
launched = []  # (entry, defines) of all that ran, in order
ORDER = os.environ.get("CUPYFLASH_EMULATION_ORDER", "first")


class _Dim(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("grid", _Dim),
        ("block", _Dim),
        ("smem", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("all_at_once", ctypes.c_int),
        ("last_first", ctypes.c_int),
        ("reserved", ctypes.c_void_p),
    )


def _run(ptr, grid, block, smem, arguments, is_cooperative=False):
    entry, launch_kernel, limit = _kernels[ptr]
    if smem > max(limit(), 48 << 10):
        raise CUDADriverError(1)
    launch = _Launch(
        entry.encode(), _Dim(*grid), _Dim(*block), smem, 1, is_cooperative,
        ORDER == "last", None,
    )  # fmt: skip
    launched.append(entry)
    wrong = launch_kernel(ctypes.byref(launch), ctypes.c_void_p(arguments))
    if wrong:
        _reset_counters()
        raise KernelError(compile_cpp.with_line(wrong.decode()))
    check_all()


def _reset_counters():
    """Counters as a kernel leaves them that comes to its end."""
    graphs = sys.modules.get("cupyflash._cuda.graphs")
    if graphs is not None:
        for counters in graphs._counters.values():
            for block in counters._blocks:
                block[...] = 0


class _Function:
    """A loaded kernel, as the driver knows it."""

    def __init__(self, entry, launch_kernel):
        self.ptr = len(_kernels) + 1
        self.max_dynamic = 0
        _kernels[self.ptr] = entry, launch_kernel, lambda: self.max_dynamic

    def __call__(self, grid, block, args, smem=0, enable_cooperative_groups=False, **_):
        holders = [_argument(x) for x in args]
        addresses = (ctypes.c_void_p * max(len(holders), 1))(
            *[h.ctypes.data for h in holders]
        )
        _run(
            self.ptr, (*grid, 1, 1)[:3], (*block, 1, 1)[:3], smem,
            ctypes.addressof(addresses), enable_cooperative_groups,
        )  # fmt: skip


def _argument(x):
    """An argument of any type of CuPy's, as bytes."""
    if isinstance(x, ndarray):
        x = x.data.ptr
    if isinstance(x, MemoryPointer):
        x = x.ptr
    if isinstance(x, bool):
        return np.array([x])
    if isinstance(x, int):
        return np.array([x], np.int64)
    return np.atleast_1d(np.asarray(x)).copy()


@functools.cache
def _function(text, entry, cc):
    """As in CuPy, one of each text."""
    return _Function(entry, compile_cpp.kernel(text, entry, cc))


class RawKernel:
    def __init__(self, text, entry, cc):
        self._text, self._entry, self._cc = text, entry, cc

    @functools.cached_property
    def kernel(self):
        return _function(self._text, self._entry, self._cc)

    @property
    def max_dynamic_shared_size_bytes(self):
        return self.kernel.max_dynamic

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size):
        self.kernel.max_dynamic = size

    def __call__(self, *args, **kwargs):
        return self.kernel(*args, **kwargs)


def _driver_module():
    driver = types.ModuleType("cupy.cuda.driver")

    def launch_kernel(ptr, gx, gy, gz, bx, by, bz, smem, stream, arguments, extra):
        _run(ptr, (gx, gy, gz), (bx, by, bz), smem, arguments)

    def launch_cooperative(ptr, gx, gy, gz, bx, by, bz, smem, stream, arguments):
        _run(ptr, (gx, gy, gz), (bx, by, bz), smem, arguments, True)

    driver.launchKernel = launch_kernel
    driver.launchCooperativeKernel = launch_cooperative
    driver.CUDADriverError = CUDADriverError
    driver.funcSetAttribute = lambda *_: None
    return driver


def make(card):
    """The module `cupy` for a card, a Device of cupyflash."""
    cupy = types.ModuleType("cupy")

    class RawModule:
        def __init__(self, code, options=(), **_):
            self._text = code

        def get_function(self, entry):
            return RawKernel(self._text, entry, card.cc)

    cupy.ndarray, cupy.RawModule, cupy.RawKernel = ndarray, RawModule, RawKernel
    cupy.asarray = cupy.array = asarray
    cupy.empty, cupy.full, cupy.asnumpy = empty, full, asnumpy
    cupy.zeros, cupy.ones = _filled(0), _filled(1)
    cupy.from_dlpack = from_dlpack
    cupy.is_available = lambda: True
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(
        free_all_blocks=lambda: None
    )
    cupy.__version__ = "0 (emulation)"

    def of_numpy(name):
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            return found

        @functools.wraps(found)
        def function(*args, **kwargs):
            with np.errstate(all="ignore"):
                return _device(found(*_host(args), **_host(kwargs)))

        return function

    cupy.__getattr__ = of_numpy
    cuda = cupy.cuda = types.ModuleType("cupy.cuda")
    cuda.driver = _driver_module()
    cuda.MemoryPointer, cuda.UnownedMemory = MemoryPointer, UnownedMemory
    cuda.Device, cuda.Stream, cuda.alloc = Device, Stream, alloc
    cuda.get_current_stream = lambda device_id=-1: Stream.null
    cuda.get_allocator = lambda: alloc
    cuda.using_allocator = lambda allocator: contextlib.nullcontext()
    cuda.nvrtc = types.SimpleNamespace(getVersion=lambda: card.nvrtc)
    cuda.compiler = types.SimpleNamespace(CompileException=CompileException)
    runtime = cuda.runtime = types.ModuleType("cupy.cuda.runtime")
    runtime.getDevice = lambda: 0
    runtime.setDevice = lambda device_id: None
    runtime.getDeviceCount = lambda: 1
    runtime.deviceSynchronize = lambda: None
    runtime.streamIsCapturing = lambda ptr: False
    runtime.getDeviceProperties = lambda device_id: {
        "name": card.name.encode(),
        "major": card.cc[0],
        "minor": card.cc[1],
        "multiProcessorCount": card.num_sms,
        "sharedMemPerBlockOptin": card.smem_optin,
        "l2CacheSize": card.l2_bytes,
    }
    random = cupy.random = types.ModuleType("cupy.random")
    random.RandomState = _RandomState
    for module in (cupy, cuda, cuda.driver, runtime, random):
        sys.modules[module.__name__] = module
    return cupy


class _RandomState:
    def __init__(self, seed=None):
        self._state = np.random.RandomState(seed)

    def __getattr__(self, name):
        found = getattr(self._state, name)
        return lambda *args, **kwargs: _device(
            found(*args, **{n: x for n, x in kwargs.items() if n != "dtype"})
        )
