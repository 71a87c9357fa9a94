"""Small problems for every row of every table, and the means to force a row.

A row that is added to a table is met here without a change: its cases are all those
below that it does not refuse. Nothing here needs a GPU but `force`.
"""

import dataclasses
import functools
import inspect
import itertools

import fuzz
import fuzz_vjp
import numpy as np
from accuracy import dtype_of

import cupyflash
from cupyflash import _explain
from cupyflash._attention.gpu import backward_registry, forward_registry
from cupyflash._core import strides as _strides
from cupyflash._cuda import device as _device
from cupyflash._softmax import memory_layout
from cupyflash._softmax.gpu import registry as softmax_registry

METHODS = fuzz.METHODS
OPERATIONS = ("softmax", "attention", "attention_vjp")


def tables():
    """{operation: its table}."""
    return {
        "softmax": softmax_registry.KERNELS,
        "attention": forward_registry.ATTENTION_KERNELS,
        "attention_vjp": backward_registry.ATTENTION_VJP_KERNELS,
    }


def all_rows():
    """(operation, name) of every row."""
    return [(name, row.name) for name, table in tables().items() for row in table]


def row_of(operation, name):
    """The row of a table."""
    (row,) = (row for row in tables()[operation] if row.name == name)
    return row


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that a row takes."""

    operation: str
    row: str
    function: str
    kind: str  # of SOFTMAX_SHAPES or ATTENTION_SHAPES
    dtype: str  # or "tf32"
    method: str = "auto"

    def __str__(self):
        return f"{self.row}-{self.function}-{self.kind}-{self.dtype}".replace(" ", "_")


# --- shapes --------------------------------------------------------------------------

# (outer, length, inner), reduced over the middle. Lengths make each row of the table
# the first to take one of them on an H200.
SOFTMAX_SHAPES = {
    "short rows": (300, 37, 1),
    "rows": (40, 1000, 1),
    "columns": (6, 64, 40),
    "long columns": (2, 3001, 24),
    "long rows": (2, 70_001, 1),
    "longer rows": (2, 300_001, 1),
    "longest rows": (3, 1_048_583, 1),
    "longest rows of doubles": (3, 524_291, 1),
    "many columns": (2, 300, 32_768),
    "short whole rows": (301, 32, 1),
    "shortest rows": (3001, 10, 1),
    "one element": (3001, 1, 1),
}
_SOFTMAX_DTYPES_OF_KIND = {
    "rows": ("float32", "bfloat16", "float64"),
    "columns": ("float32", "bfloat16", "float64"),
    "short rows": ("float32", "bfloat16"),
    "long columns": ("float32",),
    "long rows": ("float32",),
    "longer rows": ("float32",),
    "longest rows": ("float32", "float32", "bfloat16", "bfloat16"),  # both functions
    "longest rows of doubles": ("float64", "float64"),
    "many columns": ("float32",),
    "short whole rows": ("float32", "bfloat16"),
    "shortest rows": ("float32", "bfloat16"),
    "one element": ("float32", "bfloat16", "float64"),
}
# So large, half of its rows too, that only those try it that take nothing smaller; or
# of a form that others only take where that row is missing.
_ROWS_OF_KIND = {
    "many columns": ("logsumexp_shares",),
    "longest rows": ("relay",),
    "longest rows of doubles": ("relay",),
    "one element": ("logsumexp_single",),
}
# More, only to be asked about.
SOFTMAX_REACH = SOFTMAX_SHAPES | {
    "few long rows": (2, 700_001, 1),
    "a row that no card holds": (1, 4_500_000, 1),
    "a row that no cache holds": (1, 12_000_000, 1),
    "many long columns": (140, 70_000, 4),
    "very long columns": (3, 40_001, 32),
    "scattered": (3, 5000, 2),
}

# q, k and v.
ATTENTION_SHAPES = {
    "plain": ((2, 4, 130, 64), (2, 2, 200, 64), (2, 2, 200, 64)),
    "options": ((2, 4, 130, 64), (2, 2, 200, 64), (2, 2, 200, 64)),
    "odd": ((1, 3, 70, 33), (1, 1, 90, 33), (1, 1, 90, 17)),
    "one query": ((2, 4, 1, 64), (2, 2, 600, 64), (2, 2, 600, 64)),
    "many keys": ((2, 4, 130, 64), (2, 2, 1100, 64), (2, 2, 1100, 64)),
    "wide heads": ((1, 4, 130, 200), (1, 2, 200, 200), (1, 2, 200, 136)),
    "wider heads": ((2, 4, 130, 576), (2, 2, 200, 576), (2, 2, 200, 512)),
    "wider options": ((2, 4, 130, 320), (2, 2, 200, 320), (2, 2, 200, 320)),
    "wider, many keys": ((1, 4, 70, 300), (1, 2, 600, 300), (1, 2, 600, 400)),
    # So many queries that Hopper copies rows that begin between vectors.
    "odd heads": ((1, 2, 260, 33), (1, 1, 130, 33), (1, 1, 130, 49)),
    # Few such rows, of so many keys that it copies and splits them.
    "odd, many keys": ((1, 2, 8, 33), (1, 2, 3000, 33), (1, 2, 3000, 49)),
    # Parts of the keys: an odd number of rows; some without a key, or beyond a window.
    "odd parts": ((1, 1, 1, 64), (1, 1, 800, 64), (1, 1, 800, 64)),
    "empty parts": ((3, 1, 5, 64), (3, 1, 1100, 64), (3, 1, 1100, 64)),
    # Entries of the batch that share some of the three alone.
    "one k": ((3, 4, 130, 64), (1, 2, 200, 64), (3, 2, 200, 64)),
    "one q and v": ((1, 4, 130, 64), (3, 2, 200, 64), (1, 2, 200, 64)),
    # Few queries and keys, of more heads than there are multiprocessors.
    "short": ((35, 4, 40, 64), (35, 4, 40, 64), (35, 4, 40, 64)),
    "short options": ((35, 8, 21, 64), (35, 4, 60, 64), (35, 4, 60, 64)),
    "short odd": ((140, 2, 33, 33), (140, 1, 17, 33), (140, 1, 17, 90)),
    # Few queries with keys of their own.
    "few queries": ((133, 2, 1, 64), (133, 2, 45, 64), (133, 2, 45, 64)),
    # Few queries of many keys.
    "few rows": ((2, 4, 30, 64), (2, 2, 300, 64), (2, 2, 300, 64)),
    "few rows options": ((2, 4, 20, 64), (2, 2, 600, 64), (2, 2, 600, 48)),
    "few options": ((133, 2, 1, 32), (133, 2, 41, 32), (133, 2, 41, 48)),
    # Several queries with keys of their own, which blocks share, and do not.
    "several queries": ((3, 4, 6, 64), (3, 4, 333, 64), (3, 4, 333, 64)),
    "several options": ((9, 2, 7, 32), (9, 2, 71, 32), (9, 2, 71, 48)),
    # Few keys of many queries: several blocks share a head of k.
    "few keys": ((67, 4, 150, 32), (67, 2, 15, 32), (67, 2, 15, 32)),
    "few keys options": ((67, 4, 140, 64), (67, 2, 7, 64), (67, 2, 7, 64)),
    "few keys odd": ((67, 2, 133, 31), (67, 2, 16, 31), (67, 2, 16, 17)),
    "few keys wide": ((3, 4, 150, 200), (3, 2, 15, 200), (3, 2, 15, 136)),
    "tiny": ((150, 2, 4, 8), (150, 2, 4, 8), (150, 2, 4, 8)),
    "tiny options": ((41, 2, 7, 8), (41, 2, 8, 8), (41, 2, 8, 8)),
    "tiniest options": ((41, 2, 3, 8), (41, 2, 4, 8), (41, 2, 4, 8)),
    "tiny odd": ((41, 3, 4, 13), (41, 3, 3, 13), (41, 3, 3, 7)),
}
ATTENTION_REACH = ATTENTION_SHAPES | {
    "few": ((1, 2, 5, 64), (1, 2, 9, 64), (1, 2, 9, 64)),
    "wide": ((1, 1, 66, 800), (1, 1, 66, 800), (1, 1, 66, 800)),
}
_DTYPES_OF_KIND = {
    "plain": ("float16", "bfloat16", "float32", "tf32", "float64"),
    "options": ("bfloat16", "float32", "float64"),
    "odd": ("float16", "float32"),
    "one query": ("float16", "float32"),
    "wider heads": ("float16", "bfloat16"),
    "wider options": ("bfloat16",),
    "wider, many keys": ("float16",),
    "many keys": ("float32", "float64"),
    "odd parts": ("float16", "float32", "float64"),
    "odd, many keys": ("float16", "float64"),
    "empty parts": ("bfloat16", "float32", "float64"),
    "odd heads": ("bfloat16",),
    "one k": ("bfloat16", "float32", "float64"),
    "one q and v": ("bfloat16", "float32", "float64"),
    "short": ("float16", "bfloat16", "float32", "tf32"),
    "short options": ("bfloat16", "float32"),
    "short odd": ("float16", "float32"),
    "few queries": ("float16", "bfloat16", "float32"),
    "few rows": ("float32", "tf32"),
    "few rows options": ("float32",),
    "few options": ("bfloat16", "float32"),
    "few keys": ("float16", "bfloat16", "float32", "tf32", "float64"),
    "few keys options": ("bfloat16", "float32", "float64"),
    "few keys odd": ("float16", "float32", "float64"),
    "few keys wide": ("float64",),
    "tiny": ("float16", "bfloat16", "float32", "float64"),
    "tiny options": ("bfloat16", "float32"),
    "tiniest options": ("float64",),
    "tiny odd": ("float16", "float32"),
}
_VJP_DTYPES_OF_KIND = {
    "plain": ("float16", "bfloat16", "float32", "float64"),
    "options": ("bfloat16", "float32"),
    "odd": ("float16",),
    "wide heads": ("float16", "bfloat16", "float64"),
    "odd heads": ("bfloat16",),
    "one k": ("bfloat16", "float32", "float64"),
    "one q and v": ("bfloat16", "float32", "float64"),
    "short": ("float16", "bfloat16", "float32"),
    "short options": ("bfloat16", "float32"),
    "short odd": ("float16", "float32"),
    "few queries": ("float16", "bfloat16", "float32", "float64"),
    "few options": ("bfloat16", "float32", "float64"),
    "several queries": ("float16", "bfloat16", "float64"),
    "several options": ("bfloat16", "float64"),
    "few keys": ("float16", "bfloat16", "float32", "float64"),
    "few keys options": ("bfloat16", "float32", "float64"),
    "few keys odd": ("float16", "float32", "float64"),
    "few keys wide": ("float64",),
    "tiny": ("float16", "bfloat16", "float32", "float64"),
    "tiny options": ("bfloat16", "float32"),
    "tiniest options": ("float64",),
    "tiny odd": ("float16", "float32"),
}
_CAUSAL = ("odd", "short odd", "few keys odd", "tiny odd")


# --- problems ------------------------------------------------------------------------


def problem_of(case, rng, values=None):
    """The problem of tests/support/fuzz.py for a case; `values` are softmax's own x."""
    return {
        "softmax": _softmax_problem_of,
        "attention": _attention_problem_of,
        "attention_vjp": _attention_vjp_problem_of,
    }[case.operation](case, rng, values)


