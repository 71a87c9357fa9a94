"""Every row of every table, on its own: which one runs, and what it may never do."""

import numpy as np
import pytest
import rows
from accuracy import FLOATS, dtype_of, finfo, to_host, wide
from placing import empty, place

import cupyflash

pytestmark = pytest.mark.gpu

# Negative strides, gaps, one element past an aligned address, axes exchanged.
FORMS = ("shifted", "reversed", "gaps", "rows", "fortran")
CASES = [case for row in rows.all_rows() for case in rows.cases(*row)]
# Of each row; arrays that take seconds to check lie in two forms, too.
IN_ALL_FORMS = [
    case
    for case in rows.of_kinds(CASES, ("plain", "rows"))
    if case.kind != "many columns"
]
# A case of each row, and for some of another dtype, for laws.
LAWS = [
    case
    for row in rows.all_rows()
    # They take no few heads alone, or no long rows: sm80/test_sm80_short.py,
    # simt/test_gemv.py and test_tiny.py of tests/attention/gpu/.
    if row[1] not in ("gemv", "mma_short", "tiny")
    for case in rows.one_of_each_dtype(rows.cases(*row))
]
ids = str


@pytest.fixture
def forced(cupy, monkeypatch):
    """forced(case): its row alone, or a skip with the refusal of this card."""

    def force(case):
        from cupyflash._cuda import runtime

        shape = (
            rows.SOFTMAX_SHAPES
            if case.operation == "softmax"
            else rows.ATTENTION_SHAPES
        )[case.kind]
        row = rows.row_of(case.operation, case.row)
        asked = rows.library_problem(
            case.operation, case.function, shape, case.dtype, case.method
        )
        if reason := row.unsupported_reason(asked, runtime.device(0)):
            pytest.skip(f"{case.row}: {reason}")
        rows.force(monkeypatch, case.operation, case.row)

    return force


def on_device(cupy, problem):
    """(positional arguments, others) of the call of a problem."""
    arrays = {
        n: place(cupy, x, problem.forms.get(n, "plain"))
        for n, x in problem.arrays.items()
    }
    names = {
        "softmax": ("x", "dy") if "dy" in arrays else ("x",),
        "attention": ("q", "k", "v"),
        "attention_vjp": ("dout", "q", "k", "v"),
    }[problem.operation]
    args = [arrays.pop(n) for n in names]
    options = {**arrays, **problem.options}
    if problem.operation == "attention_vjp":
        need = {n: options.pop(n) for n in list(options) if n.startswith("need")}
        deterministic = options.pop("deterministic")
        out, lse = cupyflash.attention(*args[1:], **options, return_lse=True)
        args += [out, lse]
        options |= need | {"deterministic": deterministic}
    return args, options


def without_naive(cases):
    """It overflows, on purpose."""
    return [case for case in cases if case.method != "naive"]


def agrees_unless_refused(cupy, problem):
    """Check a problem; False if the row wants other strides."""
    try:
        rows.check(cupy, problem)
    except NotImplementedError:
        return False
    return True


def results(x):
    """The arrays of a result."""
    return [y for y in x if y is not None] if isinstance(x, tuple) else [x]


def run(cupy, problem):
    """The arrays of the result of a problem."""
    args, options = on_device(cupy, problem)
    return results(getattr(cupyflash, problem.function)(*args, **options))


def same_bits(cupy, a, b):
    """Whether two arrays hold the same bytes; NaN is equal to itself."""
    kind = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}[a.dtype.itemsize]
    a, b = (cupy.ascontiguousarray(x).view(kind) for x in (a, b))
    return a.shape == b.shape and bool((a == b).all())


