"""Small problems that launch what `python -m cupyflash compile --all` lists.

The samples of the compile list say which dtypes, head sizes and options there are. Of
each, calls of a few sizes are planned (tests/support/planned.py), with a row forced;
those that launch a variant that none before them did are problems of
tests/support/fuzz.py.
"""

import functools
import itertools

import fuzz
import numpy as np
import planned
from accuracy import dtype_of

from cupyflash._attention.gpu import samples as _samples
from cupyflash._cli import compile_jobs
from cupyflash._cuda import device as _device

# Rows of which every variant is to be met. There are too many of the others: each type
# of each array of softmax, say.
WHOLE = {
    "attention": ("hopper", "mma", "hopper_wide", "tiled_f64"),
    "attention_vjp": ("hopper", "mma", "hopper_wide", "mma_split", "tiled_f64"),
}
BESIDE = {"attention": ("merge", "copy"), "attention_vjp": ("sum", "narrow")}

# (batch, query heads, key heads, queries, keys): little work, work for each
# multiprocessor, long rows, queries that are few, of one head and of groups, parts of
# the keys, more keys than a cache holds.
SIZES = (
    (2, 2, 2, 70, 90),
    (1, 210, 210, 20, 20),
    (1, 210, 210, 70, 20),
    (1, 2, 1, 130, 200),
    (1, 1, 1, 300, 300),
    (2, 2, 2, 520, 130),
    (2, 2, 2, 20, 1300),
    (2, 2, 2, 20, 1304),
    (2, 2, 2, 1300, 12),
    (2, 2, 2, 1300, 30),
    (2, 2, 2, 30, 1300),
    (2, 1, 1, 700, 750),
    (1, 4, 1, 1, 2100),
    (1, 4, 1, 40, 2100),
    (2, 8, 2, 1, 700),
    (2, 64, 64, 140, 70),
    (1, 16, 16, 1030, 64),
    (1, 2, 2, 1030, 1030),
    (1, 1, 1, 2100, 520),
    (4, 40, 8, 70, 130),
    (2, 8, 2, 12, 700),
    (1, 4, 1, 7, 2100),
    (16, 64, 16, 12, 2100),
    (1, 4, 1, 1, 9000),
    (1, 2, 2, 2100, 1100),
    (1, 2, 2, 260, 2100),
    (2, 32, 32, 520, 70),
)


@functools.cache
def wanted(arch="sm_90a"):
    """{digest: (operation, row, variant)} of the rows that are to be met whole."""
    device = _device.device_of_arch(arch)
    found = {}
    for operation, rows in WHOLE.items():
        table = compile_jobs._TABLES[operation]
        for row, variant in table.compile_list(device, True):
            if row in rows + BESIDE[operation]:
                found.setdefault(planned.digest_of(variant), (operation, row, variant))
    return found


@functools.cache
def samples():
    """(problem of the compile list, axes of the batch)."""
    return tuple(_samples.everything())


def work():
    """(operation, row, index of a sample) of all there is to be tried."""
    return [
        (operation, row, index)
        for operation, rows in WHOLE.items()
        for row in rows
        for index in range(len(samples()))
    ]


# Ways to call that choose kernels, too.
WAYS = {
    "attention": ({},),
    "attention_vjp": (
        {"deterministic": True},
        {"deterministic": False},
        {"deterministic": True, "shared": True},
    ),
}


