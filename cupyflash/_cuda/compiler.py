"""Compiles text and options to a loaded kernel, and caches it."""

import ast
import contextlib
import functools
import hashlib
import os
import tempfile
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path

import cupy

from cupyflash._core import extras, threads
from cupyflash._cuda import graphs, source
from cupyflash._cuda.kernel import Variant

# One per kernel, so that the kernels of one call compile in parallel.
_locks: dict[tuple[Variant, int], threading.Lock] = {}

# Clusters of up to 8 blocks run on any device that has clusters; larger ones must be
# allowed: CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED.
_PORTABLE_CLUSTER = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


def get_kernel(variant: Variant, device_id: int):
    """The loaded kernel of `variant` on a device, which must be the current one."""
    # One compilation for all threads that need it at once.
    with _locks.setdefault((variant, device_id), threading.Lock()):
        return _load(variant, device_id)


def get_kernels(variants: Iterable[Variant], device_id: int) -> None:
    """Load several at once, each in a thread: the compiler does not hold the GIL.

    So the first call of a sequence takes as long as its slowest kernel, not as all
    together.
    """
    new = [v for v in dict.fromkeys(variants) if (v, device_id) not in _locks]
    if len(new) < 2 or graphs.is_capturing():
        return  # the launch loads them, or reports the error
    from concurrent.futures import ThreadPoolExecutor  # late: many calls do without

    def load(variant):
        with cupy.cuda.Device(device_id):
            get_kernel(variant, device_id)

    with ThreadPoolExecutor(min(len(new), threads.num_cores())) as pool:
        for found in [pool.submit(load, variant) for variant in new]:
            found.result()


@functools.cache
def _load(variant, device_id):
    if graphs.is_capturing():
        raise RuntimeError(
            f"{variant.source} is not compiled yet, and cannot be while a CUDA graph "
            "is captured: make the same call once before the capture, as a warm-up"
        )
    # For each new set of options, CuPy compiles an empty file first, which takes as
    # long as a kernel from the cache. So defines are part of the text.
    text = variant.prelude + source.load(variant.source, variant.generated)
    module = cupy.RawModule(code=text, options=variant.flags)
    with _version_from_disk():
        kernel = _build(module, variant)
    if variant.smem:
        _allow_shared_memory(kernel, variant.smem)
    if variant.cluster > _PORTABLE_CLUSTER:
        cupy.cuda.driver.funcSetAttribute(
            kernel.kernel.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
        )
    # The underlying Function launches without the look-ups of RawKernel.
    return kernel.kernel


# The most dynamic shared memory of each function of the driver, and who holds it.
_allowed: dict[int, tuple[int, object]] = {}
_allowing = threading.Lock()


def _allow_shared_memory(kernel, size):
    """Allow `size` bytes, as is needed from 48 KiB on with static memory.

    For CuPy, variants of the same text are one function: none of them takes back what
    another one needs.
    """
    function = kernel.kernel
    with _allowing:
        if _allowed.get(function.ptr, (0, None))[0] < size:
            kernel.max_dynamic_shared_size_bytes = size
            _allowed[function.ptr] = size, function


# Before CuPy looks into its cache it compiles an empty file, in each process and for
# each set of options, since the comments of the result tell the version of the
# compiler. It keeps them here.
_version_comments = getattr(cupy.cuda.compiler, "_empty_file_preprocess_cache", None)


@contextlib.contextmanager
def _version_from_disk():
    """Let CuPy compile no empty file if an earlier process did, with the same NVRTC."""
    path = _version_file()
    if path is None:
        yield
        return
    _read_versions(path)
    before = len(_version_comments)
    yield
    if len(_version_comments) > before:
        with contextlib.suppress(OSError):
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, delete=False
            ) as file:
                file.write(repr(dict(_version_comments)))
            os.replace(file.name, path)


@functools.cache
def _read_versions(path):
    with contextlib.suppress(OSError, ValueError, SyntaxError, TypeError):
        _version_comments.update(ast.literal_eval(path.read_text("utf-8")))


def _version_file():
    """The file for the version of this NVRTC, in CuPy's cache; None if unknown."""
    if not isinstance(_version_comments, dict) or os.environ.get(
        "CUPY_CACHE_IN_MEMORY"
    ):
        return None
    try:
        from cuda import pathfinder

        library = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
        facts = library.stat()
    except (ImportError, OSError, RuntimeError, TypeError):
        return None
    identity = repr((str(library), facts.st_size, facts.st_mtime_ns, cupy.__version__))
    folder = os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")
    name = f"cupyflash_nvrtc_{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    return Path(folder).expanduser() / name


def _build(module, variant):
    """Compile and load; errors are explained in one sentence."""
    try:
        try:
            return _get_function(module, variant)
        except OSError as error:
            if error.errno is None:  # not from the file system: a library is missing
                raise
            with _cache_in_memory(error):
                return _get_function(module, variant)
    except (
        cupy.cuda.compiler.CompileException,
        ImportError,  # no NVRTC
        OSError,
        RuntimeError,  # the driver does not know the code that NVRTC generated
    ) as error:
        raise RuntimeError(_explain(error, variant)) from None


def _get_function(module, variant):
    kernel = module.get_function(variant.entry)
    _ = kernel.kernel  # compiles and loads now
    return kernel


@contextlib.contextmanager
def _cache_in_memory(error):
    """Let CuPy compile without its cache folder, which is unusable."""
    warnings.warn(
        f"the kernel cache folder cannot be used ({error}); kernels are compiled anew "
        "in each process. Set CUPY_CACHE_DIR to a writable folder",
        RuntimeWarning,
        stacklevel=2,
    )
    before = os.environ.get("CUPY_CACHE_IN_MEMORY")
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUPY_CACHE_IN_MEMORY"]
        else:
            os.environ["CUPY_CACHE_IN_MEMORY"] = before


def _explain(error, variant):
    text = str(error)
    lower = text.lower()
    if "cannot open source file" in lower or "could not open source file" in lower:
        hint = f"CUDA headers are missing: {extras.CUDA} installs them"
    elif "nvrtc" in lower and ("libnvrtc" in lower or "not found" in lower):
        hint = f"NVRTC is missing: {extras.CUDA} installs it"
    elif "unsupported_ptx" in lower or "no_binary" in lower:
        hint = (
            "the NVIDIA driver is older than the CUDA toolkit of this CuPy: update the "
            "driver, or install the extra for its CUDA version"
        )
    else:
        hint = "the kernel did not compile"
    return f"{variant.source}: {hint}\n{text}"
