"""CUDA text of score and mask functions: it compiles, and as C++ it is right."""

import ctypes
import inspect
import random
import re
import shutil
import subprocess

import expressions
import numpy as np
import pytest

from cupyflash import scores
from cupyflash._cli import nvrtc
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda import source
from cupyflash._expr.emit_cuda import (
    arguments,
    arguments_dtype,
    emit_cuda,
    emit_cuda_tiles,
    reads_of,
)
from cupyflash._expr.lookup import lookup

RNG = np.random.default_rng(0)
NAMED = {
    **expressions.arrays(),
    "slopes": RNG.uniform(0.1, 1, 4),
    "prefix": np.array([2, 4, 5]),
    "documents": np.sort(RNG.integers(0, 3, (3, 64)), axis=1),
    "table": RNG.normal(size=(32, 4)).T.copy().T,  # of other strides
    "squares": RNG.uniform(9, 12, (3, 64)),
    "q": RNG.uniform(0.5, 2, 4),
    "half": RNG.normal(size=4).astype(np.float16),
    "flags": np.array([True, False]),
    "gain": np.array(1.5),
}
SCORES = [
    scores.alibi,
    scores.softcap(2.0),
    scores.t5_bias(),
    scores.t5_bias(bidirectional=False),
    scores.soft_nearest_neighbor(0.5),
    scores.debye,
    lambda s, i, j: np.where(j <= i, s, -np.inf),
    lambda s, b, i, j, *, t: (
        s * np.exp(t[b, np.clip(i - j, -9, 9) + 8]) + np.nan * (i < 0)
    ),
]
# As C++ has no types of 16 bits, these are only compiled.
OF_16_BITS = [lambda s, h, *, half, gain, flags: s * half[h] * gain + flags[h % 2]]
MASKS = [
    scores.sliding_window(3),
    scores.prefix_lm,
    scores.document,
    scores.dilated_window(4, 3),
    scores.neighborhood_2d(5, 7, 3),
]


def own(fn):
    return {n: NAMED[n] for n in inspect.signature(fn).parameters if n in NAMED}


def traced(functions, mask=False):
    """(function, its arrays, expression, values) of each."""
    return [(fn, own(fn), *lookup(fn, own(fn), mask)) for fn in functions]


def random_functions(count, mask=False):
    grow = [
        expressions.Grammar(random.Random(seed).choice, positions=mask)
        for seed in range(count)
    ]
    if mask:
        texts = [g.boolean(k % 4) for k, g in enumerate(grow)]
        return [expressions.function(text, "i, j") for text in texts]
    return [expressions.function(g.number(k % 4 + 1)) for k, g in enumerate(grow)]


# --- by the compiler of CUDA ---------------------------------------------------------


def kernels(cases):
    """CUDA text with a kernel that calls all that is made of each case."""
    text = []
    for k, (_, named, expression, _) in enumerate(cases):
        name = f"f{k}"
        text.append(emit_cuda(expression, name, tuple(named)))
        call = f"{name}_with_derivative<T>(s[0], 0, 1, i, j, args, o[1])"
        if expression.is_mask:
            text.append(emit_cuda_tiles(expression, name))
            call = (
                f"{name}<T>(s[0], 0, 1, i, j, args) + {name}_tile<T>(expr::point(0), "
                "expr::point(1), {i, i + 7, true}, {j, j + 7, true}, args)"
            )
        more = ""
        if not expression.is_mask and (n := len(reads_of(expression, tuple(named)))):
            more = (
                f"T p[{n}]; long long at[{n}];"
                f"{name}_gradients<T>(s[0], 0, 1, i, j, args, p, at);"
                f"for (int k = 0; k < {n}; ++k) o[at[k]] += p[k];"
            )
        text += [
            f'extern "C" __global__ void {name}_{T}(const {T} *s, {T} *o, '
            f"{name}_args<{T}> args) {{ using T = {T}; const int i = threadIdx.x, "
            f"j = threadIdx.y; o[0] = {call}; {more} }}\n"
            for T in ("float", "double")
        ]
    return "".join(text)


