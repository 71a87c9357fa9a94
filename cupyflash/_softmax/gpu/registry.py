"""The table of softmax kernels: which takes a problem."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._softmax.gpu import limits, shapes
from cupyflash._softmax.gpu.config import BACKWARD, FORWARD
from cupyflash._softmax.gpu.heuristics.columns import (
    hold_columns,
    share_columns,
    split_columns,
    sum_columns,
)
from cupyflash._softmax.gpu.heuristics.logsumexp import sum_rows
from cupyflash._softmax.gpu.heuristics.long_rows import (
    relay_rows,
    split_rows,
    stream_pairs,
    trail_pairs,
    trail_rows,
)
from cupyflash._softmax.gpu.heuristics.rows import hold_pairs, hold_rows, walk_rows
from cupyflash._softmax.gpu.heuristics.short_rows import (
    short_rows,
    single_sums,
    span_pairs,
    span_rows,
    span_sums,
)
from cupyflash._softmax.memory_layout import Layout

# The file of each kernel, below cuda_src/.
_SOURCES = {
    "naive": "softmax/ladder/naive.cu",
    "safe": "softmax/ladder/safe.cu",
    "online": "softmax/ladder/online.cu",
    "tiled": "softmax/ladder/tiled.cu",
    "short": "softmax/rows/short.cu",
    "span": "softmax/rows/packed.cu",
    "relay": "softmax/rows/relay.cu",
    "trail": "softmax/rows/cached_two_pass.cu",
    "split": "softmax/rows/two_pass.cu",
    "columns": "softmax/columns/on_chip.cu",
    "split_columns": "softmax/columns/split_two_pass.cu",
    "logsumexp": "softmax/logsumexp/strided.cu",
    "logsumexp_rows": "softmax/logsumexp/rows.cu",
    "logsumexp_single": "softmax/logsumexp/single.cu",
    "logsumexp_span": "softmax/logsumexp/packed_rows.cu",
    "logsumexp_columns": "softmax/logsumexp/columns.cu",
    "logsumexp_shares": "softmax/logsumexp/columns_balanced.cu",
    "vjp": "softmax/backward/strided.cu",
    "vjp_span": "softmax/backward/packed.cu",
    "vjp_tiled": "softmax/backward/on_chip.cu",
    "vjp_stream": "softmax/backward/ring.cu",
    "vjp_trail": "softmax/backward/cached_two_pass.cu",
    "vjp_split": "softmax/backward/two_pass.cu",
    "vjp_columns": "softmax/backward/columns.cu",
}


@dataclass(frozen=True)
class SoftmaxKernel:
    """One kernel: what it supports and how it is launched.

    The name is also, after ``softmax_``, the entry point of its source.
    """

    name: str
    functions: tuple[str, ...]
    # The launches for a problem on a device, or why the kernel does not support it.
    heuristic: Callable[[Any, Device], tuple[LaunchConfig, ...] | str]
    # Made-up layouts that reach every step of its thresholds, for these dtypes.
    shapes: Callable[..., Iterable[Layout]]
    methods: tuple[str, ...] = ("auto",)
    fast: bool = False  # must not spill registers

    @property
    def source(self) -> str:
        return _SOURCES[self.name]

    def unsupported_reason(self, problem: Any, device: Device) -> str | None:
        """Why this kernel does not support `problem` on `device`, or None."""
        found = self._found(problem, device)
        return found if isinstance(found, str) else None

    def configs(self, problem: Any, device: Device) -> tuple[LaunchConfig, ...]:
        """The launches, in order; none if the problem is not supported."""
        found = self._found(problem, device)
        return () if isinstance(found, str) else self._named(problem, found)

    def _found(self, problem, device):
        """The launches of the heuristic, or why there are none."""
        if problem.function not in self.functions:
            return f"{problem.function} is not one of {', '.join(self.functions)}"
        if problem.is_complex:
            return "complex numbers have no kernel; CuPy computes them"
        for name in problem.dtypes.values():
            if name and (reason := kernel.refuse_old_device(name, device)):
                return reason
        found = self.heuristic(problem, device)
        if isinstance(found, str):
            return found
        return limits.unsupported_reason(self.name, problem, found) or found

    def _named(self, problem, configs):
        """The launches with the source, the entry and the types."""
        defines = (
            *_switches(problem),
            ("OUTER_AXES", str(len(problem.layout.outer_size))),
            ("REDUCED_AXES", str(len(problem.layout.reduced_size))),
        )
        named = []
        for config in configs:
            entry = ("softmax", self.name, config.variant.entry)
            variant = replace(
                config.variant,
                source=self.source,
                entry="_".join(filter(None, entry)),
                defines=(*defines, *config.variant.defines),
            )
            named.append(replace(config, variant=variant))
        return tuple(named)


def _switches(problem):
    """Types and options as -D, by the parameter list of the function."""
    dtypes = problem.dtypes
    types = {"OUT_T": dtypes["out"], "ACC_T": problem.compute_dtype}
    flags = {}
    if problem.function in FORWARD:
        types |= {"X_T": dtypes["x"]}
        flags["HAS_WHERE"] = bool(dtypes["where"])
        flags["SCALED"] = problem.scale != 1
    elif problem.function in BACKWARD:
        types |= {"Y_T": dtypes["x"], "DY_T": dtypes["dy"]}
    else:
        types |= {"A_T": dtypes["x"], "B_T": dtypes["b"] or dtypes["x"]}
        flags["HAS_WHERE"] = bool(dtypes["where"])
        flags["HAS_B"] = dtypes["b"] is not None
    if problem.function != "logsumexp":
        flags["LOG"] = problem.function.startswith("log_")
    return (
        *((name, CUDA_TYPES[dtype]) for name, dtype in sorted(types.items())),
        *((name, str(int(flag))) for name, flag in sorted(flags.items())),
    )


_ANY, _TILED = ("auto", "tiled", "online"), ("auto", "tiled")
_SUM = ("logsumexp",)

KERNELS = (  # best first
    SoftmaxKernel("columns", FORWARD, hold_columns, shapes.COLUMNS, _TILED),
    SoftmaxKernel("split_columns", FORWARD, split_columns, shapes.LONG_COLUMNS, _TILED),
    SoftmaxKernel("vjp_columns", BACKWARD, hold_columns, shapes.COLUMNS),
    SoftmaxKernel("logsumexp_shares", _SUM, share_columns, shapes.SHARED_COLUMNS),
    SoftmaxKernel("logsumexp_columns", _SUM, sum_columns, shapes.COLUMNS),
    # The longest rows that a cluster could hold, and beyond: read once if all
    # multiprocessors together hold some of them.
    SoftmaxKernel("relay", FORWARD, relay_rows, shapes.RELAYED, _TILED, fast=True),
    SoftmaxKernel("short", FORWARD, short_rows, shapes.SHORT_ROWS, _TILED, fast=True),
    SoftmaxKernel("span", FORWARD, span_rows, shapes.SPANNED, _TILED, fast=True),
    SoftmaxKernel("tiled", FORWARD, hold_rows, shapes.ON_CHIP_ROWS, _TILED, fast=True),
    SoftmaxKernel("vjp_span", BACKWARD, span_pairs, shapes.SPANNED_PAIRS, fast=True),
    SoftmaxKernel("vjp_tiled", BACKWARD, hold_pairs, shapes.ON_CHIP_PAIRS, fast=True),
    # Few rows, and rows that would be read twice entirely, go through rings; otherwise
    # the second read hits L2, if rows fit.
    SoftmaxKernel("vjp_stream", BACKWARD, stream_pairs, shapes.STREAMED, fast=True),
    SoftmaxKernel("vjp_trail", BACKWARD, trail_pairs, shapes.STREAMED, fast=True),
    # Rows that would be read twice: the second read hits L2, if rows fit.
    SoftmaxKernel("trail", FORWARD, trail_rows, shapes.LONG_ROWS, _TILED, fast=True),
    SoftmaxKernel("split", FORWARD, split_rows, shapes.LONG_ROWS, _TILED),
    SoftmaxKernel("vjp_split", BACKWARD, split_rows, shapes.LONG_ROWS),
    SoftmaxKernel("online", FORWARD, walk_rows, shapes.WALKED, _ANY),
    SoftmaxKernel("safe", FORWARD, walk_rows, shapes.WALKED, ("safe",)),
    SoftmaxKernel("naive", FORWARD, walk_rows, shapes.WALKED, ("naive",)),
    SoftmaxKernel("logsumexp_single", _SUM, single_sums, shapes.SINGLE, fast=True),
    SoftmaxKernel("logsumexp_span", _SUM, span_sums, shapes.SPANNED_SUMS, fast=True),
    SoftmaxKernel("logsumexp_rows", _SUM, sum_rows, shapes.SUMMED),
    SoftmaxKernel("logsumexp", _SUM, walk_rows, shapes.WALKED),
    SoftmaxKernel("vjp", BACKWARD, walk_rows, shapes.WALKED),
)


def select(problem: Any, device: Device, unfit: Iterable[str] = ()):
    """The kernel spec for a problem, and why those before it refused.

    Specs named in `unfit` are skipped: the device could not hold their launch.
    """
    specs = [
        spec
        for spec in KERNELS
        if problem.function in spec.functions and spec.name not in unfit
    ]
    return kernel.select(specs, problem, device)