def _softmax_problem_of(case, rng, values):
    shape, dtype = SOFTMAX_SHAPES[case.kind], dtype_of(case.dtype)
    options = {"axis": 1}
    if case.function in ("softmax", "log_softmax"):
        options |= {"method": case.method, "scale": 1.0}
    if values is None:
        values = rng.normal(size=shape) * (1 if case.method == "naive" else 4)
    x = values.astype(dtype)
    arrays = {"x": x}
    if case.function.endswith("_vjp"):
        options["scale"] = 1.0
        forward = getattr(fuzz.oracle, case.function.removesuffix("_vjp"))
        arrays = {
            "x": forward(x, 1).astype(np.float64).astype(dtype),
            "dy": rng.normal(size=shape).astype(dtype),
        }
    if case.function == "logsumexp":
        options |= {"keepdims": False, "return_sign": False}
    forms = dict.fromkeys(arrays, "plain")
    return fuzz.Problem("softmax", 0, None, case.function, arrays, forms, options)


def batch_of(*shapes):
    """The batch axes of a call of attention."""
    return np.broadcast_shapes(*(shape[:-3] for shape in shapes))


def options_of(kind, shapes, rng, dtype, naive=False):
    """(arrays, other arguments) of a kind of attention."""
    if kind == "empty parts":
        lengths = np.array([0, 70, shapes[1][-2]], np.int32)
        return {"key_lengths": lengths}, {"window": (300, 5)}
    if not kind.endswith("options"):
        return {}, {"causal": True} if kind in _CAUSAL else {}
    (batch, heads, seqlen_q, _), (_, _, seqlen_k, _), _ = shapes
    size = 0.3 if naive else 1.0
    bias = rng.normal(size=(heads, seqlen_q, seqlen_k)) * size
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    slopes = rng.random(heads) * size / seqlen_k
    return {
        "bias": bias.astype(dtype),
        "mask": rng.random((batch, 1, seqlen_q, seqlen_k)) < 0.8,
        "sinks": rng.normal(size=heads).astype(dtype),
        "alibi_slopes": slopes.astype(dtype),
        "query_lengths": _lengths(batch, (seqlen_q, max(seqlen_q - 40, 1))),
        "key_lengths": _lengths(batch, (max(seqlen_k - 33, 1), seqlen_k)),
    }, {"causal": True, "softcap": 9.0}


