"""Entropic optimal transport between two clouds, without the matrix of costs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._core.typing import Array, Precision
from cupyflash._points import api
from cupyflash._points import problem as points_problem
from cupyflash.points._reductions import logsumexp, mean

# Iterations from one look at the marginals to the next, and pairs from which on a look
# costs less than the iteration that it may save.
_LOOK, _MANY_PAIRS = 5, 1 << 32
# Of one epsilon to the next, on the way down to the last, after one iteration.
_SCALING = 0.25
# The same below this part of the clouds' squared diameter, where single points begin to
# matter, and accelerated iterations at each.
_DEEP, _DEEP_SCALING, _DEEP_STEPS = 1 / 1000, 0.7, 10
# Errors of marginals, by the squared diameter in epsilons, from which on log-sums are
# float64, and the largest.
_COARSE, _COARSEST = 1e-5, 0.02
# The clouds' squared diameter below which float32 holds their coordinates.
_LARGEST_COARSE = 1e76
_TOL = {"float32": 1e-4, "float64": 1e-6}
# Differences of iterations that the acceleration keeps. More save few iterations.
_DEPTH = 5
# A difference whose square keeps less than this beside the others brings no direction.
_INDEPENDENT = 1e-8
# An extrapolation that makes the error this many times the least so far is undone.
_WORSE = 2.0


def _logarithm(xp, weights):
    with np.errstate(divide="ignore"):
        return xp.log(weights)


class Plan:
    """The transport plan as a linear map, never stored: ``plan @ v``, ``plan.T @ v``.

    Attributes
    ----------
    shape : tuple of int
        (..., N, M)
    T : Plan
        The transposed plan.
    """

    def __init__(self, rows, columns, epsilon, precision="float32"):
        self._rows, self._columns = rows, columns
        self._epsilon, self._precision = epsilon, precision
        self.shape = (
            *rows.log_weights.shape[:-1],
            rows.points.shape[-2],
            columns.points.shape[-2],
        )

    @property
    def T(self) -> "Plan":
        """The transposed plan."""
        return Plan(self._columns, self._rows, self._epsilon, self._precision)

    @property
    def _xp(self):
        return _arrays.import_cupy() if _arrays.is_cupy(self._rows.points) else np

    def marginal(self) -> Any:
        """Sums of the rows, shape (..., N)."""
        return self._xp.exp(self._rows.scores(self._epsilon) + self._lse())

    def _lse(self):
        return logsumexp(
            self._rows.points,
            self._columns.points,
            self._columns.scores(self._epsilon),
            bandwidth=_bandwidth(self._epsilon),
            precision=self._precision,
        )

    def means(self, v: Array) -> Any:
        """Means of values weighted by a row of the plan, shape (..., N, V)."""
        return self._means(v)[0]

    def _means(self, v):
        return mean(
            self._rows.points,
            self._columns.points,
            v,
            self._columns.scores(self._epsilon),
            bandwidth=_bandwidth(self._epsilon),
            precision=self._precision,
            return_lse=True,
        )

    def __matmul__(self, v: Array) -> Any:
        out, lse = self._means(v)
        total = self._xp.exp(self._rows.scores(self._epsilon) + lse)
        return out * (total[..., None] if out.ndim > total.ndim else total)


@dataclass
class _Side:
    """One cloud: its points, the logarithms of its weights, and its potential."""

    points: Any
    weights: Any
    log_weights: Any
    potential: Any

    def scores(self, epsilon):
        """Logarithms of what its points bring to the plan, without the cost."""
        return self.log_weights + self.potential / epsilon


@dataclass(frozen=True, eq=False)
class Transport:
    """Result of `sinkhorn`.

    Attributes
    ----------
    value : ndarray, shape (...)
        The dual objective: the cost of the plan, the entropy and, with `reach`, the
        divergences of the marginals.
    f, g : ndarray, shapes (..., N) and (..., M)
        Dual potentials.
    plan : Plan
        With entries ``a_i b_j exp((f_i + g_j - |x_i - y_j|**2) / epsilon)``.
    iterations : int
        Number of iterations at the last epsilon.
    error : float
        Largest L1 error of a marginal, or with `reach` of the fixed point, when last
        checked.
    converged : bool
        Whether the error was below `tol`.
    """

    value: Any
    f: Any
    g: Any
    plan: Plan
    iterations: int
    error: float
    converged: bool

    def barycenters(self) -> Any:
        """Where the plan sends each x on average, shape (..., N, D)."""
        return self.plan.means(self.plan._columns.points)

    def gradient(self) -> tuple[Any, Any]:
        """Gradients of the value in x and y, once the potentials have converged."""
        found = []
        for plan in (self.plan, self.plan.T):
            target, lse = plan._means(plan._columns.points)
            xp = plan._xp
            mass = xp.exp(plan._rows.scores(plan._epsilon) + lse)[..., None]
            found.append(2 * mass * (plan._rows.points - target))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Divergence:
    """Result of `sinkhorn_divergence`.

    Attributes
    ----------
    value : ndarray, shape (...)
    xy, xx, yy : Transport
        Between the clouds, and of each with itself.
    """

    value: Any
    xy: Transport
    xx: Transport
    yy: Transport

    def gradient(self) -> tuple[Any, Any]:
        """Gradients of the value with respect to x and y."""
        by_x, by_y = self.xy.gradient()
        # Both arguments of a cloud with itself are that cloud.
        return (
            by_x - sum(self.xx.gradient()) / 2,
            by_y - sum(self.yy.gradient()) / 2,
        )


def _bandwidth(epsilon):
    """Of the Gaussian kernel that is exp(-|x - y|^2 / epsilon)."""
    return math.sqrt(epsilon / 2)


def _weights(xp, name, given, points, dtype):
    """The weights of a cloud, 1 / N each by default."""
    count = points.shape[-2]
    if given is None:
        return xp.full(points.shape[:-1], 1 / max(count, 1), dtype=dtype)
    if given.ndim == 0 or given.shape[-1] != count:
        raise ValueError(
            f"{name} must have shape (..., {count}), one weight per point, got "
            f"{given.shape}"
        )
    if xp is np and not (np.isfinite(given).all() and (given >= 0).all()):
        raise ValueError(f"{name} must hold finite weights >= 0")
    if xp is np and count and not (given.sum(axis=-1) > 0).all():
        raise ValueError(f"{name} must hold a weight above 0, got only zeros")
    return given


def _positive(name, value):
    number = _arrays.finite_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return number


def sinkhorn(
    x: Array,
    y: Array,
    a: Array = None,
    b: Array = None,
    *,
    epsilon: float,
    reach: float | None = None,
    tol: float | None = None,
    max_iter: int = 1000,
    precision: Precision = "float32",
    progress: Callable[[int, float], Any] | None = None,
) -> Transport:
    """Entropic optimal transport with costs ``|x_i - y_j|**2``.

    As described in [1]_.

    Parameters
    ----------
    x, y : ndarray, shapes (..., N, D) and (..., M, D)
        The clouds; NumPy or CuPy. Leading axes broadcast.
    a, b : ndarray, shapes (..., N) and (..., M), optional
        Their weights, by default 1 / N and 1 / M. Without `reach` both must have the
        same sum.
    epsilon : float
        Strength of the entropy, a squared length.
    reach : float, optional
        Distance at which leaving mass behind costs as much as moving it: deviations of
        the marginals cost ``reach**2`` times their Kullback-Leibler divergence [2]_.
    tol : float, optional
        L1 error of a marginal, relative to its sum, at which to stop. By default 1e-6,
        or 1e-4 for float32.
    max_iter : int, default 1000
        Largest number of iterations at `epsilon`.
    precision : {"float32", "tf32"}, default "float32"
        As in `logsumexp`. With "tf32" the points are rounded in the same way in both
        directions, so the marginals are met as well as without it.
    progress : callable, optional
        Called as ``progress(iteration, error)`` whenever the error is checked.

    Returns
    -------
    Transport
        With value, f, g, plan, `barycenters` and `gradient`.

    Raises
    ------
    ValueError, TypeError
        If shapes or sums do not agree, or a number is out of range. Points and weights
        in NumPy arrays are checked too: all must be finite.

    Notes
    -----
    Each update of a potential is one `logsumexp` over the other cloud. Epsilon starts
    at the squared diameter of the clouds and is divided by 4 in each iteration until it
    reaches its final value. Below a thousandth of where it started it falls more
    slowly, by a factor of 0.7 in ten iterations. These ten, and those at the final
    value, are accelerated as described in [3]_ and [4]_, from the last 5 differences.
    An extrapolation that more than doubles the error is undone, and plain iterations
    follow. If both clouds are the same array with the same weights, there is a single
    potential, which is averaged with its update [2]_. On a GPU the error is read every
    fifth iteration, and nothing waits in between. From 2^32 pairs on, and on NumPy, it
    is read in every iteration.

    The first log-sums need fewer digits: on NumPy those of float64 are computed in
    float32, and on a GPU those of float32 with ``precision="tf32"``. One pair of clouds
    on NumPy whose kernel matrix has at most 512 MiB (8,192 points each in float64) is
    an exception to what this module is for: at the final epsilon the matrix is kept,
    and an update is a product with it.

    References
    ----------
    .. [1] M. Cuturi, "Sinkhorn distances: lightspeed computation of optimal transport",
       NeurIPS 2013.
    .. [2] T. Séjourné, J. Feydy et al., "Sinkhorn divergences for unbalanced optimal
       transport", arXiv:1910.12958, 2019.
    .. [3] D. G. Anderson, "Iterative procedures for nonlinear integral equations",
       Journal of the ACM 12, 1965.
    .. [4] H. F. Walker, P. Ni, "Anderson acceleration for fixed-point iterations",
       SIAM Journal on Numerical Analysis 49, 2011.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> x = np.array([[0.0, 0.0], [1.0, 0.0]])
    >>> transport = points.sinkhorn(x, x + [0.0, 2.0], epsilon=0.01)
    >>> transport.barycenters().round(3)
    array([[0., 2.],
           [1., 2.]])
    >>> round(float(transport.value), 2)
    4.01
    """
    same = x is y and a is b
    epsilon = _positive("epsilon", epsilon)
    strength = None if reach is None else _positive("reach", reach) ** 2
    xp, given = points_problem.adopt(2, x=x, y=y, a=a, b=b)
    points_problem.check_clouds(given["x"], given["y"])
    x, y = given["x"], given["y"]
    tol = _TOL[x.dtype.name] if tol is None else _positive("tol", tol)
    max_iter = points_problem.count("max_iter", max_iter)
    points_problem.check_precision(precision, x.dtype.name)
    if xp is np:
        for name, cloud in (("x", x), ("y", y)):
            points_problem.check_finite(name, cloud)
    if strength is None:
        _check_counts(x, y)
    a = _weights(xp, "a", given.get("a"), x, x.dtype)
    b = _weights(xp, "b", given.get("b"), y, y.dtype)
    batch = points_problem.leading_axes(
        x=x.shape[:-2], y=y.shape[:-2], a=a.shape[:-1], b=b.shape[:-1]
    )
    if xp is np and strength is None:
        _check_sums(a, b)
    sides = [
        _Side(z, w, _logarithm(xp, w), xp.zeros((*batch, z.shape[-2]), z.dtype))
        for z, w in ((x, a), (y, b))
    ]
    solver = _Solver(xp, sides, strength, same, precision)
    if xp is np and math.isinf(solver.box):
        raise ValueError(
            f"squared distances between x and y overflow {x.dtype}: divide the points "
            "by a common scale, and epsilon by its square"
        )
    solver.anneal(epsilon)
    done, error = solver.solve(epsilon, tol, max_iter, progress)
    rows, columns = sides
    return Transport(
        solver.value(epsilon),
        rows.potential,
        columns.potential,
        Plan(rows, columns, epsilon, precision),
        done,
        error,
        error <= tol,
    )


def sinkhorn_divergence(
    x: Array,
    y: Array,
    a: Array = None,
    b: Array = None,
    *,
    epsilon: float,
    reach: float | None = None,
    tol: float | None = None,
    max_iter: int = 1000,
    precision: Precision = "float32",
    progress: Callable[[int, float], Any] | None = None,
) -> Divergence:
    """Entropic transport minus half that of each cloud with itself.

    As described in [1]_.

    It is never negative, and 0 if the clouds are the same, both up to what `tol` and
    rounding leave. Its gradient moves one cloud onto the other, whereas the gradient of
    `sinkhorn` alone would also shrink it.

    Parameters
    ----------
    x, y, a, b, epsilon, reach, tol, max_iter, precision, progress
        As in `sinkhorn`, which is called for x and y, x and x, and y and y.

    Returns
    -------
    Divergence
        With value, xy, xx, yy and `gradient`.

    Raises
    ------
    ValueError, TypeError
        As in `sinkhorn`.

    References
    ----------
    .. [1] J. Feydy et al., "Interpolating between optimal transport and MMD using
       Sinkhorn divergences", AISTATS 2019.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import points
    >>> x = np.random.default_rng(0).normal(size=(50, 2))
    >>> far = points.sinkhorn_divergence(x, x + [3.0, 0.0], epsilon=1.0)
    >>> round(float(far.value), 3)
    9.0
    """
    options: dict[str, Any] = {
        "epsilon": epsilon,
        "reach": reach,
        "tol": tol,
        "max_iter": max_iter,
        "precision": precision,
        "progress": progress,
    }
    xy = sinkhorn(x, y, a, b, **options)
    xx, yy = sinkhorn(x, x, a, a, **options), sinkhorn(y, y, b, b, **options)
    value = xy.value - (xx.value + yy.value) / 2
    if reach is not None:
        rows, columns = xy.plan._rows.weights, xy.plan._columns.weights
        gap = rows.sum(axis=-1) - columns.sum(axis=-1)
        value = value + epsilon / 2 * gap * gap
    return Divergence(value, xy, xx, yy)


def _check_counts(x, y):
    counts = x.shape[-2], y.shape[-2]
    if min(counts) == 0 < max(counts):
        raise ValueError(
            f"x and y must both have points, or neither, got {counts[0]} and "
            f"{counts[1]}: pass reach= if the marginals need not be met"
        )


def _check_sums(a, b):
    sums = a.sum(axis=-1, dtype=np.float64), b.sum(axis=-1, dtype=np.float64)
    if not np.allclose(*sums, rtol=1e-3 if a.dtype == np.float32 else 1e-6):
        raise ValueError(
            f"a and b must have the same sum, got {sums[0]} and {sums[1]}: pass reach= "
            "if the marginals need not be met"
        )


def _middle_and_box(xp, sides):
    """Middle and squared diameter of the box round all points."""
    if not all(side.points.size for side in sides):
        return 0.0, 0.0
    clouds = [side.points.reshape(-1, side.points.shape[-1]) for side in sides]
    low = xp.minimum(*(cloud.min(axis=0) for cloud in clouds))
    box = xp.maximum(*(cloud.max(axis=0) for cloud in clouds)) - low
    with np.errstate(over="ignore"):  # clouds of any size
        return low + box / 2, float((box * box).sum())


class _Solver:
    """The iteration, on the potentials of two sides."""

    def __init__(self, xp, sides, strength, same, precision="float32"):
        self.xp, self.sides, self.strength, self.same = xp, sides, strength, same
        self.precision = precision  # of the final epsilon
        self.precision_now = precision
        if same:
            sides[1].potential = sides[0].potential
        # The first iterations on NumPy need no more digits, and take half the time.
        self.coarse = xp is np and sides[0].points.dtype == np.float64
        pairs = math.prod(side.points.shape[-2] for side in sides)
        self.looks_always = xp is np or pairs >= _MANY_PAIRS
        self.middle, self.box = _middle_and_box(xp, sides)
        self.coarse &= self.box < _LARGEST_COARSE
        self.kernel = None
        self.columns_are_met = False

    def target(self, side, other, epsilon):
        """The potential that meets the marginal of a side, the other being given."""
        target = None if self.kernel is None else self.kept_target(side, epsilon)
        if target is None:
            target = self.log_sum_target(side, other, epsilon)
        if self.strength is not None:
            target = target * (self.strength / (self.strength + epsilon))
        return target

    def keep(self, epsilon, tol):
        """Keep the kernel matrix from here on, where it is small and exact enough."""
        x, y = (side.points for side in self.sides)
        potential = self.sides[0].potential
        if self.xp is not np or potential.ndim > 1 or x.ndim > 2 or y.ndim > 2:
            return
        x, y = x - self.middle, y - self.middle
        self.kernel = api.kept_kernel(x, y, epsilon, self.box, tol)
        self.coarse &= self.kernel is None

    def kept_target(self, side, epsilon):
        """The same by the matrix that is kept; None if that has no digits there."""
        axis = 1 if side is self.sides[0] else 0  # that is summed over
        potentials = [each.potential for each in self.sides]
        sums = self.kernel.log_sums(axis, potentials, self.sides[axis].weights)
        return None if sums is None else (-epsilon * sums).astype(side.points.dtype)

    def log_sum_target(self, side, other, epsilon):
        """The same without the matrix."""
        arrays = side.points, other.points, other.scores(epsilon)
        if self.coarse:
            x, y, scores = arrays
            arrays = x - self.middle, y - self.middle, scores
            arrays = [z.astype(np.float32) for z in arrays]
        return -epsilon * logsumexp(
            *arrays, bandwidth=_bandwidth(epsilon), precision=self.precision_now
        ).astype(side.points.dtype, copy=False)

    def step(self, epsilon):
        """(what the columns' potential becomes, the error of the marginals now).

        The rows' potential is updated first, so that they are met.
        """
        rows, columns = self.sides
        if self.same:
            target = self.target(rows, columns, epsilon)
            error = self.error(rows, target, epsilon)
            return 0.5 * (rows.potential + target), error
        rows.potential = self.target(rows, columns, epsilon)
        target = self.target(columns, rows, epsilon)
        return target, self.error(columns, target, epsilon)

    def move(self, potential):
        """Give the columns a potential; the rows, too, where they are the same."""
        self.sides[1].potential = potential
        if self.same:
            self.sides[0].potential = potential

    def error(self, side, target, epsilon):
        """L1 error of a marginal, as a part of its sum; on the device."""
        xp = self.xp
        excess = xp.minimum((side.potential - target) / epsilon, 50.0)
        parts = side.weights * xp.abs(xp.expm1(excess))
        parts = xp.where(side.weights > 0, parts, 0.0).sum(axis=-1)
        total = side.weights.sum(axis=-1)
        return parts / xp.where(total > 0, total, 1)

    def anneal(self, epsilon):
        """A few iterations at each epsilon from the clouds' squared diameter down."""
        at = self.box
        columns = self.sides[1]
        is_float32 = columns.points.dtype == np.float32
        while math.isfinite(at) and at > epsilon:
            deep = at < _DEEP * self.box
            # Later iterations correct what rounded coordinates do to these.
            self.precision_now = "tf32" if is_float32 and not deep else self.precision
            acceleration = _Anderson(self.xp, columns.weights, at)
            target, error = self.step(at)
            for _ in range(_DEEP_STEPS - 1 if deep else 0):
                self.move(acceleration.next(columns.potential, target, error))
                target, error = self.step(at)
            self.move(target)
            at *= _DEEP_SCALING if deep else _SCALING
        self.precision_now = self.precision

    def solve(self, epsilon, tol, max_iter, progress):
        """Iterate until the marginals are met; (iterations, error)."""
        done, last = 0, math.inf
        # What errors of float32 potentials let the marginals show.
        shows = _COARSE * (1 + self.box / epsilon)
        self.coarse &= shows < _COARSEST
        self.keep(epsilon, tol)
        columns = self.sides[1]
        acceleration = _Anderson(self.xp, columns.weights, epsilon)
        while done < max_iter:
            target, error = self.step(epsilon)
            done += 1
            look = done % _LOOK == 0 or done == max_iter
            if look or self.looks_always:  # else a look would wait for the GPU
                last = float(error.max()) if error.size else 0.0
                met = last <= tol and not self.coarse
                stop = met or not math.isfinite(last)
                if progress is not None and (look or stop):
                    progress(done, last)
                if stop:
                    break
                self.coarse &= last > shows
            self.move(acceleration.next(columns.potential, target, error))
        if done:
            # Not an extrapolation, whose error nothing has seen: a plain update makes
            # the last error no larger.
            self.move(target)
        self.columns_are_met = done > 0 and not self.same
        return done, last

    def value(self, epsilon):
        """The dual objective."""
        xp, (rows, columns) = self.xp, self.sides
        terms = []
        for side in (rows, columns):
            value = side.potential
            if self.strength is not None:
                value = -self.strength * xp.expm1(-side.potential / self.strength)
            value = xp.where(side.weights > 0, side.weights * value, 0.0)
            terms.append(value.sum(axis=-1))
        # What the plan has more of mass than the weights.
        if self.strength is None and self.columns_are_met:
            mass = columns.weights.sum(axis=-1)
        else:
            plan = Plan(rows, columns, epsilon, self.precision)
            mass = plan.marginal().sum(axis=-1)
        product = rows.weights.sum(axis=-1) * columns.weights.sum(axis=-1)
        return terms[0] + terms[1] - epsilon * (mass - product)


class _Anderson:
    """Anderson's acceleration of ``g <- target(g)``, all of it on the device.

    It keeps how the residual, target(g) - g, has changed with g in the last iterations,
    as an orthonormal basis of those changes. The part of a residual in their span is
    taken off, and g moves as it moved when they arose. Where the error then grows, an
    entry of the batch goes back to the best potential so far, takes its target and
    starts a new basis: a plain iteration makes no error larger.
    """

    def __init__(self, xp, weights, epsilon):
        self.xp, self.epsilon = xp, epsilon
        total = weights.sum(axis=-1, keepdims=True)
        self.weights = (weights / xp.where(total > 0, total, 1))[..., None, :]
        self.count = 0

    def next(self, potential, target, error):
        """The potential to go on with."""
        with np.errstate(over="ignore", invalid="ignore"):  # its error will tell
            return self._next(potential, target, error)

    def _next(self, potential, target, error):
        xp = self.xp
        if self.count == 0:
            self.best = error, potential, target
            shape = *target.shape[:-1], _DEPTH, target.shape[-1]
            self.changes = xp.zeros(shape, target.dtype)  # of the residual
            self.moves = xp.zeros(shape, target.dtype)  # of g, at the same time
        else:
            least, *of_least = self.best
            keep = (error <= _WORSE * least)[..., None]
            self.add(potential - self.last[0], target - potential - self.last[1])
            self.moves = xp.where(keep[..., None], self.moves, 0)
            self.changes = xp.where(keep[..., None], self.changes, 0)
            potential = xp.where(keep, potential, of_least[0])
            target = xp.where(keep, target, of_least[1])
            better = error < least
            self.best = (
                xp.where(better, error, least),
                xp.where(better[..., None], potential, of_least[0]),
                xp.where(better[..., None], target, of_least[1]),
            )
        self.last = potential, target - potential
        self.count += 1
        parts = self.products(self.changes, target - potential)
        return target - _combined(parts, self.moves + self.changes)

    def add(self, move, change):
        """Put a direction into the basis, in the place of the oldest."""
        xp = self.xp
        size = self.products(change[..., None, :], change)
        parts = self.products(self.changes, change)
        move = move - _combined(parts, self.moves)
        change = change - _combined(parts, self.changes)
        left = self.products(change[..., None, :], change)
        new = left > _INDEPENDENT * size
        scale = xp.where(new, 1 / xp.sqrt(xp.where(new, left, 1)), 0)
        place = self.count % _DEPTH
        self.moves[..., place, :] = move * scale
        self.changes[..., place, :] = change * scale

    def products(self, directions, v):
        """Inner products over the points, in epsilons and by weights."""
        v = (v / self.epsilon)[..., None, :]
        return (self.weights * (directions / self.epsilon) * v).sum(axis=-1)


def _combined(parts, directions):
    return (parts[..., None] * directions).sum(axis=-2)
