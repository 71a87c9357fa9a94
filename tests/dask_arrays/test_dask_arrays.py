"""cupyflash.dask against the plain functions, on chunks of every kind."""

import numpy as np
import pytest

import cupyflash

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
import cupyflash.dask  # noqa: E402

# Of a result: relative, and absolute (of attention, whose values are about 1).
TOLERANCE = {
    "float16": (2e-3, 4e-3),
    "float32": (2e-6, 3e-6),
    "float64": (1e-13, 1e-13),
    "complex64": (1e-5, 1e-6),
    "complex128": (1e-13, 1e-14),
}
FAMILY = ("softmax", "log_softmax", "logsumexp")


def chunks_of(rng, shape):
    return tuple(int(rng.integers(1, max(2, n + 1))) for n in shape)


def as_dask(rng, x, share=1.0):
    """Most arrays as Dask's, in random chunks; the others as they are."""
    is_array = isinstance(x, np.ndarray) and x.ndim > 0
    if not is_array or rng.random() > share:
        return x
    return da.from_array(x, chunks=chunks_of(rng, x.shape))


def compare(got, want, near_zero):
    """Of one shape and dtype before they are computed, and of equal values then."""
    assert isinstance(got, da.Array)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    values = np.asarray(got.compute(scheduler="sync"))
    assert (values.shape, values.dtype) == (want.shape, want.dtype)
    rtol, atol = TOLERANCE[want.dtype.name]
    wide = "complex128" if want.dtype.kind == "c" else "float64"
    # Logarithms near 0 keep their digits; complex ones do not promise it.
    atol = atol if near_zero or want.dtype.kind == "c" else 1e-37
    np.testing.assert_allclose(
        values.astype(wide), np.asarray(want).astype(wide), rtol=rtol, atol=atol
    )


def family_problem(rng):
    """(function, x, options) of the softmax family."""
    shape = tuple(rng.integers(1, 9, rng.integers(1, 4)))
    dtypes = ["float16", "float32", "float64", "int32", "complex128", "complex64"]
    dtype = np.dtype(rng.choice(dtypes))
    x = rng.normal(size=shape) * 10.0 ** rng.integers(0, 3)
    if dtype.kind == "c":
        x = x + 1j * rng.normal(size=shape)
    x = x.astype(dtype)
    if dtype.kind == "f" and rng.random() < 0.4:
        place = rng.random(shape)
        x[place < 0.2] = -np.inf
        if rng.random() < 0.3:
            x[place > 0.95] = np.inf
        if rng.random() < 0.3:
            x[(place > 0.9) & (place < 0.93)] = np.nan
    axes = [None, -1, 0, tuple(range(len(shape)))]
    options = {"axis": axes[rng.integers(4)]}
    if rng.random() < 0.4:
        options["where"] = rng.random(shape) < 0.6
    function = str(rng.choice(FAMILY))
    if function == "logsumexp":
        if rng.random() < 0.4:
            options["b"] = rng.normal(size=shape)
        options["keepdims"] = bool(rng.integers(2))
        options["return_sign"] = bool(rng.integers(2))
    else:
        if rng.random() < 0.4:
            options["scale"] = float(rng.normal() * rng.choice([1, 10, 1e-3, 0]))
        if rng.random() < 0.3 and dtype.kind != "c":
            options["dtype"] = str(rng.choice(["float16", "float32", "float64"]))
    return function, x, options


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_hidden_elements_beside_special_values(name, bad, scale, chunks):
    x, where = np.array([1.0, 2.0, bad, 3.0]), np.array([True, False, True, True])
    options = {"where": where, "scale": scale}
    want = getattr(cupyflash, name)(x, **options)
    y = getattr(cupyflash.dask, name)(da.from_array(x, chunks=chunks), **options)
    np.testing.assert_allclose(y.compute(), want, rtol=1e-15)


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_results_have_the_chunks_of_x(name, dtype, axis):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    where = np.array([True, False, True, True])
    given = da.from_array(x, chunks=((2, 1), (1, 3)))
    for where_chunks in (1, 2, 4):
        hidden = da.from_array(where, chunks=where_chunks)
        y = getattr(cupyflash.dask, name)(given, axis, where=hidden)
        assert y.chunks == given.chunks
        want = getattr(cupyflash, name)(x, axis, where=where)
        np.testing.assert_allclose(y.compute(), want, rtol=1e-6)


@pytest.mark.parametrize("first", range(0, 120, 12))
def test_softmax_family(first):
    for seed in range(first, first + 12):
        rng = np.random.default_rng(seed)
        function, x, options = family_problem(rng)
        want = getattr(cupyflash, function)(x, **options)
        lazy = {name: as_dask(rng, value, 0.8) for name, value in options.items()}
        got = getattr(cupyflash.dask, function)(
            as_dask(rng, x), split_every=int(rng.integers(2, 5)), **lazy
        )
        many = isinstance(want, tuple)
        for one, other in zip(
            got if many else (got,), want if many else (want,), strict=True
        ):
            compare(one, other, near_zero=False)


