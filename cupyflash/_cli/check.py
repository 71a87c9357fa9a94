"""python -m cupyflash check: are the results here as accurate as documented?"""

import importlib
import importlib.util
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from cupyflash import _explain
from cupyflash._attention.api import attention, attention_vjp
from cupyflash._cli import bench_cases, console
from cupyflash._cli import measure as _measure
from cupyflash._core import arrays as _arrays
from cupyflash._core import extras
from cupyflash._reference import backward as reference_vjp
from cupyflash._reference import exponentials
from cupyflash._reference import forward as reference
from cupyflash._softmax import api as softmax_api

EXAMPLES = """
examples:
  python -m cupyflash check
  python -m cupyflash check --backend numpy
  python -m cupyflash check --exhaustive

Each function, method and dtype is compared with a more precise computation on the host.
On a GPU, each kernel of the tables is compared in calls that choose it. Errors are
relative to the exact result (for attention and gradients, to its largest entry), or in
units in the last place (ulp). The first run on a machine takes up to a minute, nearly
all of it for compiling.
The exit code is 1 when an error is larger than the documentation allows.
"""

# Largest error allowed. softmax: relative. log_softmax: relative to the larger of the
# result and the row's largest score. attention and gradients: max |out - exact| / max
# |exact|. logsumexp: units in the last place (relative for 16-bit dtypes).
_DTYPES = "float64", "float32", "float16", "bfloat16"
ALLOWED = {
    function: dict(zip(_DTYPES, bounds, strict=True))
    for function, bounds in {
        "softmax": (1e-15, 4e-7, 5e-4, 3.95e-3),
        "log_softmax": (1e-15, 4e-7, 5e-4, 3.95e-3),
        "logsumexp": (2.0, 1.5, 5e-4, 3.95e-3),
        "attention": (5e-15, 2e-6, 1e-3, 8e-3),
        "softmax_vjp": (1e-13, 1e-5, 3e-3, 2.4e-2),
        "attention_vjp": (1e-13, 1e-5, 3e-3, 2.4e-2),
    }.items()
}

_METHODS = bench_cases.METHODS
_OF_METHODS = ("softmax", "attention")  # functions with a `method` argument

# Shapes and axes of softmax and its relatives; each shape is computed by another
# kernel.
_SOFTMAX_SHAPES = {
    "": ((64, 1000), -1),
    "short rows": ((500, 37), -1),
    "shortest rows": ((4000, 4), -1),
    "rows of one element": ((4000, 1), -1),
    "short whole rows": ((500, 32), -1),
    "columns": ((64, 600), 0),
    "many columns": ((2, 300, 32_768), 1),
    "long columns": ((40_000, 32), 0),
    "many long columns": ((140, 70_000, 4), 1),
    "two long columns": ((3_000_000, 2), 0),
    "long rows": ((2, 100_000), -1),
    "longest rows": ((1, 1_100_000), -1),
    "several longest rows": ((2, 1_100_000), -1),
    "a row that no card holds": ((1, 4_500_000), -1),
    "a row beyond the cache": ((1, 9_000_000), -1),
    "strided": ((64, 1000), -1),  # every second element
    "two axes": ((16, 30, 64), (0, 2)),
    "turned": ((300, 400), -1),  # the result is contiguous along the other axis
}
# Queries, keys, and the head dimensions of q and v, with some options or none.
_ATTENTION_SHAPES = {
    "": (200, 333, 64, 48),
    "plain": (200, 333, 64, 48),
    "few queries": (40, 333, 64, 48),
    "fewer queries": (20, 333, 64, 48),
    "few rows": (40, 60, 64, 48),
    "several queries": (6, 333, 64, 48),
    "few keys": (300, 13, 64, 48),
    "short entries": (40, 33, 64, 48),  # many of them
    "tiny entries": (4, 4, 8, 8),
    "one query": (1, 100, 64, 64),  # of many entries
    "wide heads": (130, 200, 200, 136),
    "wider heads": (130, 600, 576, 512),
    "odd heads": (130, 200, 66, 50),  # rows are not 16-byte aligned, but words
    "copied heads": (300, 200, 65, 49),  # copied to aligned rows first, on Hopper
}

