"""Attention against the oracle, one body for NumPy and CuPy."""

import fuzz
import numpy as np
import oracle
import pytest
from accuracy import (
    BOUNDS,
    FLOATS,
    assert_as_accurate,
    assert_same_specials,
    attention_bound,
    dtype_of,
    finfo,
    max_error,
    to_host,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from placing import FORMS, empty, place

import cupyflash
from cupyflash._reference import forward as reference

METHODS = ("auto", "naive", "safe", "online", "tiled")
STABLE = ("auto", "safe", "online", "tiled")
INF, NAN = np.inf, np.nan
# (seqlen_q, seqlen_k): one, around a warp, around a tile, one long.
SEQLENS = ((1, 1), (1, 1000), (127, 129), (128, 128), (1000, 1), (65, 300), (3, 2049))


def inputs(rng, dtype="float32", q=(2, 4, 20, 16), k=(2, 2, 24, 16), head_dim_v=None):
    """q, k, v on the host; some rows see large scores, some nearly one key alone."""
    v = (*k[:-1], head_dim_v or k[-1])
    q, k, v = (rng.normal(size=shape) for shape in (q, k, v))
    q[..., ::3, :] *= 20
    return tuple(x.astype(dtype_of(dtype)) for x in (q, k, v))


def gentle(rng, dtype="float32", **shapes):
    """As inputs, with scores that naive can take."""
    q, k, v = (x.astype(np.float64) for x in inputs(rng, "float64", **shapes))
    q[..., ::3, :] /= 20
    return tuple((x * 0.5).astype(dtype_of(dtype)) for x in (q, k, v))


def on(xp, *arrays):
    return tuple(place(xp, x) for x in arrays)


def agree(xp, q, k, v, forms=None, out=None, **options):
    """Call with lse, compare both with the oracle, return (out, lse)."""
    arrays = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    other = {n: x for n, x in options.items() if n not in arrays}
    other = {"method": "auto", "layout": "bhsd", "return_lse": True, **other}
    arrays = fuzz.lengths_for(xp, {"q": q, "k": k, **arrays}, other["layout"])
    del arrays["q"], arrays["k"]
    forms = forms or {}
    problem = fuzz.Problem(
        "attention",
        0,
        None,
        "attention",
        {"q": q, "k": k, "v": v} | arrays,
        forms,
        other,
    )
    growth = fuzz.growth_of_sums(xp, q.shape[-1], "tiled")
    exact, mean, exact_lse, size = fuzz.exact_and_mean(problem, growth)
    allowed, allowed_lse = fuzz.attention_bounds(problem, mean, exact_lse, size)
    placed = {n: place(xp, x, forms.get(n, "plain")) for n, x in problem.arrays.items()}
    result = [placed.pop(n) for n in "qkv"]
    got, lse = cupyflash.attention(*result, **placed, **other, out=out)
    assert isinstance(got, xp.ndarray)
    assert isinstance(lse, xp.ndarray)
    assert got.dtype == q.dtype
    assert lse.dtype == (np.float64 if q.dtype == np.float64 else np.float32)
    for actual, expected, bound in (
        (got, exact, allowed),
        (lse, exact_lse, allowed_lse),
    ):
        finite = assert_same_specials(actual, expected)
        if finite.any():
            error = np.abs(wide(actual)[finite] - expected[finite])
            assert np.all(error <= np.broadcast_to(bound, finite.shape)[finite])
    return got, lse


# --- shapes --------------------------------------------------------------------------


@pytest.mark.parametrize("method", STABLE)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SEQLENS)
def test_every_length(xp, rng, method, dtype, causal, seqlen_q, seqlen_k):
    shapes = {"q": (1, 2, seqlen_q, 32), "k": (1, 1, seqlen_k, 32)}
    agree(xp, *inputs(rng, dtype, **shapes), method=method, causal=causal)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 16, 17, 32, 48, 64, 80, 96, 100, 128])
def test_every_head_dim(xp, rng, dtype, head_dim):
    shapes = {"q": (2, 33, head_dim), "k": (2, 40, head_dim)}
    agree(xp, *inputs(rng, dtype, **shapes))


@pytest.mark.parametrize("head_dim", [129, 192, 256, 257, 512, 1000])
@pytest.mark.parametrize("method", METHODS)
def test_large_head_dims(xp, rng, head_dim, method):
    shapes = {"q": (2, 9, head_dim), "k": (2, 70, head_dim)}
    for dtype in ("float32", "float64"):
        agree(xp, *gentle(rng, dtype, **shapes), method=method)


