"""Gradients of sinks whose rows have an `out` below the normal numbers of float16.

A sink that has nearly all the weight of its row, or tiny values, leave an `out` that
float16 rounds to few bits or to 0. The gradient of the sink is as right as any other:
where `out` is the result of these keys alone it does not depend on its rounding.
"""

import fuzz
import fuzz_vjp
import numpy as np
import pytest
import rows
from accuracy import dtype_of, to_host, wide
from placing import place

import cupyflash
from cupyflash import scores
from cupyflash._attention.cpu import backward, backward_entries

SHAPES = (2, 4, 2, 70, 90)  # batch, heads, heads of k, queries, keys
# By how much the sink is above the scores: `out` is near the normal numbers, subnormal,
# and 0.
SINKS = (8, 13, 20)


def random_options(rng, kind):
    """(arrays, options) of a call; scores change, and rows may see no key."""
    batch, heads, _, queries, keys = SHAPES
    scores_shape = (batch, heads, queries, keys)
    arrays, options = {}, {}
    if kind == "bias":
        arrays["bias"] = rng.normal(size=scores_shape).astype(np.float16)
        arrays["bias"][rng.random(scores_shape) < 0.1] = -np.inf
    elif kind == "mask":
        arrays["mask"] = rng.random(scores_shape) < 0.5
        arrays["mask"][:, :, 5:12] = False
    elif kind == "lengths":
        arrays["query_lengths"] = np.array([queries, 33])
        arrays["key_lengths"] = np.array([0, 57])
    elif kind == "window":
        options["window"] = (9, 4)
        arrays["alibi_slopes"] = rng.random((batch, heads)).astype(np.float32)
    elif kind == "softcap":
        options |= {"softcap": 3.0, "causal": True}
    return arrays, options


KINDS = ("plain", "bias", "mask", "lengths", "window", "softcap")


def problem_of(rng, dim, sink, kind="plain", dlse=False, dtype="float16", size=1.0):
    """A problem of the fuzz; `size` is that of the values."""
    batch, heads, kv_heads, queries, keys = SHAPES
    kind_of = dtype_of(dtype)
    arrays = {
        "q": rng.normal(size=(batch, heads, queries, dim)),
        "k": rng.normal(size=(batch, kv_heads, keys, dim)),
        "v": rng.normal(size=(batch, kv_heads, keys, dim)) * size,
        "dout": rng.normal(size=(batch, heads, queries, dim)),
    }
    arrays = {name: x.astype(kind_of) for name, x in arrays.items()}
    more, options = random_options(rng, kind)
    # Sums of 90 exponentials are some e^5.
    sinks = rng.normal(size=heads) * 0.3 + 5 + sink
    arrays |= more | {"sinks": sinks.astype(np.float32)}
    if dlse:
        arrays["dlse"] = 1e-6 * rng.normal(size=(batch, heads, queries))
        arrays["dlse"] = arrays["dlse"].astype(np.float32)
    forms = dict.fromkeys(arrays, "plain")
    options = {"method": "auto", "layout": "bhsd", "need_dsinks": True, **options}
    options["need_dbias"] = "bias" in arrays
    options["deterministic"] = True
    notes = {"expanded": [], "scores": (batch, heads, queries, keys)}
    return fuzz.Problem(
        "attention_vjp", 0, None, "attention_vjp", arrays, forms, options, notes=notes
    )


@pytest.fixture(params=["auto", "blocks", "mma", "tiled"])
def row(request, xp, monkeypatch):
    """What computes gradients: what is chosen, blocks of NumPy, a row of a GPU's."""
    if (request.param == "blocks") != (xp is np) and request.param != "auto":
        pytest.skip("there is no such choice")
    if request.param == "blocks":
        monkeypatch.setattr(backward, "_checked", {})
        monkeypatch.setattr(backward, "in_boxes", lambda *_: False)
        monkeypatch.setattr(backward_entries.Direct, "takes_vjp", lambda _: False)
    elif request.param != "auto":
        rows.force(monkeypatch, "attention_vjp", request.param)
    return request.param


@pytest.mark.parametrize("dim", [32, 128, 200])
@pytest.mark.parametrize("sink", SINKS)
def test_sinks_far_above_the_scores(xp, rng, row, sink, dim):
    for dlse in (False, True):
        fuzz.CHECKS["attention_vjp"](xp, problem_of(rng, dim, sink, dlse=dlse))