# --- which row runs ------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "name"), rows.all_rows())
def test_the_row_is_chosen_and_explain_says_so(cupy, operation, name):
    """By some call that forces nothing; nothing is launched."""
    from cupyflash._cuda import runtime

    device, refusals = runtime.device(0), set()
    row = rows.row_of(operation, name)
    for function, shape, dtype, method in rows.reach(operation, name):
        if operation == "softmax":
            x = cupy.empty(shape, dtype_of(dtype))
            views = (x, x[..., 0], x[:, ::2])
            args = [(v, v) if function.endswith("_vjp") else (v,) for v in views]
            options = {"axis": 1}
            if function in ("softmax", "log_softmax"):
                options["method"] = method
        else:
            arrays = [cupy.empty(s, dtype_of(dtype)) for s in shape]
            args, options = [arrays], {"method": method}
            if operation == "attention_vjp":
                q, _, v = arrays
                seen = (*rows.batch_of(*shape), *q.shape[-3:-1])
                out = cupy.empty((*seen, v.shape[-1]), q.dtype)
                real = np.float64 if dtype == "float64" else np.float32
                args = [(out, *arrays, out, cupy.empty(seen, real))]
                options["deterministic"] = True
        for given in args:
            told = cupyflash.explain(function, *given, **options)
            if told.kernel == name:
                assert name in repr(told)
                return
        asked = rows.library_problem(operation, function, shape, dtype, method)
        refusals.add(row.unsupported_reason(asked, device))
    assert None not in refusals, f"no call is led to {name}"
    pytest.skip(f"{name}: {' / '.join(sorted(refusals))}")


# --- contract ------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_contract(cupy, rng, forced, case):
    """Against the oracle, in memory of any shape, and nothing is written beside out."""
    forced(case)
    problem = rows.problem_of(case, rng)
    if case.operation == "attention":
        told = cupyflash.explain(
            case.function, *(on := on_device(cupy, problem))[0], **on[1]
        )
        assert told.kernel == case.row
    tried = 0
    forms = ("plain", *FORMS) if case in IN_ALL_FORMS else ("plain", "gaps")
    for form in forms:
        problem.forms = dict.fromkeys((*problem.arrays, "out", "lse"), form)
        problem.out_form = form if case.operation != "attention_vjp" else None
        tried += agrees_unless_refused(cupy, problem)
    assert tried


# --- hostile values ------------------------------------------------------------------


def hostile_rows(rng, shape, dtype):
    """Rows of every bad kind, by turns; reduced over the middle axis."""
    info = finfo(dtype_of(dtype))
    largest, tiny = float(info.max), float(info.smallest_subnormal)
    outer, length, inner = shape
    x = rng.normal(size=(length, outer * inner))
    which = np.arange(outer * inner) % 8
    place = np.arange(outer * inner) * 7 % length
    columns = np.arange(outer * inner)
    x[:, which == 0] = -np.inf
    x[:, which == 1] *= tiny * 5
    big = which == 2  # 1e30 where the dtype has it; steps that no rounding hides
    steps = min(1e30, largest / (2 * length))
    x[:, big] = (np.arange(length) * steps)[:, None]
    x[place[which == 3], columns[which == 3]] = np.inf
    x[place[which == 4], columns[which == 4]] = np.nan
    x[place[which == 5], columns[which == 5]] = -np.inf
    x[:, which == 6] = np.where(np.arange(length) % 2, largest, -largest)[:, None]
    return x.reshape(length, outer, inner).swapaxes(0, 1)


SOFTMAX_CASES = rows.of_kinds(
    [c for c in CASES if c.operation == "softmax"], ("rows", "columns")
)


