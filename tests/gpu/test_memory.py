"""What calls take from the pool, what they give back, and when there is none."""

import mixed
import numpy as np
import pytest
from accuracy import dtype_of
from counting import Counting
from placing import place

import cupyflash

pytest.importorskip("cupy")

from cupyflash._cuda import graphs, runtime

pytestmark = pytest.mark.gpu

CALLS = 10_000


@pytest.fixture(autouse=True)
def _give_back(cupy):
    """Other processes test on the same device."""
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def test_ten_thousand_mixed_calls_keep_nothing(cupy, record_property):
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        calls = mixed.calls(cupy, 1)
        for _ in range(2):
            for call in calls.values():
                call()
        used, total = pool.used_bytes(), pool.total_bytes()
        for i in range(CALLS):
            name = mixed.NAMES[i % len(mixed.NAMES)]
            calls[name]()
        assert (pool.used_bytes(), pool.total_bytes()) == (used, total)
    record_property("cases", CALLS)


def test_a_thousand_shapes_keep_nothing(cupy):
    """Plans of ever new shapes hold no device memory."""
    x = cupy.ones((40, 1100), np.float32)
    q = cupy.ones((1, 2, 1100, 64), np.float32)
    cupyflash.softmax(x, -1)
    cupyflash.attention(q, q, q)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        for n in range(70, 1070):
            cupyflash.softmax(x[:, :1000] if n % 2 else x[: n % 39 + 1], -1)
            cupyflash.attention(q[:, :, :n], q, q)
        assert pool.used_bytes() == 0


# --- out of memory -------------------------------------------------------------------


def out_of_memory_calls(cupy, rng):
    """{name: (call with out, out, inputs)} of calls that need memory of their own."""

    def normal(shape, dtype):
        return place(cupy, rng.normal(size=shape).astype(dtype_of(dtype)))

    found = {}
    for name, dtype, seqlen_q, seqlen_k, options in (
        ("parts of the keys", "float16", 1, 8000, {}),
        ("split numbers", "float32", 300, 200, {}),
        ("lse", "float64", 70, 80, {"return_lse": True}),
        ("scores", "float32", 70, 80, {"method": "safe"}),
    ):
        q, k, v = (normal((1, 2, n, 64), dtype) for n in (seqlen_q, seqlen_k, seqlen_k))
        out = normal(q.shape, dtype)

        def call(q=q, k=k, v=v, out=out, options=options):
            return cupyflash.attention(q, k, v, out=out, **options)

        found[name] = call, out, (q, k, v)
    x = normal((2, 700_000), "float32")
    y = cupy.empty_like(x)
    y[...] = x
    found["long rows"] = (lambda: cupyflash.softmax(x, 1, out=y)), y, (x,)
    few, dy = normal((2, 300_001), "float32"), normal((2, 300_001), "float32")
    dx = cupy.ones_like(few)
    found["gradients of long rows"] = (
        lambda: cupyflash.softmax_vjp(few, dy, 1, out=dx), dx, (few, dy),
    )  # fmt: skip
    sums = cupy.ones(2, np.float32)
    found["sums of long rows"] = (
        lambda: cupyflash.logsumexp(x, 1, out=sums), sums, (x,),
    )  # fmt: skip
    outs, lses = normal((3, 2, 70, 64), "float32"), normal((3, 2, 70), "float32")
    merged = cupy.ones((2, 70, 64), np.float32)
    found["merge"] = (
        lambda: cupyflash.merge_attention_states(outs, lses, out=merged), merged,
        (outs, lses),
    )  # fmt: skip
    return found


NEEDY = (
    "parts of the keys", "split numbers", "lse", "scores", "long rows",
    "gradients of long rows", "sums of long rows", "merge",
)  # fmt: skip