def makes_gradients(kind):
    """Whether gradients of options are asked for, which not all rows make."""
    return kind not in (
        "short options", "few options", "several options", "few keys options",
        "tiny options", "tiniest options",
    )  # fmt: skip


def _lengths(batch, lengths):
    """These lengths in turn, one an entry of the batch."""
    return np.resize(np.array(lengths, np.int32), batch)


def _attention_problem_of(case, rng, values=None):
    shapes = ATTENTION_SHAPES[case.kind]
    naive, is_tf32 = case.method == "naive", case.dtype == "tf32"
    dtype = dtype_of("float32" if is_tf32 else case.dtype)
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    if naive:  # no maximum is subtracted
        q, k = (x * x.shape[-1] ** -0.25 for x in (q, k))
    else:
        q[..., ::3, :] *= 6
    options, more = options_of(case.kind, shapes, rng, dtype, naive)
    more |= {"method": case.method, "layout": "bhsd", "return_lse": True}
    if is_tf32:
        more["precision"] = "tf32"
    arrays = {"q": q.astype(dtype), "k": k.astype(dtype), "v": v.astype(dtype)}
    arrays |= options
    *_, heads, seqlen_q, _ = shapes[0]
    problem = fuzz.Problem(
        "attention", 0, None, "attention", arrays, dict.fromkeys(arrays, "plain"), more
    )
    problem.notes |= {
        "expanded": [],
        "scores": (*batch_of(*shapes), heads, seqlen_q, shapes[1][-2]),
    }
    return problem


