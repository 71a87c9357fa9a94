"""How far a result is from the exact one, and how far it may be."""

import ml_dtypes
import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")

# Largest relative error that is promised, by function and dtype. softmax and
# log_softmax count element by element; attention as |out - exact| beside the sum of
# p_j |v_j| of each output, in which nothing cancels (attention_bound()).
BOUNDS = {
    "softmax": {
        "float64": 1e-15,
        "float32": 4e-7,
        "float16": 5e-4,
        "bfloat16": 3.95e-3,
    },
    "attention": {
        "float64": 5e-15,
        "float32": 2e-6,
        "float16": 1e-3,
        "bfloat16": 8e-3,
    },
}
# Of those sums, each rounding of what a score is summed up from.
SCORE_ROUNDINGS = {"float64": 2.0**-51}  # others compute scores in float32: 2^-22
# logsumexp: units in the last place where they are promised, else relative.
LOGSUMEXP_ULPS = {"float64": 2.0, "float32": 1.5}
LOGSUMEXP_RELATIVE = {"float16": 5e-4, "bfloat16": 3.95e-3}
TF32_ATTENTION = 1.5e-3


def dtype_of(name):
    """The NumPy dtype called `name`, bfloat16 among them."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def finfo(dtype):
    """Machine limits, of bfloat16 too."""
    return ml_dtypes.finfo(dtype)


def to_host(x):
    """`x` as a NumPy array of its own dtype."""
    if not hasattr(x, "get"):
        return np.asarray(x)
    # The bits travel, so that no cast of CuPy's takes part.
    if x.dtype == ml_dtypes.bfloat16:
        return x.view(np.uint16).get().view(x.dtype)
    return x.get()


def wide(x, real=np.longdouble):
    """`x` on the host in `real`, by default the widest float (or complex) there is."""
    x = to_host(x)
    if x.dtype.kind == "c":
        return x.astype(np.result_type(real, np.complex64))
    # bfloat16 knows the way to float64 only.
    if x.dtype.itemsize <= 4:
        x = x.astype(np.float64)
    return x.astype(real, copy=False)


def of_one_type(actual, exact):
    """Both on the host, in the type of `exact`: float64 or wider."""
    real = np.result_type(to_host(exact), np.float64).type
    return wide(actual, real), wide(exact, real)


def max_error(actual, exact):
    """Largest absolute difference; NaN if there is one on either side."""
    actual, exact = of_one_type(actual, exact)
    return float(np.abs(actual - exact).max()) if actual.size else 0.0


def assert_as_accurate(actual, standard, exact, factor=2.0):
    """Assert that `actual` is nearly as close to `exact` as `standard` is.

    One rounding of the largest value is granted on top: `standard` can be lucky.
    """
    assert actual.shape == exact.shape
    if exact.size == 0:
        return
    unit = float(finfo(standard.dtype).eps) * float(np.abs(wide(exact)).max())
    bound = factor * max_error(standard, exact) + unit
    error = max_error(actual, exact)
    assert error <= bound, f"error {error:.3e} is above {bound:.3e}"


def attention_bound(sizes, size, dtype, relative=None):
    """What is promised of each output of attention (docs/guides/precision.md).

    `sizes` are the exact sums of p_j |v_j|, and `size` the largest sum of the sizes of
    what a score is summed up from.
    """
    relative = BOUNDS["attention"][dtype] if relative is None else relative
    roundings = SCORE_ROUNDINGS.get(dtype, 2.0**-22) * size
    # Outputs below the normal numbers have no relative precision.
    least = float(finfo(dtype_of(dtype)).smallest_subnormal)
    return (relative + roundings) * wide(sizes) + least


def assert_same_specials(actual, exact):
    """Assert that NaN and infinities stand at the same places; return where none do."""
    actual, exact = of_one_type(actual, exact)
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    finite = np.isfinite(exact)
    if finite.all() and np.isfinite(actual).all():
        return finite
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(exact), "NaN elsewhere")
    infinite = np.isinf(exact)
    np.testing.assert_array_equal(np.isinf(actual), infinite, "inf elsewhere")
    np.testing.assert_array_equal(actual[infinite], exact[infinite])
    return finite


def relative_error(actual, exact, dtype):
    """Largest element-wise relative error of a softmax in `dtype`.

    Below the normal numbers there is no relative precision: there the error must be
    smaller than the smallest normal number (CuPy compiles with flushing to zero).
    """
    actual, exact = of_one_type(actual, exact)
    if exact.size == 0:
        return 0.0
    tiny = float(finfo(dtype_of(dtype)).tiny)
    error, size = np.abs(actual - exact), np.abs(exact)
    is_right = (error <= 2 * tiny) | (size >= 2 * tiny)
    assert is_right.all(), "wrong below the normal numbers"
    return float(np.where(size < 2 * tiny, 0, error / np.maximum(size, tiny)).max())


def ulps(actual, exact, largest, dtype):
    """Largest error in units in the last place of `dtype`.

    The unit is that of the result, or of the row's largest entry where the result
    cancels against it.
    """
    actual, exact = of_one_type(actual, exact)
    size = np.maximum(np.abs(exact), np.abs(wide(largest))).astype(dtype)
    # Below the normal numbers flushing to zero is allowed.
    unit = np.spacing(np.maximum(size, np.finfo(dtype).tiny)).astype(np.longdouble)
    unit = np.where(size < 2 * np.finfo(dtype).tiny, np.inf, unit)
    return float((np.abs(actual - exact) / unit).max()) if exact.size else 0.0
