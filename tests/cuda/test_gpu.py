"""What only a GPU can show: streams, graphs, memory, foreign arrays, sizes, plans."""

import dataclasses
import os
import re
import threading

import numpy as np
import oracle
import pytest
from accuracy import max_error, to_host
from counting import Counting
from placing import place

import cupyflash

pytest.importorskip("cupy")

from cupyflash._attention.gpu import forward as attention_gpu
from cupyflash._cuda import compiler, plan_cache
from cupyflash._softmax.gpu import config as softmax_config
from cupyflash._softmax.gpu import dispatch as softmax_gpu
from cupyflash._softmax.gpu import registry as softmax_registry

pytestmark = pytest.mark.gpu

FUSED = ("auto", "online", "tiled")
METHODS = ("auto", "naive", "safe", "online", "tiled")


@pytest.fixture(autouse=True)
def _give_back(cupy):
    """Other processes test on the same device."""
    yield
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def qkv(cupy, rng):
    return tuple(
        cupy.asarray(rng.normal(size=(2, 4, n, 32)).astype(np.float32))
        for n in (50, 70, 70)
    )


@pytest.fixture
def calls(cupy, rng, qkv):
    """One call of everything, by name: no argument, fresh results."""
    q, k, v = qkv
    x = cupy.asarray(rng.normal(size=(30, 500)).astype(np.float32))
    outs, lses = cupy.stack([q, q]), cupy.zeros((2, *q.shape[:-1]), np.float32)
    lengths = cupy.asarray([40, 65])
    where = x > -1
    return {
        "softmax": lambda: cupyflash.softmax(x, -1),
        "softmax safe": lambda: cupyflash.softmax(x, -1, method="safe"),
        "softmax of columns": lambda: cupyflash.softmax(x, 0, where=where),
        "log_softmax": lambda: cupyflash.log_softmax(x, -1, scale=0.5),
        "logsumexp": lambda: cupyflash.logsumexp(x, -1),
        "softmax_vjp": lambda: cupyflash.softmax_vjp(x, x, -1),
        "log_softmax_vjp": lambda: cupyflash.log_softmax_vjp(x, x, -1),
        **{
            f"attention {method}": lambda method=method: cupyflash.attention(
                q, k, v, method=method
            )
            for method in METHODS
        },
        "attention with lengths": lambda: cupyflash.attention(
            q,
            k,
            v,
            causal=True,
            query_lengths=lengths,
            key_lengths=lengths,
            query_offset=lengths,
            bias=where[:1, :70].astype(np.float32),
        ),
        "merge": lambda: cupyflash.merge_attention_states(outs, lses)[0],
    }


CALLS = (
    "softmax", "softmax safe", "softmax of columns", "log_softmax", "logsumexp",
    "softmax_vjp", "log_softmax_vjp", "attention auto", "attention naive",
    "attention safe", "attention online", "attention tiled", "attention with lengths",
    "merge",
)  # fmt: skip


# --- streams and devices -------------------------------------------------------------


@pytest.fixture(scope="module")
def spin():
    """spin(cycles) keeps the current stream busy."""
    import cupy

    kernel = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) {'
        "  const long long start = clock64();"
        "  while (clock64() - start < cycles) {}"
        "}",
        "spin",
    )
    return lambda cycles: kernel((1,), (1,), (np.int64(cycles),))


@pytest.mark.parametrize("name", CALLS)
def test_work_goes_to_the_current_stream_and_nothing_waits(cupy, calls, spin, name):
    call = calls[name]
    expected = to_host(call())  # compiled, planned
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()  # memory of this stream's pool
        stream.synchronize()
        spin(1_500_000_000)
        before = cupy.cuda.Event()
        result = call()
        assert not stream.done  # the host did not wait for the stream
        before.record(cupy.cuda.Stream.null)
        before.synchronize()
        assert not stream.done  # and nothing went to the default stream
        stream.synchronize()
        np.testing.assert_array_equal(to_host(result), expected)


def test_the_order_of_a_stream_is_kept(cupy, spin):
    """A result is made after its input, without a wait between."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros((64, 1000), np.float32)
        cupyflash.softmax(x, -1)
        spin(200_000_000)
        x[:, 3] = 50
        y = cupyflash.softmax(x, -1)
        np.testing.assert_allclose(to_host(y)[:, 3], 1, rtol=1e-6)


def test_arrays_of_another_device(cupy, rng):
    """On the device of the inputs, whatever is current."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    x = rng.normal(size=(2, 3, 40, 16)).astype(np.float32)
    with cupy.cuda.Device(1):
        there = cupy.asarray(x)
        there_too = cupy.asarray(x)
        mask_there = there > 0
    here = cupy.asarray(x)
    for _ in range(2):
        for function in (cupyflash.softmax, cupyflash.logsumexp):
            result = function(there, -1)
            assert result.device.id == 1
            np.testing.assert_array_equal(to_host(result), to_host(function(here, -1)))
        out, lse = cupyflash.attention(there, there_too, there, return_lse=True)
        assert out.device.id == lse.device.id == 1
        expected = cupyflash.attention(here, here, here)
        np.testing.assert_array_equal(to_host(out), to_host(expected))
    assert cupy.cuda.runtime.getDevice() == 0
    with pytest.raises(ValueError, match="q is on device 1 but k is on device 0"):
        cupyflash.attention(there, here, here)
    with pytest.raises(ValueError, match="on device 0 but where is on device 1"):
        cupyflash.softmax(here, where=mask_there)


