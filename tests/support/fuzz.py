"""Random problems: arguments of every kind, and the check of their results.

A problem is a function of two numbers and a budget. `seed` decides its structure: what
kernels are compiled for (dtypes, method, head sizes, which options are there), how
arrays lie in memory, and whether lengths are short or long. `sizes` decides the lengths
within that, and all values, so that a GPU run can meet many problems with few kernels.
A problem has at most 2^budget scores.

    python tests/support/fuzz.py attention 1234            # one problem again, on NumPy
    python tests/support/fuzz.py softmax 77 --sizes 3 --budget 20 --xp cupy

tests/support/fuzz_gpu.py runs thousands of them on a GPU.
"""

import argparse
import dataclasses
import math
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
sys.path.append(str(Path(__file__).resolve().parents[2]))

import cupyflash

METHODS = ("auto", "naive", "safe", "online", "tiled")
INTEGERS = ("int32", "int64", "uint8", "int16")


@dataclass
class Problem:
    """A call: arrays on the host, how each lies in memory, and the other arguments."""

    operation: str
    seed: int
    sizes: int | None
    function: str
    arrays: dict[str, np.ndarray]
    forms: dict[str, str]
    options: dict[str, Any]
    out_form: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None

    def reproducer(self, xp):
        """The line that runs this problem again."""
        sizes = f" --sizes {self.sizes}" if self.sizes else ""
        budget = "" if self.budget in (None, SMALL) else f" --budget {self.budget}"
        return (
            f"python tests/support/fuzz.py {self.operation} {self.seed}{sizes}{budget} "
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
    try:
        CHECKS[problem.operation](xp, problem)
    except Exception as error:
        raise AssertionError(f"{problem.reproducer(xp)}\n{problem}\n{error}") from error


SMALL = 15  # what the exact results of take milliseconds
LARGE = 20


def draw(operation, seed, sizes=0, budget=SMALL, values=True):
    """A problem; without `values` its arrays are zeros, which takes little time."""
    structure, rng, of_values = (
        np.random.default_rng([len(operation), *numbers])
        for numbers in ((1, seed), (2, seed, sizes), (3, seed, sizes))
    )
    problem = DRAWS[operation](structure, rng, of_values if values else Zeros(), budget)
    problem.operation = operation
    problem.seed, problem.sizes, problem.budget = seed, sizes, budget
    return problem


class Zeros:
    """In place of a generator of values where shapes alone are wanted."""

    def random(self, size=()):
        return np.zeros(size)

    def normal(self, size=()):
        return np.zeros(size)

    def integers(self, low, high=None, size=()):
        return np.full(size, 0 if high is None else low)

    def uniform(self, low, high):
        return low


def one_of(rng, choices):
    return choices[int(rng.integers(len(choices)))]


def chance(rng, probability):
    return bool(rng.random() < probability)


def length(rng, low, high):
    """Of all sizes alike; every other one at a multiple of a tile, or one beside it."""
    n = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
    if chance(rng, 0.5):
        step = one_of(rng, (8, 16, 32, 64, 128, 256))
        n = -(-n // step) * step + int(rng.integers(-1, 2))
    return min(max(n, low), high)


# --- attention -----------------------------------------------------------------------

# Usual sizes of a head, and others; of both, more small ones than large ones.
HEAD_DIMS = (16, 32, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256, 320, 512, 576)
LARGEST_HEAD = 640
# Key heads, and queries' heads of each.
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 3), (3, 1), (8, 2), (5, 5), (7, 1))
BATCHES = ((), (1,), (2,), (3,), (5,), (2, 2), (1, 3), (3, 2), (2, 1, 2))
# (queries, keys) from and to, of which each structure has one kind.
LENGTHS = {
    "few": ((1, 16), (1, 80)),
    "plain": ((17, 500), (17, 800)),
    "one query": ((1, 1), (300, 9000)),
    "few queries": ((1, 40), (300, 9000)),
    "many keys": ((50, 300), (400, 9000)),
    "many queries": ((1000, 7000), (20, 300)),
    "long": ((257, 6000), (257, 6000)),
    "many entries": ((1, 64), (1, 80)),
}
KINDS = (*LENGTHS, "plain", "many keys", "long", "many entries")
MANY_ENTRIES = (100, 1000)  # so that each multiprocessor has a head of its own
LONGEST_NAIVE = 1200  # the sum of more exponentials may overflow float16


