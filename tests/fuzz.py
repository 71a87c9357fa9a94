"""Random problems: arguments of every kind, and the check of their results.

A problem is a function of its number alone. What decides how a kernel is compiled
(dtypes, method, head_dim, which options are there) is drawn from a number of its own,
so that a GPU run can meet many problems with few kernels.

    python tests/fuzz.py attention 1234            # one problem again, on NumPy
    python tests/fuzz.py softmax 77 --variants 64 --xp cupy
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oracle
from accuracy import (
    BOUNDS,
    FLOATS,
    TF32_ATTENTION,
    assert_same_specials,
    dtype_of,
    finfo,
    wide,
)
from placing import FORMS, ROW_FORMS, empty, place

# A line that runs a problem again works in a checkout that is not installed.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import cupyflash

METHODS = ("auto", "naive", "safe", "online", "tiled")
INTEGERS = ("int32", "int64", "uint8", "int16")


@dataclass
class Problem:
    """A call: arrays on the host, how each lies in memory, and the other arguments."""

    operation: str
    seed: int
    variants: int | None
    function: str
    arrays: dict[str, np.ndarray]
    forms: dict[str, str]
    options: dict[str, Any]
    out_form: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def reproducer(self, xp):
        """The line that runs this problem again."""
        variants = "" if self.variants is None else f" --variants {self.variants}"
        return (
            f"python tests/fuzz.py {self.operation} {self.seed}{variants} "
            f"--xp {xp.__name__}"
        )

    def __str__(self):
        arrays = ", ".join(
            f"{n}: {x.dtype.name}{list(x.shape)} {self.forms.get(n, 'plain')}"
            for n, x in self.arrays.items()
        )
        return f"{self.function}({arrays}; {self.options}, out={self.out_form})"


def run(xp, problem):
    """Do the call and check the result; AssertionError with the reproducer."""
    layout = problem.options.get("layout")
    problem.arrays = lengths_for(xp, problem.arrays, layout)
    try:
        CHECKS[problem.operation](xp, problem)
    except Exception as error:
        raise AssertionError(f"{problem.reproducer(xp)}\n{problem}\n{error}") from error


def lengths_for(xp, arrays, layout):
    """`arrays` with lengths that a back end takes: NumPy's must fit their axes."""
    arrays = dict(arrays)
    for name, x in (("query_lengths", arrays.get("q")), ("key_lengths", arrays.get("k"))):
        lengths = arrays.get(name)
        if xp is np and lengths is not None:
            size = x.shape[-3 if layout == "bshd" and x.ndim > 2 else -2]
            most = min(size, np.iinfo(lengths.dtype).max)
            arrays[name] = np.asarray(lengths.clip(0, most))
    return arrays


def draw(operation, seed, variants=None):
    """Problem number `seed`, compiled in one of `variants` ways (None: any)."""
    rng = np.random.default_rng([len(operation), seed])
    number = seed if variants is None else int(rng.integers(variants))
    structure = np.random.default_rng([len(operation), 1, number])
    problem = DRAWS[operation](rng, structure)
    problem.seed, problem.variants = seed, variants
    return problem


def one_of(rng, choices):
    return choices[int(rng.integers(len(choices)))]


def chance(rng, probability):
    return bool(rng.random() < probability)


# --- attention -----------------------------------------------------------------------

HEAD_DIMS = (1, 2, 3, 8, 16, 24, 33, 40, 64, 64, 72, 128)
SEQLENS = (1, 1, 2, 3, 7, 16, 17, 31, 33, 63, 64, 65, 96, 129)
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 3), (3, 1), (8, 2))