@pytest.mark.parametrize(
    ("arch", "defines"), [("sm_80", ()), ("sm_90a", ("-DEXPR_SHORT_INTEGERS",))]
)
def test_nvrtc_compiles_the_text(arch, defines):
    if why := nvrtc.unusable():
        pytest.skip(why)
    cases = traced([*SCORES, *OF_16_BITS, *random_functions(8)])
    cases += traced([*MASKS, *random_functions(8, mask=True)], mask=True)
    text = source.load("expr/intervals.cuh") + kernels(cases)
    options = (f"-arch={arch}", "-std=c++17", "--device-as-default-execution-space")
    error, _, cubin = nvrtc.compile_text(text, "functions.cu", (*options, *defines))
    assert not error, error
    assert cubin


def test_nothing_of_the_user_is_in_the_text():
    secret_number, secret = 4.25, {"secret_array": np.ones(3)}

    def secret_name(s, i, *, secret_array):
        secret_local = secret_array[i] * secret_number
        return s + secret_local

    expression, _ = lookup(secret_name, secret)
    text = emit_cuda(expression, wrt=("secret_array",))
    assert "secret" not in text
    assert "4.25" not in text
    other, _ = lookup(lambda s, j, *, x: s + x[j] * secret_number, {"x": np.ones(3)})
    assert emit_cuda(other, wrt=("x",)) == text.replace("(i,", "(j,")


def test_every_dtype_has_a_type():
    for dtype in CUDA_TYPES:
        if dtype == "bfloat16":
            continue
        array = {"x": np.ones(3, dtype)}
        expression, _ = lookup(lambda s, i, *, x: s + x[i], array)
        assert f"const {CUDA_TYPES[dtype]} *__restrict__ a0;" in emit_cuda(expression)


# --- as C++ --------------------------------------------------------------------------

HOST = """
#include <cmath>
#include <limits>
using namespace std;
#define __device__
#define __forceinline__ inline
template <typename T> T infinity() { return numeric_limits<T>::infinity(); }
template <typename T> T nan_value() { return numeric_limits<T>::quiet_NaN(); }
template <typename T, typename From> T to(From x) { return static_cast<T>(x); }
namespace expr {
template <typename T> T element(const T *x, long long place) { return x[place]; }
}
"""
SCORE_LOOP = """
extern "C" void run{k}(long long count, const double *s, long long b, long long h,
    const long long *i, const long long *j, const f{k}_args<double> *args, double *out,
    double *ds, double *partials, long long *places) {{
  for (long long n = 0; n < count; ++n) {{
    out[n] = f{k}_with_derivative<double>(s[n], b, h, i[n], j[n], *args, ds[n]);
    {gradients}
  }}
}}
"""
MASK_LOOP = """
extern "C" int run{k}(long long b, long long h, long long i0, long long i1,
    long long j0, long long j1, const f{k}_args<double> *args, bool *seen) {{
  for (long long i = i0; i <= i1; ++i) for (long long j = j0; j <= j1; ++j)
    *seen++ = f{k}<double>(0, b, h, i, j, *args);
  return f{k}_tile<double>(expr::point(b), expr::point(h), {{i0, i1, true}},
                           {{j0, j1, true}}, *args);
}}
"""


