"""Attention where numbers, positions or counts are far from the usual ones."""

import itertools

import fuzz
import numpy as np
import oracle
import pytest
from accuracy import (
    BOUNDS,
    FLOATS,
    assert_same_specials,
    attention_bound,
    dtype_of,
    finfo,
    max_error,
    to_host,
    wide,
)
from placing import place

import cupyflash

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinity_in_q_below_a_softcap(xp, rng, dtype):
    """A product of +inf or -inf has the score +cap or -cap, as tanh has it."""
    q, k, v = (rng.normal(size=(2, n, 16)).astype(dtype_of(dtype)) for n in (9, 40, 40))
    q[0, 3, 1] = q[1, 8, 15] = INF
    q[1, 2, 7] = -INF
    q[0, 5, :2] = INF, -INF  # whose sum is NaN for some keys: a row of NaN
    exact, exact_lse, _ = oracle.attention(q, k, v, real=np.float64, softcap=5.0)
    sizes, *_ = oracle.attention(q, k, abs(v), real=np.float64, softcap=5.0)
    out, lse = cupyflash.attention(
        *(place(xp, x) for x in (q, k, v)), softcap=5.0, return_lse=True
    )
    finite = assert_same_specials(out, exact)
    assert np.isnan(exact).all(-1).sum() == 1
    assert finite.mean() > 0.9
    bound = 4 * BOUNDS["attention"][dtype] * sizes[finite]
    assert (np.abs(wide(out)[finite] - exact[finite]) <= bound).all()
    finite = assert_same_specials(lse, exact_lse)
    assert np.abs(wide(lse)[finite] - exact_lse[finite]).max() <= 1e-5


@pytest.mark.parametrize("dtype", FLOATS)
def test_outputs_below_the_normal_numbers_are_right_or_zero(xp, dtype):
    """Half of twice the least normal number, and a hundredth of it."""
    least = float(finfo(dtype_of(dtype)).tiny)
    v = np.array([[2.0, 0.02], [0.0, 0.0]]) * least
    q, k = np.zeros((3, 4), dtype_of(dtype)), np.zeros((2, 4), dtype_of(dtype))
    v = v.astype(dtype_of(dtype))
    out = wide(cupyflash.attention(*(place(xp, x) for x in (q, k, v))))
    exact = wide(v).mean(0)
    np.testing.assert_allclose(out[:, 0].astype(float) / least, 1, rtol=1e-2)
    close = np.abs(out[:, 1] - exact[1]) <= float(finfo(v.dtype).smallest_subnormal)
    assert (close | (out[:, 1] == 0)).all()


# --- outputs that cancel --------------------------------------------------------------


def assert_as_promised(xp, q, k, v, method="auto", **options):
    """Each output beside the sum of the sizes that it is made of."""
    dtype = q.dtype.name
    growth = fuzz.growth_of_sums(xp, q.shape[-1], method)
    exact, _, size = oracle.attention(q, k, v, growth=growth, **options)
    sizes, *_ = oracle.attention(q, k, abs(v), **options)
    placed = (place(xp, x) for x in (q, k, v))
    out = wide(cupyflash.attention(*placed, method=method, **options))
    error = np.abs(out - exact)
    bound = attention_bound(sizes, size, dtype)
    assert (error <= bound).all(), float((error / bound).max())
    # Where nothing cancels that is what stood beside the largest output.
    if (v > 0).all():
        largest = BOUNDS["attention"][dtype] + size * (
            2.0**-22 if q.itemsize < 8 else 0
        )
        assert error.max() <= largest * np.abs(exact).max()


def test_an_output_that_nearly_cancels(xp):
    """Beside its own size such an output is wrong by 6e-4."""
    g = np.random.default_rng(1169)
    q = g.standard_normal((1, 16)).astype("f4")
    k, v = g.standard_normal((2, 300, 16)).astype("f4")
    assert_as_promised(xp, q, k, v[:, :1])


