"""python -m cupyflash check: is what this machine computes as accurate as promised?"""

import importlib
import importlib.util
from dataclasses import dataclass

import numpy as np

from cupyflash import (
    _arrays,
    _console,
    _exponentials,
    _measure,
    _reference,
    _reference_vjp,
    _softmax,
)
from cupyflash._attention import attention
from cupyflash._attention_vjp import attention_vjp

EXAMPLES = """
examples:
  python -m cupyflash check
  python -m cupyflash check --backend numpy
  python -m cupyflash check --exhaustive

Each function, method and dtype is compared with a wider computation on the host. The
exit code is 1 when an error is larger than the documentation allows.
"""

# Largest error allowed: relative for softmax; max |out - exact| / max |exact| for
# attention and its gradients; units in the last place for logsumexp (relative for 16
# bits).
ALLOWED = {
    "softmax": {
        "float64": 1e-15,
        "float32": 4e-7,
        "float16": 5e-4,
        "bfloat16": 3.95e-3,
    },
    "logsumexp": {
        "float64": 2.0,
        "float32": 1.5,
        "float16": 5e-4,
        "bfloat16": 3.95e-3,
    },
    "attention": {
        "float64": 5e-15,
        "float32": 2e-6,
        "float16": 1e-3,
        "bfloat16": 8e-3,
    },
    "attention_vjp": {
        "float64": 1e-13,
        "float32": 1e-5,
        "float16": 3e-3,
        "bfloat16": 2.4e-2,
    },
}

_METHODS = ("naive", "safe", "online", "tiled")
_SOFTMAX_SHAPE = (64, 1000)
_SEQLEN_Q, _SEQLEN_K, _HEAD_DIM, _HEAD_DIM_V = 200, 333, 64, 48


@dataclass(frozen=True)
class Case:
    """One line of the report."""

    backend: str
    function: str
    method: str
    dtype: str


def add_arguments(parser):
    """What to check."""
    parser.add_argument(
        "--backend",
        choices=("numpy", "cupy"),
        action="append",
        help="check this one alone (default: all that this machine has)",
    )
    parser.add_argument(
        "--exhaustive",
        action="store_true",
        help="check the exponentials of the kernels instead, for all 2^32 float32 "
        "arguments (seconds; needs a GPU)",
    )


def run(args):
    """Print a verdict a line; 1 if one is bad."""
    has_gpu = _measure.cuda_device_count() > 0
    if args.exhaustive:
        return _run_exhaustive(has_gpu)
    backends = args.backend or (["numpy", "cupy"] if has_gpu else ["numpy"])
    if "cupy" in backends and not has_gpu:
        print("no CUDA device that CuPy can use; see python -m cupyflash info")
        return 1
    has_bfloat16 = importlib.util.find_spec("ml_dtypes") is not None
    dtypes = [d for d in _arrays.FLOATS if d != "bfloat16" or has_bfloat16]
    cases = [
        Case(backend, function, method, dtype)
        for backend in backends
        for function in ALLOWED
        for method in (_METHODS if function in ("softmax", "attention") else ("auto",))
        for dtype in dtypes
    ]
    rows = []
    for case in _console.progress(cases, "checking"):
        rows.append((case, *measure(case)))
    _report(rows)
    failures = sum(not error <= allowed for _, error, allowed, _ in rows)
    if not has_bfloat16:
        print("bfloat16 is not checked: pip install cupyflash[bf16]")
    if not has_gpu:
        print("no CUDA device: the NumPy back end alone is checked")
    print(f"{len(rows) - failures} passed, {failures} failed")
    return int(failures > 0)