# --- CUDA graphs ---------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_can_be_captured(cupy, calls, name):
    if name in ("attention naive", "attention safe"):
        pytest.skip("cupy.matmul may allocate a workspace: not promised in a graph")
    call = calls[name]
    expected = to_host(call())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        kept = [call() for _ in range(3)]
        stream.synchronize()
        del kept  # blocks in the pool of this stream
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
        result.fill(0)
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(to_host(result), expected)


def test_a_graph_reads_new_inputs(cupy, rng):
    x = cupy.asarray(rng.normal(size=(20, 300)).astype(np.float32))
    out = cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyflash.softmax(x, 1, out=out)
        stream.begin_capture()
        cupyflash.softmax(x, 1, out=out)
        graph = stream.end_capture()
        for factor in (1, -2):
            x *= factor
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(
                to_host(out), to_host(cupyflash.softmax(x, 1))
            )


@pytest.mark.parametrize("operation", ["softmax", "attention"])
def test_a_cold_call_cannot_be_captured(cupy, rng, operation):
    """It says what to do, and the call works once that is done."""
    x = cupy.asarray(rng.normal(size=(3, 37, 21)).astype(np.float16))
    out = cupy.empty_like(x)
    if operation == "softmax":

        def call():
            cupyflash.softmax(x, (0, 2), scale=0.3, out=out)
    else:

        def call():
            cupyflash.attention(x, x, x, softcap=3.5, out=out)

    compiler._load.cache_clear()
    for plans in (softmax_gpu._plans, attention_gpu._plans):
        plans._plans.clear()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        with pytest.raises(RuntimeError, match="make the same call once before"):
            captured(stream, call)
        call()
        expected = to_host(out)
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(to_host(out), expected)


def captured(stream, call, mode=None):
    """(what a call returns, its graph); the capture ends in any case."""
    stream.begin_capture(mode)
    try:
        result = call()
    finally:
        graph = stream.end_capture()
    return result, graph


def captured_calls(cupy, rng):
    """Calls that make arrays on the way, beside those of a plan."""

    def normal(shape, dtype=np.float32):
        return cupy.asarray(rng.normal(size=shape).astype(dtype))

    q, x = normal((1, 2, 300, 64), np.float16), normal((64, 512))
    z = normal((8, 512)) + 1j * normal((8, 512))
    outs = [normal((2, 100, 64)) for _ in range(3)]
    lses = [normal((2, 100)) for _ in range(3)]
    one_query, long_rows = q[:, :, :1], normal((2, 700_001))
    return {
        "key_lengths=200": lambda: cupyflash.attention(q, q, q, key_lengths=200),
        "bias=0.5": lambda: cupyflash.attention(q, q, q, bias=0.5),
        "mask=True": lambda: cupyflash.attention(q, q, q, mask=True),
        "where=True": lambda: cupyflash.softmax(x, -1, where=True),
        "b=2.0": lambda: cupyflash.logsumexp(x, -1, b=2.0),
        "merge of lists": lambda: cupyflash.merge_attention_states(outs, lses)[0],
        "complex softmax": lambda: cupyflash.softmax(z, -1),
        "complex log_softmax": lambda: cupyflash.log_softmax(z, -1),
        "complex logsumexp": lambda: cupyflash.logsumexp(z, -1),
        "foreign q": lambda: cupyflash.attention(
            Odd(q, 0, q.shape, "<f2"), q, q, key_lengths=200
        ),
        "foreign x": lambda: cupyflash.softmax(
            Odd(x, 0, x.shape, "<f4"), -1, where=True
        ),
        "foreign outs": lambda: cupyflash.merge_attention_states(
            [Odd(part, 0, part.shape, "<f4") for part in outs], lses
        )[0],
        "parts of the keys": lambda: cupyflash.attention(one_query, q, q),
        "scratch": lambda: cupyflash.softmax(long_rows, -1),
    }


CAPTURED = (
    "key_lengths=200", "bias=0.5", "mask=True", "where=True", "b=2.0",
    "merge of lists", "complex softmax", "complex log_softmax", "complex logsumexp",
    "foreign q", "foreign x", "foreign outs", "parts of the keys", "scratch",
)  # fmt: skip


@pytest.mark.parametrize("name", CAPTURED)
def test_a_replay_writes_to_nobody_elses_memory(cupy, rng, name):
    """All that a captured call took is kept for the graph, also an unused lse."""
    call = captured_calls(cupy, rng)[name]
    cupy.cuda.Device().synchronize()
    taken = []
    malloc = cupy.get_default_memory_pool().malloc

    def counting(size):
        memory = malloc(size)
        if stream.is_capturing():
            taken.append((memory.ptr, size))
        return memory

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(counting):
        expected = to_host(call())
        call()
        stream.synchronize()
        result, graph = captured(stream, call)
        # What has gone back to the pool would be given out again.
        others = [cupy.full(size, 7, np.uint8) for _, size in taken for _ in range(3)]
        stream.synchronize()
        places = {x.data.ptr for x in others}
        assert not places & {ptr for ptr, _ in taken}
        result.fill(0)
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(to_host(result), expected)
        assert all(bool((x == 7).all()) for x in others)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_lengths_are_read_at_each_replay(cupy, rng, dtype, seqlen_q):
    """As a cache grows: key_lengths and query_offset of the device."""
    q, k, v = (
        cupy.asarray(rng.normal(size=(2, 4, n, 64)).astype(dtype))
        for n in (seqlen_q, 1500, 1500)
    )
    lengths, offsets = cupy.asarray([100, 1000]), cupy.asarray([30, 930])
    options = {"key_lengths": lengths, "query_offset": offsets, "causal": True}
    out = cupy.empty_like(q)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyflash.attention(q, k, v, out=out, **options)
        _, graph = captured(
            stream, lambda: cupyflash.attention(q, k, v, out=out, **options)
        )
        for new in ([100, 1000], [101, 1500], [0, 3], [1500, 77]):
            lengths[...] = cupy.asarray(new)
            offsets[...] = lengths - seqlen_q
            graph.launch(stream)
            replayed = to_host(out)
            now = cupyflash.attention(q, k, v, **options)
            np.testing.assert_array_equal(replayed, to_host(now))
            few = [max(n, 1) for n in new]
            for i, n in enumerate(few):
                if new[i] >= seqlen_q:
                    alone = cupyflash.attention(
                        q[i], k[i, :, :n], v[i, :, :n], causal=True
                    )
                    bound = 3e-3 if dtype == np.float16 else 1e-5
                    np.testing.assert_allclose(
                        replayed[i].astype(float),
                        to_host(alone).astype(float),
                        atol=bound,
                    )


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_ten_thousand_calls_can_be_captured(cupy, mode):
    """Each has counters of its own; new ones are made while a stream is captured."""
    runtime = cupy.cuda.runtime
    mode = {
        "global": runtime.streamCaptureModeGlobal,
        "thread_local": runtime.streamCaptureModeThreadLocal,
        "relaxed": runtime.streamCaptureModeRelaxed,
    }[mode]
    q = cupy.ones((1, 64, 1024, 64), np.float16)  # so many that keys are not split
    out = cupyflash.attention(q, q, q, causal=True)
    cupy.cuda.Device().synchronize()

    def many():
        for _ in range(1000):
            cupyflash.attention(q, q, q, causal=True, out=out)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(10):
            _, graph = captured(stream, many, mode)
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert bool((out == 1).all())