@pytest.fixture
def built(tmp_path):
    """built(cases, more): a library of the text as C++, in double."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")

    def build(cases, more=""):
        text = [HOST]
        for name in ("functions", "intervals"):
            header = (source.CUDA_SRC / "expr" / f"{name}.cuh").read_text("utf-8")
            text.append(re.sub(r"#(include|pragma).*", "", header))
        for k, (_, named, expression, _) in enumerate(cases):
            text.append(emit_cuda(expression, f"f{k}", tuple(named)))
            if expression.is_mask:
                text += [emit_cuda_tiles(expression, f"f{k}"), MASK_LOOP.format(k=k)]
                continue
            gradients, n = "", len(reads_of(expression, tuple(named)))
            if n:
                gradients = (
                    f"double p[{n}]; long long at[{n}];"
                    f"f{k}_gradients<double>(s[n], b, h, i[n], j[n], *args, p, at);"
                    f"for (int m = 0; m < {n}; ++m) {{ partials[n * {n} + m] = p[m];"
                    f" places[n * {n} + m] = at[m]; }}"
                )
            text.append(SCORE_LOOP.format(k=k, gradients=gradients))
        text.append(more)
        (tmp_path / "a.cpp").write_text("\n".join(text), "utf-8")
        command = ["g++", "-std=c++17", "-O0", "-w", "-ffp-contract=off", "-shared"]
        subprocess.run(
            [*command, "-fPIC", "-o", "a.so", "a.cpp"], cwd=tmp_path, check=True
        )
        return ctypes.CDLL(str(tmp_path / "a.so"))

    return build


def pointer(x):
    return ctypes.c_void_p(x.ctypes.data)


def packed(expression, named, values):
    record = np.zeros(1, arguments_dtype(expression, np.float64))
    for name, value in arguments(expression, named, values).items():
        record[name] = value
    return record


def test_scores_are_those_of_numpy(built):
    cases = traced([*SCORES, *random_functions(40)])
    library, given = built(cases), expressions.variables()
    s = np.ascontiguousarray(given["s"])
    i, j = (np.ascontiguousarray(np.broadcast_to(given[n], s.shape)) for n in "ij")
    for k, (_, named, expression, values) in enumerate(cases):
        reads = reads_of(expression, tuple(named))
        roots = [expression.root, expression.derivative.root]
        roots += [x for _, index, partial in reads for x in (*index, partial)]
        expected = expressions.evaluate(roots, given, values, named, np.float64)
        out, ds = np.zeros(s.shape), np.zeros(s.shape)
        partials = np.zeros((*s.shape, len(reads)))
        places = np.zeros(partials.shape, np.int64)
        record = packed(expression, named, values)
        getattr(library, f"run{k}")(
            ctypes.c_longlong(s.size), pointer(s), ctypes.c_longlong(int(given["b"])),
            ctypes.c_longlong(int(given["h"])),
            *map(pointer, (i, j, record, out, ds, partials, places)),
        )  # fmt: skip
        rest = iter(expected[2:])
        pairs = [(out, expected[0]), (ds, expected[1])]
        read = [name for name in named if name in {read[0] for read in reads}]
        for m, (name, index, _) in enumerate(reads):
            shape = named[name].shape
            first = sum(named[n].size for n in read[: read.index(name)])
            at = tuple(np.clip(next(rest), 0, n - 1) for n in shape)
            flat = np.ravel_multi_index(np.broadcast_arrays(*at), shape) if at else 0
            assert len(index) == len(shape)
            pairs += [(places[..., m], first + flat), (partials[..., m], next(rest))]
        for ours, theirs in pairs:
            np.testing.assert_allclose(
                ours, np.broadcast_to(theirs, s.shape), rtol=1e-9, atol=1e-11, err_msg=k
            )


def test_masks_and_tiles_are_those_of_numpy(built):
    cases = traced([*MASKS, *random_functions(40, mask=True)], mask=True)
    library, r = built(cases), random.Random(0)
    decided = uniform = 0
    for k, (_, named, expression, values) in enumerate(cases):
        record = packed(expression, named, values)
        for _ in range(12):
            b, h, i0, j0, n = (r.randint(0, m) for m in (2, 3, 40, 40, 16))
            seen = np.zeros((n + 1, n + 1), bool)
            numbers = map(ctypes.c_longlong, (b, h, i0, i0 + n, j0, j0 + n))
            code = getattr(library, f"run{k}")(*numbers, pointer(record), pointer(seen))
            given = {
                "b": b, "h": h,
                "i": i0 + np.arange(n + 1)[:, None], "j": j0 + np.arange(n + 1)[None],
            }  # fmt: skip
            roots = [expression.root]
            (expected,) = expressions.evaluate(roots, given, values, named, np.float64)
            np.testing.assert_array_equal(seen, np.broadcast_to(expected, seen.shape))
            truth = 2 if seen.any() and not seen.all() else int(seen.all())
            assert code in (2, truth)
            uniform += truth != 2
            decided += code != 2
    assert decided > uniform / 2
