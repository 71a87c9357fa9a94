"""Kernels: functions of d2, the squared distance in bandwidths, one row each.

A row is plain NumPy, for a block of squared distances at a time, and the text that
kernels on a GPU are made from: its functions can be traced (`cupyflash._expr`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyflash._core import arrays as _arrays


class Decay(NamedTuple):
    """A kernel ``factor(r) * exp(-r)`` of ``r = sqrt(square * d2)``.

    Without functions the factor is 1.
    """

    square: float
    factor: Callable[[Any], Any] | None = None
    log_factor: Callable[[Any], Any] | None = None

    def value(self, d2: Any) -> Any:
        """K."""
        r = np.sqrt(self.square * d2)
        weight = np.exp(-r)
        return weight if self.factor is None else self.factor(_finite(r)) * weight

    def log(self, d2: Any) -> Any:
        """The logarithm of K."""
        r = np.sqrt(self.square * d2)
        return self.log_beyond(r, r)

    def log_beyond(self, r: Any, beyond: Any) -> Any:
        """The logarithm of K times exp(r - beyond)."""
        if self.log_factor is None:
            return -beyond
        return self.log_factor(_finite(r)) - beyond


def _finite(r):
    """r as the factor of exp(-r), which is 0 for an infinite one."""
    return np.minimum(r, 1e150)


class Kernel(NamedTuple):
    """A kernel K(d2); a function that is None is not there.

    `log` is the logarithm of K, for kernels that are positive. `slope` is the name of
    the kernel -dK/d(d2), and `slope_factor` a number that it is multiplied by.
    `reach` gives the d2 from which on K is below exp(-t), where K falls that fast.
    `smooth` tells that K has a derivative by d2 at 0, so that a small error of a small
    d2 is one of K. `decay` is what `value` and `log` are made of where K falls as the
    exponential of a distance.
    """

    name: str
    value: Callable[[Any], Any]
    log: Callable[[Any], Any] | None = None
    slope: str | None = None
    slope_factor: float = 1.0
    reach: Callable[[float], float] | None = None
    smooth: bool = True
    decay: Decay | None = None
    # Of a function of the caller: its expression, with d2 in the place of s, what it
    # closes over, and whether it is 0 where points coincide and it is not finite.
    expression: Any = None
    numbers: Any = ()
    skips_cusp: bool = False

    @property
    def sum_only(self) -> bool:
        """Whether the kernel has values below 0, and so no logarithm."""
        return self.log is None


def _where_apart(d2, value):
    """`value`, and 0 where two points coincide: the middle of the subgradients."""
    return np.where(d2 > 0, value, 0.0)


def _log_where_apart(d2, value):
    return np.where(d2 > 0, value, -np.inf)


def _nonzero(d2):
    return np.where(d2 > 0, d2, 1.0)


def _decaying(name, decay, **fields):
    return Kernel(name, decay.value, decay.log, decay=decay, **fields)


def _one_plus(r):
    return 1 + r


# The first seven are public. Those below are what gradients of the others sum up.
_ROWS = (
    Kernel(
        "gaussian",
        lambda d2: np.exp(-0.5 * d2),
        lambda d2: -0.5 * d2,
        slope="gaussian",
        slope_factor=0.5,
        reach=lambda t: 2 * t,
    ),
    _decaying(
        "laplacian",
        Decay(1.0),
        slope="laplacian_slope",
        slope_factor=0.5,
        reach=lambda t: t * t,
        smooth=False,
    ),
    Kernel(
        "cauchy",
        lambda d2: 1 / (1 + d2),
        lambda d2: -np.log1p(d2),
        slope="cauchy_slope",
    ),
    _decaying(
        "matern32",
        Decay(3.0, _one_plus, np.log1p),
        slope="matern12_root3",
        slope_factor=1.5,
        reach=lambda t: (t + 2 * math.log1p(t)) ** 2 / 3,
    ),
    _decaying(
        "matern52",
        Decay(5.0, lambda r: 1 + r + r * r / 3, lambda r: np.log1p(r + r * r / 3)),
        slope="matern32_root5",
        slope_factor=5 / 6,
        reach=lambda t: (t + 4 * math.log1p(t)) ** 2 / 5,
    ),
    Kernel(
        "inverse_multiquadric",
        lambda d2: 1 / np.sqrt(1 + d2),
        lambda d2: -0.5 * np.log1p(d2),
        slope="inverse_multiquadric_slope",
        slope_factor=0.5,
    ),
    Kernel(
        "energy",
        lambda d2: -np.sqrt(d2),
        slope="energy_slope",
        slope_factor=0.5,
        smooth=False,
    ),
    Kernel(
        "laplacian_slope",
        lambda d2: _where_apart(d2, np.exp(-np.sqrt(d2)) / np.sqrt(_nonzero(d2))),
        lambda d2: _log_where_apart(d2, -np.sqrt(d2) - 0.5 * np.log(_nonzero(d2))),
        smooth=False,
    ),
    Kernel(
        "cauchy_slope",
        lambda d2: 1 / ((1 + d2) * (1 + d2)),
        lambda d2: -2 * np.log1p(d2),
    ),
    _decaying("matern12_root3", Decay(3.0), smooth=False),
    _decaying("matern32_root5", Decay(5.0, _one_plus, np.log1p)),
    Kernel(
        "inverse_multiquadric_slope",
        lambda d2: 1 / ((1 + d2) * np.sqrt(1 + d2)),
        lambda d2: -1.5 * np.log1p(d2),
    ),
    Kernel(
        "energy_slope",
        lambda d2: _where_apart(d2, 1 / np.sqrt(_nonzero(d2))),
        lambda d2: _log_where_apart(d2, -0.5 * np.log(_nonzero(d2))),
        smooth=False,
    ),
)
KERNELS = {row.name: row for row in _ROWS}
NAMES = tuple(row.name for row in _ROWS[:7])
POSITIVE = tuple(name for name in NAMES if not KERNELS[name].sum_only)


def find(kernel: Any, reduction: str) -> Kernel:
    """The row that the caller's ``kernel=`` means; ValueError, TypeError."""
    if callable(kernel):
        return _traced(kernel)
    names = NAMES if reduction == "kernel_sum" else POSITIVE
    if isinstance(kernel, str) and kernel in NAMES and kernel not in names:
        raise ValueError(
            f"kernel {kernel!r} has negative values, whose logarithm {reduction} "
            "cannot take: use kernel_sum"
        )
    _arrays.check_choice("kernel", kernel, names)
    return KERNELS[kernel]


