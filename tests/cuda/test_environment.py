"""Hostile surroundings of the compiler, without a GPU: NVRTC and CuPy's cache are real.

What is compiled is not loaded. On a GPU, test_compile.py and gpu/test_threads.py do.
"""

import errno
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

cupy = pytest.importorskip("cupy")

from cupyflash._cli import nvrtc  # noqa: E402
from cupyflash._cuda import compiler as _compiler  # noqa: E402
from cupyflash._cuda import device  # noqa: E402
from cupyflash._softmax.gpu import coverage as softmax_coverage  # noqa: E402

ROOT = Path(_compiler.__file__).resolve().parent.parent

needs_nvrtc = pytest.mark.skipif(bool(nvrtc.unusable()), reason=str(nvrtc.unusable()))

# Of a real row, and small.
VARIANT = next(
    variant
    for row, variant in softmax_coverage.compile_list(
        device.device_of_arch("sm_80"), False
    )
    if row == "safe"
)


class Loaded:
    """In the place of a module on a device."""

    def load(self, cubin):
        self.cubin = cubin

    def _set_mapping(self, mapping):
        pass


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """CuPy's compiler, with a cache folder of its own that is not there yet."""
    found = cupy.cuda.compiler
    backend = type(found._kernel_cache_backend)(str(tmp_path / "cache"))
    monkeypatch.setattr(found, "_kernel_cache_backend", backend)
    monkeypatch.setattr(found, "function", types.SimpleNamespace(Module=Loaded))
    # Which architecture NVRTC is told; CuPy asks a device.
    told = ("-arch=sm_80", "cubin")
    monkeypatch.setattr(found, "_get_arch_for_options_for_nvrtc", lambda arch: told)
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    return found


class Module:
    """As cupy.RawModule, for a device of sm_80 that nothing is loaded on."""

    def __init__(
        self, compiler, text='extern "C" __global__ void k(int* x) { *x = 7; }'
    ):
        self.compiler, self.text = compiler, text

    def get_function(self, entry):
        """Compile now, through the cache."""
        in_memory = self.compiler._get_bool_env_variable("CUPY_CACHE_IN_MEMORY", False)
        module = self.compiler._compile_with_cache_cuda(
            self.text, ("-std=c++17",), "80", cache_in_memory=in_memory
        )
        return types.SimpleNamespace(kernel=module.cubin)


def build(compiler, **text):
    """The machine code, by the way that each kernel goes."""
    return _compiler._build(Module(compiler, **text), VARIANT).kernel


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@needs_nvrtc
def test_compiled_once_and_then_from_the_folder(compiler, tmp_path, monkeypatch):
    first = build(compiler)
    assert files_in(tmp_path / "cache")
    monkeypatch.setattr(compiler, "_compile_using_nvrtc_no_warning", None)
    assert build(compiler) == first


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(*args, **kwargs):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@needs_nvrtc
@pytest.mark.parametrize("step", ["load", "save"])
@pytest.mark.parametrize("trouble", [full, read_only])
def test_a_folder_that_is_full_or_read_only(compiler, monkeypatch, step, trouble):
    """Compiled all the same, with a warning that says what to set."""
    expected = build(compiler, text='extern "C" __global__ void k(int* x) { *x = 8; }')
    monkeypatch.setattr(compiler._kernel_cache_backend, step, trouble, raising=True)
    with pytest.warns(RuntimeWarning, match="Set CUPY_CACHE_DIR") as said:
        got = build(compiler, text='extern "C" __global__ void k(int* x) { *x = 9; }')
    assert os.strerror(errno.ENOSPC if trouble is full else errno.EACCES) in str(
        said[0].message
    )
    assert got[:4] == expected[:4]
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ


@needs_nvrtc
def test_a_file_in_the_place_of_the_folder(compiler, tmp_path):
    folder = tmp_path / "cache"
    if folder.exists():
        folder.rmdir()
    folder.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert build(compiler)


