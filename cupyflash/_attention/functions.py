"""Score and mask functions of a call: checked, and bound to their arrays."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyflash._core import arrays as _arrays
from cupyflash._core.dtypes import CUDA_TYPES


@functools.cache
def language():
    """The module that traces functions, imported when the first one arrives."""
    from cupyflash._expr import lookup

    return lookup


class BoundFunction(NamedTuple):
    """An expression, what its function closes over, and its arrays by name."""

    expression: Any
    values: list[Any]
    arrays: dict[str, Any]


class Functions(NamedTuple):
    """The functions of a call."""

    score: BoundFunction | None = None
    mask: BoundFunction | None = None


def given(score: Any, score_arrays: Any, mask: Any, mask_arrays: Any) -> bool:
    """Whether a call has a function, or an argument that goes with one."""
    others = score is None and score_arrays is None and mask_arrays is None
    return callable(mask) or not others


def bind(
    q: Any, score: Any, score_arrays: Any, mask: Any, mask_arrays: Any
) -> tuple[Functions | None, Any]:
    """The functions of a call, or None; and the mask if it is an array."""
    if not given(score, score_arrays, mask, mask_arrays):
        return None, mask
    is_function = callable(mask)
    for name, option, there in (
        ("score", score_arrays, score is not None),
        ("mask", mask_arrays, is_function),
    ):
        if option is not None and not there:
            raise ValueError(f"{name}_arrays= needs {name}= to be a function")
    return (
        Functions(
            None if score is None else _bound(q, "score", score, score_arrays),
            _bound(q, "mask", mask, mask_arrays) if is_function else None,
        ),
        None if is_function else mask,
    )


def _bound(q, name, function, named):
    if named is None:
        return bound(function, {}, is_mask=name == "mask")
    if type(named) is dict and type(q) is np.ndarray and _are_plain(named):
        return bound(function, named, is_mask=name == "mask")
    if not isinstance(named, Mapping):
        raise TypeError(
            f"{name}_arrays must be a dict of arrays by name, got "
            f"{type(named).__name__}"
        )
    for n in named:
        if not isinstance(n, str):
            raise TypeError(
                f"{name}_arrays must be a dict of arrays by name, got the key {n!r}: "
                "use the name that the array has in the function"
            )
    labels = {f"{name}_arrays[{n!r}]": x for n, x in named.items()}
    adopted = _arrays.adopt_all(1 + len(labels), q=q, **labels)[1] if labels else {}
    arrays = dict(zip(named, [adopted[label] for label in labels], strict=True))
    for label, array in zip(labels, arrays.values(), strict=True):
        if _arrays.dtype_name(array) not in CUDA_TYPES:
            raise TypeError(
                f"{label} must hold floats, integers or booleans, got "
                f"{_arrays.dtype_name(array)}"
            )
        if not array.size and _arrays.is_cupy(array):
            raise ValueError(
                f"{label} has shape {array.shape} and no element to read; on a GPU an "
                "index out of range takes the nearest one"
            )
    return bound(function, arrays, is_mask=name == "mask")


def _are_plain(named):
    """Whether these are NumPy arrays that need no checks."""
    return all(
        type(name) is str
        and type(x) is np.ndarray
        and _arrays.dtype_name(x) in CUDA_TYPES
        for name, x in named.items()
    )


def bound(
    function: Any, arrays: dict[str, Any], is_mask: bool = False
) -> BoundFunction:
    """A function and its arrays, which have been checked."""
    expression, values = language().lookup(function, arrays, mask=is_mask)
    return BoundFunction(expression, values, arrays)


def arrays_of(functions: Functions) -> dict[str, Any]:
    """The arrays of all functions, by what the caller calls them."""
    return {
        f"{option}_arrays[{name!r}]": array
        for option, function in functions._asdict().items()
        if function is not None
        for name, array in function.arrays.items()
    }


def names_of_gradients(
    need_dscore: Any, functions: Functions | None
) -> tuple[str, ...]:
    """The names of the arrays whose gradients are requested."""
    names = (need_dscore,) if isinstance(need_dscore, str) else need_dscore
    try:
        names = tuple(names)
    except TypeError:
        names = (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"need_dscore must name arrays in score_arrays, got {need_dscore!r}"
        )
    score = functions.score if functions else None
    known = score.arrays if score else {}
    for name in names:
        if name not in known:
            raise ValueError(
                f"need_dscore asks for a gradient of {name!r}, but score_arrays has "
                f"{', '.join(map(repr, known)) or 'no array'}"
            )
        if _arrays.dtype_name(known[name]) not in _arrays.FLOATS:
            raise TypeError(
                f"need_dscore asks for a gradient of {name!r}, which holds "
                f"{_arrays.dtype_name(known[name])}; only floats have one"
            )
    return tuple(dict.fromkeys(names))


def as_option(expression: Any, values: list[Any]) -> Any:
    """(left, right) for a mask that is a window, or the softcap that a score is."""
    return None if expression.option is None else expression.option.of(values)


def with_options(
    functions: Functions, left: int | None, right: int | None, softcap: float
) -> tuple[Functions | None, int | None, int | None, float]:
    """Functions with those that an option expresses replaced by that option."""
    score, mask = functions
    if mask is not None and (window := as_option(mask.expression, mask.values)):
        mask = None
        bounds = zip((left, right), window, strict=True)
        left, right = (min((x for x in of if x is not None), default=None)
                       for of in bounds)  # fmt: skip
    if score is not None and not softcap:
        if cap := as_option(score.expression, score.values):
            score, softcap = None, cap
    rest = Functions(score, mask)
    return (rest if any(rest) else None), left, right, softcap


class Taken(NamedTuple):
    """A function in whose place a call has an option."""

    of: str  # "score" or "mask"
    function: BoundFunction
    option: str
    array: str | None = None  # the name of the option's array
    start: int = 0  # bytes from the start of that to what the option is given


def taken(
    before: Functions, after: Functions | None, options: Mapping[str, str]
) -> tuple[Taken, ...]:
    """What is in `before` and not in `after`; `options` says what became of it."""
    score, mask = after or (None, None)
    rest = {"score": score, "mask": mask}
    return tuple(
        Taken(of, function, options[of])
        for of, function in before._asdict().items()
        if function is not None and rest[of] is None
    )


def with_arrays(
    functions: Functions,
    given: Mapping[str, Any],
    scores: tuple[int, ...],
    first: Any,
    accum: str,
) -> tuple[dict[str, Any], tuple[Taken, ...]]:
    """The options that do what all functions of a call do; none unless all have one.

    With a function beside them kernels take smaller tiles for options. `given` are the
    call's own options, `scores` (..., heads, queries, keys), `first` the position of
    the first query, if that is an integer. An array that is too short, or is rounded
    on its way to scores of `accum`, stays with its function.
    """
    options: dict[str, Any] = {}
    found = []
    for of, function in functions._asdict().items():
        if function is None:
            continue
        option = function.expression.array_option
        if option is None or given[option.option] is not None:
            return {}, ()
        array = function.arrays[option.array]
        if _arrays.dtype_name(array) == "float64" and accum != "float64":
            return {}, ()
        if math.gcd(*array.strides) % array.itemsize:  # between elements
            return {}, ()
        view = _of_scores(array, option.axes, scores, first)
        if view is None:
            return {}, ()
        shape = scores if "j" in option.axes else scores[:-2]
        options[option.option] = _arrays.broadcast_view(option.option, view, shape)
        start = view.data.ptr - array.data.ptr if _arrays.is_cupy(array) else 0
        found.append(Taken(of, function, option.option, option.array, start))
    return options, tuple(found)


def _of_scores(x, axes, scores, first):
    """An array, read at these variables, over the axes of scores; None if too short."""
    *batch, heads, num_queries, num_keys = scores
    sizes = {"b": math.prod(batch), "h": heads, "i": num_queries, "j": num_keys}
    if "i" in axes and not isinstance(first, int):
        return None
    starts = {"i": first}
    where: list[slice | None] = []
    for axis, size in zip(axes, x.shape, strict=True):
        start = starts.get(axis, 0)
        if not 0 <= start <= start + sizes[axis] <= size:
            return None
        if axis == "i" and "h" not in axes:
            where.append(None)
        where.append(slice(start, start + sizes[axis]))
    x = x[tuple(where)]
    return x.reshape(*batch, *x.shape[1:]) if axes[0] == "b" else x


def key_of(function: BoundFunction | None) -> str | None:
    """The key of a function's expression."""
    return None if function is None else function.expression.key