def _attention_vjp_problem_of(case, rng, values=None):
    problem = _attention_problem_of(case, rng)
    options = problem.options
    for name in ("method", "return_lse"):
        options.pop(name)
    for name in ("bias", "sinks"):
        options[f"need_d{name}"] = name in problem.arrays and makes_gradients(case.kind)
    options["deterministic"] = True
    *rows, _ = problem.notes["scores"]
    dout = rng.normal(size=(*rows, problem.arrays["v"].shape[-1]))
    problem.arrays["dout"] = dout.astype(problem.arrays["q"].dtype)
    problem.forms |= dict.fromkeys(("dout", "out", "lse"), "plain")
    problem.operation = problem.function = "attention_vjp"
    return problem


def poison(problem, rng):
    """NaN and inf where no query looks."""
    arrays = problem.arrays
    *batch, heads, _, _ = problem.notes["scores"]
    fuzz._poison(
        rng, arrays["q"], arrays["k"], arrays["v"], arrays, problem.options,
        tuple(batch), heads,
    )  # fmt: skip
    if "dout" in arrays:
        dout = arrays["dout"].astype(np.float64)
        fuzz_vjp._poison(rng, problem, dout)
        arrays["dout"] = dout.astype(arrays["q"].dtype)


def check(xp, problem):
    """Do the call and compare it with the oracle, as the fuzz does."""
    fuzz.CHECKS[problem.operation](xp, problem)


