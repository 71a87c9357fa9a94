"""attention_vjp against the oracle and finite differences, one body for both arrays."""

import fuzz
import fuzz_vjp
import numpy as np
import oracle
import pytest
import rows
from accuracy import (
    FLOATS,
    assert_as_accurate,
    dtype_of,
    finfo,
    max_error,
    to_host,
    wide,
)
from placing import FORMS, place

import cupyflash
from cupyflash._reference import backward as reference_vjp

INF, NAN = np.inf, np.nan
SEQLENS = ((1, 1), (1, 300), (127, 129), (128, 128), (300, 1), (65, 200), (33, 31))
# Of the largest entry; 16-bit results are compared with the plain computation alone.
RELATIVE = {"float64": 1e-13, "float32": 1e-5}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal from the top": {"causal": True, "query_offset": 0},
    "offset": {"causal": True, "query_offset": 3},
    "offsets": {"causal": True, "query_offset": np.array([2, -3])},
    "window": {"window": (4, 2)},
    "left window": {"window": (3, None), "causal": True},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.7},
    "zero scale": {"scale": 0.0},
    "sinks": {"sinks": np.array([0.3, -1.0, 2.0, -INF])},
    "one sink": {"sinks": np.array(0.7)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.2, 0.1, 0.0])},
    "lengths": {"query_lengths": np.array([9, 5]), "key_lengths": np.array([7, 11])},
    "mask": {"mask": np.random.default_rng(1).random((2, 1, 9, 11)) < 0.6},
}
BIASES = {
    "dense": (2, 4, 9, 11),
    "of all batches": (4, 9, 11),
    "of all heads": (2, 1, 9, 11),
    "of all": (9, 11),
    "a key": (11,),
    "a key and head": (4, 1, 11),
    "a query": (2, 4, 9, 1),
    "a query of all": (9, 1),
    "a head": (4, 1, 1),
    "one": (1,),
    "scalar": (),
}


def problem_of(q, k, v, dout, options, forms=None):
    """The problem of tests/support/fuzz.py with these arguments."""
    arrays = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    other = {n: x for n, x in options.items() if n not in arrays}
    for name in ("bias", "sinks"):
        other.setdefault(f"need_d{name}", name in arrays)
    given = {"q": q, "k": k, "v": v} | arrays | {"dout": dout}
    return fuzz.Problem(
        "attention_vjp", 0, None, "attention_vjp", given, forms or {},
        {"layout": "bhsd", **other},
    )  # fmt: skip


def inputs(rng, dtype="float32", q=(2, 4, 9, 8), k=(2, 2, 11, 8), head_dim_v=None):
    """q, k, v and dout on the host; some rows see large scores."""
    head_dim_v = head_dim_v or k[-1]
    batch = np.broadcast_shapes(q[:-3], k[:-3])
    shapes = (q, k, (*k[:-1], head_dim_v), (*batch, *q[-3:-1], head_dim_v))
    q, k, v, dout = (rng.normal(size=shape) for shape in shapes)
    q[..., ::3, :] *= 6
    return tuple(x.astype(dtype_of(dtype)) for x in (q, k, v, dout))


def agree(xp, q, k, v, dout, forms=None, **options):
    """Call, compare with the oracle, return the gradients."""
    return fuzz_vjp.check_attention_vjp(xp, problem_of(q, k, v, dout, options, forms))


def gradients(xp, q, k, v, dout, dlse=None, **options):
    """Forward and backward of host arrays."""

    def on(x):
        return place(xp, x) if isinstance(x, np.ndarray) else x

    forward = {n: on(x) for n, x in options.items()}
    need = {n: forward.pop(n) for n in list(forward) if n.startswith("need")}
    deterministic = forward.pop("deterministic", False)
    q, k, v, dout, dlse = (on(x) for x in (q, k, v, dout, dlse))
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **forward)
    return cupyflash.attention_vjp(
        dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **need,
        **forward,
    )  # fmt: skip


