"""Other views of the arrays of a call: groups as queries, splits of keys, copies."""

import dataclasses
import math

import numpy as np
import oracle
import pytest
from accuracy import BOUNDS, assert_same_specials, dtype_of, max_error, to_host, wide
from made_up import Card
from placing import empty, place
from test_attention_vjp import agree, inputs

import cupyflash
from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu import forward_registry, samples
from cupyflash._attention.gpu.sm80.forward import MMA
from cupyflash._cuda import device, kernel, runtime

HOPPER = device.device_of_arch("sm_90a")


def problem(dtype="float32", **options):
    return dataclasses.replace(samples.made_up(dtype), **options)


@pytest.mark.parametrize(
    ("heads", "seqlen_k", "num_splits"),
    [
        (1, 300, 1),
        (1, 512, 2),
        (1, 513, 3),
        (1, 1 << 20, 512),
        (8, 16384, 64),
        (8, 1024, 4),
        (132, 16384, 4),
        (133, 16384, 1),
    ],
)
def test_keys_are_split_where_tiles_are_few(heads, seqlen_k, num_splits):
    asked = problem(num_heads=heads, seqlen_q=1, seqlen_k=seqlen_k)
    count, keys, _ = attention_config.split_to_fill(asked, HOPPER, 16)
    assert count == num_splits
    assert count == 1 or keys % 256 == 0
    assert (count - 1) * keys < seqlen_k <= count * keys


def split(row, asked):
    """The problem as its splits are one."""
    count, keys, _ = row.split_kv(asked, HOPPER)
    if count == 1:
        return asked
    batch = (count, *asked.batch)
    return dataclasses.replace(asked, batch=batch, keys_of_part=keys)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k"),
    [(1, 64, 65536), (1, 512, 65536), (8, 128, 32768), (2, 256, 16384), (1, 70, 1100)],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_splits_for_tiles_of_many_queries(dtype, heads, seqlen_q, seqlen_k, head_dim):
    """Splits fill the card in one go, with tiles as large as the queries are many."""
    asked = problem(
        dtype, num_heads=heads, num_kv_heads=heads, seqlen_q=seqlen_q,
        seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim,
    )  # fmt: skip
    row, _ = kernel.select(forward_registry.ATTENTION_KERNELS, asked, HOPPER)
    assert row.name == {"float32": "mma", "float64": "tiled_f64"}[dtype]
    asked = split(row, asked)
    config = row.configs(asked, 2, HOPPER)[0]
    blocks, switches = math.prod(config.grid), dict(config.variant.defines)
    assert switches["KEY_PARTS"] == "1"
    assert blocks <= 2 * HOPPER.num_sms
    assert blocks > HOPPER.num_sms / 2 or seqlen_k < 10_000
    if dtype == "float64" and seqlen_k > 10_000:
        assert int(switches["BLOCK_M"]) == min(128, seqlen_q)


def mma_configs(**options):
    """The configurations of mma for a call over splits of the keys."""
    asked = split(MMA, problem(**options))
    assert asked.keys_of_part is not None
    return MMA.configs(asked, 2, HOPPER)


