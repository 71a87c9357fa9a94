"""Compiling and loading: what goes wrong is said in one sentence."""

import dataclasses
import threading

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from cupyflash._cuda import compiler as _compiler  # noqa: E402
from cupyflash._cuda import launch as _launch  # noqa: E402
from cupyflash._cuda import plan_cache, runtime  # noqa: E402
from cupyflash._cuda import source as _source  # noqa: E402
from cupyflash._cuda.kernel import LaunchConfig, Variant  # noqa: E402

KERNEL = 'extern "C" __global__ void k(int* x) { *x = 7; }\n'


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("libnvrtc.so.13: cannot open shared object file", "NVRTC is missing: pip"),
        (
            "k.cu(1): cannot open source file cuda_fp16.h",
            "CUDA headers are missing: pip",
        ),
        ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the NVIDIA driver is older than the"),
        ("CUDA_ERROR_NO_BINARY_FOR_GPU", "the NVIDIA driver is older than the"),
        ("k.cu(3): error: expected a ;", "the kernel did not compile"),
        ("ptx/a.cuh(17): error: unsupported", "the kernel did not compile"),
    ],
)
def test_errors_are_explained(error, hint):
    text = _compiler._explain(RuntimeError(error), Variant("softmax/k.cu", "k"))
    assert text.startswith("softmax/k.cu: ")
    assert hint in text
    assert error in text


def test_a_card_that_is_too_old(monkeypatch):
    properties = {
        "major": 7, "minor": 0, "name": b"Tesla V100", "multiProcessorCount": 80,
        "sharedMemPerBlockOptin": 98304, "l2CacheSize": 0,
    }  # fmt: skip
    monkeypatch.setattr(
        cupy.cuda.runtime, "getDeviceProperties", lambda device: properties
    )
    with pytest.raises(RuntimeError, match=r"Tesla V100.*compute capability 7\.0") as e:
        runtime.device.__wrapped__(0)
    assert "needs 7.5" in str(e.value)
    assert "cupy.asnumpy" in str(e.value)


def test_nvrtc_that_cannot_be_loaded(monkeypatch):
    def missing():
        raise RuntimeError("CuPy failed to load libnvrtc.so.13\nand more")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", missing)
    with pytest.raises(
        RuntimeError, match=r"NVRTC, CUDA's run-time compiler.*libnvrtc"
    ):
        runtime._nvrtc_version()


def test_plans_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 3)
    plans = plan_cache.PlanCache()
    for number in range(10):
        plans.put(number, str(number))
        assert plans.get(number) == str(number)
    assert plans.get(0) is None
    assert sum(plans.get(n) is not None for n in range(10)) <= 3


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """CuPy's kernel cache in a folder of its own (CuPy reads the variable once)."""
    folder = tmp_path / "cache"
    compiler = cupy.cuda.compiler
    backend = type(compiler._kernel_cache_backend)(str(folder))
    monkeypatch.setattr(compiler, "_kernel_cache_backend", backend)
    return folder


@pytest.fixture
def source(tmp_path, monkeypatch):
    """write(text) puts k.cu into a folder in the place of cuda_src/."""
    monkeypatch.setattr(_source, "CUDA_SRC", tmp_path)
    _source.load.cache_clear()
    _compiler._load.cache_clear()

    def write(text):
        (tmp_path / "k.cu").write_text(text, "utf-8")
        return Variant("k.cu", "k")

    yield write
    _source.load.cache_clear()


def run(variant):
    x = cupy.zeros(1, "i4")
    _compiler.get_kernel(variant, x.data.device_id)((1,), (1,), (x,))
    return int(x[0])


@pytest.mark.gpu
def test_a_kernel_is_compiled_once(source, monkeypatch):
    variant = source(KERNEL)
    assert run(variant) == 7
    monkeypatch.setattr(cupy, "RawModule", None)
    assert run(variant) == 7


@pytest.mark.gpu
def test_a_broken_kernel_names_its_file_and_line(source):
    with pytest.raises(RuntimeError, match=r"k\.cu: the kernel did not compile") as e:
        run(source("// one\n// two\n" + KERNEL.replace("*x", "*y")))
    assert "k.cu(3)" in str(e.value)


@pytest.mark.gpu
def test_a_missing_header_of_cuda(source):
    with pytest.raises(RuntimeError, match="CUDA headers are missing"):
        run(source("#include <no_such_header.h>\n" + KERNEL))


@pytest.mark.gpu
def test_a_cache_folder_that_cannot_be_written(source, cache_folder):
    """The kernel runs all the same, with a warning that says what to set."""
    cache_folder.rmdir()
    cache_folder.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="Set CUPY_CACHE_DIR"):
        assert run(source("// fresh\n" + KERNEL)) == 7


@pytest.mark.gpu
def test_a_corrupt_cache_is_compiled_anew(source, cache_folder):
    variant = source("// corrupt\n" + KERNEL)
    assert run(variant) == 7
    files = [p for p in cache_folder.rglob("*") if p.is_file()]
    assert files
    for path in files:
        path.write_bytes(b"nonsense")
    _compiler._load.cache_clear()
    assert run(variant) == 7


# --- launches ------------------------------------------------------------------------

ALL_WAIT = """
extern "C" __global__ void k(unsigned* count, long long blocks, words_t words) {
  if (threadIdx.x != 0) return;
  atomicAdd(count, 1u);
  while (*(volatile unsigned*)count < blocks) {}
  if (blockIdx.x == 0) count[1] = unsigned(words.of[1]);
}
"""