@pytest.mark.parametrize("kind", KINDS)
def test_with_options(xp, rng, row, kind):
    for sink in SINKS:
        for dlse in (False, True):
            problem = problem_of(rng, 64, sink, kind, dlse)
            fuzz.CHECKS["attention_vjp"](xp, problem)


@pytest.mark.parametrize("kind", ["plain", "mask", "lengths"])
def test_what_is_no_number_flows_into_rows_that_see_no_key(xp, rng, row, kind):
    problem = problem_of(rng, 64, 20, kind, True)
    fuzz_vjp._poison(rng, problem, problem.arrays["dout"])
    fuzz.CHECKS["attention_vjp"](xp, problem)


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7])
def test_tiny_values(xp, rng, row, size):
    fuzz.CHECKS["attention_vjp"](xp, problem_of(rng, 64, -4, size=size))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_dtypes(xp, rng, row, dtype):
    if row == "mma" and dtype == "float32":
        pytest.skip("it is for 16 bits")
    for sink in SINKS:
        problem = problem_of(rng, 64, sink, "bias", True, dtype)
        fuzz.CHECKS["attention_vjp"](xp, problem)


def test_functions(xp, rng):
    """Score and mask functions, against the same in float64."""
    problem = problem_of(rng, 64, 20)
    functions = {
        "score": lambda s, i, j: s - 0.01 * abs(i - j) * np.cos(s),
        "mask": scores.sliding_window(20),
    }
    found, exact = (
        _gradients(module, problem, dtype, **functions).dsinks
        for module, dtype in ((xp, np.float16), (np, np.float64))
    )
    np.testing.assert_allclose(wide(to_host(found)), exact, rtol=2e-3)


def test_rows_are_bit_identical(xp, rng, row):
    problem = problem_of(rng, 64, 14, "mask", True)
    first, second = (to_host(_gradients(xp, problem, np.float16).dsinks) for _ in "ab")
    np.testing.assert_array_equal(first, second)


def _gradients(xp, problem, dtype, **more):
    """The gradients of a problem with inputs of a dtype."""
    call = dict(problem.arrays)
    given = [place(xp, call.pop(n).astype(dtype)) for n in ("dout", "q", "k", "v")]
    dlse = call.pop("dlse", None)
    call = {n: place(xp, x) for n, x in call.items()} | more
    out, lse = cupyflash.attention(*given[1:], **call, return_lse=True)
    if dlse is not None:
        call["dlse"] = place(xp, dlse)
    return cupyflash.attention_vjp(*given, out, lse, need_dsinks=True, **call)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sink", [2, *SINKS])
def test_merged_results(xp, rng, row, dtype, sink):
    """delta is that of both calls, which lse may not tell.

    A float16 `out` says no more than its rounding leaves.
    """
    if row == "mma" and dtype != "float16":
        pytest.skip("it is for 16 bits")
    problem = problem_of(rng, 64, sink, dtype=dtype)
    wide_kind = np.float64 if dtype == "float64" else np.float32
    problem.arrays["sinks"] = problem.arrays["sinks"].astype(wide_kind)
    arrays = {n: place(xp, x) for n, x in problem.arrays.items()}
    dout, q, k, v, sinks = (arrays[n] for n in ("dout", "q", "k", "v", "sinks"))
    # The other keys have more to say.
    others = cupyflash.attention(q, k[:, :, 30:] * 2, v[:, :, 30:], return_lse=True)
    own = k[:, :, :30], v[:, :, :30]
    first = cupyflash.attention(q, *own, sinks=sinks, return_lse=True)
    merged = cupyflash.merge_attention_states(
        *(xp.stack([a, b]) for a, b in zip(first, others, strict=True))
    )
    found = cupyflash.attention_vjp(
        dout, q, *own, *merged, sinks=sinks, need_dsinks=True
    ).dsinks
    out, lse = (wide(to_host(x), np.float64) for x in merged)
    weights = np.exp(problem.arrays["sinks"][:, None] - lse)
    dout = wide(problem.arrays["dout"], np.float64)
    exact = -(weights * (dout * out).sum(-1)).sum((0, 2))
    # To one more rounding of the merged `out`.
    steps = np.spacing(np.abs(to_host(merged[0]))).astype(np.float64)
    lost = 2 * (weights * (np.abs(dout) * steps).sum(-1)).sum((0, 2))
    sizes = (weights * np.abs(dout * out).sum(-1)).sum((0, 2))
    bound = lost + (100 * np.finfo(wide_kind).eps) * sizes
    assert np.all(np.abs(to_host(found) - exact) <= bound)