def test_splits_share_their_split_tiles():
    two = {"num_heads": 2, "num_kv_heads": 2}
    _, prepare = mma_configs(**two, seqlen_q=512, seqlen_k=16384)
    assert prepare.num_blocks == 2 * 16384 // 64
    assert "KEY_PARTS" not in dict(prepare.variant.defines)
    # Of few queries, or of keys that would take too much memory, each block splits.
    assert len(mma_configs(**two, seqlen_q=128, seqlen_k=16384)) == 1
    assert len(mma_configs(num_heads=2, num_kv_heads=1, seqlen_q=128)) == 2
    assert len(mma_configs(**two, seqlen_q=512, seqlen_k=1 << 20)) == 1


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k", "num_splits"),
    [(1, 31, 65536, 256), (1, 32, 65536, 256), (1, 63, 4095, 16), (1, 63, 4096, 16),
     (1, 64, 1000, 1), (1, 64, 1024, 4), (128, 64, 2000, 1), (128, 64, 2048, 2),
     (133, 64, 65536, 1), (1, 64, 1 << 24, 8192)],
)  # fmt: skip
def test_row_mma_splits_keys_of_few_queries(heads, seqlen_q, seqlen_k, num_splits):
    asked = problem(
        num_heads=heads, num_kv_heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k
    )
    is_few = seqlen_q < 32 or (seqlen_q < 64 and seqlen_k < 4096)
    assert (MMA.unsupported_reason(asked, HOPPER) is not None) == is_few
    assert MMA.split_kv(asked, HOPPER).num_splits == num_splits


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("empty", [{"batch": (0,)}, {"seqlen_q": 0}, {"seqlen_k": 0}])
@pytest.mark.parametrize("sinks", [None, "float32"])
def test_rows_of_empty_calls_can_be_asked_for(dtype, empty, sinks):
    asked = problem(dtype, **{"seqlen_q": 40, "seqlen_k": 8192, **empty})
    asked = dataclasses.replace(asked, sinks=sinks)
    row, _ = kernel.select(forward_registry.ATTENTION_KERNELS, asked, HOPPER)
    assert row.split_kv(asked, HOPPER)


@pytest.mark.parametrize(("precision", "num_splits"), [("float32", 2), ("tf32", 1)])
def test_a_faster_kernel_wants_more_keys(precision, num_splits):
    asked = problem(precision=precision, num_heads=8, seqlen_q=1024, seqlen_k=2048)
    assert MMA.split_kv(asked, HOPPER).num_splits == num_splits


def test_no_split_has_long_sums():
    """Of more keys than LONG_SUM each split is a first level of the sum."""
    asked = problem(num_heads=66, seqlen_q=64, seqlen_k=1 << 24)
    assert MMA.split_kv(asked, HOPPER)[:2] == (8192, 2048)  # 64 tiles of 32
    asked = dataclasses.replace(asked, batch=(8192, 1), keys_of_part=2048)
    assert "RUN_TILES" not in dict(MMA.configs(asked, 2, HOPPER)[0].variant.defines)


def test_16_bits_are_not_split_and_full_cards_need_none():
    for asked in (problem("bfloat16", num_heads=1), problem()):
        rows = [r for r in forward_registry.ATTENTION_KERNELS if r.name != "hopper"]
        row, _ = kernel.select(rows, asked, HOPPER)
        assert row.name == "mma"
        assert row.split_kv(asked, HOPPER)[:2] == (1, asked.seqlen_k)


def test_a_window_has_no_more_splits_than_it_has_keys():
    asked = problem(num_heads=1, seqlen_q=1, seqlen_k=1 << 20, left=300, right=0)
    assert attention_config.split_to_fill(asked, HOPPER, 16).num_splits == 1


# --- on a device ---------------------------------------------------------------------


