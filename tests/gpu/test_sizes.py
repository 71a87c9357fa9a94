"""Sizes that overflow an int, a grid, or a tile; and nothing at all.

Arrays of more than 2^31 elements in the forward direction are in test_gpu.py.
"""

import itertools

import fuzz_vjp  # noqa: F401  (its problems)
import numpy as np
import oracle
import pytest
import rows
from accuracy import BOUNDS, FLOATS, assert_same_specials, dtype_of, to_host, wide
from placing import place

import cupyflash

pytestmark = pytest.mark.gpu

METHODS = rows.METHODS
FUSED = ("auto", "online", "tiled")


@pytest.fixture(autouse=True)
def _give_back(cupy):
    """Other processes test on the same device."""
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def normal(cupy, rng, shape, dtype):
    return place(cupy, rng.normal(size=shape).astype(dtype_of(dtype)))


# --- more than 2^31 elements ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("function", ["softmax_vjp", "log_softmax_vjp"])
@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_gradients_beyond_2_31_elements(cupy, function, axis):
    n, columns = (1 << 19) + 3, 4096
    y = cupy.zeros((n, columns), np.float16)
    y[-2:] = cupy.arange(columns) % 7 / 16
    dy = cupy.zeros_like(y)
    dy[-3:, ::5] = 1
    call = getattr(cupyflash, function)
    dx = call(y, dy, axis)
    few = (slice(-3, None), slice(None)) if axis else (slice(None), slice(-3, None))
    expected = call(y[few].copy(), dy[few].copy(), axis)
    np.testing.assert_allclose(
        to_host(dx[few]).astype(float), to_host(expected).astype(float), 2e-3, 1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_queries_beyond_2_31_elements(cupy, rng, dtype):
    """dout is 0 but for the last queries, so that these alone make the gradients."""
    dim = 64 if dtype == "bfloat16" else 128
    seqlen = (1 << 31) // dim + 70
    made = dtype_of(dtype)
    number = {2: "u2", 4: "u4"}[made.itemsize]
    q, dout = (cupy.zeros((seqlen, dim), number).view(made) for _ in range(2))
    q[-3:], dout[-3:] = (normal(cupy, rng, (3, dim), dtype) for _ in range(2))
    k, v = (normal(cupy, rng, (4, dim), dtype) for _ in "kv")
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    magnitude = grads.dq[:-3].view(number)  # with its sign, which -0 has too
    magnitude <<= 1
    assert not bool(magnitude.any())
    few = [x[-3:].copy() for x in (dout, q)]
    out, lse = cupyflash.attention(few[1], k, v, return_lse=True)
    expected = cupyflash.attention_vjp(*few, k, v, out, lse)
    bound = (
        {"rtol": 2e-2, "atol": 2e-2}
        if dtype == "bfloat16"
        else {"rtol": 1e-4, "atol": 1e-5}
    )
    for got, wanted in (
        (grads.dq[-3:], expected.dq),
        (grads.dk, expected.dk),
        (grads.dv, expected.dv),
    ):
        np.testing.assert_allclose(
            wide(got).astype(float), wide(wanted).astype(float), **bound
        )


@pytest.mark.slow
def test_gradients_of_keys_beyond_2_31_elements(cupy, rng):
    """Only the last keys are seen: a wrong offset reads or writes others."""
    seqlen, dim = (1 << 25) + 70, 64
    k = cupy.zeros((seqlen, dim), np.float16)
    v = cupy.zeros_like(k)
    k[-5:], v[-5:] = (normal(cupy, rng, (5, dim), "float16") for _ in "kv")
    q, dout = (normal(cupy, rng, (1, dim), "float16") for _ in range(2))
    window = {"window": (4, 0), "query_offset": seqlen - 1}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **window)
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, **window)
    few = k[-5:].copy(), v[-5:].copy()
    out, lse = cupyflash.attention(q, *few, return_lse=True)
    expected = cupyflash.attention_vjp(dout, q, *few, out, lse)
    for got, wanted in zip(grads[:3], expected[:3], strict=True):
        np.testing.assert_allclose(
            to_host(got[-5:]).astype(float), to_host(wanted).astype(float), 5e-3, 2e-3
        )
    assert not bool(grads.dk[:-5].any())
    assert not bool(grads.dv[:-5].any())