def problem_of(operation, index, call, values=False):
    """A problem of the fuzz with the options of a sample, called in a way."""
    asked, axes = samples()[index]
    (batch, heads, kv_heads, seqlen_q, seqlen_k), way = call
    rng = np.random.default_rng(index) if values else fuzz.Zeros()
    batch = (*(2,) * (axes - 1), batch)
    dtype = dtype_of(asked.dtype)
    # Keys and values of one entry, whose gradients are summed over the batch.
    of_keys = (1,) * len(batch) if way.get("shared") else batch
    shapes = {
        "q": (*batch, heads, seqlen_q, asked.head_dim),
        "k": (*of_keys, kv_heads, seqlen_k, asked.head_dim),
        "v": (*of_keys, kv_heads, seqlen_k, asked.head_dim_v),
    }
    arrays = {name: _array(rng, shape, dtype) for name, shape in shapes.items()}
    forms = dict.fromkeys(arrays, "plain")
    options = {"method": "auto", "layout": "bhsd"}
    if asked.no_tensor_map is not None:
        forms["q"] = "shifted"
    if axes > 1:  # axes that do not merge
        forms |= {"q": "heads"}
    for name in ("bias", "mask"):
        given = getattr(asked, name)
        if given is None:
            continue
        is_same = asked.terms == "keys" or (asked.terms, name) == (
            "bias of keys",
            "bias",
        )
        shape = (*batch, heads, 1 if is_same else seqlen_q, seqlen_k)
        arrays[name] = _array(rng, shape, dtype_of(given))
        forms[name] = "swapped" if asked.terms == "any" else "plain"
    if asked.sinks is not None:
        arrays["sinks"] = rng.normal(size=heads).astype(dtype_of(asked.sinks))
    if asked.alibi_slopes is not None:
        slopes = rng.random((*batch, heads)) * 0.1
        arrays["alibi_slopes"] = slopes.astype(dtype_of(asked.alibi_slopes))
    for name, most in (("query_lengths", seqlen_q), ("key_lengths", seqlen_k)):
        if getattr(asked, name) is not None:
            lengths = rng.integers(0, most + 1, size=batch)
            arrays[name] = lengths.astype(getattr(asked, name))
    if asked.query_offsets is not None:
        offsets = rng.integers(-3, seqlen_k, size=batch)
        arrays["query_offset"] = offsets.astype(asked.query_offsets)
    if (asked.left, asked.right) != (None, None):
        left = None if asked.left is None else max(1, seqlen_k // 3)
        options |= {"window": (left, asked.right)}
    if asked.softcap:
        options["softcap"] = asked.softcap
    if operation == "attention":
        options["return_lse"] = True
    else:
        options["deterministic"] = way["deterministic"]
        for name in ("bias", "sinks"):
            options[f"need_d{name}"] = name in arrays
        shape = (*batch, heads, seqlen_q, asked.head_dim_v)
        arrays["dout"] = _array(rng, shape, dtype)
    problem = fuzz.Problem(operation, index, None, operation, arrays, forms, options)
    problem.notes |= {"expanded": [], "scores": (*batch, heads, seqlen_q, seqlen_k)}
    return problem


def _array(rng, shape, dtype):
    """Random numbers, or booleans of a mask; zeros that take no memory of `Zeros`."""
    if isinstance(rng, fuzz.Zeros):
        return np.broadcast_to(np.zeros((), dtype), shape)
    x = rng.normal(size=shape)
    return x > -0.7 if np.dtype(dtype).kind == "b" else x.astype(dtype)


def reached(operation, row, index, met):
    """(call, plan) of calls by a row that launch what is not in `met`, which grows."""
    listed = wanted()
    for call in itertools.product(SIZES, WAYS[operation]):
        try:
            plan = planned.plan(problem_of(operation, index, call), row)
        except NotImplementedError:
            continue
        fresh = {d for d in plan.digests if d in listed} - met
        if fresh:
            met |= fresh
            yield call, plan


SAMPLES = 8  # in a test
FIRST = range(0, len(samples()), SAMPLES)
_met_here: set[str] = set()  # by this process, and not run again


def check(cupy, monkeypatch, operation, row, first):
    """Run what some samples lead a row to, against the oracle; how many calls."""
    import rows

    problems = [
        (index, call)
        for index in range(first, min(first + SAMPLES, len(samples())))
        for call, _ in reached(operation, row, index, _met_here)
    ]
    rows.force(monkeypatch, operation, row)
    for index, call in problems:
        fuzz.CHECKS[operation](cupy, problem_of(operation, index, call, values=True))
    return len(problems)


DTYPES = ("float16", "bfloat16", "float32", "float64")


def merge_of(dtype, lse_dtype):
    """Parts of rows, merged."""
    rng = np.random.default_rng(5)
    arrays = {
        "outs": rng.normal(size=(3, 40, 24)).astype(dtype_of(dtype)),
        "lses": rng.normal(size=(3, 40)).astype(lse_dtype),
    }
    forms, axis = dict.fromkeys(arrays, "plain"), {"axis": 0}
    return fuzz.Problem("merge", 0, None, "merge", arrays, forms, axis)


def beside():
    """Calls that copy their arrays first, and gradients that are summed and narrowed.

    Queries from which a copy pays, over rows of 33 columns; keys and values that
    entries of the batch share; a bias that queries share.
    """
    rng = np.random.default_rng(6)
    for dtype in DTYPES:
        for seqlen, columns in ((40, 33), (300, 33), (300, 34), (300, 36)):
            shape = (2, 2, seqlen, columns)
            arrays = {
                "q": rng.normal(size=shape), "k": rng.normal(size=(1, *shape[1:])),
                "v": rng.normal(size=(1, *shape[1:])), "dout": rng.normal(size=shape),
            }  # fmt: skip
            arrays = {n: x.astype(dtype_of(dtype)) for n, x in arrays.items()}
            forms = dict.fromkeys(("q", "k", "v", "dout"), "swapped")
            options = {"method": "auto", "layout": "bhsd"}
            notes = {"expanded": [], "scores": (2, 2, seqlen, seqlen)}
            gradients = fuzz.Problem(
                "attention_vjp", 0, None, "attention_vjp", arrays, forms,
                {**options, "deterministic": True}, notes=notes,
            )  # fmt: skip
            yield gradients
            inputs = {n: x for n, x in arrays.items() if n != "dout"}
            yield fuzz.Problem(
                "attention", 0, None, "attention", inputs, forms,
                {**options, "return_lse": True}, notes=notes,
            )  # fmt: skip
