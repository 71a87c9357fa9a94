"""The row of float64 attention of few keys: what it takes, its blocks, its results."""

import dataclasses
import math

import numpy as np
import pytest
import small_entries
from accuracy import to_host
from placing import ROW_FORMS, place
from test_fp64_forward import ARCHS, HOPPER, TERMS, check, normal

import cupyflash
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.fp64.forward import TILED_F64
from cupyflash._attention.gpu.fp64.short_forward import SHORT_F64 as ROW
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel


def problem(head_dim=64, keys=16, **options):
    made = samples.made_up("float64", head_dim)
    return dataclasses.replace(made, seqlen_k=keys, **options)


# --- selection -----------------------------------------------------------------------


def most_keys(head_dim):
    return 64 if head_dim <= 128 else 32


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [1, 16, 33, 64, 96, 128, 130, 192, 256])
@pytest.mark.parametrize("terms", TERMS)
def test_takes_few_keys(arch, head_dim, terms):
    device = _device.device_of_arch(arch)
    for keys in (1, 8, 9, 16, 32, most_keys(head_dim)):
        asked = problem(head_dim, keys, **TERMS[terms])
        if ROW._cuts(asked, device):
            assert kernel.select(ATTENTION_KERNELS, asked, device)[0] is ROW
            (config,) = ROW.configs(asked, 1, device)
            assert config.variant.smem + 512 <= device.smem_optin
    for keys in (0, most_keys(head_dim) + 1):
        asked = problem(head_dim, keys, **TERMS[terms])
        assert kernel.select(ATTENTION_KERNELS, asked, device)[0] is not ROW


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(dtype="float32"), "sm_90a", "takes float64, not float32"),
        (problem(257), "sm_90a", "not both up to 256"),
        (problem(keys=0), "sm_90a", "1 to 64 keys, not 0"),
        (problem(keys=65), "sm_90a", "1 to 64 keys, not 65"),
        (problem(head_dim_v=129, keys=33), "sm_90a", "1 to 32 keys, not 33"),
        (problem(seqlen_q=0), "sm_90a", "entries with queries"),
        (problem(seqlen_q=1 << 24), "sm_90a", None),
        (problem(num_kv_heads=1, seqlen_q=1 << 24), "sm_90a", "32 bits"),
        (problem(keys_of_part=256), "sm_90a", "all keys of a head"),
        (problem(), "sm_86", "no fast tensor cores"),
        (problem(), "sm_75", "no fast tensor cores"),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    device = _device.device_of_arch(arch)
    found = ROW.unsupported_reason(asked, device)
    assert found == reason or reason in found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("keys", [1, 16, 32, 64])