def _run_exhaustive(has_gpu):
    """Every float through the exponentials of the kernels; 1 if one is off."""
    if not has_gpu:
        print(
            "--exhaustive checks the kernels and needs a GPU: no CUDA device that CuPy "
            "can use; see python -m cupyflash info"
        )
        return 1
    findings = _exponentials.measure()
    _console.table(
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


def measure(case: Case) -> tuple[float, float, str]:
    """Error found, error allowed, and their unit."""
    rng = np.random.default_rng(20)
    xp = importlib.import_module(case.backend)
    with np.errstate(all="ignore"):
        found, unit, row_length = {
            "softmax": _softmax_error,
            "logsumexp": _logsumexp_error,
            "attention": _attention_error,
            "attention_vjp": _attention_vjp_error,
        }[case.function](case, xp, rng)
    allowed = ALLOWED[case.function][case.dtype]
    if case.method == "naive":
        # Its sums stay in the dtype of the input, so roundings pile up at random.
        allowed = max(allowed, row_length**0.5 * _eps(case.dtype))
    return found, allowed, unit


def _normal(rng, shape, dtype, size=1.0):
    """Random numbers, as an array of `dtype` on the host."""
    return (rng.standard_normal(shape) * size).astype(_arrays.to_dtype(dtype))


def _eps(dtype):
    return 2.0**-7 if dtype == "bfloat16" else float(np.finfo(dtype).eps)


def _tiny(dtype):
    return 2.0**-126 if dtype == "bfloat16" else float(np.finfo(dtype).tiny)


def _wide(x):
    """Wider than float64 where the platform has it."""
    return x.astype(np.float64).astype(np.longdouble)


def _softmax_error(case, xp, rng):
    # A wide spread of the row is where a careless exponential loses digits.
    size = 2.0 if case.method == "naive" else 15.0
    x = _normal(rng, _SOFTMAX_SHAPE, case.dtype, size)
    e = np.exp(_wide(x) - _wide(x).max(-1, keepdims=True))
    exact = e / e.sum(-1, keepdims=True)
    y = _softmax.softmax(xp.asarray(x), axis=-1, method=case.method)
    error = np.abs(_reference.to_host(y) - exact)
    normal = exact > 2 * _tiny(case.dtype)  # smaller ones have no relative precision
    return float((error[normal] / exact[normal]).max()), "", x.shape[-1]


def _logsumexp_error(case, xp, rng):
    x = _normal(rng, _SOFTMAX_SHAPE, case.dtype, 5.0)
    m = _wide(x).max(-1)
    exact = m + np.log(np.exp(_wide(x) - m[..., None]).sum(-1))
    y = _softmax.logsumexp(xp.asarray(x), axis=-1)
    error = np.abs(_reference.to_host(y) - exact)
    if ALLOWED["logsumexp"][case.dtype] < 1:
        return float((error / np.abs(exact)).max()), "", x.shape[-1]
    unit = np.spacing(np.abs(exact).astype(case.dtype)).astype(np.float64)
    return float((error / unit).max()), "ulp", x.shape[-1]


def _attention_error(case, xp, rng):
    """Grouped heads, a causal mask off the square, a bias a key, Dv other than D."""
    size = 0.5 if case.method == "naive" else 1.5
    q = _normal(rng, (2, 4, _SEQLEN_Q, _HEAD_DIM), case.dtype, size)
    k = _normal(rng, (2, 2, _SEQLEN_K, _HEAD_DIM), case.dtype, size)
    v = _normal(rng, (2, 2, _SEQLEN_K, _HEAD_DIM_V), case.dtype)
    bias = _normal(rng, (_SEQLEN_K,), case.dtype, 0.5)
    exact = _reference.attention(q, k, v, bias=bias, causal=True)
    out = attention(
        *(xp.asarray(a) for a in (q, k, v)),
        bias=xp.asarray(bias),
        causal=True,
        method=case.method,
    )
    error = np.abs(_reference.to_host(out) - exact)
    return float(error.max() / np.abs(exact).max()), "", _SEQLEN_K


def _attention_vjp_error(case, xp, rng):
    """The largest error of dq, dk, dv and dbias, on the problem of attention."""
    q = _normal(rng, (2, 4, _SEQLEN_Q, _HEAD_DIM), case.dtype, 1.5)
    k = _normal(rng, (2, 2, _SEQLEN_K, _HEAD_DIM), case.dtype, 1.5)
    v = _normal(rng, (2, 2, _SEQLEN_K, _HEAD_DIM_V), case.dtype)
    bias = _normal(rng, (_SEQLEN_K,), case.dtype, 0.5)
    dout = _normal(rng, (2, 4, _SEQLEN_Q, _HEAD_DIM_V), case.dtype)
    exact = _reference_vjp.attention_vjp(dout, q, k, v, bias=bias, causal=True)
    dout, q, k, v, bias = (xp.asarray(a) for a in (dout, q, k, v, bias))
    out, lse = attention(q, k, v, bias=bias, causal=True, return_lse=True)
    grads = attention_vjp(
        dout, q, k, v, out, lse, bias=bias, causal=True, need_dbias=True
    )
    errors = [
        float(np.abs(_reference.to_host(got) - best).max() / np.abs(best).max())
        for got, best in zip(grads[:4], exact[:4], strict=True)
    ]
    return max(errors), "", _SEQLEN_K


def _report(rows):
    _console.table(
        ("back end", "function", "method", "dtype", "error", "allowed", "unit", ""),
        [
            (
                case.backend,
                case.function,
                case.method,
                case.dtype,
                f"{error:.2e}" if not unit else f"{error:.2f}",
                f"{allowed:.2e}" if not unit else f"{allowed:.2f}",
                unit or "relative",
                "ok" if error <= allowed else "FAILED",
            )
            for case, error, allowed, unit in rows
        ],
    )
