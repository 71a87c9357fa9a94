"""The Hopper row of the attention table: what it takes, and how it cuts a problem."""

import dataclasses
import math
import re

import numpy as np
import oracle
import pytest
from accuracy import (
    BOUNDS,
    assert_same_specials,
    dtype_of,
    max_error,
    to_host,
    wide,
)
from placing import empty, place

import cupyflash
from cupyflash._attention.gpu import forward as forward_gpu
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.config import MOST_KEYS
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.sm90 import forward_model, forward_plan
from cupyflash._attention.gpu.sm90.forward import HopperKernel, has_mask_bits
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel, plan_cache, runtime, source

HOPPER = _device.device_of_arch("sm_90a")
(ROW,) = (row for row in ATTENTION_KERNELS if isinstance(row, HopperKernel))


def problem(dtype="bfloat16", head_dim=64, **options):
    return samples.made_up(dtype, head_dim, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 12, 64, 65, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("bounds", [{}, {"right": 0}, {"left": 5, "right": 3}])
def test_takes(dtype, head_dim, bounds):
    asked = problem(dtype, head_dim, **bounds)
    assert ROW.unsupported_reason(asked, HOPPER) is None
    row, refused = kernel.select(ATTENTION_KERNELS, asked, HOPPER)
    assert row is ROW
    assert [name for name, _ in refused] == ["gemv", "tiny", "mma_short"]


@pytest.mark.parametrize(
    ("asked", "device", "reason"),
    [
        (problem("float32"), HOPPER, "takes float16 and bfloat16, not float32"),
        (problem(head_dim=264), HOPPER, "head_dim 264 is above 256"),
        (problem(no_tensor_map="q starts"), HOPPER, "q starts"),
        (
            problem(head_dim=256, softcap=3.0, alibi_slopes="float32"),
            HOPPER,
            "too few registers",
        ),
        (problem(), _device.device_of_arch("sm_80"), "needs sm_90a"),
        (problem(), _device.device_of_arch("sm_100"), "needs sm_90a"),
        (problem(), dataclasses.replace(HOPPER, nvrtc=(12, 8)), "NVRTC 12.9"),
        (problem(), dataclasses.replace(HOPPER, smem_optin=49152), "shared memory"),
        (dataclasses.replace(problem(), seqlen_k=0), HOPPER, "no keys"),
        (
            dataclasses.replace(problem("float16"), seqlen_k=(8 << 18) + 1),
            HOPPER,
            "exact enough up to 262144 keys, or up to 8 times as many in splits",
        ),
        (
            dataclasses.replace(problem("float16", sinks="float32"), seqlen_k=1 << 19),
            HOPPER,
            "exact enough up to 262144 keys, and the sinks",
        ),
        (
            dataclasses.replace(problem("float16"), seqlen_q=1 << 19, seqlen_k=1 << 19),
            HOPPER,
            "and results of 2 splits would take 17716740096 bytes",
        ),
        (dataclasses.replace(problem(), seqlen_q=1 << 31), HOPPER, "32 bits"),
    ],
)
def test_leaves_to_the_next_row(asked, device, reason):
    assert reason in ROW.unsupported_reason(asked, device)
    row, refused = kernel.select(ATTENTION_KERNELS, asked, device)
    assert row is not ROW
    assert "hopper" in dict(refused)


@pytest.mark.parametrize("num_heads", [1, 7, 64, 1000])
@pytest.mark.parametrize("seqlen", [1, 100, 4096, 200_000])
def test_sections_hold_every_head(num_heads, seqlen):
    asked = dataclasses.replace(
        problem(right=0),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
    )
    plan = ROW.schedule(asked, HOPPER)
    parts = plan["num_splits"]
    assert plan["num_work_tiles"] == plan["num_blocks"] * num_heads * parts
    assert plan["num_blocks"] * ROW.tile(asked, HOPPER).block_m >= seqlen
    assert 1 <= plan["section"] <= num_heads
    # The last section is not much smaller than the others.
    sections = -(-num_heads // plan["section"])
    assert num_heads - (sections - 1) * plan["section"] >= plan["section"] - sections


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [1, 100, 512, 1000, 1024, 5000])
def test_the_last_tile_of_queries_is_full(head_dim, seqlen):
    """But for the last queries of a warpgroup: what is left over stands in front."""
    asked = dataclasses.replace(problem(head_dim=head_dim, right=0), seqlen_q=seqlen)
    plan, block_m = ROW.schedule(asked, HOPPER), ROW.tile(asked, HOPPER).block_m
    left = plan["num_blocks"] * block_m - plan["absent"] - seqlen
    assert 0 <= left < 64
    assert plan["absent"] % 64 == 0
    assert plan["absent"] < block_m


@pytest.mark.parametrize("window", [(255, 0), (1023, 0), (511, 512)])
def test_narrow_windows_have_small_tiles(window):
    left, right = window
    asked = dataclasses.replace(
        problem(head_dim=128, left=left, right=right), seqlen_q=8192, seqlen_k=8192
    )
    assert ROW.tile(asked, HOPPER) == ROW.narrow[128, 128]
    wider = dataclasses.replace(asked, left=left + 1)
    assert (ROW.tile(wider, HOPPER) == ROW.narrow[128, 128]) == (left + right < 1023)
    capped = dataclasses.replace(asked, softcap=3.0)
    long = dataclasses.replace(capped, left=4096)
    assert ROW.tile(capped, HOPPER) == ROW.tile(long, HOPPER)


@pytest.mark.parametrize("terms", ["keys", "unit"])
def test_heads_that_see_all_keys_come_one_after_another(terms):
    asked = problem(head_dim=128, bias="float32", terms=terms)
    assert ROW.schedule(asked, HOPPER)["section"] == 1
    assert ROW.schedule(dataclasses.replace(asked, right=0), HOPPER)["section"] > 1


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize(
    ("seqlen", "least", "most"), [(512, 0, 0.55), (4096, 0.9, 1.1)]
)
def test_long_causal_problems_have_large_sections(head_dim, seqlen, least, most):
    """Of keys and values, in units of the L2 cache."""
    asked = dataclasses.replace(
        problem(head_dim=head_dim, right=0),
        batch=(2,),
        seqlen_q=seqlen,
        seqlen_k=seqlen,
    )
    size = ROW.schedule(asked, HOPPER)["section"] * seqlen * head_dim * 4
    assert least <= size / HOPPER.l2_bytes <= most


def test_no_more_blocks_than_multiprocessors():
    (config,) = ROW.configs(problem(), 1, HOPPER)
    assert config.num_blocks == HOPPER.num_sms
    small = dataclasses.replace(
        problem(), seqlen_q=10, seqlen_k=100, num_heads=3, num_kv_heads=3
    )
    (config,) = ROW.configs(small, 1, HOPPER)
    assert config.num_blocks == 3


def test_operands_of_an_instruction_follow_its_accumulators():
    """Half as many accumulators as columns, then operands by their numbers."""
    text = (source.CUDA_SRC / "ptx" / "wgmma_shapes.cuh").read_text()
    shapes = re.findall(r"^WGMMA_SHAPE\(([\d, ]+)\)$", text, re.MULTILINE)
    assert len(shapes) > 5
    for shape in shapes:
        columns, count, *operands = map(int, shape.split(", "))
        assert count == columns // 2
        assert operands == list(range(count, count + 6))
    # Each list of accumulators goes on from the one before.
    lists = re.findall(r"^#define N(\d+) ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    known = 0
    for count, names in lists:
        assert names.startswith(f"N{known} " if known else '"')
        numbers = [int(number) for number in re.findall(r"%(\d+)", names)]
        assert numbers == list(range(known, int(count)))
        known = int(count)


# --- softcap, terms of keys ----------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "softcap"),
    [
        (0.125, 30.0),
        (1.0, 1.0),
        (0.09, 2.0),
        (-0.3, 5.0),
        (0.0, 3.0),
        (0.125, 1e6),
        (1e-3, 1e9),
        (1.0, 1e-8),
        (0.125, 1e12),
        (1e-12, 1e8),
    ],
)
@pytest.mark.parametrize("bias", [None, "float32"])
def test_small_scores_are_a_polynomial(scale, softcap, bias):
    """To the rounding of float32, up to the limit that goes with the coefficients."""
    asked = dataclasses.replace(problem(softcap=softcap, bias=bias), scale=scale)
    cap = ROW.schedule(asked, HOPPER)["cap"]
    x = np.linspace(-1, 1, 9999) * min(float(cap["limit"]), 1e9)
    x = x.astype(np.float32)
    score = cap["coefficients"][3]
    for n in (2, 1, 0):
        score = np.float32(score * (x * x) + cap["coefficients"][n])
    score = x.astype(np.float64) * score
    # Alone, a softcap leaves exponents of 2.
    unit = np.log2(np.e) if bias is None and 1e-20 <= scale else 1.0
    exact = unit * softcap * np.tanh(x.astype(np.float64) * scale / softcap)
    np.testing.assert_allclose(score, exact, rtol=3 * 2.0**-23, atol=0)
    assert cap["softcap"] == np.float32(unit * softcap)


def static_smem(slots, tile, head_dim):
    """A bias in so many slots, barriers and the like, as tiles are aligned."""
    if head_dim > 128:  # one float a key, beside each tile of k
        size = tile.num_stages * (4 * tile.block_n + 16)
    else:  # those preset, and those that are not
        size = slots * (8 * tile.block_n + 16)
    return -(-(size + 448) // 1024) * 1024


@pytest.mark.parametrize("head_dim", ROW.dims)
def test_a_bias_of_keys_fits_beside_few_queries(head_dim):
    asked = problem(head_dim=head_dim, terms="keys", bias="float32")
    asked = dataclasses.replace(asked, seqlen_q=5)
    (config,) = ROW.configs(asked, 1, HOPPER)
    assert ("KEY_BIAS", "1") in config.variant.defines
    static = static_smem(2, ROW.tile(asked, HOPPER), head_dim)
    assert config.variant.smem + static <= HOPPER.smem_optin


@pytest.mark.parametrize("head_dim", ROW.dims)
@pytest.mark.parametrize("bounds", [{}, {"right": 0}, {"left": 9, "right": 0}])
@pytest.mark.parametrize("seqlen", [512, 4096, 16384])
def test_a_bias_of_keys_takes_the_tiles_of_none(head_dim, bounds, seqlen):
    plain = dataclasses.replace(
        problem(head_dim=head_dim, **bounds), seqlen_q=seqlen, seqlen_k=seqlen
    )
    asked = dataclasses.replace(plain, terms="keys", bias="float32")
    (config,) = ROW.configs(asked, 1, HOPPER)
    assert ("KEY_BIAS", "1") in config.variant.defines
    tile = ROW.tile(asked, HOPPER)
    assert tile == ROW.tiles_of(plain)[0]
    static = static_smem(4, tile, head_dim)
    assert config.variant.smem + static <= HOPPER.smem_optin
    for other in (
        {"mask": "bool"},
        {"softcap": 3.0},
        {"alibi_slopes": "float32"},
        {"terms": "unit"},
        {"scale": 1e-3},
    ):
        both = dataclasses.replace(asked, **other)
        if ROW.unsupported_reason(both, HOPPER) is None:
            (config,) = ROW.configs(both, 1, HOPPER)
            assert ("KEY_BIAS", "1") not in config.variant.defines


# --- tiles of a bias ------------------------------------------------------------------


OTHER_OPTIONS = (
    {}, {"right": 0}, {"left": 100, "right": 0}, {"mask": "bool"}, {"softcap": 3.0},
    {"key_lengths": "int32"}, {"mask": "bool", "alibi_slopes": "float32"},
)  # fmt: skip


@pytest.mark.parametrize("seqlen_q", [8, 64, 65, 4096])
@pytest.mark.parametrize("seqlen_k", [8, 4096])
@pytest.mark.parametrize("options", OTHER_OPTIONS)
@pytest.mark.parametrize("head_dim", ROW.dims)
def test_tiles_of_a_bias_fit(head_dim, options, seqlen_k, seqlen_q):
    asked = problem(head_dim=head_dim, bias="bfloat16", terms="tiles", **options)
    asked = dataclasses.replace(asked, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    beside = options.keys() - {"left", "right"}
    if seqlen_q > 64:
        beside -= {"mask"}  # it is packed as bits
    assert ROW.has_bias_tiles(asked) == (head_dim <= 128 or not beside)
    if ROW.has_bias_tiles(asked):
        assert ROW.unsupported_reason(asked, HOPPER) is None
        config, *_ = ROW.configs(asked, 1, HOPPER)
        assert ("BIAS_TILES", "1") in config.variant.defines
        tile = ROW.tile(asked, HOPPER)
        assert tile.block_n % 64 == 0
        assert tile.block_m <= 256  # rows of a box
        assert config.variant.smem + 1024 <= HOPPER.smem_optin  # beside barriers


@pytest.mark.parametrize(
    "changed", [{"bias": "float32"}, {"terms": "unit"}, {"terms": "any"}]
)
def test_threads_read_any_other_bias(changed):
    asked = problem(bias="float16", terms="tiles")
    assert ROW.has_bias_tiles(asked)
    assert not ROW.has_bias_tiles(dataclasses.replace(asked, **changed))
    assert not ROW.has_bias_tiles(problem(mask="bool", terms="tiles"))


# --- masks as bits -------------------------------------------------------------------


BESIDE_MASKS = (
    {}, {"bias": "float32", "terms": "unit"}, {"bias": "float32", "terms": "any"},
    {"bias": "bfloat16", "terms": "tiles"}, {"alibi_slopes": "float32"},
    {"bias": "float32", "terms": "bias of keys"}, {"softcap": 3.0}, {"scale": -1.0},
    {"softcap": 3.0, "alibi_slopes": "float32"},
)  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("bounds", [{}, {"left": 9}, {"key_lengths": "int32"}])
@pytest.mark.parametrize("options", BESIDE_MASKS)
def test_masks_are_packed_beside_all_options(head_dim, bounds, options):
    asked = problem(head_dim=head_dim, mask="bool", terms="unit", **bounds)
    asked = dataclasses.replace(asked, **options)
    if ROW.unsupported_reason(asked, HOPPER) is None:
        config, *_ = ROW.configs(asked, 1, HOPPER)
        assert ("MASK_BITS", "1") in config.variant.defines
        unit = options.get("terms") in ("unit", "tiles")
        assert (("UNIT_COLUMNS", "1") in config.variant.defines) == unit
        of_keys = options.get("terms") == "bias of keys"
        assert (("KEY_BIAS", "1") in config.variant.defines) == of_keys
        tile = ROW.tile(asked, HOPPER)
        static = static_smem(4, tile, head_dim) if of_keys else 1024
        assert config.variant.smem + static <= HOPPER.smem_optin
    else:
        assert head_dim > 128


@pytest.mark.parametrize(
    "changed", [{"seqlen_q": 64}, {"terms": "keys"}, {"mask": None}]
)
def test_masks_that_are_not_packed(changed):
    asked = problem(mask="bool", bias="bfloat16", terms="tiles")
    assert has_mask_bits(asked)
    assert not has_mask_bits(dataclasses.replace(asked, **changed))
    assert not has_mask_bits(samples.with_functions(asked))


# --- out through shared memory -------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("bounds", [{}, {"right": 0}])
@pytest.mark.parametrize("seqlen", [512, 8192])
def test_out_is_staged_where_it_fits(head_dim, bounds, seqlen):
    asked = dataclasses.replace(
        problem(head_dim=head_dim, **bounds), seqlen_q=seqlen, seqlen_k=seqlen
    )
    (config,) = ROW.configs(asked, 1, HOPPER)
    columns = int(dict(config.variant.defines).get("STAGED_COLUMNS", 0))
    # Beside the largest tiles there is no room, and the longest loop is better without.
    large = not bounds and seqlen > 4096 and (head_dim >= 192 or head_dim <= 64)
    assert (columns == 0) == large
    if columns:
        (compiled, _) = ROW.dims_of(asked)
        assert compiled % columns == 0
        assert columns * 2 % 16 == 0


@pytest.mark.parametrize("seqlen_q", [1, 64])
def test_parts_and_few_queries_are_not_staged(seqlen_q):
    config, *_ = ROW.configs(few_queries(seqlen_q), 1, HOPPER)
    assert "STAGED_COLUMNS" not in dict(config.variant.defines)


# --- parts of the keys, packed heads -------------------------------------------------


def few_queries(seqlen_q=1, group=4, batch=(), **options):
    return dataclasses.replace(
        problem("bfloat16", 128, **options),
        batch=batch,
        num_heads=8 * group,
        num_kv_heads=8,
        seqlen_q=seqlen_q,
        seqlen_k=8192,
    )


@pytest.mark.parametrize(
    ("seqlen_q", "group", "pack"),
    [
        (1, 4, 4),
        (1, 64, 64),
        (1, 128, 64),
        (1, 7, 7),
        (1, 12, 12),
        (4, 7, 7),
        (13, 6, 3),
        (16, 4, 4),
        (17, 4, 2),
        (33, 4, 1),
        (4096, 4, 1),
    ],
)
def test_heads_of_a_group_are_packed_where_queries_are_few(seqlen_q, group, pack):
    asked = few_queries(seqlen_q, group)
    assert ROW.pack(asked) == pack
    assert ROW.pack(dataclasses.replace(asked, heads_can_be_packed=False)) == 1
    assert ROW.pack(dataclasses.replace(asked, sinks="float32")) == 1
    plan = ROW.schedule(asked, HOPPER)
    rows = plan["num_blocks"] * ROW.tile(asked, HOPPER).block_m
    assert rows >= seqlen_q * pack
    assert plan["num_heads"] * pack == asked.num_heads
    assert (
        plan["num_work_tiles"]
        == plan["num_blocks"] * plan["num_heads"] * plan["num_splits"]
    )


def test_keys_leave_the_cache_first_where_it_holds_them_and_nobody_reads_them_again():
    def is_once(asked):
        config, *_ = ROW.configs(asked, 1, HOPPER)
        return ("READ_ONCE", "1") in config.variant.defines

    assert is_once(few_queries())
    assert not is_once(few_queries(batch=(16,)))  # 512 MB
    assert is_once(few_queries(group=7))
    assert not is_once(few_queries(13, group=7))  # heads of a group are not packed
    assert not is_once(few_queries(seqlen_q=17))
    assert not is_once(few_queries(softcap=3.0))
    assert (
        ROW.tile(few_queries(), HOPPER).block_n
        == ROW.tile(few_queries(batch=(16,)), HOPPER).block_n
    )


def test_boxes_are_whole_parts_of_a_tile():
    tiles = [tile for tiles in ROW.few.values() for tile in tiles]
    tiles += [
        tile
        for steps in ROW.tiles.values()
        for ladder in steps
        for tile in ladder.values()
    ]
    for tile in tiles:
        if tile.box_n:
            assert tile.box_n % 8 == 0  # rows of a swizzle
            assert tile.block_n % tile.box_n == 0
    config, *_ = ROW.configs(few_queries(), 1, HOPPER)
    assert ("BOX_N", "16") in config.variant.defines


def test_keys_are_split_where_tiles_are_few():
    assert ROW.num_splits(few_queries(), HOPPER) == HOPPER.num_sms // 8
    assert ROW.num_splits(few_queries(batch=(16,)), HOPPER) == 1
    # Sinks join where a block combines the splits.
    assert ROW.num_splits(few_queries(group=1, sinks="float32"), HOPPER) > 1
    assert ROW.combines(few_queries(group=1, sinks="float32"), HOPPER)
    for head_dim_v, columns in ((65, 68), (127, 128)):  # results are whole vectors
        odd = dataclasses.replace(few_queries(), head_dim_v=head_dim_v)
        splits = ROW.num_splits(odd, HOPPER)
        assert splits == HOPPER.num_sms // 8
        rows = splits * math.prod(odd.lse_shape)
        assert ROW.split_bytes(odd, HOPPER)["split_out"] == 4 * columns * rows
    # Not where a block alone is done sooner.
    for queries, least in ((1, 512), (16, 512), (17, 1024), (64, 1024)):
        for keys in (least, least - 1):
            asked = dataclasses.replace(few_queries(queries, 1), seqlen_k=keys)
            assert (ROW.num_splits(asked, HOPPER) > 1) == (keys == least)
    (launch,) = ROW.configs(few_queries(), 1, HOPPER)
    assert launch.num_blocks <= HOPPER.num_sms
    assert {("SPLIT", "1"), ("COMBINE", "1")} <= set(launch.variant.defines)
    # Of more than 16 rows, another kernel combines the splits.
    some = dataclasses.replace(few_queries(16, 1), num_heads=16, num_kv_heads=16)
    assert len(ROW.configs(some, 1, HOPPER)) == 1
    many = dataclasses.replace(some, seqlen_q=17)
    launch, combine = ROW.configs(many, 1, HOPPER)
    assert ("SPLIT", "1") in launch.variant.defines
    assert ("COMBINE", "1") not in launch.variant.defines
    assert combine.variant.entry == "attention_combine"


def grid(entries, seqlen_q, seqlen_k, head_dim, **options):
    return dataclasses.replace(
        problem("float16", head_dim, query_offset=seqlen_k - seqlen_q, **options),
        batch=(entries,),
        num_heads=1,
        num_kv_heads=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bounds", [{}, {"right": 0}])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
def test_a_large_grid_takes_the_tile_of_its_length(head_dim, bounds, seqlen):
    """The problems of the benchmarks, for which the ladders were measured."""
    entries = (16384 // seqlen) * (2048 // head_dim)
    asked = grid(entries, seqlen, seqlen, head_dim, **bounds)
    ladder = ROW.tiles[head_dim, head_dim][len(bounds)]
    assert ROW.tile(asked, HOPPER) == kernel.by_threshold(ladder, seqlen)
    assert ROW.num_splits(asked, HOPPER) == 1


@pytest.mark.parametrize("bounds", [{}, {"right": 0}])
def test_a_small_grid_takes_tiles_that_fill_the_device(bounds):
    for entries in (1, 32):  # 128 tiles of 128 queries, or 64 of 256
        asked = grid(entries, 512, 512, 64, **bounds)
        assert ROW.tile(asked, HOPPER).block_m == 128
        assert ROW.num_splits(asked, HOPPER) == 1
    # In 132 multiprocessors at a time: 1024 tiles of 128 queries are 8 waves and 704
    # tiles of 192 are 6, which last longer.
    assert ROW.tile(grid(32, 4096, 512, 128), HOPPER).block_m == 128
    # Half of a tile of 256 queries would be empty, whatever the number of waves.
    assert ROW.tile(grid(1024, 128, 2048, 64), HOPPER).block_m == 128


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("bounds", [{}, {"right": 0}])
def test_many_keys_are_split_by_another_launch(head_dim, bounds):
    asked = grid(1, 512, 8192, head_dim, **bounds)
    launch, combine = ROW.configs(asked, 1, HOPPER)
    assert 32 <= launch.num_blocks <= HOPPER.num_sms
    assert ("COMBINE", "1") not in launch.variant.defines
    assert combine.variant.entry == "attention_combine"
    few_keys = dataclasses.replace(asked, seqlen_k=512, query_offset=0)
    assert ROW.num_splits(few_keys, HOPPER) == 1
    # Their sinks are added by the kernel itself.
    sinks = dataclasses.replace(asked, sinks="float32")
    assert ROW.num_splits(sinks, HOPPER) == 1 or ROW.combines(sinks, HOPPER)


def test_a_tile_is_chosen_without_queries_or_entries():
    for asked in (grid(0, 512, 4096, 64), grid(4, 0, 4096, 64)):
        assert ROW.tile(asked, HOPPER) in ROW.tiles_of(asked)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, [1000, 1000, 1000]),
        ({"right": 0}, [1000, 872, 744]),
        ({"right": -900}, [100, 1, 1]),
        ({"right": 0, "left": 100}, [228, 228, 144]),
    ],
)
def test_the_model_counts_the_keys_of_each_tile(options, keys):
    asked = grid(1, 300, 1000, 64, **options)
    assert forward_model.keys_of_tiles(asked, 128).tolist() == keys


@pytest.mark.parametrize(
    ("dtype", "seqlen_k", "num_splits"),
    [
        ("float16", 1 << 18, 1),
        ("float16", 1 << 19, 2),
        ("float16", (1 << 18) + 1, 2),
        ("float16", 1 << 21, 8),
        ("bfloat16", 1 << 21, 1),
        ("bfloat16", (1 << 21) + 1, 2),
    ],
)
def test_keys_are_split_where_a_sum_would_not_be_exact_enough(
    dtype, seqlen_k, num_splits
):
    asked = dataclasses.replace(problem(dtype), seqlen_k=seqlen_k)
    assert ROW.unsupported_reason(asked, HOPPER) is None
    assert ROW.num_splits(asked, HOPPER) == num_splits
    # There are more tiles than a block counts; another kernel combines the splits.
    assert len(ROW.configs(asked, 1, HOPPER)) == (1 if num_splits == 1 else 2)
    # Whatever the columns of v.
    odd = dataclasses.replace(asked, head_dim_v=63)
    assert ROW.unsupported_reason(odd, HOPPER) is None
    assert ROW.num_splits(odd, HOPPER) == num_splits


def test_splits_that_fill_the_device_are_short_enough():
    decoding = dataclasses.replace(few_queries(), dtype="float16", seqlen_k=1 << 21)
    assert ROW.unsupported_reason(decoding, HOPPER) is None
    assert ROW.num_splits(decoding, HOPPER) == HOPPER.num_sms // 8
    narrow = dataclasses.replace(
        problem("float16", left=1023, right=0), seqlen_k=1 << 22
    )
    assert ROW.num_splits(narrow, HOPPER) == 1


# --- on a device ---------------------------------------------------------------------

SHAPES = {
    # (q, k): one query, a few, many; keys in parts or not
    "one query": ((2, 8, 1, 64), (2, 2, 3000, 64)),
    "one query, many heads": ((1, 64, 1, 128), (1, 1, 2000, 128)),
    "odd group": ((1, 6, 3, 64), (1, 2, 1500, 64)),
    "few queries": ((1, 8, 13, 128), (1, 2, 2500, 128)),
    "a tile": ((1, 4, 64, 64), (1, 4, 4000, 64)),
    "many queries": ((1, 2, 700, 96), (1, 1, 1300, 96)),
    "wide": ((1, 4, 5, 256), (1, 2, 1700, 256)),
    "all multiprocessors": ((4, 16, 500, 64), (4, 4, 600, 64)),
    "three warpgroups": ((1, 4, 600, 128), (1, 2, 900, 128)),
    "long": ((1, 2, 2200, 128), (1, 1, 2300, 128)),
}
KINDS = {
    "full": {},
    "causal": {"causal": True},
    "causal behind": {"causal": True, "query_offset": 400},
    "window": {"window": (300, 100)},
    "softcap": {"softcap": 5.0},
    "softcap, causal": {"softcap": 50.0, "causal": True},
    "key lengths": {"key_lengths": (1000, 37, 512, 0)},
    "sinks": {"sinks": 1.0},
    "bias": {"bias": "dense"},
    "softcap of no effect": {"softcap": 1e6},
    "bias of keys": {"bias": "keys"},
    "large bias of keys": {"bias": "large", "causal": True},
    "bias, causal": {"bias": "dense", "causal": True},
    "mask": {"mask": "dense"},
    "mask of keys": {"mask": "keys", "causal": True},
    "bias and mask of keys": {"bias": "keys", "mask": "keys"},
    "bias across": {"bias": "across"},
    "alibi": {"alibi_slopes": 0.2, "causal": True},
    "softcap and bias of keys": {"softcap": 20.0, "bias": "keys"},
    "many": {"softcap": 20.0, "bias": "dense", "mask": "keys", "window": (900, 30)},
}


def options_of(kind, rng, q_shape, k_shape, **more):
    """The options of a kind, and more, with arrays for these shapes."""
    options = {**KINDS.get(kind, {}), **more}
    batch, heads, seqlen_q, _ = q_shape
    shapes = {
        "dense": (heads, seqlen_q, k_shape[2]),
        "keys": (batch, 1, 1, k_shape[2]),
        "large": (batch, 1, 1, k_shape[2]),
        "across": (heads, 1, k_shape[2], seqlen_q),
    }
    if "bias" in options:
        form = options["bias"]
        bias = rng.normal(size=shapes[form]).astype(np.float32)
        bias *= 30 if form == "large" else 1
        bias[rng.random(bias.shape) < 0.05] = -np.inf
        options["bias"] = bias
    if "mask" in options:
        options["mask"] = rng.random(shapes[options["mask"]]) < 0.8
    if "key_lengths" in options:
        options["key_lengths"] = np.array(options["key_lengths"][:batch])
    if "sinks" in options:
        options["sinks"] = rng.normal(size=heads).astype(np.float32)
    if "alibi_slopes" in options:
        slopes = rng.random(heads) * options["alibi_slopes"]
        options["alibi_slopes"] = slopes.astype(np.float32)
    return options


def placed(cupy, options):
    """The options with their arrays on the device; a bias "across" is a transpose."""
    given = {}
    for name, x in options.items():
        given[name] = place(cupy, x) if isinstance(x, np.ndarray) else x
    return given


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["full", "causal", "window", "key lengths", "bias", "mask", "alibi"]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_more_keys_than_one_sum_is_exact_enough_for(cupy, rng, monkeypatch, dim, kind):
    monkeypatch.setitem(MOST_KEYS, "float16", 400)
    heads = runtime.device(0).num_sms // 2 + 1  # two splits each would not fit at once
    q_shape, k_shape = (1, heads, 70, dim), (1, 1, 1100, dim)
    options = options_of(kind, rng, q_shape, k_shape)
    q, k, v = (rng.normal(size=s).astype("f2") for s in (q_shape, k_shape, k_shape))
    given = {**placed(cupy, options), "return_lse": True}
    arrays = [place(cupy, x) for x in (q, k, v)]
    taken, split_kv = [], HopperKernel.split_kv

    def recorded(*arguments):
        taken.append(split_kv(*arguments))
        return taken[-1]

    monkeypatch.setattr(HopperKernel, "split_kv", recorded)
    out, lse = cupyflash.attention(*arrays, **given)
    assert [split.num_splits for split in taken] == [3]
    exact, exact_lse, size = oracle.attention(q, k, v, real=np.float64, **options)
    assert max_error(out, exact) <= BOUNDS["attention"]["float16"] * np.abs(exact).max()
    finite = assert_same_specials(lse, exact_lse)
    error = np.abs(wide(lse)[finite] - exact_lse[finite]).max(initial=0)
    largest = np.abs(exact_lse[finite]).max(initial=0)
    assert error <= 2.0**-23 * (2 * size + 16 + largest)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_against_the_oracle(cupy, rng, dtype, shape, kind):
    q_shape, k_shape = SHAPES[shape]
    options = options_of(kind, rng, q_shape, k_shape)
    q, k, v = (
        (rng.normal(size=s) * 2).astype(dtype_of(dtype))
        for s in (q_shape, k_shape, k_shape)
    )
    given = placed(cupy, options)
    if kind == "bias across":
        given["bias"] = given["bias"][:, 0].swapaxes(-1, -2)
        options["bias"] = options["bias"][:, 0].swapaxes(-1, -2)
    arrays = [place(cupy, x) for x in (q, k, v)]
    out, lse = cupyflash.attention(*arrays, **given, return_lse=True)
    exact, exact_lse, size = oracle.attention(q, k, v, real=np.float64, **options)
    assert max_error(out, exact) <= BOUNDS["attention"][dtype] * np.abs(exact).max()
    finite = assert_same_specials(lse, exact_lse)
    error = np.abs(wide(lse)[finite] - exact_lse[finite]).max(initial=0)
    largest = np.abs(exact_lse[finite]).max(initial=0)
    assert error <= 2.0**-23 * (2 * size + 16 + largest)
    for _ in range(3):
        again = cupyflash.attention(*arrays, **given, return_lse=True)
        np.testing.assert_array_equal(to_host(again[0]), to_host(out))
        np.testing.assert_array_equal(to_host(again[1]), to_host(lse))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("seqlens", "options"),
    [
        ((700, 700), {}),
        ((700, 700), {"causal": True}),
        ((200, 900), {}),  # parts of the keys; queries behind the last key
        ((900, 200), {}),
        ((300, 900), {"query_offset": 0}),
        ((300, 900), {"query_offset": 333}),
        ((300, 500), {"query_offset": -1000}),
        ((300, 500), {"query_offset": 10_000}),
        ((500, 600), {"key_lengths": (600, 450, 1, 0)}),
        ((500, 600), {"query_lengths": (200, 500, 0, 1), "query_offset": (0, 7, 9, 2)}),
    ],
)
def test_alibi_on_both_sides(cupy, rng, seqlens, options, head_dim):
    """The tile of keys that comes first is that of the diagonal, if there is one."""
    queries, keys = seqlens
    q, k, v = (
        rng.normal(size=(4, 6, n, head_dim)).astype(np.float16)
        for n in (queries, keys, keys)
    )
    slopes = np.float32([1, 0.1, 0.004, 0, -0.002, -0.3])
    options = {
        name: np.array(x) if isinstance(x, tuple) else x for name, x in options.items()
    }
    options["alibi_slopes"] = slopes
    given = placed(cupy, options)
    arrays = [place(cupy, x) for x in (q, k, v)]
    out, lse = cupyflash.attention(*arrays, **given, return_lse=True)
    exact, exact_lse, size = oracle.attention(q, k, v, real=np.float64, **options)
    finite = assert_same_specials(lse, exact_lse)
    error = np.abs(wide(lse)[finite] - exact_lse[finite]).max(initial=0)
    largest = np.abs(exact_lse[finite]).max(initial=0)
    assert error <= 2.0**-23 * (2 * size + 16 + largest)
    bound = BOUNDS["attention"]["float16"] + 2.0**-23 * largest  # of the scores
    assert max_error(out, exact) <= bound * np.abs(exact).max()


MASKS = {
    # shape of the memory, and the view of it that is the mask
    "of all": ((2, 6, 500, 700), lambda x: x),
    "of heads": ((6, 500, 700), lambda x: x),
    "of entries": ((2, 1, 500, 700), lambda x: x),
    "shared": ((500, 700), lambda x: x),
    "part": ((6, 510, 720), lambda x: x[:, 4:504, 7:707]),  # rows start anywhere
    "reversed": ((500, 700), lambda x: x[::-1, ::-1]),
    "steps": ((1000, 1400), lambda x: x[::2, ::2]),
    "transposed": ((2, 1, 700, 500), lambda x: x.swapaxes(-1, -2)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (200, 10)}, {"key_lengths": (650, 3)}]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_mask_bits_of_any_strides(cupy, rng, head_dim, options, name):
    shape, view = MASKS[name]
    memory = rng.random(shape) < 0.7
    mask, mask_there = view(memory), view(place(cupy, memory))
    q, k, v = (
        rng.normal(size=(2, 6, n, head_dim)).astype(np.float16) for n in (500, 700, 700)
    )
    options = {n: np.array(x) if n == "key_lengths" else x for n, x in options.items()}
    arrays = [place(cupy, x) for x in (q, k, v)]
    given = placed(cupy, options)
    out, lse = cupyflash.attention(*arrays, mask=mask_there, **given, return_lse=True)
    exact, exact_lse, size = oracle.attention(
        q, k, v, real=np.float64, mask=mask, **options
    )
    finite = assert_same_specials(lse, exact_lse)
    error = np.abs(wide(lse)[finite] - exact_lse[finite]).max(initial=0)
    assert error <= 2.0**-23 * (2 * size + 16 + np.abs(exact_lse[finite]).max())
    assert max_error(out, exact) <= BOUNDS["attention"]["float16"] * np.abs(exact).max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "kind", "more"),
    [
        (64, "bias", {}),
        (64, "bias", {"window": (200, 10)}),
        (64, "bias", {"alibi_slopes": 0.01, "softcap": 5.0}),
        (64, "bias of keys", {}),
        (64, "large bias of keys", {}),
        (64, "wide bias", {}),
        (64, "alibi", {"window": (200, 10)}),
        (64, "softcap", {}),
        (96, "bias of keys", {"softcap": 5.0}),
        (128, "bias", {"causal": True}),
        (128, "bias", {"key_lengths": (650, 3)}),
        (128, "bias of keys", {"causal": True}),
        (128, "softcap", {"window": (200, 10)}),
        ((192, 128), "bias", {}),
        ((192, 128), "alibi", {}),
        (256, "bias", {"causal": True}),
        (256, "bias of keys", {}),
    ],
)
@pytest.mark.parametrize("form", ["random", "whole tiles", "steps"])
def test_mask_bits_beside_other_options(cupy, rng, monkeypatch, dims, kind, more, form):
    head_dim, head_dim_v = dims if isinstance(dims, tuple) else (dims, dims)
    q, k, v = (
        rng.normal(size=(2, 4, n, dim)).astype(np.float16)
        for n, dim in ((300, head_dim), (704, head_dim), (704, head_dim_v))
    )
    wide_bias = kind == "wide bias"
    kind = "bias" if wide_bias else kind
    options = options_of(kind, rng, q.shape, k.shape, **more)
    if kind == "bias" and not wide_bias:
        options["bias"] = options["bias"].astype(np.float16)
    memory = rng.random((4, 600, 1408)) < 0.7
    if form == "whole tiles":  # some queries see all, some nothing, some a prefix
        memory[:] = np.arange(1408) < np.arange(600)[:, None] * 9 - 600
    view = (slice(None), slice(0, 600, 2), slice(0, 1408, 2))
    if form != "steps":
        view = (slice(None), slice(100, 400), slice(0, 704))
    given = placed(cupy, options)
    asked, has_bits = [], forward_plan.has_mask_bits

    def recorded(problem):
        asked.append(has_bits(problem))
        return asked[-1]

    monkeypatch.setattr(forward_plan, "has_mask_bits", recorded)
    monkeypatch.setattr(forward_gpu, "_plans", plan_cache.PlanCache())
    out, lse = cupyflash.attention(
        *(place(cupy, x) for x in (q, k, v)),
        mask=place(cupy, memory)[view],
        **given,
        return_lse=True,
    )
    assert set(asked) == {True}
    exact, exact_lse, size = oracle.attention(
        q, k, v, real=np.float64, mask=memory[view], **options
    )
    finite = assert_same_specials(lse, exact_lse)
    error = np.abs(wide(lse)[finite] - exact_lse[finite]).max(initial=0)
    assert error <= 2.0**-23 * (2 * size + 16 + np.abs(exact_lse[finite]).max())
    assert max_error(out, exact) <= BOUNDS["attention"]["float16"] * np.abs(exact).max()


