"""Score and mask functions in attention and its gradients, on NumPy arrays."""

import random

import expressions
import fuzz_functions
import numpy as np
import pytest

import cupyflash
from cupyflash import scores
from cupyflash._attention.cpu import entries, forward, tiled

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = (2,), 4, 2, 120, 560, 8
CAP, FAR = 3.0, 90


@pytest.fixture(params=["naive", "safe", "online", "tiled", "entries"])
def method(request, monkeypatch):
    """A method; tiled once by tiles, and once by entries, as small ones go."""
    monkeypatch.setattr(forward, "_checked", {})
    if request.param == "tiled":
        monkeypatch.setattr(entries, "takes", lambda problem: False)
    return "tiled" if request.param == "entries" else request.param


def bent(s, b, h, i, j, *, slope, table, gain):
    """All variables, arrays of one and two axes and of none, a branch."""
    near = np.clip(i - j, -8, 8) + 8
    return (
        np.where(i >= j, gain * np.sin(s), s) - slope[h] * abs(i - j) + table[b, near]
    )


def within(b, h, i, j, *, document):
    return (document[b, j] <= 1 + h) & (abs(i - j) < FAR) & (j % 5 != 3)


def data(dtype=np.float64, layout="bhsd"):
    rng = np.random.default_rng(0)
    shapes = {
        "q": (*BATCH, HEADS, QUERIES, DIM),
        "k": (*BATCH, KV_HEADS, KEYS, DIM),
        "v": (*BATCH, KV_HEADS, KEYS, 5),
    }
    arrays = {n: rng.normal(size=shape).astype(dtype) for n, shape in shapes.items()}
    if layout == "bshd":
        arrays = {n: x.swapaxes(1, 2).copy() for n, x in arrays.items()}
    named = {
        "slope": rng.uniform(0.01, 0.1, HEADS),
        "table": rng.normal(size=(2, 17)),
        "gain": np.array(1.5),
    }
    mask = {"document": np.sort(rng.integers(0, 4, (2, KEYS)), axis=1)}
    return arrays, {
        "score": bent,
        "score_arrays": named,
        "mask": within,
        "mask_arrays": mask,
    }


def others(rng):
    """Every other option, at once."""
    return {
        "scale": 0.4,
        "softcap": CAP,
        "bias": rng.normal(size=(HEADS, QUERIES, KEYS)),
        "causal": True,
        "window": (300, None),
        "query_offset": np.array([400, 430]),
        "sinks": rng.normal(size=HEADS),
        "alibi_slopes": rng.uniform(0, 0.1, HEADS),
        "query_lengths": np.array([QUERIES, 100]),
        "key_lengths": np.array([KEYS, 550]),
    }