def attention_problem(rng):
    """(arrays q, k, v; options)."""
    batch = tuple(rng.integers(1, 4, rng.integers(0, 3)))
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(rng.integers(1, 4))
    seqlen_q, seqlen_k = int(rng.integers(0, 12)), int(rng.integers(0, 14))
    head_dim, head_dim_v = rng.integers(1, 9, 2)
    dtype = str(rng.choice(["float16", "float32", "float64"]))
    if is_matrix := rng.random() < 0.1:
        batch, heads, lead, lead_kv = (), 1, (), ()
    else:
        of_keys = tuple(n if rng.random() < 0.8 else 1 for n in batch)
        lead, lead_kv = (*batch, heads), (*of_keys, kv_heads)
    q = rng.normal(size=(*lead, seqlen_q, head_dim)).astype(dtype)
    k = rng.normal(size=(*lead_kv, seqlen_k, head_dim)).astype(dtype)
    v = rng.normal(size=(*lead_kv, seqlen_k, head_dim_v)).astype(dtype)
    options = {}
    if rng.random() < 0.3:
        shape = [rng.choice([1, n]) for n in (heads, seqlen_q, seqlen_k)]
        options["bias"] = rng.normal(size=shape).astype(dtype)
    if rng.random() < 0.3:
        shape = (*batch, rng.choice([1, heads]), seqlen_q, seqlen_k)
        options["mask"] = rng.random(shape) < 0.7
    if rng.random() < 0.3:
        options["sinks"] = rng.normal(size=heads).astype(dtype)
    if rng.random() < 0.3:
        options["alibi_slopes"] = rng.random(heads).astype("float32")
    if rng.random() < 0.3:
        options["softcap"] = 2.0
    if rng.random() < 0.4:
        options["causal"] = True
    if rng.random() < 0.3:
        windows = [3, (int(rng.integers(0, 6)), None), (None, 2)]
        options["window"] = windows[rng.integers(3)]
    if rng.random() < 0.3:
        of_entries = rng.integers(-3, 6, size=batch)
        offset = int(rng.integers(-5, 8))
        options["query_offset"] = offset if rng.random() < 0.5 else of_entries
    if rng.random() < 0.3:
        options["query_lengths"] = rng.integers(0, seqlen_q + 1, size=batch)
    if rng.random() < 0.3:
        options["key_lengths"] = rng.integers(0, seqlen_k + 1, size=batch)
    arrays = (q, k, v)
    if rng.random() < 0.3 and not is_matrix:
        options["layout"] = "bshd"
        arrays = tuple(x.swapaxes(-3, -2).copy() for x in arrays)
    return arrays, options


@pytest.mark.parametrize("first", range(0, 80, 8))
def test_attention(first):
    for seed in range(first, first + 8):
        rng = np.random.default_rng(seed)
        arrays, options = attention_problem(rng)
        want = cupyflash.attention(*arrays, return_lse=True, **options)
        got = cupyflash.dask.attention(
            *(as_dask(rng, x) for x in arrays),
            return_lse=True,
            split_every=int(rng.integers(2, 5)),
            **{name: as_dask(rng, x, 0.8) for name, x in options.items()},
        )
        for one, other in zip(got, want, strict=True):
            compare(one, other, near_zero=True)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_merge(as_list, axis):
    rng = np.random.default_rng(0)
    outs, lses = rng.normal(size=(5, 4, 6, 3)), rng.normal(size=(5, 4, 6))
    lses[1:3] = -np.inf
    if as_list:
        want = cupyflash.merge_attention_states(list(outs), list(lses), axis=axis)
        lazy = [[as_dask(rng, x) for x in parts] for parts in (outs, lses)]
    else:
        outs, lses = (np.moveaxis(x, 0, axis % 3) for x in (outs, lses))
        want = cupyflash.merge_attention_states(outs, lses, axis=axis)
        lazy = [as_dask(rng, x) for x in (outs, lses)]
    got = cupyflash.dask.merge_attention_states(*lazy, axis=axis, split_every=2)
    for one, other in zip(got, want, strict=True):
        compare(one, other, near_zero=True)


def test_nothing_is_computed_before_it_is_asked_for():
    calls = []

    def read(block):
        calls.append(block.shape)
        return block

    x = da.zeros((4, 6), chunks=2).map_blocks(read, dtype=float, meta=np.empty((0, 0)))
    q = x[:, None]
    lazy = [
        cupyflash.dask.softmax(x, axis=0),
        cupyflash.dask.logsumexp(x, axis=1),
        *cupyflash.dask.attention(q, q, q, return_lse=True),
        *cupyflash.dask.merge_attention_states(q, q[..., 0]),
    ]
    assert calls == []
    assert [y.dtype for y in lazy] == [np.dtype(float)] * len(lazy)
    assert all(isinstance(y._meta, np.ndarray) for y in lazy)


