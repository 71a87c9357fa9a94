"""A card that is not there, and arrays of any size that take no memory.

What the host computes for a call is the same: plans, grids, parameters and places in
memory. Launches are noted and not made.
"""

import contextlib
import itertools

import numpy as np

# Far above all that is added to it, so that an integer among a launch's arguments that
# lies in an array is a pointer.
_FIRST = 1 << 56


class Card:
    """Takes the place of the device in the package, for one test."""

    def __init__(self, monkeypatch, arch, cupy):
        from cupyflash._cuda import (
            device,
            graphs,
            launch_sequence,
            runtime,
            tensor_map,
        )
        from cupyflash._cuda import launch as _launch

        self.cupy, self.launched, self.maps, self.given = cupy, [], [], []
        self._next = _FIRST
        self.device = device.device_of_arch(arch)
        card = self

        class Encoder:
            def __init__(self, dtype, where, box_rows, box_heads=1):
                card.maps.append(where)

            def __call__(self, ptr):
                return np.zeros(1, tensor_map.MAP)

        def note(launch, *args):
            card.launched.append((launch, args))

        def no_device(*args):
            return contextlib.nullcontext()

        counters = type("Counters", (), {"of_current_stream": lambda self: 0})
        monkeypatch.setattr(runtime, "device", lambda device_id: self.device)
        monkeypatch.setattr(runtime, "current_device", lambda: 0)
        monkeypatch.setattr(_launch.Launch, "enqueue", note)
        monkeypatch.setattr(launch_sequence, "fill", lambda x, value: None)
        monkeypatch.setattr(tensor_map, "Encoder", Encoder)
        monkeypatch.setattr(graphs, "keep_if_capturing", lambda *args: None)
        monkeypatch.setattr(graphs, "_num_devices", lambda: 0)
        monkeypatch.setattr(graphs, "counters", lambda *args: counters())
        monkeypatch.setattr(cupy.cuda, "Device", no_device)
        monkeypatch.setattr(cupy.cuda, "alloc", self._alloc_scratch)

    def _alloc(self, size):
        cupy, start = self.cupy, self._next
        self._next += -(-(size + 1) // 512) * 512
        memory = cupy.cuda.UnownedMemory(start, max(size, 1), None, 0)
        return cupy.cuda.MemoryPointer(memory, 0)

    def _alloc_scratch(self, size):
        pointer = self._alloc(size)
        self.given.append((pointer.ptr, pointer.ptr + size))
        return _Memory(pointer.ptr)

    @contextlib.contextmanager
    def allocates(self):
        """Where arrays are made: in this card's memory, noted in `given`."""

        def alloc(size):
            pointer = self._alloc(size)
            self.given.append((pointer.ptr, pointer.ptr + size))
            return pointer

        with self.cupy.cuda.using_allocator(alloc):
            yield

    def array(self, shape, dtype, shift=0):
        """An array of the caller, `shift` bytes behind a multiple of 512."""
        size = int(np.prod([int(n) for n in shape], dtype=object)) if shape else 1
        size *= np.dtype(dtype).itemsize
        pointer = self._alloc(size + shift)
        return self.cupy.ndarray(shape, dtype, pointer + shift)

    def pointers(self):
        """(launch, pointer) of all that launches were told of memory of the card."""
        for launch, args in self.launched:
            for x in args:
                if type(x) is int and x >= _FIRST:
                    yield launch, x

    def scratch(self):
        """The same of memory that calls took for themselves."""
        for launch, pointer in self.pointers():
            if any(first <= pointer < end for first, end in self.given):
                yield launch, pointer

    def check_launches(self):
        """Assert that the driver and the kernels can take what they were told."""
        for launch, args in self.launched:
            x, y, z, *_ = (*launch.grid, 1, 1)
            for n, most in ((x, 1 << 31), (y, 1 << 16), (z, 1 << 16)):
                assert 1 <= n < most, (launch.variant.source, launch.grid)
            assert np.prod(launch.block) <= 1024
            for arg in args:
                assert (
                    isinstance(arg, bytes)
                    or not hasattr(arg, "__int__")
                    or (-(1 << 63) <= int(arg) < 1 << 63)
                )
        for where in self.maps:  # of cuTensorMapEncodeTiled
            assert all(1 <= n <= 1 << 32 for n in where.sizes), where
            assert all(n % 16 == 0 and n < 1 << 40 for n in where.strides), where


class _Memory:
    """What cupy.cuda.alloc gives."""

    def __init__(self, ptr):
        self.ptr = ptr

    def memset_async(self, value, size):
        pass


def odd_shapes():
    """(batch, (heads, heads of k), queries): products odd and even."""
    return itertools.product(
        (1, 3, 5), ((1, 1), (3, 1), (3, 3), (5, 5), (6, 3)), (1, 3, 17, 64, 65, 257)
    )