def dense(q, k, v, score, score_arrays, mask, mask_arrays, **options):
    """(out, lse) with all scores in memory, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = HEADS // KV_HEADS
    k, v = (x.repeat(group, axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * options.get("scale", DIM**-0.5)
    if cap := options.get("softcap"):
        s = cap * np.tanh(s / cap)
    offset = np.asarray(options.get("query_offset", KEYS - QUERIES)).reshape(
        -1, 1, 1, 1
    )
    b, h = np.arange(BATCH[0])[:, None, None, None], np.arange(HEADS)[:, None, None]
    i, j = np.arange(QUERIES)[:, None], np.arange(KEYS)
    at = i + offset
    if score:
        s = score(s=s, b=b, h=h, i=at, j=j, **score_arrays)
    s = s + options.get("bias", 0)
    slopes = options.get("alibi_slopes", np.zeros(HEADS))
    s = s - slopes[:, None, None] * abs(at - j)
    seen = np.ones(s.shape, bool)
    if mask:
        seen &= mask(b=b, h=h, i=at, j=j, **mask_arrays)
    if options.get("causal"):
        seen &= j <= at
    if "window" in options:
        seen &= at - j <= options["window"][0]
    if "key_lengths" in options:
        seen &= j < options["key_lengths"].reshape(-1, 1, 1, 1)
    s = np.where(seen, s, -np.inf)
    sinks = np.full(HEADS, -np.inf) if "sinks" not in options else options["sinks"]
    sinks = np.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))
    whole = np.concatenate([s, sinks], axis=-1)
    m = whole.max(axis=-1, keepdims=True)
    m = np.where(np.isfinite(m), m, 0)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(whole - m).sum(axis=-1)) + m[..., 0]
    p = np.exp(s - np.where(np.isfinite(lse), lse, 0)[..., None])
    out = p @ v
    if "query_lengths" in options:
        padding = i[:, 0] >= options["query_lengths"].reshape(-1, 1, 1)
        out, lse = np.where(padding[..., None], 0, out), np.where(padding, -np.inf, lse)
    return out, lse


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "all options"])
def test_values(method, beside):
    arrays, functions = data()
    options = others(np.random.default_rng(1)) if beside else {}
    out, lse = cupyflash.attention(
        **arrays, **functions, **options, method=method, return_lse=True
    )
    expected = dense(**arrays, **functions, **options)
    np.testing.assert_allclose(out, expected[0], atol=1e-13)
    np.testing.assert_allclose(lse, expected[1], atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(method, dtype):
    arrays, functions = data(dtype)
    out = cupyflash.attention(**arrays, **functions, method=method)
    assert out.dtype == dtype
    expected, _ = dense(**arrays, **functions)
    limit = {"float16": 1e-3, "float32": 2e-6}[dtype]
    limit *= 10 if method == "naive" else 1  # which rounds each step
    assert abs(out - expected).max() <= limit * abs(expected).max()


def test_bfloat16_and_arrays_of_16_bits():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    arrays, functions = data(bfloat16)
    named = {n: x.astype(bfloat16) for n, x in functions["score_arrays"].items()}
    functions |= {"score_arrays": named}
    out, lse = cupyflash.attention(**arrays, **functions, return_lse=True)
    wide = {n: x.astype(np.float64) for n, x in named.items()}
    expected, _ = dense(**arrays, **(functions | {"score_arrays": wide}))
    assert abs(out.astype(float) - expected).max() <= 8e-3 * abs(expected).max()
    grads = cupyflash.attention_vjp(
        out, **arrays, out=out, lse=lse, **functions, need_dscore=["table"]
    )
    assert grads.dscore["table"].dtype == bfloat16


def test_layout_and_matrices():
    arrays, functions = data()
    turned, _ = data(layout="bshd")
    out = cupyflash.attention(**arrays, **functions)
    np.testing.assert_array_equal(
        cupyflash.attention(**turned, **functions, layout="bshd").swapaxes(1, 2), out
    )
    q, k, v = (arrays[n][1, 0] for n in "qkv")
    matrix = cupyflash.attention(q, k, v, score=lambda s, b, h, i: s * (1 + b + h))
    np.testing.assert_allclose(matrix, cupyflash.attention(q, k, v), atol=1e-14)


def test_batch_axes_are_counted_in_c_order():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 3, 1, 4, 8))
    k, v = rng.normal(size=(2, 3, 1, 7, 8))
    gain = rng.normal(size=6)
    out = cupyflash.attention(
        q, k, v, score=lambda s, b, *, g: s * g[b], score_arrays={"g": gain}
    )
    for b, index in enumerate(np.ndindex(2, 3)):
        one = cupyflash.attention(
            q[index], k[index[1]], v[index[1]], scale=gain[b] / 8**0.5
        )
        np.testing.assert_allclose(out[index], one, atol=1e-14)


def test_no_rows_and_no_keys():
    q, k = np.ones((2, 0, 4)), np.ones((2, 3, 4))
    assert cupyflash.attention(q, k, k, score=lambda s: -s).shape == (2, 0, 4)
    out, lse = cupyflash.attention(
        k, k[:, :0], k[:, :0], mask=lambda i, j: j < i, return_lse=True
    )
    assert (out == 0).all()
    assert (lse == -np.inf).all()


# --- gradients -----------------------------------------------------------------------

DIFFERENTIATED = ("q", "k", "v", "bias", "sinks", "slope", "table", "gain")


@pytest.fixture(scope="module")
def gradients():
    """Gradients of everything, with every option; and a function of the inputs."""
    arrays, functions = data()
    rng = np.random.default_rng(1)
    options = others(rng)
    out, lse = cupyflash.attention(**arrays, **functions, **options, return_lse=True)
    dout, dlse = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    dlse = np.where(np.isfinite(lse), dlse, 0)

    def vjp():
        return cupyflash.attention_vjp(
            dout, **arrays, out=out, lse=lse, **functions, **options, dlse=dlse,
            need_dbias=True, need_dsinks=True, need_dscore=("slope", "table", "gain"),
        )  # fmt: skip

    def value(name, change):
        """The number whose gradients these are, where one input is moved."""
        of = [arrays, options, functions["score_arrays"]]
        moved = [{**x, name: x[name] + change} if name in x else x for x in of]
        out, lse = dense(
            **moved[0], **moved[1], **(functions | {"score_arrays": moved[2]})
        )
        return (out * dout).sum() + (np.where(dlse == 0, 0, lse) * dlse).sum()

    return vjp, value, arrays | options | functions["score_arrays"]


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_those_of_differences(gradients, name):
    vjp, value, inputs = gradients
    grads = vjp()
    of_score = grads.dscore | {"bias": grads.dbias, "sinks": grads.dsinks}
    gradient = of_score[name] if name in of_score else getattr(grads, f"d{name}")
    assert gradient.shape == inputs[name].shape
    assert gradient.dtype == inputs[name].dtype
    direction = np.random.default_rng(3).normal(size=gradient.shape)
    step = 1e-5 * direction
    expected = (value(name, step) - value(name, -step)) / 2e-5
    assert np.isclose((gradient * direction).sum(), expected, rtol=1e-6, atol=1e-6)


def test_gradients_have_the_same_bits_again(gradients):
    vjp, _, _ = gradients
    first, second = vjp(), vjp()
    for x, y in zip(first[:5], second[:5], strict=True):
        np.testing.assert_array_equal(x, y)
    for name, x in first.dscore.items():
        np.testing.assert_array_equal(x, second.dscore[name])


def test_gradients_of_a_bias_by_pairs_of_types():
    """``weight[type[i], type[j]]``: a read of an integer array inside of an index."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 40, 8))
    kind, weight = rng.integers(0, 4, 40), rng.normal(size=(4, 4))

    def pairs(s, i, j, *, kind, weight):
        return s + weight[kind[i], kind[j]]

    named = {"kind": kind, "weight": weight}
    bias = weight[kind[:, None], kind]
    out, lse = cupyflash.attention(q, k, v, bias=bias, return_lse=True)
    np.testing.assert_allclose(
        cupyflash.attention(q, k, v, score=pairs, score_arrays=named), out, atol=1e-14
    )
    dout = rng.normal(size=out.shape)
    grads = cupyflash.attention_vjp(
        dout, q, k, v, out, lse, score=pairs, score_arrays=named, need_dscore="weight"
    )
    dbias = cupyflash.attention_vjp(
        dout, q, k, v, out, lse, bias=bias, need_dbias=True
    ).dbias
    expected = np.zeros((4, 4))
    np.add.at(expected, (kind[:, None], kind[None]), dbias)
    np.testing.assert_allclose(grads.dscore["weight"], expected, atol=1e-13)