@pytest.mark.parametrize("method", ["auto", "safe", "online", "tiled"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_errors_beside_the_sizes_of_values(xp, rng, dtype, method):
    for n in range(30):
        queries, keys = rng.choice((1, 3, 70)), rng.choice((5, 80, 300, 1000))
        dim, columns = rng.choice((8, 16, 64)), rng.choice((1, 3, 16))
        q, k, v = (
            rng.normal(size=shape).astype(dtype_of(dtype))
            for shape in ((queries, dim), (keys, dim), (keys, columns))
        )
        if n % 3 == 0:  # sums that cancel to the last digits
            half = keys // 2
            k[:half], v[:half] = k[half : 2 * half], -v[half : 2 * half]
        if n % 3 == 1:
            v = abs(v)
        assert_as_promised(xp, q, k, v, method, causal=bool(n % 2))


# --- parts of the keys whose number is odd -------------------------------------------

# (batch, heads, heads of k, queries, keys, head_dim), options
ODD_PARTS = {
    "one head, one query, 800 keys": ((1, 1, 1, 1, 800, 64), {}),
    "three heads of a group, folded": ((1, 3, 1, 1, 800, 64), {}),
    "packed heads": ((1, 3, 1, 5, 800, 64), {}),
    "an odd batch, softcap": ((3, 3, 1, 65, 777, 80), {"causal": True, "softcap": 5.0}),
    "window": ((1, 1, 1, 33, 4000, 128), {"window": (900, 0)}),
    "a kernel that merges": ((1, 1, 1, 1, 33_791, 256), {}),
    "a kernel that merges 65 queries": ((1, 1, 1, 65, 9000, 64), {}),
    "an even number": ((1, 2, 2, 1, 800, 64), {}),
    "a part that sees no key": ((3, 1, 1, 1, 800, 64), {"key_lengths": (100, 0, 800)}),
    "sinks": ((1, 3, 3, 1, 800, 64), {"sinks": (0.5, -1.0, 2.0)}),
    "wide heads": ((1, 3, 1, 7, 3000, 320), {}),
    "odd columns": ((1, 2, 2, 8, 3000, 103), {}),
    "odd columns, packed heads": ((1, 4, 1, 5, 3000, 33), {}),
    "few odd columns": ((1, 2, 2, 8, 3000, 7), {}),
    "odd columns, a kernel that merges": ((1, 2, 2, 100, 3000, 65), {}),
    "columns that are whole words": ((1, 2, 2, 8, 3000, 50), {}),
    "odd columns, sinks": ((1, 3, 3, 8, 3000, 31), {"sinks": (0.5, -1.0, 2.0)}),
}


def odd_parts(rng, dtype, name):
    """(q, k, v), options of a problem of ODD_PARTS."""
    (batch, heads, of_k, queries, keys, dim), options = ODD_PARTS[name]
    q = rng.normal(size=(batch, heads, queries, dim)).astype(dtype_of(dtype))
    k, v = (
        rng.normal(size=(batch, of_k, keys, dim)).astype(dtype_of(dtype)) for _ in "kv"
    )
    options = {
        n: np.array(x, "int64" if n == "key_lengths" else "float32")
        if n in ("key_lengths", "sinks")
        else x
        for n, x in options.items()
    }
    return (q, k, v), options


def assert_parts_are_right(cupy, arrays, options):
    """Out and lse beside the oracle, infinities and NaN at the same places."""
    q, k, v = arrays
    on_card = {
        n: place(cupy, x) if isinstance(x, np.ndarray) else x
        for n, x in options.items()
    }
    out, lse = cupyflash.attention(
        *(place(cupy, x) for x in arrays), return_lse=True, **on_card
    )
    exact, exact_lse, *_ = oracle.attention(q, k, v, real=np.float64, **options)
    sizes, *_ = oracle.attention(q, k, abs(v), real=np.float64, **options)
    finite = assert_same_specials(out, exact)
    bound = BOUNDS["attention"][q.dtype.name] * np.max(sizes[finite], initial=1)
    if finite.any():
        assert max_error(wide(out)[finite], exact[finite]) <= 4 * bound
    seen = assert_same_specials(lse, exact_lse)
    if seen.any():
        assert max_error(to_host(lse)[seen], exact_lse[seen]) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ODD_PARTS)
def test_odd_numbers_of_parts(cupy, rng, dtype, name):
    """Parts began 8 bytes past a multiple of 16, where kernels read 16 at a time."""
    assert_parts_are_right(cupy, *odd_parts(rng, dtype, name))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ODD_PARTS)
