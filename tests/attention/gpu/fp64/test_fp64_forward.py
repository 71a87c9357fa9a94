"""The float64 row of the attention table: what it takes, its tiles, and its results."""

import dataclasses
import itertools

import mask_views
import numpy as np
import oracle
import pytest
import small_entries
from accuracy import BOUNDS, assert_same_specials, max_error, to_host
from placing import place

import cupyflash
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.fp64.forward import TILED_F64 as ROW
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel

ARCHS = ("sm_80", "sm_90a", "sm_100")
HOPPER = _device.device_of_arch("sm_90a")
HEAD_DIMS = (1, 16, 17, 64, 65, 96, 128, 130, 192, 256)
TERMS = {
    "plain": {},
    "lengths": {"query_lengths": "int32", "key_lengths": "int64"},
    "bias": {"bias": "float64"},
    "softcap": {"softcap": 30.0},
    "negative": {"scale": -1.0},
}


def problem(head_dim=64, **options):
    made = samples.made_up("float64", head_dim)
    return dataclasses.replace(made, **options)


@pytest.fixture(autouse=True)
def without_rows_of_few_queries(request, monkeypatch):
    """On a GPU, leave few queries to this row, too."""
    if request.node.get_closest_marker("gpu"):
        small_entries.change_tables(
            monkeypatch, lambda rows: tuple(row for row in rows if row.name != "gemv")
        )


# --- selection -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "alignment", "partial"),
    [
        *(((64, 64), 16, False), ((112, 112), 16, False), ((160, 256), 16, False)),
        *(((50, 50), 16, True), ((64, 50), 16, True), ((144, 160), 16, True)),
        *(((64, 64), 8, True), ((103, 103), 8, True)),
    ],
)
def test_a_variant_copies_partial_rows(dims, alignment, partial):
    head_dim, head_dim_v = dims
    asked = problem(head_dim, head_dim_v=head_dim_v, row_alignment=alignment)
    (config,) = ROW.configs(asked, 1, HOPPER)
    assert (("PARTIAL_ROWS", "1") in config.variant.defines) == partial


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("terms", TERMS)
def test_takes(arch, head_dim, terms):
    device = _device.device_of_arch(arch)
    asked = problem(head_dim, **TERMS[terms])
    row, _ = kernel.select(ATTENTION_KERNELS, asked, device)
    assert row is ROW
    (config,) = ROW.configs(asked, 1, device)
    # Static memory takes up to 1 KiB more.
    assert config.variant.smem + 1024 <= device.smem_optin


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(dtype="float32"), "sm_90a", "takes float64, not float32"),
        (problem(257), "sm_90a", "not both up to 256"),
        (problem(head_dim_v=300), "sm_90a", "not both up to 256"),
        (problem(seqlen_k=1 << 30), "sm_90a", "32 bits"),
        (problem(), "sm_75", "no fast tensor cores"),
        (problem(), "sm_86", "no fast tensor cores"),
        (problem(), "sm_89", "no fast tensor cores"),
        (problem(), "sm_120", "no fast tensor cores"),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    device = _device.device_of_arch(arch)
    assert reason in ROW.unsupported_reason(asked, device)
    row, _ = kernel.select(ATTENTION_KERNELS, asked, device)
    next_rows = ("mma",) if asked.dtype == "float32" else ("tiled", "online")
    assert row.name in next_rows


def test_columns_are_padded_to_few_more():
    asked = (1, 17, 33, 49, 65, 81, 97, 113, 129, 161, 193, 225)
    assert tuple(ROW._dims(problem(n))[0] for n in asked) == ROW.dims
    # Two warps that share rows have half of the columns each.
    assert ROW._dims(problem(16, head_dim_v=200)) == (32, 224)
    assert ROW._dims(problem(48, head_dim_v=192)) == (64, 192)
    assert ROW._dims(problem(129, head_dim_v=100)) == (160, 128)