@pytest.mark.parametrize("name", NEEDY)
@pytest.mark.parametrize("is_warm", [False, True])
def test_out_of_memory_changes_nothing(cupy, rng, name, is_warm):
    """Inputs and out stay as they were, and the same call works afterwards."""
    call, out, inputs = out_of_memory_calls(cupy, rng)[name]
    if is_warm:
        kept = out.copy()
        call()
        out[...] = kept
    before = [x.copy() for x in (out, *inputs)]
    empty = cupy.cuda.MemoryPool()
    empty.set_limit(size=1)
    with cupy.cuda.using_allocator(empty.malloc):
        for _ in range(2):
            with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
                call()
    for x, was in zip((out, *inputs), before, strict=True):
        assert mixed.same(x, was)
    first = call()
    first = [x.copy() for x in mixed.arrays(first)]
    assert mixed.same(call(), tuple(first) if len(first) > 1 else first[0])
    assert not mixed.same(out, before[0])


@pytest.mark.parametrize("name", mixed.NAMES)
def test_out_of_memory_of_every_call(cupy, name):
    """At each of its allocations in turn."""
    call = mixed.call(cupy, 2, name)
    expected = call()
    counting = Counting(cupy)
    with cupy.cuda.using_allocator(counting):
        call()
    malloc = cupy.get_default_memory_pool().malloc
    for allowed in range(len(counting.sizes)):
        left = [allowed]

        def few(size, left=left):
            if not left[0]:
                raise cupy.cuda.memory.OutOfMemoryError(size, 0, 0)
            left[0] -= 1
            return malloc(size)

        with (
            cupy.cuda.using_allocator(few),
            pytest.raises(cupy.cuda.memory.OutOfMemoryError),
        ):
            call()
        assert mixed.same(call(), expected)


# --- graphs --------------------------------------------------------------------------


def _pointers(x):
    """Of all that was kept: arrays, memory, and tuples of them."""
    if x is None:
        return set()
    if isinstance(x, (tuple, list)):
        return set().union(*map(_pointers, x))
    return {x.data.ptr if hasattr(x, "data") else x.ptr}


@pytest.mark.parametrize("name", mixed.NAMES)
def test_a_captured_call_keeps_what_it_takes(cupy, name, monkeypatch):
    """All but its results, of a call that has a plan."""
    kept = []
    monkeypatch.setattr(graphs, "_kept_for_graphs", kept)
    call = mixed.call(cupy, 8, name)
    cupy.cuda.Device().synchronize()
    malloc, taken = cupy.get_default_memory_pool().malloc, set()

    def noting(size):
        memory = malloc(size)
        if stream.is_capturing():
            taken.add(memory.ptr)
        return memory

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(noting):
        for _ in range(2):
            call()
        stream.synchronize()
        stream.begin_capture()
        try:
            result = call()
        finally:
            stream.end_capture()
    assert taken - _pointers(mixed.arrays(result)) <= _pointers(kept)


# --- extra memory --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_tiled_at_131072_takes_out_and_lse(cupy, rng, dtype):
    n, dim = 131_072, 64
    shape = (1, 1, n, dim)
    random = cupy.random.RandomState(1)
    q, k, v = (
        random.standard_normal(shape, np.float32).astype(dtype_of(dtype)) for _ in "qkv"
    )
    cupyflash.attention(q, k, v, return_lse=True, method="tiled")
    counting = Counting(cupy)
    with cupy.cuda.using_allocator(counting):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, method="tiled")
    assert sorted(counting.sizes) == sorted((out.nbytes, lse.nbytes))


@pytest.mark.slow
def test_tiled_float32_at_131072_takes_four_times_out(cupy):
    """As documented: the parts of k and v, of up to four times the result."""
    random = cupy.random.RandomState(1)
    q, k, v = (random.standard_normal((1, 1, 131_072, 64), np.float32) for _ in "qkv")
    cupyflash.attention(q, k, v, return_lse=True, method="tiled")
    counting = Counting(cupy)
    with cupy.cuda.using_allocator(counting):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, method="tiled")
    own = out.nbytes + lse.nbytes
    assert sum(counting.sizes) - own <= 4.1 * out.nbytes


def _extra(cupy, call):
    """(result, bytes taken beside it)."""
    call()
    counting = Counting(cupy)
    with cupy.cuda.using_allocator(counting):
        result = call()
    return result, sum(counting.sizes) - _bytes(result)


