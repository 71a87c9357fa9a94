"""Gradients of what a score function reads, CuPy arrays beside NumPy's.

``python tests/support/named_gradients.py sm_75`` compares them on emulated kernels, and
prints a digest of the bits of each.
"""

import functools
import hashlib
import sys

import numpy as np

import cupyflash


def gained(s, h, *, gain):
    return s * gain[h]


def relative(s, h, i, j, *, table):
    return s + table[h, np.clip(i - j, -6, 6) + 6]


def by_pairs(s, b, i, j, *, weights, kinds, unread):
    return s * weights[kinds[b, i], kinds[b, j]] + weights[kinds[b, j], 0]


def all_of_it(s, b, h, i, j, *, gain, table, once):
    near = table[h, np.clip(i - j, -6, 6) + 6]
    return np.where(i >= j, once * np.sin(s), s * near) - gain[h] * abs(i - j)


def of_keys(s, j, *, bias):
    return s + bias[j]


def anywhere(s, i, j, *, bias):
    return s + bias[i, j]


RNG = np.random.default_rng(0)
NAMED = {
    "gain": RNG.normal(size=4),
    "table": RNG.normal(size=(13, 8)).T[::2],  # of other strides
    "weights": RNG.normal(size=(3, 3)).astype("float32"),
    "kinds": RNG.integers(0, 3, (2, 60)),
    "once": np.array(1.5),
    "unread": np.ones(5),
}
KEYS = {"bias": np.where(np.arange(47) == 5, -np.inf, 1.0)}
MATRIX = {"bias": RNG.normal(size=(47, 47)).astype("float16")}
SHAPES = (2, 4, 33, 8), (2, 2, 47, 8), (2, 2, 47, 12)
NO_KEYS = (2, 4, 33, 8), (2, 2, 0, 8), (2, 2, 0, 12)
WIDE = (1, 4, 17, 200), (1, 4, 19, 200), (1, 4, 19, 130)
LENGTHS = {"query_lengths": np.array([33, 20]), "key_lengths": np.array([40, 0])}
OPTIONS = {"causal": True, "window": (20, None), "softcap": 2.0, "scale": 0.7}
# function, arrays, shapes, dtype, options
CASES = {
    "head": (gained, NAMED, SHAPES, "float32", {}),
    "diagonal and lengths": (relative, NAMED, SHAPES, "float32", LENGTHS),
    "pairs of kinds": (by_pairs, NAMED, SHAPES, "float64", {}),
    "several arrays and options": (all_of_it, NAMED, SHAPES, "float32", OPTIONS),
    "16 bits and a mask": (
        all_of_it, NAMED, SHAPES, "float16", {"mask": lambda i, j: j <= i + 9},
    ),
    "keys, one hidden": (of_keys, KEYS, SHAPES, "float32", {}),
    "a matrix": (anywhere, MATRIX, SHAPES, "float32", {"query_offset": 0}),
    "wide heads": (gained, NAMED, WIDE, "float32", {}),
    "no keys": (gained, NAMED, NO_KEYS, "float32", {}),
    "NaN": (relative, NAMED, SHAPES, "float32", {}),
}  # fmt: skip
ALLOWED = {"float16": 1e-3, "float32": 5e-6, "float64": 1e-13}


def check(name, cupy):
    """Compare a case with NumPy's; the gradients."""
    score, arrays, shapes, dtype, options = CASES[name]
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    if name == "NaN":
        q[0, 1, 3] = np.nan
    code = score.__code__
    asked = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    named = {n: x for n, x in arrays.items() if n in asked}
    names = [n for n, x in named.items() if x.dtype.kind == "f"]
    functions = {"score": score, "score_arrays": named, **options}
    out, lse = cupyflash.attention(q, k, v, **functions, return_lse=True)
    dout = rng.normal(size=out.shape).astype(dtype)
    inputs = dout, q, k, v, out, lse
    expected = cupyflash.attention_vjp(*inputs, **functions, need_dscore=names).dscore
    on_gpu = functions | {
        "score_arrays": {n: cupy.asarray(x) for n, x in named.items()}
    }
    for option in LENGTHS:
        if option in options:
            on_gpu[option] = cupy.asarray(options[option])
    vjp = functools.partial(
        cupyflash.attention_vjp, *map(cupy.asarray, inputs), **on_gpu, need_dscore=names
    )
    found = {n: cupy.asnumpy(x) for n, x in vjp().dscore.items()}
    again = vjp().dscore  # by the plan that was made
    assert list(found) == names
    for n, x in found.items():
        assert (x.shape, x.dtype) == (named[n].shape, named[n].dtype)
        assert x.tobytes() == cupy.asnumpy(again[n]).tobytes(), f"{n}: other bits"
        size = np.nan_to_num(np.abs(expected[n])).max(initial=0)
        allowed = max(ALLOWED[dtype], np.finfo(x.dtype).eps) * size
        np.testing.assert_allclose(
            x.astype(float), expected[n].astype(float), rtol=0, atol=allowed
        )
    return found


def main(arch, *names):
    """Run cases on emulated kernels of an architecture."""
    import emulation

    cupy = emulation.install(arch)
    for name in names or CASES:
        found = check(name, cupy)
        bits = b"".join(x.tobytes() for x in found.values())
        print(f"{name}: {hashlib.sha256(bits).hexdigest()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