def options_of(kind, rng, heads, seqlen_q, seqlen_k):
    """Options by words, as NumPy arrays for a batch of two."""
    options = {}
    for word in kind.split():
        options |= {
            "causal": lambda: {"causal": True},
            "window": lambda: {"window": (1500, 5)},
            "sinks": lambda: {"sinks": rng.normal(size=heads).astype(np.float32) * 3},
            "lengths": lambda: {"key_lengths": np.array([seqlen_k, seqlen_k // 3])},
            "mask": lambda: {"mask": rng.random((2, 1, 1, seqlen_k)) < 0.7},
            "bias": lambda: {
                "bias": rng.normal(size=(heads, 1, seqlen_k)).astype(np.float32)
            },
            "alibi": lambda: {"alibi_slopes": np.linspace(0.01, 0.5, heads)},
            "softcap": lambda: {"softcap": 3.0},
        }[word]()
    return options


def error_in_steps(q, k, v, exact):
    """The error of the same numbers by whole matrices, in the dtype of the call."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = (q @ k.swapaxes(-1, -2)) * q.dtype.type(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return max_error((p / p.sum(axis=-1, keepdims=True)) @ v, exact)


def assert_is_right(cupy, arrays, options, placed, beside_steps=False, **more):
    """Out and lse beside the oracle, in memory of the call and in one that is given.

    With `beside_steps` an error may also be twice that of the computation in steps,
    which the guide to precision allows where scores are sums of many terms.
    """
    given = {
        n: place(cupy, x) if hasattr(x, "shape") else x for n, x in options.items()
    }
    out, lse = cupyflash.attention(*placed, **given, **more, return_lse=True)
    exact, exact_lse, size = oracle.attention(*arrays, real=np.float64, **options)
    dtype = arrays[0].dtype.name
    unit = 2.0**-52 if dtype == "float64" else 2.0**-23
    allowed = BOUNDS["attention"][dtype] * np.abs(exact).max()
    if beside_steps:
        allowed = max(allowed, 2 * error_in_steps(*arrays, exact))
    assert max_error(out, exact) <= allowed
    finite = assert_same_specials(lse, exact_lse)
    largest = np.abs(exact_lse[finite]).max(initial=0)
    error = np.abs(wide(lse)[finite] - exact_lse[finite]).max(initial=0)
    assert error <= unit * (2 * size + 16 + largest)
    into = place(cupy, np.full(out.shape, np.nan).astype(out.dtype))
    for again in (
        cupyflash.attention(*placed, **given, **more),
        cupyflash.attention(*placed, **given, **more, out=into),
    ):
        np.testing.assert_array_equal(to_host(again), to_host(out))
    return cupyflash.explain("attention", *placed, **given, **more)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["", "sinks", "lengths sinks", "mask", "bias", "causal", "softcap", "alibi"]
)
@pytest.mark.parametrize("heads", [(28, 4), (6, 2), (71, 1)])
@pytest.mark.parametrize("seqlen_k", [300, 5000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_one_query_of_a_group_of_any_size(cupy, rng, dtype, seqlen_k, heads, kind):
    shapes = (
        (2, heads[0], 1, 64),
        (2, heads[1], seqlen_k, 64),
        (2, heads[1], seqlen_k, 64),
    )
    arrays = [rng.normal(size=s).astype(dtype_of(dtype)) for s in shapes]
    options = options_of(kind, rng, heads[0], 1, seqlen_k)
    assert_is_right(cupy, arrays, options, [place(cupy, x) for x in arrays])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["", "causal", "window", "sinks lengths", "bias", "alibi", "mask causal"]
)
@pytest.mark.parametrize(
    ("seqlen_q", "head_dim"), [(3, 64), (40, 64), (70, 64), (300, 64), (150, 128)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_split_keys(cupy, rng, dtype, seqlen_q, head_dim, kind):
    """Of two key lengths, one ends within a part and before others."""
    shapes = ((2, 6, seqlen_q, head_dim), *[(2, 2, 4101, head_dim)] * 2)
    arrays = [rng.normal(size=s).astype(dtype_of(dtype)) for s in shapes]
    options = options_of(kind, rng, 6, seqlen_q, 4101)
    told = assert_is_right(cupy, arrays, options, [place(cupy, x) for x in arrays])
    assert told.details["split of the keys"] > 1
    of_mma = dtype == "float32" and seqlen_q >= 32
    assert (told.kernel == "mma") == of_mma


PARTS = [("float32", 40), ("float32", 70), ("float32", 150), ("float64", 70)]


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["lengths", "causal", "mask"])
@pytest.mark.parametrize(("dtype", "seqlen_q"), PARTS)
def test_hidden_values_of_parts(cupy, rng, dtype, seqlen_q, kind, bad):
    """What no query sees leaves no trace; what some see reaches these alone."""
    shapes = ((2, 1, 3, seqlen_q, 64), *[(2, 1, 1, 3000, 64)] * 2)
    q, k, v = (rng.normal(size=s).astype(dtype) for s in shapes)
    options, hidden = {}, np.zeros((2, 3000), bool)
    if kind == "lengths":
        options["key_lengths"] = np.array([[1700], [70]])
        hidden[0, 1700:], hidden[1, 70:] = True, True
    elif kind == "mask":
        hidden[:] = rng.random((2, 3000)) < 0.3
        options["mask"] = ~hidden[:, None, None, None]
    else:
        options["causal"] = True
    poisoned = v.copy()
    poisoned[hidden[:, None, None] | np.zeros((2, 1, 1, 3000), bool)] = bad
    if kind == "causal":
        poisoned[:, :, :, -20:] = bad
    given = {
        n: place(cupy, x) if hasattr(x, "shape") else x for n, x in options.items()
    }
    out, told = (
        f(*x, *(place(cupy, y) for y in (q, k, poisoned)), **given)
        for f, x in ((cupyflash.attention, ()), (cupyflash.explain, ("attention",)))
    )
    assert told.details["split of the keys"] > 1
    exact, *_ = oracle.attention(q, k, v, real=np.float64, **options)
    found = to_host(out)
    if kind == "causal":  # the last 20 queries see some of them
        assert not np.isfinite(found[..., -20:, :]).any()
        found, exact = found[..., :-20, :], exact[..., :-20, :]
    assert max_error(found, exact) <= BOUNDS["attention"][dtype] * np.abs(exact).max()


@pytest.mark.gpu
@pytest.mark.parametrize("by", [-1e9, 1e9, float(np.finfo("f4").min)])
@pytest.mark.parametrize(("dtype", "seqlen_q"), PARTS)
def test_parts_of_huge_scores(cupy, rng, dtype, seqlen_q, by):
    """Parts of unlike length weigh as many keys as they have, whatever the scores."""
    q = np.zeros((1, 2, seqlen_q, 64), dtype)
    k, v = (rng.normal(size=(1, 2, 3001, 64)).astype(dtype) for _ in range(2))
    v += np.linspace(0, 1, 3001)[:, None].astype(dtype)
    bias = np.full((1, 3001), by, dtype)
    args = [place(cupy, x) for x in (q, k, v)]
    out = cupyflash.attention(*args, bias=place(cupy, bias))
    told = cupyflash.explain("attention", *args, bias=place(cupy, bias))
    assert told.details["split of the keys"] > 1
    exact = np.broadcast_to(wide(v).mean(axis=2, keepdims=True), q.shape)
    assert max_error(out, exact) <= BOUNDS["attention"][dtype] * np.abs(exact).max()


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "parts"), [(1, 256), (66, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_sums_of_parts(cupy, rng, dtype, heads, parts):
    """Over keys that are all alike, in many parts and in long ones."""
    seqlen_k = 1 << 18 if parts == 4 else 1 << 16
    q = np.zeros((heads, 64, 64), dtype)
    row = (1 + rng.random((1, 1, 64))).astype(dtype)
    k = cupy.zeros((1, seqlen_k, 64), dtype)
    v = cupy.broadcast_to(place(cupy, row), k.shape).copy()
    args = place(cupy, q), k, v
    told = cupyflash.explain("attention", *args)
    assert told.details["split of the keys"] > 1
    out = cupyflash.attention(*args)
    exact = np.broadcast_to(row, q.shape)
    assert max_error(out, exact) <= BOUNDS["attention"][dtype] * np.abs(exact).max()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["", "causal", "lengths", "bias"])
@pytest.mark.parametrize(
    ("head_dim", "form"),
    [(65, "plain"), (100, "plain"), (64, "shifted"), (64, "swapped"), (64, "reversed"),
     (40, "gaps"), (127, "rows")],
)  # fmt: skip
@pytest.mark.parametrize("seqlen", [70, 1100])
def test_rows_between_vectors(cupy, rng, seqlen, head_dim, form, kind):
    """Copied for TMA where queries are many, else read as they lie."""
    shapes = ((2, 4, seqlen, head_dim), *[(2, 2, seqlen, head_dim)] * 2)
    arrays = [rng.normal(size=s).astype(dtype_of("bfloat16")) for s in shapes]
    options = options_of(kind, rng, 4, seqlen, seqlen)
    placed = [place(cupy, x, form) for x in arrays]
    told = assert_is_right(cupy, arrays, options, placed)
    if told.kernel == "hopper":
        assert told.details["copied first"] == "q, k, v"


# Queries, heads of q and k, keys, columns, and columns left out in front: of attention,
# and its gradients, what is copied on sm_90.
COPIED = [
    ((100, 8, 8, 2048, 103, 0), "q, k, v", "q, k, v, dout"),
    ((100, 8, 8, 400, 103, 0), "q, k, v", "q, k, v, dout"),
    ((64, 8, 8, 64, 103, 0), "q, k, v", "q, k, v, dout"),
    ((16, 8, 8, 64, 103, 0), "q, k, v", "q, k, v, dout"),
    ((9, 8, 8, 1000, 31, 0), "q, k, v", "q, k, v, dout"),
    ((4, 32, 4, 100, 103, 0), "q, k, v", "q, k, v, dout"),  # 32 read each key
    ((100, 8, 8, 400, 64, 1), "q, k, v", "q, k, v"),
    ((8, 8, 8, 1000, 103, 0), "q, k, v", "q, k, v, dout"),
    ((4, 8, 8, 1000, 103, 0), "", ""),  # by vectors of a number
    ((8, 8, 8, 100_000, 103, 0), "", "q, k, v, dout"),  # 330 MB
    ((100, 8, 8, 63, 103, 0), "", ""),
    ((100, 8, 8, 400, 15, 0), "", "q, k, v, dout"),  # a row is soon read
    ((8, 8, 8, 2047, 16, 1), "", "q, k, v"),
    ((8, 8, 8, 2048, 7, 0), "q, k, v", "q, k, v, dout"),
    ((100, 8, 8, 400, 102, 0), "", ""),  # words
    ((100, 8, 8, 400, 62, 2), "", ""),
    ((100, 8, 8, 400, 104, 0), "", ""),
    ((8, 8, 8, 2048, 102, 0), "q, k, v", ""),  # few tiles, whose keys are split
    ((8, 8, 8, 2047, 102, 0), "", ""),
    ((65, 16, 16, 2048, 102, 0), "q, k, v", ""),
    ((65, 17, 17, 2048, 102, 0), "", ""),
    ((5, 32, 4, 4096, 62, 2), "q, k, v", ""),
    ((300, 8, 8, 400, 102, 0), "q, k, v", "q, k, v, dout"),
    ((371, 8, 8, 1476, 103, 0), "q, k, v", "q, k, v, dout"),  # 3.98 times out
    ((300, 8, 8, 1300, 102, 0), "", ""),
    ((300, 8, 8, 1300, 103, 0), "q, k, v", "q, k, v, dout"),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("sizes", "forward", "backward"), COPIED)
def test_what_is_copied(monkeypatch, arch, dtype, sizes, forward, backward):
    """Odd rows of 16 bits from few queries on, words from more, and no others."""
    cupy = pytest.importorskip("cupy")
    queries, heads, heads_kv, keys, dim, left = sizes
    card = Card(monkeypatch, arch, cupy)

    def array(heads, rows, left):
        return card.array((2, heads, rows, left + dim), dtype)[..., left:]

    q, k, v = (
        array(h, n, left) for h, n in [(heads, queries), *[(heads_kv, keys)] * 2]
    )
    out, dout = (array(heads, queries, 0) for _ in range(2))
    lse = card.array((2, heads, queries), "float32")
    copies = arch == "sm_90" and dtype == "float16"
    # Copies of few rows that are whole vectors suit the row for few queries.
    few = "mma_few" if dim % 8 == 0 and queries <= 16 else "hopper"
    for told, expected, taken_by in (
        (cupyflash.explain("attention", q, k, v), forward, "hopper"),
        (cupyflash.explain("attention_vjp", dout, q, k, v, out, lse), backward, few),
    ):
        copied = told.details.get("copied first", "")
        assert copied == (expected if copies else "")
        if copied:
            assert told.kernel == taken_by


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["", "causal", "lengths", "sinks"])
@pytest.mark.parametrize(
    ("queries", "heads", "keys"), [(6, 2, 200), (20, 6, 70), (100, 2, 390)]
)
@pytest.mark.parametrize(
    ("dim", "form"), [(103, "plain"), (31, "plain"), (7, "plain"), (64, "shifted")]
)
def test_odd_rows_of_few_queries(cupy, rng, dim, form, queries, heads, keys, kind):
    """Forward and gradients; copied where the card has TMA."""
    q, k, v, dout = inputs(
        rng, "bfloat16", q=(2, heads, queries, dim), k=(2, 2, keys, dim)
    )
    options = options_of(kind, rng, heads, queries, keys)
    placed = [place(cupy, x, form) for x in (q, k, v)]
    assert_is_right(cupy, [q, k, v], options, placed)
    agree(cupy, q, k, v, dout, forms=dict.fromkeys(("q", "k", "v"), form), **options)
    if runtime.device(0).arch == "sm_90" and kind in ("", "causal"):
        out, lse = cupyflash.attention(*placed, return_lse=True, **options)
        arguments = place(cupy, dout), *placed, out, lse
        told = cupyflash.explain("attention_vjp", *arguments, **options)
        few = (dim, queries) == (64, 6)
        assert told.kernel == ("mma_few" if few else "hopper")
        assert told.details["copied first"].startswith("q, k, v")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["shifted", "rows", "swapped", "reversed"])
@pytest.mark.parametrize("queries", [8, 40])
@pytest.mark.parametrize("dim", [50, 103])
def test_splits_are_combined_where_out_lies(cupy, rng, dim, queries, form):
    """By the kernel itself, and by another of more queries."""
    q, k, v = (
        rng.normal(size=(1, 2, n, dim)).astype(np.float16)
        for n in (queries, 3000, 3000)
    )
    placed = [place(cupy, x) for x in (q, k, v)]
    expected = cupyflash.attention(*placed)
    out = empty(cupy, q.shape, q.dtype, form)
    assert cupyflash.attention(*placed, out=out) is out
    np.testing.assert_array_equal(to_host(out), to_host(expected))
    exact, *_ = oracle.attention(q, k, v, real=np.float64)
    assert max_error(to_host(out), exact) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [576, 768])
@pytest.mark.parametrize("seqlen_q", [1, 70])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_very_wide_heads(cupy, rng, dtype, seqlen_q, head_dim):
    shapes = ((2, 8, seqlen_q, head_dim), (2, 1, 300, head_dim), (2, 1, 300, 512))
    arrays = [rng.normal(size=s).astype(dtype_of(dtype)) for s in shapes]
    placed = [place(cupy, x) for x in arrays]
    told = assert_is_right(cupy, arrays, {}, placed, beside_steps=dtype == "float32")
    by_tensor_cores = dtype == "bfloat16" and head_dim <= 576
    assert told.kernel in ("tiled", "hopper_wide" if by_tensor_cores else "tiled")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["shifted", "swapped", "reversed"])
@pytest.mark.parametrize("mask", [False, True])
def test_gradients_of_arrays_that_lie_anywhere(cupy, rng, form, mask):
    """As of contiguous ones, also where the call is made again."""
    q, k, v, dout = (
        rng.normal(size=(1, 2, 1101, 64)).astype(np.float16) for _ in range(4)
    )
    options = {"mask": place(cupy, rng.random((1101, 1101)) < 0.7)} if mask else {}

    def grads(form):
        placed = [place(cupy, x, form) for x in (q, k, v, dout)]
        out, lse = cupyflash.attention(*placed[:3], return_lse=True, **options)
        arguments = placed[3], *placed[:3], out, lse
        cupyflash.attention_vjp(*arguments, **options)
        return cupyflash.attention_vjp(*arguments, deterministic=True, **options)

    for found, expected in zip(grads(form)[:3], grads("plain")[:3], strict=True):
        largest = np.abs(wide(expected)).max()
        assert max_error(found, expected) <= 3e-3 * largest


# --- groups as queries, in gradients -------------------------------------------------

# Layout, shapes of q and k, options by words. Without positions, heads and queries of a
# group are rows of one head; of several queries where the heads lie next to each other.
GROUPED = [
    ("bhsd", (2, 8, 1, 64), (2, 2, 70, 64), ""),
    ("bshd", (2, 1, 8, 64), (2, 70, 2, 64), ""),
    ("bhsd", (2, 6, 3, 64), (2, 2, 70, 64), ""),
    ("bshd", (2, 3, 6, 64), (2, 70, 2, 64), ""),
    ("bhsd", (2, 6, 1, 20), (2, 2, 300, 20), "softcap lengths"),
    ("bhsd", (2, 6, 2, 64), (2, 2, 70, 64), "lengths mask"),
    ("bshd", (2, 1, 6, 64), (2, 70, 2, 64), "causal mask"),
    ("bhsd", (2, 6, 1, 64), (2, 2, 70, 64), "sinks"),
    ("bhsd", (2, 6, 2, 64), (2, 2, 70, 64), "sinks"),
    ("bhsd", (2, 6, 1, 64), (2, 2, 70, 64), "alibi"),
    ("bhsd", (2, 6, 2, 64), (2, 2, 70, 64), "causal"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "q_shape", "k_shape", "kind"), GROUPED)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gradients_of_groups(cupy, rng, dtype, layout, q_shape, k_shape, kind):
    axis = 1 if layout == "bhsd" else 2
    heads, queries = q_shape[axis], q_shape[3 - axis]
    options = options_of(kind, rng, heads, queries, k_shape[3 - axis])
    arrays = inputs(rng, dtype, q_shape, k_shape)
    agree(cupy, *arrays, layout=layout, **options)
    dlse = rng.normal(size=(2, heads, queries))
    dlse = dlse.astype(np.float64 if dtype == "float64" else np.float32)
    need = {"need_dsinks": False} if "sinks" in options else {}
    agree(cupy, *arrays, layout=layout, dlse=dlse, **need, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "bias", ["heads 1", "heads queries", "queries", "1", "1 1", ""]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_of_the_bias_of_groups(cupy, rng, dtype, queries, bias):
    """Of one for all heads or queries, of one for each, and of those between."""
    sizes = {"heads": 6, "queries": queries, "1": 1}
    own = [sizes[word] for word in bias.split()]
    arrays = inputs(rng, dtype, (2, 6, queries, 64), (2, 2, 70, 64))
    agree(cupy, *arrays, bias=rng.normal(size=(*own, 70)).astype(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["plain", "gaps", "swapped", "reversed"])
@pytest.mark.parametrize("queries", [1, 3])
def test_gradients_of_groups_in_any_memory(cupy, rng, queries, form):
    arrays = inputs(rng, "float32", (2, 6, queries, 64), (2, 2, 70, 64))
    agree(cupy, *arrays, forms=dict.fromkeys(("q", "k", "v", "dout", "out"), form))


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_groups_are_queries_of_one_head(cupy, rng, dtype, queries):
    """The same kernels, and the same bits."""
    q, k, v, dout = (
        place(cupy, x) for x in inputs(rng, dtype, (3, 8, queries, 64), (3, 2, 90, 64))
    )
    whole = cupyflash.attention(q, k, v, return_lse=True)
    rows = (3, 2, 4 * queries)
    of_rows = [x.reshape(*rows, *x.shape[3:]) for x in (dout, q, *whole)]
    arrays = (dout, q, k, v, *whole), (*of_rows[:2], k, v, *of_rows[2:])
    told = [cupyflash.explain("attention_vjp", *x) for x in arrays]
    assert told[0].kernel == told[1].kernel
    assert told[0].details["launches"] == told[1].details["launches"]
    found = [cupyflash.attention_vjp(*x) for x in arrays]
    assert found[0].dq.shape == q.shape
    for a, b in zip(found[0][:3], found[1][:3], strict=True):
        np.testing.assert_array_equal(to_host(a).ravel(), to_host(b).ravel())