def described(
    functions: Functions | None, taken: tuple[Taken, ...] = ()
) -> dict[str, str]:
    """The functions of a call as Python, and options in their place, for explain()."""
    details = {}
    for of, function, option, array, _ in taken:
        details["mask_function" if of == "mask" else of] = repr(function.expression)
        of_array = "" if array is None else f", {array!r} being its array"
        details[f"{of}_is"] = f"the option {option}={of_array}"
    score, mask = functions or (None, None)
    if score is not None:
        details["score"] = repr(score.expression)
        details["score_derivative"] = repr(score.expression.derivative)
    if mask is not None:
        details["mask_function"] = repr(mask.expression)
    return details


def tiles_of_mask(
    problem: Any, mask: BoundFunction, offsets: Any, rows: int, keys: int
) -> dict[str, int]:
    """How many tiles of `rows` queries and `keys` keys a mask shows, whole or not."""
    from cupyflash._expr.intervals import decide

    arrays = {
        name: x.get() if _arrays.is_cupy(x) else x for name, x in mask.arrays.items()
    }
    free = mask.expression.root.free
    offsets = np.broadcast_to(offsets, problem.batch).ravel()
    of_batch = "b" in free or (offsets != offsets[:1]).any()
    counts = {"full": 0, "mixed": 0, "empty": 0}
    names = {True: "full", None: "mixed", False: "empty"}
    for b, h, i, j in itertools.product(
        range(len(offsets) if of_batch else min(len(offsets), 1)),
        range(problem.num_heads if "h" in free else 1),
        range(0, problem.seqlen_q, rows),
        range(0, problem.seqlen_k, keys),
    ):
        first, last = (
            int(offsets[b]) + x for x in (i, min(i + rows, problem.seqlen_q))
        )
        ranges = {
            "b": (b, b),
            "h": (h, h),
            "i": (first, last - 1),
            "j": (j, min(j + keys, problem.seqlen_k) - 1),
        }
        known = decide(mask.expression, ranges, mask.values, arrays)
        counts[names[known]] += 1
    return counts