def _head_dim(rng):
    if chance(rng, 0.45):
        return one_of(rng, HEAD_DIMS)
    return int(rng.integers(1, one_of(rng, (16, 64, 128, 256, LARGEST_HEAD)) + 1))


def _attention_structure(rng):
    """What a kernel is compiled for."""
    dtype = one_of(rng, FLOATS)
    floats = (dtype, dtype, "float32", one_of(rng, FLOATS))
    head_dim = _head_dim(rng)
    # None, few or many: the fastest rows refuse most of them.
    share = one_of(rng, (0, 0, 0.1, 0.4))
    return {
        "dtype": dtype,
        "method": one_of(rng, (*METHODS, *("auto",) * 5)),
        "head_dim": head_dim,
        "head_dim_v": head_dim if chance(rng, 0.5) else _head_dim(rng),
        "bias": one_of(rng, floats) if chance(rng, share) else None,
        "mask": chance(rng, share),
        "causal": chance(rng, 0.35),
        "window": chance(rng, 0.3),
        "softcap": chance(rng, share),
        "sinks": one_of(rng, floats) if chance(rng, share) else None,
        "alibi_slopes": one_of(rng, floats) if chance(rng, share) else None,
        "query_lengths": one_of(rng, INTEGERS) if chance(rng, share) else None,
        "key_lengths": one_of(rng, INTEGERS) if chance(rng, share) else None,
        "query_offset": one_of(rng, ("int", "zero", "array" if share else "int"))
        if chance(rng, 0.3)
        else "none",
        "offset_dtype": one_of(rng, ("int32", "int64", "int16")),
        "tf32": dtype == "float32" and chance(rng, 0.3),
        "lengths": one_of(rng, KINDS),
        "batch": one_of(rng, BATCHES),
        "heads": one_of(rng, HEADS),
        "any group": chance(rng, 0.4),
        "matrices": chance(rng, 0.06),
        "layout": one_of(rng, ("bhsd", "bshd")),
        "forms": _forms(rng),
        "out": one_of(rng, FORMS) if chance(rng, 0.25) else None,
        "return_lse": chance(rng, 0.8),
        "expanded": [n for n in ("bias", "mask") if chance(rng, 0.2)],
        "empty": (chance(rng, 0.02), chance(rng, 0.02)),
        # Which axes are broadcast, and which sides a window has: by a generator that
        # is the same for all sizes.
        "broadcast": int(rng.integers(1 << 30)),
    }


ARRAYS = (
    "q", "k", "v", "bias", "mask", "sinks", "alibi_slopes", "query_offset",
    "query_lengths", "key_lengths",
)  # fmt: skip


def _forms(rng):
    """How each array lies in memory: all as they come, or anyhow."""
    if chance(rng, 0.35):
        return dict.fromkeys(ARRAYS, "plain")
    choices = ROW_FORMS if chance(rng, 0.5) else FORMS
    return {name: one_of(rng, choices) for name in ARRAYS}


