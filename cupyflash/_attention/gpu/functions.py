"""Score and mask functions of a call on a GPU: their part of plans and launches."""

import types
from typing import Any, NamedTuple

from cupyflash._attention import functions as _functions
from cupyflash._attention.gpu.config import FUNCTIONS, OPTIONS
from cupyflash._core import strides


class WithFunctions(NamedTuple):
    """params_t of a call with functions, whose arguments are at its end."""

    params: bytes
    reads: tuple[str, ...] = (FUNCTIONS,)

    def bind(self, device_id):
        """See Argument of launches."""
        return lambda functions: self.params + functions


class WithTable(NamedTuple):
    """The same, whose score function reads a table made in the call."""

    params: bytes
    rest: bytes
    replaced: int
    reads: tuple[str, ...] = (FUNCTIONS, "diagonals")

    def bind(self, device_id):
        """See Argument of launches."""
        return lambda functions, table: b"".join(
            (
                self.params,
                table.to_bytes(8, "little"),
                self.rest,
                functions[self.replaced :],
            )
        )


def with_functions(params: bytes, problem) -> Any:
    """params_t as an argument of launches."""
    if problem.score is not None and problem.table is not None:
        return WithTable(params, *problem.table)
    return WithFunctions(params) if problem.has_functions else params


def without_functions(params: Any) -> bytes:
    """params_t for kernels other than the main one, with functions or without."""
    return params.params if isinstance(params, (WithFunctions, WithTable)) else params


def packed(problem, functions) -> bytes:
    """functions_t of attention/score/functions.cuh for checked operands."""
    return b"".join(
        function.expression.packer(
            function.arrays, function.values, problem.compute_dtype
        )
        for function in functions or ()
        if function is not None
    )


def of_call(
    q, score, score_arrays, mask, mask_arrays, softcap, first=None
) -> tuple[Any, bytes]:
    """(key of a plan, functions_t) of a call whose functions are known.

    `first` is the query offset if it is an int, else None. Raises TypeError,
    ValueError or AttributeError if the arguments need the checks first.
    """
    accum = "float64" if q.dtype.char == "d" else "float32"
    key, packed = _of_one(q, score, score_arrays, accum, bool(softcap), first)
    if mask is mask_arrays is None:
        return (*key, None), packed
    of_mask, packed_mask = _of_one(q, mask, mask_arrays, accum, None, first)
    return key + of_mask, packed + packed_mask


def with_taken(options, taken, score_arrays, mask_arrays) -> Any:
    """Pointers of the options, with the arrays of functions that options replace."""
    options = list(options)
    arrays = {"score": score_arrays, "mask": mask_arrays}
    for x in taken:
        place = OPTIONS.index(x.option)
        options[place] = arrays[x.of][x.array].data.ptr + x.start
    return options


# id of a function's code -> (a snapshot of it, what `_of_one` said then).
_known: dict[int, tuple[Any, tuple[Any, bytes]]] = {}
_MOST_KNOWN = 256


def _of_one(q, function, arrays, accum, has_softcap, first):
    """`of_call` of a score, or of a mask, which has None for `has_softcap`."""
    if function is None:
        if arrays is not None:
            raise TypeError
        return (None,), b""
    facts = [accum, has_softcap, first]
    if arrays:
        facts.append(q.data.device_id)
        for name, x in arrays.items():
            data = x.data
            facts += name, x.dtype, x.shape, x.strides, data.ptr, data.device_id
    if type(function) is not types.FunctionType:  # a partial
        return _looked_up(q, function, arrays, accum, has_softcap, first)
    place = id(function.__code__)
    if known := _known.get(place):
        snapshot, found = known
        if snapshot.still_holds(function, facts):
            return found
    from cupyflash._expr.closures import Snapshot

    snapshot = Snapshot(function, facts)
    found = _looked_up(q, function, arrays, accum, has_softcap, first)
    if snapshot.still_holds(function, facts):  # no thread has changed it meanwhile
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[place] = snapshot, found
    return found


def _looked_up(q, function, arrays, accum, has_softcap, first):
    is_mask = has_softcap is None
    expression, values = _functions.language().lookup(function, arrays, is_mask)
    if not has_softcap and expression.option is not None:
        option = _functions.as_option(expression, values)
        if option is not None:
            return (option,), b""
    for x in (arrays or {}).values():
        # A CuPy array on q's device, in native byte order
        if x.data.device_id != q.data.device_id or x.dtype.byteorder not in "=|":
            raise ValueError
    packer = expression.packer
    small = not packer.integers or _functions.are_small(expression, values)
    key = expression.key, small
    if (option := expression.array_option) is not None:
        x = arrays[option.array]  # of which the plan of an option depends on this
        key += x.dtype, x.shape, x.strides, x.data.ptr % 16, first
    elif expression.sum_of_diagonals is not None:
        key += (first,)  # which is where a table starts
    return key, packer(arrays, values, accum)


def overlap(out, *named) -> bool:
    """Whether the memory of `out` overlaps that of an array of a function."""
    first, end = (out.data.ptr + x for x in strides.address_range(out))
    for arrays in named:
        for array in (arrays or {}).values():
            low, high = (array.data.ptr + x for x in strides.address_range(array))
            if low < end and first < high:
                return True
    return False