# --- the oracle itself ---------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_the_oracle_against_finite_differences(rng, name):
    q, k, v, dout = inputs(rng, "float64", (2, 4, 9, 3), (1, 2, 11, 3), head_dim_v=2)
    q[..., ::3, :] /= 6
    options = dict(OPTIONS[name])
    real = {"q": q, "k": k, "v": v, "bias": rng.normal(size=(4, 1, 11))}
    if "sinks" in options:
        real["sinks"] = options.pop("sinks")
    dlse = rng.normal(size=(2, 4, 9))
    real = {n: x.astype(np.longdouble) for n, x in real.items()}

    def value(**given):
        arrays = {**real, **given}
        q, k, v = (arrays.pop(n) for n in "qkv")
        out, lse, _ = oracle.attention(q, k, v, **arrays, **options)
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    more = {n: real[n] for n in ("bias", "sinks") if n in real}
    exact, *_ = oracle.attention_vjp(dout, q, k, v, dlse=dlse, **more, **options)
    for name, x in real.items():
        direction = np.where(np.isfinite(x), rng.normal(size=x.shape), 0)
        step = np.longdouble(1e-3)
        values = [value(**{name: x + n * step * direction}) for n in (-2, -1, 1, 2)]
        weights = np.array([1, -8, 8, -1], np.longdouble) / (12 * step)
        slope = (weights * values).sum()
        found = (exact[f"d{name}"] * direction).sum()
        assert abs(found - slope) <= 1e-9 * (1 + abs(slope)), name


