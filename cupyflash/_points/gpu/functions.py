"""Kernels that a caller wrote, as text and numbers for cuda_src/points/function.cuh."""

import functools
from typing import Any

from cupyflash._expr.emit_cuda import emit_cuda
from cupyflash._points import kernels

_NAME = "caller_function"


def of(kernel: kernels.Kernel, is_log: bool) -> tuple[str, bytes]:
    """The text of K or of log K, and the numbers of this call."""
    expression = _expression(kernel.expression, is_log)
    text = _text(expression, kernel.skips_cusp)
    return text, expression.packer({}, kernel.numbers, "float64")


@functools.lru_cache(maxsize=256)
def _expression(expression: Any, is_log: bool) -> Any:
    return kernels.logarithm_of(expression) if is_log else expression


@functools.lru_cache(maxsize=256)
def _text(expression: Any, skips_cusp: bool) -> str:
    """The function, its numbers, and how these become numbers of another type."""
    struct = f"{_NAME}_args"
    copies = "".join(
        f"  to.p{k} = static_cast<decltype(to.p{k})>(from.p{k});\n"
        for k in range(len(expression.numbers))
    )
    return (
        emit_cuda(expression, _NAME, with_derivative=False)
        + f"constexpr bool {_NAME}_skips_cusp = {str(skips_cusp).lower()};\n"
        f"template <typename T>\n"
        f"__device__ __forceinline__ {struct}<T> {_NAME}_args_as(\n"
        f"    const {struct}<double> &from) {{\n"
        f"  {struct}<T> to = {{}};\n{copies}  return to;\n}}\n"
    )