@pytest.mark.parametrize("bad", ["NaN in q", "inf in q", "NaN in k"])
def test_rows_that_are_nan_in_parts(cupy, rng, dtype, name, bad):
    """A part whose scores are all NaN has no largest score, and yet saw keys."""
    (q, k, v), options = odd_parts(rng, dtype, name)
    if bad == "NaN in k":  # in one part alone, and not in all rows
        k[0, 0, k.shape[-2] // 2, 5] = NAN
    else:  # an infinity makes some score +inf
        q[0, -1, q.shape[-2] // 2, 3] = NAN if bad == "NaN in q" else INF
    assert_parts_are_right(cupy, (q, k, v), options)


# --- tiles of keys that have been split, beyond 4 GiB of a head -----------------------


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "keys", "precision"),
    [(128, 4_300_000, "float32"), (64, 8_500_000, "float32"), (128, 8_500_000, "tf32")],
)
def test_split_keys_beyond_4_gib_of_a_head(cupy, dim, keys, precision):
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 30 << 30:
        pytest.skip("needs 30 GB")
    generator = cupy.random.RandomState(1)
    q, k, v = (generator.standard_normal((keys, dim), dtype="f4") for _ in "qkv")
    out = cupyflash.attention(q, k, v, window=(63, 0), precision=precision)
    for at in (1_000_000, keys - 1024):
        few = [to_host(x[at - 64 : at + 1024]) for x in (q, k, v)]
        exact, *_ = oracle.attention(*few, real=np.float64, window=(63, 0))
        error = max_error(to_host(out[at : at + 1024]), exact[64:])
        assert error < (2e-5 if precision == "float32" else 2e-2)
    del q, k, v, out
    cupy.get_default_memory_pool().free_all_blocks()


# --- more tiles of queries than the row of sm_90a counts ------------------------------


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("batch", [(1 << 28) + 1, 1 << 30])
def test_a_batch_of_2_30(cupy, batch):
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 40 << 30:
        pytest.skip("needs 40 GB")
    q = cupy.zeros((batch, 1, 1, 8), "f2")
    q[-3:] = 1
    k = cupy.random.RandomState(0).standard_normal((1, 1, 128, 8), dtype="f4")
    k = k.astype("f2")
    out = cupyflash.attention(q, k, k)
    few = cupyflash.attention(q[-5:].copy(), k, k)
    error = float(abs(out[-5:].astype("f4") - few.astype("f4")).max())
    del q, out
    cupy.get_default_memory_pool().free_all_blocks()
    assert error < 1e-2


# --- positions beyond 64 bits ---------------------------------------------------------