@pytest.mark.parametrize("queries", [1, 16, 17, 40, 64, 200, 4096])
def test_a_block_has_no_more_warps_than_tiles(arch, keys, queries):
    device = _device.device_of_arch(arch)
    asked = problem(64, keys, seqlen_q=queries)
    cut = ROW.cut(asked, device)
    tiles = ROW.tiles_of_block(asked, device, cut)
    assert cut.teams <= min(-(-queries // 16), tiles)
    assert 32 * cut.resident * 255 <= 1 << 16 or keys < 64


def test_blocks_share_queries_where_multiprocessors_are_idle():
    for heads, queries in ((1, 4096), (32, 4096), (1024, 512), (1, 100)):
        asked = problem(num_heads=heads, num_kv_heads=heads, seqlen_q=queries)
        cut = ROW.cut(asked, HOPPER)
        tiles, of_block = -(-queries // 16), ROW.tiles_of_block(asked, HOPPER, cut)
        (config,) = ROW.configs(asked, 1, HOPPER)
        assert config.num_blocks == heads * math.ceil(tiles / of_block)
        is_idle = config.num_blocks < 2 * HOPPER.num_sms * cut.min_blocks
        assert of_block < 16 or not is_idle


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("queries", [1, 20, 100, 4096])
@pytest.mark.parametrize(("keys", "head_dim"), [(32, 256), (32, 192), (64, 128)])
def test_a_multiprocessor_has_some_warps(arch, keys, head_dim, queries):
    device = _device.device_of_arch(arch)
    for heads in (1, 32, 1024):
        few = {"num_heads": heads, "num_kv_heads": heads, "seqlen_q": queries}
        asked = problem(head_dim, keys, **few)
        if not ROW._cuts(asked, device):
            continue
        cut = ROW.cut(asked, device)
        assert cut.resident >= 4 or cut.team == 1
        assert cut.resident >= 4 or ROW._team(asked, device) is None


def test_as_few_variants_as_tiles_allow():
    """An entry that is one block leaves the tiles of a block as they are."""
    for queries, heads in ((1, 32), (20, 1024), (100, 4096)):
        few = {"num_heads": heads, "num_kv_heads": heads, "seqlen_q": queries}
        cut = ROW.cut(problem(64, 32, **few), HOPPER)
        if cut.teams * 16 >= queries:
            assert ROW.tiles_of_block(problem(64, 32, **few), HOPPER, cut) == 64


# --- results -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_row_of_few_queries(monkeypatch):
    small_entries.change_tables(
        monkeypatch,
        lambda rows: tuple(row for row in rows if row.name not in ("gemv", "tiny")),
    )


def taken(*arrays, **options):
    import cupy

    placed = [place(cupy, x) for x in arrays]
    return "on cupy: short_f64" in str(
        cupyflash.explain("attention", *placed, **options)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [1, 7, 8, 9, 16, 31, 32, 64])
@pytest.mark.parametrize("queries", [1, 16, 33, 150])
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (33, 100), (128, 96), (256, 7)])
def test_sizes(rng, keys, queries, dims):
    q, k, v = normal(rng, queries, keys, *dims)
    assert taken(q, k, v) == (keys <= most_keys(max(dims)))
    check(q, k, v)
    check(q, k, v, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("keys", [1, 13, 30])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (4, 7)},
        {"causal": True, "query_offset": 5},
        {"softcap": 5.0, "causal": True, "query_offset": 0},
        {"scale": 0.0},
        {"scale": -0.1},
    ],
)
def test_options(rng, head_dim, keys, options):
    check(*normal(rng, 100, keys, head_dim), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", [1, 13, 30])
@pytest.mark.parametrize("name", ["bias", "mask", "sinks", "alibi_slopes", "lengths"])
def test_arrays(rng, head_dim, keys, name):
    q, k, v = (x[None] for x in normal(rng, 100, keys, head_dim))
    arrays = {
        "bias": {"bias": rng.normal(size=(2, 100, keys))},
        "mask": {"mask": rng.random((100, keys)) < 0.5},
        "sinks": {"sinks": rng.normal(size=2)},
        "alibi_slopes": {"alibi_slopes": rng.random(2)},
        "lengths": {"query_lengths": np.array([77]), "key_lengths": np.array([keys])},
    }[name]
    check(q, k, v, arrays)
    check(q, k, v, arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys"), [(70, 20), (200, 5)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_options(rng, queries, keys, head_dim):
    arrays = {
        "bias": rng.normal(size=(4, queries, keys)),
        "mask": rng.random((queries, keys)) < 0.8,
        "sinks": rng.normal(size=4),
        "alibi_slopes": rng.random(4) * 0.1,
        "query_lengths": np.array([queries - 3, 20]),
        "key_lengths": np.array([keys - 2, keys]),
    }
    q = rng.normal(size=(2, 4, queries, head_dim))
    k, v = (rng.normal(size=(2, 2, keys, head_dim)) for _ in range(2))
    check(q, k, v, arrays, softcap=4.0, window=(100, 60))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ROW_FORMS)
def test_strides(rng, form):
    import cupy

    q, k, v = (x.reshape(3, 2, -1, 50) for x in normal(rng, 70, 9, 50, heads=6))
    placed = [place(cupy, x, form) for x in (q, k, v)]
    expected = cupyflash.attention(*(place(cupy, x) for x in (q, k, v)))
    out = cupyflash.attention(*placed)
    np.testing.assert_array_equal(to_host(out), to_host(expected))
    check(q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [16, 1000])
def test_heads_that_share_keys(rng, queries):
    q = rng.normal(size=(3, 6, queries, 64))
    k, v = (rng.normal(size=(3, 2, 12, 64)) for _ in range(2))
    check(q, k, v, causal=True)
    check(q, k, v, query_offset=0, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize(
    ("keys", "dims"),
    [
        (32, (256, 256)),
        (30, (200, 130)),
        (60, (128, 128)),
        (20, (3, 130)),
        (30, (16, 256)),
    ],
)
def test_warps_that_share_a_tile_leave_the_bits_as_they_are(
    rng, monkeypatch, keys, dims, at_once
):
    import cupy

    from cupyflash._attention.gpu.fp64.short_forward import ShortFloat64Kernel

    arrays = normal(rng, 70, keys, *dims)
    arrays[2][1, 3, 5] = np.inf
    made = []

    def results(teams):
        made_before = ShortFloat64Kernel._team

        def team(self, asked, device):
            made.append(made_before(self, asked, device))
            return made[-1] if teams else None

        with monkeypatch.context() as patch:
            small_entries.change_tables(patch, lambda rows: rows)
            patch.setattr(ShortFloat64Kernel, "_tiles_at_once", lambda *_: at_once)
            patch.setattr(ShortFloat64Kernel, "_team", team)
            options = {"causal": True, "query_offset": -3, "return_lse": True}
            placed = [place(cupy, x) for x in arrays]
            return [to_host(x) for x in cupyflash.attention(*placed, **options)]

    if not taken(*arrays):
        pytest.skip("does not fit on this device")
    for a, b in zip(results(True), results(False), strict=True):
        np.testing.assert_array_equal(a, b)
    check(*arrays, causal=True, query_offset=-3)
    if not made or made[0] is None:
        pytest.skip("no warps share a tile on this device")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 130])