# Kinds of call that have kernels of their own on a GPU.
_KINDS = {
    "softmax": (
        "short rows", "short whole rows", "columns", "long columns",
        "many long columns", "long rows", "longest rows", "several longest rows",
        "a row beyond the cache", "strided", "two axes", "turned",
    ),
    "log_softmax": ("short rows", "short whole rows"),
    "logsumexp": (
        "shortest rows", "rows of one element", "columns", "many columns", "long rows",
        "strided",
    ),
    "softmax_vjp": (
        "short rows", "columns", "long columns", "two long columns", "long rows",
        "longest rows", "a row that no card holds", "strided", "two axes",
    ),
    "attention": (
        "plain", "few queries", "fewer queries", "few keys", "short entries",
        "tiny entries", "one query", "wider heads",
    ),
    "attention_vjp": (
        "plain", "few queries", "few rows", "several queries", "few keys",
        "short entries", "tiny entries", "one query", "wide heads", "odd heads",
        "copied heads",
    ),
}  # fmt: skip

# (batch, heads of k) where there are more heads than a GPU has multiprocessors: kernels
# of short entries take no fewer.
_ENTRIES_OF_KIND = {
    "several queries": (2, 4),
    "short entries": (128, 2),
    "tiny entries": (512, 4),
    "one query": (128, 4),
}

_MOST_PROCESSES = 8


@dataclass(frozen=True)
class Case:
    """One line of the report."""

    backend: str
    function: str
    method: str
    dtype: str
    kind: str = ""  # of shapes


