"""The package's float64 reference against the oracle, and the oracle against loops."""

import math

import fuzz
import numpy as np
import oracle
import pytest
import scipy.special
import unfused
from accuracy import FLOATS, dtype_of, wide
from placing import place

from cupyflash._reference import forward as _reference


def attention_in_loops(q, k, v, o):
    """One head, one number at a time, as the contract says it."""
    out = np.zeros((len(q), v.shape[1]))
    lse = np.full(len(q), -math.inf)
    for i in range(o["query_length"]):
        scores = {}
        for j in range(o["key_length"]):
            position = i + o["offset"]
            if o["causal"] and j > position:
                continue
            if not position - o["left"] <= j <= position + o["right"]:
                continue
            if not o["mask"][i, j]:
                continue
            s = o["scale"] * math.fsum(a * b for a, b in zip(q[i], k[j], strict=True))
            s = o["softcap"] * math.tanh(s / o["softcap"])
            scores[j] = s + o["bias"][i, j] - o["slope"] * abs(position - j)
        terms = [math.exp(s) for s in scores.values()]
        total = math.fsum(terms) + math.exp(o["sink"])
        lse[i] = math.log(total)
        for j, term in zip(scores, terms, strict=True):
            out[i] += term / total * v[j]
    return out, lse


@pytest.mark.parametrize("offset", [None, 0, 3, -2])
@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_against_loops(rng, offset, causal):
    q, k, v = (rng.normal(size=s) for s in ((6, 4), (9, 4), (9, 3)))
    options = {
        "bias": rng.normal(size=(6, 9)),
        "mask": rng.random((6, 9)) < 0.7,
        "scale": 0.7,
        "causal": causal,
        "window": (4, 3),
        "softcap": 1.5,
    }
    lengths = {"query_lengths": np.array(5), "key_lengths": np.array(7)}
    loops = {
        **{n: options[n] for n in ("bias", "mask", "scale", "causal", "softcap")},
        "left": 4,
        "right": 3,
        "slope": 0.3,
        "sink": 0.4,
        "query_length": 5,
        "key_length": 7,
        "offset": 7 - 5 if offset is None else offset,
    }
    expected = attention_in_loops(q, k, v, loops)
    arguments = {
        **options,
        **lengths,
        "query_offset": offset,
        "sinks": np.array([0.4]),
        "alibi_slopes": np.array([0.3]),
    }
    out, lse, size = oracle.attention(q, k, v, **arguments)
    np.testing.assert_allclose(wide(out).astype(float), expected[0], atol=1e-14)
    np.testing.assert_allclose(wide(lse).astype(float), expected[1], atol=1e-14)
    assert size > 0
    reference = _reference.attention(q, k, v, return_lse=True, **arguments)
    for got, exact in zip(reference, expected, strict=True):
        np.testing.assert_allclose(got, exact, atol=1e-14)


def test_attention_over_random_problems(xp):
    for number in range(150):
        # Few structures, whose kernels are compiled once.
        problem = fuzz.draw("attention", number % 40, number // 40)
        if problem.arrays["q"].dtype == np.float64:
            continue
        exact, exact_lse, size = fuzz.exact_attention(problem)
        placed = {n: place(xp, x) for n, x in problem.arrays.items()}
        q, k, v = (placed.pop(n) for n in "qkv")
        options = {n: x for n, x in problem.options.items() if n != "return_lse"}
        out, lse = _reference.attention(q, k, v, return_lse=True, **placed, **options)
        for got, expected in ((out, exact), (lse, exact_lse)):
            assert isinstance(got, np.ndarray)
            assert got.dtype == np.float64
            np.testing.assert_allclose(
                got, expected.astype(float), rtol=1e-10, atol=1e-13 * (10 + size)
            )


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_softmax(xp, rng, function, dtype):
    x = (rng.normal(size=(4, 3, 30)) * 10).astype(dtype_of(dtype))
    where = rng.random((3, 30)) < 0.7
    for options in ({}, {"scale": -0.5}, {"where": where}):
        exact = getattr(oracle, function)(x, (0, 2), **options)
        placed = {n: place(xp, o) if n == "where" else o for n, o in options.items()}
        y = getattr(_reference, function)(place(xp, x), (0, 2), **placed)
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, exact.astype(float), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("sign", [False, True])
def test_logsumexp(xp, rng, sign):
    a, b = rng.normal(size=(2, 4, 30))
    placed = place(xp, a), 1, place(xp, b)
    y = _reference.logsumexp(*placed, keepdims=True, return_sign=sign)
    with np.errstate(invalid="ignore"):
        expected = scipy.special.logsumexp(a, 1, b, keepdims=True, return_sign=sign)
    for got, exact in zip(*((y, expected) if sign else ([y], [expected])), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-12)


@pytest.mark.parametrize("function", ["softmax_vjp", "log_softmax_vjp"])
def test_vjp(xp, rng, function):
    y, dy = rng.normal(size=(2, 4, 30)).astype(np.float32)
    got = getattr(_reference, function)(place(xp, y), place(xp, dy), 1, scale=0.3)
    exact = getattr(oracle, function)(y, dy, 1, 0.3).astype(float)
    np.testing.assert_allclose(got, exact, rtol=1e-12, atol=1e-12)


def test_merge(xp, rng):
    outs, lses = rng.normal(size=(5, 3, 4)), rng.normal(size=(5, 3))
    lses[:, 1] = -np.inf
    lses[2, 0] = -np.inf
    outs[2, 0] = np.nan
    expected = oracle.merge(outs, lses)
    got = _reference.merge_attention_states(place(xp, outs), place(xp, lses))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b.astype(float), rtol=1e-13)


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_computations_round_to_the_dtype(xp, rng, dtype):
    """They are near the exact result, but not nearer than their dtype allows."""
    unit = float(np.finfo(dtype_of("float32")).eps) if dtype == "float32" else 1e-16
    unit = {"float16": 1e-4, "bfloat16": 1e-3}.get(dtype, unit)
    q, k, v = (rng.normal(size=(2, 20, 8)).astype(dtype_of(dtype)) for _ in range(3))
    exact = oracle.attention(q, k, v)[0]
    plain = _reference.plain_attention(*(place(xp, x) for x in (q, k, v)))
    assert plain.dtype == dtype_of(dtype)
    error = float(np.abs(wide(plain) - exact).max())
    assert 0.01 * unit < error < 50 * unit
    x = q[0]
    for name in ("softmax", "log_softmax"):
        plain = getattr(unfused, name)(xp, place(xp, x), 1)
        error = float(np.abs(wide(plain) - getattr(oracle, name)(x, 1)).max())
        assert plain.dtype == dtype_of(dtype)
        assert error < 50 * unit
