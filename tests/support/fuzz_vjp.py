"""Random problems of attention_vjp, and the check of their gradients.

python tests/support/fuzz.py attention_vjp 1234
"""

import fuzz
import numpy as np
import oracle
from accuracy import TF32_ATTENTION, dtype_of, finfo, to_host, wide
from fuzz import chance, one_of
from placing import FORMS, ROW_FORMS, place

import cupyflash


def draw_attention_vjp(structure, rng, values, budget):
    """A problem of attention, and what flows into its results."""
    problem = fuzz.draw_attention(structure, rng, values, budget - 1)
    options = problem.options
    options.pop("return_lse")
    if options["method"] != "tiled":  # the only method that gradients have
        options["method"] = "auto"
    given = {name: name in problem.arrays for name in ("bias", "sinks")}
    for name, is_given in given.items():
        options[f"need_d{name}"] = is_given and chance(structure, 0.8)
    options["deterministic"] = chance(structure, 0.5)
    forms = ROW_FORMS if chance(structure, 0.6) else FORMS
    if {*problem.forms.values()} == {"plain"}:
        forms = ("plain",)
    for name in ("dout", "out", "lse", "dlse"):
        problem.forms[name] = one_of(structure, forms)
    arrays = problem.arrays
    out_shape, lse_shape = fuzz.attention_shapes(problem)
    dtype = arrays["q"].dtype
    dout = values.normal(size=out_shape)
    if chance(structure, 0.4):
        dlse = values.normal(size=lse_shape)
        arrays["dlse"] = dlse.astype(np.float64 if dtype == np.float64 else np.float32)
    if not isinstance(values, fuzz.Zeros):
        if chance(values, 0.3):
            dout[values.random(out_shape) < 0.5] = 0
        if chance(values, 0.5):
            _poison(values, problem, dout)
    arrays["dout"] = dout.astype(dtype)
    problem.operation = problem.function = "attention_vjp"
    problem.out_form = None
    # A gradient has the shape of its bias: that one is not expanded.
    problem.notes["expanded"] = [n for n in problem.notes["expanded"] if n == "mask"]
    return problem


def _poison(rng, problem, dout):
    """NaN flows into rows that see no key, and into padding."""
    arrays, options = problem.arrays, problem.options
    *batch, heads, seqlen_q, seqlen_k = problem.notes["scores"]
    seen, _, alive = oracle.visible(
        tuple(batch), heads, seqlen_q, seqlen_k, arrays.get("mask"),
        options.get("causal", False),
        arrays.get("query_offset", options.get("query_offset")),
        options.get("window"), arrays.get("query_lengths"), arrays.get("key_lengths"),
    )  # fmt: skip
    if "bias" in arrays:
        seen = seen & ~np.isneginf(wide(arrays["bias"]))
    bad = one_of(rng, (np.nan, np.inf, -np.inf))
    blind = ~seen.any(-1)
    view = dout
    if dout.ndim > 2 and options["layout"] == "bshd":
        view = dout.swapaxes(-3, -2)
    view[blind if dout.ndim > 2 else blind[0]] = bad
    if "dlse" in arrays:
        padding = ~np.broadcast_to(alive, (*batch, heads, seqlen_q, 1))[..., 0]
        arrays["dlse"][padding if dout.ndim > 2 else padding[0]] = bad


FORWARD = ("causal", "window", "softcap", "query_offset", "scale", "layout")
GPU_ALONE = ("precision", "method")  # and the oracle knows neither
NOT_FORWARD = ("dout", "dlse", "out", "lse")


def exact_gradients(problem, growth=1):
    """(gradients, sums of the sizes of their terms, score size, lse)."""
    arrays, options = problem.arrays, problem.options
    given = {n: options[n] for n in FORWARD if n in options}
    given |= {n: x for n, x in arrays.items() if n not in ("q", "k", "v", "dout")}
    q, k, v = (arrays[n] for n in "qkv")
    real = np.longdouble if q.dtype == np.float64 else np.float64
    exact, sizes, lse, size = oracle.attention_vjp(
        arrays["dout"], q, k, v, real=real, growth=growth, **given
    )
    return exact, sizes, size, lse