def slope_of(kernel: Kernel) -> tuple[Kernel, float]:
    """-dK/d(d2) as a kernel and a factor of it."""
    if kernel.expression is None:
        assert kernel.slope is not None
        return KERNELS[kernel.slope], kernel.slope_factor
    row = _of_expression(kernel.expression.derivative, kernel.numbers)
    return row._replace(value=_without_cusp(row.value), skips_cusp=True), -1.0


def _without_cusp(slope):
    """A slope that is 0 where points coincide and it is not finite, as at a cusp."""

    def value(d2):
        together = d2 == 0
        if not together.any():
            return slope(d2)
        with np.errstate(all="ignore"):
            at_0 = slope(np.zeros(1, d2.dtype))[0]
        apart = slope(np.where(together, 1.0, d2).astype(d2.dtype, copy=False))
        return np.where(together, at_0 if np.isfinite(at_0) else 0.0, apart)

    return value


def _traced(function):
    from cupyflash._expr.lookup import lookup

    expression, numbers = lookup(function, names=("d2",))
    return _of_expression(expression, numbers)


def _of_expression(expression, numbers):
    """A row of an expression; its logarithm as far as it can be taken by rules."""
    from cupyflash._expr.emit_numpy import evaluate

    logarithm = logarithm_of(expression)

    def function_of(root):
        def function(d2):
            (value,) = evaluate([root], {"s": d2}, numbers, {}, d2.dtype)
            return np.array(np.broadcast_to(value, d2.shape))  # d2 stays as it is

        return function

    return Kernel(
        expression.name,
        function_of(expression.root),
        function_of(logarithm.root),
        smooth=False,
        expression=expression,
        numbers=numbers,
    )


def logarithm_of(expression: Any) -> Any:
    """The expression of the logarithm of a kernel."""
    return expression.of(_logarithm(expression.root), f"log_{expression.name}")


def _logarithm(root):
    """The logarithm of a node; a factor exp(u) gives u, which does not underflow."""
    from cupyflash._expr.nodes import make

    exponent, rest = _split(root)
    if exponent is None:
        return make("log", rest)
    return exponent if rest is None else make("add", exponent, make("log", rest))


def _split(x):
    """(u, r) of a node exp(u) * r; u or r may be None, for 0 and 1."""
    from cupyflash._expr.nodes import make

    if x.op == "exp":
        return x.args[0], None
    if x.op not in ("mul", "div"):
        return None, x
    (u, r), (v, s) = map(_split, x.args)
    if x.op == "div":
        v = None if v is None else make("neg", v)
        s = None if s is None else make("div", 1.0, s)
    return _joined("add", u, v), _joined("mul", r, s)


def _joined(op, a, b):
    from cupyflash._expr.nodes import make

    if a is None or b is None:
        return b if a is None else a
    return make(op, a, b)