# --- what the tables say -------------------------------------------------------------


def library_problem(operation, function, shape, dtype, method, options=None):
    """The checked problem of a call with arrays that lie back to back."""
    made = dtype_of("float32" if dtype == "tf32" else dtype)
    if operation == "softmax":
        return _library_softmax(function, np.empty(shape, made), method)
    q, k, v = (np.empty(s, made) for s in shape)
    arguments = {"method": method, **(options or {})}
    if dtype == "tf32":
        arguments["precision"] = "tf32"
    if operation == "attention":
        return _checked(cupyflash.attention, q, k, v, return_lse=True, **arguments)
    rows = (*batch_of(*shape), *q.shape[-3:-1])
    out = np.empty((*rows, v.shape[-1]), made)
    lse = np.empty(rows, made if made == np.float64 else np.float32)
    kind = next((n for n, s in ATTENTION_SHAPES.items() if s == shape), "")
    asked = makes_gradients(kind)
    need = {f"need_d{n}": asked and n in arguments for n in ("bias", "sinks")}
    return _checked(
        cupyflash.attention_vjp, out, q, k, v, out, lse, deterministic=True, **need,
        **arguments,
    )  # fmt: skip


def _checked(function, *args, **kwargs):
    """The problem that the checks of a function make of its arguments."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    check, _ = _explain._CHECKS[function]
    problem, _ = check(*call.arguments.values())
    return problem


def _library_softmax(function, x, method):
    call = getattr(cupyflash, function)
    if function.endswith("_vjp"):
        problem, names = _checked(call, x, x, axis=1), ("x", "dy", "out")
    elif function == "logsumexp":
        problem, names = _checked(call, x, axis=1), ("x", "b", "where")
    else:
        problem = _checked(call, x, axis=1, method=method)
        names = ("x", "where", "out")
    steps = _strides.element_strides(x)
    strides = {n: (0,) * 3 if n in ("b", "where") else steps for n in names}
    full = [n for n in names if n in ("x", "dy", "out")]
    if function == "logsumexp":
        strides |= dict.fromkeys(("out", "sign"), (x.shape[2], 0, 1))
    layout = memory_layout.of(problem.shape, problem.axes, strides, full)
    return dataclasses.replace(problem, layout=layout)


def _method_of(row):
    """A method that leads to a row."""
    return "auto" if "auto" in row.methods else row.methods[0]


@functools.cache
def cases(operation, name, arch="sm_90a"):
    """The cases that a row takes, on a made-up device."""
    row, device = row_of(operation, name), _device.device_of_arch(arch)
    rng = np.random.default_rng(0)
    found = []
    if operation == "softmax":
        for i, (kind, shape) in enumerate(SOFTMAX_SHAPES.items()):
            if name not in _ROWS_OF_KIND.get(kind, (name,)):
                continue
            for j, dtype in enumerate(_SOFTMAX_DTYPES_OF_KIND[kind]):
                function = row.functions[(i + j) % len(row.functions)]
                case = Case(operation, name, function, kind, dtype, _method_of(row))
                asked = library_problem(operation, function, shape, dtype, case.method)
                if row.unsupported_reason(asked, device) is None:
                    found.append(case)
        return tuple(found)
    is_vjp = operation == "attention_vjp"
    for kind, dtypes in (_VJP_DTYPES_OF_KIND if is_vjp else _DTYPES_OF_KIND).items():
        shapes = ATTENTION_SHAPES[kind]
        for dtype in dtypes:
            arrays, more = options_of(kind, shapes, rng, np.float32)
            case = Case(operation, name, operation, kind, dtype, _method_of(row))
            asked = library_problem(
                operation, operation, shapes, dtype, case.method, arrays | more
            )
            if _lies_between_vectors(shapes, dtype):
                asked = _without_tensor_maps(asked)
            if row.unsupported_reason(asked, device) is None and _is_new(row, case):
                found.append(case)
    return tuple(found)


def _lies_between_vectors(shapes, dtype):
    """Whether 16-bit rows are no whole vectors, and too few rows for copies."""
    (*_, seqlen_q, _), (*_, seqlen_k, _), _ = shapes
    is_odd = any(shape[-1] % 8 for shape in shapes)
    return (
        dtype in ("float16", "bfloat16")
        and is_odd
        and seqlen_q < 256
        and seqlen_k < 2048
    )


def _without_tensor_maps(problem):
    """The same problem in memory that TMA cannot read."""
    if hasattr(problem, "forward"):
        forward = _without_tensor_maps(problem.forward)
        return dataclasses.replace(problem, forward=forward)
    return dataclasses.replace(problem, no_tensor_map="rows begin between vectors")


def of_kinds(cases, kinds):
    """Those of these kinds; of a row that takes none of them, all that it takes."""
    known = {(c.operation, c.row) for c in cases if c.kind in kinds}
    return [c for c in cases if c.kind in kinds or (c.operation, c.row) not in known]


def one_of_each_dtype(cases, dtypes=("bfloat16", "float32", "tf32", "float64")):
    """The first of each of these dtypes; of a row that takes none, the first."""
    firsts = {c.dtype: c for c in reversed(cases)}
    return [firsts[dtype] for dtype in dtypes if dtype in firsts] or list(cases[:1])


def _is_new(row, case):
    """Whether "tf32" is another kernel than "float32"."""
    return case.dtype != "tf32" or row.name in ("mma", "mma_few", "mma_short")


def reach(operation, name):
    """Calls (function, shape, dtype, method) one of which a row is the choice for."""
    row = row_of(operation, name)
    functions = row.functions if operation == "softmax" else (operation,)
    shapes = SOFTMAX_REACH if operation == "softmax" else ATTENTION_REACH
    return itertools.product(
        functions, shapes.values(), ("bfloat16", "float32", "float64"), row.methods
    )


# --- on a device ---------------------------------------------------------------------


def force(monkeypatch, operation, name):
    """Let the operation have this row alone, for every method."""
    from cupyflash._attention.gpu import backward as attention_vjp_gpu
    from cupyflash._attention.gpu import forward as attention_gpu
    from cupyflash._cuda import plan_cache
    from cupyflash._softmax.gpu import dispatch as softmax_gpu

    module, holder, attribute = {
        "softmax": (softmax_gpu, softmax_registry, "KERNELS"),
        "attention": (attention_gpu, attention_gpu, "ATTENTION_KERNELS"),
        "attention_vjp": (
            attention_vjp_gpu,
            attention_vjp_gpu,
            "ATTENTION_VJP_KERNELS",
        ),
    }[operation]
    row = dataclasses.replace(row_of(operation, name), methods=METHODS)
    monkeypatch.setattr(holder, attribute, (row,))
    monkeypatch.setattr(module, "_plans", plan_cache.PlanCache())
