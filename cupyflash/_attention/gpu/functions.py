"""Score and mask functions of a call on a GPU: their part of plans and launches."""

from typing import Any, NamedTuple

from cupyflash._attention import functions as _functions
from cupyflash._attention.gpu.config import FUNCTIONS
from cupyflash._core import strides


class WithFunctions(NamedTuple):
    """params_t of a call with functions, whose arguments are at its end."""

    params: bytes

    def bind(self, place, device_id):
        """See Argument of launches."""
        at = place(FUNCTIONS)
        return lambda values: self.params + values[at]


def with_functions(params: bytes, problem) -> Any:
    """params_t as an argument of launches."""
    return WithFunctions(params) if problem.has_functions else params


def without_functions(params: Any) -> bytes:
    """params_t for kernels other than the main one, with functions or without."""
    return params.params if isinstance(params, WithFunctions) else params


def packed(problem, functions) -> bytes:
    """functions_t of attention/score/functions.cuh for checked operands."""
    return b"".join(
        function.expression.packer(
            function.arrays, function.values, problem.compute_dtype
        )
        for function in functions or ()
        if function is not None
    )


def of_call(q, score, score_arrays, mask, mask_arrays, softcap) -> tuple[Any, bytes]:
    """(key of a plan, functions_t) of a call whose functions are known.

    Raises TypeError, ValueError or AttributeError if the arguments need the checks
    first.
    """
    key: tuple[Any, ...] = ()
    parts = []
    accum = "float64" if q.dtype == "float64" else "float32"
    for function, arrays, is_mask in (
        (score, score_arrays, False),
        (mask, mask_arrays, True),
    ):
        if function is None:
            if arrays is not None:
                raise TypeError
            key += (None,)
            continue
        expression, values = _functions.language().lookup(function, arrays, is_mask)
        if expression.option is not None and (is_mask or not softcap):
            option = _functions.as_option(expression, values)
            if option is not None:
                key += (option,)
                continue
        packer = expression.packer
        if arrays:
            for array in arrays.values():
                # A CuPy array on q's device, in native byte order
                if (
                    array.data.device_id != q.data.device_id
                    or array.dtype.byteorder not in "=|"
                ):
                    raise ValueError
        small = not packer.integers or _functions.are_small(expression, values)
        key += (expression.key, small)
        parts.append(packer(arrays, values, accum))
    return key, b"".join(parts)


def overlap(out, *named) -> bool:
    """Whether the memory of `out` overlaps that of an array of a function."""
    first, end = (out.data.ptr + x for x in strides.address_range(out))
    for arrays in named:
        for array in (arrays or {}).values():
            low, high = (array.data.ptr + x for x in strides.address_range(array))
            if low < end and first < high:
                return True
    return False