def _bytes(result):
    """Of its arrays: of gradients, those that are asked for."""
    return sum(x.nbytes for x in mixed.arrays(result) if x is not None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 16, 300])
@pytest.mark.parametrize("seqlen_k", [8_000, 30_000])
def test_parts_of_the_keys_stay_small(cupy, dtype, dim, seqlen_q, seqlen_k):
    """As documented: below 40 MiB, and what float32 prepares below 256 MiB."""
    random = cupy.random.RandomState(1)
    q, k, v = (
        random.standard_normal((1, 2, n, dim), np.float32).astype(dtype_of(dtype))
        for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    _, extra = _extra(cupy, lambda: cupyflash.attention(q, k, v))
    assert extra <= (256 << 20 if dtype == "float32" else 40 << 20)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seqlen_q", [64, 300])
def test_parts_of_very_many_keys(cupy, dtype, seqlen_q):
    """As documented: up to four times what one head of k and v takes."""
    random = cupy.random.RandomState(1)
    q, k, v = (
        random.standard_normal((1, 2, n, 64), np.float32).astype(dtype)
        for n in (seqlen_q, 100_000, 100_000)
    )
    _, extra = _extra(cupy, lambda: cupyflash.attention(q, k, v))
    prepared = 256 << 20 if dtype == "float32" else 0
    assert extra <= 4 * (k[0, 0].nbytes + v[0, 0].nbytes) + prepared


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_copies_take_four_times_the_result_each(cupy, layout):
    """Of q, k and v whose rows TMA cannot read."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("other cards copy nothing")
    shape = (2, 4, 700, 65) if layout == "bhsd" else (2, 700, 4, 65)
    random = cupy.random.RandomState(1)
    q, k, v = (
        random.standard_normal(shape, np.float32).astype(np.float16) for _ in "qkv"
    )
    report = cupyflash.explain("attention", q, k, v, layout=layout)
    assert report.details["copied first"] == "q, k, v"
    out, extra = _extra(cupy, lambda: cupyflash.attention(q, k, v, layout=layout))
    assert out.nbytes <= extra <= 3 * 4 * out.nbytes


def _gradients(cupy, rng, dtype, queries, keys, dim):
    """A call of attention_vjp, and its arguments."""
    q, k, v, dout = (
        place(cupy, rng.normal(size=(2, 4, n, dim)).astype(dtype))
        for n in (queries, keys, keys, queries)
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    arguments = dout, q, k, v, out, lse
    return lambda: cupyflash.attention_vjp(*arguments), arguments


@pytest.mark.parametrize(("queries", "keys"), [(9, 1000), (100, 600), (300, 1500)])
def test_copies_of_gradients_are_as_large_as_they(cupy, rng, queries, keys):
    """Beside copies there are dq, dk and dv before they are trimmed, and sums of dq."""
    if runtime.device(0).arch != "sm_90":
        pytest.skip("other cards copy nothing")
    call, arguments = _gradients(cupy, rng, np.float16, queries, keys, 103)
    report = cupyflash.explain("attention_vjp", *arguments)
    assert report.details["copied first"] == "q, k, v, dout"
    grads, extra = _extra(cupy, call)
    results = _bytes(grads)
    rows = 2 * 4 * -(-queries // 128) * 128
    of_rows = rows * (128 + 4) * 4  # sums of dq, statistics
    assert results <= extra <= 2.5 * results + of_rows + (1 << 16)


@pytest.mark.parametrize(("queries", "keys"), [(2048, 2048), (1100, 5000)])
@pytest.mark.parametrize("dim", [4, 7, 8, 16, 30, 32])
def test_gradients_of_narrow_float32_rows(cupy, rng, queries, keys, dim):
    """As documented: as much as q, k, v and dout in rows of 64 columns."""
    call, arguments = _gradients(cupy, rng, np.float32, queries, keys, dim)
    if runtime.device(0).cc >= (8, 0):
        assert cupyflash.explain("attention_vjp", *arguments).kernel == "mma_split"
    _, extra = _extra(cupy, call)
    padded = sum(x.nbytes for x in arguments[:4]) // dim * 64
    assert extra <= 1.1 * padded
