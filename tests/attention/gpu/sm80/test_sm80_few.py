"""The row of few float32 queries over many keys: what it takes, and its results."""

import dataclasses

import numpy as np
import oracle
import pytest
from accuracy import (
    TF32_ATTENTION,
    assert_same_specials,
    attention_bound,
    max_error,
    to_host,
)
from placing import ROW_FORMS, place

import cupyflash
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.sm80.few_forward import MMA_FEW as ROW
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel

ARCHS = ("sm_80", "sm_90a", "sm_100")


def problem(queries=32, keys=512, head_dim=128, heads=1024, **options):
    made = samples.made_up("float32", head_dim)
    few = {"num_heads": heads, "num_kv_heads": heads, "seqlen_q": queries}
    return dataclasses.replace(made, **{**few, "seqlen_k": keys, **options})


# --- selection -----------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 64, 100, 128, 192, 256])
@pytest.mark.parametrize("queries", [6, 16, 17, 32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": "float32", "mask": "bool"},
        {"softcap": 30.0, "alibi_slopes": "float32", "sinks": "float32"},
        {"query_lengths": "int32", "key_lengths": "int64", "left": 40},
        {"precision": "tf32"},
    ],
)
def test_takes_few_queries(head_dim, queries, options):
    device = _device.device_of_arch("sm_90a")
    asked = problem(queries, 512, head_dim, **options)
    assert kernel.select(ATTENTION_KERNELS, asked, device)[0] is ROW
    (config,) = ROW.configs(asked, 1, device)
    assert config.num_blocks == 1024 * -(-queries // (16 if queries <= 16 else 32))


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "head_dim", "splits"),
    [
        (1024, 32, 512, 256, (1, 512)),
        (133, 32, 512, 256, (1, 512)),
        (32, 32, 512, 256, (8, 64)),
        (32, 32, 4096, 128, (8, 512)),
        (1, 32, 4096, 256, (64, 64)),
        (1, 64, 4096, 256, (64, 64)),
        (1, 32, 511, 256, (8, 64)),
        (32, 32, 256, 128, (4, 64)),
        (1, 32, 255, 256, (1, 255)),
    ],
)
def test_splits_of_one_tile_fill_the_card(heads, queries, keys, head_dim, splits):
    asked = problem(queries, keys, head_dim, heads)
    assert ROW.split_kv(asked, _device.device_of_arch("sm_90a"))[:2] == splits


@pytest.mark.parametrize(
    ("arch", "head_dim", "block_m"),
    [("sm_90a", 128, 32), ("sm_100", 64, 32), ("sm_100", 65, 16), ("sm_100", 256, 16)],
)
def test_few_queries_of_a_tile_where_more_spill(arch, head_dim, block_m):
    options = {"softcap": 30.0, "alibi_slopes": "float32"}
    (config,) = ROW.configs(
        problem(32, 512, head_dim, **options), 1, _device.device_of_arch(arch)
    )
    assert dict(config.variant.defines)["BLOCK_M"] == str(block_m)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_two_blocks_fit_on_a_multiprocessor(arch, head_dim):
    device, asked = _device.device_of_arch(arch), problem(32, 512, head_dim)
    reason = ROW.unsupported_reason(asked, device)
    fits = 2 * (ROW.smem(asked, device) + 1024) <= device.smem_optin + 1024
    assert fits == (reason is None)
    assert fits or "2 blocks" in reason


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(dtype="float16"), "sm_90a", "takes float32, not float16"),
        (problem(), "sm_75", "needs sm_80"),
        (problem(), "sm_86", "blocks"),
        (problem(head_dim=257), "sm_90a", "head_dim 257 is above 256"),
        (problem(head_dim_v=260), "sm_90a", "head_dim_v 260 is above 256"),
        (problem(queries=5), "sm_90a", "queries, not 5"),
        (problem(queries=33), "sm_90a", "takes 6 to 32 queries, not 33"),
        (problem(queries=65, head_dim=256), "sm_90a", "6 to 64 queries, not 65"),
        (problem(keys=127), "sm_90a", "128 keys or more, not 127"),
        (problem(keys=63, head_dim=256), "sm_90a", "64 keys or more, not 63"),
        (problem(keys=(1 << 15) + 1), "sm_90a", "sums up to 32768 keys"),
        (problem(score="s * 2"), "sm_90a", "no score or mask function"),
        (problem(keys=1 << 30, left=3, right=0), "sm_90a", "in 32 bits"),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    device = _device.device_of_arch(arch)
    assert reason in ROW.unsupported_reason(asked, device)
    assert kernel.select(ATTENTION_KERNELS, asked, device)[0] is not ROW


