"""Moves and casts by bits are those of ml_dtypes."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from accuracy import to_host
from placing import place

from cupyflash._cli import nvrtc
from cupyflash.distributed import _bits

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("float32", "float16", "bfloat16")


def every_bfloat16():
    return np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)


def test_bfloat16_is_added_as_float32(xp):
    x = every_bfloat16()[:0x7F80]  # finite, not negative
    total = xp.ones((2, x.size), np.float32)
    _bits.add(total[1, ::-1], place(xp, x))
    np.testing.assert_array_equal(to_host(total)[0], 1)
    np.testing.assert_array_equal(to_host(total)[1, ::-1], 1 + x.astype(np.float32))


@pytest.mark.parametrize("columns", [7, 8])
@pytest.mark.parametrize("dtypes", [*itertools.product(FLOATS, repeat=3)])
def test_sums_are_made_in_float32_and_rounded_once(xp, rng, dtypes, columns):
    of_a, of_b, of_sum = (np.dtype(n) for n in dtypes)
    a, b = rng.normal(size=(2, 3, 20, columns)) * 2.0 ** rng.integers(-9, 9, (20, 1))
    a, b = a.astype(of_a), b.astype(of_b)
    want = a.astype(np.float32) + b.astype(np.float32)
    got = _bits.summed(xp, place(xp, a), place(xp, b), of_sum)
    assert got.dtype == of_sum
    assert to_host(got).tobytes() == want.astype(of_sum).tobytes()
    # In place, of rows that do not follow one another.
    total = place(xp, a)
    _bits.add(total[:, 5:9], place(xp, b)[:, 5:9])
    want_a = a.copy()
    want_a[:, 5:9] = want[:, 5:9].astype(of_a)
    assert to_host(total).tobytes() == want_a.tobytes()


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_every_dtype_is_cast_to_every_other(xp, rng, source, target):
    x = rng.normal(size=(3, 20, 6)).astype(source)
    for host, placed in ((x, place(xp, x)), (x[..., 1:], place(xp, x)[..., 1:])):
        got = to_host(_bits.cast(xp, placed, np.dtype(target)))
        assert got.tobytes() == host.astype(np.float32).astype(target).tobytes()


def test_casts_round_to_nearest_even(xp):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16) + 0x8000
    x = np.concatenate([words, halves, halves + 1, halves - 1]).view(np.float32)
    got = to_host(_bits.cast(xp, xp.asarray(x), BFLOAT16))
    with np.errstate(invalid="ignore"):
        want = x.astype(BFLOAT16)
    np.testing.assert_array_equal(np.isnan(x), np.isnan(got.astype(np.float32)))
    here = ~np.isnan(x)
    np.testing.assert_array_equal(got.view("u2")[here], want.view("u2")[here])


def test_other_dtypes_are_cast_as_ever():
    x = np.array([1.0, 1e-9, 70000.0], np.float32)
    with np.errstate(over="ignore"):
        got = _bits.cast(np, x, np.dtype("float16"))
        np.testing.assert_array_equal(got, x.astype("float16"))
    assert _bits.cast(np, x, np.dtype("float32")) is x
    y = every_bfloat16()
    assert _bits.cast(np, y, BFLOAT16) is y


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float32")])
def test_parts_are_moved(xp, dtype):
    host = np.arange(6 * 40 * 8).reshape(2, 3, 40, 8).astype(dtype)
    x = place(xp, host)
    for part in (
        (..., slice(3, 21), slice(None)), (slice(1, 2), ..., slice(5), slice(None)),
        (..., slice(None, None, 2), slice(None)), (..., slice(2, 5)),
        (..., slice(None, None, -1), slice(None)), (slice(None), 1, 7), (1, 1, 7, 3),
        (..., slice(0), slice(None)), (slice(None), slice(0, 2), slice(0, 7)),
    ):  # fmt: skip
        got = _bits.contiguous(xp, x[part])
        assert got.flags.c_contiguous
        assert got.dtype == dtype
        np.testing.assert_array_equal(to_host(got), host[part])


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float32")])
def test_moves(dtype):
    x = np.arange(24).reshape(2, 3, 4).astype(dtype)
    turned = x.swapaxes(0, 2)
    got = _bits.contiguous(np, turned)
    assert got.flags.c_contiguous
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, turned)
    assert _bits.contiguous(np, x) is x
    joined = _bits.joined(np, [x, turned.swapaxes(0, 2)], axis=1)
    assert joined.dtype == dtype
    np.testing.assert_array_equal(joined, np.concatenate([x, x], axis=1))


def test_kernels_need_no_header():
    if why := nvrtc.unusable():
        pytest.skip(why)
    from cupy.cuda import nvrtc as compiler

    formats = [name for name, _ in _bits._FORMATS.values()]
    body = "".join(
        f"y[{n}] = store<{f}>(load<{f}>(x, 1), 0);" for n, f in enumerate(formats)
    )
    text = f"""{_bits._PREAMBLE}
        extern "C" __global__ void all_formats(unsigned long long x,
                                               unsigned long long *y) {{ {body} }}"""
    made = compiler.createProgram(text, "bits.cu", [], [])
    compiler.compileProgram(made, ["--gpu-architecture=sm_80"])
