"""More long rows than the ring of softmax_relay has places and barriers for."""

import numpy as np
import pytest
import rows
from accuracy import dtype_of, to_host
from test_softmax import check

import cupyflash

pytest.importorskip("cupy")

from cupyflash._cuda import runtime
from cupyflash._softmax.gpu.heuristics import long_rows

pytestmark = pytest.mark.gpu

SLICE = 40 << 10


# In one group of all blocks, and in several.
@pytest.mark.parametrize("share", [1, 0.4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_barriers_go_round_more_than_twice(
    cupy, rng, monkeypatch, function, dtype, share
):
    """Of rows whose slices are as long as usual, from addresses between vectors."""
    monkeypatch.setattr(long_rows, "_RELAY_LEAST", dict.fromkeys((2, 4, 8), 0))
    monkeypatch.setattr(long_rows, "_RELAY_SLICE", SLICE)
    rows.force(monkeypatch, "softmax", "relay")
    num_sms = runtime.device(0).num_sms
    length = int(share * num_sms * SLICE) // dtype_of(dtype).itemsize | 3
    x = rng.normal(size=(40 * int(1 / share), length)).astype(np.float32)
    x *= 1 + np.arange(len(x), dtype=np.float32)[:, None] % 7
    x = x.astype(dtype_of(dtype))
    special = np.isin(np.arange(len(x)), (3, 20, len(x) - 2))
    x[3, rng.integers(length)] = np.nan
    x[20] = -np.inf
    x[-2, rng.integers(length)] = np.inf
    placed = cupy.asarray(x)
    assert cupyflash.explain(function, placed, 1).kernel == "relay"
    y = getattr(cupyflash, function)(placed, 1)
    again = getattr(cupyflash, function)(placed, 1)
    y, again = to_host(y), to_host(again)
    # NaNs of bfloat16 are not equal for NumPy.
    np.testing.assert_array_equal(again.astype(np.float64), y.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(y).any(axis=1), special)
    for i in np.flatnonzero(~special)[::9]:
        check(function, y[i : i + 1], x[i : i + 1], dtype, axis=1)