@pytest.mark.gpu
@pytest.mark.parametrize("method", STABLE)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 576), ("float32", 640), ("bfloat16", 619)]
)
def test_scores_of_wide_heads_round_little(cupy, rng, method, dtype, head_dim):
    # All products of one sign: lse is all but the score of a query and its own key.
    k = rng.normal(size=(1, 2, 300, head_dim)).astype(dtype_of(dtype))
    q = 8 * k
    scale = 0.1
    _, lse = cupyflash.attention(
        *(place(cupy, x) for x in (q, k, k)),
        scale=scale,
        method=method,
        return_lse=True,
    )
    exact = scale * (wide(q) * wide(k)).sum(-1)
    # A score is rounded to 2^-22 of its size, lse to 2^-23.
    assert max_error(lse, exact) <= 2.0**-22 * 1.5 * exact.max()


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(1, 8), (8, 1), (64, 16), (16, 64), (40, 129), (256, 3)],
)
@pytest.mark.parametrize("method", METHODS)
def test_values_of_another_dimension(xp, rng, head_dim, head_dim_v, method):
    shapes = {"q": (2, 10, head_dim), "k": (2, 35, head_dim)}
    agree(xp, *gentle(rng, head_dim_v=head_dim_v, **shapes), method=method)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1), (3, 1), (32, 4)])
