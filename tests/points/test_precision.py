"""The keyword precision of the reductions, and of what is built on them."""

import numpy as np
import pytest

from cupyflash import points


def call(function, dtype=np.float32, **options):
    rng = np.random.default_rng(0)
    x, y = (rng.random((n, 9)).astype(dtype) for n in (30, 40))
    if function in (points.kernel_sum, points.mean):
        return function(x, y, np.ones((40, 2), dtype), **options)
    if function is points.logsumexp:
        return function(x, y, **options)
    return function(x, y, epsilon=0.5, **options).value


FUNCTIONS = (
    points.logsumexp,
    points.kernel_sum,
    points.mean,
    points.sinkhorn,
    points.sinkhorn_divergence,
)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numpy_has_float32_either_way(function):
    for dtype in (np.float16, np.float32):
        plain = call(function, dtype)
        assert plain.dtype == np.float32
        np.testing.assert_array_equal(call(function, dtype, precision="tf32"), plain)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_refused(function):
    match = "precision must be one of 'float32', 'tf32', got 'half'"
    with pytest.raises(ValueError, match=match):
        call(function, precision="half")
    match = "precision='tf32' is for float32 inputs, got float64"
    with pytest.raises(ValueError, match=match):
        call(function, np.float64, precision="tf32")
    assert call(function, np.float64, precision="float32").dtype == np.float64