def _attention_structure(rng):
    """What a kernel is compiled for."""
    dtype = one_of(rng, FLOATS)
    floats = (dtype, dtype, "float32", one_of(rng, FLOATS))
    head_dim = one_of(rng, HEAD_DIMS)
    return {
        "dtype": dtype,
        "method": one_of(rng, METHODS),
        "head_dim": head_dim,
        "head_dim_v": head_dim if chance(rng, 0.6) else one_of(rng, HEAD_DIMS),
        "bias": one_of(rng, floats) if chance(rng, 0.35) else None,
        "mask": chance(rng, 0.35),
        "causal": chance(rng, 0.35),
        "window": chance(rng, 0.3),
        "softcap": chance(rng, 0.25),
        "sinks": one_of(rng, floats) if chance(rng, 0.25) else None,
        "alibi_slopes": one_of(rng, floats) if chance(rng, 0.25) else None,
        "query_lengths": one_of(rng, INTEGERS) if chance(rng, 0.25) else None,
        "key_lengths": one_of(rng, INTEGERS) if chance(rng, 0.3) else None,
        "query_offset": one_of(rng, ("none", "none", "zero", "int", "array")),
        "offset_dtype": one_of(rng, ("int32", "int64", "int16")),
        "tf32": dtype == "float32" and chance(rng, 0.3),
    }


def _smaller(rng, shape):
    """A shape that broadcasts to `shape`: some axes 1, some leading ones left out."""
    kept = tuple(n if chance(rng, 0.7) else 1 for n in shape)
    return kept[int(rng.integers(len(shape) + 1)) :] if chance(rng, 0.4) else kept