OFFSETS = (3, 2**61, -(2**61), 2**61 + 2, 2**62, 2**63, -(2**63), 2**70, -(2**70))
WINDOWS = (
    (None, None), (3, 2), (2**61, 0), (2**62, 0), (2**62, 2**62), (2**63, 1),
    (2**63 - 4, 3), (2**70 - 3, 2**70), (2**70 + 1, None), (None, 2**70 - 2),
    (0, 2**70),
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("keys", [7, 300])
def test_offsets_and_windows_are_exact_integers(xp, rng, dtype, keys):
    """What is seen is what Python's integers say, on every back end."""
    q = rng.normal(size=(70, 16)).astype(dtype)
    k, v = (rng.normal(size=(keys, 16)).astype(dtype) for _ in "kv")
    placed = [place(xp, x) for x in (q, k, v)]
    dout = place(xp, np.ones((70, 16), dtype))
    for offset, (left, right) in itertools.product(OFFSETS, WINDOWS):
        diagonal = [i + offset for i in range(70)]
        seen = np.array(
            [
                [
                    (left is None or i - j <= left)
                    and (right is None or j - i <= right)
                    for j in range(keys)
                ]
                for i in diagonal
            ]
        )
        options = {"query_offset": offset, "window": (left, right)}
        out, lse = cupyflash.attention(*placed, return_lse=True, **options)
        exact, *_ = oracle.attention(q, k, v, real=np.float64, mask=seen)
        assert max_error(out, exact) <= 4 * BOUNDS["attention"][dtype]
        blind = ~seen.any(axis=1)
        np.testing.assert_array_equal(np.isneginf(to_host(lse)), blind)
        grads = cupyflash.attention_vjp(dout, *placed, out, lse, **options)
        assert (to_host(grads.dq)[blind] == 0).all()
        assert (to_host(grads.dk)[~seen.any(axis=0)] == 0).all()


def test_a_plan_seen_before_is_not_taken_for_an_offset_beyond_64_bits(xp, rng):
    """A window moves with an offset that is clamped, so that the plan is another."""
    q, k = (place(xp, rng.normal(size=(5, 8))) for _ in "qk")
    for offset in (0, 2**63, 1, -(2**70), 0):
        out = to_host(cupyflash.attention(q, k, k, query_offset=offset, causal=True))
        blind = np.array([i + offset < 0 for i in range(5)])
        np.testing.assert_array_equal((out == 0).all(axis=1), blind)


# --- values near the largest number ---------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "method"),
    [
        *((dtype, m) for dtype in ("float32", "float64") for m in ("safe", "online")),
        ("float64", "auto"),
    ],
)
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 10), (1, 4000), (2, 600), (40, 33), (40, 700)]
)
def test_values_near_the_largest_number(cupy, dtype, method, queries, keys):
    """A mean is not larger than what it is the mean of."""
    size = 1e308 if dtype == "float64" else 3e38
    for dim in (1, 64, 96, 200):
        q, k = np.zeros((queries, dim), dtype), np.zeros((keys, dim), dtype)
        v = np.full((keys, dim), size, dtype)
        v[:, dim // 2 :] *= -1
        placed = [place(cupy, x) for x in (q, k, v)]
        told = cupyflash.explain("attention", *placed, method=method)
        if method == "auto" and told.kernel not in ("tiled_f64", "short_f64", "gemv"):
            continue  # the portable kernel adds up values before it divides
        out = cupyflash.attention(*placed, method=method)
        np.testing.assert_allclose(
            wide(out), np.broadcast_to(wide(v[0]), (queries, dim)), rtol=4e-6
        )


# --- parts that are many --------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lse_dtype", ["float32", "float64"])
@pytest.mark.parametrize("num_parts", [1, 3, 256, 20_000])
def test_merges_of_many_parts(xp, dtype, lse_dtype, num_parts):
    """The error of a sum of so many must not grow with them."""
    lses = np.full((num_parts, 2), -0.1, lse_dtype)
    lses[0] = 0
    outs = np.full((num_parts, 2, 3), 1 / 3).astype(dtype_of(dtype))
    out, lse = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
    exact, exact_lse = oracle.merge(outs, lses)
    assert max_error(out, exact) <= BOUNDS["attention"][dtype] / 3
    bound = {"float32": 2e-6, "float64": 5e-15}[lse_dtype]
    assert max_error(lse, exact_lse) <= bound * max(1, np.log(num_parts))


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float32", 3e38), ("float64", 1.5e308)]
)
def test_merges_of_the_largest_numbers(xp, dtype, largest):
    outs = np.full((10, 2, 40), largest, dtype)
    outs[:, :, 1] *= -1
    # Beside them in a row: a small number, and what is infinite or NaN in one part.
    outs[:, 0, 2], outs[4, 0, 3], outs[5, 0, 4] = 1e-3, INF, NAN
    out, lse = cupyflash.merge_attention_states(
        place(xp, outs), place(xp, np.zeros((10, 2), dtype))
    )
    exact = outs.mean(axis=0, dtype=np.longdouble).astype(dtype)
    rtol = 1e-14 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(to_host(out), exact, rtol=rtol)
    np.testing.assert_allclose(to_host(lse), np.log(10), rtol=rtol)


