"""From a function to its expression: traced once, then found by its code."""

import functools
import inspect
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyflash._expr.closures import (
    PARAMETERS,
    closed_over,
    codes,
    with_parameters,
)
from cupyflash._expr.errors import AtLine, fail, start_of, unhidden
from cupyflash._expr.expression import Expression, dtype_name
from cupyflash._expr.nodes import VARIABLES, cast, const, var
from cupyflash._expr.tracing import KINDS, NUMBERS, NamedArray, Trace, Traced

_MOST_CODES = 256
_MOST_OF_A_CODE = 16

# (code, types closed over, arrays) -> plans of other constants, the last one first.
_plans: "OrderedDict[Any, list[_Plan]]" = OrderedDict()
_lock = threading.Lock()
_MEANING = {"s": "score", "b": "batch entry", "h": "head", "i": "query", "j": "key"}
_NO_ARRAYS: dict[str, Any] = {}

# (place, value) of what must be the same, the expression, and the code, whose id is
# in the key.
_Plan = tuple[tuple[tuple[int, Any], ...], Expression, types.CodeType]


def lookup(
    function: Callable[..., Any],
    arrays: Mapping[str, Any] | None = None,
    mask: bool = False,
    names: tuple[str, ...] = (),
) -> tuple[Expression, list[Any]]:
    """The expression of a function; traced where it or its constants are new.

    Parameters
    ----------
    function : function
        Takes any of s, b, h, i and j by name and, after ``*``, arrays by name.
    arrays : mapping of str to array, optional
        The named arrays; of these, dtype and ndim are looked at.
    mask : bool, default False
        Whether the function is a mask: without s, its result a boolean.
    names : tuple of str, optional
        What the function may ask for in place of the positions: names of s.

    Returns
    -------
    expression : Expression
    values : list
        All that the function closes over; ``expression.number_values(values)`` are the
        numbers of this call.

    Raises
    ------
    TypeError, ValueError
        If the function does what cannot be traced; the message names the line.
    """
    if type(function) is not types.FunctionType:
        what = "kernel" if names else "mask" if mask else "score"
        function = _of_partial(function, what)
    try:
        values, functions = closed_over(function)  # type: ignore[arg-type]
    except ValueError:  # a cell that is empty yet
        raise ValueError(
            f"{function.__name__} closes over a name that has no value yet"
        ) from None
    if arrays is None:
        arrays = _NO_ARRAYS
    key: tuple[Any, ...] = (id(function.__code__), mask, names, *map(type, values))
    for name, array in arrays.items():
        key += name, array.dtype, array.ndim
    plans = _plans.get(key, ())
    for fixed, expression, _ in plans:
        for place, value in fixed:
            now = values[place]
            if now is not value and not _same(now, value):
                break
        else:
            try:
                _plans.move_to_end(key)
            except KeyError:  # forgotten meanwhile by another thread
                pass
            return expression, values
    expression, pinned = _traced_twice(function, arrays, mask, values, functions, names)
    _keep(key, function.__code__, values, pinned, expression)
    return expression, values


def _of_partial(function, what):
    """The plain function of a functools.partial, what is bound being its defaults."""
    inner = getattr(function, "func", None)
    if type(function) is not functools.partial or type(inner) is not types.FunctionType:
        _refuse_kind(function, what)
    bound = dict(zip(inner.__code__.co_varnames, function.args, strict=False))
    bound |= function.keywords
    if positions := sorted(bound.keys() & VARIABLES.keys()):
        name = positions[0]
        raise TypeError(
            f"{what} is a functools.partial with {name} bound, which is the "
            f"{_MEANING[name]}: rename the argument that you bind"
        )
    plain = types.FunctionType(
        inner.__code__,
        inner.__globals__,
        inner.__name__,
        inner.__defaults__,
        inner.__closure__,
    )
    plain.__kwdefaults__ = {**(inner.__kwdefaults__ or {}), **bound}
    return plain


def _refuse_kind(function, what):
    hint = "; call it inside one" if callable(function) else ""
    raise TypeError(
        f"{what} must be a plain function (def or lambda), got "
        f"{type(function).__name__}{hint}"
    )


def _same(now, value):
    if type(now) is types.FunctionType:  # what it closes over is among the values
        return now.__code__ is value.__code__
    if type(now) is tuple:
        return type(value) is tuple and repr(now) == repr(value)
    if type(now) in PARAMETERS:
        return repr(now) == repr(value)  # -0.0 is not 0.0, and NaN is NaN
    return type(now) is str and now == value


def _keep(key, code, values, pinned, expression):
    """Remember a plan; the oldest codes and constants are forgotten."""
    fixed = tuple(
        (place, value)
        for place, value in enumerate(values)
        if place in pinned or type(value) not in PARAMETERS
    )
    with _lock:
        known = _plans.get(key, [])
        # A new list: another thread may be reading the old one.
        _plans[key] = [(fixed, expression, code), *known[: _MOST_OF_A_CODE - 1]]
        _plans.move_to_end(key)
        while len(_plans) > _MOST_CODES:
            _plans.popitem(last=False)
        if len(codes) > 4 * _MOST_CODES:
            alive = {id(plan[2]) for plans in _plans.values() for plan in plans}
            for unused in set(codes) - alive:
                codes.pop(unused, None)