def calls_in(x, name):
    """How many tasks of a graph call a chunk of attention."""
    return sum(isinstance(key, tuple) and key[0].startswith(name) and len(key) == 5
               for key in x.__dask_graph__())  # fmt: skip


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, 64),
        ({"causal": True}, 36),  # 8 * 9 / 2
        ({"window": (8, 0)}, 15),  # its own chunk and the one before
        ({"window": 0}, 8),
        ({"causal": True, "query_offset": -64}, 8),  # none is seen: one gives the 0
        ({"causal": True, "key_lengths": np.array([64])}, 64),  # not known to the host
    ],
)
def test_what_no_query_sees_is_no_part_of_the_graph(options, calls):
    x = da.random.default_rng(0).normal(size=(1, 1, 64, 4), chunks=(1, 1, 8, 4))
    out = cupyflash.dask.attention(x, x, x, **options)
    assert calls_in(out, "attention-") == calls
    want = cupyflash.attention(*[x.compute()] * 3, **options)
    np.testing.assert_allclose(out.compute(), want, atol=1e-13)


def test_chunks_of_heads_that_fit_take_a_task_each():
    x = da.random.default_rng(0).normal(size=(1, 4, 8, 4), chunks=(1, 1, 8, 4))
    x = x.persist()
    (out,) = dask.optimize(cupyflash.dask.attention(x, x, x).sum())
    # Each chunk, its call, and its name in the sum; 4, 2 and 1 sums.
    assert len(out.__dask_graph__()) <= 3 * 4 + 7
    one_head_of_keys = x[:, :1]
    found = cupyflash.dask.attention(x, one_head_of_keys, one_head_of_keys)
    want = cupyflash.attention(*(y.compute() for y in (x, *[one_head_of_keys] * 2)))
    np.testing.assert_allclose(found.compute(), want, atol=1e-13)


def test_errors_are_those_of_the_functions_and_come_at_once():
    x = da.zeros((2, 3), chunks=1)
    with pytest.raises(np.exceptions.AxisError):
        cupyflash.dask.softmax(x, axis=2)
    with pytest.raises(TypeError, match="where must be bool"):
        cupyflash.dask.softmax(x, where=x)
    with pytest.raises(ValueError, match="does not broadcast"):
        cupyflash.dask.logsumexp(x, b=da.zeros(4))
    with pytest.raises(ValueError, match="the same head_dim"):
        cupyflash.dask.attention(x, da.zeros((2, 4)), x)
    with pytest.raises(TypeError, match=r"is_causal.*causal="):
        cupyflash.dask.attention(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="key_lengths must be from 0 to seqlen_k = 2"):
        cupyflash.dask.attention(x, x, x, key_lengths=np.array(3))
    with pytest.raises(ValueError, match=r"key_lengths\[1\] is 3"):
        cupyflash.dask.attention(*[x[:, None, None]] * 3, key_lengths=[1, 3])
    with pytest.raises(TypeError, match="mask must be an array here, not a function"):
        cupyflash.dask.attention(x, x, x, mask=lambda i, j: i >= j)
    with pytest.raises(TypeError, match="int or an integer array, got float"):
        cupyflash.dask.attention(x, x, x, query_offset=1.0)
    for function in (cupyflash.dask.attention, cupyflash.dask.merge_attention_states):
        with pytest.raises(TypeError, match="must be an array, got None"):
            function(x)
    for function in (cupyflash.dask.softmax, cupyflash.dask.logsumexp):
        with pytest.raises(TypeError, match="must be an array, got None"):
            function(None)
        with pytest.raises(TypeError, match="here it is axis="):
            function(x, dim=0)
    with pytest.raises(ValueError, match="empty list"):
        cupyflash.dask.merge_attention_states([], [])


@pytest.mark.parametrize(
    ("split_every", "kind"), [(0, ValueError), (1, ValueError), (2.5, TypeError)]
)
def test_split_every(split_every, kind):
    x = da.zeros((2, 3, 4), chunks=1)
    for function, arguments in (
        (cupyflash.dask.softmax, (x,)),
        (cupyflash.dask.logsumexp, (x,)),
        (cupyflash.dask.attention, (x, x, x)),
        (cupyflash.dask.merge_attention_states, (x, x[..., 0])),
    ):
        with pytest.raises(kind, match="split_every must be"):
            function(*arguments, split_every=split_every)


