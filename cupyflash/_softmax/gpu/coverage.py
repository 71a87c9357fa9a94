"""What can be compiled for the softmax family."""

import functools
import itertools
from collections.abc import Iterable

import numpy as np

from cupyflash._core import arrays
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import Variant
from cupyflash._softmax.gpu import transpose
from cupyflash._softmax.gpu.config import BACKWARD, FORWARD
from cupyflash._softmax.gpu.registry import KERNELS
from cupyflash._softmax.problem import SoftmaxProblem, compute_dtype


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """(spec, variant) pairs that `device` may compile: all of them, or a sample."""
    found: dict[tuple[str, Variant], None] = {}
    problems_of = _everything if everything else _representative
    for spec in KERNELS:
        for problem in problems_of(spec):
            for config in spec.configs(problem, device):
                found[spec.name, config.variant] = None
    return [*found, *transpose.compile_list()]


def _problem(function, layout, dtypes, scale=1.0, method="auto"):
    """A call whose arrays lie as `layout` says."""
    used = [d for name, d in dtypes.items() if d and name != "where"]
    return SoftmaxProblem(
        function,
        backend="cupy",
        shape=(layout.num_rows, layout.row_length),
        axes=(1,),
        dtypes=dtypes,
        compute_dtype=compute_dtype(*used),
        scale=scale,
        method=method,
        layout=layout,
    )


@functools.cache
def _natural(*names):
    """The result type of NumPy's promotion, with bool and integers as float64."""
    names = {name if name in arrays.FLOATS else "float64" for name in names}
    if len(names) == 1:
        return names.pop()
    return np.result_type(*(names - {"bfloat16"}), np.float32).name


def _problems(spec, layout, x, out, where, scaled, function):
    """One choice of types and switches; `out` is the type of a second input if any."""
    dtypes = {"x": x, "where": where and "bool"}
    if "logsumexp" in spec.functions:
        for b in (None, out):
            result = _natural(x) if b is None else _natural(x, b)
            yield _problem(function, layout, dtypes | {"b": b, "out": result})
    elif spec.functions == BACKWARD:
        dtypes |= {"dy": out, "out": _natural(x, out), "where": None}
        yield _problem(function, layout, dtypes)
    else:
        scale, method = (
            2.0 if scaled else 1.0,
            spec.methods[-1] if spec.methods else "auto",
        )
        yield _problem(function, layout, dtypes | {"out": out}, scale, method)


def _everything(spec) -> Iterable[SoftmaxProblem]:
    """All types and switches, on up to two axes of each kind."""
    seconds = arrays.FLOATS if spec.functions == FORWARD else tuple(CUDA_TYPES)
    scales = (False, True) if spec.functions == FORWARD else (False,)
    masks = (False,) if spec.functions == BACKWARD else (False, True)
    for x, second in itertools.product(CUDA_TYPES, seconds):
        # Many problems share a layout, which caches its properties.
        layouts = [
            layout.spread(*axes)
            for layout in spec.shapes(x, second)
            for axes in ((1, 1), (2, 1), (1, 2), (2, 2))
        ]
        for where, scaled, function in itertools.product(masks, scales, spec.functions):
            for layout in layouts:
                yield from _problems(spec, layout, x, second, where, scaled, function)


def _representative(spec) -> Iterable[SoftmaxProblem]:
    """Each type, switch, axis count and step of the ladder once, not all together."""
    function, other = spec.functions[0], spec.functions[-1]
    for x in CUDA_TYPES:
        # All kernels convert in the same way: one of them covers every type.
        if spec.fast or x in (*arrays.FLOATS, "int8"):
            layout = _closest(spec.shapes(x, _natural(x)), 1000)
            yield from _problems(spec, layout, x, _natural(x), False, False, other)
    for layout in list(spec.shapes("float32", "float32"))[:: 1 if spec.fast else 2]:
        yield from _problems(spec, layout, "float32", "float32", False, False, function)
    # All switches at once, with the types that take the most registers of each kind.
    where, scaled = (
        spec.functions != BACKWARD,
        spec.functions == FORWARD,
    )
    for x, out in (("float32",) * 2, ("float64",) * 2, ("float16", "float32")):
        layout = _closest(spec.shapes(x, out), 4096).spread(2, 2)
        yield from _problems(spec, layout, x, out, where, scaled, other)


def _closest(layouts, length):
    """The layout with rows nearest to `length`, seen from above."""
    layouts = list(layouts)
    longer = [layout for layout in layouts if layout.row_length >= length]
    if longer:
        return min(longer, key=lambda layout: layout.row_length)
    return max(layouts, key=lambda layout: layout.row_length)
