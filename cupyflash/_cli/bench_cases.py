"""The benchmark cases of softmax and attention, the calls compared, and their errors.

The command line and the scripts in benchmarks/ share this; timing is in _measure. A
result is checked before it is timed.
"""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import scipy.special

from cupyflash._attention.api import attention
from cupyflash._cli import console
from cupyflash._cli import measure as _measure
from cupyflash._core import arrays
from cupyflash._reference import forward as reference
from cupyflash._softmax.api import softmax

METHODS = arrays.METHODS[1:]  # all but "auto"

Calls = dict[str, Callable[[], Any]]

# A larger error than this is a bug, not rounding; such a call is not timed. naive is
# exempt: its overflow and rounding are what the comparison is to show.
_WRONG = {"float64": 1e-11, "float32": 5e-3, "float16": 3e-2, "bfloat16": 8e-2}

# Rows of the result that are checked against a float64 reference.
_CHECKED_ROWS = 16


@dataclass(frozen=True)
class SoftmaxCase:
    """Softmax over the last axis, or the first, of a matrix."""

    num_rows: int
    row_length: int
    dtype: str
    axis: int = -1

    @property
    def work(self) -> float:
        """Bytes of one read and one write of the matrix."""
        return 2.0 * self.num_rows * self.row_length * _itemsize(self.dtype)

    @property
    def label(self) -> str:
        shape = (self.num_rows, self.row_length)
        if self.axis == 0:
            shape = shape[::-1]
        axis = ", axis=0" if self.axis == 0 else ""
        return f"{shape[0]} x {shape[1]} {self.dtype}{axis}"