@dataclass(frozen=True)
class Verdict:
    """The result of one case."""

    row: str  # of the kernel table, or the method of the NumPy back end
    error: float
    allowed: float
    unit: str
    problem: str = ""  # the exception, if one was raised

    @property
    def is_good(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.allowed


def add_arguments(parser):
    """Which back end, functions and dtypes to check."""
    parser.add_argument(
        "--backend",
        choices=("numpy", "cupy"),
        action="append",
        help="check only this back end (default: all that this machine has)",
    )
    parser.add_argument(
        "--exhaustive",
        action="store_true",
        help="check the exponentials of the kernels instead, for all 2^32 float32 "
        "arguments (seconds; needs a GPU)",
    )


def run(args):
    """Print a verdict for each case; returns 1 if one is bad."""
    has_gpu = _measure.cuda_device_count() > 0
    if args.exhaustive:
        return _run_exhaustive(has_gpu)
    available = ["numpy", "cupy"] if has_gpu else ["numpy"]
    backends = list(dict.fromkeys(args.backend or available))
    if "cupy" in backends and not has_gpu:
        console.complain(
            "no CUDA device that CuPy can use; see python -m cupyflash info"
        )
        return 1
    has_bfloat16 = importlib.util.find_spec("ml_dtypes") is not None
    dtypes = [d for d in _arrays.FLOATS if d != "bfloat16" or has_bfloat16]
    cases = [case for backend in backends for case in _cases(backend, dtypes)]
    found = dict(console.progress(_verdicts(cases), "checking", len(cases)))
    rows = [(case, found[case]) for case in cases]
    for backend in backends:
        _report(backend, [row for row in rows if row[0].backend == backend])
    for case, verdict in rows:
        if verdict.problem:
            print(f"{case.function} {case.method} {case.dtype}: {verdict.problem}")
    failures = sum(not verdict.is_good for _, verdict in rows)
    if not has_bfloat16:
        print(f"bfloat16 is not checked: {extras.command('bf16')}")
    if not has_gpu:
        print("no CUDA device: only the NumPy back end is checked")
    print(f"{len(rows) - failures} passed, {failures} failed")
    return int(failures > 0)


def _cases(backend, dtypes):
    """Each function, method and dtype; on a GPU also each kind of its own kernels."""
    cases = [
        Case(backend, function, method, dtype)
        for function in ALLOWED
        for method in (_METHODS if function in _OF_METHODS else ("auto",))
        for dtype in dtypes
    ]
    if backend == "cupy":
        cases += [
            Case(backend, function, "auto", dtype, kind)
            for function, kinds in _KINDS.items()
            for kind in kinds
            for dtype in dtypes
            if dtype in _DTYPES_OF_KIND.get(kind, _dtypes_of(function))
        ]
    return cases


# Checked in one dtype or two: each takes seconds to compile.
_DTYPES_OF_KIND = dict.fromkeys(
    ("wider heads", "odd heads", "copied heads"), ("bfloat16",)
) | {
    "wide heads": ("bfloat16", "float64"),
    "fewer queries": ("float32",),
    "few rows": ("float32",),
    "several queries": ("bfloat16", "float64"),
    "few keys": ("float32", "float64"),
}


def _dtypes_of(function):
    """The dtypes to check: softmax kernels treat dtypes of equal width alike."""
    return _arrays.FLOATS if function.startswith("attention") else _DTYPES_OF_SOFTMAX


_DTYPES_OF_SOFTMAX = ("float32", "bfloat16")


def _verdicts(cases: Iterable[Case]) -> Iterator[tuple[Case, Verdict]]:
    """Verdicts as they come; on a GPU from several processes, since each compiles."""
    on_gpu = [case for case in cases if case.backend == "cupy"]
    for case in cases:
        if case.backend != "cupy":
            yield case, measure(case)
    if not on_gpu:
        return
    # The cases that take longest to compile start first.
    on_gpu.sort(key=lambda case: not case.function.startswith("attention"))
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        waiting = {pool.submit(measure, case): case for case in on_gpu}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def _run_exhaustive(has_gpu):
    """Check the exponentials of the kernels at every float; returns 1 if one is off."""
    if not has_gpu:
        console.complain(
            "--exhaustive checks the kernels and needs a GPU: no CUDA device that CuPy "
            "can use; see python -m cupyflash info"
        )
        return 1
    findings = exponentials.measure()
    console.table(
        ("exponential", "dtype", "arguments", "largest ulp", "at", "allowed", ""),
        [
            (
                f.function,
                f.dtype,
                f.arguments,
                f"{f.ulps:.3f}",
                f"{f.at:.9g}" if f.dtype == "float32" else f"{f.at:.17g}",
                f"{f.allowed:g}",
                "ok" if f.is_good else "FAILED",
            )
            for f in findings
        ],
    )
    failures = sum(not f.is_good for f in findings)
    print(f"{len(findings) - failures} passed, {failures} failed")
    return int(failures > 0)


def measure(case: Case) -> Verdict:
    """Run a case: the kernel that ran, its error, the allowed error and their unit."""
    rng = np.random.default_rng(20)
    xp = importlib.import_module(case.backend)
    measured = {
        "attention": _attention_error,
        "attention_vjp": _attention_vjp_error,
    }.get(case.function, _softmax_error)
    allowed, unit = ALLOWED[case.function][case.dtype], ""
    if case.function == "logsumexp" and allowed >= 1:
        unit = "ulp"
    try:
        with np.errstate(all="ignore"):
            row, found, row_length = measured(case, xp, rng)
    except Exception as error:  # reported as a failed case
        text = str(error).strip().splitlines()
        problem = f"{type(error).__name__}: {text[0] if text else ''}"
        return Verdict("", math.nan, allowed, unit, problem)
    if case.method == "naive":
        # Its sums are kept in the input dtype, so rounding errors grow like a random
        # walk.
        allowed = max(allowed, row_length**0.5 * _eps(case.dtype))
    return Verdict(row, found, allowed, unit)


def _normal(rng, shape, dtype, size=1.0):
    """Random numbers, as an array of `dtype` on the host."""
    return (rng.standard_normal(shape) * size).astype(_arrays.to_dtype(dtype))


def _eps(dtype):
    return 2.0**-7 if dtype == "bfloat16" else float(np.finfo(dtype).eps)


def _wide(x):
    """`x` in a dtype wider than float64 where the platform has one."""
    return x.astype(np.float64).astype(np.longdouble)


def _call(function, *args, **options):
    """(name of the kernel row, result) of a call."""
    return _explain.explain(function, *args, **options).kernel, function(
        *args, **options
    )


def _on(xp, x, case):
    """`x` as an array of the back end, laid out in memory as the case asks."""
    if case.kind == "strided":
        return xp.asarray(np.repeat(x, 2, axis=-1))[..., ::2]
    return xp.asarray(x)


def _softmax_error(case, xp, rng):
    """Of softmax, log_softmax, logsumexp, softmax_vjp."""
    shape, axis = _SOFTMAX_SHAPES[case.kind]
    # Rows with a wide range of scores are where a careless exponential loses digits.
    size = {"logsumexp": 5.0, "softmax_vjp": 2.0}.get(case.function, 15.0)
    x = _normal(rng, shape, case.dtype, 2.0 if case.method == "naive" else size)
    m = _wide(x).max(axis, keepdims=True)
    scores = _wide(x) - m
    e = np.exp(scores)
    total = e.sum(axis, keepdims=True)
    arrays, options = [x], {"axis": axis}
    if case.function == "softmax":
        exact = e / total
        options["method"] = case.method
        if case.kind == "turned":
            options["out"] = xp.empty(shape[::-1], x.dtype).T
        # Subnormals have no relative precision.
        unit = np.where(exact > 2 * bench_cases.tiny(case.dtype), exact, np.inf)
    elif case.function == "log_softmax":
        exact = scores - np.log(total)
        unit = np.maximum(np.abs(exact), np.abs(m))
    elif case.function == "logsumexp":
        exact = (m + np.log(total)).squeeze(axis)
        unit = np.abs(exact)
        if ALLOWED["logsumexp"][case.dtype] >= 1:
            unit = np.spacing(unit.astype(case.dtype)).astype(np.float64)
    else:
        y = (e / total).astype(np.float64).astype(x.dtype)
        dy = _normal(rng, shape, case.dtype)
        arrays = [y, dy]
        inner = (_wide(y) * _wide(dy)).sum(axis, keepdims=True)
        exact = _wide(y) * (_wide(dy) - inner)
        unit = np.abs(exact).max()
    function = getattr(softmax_api, case.function)
    row, found = _call(function, *(_on(xp, x, case) for x in arrays), **options)
    error = np.abs(reference.to_host(found) - exact) / unit
    axes = axis if isinstance(axis, tuple) else (axis,)
    return row, float(error.max()), math.prod(shape[axis] for axis in axes)


def _attention_inputs(case, rng, size):
    """q, k and v on the host, and the other arguments, of a kind of call.

    The default has grouped heads, Dv != D, a causal mask with Lq != Lk and a bias for
    each key.
    """
    seqlen_q, seqlen_k, dim, dim_v = _ATTENTION_SHAPES[case.kind]
    batch, kv_heads = _ENTRIES_OF_KIND.get(case.kind, (2, 2))
    q = _normal(rng, (batch, 4, seqlen_q, dim), case.dtype, size)
    k = _normal(rng, (batch, kv_heads, seqlen_k, dim), case.dtype, size)
    v = _normal(rng, (batch, kv_heads, seqlen_k, dim_v), case.dtype)
    if case.kind:
        return (q, k, v), {}
    bias = _normal(rng, (seqlen_k,), case.dtype, 0.5)
    return (q, k, v), {"bias": bias, "causal": True}


def _attention_error(case, xp, rng):
    size = 0.5 if case.method == "naive" else 1.5
    arrays, options = _attention_inputs(case, rng, size)
    exact = reference.attention(*arrays, **options)
    if "bias" in options:
        options["bias"] = xp.asarray(options["bias"])
    arrays = [xp.asarray(a) for a in arrays]
    row, out = _call(attention, *arrays, **options, method=case.method)
    error = np.abs(reference.to_host(out) - exact)
    return row, float(error.max() / np.abs(exact).max()), arrays[1].shape[2]


def _attention_vjp_error(case, xp, rng):
    """The largest error of dq, dk, dv and dbias for the same problem as attention."""
    arrays, options = _attention_inputs(case, rng, 1.5)
    q, _, v = arrays
    dout = _normal(rng, (*q.shape[:-1], v.shape[-1]), case.dtype)
    exact = reference_vjp.attention_vjp(dout, *arrays, **options)
    if "bias" in options:
        options["bias"] = xp.asarray(options["bias"])
    arrays = [xp.asarray(a) for a in arrays]
    out, lse = attention(*arrays, **options, return_lse=True)
    row, grads = _call(
        attention_vjp, xp.asarray(dout), *arrays, out, lse, **options,
        need_dbias="bias" in options,
    )  # fmt: skip
    errors = [
        float(np.abs(reference.to_host(got) - best).max() / np.abs(best).max())
        for got, best in zip(grads[:4], exact[:4], strict=True)
        if got is not None
    ]
    return row, max(errors), arrays[1].shape[2]


def _report(backend, rows):
    console.heading(backend)
    console.table(
        ("function", "method", "dtype", "kernel", "error", "allowed", ""),
        [
            (
                case.function,
                case.kind or case.method,
                case.dtype,
                verdict.row,
                _size_of_error(verdict.error, verdict.unit),
                _size_of_error(verdict.allowed, verdict.unit),
                "ok" if verdict.is_good else "FAILED",
            )
            for case, verdict in rows
        ],
    )


def _size_of_error(error, unit):
    return f"{error:.2f} {unit}" if unit else f"{error:.2e}"
