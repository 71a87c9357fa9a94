"""softmax, log_softmax, logsumexp and their vector-Jacobian products."""

import functools
from typing import Any, Literal, overload

import numpy as np

from cupyflash._core import arrays, foreign_names
from cupyflash._core.typing import Array, Axis, Method, Never
from cupyflash._softmax import problem as softmax_problem


@functools.cache
def _gpu():
    """The CuPy back end, imported when the first GPU array arrives."""
    from cupyflash._softmax.gpu import dispatch as softmax_gpu

    return softmax_gpu


@functools.cache
def _cpu():
    """The NumPy back end."""
    from cupyflash._softmax.cpu import softmax as softmax_cpu

    return softmax_cpu


def backend(problem):
    """The module that runs a problem."""
    return _cpu() if problem.backend == "numpy" else _gpu()


def _run(check, out, x, *rest):
    """A call whose first array is not CuPy's: NumPy's, or another library's.

    `out` is among `rest`, too: it is returned as it was given, of a subclass or not.
    """
    if arrays.lives_on_gpu(x):
        arrays.import_cupy()
        return _gpu().unplanned(check, x, *rest)
    result = _cpu().run(*check(x, *rest))
    if out is None:
        return result
    return (out, result[1]) if isinstance(result, tuple) else out


# The checks of each function, made once: calls on small arrays are known by them.
_check_softmax, _check_log_softmax = (
    functools.partial(softmax_problem.softmax, name)
    for name in ("softmax", "log_softmax")
)
_checks_vjp = {
    name: functools.partial(softmax_problem.vjp, name)
    for name in ("softmax_vjp", "log_softmax_vjp")
}


def _run_family(check, x, axis, where, scale, dtype, out, method):
    """softmax or log_softmax of what is no CuPy array."""
    if (
        type(x) is np.ndarray
        and 0 < x.size <= _SMALL
        and where is None
        and dtype is None
        and out is None
        and type(axis) in _AXIS
        and type(scale) in _SCALE
        and type(method) is str
    ):
        return _cpu().run_small(check, x, axis, None, scale, None, None, method)
    return _run(check, out, x, axis, where, scale, dtype, out, method)


# Elements of an array whose calls are planned; fewer than are worth a thread.
_SMALL = 64 * 1024
# Types by which equal options mean the same: True is 1, but no axis.
_AXIS, _SCALE = (int, type(None)), (float, int)


@foreign_names.documented("x")
def softmax(
    x: Array = None,
    axis: Axis = None,
    *,
    where: Array | None = None,
    scale: float = 1.0,
    dtype: Any = None,
    out: Array | None = None,
    method: Method = "auto",
    **unknown: Never,
) -> Array:
    """Softmax, ``exp(scale * x) / sum(exp(scale * x))`` along `axis`.

    Parameters
    ----------
    x : array_like
        NumPy array, list or scalar (computed on the CPU), CuPy array (on its GPU), or
        an object that exposes CUDA memory through ``__dlpack__`` or
        ``__cuda_array_interface__`` (read in place; the result is a CuPy array).
        float16, bfloat16, float32, float64 or complex; bool and integers are converted
        to float64. Any strides.
    axis : int or tuple of ints, optional
        Axes that one sum runs over. None, the default, is all of them.
    where : array_like of bool, optional
        Broadcasts to `x`. Elements where it is False are ignored, even NaN, and give 0.
    scale : float, default 1.0
        Factor on `x`. It costs no accuracy: exact differences of `x` are multiplied.
    dtype : dtype, optional
        Floating dtype of the result; by default that of `out`, or else of `x`.
    out : ndarray, optional
        Where to put the result, of the shape of `x`. May be `x` itself, with any
        strides, but may not overlap `x` in any other way.
    method : {"auto", "naive", "safe", "online", "tiled"}, default "auto"
        "naive" is the textbook formula in the dtype of `x` without subtracting the
        maximum: it overflows in float16 from 11.09, in float32 from 88.7. "safe" goes
        over memory three times, "online" twice, "tiled" once.

    Returns
    -------
    ndarray
        Of the shape of `x`. A scalar for 0-d NumPy input, as in SciPy.

    Raises
    ------
    TypeError
        For mixed kinds of arrays, a `where` that is not bool, or a dtype that is not
        floating.
    ValueError
        For shapes that do not broadcast, an unknown method, an `out` of another shape,
        or arrays on two devices.
    numpy.exceptions.AxisError
        If `axis` is out of bounds.

    See Also
    --------
    log_softmax, logsumexp, softmax_vjp

    Notes
    -----
    Maxima, exponentials and sums are float32 or wider for 16-bit and float32 input,
    float64 otherwise; the result is rounded once. The rounding error of
    ``x - max(x)`` is carried along, and `scale` multiplies that difference, so the
    relative error does not grow with the spread of a row or the size of its numbers:
    it is 1e-15 for float64 and 4e-7 for float32.

    Special values are treated as in SciPy: a row of -inf only, or with a +inf, gives
    NaN, and a NaN affects its own row only. A row with `where` all False gives 0.

    References
    ----------
    .. [1] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax",
       arXiv:1805.02867, 2018.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> cupyflash.softmax(np.array([[0.0, 0.0], [0.0, 1000.0]]), axis=-1)
    array([[0.5, 0.5],
           [0. , 1. ]])
    """
    if unknown:
        foreign_names.refuse("softmax", unknown)
    if type(x) in arrays.CUPY_CLASSES or arrays.is_cupy(x):
        return _gpu().softmax("softmax", x, axis, where, scale, dtype, out, method)
    check = _check_softmax
    return _run_family(check, x, axis, where, scale, dtype, out, method)


