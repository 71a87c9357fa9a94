"""Columns that no cluster holds: blocks anywhere on the card share their tiles."""

import numpy as np
import oracle
import pytest
from accuracy import dtype_of, to_host
from test_softmax import check, vjp_error_is_small

import cupyflash

pytest.importorskip("cupy")

from cupyflash._cuda import runtime
from cupyflash._softmax.gpu.heuristics import columns

pytestmark = pytest.mark.gpu

FLOATS = ("float16", "float32", "float64")


def length_of(share):
    """Rows of 128 bytes that about this share of the card holds; not for clusters."""
    return max(17_001, int(share * runtime.device(0).num_sms * 2100) | 1)


def computed(function, *arrays, **options):
    """The result, the same in a second call; by teams of blocks."""
    told = cupyflash.explain(function, *arrays, 0, **options)
    if "TEAMS=1" not in str(told):
        pytest.skip(f"{told.kernel} takes this on this card")
    y = to_host(getattr(cupyflash, function)(*arrays, 0, **options))
    again = to_host(getattr(cupyflash, function)(*arrays, 0, **options))
    np.testing.assert_array_equal(again, y)
    return y


@pytest.mark.parametrize("inner_bytes", [56, 192])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_special_columns_are_on_their_own(cupy, rng, function, dtype, inner_bytes):
    num_columns = inner_bytes // dtype_of(dtype).itemsize
    x = rng.normal(size=(length_of(0.4), num_columns))
    x = (x * (1 + np.arange(num_columns) % 5)).astype(dtype)
    x[rng.integers(len(x)), 1] = np.nan
    x[:, 2] = -np.inf
    x[rng.integers(len(x)), 3] = np.inf
    x[:-1, 4] = -np.inf
    y = computed(function, cupy.asarray(x))
    check(function, y, x, dtype, axis=0)
    x[:, 1] = x[:, 3] = 0
    usual = computed(function, cupy.asarray(x))
    others = [i for i in range(num_columns) if i not in (1, 3)]
    np.testing.assert_array_equal(usual[:, others], y[:, others])


@pytest.mark.parametrize("option", ["where", "scale"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_options(cupy, rng, function, dtype, option):
    x = rng.normal(size=(length_of(0.2), 24)).astype(dtype)
    if option == "scale":
        given, on_card = {"scale": -0.7}, {"scale": -0.7}
    else:
        where = rng.random(size=x.shape) > 0.3
        where[:, 5] = False
        given, on_card = {"where": where}, {"where": cupy.asarray(where)}
    y = computed(function, cupy.asarray(x), **on_card)
    check(function, y, x, dtype, axis=0, **given)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_teams_take_turns(cupy, rng, monkeypatch, dtype):
    """At the tiles of two slabs."""
    monkeypatch.setattr(columns, "_TEAM_MANY", 1)
    num_columns = 13 * 128 // dtype_of(dtype).itemsize
    x = rng.normal(size=(2, length_of(0.15), num_columns)).astype(dtype)
    placed = cupy.asarray(x)
    told = cupyflash.explain("softmax", placed, 1)
    if "TEAMS=1" not in str(told):
        pytest.skip(f"{told.kernel} takes this on this card")
    y = to_host(cupyflash.softmax(placed, 1))
    check("softmax", y[:, :, ::37], x[:, :, ::37], dtype, axis=1)


@pytest.mark.parametrize("inner_bytes", [56, 1304])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", ["softmax_vjp", "log_softmax_vjp"])
def test_gradients(cupy, rng, function, dtype, inner_bytes):
    """Of one tile, and of more than there are teams."""
    shape = (length_of(0.15), inner_bytes // dtype_of(dtype).itemsize)
    x, dy = rng.normal(size=(2, *shape))
    y = getattr(oracle, function.removesuffix("_vjp"))(x, 0, real=np.float64)
    y, dy = y.astype(dtype), dy.astype(dtype)
    dx = computed(function, cupy.asarray(y), cupy.asarray(dy))
    exact = getattr(oracle, function)(y, dy, 0)
    vjp_error_is_small(dx, y, dy, exact, dtype, 1.0)
