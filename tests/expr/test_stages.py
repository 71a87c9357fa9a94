"""Functions in stages, and their bounds over tiles: as C++ they are right."""

import ctypes
import random

import expressions
import numpy as np
import pytest
from test_cuda_text import (
    MASKS,
    SCORES,
    built,  # noqa: F401  (a fixture)
    packed,
    pointer,
    random_functions,
    traced,
)

from cupyflash._expr.emit_cuda import emit_cuda
from cupyflash._expr.emit_stages import emit_bounds, emit_stages
from cupyflash._expr.lookup import lookup

BODY = """
  const auto head = {name}_of_head<double>(b, h, *args);
  const auto row = {name}_of_row<double>(head, b, h, i, *args);
  const auto col = {name}_of_col<double>(head, b, h, j, *args);
  const auto diag = {name}_of_diag<double>(head, b, h, i - j, double(i - j), *args);
"""
SCORE = """
extern "C" double run{k}(double s, long long b, long long h, long long i, long long j,
    const f{k}_args<double> *args, double *ds) {{
  {body}
  const double value = f{k}_at<double>(
      s, i, j, i - j, double(i - j), b, h, head, row, col, diag, *args);
  const double same = f{k}_at_with_derivative<double>(
      s, i, j, i - j, double(i - j), b, h, head, row, col, diag, *args, *ds);
  if (!f{k}_has_derivative && *ds != 1) return nan_value<double>();
  return value == same || value != value ? value : nan_value<double>();
}}
"""
MASK = """
extern "C" bool run{k}(long long b, long long h, long long i, long long j,
    const f{k}_args<double> *args) {{
  {body}
  return f{k}_at<double>(0, i, j, i - j, double(i - j), b, h, head, row, col, diag,
                         *args);
}}
template <typename Numbers>
static void extend(
    expr::interval_t *x, const Numbers &numbers, int count, bool first) {{
  for (int n = 0; n < count; ++n) {{
    if (first) x[n] = {{numbers[n], numbers[n], true}};
    x[n].low = numbers[n] < x[n].low ? numbers[n] : x[n].low;
    x[n].high = numbers[n] > x[n].high ? numbers[n] : x[n].high;
  }}
}}
extern "C" int tile{k}(long long b, long long h, long long i0, long long i1,
    long long j0, long long j1, const f{k}_args<double> *args) {{
  const auto head = f{k}_exact_of_head<double>(b, h, *args);
  expr::interval_t rows[8], cols[8];
  for (long long i = i0; i <= i1; ++i) {{
    long long x[f{k}_exact_row_count > 0 ? f{k}_exact_row_count : 1];
    f{k}_exact_row_numbers(f{k}_exact_of_row<double>(head, b, h, i, *args), x);
    extend(rows, x, f{k}_exact_row_count, i == i0);
  }}
  for (long long j = j0; j <= j1; ++j) {{
    long long x[f{k}_exact_col_count > 0 ? f{k}_exact_col_count : 1];
    f{k}_exact_col_numbers(f{k}_exact_of_col<double>(head, b, h, j, *args), x);
    extend(cols, x, f{k}_exact_col_count, j == j0);
  }}
  return f{k}_exact_bounds<double>({{i0, i1, true}}, {{j0, j1, true}},
      {{i0 - j1, i1 - j0, true}}, expr::point(b), expr::point(h), head, rows, cols,
      *args);
}}
"""


@pytest.fixture
def library(built):  # noqa: F811
    """library(cases, small): the stages of each case as C++, in double."""

    def build(cases, small):
        text = []
        for k, (_, _, expression, _) in enumerate(cases):
            name = f"f{k}"
            text += [
                emit_cuda(expression, name),
                emit_stages(expression, name, small_positions=small),
            ]
            loop = SCORE
            if expression.is_mask:
                text.append(emit_bounds(expression, name))
                loop = (
                    MASK
                    if k == 0
                    else MASK.split("template")[0]
                    + ('extern "C" int tile' + MASK.split('extern "C" int tile')[1])
                )
            text.append(loop.format(k=k, body=BODY.format(name=name)))
        return built([], more="\n".join(text))

    return build