# --- memory --------------------------------------------------------------------------


@pytest.mark.parametrize("method", FUSED)
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_allocates_its_results_alone(cupy, qkv, method, causal):
    q, k, v = qkv
    options = {"method": method, "causal": causal}
    cupyflash.attention(q, k, v, return_lse=True, **options)
    counting = Counting(cupy)
    with cupy.cuda.using_allocator(counting):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        assert sorted(counting.sizes) == sorted((out.nbytes, lse.nbytes))
        counting.sizes.clear()
        cupyflash.attention(q, k, v, out=out, **options)
        assert sum(counting.sizes) in (0, lse.nbytes)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_no_hidden_copies_of_what_is_read_in_place(cupy, rng, layout):
    """Any strides with a contiguous last axis, broadcast batches and options."""
    x = rng.normal(size=(2, 4, 60, 16)).astype(np.float32)
    if layout == "bshd":
        x = x.swapaxes(1, 2)
    q, k, v = (place(cupy, x, form) for form in ("rows", "heads", "shifted"))
    bias = cupy.broadcast_to(cupy.zeros(60, np.float32), (2, 4, 60, 60))
    mask = place(cupy, np.ones((60, 60), bool), "gaps")
    options = {"bias": bias, "mask": mask, "layout": layout}
    cupyflash.attention(q, k, v, **options)
    counting = Counting(cupy)
    with cupy.cuda.using_allocator(counting):
        out = cupyflash.attention(q, k, v, **options)
    assert sum(counting.sizes) <= out.nbytes + out.nbytes // 16


@pytest.mark.parametrize("form", ["plain", "gaps", "fortran"])
@pytest.mark.parametrize("method", METHODS)
def test_softmax_allocates_its_result_alone(cupy, rng, form, method):
    x = place(cupy, rng.normal(size=(6, 50, 40)).astype(np.float32), form)
    where = place(cupy, np.ones((50, 1), bool))
    for axis in (-1, (0, 2)):
        cupyflash.softmax(x, axis, where=where, method=method)
        counting = Counting(cupy)
        with cupy.cuda.using_allocator(counting):
            y = cupyflash.softmax(x, axis, where=where, method=method)
            assert counting.sizes == [y.nbytes]
            counting.sizes.clear()
            cupyflash.softmax(x, axis, where=where, method=method, out=x)
            assert not counting.sizes


@pytest.mark.parametrize("name", CALLS)
def test_memory_comes_from_the_current_allocator(cupy, calls, name):
    """Another allocator gets every request, and the default pool none."""
    call = calls[name]
    call()
    pool, default = cupy.cuda.MemoryPool(), cupy.get_default_memory_pool()
    before = default.used_bytes(), default.total_bytes()
    with cupy.cuda.using_allocator(pool.malloc):
        result = call()
        assert pool.used_bytes() >= result.nbytes
        assert (default.used_bytes(), default.total_bytes()) == before
        del result
        call()
        size = pool.total_bytes()
        for _ in range(3):  # what a call took, it gave back
            call()
        assert pool.total_bytes() == size


@pytest.mark.parametrize("name", CALLS)
def test_without_a_pool(cupy, calls, name):
    """Memory that is given back is gone at once, and another's."""
    call = calls[name]
    expected = to_host(call())
    with cupy.cuda.using_allocator(None):
        results = [call() for _ in range(3)]
        for result in results:
            np.testing.assert_array_equal(to_host(result), expected)
        del results


@pytest.mark.parametrize("name", ["parts of the keys", "scratch"])
def test_threads_on_one_stream_do_not_share_memory_between_kernels(cupy, rng, name):
    """The launches of calls from two threads interleave on the default stream."""
    call = captured_calls(cupy, rng)[name]
    expected = to_host(call())
    wrong = []

    def work():
        for _ in range(200):
            result = call()
            if not np.array_equal(to_host(result), expected):
                wrong.append(result)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- foreign arrays ------------------------------------------------------------------


class Interface:
    """A CUDA array known by its interface alone."""

    def __init__(self, x):
        self._x = x
        self.__cuda_array_interface__ = x.__cuda_array_interface__