def _attention_sizes(rng, s, budget):
    """(batch, heads, key heads, queries, keys) of at most 2^budget scores."""
    batch, (heads, kv_heads) = s["batch"], s["heads"]
    if s["any group"]:
        kv_heads = int(rng.integers(1, 4))
        heads = kv_heads * int(rng.integers(1, 18))
    if s["lengths"] == "many entries":
        batch = (length(rng, *MANY_ENTRIES),)
    if s["matrices"]:
        batch, heads, kv_heads = (), 1, 1
    of_queries, of_keys = LENGTHS[s["lengths"]]
    seqlen_q, seqlen_k = length(rng, *of_queries), length(rng, *of_keys)
    if chance(rng, 0.2) and s["lengths"] in ("few", "plain", "long"):
        seqlen_q = seqlen_k
    if s["method"] == "naive":
        seqlen_k = min(seqlen_k, LONGEST_NAIVE)
    # Exact results of float64 take long double.
    most = 2 ** (budget - 3 if s["dtype"] == "float64" else budget)
    most = most * 64 // max(64, s["head_dim"], s["head_dim_v"])
    batch, group = list(batch), heads // kv_heads
    while seqlen_q * seqlen_k * group * kv_heads * math.prod(batch) > most:
        if max(batch, default=1) > 1:
            batch[batch.index(max(batch))] -= 1
        elif kv_heads > 1:
            kv_heads -= 1
        elif s["lengths"] == "long" and seqlen_k > seqlen_q:
            seqlen_k = seqlen_k * 3 // 4
        elif s["lengths"] == "many queries" and seqlen_k > 20:
            seqlen_k = seqlen_k * 3 // 4
        elif seqlen_q > 64:
            seqlen_q = seqlen_q * 2 // 3 - 1
        elif group > 1:
            group -= 1
        elif seqlen_q > 1:
            seqlen_q = seqlen_q // 2
        else:
            seqlen_k = seqlen_k * 2 // 3
    no_queries, no_keys = s["empty"]
    seqlen_q, seqlen_k = seqlen_q * (not no_queries), seqlen_k * (not no_keys)
    return tuple(batch), group * kv_heads, kv_heads, seqlen_q, seqlen_k


def _smaller(rng, shape):
    """A shape that broadcasts to `shape`: some axes 1, some leading ones left out."""
    kept = tuple(n if chance(rng, 0.7) else 1 for n in shape)
    return kept[int(rng.integers(len(shape) + 1)) :] if chance(rng, 0.4) else kept