def _queries_and_keys(rng, s, batch, heads, kv_heads, seqlen_q, seqlen_k):
    """q, k, v heads-first in float64: some scores large, some rows nearly one-hot."""
    k_batch = batch
    if chance(rng, 0.3):
        k_batch = tuple(n if chance(rng, 0.5) else 1 for n in batch)
        k_batch = k_batch[int(rng.integers(len(batch) + 1)) :]
    q_batch, v_batch = batch, k_batch
    (own,) = rng.spawn(1)
    if chance(own, 0.15):  # entries that share v alone, or do not share it
        v_batch = tuple(n if chance(own, 0.5) else 1 for n in batch)
    if chance(own, 0.15) and k_batch == batch:
        q_batch = tuple(n if chance(own, 0.5) else 1 for n in batch)
    q = rng.normal(size=(*q_batch, heads, seqlen_q, s["head_dim"]))
    k = rng.normal(size=(*k_batch, kv_heads, seqlen_k, s["head_dim"]))
    v = rng.normal(size=(*v_batch, kv_heads, seqlen_k, s["head_dim_v"]))
    if s["method"] == "naive":
        # No maximum is subtracted: scores stay where exp is precise in float16.
        return q * s["head_dim"] ** -0.25, k * s["head_dim"] ** -0.25, v
    style = one_of(rng, ("plain", "bites", "bites"))
    if style == "bites" and q.size and k.size:
        rows = q.reshape(-1, s["head_dim"])
        rows[:: int(rng.integers(2, 6))] *= 30
        keys = np.broadcast_to(k, (*batch, *k.shape[-3:])).reshape(-1, s["head_dim"])
        some = rng.integers(len(rows), size=max(1, len(rows) // 5))
        rows[some] = 8 * keys[rng.integers(len(keys), size=len(some))]
    return q, k, v


def _options(rng, s, batch, heads, seqlen_q, seqlen_k):
    """(arrays, other arguments) of the options in the structure."""
    naive = s["method"] == "naive"
    scores = (*batch, heads, seqlen_q, seqlen_k)
    arrays, options = {}, {}
    if s["bias"]:
        bias = np.array(rng.normal(size=_smaller(rng, scores)) * (1 if naive else 3))
        if chance(rng, 0.4):
            bias[rng.random(bias.shape) < 0.2] = -np.inf
        arrays["bias"] = bias.astype(dtype_of(s["bias"]))
    if s["mask"]:
        arrays["mask"] = rng.random(_smaller(rng, scores)) < 0.75
    if s["causal"]:
        options["causal"] = True
    if s["window"]:
        sides = [int(rng.integers(seqlen_k + 2)), int(rng.integers(12)), None]
        left, right = one_of(rng, sides), one_of(rng, sides)
        options["window"] = left if chance(rng, 0.2) else (left, right)
    if s["softcap"]:
        options["softcap"] = float(rng.uniform(1, 30))
    if s["sinks"]:
        arrays["sinks"] = rng.normal(size=heads).astype(dtype_of(s["sinks"]))
    far = seqlen_q + seqlen_k + 1
    if s["query_offset"] == "zero":
        options["query_offset"] = 0
    elif s["query_offset"] == "int":
        options["query_offset"] = int(rng.integers(-seqlen_q - 3, seqlen_k + 3))
    elif s["query_offset"] == "array":
        offsets = rng.integers(-seqlen_q - 3, seqlen_k + 3, size=_smaller(rng, batch))
        arrays["query_offset"] = np.asarray(offsets).astype(s["offset_dtype"])
    if s["alibi_slopes"]:
        shape = (heads,) if chance(rng, 0.5) else (*_smaller(rng, batch), heads)
        slopes = rng.random(shape) * (2.0 / far if naive else 0.5)
        arrays["alibi_slopes"] = slopes.astype(dtype_of(s["alibi_slopes"]))
    for name, size in (("query_lengths", seqlen_q), ("key_lengths", seqlen_k)):
        if s[name]:
            low = 0 if s[name].startswith("u") else -2
            lengths = np.array(rng.integers(low, size + 4, size=_smaller(rng, batch)))
            if lengths.size and chance(rng, 0.3):
                lengths.reshape(-1)[0] = 0
            arrays[name] = lengths.astype(s[name])
    if chance(rng, 0.4):
        options["scale"] = float(one_of(rng, (0.0, 1.0, -0.5, 0.1, 1.7)))
        if naive:
            options["scale"] = float(np.clip(options["scale"], -0.5, 0.5))
    return arrays, options


def _all_to(flags, shape):
    """all() over the axes that broadcasting `shape` added or stretched."""
    flags = flags.all(tuple(range(flags.ndim - len(shape))))
    stretched = tuple(a for a, n in enumerate(shape) if n == 1)
    return flags.all(stretched, keepdims=True).reshape(shape)


def _poison(rng, q, k, v, arrays, options, batch, heads):
    """NaN and inf where no query looks, and in rows that are padding."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    kv_heads = k.shape[-3]
    seen, _, alive = oracle.visible(
        batch, heads, seqlen_q, seqlen_k, arrays.get("mask"),
        options.get("causal", False),
        arrays.get("query_offset", options.get("query_offset")),
        options.get("window"), arrays.get("query_lengths"), arrays.get("key_lengths"),
    )  # fmt: skip

    def unseen(hidden, x):
        """Keys that no query of the group sees, in the shape of the rows of k or v."""
        hidden = hidden.reshape(
            *batch, kv_heads, heads // max(kv_heads, 1), seqlen_q, seqlen_k
        )
        return _all_to(hidden.all((-3, -2)), x.shape[:-1])

    bad = one_of(rng, (np.nan, np.inf, -np.inf))
    k[unseen(~seen, k)] = bad
    hidden = ~seen
    if "bias" in arrays:
        hidden = hidden | np.isneginf(wide(arrays["bias"]))
    v[unseen(hidden, v)] = bad
    padding = ~np.broadcast_to(alive, (*batch, heads, seqlen_q, 1))[..., 0]
    q[_all_to(padding, q.shape[:-1])] = np.nan
    return k, v


def draw_attention(rng, structure_rng):
    s = _attention_structure(structure_rng)
    matrices = chance(rng, 0.1)
    batch = one_of(rng, ((), (1,), (2,), (3,), (2, 2), (1, 3)))
    heads, kv_heads = one_of(rng, HEADS)
    if matrices:
        batch, heads, kv_heads = (), 1, 1
    seqlen_q, seqlen_k = one_of(rng, SEQLENS), one_of(rng, SEQLENS)
    if chance(rng, 0.3):
        seqlen_k = seqlen_q
    if chance(rng, 0.03):
        seqlen_q = 0
    if chance(rng, 0.03):
        seqlen_k = 0
    q, k, v = _queries_and_keys(rng, s, batch, heads, kv_heads, seqlen_q, seqlen_k)
    arrays, options = _options(rng, s, batch, heads, seqlen_q, seqlen_k)
    if seqlen_q and chance(rng, 0.6):
        _poison(rng, q, k, v, arrays, options, batch, heads)
    if chance(rng, 0.05) and q.size:  # a NaN that is seen stays in its row
        q.reshape(-1)[int(rng.integers(q.size))] = np.nan
    options |= {"method": s["method"], "layout": one_of(rng, ("bhsd", "bshd"))}
    options["return_lse"] = chance(rng, 0.8)
    if s["tf32"]:
        options["precision"] = "tf32"
    dtype = dtype_of(s["dtype"])
    given = {}
    for name, x in {"q": q, "k": k, "v": v}.items():
        if matrices:
            x = x[0]
        elif options["layout"] == "bshd":
            x = x.swapaxes(-3, -2)
        given[name] = x.astype(dtype)
    forms = {
        name: one_of(rng, ROW_FORMS if chance(rng, 0.6) else FORMS)
        for name in (*given, *arrays)
    }
    out_form = one_of(rng, FORMS) if chance(rng, 0.25) else None
    problem = Problem(
        "attention", 0, None, "attention", given | arrays, forms, options, out_form
    )
    problem.notes["expanded"] = [n for n in ("bias", "mask") if chance(rng, 0.2)]
    problem.notes["scores"] = (*batch, heads, seqlen_q, seqlen_k)
    return problem


def exact_attention(problem):
    """(out, lse, size) by the oracle; float64 is enough below float64 inputs."""
    dtype = problem.arrays["q"].dtype
    options = {n: x for n, x in problem.arrays.items() if n not in "qkv"}
    for name in ("causal", "window", "softcap", "query_offset", "scale", "layout"):
        if name in problem.options:
            options[name] = problem.options[name]
    q, k, v = (problem.arrays[n] for n in "qkv")
    real = np.longdouble if dtype == np.float64 else np.float64
    return oracle.attention(q, k, v, real=real, **options)


def attention_bounds(problem, exact, lse, size):
    """Largest errors of out and of lse.

    The promised bound, and what the rounding of the scores alone brings: a score of
    `size` is wrong by `size` roundings, which changes the weights by as much.
    """
    dtype = problem.arrays["q"].dtype.name
    unit = float(finfo(dtype_of(dtype)).eps)
    work = unit if dtype == "float64" else 2.0**-23
    relative = BOUNDS["attention"][dtype]
    if problem.options.get("precision") == "tf32":
        relative, work = TF32_ATTENTION, 2.0**-10
    largest = np.abs(wide(exact)[np.isfinite(exact)]).max(initial=0)
    v = wide(problem.arrays["v"])
    values = np.abs(v[np.isfinite(v)]).max(initial=0)
    if problem.options["method"] == "naive":
        # Every step rounds to the dtype: five on the way to a score, one a term.
        steps = unit * (8 * (size + 1) + problem.arrays["k"].size ** 0.5 + 140)
        return steps * values, steps * 2
    lse = np.abs(lse[np.isfinite(lse)]).max(initial=0)
    return relative * largest + 2 * work * size * values, work * (2 * size + 16 + lse)


def _difference(actual, exact, finite):
    """|actual - exact| where that is finite, else 0."""
    zero = np.longdouble(0)
    return np.abs(np.where(finite, wide(actual), zero) - np.where(finite, exact, zero))


def check_attention(xp, problem):
    arrays = {
        name: place(xp, x, problem.forms[name]) for name, x in problem.arrays.items()
    }
    for name in problem.notes["expanded"]:
        if name in arrays:
            arrays[name] = xp.broadcast_to(arrays[name], problem.notes["scores"])
    exact, lse, size = exact_attention(problem)
    dtype = problem.arrays["q"].dtype
    q, k, v = (arrays.pop(n) for n in "qkv")
    out = None
    if problem.out_form:
        out = empty(xp, exact.shape, dtype, problem.out_form)
    result = cupyflash.attention(q, k, v, **arrays, **problem.options, out=out)
    got, got_lse = result if problem.options["return_lse"] else (result, None)
    assert isinstance(got, xp.ndarray)
    assert out is None or got is out
    assert got.dtype == dtype
    allowed, allowed_lse = attention_bounds(problem, exact, lse, size)
    finite = assert_same_specials(got, exact)
    error = _difference(got, exact, finite)
    assert error.max(initial=0) <= allowed, (
        f"out is wrong by {error.max()}, allowed {allowed}, at "
        f"{np.unravel_index(error.argmax(), error.shape)}"
    )
    if got_lse is None:
        return
    assert got_lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    finite = assert_same_specials(got_lse, lse)
    error = _difference(got_lse, lse, finite)
    assert error.max(initial=0) <= allowed_lse, (
        f"lse is wrong by {error.max()}, allowed {allowed_lse}"
    )


# --- softmax -------------------------------------------------------------------------

FUNCTIONS = (
    "softmax",
    "softmax",
    "log_softmax",
    "logsumexp",
    "softmax_vjp",
    "log_softmax_vjp",
)
SIZES = (1, 1, 2, 3, 5, 8, 17, 32, 33, 64)
LONG = (1, 2, 31, 33, 128, 257, 1000, 1024, 4100)
# (shape, axis): rows that are whole vectors, very short ones, rows over two axes, a
# result that is turned if it lies in another order, few long rows, long columns.
WITH_KERNELS_OF_THEIR_OWN = (
    ((301, 32), 1),
    ((90, 64), -1),
    ((900, 4), -1),
    ((700, 10), 1),
    ((12, 5, 64), (0, 2)),
    ((270, 250), 1),
    ((1, 700_001), None),
    ((3, 40_001, 4), 1),
)


def _softmax_structure(rng):
    dtype = one_of(rng, (*FLOATS, *FLOATS, *FLOATS, "int32", "uint8", "bool"))
    return {
        "function": one_of(rng, FUNCTIONS),
        "dtype": dtype,
        "asked": one_of(rng, FLOATS) if chance(rng, 0.25) else None,
        "other": dtype if chance(rng, 0.7) else one_of(rng, FLOATS),
        "method": one_of(rng, METHODS),
        "where": chance(rng, 0.35),
        "weights": chance(rng, 0.4),
        "scale": float(one_of(rng, (1.0, 1.0, 0.0, -1.0, 0.3))),
        "return_sign": chance(rng, 0.3),
    }


def _values(rng, shape, dtype, method):
    """Numbers of `dtype`: some rows large, some nearly one-hot, some special."""
    if dtype_of(dtype).kind in "biu":
        return rng.integers(0, 2 if dtype == "bool" else 30, shape).astype(dtype)
    if method == "naive":
        return rng.normal(size=shape).astype(dtype_of(dtype))
    x = rng.normal(size=shape) * one_of(rng, (0.1, 1, 5, 20))
    style = one_of(rng, ("plain", "offset", "peaks", "equal", "specials"))
    if style == "offset":
        x = x + 1000
    elif style == "peaks":
        x = np.where(rng.random(shape) < 0.05, x + 100, x)
    elif style == "equal":
        x = np.full(shape, 3.0)
    elif style == "specials":
        x = np.where(rng.random(shape) < 0.1, -np.inf, x)
        x = np.where(rng.random(shape) < 0.002, np.nan, x)
        x = np.where(rng.random(shape) < 0.001, np.inf, x)
    return np.asarray(x).astype(dtype_of(dtype))


def _geometry(rng, method):
    """(shape, axis, forms): row lengths and strides choose kernels too."""
    if chance(rng, 0.5):
        shape = [one_of(rng, SIZES[:6]), one_of(rng, LONG)]
        if chance(rng, 0.3):
            shape = shape[::-1]
    else:
        shape = [one_of(rng, SIZES) for _ in range(int(rng.integers(5)))]
        while np.prod(shape) > 30_000:
            shape[int(np.argmax(shape))] //= 2
    if shape and chance(rng, 0.05):
        shape[int(rng.integers(len(shape)))] = 0
    ndim, axis = len(shape), None
    if ndim and chance(rng, 0.5):
        axis = int(rng.integers(-ndim, ndim))
    elif chance(rng, 0.6):
        axis = tuple(int(a) for a in rng.permutation(ndim)[: rng.integers(ndim + 1)])
    forms = {name: one_of(rng, FORMS) for name in ("x", "dy", "b", "where")}
    if chance(rng, 0.12) and method != "naive":  # whose sums overflow float16
        shape, axis = one_of(rng, WITH_KERNELS_OF_THEIR_OWN)
        forms = dict.fromkeys(forms, one_of(rng, ("plain", "plain", "shifted")))
    return tuple(shape), axis, forms


def draw_softmax(rng, structure_rng):
    s = _softmax_structure(structure_rng)
    shape, axis, forms = _geometry(structure_rng, s["method"])
    method, function = s["method"], s["function"]
    options: dict[str, Any] = {"axis": axis}
    arrays = {"x": _values(rng, shape, s["dtype"], method)}
    if function in ("softmax", "log_softmax"):
        options["method"] = method
        options["scale"] = s["scale"]
        if s["asked"]:
            options["dtype"] = s["asked"]
    if function.endswith("vjp"):
        options["scale"] = float(one_of(rng, (1.0, -0.5)))
        real = s["dtype"] if s["dtype"] in FLOATS else "float32"
        where = rng.random(shape) < 0.9
        forward = getattr(oracle, function.removesuffix("_vjp"))
        x = _values(rng, shape, real, "naive")
        arrays["x"] = forward(x, axis, where).astype(dtype_of(real))
        other = s["other"] if s["other"] in FLOATS else real
        dy_shape = _smaller(rng, shape) if chance(rng, 0.2) else shape
        arrays["dy"] = np.asarray(rng.normal(size=dy_shape)).astype(dtype_of(other))
    elif s["where"]:
        where = rng.random(_smaller(rng, shape)) < one_of(rng, (0.1, 0.7, 0.95))
        arrays["where"] = np.asarray(where)
    if function == "logsumexp":
        options["keepdims"] = chance(rng, 0.5)
        options["return_sign"] = s["return_sign"]
        if s["weights"]:
            other = s["other"] if s["other"] in FLOATS else "float64"
            b = rng.random(_smaller(rng, shape)) + 0.1
            b = np.where(rng.random(b.shape) < 0.2, 0, b)
            arrays["b"] = np.asarray(b).astype(dtype_of(other))
    out_form = one_of(rng, FORMS) if chance(rng, 0.25) else None
    return Problem("softmax", 0, None, function, arrays, forms, options, out_form)


def _result_dtype(problem):
    if "dtype" in problem.options:
        return problem.options["dtype"]
    names = {
        x.dtype.name if x.dtype.name in FLOATS else "float64"
        for name, x in problem.arrays.items()
        if name != "where"
    }
    if len(names) > 1 and "bfloat16" in names:
        names = {"float32" if n in ("float16", "bfloat16") else n for n in names}
    return np.result_type(*names).name if len(names) > 1 else names.pop()


def check_softmax(xp, problem):
    host, options, function = problem.arrays, problem.options, problem.function
    x = {name: place(xp, a, problem.forms[name]) for name, a in host.items()}
    dtype = _result_dtype(problem)
    exact = exact_softmax(problem)
    sign = None
    if function == "logsumexp":
        exact, sign = exact
    out = None
    if problem.out_form:
        out = empty(xp, exact.shape, dtype_of(dtype), problem.out_form)
    call = getattr(cupyflash, function)
    extra = {n: x[n] for n in ("where", "b") if n in x}
    args = (x["x"], x["dy"]) if "dy" in x else (x["x"],)
    result = call(*args, **options, **extra, out=out)
    if options.get("return_sign"):
        result, got_sign = result
        assert got_sign.dtype == dtype_of(dtype)
        np.testing.assert_array_equal(wide(got_sign), sign)
    assert out is None or result is out
    assert result.dtype == dtype_of(dtype), (result.dtype, dtype)
    # What overflows the result's dtype is an infinity there.
    with np.errstate(over="ignore", invalid="ignore"):
        shown = np.asarray(exact).astype(dtype_of(dtype))
    finite = assert_same_specials(result, shown)
    allowed = softmax_bound(problem, exact, dtype)
    allowed = np.broadcast_to(allowed, exact.shape)[finite]
    error = np.abs(wide(result)[finite] - exact[finite])
    over = error - allowed
    assert np.all(over <= 0), (
        f"wrong by {error[over.argmax()]}, allowed {allowed[over.argmax()]}"
    )


@np.errstate(all="ignore")
def exact_softmax(problem):
    host, options = problem.arrays, problem.options
    given = {n: options[n] for n in ("axis", "scale", "keepdims") if n in options}
    given |= {n: host[n] for n in ("where", "b") if n in host}
    if "dy" in host:
        dy = np.broadcast_to(host["dy"], host["x"].shape)
        return getattr(oracle, problem.function)(host["x"], dy, **given)
    return getattr(oracle, problem.function)(host["x"], **given)


def softmax_bound(problem, exact, dtype):
    """Largest error, element by element."""
    x, function = problem.arrays["x"], problem.function
    inputs = {a.dtype.name for n, a in problem.arrays.items() if n != "where"}
    single = (inputs | {dtype}) <= set(FLOATS[:3])
    work = 2.0**-23 if single else 2.0**-52
    info = finfo(dtype_of(dtype))
    unit, tiny = float(info.eps), float(info.tiny)
    # Scores are multiplied by scale and rounded; 0, 1 and -1 round nothing.
    values = wide(x)[np.isfinite(wide(x))]
    scale = problem.options.get("scale", 1.0)
    size = np.abs(values).max(initial=0) * abs(scale)
    magnitude = np.abs(np.where(np.isfinite(exact), exact, 0))
    if function.endswith("vjp"):
        dy = np.abs(wide(problem.arrays["dy"])).max(initial=0)
        terms = np.log2(x.size + 2) * 8
        return unit * magnitude + work * terms * dy * max(1, abs(scale)) + tiny
    if problem.options.get("method") == "naive" and x.dtype.name in FLOATS:
        own = max(float(finfo(x.dtype).eps), unit)
        n = x.size + 16
        error = n * own * (magnitude if function == "softmax" else magnitude + 1)
        return error + (16 + n) * own * max(1, size) * magnitude + tiny
    rounded = work * size if scale not in (0.0, 1.0, -1.0) else 0.0
    if function == "softmax":
        return (BOUNDS["softmax"][dtype] + 2 * rounded) * magnitude + 2 * tiny
    return unit * magnitude + work * (3 * size + 8) + 2 * rounded + tiny


DRAWS = {"attention": draw_attention, "softmax": draw_softmax}
CHECKS = {"attention": check_attention, "softmax": check_softmax}


def main():
    parser = argparse.ArgumentParser(description="Run one random problem again.")
    parser.add_argument("operation", choices=DRAWS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--variants", type=int, default=None)
    parser.add_argument("--xp", choices=("numpy", "cupy"), default="numpy")
    options = parser.parse_args()
    xp = __import__(options.xp)
    problem = draw(options.operation, options.seed, options.variants)
    print(problem)
    run(xp, problem)
    print("agrees")


if __name__ == "__main__":
    # The module that others import, with the operations that they add.
    import fuzz_vjp

    fuzz_vjp.fuzz.main()