def test_cuda_array_interface(cupy, qkv):
    q, k, v = qkv
    expected = to_host(cupyflash.attention(q, k, v))
    for given in ((Interface(q), k, v), (q, Interface(k), Interface(v))):
        out = cupyflash.attention(*given)
        assert isinstance(out, cupy.ndarray)
        np.testing.assert_array_equal(to_host(out), expected)
    for function in (cupyflash.softmax, cupyflash.log_softmax, cupyflash.logsumexp):
        y = function(Interface(q), -1)
        assert isinstance(y, cupy.ndarray)
        np.testing.assert_array_equal(to_host(y), to_host(function(q, -1)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors(cupy, rng, dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    x = torch.tensor(rng.normal(size=(2, 3, 40, 16)), device="cuda")
    x = x.to(getattr(torch, dtype))
    mask = torch.ones(40, 40, dtype=torch.bool, device="cuda").tril()
    torch.cuda.synchronize()
    out = cupyflash.attention(x, x, x, mask=mask)
    assert isinstance(out, cupy.ndarray)
    assert out.dtype.name == dtype
    same = cupyflash.attention(x, x, x, causal=True)
    exact, _, _ = oracle.attention(
        *[x.double().cpu().numpy()] * 3, causal=True, real=np.float64
    )
    limit = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 5e-15}
    for result in (out, same):
        assert max_error(result, exact) <= limit[dtype] * float(np.abs(exact).max())
    y = cupyflash.softmax(x, -1)
    assert y.shape == tuple(x.shape)
    # Without a copy: what is written into the tensor is read.
    y = cupyflash.softmax(x[:1], -1, out=cupy.from_dlpack(x[1:2]))
    np.testing.assert_allclose(
        x[1].double().cpu().numpy(), to_host(y[0]).astype(float), rtol=0
    )


def test_jax_arrays(cupy, rng):
    # At its first use JAX takes most of the memory of the card for itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("this JAX has no GPU")
    host = rng.normal(size=(2, 40, 16)).astype(np.float32)
    x = jax.device_put(host, device).block_until_ready()
    out = cupyflash.attention(x, x, x, causal=True)
    assert isinstance(out, cupy.ndarray)
    expected = to_host(cupyflash.attention(*[cupy.asarray(host)] * 3, causal=True))
    np.testing.assert_array_equal(to_host(out), expected)
    y = cupyflash.softmax(x, -1)
    np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(y)), to_host(y))


def test_numba_arrays(cupy, rng):
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("this Numba has no CUDA")
    host = rng.normal(size=(2, 40, 16)).astype(np.float32)
    x = cuda.to_device(host)
    cuda.synchronize()
    out = cupyflash.attention(x, x, x)
    assert isinstance(out, cupy.ndarray)
    expected = to_host(cupyflash.attention(*[cupy.asarray(host)] * 3))
    np.testing.assert_array_equal(to_host(out), expected)
    into = cuda.device_array_like(host)
    assert cupyflash.softmax(x, -1, out=into) is not None
    expected = to_host(cupyflash.softmax(cupy.asarray(host), -1))
    np.testing.assert_array_equal(into.copy_to_host(), expected)


def _torch_allocator(cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return cupy.cuda.PythonFunctionAllocator(
        lambda size, device: torch.cuda.caching_allocator_alloc(size, device),
        lambda ptr, device: torch.cuda.caching_allocator_delete(ptr),
    ).malloc


def _rmm_allocator(cupy):
    return pytest.importorskip("rmm.allocators.cupy").rmm_cupy_allocator


def _stream_ordered_allocator(cupy):
    return cupy.cuda.malloc_async


ALLOCATORS = {
    "torch": _torch_allocator,
    "rmm": _rmm_allocator,
    "malloc_async": _stream_ordered_allocator,
}


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("name", CALLS)
def test_allocators_of_other_libraries(cupy, calls, allocator, name):
    malloc = ALLOCATORS[allocator](cupy)
    call = calls[name]
    expected = to_host(call())
    with cupy.cuda.using_allocator(malloc):
        for _ in range(3):
            np.testing.assert_array_equal(to_host(call()), expected)
    cupy.cuda.Device().synchronize()


class Odd:
    """CUDA memory as another library describes it."""

    def __init__(self, owner, offset, shape, typestr, strides=None, readonly=False):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (owner.data.ptr + offset, readonly),
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "stream": None,
        }


@pytest.mark.parametrize("typestr", ["<f2", "<f4", "<f8"])
def test_elements_that_begin_within_others_are_refused(cupy, typestr):
    raw = cupy.zeros(1 << 18, np.uint8)
    x = Odd(raw, 1, (4, 70, 64), typestr)
    good = cupy.zeros((4, 70, 64), typestr)
    lse = cupy.zeros((4, 70), np.float64 if typestr == "<f8" else np.float32)
    # The same, as CuPy lets one make it: of a plan's shape and strides.
    same = raw[1 : 1 + good.nbytes].view(typestr).reshape(good.shape)
    for odd in (x, same):
        for call in (
            lambda odd: cupyflash.softmax(odd, -1),
            lambda odd: cupyflash.softmax(good, -1, out=odd),
            lambda odd: cupyflash.logsumexp(odd, -1),
            lambda odd: cupyflash.logsumexp(good, -1, b=odd),
            lambda odd: cupyflash.softmax_vjp(good, odd, -1),
            lambda odd: cupyflash.attention(odd, good, good),
            lambda odd: cupyflash.attention(good, good, odd),
            lambda odd: (
                cupyflash.attention(good, good, good, bias=odd[..., :70])
                if odd is same
                else cupyflash.attention(good, odd, good)
            ),
            lambda odd: cupyflash.attention(good, good, good, out=odd),
            lambda odd: cupyflash.attention_vjp(odd, good, good, good, good, lse),
            lambda odd: cupyflash.attention_vjp(good, good, odd, good, good, lse),
        ):
            with pytest.raises(ValueError, match="starts 1 bytes past a multiple of"):
                call(odd)
            cupy.cuda.Device().synchronize()
        # A call with a plan, then one that differs in its address alone.
        for shifted in (good, same):
            calls = (
                lambda x=shifted: cupyflash.softmax(x, -1),
                lambda x=shifted: cupyflash.logsumexp(x, -1),
                lambda x=shifted: cupyflash.attention(x[1:], x[1:], x[1:]),
                lambda x=shifted: cupyflash.attention_vjp(
                    x, good, good, good, good, lse
                ),
            )
            for call in calls:
                if shifted is good:
                    call()
                else:
                    with pytest.raises(ValueError, match="starts"):
                        call()
    cupy.cuda.Device().synchronize()