def test_chunks_that_the_functions_would_refuse():
    masked = da.from_array(np.ma.masked_array(np.zeros(3), [1, 0, 0]), chunks=1)
    with pytest.raises(TypeError, match="x is a masked array"):
        cupyflash.dask.softmax(masked)
    with pytest.raises(TypeError, match="where is a masked array"):
        cupyflash.dask.softmax(da.zeros(3), where=masked)


@pytest.mark.parametrize(
    "options",
    [
        {"query_offset": -(2**70), "window": (2**70, 2**70)},
        {"query_offset": 2**70, "window": (2**70, 0)},
        {"query_offset": -(2**70), "causal": True},
    ],
    ids=str,
)
def test_offsets_beyond_64_bits(options):
    x = np.random.default_rng(0).normal(size=(1, 8, 2))
    lazy = da.from_array(x, chunks=(1, 3, 2))
    got = cupyflash.dask.attention(lazy, lazy, lazy, **options)
    compare(got, cupyflash.attention(x, x, x, **options), near_zero=True)


def test_lengths_in_dask_arrays_are_checked_when_they_are_computed():
    x = da.zeros((2, 1, 6, 3), chunks=2)
    lengths = da.from_array(np.array([6, 7]), chunks=1)
    out = cupyflash.dask.attention(x, x, x, key_lengths=lengths)
    with pytest.raises(ValueError, match=r"from 0 to seqlen_k = 6, but .* is 7"):
        out.compute(scheduler="sync")


def test_axes_of_unknown_length():
    x = da.zeros(6, chunks=2)
    x = x[x > 0]
    with pytest.raises(ValueError, match=r"x\.compute_chunk_sizes\(\)"):
        cupyflash.dask.softmax(x)


def test_the_plain_functions_name_this_module():
    with pytest.raises(TypeError, match=r"use cupyflash\.dask"):
        cupyflash.attention(*[da.zeros((2, 2))] * 3)


def test_equal_calls_have_equal_names():
    """So that Dask computes what two results share once."""
    x = da.zeros((4, 4), chunks=2)
    one, other = (cupyflash.dask.softmax(x, axis=0, scale=2.0) for _ in range(2))
    assert one.name == other.name
    assert one.name != cupyflash.dask.softmax(x, axis=0, scale=3.0).name
    one, other = (cupyflash.dask.attention(x, x, x, causal=True) for _ in range(2))
    assert one.name == other.name
    assert one.name != cupyflash.dask.attention(x, x, x).name


def test_in_processes():
    """Arguments and results of tasks travel between processes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 8))
    lazy = da.from_array(x, chunks=(3, 4))
    q = rng.normal(size=(1, 2, 8, 3))
    of_q = da.from_array(q, chunks=(1, 1, 4, 3))
    results = (
        cupyflash.dask.softmax(lazy, axis=1),
        cupyflash.dask.logsumexp(lazy),
        cupyflash.dask.attention(of_q, of_q, of_q, causal=True),
    )
    got = da.compute(*results, scheduler="processes", num_workers=2)
    want = (
        cupyflash.softmax(x, axis=1),
        cupyflash.logsumexp(x),
        cupyflash.attention(q, q, q, causal=True),
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13)


def test_under_distributed():
    distributed = pytest.importorskip("distributed")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 64))
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster),
    ):
        got = cupyflash.dask.softmax(da.from_array(x, chunks=16), axis=1).compute()
    np.testing.assert_allclose(got, cupyflash.softmax(x, axis=1), rtol=1e-13)


@pytest.mark.gpu
def test_chunks_on_a_gpu(cupy):
    rng = np.random.default_rng(0)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        function, x, options = family_problem(rng)
        if x.dtype.kind == "c" or "dtype" in options:
            continue
        want = getattr(cupyflash, function)(x, **options)
        on_gpu = {
            name: cupy.asarray(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        lazy = da.from_array(
            cupy.asarray(x), chunks=chunks_of(rng, x.shape), asarray=False
        )
        got = getattr(cupyflash.dask, function)(lazy, **on_gpu)
        many = isinstance(want, tuple)
        for one, other in zip(
            got if many else (got,), want if many else (want,), strict=True
        ):
            values = one.compute(scheduler="sync")
            assert isinstance(values, cupy.ndarray)
            compare(one.map_blocks(cupy.asnumpy), np.asarray(other), near_zero=True)


@pytest.mark.gpu
def test_attention_on_a_gpu(cupy):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        arrays, options = attention_problem(rng)
        want = cupyflash.attention(*arrays, **options)
        on_gpu = {
            name: cupy.asarray(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        got = cupyflash.dask.attention(
            *(
                da.from_array(
                    cupy.asarray(x), chunks=chunks_of(rng, x.shape), asarray=False
                )
                for x in arrays
            ),
            **on_gpu,
        )
        assert isinstance(got._meta, cupy.ndarray)
        compare(got.map_blocks(cupy.asnumpy), want, near_zero=True)