@foreign_names.documented("x")
def log_softmax(
    x: Array = None,
    axis: Axis = None,
    *,
    where: Array | None = None,
    scale: float = 1.0,
    dtype: Any = None,
    out: Array | None = None,
    method: Method = "auto",
    **unknown: Never,
) -> Array:
    """Logarithm of the softmax, ``scale * x - logsumexp(scale * x)`` along `axis`.

    Parameters
    ----------
    x, axis, where, scale, dtype, out, method
        As in `softmax`. Elements where `where` is False give -inf.

    Returns
    -------
    ndarray
        Of the shape of `x`. A scalar for 0-d NumPy input.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As in `softmax`.

    See Also
    --------
    softmax, logsumexp, log_softmax_vjp

    Notes
    -----
    More accurate than ``log(softmax(x))``: a small softmax does not underflow to -inf.
    The log of a softmax near 1 keeps its digits on NumPy; on a GPU the error of each
    result is relative to 1 or to its size, whichever is larger.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> cupyflash.log_softmax(np.array([1000.0, 0.0]))
    array([    0., -1000.])
    """
    if unknown:
        foreign_names.refuse("log_softmax", unknown)
    if type(x) in arrays.CUPY_CLASSES or arrays.is_cupy(x):
        return _gpu().softmax("log_softmax", x, axis, where, scale, dtype, out, method)
    check = _check_log_softmax
    return _run_family(check, x, axis, where, scale, dtype, out, method)


@overload
def logsumexp(
    a: Array,
    axis: Axis = None,
    b: Array | None = None,
    keepdims: bool = False,
    *,
    return_sign: Literal[True],
    where: Array | None = None,
    out: Array | None = None,
) -> tuple[Array, Array]: ...
@overload
def logsumexp(
    a: Array,
    axis: Axis = None,
    b: Array | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    *,
    where: Array | None = None,
    out: Array | None = None,
) -> Array: ...  # Any: a pair, too, if the flag is not known
@foreign_names.documented("a")
def logsumexp(
    a: Array = None,
    axis: Axis = None,
    b: Array | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    *,
    where: Array | None = None,
    out: Array | None = None,
    **unknown: Never,
) -> Array | tuple[Array, Array]:
    """Logarithm of a sum of exponentials, ``log(sum(b * exp(a)))`` along `axis`.

    Parameters
    ----------
    a : array_like
        As `x` in `softmax`; complex too.
    axis : int or tuple of ints, optional
        Axes that the sum runs over. None, the default, is all of them.
    b : array_like, optional
        Factors, broadcast with `a`; may be negative. Where `b` is 0, `a` is ignored. A
        Python number does not widen the dtype of the result; arrays of integers and
        bool count as float64.
    keepdims : bool, default False
        Keep the reduced axes with length one.
    return_sign : bool, default False
        Also return the sign of the sum; without it a negative sum gives NaN.
    where : array_like of bool, optional
        Broadcasts to `a`. Elements where it is False are ignored, even NaN.
    out : ndarray, optional
        Where to put the result.

    Returns
    -------
    ndarray
        The logarithms; a NumPy scalar if 0-d on the CPU.
    sign : ndarray
        Only with `return_sign`: 1, 0 or -1 (a phase for complex input).

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As in `softmax`.

    See Also
    --------
    scipy.special.logsumexp, softmax, log_softmax

    Notes
    -----
    `a` is read once. An empty sum, or one of -inf only, gives -inf; a +inf gives inf.
    In float64 the error is at most 1e-15 times the result or 1, whichever is larger; on
    NumPy, 2 units in the last place for up to 16 numbers without weights, unless the
    result is within 1e-3 of 0. With weights of both signs the error is relative to
    ``sum(abs(b) * exp(a))``. With infinite scores or weights the sum is what floating
    point makes of ``b * exp(a)``; a real weight multiplies both parts of a complex
    number.

    Results have the same shape and dtype as SciPy's, with these exceptions: `keepdims`
    with a 0-d array gives a 0-d result, as in NumPy's reductions (SciPy: shape (1,));
    ``axis=()`` reduces nothing, and an empty array with several axes is not an error;
    and integers and bool count as float64 even together with narrower types (SciPy: a
    bool with float32 is float32). SciPy 1.14 lets a Python number widen the result.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> float(cupyflash.logsumexp(np.array([1000.0, 1000.0])))
    1000.6931471805599
    """
    if unknown:
        foreign_names.refuse("logsumexp", unknown)
    if type(a) in arrays.CUPY_CLASSES or arrays.is_cupy(a):
        return _gpu().logsumexp(a, axis, b, keepdims, return_sign, where, out)
    check = softmax_problem.logsumexp
    if (
        type(a) is np.ndarray
        and 0 < a.size <= _SMALL
        and b is None
        and where is None
        and out is None
        and return_sign is False
        and type(keepdims) is bool
        and type(axis) in _AXIS
    ):
        return _cpu().run_small(check, a, axis, None, keepdims, False, None, None)
    return _run(check, out, a, axis, b, keepdims, return_sign, where, out)


