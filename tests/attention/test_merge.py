"""merge_attention_states against the oracle."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from accuracy import (
    BOUNDS,
    FLOATS,
    assert_same_specials,
    dtype_of,
    max_error,
    to_host,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from placing import FORMS, empty, place

import cupyflash
from cupyflash._attention.gpu import combine_config

INF, NAN = np.inf, np.nan


def parts(rng, shape=(4, 3, 5), head_dim=6, dtype="float32", lse_dtype="float32"):
    """Outputs and lses of several parts, some of which saw nothing."""
    outs = rng.normal(size=(*shape, head_dim))
    lses = rng.normal(size=shape) * 20
    lses[rng.random(shape) < 0.2] = -INF
    return outs.astype(dtype_of(dtype)), lses.astype(lse_dtype)


def check(xp, outs, lses, result, axis=0):
    out, lse = result
    exact, exact_lse = oracle.merge(outs, lses, axis)
    assert isinstance(out, xp.ndarray)
    assert isinstance(lse, xp.ndarray) or lse.ndim == 0
    assert out.dtype == outs.dtype
    assert lse.dtype == lses.dtype
    dtype = outs.dtype.name
    bound = BOUNDS["attention"][dtype]
    if dtype == "float64" and lses.dtype == np.float32:
        bound = BOUNDS["attention"]["float64"]  # sums are in float64 then
    for actual, expected, relative in (
        (out, exact, bound),
        (lse, exact_lse, BOUNDS["attention"][lses.dtype.name]),
    ):
        finite = assert_same_specials(actual, expected)
        if finite.any():
            size = max(1.0, float(np.abs(expected[finite]).max()))
            assert max_error(wide(actual)[finite], expected[finite]) <= relative * size


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lse_dtype", ["float32", "float64"])
def test_dtypes(xp, rng, dtype, lse_dtype):
    outs, lses = parts(rng, dtype=dtype, lse_dtype=lse_dtype)
    result = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
    check(xp, outs, lses, result)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("form", FORMS)
def test_every_axis_of_every_layout(xp, rng, axis, form):
    outs, lses = parts(rng)
    placed = place(xp, outs, form), place(xp, lses, form)
    result = cupyflash.merge_attention_states(*placed, axis=axis)
    check(xp, outs, lses, result, axis % 3)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_parts(xp, rng, kind):
    outs, lses = parts(rng)
    result = cupyflash.merge_attention_states(
        kind(place(xp, x) for x in outs), kind(place(xp, x) for x in lses)
    )
    check(xp, outs, lses, result)


@pytest.mark.parametrize("form", FORMS)
def test_out(xp, rng, form):
    outs, lses = parts(rng)
    out = empty(xp, outs.shape[1:], np.float32, form)
    result = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses), out=out)
    assert result[0] is out
    check(xp, outs, lses, result)


def test_one_part_is_itself(xp, rng):
    outs, lses = parts(rng, shape=(1, 3, 5))
    lses[:] = 7.25
    out, lse = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
    np.testing.assert_array_equal(to_host(out), outs[0])
    np.testing.assert_array_equal(to_host(lse), lses[0])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_part_that_saw_nothing_adds_nothing(xp, rng, bad, dtype):
    outs, lses = parts(rng, dtype=dtype)
    lses[1] = -INF
    clean = cupyflash.merge_attention_states(
        place(xp, np.delete(outs, 1, 0)), place(xp, np.delete(lses, 1, 0))
    )
    outs[np.isneginf(lses)] = bad
    result = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
    check(xp, outs, lses, result)
    for a, b in zip(result, clean, strict=True):
        np.testing.assert_allclose(
            wide(a).astype(float), wide(b).astype(float), rtol=1e-2, atol=1e-2
        )


def test_no_part_saw_anything(xp):
    outs, lses = xp.full((3, 2, 4), NAN), xp.full((3, 2), -INF)
    out, lse = cupyflash.merge_attention_states(outs, lses)
    assert not to_host(out).any()
    assert np.all(np.isneginf(to_host(lse)))


def test_no_parts(xp):
    out, lse = cupyflash.merge_attention_states(xp.empty((0, 2, 4)), xp.empty((0, 2)))
    np.testing.assert_array_equal(to_host(out), np.zeros((2, 4)))
    np.testing.assert_array_equal(to_host(lse), [-INF, -INF])


@pytest.mark.parametrize("shape", [(3, 0), (3, 2, 0), (0, 0)])
def test_empty(xp, shape):
    out, lse = cupyflash.merge_attention_states(
        xp.empty((*shape, 4), np.float32), xp.empty(shape, np.float32)
    )
    assert out.shape == (*shape[1:], 4)
    assert lse.shape == shape[1:]


def test_one_row(xp):
    """A single query: the merged lse has no axes."""
    outs = np.array([[1.0, 2.0], [3.0, 4.0]])
    out, lse = cupyflash.merge_attention_states(place(xp, outs), place(xp, np.zeros(2)))
    np.testing.assert_allclose(to_host(out), [2, 3])
    np.testing.assert_allclose(to_host(lse), np.log(2))


def test_large_lses_do_not_overflow(xp):
    outs = np.array([[[1.0]], [[3.0]]], np.float32)
    for value in (1e4, -1e4, 3e38):
        lses = np.full((2, 1), value, np.float32)
        out, lse = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
        np.testing.assert_allclose(to_host(out), [[2]])
        np.testing.assert_allclose(to_host(lse), value + np.log(2), rtol=1e-6)


def test_nan_stays_in_its_row(xp, rng):
    outs, lses = parts(rng)
    lses[:] = 1
    lses[2, 1, 3] = NAN
    out, lse = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
    nan = np.isnan(to_host(lse))
    assert nan[1, 3]
    assert nan.sum() == 1
    np.testing.assert_array_equal(np.isnan(to_host(out)).all(-1), nan)
    np.testing.assert_array_equal(np.isnan(to_host(out)).any(-1), nan)


def test_order_of_parts_does_not_matter(xp, rng):
    outs, lses = parts(rng, dtype="float64", lse_dtype="float64")
    order = rng.permutation(len(outs))
    first = cupyflash.merge_attention_states(place(xp, outs), place(xp, lses))
    second = cupyflash.merge_attention_states(
        place(xp, outs[order]), place(xp, lses[order])
    )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(to_host(a), to_host(b), rtol=1e-13, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["plain", "gaps", "shifted"])
@pytest.mark.parametrize(
    ("count", "head_dim", "dtype"),
    [
        (2, 130, "float16"),  # no whole vectors: those have a kernel of their own
        (3, 70, "bfloat16"),
        (40, 33, "float32"),
        (2, 200, "float64"),
    ],
)
def test_many_rows_have_the_bits_of_few(cupy, rng, count, head_dim, dtype, form):
    """A thread has several columns then; sums and their order are the same."""
    rows, few = 1 << 14, 500
    outs, lses = parts(rng, (count, rows), head_dim, dtype)
    outs[:, 7], lses[:, 7] = np.finfo("f4").max if dtype == "float32" else 6e4, 0
    outs[0, 11, head_dim - 1] = NAN
    found = cupyflash.merge_attention_states(place(cupy, outs, form), place(cupy, lses))
    first = [place(cupy, x[:, :few].copy()) for x in (outs, lses)]
    expected = cupyflash.merge_attention_states(*first)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(wide(a)[:few], wide(b))
    last = slice(rows - 100, rows)
    ends = [np.ascontiguousarray(x[:, last]) for x in (outs, lses)]
    check(cupy, *ends, [x[last] for x in found])


def test_merging_in_steps_is_merging_at_once(xp, rng):
    outs, lses = (
        place(xp, x) for x in parts(rng, dtype="float64", lse_dtype="float64")
    )
    whole = cupyflash.merge_attention_states(outs, lses)
    half = cupyflash.merge_attention_states(outs[:2], lses[:2])
    rest = cupyflash.merge_attention_states(outs[2:], lses[2:])
    steps = cupyflash.merge_attention_states(*zip(half, rest, strict=True))
    for a, b in zip(whole, steps, strict=True):
        np.testing.assert_allclose(to_host(a), to_host(b), rtol=1e-13, atol=1e-14)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    head_dim=st.integers(1, 40),
    form=st.sampled_from(FORMS),
    data=st.data(),
)
def test_any_shape(xp, shape, head_dim, form, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    outs, lses = parts(np.random.default_rng(3), shape, head_dim)
    placed = place(xp, outs, form), place(xp, lses, form)
    result = cupyflash.merge_attention_states(*placed, axis=axis)
    check(xp, outs, lses, result, axis % len(shape))


@pytest.mark.parametrize("head_dim", [4, 8, 24, 64, 128, 264])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_of_whole_vectors(xp, rng, monkeypatch, dtype, head_dim):
    """As of many rows: several to a warp, fewer to the last; and not aligned."""
    monkeypatch.setattr(combine_config, "_MANY_ROWS", 1)
    for count, first in ((2, 0), (3, 1), (9, 0), (37, 0)):
        outs, lses = parts(rng, (count, 3, 5), head_dim, dtype)
        lses[:, 0, 1] = lses[1:, 1, 2] = -INF
        outs[np.isneginf(lses)] = NAN
        outs[:, 2, 2], lses[:, 2, 2] = float(ml_dtypes.finfo(outs.dtype).max), 0
        room = np.zeros((count, 3, 5, head_dim + 8), outs.dtype)
        room[..., first : first + head_dim] = outs
        placed = place(xp, room)[..., first : first + head_dim]
        if xp is not np:
            told = cupyflash.explain("merge_attention_states", placed, xp.asarray(lses))
            few = count <= 8 and not first and head_dim in (8, 24, 64, 128)
            few &= dtype != "float32"
            assert ("combine_few.cu" in str(told)) == few
        check(
            xp, outs, lses, cupyflash.merge_attention_states(placed, xp.asarray(lses))
        )
        out = place(xp, room[0])[..., :head_dim]
        result = cupyflash.merge_attention_states(placed, xp.asarray(lses), out=out)
        check(xp, outs, lses, result)