@pytest.mark.parametrize("case", without_naive(SOFTMAX_CASES), ids=ids)
def test_hostile_rows_of_softmax(cupy, rng, forced, case):
    """NaN, infinities, denormals, all -inf, 1e30, the largest numbers: each in rows of
    its own, and the rows beside them are as if alone."""
    forced(case)
    shape = rows.SOFTMAX_SHAPES[case.kind]
    values = hostile_rows(rng, shape, case.dtype)
    if not case.function.endswith("_vjp"):
        problem = rows.problem_of(case, rng, values)
        is_large = values.size > 1 << 20  # whose exact results take seconds
        # Bounds go by the largest number.
        for kind in ("rest",) if is_large else ("all", "huge", "rest"):
            x = values.copy()
            which = np.broadcast_to(
                (np.arange(shape[0])[:, None] * shape[2] + np.arange(shape[2])) % 8,
                (shape[0], shape[2]),
            )
            huge = np.isin(which, (2, 6))[:, None, :]
            if kind != "all":
                x = np.where(huge == (kind == "rest"), 0.5, x)
            problem.arrays["x"] = x.astype(dtype_of(case.dtype))
            for form in ("plain",) if is_large else ("plain", "shifted"):
                problem.forms["x"] = form
                agreed = agrees_unless_refused(cupy, problem)
                assert agreed or form == "shifted"
        return
    problem = rows.problem_of(case, rng)
    y, dy = problem.arrays["x"], problem.arrays["dy"]
    dy[1] = 0
    dy[3] = dy[3] * float(finfo(dy.dtype).smallest_subnormal) * 5
    rows.check(cupy, problem)
    (clean,) = run(cupy, problem)
    dy[0, 3], y[2, 5] = np.nan, np.nan
    (got,) = run(cupy, problem)
    reached = (np.isnan(dy) | np.isnan(y)).any(1)
    assert reached.any()
    for entry, column in np.argwhere(~reached)[::7]:
        assert same_bits(cupy, got[entry, :, column], clean[entry, :, column])
    for entry, column in np.argwhere(reached):
        assert np.isnan(wide(got[entry, :, column])).any()


ATTENTION_CASES = rows.of_kinds(
    [c for c in CASES if c.operation != "softmax" and c.dtype != "tf32"],
    ("options", "plain"),
)


# Of dk and dv one is summed over the batch and the other is not, in repairs too.
SUMMED_APART = [
    c
    for c in CASES
    if c.operation == "attention_vjp" and c.kind in ("one k", "one q and v")
]


@pytest.mark.parametrize("case", ATTENTION_CASES + SUMMED_APART, ids=ids)
def test_hidden_values_of_attention(cupy, rng, forced, case):
    """NaN and inf in padding and behind masks reach nothing."""
    forced(case)
    problem = rows.problem_of(case, rng)
    if case.kind != "options":
        # A band: the first keys and the last queries see nothing of each other; of
        # entries with few keys the last keys and the first queries.
        offset = -20 if case.kind.startswith("short") else 20
        if case.kind.startswith(("few keys", "tini", "tiny")):
            queries, keys = problem.notes["scores"][-2:]
            offset = keys // 2 - queries
        window = {"window": (30, None), "query_offset": offset}
        problem.options |= {"causal": True, **window}
    else:
        problem.arrays["bias"][1, 5] = -np.inf  # a row of scores, in each entry
    rows.poison(problem, rng)
    assert not np.isfinite(wide(problem.arrays["k"])).all()
    rows.check(cupy, problem)


FORWARD_PLAIN = [
    c
    for c in rows.of_kinds(
        [c for c in ATTENTION_CASES if c.operation == "attention"], ("plain",)
    )
    if c.kind in ("plain", "wider heads")
]


@pytest.mark.parametrize("case", FORWARD_PLAIN, ids=ids)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_bad_values_stay_in_their_rows(cupy, rng, forced, case, bad):
    """A NaN in q, an infinite value in v, a score of +inf."""
    forced(case)
    problem = rows.problem_of(case, rng)
    if case.method == "naive":  # its lse is the formula's: log of a sum of inf
        problem.options["return_lse"] = False
    q, k = problem.arrays["q"], problem.arrays["k"]
    clean = {n: x.copy() for n, x in problem.arrays.items()}
    q[0, 1, 7, 3] = float(bad)
    if bad == "nan":
        q[1, 3, 129, 63] = np.nan
    else:
        # All of row 7 would be inf - inf: one product decides instead.
        q[0, 1, 7] = 0
        q[0, 1, 7, 3], k[0, 0, :, 3] = float(bad), np.abs(k[0, 0, :, 3]) + 0.5
    rows.check(cupy, problem)
    problem.arrays.update(clean)
    problem.arrays["v"][1, 1, 11, 5] = float(bad)
    if bad == "nan":
        rows.check(cupy, problem)
        return
    # A weight that the dtype rounds to 0 makes NaN of an infinity, in its own place.
    columns = problem.arrays["q"].shape[-1]
    growth = rows.fuzz.growth_of_sums(cupy, columns, case.row)
    exact, mean, lse, size = rows.fuzz.exact_and_mean(problem, growth)
    got = wide(run(cupy, problem)[0])
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    allowed, _ = rows.fuzz.attention_bounds(problem, mean, lse, size)
    allowed = np.broadcast_to(allowed, exact.shape)
    assert np.all(np.abs(got[finite] - exact[finite]) <= allowed[finite])