@pytest.mark.parametrize("arch", ARCHS)
def test_warps_that_share_rows_have_whole_steps_of_columns(arch):
    device = _device.device_of_arch(arch)
    widths = range(8, 257)
    for dim, dim_v in itertools.product(widths, widths):
        asked = problem(dim, head_dim_v=dim_v)
        dims = ROW._dims(asked)
        assert dims[0] >= dim
        assert dims[1] >= dim_v
        tiles = ROW._tiles(asked, device)
        assert tiles
        for tile in tiles:
            assert all(n % (16 * tile.sharers) == 0 for n in dims)
            assert dims[0] >= 16 * tile.sharers * tile.in_registers


def test_a_card_with_little_shared_memory():
    small = dataclasses.replace(HOPPER, smem_optin=48 * 1024)
    assert "more shared memory" in ROW.unsupported_reason(problem(128), small)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seqlen_q", [1, 16, 17, 100, 4096])
@pytest.mark.parametrize("heads", [1, 64])
def test_the_tiles_cover_every_query_and_column(head_dim, seqlen_q, heads):
    asked = problem(
        head_dim, seqlen_q=seqlen_q, num_heads=heads, num_kv_heads=heads, head_dim_v=200
    )
    tile = ROW.tile(asked, HOPPER)
    dim, dim_v = ROW._dims(asked)
    assert dim >= head_dim
    assert dim_v >= 200
    # What the registers of a warp hold sums for.
    assert dim_v // tile.sharers <= ROW.most_alone
    (config,) = ROW.configs(asked, 1, HOPPER)
    assert config.num_blocks == heads * -(-seqlen_q // tile.block_m)
    assert tile.num_threads == 2 * tile.block_m * tile.sharers


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_of_a_problem_sum_in_the_same_order(head_dim, terms):
    """The number of other heads may change block_m, never the bits of a row."""
    tiles = ROW._tiles(problem(head_dim, **TERMS[terms]), HOPPER)
    assert len({tile.block_n for tile in tiles}) == 1


@pytest.mark.parametrize(
    ("arch", "head_dim", "heads", "seqlen_q", "blocks"),
    [
        ("sm_90a", 128, 264, 32, 2),
        ("sm_90a", 96, 264, 17, 2),
        ("sm_90a", 128, 263, 32, 1),  # not two for each multiprocessor
        ("sm_90a", 128, 264, 16, 2),
        ("sm_90a", 128, 264, 8, 1),  # half of a tile
        ("sm_90a", 128, 264, 64, 1),
        ("sm_100", 128, 1024, 32, 2),
        ("sm_80", 128, 1024, 32, 1),  # has too little shared memory
    ],
)
def test_two_blocks_of_few_queries(arch, head_dim, heads, seqlen_q, blocks):
    asked = problem(head_dim, seqlen_q=seqlen_q, num_heads=heads, num_kv_heads=heads)
    assert ROW.tile(asked, _device.device_of_arch(arch)).min_blocks == blocks


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k", "head_dim", "splits"),
    [
        (32, 32, 512, 256, (4, 128)),
        (32, 32, 512, 128, (8, 64)),  # two blocks
        (1, 512, 512, 256, (8, 64)),
        (1, 512, 512, 128, (8, 64)),
        (1, 32, 4096, 256, (64, 64)),
        (1, 4096, 512, 256, (2, 256)),
        (1, 512, 512, 64, (8, 64)),
        (32, 32, 512, 64, (8, 64)),
        (4, 512, 512, 256, (4, 128)),
        (1, 1024, 1024, 128, (16, 64)),
        (8, 512, 512, 128, (2, 256)),  # tiles of 64 queries are enough
        (32, 512, 512, 256, (1, 512)),
        (1, 32, 511, 128, (1, 511)),
    ],
)
def test_splits_of_few_heads(heads, seqlen_q, seqlen_k, head_dim, splits):
    asked = problem(
        head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=heads,
        num_kv_heads=heads,
    )  # fmt: skip
    assert ROW.split_kv(asked, HOPPER)[:2] == splits


# --- results -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "options", "buffers"),
    [
        ("sm_90a", {"softcap": 30.0, "alibi_slopes": "float64"}, 3),
        ("sm_100", {"softcap": 30.0}, 3),
        ("sm_100", {"softcap": 30.0, "alibi_slopes": "float64"}, 2),
        ("sm_80", {}, 2),
    ],
)
def test_two_buffers_where_kernels_with_three_spill(arch, options, buffers):
    asked, device = problem(128, **options), _device.device_of_arch(arch)
    assert ROW.tile(asked, device).slots == buffers