def test_the_oracle_against_mpmath():
    """One head, two queries, three keys: differences in fifty digits."""
    mpmath = pytest.importorskip("mpmath")
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.normal(size=s) for s in ((2, 2), (3, 2), (3, 2), (2, 2)))

    def value(x):
        """Sum of dout * out, with a scale of 1 and a softcap of 2."""
        q, k, v = x[:4], x[4:10], x[10:]
        total = mpmath.mpf(0)
        for i in range(2):
            raw = [q[2 * i] * k[2 * j] + q[2 * i + 1] * k[2 * j + 1] for j in range(3)]
            e = [mpmath.exp(2 * mpmath.tanh(s / 2)) for s in raw]
            for d in range(2):
                o = sum(e[j] * v[2 * j + d] for j in range(3)) / sum(e)
                total += mpmath.mpf(dout[i, d]) * o
        return total

    numbers = np.concatenate([q.ravel(), k.ravel(), v.ravel()]).tolist()
    expected = []
    with mpmath.workdps(50):
        x, step = [mpmath.mpf(n) for n in numbers], mpmath.mpf("1e-15")
        for n in range(len(x)):
            ends = [value([*x[:n], x[n] + s * step, *x[n + 1 :]]) for s in (1, -1)]
            expected.append(float((ends[0] - ends[1]) / (2 * step)))
    options = {"scale": 1.0, "softcap": 2.0}
    exact, *_ = oracle.attention_vjp(dout, q, k, v, **options)
    got = np.concatenate([exact[n].ravel() for n in ("dq", "dk", "dv")])
    np.testing.assert_allclose(got.astype(float), expected, atol=1e-15, rtol=1e-14)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, **options)
    got = np.concatenate([x.ravel() for x in grads[:3]])
    np.testing.assert_allclose(got, expected, atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_against_the_oracle(xp, rng, name):
    for dtype in ("float32", "float64"):
        q, k, v, dout = inputs(rng, dtype)
        options = {**OPTIONS[name], "bias": rng.normal(size=(4, 9, 1))}
        exact, *_ = oracle.attention_vjp(dout, q, k, v, **options)
        placed = {
            n: place(xp, x) if isinstance(x, np.ndarray) else x
            for n, x in options.items()
        }
        found = reference_vjp.attention_vjp(
            *(place(xp, x) for x in (dout, q, k, v)), **placed
        )
        for field, got in zip(found._fields, found, strict=True):
            if got is not None:
                assert got.dtype == np.float64
                np.testing.assert_allclose(
                    got, exact[field].astype(float), rtol=1e-11, atol=1e-12
                )


# --- every option --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(xp, rng, name, dtype):
    options = dict(OPTIONS[name])
    for array in ("sinks", "alibi_slopes"):
        if array in options:
            options[array] = options[array].astype(np.float32)
    agree(xp, *inputs(rng, dtype), **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_finite_differences(xp, rng, name):
    """In float64, along a random direction of each input."""
    q, k, v, dout = inputs(rng, "float64")
    q[..., ::3, :] /= 6
    options = dict(OPTIONS[name])
    real = {"q": q, "k": k, "v": v, "bias": rng.normal(size=(2, 1, 9, 11))}
    if "sinks" in options:
        real["sinks"] = options.pop("sinks")
    dlse = rng.normal(size=(2, 4, 9))

    def value(given):
        placed = {
            n: place(xp, x) if isinstance(x, np.ndarray) else x
            for n, x in {**given, **options}.items()
        }
        out, lse = cupyflash.attention(**placed, return_lse=True)
        lse = wide(lse)
        return (wide(out) * dout).sum() + (
            np.where(np.isfinite(lse), lse, 0) * dlse
        ).sum()

    need = {"need_dbias": True, "need_dsinks": "sinks" in real}
    grads = gradients(xp, dout=dout, dlse=dlse, **real, **options, **need)
    for name, x in real.items():
        direction = np.where(np.isfinite(x), rng.normal(size=x.shape), 0)
        step = 1e-3
        values = [
            value({**real, name: x + n * step * direction}) for n in (-2, -1, 1, 2)
        ]
        slope = (np.array([1, -8, 8, -1]) * values).sum() / (12 * step)
        found = (wide(getattr(grads, f"d{name}")) * direction).sum()
        assert abs(found - slope) <= 1e-8 * (1 + abs(slope)), name


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_bias_of_every_shape(xp, rng, shape, dtype):
    bias = np.asarray(rng.normal(size=shape)).astype(dtype_of(dtype))
    options = {"bias": bias, "causal": True, "softcap": 2.0}
    grads = agree(xp, *inputs(rng, dtype), **options)
    assert grads.dbias.shape == shape


@pytest.mark.parametrize("shape", [(2, 4, 150, 170), (150, 170), (170,), (4, 150, 1)])
def test_bias_over_several_tiles(xp, rng, shape):
    bias = rng.normal(size=shape).astype(np.float32)
    shapes = {"q": (2, 4, 150, 8), "k": (2, 2, 170, 8)}
    agree(xp, *inputs(rng, **shapes), bias=bias, window=(60, 20))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SEQLENS)
def test_every_length(xp, rng, dtype, causal, seqlen_q, seqlen_k):
    shapes = {"q": (1, 2, seqlen_q, 32), "k": (1, 1, seqlen_k, 32)}
    agree(xp, *inputs(rng, dtype, **shapes), causal=causal)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "dims", [(1, 1), (3, 7), (16, 64), (64, 16), (100, 100), (128, 96)]
)
def test_every_head_dim(xp, rng, dtype, dims):
    shapes = {"q": (2, 33, dims[0]), "k": (2, 40, dims[0]), "head_dim_v": dims[1]}
    agree(xp, *inputs(rng, dtype, **shapes), scale=0.1)


@pytest.mark.parametrize(
    "dims", [(129, 129), (256, 256), (16, 300), (300, 16), (1000, 513)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_large_head_dims(xp, rng, dims, dtype):
    shapes = {"q": (2, 9, dims[0]), "k": (2, 70, dims[0]), "head_dim_v": dims[1]}
    bias = rng.normal(size=(2, 1, 70)).astype(np.float32)
    agree(xp, *inputs(rng, dtype, **shapes), bias=bias, scale=0.02)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1), (32, 4)])