@pytest.mark.parametrize("keys", [5, 12, 30])
def test_values_that_are_not_finite(rng, head_dim, keys):
    """What a query does not see never reaches it; what it sees does."""
    q, k, v = normal(rng, 100, keys, head_dim)
    v[0, 4, :9] = np.nan
    v[0, 3, 3] = np.inf
    v[1, 1, 3], v[1, 2, 3] = np.inf, -np.inf
    k[1, 3, 0] = np.nan
    check(q, k, v, causal=True, query_offset=0)
    q[0, 50, 3], q[1, 20, 5] = np.nan, np.inf
    check(q, k, v, causal=True, query_offset=-2)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_value_far_below_the_maximum_counts_if_it_is_not_finite(rng, head_dim):
    """exp(-720) is below the normal numbers, and yet an infinity times it is one."""
    q, k, v = normal(rng, 20, 10, head_dim)
    q[...], k[...] = 0, 0
    q[..., 0] = 1
    k[0, 1, 0] = -720
    v[0, 1, 5] = np.inf
    check(q, k, v, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [8, 30])
def test_sums_of_the_largest_numbers(rng, keys):
    q, k, v = normal(rng, 40, keys, 64)
    k[0] = 0
    v[0, :, :5] = np.finfo(np.float64).max * 0.99
    check(q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [3.0, 40.0, 1e6])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores(rng, growth, sign):
    q, k, v = normal(rng, 40, 30, 64)
    q[...], k[...] = 0, 0
    q[..., 0] = sign
    k[..., 0] = growth * np.arange(30)
    check(q, k, v, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("queries", "keys"), [(60, 12), (200, 30), (40, 8)])
def test_what_nobody_sees_leaves_the_bits_as_they_are(rng, bad, queries, keys):
    import cupy

    q, k, v = normal(rng, queries, keys, 64)
    mask = np.ones((queries, keys), bool)
    mask[:, 4:7], mask[33:35] = False, False
    arrays = [q, k, v]
    options = {"mask": place(cupy, mask), "return_lse": True}
    clean = cupyflash.attention(*(place(cupy, x) for x in arrays), **options)
    k[:, 4:7], v[:, 4:7], q[:, 33:35] = bad, bad, bad
    hidden = cupyflash.attention(*(place(cupy, x) for x in arrays), **options)
    for a, b in zip(clean, hidden, strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", [1, 20])
def test_the_bits_of_a_row_are_its_own(rng, head_dim, keys):
    """Neither its place in a tile nor the rows and heads beside it change them."""
    import cupy

    q, k, v = normal(rng, 150, keys, head_dim)
    whole = to_host(cupyflash.attention(*(place(cupy, x) for x in (q, k, v))))
    for rows in (slice(3, None), slice(50, 51), slice(0, 40)):
        part = cupyflash.attention(
            *(place(cupy, x) for x in (q[:1, rows], k[:1], v[:1]))
        )
        np.testing.assert_array_equal(to_host(part), whole[:1, rows])


def test_the_next_row_is_for_more_keys():
    names = [row.name for row in ATTENTION_KERNELS]
    assert names.index(ROW.name) < names.index(TILED_F64.name)