@dataclass(frozen=True)
class AttentionCase:
    """Attention of a batch of heads."""

    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    causal: bool = False

    @property
    def work(self) -> float:
        """Floating-point operations of both matrix products; half if causal."""
        pairs = self.seqlen_q * self.seqlen_k * (0.5 if self.causal else 1.0)
        return 4.0 * self.batch * self.num_heads * pairs * self.head_dim

    @property
    def label(self) -> str:
        heads = f"{self.num_heads}" + (
            f"/{self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        )
        return (
            f"{self.batch} x {heads} heads, {self.seqlen_q} x {self.seqlen_k}, "
            f"D={self.head_dim} {self.dtype}{' causal' if self.causal else ''}"
        )


def _itemsize(dtype):
    return arrays.to_dtype(dtype).itemsize


def tiny(dtype):
    """The smallest normal number."""
    return 2.0**-126 if dtype == "bfloat16" else float(np.finfo(dtype).tiny)


def random(xp, shape, dtype, seed):
    """Normal random numbers, generated on the device where they are used."""
    if xp is np:
        x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    else:
        x = xp.random.default_rng(seed).standard_normal(shape, dtype=xp.float32)
    return x.astype(arrays.to_dtype(dtype))


def softmax_inputs(xp, case: SoftmaxCase):
    """The matrix of a case."""
    shape = (case.num_rows, case.row_length)
    return random(xp, shape if case.axis == -1 else shape[::-1], case.dtype, 1)


def attention_inputs(xp, case: AttentionCase):
    """q, k and v of a case."""
    q_shape = (case.batch, case.num_heads, case.seqlen_q, case.head_dim)
    kv_shape = (case.batch, case.num_kv_heads, case.seqlen_k, case.head_dim)
    return tuple(
        random(xp, shape, case.dtype, seed)
        for seed, shape in enumerate((q_shape, kv_shape, kv_shape))
    )


def softmax_calls(xp, case: SoftmaxCase, x, methods=METHODS) -> Calls:
    """Our methods, and the softmax of the library that owns the array."""
    bind = functools.partial
    calls: Calls = {m: bind(softmax, x, axis=case.axis, method=m) for m in methods}
    if xp is np or case.dtype != "bfloat16":
        name = "scipy" if xp is np else "cupyx"
        calls[name] = bind(library_softmax(xp), x, axis=case.axis)
    return calls


def attention_calls(xp, case: AttentionCase, q, k, v, methods=METHODS) -> Calls:
    """Our methods, and the unfused product, softmax and product."""
    bind = functools.partial
    calls: Calls = {
        m: bind(attention, q, k, v, causal=case.causal, method=m) for m in methods
    }
    name = "numpy + scipy" if xp is np else "cupy + cupyx"
    if case.dtype != "bfloat16":
        calls[name] = bind(_unfused, xp, case, q, k, v)
    return calls


def library_softmax(xp):
    """The softmax of SciPy, or that of CuPy."""
    if xp is np:
        return scipy.special.softmax
    import cupyx.scipy.special

    return cupyx.scipy.special.softmax


def _unfused(xp, case, q, k, v):
    """Attention without a fused kernel: matmul, softmax, matmul."""
    group = case.num_heads // case.num_kv_heads
    if group > 1:
        k, v = (xp.repeat(x, group, axis=1) for x in (k, v))
    s = xp.matmul(q, k.swapaxes(-1, -2)) * q.dtype.type(case.head_dim**-0.5)
    if case.causal:
        visible = xp.tri(
            case.seqlen_q, case.seqlen_k, case.seqlen_k - case.seqlen_q, dtype=bool
        )
        s = xp.where(visible, s, s.dtype.type(-np.inf))
    return xp.matmul(library_softmax(xp)(s, axis=-1), v)


def softmax_error(case: SoftmaxCase, x, y) -> float:
    """Largest relative error over the first rows."""
    first = slice(_CHECKED_ROWS)
    rows = (slice(None), first) if case.axis == 0 else (first, slice(None))
    exact = reference.softmax(x[rows], axis=case.axis)
    error = np.abs(reference.to_host(y[rows]) - exact)
    # Subnormal results have no relative precision.
    return float((error / np.maximum(exact, 2 * tiny(case.dtype))).max())


def attention_error(case: AttentionCase, q, k, v, out, **options) -> float:
    """Largest error of the last rows of one head, relative to the largest value."""
    rows = slice(-_CHECKED_ROWS, None)
    start = max(0, case.seqlen_q - _CHECKED_ROWS)
    exact = reference.attention(
        q[-1, -1, rows],
        k[-1, -1],
        v[-1, -1],
        causal=case.causal,
        query_offset=case.seqlen_k - case.seqlen_q + start,
        **options,
    )
    error = np.abs(reference.to_host(out[-1, -1, rows]) - exact)
    return float(error.max() / np.abs(exact).max())


def measure(
    case: Any,
    calls: Calls,
    error_of: Callable[[Any], float],
    *,
    on_gpu: bool,
    turns: int = 5,
    unchecked: Calls | None = None,
) -> list[dict[str, Any]]:
    """Check each call, time those that are right, and return a row for each.

    `rate` is work per second: bytes for softmax, floating-point operations for
    attention. Calls in `unchecked` compute something else; they are timed only.
    """
    calls = calls | (unchecked or {})
    rows = {}
    for name, call in calls.items():
        row = {"case": case.label, **asdict(case), "provider": name}
        rows[name] = row
        if unchecked and name in unchecked:
            continue
        try:
            row["error"] = error_of(call())
        except Exception as error:  # another library may not support the case
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if name != "naive" and not row["error"] <= _WRONG[case.dtype]:
            row["failed"] = f"error {row['error']:.2e}"
    right = {name: calls[name] for name in calls if "failed" not in rows[name]}
    for name, timing in _measure.interleaved(right, on_gpu=on_gpu, turns=turns).items():
        rows[name] |= asdict(timing) | {"rate": case.work / timing.seconds}
    for row in rows.values():  # JSON has no NaN
        if not np.isfinite(row.get("error", 0.0)):
            row["error"] = None
    return list(rows.values())


def report(rows: list[dict[str, Any]], unit: str, per_unit: float) -> None:
    """Print a table: a line for each case, a column for each call, rates in `unit`."""
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    cases: dict[str, dict[str, str]] = {}
    for row in rows:
        cell = f"{row['rate'] / per_unit:.1f}" if "rate" in row else "failed"
        cases.setdefault(row["case"], {})[row["provider"]] = cell
    console.table(
        (unit, *providers),
        [
            (case, *(cells.get(provider, "-") for provider in providers))
            for case, cells in cases.items()
        ],
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['case']}, {row['provider']}: {row['failed']}")