# How the text of functions begins whose integers have 32 bits.
SHORT_INTEGERS = "#define EXPR_SHORT_INTEGERS\n"

# Largest integers that functions may close over in kernels that count in 32 bits.
MOST_OF_A_NUMBER = 1 << 20


def are_small(expression: Any, values: list[Any]) -> bool:
    """Whether the integers that a function closes over are small."""
    return all(
        -MOST_OF_A_NUMBER <= values[place] <= MOST_OF_A_NUMBER
        for place in expression.packer.integers
    )


def cuda_text(
    functions: Functions,
    ranges: Mapping[str, tuple[int, int] | None],
    in_stages: bool = False,
    gradients_of: tuple[str, ...] = (),
) -> str:
    """The functions as CUDA text, with the headers that they need.

    `ranges` are the first and the last of b, h, i and j in the call, None if that is
    not known. If all integers fit, they have 32 bits. With `in_stages` the text also
    has the stages of `emit_stages`, with `gradients_of` the derivatives of the score by
    elements of these arrays.
    """
    from cupyflash._expr.emit_cuda import emit_cuda, emit_cuda_tiles
    from cupyflash._expr.emit_stages import emit_bounds, emit_stages

    text, is_short = [], True
    near = all(_is_near(ranges[name]) for name in "ij")
    for name, function in zip(("score_mod", "mask_mod"), functions, strict=True):
        if function is None:
            continue
        expression, values = function.expression, function.values
        is_short = is_short and _fits_int32(expression, values, ranges)
        text.append(emit_cuda(expression, name, gradients_of))
        if expression.is_mask:
            text.append(emit_cuda_tiles(expression, name))
        if in_stages:
            text.append(emit_stages(expression, name, small_positions=near))
            if expression.is_mask:
                text.append(emit_bounds(expression, name))
    width = SHORT_INTEGERS if is_short else ""
    return "".join([width, '#include "expr/intervals.cuh"\n', *text])


def _is_near(positions):
    """Whether positions are small in the sense of `emit_stages`."""
    return positions is not None and max(map(abs, positions)) < 1 << 23


def _fits_int32(expression, values, ranges):
    """Whether 32 bits suffice for all numbers closed over whose integers are small."""
    from cupyflash._expr.intervals import fits_int32

    numbers: dict[Any, Any] = dict.fromkeys(expression.numbers)
    most = -MOST_OF_A_NUMBER, MOST_OF_A_NUMBER
    numbers |= dict.fromkeys(expression.packer.integers, most)
    found = [expression] if expression.is_mask else [expression, expression.derivative]
    return are_small(expression, values) and all(
        fits_int32(x, {**ranges, **numbers}, values) for x in found
    )