@pytest.mark.parametrize(
    "score",
    [
        lambda s, h, *, gain: s * gain[h],
        lambda s, h, *, gain: 0.5 * s * s * gain[h],
    ],
)
def test_gradients_of_which_the_score_itself_is_a_factor(score):
    """The scores are overwritten before these are needed."""
    arrays, _ = data()
    rng = np.random.default_rng(1)
    gain, dout = rng.normal(size=HEADS), rng.normal(size=(2, HEADS, QUERIES, 5))

    def call(q=arrays["q"], gain=gain, **options):
        named = {"score": score, "score_arrays": {"gain": gain}}
        return cupyflash.attention(q, arrays["k"], arrays["v"], **named, **options)

    out, lse = call(return_lse=True)
    grads = cupyflash.attention_vjp(
        dout, *arrays.values(), out, lse, score=score, score_arrays={"gain": gain},
        need_dscore="gain",
    )  # fmt: skip
    for name, x, gradient in (
        ("q", arrays["q"], grads.dq),
        ("gain", gain, grads.dscore["gain"]),
    ):
        along = 1e-5 * rng.normal(size=x.shape)
        change = call(**{name: x + along}) - call(**{name: x - along})
        np.testing.assert_allclose(
            2 * (gradient * along).sum(), (change * dout).sum(), rtol=1e-6
        )