# Memory of a bias over (2, 6, queries, keys), the view that is passed, and whether TMA
# can read it.
BIASES = {
    "own": ((2, 6, 500, 704), lambda x: x, True),
    "of heads": ((1, 6, 500, 704), lambda x: x, True),
    "of entries": ((2, 1, 500, 704), lambda x: x, True),
    "shared": ((500, 704), lambda x: x, True),
    "part": ((6, 510, 720), lambda x: x[:, 4:504, 8:712], True),
    "between": ((6, 510, 720), lambda x: x[:, 4:504, 2:706], False),
    "short rows": ((6, 500, 710), lambda x: x[:, :, :704], False),
    "reversed": ((500, 704), lambda x: x[::-1], False),
    "steps": ((500, 1408), lambda x: x[:, ::2], False),
    "transposed": ((2, 1, 704, 500), lambda x: x.swapaxes(-1, -2), False),
}
BIASED_OPTIONS = (
    {}, {"causal": True}, {"window": (200, 10)}, {"key_lengths": (650, 3)},
    {"softcap": 5.0}, {"alibi_slopes": 0.01, "mask": "dense"},
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("options", BIASED_OPTIONS)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "of_bias"),
    [
        (64, "float16", "float16"),
        (64, "bfloat16", "bfloat16"),
        (64, "float16", "float32"),
        (128, "bfloat16", "bfloat16"),
        (128, "bfloat16", "float16"),
    ],
)
@pytest.mark.parametrize("seqlen_q", [30, 500])
def test_a_bias_of_any_strides(
    cupy, rng, monkeypatch, head_dim, dtype, of_bias, options, name, seqlen_q
):
    shape, view, mapped = BIASES[name]
    memory = rng.normal(size=shape)
    memory[rng.random(shape) < 0.05] = -np.inf
    memory = memory.astype(dtype_of(of_bias))
    there = view(place(cupy, memory))[..., :seqlen_q, :]
    bias = view(memory)[..., :seqlen_q, :]
    q, k, v = (
        rng.normal(size=(2, 6, n, head_dim)).astype(dtype_of(dtype))
        for n in (seqlen_q, 704, 704)
    )
    options = options_of("", rng, q.shape, k.shape, **options)
    given = placed(cupy, options)
    arrays = [place(cupy, x) for x in (q, k, v)]
    kinds = []

    def recorded(row, problem):
        kinds.append(problem.terms)
        return has_bias_tiles(row, problem)

    has_bias_tiles = HopperKernel.has_bias_tiles
    monkeypatch.setattr(HopperKernel, "has_bias_tiles", recorded)
    out, lse = cupyflash.attention(*arrays, bias=there, **given, return_lse=True)
    assert {x == "tiles" for x in kinds} == {mapped}
    exact, exact_lse, size = oracle.attention(
        q, k, v, real=np.float64, bias=bias, **options
    )
    finite = assert_same_specials(lse, exact_lse)
    error = np.abs(wide(lse)[finite] - exact_lse[finite]).max(initial=0)
    assert error <= 2.0**-23 * (2 * size + 16 + np.abs(exact_lse[finite]).max())
    assert max_error(out, exact) <= BOUNDS["attention"][dtype] * np.abs(exact).max()


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["none", "mask", "mask and alibi"])
def test_tiles_of_a_bias_give_the_same_bits_each_time(cupy, rng, option):
    """Blocks load tiles of a bias into memory that others have been in."""
    q, k, v = (
        place(cupy, rng.normal(size=(2, 6, n, 64)).astype("f2"))
        for n in (500, 704, 704)
    )
    options = {"bias": place(cupy, rng.normal(size=(2, 6, 500, 704)).astype("f2"))}
    if option != "none":
        options["mask"] = place(cupy, rng.random((6, 500, 704)) < 0.8)
    if option == "mask and alibi":
        options["alibi_slopes"] = place(cupy, (rng.random(6) / 100).astype("f4"))
    first = cupyflash.attention(q, k, v, return_lse=True, **options)
    for _ in range(100):
        for x, y in zip(
            first, cupyflash.attention(q, k, v, return_lse=True, **options), strict=True
        ):
            assert bool((x == y).all())


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 4])
def test_a_plan_knows_where_a_bias_starts(cupy, rng, first):
    """TMA reads one that starts at a multiple of 16 bytes, and no other."""
    q, k, v = (
        place(cupy, rng.normal(size=(1, 2, n, 64)).astype("f2"))
        for n in (100, 200, 200)
    )
    memory = rng.normal(size=100 * 208 + 8).astype("f2")
    there = place(cupy, memory)
    for start in (first, 4 - first, first):
        bias = memory[start : start + 100 * 208].reshape(100, 208)[:, :200]
        of_call = there[start : start + 100 * 208].reshape(100, 208)[:, :200]
        out = cupyflash.attention(q, k, v, bias=of_call)
        exact, *_ = oracle.attention(
            *(to_host(x) for x in (q, k, v)), real=np.float64, bias=bias
        )
        bound = BOUNDS["attention"]["float16"] * np.abs(exact).max()
        assert max_error(out, exact) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 20.0}])
