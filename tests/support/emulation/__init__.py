"""Every public call on emulated CUDA kernels, on a machine without a GPU.

    import emulation                    # tests/support on the path
    cupy = emulation.install("sm_80")   # first of all: what `import cupy` finds now
    x = cupy.asarray(numpy_array)
    cupyflash.attention(x, x, x).get()

    python tests/support/emulation/run.py --arch sm_80 --rows attention/mma_short

The package is the true one: dispatch, plan, launches and the kernels' own text. Only
what lies below is replaced: CuPy by `stand_in.py`, whose arrays lie in host memory, and
the headers of cuda_src/ptx/ and CUDA's own words by C++ (`ptx/`, `language.h`), so that
g++ makes a library of a kernel. `runtime.cpp` runs its threads as fibers, block by
block.

What a kernel may not do ends its launch with an error that names the kernel, and mostly
block and thread: touching what is not its memory, accesses that are not aligned,
barriers that not all come to, lanes of a warp at different places, threads that wait
for ever. Memory is poisoned before it is written (0xff: NaN, -1), shared memory too,
and the target of a cp.async until it is waited for. CUPYFLASH_EMULATION_ORDER=last lets
threads run in the opposite order, which shows what a missing barrier leaves to luck.

It says nothing about speed, registers, or accesses of two threads that meet by time
alone; sums of tensor cores are a little more exact than theirs.

In a process where CuPy or cupyflash's GPU modules were imported before, it is too late.
"""

import dataclasses
import functools
import sys

from cupyflash._cuda.device import Device, device_of_arch

from . import compile as _compile

missing = _compile.missing


def install(card="sm_90a", num_sms=None):
    """Make `import cupy` the emulation of a card; return that module.

    `card` is an architecture or a Device. With few multiprocessors (`num_sms`) kernels
    that fill the card do with small problems.
    """
    if (why := missing()) is not None:
        raise RuntimeError(why)
    late = [name for name in sys.modules if name.partition(".")[0] == "cupy"]
    if late:
        raise RuntimeError("install() comes before the first import of cupy")
    from . import stand_in

    card = card if isinstance(card, Device) else device_of_arch(card)
    if num_sms is not None:
        card = dataclasses.replace(card, num_sms=num_sms)
    cupy = stand_in.make(card)
    from cupyflash._cuda import graphs, launch, source, tensor_map

    source.CUDA_SRC = _compile.Sources()
    source.load.cache_clear()
    launch._LaunchOverlapping = functools.partial(
        functools.partial, launch._launch_kernel
    )
    graphs._driver = _Driver
    tensor_map._driver = lambda: _encode
    return cupy


class _Driver:
    """What cupyflash calls of the driver itself."""

    @staticmethod
    def cuThreadExchangeStreamCaptureMode(mode):
        return 1


def _encode(target, kind, axes, ptr, sizes, strides, box, steps, *how):
    """A tensor map that ptx/tma.cuh reads."""
    import ctypes

    import numpy as np

    if ptr.value % 16 or any(step % 16 for step in strides):
        return 1  # CUDA_ERROR_INVALID_VALUE
    words = np.zeros(16, np.uint64)
    words[0] = ptr.value
    words[1:6] = list(sizes)
    words[6:10] = list(strides)
    words[10:13].view(np.uint32)[:5] = list(box)
    words[13] = how[1]  # the swizzle
    words[14] = getattr(kind, "value", kind)
    ctypes.memmove(target, words.ctypes.data, words.nbytes)
    return 0
