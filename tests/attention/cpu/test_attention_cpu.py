"""What holds of attention on NumPy arrays alone: boxes of entries, extremes, errors."""

import inspect
import itertools
import pathlib
import re
import sys
import threading
import time
import tracemalloc
import types
import warnings

import numpy as np
import oracle
import pytest
import threadpoolctl
from accuracy import max_error

import cupyflash
from cupyflash._attention import problem as attention_problem
from cupyflash._attention.cpu import backward as vjp_cpu
from cupyflash._attention.cpu import (
    backward_entries,
    block,
    checked,
    entries,
    grouped,
    pieces,
    tiled,
)
from cupyflash._attention.cpu import forward as attention_cpu
from cupyflash._attention.gpu.sm90 import forward as sm90_forward
from cupyflash._core import threads

SHAPES = [(1, 1, 4), (1, 100, 64), (4, 4, 8), (3, 65, 5), (64, 64, 64), (300, 20, 16)]


def arrays(rng, batch, rows, keys, dim, dtype="float32", heads=1, kv_heads=1):
    return tuple(
        rng.normal(size=(batch, h, n, dim)).astype(dtype)
        for h, n in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )


def gradients_by_tasks(*arguments, **options):
    """attention_vjp without the short way of small calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vjp_cpu, "_checked", {})
        patch.setattr(vjp_cpu, "_short_way", lambda problem: None)
        return cupyflash.attention_vjp(*arguments, **options)


@pytest.fixture(autouse=True)
def no_call_is_known(monkeypatch):
    monkeypatch.setattr(attention_cpu, "_checked", {})
    monkeypatch.setattr(vjp_cpu, "_checked", {})


# --- boxes of entries ----------------------------------------------------------------


def test_boxes_cover_every_entry_once():
    for shape in itertools.product((1, 2, 5), (1, 3), (1, 4, 7)):
        for size in (1, 2, 3, 6, 10, 1000):
            seen = np.zeros(shape, int)
            for box in entries.boxes_of(shape, size):
                assert seen[box].size <= size
                seen[box] += 1
            assert (seen == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_an_entry_does_not_depend_on_the_others(rng, dtype, shape, causal):
    q, k, v = arrays(rng, 300, *shape, dtype)
    whole, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
    for i in (0, 1, 149, 298, 299):
        for n in (1, 2):
            part = slice(i, i + n)
            out, part_lse = cupyflash.attention(
                q[part], k[part], v[part], causal=causal, return_lse=True
            )
            np.testing.assert_array_equal(out, whole[part])
            np.testing.assert_array_equal(part_lse, lse[part])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", ["plain", "causal", "bias", "scale"])
def test_a_call_like_one_before_has_the_same_bits(rng, dtype, shape, option):
    q, k, v = arrays(rng, 2, *shape, dtype)
    options = {
        "plain": {},
        "causal": {"causal": True},
        "bias": {"bias": rng.normal(size=shape[:2]).astype(dtype)},
        "scale": {"scale": 0.3},
    }[option]
    first = cupyflash.attention(q, k, v, **options)
    assert len(attention_cpu._checked) == 1
    for _ in range(2):
        np.testing.assert_array_equal(cupyflash.attention(q, k, v, **options), first)
    # The same shapes, lying otherwise.
    turned = [np.asfortranarray(x) for x in (q, k, v)]
    np.testing.assert_allclose(
        cupyflash.attention(*turned, **options), first, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "dim", "dim_v"),
    [(6, 1, 28, 40, 1), (2, 40, 28, 1, 1), (40, 1, 40, 1, 40), (3, 5, 1, 7, 7)],
)
def test_a_stride_of_an_axis_of_length_1_changes_no_bits(
    rng, dtype, batch, queries, keys, dim, dim_v
):
    """The first call sees views with other such strides than later ones."""
    shapes = [(batch, queries, dim), (batch, keys, dim), (batch, keys, dim_v)]
    shapes.append((batch, queries, dim_v))
    for step in (2, -1):
        q, k, v, dout = (
            rng.normal(size=(n, abs(step) * rows, d)).astype(dtype)[:, ::step]
            for n, rows, d in shapes
        )
        outs = [cupyflash.attention(q, k, v, return_lse=True) for _ in range(3)]
        for out, lse in outs:
            np.testing.assert_array_equal(out, outs[0][0])
            np.testing.assert_array_equal(lse, outs[0][1])
        grads = [cupyflash.attention_vjp(dout, q, k, v, *outs[0]) for _ in range(3)]
        for found in grads:
            for one, first in zip(found[:3], grads[0][:3], strict=True):
                np.testing.assert_array_equal(one, first)


def _lying_otherwise(x, how):
    """An equal array with other strides."""
    if how == "heads second":
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if how == "part of columns":
        return np.concatenate([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]]
    if how == "columns first":
        return np.ascontiguousarray(x.mT).mT
    if how == "backwards":
        return np.ascontiguousarray(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1]
    if how == "batch last":
        return np.ascontiguousarray(x.T).T
    if how == "heads before batch":
        return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
    return np.ascontiguousarray(x[:, ::-1])[:, ::-1]  # heads backwards


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "how",
    ["heads second", "part of columns", "columns first", "backwards", "batch last",
     "heads before batch", "heads backwards"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("rows", "keys", "dim", "heads", "kv_heads"),
    [(5, 7, 8, 4, 4), (1, 40, 16, 4, 2), (40, 20, 16, 2, 2), (30, 300, 32, 2, 1),
     (1, 1, 1, 3, 3), (5, 1, 7, 2, 2), (64, 128, 64, 4, 4), (16, 16, 64, 1, 1)],
)  # fmt: skip
def test_arrays_that_are_not_contiguous_give_the_same_bits(
    rng, monkeypatch, dtype, layout, how, rows, keys, dim, heads, kv_heads
):
    """By the short way of small calls, too, of which results are contiguous."""
    q, k, v = arrays(rng, 2, rows, keys, dim, dtype, heads, kv_heads)
    dout = rng.normal(size=q.shape).astype(dtype)
    q, k, v, dout = (np.ascontiguousarray(_as(layout, x)) for x in (q, k, v, dout))
    expected = cupyflash.attention(q, k, v, layout=layout, return_lse=True)
    grads = cupyflash.attention_vjp(dout, q, k, v, *expected, layout=layout)[:3]
    first = cupyflash.attention(q, k, v, layout=layout)
    views = [_lying_otherwise(x, how) for x in (q, k, v, dout)]
    monkeypatch.setattr(attention_cpu, "run", None)
    monkeypatch.setattr(vjp_cpu, "run", None)
    found = cupyflash.attention(*views[:3], layout=layout, return_lse=True)
    of_views = cupyflash.attention_vjp(views[3], *views[:3], *found, layout=layout)[:3]
    alone = cupyflash.attention(*views[:3], layout=layout)
    pairs = zip((*found, *of_views, alone), (*expected, *grads, first), strict=True)
    for x, y in pairs:
        assert x.flags.c_contiguous
        assert x.tobytes() == y.tobytes()


def _as(layout, x):
    return x if layout == "bhsd" else x.swapaxes(1, 2)


@pytest.mark.skipif(threads.num_cores() < 2, reason="one core")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
def test_bits_do_not_depend_on_which_thread_takes_a_task(rng, dtype, causal):
    """One head of many tasks, whose keys are cut by the rows of a task."""
    q = rng.normal(size=(1, 333, 16)).astype(dtype)
    k, v = rng.normal(size=(2, 1, 5001, 16)).astype(dtype)

    def call():
        out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
        grads = cupyflash.attention_vjp(out, q, k, v, out, lse, causal=causal)
        return [out, lse, *grads[:3]]

    first = call()
    taken = []  # so that threads sometimes take tasks of others

    def work():
        taken.extend(call() for _ in range(5))

    callers = [threading.Thread(target=work) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    taken.extend(call() for _ in range(10))
    assert len(taken) == 20
    for results in taken:
        for x, expected in zip(results, first, strict=True):
            np.testing.assert_array_equal(x, expected)


def test_a_known_call_sees_other_values(rng):
    q, k, v = arrays(rng, 2, 3, 5, 8)
    for _ in range(3):
        x = rng.normal(size=q.shape).astype(np.float32)
        exact, *_ = oracle.attention(x, k, v)
        got = cupyflash.attention(x, k, v)
        assert np.abs(got - exact).max() <= 2e-6 * np.abs(exact).max()
    k[0, 0, 0, 0] = np.nan
    assert np.isnan(cupyflash.attention(q, k, v)[0]).all()
    assert np.isfinite(cupyflash.attention(q, k, v)[1]).all()


def test_a_known_call_keeps_the_checks(rng):
    q, k, v = arrays(rng, 2, 3, 5, 8)
    cupyflash.attention(q, k, v)
    with pytest.raises(TypeError, match="causal must be a bool"):
        cupyflash.attention(q, k, v, causal=0)
    with pytest.raises(TypeError, match="softcap"):
        cupyflash.attention(q, k, v, softcap="0.0")
    with pytest.raises(ValueError, match="method"):
        cupyflash.attention(q, k, v, method="fast")
    with pytest.raises(TypeError, match="the same dtype"):
        cupyflash.attention(q, k.astype(np.float64), v)


OPTIONS_OF_A_KNOWN_CALL = {
    "window": {"window": 2},
    "left": {"window": (1, None), "causal": True},
    "offset": {"query_offset": -2, "causal": True},
    "far": {"query_offset": 1 << 62, "window": 1},
    "offsets": {"query_offset": np.array([[1], [-3]]), "causal": True},
    "softcap": {"softcap": 3.0},
    "mask": {"mask": np.arange(7) % 3 > 0},
    "no key": {"mask": np.zeros((5, 7), bool), "sinks": np.ones(1)},
    "sinks": {"sinks": np.array([0.5, -1, -np.inf], np.float32), "causal": True},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 1], np.float32), "query_offset": 3},
    "key lengths": {"key_lengths": np.array([[7], [2]]), "causal": True},
    "lengths": {"query_lengths": np.array([[5], [0]]), "key_lengths": np.array(3)},
    "bias": {"bias": np.linspace(-1, 1, 7, dtype=np.float32), "scale": -0.3},
    "layout": {"layout": "bshd", "window": (0, 3)},
}


@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize("name", OPTIONS_OF_A_KNOWN_CALL)
def test_a_known_call_gives_what_the_first_gave(rng, name, kv_heads, return_lse, bad):
    """Few of its steps are those of the first; each result is the same to the bit."""
    options = dict(OPTIONS_OF_A_KNOWN_CALL[name])
    q, k, v = rng.normal(size=(3, 2, 1, 3, 7, 4)).astype(np.float32)
    q, k, v = q[..., :5, :], k[:, :, :kv_heads], v[:, :, :kv_heads]
    if options.get("layout") == "bshd":
        q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))
    q, k, v = (x.copy() for x in (q, k, v))

    def call(*arrays):
        found = cupyflash.attention(*arrays, return_lse=return_lse, **options)
        return found if return_lse else (found,)

    call(q, k, v)  # makes it known
    if bad is not None:
        q.reshape(-1)[3], k.reshape(-1)[-1], v.reshape(-1)[5] = bad, bad, bad
    known = call(q, k, v)
    attention_cpu._checked.clear()
    # Of other memory order, so that none is quick.
    first = call(*(np.asfortranarray(x) for x in (q, k, v)))
    for a, b in zip(known, first, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", OPTIONS_OF_A_KNOWN_CALL)
@pytest.mark.parametrize(
    ("shape", "kv_heads"), [((2, 1, 3), 1), ((2, 1, 3), 3), ((), 1)]
)
def test_known_gradients_are_those_of_the_first_call(rng, name, shape, kv_heads, dtype):
    options = dict(OPTIONS_OF_A_KNOWN_CALL[name])
    q, dout = rng.normal(size=(2, *shape, 5, 4)).astype(dtype)
    k, v = rng.normal(size=(2, *shape, 7, 4)).astype(dtype)
    if not shape:
        options = {n: x for n, x in options.items() if not isinstance(x, np.ndarray)}
    else:
        k, v = k[:, :, :kv_heads].copy(), v[:, :, :kv_heads].copy()
    if options.get("layout") == "bshd":
        q, k, v, dout = (
            x.swapaxes(-2, -3).copy() if shape else x for x in (q, k, v, dout)
        )
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    first, known = (
        cupyflash.attention_vjp(dout, q, k, v, out, lse, **options) for _ in range(2)
    )
    for a, b in zip(first[:3], known[:3], strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert b.flags.c_contiguous


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 7), (1, 5, 7), (5, 7), (7,)])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_three_axes_of_scores_beside_two_of_q(rng, name, shape):
    """Matrices have one head, which bias and mask may have an axis for."""
    q, dout = rng.normal(size=(2, 5, 4))
    k, v = rng.normal(size=(2, 7, 4))
    x = rng.normal(size=shape)
    if name == "mask":
        x = x > -1
    wanted = cupyflash.attention(q[None], k[None], v[None], **{name: x})[0]
    for _ in range(2):
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **{name: x})
        np.testing.assert_allclose(out, wanted, rtol=1e-12, atol=1e-14)
    options = {name: x, "need_dbias": name == "bias"}
    exact = cupyflash.attention_vjp(
        *(y[None] for y in (dout, q, k, v, out, lse)), **options
    )
    for _ in range(2):
        found = cupyflash.attention_vjp(dout, q, k, v, out, lse, **options)
        for a, b in zip(found[:3], exact[:3], strict=True):
            np.testing.assert_allclose(a, b[0], rtol=1e-10, atol=1e-12)
        if name == "bias":
            assert found.dbias.shape == shape
            np.testing.assert_allclose(found.dbias, exact.dbias, atol=1e-12)


def test_a_known_call_looks_at_lengths(rng):
    q, k, v = arrays(rng, 2, 3, 5, 8)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    for _ in range(2):
        for length, match in ((5, None), (6, "key_lengths must be"), (-1, "from 0 to")):
            for call in (
                lambda n: cupyflash.attention(q, k, v, key_lengths=n),
                lambda n: cupyflash.attention_vjp(
                    out, q, k, v, out, lse, key_lengths=n
                ),
            ):
                lengths = np.array([length, 1])
                if match is None:
                    call(lengths)
                    continue
                with pytest.raises(ValueError, match=match):
                    call(lengths)


def test_numbers_beyond_float32_are_refused_in_a_known_call(rng):
    q, k, v = arrays(rng, 1, 3, 5, 8)
    cupyflash.attention(q, k, v, sinks=np.ones(1))
    with pytest.raises(ValueError, match="sinks must be finite in float32"):
        cupyflash.attention(q, k, v, sinks=np.full(1, 1e300))


def test_known_calls_do_not_pile_up(rng, monkeypatch):
    monkeypatch.setattr(checked, "_MOST", 5)
    for n in range(1, 30):
        cupyflash.attention(*arrays(rng, 1, n, 3, 2))
        assert len(attention_cpu._checked) <= 5


@pytest.fixture
def ways(monkeypatch):
    """What parts of the back end the calls of a test go through."""
    taken = []

    def watch(module, name):
        function = getattr(module, name)

        def watched(*args, **kwargs):
            taken.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    watch(threads, "for_each")
    watch(threads, "run_with_blas")
    watch(tiled, "_walk")
    watch(threads._shared, "hold_blas")
    return taken


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (1, 1, 4096, 64), (20, 8, 8, 16)])
def test_short_calls_take_no_thread_and_leave_blas_alone(rng, ways, shape):
    q, k, v = arrays(rng, *shape)
    cupyflash.attention(q, k, v)
    ways.clear()
    cupyflash.attention(q, k, v)
    assert ways == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blas_takes_no_thread_for_small_products(dtype):
    """A thread that BLAS wakes waits for more, for 20 ms on a core."""

    def seconds_of_others():
        own, tasks = threading.get_native_id(), pathlib.Path("/proc/self/task")
        return sum(
            int((task / "schedstat").read_text().split()[0]) * 1e-9
            for task in tasks.iterdir()
            if int(task.name) != own
        )

    vector, matrix = entries._SMALL_FOR_BLAS
    x = np.ones(entries._SMALL_DOT if dtype == "float64" else 1 << 20, dtype)
    k = np.ones((vector // 64, 64), dtype)
    many = np.ones((matrix // (64 * 16), 64), dtype)
    p = np.ones((16, len(many)), dtype)
    products = [
        lambda: x.dot(x), lambda: k[:1] @ k.T, lambda: np.ones((1, len(k)), dtype) @ k,
        lambda: many[:16] @ many.T, lambda: p @ many,
    ]  # fmt: skip
    time.sleep(0.1)  # what a test before has woken
    before = seconds_of_others()
    for product in products:
        product()
    time.sleep(0.1)
    assert seconds_of_others() - before < 0.01


@pytest.mark.parametrize(
    "shape", [(1, 1, 8000, 64), (1, 200, 200, 64), (1, 1, 30000, 16), (1, 4096, 1, 128)]
)
def test_calls_below_a_millisecond_take_one_thread(rng, ways, shape):
    q, k, v = arrays(rng, *shape)
    first = cupyflash.attention(q, k, v)
    ways.clear()
    again = cupyflash.attention(q, k, v)
    assert ways == ["run_with_blas", "hold_blas"]
    assert again.tobytes() == first.tobytes()


@pytest.mark.parametrize("keys", [131_072, 131_073, 500_000])
@pytest.mark.parametrize("dim", [1, 8])
def test_one_row_takes_no_tiles_however_long(rng, ways, keys, dim):
    q, k, v = arrays(rng, 1, 1, keys, dim)
    y = cupyflash.attention(q, k, v)
    assert "_walk" not in ways
    exact = oracle.attention(q, k, v)[0]
    assert np.abs(y - exact).max() <= 2e-6 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [1, 2, 40, 130])
def test_few_rows_of_many_keys(rng, rows, dtype):
    q, k, v = arrays(rng, 1, rows, 20_001, 16, dtype)
    y = cupyflash.attention(q, k, v)
    exact = oracle.attention(q, k, v)[0]
    bound = {"float32": 2e-6, "float64": 5e-15}[dtype]
    assert np.abs(y - exact).max() <= bound * np.abs(exact).max()


@pytest.mark.parametrize(
    "shape", [(2, 130, 150, 64), (1, 1, 3000, 64), (1, 600, 600, 8)]
)
@pytest.mark.parametrize("cores", [1, 2])
def test_many_entries_have_the_bits_of_one(rng, monkeypatch, shape, cores):
    """The first is made at once, the many in boxes by threads."""
    monkeypatch.setattr(threads, "num_cores", lambda: cores)
    one = arrays(rng, *shape)
    many = [np.concatenate([x] * 40) for x in one]
    few = [cupyflash.attention(*one) for _ in range(2)]
    y = cupyflash.attention(*many)
    assert few[0].tobytes() == few[1].tobytes() == y[: shape[0]].tobytes()


@pytest.mark.parametrize("option", ["plain", "causal", "bias", "mask", "window"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_threads_share_the_products_of_few_rows(rng, ways, dtype, option):
    """With the bits of the entry among others, and of the same call by one thread."""
    q, k, v = arrays(rng, 1, 16, 4096, 256, dtype)
    options = {
        "causal": {"causal": True},
        "bias": {"bias": rng.normal(size=(16, 4096)).astype(dtype)},
        "mask": {"mask": rng.random((16, 4096)) < 0.7},
        "window": {"window": (3500, 0)},
    }.get(option, {})
    before = threadpoolctl.threadpool_info()
    first = cupyflash.attention(q, k, v, **options)
    ways.clear()
    again = cupyflash.attention(q, k, v, **options)
    assert ways == ["run_with_blas", "hold_blas", "for_each", "for_each"]
    assert not threads._shared.callers | threads._shared.at_work
    assert threadpoolctl.threadpool_info() == before
    views = [np.repeat(x, 2, -1)[..., ::2] for x in (q, k, v)]
    far = cupyflash.attention(*views, **options)
    among = cupyflash.attention(
        *(np.concatenate([x] * 3) for x in (q, k, v)), **options
    )
    for other in (again, far, among[1:2]):
        assert first.tobytes() == other.tobytes()
    exact = oracle.attention(q, k, v, **options)[0]
    bound = {"float32": 2e-6, "float64": 5e-15}[dtype]
    assert np.abs(first - exact).max() <= bound * np.abs(exact).max()


_OF_HALVES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (250, 3), "query_offset": 100},
    "bias": {"bias": (200, 300)},
    "bias of keys": {"bias": (300,), "softcap": 3.0},
    "mask": {"mask": (200, 1)},
    "alibi and sinks": {"alibi_slopes": (1,), "sinks": (1,)},
    "key lengths": {"key_lengths": 177},
    "score": {"score": lambda s, b, h, i, j: s - 0.01 * (i - j) ** 2},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keys", [16, 130, 300])
@pytest.mark.parametrize("name", _OF_HALVES)
def test_a_single_entry_goes_in_halves_to_two_threads(rng, ways, name, keys, dtype):
    """With the bits of the entry among others, and of the same call by one thread."""
    rows, options = 200 if keys > 16 else 1500, {}
    for option, x in _OF_HALVES[name].items():
        if isinstance(x, tuple) and option != "window":
            shape = tuple({200: rows, 300: keys}.get(n, n) for n in x)
            x = rng.normal(size=shape).astype(dtype)
            x = x > -1 if option == "mask" else x
        options[option] = min(x, keys) if option == "key_lengths" else x
    options["return_lse"] = name != "score"
    one = arrays(rng, 1, rows, keys, 256, dtype)

    def call(*arrays, **out):
        found = cupyflash.attention(*arrays, **options, **out)
        return found if options["return_lse"] else (found,)

    first = call(*one)
    ways.clear()
    known = call(*one)
    assert ways == ["for_each", "hold_blas"]
    out = np.empty_like(one[0])
    into = call(*one, out=out)
    among = call(*(np.concatenate([x] * 3) for x in one))
    for a, b, c, of_many in zip(first, known, into, among, strict=True):
        assert a.tobytes() == b.tobytes() == c.tobytes() == of_many[1].tobytes()
    assert into[0] is out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keys", [16, 130, 300])
@pytest.mark.parametrize("name", [*_OF_HALVES, "dlse", "infinite"])
def test_gradients_of_a_single_head_go_in_halves(rng, ways, name, keys, dtype):
    """Right, and the same bits in every call; what is not finite goes the long way."""
    if name == "score":
        pytest.skip("gradients of functions go by tasks")
    rows, options = 200 if keys > 16 else 1500, {}
    for option, x in _OF_HALVES.get(name, {}).items():
        if isinstance(x, tuple) and option != "window":
            shape = tuple({200: rows, 300: keys}.get(n, n) for n in x)
            x = rng.normal(size=shape).astype(dtype)
            x = x > -1 if option == "mask" else x
        options[option] = min(x, keys) if option == "key_lengths" else x
    q, k, v = arrays(rng, 1, rows, keys, 256, dtype)
    dout = rng.normal(size=q.shape).astype(dtype)
    if name == "infinite":
        v[0, 0, 3] = np.inf
    call = dout, q, k, v, *cupyflash.attention(q, k, v, return_lse=True, **options)
    if name == "dlse":
        options["dlse"] = rng.normal(size=(1, 1, rows)).astype(dtype)
    first = cupyflash.attention_vjp(*call, **options)
    ways.clear()
    again = cupyflash.attention_vjp(*call, **options)
    assert ways[:2] == ["for_each", "hold_blas"]
    tasks = gradients_by_tasks(*call, **options)
    bound = 1e-5 if dtype == "float32" else 1e-13
    for a, b, exact in zip(first[:3], again[:3], tasks[:3], strict=True):
        assert a.tobytes() == b.tobytes()
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(exact))
        finite = np.isfinite(exact)
        size = np.abs(exact, where=finite, out=np.zeros_like(exact)).max()
        assert np.abs(a[finite] - exact[finite]).max(initial=0) <= bound * size


_OF_SOME = {
    "plain": {},
    "causal": {"causal": True, "softcap": 4.0},
    "bias": {"bias": (6, 1, 40, 60)},
    "mask of keys": {"mask": (60,)},
    "alibi and sinks": {"alibi_slopes": (6, 1), "sinks": (1,)},
    "lengths": {"key_lengths": np.arange(6) * 12, "query_lengths": np.arange(6) * 8},
    "lengths, causal": {"key_lengths": np.arange(6) * 12, "causal": True},
}


@pytest.mark.parametrize("axis", ["batch", "heads", "bshd", "groups", "shared keys"])
@pytest.mark.parametrize("name", _OF_SOME)
def test_some_entries_go_in_halves_to_two_threads(rng, ways, monkeypatch, name, axis):
    """And gradients: each entry as it is alone."""
    options = {
        n: x if not isinstance(x, tuple) or n == "window" else rng.normal(size=x)
        for n, x in _OF_SOME[name].items()
    }
    options = {n: x > -1 if n == "mask" else x for n, x in options.items()}
    dim = 256 if axis == "groups" else 512
    q, dout = rng.normal(size=(2, 6, 1, 40, dim))
    k, v = rng.normal(size=(2, 6, 1, 60, dim))
    if axis == "shared keys":
        k = k[:1]
    elif axis == "groups":
        q, dout = rng.normal(size=(2, 6, 2, 40, dim))
        if name in ("alibi and sinks", "bias"):
            pytest.skip("they would need two heads, too")
    elif axis == "heads":
        if "lengths" in name:
            pytest.skip("lengths are those of batch entries")
        q, dout, k, v = (x.swapaxes(0, 1) for x in (q, dout, k, v))
        for n in ("bias", "alibi_slopes"):
            if n in options:
                options[n] = options[n].swapaxes(0, 1)
    elif axis == "bshd":
        options["layout"] = "bshd"
        q, dout, k, v = (x.swapaxes(-2, -3) for x in (q, dout, k, v))
    q, dout, k, v = (np.ascontiguousarray(x) for x in (q, dout, k, v))

    def call():
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, **options)
        return out, lse, *grads[:3]

    call()
    ways.clear()
    found = call()
    assert ways[:2] == ["for_each", "hold_blas"]
    if axis != "shared keys":
        assert ways == ["for_each", "hold_blas"] * 2
    monkeypatch.setattr(entries, "WORTH_HALVES", (1 << 40, 1 << 40))
    attention_cpu._checked.clear()
    vjp_cpu._checked.clear()
    call()
    ways.clear()
    for a, b in zip(found, call(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "for_each" not in ways or axis == "shared keys"


def test_gradients_of_a_batch_go_in_halves_to_two_threads(rng, ways):
    q, k, v = arrays(rng, 16, 16, 512, 128)
    dout = rng.normal(size=q.shape).astype(q.dtype)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    call = dout, q, k, v, out, lse
    told = cupyflash.explain("attention_vjp", *call).details
    assert (told["heads_of_a_task"], told["threads"]) == (8, 2)
    ways.clear()
    grads = cupyflash.attention_vjp(*call)
    assert ways == ["for_each", "hold_blas"]
    one = cupyflash.attention_vjp(*(x[5:6] for x in call))
    for a, b in zip(grads[:3], one[:3], strict=True):
        np.testing.assert_array_equal(a[5:6], b)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_halves_that_are_not_finite_take_the_long_way(rng, ways, bad):
    q, k, v = arrays(rng, 1, 200, 130, 256)
    cupyflash.attention(q, k, v)
    v[0, 0, 5, 7] = bad
    out = cupyflash.attention(q, k, v)
    assert (np.isfinite(out) == (np.arange(256) != 7)).all()
    told = cupyflash.explain("attention", q, k, v).details
    assert (told["rows_of_a_task"], told["threads"]) == (120, 2)


@pytest.mark.parametrize("dims", [(8, 3), (8, 1), (1, 1), (64, 1)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("lies", ["C", "F", "reversed", "swapped"])
def test_narrow_views_have_the_bits_of_the_first_call(rng, dims, layout, lies):
    """Copies of what BLAS cannot read round otherwise than it does as it lies."""
    lay = {
        "C": np.ascontiguousarray,
        "F": np.asfortranarray,
        "reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
        "swapped": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    }[lies]
    for dtype, (batch, rows, keys) in itertools.product(
        ("float32", "float64"), ((1, 1, 130), (40, 1, 17), (5, 64, 17), (2, 130, 64))
    ):
        shape = (batch, 3, 0) if layout == "bhsd" else (batch, 0, 3)
        axis = 2 if layout == "bhsd" else 1
        q, k, v = (
            lay(
                rng.normal(size=(*shape[:axis], n, *shape[axis + 1 :], d)).astype(dtype)
            )
            for n, d in ((rows, dims[0]), (keys, dims[0]), (keys, dims[1]))
        )
        q, k, v = (lay(x.astype(dtype)) for x in (q, k, v))
        first, *others = (
            cupyflash.attention(q, k, v, layout=layout).tobytes() for _ in range(3)
        )
        assert others == [first] * 2, (dtype, batch, rows, keys)


@pytest.mark.parametrize("batch", [7, 8])
def test_what_would_be_two_boxes_goes_in_halves_if_these_are_equal(rng, ways, batch):
    q, k, v = arrays(rng, batch, 64, 64, 64, heads=8, kv_heads=8)
    problem, _ = attention_problem.attention(
        q, k, v, *[None] * 3, False, None, None, 0.0, *[None] * 4, "bhsd", "float32",
        False, None, "auto",
    )  # fmt: skip
    assert block.num_threads(problem) == 2
    assert 2 * entries.shape_of_a_box(problem)[0] >= batch * 8
    halves = entries.halves_of(problem)
    assert halves == ((-4, (slice(0, 4), slice(4, 8))) if batch == 8 else None)
    first = cupyflash.attention(q, k, v)
    ways.clear()
    again = cupyflash.attention(q, k, v)
    assert ways == ["for_each", "hold_blas"]
    one = cupyflash.attention(q[3:4], k[3:4], v[3:4])
    assert first.tobytes() == again.tobytes()
    assert first[3:4].tobytes() == one.tobytes()


@pytest.mark.parametrize("rows", [1, 511, 512, 513, 5000])
def test_rows_of_a_box_are_of_one_size(rows):
    x = np.zeros((1, rows, 4), np.float32)
    k = np.zeros((1, 2000, 4), np.float32)
    problem, _ = attention_problem.attention(
        x, k, k, *[None] * 3, False, None, None, 0.0, *[None] * 4, "bhsd", "float32",
        False, None, "auto",
    )  # fmt: skip
    _, size = entries.shape_of_a_box(problem)
    parts = -(-rows // size)
    assert size * 2000 <= 1 << 18
    assert parts * size - rows < parts  # but for rounding up
    assert parts == 1 or parts % threads.num_cores() == 0 or size == 1


@pytest.mark.parametrize("method", ["auto", "safe", "online"])
@pytest.mark.parametrize("slope", [1e38, np.inf])
@pytest.mark.parametrize("keys", [1, 6, 40])
@pytest.mark.parametrize("entries", [1, 5])
def test_scores_that_all_overflow_are_hidden_keys(rng, method, slope, keys, entries):
    """Alibi alone hides them, and lse says so, also in a call like an earlier one."""
    q, k, v = arrays(rng, entries, 4, keys, 8)
    slopes = np.array([slope], np.float32)
    for _ in range(2):
        out, lse = cupyflash.attention(
            q, k, v, alibi_slopes=slopes, query_offset=keys + 40, method=method,
            return_lse=True,
        )  # fmt: skip
        assert (out == 0).all()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("terms", [1, 511, 512, 513, 1024, 16 * 512 + 3, 40_000])
@pytest.mark.parametrize("width", [1, 40])
def test_products_of_many_terms(rng, dtype, terms, width):
    a = rng.random((2, 3, terms)).astype(dtype)
    b = rng.random((2, terms, width)).astype(dtype)
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
    bound = 8 * np.finfo(dtype).eps * exact
    out = np.empty(exact.shape, dtype)
    assert block.product(a, b, out) is out
    assert (np.abs(out - exact) <= bound).all()
    assert block.product(a, b).tobytes() == out.tobytes()


@pytest.mark.parametrize("terms", [257, 384, 511, 512, 513, 700, 767])
@pytest.mark.parametrize(("rows", "width"), [(2, 8), (3, 40), (24, 40), (300, 40)])
def test_sums_of_float64_do_not_go_term_by_term(rng, rows, terms, width):
    """The error of more than 256 terms, one after another, is up to 12 units."""
    a, b = rng.random((20, rows, terms)), rng.random((20, terms, width))
    if width * rows * terms > pieces.MOST:  # one call is enough
        a, b = a[:1], b[:1]
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
    off = np.abs(block.product(a, b) - exact) / (np.finfo(float).eps * exact)
    assert off.max() <= 8
    if threads.blas_architectures() <= {"Haswell", "SkylakeX"}:
        assert np.sqrt(np.mean(off**2)) < 1.7


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keys", [257, 300, 511, 700])
@pytest.mark.parametrize(("rows", "dim"), [(2, 8), (4, 40), (16, 64), (60, 40)])
def test_sums_of_an_entry_alone_are_those_in_a_batch(rng, dtype, rows, keys, dim):
    q, k, v = arrays(rng, 3, rows, keys, dim, dtype)
    for return_lse in (False, True, False):
        whole = cupyflash.attention(q, k, v, return_lse=return_lse)
        alone = cupyflash.attention(q[1:2], k[1:2], v[1:2], return_lse=return_lse)
        if return_lse:
            whole, alone = whole[0], alone[0]
        np.testing.assert_array_equal(alone, whole[1:2])


OPTIONS = {
    "causal": lambda rng, rows, keys: {"causal": True},
    "window": lambda rng, rows, keys: {"window": (3, 5)},
    "left": lambda rng, rows, keys: {"window": (2, None)},
    "bias": lambda rng, rows, keys: {
        "bias": rng.normal(size=(rows, keys)).astype(np.float32)
    },
    "mask": lambda rng, rows, keys: {"mask": rng.random((2, rows, keys)) < 0.7},
    "alibi": lambda rng, rows, keys: {
        "alibi_slopes": np.array([0.5, 0.1], np.float32), "causal": True
    },
    "lengths": lambda rng, rows, keys: {
        "key_lengths": np.array([keys // 2, keys]), "query_lengths": np.array([1, rows])
    },
    "offset": lambda rng, rows, keys: {
        "query_offset": np.array([-2, 4]), "causal": True
    },
    "sinks": lambda rng, rows, keys: {"sinks": np.array([0.5, -1], np.float32)},
    "softcap": lambda rng, rows, keys: {"softcap": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("keys", [1, 9, 40])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_scores_of_more_rows_than_keys(rng, option, keys, layout):
    """They lie side by side, so that every option meets another order of memory."""
    rows = 70
    q, k, v = arrays(rng, 2, rows, keys, 8, heads=2, kv_heads=2)
    options = OPTIONS[option](rng, rows, keys)
    exact, lse, _ = oracle.attention(q, k, v, **options)
    if layout == "bshd":
        q, k, v, exact = (x.swapaxes(1, 2) for x in (q, k, v, exact))
    for _ in range(2):  # the second one is a known call
        y = cupyflash.attention(q, k, v, layout=layout, **options)
        np.testing.assert_allclose(y, exact.astype(float), rtol=1e-5, atol=2e-6)
    y, y_lse = cupyflash.attention(q, k, v, layout=layout, return_lse=True, **options)
    np.testing.assert_allclose(y, exact.astype(float), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(y_lse, lse.astype(float), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("keys", [3, 40])
def test_what_is_not_seen_never_counts_where_rows_are_many(rng, keys):
    q, k, v = arrays(rng, 2, 70, keys, 8)
    exact, *_ = oracle.attention(q, k, v, causal=True)
    hidden = [x.copy() for x in (k, v)]
    hidden[0][..., -1, :], hidden[1][..., -1, :] = np.inf, np.nan
    for _ in range(2):
        y = cupyflash.attention(q, *hidden, causal=True)
        sees = np.arange(70) == 69  # the last query alone sees the last key
        np.testing.assert_allclose(
            y[..., ~sees, :], exact[..., ~sees, :].astype(float), rtol=1e-5, atol=2e-6
        )
        assert np.isnan(y[..., sees, :]).all()
        assert (y[..., : 70 - keys, :] == 0).all()  # rows that see no key


HIDING = {
    "mask": lambda rng, rows, keys: {"mask": rng.random((rows, keys)) < 0.6},
    "mask of entries": lambda rng, rows, keys: {
        "mask": rng.random((3, 4, rows, keys)) < 0.6
    },
    "lengths": lambda rng, rows, keys: {"key_lengths": np.array([keys, 0, keys // 2])},
    "all": lambda rng, rows, keys: {
        "mask": rng.random((3, 1, rows, keys)) < 0.6,
        "key_lengths": np.array([keys, 1, keys // 2]),
        "bias": rng.normal(size=(4, rows, keys)).astype(np.float32),
    },
}


@pytest.mark.parametrize("option", HIDING)
@pytest.mark.parametrize(("rows", "keys"), [(1, 16), (5, 7), (24, 48), (70, 9)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_masks_and_lengths_hide_in_a_known_call(
    rng, option, rows, keys, kv_heads, dtype
):
    q, k, v = arrays(rng, 3, rows, keys, 8, dtype, 4, kv_heads)
    options = HIDING[option](rng, rows, keys)
    if "mask" in options:
        options["mask"][..., 0, :] = False  # a row that sees no key
    exact, *_ = oracle.attention(q, k, v, **options)
    for _ in range(2):
        y = cupyflash.attention(q, k, v, **options)
        np.testing.assert_allclose(y, exact.astype(float), rtol=1e-5, atol=2e-6)
        assert (y[exact == 0] == 0).all()
        one = {
            name: x[1:2] if name == "key_lengths" or x.ndim == 4 else x
            for name, x in options.items()
        }
        alone = cupyflash.attention(q[1:2], k[1:2], v[1:2], **one)
        np.testing.assert_array_equal(alone, y[1:2])


@pytest.mark.parametrize("shape", [(5, 7), (40, 48), (70, 9)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_a_mask_hides_never_counts(rng, shape, bad):
    q, k, v = arrays(rng, 2, *shape, 8)
    mask = np.ones(shape, bool)
    mask[:, 3] = False
    exact = cupyflash.attention(q, k, v, mask=mask)
    k[:, :, 3, 0] = v[:, :, 3, 1] = bad
    y = cupyflash.attention(q, k, v, mask=mask)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("option", ["mask", "key_lengths", "bias"])
@pytest.mark.parametrize("shape", [(1, 40), (5, 7), (40, 48), (70, 9)])
def test_options_of_arrays_without_heads(rng, option, shape):
    q, k, v = (x[0, 0] for x in arrays(rng, 1, *shape, 8))
    given = {
        "mask": rng.random(shape) < 0.7,
        "key_lengths": np.array(shape[1] - 1),
        "bias": rng.normal(size=shape).astype(np.float32),
    }
    options = {option: given[option]}
    exact, *_ = oracle.attention(q[None], k[None], v[None], **options)
    for _ in range(2):
        y = cupyflash.attention(q, k, v, **options)
        np.testing.assert_allclose(y, exact[0].astype(float), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", ">i8", "uint8"])
@pytest.mark.parametrize("length", [-1, 301])
def test_lengths_of_any_integers_are_checked_in_a_known_call(rng, dtype, length):
    q, k, v = arrays(rng, 2, 1, 300, 4)
    lengths = np.array([0, 100], dtype)
    cupyflash.attention(q, k, v, key_lengths=lengths)
    info = np.iinfo(dtype)
    if not info.min <= length <= info.max:
        pytest.skip(f"{dtype} does not hold {length}")
    with pytest.raises(ValueError, match=r"key_lengths\[0\] is"):
        cupyflash.attention(q, k, v, key_lengths=np.array([length, 1], dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keys", [1, 7, 16, 64, 100])
def test_maxima_of_rows(rng, dtype, keys):
    s = rng.normal(size=(3, 5, keys)).astype(dtype)
    s[0, 1], s[1, 2, 0], s[2, 3, -1] = -np.inf, np.nan, np.inf
    np.testing.assert_array_equal(
        block.row_maxima(s), s.max(axis=-1, keepdims=True), strict=True
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keys", [512, 1000, 1024, 1536, 4096, 16 * 512, 17 * 512])
def test_a_long_row_alone_has_its_bits_in_a_batch(rng, dtype, keys):
    q, k, v = arrays(rng, 3, 1, keys, 5, dtype)
    for _ in range(2):
        whole = cupyflash.attention(q, k, v)
        alone = cupyflash.attention(q[:1], k[:1], v[:1])
        np.testing.assert_array_equal(alone, whole[:1])


def test_memory_of_many_entries(rng):
    q, k, v = arrays(rng, 4000, 8, 64, 4)
    cupyflash.attention(q, k, v)
    tracemalloc.start()
    out = cupyflash.attention(q, k, v)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - out.nbytes < 4 << 20  # the scores of all are 8 MiB


def test_memory_of_a_wide_bias(rng, monkeypatch):
    """A float64 bias beside float32 queries is looked at in blocks, a number once."""
    # How many threads have buffers at a time would be left to chance.
    monkeypatch.setattr(threads, "num_cores", lambda: 1)
    q, k, v = rng.normal(size=(3, 8, 1500, 16)).astype(np.float32)
    row, full = rng.normal(size=1500), rng.normal(size=(2400, 1500))[::-2]
    own = q[:1, :1200], k[:1], v[:1]
    for (q_, k_, v_), bias in (
        ((q, k, v), np.broadcast_to(row, (8, 1500, 1500))),
        (own, full),
        ((k[:1], own[0], own[0]), full.T),
    ):
        out, lse = cupyflash.attention(q_, k_, v_, bias=bias, return_lse=True)
        narrow = bias.astype(np.float32)
        expected = cupyflash.attention(q_, k_, v_, bias=narrow)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
        for call in (
            lambda b, a=(q_, k_, v_): cupyflash.attention(*a, bias=b),
            lambda b, a=(q_, k_, v_): cupyflash.explain("attention", *a, bias=b),
            lambda b, a=(out, q_, k_, v_, out, lse): cupyflash.attention_vjp(
                *a, bias=b
            ),
        ):
            peaks = []
            for b in (narrow, bias):
                call(b)
                tracemalloc.start()
                call(b)
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            assert peaks[1] - peaks[0] < 3 << 19  # one bool of each is 1.7 or 17 MiB


# --- values near the ends of the range -----------------------------------------------


@pytest.mark.parametrize("method", ["auto", "tiled", "safe", "online"])
@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_near_the_largest_number(method, rows, dtype):
    for keys in (10, 2000):
        q, k = np.zeros((rows, 1), dtype), np.zeros((keys, 1), dtype)
        for part in (0.55, -0.9):
            v = np.full((keys, 2), part * float(np.finfo(dtype).max), dtype)
            v[:, 1] = 1
            out = cupyflash.attention(q, k, v, method=method)
            np.testing.assert_allclose(out, v[:rows][:1].repeat(rows, 0), rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_largest_number_itself(rows, dtype):
    largest = np.finfo(dtype).max
    v = np.full((1500, 1), largest, dtype)
    zeros = np.zeros((1500, 1), dtype)
    out = cupyflash.attention(zeros[:rows], zeros, v)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out / largest, 1, rtol=1e-5)
    v[0] = np.inf
    assert (cupyflash.attention(zeros[:rows], zeros, v) == np.inf).all()


@pytest.mark.parametrize("scale", [1e300, -1e300, 1e39, 5e-324, 0.0])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("method", ["auto", "online", "safe"])
def test_any_scale_of_scores_of_zero(scale, dtype, method):
    q, k = np.zeros((1, 4), dtype), np.ones((3, 4), dtype)
    v = np.arange(12).reshape(3, 4).astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = cupyflash.attention(q, k, v, scale=scale, method=method)
        grads = cupyflash.attention_vjp(
            out, q, k, v, *cupyflash.attention(q, k, v, scale=scale, return_lse=True),
            scale=scale,
        )  # fmt: skip
    np.testing.assert_allclose(out, [[4, 5, 6, 7]], rtol=1e-3)
    assert not np.isnan(grads.dv).any()


@pytest.mark.parametrize("softcap", [1.1754944e-38, 1.0, 3.4e38])
@pytest.mark.parametrize("scale", [1e30, -1e30, 1e300])
def test_softcaps_of_far_scores(softcap, scale):
    k = np.ones((3, 4), np.float32)
    v = np.arange(12, dtype=np.float32).reshape(3, 4)
    out = cupyflash.attention(k, k, v, softcap=softcap, scale=scale)
    np.testing.assert_allclose(out, [[4, 5, 6, 7]] * 3, rtol=1e-6)


# --- gradients -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "shared"),
    [(((50, 1), (1, 1), (1, 1)), "k, v"), (((1, 1), (50, 1), (50, 1)), "q"),
     (((7, 1), (1, 5), (1, 1)), "crosswise")],
)  # fmt: skip
def test_memory_of_gradients_of_shared_entries(rng, batches, shared):
    shapes = ((4, 16), (600, 16), (600, 16))
    q, k, v = (
        rng.normal(size=(*b, 1, *s)) for b, s in zip(batches, shapes, strict=True)
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    dout = rng.normal(size=out.shape)
    cupyflash.attention_vjp(dout, q, k, v, out, lse)
    tracemalloc.start()
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    own = sum(x.nbytes for x in grads[:3])
    # Threads have a sum and the gradient of an entry each; 50 terms would be 7 MiB.
    assert peak <= 6 * own + (1 << 20)

    def whole(x):
        return np.broadcast_to(x, (*out.shape[:-3], *x.shape[-3:])).copy()

    copies = [whole(x) for x in (q, k, v)]
    expected = cupyflash.attention_vjp(dout, *copies, out, lse)
    for got, each in zip(grads[:3], expected[:3], strict=True):
        axes = tuple(a for a, n in enumerate(got.shape[:-3]) if n != each.shape[a])
        total = each.sum(axis=axes, keepdims=True)
        np.testing.assert_allclose(got, total, rtol=0, atol=1e-12 * abs(total).max())
    again = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    for a, b in zip(grads[:3], again[:3], strict=True):
        np.testing.assert_array_equal(a, b)


# --- errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lengths", "said"),
    [("key_lengths", [5, -1], "0 to seqlen_k = 7, but key_lengths[1] is -1"),
     ("key_lengths", [8, 9], "0 to seqlen_k = 7, but key_lengths[0] is 8"),
     ("query_lengths", 6, "0 to seqlen_q = 5, but query_lengths is 6"),
     ("query_lengths", np.array([[1, 2], [2**64 - 1, 6]], np.uint64),
      f"0 to seqlen_q = 5, but query_lengths[1, 0] is {2**64 - 1}")],
)  # fmt: skip
@pytest.mark.parametrize("function", ["attention", "attention_vjp"])
def test_lengths_that_do_not_fit(rng, name, lengths, said, function):
    lengths = np.asarray(lengths)
    batch = (2,) * max(1, lengths.ndim)
    q, k = (rng.normal(size=(*batch, 1, n, 8)) for n in (5, 7))
    rest = (k, k) if function == "attention" else (q, k, k, q, q[..., 0])
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'{name} must be from {said}')}$"
    ):
        getattr(cupyflash, function)(q, *rest, **{name: lengths})


@pytest.mark.parametrize(
    ("name", "ours"),
    [("is_causal", "causal="), ("attn_mask", "mask="), ("softmax_scale", "scale="),
     ("dropout_p", "no dropout"), ("window_size", "window=")],
)  # fmt: skip
def test_names_of_other_packages(name, ours):
    x = np.ones((2, 3))
    for call in (
        lambda: cupyflash.attention(x, x, x, **{name: None}),
        lambda: cupyflash.attention_vjp(x, x, x, x, x, x[:, 0], **{name: None}),
        lambda: cupyflash.explain("attention", x, x, x, **{name: None}),
    ):
        with pytest.raises(TypeError, match=f"'{name}'; here it is .*{ours}"):
            call()


@pytest.mark.parametrize("rows", [2, 300])
@pytest.mark.parametrize("softcap", [0.0, 30.0, 3e38])
def test_a_scale_beyond_float32(rows, softcap):
    """Scores are 0 and large: the largest have all the weight, with no warning."""
    q = np.zeros((rows, 4), np.float32)
    q[0, 0] = 1
    k = np.eye(600, 4, dtype=np.float32)
    v = np.random.default_rng(0).normal(size=(600, 3)).astype(np.float32)
    out = cupyflash.attention(q, k, v, scale=1e300, softcap=softcap)
    np.testing.assert_allclose(out[0], v[0], rtol=1e-5)
    expected = np.broadcast_to(v.mean(axis=0), (rows - 1, 3))
    np.testing.assert_allclose(out[1:], expected, rtol=0, atol=1e-6)


def test_the_softcap_of_hopper_beyond_float32():
    problem = types.SimpleNamespace(scale=1e300, softcap=3.4e38)
    cap = sm90_forward.cap_of(problem, in_log2=False)
    assert cap["inverse"] == np.finfo(np.float32).max
    assert cap["limit"] == 0
    assert not cap["coefficients"].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_of_parts_of_the_keys_add_up(dtype):
    """With out and lse over all keys, as where a ring of devices holds the keys."""
    rng = np.random.default_rng(0)
    q, dout = rng.normal(size=(2, 3, 70, 16)).astype(dtype)
    k, v = (rng.normal(size=(2, 3, 300, 16)) + 5).astype(dtype)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    whole = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    parts = [
        cupyflash.attention_vjp(dout, q, k[:, a:b], v[:, a:b], out, lse)
        for a, b in ((0, 90), (90, 91), (91, 300))
    ]
    bound = {"float32": 1e-4, "float64": 1e-12}[dtype]
    dk, dv = (np.concatenate([g[n] for g in parts], axis=1) for n in (1, 2))
    for got, want in zip((sum(g.dq for g in parts), dk, dv), whole[:3], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=bound * np.abs(want).max())


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_the_axis_of_other_packages(name):
    function = getattr(cupyflash, name)
    with pytest.raises(TypeError, match=r"argument 'dim'; here it is axis=$"):
        function(np.ones(3), dim=0)
    with pytest.raises(TypeError, match=r"argument 'colour'$"):
        function(np.ones(3), colour=0)
    assert "unknown" not in inspect.signature(function).parameters


def test_names_that_nobody_has():
    x = np.ones((2, 3))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'$"):
        cupyflash.attention(x, x, x, colour=1)


@pytest.mark.parametrize("name", ["attention", "attention_vjp"])
def test_help_shows_our_names_alone(name):
    kinds = {
        p.kind for p in inspect.signature(getattr(cupyflash, name)).parameters.values()
    }
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_a_mask_given_as_bias():
    x = np.ones((2, 3))
    with pytest.raises(TypeError, match="a boolean mask goes into mask="):
        cupyflash.attention(x, x, x, bias=np.ones((2, 2), bool))
    with pytest.raises(TypeError, match=r"bias must be one of .* got int64"):
        cupyflash.attention(x, x, x, bias=np.ones((2, 2), np.int64))


def test_lists_and_integers():
    x = [[1.0, 0.0], [0.0, 1.0]]
    from_lists = cupyflash.attention(x, x, x, bias=x, mask=[[True, False]] * 2)
    y = np.array(x)
    np.testing.assert_array_equal(
        from_lists,
        cupyflash.attention(y, y, y, bias=y, mask=np.array([[1, 0]] * 2) > 0),
    )
    with pytest.raises(TypeError, match=r"q must be one of float16, .* got int64"):
        cupyflash.attention([[1, 0]], y, y)


def test_one_with_two_axes_beside_one_with_four():
    q, k = np.ones((5, 8)), np.ones((2, 3, 7, 8))
    with pytest.raises(ValueError, match="axes") as caught:
        cupyflash.attention(q, k, k)
    said = str(caught.value)
    assert "q has 2 axes (5, 8)" in said
    assert "k has 4 axes (2, 3, 7, 8)" in said


@pytest.mark.parametrize("method", ["auto", "safe", "online"])
@pytest.mark.parametrize("keys", [513, 4096, 131_072, 131_073])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 6e-6), ("float64", 8e-15)])
def test_many_keys_alike(method, keys, dtype, bound):
    """BLAS alone would add them up in one sum: 6e-4 in float32."""
    q, k = np.zeros((3, 1), dtype), np.zeros((keys, 1), dtype)
    v = np.full((keys, 2), 0.1, dtype)
    out = cupyflash.attention(q, k, v, method=method)
    np.testing.assert_allclose(out.astype(np.float64), float(v[0, 0]), rtol=bound)


@pytest.mark.parametrize("queries", [4096, 65_537, 131_073])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-13)])
def test_gradients_of_many_queries_alike(queries, dtype, bound):
    q, k, v = (
        np.zeros((queries, 1), dtype),
        np.zeros((1, 1), dtype),
        np.ones((1, 2), dtype),
    )
    dout = np.full((queries, 2), 0.1, dtype)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    np.testing.assert_allclose(
        grads.dv.astype(np.float64), queries * float(dout[0, 0]), rtol=bound
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"softcap": 30.0}, {"sinks": True}, {"dlse": True}],
    ids=str,
)
@pytest.mark.parametrize("queries", [40, 600])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-13)])
def test_gradients_of_keys_and_values_far_from_zero(dtype, bound, queries, options):
    """The sum of a row of dS is known; else what it lacks is multiplied by the keys."""
    options = dict(options)
    rng = np.random.default_rng(3)
    keys, shift = 300, 5 if dtype == "float32" else 30
    real = np.float64 if dtype == "float32" else np.longdouble
    q, dout = rng.normal(size=(2, queries, 64)).astype(dtype)
    k = (rng.normal(size=(keys, 64)) + 5).astype(dtype)
    v = (rng.normal(size=(keys, 64)) + shift).astype(dtype)
    if options.pop("sinks", False):
        options["sinks"] = np.ones(1, dtype)
    dlse = rng.normal(size=queries).astype(dtype) if options.pop("dlse", 0) else None
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dq, dk, dv, *_ = cupyflash.attention_vjp(
        dout, q, k, v, out, lse, dlse=dlse, **options
    )
    exact, *_ = oracle.attention_vjp(dout, q, k, v, dlse=dlse, real=real, **options)
    for name, got in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert max_error(got, exact[name]) <= bound * np.abs(exact[name]).max(), name


@pytest.mark.parametrize("method", ["auto", "tiled", "online"])
@pytest.mark.parametrize("rows_keys", [(3, 5), (40, 300), (300, 600)], ids=str)
@pytest.mark.parametrize(
    ("scale", "size"), [(None, 6e18), (1e-40, 1e20), (-1e-39, 1e19), (0.3, 1.0)]
)
def test_products_beyond_float32_whose_scores_are_not(rows_keys, scale, size, method):
    """The scale goes into q before the product, as far as it is a power of two."""
    rng = np.random.default_rng(5)
    rows, keys = rows_keys
    q, k = ((rng.normal(size=(n, 8)) * size).astype(np.float32) for n in (rows, keys))
    v = rng.normal(size=(keys, 8)).astype(np.float32)
    out, lse = cupyflash.attention(q, k, v, scale=scale, method=method, return_lse=True)
    exact, exact_lse = cupyflash.attention(
        *(x.astype(np.float64) for x in (q, k, v)), scale=scale, return_lse=True
    )
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-5)
    np.testing.assert_allclose(out, exact, atol=1e-4)
    if method != "online":
        dout = np.ones_like(out)
        grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, scale=scale)
        assert all(np.isfinite(x).all() for x in grads[:3])


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": 3, "softcap": 5.0}, {"bias": True},
     {"sinks": True}, {"lengths": True}, {"dlse": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("bad", [None, np.nan])
def test_gradients_of_small_heads_do_not_depend_on_others(rng, options, dtype, bad):
    """Many go in one product; each gets what it gets alone, to the bit."""
    options, heads, (rows, keys) = dict(options), 40, (9, 12)
    q, dout = rng.normal(size=(2, heads, 2, rows, 8)).astype(dtype)
    k, v = rng.normal(size=(2, heads, 1, keys, 8)).astype(dtype)
    if bad is not None:
        k[3, 0, 5], dout[17, 1, 2] = bad, bad
    if options.pop("bias", False):
        options["bias"] = rng.normal(size=(heads, 2, rows, keys)).astype(dtype)
    if options.pop("sinks", False):
        options["sinks"] = np.array([0.5, -1], dtype)
    if options.pop("lengths", False):
        options["key_lengths"] = rng.integers(0, keys + 1, heads)
        options["query_lengths"] = rng.integers(0, rows + 1, heads)
    has_dlse = options.pop("dlse", False)

    def gradients(which):
        given = {
            name: x[which] if isinstance(x, np.ndarray) and x.shape[0] == heads else x
            for name, x in options.items()
        }
        out, lse = cupyflash.attention(
            q[which], k[which], v[which], return_lse=True, **given
        )
        call = dout[which], q[which], k[which], v[which], out, lse
        dlse = np.cos(lse) if has_dlse else None
        given |= {"dlse": dlse, "need_dbias": "bias" in given}
        told = cupyflash.explain("attention_vjp", *call, **given).details
        return cupyflash.attention_vjp(*call, **given), told

    together, told = gradients(slice(None))
    assert told["heads_of_a_task"] == heads
    for head in range(heads):
        alone, _ = gradients(slice(head, head + 1))
        for a, b in zip(alone, together, strict=True):
            if a is not None:
                np.testing.assert_array_equal(a[0], b[head])


# --- heads of a group as rows of one product -----------------------------------------

_OF_GROUPS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "causal": {"causal": True},
    "key lengths": {"key_lengths": np.array([40, 17, 1])},
    "bias of keys": {"bias": np.cos(np.arange(40.0))},
    "bias of queries": {"bias": np.cos(np.arange(120.0)).reshape(3, 40)},
    "bias of heads": {"bias": np.cos(np.arange(480.0)).reshape(12, 1, 40)},
    "bias of rows": {"bias": np.cos(np.arange(1440.0)).reshape(12, 3, 40)},
    "bias of entries": {"bias": np.cos(np.arange(120.0)).reshape(3, 1, 1, 40)},
    "mask": {"mask": np.tri(3, 40, 5, bool)},
    "mask of heads": {"mask": np.cos(np.arange(1440.0)).reshape(12, 3, 40) > -0.5},
    "mask and bias": {
        "mask": np.tri(3, 40, 30, bool), "bias": np.cos(np.arange(12.0))[:, None, None]
    },
    "offset": {"query_offset": 7},
    "window": {"window": (9, 4), "query_offset": 20},
    "window of all": {"window": (40, 9), "query_offset": 35},
    "causal, offset": {
        "causal": True, "query_offset": 39, "key_lengths": np.array([40, 13, 0]),
        "mask": np.cos(np.arange(480.0)).reshape(12, 1, 40) > -0.5,
        "bias": np.cos(np.arange(120.0)).reshape(3, 1, 1, 40),
    },
    "window by a function": {"mask": lambda i, j: (j <= i) & (i - j < 7)},
    "function": {"score": lambda s, i, j: 2 * np.tanh(s / 2)},
}  # fmt: skip


def _some_queries(x, queries):
    """An option of three queries for as many, from the last ones."""
    is_array = isinstance(x, np.ndarray) and x.ndim > 1 and x.shape[-2] == 3
    return x[..., 3 - queries :, :] if is_array else x


def _apart(monkeypatch):
    """No heads go together; no call is known."""
    for module in (attention_cpu, vjp_cpu):
        monkeypatch.setattr(module, "_checked", {})
    monkeypatch.setattr(grouped, "_MOST_ROWS", 1)


@pytest.mark.parametrize("name", _OF_GROUPS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_heads_of_a_group_are_rows_of_one_product(
    rng, monkeypatch, name, layout, kv_heads, queries, dtype
):
    q, k, v = arrays(rng, 3, queries, 40, 8, dtype, 12, kv_heads)
    options = {n: _some_queries(x, queries) for n, x in _OF_GROUPS[name].items()}
    exact_options = dict(options)
    if name == "function":
        exact_options = {"softcap": 2.0}
    elif name == "window by a function":
        exact_options = {"window": (6, 0)}
    exact, exact_lse, _ = oracle.attention(q, k, v, **exact_options)
    dout = rng.normal(size=q.shape).astype(dtype)
    if layout == "bshd":
        q, k, v, dout, exact = (
            np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, dout, exact)
        )
    options["layout"] = layout
    told = cupyflash.explain("attention", q, k, v, **options).details
    is_joined = queries == 1 or not ("causal" in name or "window" in name)
    is_joined &= name not in ("window", "window by a function") and dtype != "float16"
    assert ("heads_of_a_product" in told) == is_joined
    if is_joined:  # in up to 32 rows
        most = 12 if queries == 1 else 6
        assert told["heads_of_a_product"] == min(12 // kv_heads, most)
    close = {"rtol": 2e-3, "atol": 1e-3} if dtype == "float16" else {}
    close = close or {"rtol": 1e-5, "atol": 2e-6}
    target = np.empty_like(dout)
    for _ in range(2):  # the second one is a known call
        y = cupyflash.attention(q, k, v, **options)
        assert y.flags.c_contiguous
        np.testing.assert_allclose(y, exact.astype(float), **close)
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        np.testing.assert_array_equal(out, y)
        np.testing.assert_allclose(lse, exact_lse.astype(float), **close)
        assert cupyflash.attention(q, k, v, out=target, **options) is target
        np.testing.assert_array_equal(target, y)
    dlse = np.where(np.isfinite(lse), 0.3 * lse, 0).astype(lse.dtype)
    grads = [
        cupyflash.attention_vjp(dout, q, k, v, out, lse, dlse=dlse, **options)
        for _ in range(2)
    ]
    _apart(monkeypatch)
    told = cupyflash.explain("attention", q, k, v, **options).details
    assert "heads_of_a_product" not in told
    apart = cupyflash.attention_vjp(dout, q, k, v, out, lse, dlse=dlse, **options)
    for one, other, x in zip(apart[:3], grads[0][:3], (q, k, v), strict=True):
        assert other.shape == x.shape
        assert other.dtype == x.dtype
        assert other.flags.c_contiguous
        np.testing.assert_allclose(
            other.astype(float),
            one.astype(float),
            **(close | {"atol": 20 * close["atol"]}),
        )
    for one, other in zip(grads[0][:3], grads[1][:3], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 300, 80), (1, 1500, 64), (2, 40, 8), (4, 9, 4)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_bits_of_heads_that_go_together(rng, dtype, shape, kv_heads):
    """An entry of many has those of it alone, however arrays lie in memory."""
    q, k, v = arrays(rng, 9, *shape, dtype, 8, kv_heads)
    dout = rng.normal(size=q.shape).astype(dtype)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    for i in (0, 8):
        here = slice(i, i + 1)
        one, one_lse = cupyflash.attention(q[here], k[here], v[here], return_lse=True)
        np.testing.assert_array_equal(one, out[here])
        np.testing.assert_array_equal(one_lse, lse[here])
    for axis in (0, 2, 3):
        wide = [np.repeat(x, 2, axis=axis) for x in (q, k, v)]
        wide = [x.swapaxes(0, axis)[::2].swapaxes(0, axis) for x in wide]
        for _ in range(2):
            np.testing.assert_array_equal(cupyflash.attention(*wide), out)
            found = cupyflash.attention_vjp(dout, *wide, out, lse)
            for x, expected in zip(found[:3], grads[:3], strict=True):
                np.testing.assert_array_equal(x, expected)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (dout, q, k, v, out)]
    for _ in range(2):
        y = cupyflash.attention(*turned[1:4], layout="bshd")
        np.testing.assert_array_equal(y.swapaxes(1, 2), out)
        found = cupyflash.attention_vjp(*turned, lse, layout="bshd")
        for x, expected in zip(found[:3], grads[:3], strict=True):
            np.testing.assert_array_equal(x.swapaxes(1, 2), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_that_go_together_and_are_not_finite(rng, monkeypatch, bad, masked):
    q, k, v = arrays(rng, 2, 1, 40, 8, "float32", 8, 2)
    dout = rng.normal(size=q.shape).astype("float32")
    options = {"mask": np.arange(40) != 5} if masked else {}
    k[0, 1, 5, 3] = v[1, 0, 5, 2] = bad

    def call():
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        return (
            out,
            lse,
            *cupyflash.attention_vjp(dout, q, k, v, out, lse, **options)[:3],
        )

    with np.errstate(all="ignore"):
        together = [call() for _ in range(2)]
        _apart(monkeypatch)
        apart = call()
    for found in together:
        for one, other in zip(found, apart, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_group_is_cut_where_cores_are_without_a_head(monkeypatch):
    """Or where it has more rows than a product is to have."""

    def heads_of_a_product(heads, kv_heads, queries, keys, dim):
        q = np.broadcast_to(np.float32(0), (1, heads, queries, dim))
        k = np.broadcast_to(np.float32(0), (1, kv_heads, keys, dim))
        told = cupyflash.explain("attention", q, k, k).details
        return told.get("heads_of_a_product", 1)

    monkeypatch.setattr(threads, "num_cores", lambda: 4)
    assert heads_of_a_product(32, 8, 1, 4096, 128) == 4
    assert heads_of_a_product(32, 1, 1, 8192, 128) == 8
    assert heads_of_a_product(32, 1, 1, 64, 16) == 32
    assert heads_of_a_product(64, 1, 1, 64, 16) == 32
    assert heads_of_a_product(32, 2, 4, 64, 16) == 8
    assert heads_of_a_product(34, 2, 2, 64, 16) == 1  # 17 heads
    assert heads_of_a_product(32, 8, 5, 64, 16) == 1
    assert heads_of_a_product(8, 8, 1, 64, 16) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "keys"), [(40, 50), (100, 20), (8, 400)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_of_groups_of_many_queries(rng, dtype, rows, keys, layout):
    """Those of k and v are of all rows of a group at once, not of a head at a time."""
    q, k, v = arrays(rng, 2, rows, keys, 16, dtype, 6, 2)
    dout = rng.normal(size=q.shape).astype(dtype)
    bias = rng.normal(size=(6, rows, keys)).astype(dtype)

    def gradients(k, v):
        given = q, k, v, dout
        if layout == "bshd":
            given = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in given]
        q_, k_, v_, dout_ = given
        options = {"bias": bias, "softcap": 5.0, "layout": layout}
        out, lse = cupyflash.attention(q_, k_, v_, return_lse=True, **options)
        found = [
            cupyflash.attention_vjp(
                dout_, q_, k_, v_, out, lse, need_dbias=True, **options
            )
            for _ in range(2)
        ]
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)
        dq, dk, dv, dbias, *_ = found[0]
        if layout == "bshd":
            dq, dk, dv = (x.swapaxes(1, 2) for x in (dq, dk, dv))
        return dq, dk, dv, dbias

    together = gradients(k, v)
    dq, dk, dv, dbias = gradients(np.repeat(k, 3, axis=1), np.repeat(v, 3, axis=1))
    dk, dv = (x.reshape(2, 2, 3, keys, 16).sum(axis=2) for x in (dk, dv))
    close = 1e-5 if dtype == "float32" else 1e-13
    for one, other in zip(together, (dq, dk, dv, dbias), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=close * np.abs(other).max())


def test_norms_tell_that_a_product_is_finite(rng, monkeypatch):
    a, b = (rng.normal(size=(2, 3, n)).astype(np.float32) for n in (50, 40))
    asked = []
    is_finite = backward_entries.is_finite
    monkeypatch.setattr(
        backward_entries, "is_finite", lambda x: asked.append(1) or is_finite(x)
    )
    with np.errstate(all="ignore"):
        for size, asks, finite in (
            (1, 0, True), (1e15, 0, True), (1e18, 1, False), (1e20, 1, False),
            (np.inf, 1, False), (np.nan, 1, False),
        ):  # fmt: skip
            asked.clear()
            x, y = a * np.float32(size), b * np.float32(size)
            product = x.mT @ y
            assert backward_entries._is_finite_product(x, y, product) == finite
            assert len(asked) == asks


# --- what Ctrl-C waits for -----------------------------------------------------------


def test_no_step_takes_all_of_many_keys():
    many = 4_000_000
    q, k = np.zeros((1, 64)), np.broadcast_to(np.zeros((1, 64)), (many, 64))
    for call in (
        ("attention", q, k, k),
        ("attention_vjp", q, q, k, k, q, np.zeros(1)),
    ):
        assert cupyflash.explain(*call).details["keys_of_a_block"] <= 1 << 17
    told = cupyflash.explain("attention", np.zeros((256, 64)), k, k, method="safe")
    assert told.details["rows_of_a_task"] * many <= 1 << 22


def test_one_query_of_many_keys_by_tiles(rng, monkeypatch):
    """Its result, and its gradients, are those of all keys at once."""
    q, dout = rng.normal(size=(2, 3, 1, 8))
    k, v = rng.normal(size=(2, 3, 5000, 8))

    def call():
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        return out, lse, *cupyflash.attention_vjp(dout, q, k, v, out, lse)[:3]

    whole = call()
    monkeypatch.setattr(entries, "_MOST_OF_A_ROW", 1000)
    for x, y in zip(whole, call(), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-11, atol=1e-15)


def test_merging_by_boxes_changes_no_bits(rng, monkeypatch):
    outs, lses = rng.normal(size=(5, 2, 3, 7, 4)), rng.normal(size=(5, 2, 3, 7))
    for axis in (0, 2):
        args = np.moveaxis(outs, 0, axis), np.moveaxis(lses, 0, axis)
        whole = cupyflash.merge_attention_states(*args, axis=axis)
        with monkeypatch.context() as patch:
            patch.setattr(attention_cpu, "_MERGED", 20)
            for x, y in zip(
                whole, cupyflash.merge_attention_states(*args, axis=axis), strict=True
            ):
                assert x.tobytes() == y.tobytes()


def test_a_thread_holds_few_scores():
    """As the docstring of attention says."""
    rng, most = np.random.default_rng(0), 1 << 19
    for _ in range(300):
        heads, rows, keys = (int(2 ** rng.uniform(0, n)) for n in (10, 14, 20))
        head_dim = int(rng.choice([1, 64, 640]))
        dtype = rng.choice(["float16", "float32", "float64"])

        def zeros(*shape, dtype=dtype):
            return np.broadcast_to(np.zeros((), dtype), shape)

        q = zeros(heads, rows, head_dim)
        k = v = zeros(heads, keys, head_dim)
        told = cupyflash.explain("attention", q, k, v).details
        entries_of_a_task = told.get("entries_of_a_task", 1)
        rows_of_a_task = entries_of_a_task * told["rows_of_a_task"]
        scores = rows_of_a_task * min(keys, told.get("keys_of_a_block", keys))
        assert scores <= most or rows_of_a_task == 1
        lse = zeros(heads, rows, dtype="f8" if dtype == "float64" else "f4")
        told = cupyflash.explain("attention_vjp", q, q, k, v, q, lse).details
        rows_of_a_task = told["rows_of_a_task"]
        scores = rows_of_a_task * min(keys, told["keys_of_a_block"])
        assert scores <= most or rows_of_a_task == 1


# --- calls like an earlier one -------------------------------------------------------

_AGAIN = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2), "softcap": 5.0},
    "bshd": {"layout": "bshd", "causal": True},
    "groups": {"kv_heads": 2, "causal": True},
    "groups, bshd": {"kv_heads": 2, "layout": "bshd"},
    "one head of keys": {"kv_heads": 1, "softcap": 3.0},
    "key lengths": {"key_lengths": np.array([5, 0])},
    "lengths": {"key_lengths": np.array([5, 9]), "query_lengths": np.array([0, 7])},
    "a length": {"key_lengths": 5, "query_lengths": 6},
    "lengths, groups": {"key_lengths": np.array([[4], [9]])[:, 0], "kv_heads": 2},
    "lengths, causal": {"key_lengths": np.array([5, 9]), "causal": True},
    "lengths, window": {
        "key_lengths": np.array([3, 9], np.uint8),
        "query_lengths": np.array([8, 2]),
        "window": (2, 1),
        "kv_heads": 2,
    },
    "a length, causal, sinks": {
        "query_lengths": 7,
        "causal": True,
        "sinks": 0.5,
        "layout": "bshd",
    },
    "sinks": {"sinks": np.array([0.3, -1, 2, 0]), "kv_heads": 2, "layout": "bshd"},
    "one sink": {"sinks": 0.5, "kv_heads": 2},
    "slopes": {"alibi_slopes": np.array([0.5, 1, 2, 0.1]), "kv_heads": 2},
    "mask": {"mask": np.tri(8, 9, 1, bool), "kv_heads": 2},
    "mask of heads": {"mask": np.arange(4 * 72).reshape(4, 8, 9) % 5 > 0},
    "bias of heads": {"bias": np.sin(np.arange(288.0)).reshape(4, 8, 9), "kv_heads": 2},
    "more queries than keys": {"causal": True, "query_offset": -3},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", _AGAIN)
def test_a_call_like_an_earlier_one(name, dtype):
    """It skips the checks, and gives the same numbers."""
    options = dict(_AGAIN[name])
    kv_heads = options.pop("kv_heads", 4)
    for option in ("sinks", "alibi_slopes", "bias"):
        if isinstance(options.get(option), np.ndarray):
            options[option] = options[option].astype(dtype)
    rng = np.random.default_rng(1)
    shapes = [(2, 4, 8, 16), (2, kv_heads, 9, 16), (2, kv_heads, 9, 5), (2, 4, 8, 5)]
    if options.get("layout") == "bshd":
        shapes = [(b, n, h, d) for b, h, n, d in shapes]
    q, k, v, dout = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    gradients = {
        "need_dbias": "bias" in options,
        "need_dsinks": "sinks" in options,
        "dlse": rng.normal(size=(2, 4, 8)).astype(dtype),
    }
    first, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    of_first = cupyflash.attention_vjp(
        dout, q, k, v, first, lse, **options, **gradients
    )
    out = np.full_like(first, np.nan)
    for given in ({}, {}, {"out": out}, {"out": out}):
        again, lse_again = cupyflash.attention(
            q, k, v, return_lse=True, **options, **given
        )
        assert again.tobytes() == first.tobytes()
        assert lse_again.tobytes() == lse.tobytes()
        assert again.flags.c_contiguous
        assert again is out or not given
    of_again = cupyflash.attention_vjp(
        dout, q, k, v, first, lse, **options, **gradients
    )
    by_tasks = gradients_by_tasks(dout, q, k, v, first, lse, **options, **gradients)
    bound = 1e-5 if dtype == "float32" else 1e-13
    for a, b, c in zip(of_first, of_again, by_tasks, strict=True):
        if a is None:
            assert b is c is None
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype) == (c.shape, c.dtype)
        assert b.flags.c_contiguous
        assert a.tobytes() == b.tobytes()
        assert np.abs(b - c).max() <= bound * np.abs(c).max()


@pytest.mark.parametrize("name", [name for name in _AGAIN if "length" in name])
def test_lengths_go_the_short_way(rng, monkeypatch, name):
    """Also where they say which keys a causal mask or a window hides."""
    options = dict(_AGAIN[name])
    shape = (2, 8, 4, 16) if options.get("layout") == "bshd" else (2, 4, 8, 16)
    q = rng.normal(size=shape)
    options.pop("kv_heads", None)
    if isinstance(options.get("key_lengths"), np.ndarray):
        options["key_lengths"] = options["key_lengths"].clip(0, 8)
    call = q, q, q, q, *cupyflash.attention(q, q, q, return_lse=True, **options)
    cupyflash.attention_vjp(*call, **options)

    def run(*args):
        raise AssertionError("the long way")

    monkeypatch.setattr(attention_cpu, "run", run)
    monkeypatch.setattr(vjp_cpu, "run", run)
    cupyflash.attention(q, q, q, return_lse=True, **options)
    cupyflash.attention_vjp(*call, **options)


def test_a_call_like_an_earlier_one_looks_at_values():
    """Shapes and dtypes are known; lengths, and where `out` lies, are not."""
    q, k, v = np.random.default_rng(1).normal(size=(3, 2, 4, 8, 8))
    lengths, memory = np.array([5, 8]), np.empty((2, *q.shape))
    for _ in range(2):
        out, lse = cupyflash.attention(
            q, k, v, key_lengths=lengths, return_lse=True, out=memory[0]
        )
        cupyflash.attention_vjp(q, q, k, v, out, lse, key_lengths=lengths)
    expected = out.copy()
    memory[0] = q
    for x in (memory[0], memory[0][:, ::-1]):
        with pytest.raises(ValueError, match="out shares memory with q"):
            cupyflash.attention(x, k, v, key_lengths=lengths, out=memory[0])
    with pytest.raises(ValueError, match="key_lengths must be from 0 to"):
        cupyflash.attention(q, k, v, key_lengths=lengths + 1, out=memory[0])
    with pytest.raises(ValueError, match="key_lengths must be from 0 to"):
        cupyflash.attention_vjp(q, q, k, v, out, lse, key_lengths=lengths - 6)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        cupyflash.attention(q, k, v, key_lengths=lengths, out=memory[0])
    other = np.empty((2, 4, 8, 16))[..., ::2]
    cupyflash.attention(q, k, v, key_lengths=lengths, out=other)
    assert np.array_equal(other, expected)


def test_gradients_over_some_of_the_keys():
    """With lse over more keys than a small call has, `out` knows the other sums."""
    rng = np.random.default_rng(2)
    q, k, v, dout = rng.normal(size=(4, 3, 2, 12, 16))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    whole = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    halves = [
        cupyflash.attention_vjp(dout, q, k[:, :, part], v[:, :, part], out, lse)
        for part in (slice(0, 5), slice(5, 12))
    ]
    assert np.allclose(halves[0].dq + halves[1].dq, whole.dq, rtol=0, atol=1e-13)
    for name in ("dk", "dv"):
        parts = np.concatenate([getattr(half, name) for half in halves], axis=2)
        assert np.allclose(parts, getattr(whole, name), rtol=0, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_queries", [1, 3, 40])
@pytest.mark.parametrize("batch", [1, 5])
def test_one_key_is_the_result(batch, num_queries, causal):
    """Softmax of one score is 1; a NaN stays in its row, and lse is the score."""
    rng = np.random.default_rng(num_queries)
    q = rng.standard_normal((batch, 1, num_queries, 4))
    k, v = rng.standard_normal((2, batch, 1, 1, 4))
    q[0, 0, -1, 0] = np.nan
    for _ in range(2):  # the second call needs no checks
        out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
        plain = cupyflash.attention(q, k, v, causal=causal)
        for result in (out, plain):
            assert np.isnan(result[0, 0, -1]).all()
            np.testing.assert_array_equal(result[1:, :, -1], v[1:, :, 0])
            hidden = result[:, :, :-1]
            expected = np.zeros_like(hidden) if causal else v + 0 * hidden
            np.testing.assert_array_equal(hidden, expected)
        score = (q * k).sum(-1)[:, :, -1] / 2
        np.testing.assert_allclose(lse[:, :, -1], score, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("option", ["plain", "sinks", "mask", "dlse", "groups"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_gradients_of_one_key(rng, rows, option):
    """The score gets none, but for what flows into lse or competes with a sink."""
    heads = 4 if option == "groups" else 1
    q, dout = rng.normal(size=(2, 5, heads, rows, 4))
    k, v = rng.normal(size=(2, 5, 1, 1, 4))
    options, flow = {}, {}
    if option == "sinks":
        options["sinks"] = np.array([0.3])
    elif option == "mask":
        options["mask"] = np.arange(rows)[:, None] != 1
    elif option == "dlse":
        flow["dlse"] = rng.normal(size=(5, 1, rows))
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    s = (q @ k.swapaxes(-1, -2)) / 2
    p, ds = np.ones_like(s), np.zeros_like(s)
    if option == "sinks":
        p = 1 / (1 + np.exp(0.3 - s))
        ds = p * (1 - p) * (dout @ v.swapaxes(-1, -2))
    elif option == "mask":
        p = p * options["mask"]
    elif option == "dlse":
        ds = flow["dlse"][..., None]
    exact = (
        ds * k / 2,
        (ds * q).sum((1, 2), keepdims=True) / 2,
        (p * dout).sum((1, 2), keepdims=True),
    )
    for _ in range(2):  # the second call needs no checks
        grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, **options, **flow)
        for found, expected in zip(grads[:3], exact, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    among = cupyflash.attention_vjp(
        *(np.concatenate([x] * 2000) for x in (dout, q, k, v, out, lse)),
        **options,
        **{name: np.concatenate([x] * 2000) for name, x in flow.items()},
    )
    for found, many in zip(grads[:3], among[:3], strict=True):
        np.testing.assert_array_equal(found, many[-5:])


@pytest.mark.parametrize("bad", ["q", "k", "v", "dout"])
def test_gradients_of_one_key_that_are_no_numbers(rng, bad):
    """As those of a call by tasks."""
    q, k, v = arrays(rng, 2, 3, 1, 4)
    dout = rng.normal(size=q.shape).astype(q.dtype)
    {"q": q, "k": k, "v": v, "dout": dout}[bad][0, 0, -1, 1] = np.nan
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    tasks = gradients_by_tasks(dout, q, k, v, out, lse)
    assert not np.isfinite(np.concatenate([x.ravel() for x in grads[:3]])).all()
    for found, expected in zip(grads[:3], tasks[:3], strict=True):
        np.testing.assert_array_equal(found, expected)


# --- products in pieces --------------------------------------------------------------


@pytest.fixture(params=["as it is", "pieces"])
def small_kernels(request, monkeypatch):
    """Whether there are pieces: as BLAS is, and in any case."""
    if request.param == "pieces":
        monkeypatch.setattr(pieces, "has_small_kernels", lambda: True)
    attention_cpu._checked.clear()
    with threadpoolctl.threadpool_limits(1):
        yield pieces.has_small_kernels()
    attention_cpu._checked.clear()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "shape",
    [(2, 700, 64), (16, 1024, 256), (16, 130, 256), (31, 517, 40), (32, 40, 2100),
     (33, 600, 64), (16, 1000, 31)],
)  # fmt: skip
def test_a_product_by_the_transposed_in_pieces(rng, small_kernels, dtype, shape):
    rows, columns, terms = shape
    a = rng.normal(size=(2, 3, rows, terms)).astype(dtype)
    b = rng.normal(size=(2, 1, columns, terms)).astype(dtype)
    found = pieces.multiply_transposed(a, b)
    bound = 24 * np.finfo(dtype).eps * (np.abs(a) @ np.abs(b).mT)
    assert (np.abs(found - a @ b.mT) <= bound).all()
    wide = np.full((2, 3, rows, columns + 5), np.nan, dtype)
    for out in (np.empty_like(found), wide[..., 2:-3]):
        pieces.multiply_transposed(a, b, out)
        assert out.tobytes() == found.tobytes()
    assert np.isnan(wide[..., :2]).all()
    assert np.isnan(wide[..., -3:]).all()
    one = pieces.multiply_transposed(a[1, 2], b[1, 0])
    assert one.tobytes() == found[1, 2].tobytes()
    size = pieces.columns_of_a_piece(rows, terms, columns)
    is_cut = small_kernels and rows <= 32 and 32 <= terms < 2100
    assert bool(size) == is_cut
    assert size * rows <= 1200
    assert size * rows * terms <= 10**6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    "shape", [(128, 512, 64), (1025, 100, 40), (49, 300, 130), (25, 9, 9), (50, 1, 40)]
)
def test_a_product_in_pieces_of_rows(rng, small_kernels, dtype, is_cut, shape):
    rows, terms, columns = shape
    a = rng.normal(size=(3, rows, terms)).astype(dtype)
    b = rng.normal(size=(3, terms, columns)).astype(dtype)
    exact = a @ b
    bound = 24 * np.finfo(dtype).eps * (np.abs(a) @ np.abs(b))
    cut = pieces.Cut(rows, min(24, rows - 24)) if is_cut else None
    found = pieces.multiply(a, b, None, cut)
    assert (np.abs(found - exact) <= bound).all()
    across = np.ascontiguousarray(a.mT).mT
    out = np.empty_like(found)
    assert pieces.multiply(across, b, out, cut) is out
    assert (np.abs(out - exact) <= bound).all()
    if is_cut and small_kernels and rows > 49:  # cut at a multiple of 24
        parts = [
            pieces.multiply(a[:, part], b, None, cut)
            for part in (slice(0, 24), slice(24, None))
        ]
        np.testing.assert_array_equal(np.concatenate(parts, 1), found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [2, 16, 24, 30])
@pytest.mark.parametrize("terms", [300, 511, 1024, 1700, 9_000])
def test_sums_of_few_rows_are_shorter(rng, small_kernels, dtype, rows, terms):
    a = rng.random((rows, terms)).astype(dtype)
    b = rng.random((2, terms, 256)).astype(dtype)
    some = slice(None, None, 37)
    exact = a.astype(np.longdouble) @ b[..., some].astype(np.longdouble)
    bound = 24 * np.finfo(dtype).eps * exact
    out = np.empty((2, rows, 256), dtype)
    assert block.product(a, b, out) is out
    assert (np.abs(out[..., some] - exact) <= bound).all()
    assert block.product(a, b).tobytes() == out.tobytes()
    assert block.product(a, b[1]).tobytes() == out[1].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "shape",
    [(49, 1024, 256), (50, 1100, 194), (36, 746, 422), (400, 400, 8), (275, 658, 8),
     (27, 1353, 211), (16, 1100, 256), (1500, 16, 200), (40, 2000, 128)],
)  # fmt: skip
def test_an_entry_alone_has_its_bits(rng, small_kernels, dtype, shape):
    """Those among others, whether two threads share it or not."""
    one = arrays(rng, 1, *shape, dtype)
    alone = [cupyflash.attention(*one, return_lse=True) for _ in range(2)]
    many = [np.concatenate([x] * 3) for x in one]
    among = cupyflash.attention(*many, return_lse=True)
    for first, again, of_many in zip(*alone, among, strict=True):
        assert first.tobytes() == again.tobytes() == of_many[1].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("option", ["plain", "causal", "bias", "square"])
@pytest.mark.parametrize(
    "shape",
    [(1, 16, 4), (1, 3, 64), (1, 1500, 8), (16, 16, 64), (5, 200, 3), (30, 9, 20)],
)
def test_a_small_entry_goes_as_matrices(rng, monkeypatch, dtype, option, shape):
    """With the bits of the long way, forward and backward; NaN and infinity, too."""
    q, k, v = arrays(rng, 1, *shape, dtype)
    options = {}
    if option == "causal":
        options = {"causal": True, "query_offset": max(0, shape[1] - shape[0])}
    if option == "bias":
        options = {"bias": rng.normal(size=shape[:2]).astype(dtype)}
    if option == "square" and shape[0] == shape[1]:
        q = k
    asked = []
    for name in ("_compute_matrices", "_gradients_of_matrices"):
        kind = backward_entries.Direct
        whole = getattr(kind, name)
        owner = entries.Direct if hasattr(entries.Direct, name) else kind
        monkeypatch.setattr(
            owner,
            name,
            lambda self, *given, whole=whole: (asked.append(1), whole(self, *given))[1],
        )
    first, found = (cupyflash.attention(q, k, v, **options) for _ in range(2))
    assert asked
    assert first.tobytes() == found.tobytes()
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    assert out.tobytes() == found.tobytes()
    dout = rng.normal(size=out.shape).astype(dtype)
    asked.clear()
    grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, **options)
    assert asked
    monkeypatch.setattr(
        backward_entries.Direct, "_gradients_of_matrices", lambda *_: None
    )
    for a, b in zip(
        grads[:3],
        cupyflash.attention_vjp(dout, q, k, v, out, lse, **options),
        strict=False,
    ):
        np.testing.assert_array_equal(a, b)
    monkeypatch.undo()
    for x in (q, k, v):
        for odd in (np.nan, np.inf):
            kept, x[0, 0, -1, 0] = x[0, 0, -1, 0].copy(), odd
            among = cupyflash.attention(
                *(np.concatenate([y] * 3) for y in (q, k, v)), **options
            )
            np.testing.assert_array_equal(
                cupyflash.attention(q, k, v, **options), among[1:2]
            )
            x[0, 0, -1, 0] = kept


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gradients_of_many_queries_before_all_keys(rng, dtype):
    """More than a product sums at once, and no key that any of them sees."""
    q, k = (rng.normal(size=(1, n, 64)).astype(dtype) for n in (2000, 2))
    options = {"causal": True, "query_offset": -2000}
    out, lse = cupyflash.attention(q, k, k, return_lse=True, **options)
    for x in cupyflash.attention_vjp(q, q, k, k, out, lse, **options)[:3]:
        assert not x.any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seqlen_k", [1, 2])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_zeros_of_queries_that_see_no_key(dtype, seqlen_k, dim):
    """They are 0.0 in every call, where 0 times a value is -0.0."""
    rng = np.random.default_rng(0)
    for batch, seqlen_q in (((1, 1), 3), ((2, 3), 17)):
        q = rng.normal(size=(*batch, seqlen_q, dim)).astype(dtype)
        k = rng.normal(size=(*batch, seqlen_k, dim)).astype(dtype)
        v = -np.abs(rng.normal(size=k.shape)).astype(dtype)
        hidden = np.arange(seqlen_q) % 2 == 0
        for options in (
            {"causal": True},
            {"window": (0, 0)},
            {"mask": np.broadcast_to(~hidden[:, None], (seqlen_q, seqlen_k))},
            {"key_lengths": np.zeros(batch[0], int)},
            {"causal": True, "sinks": np.zeros(batch[1], dtype)},
        ):
            first, *later = (
                cupyflash.attention(q, k, v, **options).copy() for _ in range(3)
            )
            assert not np.signbit(first[first == 0]).any(), options
            for again in later:
                assert again.tobytes() == first.tobytes(), options


def test_keys_of_one_float16_query_are_converted_in_blocks():
    """Those of a call that is long: all at once leave the cache before they count."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 1, n, 64)) for n in (1, 65_536, 65_536))
    narrow = [x.astype(np.float16) for x in (q, k, v)]
    cupyflash.attention(*narrow)
    tracemalloc.start()
    out = cupyflash.attention(*narrow)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20  # k and v have 32 MiB in float32
    exact = cupyflash.attention(*(x.astype(np.float64) for x in narrow))
    assert max_error(out, exact) <= 2e-3 * np.abs(exact).max() + 1e-3