@needs_nvrtc
@pytest.mark.parametrize("damage", ["nonsense", "empty", "cut", "a bit"])
def test_a_corrupt_cache_file_is_compiled_anew(compiler, tmp_path, damage):
    first = build(compiler)
    for path in files_in(tmp_path / "cache"):
        content = path.read_bytes()
        path.write_bytes({
            "nonsense": b"nonsense",
            "empty": b"",
            "cut": content[: len(content) // 2],
            "a bit": content[:-1] + bytes([content[-1] ^ 1]),
        }[damage])  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(compiler) == first


@needs_nvrtc
def test_the_cache_in_memory_writes_no_file(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert build(compiler)
    assert not files_in(tmp_path)
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1"


@pytest.fixture
def new_process(compiler, tmp_path, monkeypatch):
    """What forgets all that this process knows of the compiler."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))

    def forget():
        known = {}
        monkeypatch.setattr(compiler, "_empty_file_preprocess_cache", known)
        monkeypatch.setattr(_compiler, "_version_comments", known)
        _compiler._read_versions.cache_clear()

    forget()
    yield forget
    _compiler._read_versions.cache_clear()


def build_with_version(compiler):
    with _compiler._version_from_disk():
        return build(compiler)


@needs_nvrtc
def test_the_version_of_the_compiler_is_asked_once(
    compiler, new_process, tmp_path, monkeypatch
):
    """Not in each process: a kernel from the folder needs no compiler."""
    first = build_with_version(compiler)
    new_process()
    for step in ("_preprocess", "_compile_using_nvrtc_no_warning"):
        monkeypatch.setattr(compiler, step, None)
    compiler._empty_file_preprocess_cache["of CuPy's own kernels"] = ""
    assert build_with_version(compiler) == first


@needs_nvrtc
@pytest.mark.parametrize("content", [b"", b"{('a', ", b"7", b"\xff\xfe", b"[1, 2]"])
def test_a_corrupt_file_of_the_version_is_written_anew(
    compiler, new_process, tmp_path, content
):
    first = build_with_version(compiler)
    (path,) = tmp_path.glob("cupyflash_nvrtc_*")
    whole = path.read_bytes()
    path.write_bytes(content)
    new_process()
    assert build_with_version(compiler) == first
    assert path.read_bytes() == whole


@needs_nvrtc
def test_no_file_of_the_version_without_a_folder(
    compiler, new_process, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "missing"))
    assert build_with_version(compiler)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    new_process()
    assert build_with_version(compiler)
    assert not list(tmp_path.glob("cupyflash_nvrtc_*"))


@needs_nvrtc
def test_another_nvrtc_is_asked_for_its_version(new_process, tmp_path, monkeypatch):
    """It has another file, by its path, size and time."""
    from cuda import pathfinder

    seen, found = set(), types.SimpleNamespace()
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda _: found)
    for name, content, time in (("a", b"1", 1), ("b", b"1", 1), ("b", b"1", 2),
                                ("b", b"22", 2)):  # fmt: skip
        library = tmp_path / name
        library.write_bytes(content)
        os.utime(library, ns=(time, time))
        found.abs_path = str(library)
        seen.add(_compiler._version_file())
    assert len(seen) == 4
    found.abs_path = str(tmp_path / "missing")
    assert _compiler._version_file() is None


@needs_nvrtc
def test_an_error_of_the_source_is_one_sentence_and_the_log(compiler):
    with pytest.raises(RuntimeError, match="the kernel did not compile") as error:
        build(compiler, text="int broken(")
    assert VARIANT.source in str(error.value)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ImportError("libnvrtc.so.13: cannot open shared object file"), "NVRTC is"),
        (RuntimeError("CuPy failed to load libnvrtc.so.13"), "NVRTC is missing"),
        (OSError("libnvrtc-builtins.so.13.0 not found"), "NVRTC is missing: pip"),
    ],
)
def test_without_nvrtc_the_error_says_what_brings_it(error, hint):
    class Missing:
        def get_function(self, entry):
            raise error

    with pytest.raises(RuntimeError, match=hint) as raised:
        _compiler._build(Missing(), VARIANT)
    assert 'pip install "cupyflash[cuda13x]"' in str(raised.value)


@needs_nvrtc
def test_headers_of_another_cuda(tmp_path):
    """Kernels include none: a folder of wrong ones on the way changes nothing."""
    include = tmp_path / "cuda" / "include"
    include.mkdir(parents=True)
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_runtime.h", "cuda.h", "math.h"):
        (include / name).write_text('#error "of another CUDA"\n')
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    env = os.environ | {
        "CUDA_PATH": str(tmp_path / "cuda"),
        "CUDA_HOME": str(tmp_path / "cuda"),
        "CPATH": str(include),
        "CPLUS_INCLUDE_PATH": str(include),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    program = (
        "from cupyflash._cli import compile_jobs as _compile_jobs, nvrtc as _nvrtc\n"
        "from cupyflash._cuda import device as _kernels\n"
        "jobs = _compile_jobs.jobs_for(_kernels.device_of_arch('sm_80'))\n"
        "of = {job.operation: job for job in jobs}\n"
        "found = [_nvrtc.outcome_of(x, *_nvrtc.find(x)) for x in of.values()]\n"
        "print([outcome.problem for outcome in found])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(eval(done.stdout)) == {""}, done.stdout