def test_a_merge_of_an_infinity_that_weighs_little(xp):
    outs, lses = np.ones((2, 1, 2), "f4"), np.array([[0], [-70]], "f4")
    outs[1, 0, 0] = INF
    out, _ = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
    np.testing.assert_array_equal(to_host(out), [[INF, 1]])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lse_dtype", ["float32", "float64"])
def test_merges_of_lses_that_are_not_finite(xp, rng, dtype, lse_dtype):
    """NaN and +inf make NaN of their row; -inf adds nothing."""
    specials = list(itertools.product((0.5, NAN, INF, -INF), repeat=3))
    lses = np.array(specials, lse_dtype).T
    outs = rng.normal(size=(*lses.shape, 40)).astype(dtype_of(dtype))
    out, lse = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
    is_nan = (np.isnan(lses) | np.isposinf(lses)).any(axis=0)
    blind = np.isneginf(lses).all(axis=0)
    np.testing.assert_array_equal(np.isnan(to_host(lse)), is_nan)
    np.testing.assert_array_equal(np.isneginf(to_host(lse)), blind)
    np.testing.assert_array_equal(np.isnan(wide(out)).any(axis=1), is_nan)
    np.testing.assert_array_equal(np.isnan(wide(out)).all(axis=1), is_nan)
    np.testing.assert_array_equal((wide(out) == 0).all(axis=1), blind)


# --- gradients of rows that see no key ------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("flows", [NAN, INF])
def test_nan_into_the_lse_of_a_row_that_sees_no_key(xp, rng, dtype, dim, flows):
    """It has no part in any gradient, dsinks included; a number flows into the sink."""
    kind, wide_kind = dtype_of(dtype), "float64" if dtype == "float64" else "float32"
    q = rng.normal(size=(2, 4, 70, dim)).astype(kind)
    k, v = (rng.normal(size=(2, 2, 80, dim)).astype(kind) for _ in "kv")
    lengths = np.array([0, 80])
    sinks = rng.normal(size=4).astype(wide_kind)
    on = [place(xp, x) for x in (q, k, v)]
    options = {"sinks": place(xp, sinks), "key_lengths": place(xp, lengths)}
    out, lse = cupyflash.attention(*on, return_lse=True, **options)
    dout = place(xp, rng.normal(size=q.shape).astype(kind))
    found = {}
    for x in (0, 0.5, flows):
        dlse = rng.normal(size=(2, 4, 70)).astype(wide_kind) * 0
        dlse[0] = x
        grads = cupyflash.attention_vjp(
            dout, *on, out, lse, dlse=place(xp, dlse), need_dsinks=True, **options
        )
        found[x] = [to_host(y).astype(np.float64) for y in grads if y is not None]
        assert all(np.isfinite(y).all() for y in found[x])
    for a, b, c in zip(*found.values(), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-2, atol=1e-3)
        if a.ndim > 1:
            np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)
    # lse of such a row is the sink: 70 rows of a head pass on what flows into theirs.
    np.testing.assert_allclose(found[0.5][-1] - found[0][-1], 35, rtol=1e-2)