def test_strides_that_are_no_multiples_are_refused(cupy):
    raw = cupy.zeros(1 << 16, np.uint8)
    x = Odd(raw, 0, (64, 64), "<f4", strides=(64 * 6, 6))
    k = cupy.ones((64, 64), np.float32)
    for call in (
        lambda: cupyflash.attention(x, k, k),
        lambda: cupyflash.attention(k, k, x),
        lambda: cupyflash.attention(k, k, k, out=x),
        lambda: cupyflash.softmax(x, -1),
        lambda: cupyflash.softmax(k, -1, out=x),
        lambda: cupyflash.logsumexp(x, -1),
        lambda: cupyflash.merge_attention_states(x, k[:, 0]),
    ):
        with pytest.raises(ValueError, match="not multiples of 4"):
            call()


def test_another_byte_order_is_refused(cupy):
    raw = cupy.zeros(1 << 16, np.uint8)
    x, k = Odd(raw, 0, (64, 64), ">f4"), cupy.ones((64, 64), np.float32)
    with pytest.raises((ValueError, TypeError)):
        cupyflash.attention(x, k, k)
    with pytest.raises((ValueError, TypeError)):
        cupyflash.softmax(x, -1)


def test_an_out_that_must_not_be_written(cupy):
    x, kept = cupy.ones((4, 64), np.float32), cupy.zeros((4, 64), np.float32)
    out = Odd(kept, 0, kept.shape, "<f4", readonly=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="out is read-only"):
            cupyflash.softmax(x, -1, out=out)
        with pytest.raises(ValueError, match="out is read-only"):
            cupyflash.attention(x, x, x, out=out)
        cupyflash.softmax(x, -1, out=Odd(x.copy(), 0, x.shape, "<f4"))
    assert not kept.any()


