"""What a function closes over: its numbers become parameters, without touching it.

A traced function runs as a copy whose cells, globals and defaults hold symbols in place
of numbers, so that another number needs no other kernel.
"""

import dis
import itertools
import operator
import sys
import types
from typing import Any

import numpy as np

from cupyflash._expr.errors import fail
from cupyflash._expr.nodes import node
from cupyflash._expr.tracing import Trace, Traced

# Types of numbers, which become parameters.
PARAMETERS = frozenset({int, float, *(np.dtype(c).type for c in "efdbhilqBHILQ")})
_CONSTANTS = (bool, np.bool_, str, type(None))
# Modules whose functions and classes never change, and what these are.
_MODULES = ("numpy", "math", "builtins", "operator", "functools", "itertools")
_OF_MODULES = (np.ufunc, type(np.where), types.BuiltinFunctionType, type)
# Builtins by which a function would get at what is not seen from here.
_OUTSIDE = frozenset({"__import__", "eval", "exec", "open", "globals", "input"})

_Function = types.FunctionType


def global_lines(code: types.CodeType) -> dict[str, int]:
    """The globals that a code and those within read, each with its line.

    From the instructions: `co_names` has attributes, too.
    """
    names: dict[str, int] = {}
    for step, line in _instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.setdefault(step.argval, line)
    return names


def _instructions(code):
    """The instructions of a code and those within, each with its line."""
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        # Python 3.13 has both, and the first of them as a bool.
        line = getattr(step, "line_number", step.starts_line) or line
        yield step, line
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _instructions(inner)


# id of a code -> (the code, which so stays alive; the globals that it reads).
codes: dict[int, tuple[types.CodeType, tuple[str, ...]]] = {}


_contents = operator.attrgetter("cell_contents")


def _own(function):
    """What a function closes over: cells, globals (None for a builtin), defaults."""
    code = function.__code__
    known = codes.get(id(code))
    if known is None:
        known = codes[id(code)] = (code, tuple(global_lines(code)))
    cells = function.__closure__
    values = [*map(_contents, cells)] if cells else []
    if known[1]:
        values += map(function.__globals__.get, known[1])
    if function.__defaults__:
        values += function.__defaults__
    if function.__kwdefaults__:
        values += function.__kwdefaults__.values()
        values.append(sys.intern(",".join(function.__kwdefaults__)))
    return values


def closed_over(function: _Function) -> tuple[list[Any], list[_Function]]:
    """What a function and those that it calls close over; and these functions."""
    values, functions = _own(function), [function]
    if _Function in map(type, values):
        own, values = values, []
        for each in functions:  # which grows
            if each is not function:
                own = _own(each)
            values += own
            for v in own:
                if type(v) is _Function and v not in functions:
                    functions.append(v)
    return values, functions


def _of_all(function):
    return closed_over(function)[0]


class Snapshot:
    """What a function and its arrays were in a call, to be compared with a later one.

    In half the time of a look-up, if it closes over the very same objects, which are
    numbers and what never changes.
    """

    __slots__ = ("_code", "_facts", "_read", "_values")

    def __init__(self, function: _Function, facts: Any):
        self._code = function.__code__  # which so stays alive, and its id is its own
        self._facts = facts
        self._values, functions = closed_over(function)
        self._read = _own if len(functions) == 1 else _of_all

    def still_holds(self, function: _Function, facts: Any) -> bool:
        """Whether a function of this code closes over the same as then."""
        values = self._read(function)
        return (
            len(values) == len(self._values)
            and all(map(operator.is_, values, self._values))
            and facts == self._facts
        )