def _queries_and_keys(rng, values, s, batch, heads, kv_heads, seqlen_q, seqlen_k):
    """q, k, v heads-first in float64: some scores large, some rows nearly one-hot."""
    axes = np.random.default_rng(s["broadcast"])
    k_batch = batch
    if chance(axes, 0.3):
        k_batch = tuple(n if chance(axes, 0.5) else 1 for n in batch)
        k_batch = k_batch[int(axes.integers(len(batch) + 1)) :]
    q_batch, v_batch = batch, k_batch
    if chance(axes, 0.15):  # entries that share v alone, or do not share it
        v_batch = tuple(n if chance(axes, 0.5) else 1 for n in batch)
    if chance(axes, 0.15) and k_batch == batch:
        q_batch = tuple(n if chance(axes, 0.5) else 1 for n in batch)
    q = values.normal(size=(*q_batch, heads, seqlen_q, s["head_dim"]))
    k = values.normal(size=(*k_batch, kv_heads, seqlen_k, s["head_dim"]))
    v = values.normal(size=(*v_batch, kv_heads, seqlen_k, s["head_dim_v"]))
    if s["method"] == "naive":
        # No maximum is subtracted: scores stay where exp is precise in float16.
        return q * s["head_dim"] ** -0.25, k * s["head_dim"] ** -0.25, v
    style = one_of(rng, ("plain", "bites", "bites"))
    is_drawn = not isinstance(values, Zeros)
    if style == "bites" and q.size and k.size and is_drawn:
        rows = q.reshape(-1, s["head_dim"])
        rows[:: int(values.integers(2, 6))] *= 30
        keys = np.broadcast_to(k, (*batch, *k.shape[-3:])).reshape(-1, s["head_dim"])
        some = values.integers(len(rows), size=max(1, len(rows) // 5))
        rows[some] = 8 * keys[values.integers(len(keys), size=len(some))]
    return q, k, v


def _lengths(rng, values, shape, size, dtype):
    """Lengths of sequences: short ones, whole ones, and what is clipped to 0 or all."""
    # Few keys leave most parts of the keys empty.
    most = min(size, 70) if chance(rng, 0.4) else size + 3
    low = 0 if dtype.startswith("u") else -2
    high = min(most, np.iinfo(dtype).max)
    lengths = np.array(values.integers(low, high + 1, size=shape))
    if lengths.size and chance(rng, 0.3):
        lengths.reshape(-1)[0] = 0
    return lengths.astype(dtype)


def _options(rng, values, s, batch, heads, seqlen_q, seqlen_k):
    """(arrays, other arguments) of the options in the structure."""
    naive = s["method"] == "naive"
    scores = (*batch, heads, seqlen_q, seqlen_k)
    arrays, options = {}, {}
    axes = np.random.default_rng([1, s["broadcast"]])
    if s["bias"]:
        bias = np.array(
            values.normal(size=_smaller(axes, scores)) * (1 if naive else 3)
        )
        if chance(rng, 0.4):
            bias[values.random(bias.shape) < 0.2] = -np.inf
        arrays["bias"] = bias.astype(dtype_of(s["bias"]))
    if s["mask"]:
        arrays["mask"] = values.random(_smaller(axes, scores)) < 0.75
    if s["causal"]:
        options["causal"] = True
    if s["window"]:
        sides = [int(rng.integers(seqlen_k + 2)), int(rng.integers(12)), None]
        left, right = one_of(axes, sides), one_of(axes, sides)
        options["window"] = left if chance(axes, 0.2) else (left, right)
    if s["softcap"]:
        options["softcap"] = float(rng.uniform(1, 30))
    if s["sinks"]:
        arrays["sinks"] = values.normal(size=heads).astype(dtype_of(s["sinks"]))
    far = seqlen_q + seqlen_k + 1
    if s["query_offset"] == "zero":
        options["query_offset"] = 0
    elif s["query_offset"] == "int":
        options["query_offset"] = int(rng.integers(-seqlen_q - 3, seqlen_k + 3))
    elif s["query_offset"] == "array":
        shape = _smaller(axes, batch)
        offsets = values.integers(-seqlen_q - 3, seqlen_k + 3, size=shape)
        arrays["query_offset"] = np.asarray(offsets).astype(s["offset_dtype"])
    if s["alibi_slopes"]:
        shape = (heads,) if chance(axes, 0.5) else (*_smaller(axes, batch), heads)
        slopes = values.random(shape) * (2.0 / far if naive else 0.5)
        arrays["alibi_slopes"] = slopes.astype(dtype_of(s["alibi_slopes"]))
    for name, size in (("query_lengths", seqlen_q), ("key_lengths", seqlen_k)):
        if s[name]:
            shape = _smaller(axes, batch)
            arrays[name] = _lengths(rng, values, shape, size, s[name])
    if chance(axes, 0.4):
        options["scale"] = float(one_of(axes, (0.0, 1.0, -0.5, 0.1, 1.7)))
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


def draw_attention(structure, rng, values, budget):
    s = _attention_structure(structure)
    batch, heads, kv_heads, seqlen_q, seqlen_k = _attention_sizes(rng, s, budget)
    sizes = batch, heads, kv_heads, seqlen_q, seqlen_k
    q, k, v = _queries_and_keys(rng, values, s, *sizes)
    arrays, options = _options(rng, values, s, batch, heads, seqlen_q, seqlen_k)
    if not isinstance(values, Zeros):
        if seqlen_q and chance(values, 0.6):
            _poison(values, q, k, v, arrays, options, batch, heads)
        if chance(values, 0.05) and q.size:  # a NaN that is seen stays in its row
            q.reshape(-1)[int(values.integers(q.size))] = np.nan
    options |= {"method": s["method"], "layout": s["layout"]}
    options["return_lse"] = s["return_lse"]
    if s["tf32"]:
        options["precision"] = "tf32"
    dtype = dtype_of(s["dtype"])
    given = {}
    for name, x in {"q": q, "k": k, "v": v}.items():
        if s["matrices"]:
            x = x[0]
        elif options["layout"] == "bshd":
            x = x.swapaxes(-3, -2)
        given[name] = x.astype(dtype)
    forms = {name: s["forms"][name] for name in (*given, *arrays)}
    problem = Problem(
        "attention", 0, None, "attention", given | arrays, forms, options, s["out"]
    )
    problem.notes["expanded"] = s["expanded"]
    problem.notes["scores"] = (*batch, heads, seqlen_q, seqlen_k)
    return problem


def attention_shapes(problem):
    """Shapes of out and of lse."""
    *batch, heads, seqlen_q, _ = problem.notes["scores"]
    columns = problem.arrays["v"].shape[-1]
    if problem.arrays["q"].ndim == problem.arrays["k"].ndim == 2:
        return (seqlen_q, columns), (seqlen_q,)
    lse = (*batch, heads, seqlen_q)
    if problem.options["layout"] == "bhsd":
        return (*lse, columns), lse
    return (*batch, seqlen_q, heads, columns), lse


def growth_of_sums(xp, columns, *rows):
    """How the error of a score grows where many columns go into one sum.

    BLAS may add one column after another, and so does row `tiled` of a GPU up to 256
    columns (docs/guides/precision.md). Tensor cores of 16 bits truncate their sum, 16
    columns at a time: such errors are of one sign, and add up. Of D products of one
    sign the partial sums grow evenly, so they lose up to D / 32 units in the last
    place.
    """
    if columns <= 128:
        return 1
    if xp is np or ("tiled" in rows and columns <= 256):
        return columns**0.5 / 4
    return columns / 64 if {"mma", "hopper", "hopper_wide"} & set(rows) else 1


def exact_attention(problem, growth=1):
    """(out, lse, size) by the oracle; float64 is enough below float64 inputs."""
    dtype = problem.arrays["q"].dtype
    options = {n: x for n, x in problem.arrays.items() if n not in "qkv"}
    for name in ("causal", "window", "softcap", "query_offset", "scale", "layout"):
        if name in problem.options:
            options[name] = problem.options[name]
    q, k, v = (problem.arrays[n] for n in "qkv")
    real = np.longdouble if dtype == np.float64 else np.float64
    return oracle.attention(q, k, v, real=real, growth=growth, **options)


def exact_and_mean(problem, growth=1):
    """(out, the same weights over abs(v), lse, size)."""
    v = problem.arrays["v"]
    both = np.concatenate((v, np.abs(v)), -1)
    asked = dataclasses.replace(problem, arrays=problem.arrays | {"v": both})
    out, lse, size = exact_attention(asked, growth)
    columns = v.shape[-1]
    return out[..., :columns], out[..., columns:], lse, size


def attention_bounds(problem, mean, lse, size):
    """Largest errors of out, row by row, and of lse.

    The promised bound, which is relative to the weighted mean of abs(v), and what the
    rounding of the scores alone brings: a score of `size` is wrong by `size` roundings,
    which changes the weights by as much.
    """
    dtype = problem.arrays["q"].dtype.name
    unit = float(finfo(dtype_of(dtype)).eps)
    work = unit if dtype == "float64" else 2.0**-23
    relative = BOUNDS["attention"][dtype]
    if problem.options.get("precision") == "tf32":
        relative, work = TF32_ATTENTION, 2.0**-10
    mean = np.abs(np.where(np.isfinite(mean), mean, 0))
    largest = mean.max(-1, keepdims=True, initial=0)
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


def given(xp, problem):
    """The arrays of a problem in the memory of `xp`, each as its form says."""
    host = lengths_for(xp, problem.arrays, problem.options.get("layout", "bhsd"))
    arrays = {
        name: place(xp, x, problem.forms.get(name, "plain")) for name, x in host.items()
    }
    for name in problem.notes.get("expanded", ()):
        if name in arrays:
            arrays[name] = xp.broadcast_to(arrays[name], problem.notes["scores"])
    return arrays


def lengths_for(xp, arrays, layout):
    """`arrays` with lengths that a back end takes: NumPy's are checked, not clipped."""
    arrays = dict(arrays)
    for name, x in (
        ("query_lengths", arrays.get("q")),
        ("key_lengths", arrays.get("k")),
    ):
        lengths = arrays.get(name)
        if xp is np and lengths is not None:
            size = x.shape[-3 if layout == "bshd" and x.ndim > 2 else -2]
            most = min(size, np.iinfo(lengths.dtype).max)
            arrays[name] = np.asarray(lengths.clip(0, most))
    return arrays


def check_attention(xp, problem):
    arrays = given(xp, problem)
    q, k, v = (arrays.pop(n) for n in "qkv")
    told = cupyflash.explain("attention", q, k, v, **arrays, **problem.options)
    growth = growth_of_sums(xp, q.shape[-1], told.kernel)
    exact, mean, lse, size = exact_and_mean(problem, growth)
    dtype = problem.arrays["q"].dtype
    out = None
    if problem.out_form:
        out = empty(xp, exact.shape, dtype, problem.out_form)
    if xp is np:  # a call like an earlier one skips the checks, and takes its own path
        cupyflash.attention(q, k, v, **arrays, **problem.options)
    result = cupyflash.attention(q, k, v, **arrays, **problem.options, out=out)
    got, got_lse = result if problem.options["return_lse"] else (result, None)
    assert isinstance(got, xp.ndarray)
    assert out is None or got is out
    assert got.dtype == dtype
    allowed, allowed_lse = attention_bounds(problem, mean, lse, size)
    finite = assert_same_specials(got, exact)
    error = _difference(got, exact, finite)
    allowed = np.broadcast_to(allowed, error.shape)
    over = np.argwhere(~(error <= allowed))
    assert not len(over), (
        f"out is wrong by {error[tuple(over[0])]}, allowed {allowed[tuple(over[0])]}, "
        f"at {over[0]}"
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
# (shape, axis): rows that are whole vectors, very short ones, rows over two axes, a
# result that is turned if it lies in another order, few long rows, long columns.
WITH_KERNELS_OF_THEIR_OWN = (
    ((301, 32), 1),
    ((90, 64), -1),
    ((900, 4), -1),
    ((700, 10), 1),
    ((12, 5, 64), (0, 2)),
    ((270, 250), 1),
    ((3, 40_001, 4), 1),
)
SHORT_ROWS = (16, 24, 32, 48, 64, 96, 128, 192, 256)  # whole vectors
# The same where there is time: a row that no block, no card, and no cache holds.
LONG_ROWS = (
    (1, 700_001), (2, 1_300_001), (1, 4_500_001), (1, 9_000_001), (2, 1 << 20),
    (9, 300_000), (5, 500_000), (3, 1_900_003),
)  # fmt: skip


def _softmax_structure(rng):
    dtype = one_of(rng, (*FLOATS, *FLOATS, *FLOATS, "int32", "uint8", "bool"))
    # Without options in every other one: the fastest rows refuse most of them.
    asks = chance(rng, 0.5)
    return {
        "function": one_of(rng, FUNCTIONS),
        "dtype": dtype,
        "asked": one_of(rng, FLOATS) if chance(rng, 0.4 * asks) else None,
        "other": dtype if chance(rng, 0.7) else one_of(rng, FLOATS),
        "method": one_of(rng, (*METHODS, "auto", "auto")),
        "where": chance(rng, 0.6 * asks),
        "weights": chance(rng, 0.4),
        "scale": float(one_of(rng, (1.0, 0.0, -1.0, 0.3))) if asks else 1.0,
        "return_sign": chance(rng, 0.3),
        "out": one_of(rng, FORMS) if chance(rng, 0.25) else None,
    }


def _values(rng, shape, dtype, method):
    """Numbers of `dtype`: some rows large, some nearly one-hot, some special."""
    if isinstance(rng, Zeros):
        return np.zeros(shape, dtype_of(dtype))
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


def _geometry(s, rng, budget):
    """(shape, axis): row lengths and strides choose kernels too."""
    kind, most = s["geometry"], 2**budget
    if kind == "rows":
        n = length(rng, 1, most)
        shape = [min(length(rng, 1, 5000), max(1, most // n)), n]
    elif kind == "short rows":
        n = s["short"]
        shape = [min(length(rng, 300, 20_000), max(1, most // n)), n]
    elif kind == "columns":
        n = length(rng, 1, min(most, 100_000))
        inner = min(length(rng, 2, 300), max(2, most // n))
        shape = [max(1, min(int(rng.integers(1, 9)), most // (n * inner))), n, inner]
    else:
        shape = [one_of(rng, SIZES) for _ in range(s["ndim"])]
        while np.prod(shape) > most:
            shape[int(np.argmax(shape))] //= 2
    if kind == "any" and shape and chance(rng, 0.1):
        shape[int(rng.integers(len(shape)))] = 0
    axis = 1 if kind in ("rows", "short rows", "columns") else s["axis"]
    if kind == "special" and s["method"] != "naive":  # whose sums overflow float16
        return s["special"]
    if kind == "long" and s["method"] != "naive" and budget >= LARGE:
        rows, n = s["long"]
        n -= int(rng.integers(n // 50))
        shape, axis = (rows, n), one_of(rng, (None, 1, -1) if rows == 1 else (1, -1))
    return tuple(shape), axis


def _softmax_geometry(rng):
    """What a structure says of shapes and memory."""
    kinds = ("rows", "short rows", "any") * 3 + ("columns", "long") * 2 + ("special",)
    kind, ndim, axis = one_of(rng, kinds), int(rng.integers(5)), None
    if kind not in ("any", "long"):
        ndim = 2
    if ndim and chance(rng, 0.5):
        axis = int(rng.integers(-ndim, ndim))
    elif chance(rng, 0.6):
        axis = tuple(int(a) for a in rng.permutation(ndim)[: rng.integers(ndim + 1)])
    usual = chance(rng, 0.4) or kind in ("long", "short rows")
    names = ("x", "dy", "b", "where")
    forms = {name: one_of(rng, FORMS) for name in names}
    if usual or kind == "special":
        forms = dict.fromkeys(names, one_of(rng, ("plain", "plain", "shifted")))
    return {
        "geometry": kind, "ndim": ndim, "axis": axis, "forms": forms,
        "special": one_of(rng, WITH_KERNELS_OF_THEIR_OWN),
        "long": one_of(rng, LONG_ROWS), "short": one_of(rng, SHORT_ROWS)
        if chance(rng, 0.4)
        else length(rng, 2, 256),
    }  # fmt: skip


def draw_softmax(structure, rng, values, budget):
    s = _softmax_structure(structure) | _softmax_geometry(structure)
    shape, axis = _geometry(s, rng, budget)
    forms = s["forms"]
    is_drawn = not isinstance(values, Zeros)
    method, function = s["method"], s["function"]
    options: dict[str, Any] = {"axis": axis}
    arrays = {"x": _values(values, shape, s["dtype"], method)}
    if function in ("softmax", "log_softmax"):
        options["method"] = method
        options["scale"] = s["scale"]
        if s["asked"]:
            options["dtype"] = s["asked"]
    if function.endswith("vjp"):
        options["scale"] = float(one_of(rng, (1.0, -0.5)))
        real = s["dtype"] if s["dtype"] in FLOATS else "float32"
        x = _values(values, shape, real, "naive")
        if is_drawn:
            forward = getattr(oracle, function.removesuffix("_vjp"))
            where = values.random(shape) < 0.9
            x = forward(x, axis, where, real=np.float64)
        arrays["x"] = x.astype(dtype_of(real))
        other = s["other"] if s["other"] in FLOATS else real
        dy_shape = _smaller(rng, shape) if chance(rng, 0.2) else shape
        dy = np.asarray(values.normal(size=dy_shape))
        arrays["dy"] = dy.astype(dtype_of(other))
    elif s["where"]:
        where = values.random(_smaller(rng, shape)) < one_of(rng, (0.1, 0.7, 0.95))
        arrays["where"] = np.asarray(where)
    if function == "logsumexp":
        options["keepdims"] = chance(rng, 0.5)
        options["return_sign"] = s["return_sign"]
        if s["weights"]:
            other = s["other"] if s["other"] in FLOATS else "float64"
            b = values.random(_smaller(rng, shape)) + 0.1
            b = np.where(values.random(b.shape) < 0.2, 0, b)
            arrays["b"] = np.asarray(b).astype(dtype_of(other))
    return Problem("softmax", 0, None, function, arrays, forms, options, s["out"])


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


def _real_of(problem):
    """float64 is exact enough for long rows whose results are narrower."""
    types = {x.dtype.name for name, x in problem.arrays.items() if name != "where"}
    is_single = types | {_result_dtype(problem)} <= set(FLOATS[:3])
    is_large = problem.arrays["x"].size > 1 << 15
    return np.float64 if is_single and is_large else np.longdouble


@np.errstate(all="ignore")
def exact_softmax(problem):
    host, options = problem.arrays, problem.options
    given = {n: options[n] for n in ("axis", "scale", "keepdims") if n in options}
    given |= {n: host[n] for n in ("where", "b") if n in host}
    given["real"] = _real_of(problem)
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


# --- merge_attention_states ----------------------------------------------------------


def draw_merge(structure, rng, values, budget):
    """Parts of attention, some of which have seen no key."""
    dtype = one_of(structure, FLOATS)
    wide_lse = dtype == "float64" or chance(structure, 0.2)
    rows_dims = int(structure.integers(1, 5))
    columns = _head_dim(structure)
    forms = {name: one_of(structure, FORMS) for name in ("outs", "lses")}
    out_form = one_of(structure, FORMS) if chance(structure, 0.25) else None
    parts = length(rng, 1, one_of(rng, (4, 40, 400)))
    rows = [length(rng, 1, 40) for _ in range(rows_dims)]
    while parts * math.prod(rows) * columns > 2**budget and max(rows) > 1:
        rows[rows.index(max(rows))] //= 2
    axis = int(rng.integers(-rows_dims - 1, rows_dims + 1))
    outs = values.normal(size=(parts, *rows, columns))
    lses = values.normal(size=(parts, *rows)) * one_of(rng, (1, 10, 200))
    lses[values.random(lses.shape) < 0.1] = -np.inf
    place_of_axis = axis % (rows_dims + 1)
    arrays = {
        "outs": np.moveaxis(outs, 0, place_of_axis).astype(dtype_of(dtype)),
        "lses": np.moveaxis(lses, 0, place_of_axis).astype(
            np.float64 if wide_lse else np.float32
        ),
    }
    options = {"axis": axis}
    return Problem(
        "merge", 0, None, "merge_attention_states", arrays, forms, options, out_form
    )


def check_merge(xp, problem):
    host, axis = problem.arrays, problem.options["axis"]
    arrays = {name: place(xp, x, problem.forms[name]) for name, x in host.items()}
    outs, lses = host["outs"], host["lses"]
    exact, exact_lse = oracle.merge(
        np.moveaxis(outs, axis % lses.ndim, 0), np.moveaxis(lses, axis % lses.ndim, 0)
    )
    mean, _ = oracle.merge(
        np.abs(np.moveaxis(outs, axis % lses.ndim, 0)),
        np.moveaxis(lses, axis % lses.ndim, 0),
    )
    out = None
    if problem.out_form:
        out = empty(xp, exact.shape, outs.dtype, problem.out_form)
    got, got_lse = cupyflash.merge_attention_states(**arrays, axis=axis, out=out)
    assert out is None or got is out
    assert (got.dtype, got_lse.dtype) == (outs.dtype, lses.dtype)
    name = outs.dtype.name
    work = 2.0**-52 if "float64" == name == lses.dtype.name else 2.0**-23
    # The difference of two lse is rounded, and so is each step of the sum.
    steps = len(lses) if axis == 0 else lses.shape[axis]
    size = np.abs(lses[np.isfinite(lses)]).max(initial=0)
    share = BOUNDS["attention"][name] + work * (2 * size + 8 + np.sqrt(steps))
    error = _difference(got, exact, assert_same_specials(got, exact))
    over = error - share * mean.max(-1, keepdims=True, initial=0)
    assert np.all(over <= 0), f"out is wrong by {over.max()} more than is allowed"
    error = _difference(got_lse, exact_lse, assert_same_specials(got_lse, exact_lse))
    allowed = work * (2 * size + 8 + np.sqrt(steps))
    assert error.max(initial=0) <= allowed, (
        f"lse is wrong by {error.max()}, allowed {allowed}"
    )


DRAWS = {"attention": draw_attention, "softmax": draw_softmax, "merge": draw_merge}
CHECKS = {"attention": check_attention, "softmax": check_softmax, "merge": check_merge}


def main():
    parser = argparse.ArgumentParser(description="Run one random problem again.")
    parser.add_argument("operation", choices=DRAWS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--sizes", type=int, default=0)
    parser.add_argument("--budget", type=int, default=SMALL)
    parser.add_argument("--xp", choices=("numpy", "cupy"), default="numpy")
    options = parser.parse_args()
    xp = __import__(options.xp)
    problem = draw(options.operation, options.seed, options.sizes, options.budget)
    print(problem)
    run(xp, problem)
    print("agrees")


if __name__ == "__main__":
    # The module that others import, with the operations that they add.
    import fuzz_vjp

    fuzz_vjp.fuzz.main()