def _traced_twice(function, arrays, mask, values, functions, names):
    """A trace that a second one confirms."""
    first, pinned = trace(function, arrays, mask, values, functions, names)
    second, _ = trace(function, arrays, mask, values, functions, names)
    if first.key != second.key:
        fail(
            f"{function.__name__} is not the same in every call: its result may only "
            "depend on its arguments and on constants, not on random numbers or time",
            start_of(function.__code__),
        )
    return first, pinned


def trace(function, arrays, mask, values, functions, names=()):
    """(expression, places of numbers whose value was asked for)."""
    code = function.__code__
    start = start_of(code)
    state = Trace(values)
    try:
        copy, number_names = with_parameters(functions, state)
    except TypeError:  # one of ours that makes a function is none itself
        if not (function.__module__ or "").startswith("cupyflash.scores."):
            raise
        name, option = function.__name__, "mask" if mask else "score"
        raise TypeError(
            f"scores.{name} makes a function: pass what it returns, as in "
            f"{option}=scores.{name}(...)"
        ) from None
    given = _arguments(function, arrays, mask, state, start, names)
    try:
        with np.errstate(all="ignore"), unhidden():  # of what it does with literals
            bound = copy.__kwdefaults__ or {}  # by a partial, of any argument
            given = {**bound, **given}
            by_place = [
                given.pop(n) for n in code.co_varnames[: code.co_posonlyargcount]
            ]
            result = copy(*by_place, **given)
    except AtLine:
        raise
    except Exception as error:
        inside = {f.__code__ for f in functions}
        at, step = start, error.__traceback__
        while step:
            if step.tb_frame.f_code in inside:
                at = step.tb_frame.f_code.co_filename, step.tb_lineno
            step = step.tb_next
        fail(f"{type(error).__name__}: {error}", at, cause=error)
    if isinstance(result, np.ndarray) and result.ndim == 0:
        result = result[()]  # np.where() of numbers alone makes these
    if isinstance(result, NUMBERS):
        result = Traced(const(result), state)
    if isinstance(result, NamedArray):
        fail(f"the result is an array: index it, as in {result.example()}", start)
    if not isinstance(result, Traced):
        fail(f"the result is a {type(result).__name__}: return one expression", start)
    root = result.node
    if mask and root.dtype != "bool":
        fail(
            f"a mask returns a boolean, got {root.dtype}: compare, as in i >= j", start
        )
    if names and root.dtype == "bool":
        fail("a kernel returns a number: write np.where(near, 1.0, 0.0)", start)
    if not mask and root.dtype == "bool":
        fail("a score returns a number: write np.where(seen, s, -np.inf)", start)
    dtypes = {name: dtype_name(array) for name, array in arrays.items()}
    name = function.__name__ if function.__name__.isidentifier() else ""
    name = name or ("mask" if mask else "score")
    root = root if mask else cast(root, "float")
    return Expression(root, dtypes, name, number_names), state.pinned


def _arguments(function, arrays, mask, state, start, names):
    """What a function is called with."""
    code, given = function.__code__, {}
    count = code.co_argcount
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        fail(
            f"{function.__name__} takes * or ** arguments: name each argument instead",
            start,
        )
    if names:
        known = dict.fromkeys(names, "s")
    else:
        known = {name: name for name in VARIABLES if not (mask and name == "s")}
    variables = ", ".join(known if names else (f"{n} ({_MEANING[n]})" for n in known))
    optional = {
        *code.co_varnames[count - len(function.__defaults__ or ()) : count],
        *(function.__kwdefaults__ or ()),
    }
    for name in code.co_varnames[: count + code.co_kwonlyargcount]:
        if name in known and name in optional:
            fail(
                f"{name} has a default, but is the {_MEANING.get(name, 'argument')}: "
                "rename it, or leave the default out",
                start,
            )
        if name in arrays:
            array = arrays[name]
            if name in VARIABLES:
                fail(f"an array cannot be called {name}: that is a position", start)
            if array.dtype.kind not in KINDS:
                raise TypeError(
                    f"{name} must hold floats, integers or booleans, got {array.dtype}"
                )
            given[name] = NamedArray(name, array, state)
            if array.ndim == 0:
                given[name] = given[name][()]
        elif name in known:
            given[name] = Traced(var(known[name]), state)
        elif name not in optional and names:
            fail(
                f"{function.__name__} asks for {name}: it may ask for {variables}",
                start,
            )
        elif name not in optional:
            option = "mask_arrays" if mask else "score_arrays"
            fail(
                f"{function.__name__} asks for {name}: it may ask for {variables} and "
                f"for arrays given by name, {option}={{'{name}': ...}}",
                start,
            )
    if unused := set(arrays) - set(given):
        fail(
            f"{function.__name__} does not take the array {', '.join(sorted(unused))}: "
            "name it after `*`, or leave it out",
            start,
        )
    return given