@foreign_names.documented("y", "dy")
def softmax_vjp(
    y: Array = None,
    dy: Array = None,
    axis: Axis = None,
    *,
    scale: float = 1.0,
    out: Array | None = None,
    **unknown: Never,
) -> Array:
    """Gradient of `softmax`: ``scale * y * (dy - sum(y * dy))`` along `axis`.

    Parameters
    ----------
    y : array_like
        What ``softmax(x, axis, scale=scale)`` returned.
    dy : array_like
        Gradient with respect to `y`; broadcasts to it.
    axis : int or tuple of ints, optional
        The axis of the softmax.
    scale : float, default 1.0
        The scale of the softmax.
    out : ndarray, optional
        Where to put the result; may be `y` or `dy` itself.

    Returns
    -------
    ndarray
        Gradient with respect to `x`, of the shape of `y` and the common dtype of `y`
        and `dy`.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As in `softmax`; TypeError also for complex input.

    See Also
    --------
    softmax, log_softmax_vjp

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> y = cupyflash.softmax(np.zeros(2))
    >>> cupyflash.softmax_vjp(y, np.array([1.0, 0.0]))
    array([ 0.25, -0.25])
    """
    if unknown:
        foreign_names.refuse("softmax_vjp", unknown)
    return _vjp("softmax_vjp", y, dy, axis, scale, out)


@foreign_names.documented("y", "dy")
def log_softmax_vjp(
    y: Array = None,
    dy: Array = None,
    axis: Axis = None,
    *,
    scale: float = 1.0,
    out: Array | None = None,
    **unknown: Never,
) -> Array:
    """Gradient of `log_softmax`: ``scale * (dy - exp(y) * sum(dy))`` along `axis`.

    Parameters
    ----------
    y : array_like
        What ``log_softmax(x, axis, scale=scale)`` returned. Elements that are -inf
        (masked by `where`) get a gradient of 0.
    dy : array_like
        Gradient with respect to `y`; broadcasts to it.
    axis, scale, out
        As in `softmax_vjp`.

    Returns
    -------
    ndarray
        Gradient with respect to `x`, of the shape of `y` and the common dtype of `y`
        and `dy`.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As in `softmax_vjp`.

    See Also
    --------
    log_softmax, softmax_vjp

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> y = cupyflash.log_softmax(np.zeros(2))
    >>> cupyflash.log_softmax_vjp(y, np.array([1.0, 0.0]))
    array([ 0.5, -0.5])
    """
    if unknown:
        foreign_names.refuse("log_softmax_vjp", unknown)
    return _vjp("log_softmax_vjp", y, dy, axis, scale, out)


def _vjp(function, y, dy, axis, scale, out):
    if type(y) in arrays.CUPY_CLASSES or arrays.is_cupy(y):
        return _gpu().vjp(function, y, dy, axis, scale, out)
    check = _checks_vjp[function]
    if (
        type(y) is np.ndarray
        and type(dy) is np.ndarray
        and 0 < y.size <= _SMALL
        and y.shape == dy.shape
        and out is None
        and type(axis) in _AXIS
        and type(scale) in _SCALE
    ):
        return _cpu().run_small_pair(check, y, dy, axis, scale, None)
    return _run(check, out, y, dy, axis, scale, out)