def test_a_gradient_of_one_number_is_an_array():
    out, lse = cupyflash.attention(Q, Q, Q, return_lse=True)
    grads = cupyflash.attention_vjp(
        Q, Q, Q, Q, out, lse, score=lambda s, *, c: s * c[()],
        score_arrays={"c": np.float32(1.0)}, need_dscore="c",
    )  # fmt: skip
    found = grads.dscore["c"]
    assert (type(found), found.shape, found.dtype) == (np.ndarray, (), "float32")


def test_an_array_without_elements_has_no_index():
    with pytest.raises(IndexError, match=r"hide such pairs by another option$"):
        cupyflash.attention(
            Q, Q, Q, score=lambda s, j, *, w: s + w[j], score_arrays={"w": np.ones(0)}
        )


def test_a_gradient_of_an_array_that_is_not_read_is_zero():
    q = np.ones((3, 4))
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    grads = cupyflash.attention_vjp(
        out, q, q, q, out, lse,
        score=lambda s, *, w: s, score_arrays={"w": np.ones(3)}, need_dscore="w",
    )  # fmt: skip
    np.testing.assert_array_equal(grads.dscore["w"], np.zeros(3))


def test_what_a_score_hides_has_no_part_in_gradients():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 40, 8))
    hidden = {
        "score": lambda s, i, j, *, w: np.where(j <= i - 2, s * w[i - 2], -np.inf)
    }
    hidden["score_arrays"] = {"w": np.ones(40)}
    hidden["mask"] = lambda i, j: i >= 2
    k, v = k.copy(), v.copy()
    k[:, -2:] = v[:, -2:] = np.nan  # which no query sees
    out, lse = cupyflash.attention(q, k, v, **hidden, return_lse=True)
    seen = np.tril(np.ones((40, 40), bool), -2)
    expected = cupyflash.attention(q, k, v, mask=seen)
    np.testing.assert_allclose(out, expected, atol=1e-14)
    assert (lse[:, :2] == -np.inf).all()
    grads = cupyflash.attention_vjp(
        np.ones_like(out), q, k, v, out, lse, **hidden, need_dscore="w"
    )
    plain = cupyflash.attention_vjp(np.ones_like(out), q, k, v, out, lse, mask=seen)
    for ours, theirs in zip(grads[:3], plain[:3], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-13)
    assert np.isfinite(grads.dscore["w"]).all()


# --- small calls ---------------------------------------------------------------------


def near_by_table(s, b, h, i, j, *, table, gain):
    return np.where(i >= j, s * gain[h], s) + table[b, abs(i - j)] * (i - j)