# --- one query, four million keys ----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_query_and_four_million_keys(cupy, rng, dtype):
    seqlen, dim = 1 << 22, 64
    random = cupy.random.RandomState(5)
    k, v = (
        random.standard_normal((seqlen, dim), np.float32).astype(dtype_of(dtype))
        for _ in "kv"
    )
    q = normal(cupy, rng, (1, dim), dtype)
    k[-1] = q[0]  # an entry that counts, at the far end
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    s = q.astype(np.float64) @ k.astype(np.float64).T / 8
    m = s.max()
    p = cupy.exp(s - m)
    exact = (p @ v.astype(np.float64)) / p.sum()
    exact_lse = float(m + cupy.log(p.sum()))
    # Terms of 4 million keys cancel: errors go by the weighted sizes of the values.
    size = float((p @ abs(v.astype(np.float64)) / p.sum()).max())
    error = float(abs(out.astype(np.float64) - exact).max())
    assert error <= BOUNDS["attention"][dtype] * size
    assert abs(float(lse[0]) - exact_lse) <= (1e-12 if dtype == "float64" else 1e-4)


# --- grids ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        ("float16", 33),
        ("bfloat16", 64),
        ("bfloat16", 200),
        ("float32", 8),
        ("float32", 64),
        ("float64", 8),
    ],
)
@pytest.mark.parametrize("batch", [(20_000, 4), (2, 70_002)])
def test_gradients_of_many_batch_entries_and_heads(cupy, rng, dtype, dim, batch):
    """More than the 65,535 blocks of a grid's second and third axis."""
    entries, heads = batch
    q = normal(cupy, rng, (entries, heads, 2, dim), dtype)
    k = normal(cupy, rng, (entries, heads // 2, 3, dim), dtype)
    dout = normal(cupy, rng, q.shape, dtype)

    def gradients(dout, q, k):
        out, lse = cupyflash.attention(q, k, k, return_lse=True)
        return cupyflash.attention_vjp(dout, q, k, k, out, lse)

    grads = gradients(dout, q, k)
    last = gradients(*(x[-3:, -4:].copy() for x in (dout, q)), k[-3:, -2:].copy())
    relative, absolute = (2e-2, 2e-2) if "16" in dtype else (1e-4, 1e-5)
    for got, expected in zip(grads[:3], last[:3], strict=True):
        np.testing.assert_allclose(
            wide(got[-3:, -expected.shape[1] :]).astype(float),
            wide(expected).astype(float),
            relative,
            absolute,
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_many_entries_on_tensor_cores(cupy, rng, dtype):
    heads = 70_001
    q, k, v = (normal(cupy, rng, (1, heads, n, 16), dtype) for n in (3, 5, 5))
    out = cupyflash.attention(q, k, v)
    last = cupyflash.attention(*(x[:, -3:].copy() for x in (q, k, v)))
    bound = 1e-2 if dtype == "bfloat16" else 1e-14
    np.testing.assert_allclose(
        wide(out[:, -3:]).astype(float), wide(last).astype(float), bound, bound
    )


# --- the narrowest and the widest heads ----------------------------------------------


@pytest.mark.parametrize("dims", [(1, 1), (512, 512), (1, 512), (512, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("operation", ["attention", "attention_vjp"])
def test_head_dims_of_1_and_512(cupy, rng, monkeypatch, operation, dtype, dims):
    shapes = ((1, 2, 70, dims[0]), (1, 1, 80, dims[0]), (1, 1, 80, dims[1]))
    monkeypatch.setitem(rows.ATTENTION_SHAPES, "wide", shapes)
    case = rows.Case(operation, "", operation, "wide", dtype)
    rows.check(cupy, rows.problem_of(case, rng))


# --- nothing -------------------------------------------------------------------------

# q, k and head_dim_v with a 0 in each place in turn.
EMPTY = {
    "batch": ((0, 4, 5, 8), (0, 2, 7, 8)),
    "batch of k": ((1, 4, 5, 8), (0, 2, 7, 8)),
    "queries": ((2, 4, 0, 8), (2, 2, 7, 8)),
    "keys": ((2, 4, 5, 8), (2, 2, 0, 8)),
    "both": ((2, 4, 0, 8), (2, 2, 0, 8)),
    "heads": ((2, 0, 5, 8), (2, 0, 7, 8)),
}


def every_option(q_shape, k_shape):
    """All options of attention at once, some of them with nothing in them."""
    batch, heads, seqlen_q, _ = q_shape
    scores = (batch, heads, seqlen_q, k_shape[2])
    return {
        "bias": np.ones(scores, np.float32),
        "mask": np.ones(scores, bool),
        "sinks": np.ones(heads, np.float32),
        "alibi_slopes": np.ones((batch, heads), np.float32),
        "query_lengths": np.full(batch, 3),
        "key_lengths": np.full(batch, 4),
        "query_offset": np.full(batch, 2),
        "window": (3, 1),
        "softcap": 5.0,
    }


@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_empty_attention(cupy, shapes, dtype):
    """Of every method, and its gradients: shapes as on NumPy, zeros, -inf."""
    made = dtype_of(dtype)
    host = [np.ones(s, made) for s in (shapes[0], shapes[1], shapes[1])]
    on = [place(cupy, x) for x in host]
    choices = [{}, {"causal": True}]
    if dtype == "float32":
        choices.append(every_option(*shapes))
    for method, more in itertools.product(METHODS, choices):
        placed = {
            n: place(cupy, x) if isinstance(x, np.ndarray) else x
            for n, x in more.items()
        }
        got = cupyflash.attention(*on, return_lse=True, method=method, **placed)
        # Lengths beyond an axis are an error on the host.
        fits = {
            n: x.clip(0, shapes[n == "key_lengths"][-2]) if "lengths" in n else x
            for n, x in more.items()
        }
        want = cupyflash.attention(*host, return_lse=True, method=method, **fits)
        for a, b in zip(got, want, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_array_equal(wide(a), wide(b))
    sinks = np.ones(shapes[0][1], made)
    want = cupyflash.attention(*host, sinks=sinks, return_lse=True)
    out, lse = cupyflash.attention(*on, sinks=place(cupy, sinks), return_lse=True)
    grads = cupyflash.attention_vjp(
        place(cupy, np.ones_like(want[0])),
        *on,
        out,
        lse,
        sinks=place(cupy, sinks),
        need_dsinks=True,
    )
    wanted = cupyflash.attention_vjp(
        np.ones_like(want[0]), *host, *want, sinks=sinks, need_dsinks=True
    )
    for a, b in zip(grads, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert_same_specials(a, wide(b))
            np.testing.assert_allclose(
                wide(a).astype(float), wide(b).astype(float), 1e-2
            )


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0)])
def test_empty_softmax(cupy, shape):
    for axis in (None, *range(len(shape))):
        x, on = np.ones(shape, np.float32), cupy.ones(shape, np.float32)
        for name in ("softmax", "log_softmax", "logsumexp"):
            call = getattr(cupyflash, name)
            methods = ("auto",) if name == "logsumexp" else METHODS
            for method in methods:
                options = {"axis": axis}
                if name != "logsumexp":
                    options["method"] = method
                got, want = call(on, **options), call(x, **options)
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
                np.testing.assert_array_equal(to_host(got), want)
        for name in ("softmax_vjp", "log_softmax_vjp"):
            got = getattr(cupyflash, name)(on, on, axis)
            assert got.shape == shape


def test_merging_nothing(cupy):
    outs = cupy.ones((0, 2, 3, 4), np.float32)
    out, lse = cupyflash.merge_attention_states(outs, cupy.ones((0, 2, 3), np.float32))
    expected, expected_lse = oracle.merge(to_host(outs), np.ones((0, 2, 3), np.float32))
    np.testing.assert_array_equal(to_host(out), expected)
    np.testing.assert_array_equal(to_host(lse), expected_lse)
    out, lse = cupyflash.merge_attention_states(
        cupy.ones((2, 0, 4), np.float32), cupy.ones((2, 0), np.float32)
    )
    assert (out.shape, lse.shape) == ((0, 4), (0,))