@pytest.mark.parametrize("scores", ["negative", "rising", "falling", "0", "-0"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_any_order_and_sign_of_scores(cupy, rng, head_dim, scores, options):
    """Where the reference of a row moves often, lies low, or where all is 0."""
    shape = (1, 2, 1300, head_dim)
    q, k, v = (rng.normal(size=shape) for _ in "qkv")
    sign = {"negative": -1, "rising": 1, "falling": 1}.get(scores, 0)
    if sign:
        q, k = np.abs(q), sign * np.abs(k)
    else:
        q *= 0
    # Keys are read from the last to the first.
    order = {"rising": (4, 0.1), "falling": (0.1, 4)}.get(scores, (2, 2))
    k *= np.linspace(*order, shape[2])[:, None]
    options = {"scale": -0.1 if scores == "-0" else 0.1, **options}
    q, k, v = (x.astype(dtype_of("bfloat16")) for x in (q, k, v))
    out = cupyflash.attention(*[place(cupy, x) for x in (q, k, v)], **options)
    exact, *_ = oracle.attention(q, k, v, real=np.float64, **options)
    assert (
        max_error(out, exact) <= BOUNDS["attention"]["bfloat16"] * np.abs(exact).max()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "kind",
    ["causal", "causal behind", "window", "key lengths", "mask", "mask of keys"],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_values_leave_no_bit(cupy, rng, shape, kind, bad):
    """Rows that do not see a NaN keep their bits; those that see it get it."""
    q_shape, k_shape = SHAPES[shape]
    seqlen_k = k_shape[2]
    q, k, v = (
        rng.normal(size=s).astype(np.float16) for s in (q_shape, k_shape, k_shape)
    )
    options = options_of(kind, rng, q_shape, k_shape)
    clean = [x.copy() for x in (q, k, v)]
    some = rng.choice(seqlen_k, size=max(2, seqlen_k // 100), replace=False)
    columns = rng.choice(v.shape[-1], size=len(some))
    v[:, :, some, columns] = bad
    given = placed(cupy, options)
    result, expected = (
        to_host(cupyflash.attention(*[place(cupy, x) for x in arrays], **given))
        for arrays in ((q, k, v), clean)
    )
    names = ("mask", "causal", "query_offset", "window", "query_lengths", "key_lengths")
    seen, _, _ = oracle.visible(
        q_shape[:1], q_shape[1], q_shape[2], seqlen_k,
        *(options.get(n, False if n == "causal" else None) for n in names),
    )  # fmt: skip
    touched = np.zeros(expected.shape, bool)
    for key, column in zip(some, columns, strict=True):
        touched[..., column] |= seen[..., key]
    np.testing.assert_array_equal(result[~touched], expected[~touched])
    assert not np.isfinite(result[touched]).any()
    if not np.isnan(bad):
        assert np.all(result[touched] == bad)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "softcap", "bias of keys", "mask"])
@pytest.mark.parametrize("shape", ["one query", "few queries", "all multiprocessors"])
def test_a_hundred_runs_agree(cupy, rng, shape, kind):
    q_shape, k_shape = SHAPES[shape]
    given = placed(cupy, options_of(kind, rng, q_shape, k_shape))
    arrays = [
        place(cupy, rng.normal(size=s).astype(np.float16))
        for s in (q_shape, k_shape, k_shape)
    ]
    out, lse = cupyflash.attention(*arrays, **given, return_lse=True)
    for _ in range(100):
        again = cupyflash.attention(*arrays, **given, return_lse=True)
        assert bool((again[0].view(np.uint16) == out.view(np.uint16)).all())
        assert bool((again[1].view(np.uint32) == lse.view(np.uint32)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (700, 0)}])
@pytest.mark.parametrize("num_heads", [2, 36])  # keys are split, or not
@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_queries_end_inside_a_tile(cupy, rng, head_dim, num_heads, options):
    """Groups of warps whose queries do not exist skip tiles that the first one sees.

    Where groups take turns, one that held back a tile of v until its turn, and one that
    had the turn and waited for the next tile in its place, waited for each other.
    """
    q, k, v = (
        rng.normal(size=(2, num_heads, n, head_dim)).astype(np.float16)
        for n in (192, 1040, 1040)
    )
    options = {
        "query_lengths": np.array([40, 48]),
        "key_lengths": np.array([1040, 1000]),
        **options,
    }
    arrays = [place(cupy, x) for x in (q, k, v)]
    out = cupyflash.attention(*arrays, **placed(cupy, options))
    exact, *_ = oracle.attention(q, k, v, real=np.float64, **options)
    assert max_error(out, exact) <= BOUNDS["attention"]["float16"] * np.abs(exact).max()


@pytest.mark.gpu
@pytest.mark.parametrize("hiding", [-np.inf, -1e30])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_keys_hidden_by_a_bias_may_have_large_scores(
    cupy, rng, dtype, head_dim, hiding
):
    """No row is measured by the score of a key that a bias takes away from it."""
    shape = (1, 2, 700, head_dim)
    q, k, v = (rng.normal(size=shape) for _ in "qkv")
    bias = rng.uniform(-6, 6, size=shape[2]).astype(np.float32)
    hidden = rng.random(shape[2]) < 0.3
    k[:, :, hidden] *= 40
    bias[hidden] = hiding
    q, k, v = (x.astype(dtype_of(dtype)) for x in (q, k, v))
    arrays = [place(cupy, x) for x in (q, k, v, bias)]
    out, lse = cupyflash.attention(*arrays[:3], bias=arrays[3], return_lse=True)
    exact, exact_lse, _ = oracle.attention(q, k, v, real=np.float64, bias=bias)
    assert max_error(out, exact) <= BOUNDS["attention"][dtype] * np.abs(exact).max()
    np.testing.assert_allclose(wide(lse), exact_lse, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["heads", "rows", "shifted", "swapped", "gaps"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 200])
def test_out_of_any_memory(cupy, rng, head_dim, causal, form):
    """The same bits wherever rows of out lie, and none between them."""
    shape = (2, 5, 300, head_dim)
    q, k, v = (place(cupy, rng.normal(size=shape).astype(np.float16)) for _ in "qkv")
    expected = cupyflash.attention(q, k, v, causal=causal)
    out = empty(cupy, shape, np.float16, form)
    outer = out if out.base is None else out.base
    before = outer.view(np.uint16).copy()
    out.view(np.uint16)[...] = 1
    marked = outer.view(np.uint16) != before
    cupyflash.attention(q, k, v, causal=causal, out=out)
    np.testing.assert_array_equal(to_host(out), to_host(expected))
    assert bool((outer.view(np.uint16)[~marked] == before[~marked]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (50, 0)}])
def test_a_batch_of_two_axes(cupy, rng, head_dim, options):
    """Axes that are not one in memory give the bits of those that are."""
    shape = (2, 4, 3, 300, head_dim)
    whole = [place(cupy, rng.normal(size=shape).astype(np.float16)) for _ in "qkv"]
    views = [x[:, 1:3] for x in whole]
    out = cupyflash.attention(*views, **options)
    expected = cupyflash.attention(*[x.copy() for x in views], **options)
    np.testing.assert_array_equal(to_host(out), to_host(expected))


@pytest.mark.gpu
def test_a_graph_keeps_the_memory_of_its_parts(cupy, rng):
    """Parts of the keys are written at each replay, and to no memory of others."""
    q_shape, k_shape = SHAPES["one query"]
    q, k, v = (
        place(cupy, rng.normal(size=s).astype(np.float16))
        for s in (q_shape, k_shape, k_shape)
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream:
        expected, _ = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        kept = [cupyflash.attention(q, k, v, causal=True) for _ in range(3)]
        out = cupy.empty_like(expected)
        stream.synchronize()
        del kept
        stream.begin_capture()
        cupyflash.attention(q, k, v, causal=True, out=out)
        graph = stream.end_capture()
        # Whatever the call gave back is taken and filled now.
        others = [cupy.full(n, 7, np.uint8) for n in 64 * (512, 4096, 32768)]
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(to_host(out), to_host(expected))
        assert all(bool((x == 7).all()) for x in others)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [500, -500])
def test_an_infinite_slope_hides_all_keys(cupy, rng, offset):
    q, k = (cupy.asarray(rng.normal(size=(1, 1, n, 64)).astype("f2")) for n in (70, 64))
    slopes = cupy.asarray([np.inf], "f4")
    options = {"alibi_slopes": slopes, "query_offset": offset, "return_lse": True}
    out, lse = cupyflash.attention(q, k, k, **options)
    assert not cupy.asnumpy(out).any()
    assert np.isneginf(cupy.asnumpy(lse)).all()