# --- results -------------------------------------------------------------------------


def check(q, k, v, arrays=None, **options):
    """A call of this row against what is exact, twice."""
    import cupy

    arrays = arrays or {}
    tf32 = options.pop("precision", None)
    exact, exact_lse, size = oracle.attention(q, k, v, **arrays, **options)
    sizes = oracle.attention(q, k, np.abs(v), **arrays, **options)[0]
    placed = [place(cupy, x) for x in (q, k, v)]
    options |= {name: place(cupy, x) for name, x in arrays.items()}
    options |= {"precision": tf32} if tf32 else {}
    told = str(cupyflash.explain("attention", *placed, **options))
    assert "on cupy: mma_few" in told
    out, lse = cupyflash.attention(*placed, **options, return_lse=True)
    again = cupyflash.attention(*placed, **options)
    np.testing.assert_array_equal(to_host(out), to_host(again))
    finite = assert_same_specials(out, exact)
    error = np.abs(np.where(finite, to_host(out), 0) - np.where(finite, exact, 0))
    relative = TF32_ATTENTION if tf32 else None
    bound = attention_bound(np.where(finite, sizes, 0), size, "float32", relative)
    assert np.all(error <= bound)
    finite = assert_same_specials(lse, exact_lse)
    error = max_error(np.where(finite, to_host(lse), 0), np.where(finite, exact_lse, 0))
    assert error <= (2e-2 if tf32 else 2e-6) * max(1, size)


def normal(rng, queries, keys, head_dim, head_dim_v=None, heads=2):
    shapes = (queries, head_dim), (keys, head_dim), (keys, head_dim_v or head_dim)
    return [rng.normal(size=(heads, *s)).astype("float32") for s in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "seqlens", [(6, 128), (16, 200), (17, 191), (32, 513), (40, 64)]
)
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 192), (256, 256), (40, 148), (200, 8)]
)
def test_sizes(rng, seqlens, dims):
    if seqlens == (40, 64) and max(dims) <= 192:
        pytest.skip("more queries, or fewer keys, of wide heads alone")
    q, k, v = normal(rng, *seqlens, *dims)
    check(q, k, v)
    check(q, k, v, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (40, 7)},
        {"causal": True, "query_offset": 5},
        {"causal": True, "query_offset": -12},
        {"softcap": 5.0, "causal": True},
        {"scale": 0.0},
        {"scale": -0.1},
        {"precision": "tf32"},
    ],
)
def test_options(rng, head_dim, options):
    check(*normal(rng, 25, 170, head_dim), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("name", ["bias", "mask", "sinks", "alibi_slopes", "lengths"])
def test_arrays(rng, head_dim, name):
    q, k, v = (x[None] for x in normal(rng, 20, 170, head_dim))
    arrays = {
        "bias": {"bias": rng.normal(size=(2, 20, 170)).astype("float32")},
        "mask": {"mask": rng.random((20, 170)) < 0.5},
        "sinks": {"sinks": rng.normal(size=2).astype("float32")},
        "alibi_slopes": {"alibi_slopes": rng.random(2).astype("float32")},
        "lengths": {"query_lengths": np.array([13]), "key_lengths": np.array([90])},
    }[name]
    check(q, k, v, arrays)
    check(q, k, v, arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
def test_all_options(rng, head_dim):
    queries, keys = 20, 150
    arrays = {
        "bias": rng.normal(size=(4, queries, keys)).astype("float32"),
        "mask": rng.random((queries, keys)) < 0.8,
        "sinks": rng.normal(size=4).astype("float32"),
        "alibi_slopes": (rng.random(4) * 0.1).astype("float32"),
        "query_lengths": np.array([queries - 3, 9]),
        "key_lengths": np.array([keys - 2, keys]),
    }
    q = rng.normal(size=(2, 4, queries, head_dim)).astype("float32")
    k, v = (rng.normal(size=(2, 2, keys, head_dim)).astype("float32") for _ in range(2))
    check(q, k, v, arrays, softcap=4.0, window=(100, 60))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 3])