def test_query_heads_share_key_heads(xp, rng, layout, heads):
    shapes = {"q": (2, heads[0], 5, 8), "k": (2, heads[1], 7, 8)}
    arrays = inputs(rng, **shapes)
    if layout == "bshd":
        arrays = tuple(x.swapaxes(1, 2) for x in arrays)
    agree(xp, *arrays, layout=layout)


@pytest.mark.parametrize(
    ("q", "k", "v", "dout"),
    [
        ((5, 8), (7, 8), (7, 4), (5, 4)),
        ((3, 5, 8), (7, 8), (7, 4), (3, 5, 4)),
        ((5, 8), (1, 7, 8), (2, 1, 7, 4), (2, 1, 5, 4)),
        ((2, 3, 5, 8), (3, 7, 8), (3, 7, 4), (2, 3, 5, 4)),
        ((2, 1, 4, 5, 8), (3, 2, 7, 8), (1, 1, 2, 7, 4), (2, 3, 4, 5, 4)),
        ((1, 1, 5, 8), (6, 1, 7, 8), (1, 7, 4), (6, 1, 5, 4)),
        ((0, 2, 5, 8), (0, 2, 7, 8), (1, 2, 7, 4), (0, 2, 5, 4)),
    ],
)
def test_batch_axes_broadcast(xp, rng, q, k, v, dout):
    arrays = (rng.normal(size=s).astype(np.float32) for s in (q, k, v, dout))
    agree(xp, *arrays)


def test_sums_over_many_shared_entries(xp, rng):
    """Few keys and queries for all of a large batch: terms, and their sum."""
    q, k, v, dout = inputs(rng, q=(1, 1, 90, 8), k=(50, 1, 130, 8))
    dout = rng.normal(size=(50, 1, 90, 8)).astype(np.float32)
    agree(xp, q, k, v, dout, bias=rng.normal(size=(1, 1)).astype(np.float32))
    q, k, v, _ = inputs(rng, q=(50, 8, 90, 8), k=(1, 1, 30, 8))
    dout = rng.normal(size=q.shape).astype(np.float32)
    sinks = rng.normal(size=8).astype(np.float32)
    agree(xp, q, k, v, dout, causal=True, sinks=sinks)


# --- accuracy ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "window"])
def test_as_accurate_as_the_plain_computation(xp, rng, dtype, name):
    shapes = {"q": (2, 4, 200, 64), "k": (2, 2, 250, 64)}
    q, k, v, dout = inputs(rng, dtype, **shapes)
    options = {**OPTIONS[name], "bias": rng.normal(size=(4, 1, 250)).astype(q.dtype)}
    sinks = rng.normal(size=4).astype(q.dtype)
    grads = gradients(
        xp, q, k, v, dout, **options, sinks=sinks, need_dbias=True, need_dsinks=True
    )
    exact = reference_vjp.attention_vjp(dout, q, k, v, **options, sinks=sinks)
    plain = reference_vjp.plain_attention_vjp(dout, q, k, v, **options, sinks=sinks)
    for name_of, got, standard, best in zip(
        grads._fields[:5], grads[:5], plain[:5], exact[:5], strict=True
    ):
        if got is None:  # no function of the score has arrays here
            assert name_of == "dscore"
            continue
        if name_of == "dsinks":
            size = condition_of_dsinks(dout, q, k, v, sinks, options)
            error = np.abs(wide(got) - wide(best))
            assert np.all(error <= float(finfo(to_host(got).dtype).eps) * size)
        else:
            assert_as_accurate(to_host(got), standard, best, factor=3.0)
        if dtype in RELATIVE:
            largest = np.abs(best).max()
            assert max_error(got, best) <= RELATIVE[dtype] * largest