def sees(b, h, i, j, *, document):
    return (document[b, j] <= 1 + h) & ((i + j) % 3 != 1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shapes", ["matrices", "heads", "batch", "group", "one row"])
def test_small_calls(shapes, causal, dtype):
    """Which skip the checks when they come again, and take all heads at once."""
    rng = np.random.default_rng(0)
    of_q, of_k = {
        "matrices": ((7, 4), (7, 4)),
        "heads": ((3, 7, 4), (3, 9, 4)),
        "batch": ((2, 1, 3, 7, 4), (3, 3, 12, 4)),
        "group": ((2, 4, 7, 4), (2, 2, 9, 4)),
        "one row": ((2, 3, 1, 4), (2, 3, 9, 4)),
    }[shapes]
    limit = {"float16": 4e-3, "float32": 4e-6, "float64": 1e-14}[dtype]
    named = {"table": rng.normal(size=(6, 12)), "gain": rng.normal(size=4)}
    document = {"document": rng.integers(0, 4, (6, 12))}
    for _ in range(3):
        q = rng.normal(size=of_q).astype(dtype)
        k, v = rng.normal(size=(2, *of_k)).astype(dtype)
        for functions in (
            {"score": near_by_table, "score_arrays": named},
            {"mask": sees, "mask_arrays": document},
            {
                "score": near_by_table, "score_arrays": named,
                "mask": sees, "mask_arrays": document,
            },
        ):  # fmt: skip
            call = {"causal": causal, **functions}
            expected = cupyflash.attention(q, k, v, **call, method="safe")
            np.testing.assert_allclose(
                cupyflash.attention(q, k, v, **call), expected, rtol=0, atol=limit
            )


@pytest.mark.parametrize("group", [1, 2, 4])
def test_small_calls_with_places_of_their_own(group, method):
    """Queries of each batch entry begin at another key."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, 4, 7, 8))
    k, v = rng.normal(size=(2, 3, 4 // group, 9, 8))
    i, j = np.arange(7)[:, None], np.arange(9)
    lengths = np.array([4, 9, 6])

    def score(s, h, i, j, *, slope):
        return s - slope[h] * abs(i - j)

    def mask(i, j):
        return (i - j) % 4 != 1

    named, slope = {"slope": np.arange(4.0)}, np.arange(4.0)[:, None, None]
    for option, first in (
        ({"key_lengths": lengths}, lengths - 7),
        ({"query_lengths": lengths // 2}, 9 - lengths // 2),
        ({"query_offset": lengths}, lengths),
    ):
        distance = i + first[:, None, None, None] - j
        out = cupyflash.attention(
            q, k, v, score=score, score_arrays=named, mask=mask, method=method, **option
        )
        expected = cupyflash.attention(
            q, k, v, bias=-slope * abs(distance), mask=distance % 4 != 1, method="safe",
            **option,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected, atol=1e-14)


def test_small_calls_with_other_windows_closed_over():
    """The same expression, of which an option is made: other problems."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 9, 4))
    for width in (1, 4, 1, 2, -1):
        seen = abs(np.arange(9)[:, None] - np.arange(9)) <= width
        np.testing.assert_allclose(
            cupyflash.attention(q, k, v, mask=lambda i, j, w=width: abs(i - j) <= w),
            cupyflash.attention(q, k, v, mask=seen),
            atol=1e-14,
        )


def test_small_calls_with_rows_that_see_nothing():
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 9, 4))
    k[:, -1] = v[:, -1] = np.nan
    for _ in range(2):
        for hides in (
            {"mask": lambda i, j: (i % 3 > 0) & (j < 8)},
            {"score": lambda s, i, j: np.where((i % 3 > 0) & (j < 8), s, -np.inf)},
        ):
            out, lse = cupyflash.attention(q, k, v, **hides, return_lse=True)
            np.testing.assert_array_equal(cupyflash.attention(q, k, v, **hides), out)
            assert (out[:, ::3] == 0).all()
            assert (lse[:, ::3] == -np.inf).all()
            np.testing.assert_allclose(
                out[:, 1::3],
                cupyflash.attention(q[:, 1::3], k[:, :8], v[:, :8]),
                atol=1e-14,
            )