def gradient_bound(problem, exact, sizes, size, lse, dtype):
    """Largest error, element by element.

    A weight exp(s - lse) is wrong by the roundings of s and lse, a gradient by those of
    its weights and of `out`, in proportion to the sum of the sizes of its terms.
    """
    own = problem.arrays["q"].dtype.name
    unit = float(finfo(dtype_of(own)).eps)
    work = unit if own == "float64" else 2.0**-23
    lse = np.abs(lse[np.isfinite(lse)]).max(initial=0)
    steps = work * (4 * size + 48 + lse)
    if problem.options.get("precision") == "tf32":
        # Scores are rounded to 10 bits, forward and backward: by so much in all.
        unit, steps = TF32_ATTENTION, steps + np.expm1(min(2.0**-9 * size, 80.0))
    share = unit + steps
    info = finfo(dtype_of(dtype))
    # What is below the normal numbers may be 0; float64 is stored in other dtypes by
    # way of float32.
    is_double = own == dtype == "float64"
    flushed = np.finfo(np.float64 if is_double else np.float32).tiny
    rounded = float(info.smallest_subnormal) + float(info.eps) * np.abs(exact)
    return share * sizes + rounded + 1e4 * flushed


GRANULE = 32  # rows that float32 on tensor cores splits by one power of 2
LOST = 2.0**-39  # of the largest number of a granule: what its parts leave out at most