@pytest.mark.parametrize(
    ("options", "in_registers"),
    [
        ({}, 1),
        ({"bias": "float64", "mask": "bool", "softcap": 30.0}, 1),
        ({"query_lengths": "int32", "key_lengths": "int32", "sinks": "float64"}, 1),
        ({**TERMS["lengths"], **TERMS["bias"], "mask": "bool"}, 0),
        (samples._ALL_OPTIONS, 0),
    ],
)
def test_no_part_of_q_in_registers_beside_many_options(options, in_registers):
    tile = ROW.tile(problem(256, **options), HOPPER)
    assert tile.in_registers == in_registers
    assert tile.block_n == ROW.tile(problem(256), HOPPER).block_n


def check(q, k, v, arrays=None, **options):
    import cupy

    arrays = arrays or {}
    exact, exact_lse, _ = oracle.attention(
        q, k, v, **arrays, **options, real=np.longdouble
    )
    placed = [place(cupy, x) for x in (q, k, v)]
    named = {name: place(cupy, x) for name, x in arrays.items()}
    out, lse = cupyflash.attention(*placed, **named, **options, return_lse=True)
    again = cupyflash.attention(*placed, **named, **options)
    np.testing.assert_array_equal(to_host(out), to_host(again))
    finite = assert_same_specials(out, exact)
    exact = np.where(finite, exact, 0)
    size = float(np.abs(exact).max(initial=0))
    error = max_error(np.where(finite, to_host(out), 0), exact)
    assert error <= BOUNDS["attention"]["float64"] * size
    finite = assert_same_specials(lse, exact_lse)
    error = max_error(np.where(finite, to_host(lse), 0), np.where(finite, exact_lse, 0))
    size = float(np.abs(np.where(finite, exact_lse, 0)).max(initial=0))
    assert error <= max(1e-14, 2 * np.finfo(np.float64).eps * size)


def normal(rng, seqlen_q, seqlen_k, head_dim, head_dim_v=None, heads=2):
    return (
        rng.normal(size=(heads, seqlen_q, head_dim)),
        rng.normal(size=(heads, seqlen_k, head_dim)),
        rng.normal(size=(heads, seqlen_k, head_dim_v or head_dim)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(1, 1), (1, 1000), (130, 127), (300, 65), (33, 0)])
@pytest.mark.parametrize(
    "dims",
    [
        *((64, 64), (128, 128), (256, 256), (40, 150), (96, 7), (48, 48), (80, 65)),
        *((112, 100), (160, 160), (224, 200), (30, 210)),
    ],
)
def test_sizes(rng, seqlens, dims):
    q, k, v = normal(rng, *seqlens, *dims)
    check(q, k, v)
    check(q, k, v, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["shifted", "rows"])
@pytest.mark.parametrize("dim", [50, 64, 103, 200])
@pytest.mark.parametrize("seqlens", [(3, 300), (130, 70)])
def test_rows_that_begin_anywhere(cupy, rng, seqlens, dim, form):
    """As of contiguous arrays, bit for bit: only the copies to the chip are others."""
    arrays = normal(rng, *seqlens, dim)
    check(*arrays)
    contiguous, anywhere = (
        cupyflash.attention(*(place(cupy, x, f) for x in arrays), return_lse=True)
        for f in ("plain", form)
    )
    for found, expected in zip(anywhere, contiguous, strict=True):
        assert np.array_equal(to_host(found), to_host(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize("seqlen_q", [13, 21])
def test_many_heads_of_few_queries(rng, seqlen_q, head_dim):
    """Two blocks for each multiprocessor."""
    q, k, v = normal(rng, seqlen_q, 70, head_dim, heads=300)
    check(q, k, v)
    check(q, k, v, causal=True, query_offset=30)
    v[0, 60, 3], k[1, 65, 0] = np.nan, np.inf
    check(q, k, v, causal=True, query_offset=40)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("heads", [1, 32])
def test_splits_of_few_keys(rng, head_dim, heads):
    check(*normal(rng, 32, 512, head_dim, heads=heads))
    # All splits read the bits of the same mask.
    masks = rng.random((heads, 32, 512)) < 0.7
    check(*normal(rng, 32, 512, head_dim, heads=heads), {"mask": masks})


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (40, 7)},
        {"causal": True, "query_offset": 50},
        {"softcap": 5.0, "causal": True},
        {"scale": 0.0},
        {"scale": -0.1},
    ],
)
def test_options(rng, head_dim, options):
    check(*normal(rng, 150, 170, head_dim), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["bias", "mask", "sinks", "alibi_slopes", "lengths"])