CLUSTER = """
extern "C" __global__ void __cluster_dims__(16, 1, 1) k(unsigned* blocks) {
  unsigned size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (blockIdx.x == 0 && threadIdx.x == 0) *blocks = size;
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "cooperative", "overlaps"])
@pytest.mark.parametrize("has_entry", [True, False])
def test_arguments_arrive(source, monkeypatch, kind, has_entry):
    """Pointers, numbers and structs, also where CuPy hides the driver's launch."""
    if not has_entry:
        monkeypatch.setattr(_launch, "_launch_kernel", None)
    text = "struct words_t { long long of[3]; };" + ALL_WAIT
    variant = dataclasses.replace(source(text), cooperative=kind == "cooperative")
    device = runtime.device(0)
    overlaps = kind == "overlaps"
    if overlaps and device.cc < (9, 0):
        pytest.skip("kernels overlap from sm_90 on")
    config = LaunchConfig(variant, (device.num_sms,), (32,), overlaps=overlaps)
    launch = _launch.Launch(config, 0)
    for value in (5, 6):
        count = cupy.zeros(2, "u4")
        words = np.array([1, value, 3]).tobytes()
        launch.enqueue(count.data.ptr, device.num_sms, words)
        assert count.get().tolist() == [device.num_sms, value]


@pytest.mark.gpu
def test_large_clusters_are_asked_for(source):
    if runtime.device(0).cc < (9, 0):
        pytest.skip("clusters came with sm_90")
    variant = source(CLUSTER)
    blocks = cupy.zeros(1, "u4")
    with pytest.raises(_launch.DoesNotFitError, match="INVALID_CLUSTER_SIZE"):
        _launch.Launch(LaunchConfig(variant, (32,), (32,)), 0).enqueue(blocks.data.ptr)
    config = LaunchConfig(dataclasses.replace(variant, cluster=16), (32,), (32,))
    _launch.Launch(config, 0).enqueue(blocks.data.ptr)
    assert int(blocks[0]) == 16


FILLS_SHARED_MEMORY = """
extern "C" __global__ void k(int* x, long long n) {
  extern __shared__ int last[];
  last[n - 1] = 7;
  *x = last[n - 1];
}
"""


@pytest.mark.gpu
def test_sizes_of_shared_memory_do_not_replace_each_other(source):
    """CuPy has one function for a text, whatever its launches ask for."""
    variant = source("// sizes\n" + FILLS_SHARED_MEMORY)
    launches = {
        size: _launch.Launch(
            LaunchConfig(dataclasses.replace(variant, smem=size), (1,), (32,)), 0
        )
        for size in (60 << 10, 62 << 10, 1 << 10)
    }
    for size in (*launches, *launches):
        x = cupy.zeros(1, "i4")
        launches[size].enqueue(x.data.ptr, size // 4)
        assert int(x[0]) == 7


# --- several at once -----------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """Loading takes until as many load as the test says; what was loaded, and where."""
    import contextlib

    loaded, used = [], []

    @contextlib.contextmanager
    def use(device_id):
        used.append(device_id)
        yield

    monkeypatch.setattr(_compiler, "_locks", {})
    monkeypatch.setattr(_compiler.graphs, "is_capturing", lambda: False)
    monkeypatch.setattr(_compiler.threads, "num_cores", lambda: 4)
    monkeypatch.setattr(cupy.cuda, "Device", use)

    def together(count):
        barrier = threading.Barrier(count)

        def load(variant, device_id):
            barrier.wait(timeout=20)
            loaded.append((variant.entry, device_id))

        monkeypatch.setattr(_compiler, "_load", load)
        return loaded, used

    return together


def test_kernels_of_a_call_are_loaded_side_by_side(slow):
    loaded, used = slow(3)
    variants = [Variant("k.cu", name) for name in ("a", "b", "c", "a")]
    _compiler.get_kernels(variants, 2)
    assert sorted(loaded) == [("a", 2), ("b", 2), ("c", 2)]
    assert used == [2, 2, 2]
    _compiler.get_kernels(variants, 2)  # which are there
    _compiler.get_kernels(
        [*variants, Variant("k.cu", "d")], 2
    )  # one is nothing to part
    assert len(loaded) == 3


def test_kernels_are_not_loaded_ahead_in_a_capture(slow, monkeypatch):
    loaded, _ = slow(2)
    monkeypatch.setattr(_compiler.graphs, "is_capturing", lambda: True)
    _compiler.get_kernels([Variant("k.cu", "a"), Variant("k.cu", "b")], 0)
    assert loaded == []


def test_what_goes_wrong_in_a_thread_is_raised(slow, monkeypatch):
    slow(2)

    def fail(variant, device_id):
        raise RuntimeError(f"{variant.entry} did not compile")

    monkeypatch.setattr(_compiler, "_load", fail)
    with pytest.raises(RuntimeError, match="a did not compile"):
        _compiler.get_kernels([Variant("k.cu", "a"), Variant("k.cu", "b")], 0)


def test_the_first_launch_loads_all_of_its_call(monkeypatch):
    from cupyflash._cuda import launch_sequence

    asked = []
    monkeypatch.setattr(
        _compiler, "get_kernels", lambda variants, n: asked.append([*variants])
    )
    monkeypatch.setattr(_compiler, "get_kernel", lambda variant, n: variant.entry)
    variants = [Variant("k.cu", name) for name in "ab"]
    steps = [(LaunchConfig(variant, (1,), (32,)), ("x",)) for variant in variants]
    results = {"out": launch_sequence.Result((1,), np.dtype("f4"))}
    plan = launch_sequence.LaunchSequence(
        0, ("x",), results, launch_sequence.Steps(steps)
    )
    assert asked == []
    assert plan.launches[0]._load() == "a"
    assert asked == [variants]