@pytest.mark.parametrize("method", METHODS)
def test_query_heads_share_key_heads(xp, rng, layout, heads, method):
    shapes = {"q": (2, heads[0], 5, 8), "k": (2, heads[1], 7, 8)}
    q, k, v = gentle(rng, **shapes)
    repeated = [np.repeat(x, heads[0] // heads[1], axis=1) for x in (k, v)]
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = agree(xp, q, k, v, layout=layout, method=method)
    same, same_lse = agree(
        xp, q if layout == "bhsd" else q.swapaxes(1, 2), *repeated, method=method
    )
    if layout == "bshd":
        same = same.swapaxes(1, 2)
    np.testing.assert_allclose(to_host(out), to_host(same), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(to_host(lse), to_host(same_lse), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((5, 8), (7, 8), (7, 4)),
        ((3, 5, 8), (7, 8), (7, 4)),
        ((5, 8), (1, 7, 8), (2, 1, 7, 4)),
        ((2, 3, 5, 8), (3, 7, 8), (3, 7, 4)),
        ((2, 1, 4, 5, 8), (3, 2, 7, 8), (1, 1, 2, 7, 4)),
        ((1, 1, 5, 8), (6, 1, 7, 8), (1, 7, 4)),
        ((0, 2, 5, 8), (0, 2, 7, 8), (1, 2, 7, 4)),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_batch_axes_broadcast(xp, rng, q, k, v, method):
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in (q, k, v))
    out, lse = agree(xp, q, k, v, method=method)
    heads = q.shape[-3] if q.ndim > 2 else 1
    if max(x.ndim for x in (q, k, v)) == 2:
        assert out.shape == (5, 4)
        assert lse.shape == (5,)
    else:
        assert out.shape[-3:] == (heads, 5, 4)
        assert lse.shape == out.shape[:-1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((2, 2, 0, 8), (2, 2, 7, 8)),
        ((0, 2, 5, 8), (0, 2, 7, 8)),
        ((2, 0, 5, 8), (2, 0, 7, 8)),
        ((2, 2, 5, 8), (2, 2, 0, 8)),
        ((2, 2, 0, 8), (2, 2, 0, 8)),
        ((0, 8), (3, 8)),
        ((3, 8), (0, 8)),
    ],
)
def test_empty(xp, method, q, k):
    for dtype in FLOATS:
        arrays = [np.ones(s).astype(dtype_of(dtype)) for s in (q, k, k)]
        out, lse = cupyflash.attention(*on(xp, *arrays), method=method, return_lse=True)
        assert out.shape == q
        assert lse.shape == q[:-1]
        assert out.dtype == dtype_of(dtype)
        assert np.all(wide(out) == 0)
        assert np.all(np.isneginf(wide(lse)))


@pytest.mark.parametrize("method", METHODS)
def test_no_keys_with_sinks(xp, method):
    q, k = np.ones((2, 3, 4, 8), np.float32), np.ones((2, 3, 0, 8), np.float32)
    sinks = np.array([0.5, -1, 2], np.float32)
    out, lse = agree(xp, q, k, k, sinks=sinks, method=method)
    assert not out.any()
    np.testing.assert_array_equal(to_host(lse)[0, :, 0], sinks)


@pytest.mark.parametrize("method", STABLE)
def test_scores_far_below_the_sink(xp, rng, method):
    """Their weights are 0 in any type."""
    q, k, v = rng.normal(size=(3, 2, 3, 20, 8)).astype(np.float32)
    q[..., 0], k[..., 0] = 1000, -1000
    out, _ = agree(xp, q, k, v, sinks=np.zeros(3, np.float32), method=method)
    assert not to_host(out).any()


# --- strides and out -----------------------------------------------------------------


@pytest.mark.parametrize("form", [*FORMS, "heads"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("method", METHODS)
def test_every_stride(xp, rng, form, layout, method):
    """Inputs and options between poison, read where they lie."""
    q, k, v = gentle(rng)
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    arrays = {
        "bias": rng.normal(size=(2, 1, 20, 24)).astype(np.float32),
        "mask": rng.random((4, 20, 24)) < 0.8,
        "key_lengths": np.array([20, 24]),
    }
    forms = dict.fromkeys((*"qkv", *arrays), form)
    agree(xp, q, k, v, forms, layout=layout, method=method, **arrays)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("method", METHODS)
def test_out_of_any_strides(xp, rng, form, layout, method):
    q, k, v = gentle(rng, head_dim_v=8)
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    shape = (*q.shape[:-1], 8)
    out = empty(xp, shape, np.float32, form)
    got, _ = agree(xp, q, k, v, out=out, layout=layout, method=method)
    assert got is out


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_written_beside_out(xp, rng, method):
    q, k, v = gentle(rng, q=(3, 5, 8), k=(3, 6, 8))
    buffer = xp.full((5, 9, 12), -7.0, np.float32)
    agree(xp, q, k, v, out=buffer[1:4, 2:7, 3:11], method=method)
    host = to_host(buffer)
    host[1:4, 2:7, 3:11] = -7
    assert np.all(host == -7)


def test_expanded_options_are_read_through_strides(xp, rng):
    q, k, v = inputs(rng)
    bias = rng.normal(size=(1, 1, 1, 24)).astype(np.float32)
    mask = rng.random((20, 1)) < 0.7
    first = agree(xp, q, k, v, bias=bias, mask=mask)
    q, k, v, bias, mask = on(xp, q, k, v, bias, mask)
    full = (2, 4, 20, 24)
    second = cupyflash.attention(
        q,
        k,
        v,
        bias=xp.broadcast_to(bias, full),
        mask=xp.broadcast_to(mask, full),
        return_lse=True,
    )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


def test_one_array_in_three_roles(xp, rng):
    x = rng.normal(size=(2, 3, 9, 8)).astype(np.float32)
    agree(xp, x, x, x)
    y = place(xp, x)
    np.testing.assert_array_equal(
        to_host(cupyflash.attention(y, y, y)),
        to_host(cupyflash.attention(y, y.copy(), y.copy())),
    )


@pytest.mark.parametrize(
    ("num_keys", "options"),
    [(100_000, {}), (100_000, {"bias": np.float32(0)}), (30_000, {"method": "online"})],
    ids=["bounded", "not bounded", "online"],
)
def test_the_error_does_not_grow_with_the_keys_on_numpy(rng, num_keys, options):
    """Equal keys: what each step rounds goes one way, and adds up."""
    q, k = np.full((128, 4), 0.3, np.float32), np.full((num_keys, 4), 0.7, np.float32)
    v = (1 + rng.random((num_keys, 4))).astype(np.float32)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    exact = v.mean(axis=0, dtype=np.float64)
    assert np.abs(out - exact).max() <= BOUNDS["attention"]["float32"] * exact.max()
    score = np.float64(q[0] @ k[0]) / 2
    np.testing.assert_allclose(lse, score + np.log(num_keys), rtol=2e-7)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_of_another_order(rng, method):
    """As NumPy's own functions: the other order in, the machine's own out."""
    q, k, v = gentle(rng)
    turned = [x.astype(x.dtype.newbyteorder()) for x in (q, k, v)]
    out, lse = cupyflash.attention(*turned, return_lse=True, method=method)
    assert out.dtype.isnative
    np.testing.assert_array_equal(out, cupyflash.attention(q, k, v, method=method))
    grads = cupyflash.attention_vjp(out, *turned, out, lse)
    expected = cupyflash.attention_vjp(out, q, k, v, out, lse)
    for actual, exact in zip(grads[:3], expected[:3], strict=True):
        assert actual.dtype.isnative
        np.testing.assert_array_equal(actual, exact)
    turned = [x.astype(x.dtype.newbyteorder())[None] for x in (out, lse)]
    merged, total = cupyflash.merge_attention_states(*turned)
    assert merged.dtype.isnative
    assert total.dtype.isnative
    np.testing.assert_allclose(merged, out, rtol=1e-6)


def test_lists_are_numpy():
    out = cupyflash.attention([[1.0, 2.0]], [[1.0, 2.0]], [[3.0, 4.0]])
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(out, [[3, 4]])


# --- options, singly and together ----------------------------------------------------

OPTIONS = {
    "nothing": lambda rng: {},
    "scale": lambda rng: {"scale": 0.05},
    "scale 0": lambda rng: {"scale": 0.0},
    "scale below 0": lambda rng: {"scale": -0.1},
    "scale as an int": lambda rng: {"scale": 1},
    "softcap": lambda rng: {"softcap": 1.5},
    "bias": lambda rng: {"bias": rng.normal(size=(2, 4, 20, 24)).astype(np.float32)},
    "bias a key": lambda rng: {"bias": rng.normal(size=(2, 1, 1, 24)).astype("f4")},
    "bias a query": lambda rng: {"bias": rng.normal(size=(20, 1)).astype(np.float64)},
    "bias a head": lambda rng: {"bias": rng.normal(size=(4, 1, 1)).astype(np.float16)},
    "bias of one": lambda rng: {"bias": np.array(0.5, np.float32)},
    "bias bfloat16": lambda rng: {
        "bias": rng.normal(size=(20, 24)).astype(dtype_of("bfloat16"))
    },
    "bias with -inf": lambda rng: {
        "bias": np.where(rng.random((4, 20, 24)) < 0.3, -INF, 0).astype(np.float32)
    },
    "mask": lambda rng: {"mask": rng.random((2, 4, 20, 24)) < 0.7},
    "mask a key": lambda rng: {"mask": rng.random((2, 1, 1, 24)) < 0.7},
    "mask a query": lambda rng: {"mask": rng.random((20, 1)) < 0.7},
    "mask of one": lambda rng: {"mask": np.array(True)},
    "mask of none": lambda rng: {"mask": np.array(False)},
    "causal": lambda rng: {"causal": True},
    "causal top-left": lambda rng: {"causal": True, "query_offset": 0},
    "causal behind": lambda rng: {"causal": True, "query_offset": -7},
    "causal far behind": lambda rng: {"causal": True, "query_offset": -100},
    "causal ahead": lambda rng: {"causal": True, "query_offset": 1000},
    "causal of arrays": lambda rng: {
        "causal": True,
        "query_offset": np.array([3, -5], np.int32),
    },
    "window": lambda rng: {"window": 3},
    "window 0": lambda rng: {"window": 0},
    "window left": lambda rng: {"window": (5, 0)},
    "window right": lambda rng: {"window": (0, 5)},
    "window open left": lambda rng: {"window": (None, 2)},
    "window open right": lambda rng: {"window": (2, None)},
    "window top-left": lambda rng: {"window": (4, 2), "query_offset": 0},
    "window and causal": lambda rng: {"window": (6, 6), "causal": True},
    "window outside": lambda rng: {"window": 2, "query_offset": 500},
    "huge window": lambda rng: {"window": 2**40, "causal": True},
    "sinks": lambda rng: {"sinks": rng.normal(size=4).astype(np.float32)},
    "sinks float64": lambda rng: {"sinks": rng.normal(size=4)},
    "one sink": lambda rng: {"sinks": np.ones(1, np.float16)},
    "large sinks": lambda rng: {"sinks": np.full(4, 8.0, np.float32)},
    "sinks of -inf": lambda rng: {"sinks": np.full(4, -INF, np.float32)},
    "alibi": lambda rng: {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0.0], "f4")},
    "alibi a batch": lambda rng: {"alibi_slopes": rng.random((2, 4)).astype("f4")},
    "alibi below 0": lambda rng: {"alibi_slopes": np.full(4, -0.1)},
    "alibi top-left": lambda rng: {
        "alibi_slopes": np.full(4, 0.3, np.float16),
        "query_offset": 0,
    },
    "key lengths": lambda rng: {"key_lengths": np.array([24, 5])},
    "key lengths 0": lambda rng: {"key_lengths": np.array([0, 13], np.int32)},
    "key lengths beyond": lambda rng: {"key_lengths": np.array([-3, 99], np.int64)},
    "one key length": lambda rng: {"key_lengths": np.array(9, np.uint8)},
    "query lengths": lambda rng: {"query_lengths": np.array([20, 7], np.int16)},
    "query lengths beyond": lambda rng: {"query_lengths": np.array([-1, 50])},
    "both lengths": lambda rng: {
        "query_lengths": np.array([11, 20]),
        "key_lengths": np.array([24, 6], np.uint16),
    },
    "lengths and causal": lambda rng: {
        "query_lengths": np.array([11, 20]),
        "key_lengths": np.array([24, 6]),
        "causal": True,
    },
    "lengths and window": lambda rng: {
        "query_lengths": np.array([20, 4]),
        "key_lengths": np.array([17, 24]),
        "window": (3, 1),
    },
    "lengths and sinks": lambda rng: {
        "query_lengths": np.array([20, 4]),
        "key_lengths": np.array([0, 24]),
        "sinks": np.ones(4, np.float32),
    },
    "lengths and an offset": lambda rng: {
        "key_lengths": np.array([24, 6]),
        "causal": True,
        "query_offset": 2,
    },
    "everything": lambda rng: {
        "bias": rng.normal(size=(2, 1, 20, 24)).astype(np.float32),
        "mask": rng.random((4, 1, 24)) < 0.9,
        "causal": True,
        "window": (15, 3),
        "softcap": 2.0,
        "sinks": rng.normal(size=4).astype(np.float32),
        "alibi_slopes": rng.random((2, 4)).astype(np.float32) * 0.1,
        "query_lengths": np.array([20, 13]),
        "key_lengths": np.array([22, 24]),
        "scale": 0.3,
    },
    "everything at an offset": lambda rng: {
        "bias": rng.normal(size=(1, 24)).astype(np.float32),
        "mask": rng.random((2, 1, 20, 1)) < 0.9,
        "window": (9, 9),
        "softcap": 5.0,
        "sinks": rng.normal(size=4).astype(np.float32),
        "alibi_slopes": rng.random(4).astype(np.float32) * 0.1,
        "key_lengths": np.array([22, 3]),
        "query_offset": np.array([2, -4]),
    },
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_options(xp, rng, option, method):
    agree(xp, *gentle(rng), method=method, **OPTIONS[option](rng))


@pytest.mark.parametrize(
    "option", ["everything", "bias with -inf", "lengths and sinks"]
)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_options_of_every_dtype(xp, rng, option, dtype, layout):
    q, k, v = inputs(rng, dtype)
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    agree(xp, q, k, v, layout=layout, **OPTIONS[option](rng))


@pytest.mark.parametrize("option", ["everything at an offset", "lengths and causal"])
@pytest.mark.parametrize("seqlens", [(1, 600), (300, 70), (257, 513)])
def test_options_over_many_tiles(xp, rng, option, seqlens):
    shapes = {"q": (2, 4, seqlens[0], 16), "k": (2, 2, seqlens[1], 16)}
    options = OPTIONS[option](rng)
    for name, axes in (("bias", (1, seqlens[1])), ("mask", (2, 1, seqlens[0], 1))):
        if name in options:
            fresh = rng.normal(size=axes)
            options[name] = (fresh > -1) if name == "mask" else fresh.astype(np.float32)
    options["key_lengths"] = np.array([seqlens[1], seqlens[1] // 2])
    agree(xp, *inputs(rng, **shapes), **options)


@pytest.mark.parametrize("name", ["key_lengths", "query_lengths", "query_offset"])
@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_integers_of_every_kind(xp, rng, name, kind):
    agree(xp, *gentle(rng), causal=True, **{name: np.array([7, 19], kind)})


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("other", FLOATS)
def test_options_in_a_dtype_of_their_own(xp, rng, name, dtype, other):
    shape = (20, 24) if name == "bias" else (4,)
    option = rng.random(shape).astype(dtype_of(other))
    agree(xp, *inputs(rng, dtype), **{name: option})


def test_lengths_of_several_batch_axes(xp, rng):
    shapes = {"q": (2, 3, 4, 10, 8), "k": (2, 1, 2, 12, 8)}
    q, k, v = inputs(rng, **shapes)
    lengths = rng.integers(0, 13, size=(2, 3))
    agree(xp, q, k, v, key_lengths=lengths, causal=True)
    agree(
        xp, q, k, v, key_lengths=lengths[:1], query_offset=lengths[:, :1], causal=True
    )


@pytest.mark.parametrize("method", STABLE)
def test_tf32_is_allowed_for_float32(xp, rng, method):
    q, k, v = gentle(rng)
    agree(xp, q, k, v, precision="tf32", method=method)


def test_methods_agree(xp, rng):
    q, k, v = on(xp, *gentle(rng))
    first = to_host(cupyflash.attention(q, k, v))
    for method in METHODS:
        out = to_host(cupyflash.attention(q, k, v, method=method))
        np.testing.assert_allclose(out, first, rtol=1e-5, atol=2e-6)


# --- what is masked never enters -----------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["lengths", "causal", "window", "mask", "bias"])
def test_poison_behind_masks(xp, rng, bad, dtype, method, how):
    """NaN and inf in keys and values that a row does not see leave no trace in it."""
    q, k, v = gentle(rng, dtype)
    clean = [x.copy() for x in (q, k, v)]
    if how == "lengths":
        options = {"key_lengths": np.array([15, 3])}
        k[0, :, 15:], v[0, :, 15:], k[1, :, 3:], v[1, :, 3:] = bad, bad, bad, bad
        rows = np.s_[:, :, :]
    elif how == "causal":
        options = {"causal": True, "query_offset": 0}
        k[:, :, 11:], v[:, :, 11:] = bad, bad
        rows = np.s_[:, :, :11]
    elif how == "window":
        options = {"window": (2, 3), "query_offset": 0}
        k[:, :, 13:], v[:, :, 13:], k[:, :, 0], v[:, :, 0] = bad, bad, bad, bad
        rows = np.s_[:, :, 3:10]
    elif how == "mask":
        mask = rng.random((1, 1, 1, 24)) < 0.6
        options = {"mask": mask}
        k[:, :, ~mask[0, 0, 0]], v[:, :, ~mask[0, 0, 0]] = bad, bad
        rows = np.s_[:, :, :]
    else:  # a score of -inf hides its value, too
        bias = np.where(rng.random((1, 1, 1, 24)) < 0.4, -INF, 0).astype(np.float32)
        options = {"bias": bias}
        v[:, :, np.isneginf(bias[0, 0, 0])] = bad
        rows = np.s_[:, :, :]
    placed = {n: place(xp, x) for n, x in options.items() if isinstance(x, np.ndarray)}
    other = {n: x for n, x in options.items() if n not in placed}
    results = [
        cupyflash.attention(
            *on(xp, *given), **placed, **other, method=method, return_lse=True
        )
        for given in ((q, k, v), clean)
    ]
    for poisoned, expected in zip(*results, strict=True):
        got = to_host(poisoned)[rows]
        assert np.all(np.isfinite(wide(got)))
        np.testing.assert_array_equal(got, to_host(expected)[rows])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
def test_nan_stays_in_the_rows_that_see_it(xp, rng, method, where):
    q, k, v = gentle(rng)
    bias = np.zeros((2, 4, 20, 24), np.float32)
    given = {"q": q, "k": k, "v": v, "bias": bias}
    place_of_nan = {"q": (0, 1, 12, 3), "k": (1, 0, 9, 2), "v": (1, 1, 9, 4)}
    given[where][place_of_nan.get(where, (0, 2, 15, 9))] = NAN
    out, lse = agree(xp, q, k, v, bias=bias, causal=True, query_offset=0, method=method)
    nan = np.isnan(to_host(out))
    assert nan.any()
    if where == "v":  # one entry of the rows that see it
        assert set(np.argwhere(nan)[:, 3]) == {4}
        assert not np.isnan(to_host(lse)).any()
    if where in ("q", "bias"):
        assert len({tuple(i[:3]) for i in np.argwhere(nan)}) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_that_see_nothing(xp, rng, method, dtype):
    q, k, v = gentle(rng, dtype)
    mask = np.ones((20, 24), bool)
    mask[4] = mask[19] = False
    out, lse = agree(xp, q, k, v, mask=mask, method=method)
    assert np.all(wide(out)[:, :, [4, 19]] == 0)
    assert np.all(np.isneginf(wide(lse)[:, :, [4, 19]]))
    bias = np.where(mask, 0, -INF).astype(np.float32)
    out, lse = agree(xp, q, k, v, bias=bias, method=method)
    assert np.all(wide(out)[:, :, [4, 19]] == 0)
    assert np.all(np.isneginf(wide(lse)[:, :, [4, 19]]))


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_see_nothing_but_a_sink(xp, rng, method):
    q, k, v = gentle(rng)
    sinks = np.array([0.5, -2, 1, 0], np.float32)
    mask = np.ones((20, 1), bool)
    mask[7] = False
    lengths = np.array([20, 12])
    out, lse = agree(
        xp, q, k, v, mask=mask, sinks=sinks, query_lengths=lengths, method=method
    )
    np.testing.assert_allclose(to_host(lse)[0, :, 7], sinks, rtol=1e-6)
    assert not to_host(out)[:, :, 7].any()
    # Padding has no denominator at all.
    assert np.all(np.isneginf(to_host(lse)[1, :, 12:]))
    assert not to_host(out)[1, :, 12:].any()


@pytest.mark.parametrize("method", STABLE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_infinite_score_makes_a_nan_row(xp, rng, method, dtype):
    q, k, v = gentle(rng, dtype)
    bias = np.zeros((20, 24), np.float32)
    bias[6, 3] = INF
    placed = on(xp, q, k, v, bias)
    out, lse = cupyflash.attention(
        *placed[:3], bias=placed[3], method=method, return_lse=True
    )
    out, lse = wide(out), wide(lse)
    others = np.arange(20) != 6
    assert np.all(np.isnan(out[:, :, 6]))
    assert np.all(np.isnan(lse[:, :, 6]) | np.isposinf(lse[:, :, 6]))
    assert np.all(np.isfinite(out[:, :, others]))
    assert np.all(np.isfinite(lse[:, :, others]))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("method", METHODS)
def test_padding_queries_are_never_read(xp, rng, bad, method):
    q, k, v = gentle(rng)
    q[0, :, 13:] = bad
    lengths = np.array([13, 20])
    out, lse = agree(xp, q, k, v, query_lengths=lengths, method=method)
    assert not to_host(out)[0, :, 13:].any()
    assert np.all(np.isneginf(to_host(lse)[0, :, 13:]))


# --- naive ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "score"), [("float16", 12.0), ("float32", 90.0), ("float64", 720.0)]
)
def test_naive_overflows_where_its_dtype_does(xp, dtype, score):
    q = np.ones((1, 1)).astype(dtype_of(dtype))
    k = np.array([[score], [0.0]]).astype(dtype_of(dtype))
    v = np.array([[1.0], [2.0]]).astype(dtype_of(dtype))
    naive = wide(cupyflash.attention(*on(xp, q, k, v), method="naive"))
    assert not np.isfinite(naive).any()
    for method in STABLE:
        out = wide(cupyflash.attention(*on(xp, q, k, v), method=method))
        assert abs(float(out[0, 0]) - 1) < 1e-4


# --- accuracy against the plain computation ------------------------------------------


@pytest.mark.parametrize("method", STABLE)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
def test_as_accurate_as_the_plain_one(xp, rng, method, dtype, causal):
    shapes = {"q": (2, 4, 200, 64), "k": (2, 2, 260, 64)}
    q, k, v = (rng.normal(size=s) for s in (shapes["q"], shapes["k"], shapes["k"]))
    q[:, :, ::7] *= 8
    q, k, v = (x.astype(dtype_of(dtype)) for x in (q, k, v))
    exact, exact_lse, _ = oracle.attention(
        q, k, v, causal=causal, real=np.longdouble if dtype == "float64" else np.float64
    )
    placed = on(xp, q, k, v)
    out, lse = cupyflash.attention(
        *placed, causal=causal, method=method, return_lse=True
    )
    plain, plain_lse = reference.plain_attention(
        q, k, v, causal=causal, return_lse=True
    )
    assert_as_accurate(out, plain, exact)
    assert_as_accurate(lse, plain_lse, exact_lse)


# --- laws ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", STABLE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_sum_to_one(xp, rng, method, dtype):
    q, k, v = inputs(rng, dtype)
    out = wide(cupyflash.attention(*on(xp, q, k, np.ones_like(v)), method=method))
    assert np.abs(out - 1).max() <= BOUNDS["attention"][dtype]


@pytest.mark.parametrize("method", METHODS)
def test_a_shift_of_a_row_changes_only_lse(xp, rng, method):
    q, k, v = gentle(rng, "float64")
    bias = rng.normal(size=(20, 1))
    plain = cupyflash.attention(*on(xp, q, k, v), method=method, return_lse=True)
    q, k, v, bias = on(xp, q, k, v, bias)
    out, lse = cupyflash.attention(q, k, v, bias=bias, method=method, return_lse=True)
    np.testing.assert_allclose(to_host(out), to_host(plain[0]), atol=1e-14)
    shifted = to_host(plain[1]) + to_host(bias)[:, 0]
    np.testing.assert_allclose(to_host(lse), shifted, atol=1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_keys_may_be_permuted_with_their_values(xp, rng, method):
    q, k, v = gentle(rng, "float64")
    order = rng.permutation(24)
    out = cupyflash.attention(*on(xp, q, k, v), method=method)
    same = cupyflash.attention(
        *on(xp, q, k[:, :, order], v[:, :, order]), method=method
    )
    np.testing.assert_allclose(to_host(out), to_host(same), atol=1e-14)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_row_of_causal_is_the_first_value(xp, rng, method, dtype):
    q, k, v = gentle(rng, dtype, q=(2, 2, 9, 8), k=(2, 2, 9, 8))
    out = to_host(cupyflash.attention(*on(xp, q, k, v), causal=True, method=method))
    np.testing.assert_allclose(
        wide(out[:, :, 0]).astype(float),
        wide(v[:, :, 0]).astype(float),
        rtol=4 * float(finfo(v.dtype).eps) if method == "naive" else 0,
    )


@pytest.mark.parametrize("method", METHODS)
def test_equal_scores_average_the_values(xp, rng, method):
    _, k, v = gentle(rng, "float64")
    q = np.zeros((2, 4, 20, 16))
    out, lse = cupyflash.attention(*on(xp, q, k, v), method=method, return_lse=True)
    mean = np.repeat(v.mean(2, keepdims=True), 2, axis=1)
    np.testing.assert_allclose(to_host(out), np.broadcast_to(mean, q.shape), atol=1e-15)
    np.testing.assert_allclose(to_host(lse), np.log(24), rtol=1e-15)


@pytest.mark.parametrize("method", STABLE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_halves_of_the_keys_merge_to_the_whole(xp, rng, method, dtype):
    q, k, v = inputs(rng, dtype)
    whole = cupyflash.attention(*on(xp, q, k, v), method=method, return_lse=True)
    parts = [
        cupyflash.attention(
            *on(xp, q, k[:, :, a:b], v[:, :, a:b]), method=method, return_lse=True
        )
        for a, b in ((0, 9), (9, 10), (10, 24))
    ]
    out, lse = cupyflash.merge_attention_states(*zip(*parts, strict=True))
    bound = 2 * BOUNDS["attention"][dtype] * np.abs(wide(whole[0])).max()
    assert max_error(out, wide(whole[0])) <= bound
    assert max_error(lse, wide(whole[1])) <= 1e-5
    assert out.dtype == dtype_of(dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("option", ["nothing", "causal", "everything"])
def test_batch_entries_do_not_depend_on_each_other(xp, rng, method, option):
    """Bit for bit: other entries and heads may change, or not be there."""
    q, k, v = gentle(rng)
    options = OPTIONS[option](rng)
    placed = {n: place(xp, x) for n, x in options.items() if isinstance(x, np.ndarray)}
    other = {n: x for n, x in options.items() if n not in placed}
    arguments = {**placed, **other, "method": method, "return_lse": True}
    first = cupyflash.attention(*on(xp, q, k, v), **arguments)
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x[0] = rng.normal(size=x[0].shape)
        x[1, -1] *= 3
    second = cupyflash.attention(*on(xp, *changed), **arguments)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(to_host(a)[1, :2], to_host(b)[1, :2])


@pytest.mark.parametrize("method", METHODS)
def test_an_entry_alone_is_the_entry_among_many(xp, rng, method):
    q, k, v = gentle(rng, q=(6, 4, 70, 16), k=(6, 2, 130, 16))
    many = to_host(cupyflash.attention(*on(xp, q, k, v), method=method))
    one = to_host(cupyflash.attention(*on(xp, q[4:5], k[4:5], v[4:5]), method=method))
    np.testing.assert_array_equal(many[4:5], one)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_same_bits_in_every_run(xp, rng, method, dtype):
    placed = on(xp, *gentle(rng, dtype, q=(2, 4, 100, 32), k=(2, 2, 333, 32)))
    first = cupyflash.attention(*placed, method=method, return_lse=True)
    for _ in range(4):
        again = cupyflash.attention(*placed, method=method, return_lse=True)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(to_host(a), to_host(b))


@pytest.mark.parametrize("method", METHODS)
def test_return_lse_and_out_change_no_bit(xp, rng, method):
    placed = on(xp, *gentle(rng))
    plain = to_host(cupyflash.attention(*placed, method=method))
    out = xp.empty(plain.shape, plain.dtype)
    with_lse, _ = cupyflash.attention(*placed, method=method, return_lse=True)
    cupyflash.attention(*placed, method=method, out=out)
    np.testing.assert_array_equal(plain, to_host(with_lse))
    np.testing.assert_array_equal(plain, to_host(out))


def test_chunks_of_queries_are_the_whole(xp, rng):
    """query_offset places a chunk of a longer causal sequence."""
    q, k, v = inputs(rng, q=(2, 4, 24, 16))
    whole = to_host(cupyflash.attention(*on(xp, q, k, v), causal=True))
    for start in (0, 7, 20):
        part = cupyflash.attention(
            *on(xp, q[:, :, start:], k, v), causal=True, query_offset=start
        )
        exact, _, size = oracle.attention(q, k, v, causal=True)
        sizes, *_ = oracle.attention(q, k, abs(v), causal=True)
        bound = attention_bound(sizes, size, "float32")[:, :, start:]
        for result in (part, whole[:, :, start:]):
            assert (np.abs(wide(result) - exact[:, :, start:]) <= bound).all()


# --- any option ----------------------------------------------------------------------


@st.composite
def geometries(draw):
    heads, kv_heads = draw(st.sampled_from(fuzz.HEADS))
    return {
        "q": (draw(st.integers(1, 2)), heads, draw(st.integers(0, 70)), 16),
        "k": (1, kv_heads, draw(st.integers(0, 70)), 16),
    }


@given(
    shapes=geometries(),
    causal=st.booleans(),
    offset=st.one_of(st.none(), st.integers(-80, 80)),
    left=st.one_of(st.none(), st.integers(0, 80)),
    right=st.one_of(st.none(), st.integers(0, 80)),
    key_lengths=st.one_of(st.none(), st.integers(-1, 75)),
    query_lengths=st.one_of(st.none(), st.integers(-1, 75)),
    method=st.sampled_from(STABLE),
    layout=st.sampled_from(["bhsd", "bshd"]),
)
def test_any_diagonal(
    xp, shapes, causal, offset, left, right, key_lengths, query_lengths, method, layout
):
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=shapes[n]).astype(np.float32) for n in "qkk")
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options = {"causal": causal, "query_offset": offset, "window": (left, right)}
    for name, length in (
        ("key_lengths", key_lengths),
        ("query_lengths", query_lengths),
    ):
        if length is not None:
            options[name] = np.array([length])
    agree(xp, q, k, v, method=method, layout=layout, **options)