def test_arrays(rng, head_dim, name):
    q, k, v = (x[None] for x in normal(rng, 150, 170, head_dim))
    arrays = {
        "bias": {"bias": rng.normal(size=(2, 150, 170))},
        "mask": {"mask": rng.random((1, 170)) < 0.5},
        "sinks": {"sinks": rng.normal(size=2)},
        "alibi_slopes": {"alibi_slopes": rng.random(2)},
        "lengths": {"query_lengths": np.array([77]), "key_lengths": np.array([90])},
    }[name]
    check(q, k, v, arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("name", mask_views.VIEWS)
@pytest.mark.parametrize("head_dim", [48, 64, 128, 192])
def test_masks_of_any_strides(rng, head_dim, name):
    q, k = ((*mask_views.SHAPES[n], head_dim) for n in "qk")
    arrays = {"mask": mask_views.view(rng, name)}
    normals = [rng.normal(size=x) for x in (q, k, k)]
    check(*normals, arrays)
    check(*normals, {**arrays, "key_lengths": np.array([150, 3])}, window=(60, 40))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_values_that_are_not_finite(rng, head_dim):
    """What a query does not see never reaches it; what it sees does."""
    q, k, v = normal(rng, 200, 200, head_dim)
    v[0, 100, :9] = np.nan
    v[0, 101, 3] = np.inf
    v[1, 60, 3], v[1, 70, 3] = np.inf, -np.inf
    k[1, 150, 0] = np.nan
    check(q, k, v, causal=True, query_offset=0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_the_largest_tiles(rng, head_dim):
    """Few heads would be cut into small ones."""
    q, k, v = normal(rng, 130, 100, head_dim, heads=70)
    check(q, k, v)
    v[3, 50, 5], v[69, 20, 3] = np.nan, np.inf
    check(q, k, v, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_value_far_below_the_maximum_counts_if_it_is_not_finite(rng, head_dim):
    """exp(-720) is below the normal numbers, and yet an infinity times it is one."""
    q, k, v = normal(rng, 20, 40, head_dim)
    q[...], k[...] = 0, 0
    q[..., 0] = 1
    k[0, 1, 0] = -720
    v[0, 1, 5] = np.inf
    check(q, k, v, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [0.1, 3.0, 40.0, 1e6])
def test_scores_that_grow(rng, growth):
    """The reference of a row is raised again and again."""
    q, k, v = normal(rng, 40, 300, 64)
    q[...], k[...] = 0, 0
    q[..., 0] = 1
    k[..., 0] = growth * np.arange(300)
    check(q, k, v, scale=1.0)
    check(-q, k, v, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_scores_and_values(head_dim):
    """The order of the sums keeps long ones accurate where all errors have one sign."""
    q = np.zeros((1, 16, head_dim))
    k = np.zeros((1, 4096, head_dim))
    v = np.full((1, 4096, head_dim), 1 / 3)
    check(q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_bits_of_a_row_are_its_own(rng, head_dim):
    """Neither its place in a tile nor the rows and heads beside it change them."""
    import cupy

    q, k, v = normal(rng, 150, 333, head_dim)
    k *= np.linspace(0.1, 3, 333)[:, None]
    q[:, ::7] *= 20
    whole = to_host(cupyflash.attention(*(place(cupy, x) for x in (q, k, v))))
    for rows in (slice(3, None), slice(50, 51), slice(0, 40)):
        part = cupyflash.attention(
            *(place(cupy, x) for x in (q[:1, rows], k[:1], v[:1]))
        )
        np.testing.assert_array_equal(to_host(part), whole[:1, rows])