def test_torch_tensors_of_the_host_do_not_mix(cupy, qkv):
    torch = pytest.importorskip("torch")
    message = (
        "k cannot be made an array: torch.Tensor would silently become a NumPy "
        "array; pass x.numpy(force=True)"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        cupyflash.attention(qkv[0], torch.zeros(2, 4, 70, 32), qkv[2])


# --- sizes ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_beyond_2_31_elements(cupy, function, axis):
    rows, columns = (1 << 19) + 3, 4096
    x = cupy.zeros((rows, columns), np.float16)
    x[-2:] = cupy.arange(columns) % 7
    function = getattr(cupyflash, function)
    if axis == 1:
        result = function(x, axis)
        expected = to_host(function(x[-3:].copy(), axis))
        np.testing.assert_array_equal(to_host(result[-3:]), expected)
        np.testing.assert_array_equal(to_host(result[:1]), expected[:1])
    else:
        result = function(x, axis)
        few = x[:, -3:].copy()
        expected = to_host(function(few, axis))
        got = to_host(result[..., -3:])
        np.testing.assert_allclose(
            got.astype(float), expected.astype(float), rtol=2e-3, atol=1e-7
        )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_one_row_beyond_2_31_elements(cupy, method):
    if method == "naive":
        pytest.skip("the sum of so many terms is not representable")
    n = (1 << 31) + 1000
    x = cupy.full(n, -20.0, np.float16)
    x[-1] = 0
    y = cupyflash.softmax(x, method=method)
    total = 1 + (n - 1) * float(np.exp(-20.0))
    assert abs(float(y[-1]) * total - 1) < 1e-3
    lse = float(cupyflash.logsumexp(x, out=cupy.empty((), np.float16)))
    assert abs(lse - np.log(total)) < 1e-3 * np.log(total)


@pytest.mark.slow
@pytest.mark.parametrize("method", FUSED)
def test_keys_beyond_2_31_elements(cupy, rng, method):
    """Only the last keys are seen: a wrong offset reads others."""
    seqlen, dim = (1 << 25) + 70, 64
    k = cupy.zeros((seqlen, dim), np.float16)
    k[-5:] = cupy.asarray(rng.normal(size=(5, dim)))
    v = cupy.zeros_like(k)
    v[-5:] = cupy.asarray(rng.normal(size=(5, dim)))
    q = cupy.asarray(rng.normal(size=(3, dim)).astype(np.float16))
    window = {"window": (4, 0), "query_offset": seqlen - 1, "method": method}
    out = cupyflash.attention(q[:1], k, v, **window)
    expected = cupyflash.attention(q[:1], k[-5:].copy(), v[-5:].copy(), method=method)
    np.testing.assert_allclose(to_host(out), to_host(expected), rtol=2e-3, atol=1e-4)
    if method != "online":  # all of the keys: the zeros outweigh the five
        out, lse = cupyflash.attention(q, k, v, return_lse=True, method=method)
        assert abs(float(lse[0]) - np.log(seqlen)) < 1e-3
        assert float(abs(out).max()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", FUSED)
def test_queries_beyond_2_31_elements(cupy, rng, method):
    seqlen, dim = (1 << 25) + 70, 64
    q = cupy.zeros((seqlen, dim), np.float16)
    q[-3:] = cupy.asarray(rng.normal(size=(3, dim)))
    k, v = (cupy.asarray(rng.normal(size=(4, dim)).astype(np.float16)) for _ in "kv")
    out, lse = cupyflash.attention(q, k, v, return_lse=True, method=method)
    few, few_lse = cupyflash.attention(
        q[-3:].copy(), k, v, return_lse=True, method=method
    )
    np.testing.assert_allclose(to_host(out[-3:]), to_host(few), rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(to_host(lse[-3:]), to_host(few_lse), rtol=1e-5)
    np.testing.assert_allclose(float(lse[0]), np.log(4), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_scores_beyond_2_31_elements(cupy, rng, method):
    """The mask, and S and P of naive and safe, go beyond what an int counts."""
    seqlen_q, seqlen_k, dim = 70_000, 31_000, 8
    q, k, v = (
        cupy.asarray((rng.normal(size=(n, dim)) * 0.3).astype(np.float16))
        for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    mask = cupy.ones((seqlen_q, seqlen_k), bool)
    mask[-1] = False
    mask[-1, -2:] = True
    out = cupyflash.attention(q, k, v, mask=mask, method=method)
    expected = cupyflash.attention(q[-1:], k[-2:], v[-2:], method=method)
    np.testing.assert_allclose(
        to_host(out[-1:]), to_host(expected), rtol=1e-2, atol=1e-3
    )


@pytest.mark.parametrize("method", METHODS)
def test_many_batch_entries_and_heads(cupy, rng, method):
    """More than the 65,535 blocks of a grid's second and third axis."""
    q = cupy.asarray(rng.normal(size=(20_000, 4, 2, 8)).astype(np.float32) * 0.5)
    k = cupy.asarray(rng.normal(size=(20_000, 2, 3, 8)).astype(np.float32) * 0.5)
    lengths = cupy.full(20_000, 2)
    out = cupyflash.attention(q, k, k, key_lengths=lengths, method=method)
    last = cupyflash.attention(
        q[-3:], k[-3:], k[-3:], key_lengths=lengths[-3:], method=method
    )
    np.testing.assert_allclose(to_host(out[-3:]), to_host(last), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [((1 << 21) + 5, 3), (70_001, 100), (5, 70_001, 2)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_many_rows(cupy, rng, shape, axis):
    x = cupy.asarray(rng.normal(size=shape).astype(np.float32))
    y = cupyflash.softmax(x, axis)
    total = to_host(y.sum(axis, dtype=np.float64))
    np.testing.assert_allclose(total, 1, atol=1e-5)
    lse = to_host(cupyflash.logsumexp(x, axis))
    expected = to_host(cupy.log(cupy.exp(x.astype(np.float64)).sum(axis)))
    np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=1e-6)


# --- plans ---------------------------------------------------------------------------


def test_plans_know_the_strides(cupy, rng):
    x = rng.normal(size=(40, 40)).astype(np.float32)
    expected = to_host(cupyflash.softmax(place(cupy, x), 1))
    for form in ("plain", "fortran", "gaps", "reversed", "rows", "plain"):
        y = cupyflash.softmax(place(cupy, x, form), 1)
        np.testing.assert_allclose(to_host(y), expected, rtol=1e-6)
    q = rng.normal(size=(3, 40, 16)).astype(np.float32)
    expected = to_host(cupyflash.attention(*[place(cupy, q)] * 3))
    for form in ("plain", "heads", "fortran", "rows", "gaps", "plain"):
        out = cupyflash.attention(*[place(cupy, q, form)] * 3)
        np.testing.assert_allclose(to_host(out), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8"])
@pytest.mark.parametrize("n", [8, 64, 1000, 4096])
def test_plans_do_not_assume_alignment(cupy, rng, dtype, n):
    """The same shape and strides, one element further."""
    x = (rng.normal(size=(9, n)) * 10).astype(dtype)
    expected = to_host(cupyflash.softmax(place(cupy, x), 1))
    bound = {"rtol": 1e-3 if dtype == "float16" else 1e-6, "atol": 1e-7}
    for form in ("shifted", "plain", "shifted"):
        out = place(cupy, np.zeros(x.shape, expected.dtype), form)
        y = cupyflash.softmax(place(cupy, x, form), 1, out=out)
        np.testing.assert_allclose(to_host(y), expected, **bound)
        y = cupyflash.softmax(place(cupy, x, form), 1)
        np.testing.assert_allclose(to_host(y), expected, **bound)


@pytest.mark.parametrize("dim", [8, 16, 64, 128])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_attention_plans_do_not_assume_alignment(cupy, rng, dim, dtype):
    x = rng.normal(size=(2, 30, dim)).astype(dtype)
    expected = to_host(cupyflash.attention(*[place(cupy, x)] * 3))
    bound = {"rtol": 1e-5, "atol": 2e-3 if dtype == np.float16 else 2e-6}
    for form in ("shifted", "plain", "shifted"):
        out = place(cupy, np.zeros_like(x), form)
        got = cupyflash.attention(*[place(cupy, x, form)] * 3, out=out)
        np.testing.assert_allclose(to_host(got), expected, **bound)


def test_attention_plans_do_not_assume_that_options_are_aligned(cupy, rng):
    """All arrays at once, each time others, at places that TMA can read or cannot."""
    x = rng.normal(size=(2, 30, 64)).astype(np.float16)
    q = place(cupy, x)
    for form in ("plain", "shifted", "plain", "shifted"):
        host = {
            "bias": rng.normal(size=(2, 30, 30)).astype(np.float16),
            "mask": rng.random((2, 30, 30)) < 0.8,
            "sinks": rng.normal(size=2).astype(np.float32),
            "alibi_slopes": rng.random(2).astype(np.float32),
            "query_offset": rng.integers(0, 9, size=()).astype(np.int32),
            "query_lengths": rng.integers(20, 30, size=()).astype(np.int32),
            "key_lengths": rng.integers(20, 30, size=()).astype(np.int32),
        }
        given = {
            n: place(cupy, y, form if y.ndim else "plain") for n, y in host.items()
        }
        out = cupyflash.attention(q, q, q, causal=True, **given)
        exact, _, _ = oracle.attention(x, x, x, real=np.float64, causal=True, **host)
        assert max_error(out, exact) <= 4e-3


def test_plans_do_not_let_host_arrays_in(cupy, qkv):
    q, k, v = qkv
    host = np.ones((50, 70), bool)
    mask = cupy.asarray(host)
    for _ in range(2):
        cupyflash.attention(q, k, v, mask=mask)
        with pytest.raises(TypeError, match="mask is a NumPy array"):
            cupyflash.attention(q, k, v, mask=host)
        cupyflash.softmax(q, -1, where=q > 0)
        with pytest.raises(TypeError, match="where is a NumPy array"):
            cupyflash.softmax(q, -1, where=np.ones(q.shape, bool))
        with pytest.raises(TypeError, match="k is a NumPy array"):
            cupyflash.attention(q, to_host(k), v)
        with pytest.raises(TypeError, match="out is a NumPy array"):
            cupyflash.softmax(q, -1, out=np.empty(q.shape, q.dtype))


def test_plans_check_what_looks_the_same(cupy, qkv):
    """1 == True == 1.0 and hash alike; the checks tell them apart."""
    q, k, v = qkv
    cupyflash.attention(q, k, v, causal=True, scale=1.0, window=1, query_offset=1)
    for wrong in ({"causal": 1}, {"scale": True}, {"window": True}):
        with pytest.raises(TypeError):
            cupyflash.attention(
                q, k, v, **{"causal": True, "scale": 1.0, "window": 1, **wrong}
            )
    with pytest.raises(TypeError, match="query_offset"):
        cupyflash.attention(q, k, v, query_offset=True)
    x = q[0, 0]
    cupyflash.softmax(x, 1, scale=1.0)
    with pytest.raises(TypeError, match="axis must be"):
        cupyflash.softmax(x, True, scale=1.0)
    with pytest.raises(TypeError, match="scale must be"):
        cupyflash.softmax(x, 1, scale=True)


def test_plans_check_where_out_lies(cupy, rng):
    """Shapes and strides as before, but now it overlaps."""
    buffer = cupy.asarray(rng.normal(size=(3, 8, 16)).astype(np.float32))
    x, apart = buffer[0], buffer[2]
    cupyflash.softmax(x, 1, out=apart)
    shifted = buffer.ravel()[16 : 16 + 128].reshape(8, 16)
    with pytest.raises(ValueError, match="out shares memory with x"):
        cupyflash.softmax(x, 1, out=shifted)
    assert cupyflash.softmax(x, 1, out=x) is x
    q = buffer[0]
    cupyflash.attention(q, buffer[1], buffer[1], out=apart)
    with pytest.raises(ValueError, match="out shares memory with q"):
        cupyflash.attention(q, buffer[1], buffer[1], out=q)
    with pytest.raises(ValueError, match="out shares memory with k"):
        cupyflash.attention(q, buffer[1], buffer[2], out=buffer[1])


def test_plans_know_every_option(cupy, qkv):
    """Calls that differ in one option do not get each other's plan."""
    q, k, v = qkv
    options = [
        {},
        {"scale": 0.3},
        {"causal": True},
        {"causal": True, "query_offset": 3},
        {"causal": True, "query_offset": 4},
        {"window": 5},
        {"window": (5, 0)},
        {"window": (None, 5)},
        {"softcap": 2.0},
        {"softcap": 3.0},
        {"bias": cupy.ones((50, 1), np.float32) * cupy.arange(70, dtype=np.float32)},
        {"bias": cupy.arange(70, dtype=np.float32)[None] * 0.5},
        {"bias": cupy.arange(70, dtype=np.float64) * 0.25},
        {"mask": cupy.arange(70) > 30},
        {"key_lengths": cupy.asarray([30, 40])},
        {"key_lengths": cupy.asarray([30, 40], np.int16) + 5},
        {"query_lengths": cupy.asarray([30, 40])},
        {"sinks": cupy.ones(4, np.float32)},
        {"alibi_slopes": cupy.ones(4, np.float32)},
        {"query_offset": cupy.asarray([1, 2]), "causal": True},
        {"method": "online", "scale": 0.7},
    ]
    for _ in range(2):
        for option in options:
            out = cupyflash.attention(q, k, v, **option)
            host = {
                n: to_host(x) if isinstance(x, cupy.ndarray) else x
                for n, x in option.items()
                if n != "method"
            }
            exact, _, size = oracle.attention(
                *(to_host(x) for x in qkv), real=np.float64, **host
            )
            assert max_error(out, exact) <= 1e-6 * (4 + size)


def test_repeated_calls_with_every_option(cupy, rng):
    """Later calls, which go directly to the launches, give the bits of the first."""

    def some(*shape):
        return cupy.asarray(rng.normal(size=shape).astype(np.float16))

    q, k, v, dout, dlse = some(1, 2, 8, 16), *some(3, 1, 2, 8, 16), some(1, 2, 8)
    options = [
        {},
        {"bias": some(1, 2, 8, 8), "need_dbias": True},
        {"mask": cupy.asarray(rng.random((1, 2, 8, 8)) < 0.8)},
        {"sinks": cupy.asarray([0.1, 0.2], np.float32), "need_dsinks": True},
        {"alibi_slopes": cupy.asarray([0.5, 0.25], np.float32)},
        {"causal": True, "query_offset": cupy.asarray([2], np.int32)},
        {"causal": True, "query_offset": 3},
        {"causal": True},
        {"key_lengths": cupy.asarray([5], np.int32)},
        {"query_lengths": cupy.asarray([5], np.int32)},
        {"scale": 0.3},
        {"softcap": 2.0},
        {"window": (2, 0)},
        {"dlse": dlse.astype(np.float32)},
    ]
    first = {}
    for _ in range(3):
        for n, option in enumerate(options):
            shared = {x: y for x, y in option.items() if x[:4] not in ("need", "dlse")}
            found = cupyflash.attention(q, k, v, return_lse=True, **shared)
            gradients = cupyflash.attention_vjp(
                dout, q, k, v, *found, deterministic=True, **option
            )
            arrays = [*found, *(x for x in gradients if isinstance(x, cupy.ndarray))]
            bits = [to_host(x).tobytes() for x in arrays]
            assert first.setdefault(n, bits) == bits, option
    assert len({tuple(bits) for bits in first.values()}) == len(options)


def test_values_of_arrays_are_no_part_of_a_plan(cupy, qkv):
    q, k, v = qkv
    lengths = cupy.asarray([10, 20])
    for value in (10, 33, 70):
        lengths[...] = value
        out = cupyflash.attention(q, k, v, key_lengths=lengths)
        exact, _, _ = oracle.attention(
            *(to_host(x) for x in (q, k[:, :, :value], v[:, :, :value])),
            real=np.float64,
        )
        assert max_error(out, exact) <= 2e-6


def test_a_second_thread_can_call(cupy, rng):
    """Plans and kernels are shared by threads."""
    from concurrent.futures import ThreadPoolExecutor

    x = rng.normal(size=(7, 11, 130)).astype(np.float16)
    expected = to_host(cupyflash.attention(*[cupy.asarray(x)] * 3, softcap=7.0))

    def call(_):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            y = cupyflash.attention(*[cupy.asarray(x)] * 3, softcap=7.0)
            stream.synchronize()
            return to_host(y)

    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(call, range(16)):
            np.testing.assert_array_equal(y, expected)


def test_the_first_call_of_a_thread(cupy, rng):
    """A new thread has no CUDA context yet, and a call with out= makes none before."""
    import threading

    x = cupy.asarray(rng.normal(size=(7, 100)).astype(np.float32))
    out, errors = cupy.empty_like(x), []
    expected = to_host(cupyflash.softmax(x, 1, out=out))
    out.fill(0)

    def call():
        try:
            cupyflash.softmax(x, 1, out=out)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert not errors
    np.testing.assert_array_equal(to_host(out), expected)


def test_threads_do_not_mix_their_arguments(cupy):
    """One plan, many threads at once, each with arrays of its own."""
    from concurrent.futures import ThreadPoolExecutor

    def calls(place):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.zeros((3, 40), np.float32)
            x[:, place] = 30
            results = [cupyflash.softmax(x, 1) for _ in range(200)]
            attended = [cupyflash.attention(x, x, x) for _ in range(50)]
            stream.synchronize()
            found = {int(to_host(y).argmax(1)[0]) for y in (*results, *attended)}
            return found == {place}

    cupyflash.softmax(cupy.zeros((3, 40), np.float32), 1)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(calls, range(32)))


def test_calls_keep_no_array_alive(cupy, rng):
    """Plans hold shapes, not arrays."""
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        x = cupy.zeros((50, 70), np.float32)
        q = cupy.zeros((2, 3, 40, 16), np.float32)
        for _ in range(2):
            cupyflash.softmax(x, 1, out=x)
            cupyflash.softmax_vjp(x, x, 1)
            cupyflash.logsumexp(x, 1)
            cupyflash.attention(q, q, q)
        del x, q
        assert pool.used_bytes() == 0


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_what_the_card_cannot_hold_goes_to_the_next_kernel(
    cupy, rng, monkeypatch, function
):
    """A launch of more blocks than can run together is refused by the driver."""
    x = cupy.asarray(rng.normal(size=(40, 300)).astype(np.float32))
    compute = getattr(cupyflash, function)
    expected = to_host(compute(x, 1))
    chosen = cupyflash.explain(compute, x, 1).kernel
    rows = softmax_registry.KERNELS
    (row,) = (row for row in rows if row.name == chosen)

    def too_many(problem, device):
        configs = row.heuristic(problem, device)
        if isinstance(configs, str):
            return configs
        return tuple(
            softmax_config.varied(config, (1 << 20,), cooperative=True)
            for config in configs
        )

    unfit = dataclasses.replace(row, heuristic=too_many)
    monkeypatch.setattr(
        softmax_registry,
        "KERNELS",
        tuple(unfit if other is row else other for other in rows),
    )
    monkeypatch.setattr(softmax_gpu, "_plans", plan_cache.PlanCache())
    result = to_host(compute(x, 1))
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    (plan,) = softmax_gpu._plans._plans.values()
    assert all(launch.variant.source != row.source for launch in plan.launches)