@pytest.mark.parametrize("case", without_naive(FORWARD_PLAIN), ids=ids)
def test_huge_scores(cupy, rng, forced, case):
    """Scores of up to 1e30 and beyond: the largest takes all."""
    forced(case)
    problem = rows.problem_of(case, rng)
    q, k, v = (problem.arrays[n] for n in "qkv")
    size = 2e2 if case.dtype == "float16" else 1e15
    order = rng.permutation(k.shape[2])
    q[...], k[...] = 0, 0
    q[..., 0] = size
    k[..., 0] = (order * (size if case.dtype != "float16" else 300)).astype(k.dtype)
    if case.dtype == "bfloat16":  # 8 bits: count to 200 in two columns
        k[..., 0] = (order // 16 * 16 * size).astype(k.dtype)
        k[..., 1] = (order % 16 * size).astype(k.dtype)
        q[..., 1] = size
    args, options = on_device(cupy, problem)
    out, lse = cupyflash.attention(*args, **options)
    best = int(order.argmax())
    expected = np.repeat(v[:, :, best], 2, axis=1)[:, :, None]
    np.testing.assert_array_equal(wide(out), np.broadcast_to(wide(expected), out.shape))
    largest = float(wide(q[0, 0, 0]) @ wide(k[0, 0, best])) / np.sqrt(q.shape[-1])
    unit = 2.0**-22 if out.dtype != np.float64 else 2.0**-51
    np.testing.assert_allclose(to_host(lse), largest, rtol=unit)


@pytest.mark.parametrize("case", without_naive(FORWARD_PLAIN), ids=ids)
@pytest.mark.parametrize("spread", [0.2, 1, 3])
def test_outputs_that_cancel(cupy, rng, forced, case, spread):
    """Rounding a weight costs half a unit of its value, whatever is left of the sum."""
    forced(case)
    problem = rows.problem_of(case, rng)
    arrays, dtype = problem.arrays, problem.arrays["q"].dtype
    arrays["q"] = rng.normal(size=arrays["q"].shape) * spread
    # A column's values less what the first query sees of them.
    v = rng.normal(size=arrays["v"].shape)
    arrays["q"], arrays["v"] = arrays["q"].astype(dtype), v.astype(dtype)
    seen, _, _ = rows.fuzz.exact_attention(problem)
    arrays["v"] = (v - wide(seen)[:, ::2, :1].astype(np.float64)).astype(dtype)
    exact, _, size = rows.fuzz.exact_attention(problem)
    args, options = on_device(cupy, problem)
    arrays["v"] = np.abs(arrays["v"])
    mean, _, _ = rows.fuzz.exact_attention(problem)
    out, _ = cupyflash.attention(*args, **options)
    half = rows.fuzz.BOUNDS["attention"][dtype.name] / 2
    work = 2.0**-52 if dtype == np.float64 else 2.0**-23
    if case.dtype == "tf32":
        half, work = rows.fuzz.TF32_ATTENTION / 2, 2.0**-10
    allowed = half * (mean + np.abs(exact)) + 2 * work * size * mean
    assert np.all(np.abs(wide(out) - exact) <= allowed)


@pytest.mark.parametrize("case", FORWARD_PLAIN, ids=ids)
def test_denormals(cupy, rng, forced, case):
    """Numbers below the normal ones: single precision may take them for 0."""
    forced(case)
    problem = rows.problem_of(case, rng)
    dtype = problem.arrays["q"].dtype
    tiny = float(finfo(dtype).smallest_subnormal) * 9
    problem.arrays["v"] = (problem.arrays["v"].astype(np.float64) * tiny).astype(dtype)
    exact, _, _ = rows.fuzz.exact_attention(problem)
    args, options = on_device(cupy, problem)
    out, _ = cupyflash.attention(*args, **options)
    # float16 has its smallest numbers far above those of float32.
    flushed = float(
        finfo(dtype).smallest_subnormal if dtype == np.float16 else finfo(dtype).tiny
    )
    assert np.abs(wide(out) - exact).max() <= flushed
    problem = rows.problem_of(case, rng)
    for name in "qk":
        x = problem.arrays[name].astype(np.float64)
        problem.arrays[name] = (x * tiny).astype(dtype)
    rows.check(cupy, problem)


@pytest.mark.parametrize("operation", ["softmax", "attention"])
def test_out_that_overlaps_is_refused_and_left_alone(cupy, rng, operation):
    buffer = cupy.asarray(rng.normal(size=(4, 2, 8, 16)).astype(np.float32))
    before = buffer.copy()
    shifted = buffer.ravel()[16 : 16 + 256].reshape(2, 8, 16)
    x, other = buffer[0], buffer[2]
    if operation == "softmax":
        calls = [
            lambda: cupyflash.softmax(x, -1, out=shifted),
            lambda: cupyflash.log_softmax(x, -1, out=x[::-1]),
            lambda: cupyflash.softmax_vjp(x, other, -1, out=shifted),
            lambda: cupyflash.logsumexp(x, -1, out=buffer[0, :, :, 0]),
        ]
    else:
        calls = [
            lambda: cupyflash.attention(x, other, other, out=x),
            lambda: cupyflash.attention(x, other, other, out=shifted),
            lambda: cupyflash.attention(x, other, buffer[3], out=other),
            lambda: cupyflash.attention(
                x, other, other, bias=buffer[3, :, :, :8], out=buffer[3]
            ),
            lambda: cupyflash.merge_attention_states(
                buffer[:2], buffer[2:, :, :, 0].copy(), out=buffer[1]
            ),
        ]
    for call in calls * 2:
        with pytest.raises(ValueError, match="out shares memory"):
            call()
    assert same_bits(cupy, buffer, before)


# --- laws that need no reference -----------------------------------------------------


# Where blocks share a row or the keys, and where all options meet.
SHARED = ("long columns", "long rows", "longer rows", "one query", "options")
BITS = LAWS + [c for c in CASES if c.kind in SHARED and c not in LAWS]


@pytest.mark.parametrize("case", BITS, ids=ids)
def test_the_same_bits_in_100_runs_with_out_and_in_a_graph(cupy, rng, forced, case):
    forced(case)
    args, options = on_device(cupy, rows.problem_of(case, rng))
    call = getattr(cupyflash, case.function)
    first = results(call(*args, **options))
    for _ in range(99):
        for a, b in zip(results(call(*args, **options)), first, strict=True):
            assert same_bits(cupy, a, b)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        if case.operation != "attention_vjp":
            out = empty(cupy, first[0].shape, first[0].dtype)
            got = results(call(*args, **options, out=out))
            assert got[0] is out
            for a, b in zip(got, first, strict=True):
                assert same_bits(cupy, a, b)
        if case.operation == "attention" and case.row in ("naive", "safe"):
            return  # cupy.matmul may allocate a workspace: not promised in a graph
        kept = [call(*args, **options) for _ in range(3)]
        stream.synchronize()
        del kept
        stream.begin_capture()
        captured = results(call(*args, **options))
        graph = stream.end_capture()
        for _ in range(3):
            for x in captured:
                x.data.memset_async(0, x.nbytes)
            graph.launch(stream)
            stream.synchronize()
            for a, b in zip(captured, first, strict=True):
                assert same_bits(cupy, a, b)


def close(actual, expected, relative, absolute=0.0):
    np.testing.assert_allclose(
        wide(actual).astype(float), wide(expected).astype(float), relative, absolute
    )


@pytest.mark.parametrize("case", [c for c in LAWS if c.operation == "softmax"], ids=ids)
def test_laws_of_softmax(cupy, rng, forced, case):
    """Rows sum to one; a shift changes nothing; parts of a row add up to the whole."""
    forced(case)
    shape, dtype = rows.SOFTMAX_SHAPES[case.kind], dtype_of(case.dtype)
    unit, length = float(finfo(dtype).eps), shape[1]
    many = length * unit if case.method == "naive" else length**0.5 * unit
    whole = rng.integers(-8, 9, shape) * (0.25 if case.method == "naive" else 1)
    x, moved = (place(cupy, a.astype(dtype)) for a in (whole, whole + 2))
    call, options = getattr(cupyflash, case.function), {"axis": 1}
    if case.function in ("softmax", "log_softmax"):
        options["method"] = case.method
        y = call(x, **options)
        p = np.exp(wide(y)) if case.function == "log_softmax" else wide(y)
        size = 1 if case.function == "softmax" else 30  # of the logarithms
        close(p.sum(1), np.ones(p.sum(1).shape), (4 * many + 4 * unit) * size)
        close(call(moved, **options), y, 4 * many + 4 * unit, 0)
    elif case.function == "logsumexp":
        y = call(x, **options)
        close(wide(call(moved, **options)) - 2, y, 4 * unit, 16 * unit)
        half = length // 2
        # Back to back, as some rows of the table want them.
        halves = (place(cupy, to_host(a)) for a in (x[:, :half], x[:, half:]))
        one, two = (wide(cupyflash.logsumexp(a, axis=1)) for a in halves)
        close(np.logaddexp(one, two), y, 4 * unit, 8 * unit)
    else:
        dy = rng.normal(size=shape).astype(dtype)
        twice = place(cupy, (dy * 2).astype(dtype))
        dy = place(cupy, dy)
        forward = getattr(rows.fuzz.oracle, case.function.removesuffix("_vjp"))
        y = place(cupy, forward(to_host(x), 1).astype(np.float64).astype(dtype))
        dx = call(y, dy, **options)
        # What flows back into a row adds up to nothing, since a shift does nothing.
        total = np.abs(wide(dx).sum(1))
        assert np.all(total <= 8 * unit * (1 + np.abs(wide(dy))).sum(1))
        np.testing.assert_array_equal(wide(call(y, twice, **options)), wide(dx) * 2)


# That of few keys takes no other splits of them: fp64/test_fp64_short_forward.py.
ATTENTION_LAWS = [
    c for c in LAWS if c.operation == "attention" and c.row != "short_f64"
]


@pytest.mark.parametrize("case", ATTENTION_LAWS, ids=ids)
def test_laws_of_attention(cupy, rng, forced, case):
    """Weights sum to one; a shift of the scores moves lse alone; the order of the keys
    does not matter; parts of the keys merge to the whole; entries of the batch do not
    know of each other."""
    forced(case)
    problem = rows.problem_of(case, rng)
    own = case.kind in ("wider heads", "few rows")
    kind = case.kind if own else "plain"
    shapes, dtype = rows.ATTENTION_SHAPES[kind], problem.arrays["q"].dtype
    keys, cut = shapes[1][2], 140 if kind == "few rows" else 70
    small = 1 if case.method == "naive" else 2
    q, k = (rng.integers(-small, small + 1, s).astype(dtype) for s in shapes[:2])
    v = rng.normal(size=shapes[2]).astype(dtype)
    scale = 0.125 if case.method == "naive" else 0.5
    options = {"scale": scale, "method": case.method, "return_lse": True}
    if case.dtype == "tf32":
        options["precision"] = "tf32"
    bound = rows.fuzz.BOUNDS["attention"][dtype.name]
    work = 2.0**-50 if dtype == np.float64 else 2.0**-21
    if case.dtype == "tf32":
        bound = rows.fuzz.TF32_ATTENTION
    if case.method == "naive":  # each step in the dtype of the input
        bound, work = 64 * float(finfo(dtype).eps), 64 * float(finfo(dtype).eps)
    size = float(np.abs(wide(v)).max())

    def run(q, k, v, **more):
        args = [place(cupy, np.ascontiguousarray(x)) for x in (q, k, v)]
        return cupyflash.attention(*args, **options, **more)

    out, lse = run(q, k, v)
    ones, _ = run(q, k, np.ones_like(v))
    close(ones, np.ones(ones.shape), 2 * bound)
    moved, moved_lse = run(q, (k.astype(np.float32) + 1).astype(dtype), v)
    close(moved, out, 0, 3 * bound * size)
    shift = scale * wide(q).sum(-1)
    close(wide(moved_lse) - shift, lse, 16 * work, 16 * work)
    order = rng.permutation(k.shape[2])
    mixed, mixed_lse = run(q, k[:, :, order], v[:, :, order])
    close(mixed, out, 0, 3 * bound * size)
    close(mixed_lse, lse, 16 * work, 16 * work)
    parts = [run(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, cut), (cut, keys))]
    outs, lses = (
        place(cupy, np.stack([to_host(part[i]) for part in parts])) for i in range(2)
    )
    merged, merged_lse = cupyflash.merge_attention_states(outs, lses)
    close(merged, out, 0, 4 * bound * size)
    close(merged_lse, lse, 16 * work, 16 * work)
    # Other numbers in the other entry and the other heads: the same split of the keys.
    others = [x.copy() for x in (q, k, v)]
    for x in others:
        x[1:], x[0, x.shape[1] // 2 :] = x[1:][:, ::-1] * 2, np.nan
    beside, beside_lse = run(*others)
    assert same_bits(cupy, beside[0, :2], out[0, :2])
    assert same_bits(cupy, beside_lse[0, :2], lse[0, :2])
    split = [
        cupyflash.explain(
            "attention", *(place(cupy, x[:n]) for x in (q, k, v)), **options
        ).details.get("split of the keys")
        for n in (1, 2)
    ]
    assert (None in split) == (case.row in ("naive", "safe"))  # which call cuBLAS
    if split[0] == split[1] is not None:
        for entry in range(2):
            alone, alone_lse = run(*(x[entry : entry + 1] for x in (q, k, v)))
            assert same_bits(cupy, alone[0], out[entry])
            assert same_bits(cupy, alone_lse[0], lse[entry])


@pytest.mark.parametrize(
    "case", [c for c in LAWS if c.operation == "attention_vjp"], ids=ids
)
def test_laws_of_attention_vjp(cupy, rng, forced, case):
    """Gradients are linear in dout, those of v add up to it, and neither entries of the
    batch nor heads know of each other."""
    forced(case)
    problem = rows.problem_of(case, rng)
    (dout, *rest), options = on_device(cupy, problem)
    dtype = problem.arrays["q"].dtype
    unit = float(finfo(dtype).eps)
    grads = cupyflash.attention_vjp(dout, *rest, **options)
    double = place(cupy, (to_host(dout) * 2).astype(dtype))
    twice = cupyflash.attention_vjp(double, *rest, **options)
    for a, b in zip(results(twice), results(grads), strict=True):
        close(a, wide(b) * 2, 4 * unit, 4 * unit * float(np.abs(wide(b)).max()))
    terms = np.abs(wide(dout)).sum(-2)
    total = wide(dout).sum(-2)
    own = wide(grads.dv).sum(-2)
    groups = (own.shape[0], own.shape[1], -1, own.shape[2])  # heads that share one of v
    expected, allowed = (x.reshape(groups).sum(2) for x in (total, terms))
    assert np.all(np.abs(own - expected) <= 8 * unit * allowed)
    # Other numbers in the other entry and the other heads. Not NaN: where one gradient
    # is not finite, other kernels make them all again, which round otherwise.
    for name in ("dout", "q", "k", "v"):
        x = problem.arrays[name]
        x[1:], x[0, x.shape[1] // 2 :] = x[1:][:, ::-1] * 2, 0.5
    args, options = on_device(cupy, problem)
    beside = cupyflash.attention_vjp(*args, **options)
    for a, b in zip(beside[:3], grads[:3], strict=True):
        assert same_bits(cupy, a[0, : a.shape[1] // 2], b[0, : a.shape[1] // 2])


def test_every_dtype_is_met():
    """By the cases above, in each of the tables."""
    for operation in rows.OPERATIONS:
        met = {c.dtype for c in CASES if c.operation == operation}
        assert met >= set(FLOATS) - ({"float16"} if operation == "softmax" else set())