def condition_of_dsinks(dout, q, k, v, sinks, options):
    """By how much roundings of scores and products are magnified in dsinks.

    It is a sum of many terms of both signs in few numbers, often with one large term:
    what the plain computation happens to lose in them is no measure.
    """
    exact = [a.astype(np.float64) for a in (q, k, v, sinks)]
    options = {**options, "bias": options["bias"].astype(np.float64)}
    out, lse = cupyflash.attention(
        *exact[:3], **options, sinks=exact[3], return_lse=True
    )
    share = np.exp(exact[3][:, None] - lse)
    terms = share * np.abs(dout.astype(np.float64) * out).sum(-1) * (1 + np.abs(lse))
    return np.sqrt((terms**2).sum((0, 2)))


# --- rows and keys that take no part -------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_seen_never_leaks(xp, rng, dtype, bad):
    """Poison behind every kind of mask leaves the gradients as they are."""
    q, k, v, dout = inputs(rng, dtype)
    dlse = rng.normal(size=(2, 4, 9)).astype(np.float64 if dtype == "float64" else "f4")
    mask = np.ones((9, 11), bool)
    mask[4] = False
    mask[:, 3] = False
    options = {
        "mask": mask, "causal": True, "query_offset": 0,
        "query_lengths": np.array([8, 6]), "key_lengths": np.array([11, 7]),
        "sinks": np.ones(4, np.float32), "need_dsinks": True,
    }  # fmt: skip
    clean = gradients(xp, q, k, v, dout, dlse=dlse, **options)
    for x in (k, v):
        x[:, :, 3] = bad
        x[1, :, 7:] = bad
        x[:, :, 9:] = bad  # beyond the diagonal of the last query
    q[0, :, 8:], q[1, :, 6:], q[:, :, 4] = bad, bad, bad
    dout[0, :, 8:], dout[1, :, 6:], dout[:, :, 4] = bad, bad, bad
    dlse[0, :, 8:], dlse[1, :, 6:] = bad, bad
    poisoned = gradients(xp, q, k, v, dout, dlse=dlse, **options)
    for a, b in zip(clean, poisoned, strict=True):
        if a is not None:
            np.testing.assert_array_equal(to_host(a), to_host(b))
    assert not to_host(clean.dq)[:, :, 4].any()
    assert not to_host(clean.dq)[0, :, 8:].any()
    assert not to_host(clean.dk)[:, :, 3].any()
    assert not to_host(clean.dv)[1, :, 7:].any()


def test_nan_stays_where_it_is_seen(xp, rng):
    q, k, v, dout = inputs(rng, q=(2, 2, 9, 8))
    q[0, 0, 5] = NAN
    grads = agree(xp, q, k, v, dout, causal=True, query_offset=0)
    dq, dk = to_host(grads.dq), to_host(grads.dk)
    assert np.isnan(dq[0, 0, 5]).all()
    assert np.isnan(dk[0, 0, :6]).all()
    dq[0, 0, 5] = dk[0, 0, :6] = 0
    assert np.isfinite(dq).all()
    assert np.isfinite(dk).all()


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((2, 2, 0, 8), (2, 2, 7, 8)),
        ((0, 2, 5, 8), (0, 2, 7, 8)),
        ((2, 0, 5, 8), (2, 0, 7, 8)),
        ((2, 2, 5, 8), (2, 2, 0, 8)),
        ((0, 8), (3, 8)),
        ((3, 8), (0, 8)),
        ((0, 2, 5, 8), (1, 1, 7, 8)),
    ],
)
def test_empty(xp, q, k):
    for dtype in FLOATS:
        arrays = [np.ones(s).astype(dtype_of(dtype)) for s in (q, k, k)]
        out_shape = (*np.broadcast_shapes(q[:-3], k[:-3]), *q[-3:])
        dout = np.ones(out_shape).astype(dtype_of(dtype))
        bias = np.ones((1, 1), np.float32)
        grads = gradients(xp, *arrays, dout, bias=bias, need_dbias=True)
        for got, x in zip(grads, (*arrays, bias, None, None), strict=True):
            if x is not None:
                assert got.shape == x.shape
                assert got.dtype == x.dtype
                assert not to_host(got).any()