def test_small_calls_that_read_out_of_range():
    """Where an option hides the pair nothing is wrong, however often it is done."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 9, 4))
    named = {"t": np.arange(9.0)}

    def far(s, i, j, *, t):  # one number a diagonal, and made of one that is read
        return s - t[i - j] * abs(i - j)

    distance = np.arange(9)[:, None] - np.arange(9)
    bias = -(distance**2.0)
    expected = cupyflash.attention(q, k, v, bias=bias, causal=True)
    for _ in range(3):
        out = cupyflash.attention(q, k, v, score=far, score_arrays=named, causal=True)
        np.testing.assert_allclose(out, expected, atol=1e-14)
        with pytest.raises(IndexError, match=r"t, of shape .* is read at -1 .* j = 1"):
            cupyflash.attention(q, k, v, score=far, score_arrays=named)
    lengths = {"query_lengths": np.array([5, 3]), "key_lengths": np.array([6, 3])}
    short = {"t": np.arange(6.0)}

    def both(s, i, j, *, t):
        return s + t[i] - t[j]

    found = cupyflash.attention(
        q[:, None], k[:, None], v[:, None], score=both, score_arrays=short,
        query_offset=0, **lengths,
    )  # fmt: skip
    bias = np.arange(9.0)[:, None] - np.arange(9)
    expected = cupyflash.attention(
        q[:, None], k[:, None], v[:, None], bias=bias, query_offset=0, **lengths
    )
    np.testing.assert_allclose(found, expected, atol=1e-13)


# --- tiles ---------------------------------------------------------------------------


def test_tiles_that_no_query_sees_are_skipped(monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 4096, 4)).astype(np.float32)
    made, scores = [], tiled.scores

    def counted(part, q, factor, start, stop):
        made.append((part.start, start))
        return scores(part, q, factor, start, stop)

    monkeypatch.setattr(tiled, "scores", counted)
    document = np.arange(4096)[None] // 512
    mask = {
        "mask": lambda b, i, j, *, document: document[b, i] == document[b, j],
        "mask_arrays": {"document": document},
    }
    out = cupyflash.attention(q, k, v, **mask)
    tiles = cupyflash.explain("attention", q, k, v, **mask).details["tiles_of_the_mask"]
    assert len(made) < sum(tiles.values())
    assert tiles["empty"] > tiles["mixed"] + tiles["full"]
    made.clear()
    seen = document[0, :, None] == document[0]
    np.testing.assert_allclose(out, cupyflash.attention(q, k, v, mask=seen), atol=1e-6)
    # By blocks of keys of 256 and 512, so that other calls make other numbers of them.
    assert len(made) >= sum(tiles.values())


def test_nan_in_keys_that_a_mask_hides(method):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 1200, 4))
    k[:, 700:] = v[:, 700:] = np.nan
    out = cupyflash.attention(q, k, v, mask=lambda j: j < 700, method=method)
    expected = cupyflash.attention(q, k[:, :700], v[:, :700], method=method)
    np.testing.assert_allclose(out, expected, atol=1e-13)


# --- indices -------------------------------------------------------------------------


def test_indices_out_of_range(method):
    q = np.ones((1, 6, 4))
    w = {"w": np.ones(6)}

    def f(s, i, j, *, w):
        return s + w[i - j]

    with pytest.raises(
        IndexError, match=r"w, of shape \(6,\), is read at -1 of axis 0"
    ):
        cupyflash.attention(q, q, q, score=f, score_arrays=w, method=method)
    # What other options hide is not read, nor what the mask hides.
    cupyflash.attention(q, q, q, score=f, score_arrays=w, causal=True, method=method)
    cupyflash.attention(
        q, q, q, score=f, score_arrays=w, mask=lambda i, j: j <= i, method=method
    )
    cupyflash.attention(
        q, q, q, score=f, score_arrays=w, mask=np.tri(6, dtype=bool), method=method
    )
    with pytest.raises(IndexError, match=r"read at 5 .* where b = 0, h = 0, i = 5"):
        cupyflash.attention(
            q, q, q,
            mask=lambda i, j, *, w: w[i] == w[j],
            mask_arrays={"w": np.ones(5)},
            method=method,
        )  # fmt: skip


# --- errors and explain --------------------------------------------------------------

Q = np.ones((2, 3, 4))


class OnGpu:
    __cuda_array_interface__ = {}  # noqa: RUF012


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"score_arrays": {}}, ValueError, "score_arrays= needs score="),
        ({"mask_arrays": {}}, ValueError, "mask_arrays= needs mask= to be a function"),
        (
            {"mask": np.ones(3, bool), "mask_arrays": {"x": [1]}},
            ValueError,
            "to be a function",
        ),
        ({"score": "alibi"}, TypeError, "score must be a plain function"),
        ({"mask": np.tanh}, TypeError, "mask must be a plain function"),
        (
            {"score": lambda s: s, "score_arrays": [1]},
            TypeError,
            "must be a dict of arrays by name, got list",
        ),
        (
            {"score": lambda s: s, "score_arrays": {1: [1]}},
            TypeError,
            "must be a dict of arrays by name, got the key 1: use the name",
        ),
        (
            {"score": lambda s, *, w: s + w[0], "score_arrays": {"w": [1j]}},
            TypeError,
            r"score_arrays\['w'\] must hold floats, integers or booleans, got complex",
        ),
        (
            {"score": lambda s, *, w: s + w[0], "score_arrays": {"w": None}},
            TypeError,
            r"score_arrays\['w'\] must be an array, got None",
        ),
        ({"score": lambda s, *, w: s + w[0]}, TypeError, "asks for w"),
        ({"score": lambda i, j: i < j}, TypeError, "a score returns a number"),
        ({"score": np.tanh}, TypeError, r"got ufunc; call it inside one$"),
        ({"score": "relu"}, TypeError, r"\(def or lambda\), got str$"),
        (
            {"mask": scores.sliding_window},
            TypeError,
            r"makes a function: .*, as in mask=scores.sliding_window\(...\)$",
        ),
        ({"score": scores.t5_bias}, TypeError, r"as in score=scores.t5_bias\(...\)$"),
    ],
)
def test_errors(options, kind, message):
    out = np.full(Q.shape, 7.0)
    with pytest.raises(kind, match=message):
        cupyflash.attention(Q, Q, Q, out=out, **options)
    assert (out == 7).all()
    cupyflash.attention(Q, Q, Q)  # after which a call like it needs no checks
    with pytest.raises(kind, match=message):
        cupyflash.attention(Q, Q, Q, **options)
    with pytest.raises(kind, match=message):
        cupyflash.explain("attention", Q, Q, Q, **options)


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        ("x", ValueError, "asks for a gradient of 'x', but score_arrays has 'w', 'n'"),
        (["n"], TypeError, "which holds int64; only floats have one"),
        (True, TypeError, "must name arrays in score_arrays"),
        ([3], TypeError, "must name arrays in score_arrays"),
    ],
)
def test_errors_of_need_dscore(names, kind, message):
    out, lse = cupyflash.attention(Q, Q, Q, return_lse=True)
    named = {"w": np.ones(3), "n": np.ones(3, int)}
    with pytest.raises(kind, match=message):
        cupyflash.attention_vjp(
            Q, Q, Q, Q, out, lse, need_dscore=names,
            score=lambda s, j, *, w, n: s + w[n[j]], score_arrays=named,
        )  # fmt: skip
    with pytest.raises(ValueError, match="score_arrays has no array"):
        cupyflash.attention_vjp(Q, Q, Q, Q, out, lse, need_dscore="w")


def test_explain():
    arrays, functions = data()
    text = repr(cupyflash.explain("attention", **arrays, **functions))
    assert "\n  score:\n    def bent(s, b, h, i, j, *, gain, slope, table):\n" in text
    assert "\n  mask_function:\n    def within(b, h, i, j, *, document):\n" in text
    assert "tiles_of_the_mask: {'full': " in text
    out, lse = cupyflash.attention(**arrays, **functions, return_lse=True)
    told = cupyflash.explain(
        "attention_vjp", out, **arrays, out=out, lse=lse, **functions
    )
    assert "np.cos(s)" in told.details["score_derivative"]


def test_a_number_closed_over_may_change():
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 30, 8))
    for cap in (0.5, 2.0):
        out = cupyflash.attention(
            q, k, v, score=lambda s, cap=cap: cap * np.tanh(s / cap)
        )
        np.testing.assert_allclose(
            out, cupyflash.attention(q, k, v, softcap=cap), atol=1e-14
        )


@pytest.mark.parametrize(
    ("function", "option"),
    [
        ({"mask": scores.sliding_window(30)}, {"window": (30, 0)}),
        ({"mask": lambda i, j: abs(i - j) < 9, "causal": True}, {"window": (8, 0)}),
        ({"score": scores.softcap(2.0)}, {"softcap": 2.0}),
    ],
)
def test_what_an_option_says_is_taken_as_the_option(function, option):
    """Which is faster, and has the same bits; explain still shows the function."""
    arrays, _ = data()
    out, lse = cupyflash.attention(**arrays, **option, return_lse=True)
    np.testing.assert_array_equal(cupyflash.attention(**arrays, **function), out)
    given = {"dout": out, **arrays, "out": out, "lse": lse}
    found = cupyflash.attention_vjp(**given, **function)[:3]
    expected = cupyflash.attention_vjp(**given, **option)[:3]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    told = cupyflash.explain("attention", **arrays, **function)
    assert told.details.keys() & {"score", "tiles_of_the_mask"}


def test_random_functions_in_blocks(method):
    """Scores and masks of the grammar are what they are as a bias and a mask."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(3, 4, 40, 8)), rng.normal(size=(3, 4, 64, 8))
    v, named = rng.normal(size=(3, 4, 64, 5)), expressions.arrays()
    position = {
        "b": np.arange(3)[:, None, None, None], "h": np.arange(4)[:, None, None],
        "i": 24 + np.arange(40)[:, None], "j": np.arange(64),
    }  # fmt: skip
    scores = q @ k.swapaxes(-1, -2) * 8**-0.5
    for seed in range(4 if method == "online" else 12):
        choose = random.Random(seed).choice
        score = expressions.function(expressions.Grammar(choose).number(seed % 4))
        text = expressions.Grammar(choose, positions=True).boolean(seed % 4)
        mask = expressions.function(text, "i, j")
        with np.errstate(all="ignore"):
            bias = np.broadcast_to(score(s=scores, **position, **named), scores.shape)
            seen = mask(i=position["i"], j=position["j"])
        expected = cupyflash.attention(
            q, k, v, scale=0.0, bias=bias, mask=np.broadcast_to(seen, (40, 64)),
            key_lengths=np.array([64, 50, 64]), query_offset=24, method="safe",
        )  # fmt: skip
        out = cupyflash.attention(
            q, k, v, score=score, score_arrays=named, mask=mask,
            key_lengths=np.array([64, 50, 64]), query_offset=24, method=method,
        )  # fmt: skip
        if method == "naive":  # which overflows
            fine = np.isfinite(out).all(axis=-1, keepdims=True)
            out, expected = np.where(fine, out, 0), np.where(fine, expected, 0)
        np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", fuzz_functions.WAYS)
def test_random_functions_beside_random_options(way):
    assert sum(fuzz_functions.check(seed, way) for seed in range(25)) > 20
