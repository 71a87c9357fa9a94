"""cupyflash.dask.points against cupyflash.points, on chunks of every kind."""

import numpy as np
import pytest

from cupyflash import points

da = pytest.importorskip("dask.array")
import cupyflash.dask as cd  # noqa: E402

KERNELS = (
    "gaussian", "laplacian", "cauchy", "matern32", "matern52", "inverse_multiquadric",
)  # fmt: skip
# Beside the bounds of the plain functions: a rounding for each join.
TOLERANCE = {"float32": 4e-6, "float64": 2e-13}


def near_and_far(d2):
    return np.exp(-d2) + 0.1 / (1 + d2)


def chunks_of(rng, shape):
    return tuple(int(rng.integers(1, n + 1)) if n else 1 for n in shape)


def problem(rng):
    """(reduction, arrays, options)."""
    batch = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3)))
    num_x, num_y = (int(n) for n in rng.integers(0, 30, 2))
    dim, columns = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    dtypes = ["float16", "float32", "float32", "float64", "int32"]

    def leading():
        return tuple(n if rng.random() < 0.7 else 1 for n in batch[rng.integers(2) :])

    def make(*shape):
        return (3 * rng.normal(size=shape)).astype(rng.choice(dtypes))

    reduction = str(rng.choice(["logsumexp", "kernel_sum", "mean"]))
    arrays = {"x": make(*leading(), num_x, dim), "y": make(*leading(), num_y, dim)}
    is_vector = rng.random() < 0.3
    if reduction != "logsumexp":
        values = make(num_y) if is_vector else make(*leading(), num_y, columns)
        arrays["b" if reduction == "kernel_sum" else "v"] = values
    if reduction != "kernel_sum" and rng.random() < 0.6:
        weights = rng.normal(size=(*leading(), num_y if rng.random() < 0.8 else 1))
        weights[rng.random(weights.shape) < 0.1] = -np.inf
        arrays["log_weights"] = weights.astype(rng.choice(dtypes[:4]))
    options = {"bandwidth": 1.5}
    if rng.random() < 0.4:
        options["bandwidth"] = rng.uniform(0.5, 2.0, dim)
    names = (*KERNELS, near_and_far)
    names += ("energy",) if reduction == "kernel_sum" else ()
    options["kernel"] = names[rng.integers(len(names))]
    if reduction == "mean":
        options["return_lse"] = bool(rng.integers(2))
    return reduction, arrays, options


def compare(got, want):
    assert isinstance(got, da.Array)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    values = got.compute(scheduler="sync")
    assert (values.shape, values.dtype) == (want.shape, want.dtype)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(values[~finite], want[~finite])
    atol = TOLERANCE[want.dtype.name] * np.abs(want[finite]).max(initial=1.0)
    np.testing.assert_allclose(values[finite], want[finite], rtol=0, atol=atol)


@pytest.mark.parametrize("first", range(0, 80, 8))
def test_reductions(first):
    for seed in range(first, first + 8):
        rng = np.random.default_rng(seed)
        reduction, arrays, options = problem(rng)
        want = getattr(points, reduction)(**arrays, **options)
        lazy = {
            n: da.from_array(x, chunks=chunks_of(rng, x.shape))
            if rng.random() < 0.8
            else x
            for n, x in arrays.items()
        }
        got = getattr(cd.points, reduction)(
            **lazy, **options, split_every=int(rng.integers(2, 5))
        )
        many = isinstance(want, tuple)
        for one, other in zip(
            got if many else (got,), want if many else (want,), strict=True
        ):
            compare(one, other)


def test_a_number_as_weight_keeps_the_dtype():
    x = np.ones((5, 2), np.float32)
    lazy = da.from_array(x, chunks=2)
    compare(cd.points.logsumexp(lazy, lazy, 2.0), points.logsumexp(x, x, 2.0))


def test_errors_are_those_of_the_functions_and_come_at_once():
    x = da.zeros((4, 2), chunks=1)
    for call, kind, words in (
        (lambda: cd.points.mean(x, x, None), TypeError, "v must be an array, got None"),
        (lambda: cd.points.logsumexp(x, x, bandwidth=0), ValueError, "above 0"),
        (
            lambda: cd.points.logsumexp(x, x[:, :1]),
            ValueError,
            "same number of dimensions",
        ),
        (lambda: cd.points.logsumexp(x, x, kernel="energy"), ValueError, "negative"),
        (lambda: cd.points.kernel_sum(x, x, x[:3]), ValueError, "b must have shape"),
        (lambda: cd.points.logsumexp(x, x, split_every=1), ValueError, "2 or more"),
        (lambda: cd.points.logsumexp(x[x[:, 0] > 0], x), ValueError, "unknown length"),
        (lambda: points.logsumexp(x, x), TypeError, r"use cupyflash\.dask"),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_lazy_named_by_content_and_in_processes():
    x = np.random.default_rng(0).normal(size=(30, 3))
    lazy = da.from_array(x, chunks=(8, 2))
    one, other = (cd.points.mean(lazy, lazy, lazy[:, 0]) for _ in range(2))
    assert one.name == other.name
    assert one.name != cd.points.mean(lazy, lazy, lazy[:, 0], bandwidth=2.0).name
    (got,) = da.compute(one, scheduler="processes", num_workers=2)
    np.testing.assert_allclose(got, points.mean(x, x, x[:, 0]), rtol=1e-12)


@pytest.mark.gpu
def test_reductions_on_a_gpu(cupy):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        reduction, arrays, options = problem(rng)
        if callable(options["kernel"]):
            continue
        want = getattr(points, reduction)(**arrays, **options)
        lazy = {
            n: da.from_array(
                cupy.asarray(x), chunks=chunks_of(rng, x.shape), asarray=False
            )
            for n, x in arrays.items()
        }
        got = getattr(cd.points, reduction)(**lazy, **options)
        many = isinstance(want, tuple)
        for one, other in zip(
            got if many else (got,), want if many else (want,), strict=True
        ):
            assert isinstance(one._meta, cupy.ndarray)
            compare(one.map_blocks(cupy.asnumpy), other)