def test_parts_of_the_keys(rng, heads):
    """Few heads: their keys are split, and the results combined."""
    import cupy

    q, k, v = normal(rng, 20, 1100, 64, heads=heads)
    told = str(cupyflash.explain("attention", *(place(cupy, x) for x in (q, k, v))))
    assert "split of the keys: 1\n" not in told + "\n"
    check(q, k, v)
    check(q, k, v, causal=True, query_offset=300)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ROW_FORMS)
def test_strides(rng, form):
    import cupy

    q, k, v = (x.reshape(3, 2, -1, 52) for x in normal(rng, 20, 140, 52, heads=6))
    placed = [place(cupy, x, form) for x in (q, k, v)]
    expected = cupyflash.attention(*(place(cupy, x) for x in (q, k, v)))
    told = str(cupyflash.explain("attention", *placed))
    assert "on cupy: mma_few" in told
    assert ("UNALIGNED=1" in told) == (form in ("rows", "shifted"))
    np.testing.assert_array_equal(
        to_host(cupyflash.attention(*placed)), to_host(expected)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(6, 128), (17, 191), (32, 513)])
@pytest.mark.parametrize("dims", [(103, 103), (7, 50), (126, 129), (253, 65)])
def test_rows_of_any_width(rng, seqlens, dims):
    """Rows that are no whole vectors are copied in words."""
    q, k, v = normal(rng, *seqlens, *dims)
    check(q, k, v)
    check(q, k, v, causal=True)
    check(q, k, v, precision="tf32")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [50, 201])
def test_options_of_rows_of_any_width(rng, head_dim):
    q, k, v = (x[None] for x in normal(rng, 20, 150, head_dim, heads=4))
    arrays = {
        "bias": rng.normal(size=(4, 20, 150)).astype("float32"),
        "mask": rng.random((20, 150)) < 0.8,
        "sinks": rng.normal(size=4).astype("float32"),
        "key_lengths": np.array([131]),
    }
    check(q, k, v, arrays, window=(100, 60))
    check(q, k, v, {"alibi_slopes": rng.random(4).astype("float32")}, softcap=4.0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_values_that_are_not_finite(rng, head_dim):
    """What a query does not see never reaches it; what it sees does."""
    q, k, v = normal(rng, 30, 200, head_dim)
    v[0, 190, :9] = np.nan
    v[0, 181, 3] = np.inf
    v[1, 60, 3], v[1, 70, 3] = np.inf, -np.inf
    k[1, 185, 0] = np.nan
    check(q, k, v, causal=True)
    q[0, 5, 3], q[1, 20, 5] = np.nan, np.inf
    check(q, k, v, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_what_nobody_sees_leaves_the_bits_as_they_are(rng, bad, head_dim):
    import cupy

    q, k, v = normal(rng, 30, 200, head_dim)
    mask = np.ones((30, 200), bool)
    mask[:, 40:45], mask[13:15] = False, False
    arrays = [q, k, v]
    options = {"mask": place(cupy, mask), "return_lse": True}
    clean = cupyflash.attention(*(place(cupy, x) for x in arrays), **options)
    k[:, 40:45], v[:, 40:45], q[:, 13:15] = bad, bad, bad
    hidden = cupyflash.attention(*(place(cupy, x) for x in arrays), **options)
    for a, b in zip(clean, hidden, strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [1e30, 3.4028e38])
def test_numbers_near_the_largest(rng, largest):
    """Rounded to 11 bits the largest would be infinite."""
    q, k, v = normal(rng, 20, 130, 64)
    v[0, 3] = np.copysign(np.float32(largest), v[0, 3])
    check(q, k, v)
    q[1, 3, 5] = k[1, 40, 5] = 1e-30
    k[1, 41, 5] = largest
    q[1, :, 5] *= 1e-36
    check(q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [3.0, 40.0, 1e6])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores(rng, growth, sign):
    q, k, v = normal(rng, 20, 130, 64)
    q[...], k[...] = 0, 0
    q[..., 0] = sign
    k[..., 0] = growth * np.arange(130)
    check(q, k, v, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_bits_of_a_row_are_its_own(rng, head_dim):
    """Neither its place in a tile nor the rows and heads beside it change them."""
    import cupy

    q, k, v = normal(rng, 32, 150, head_dim)
    whole = to_host(cupyflash.attention(*(place(cupy, x) for x in (q, k, v))))
    for rows in (slice(3, None), slice(11, 17), slice(0, 16)):
        part = cupyflash.attention(
            *(place(cupy, x) for x in (q[:1, rows], k[:1], v[:1]))
        )
        np.testing.assert_array_equal(to_host(part), whole[:1, rows])