@np.errstate(all="ignore")  # of rows that see no key, and of what is hidden
def lost_in_parts(problem):
    """What the row mma_split may lose of each element of dq, dk and dv.

    It multiplies pairs of float16 numbers. P and dS of 32 queries (for dq, dS of 32
    keys) have one power of 2, and so have 32 rows of each input: a number there is
    right to 2^-39 of the largest, or to a rounding (docs/guides/precision.md).
    """
    arrays, options = problem.arrays, problem.options
    layout = options.get("layout", "bhsd")
    given = {n: options[n] for n in FORWARD if n in options and n != "layout"}
    given |= {n: x for n, x in arrays.items() if n not in ("q", "k", "v", *NOT_FORWARD)}
    q, k, v, dout = (
        oracle.heads_first(arrays[n], layout) for n in ("q", "k", "v", "dout")
    )
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads, kv_heads, rows = q.shape[-3], k.shape[-3], q.shape[-2]
    dout = np.broadcast_to(wide(dout, np.float64), (*batch, heads, rows, v.shape[-1]))
    down = np.broadcast_to(
        wide(arrays.get("dlse", np.zeros(())), np.float64), dout.shape[:-1]
    )
    lost = {
        "dq": np.zeros((*batch, *q.shape[-3:])),
        "dk": np.zeros((*batch, *k.shape[-3:])),
        "dv": np.zeros((*batch, kv_heads, *v.shape[-2:])),
    }
    for at, head in oracle.heads_of(q, k, v, np.float64, **given):
        s, _ = head.scores()
        found = _lost_of_head(head, head.softmax(s)[0], dout[at], down[at])
        of_keys = (*at[:-1], at[-1] // (heads // kv_heads))
        for name, x in found.items():
            lost[name][at if name == "dq" else of_keys] += x
    for name, x in lost.items():
        own = arrays[name[1:]].shape
        x = x if layout == "bhsd" or len(own) == 2 else x.swapaxes(-3, -2)
        lost[name] = oracle._sum_to(x, own)
    return lost


def _largest(x, axis):
    """The largest number of each granule along an axis, in the place of each number."""
    starts = np.arange(0, x.shape[axis], GRANULE)
    if not len(starts):
        return x
    largest = np.maximum.reduceat(x, starts, axis)
    return np.repeat(largest, GRANULE, axis).take(np.arange(x.shape[axis]), axis)


def _lost_of_head(head, p, dout, down):
    """Of one head: the terms of a @ b with what parts leave out of either."""
    q, k, v, dout, down = (
        np.where(np.isfinite(x), np.abs(x), 0)
        for x in (head.q, head.k, head.v, dout, down)
    )
    p = np.where(np.isfinite(p), np.abs(p), 0)

    def left_out(rows):
        return LOST * _largest(rows.max(-1, keepdims=True, initial=0), 0)

    def product(a, of_a, b):
        """|(a + of_a) (b + of_b) - a b|, all of them sizes."""
        of_b = left_out(b)
        return of_a @ (b + of_b) + a @ np.broadcast_to(of_b, b.shape)

    dp = dout @ v.T
    of_dout, of_v = left_out(dout), left_out(v)
    of_dp = of_dout * v.sum(-1) + (dout + of_dout).sum(-1, keepdims=True) * of_v.T
    dp = dp + (p * dp).sum(-1, keepdims=True) + down[:, None]
    ds = p * dp
    of_p = LOST * _largest(p, 0)
    of_ds = p * of_dp
    of_keys = of_ds + of_p * (dp + of_dp) + LOST * _largest(ds, 0)
    of_queries = of_ds + LOST * _largest(ds, 1)
    scale = abs(head.scale)
    return {
        "dq": scale * product(ds, of_queries, k),
        "dk": scale * product(ds.T, of_keys.T, q),
        "dv": product(p.T, of_p.T, dout),
    }


def check_attention_vjp(xp, problem):
    """Forward and backward; each gradient against the oracle."""
    arrays = fuzz.given(xp, problem)
    q, k, v, dout = (arrays.pop(n) for n in ("q", "k", "v", "dout"))
    dlse = arrays.pop("dlse", None)
    forward = {n: x for n, x in problem.options.items() if n in FORWARD + GPU_ALONE}
    out, lse = cupyflash.attention(q, k, v, **arrays, **forward, return_lse=True)
    out, lse = (
        place(xp, to_host(x), problem.forms.get(n, "plain"))
        for n, x in (("out", out), ("lse", lse))
    )
    call = {**arrays, **problem.options, "dlse": dlse}
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, **call)
    row = cupyflash.explain("attention_vjp", dout, q, k, v, out, lse, **call).kernel
    # Weights are exp(score - lse): of scores made twice.
    row_of_lse = cupyflash.explain("attention", q, k, v, **arrays, **forward).kernel
    growth = fuzz.growth_of_sums(xp, q.shape[-1], row, row_of_lse)
    exact, sizes, size, exact_lse = exact_gradients(problem, growth)
    lost = {}
    if xp is not np and row == "mma_split":
        lost = lost_in_parts(problem)
    inputs = {"q": q, "k": k, "v": v, **arrays}
    for name, got in zip(grads._fields, grads, strict=True):
        asked = problem.options.get(f"need_{name}", name in ("dq", "dk", "dv"))
        assert (got is not None) == asked, name
        if got is None:
            continue
        x = inputs[name[1:]]
        assert isinstance(got, xp.ndarray)
        assert got.dtype == x.dtype
        assert got.shape == x.shape
        assert got.flags.c_contiguous
        expected = np.where(np.isfinite(exact[name]), exact[name], np.nan)
        assert_same_specials_loosely(got, expected, name)
        allowed = gradient_bound(
            problem, expected, sizes[name], size, exact_lse, x.dtype.name
        ) + lost.get(name, 0)
        finite = np.isfinite(expected)
        error = fuzz._difference(got, expected, finite)
        over = np.where(finite, error - allowed, -1)
        worst = np.unravel_index(over.argmax(), over.shape) if over.size else ()
        assert not np.any(over > 0), (
            f"{name} is wrong by {error[worst]} at {worst}, where {allowed[worst]} is "
            "allowed"
        )
    return grads


def assert_same_specials_loosely(got, expected, name):
    """NaN at the same places; what flows from infinities may be either."""
    found = wide(got)
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    np.testing.assert_array_equal(
        ~np.isfinite(found), ~np.isfinite(expected), f"{name}: NaN elsewhere"
    )


fuzz.DRAWS["attention_vjp"] = draw_attention_vjp
fuzz.CHECKS["attention_vjp"] = check_attention_vjp
