"""Optimal transport beside plain iterations on the matrix of costs."""

from types import SimpleNamespace

import numpy as np
import pytest

from cupyflash import points
from cupyflash._points.cpu import scaled_kernel
from cupyflash.points import _sinkhorn
from tests.points.test_gradients import differences


def costs(x, y):
    gaps = x[:, None] - y[None]
    return (gaps * gaps).sum(axis=-1)


def logsumexp(a, axis):
    top = a.max(axis=axis, keepdims=True)
    return np.log(np.exp(a - top).sum(axis=axis)) + np.squeeze(top, axis)


def plain(x, y, a, b, epsilon, strength=None, steps=5000):
    """(plan, f, g) by plain iterations."""
    c = costs(x, y)
    f, g = np.zeros(len(x)), np.zeros(len(y))
    damping = 1.0 if strength is None else strength / (strength + epsilon)
    for _ in range(steps):
        f = -damping * epsilon * logsumexp((g - c) / epsilon + np.log(b), 1)
        g = (
            -damping
            * epsilon
            * logsumexp((f[:, None] - c) / epsilon + np.log(a)[:, None], 0)
        )
    plan = a[:, None] * b * np.exp((f[:, None] + g - c) / epsilon)
    return plan, f, g


@pytest.mark.parametrize("scale", [1e-150, 1e-40, 1e38, 1e40, 1e150])
def test_clouds_of_any_scale(scale):
    """Also where float32, which the first iterations use, has no such numbers."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=(20, 3))
    square = scale * scale
    found = points.sinkhorn(scale * x, scale * y, epsilon=0.5 * square)
    expected = points.sinkhorn(x, y, epsilon=0.5)
    assert found.converged
    np.testing.assert_allclose(found.value / square, expected.value, 1e-9)
    divergence = points.sinkhorn_divergence(
        scale * x, scale * y, epsilon=0.5 * square
    ).value
    expected = points.sinkhorn_divergence(x, y, epsilon=0.5).value
    np.testing.assert_allclose(divergence / square, expected, 1e-6)


@pytest.mark.parametrize(("scale", "dtype"), [(1e200, "float64"), (1e20, "float32")])
def test_squared_distances_that_overflow(scale, dtype):
    x = (scale * np.random.default_rng(0).normal(size=(5, 3))).astype(dtype)
    for function in (points.sinkhorn, points.sinkhorn_divergence):
        with pytest.raises(ValueError, match=f"overflow {dtype}: divide the points"):
            function(x, x + x, epsilon=0.5)


def test_one_cloud_without_points():
    x, empty = np.ones((4, 3)), np.ones((0, 3))
    with pytest.raises(ValueError, match="both have points, or neither, got 0 and 4"):
        points.sinkhorn(empty, x, epsilon=0.5)
    with pytest.raises(ValueError, match="got 4 and 0: pass reach="):
        points.sinkhorn_divergence(x, empty, epsilon=0.5)
    assert points.sinkhorn(empty, empty, epsilon=0.5).value == 0.0
    assert np.isfinite(points.sinkhorn(empty, x, epsilon=0.5, reach=1.0).value)


def problem(num_x=30, num_y=40):
    rng = np.random.default_rng(0)
    a, b = rng.random(num_x) + 0.1, rng.random(num_y) + 0.1
    x, y = rng.normal(size=(num_x, 2)), rng.normal(size=(num_y, 2)) + 1
    return x, y, a / a.sum(), b / b.sum()


def divergence(p, q):
    return (p * np.log(p / q) - p + q).sum()


@pytest.mark.parametrize("epsilon", [1.0, 0.1])
def test_balanced(epsilon):
    x, y, a, b = problem()
    plan, f, _ = plain(x, y, a, b, epsilon)
    found = points.sinkhorn(x, y, a, b, epsilon=epsilon, tol=1e-12, max_iter=5000)
    assert found.converged
    shift = (f - found.f).mean()
    np.testing.assert_allclose(found.f + shift, f, atol=1e-9)
    dense = found.plan @ np.eye(len(y))
    np.testing.assert_allclose(dense, plan, atol=1e-11)
    np.testing.assert_allclose(found.plan.T @ np.eye(len(x)), plan.T, atol=1e-11)
    np.testing.assert_allclose(found.plan.marginal(), a, atol=1e-11)
    np.testing.assert_allclose(found.plan.T.marginal(), b, atol=1e-11)
    assert found.plan.shape == (30, 40)
    value = (plan * costs(x, y)).sum() + epsilon * divergence(plan, a[:, None] * b)
    assert found.value == pytest.approx(value, abs=1e-10)
    np.testing.assert_allclose(
        found.barycenters(), plan @ y / plan.sum(axis=1, keepdims=True), atol=1e-9
    )
    np.testing.assert_allclose(found.plan @ y[:, 0], plan @ y[:, 0], atol=1e-11)


def test_small_epsilon_finds_the_assignment():
    from scipy.optimize import linear_sum_assignment

    rng = np.random.default_rng(1)
    x, y = rng.random((50, 2)), rng.random((50, 2))
    found = points.sinkhorn(x, y, epsilon=1e-3, tol=1e-4)
    assert found.converged
    rows, columns = linear_sum_assignment(costs(x, y))
    exact = costs(x, y)[rows, columns].mean()
    assert found.value == pytest.approx(exact, abs=5e-3)


def test_small_epsilon_between_few_points():
    """Where epsilon falls too fast, a thousand iterations do not make up for it."""
    x, y, a, b = problem(100, 100)
    found = points.sinkhorn(x, y, a, b, epsilon=3e-3)
    assert found.converged
    assert found.iterations < 600


def test_unbalanced():
    x, y, a, b = problem()
    b = 2 * b
    plan, f, _ = plain(x, y, a, b, 0.3, strength=1.5**2)
    found = points.sinkhorn(x, y, a, b, epsilon=0.3, reach=1.5, tol=1e-11)
    assert found.converged
    np.testing.assert_allclose(found.f, f, atol=1e-9)
    np.testing.assert_allclose(found.plan @ np.eye(40), plan, atol=1e-10)
    value = (plan * costs(x, y)).sum() + 0.3 * divergence(plan, a[:, None] * b)
    value += 2.25 * (divergence(plan.sum(1), a) + divergence(plan.sum(0), b))
    assert found.value == pytest.approx(value, abs=1e-9)


def test_symmetric():
    x, _, a, _ = problem()
    one = points.sinkhorn(x, x, a, a, epsilon=0.5, tol=1e-11)
    two = points.sinkhorn(x, x.copy(), a, a.copy(), epsilon=0.5, tol=1e-11)
    assert one.f is one.g
    assert one.converged
    assert one.value == pytest.approx(two.value, abs=1e-9)
    assert one.iterations <= two.iterations


def test_gradients():
    x, y, a, b = problem(6, 7)

    def value(x, y):
        found = points.sinkhorn(x, y, a, b, epsilon=0.5, tol=1e-13, max_iter=3000)
        return found.value

    found = points.sinkhorn(x, y, a, b, epsilon=0.5, tol=1e-13, max_iter=3000)
    for place, gradient in enumerate(found.gradient()):
        exact = differences(value, [x, y], place, step=1e-4)
        np.testing.assert_allclose(gradient, exact, atol=1e-6)


def test_divergence():
    x, y, a, b = problem(6, 7)
    options = {"epsilon": 0.5, "tol": 1e-12, "max_iter": 3000}
    same = points.sinkhorn_divergence(x, x, a, a, **options)
    assert same.value == pytest.approx(0, abs=1e-10)
    found = points.sinkhorn_divergence(x, y, a, b, **options)
    assert found.value > 0

    def value(x, y):
        return points.sinkhorn_divergence(x, y, a, b, **options).value

    for place, gradient in enumerate(found.gradient()):
        exact = differences(value, [x, y], place, step=1e-4)
        np.testing.assert_allclose(gradient, exact, atol=1e-5)
    unbalanced = points.sinkhorn_divergence(x, x, a, a, reach=1.0, **options)
    assert unbalanced.value == pytest.approx(0, abs=1e-10)


def test_points_without_weight_take_no_part():
    x, y, a, b = problem()
    b[3] = 0
    b /= b.sum()
    keep = b > 0
    whole = points.sinkhorn(x, y, a, b, epsilon=0.5, tol=1e-10)
    part = points.sinkhorn(x, y[keep], a, b[keep], epsilon=0.5, tol=1e-10)
    assert whole.value == pytest.approx(part.value, abs=1e-9)
    assert ((whole.plan.T @ np.ones(30))[3]) == 0


def test_batches():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 20, 2)), rng.normal(size=(25, 2))
    found = points.sinkhorn(x, y, epsilon=0.7, tol=1e-10)
    assert found.value.shape == (3,)
    assert found.plan.shape == (3, 20, 25)
    for place in range(3):
        one = points.sinkhorn(x[place], y, epsilon=0.7, tol=1e-10)
        assert found.value[place] == pytest.approx(one.value, abs=1e-8)


def test_float32():
    x, y, a, b = (z.astype(np.float32) for z in problem())
    found = points.sinkhorn(x, y, a, b, epsilon=0.2)
    assert found.converged
    assert found.f.dtype == np.float32
    exact = points.sinkhorn(*problem(), epsilon=0.2)
    assert float(found.value) == pytest.approx(float(exact.value), rel=1e-4)


@pytest.mark.parametrize("reach", [None, 2.0])
def test_few_iterations(reach):
    """Four times as many plain ones have not come so far."""
    x, y, a, b = problem()
    found = points.sinkhorn(x, y, a, b, epsilon=0.05, reach=reach, tol=1e-9)
    assert found.converged
    strength = None if reach is None else reach**2
    steps = 4 * found.iterations
    _, _, g = plain(x, y, a, b, 0.05, strength, steps)
    _, _, later = plain(x, y, a, b, 0.05, strength, steps + 1)
    assert (b * abs(np.expm1((g - later) / 0.05))).sum() > 1e-7


def test_a_wrong_extrapolation_is_undone():
    """From the best potential on, in that entry of the batch alone."""
    weights = np.array([0.2, 0.3, 0.5])
    acceleration = _sinkhorn._Anderson(np, weights, 0.1)
    rng = np.random.default_rng(0)
    g = rng.normal(size=(2, 3))
    errors = np.array([[1.0, 1.0], [0.5, 0.5], [np.nan, 0.6], [0.4, 0.4]])
    targets = rng.normal(size=(4, 2, 3))
    moves = []
    for error, target in zip(errors, targets, strict=True):
        moves.append(acceleration.next(g, target, error))
        g = moves[-1]
    np.testing.assert_array_equal(moves[0], targets[0])
    np.testing.assert_allclose(moves[2][0], targets[1][0], atol=1e-14)
    assert abs(moves[2][1] - targets[1][1]).max() > 0.1
    assert np.isfinite(moves).all()


def test_acceleration_of_a_linear_map_is_exact():
    """In as many iterations as there are dimensions, as GMRES."""
    rng = np.random.default_rng(1)
    matrix, at = 0.5 * rng.normal(size=(3, 3)), rng.normal(size=3)
    fixed = np.linalg.solve(np.eye(3) - matrix, at)
    acceleration = _sinkhorn._Anderson(np, np.full(3, 1 / 3), 1.0)
    g = np.zeros(3)
    for _ in range(5):
        target = matrix @ g + at
        g = acceleration.next(g, target, np.array(1.0))
    np.testing.assert_allclose(g, fixed, atol=1e-12)


def test_progress_is_told():
    told = []
    x, y, a, b = problem()
    found = points.sinkhorn(
        x, y, a, b, epsilon=0.1, progress=lambda *now: told.append(now)
    )
    assert told[-1] == (found.iterations, found.error)


@pytest.mark.parametrize("most", [1, 1 << 32])
def test_many_pairs_are_looked_at_each_iteration(most, monkeypatch):
    """On a GPU: what is not NumPy itself is waited for as one."""
    monkeypatch.setattr(_sinkhorn, "_MANY_PAIRS", most)
    xp = SimpleNamespace(**vars(np))
    x, y, a, b = problem()
    sides = [
        _sinkhorn._Side(z, w, np.log(w), np.zeros(len(z))) for z, w in ((x, a), (y, b))
    ]
    solver = _sinkhorn._Solver(xp, sides, None, False)
    solver.anneal(1.0)
    done, error = solver.solve(1.0, 1e-4, 100, None)
    assert error <= 1e-4
    assert (done % _sinkhorn._LOOK == 0) == (most > 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0}, "epsilon must be above 0"),
        ({"epsilon": 1, "reach": -1}, "reach must be above 0"),
        ({"epsilon": 1, "a": np.ones(3)}, r"a must have shape \(\.\.\., 4\)"),
        ({"epsilon": 1, "b": -np.ones(5)}, "b must hold finite weights >= 0"),
        ({"epsilon": 1, "a": np.ones(4)}, "a and b must have the same sum"),
        ({"epsilon": 1, "a": np.zeros(4)}, "a must hold a weight above 0"),
        (
            {"epsilon": 1, "a": np.ones((3, 4)), "b": np.ones((2, 5))},
            r"a \(3,\), b \(2",
        ),
        ({"epsilon": 1, "max_iter": -1}, "max_iter must be at least 0, got -1"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        points.sinkhorn(np.zeros((4, 2)), np.ones((5, 2)), **options)


def test_points_are_finite():
    x = np.array([[0.0], [np.inf]])
    with pytest.raises(ValueError, match="y must be finite"):
        points.sinkhorn(np.zeros((2, 1)), x, epsilon=1.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reach", [None, 0.5])
@pytest.mark.parametrize("epsilon", [0.5, 0.02, 5e-3])
def test_with_and_without_the_matrix(epsilon, reach, dtype, monkeypatch):
    """In all ranges of its entries, far from the origin, with points of no weight."""
    x, y, a, b = problem()
    b[5] = 0.0
    x, y = ((z + 1000).astype(dtype) for z in (x, y))
    a, b = (w.astype(dtype) for w in (a, b / b.sum()))
    tol = 1e-4 if dtype == "float32" else 1e-9
    options = {"epsilon": epsilon, "reach": reach, "tol": tol, "max_iter": 5000}
    made = []
    make = scaled_kernel.ScaledKernel.make
    monkeypatch.setattr(
        scaled_kernel.ScaledKernel,
        "make",
        lambda kernel, at: made.append(1) or make(kernel, at),
    )
    kept = points.sinkhorn(x, y, a, b, **options)
    count = len(made)
    assert 0 < count < (20 if epsilon > 0.01 else 500)
    monkeypatch.setattr(scaled_kernel, "MOST_BYTES", 0)
    without = points.sinkhorn(x, y, a, b, **options)
    assert len(made) == count
    for found in (kept, without):
        assert found.converged
        assert found.f.dtype == dtype
    if reach is None:
        noise = 2 * tol + 1e-7 / epsilon * (dtype == "float32")
        assert abs(kept.plan.marginal() - a).sum() < noise
        assert abs(kept.plan.T.marginal() - b).sum() < noise
    assert float(kept.value) == pytest.approx(float(without.value), rel=10 * tol)


def test_a_matrix_of_too_small_entries_is_not_used():
    """Without a matrix that has digits there, log-sums take over."""
    x = np.array([[0.0], [1.0]])
    kernel = scaled_kernel.ScaledKernel(x, x + 1e3, 1.0)
    nothing = [np.zeros(2)] * 2
    assert kernel.log_sums(1, nothing, np.ones(2)) is None
    kernel = scaled_kernel.ScaledKernel(x, x, 1.0)
    expected = np.log(np.exp(-((x - x.T) ** 2)) @ [1.0, 2.0])
    found = kernel.log_sums(1, nothing, np.array([1.0, 2.0]))
    np.testing.assert_allclose(found, expected, atol=1e-15)


def test_first_iterations_in_float32_cost_no_digit(monkeypatch):
    """Far from the origin, where float32 could not hold the points."""
    monkeypatch.setattr(scaled_kernel, "MOST_BYTES", 0)
    rng = np.random.default_rng(4)
    x, y = (rng.random((n, 2)) + 1e6 for n in (60, 80))
    dtypes = []
    whole = _sinkhorn.logsumexp
    monkeypatch.setattr(
        _sinkhorn,
        "logsumexp",
        lambda x, *args, **options: (
            dtypes.append(x.dtype) or whole(x, *args, **options)
        ),
    )
    found = points.sinkhorn(x, y, epsilon=0.05, tol=1e-11)
    assert found.converged
    assert dtypes[0] == np.float32
    assert dtypes[-1] == np.float64
    assert abs(found.plan.marginal() - 1 / 60).sum() < 1e-10
    assert abs(found.plan.T.marginal() - 1 / 80).sum() < 1e-10


def test_first_iterations_in_tf32_cost_no_digit(monkeypatch):
    """Float32 on a GPU; NumPy takes the argument and computes as ever."""
    monkeypatch.setattr(scaled_kernel, "MOST_BYTES", 0)
    x, y, a, b = (z.astype(np.float32) for z in problem())
    precisions = []
    whole = _sinkhorn.logsumexp

    def noisy(x, y, *args, precision, **options):
        precisions.append(precision)
        if precision == "tf32":
            x, y = (z.astype(np.float16).astype(np.float32) for z in (x, y))
        return whole(x, y, *args, precision=precision, **options)

    monkeypatch.setattr(_sinkhorn, "logsumexp", noisy)
    found = points.sinkhorn(x, y, a, b, epsilon=0.2, tol=1e-5)
    assert found.converged
    assert precisions[0] == "tf32"
    last = 2 * found.iterations
    assert precisions[-last:] == ["float32"] * last
    exact = points.sinkhorn(*problem(), epsilon=0.2, tol=1e-9)
    assert float(found.value) == pytest.approx(float(exact.value), rel=1e-5)
    assert abs(found.plan.marginal() - a).sum() < 1e-4


@pytest.mark.parametrize("reach", [None, 1.5])
def test_the_value_is_that_of_the_plan(reach):
    """Weights of any sum; after an update the plan has the mass of the columns."""
    x, y, a, b = problem()
    found = points.sinkhorn(x, y, 3 * a, 3 * b, epsilon=0.3, reach=reach, max_iter=3)
    plan = found.plan @ np.eye(len(y))
    entropy = 0.3 * (plan.sum() - 9 * a.sum() * b.sum())
    strength = None if reach is None else reach**2
    each = [
        z if strength is None else -strength * np.expm1(-z / strength)
        for z in (found.f, found.g)
    ]
    dual = (3 * a * each[0]).sum() + (3 * b * each[1]).sum() - entropy
    assert float(found.value) == pytest.approx(dual, rel=1e-12)