def test_no_keys_with_sinks(xp, rng):
    """Then lse is the sink, which gets what flows into lse."""
    q, k = np.ones((2, 3, 4, 8), np.float32), np.ones((2, 3, 0, 8), np.float32)
    dlse = rng.normal(size=(2, 3, 4)).astype(np.float32)
    sinks = np.array([0.5, -1, 2], np.float32)
    grads = gradients(
        xp, q, k, k, np.ones_like(q), dlse=dlse, sinks=sinks, need_dsinks=True
    )
    np.testing.assert_allclose(to_host(grads.dsinks), dlse.sum((0, 2)), rtol=1e-5)
    assert not to_host(grads.dq).any()


# --- strides, flags, bits ------------------------------------------------------------


@pytest.mark.parametrize("form", [*FORMS, "heads"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_every_stride(xp, rng, form, layout):
    arrays = inputs(rng)
    if layout == "bshd":
        arrays = tuple(x.swapaxes(1, 2) for x in arrays)
    options = {
        "bias": rng.normal(size=(2, 1, 9, 11)).astype(np.float32),
        "mask": rng.random((4, 9, 11)) < 0.8,
        "key_lengths": np.array([8, 11]),
        "dlse": rng.normal(size=(2, 4, 9)).astype(np.float32),
    }
    forms = dict.fromkeys((*"qkv", "dout", "out", "lse", *options), form)
    agree(xp, *arrays, forms=forms, layout=layout, **options)


def test_broadcast_dout(xp, rng):
    """The gradient of a plain sum: one number, broadcast."""
    q, k, v, dout = inputs(rng)
    expected = gradients(xp, q, k, v, np.ones_like(dout))
    q, k, v = (place(xp, x) for x in (q, k, v))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    ones = xp.broadcast_to(xp.ones((), np.float32), out.shape)
    got = cupyflash.attention_vjp(ones, q, k, v, out, lse)
    for a, b in zip(expected[:3], got[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


@pytest.mark.parametrize("need_dbias", [False, True])
@pytest.mark.parametrize("need_dsinks", [False, True])
def test_what_is_asked_for(xp, rng, need_dbias, need_dsinks):
    bias, sinks = np.ones((9, 1), np.float64), np.ones(1, np.float16)
    grads = gradients(
        xp, *inputs(rng), bias=bias, sinks=sinks, need_dbias=need_dbias,
        need_dsinks=need_dsinks,
    )  # fmt: skip
    assert isinstance(grads, cupyflash.AttentionGrads)
    assert grads._fields == ("dq", "dk", "dv", "dbias", "dsinks", "dscore")
    assert grads.dscore is None
    assert (grads.dbias is not None) == need_dbias
    assert (grads.dsinks is not None) == need_dsinks
    if need_dbias:
        assert grads.dbias.dtype == np.float64
        assert grads.dbias.shape == (9, 1)
    if need_dsinks:
        assert grads.dsinks.dtype == np.float16
        assert grads.dsinks.shape == (1,)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_bits_in_every_run(xp, rng, dtype, deterministic):
    if not deterministic and dtype not in RELATIVE:
        pytest.skip("16-bit gradients are the same bits on request")
    arrays = inputs(rng, dtype, q=(2, 8, 300, 32), k=(2, 2, 400, 32))
    options = {
        "bias": np.zeros((8, 1, 400), np.float32), "sinks": np.zeros(8, np.float32),
        "need_dbias": True, "need_dsinks": True, "deterministic": deterministic,
    }  # fmt: skip
    first = gradients(xp, *arrays, **options)
    for _ in range(3):
        again = gradients(xp, *arrays, **options)
        for a, b in zip(first[:5], again[:5], strict=True):
            np.testing.assert_array_equal(to_host(a), to_host(b))


def test_gradients_of_merged_parts(xp, rng):
    """A merge sends gradients into out and lse of its parts; they add up."""
    q, k, v, dout = inputs(rng, "float64", (2, 9, 8), (2, 12, 8))
    whole = gradients(xp, q, k, v, dout)
    q, k, v, dout = (place(xp, x) for x in (q, k, v, dout))
    parts = [slice(0, 5), slice(5, 12)]
    states = [cupyflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in parts]
    out, lse = cupyflash.merge_attention_states(*zip(*states, strict=True))
    dq, dk = xp.zeros_like(q), []
    for s, (part_out, part_lse) in zip(parts, states, strict=True):
        share = xp.exp(part_lse - lse)[..., None]
        grads = cupyflash.attention_vjp(
            share * dout, q, k[:, s], v[:, s], part_out, part_lse,
            dlse=(share * dout * (part_out - out)).sum(-1),
        )  # fmt: skip
        dq += grads.dq
        dk.append(grads.dk)
    np.testing.assert_allclose(to_host(dq), to_host(whole.dq), atol=1e-12)
    dk = np.concatenate([to_host(x) for x in dk], 1)
    np.testing.assert_allclose(dk, to_host(whole.dk), atol=1e-12)


def test_lists_are_arrays():
    q = [[1.0, 0.0], [0.0, 1.0]]
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    grads = cupyflash.attention_vjp(out.tolist(), q, q, q, out.tolist(), lse.tolist())
    assert grads.dq.shape == (2, 2)


def test_explain(xp, rng):
    q, k, v, dout = (place(xp, x) for x in inputs(rng))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    told = cupyflash.explain("attention_vjp", dout, q, k, v, out, lse, causal=True)
    assert told.function == "attention_vjp"
    assert told.backend == xp.__name__
    assert told.kernel == "tiled"
    assert told.problem.forward.seqlen_k == 11
    assert len(repr(told).splitlines()) > 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("row", "columns", "of_rows"), [("tiled", 0, 2), ("mma_split", 64, 10)]
)
def test_memory_is_linear(cupy, monkeypatch, row, columns, of_rows):
    """Beside the gradients: delta, and nothing of the size of the scores.

    Tensor cores have q, k, v and dO in rows of 64 columns, too, and their statistics.
    """
    rows.force(monkeypatch, "attention_vjp", row)
    q = cupy.ones((1, 4, 4096, 16), np.float32)
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    cupyflash.attention_vjp(out, q, q, q, out, lse)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        grads = cupyflash.attention_vjp(out, q, q, q, out, lse)
        parts = 4 * columns * lse.nbytes
        assert pool.total_bytes() <= 3 * q.nbytes + of_rows * lse.nbytes + parts
        del grads


@pytest.mark.gpu
def test_a_warm_call_can_be_captured(cupy, rng):
    q, k, v, dout = (place(cupy, x) for x in inputs(rng))
    sinks = cupy.ones(4, np.float32)
    bias = cupy.ones((1, 11), np.float32)
    out, lse = cupyflash.attention(q, k, v, sinks=sinks, bias=bias, return_lse=True)

    def call():
        return cupyflash.attention_vjp(
            dout, q, k, v, out, lse, sinks=sinks, bias=bias, need_dbias=True,
            need_dsinks=True,
        )  # fmt: skip

    expected = [to_host(x) for x in call()]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.begin_capture()
        captured = call()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    for a, b in zip(expected, captured, strict=True):
        np.testing.assert_array_equal(a, to_host(b))


@pytest.mark.parametrize("keys", [1, 3])
def test_rows_that_no_key_reaches_in_many_heads(xp, keys):
    q, dout = xp.ones((70, 2, 2, 3)), xp.ones((70, 2, 2, 3))
    k = v = xp.ones((70, 1, keys, 3))
    options = {"causal": True, "query_offset": -6}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    for grad in cupyflash.attention_vjp(dout, q, k, v, out, lse, **options)[:3]:
        np.testing.assert_array_equal(to_host(grad), 0)