def with_parameters(
    functions: list[_Function], trace: Trace
) -> tuple[_Function, dict[int, str]]:
    """A copy of the first function on symbols, and what each number was called."""
    places = itertools.count()
    names: dict[int, str] = {}
    copies = {}
    for function in functions:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        scope = {"__builtins__": function.__globals__.get("__builtins__", __builtins__)}
        copies[function] = _Function(
            function.__code__, scope, function.__name__, None, cells or None
        )

    def stand_in(name, value, code):
        place = next(places)
        if type(value) in PARAMETERS:
            dtype = "int" if isinstance(value, (int, np.integer)) else "float"
            names[place] = name
            return Traced(node("param", dtype, (), place), trace)
        if _is_constant(value):
            return value
        if isinstance(value, _Function) and value in copies:
            return copies[value]
        if _is_known(value):
            return value
        line = global_lines(code).get(name, code.co_firstlineno)
        fail(_instead(name, value), (code.co_filename, line))

    for function, copy in copies.items():  # in the order of `_own`
        code = function.__code__
        new, given = copy.__closure__ or (), function.__closure__ or ()
        for name, cell, old in zip(code.co_freevars, new, given, strict=True):
            cell.cell_contents = stand_in(name, old.cell_contents, code)
        _refuse_outside(function)
        for name in global_lines(code):
            value = stand_in(name, function.__globals__.get(name), code)
            if name in function.__globals__:
                copy.__globals__[name] = value
        defaults = function.__defaults__ or ()
        of_defaults = code.co_varnames[: code.co_argcount][-len(defaults) :]
        copy.__defaults__ = (
            tuple(
                stand_in(name, value, code)
                for name, value in zip(of_defaults, defaults, strict=False)
            )
            or None
        )
        copy.__kwdefaults__ = {
            name: stand_in(name, value, code)
            for name, value in (function.__kwdefaults__ or {}).items()
        }
        if function.__kwdefaults__:
            next(places)  # of their names
    return copies[functions[0]], names


def _refuse_outside(function):
    """Refuse what could change without being closed over."""
    code = function.__code__
    for step, line in _instructions(code):
        name, place = step.argval, (code.co_filename, line)
        if step.opname == "IMPORT_NAME" and not _never_changes(name):
            fail(
                f"{name} is imported in a traced function, which would not see it "
                "change: use NumPy, or math for numbers",
                place,
            )
        if step.opname == "LOAD_GLOBAL" and name in _OUTSIDE:
            if name not in function.__globals__:
                fail(
                    f"{name}() in a traced function, which would not see its result "
                    "change: close over a number, or pass an array by name",
                    place,
                )


def _never_changes(module):
    return module.split(".")[0].lstrip("_") in _MODULES


def _is_constant(value):
    """Whether a value is compared at each call; a tuple of such and numbers is, too."""
    if type(value) is tuple:
        return all(type(x) in PARAMETERS or _is_constant(x) for x in value)
    return isinstance(value, _CONSTANTS)


def _is_known(value):
    """Whether a value is a module, or a function of a module, that never changes."""
    if isinstance(value, np.ufunc):
        return True
    if type(value) is types.ModuleType:
        module = value.__name__
    elif isinstance(value, _OF_MODULES):
        module = getattr(value, "__module__", None) or ""
    else:
        return False
    return _never_changes(module)


def _instead(name, value):
    """What to write instead of a value that cannot be closed over."""
    if hasattr(value, "dtype"):
        instead = (
            f"pass it by name: {name} after `*` in the function, and score_arrays= or "
            f"mask_arrays={{'{name}': {name}}} (kernels of points only take numbers)"
        )
    elif getattr(value, "__name__", "") == "cupy":
        instead = "use np.f(x), for CuPy arrays too"
    elif isinstance(value, types.ModuleType):
        instead = "use NumPy, or math for numbers"
    elif isinstance(value, type):
        instead = "bind the number that it holds to a name, outside of the function"
    elif callable(value):
        instead = "write it as a plain function (def or lambda)"
    else:
        instead = "bind the number that it holds to a name, outside of the function"
    kind = "a class" if isinstance(value, type) else f"a {type(value).__name__}"
    kind = "an array" if hasattr(value, "dtype") else kind
    return f"{name}, {kind}, is closed over: {instead}"