def places(count):
    """Random pairs, near enough for arrays that distances index."""
    r, found = random.Random(1), []
    while len(found) < count:
        b, h, i, j = (r.randint(0, n) for n in (2, 3, 15, 15))
        if abs(i - j) < 8:
            found.append((b, h, i, j))
    return found


@pytest.mark.parametrize("small", [False, True])
def test_scores_in_stages_are_those_of_numpy(library, small):
    cases = traced([*SCORES, *random_functions(30)])
    found = library(cases, small)
    for k, (_, named, expression, values) in enumerate(cases):
        record, run = packed(expression, named, values), getattr(found, f"run{k}")
        run.restype = ctypes.c_double
        roots = [expression.root, expression.derivative.root]
        for b, h, i, j in places(20):
            s, ds = (b + 1) / (h + 3) - j / 50, np.zeros(1)
            given = {"s": np.float64(s), "b": b, "h": h, "i": i, "j": j}
            expected = expressions.evaluate(roots, given, values, named, np.float64)
            numbers = map(ctypes.c_longlong, (b, h, i, j))
            got = run(ctypes.c_double(s), *numbers, pointer(record), pointer(ds))
            np.testing.assert_allclose(
                (got, ds[0]), [float(x) for x in expected], rtol=1e-9, atol=1e-11
            )


@pytest.mark.parametrize("small", [False, True])
def test_masks_in_stages_and_their_tiles(library, small):
    # Sorted documents are decided by what queries and keys bring.
    cases = traced([*MASKS, *random_functions(30, mask=True)], mask=True)
    found = library(cases, small)
    r, decided, uniform = random.Random(0), 0, 0
    for k, (fn, named, expression, values) in enumerate(cases):
        record = packed(expression, named, values)
        run, tile = getattr(found, f"run{k}"), getattr(found, f"tile{k}")
        run.restype = ctypes.c_bool
        for _ in range(8):
            b, h, i0, j0, n = (r.randint(0, m) for m in (2, 3, 40, 40, 12))
            i, j = np.ogrid[i0 : i0 + n + 1, j0 : j0 + n + 1]
            given = {"b": b, "h": h, "i": i, "j": j}
            (expected,) = expressions.evaluate(
                [expression.root], given, values, named, np.float64
            )
            expected = np.broadcast_to(expected, (n + 1, n + 1))
            entry = tuple(map(ctypes.c_longlong, (b, h)))
            for y, x in np.ndindex(expected.shape):
                at = ctypes.c_longlong(i0 + y), ctypes.c_longlong(j0 + x)
                assert run(*entry, *at, pointer(record)) == expected[y, x]
            sides = map(ctypes.c_longlong, (i0, i0 + n, j0, j0 + n))
            code = tile(*entry, *sides, pointer(record))
            truth = int(expected.all()) if len(np.unique(expected)) == 1 else 2
            assert code in (2, truth), fn
            uniform += truth != 2
            decided += code != 2
    assert decided > uniform / 2


def test_what_belongs_to_a_head_a_query_or_a_key_stands_apart():
    def score(s, h, i, j, *, slope, gain, shift):
        return s * gain[i] - slope[h] * abs(i - j) + shift[j]

    named = dict.fromkeys(("slope", "gain", "shift"), np.ones(4, "float32"))
    expression, _ = lookup(score, named)
    text = emit_stages(expression, small_positions=True)
    per_score = text[text.index("score_mod_at(") :]
    assert "element" not in per_score
    assert "absolute" not in per_score  # of a diagonal
    assert text.count("expr::element(") == 3


def test_positions_that_may_be_large_stay_integers():
    expression, _ = lookup(lambda s, i, j: s - abs(i - j), {})
    near, far = (
        emit_stages(expression, small_positions=small) for small in (True, False)
    )
    assert "expr::absolute(x)" in near
    assert "expr::absolute(d)" in far
