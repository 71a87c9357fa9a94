"""Memory of the emulated device: between pages that nobody may touch, and poisoned."""

import ctypes
import mmap
import weakref

import numpy as np

POISON = 0xFF  # in every byte: NaN as a float, -1 as an integer
_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


_alive: "weakref.WeakSet[Memory]" = weakref.WeakSet()


class Memory:
    """Bytes of one allocation.

    In front of them and behind their last page lie pages that stop who touches them;
    what was written to the rest of the last page, `check` finds.
    """

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes
        pages = max(-(-num_bytes // _PAGE), 1) * _PAGE
        self._all = pages + 2 * _PAGE
        read_write, private_anonymous = mmap.PROT_READ | mmap.PROT_WRITE, 0x22
        self._start = _libc.mmap(None, self._all, read_write, private_anonymous, -1, 0)
        if self._start in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"{num_bytes} bytes")
        self.ptr = self._start + _PAGE
        _libc.mprotect(self._start, _PAGE, 0)
        _libc.mprotect(self.ptr + pages, _PAGE, 0)
        ctypes.memset(self.ptr, POISON, pages)
        self._rest = np.asarray(_Bytes(self.ptr + num_bytes, pages - num_bytes))
        _alive.add(self)

    def __del__(self, munmap=_libc.munmap):
        if getattr(self, "_start", None):
            munmap(self._start, self._all)

    def check(self):
        """Refuse what was written behind the end."""
        at = np.flatnonzero(self._rest != POISON)
        if at.size:
            self._rest[...] = POISON
            raise RuntimeError(
                f"byte {at[0]} behind the {self.num_bytes} bytes of an array was "
                "written to"
            )


def check_all():
    """Refuse what was written behind the end of any memory there is."""
    for memory in list(_alive):
        memory.check()


class _Bytes:
    """Bytes at an address, as NumPy reads them; `owner` is kept."""

    def __init__(self, ptr, size, owner=None):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (ptr, False),
            "shape": (size,),
            "typestr": "|u1",
        }


def array_at(ptr, shape, dtype, strides, owner):
    """A NumPy array at an address."""
    dtype = np.dtype(dtype)
    if strides is None:
        strides, step = [], dtype.itemsize
        for n in reversed(shape):
            strides.insert(0, step)
            step *= n
    # NumPy takes a null pointer as a wish for memory of its own.
    holder = _Bytes(ptr or _PAGE, 0, owner)
    holder.__array_interface__ |= {
        "shape": tuple(shape),
        "strides": tuple(strides),
        "typestr": f"|V{dtype.itemsize}",
    }
    return np.asarray(holder).view(dtype)
