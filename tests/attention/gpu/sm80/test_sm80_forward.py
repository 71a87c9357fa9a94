"""The mma row of the attention table: what it takes, its tiles, its split numbers."""

import dataclasses
import itertools

import numpy as np
import oracle
import pytest
from accuracy import (
    BOUNDS,
    TF32_ATTENTION,
    assert_same_specials,
    dtype_of,
    max_error,
    to_host,
    wide,
)
from placing import place

import cupyflash
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.sm80 import forward as sm80_forward
from cupyflash._attention.gpu.sm80.forward import DIMS, MMA
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel, plan_cache

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
KINDS = (
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float32", "float32"),
    ("float32", "tf32"),
)


def problem(dtype="float16", head_dim=64, precision="float32", **options):
    made = samples.made_up(dtype, head_dim)
    return dataclasses.replace(made, precision=precision, **options)


def device(arch):
    return _device.device_of_arch(arch)


# --- the row -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("head_dim", [1, 7, 64, 72, 96, 100, 128])
@pytest.mark.parametrize("options", [{}, {"bias": "float32"}, {"softcap": 3.0}])
def test_takes(arch, dtype, precision, head_dim, options):
    asked = problem(dtype, head_dim, precision, **options)
    assert MMA.unsupported_reason(asked, device(arch)) is None
    names = [
        row.name
        for row in ATTENTION_KERNELS
        if row.unsupported_reason(asked, device(arch)) is None
    ]
    assert names.index("mma") < names.index("tiled")
    on_hopper = dtype != "float32" and arch == "sm_90a"
    assert names[0] == ("hopper" if on_hopper else "mma")
    unfit = dataclasses.replace(asked, no_tensor_map="q starts anywhere")
    row, _ = kernel.select(ATTENTION_KERNELS, unfit, device(arch))
    assert row is MMA


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dims", [(192, 192), (256, 256), (192, 128), (40, 250)])
@pytest.mark.parametrize("options", [{}, {"mask": "bool"}])
def test_takes_large_head_dims_in_16_bits(arch, dtype, dims, options):
    asked = problem(dtype, dims[0], head_dim_v=dims[1], **options)
    assert MMA.unsupported_reason(asked, device(arch)) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("dims", [(192, 192), (256, 256), (250, 64), (40, 256)])
@pytest.mark.parametrize("options", [{}, {"mask": "bool", "softcap": 3.0}])
def test_takes_large_head_dims_in_float32(arch, dims, options):
    made = problem("float32", dims[0], head_dim_v=dims[1], **options)
    asked = dataclasses.replace(made, num_heads=16, num_kv_heads=16)
    row, _ = kernel.select(ATTENTION_KERNELS, asked, device(arch))
    assert row is MMA
    assert MMA.is_prepared(asked)


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem("float64"), "sm_90a", "not float64"),
        (problem(), "sm_75", "needs sm_80"),
        (problem(head_dim=257), "sm_90a", "head_dim 257 is above 256"),
        (problem(head_dim_v=300), "sm_90a", "head_dim_v 300 is above 256"),
        (problem("float32", 192), "sm_86", "too little shared memory"),
        # Its parts would take 4 GiB.
        (
            problem("float32", 256, seqlen_q=512, seqlen_k=1 << 15),
            "sm_90a",
            "too little shared memory",
        ),
        # Of fewer heads keys are in parts.
        (
            problem("float32", seqlen_q=63, num_heads=192, score="s * 2"),
            "sm_90a",
            "from 64 queries",
        ),
        (
            problem("float32", seqlen_q=31, score="s * 2"),
            "sm_90a",
            "from 64 queries and keys on",
        ),
        (
            problem("float32", seqlen_k=10, score="s * 2"),
            "sm_90a",
            "from 64 queries and keys on",
        ),
        (problem(seqlen_k=(1 << 18) + 1), "sm_80", "up to 262144 keys"),
        (problem("float32", seqlen_k=1 << 29), "sm_90a", "32 bits"),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    assert reason in MMA.unsupported_reason(asked, device(arch))
    row, refused = kernel.select(ATTENTION_KERNELS, asked, device(arch))
    assert row.name not in ("mma", "hopper")
    assert "mma" in dict(refused)


# --- tiles ---------------------------------------------------------------------------


def problems():
    """One problem for each ladder and head dimension."""
    for dtype, precision in KINDS:
        for head_dim in DIMS:
            for seqlen_q in (4096, 64):
                for options in ({}, {"bias": "float32"}):
                    yield problem(
                        dtype, head_dim, precision, seqlen_q=seqlen_q, **options
                    )


@pytest.mark.parametrize("arch", ARCHS)
def test_tiles_fit_the_shared_memory(arch):
    """Each tile alone, and as many as the registers are shared out for."""
    for asked in problems():
        tiles = MMA.fitting(asked, device(arch))
        for tile in tiles:
            needed = MMA.config(tile, asked, 1).variant.smem
            limit = device(arch).smem_optin
            assert needed == MMA.smem(tile, asked)
            assert tile.min_blocks * (needed + 1024) <= limit + 1024
            # 64 Ki registers, of which a thread can have 255.
            assert tile.min_blocks * tile.num_threads * 128 <= 1 << 16
        assert len({tile.block_n for tile in tiles}) <= 1


def test_shared_memory_of_a_tile():
    tile = sm80_forward.MmaTile(128, 64, 128, stages=2)
    of_q, of_kv = 128 * 64 * 2, 64 * (64 + 32) * 2
    few = 512 + 2 * 2 * 128
    assert sm80_forward.smem_bytes(tile, (64, 32), 1, False) == of_q + 2 * of_kv + few
    staged = sm80_forward.smem_bytes(tile, (64, 32), 2, True)
    assert staged == 2 * (of_q + 2 * of_kv) + 2 * of_kv + few


def test_results_leave_apart_while_the_next_tiles_come():
    one, two = (sm80_forward.MmaTile(128, 64, 128, stages=n) for n in (1, 2))
    for tile, apart in ((one, 128 * 64 * 2), (two, 0)):
        alone = sm80_forward.smem_bytes(tile, (64, 64), 1, False)
        assert sm80_forward.smem_bytes(tile, (64, 64), 1, False, True) == (
            alone + apart
        )


def test_results_leave_by_places_that_are_there():
    alone, persistent = (
        sm80_forward.smem_bytes(
            sm80_forward.MmaTile(128, 64, 128), (128, 128), 1, False, persistent
        )
        for persistent in (False, True)
    )
    assert alone == persistent  # by that of q
    tile = MMA.tile(problem(head_dim=64, head_dim_v=128, right=0), device("sm_80"))
    assert tile.persistent
    # q is smaller than the results.
    assert not MMA.is_persistent(tile, problem(head_dim=64, head_dim_v=128, right=0))
    assert MMA.is_persistent(tile, problem(head_dim=128, head_dim_v=64, right=0))


def test_rows_that_are_whole_chunks_are_known_to_be():
    def knows(**options):
        (config,) = MMA.configs(problem(**options), 1, device("sm_80"))
        return "ALIGNED" in dict(config.variant.defines)

    assert knows()
    assert not knows(no_tensor_map="q starts 8 bytes past a multiple of 16")
    assert not knows(head_dim=60)
    assert not knows(seqlen_k=1)
    assert not MMA.is_aligned(problem("float32"))


def rounds(num_sms=132, **options):
    asked = problem(**options)
    tile = MMA.tile(asked, device("sm_90a"))
    return MMA.rounds(tile, asked, num_sms), MMA.configs(asked, 1, device("sm_90a"))[0]


@pytest.mark.parametrize("seqlen_q", [1, 128, 129, 1000, 4096])
@pytest.mark.parametrize("options", [{}, {"right": 0}, {"left": 300, "right": 0}])
def test_blocks_of_a_head_have_all_its_tiles(seqlen_q, options):
    count, config = rounds(seqlen_q=seqlen_q, **options)
    blocks, heads, more = config.grid
    tiles = -(-seqlen_q // 128)
    # As query_of_turn() in sm80/forward_state.cuh.
    taken = [
        turn * blocks + block if turn % 2 == 0 else (turn + 1) * blocks - 1 - block
        for block in range(blocks)
        for turn in range(count + 1)
    ]
    assert sorted(x for x in taken if x < tiles) == list(range(tiles))
    assert heads * more == 64


def test_blocks_take_several_tiles_where_that_leaves_nobody_idle():
    few, _ = rounds(num_heads=1, num_kv_heads=1, seqlen_q=1024, right=0)
    assert few == 1
    many, config = rounds(seqlen_q=1024, right=0)
    assert many > 1
    assert ("PERSISTENT", "1") in config.variant.defines
    for options in ({}, {"bias": "float32", "right": 0}):
        one, config = rounds(seqlen_q=1024, **options)
        assert one == 1
        assert "PERSISTENT" not in dict(config.variant.defines)
    # Warps that share rows leave a multiprocessor no second block.
    alike, config = rounds(head_dim=256, seqlen_q=1024)
    assert alike > 1
    assert ("PERSISTENT", "1") in config.variant.defines


def test_many_heads_take_a_third_axis():
    _, config = rounds(num_heads=100_000, num_kv_heads=100_000, seqlen_q=64)
    _, heads, more = config.grid
    assert heads <= 65535
    assert more <= 65535
    assert heads * more >= 100_000


def test_few_tiles_take_the_smaller_one():
    large = MMA.tile(problem("float16", 128), device("sm_90a"))
    few = problem("float16", 128, num_heads=1, num_kv_heads=1, seqlen_q=100)
    small = MMA.tile(few, device("sm_90a"))
    assert small.block_m < large.block_m
    assert small.block_n == large.block_n


def test_keys_are_split_beforehand_where_out_is_as_large():
    for dims, parts in ((64, 2), (128, 2)):
        asked = problem("float32", dims)
        assert MMA.parts(asked) == parts
        assert MMA.is_prepared(asked)
        config, prepare = MMA.configs(asked, 1, device("sm_90a"))
        assert ("PREPARED", "1") in config.variant.defines
        assert prepare.variant.entry == "attention_mma_prepare"
        out = 64 * 4096 * dims * 4
        assert MMA.split_operand_bytes(asked, device("sm_90a")) <= 4.1 * out
    # Wide heads take up to 2 GiB for it, of fewer than 64 queries 256 MiB.
    for seqlen_q, most in ((256, 16384), (64, 16384), (63, 2048)):
        for seqlen_k, prepared in ((most, True), (most + 32, False)):
            wide = problem("float32", 256, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
            assert MMA.is_prepared(wide) == prepared
            if not prepared:
                continue
            own = 64 * seqlen_k * 2 * 256 * 4
            size = MMA.split_operand_bytes(wide, device("sm_90a"))
            assert size <= 1.01 * own
    few = problem("float32", seqlen_q=512)
    assert not MMA.is_prepared(few)
    (config,) = MMA.configs(few, 1, device("sm_90a"))
    assert "PREPARED" not in dict(config.variant.defines)
    assert MMA.parts(problem("float32", precision="tf32")) == 1
    assert not MMA.is_prepared(problem("float16"))


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "columns", "splits"),
    [
        # The fastest of some numbers on an H200: docs/design/lab/0028.
        (1, 512, 512, 64, (4, 128)),
        (1, 4096, 512, 64, (4, 128)),
        (1, 512, 512, 128, (8, 64)),
        (1, 4096, 512, 128, (4, 128)),
        (4, 1024, 1024, 128, (4, 256)),
        (1, 512, 512, 256, (8, 64)),
        (1, 4096, 512, 256, (2, 256)),
        (1, 512, 4096, 256, (16, 256)),
        (1, 4096, 4096, 256, (4, 1024)),
        (32, 512, 512, 128, (1, 512)),
        # Fewer keys, or queries.
        (1, 512, 511, 128, (1, 511)),
        (1, 64, 512, 128, (1, 512)),
    ],
)
def test_keys_of_few_heads_are_split(heads, queries, keys, columns, splits):
    shape = {"seqlen_q": queries, "seqlen_k": keys}
    shape |= {"batch": (heads,), "num_heads": 1, "num_kv_heads": 1}
    h200 = dataclasses.replace(device("sm_90a"), num_sms=132)
    asked = problem("float32", columns, **shape)
    assert MMA.split_kv(asked, h200) == (*splits, False)
    band = dataclasses.replace(asked, left=100, right=100)
    assert MMA.split_kv(band, h200) == (1, keys, False)
    for dtype, precision in (("float16", "float32"), ("float32", "tf32")):
        other = problem(dtype, columns, precision, **shape)
        assert MMA.split_kv(other, h200).keys_per_split >= 256


# --- on a device ---------------------------------------------------------------------


@pytest.fixture
def forced(cupy, monkeypatch):
    """The row in front of the table, for problems of any size."""
    from cupyflash._attention.gpu import forward as attention_gpu

    row = dataclasses.replace(MMA, least=1)
    rest = [x for x in ATTENTION_KERNELS if x.name not in ("hopper", "mma")]
    monkeypatch.setattr(attention_gpu, "ATTENTION_KERNELS", (row, *rest))
    monkeypatch.setattr(attention_gpu, "_plans", plan_cache.PlanCache())

    def force(tile):
        one = {kind: {np.inf: (tile,)} for kind in MMA.tiles}
        only = dataclasses.replace(row, tiles=one)
        monkeypatch.setattr(attention_gpu, "ATTENTION_KERNELS", (only, *rest))

    return force


SHAPES = {
    "one key": ((1, 2, 5, 64), (1, 1, 1, 64)),
    "one tile": ((1, 2, 64, 32), (1, 2, 64, 32)),
    "some": ((2, 4, 200, 64), (2, 2, 333, 64)),
    "odd": ((1, 6, 77, 33), (1, 3, 130, 33)),
    "wide": ((1, 2, 150, 128), (1, 1, 260, 128)),
    "wider": ((1, 2, 70, 190), (1, 1, 100, 190)),
    "widest": ((1, 2, 150, 256), (1, 1, 260, 256)),
    "few queries": ((2, 2, 70, 96), (2, 1, 900, 96)),
    "more queries": ((1, 2, 700, 40), (1, 2, 100, 40)),
}
OPTIONS = {
    "full": lambda rng, q, k: {},
    "causal": lambda rng, q, k: {"causal": True},
    "causal behind": lambda rng, q, k: {"causal": True, "query_offset": 31},
    "window": lambda rng, q, k: {"window": (40, 9)},
    "softcap": lambda rng, q, k: {"softcap": 5.0},
    "scale": lambda rng, q, k: {"scale": -0.3},
    "sinks": lambda rng, q, k: {"sinks": rng.normal(size=q[1]).astype(np.float32)},
    "key lengths": lambda rng, q, k: {
        "key_lengths": rng.integers(0, k[2] + 1, q[0]),
        "query_lengths": rng.integers(0, q[2] + 1, q[0]),
    },
    "bias": lambda rng, q, k: {
        "bias": np.where(
            rng.random((q[1], q[2], k[2])) < 0.2, -np.inf, rng.normal()
        ).astype(np.float32)
    },
    "mask": lambda rng, q, k: {"mask": rng.random((q[2], k[2])) < 0.7},
    "alibi": lambda rng, q, k: {
        "alibi_slopes": rng.random(q[1]).astype(np.float32) * 0.2,
        "causal": True,
    },
}


def compare(cupy, arrays, options, precision="float32"):
    """Out and lse against the oracle, and the bits of a second call."""
    q, k, v = arrays
    given = {
        n: place(cupy, x) if isinstance(x, np.ndarray) else x
        for n, x in options.items()
    }
    placed = [place(cupy, x) for x in arrays]
    results = [
        cupyflash.attention(*placed, **given, precision=precision, return_lse=True)
        for _ in range(2)
    ]
    (out, lse), again = results
    exact, exact_lse, size = oracle.attention(q, k, v, real=np.float64, **options)
    dtype = q.dtype.name
    relative, unit = BOUNDS["attention"][dtype], 2.0**-23
    if precision == "tf32":
        relative, unit = TF32_ATTENTION, 2.0**-10
    finite = assert_same_specials(out, exact)
    largest = np.abs(exact[finite]).max(initial=0)
    values = np.abs(wide(v)[np.isfinite(wide(v))]).max(initial=0)
    error = max_error(wide(out)[finite], exact[finite])
    assert error <= relative * largest + 2 * unit * size * values
    finite = assert_same_specials(lse, exact_lse)
    error = np.abs(wide(lse)[finite] - exact_lse[finite]).max(initial=0)
    largest = np.abs(exact_lse[finite]).max(initial=0)
    assert error <= unit * (2 * size + 16 + largest)
    for x, y in zip((out, lse), again, strict=True):
        np.testing.assert_array_equal(to_host(x), to_host(y))


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_options(cupy, rng, forced, dtype, precision, shape, option):
    q, k = SHAPES[shape]
    arrays = [(rng.normal(size=s) * 2).astype(dtype_of(dtype)) for s in (q, k, k)]
    compare(cupy, arrays, OPTIONS[option](rng, q, k), precision)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "option", ["full", "causal", "sinks", "key lengths", "bias", "alibi"]
)
@pytest.mark.parametrize("dims", [(64, 40), (128, 128), (190, 256)])
def test_splits_of_few_tiles_of_keys(cupy, rng, forced, dims, option):
    """Some of them empty, or beyond the keys that a query sees."""
    q, k, v = (1, 1, 260, dims[0]), (1, 1, 530, dims[0]), (1, 1, 530, dims[1])
    arrays = [rng.normal(size=s).astype("f4") for s in (q, k, v)]
    compare(cupy, arrays, OPTIONS[option](rng, q, k))


def all_tiles():
    """(dtype, precision, head_dim, with terms, seqlen_q, tile), each once."""
    found = {}
    for asked in problems():
        if asked.dtype == "bfloat16":
            continue
        terms = asked.bias is not None
        for arch in ("sm_90a", "sm_80", "sm_86"):
            for tile in MMA.fitting(asked, device(arch)):
                key = MMA._kind(asked), terms, asked.head_dim, tile
                found[key] = asked
    for (kind, terms, head_dim, tile), asked in found.items():
        name = f"{kind}-{head_dim}-{'terms' if terms else 'plain'}-{tile.block_m}"
        name += f"x{tile.block_n}-{tile.num_threads}-{tile.stages}-{tile.min_blocks}"
        yield pytest.param(asked, tile, id=name.replace(" ", "_"))


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "tile"), list(all_tiles()))
def test_each_tile(cupy, rng, forced, asked, tile):
    forced(tile)
    seqlens = (300, 200) if asked.seqlen_q > 64 else (70, 600)
    q, k = ((2, 2, n, asked.head_dim) for n in seqlens)
    arrays = [rng.normal(size=s).astype(dtype_of(asked.dtype)) for s in (q, k, k)]
    options = {"causal": True, "query_offset": 5}
    if asked.bias is not None:
        options["bias"] = rng.normal(size=(1, seqlens[1])).astype(np.float32)
    compare(cupy, arrays, options, asked.precision)


SHARED = [
    tile
    for tiles in MMA.tiles["float16", False].values()
    for tile in tiles
    if tile.warps_per_row > 1
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "option", ["full", "causal", "causal behind", "window", "sinks", "key lengths"]
)
@pytest.mark.parametrize(
    "dims", [(256, 256), (192, 192), (250, 161), (70, 256), (64, 256)]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", SHARED, ids=lambda tile: f"{tile.block_m}")
def test_rows_that_warps_share(cupy, rng, forced, tile, dtype, dims, option):
    forced(tile)
    q, k, v = (2, 2, 150, dims[0]), (2, 1, 333, dims[0]), (2, 1, 333, dims[1])
    arrays = [rng.normal(size=s).astype(dtype_of(dtype)) for s in (q, k, v)]
    compare(cupy, arrays, OPTIONS[option](rng, q, k))


@pytest.mark.gpu
def test_shared_tiles_give_the_same_bits(cupy, rng, forced):
    arrays = [
        place(cupy, rng.normal(size=(1, 2, 300, 256)).astype("f2")) for _ in "qkv"
    ]
    found = []
    for tile in SHARED:
        forced(tile)
        results = cupyflash.attention(*arrays, causal=True, return_lse=True)
        found.append([to_host(x) for x in results])
    for results in found[1:]:
        for x, y in zip(results, found[0], strict=True):
            np.testing.assert_array_equal(x, y)


def staying(dims, arch):
    """The tile of an architecture that takes several tiles of queries a block."""
    asked = problem("float16", dims[0], head_dim_v=dims[1], right=0, seqlen_k=512)
    tile = MMA.tile(asked, device(arch))
    assert MMA.is_persistent(tile, asked)
    return tile


@pytest.mark.gpu
@pytest.mark.parametrize(
    "option", ["full", "causal", "causal behind", "window", "sinks", "key lengths"]
)
@pytest.mark.parametrize("keys", [450, 512])
@pytest.mark.parametrize(
    ("arch", "dims"),
    [
        ("sm_80", (64, 64)),
        ("sm_80", (40, 64)),
        ("sm_86", (64, 64)),
        ("sm_86", (40, 64)),
        *itertools.product(
            ("sm_80", "sm_90a"), ((128, 128), (128, 72), (256, 256), (256, 192))
        ),
    ],
)
def test_blocks_that_stay(cupy, rng, forced, monkeypatch, arch, dims, keys, option):
    """However many tiles of queries a block takes, the bits are the same."""
    from cupyflash._attention.gpu import forward as attention_gpu

    tile = staying(dims, arch)
    q, k, v = (2, 4, 900, dims[0]), (2, 2, keys, dims[0]), (2, 2, keys, dims[1])
    arrays = [rng.normal(size=s).astype("f2") for s in (q, k, v)]
    options = OPTIONS[option](rng, q, k)
    found = []
    for count in (0, 1, 2, 3, 8):
        monkeypatch.setattr(
            sm80_forward.MmaKernel,
            "rounds",
            lambda self, tile, asked, num_sms, count=count: (
                count if self.is_persistent(tile, asked) else 1
            ),
        )
        forced(dataclasses.replace(tile, persistent=count > 0))
        attention_gpu._plans._plans.clear()
        compare(cupy, arrays, options)
        found.append(attend(cupy, arrays, "float32", **options))
    for results in found[1:]:
        for x, y in zip(results, found[0], strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("step", [1, 13, 40])
def test_references_that_move(cupy, rng, forced, dtype, head_dim, step):
    # Scores grow along the keys, in every `step`-th of them.
    q, k, v = (rng.normal(size=(1, 1, 600, head_dim)) for _ in range(3))
    k[..., ::step, :] *= np.arange(0, 600, step)[:, None] / 100
    arrays = [x.astype(dtype_of(dtype)) for x in (q, k, v)]
    for tile in SHARED if head_dim == 256 else (None,):
        if tile is not None:
            forced(tile)
        compare(cupy, arrays, {})


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("option", ["causal", "window", "mask", "bias"])
@pytest.mark.parametrize(
    ("dtype", "precision", "head_dim"),
    [*((*kind, 64) for kind in KINDS), ("float32", "float32", 256)],
)
def test_hidden_values_leave_no_bit(
    cupy, rng, forced, dtype, precision, head_dim, option, bad
):
    """Rows that do not see a NaN keep their bits; those that see it get it."""
    q_shape, k_shape = (1, 2, 200, head_dim), (1, 2, 260, head_dim)
    q, k, v = (
        rng.normal(size=s).astype(dtype_of(dtype)) for s in (q_shape, k_shape, k_shape)
    )
    options = OPTIONS[option](rng, q_shape, k_shape)
    clean = [x.copy() for x in (q, k, v)]
    v[:, :, 150, 7] = bad
    given = {
        n: place(cupy, x) if isinstance(x, np.ndarray) else x
        for n, x in options.items()
    }
    result, expected = (
        wide(
            cupyflash.attention(
                *[place(cupy, x) for x in arrays], **given, precision=precision
            )
        )
        for arrays in ((q, k, v), clean)
    )
    bias = options.pop("bias", None)
    names = ("mask", "causal", "query_offset", "window", "query_lengths", "key_lengths")
    seen, _, _ = oracle.visible(
        (1,), 2, 200, 260,
        *(options.get(n, False if n == "causal" else None) for n in names),
    )  # fmt: skip
    seen = np.broadcast_to(seen, (1, 2, 200, 260))[..., 150]
    if bias is not None:
        seen = seen & ~np.isneginf(bias[..., 150])
    np.testing.assert_array_equal(result[~seen], expected[~seen])
    others = np.arange(head_dim) != 7
    np.testing.assert_array_equal(result[..., others], expected[..., others])
    assert not np.isfinite(result[seen][:, 7]).any()


def attend(cupy, arrays, precision, **options):
    """(out, lse) on the host."""
    options = {
        n: place(cupy, x) if isinstance(x, np.ndarray) else x
        for n, x in options.items()
    }
    placed = [place(cupy, x) for x in arrays]
    results = cupyflash.attention(
        *placed, **options, precision=precision, return_lse=True
    )
    return [wide(x) for x in results]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_huge_rows_leave_others_alone(
    cupy, rng, forced, dtype, precision, head_dim, causal
):
    """A row of huge scores is its value of the largest; the rest keep their bits."""
    q, k, v = (
        rng.normal(size=(1, 2, n, head_dim)).astype(dtype_of(dtype))
        for n in (200, 260, 260)
    )
    clean = attend(cupy, (q, k, v), precision, causal=causal)
    huge = np.zeros(200, bool)
    huge[[0, 3, 70, 71, 150, 199]] = True
    by = 1e4 if dtype == "float16" else 1e25
    q[:, :, huge] = (wide(q[:, :, huge]) * by).astype(q.dtype)
    if dtype == "float16":
        k = (wide(k) * 1e4).astype(k.dtype)
        clean = attend(
            cupy, (np.where(huge[:, None], 0, q).astype(q.dtype), k, v), precision,
            causal=causal,
        )  # fmt: skip
    result = attend(cupy, (q, k, v), precision, causal=causal)
    # Of float32, a tile of queries is scaled and split as a whole.
    tolerance = {"tf32": 1e-2, "float32": 1e-5 if dtype == "float32" else 0}[precision]
    for x, y in zip(result, clean, strict=True):
        np.testing.assert_allclose(x[:, :, ~huge], y[:, :, ~huge], 0, tolerance)
    scores = wide(q)[:, :, huge] @ wide(k).swapaxes(-1, -2) * head_dim**-0.5
    if causal:
        scores[..., np.arange(260) > np.flatnonzero(huge)[:, None] + 60] = -np.inf
    second, first = np.sort(scores, axis=-1)[..., -2:].transpose(3, 0, 1, 2)
    clear = (first - second) > 0.01 * np.abs(first)
    assert clear.any()
    best = np.take_along_axis(wide(v), scores.argmax(-1)[..., None], axis=2)
    out, lse = (x[:, :, huge] for x in result)
    unit = 2.0**-9 if precision == "tf32" else 2.0**-20
    np.testing.assert_allclose(lse[clear], first[clear], rtol=unit)
    np.testing.assert_array_equal(out[clear], best[clear])


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [-1e30, -1e6, 0.0, 1e30])
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_sinks_of_rows_that_see_nothing(cupy, rng, forced, dtype, precision, sink):
    """Their lse is the sink, however small; large ones leave nothing to the keys."""
    q, k, v = (
        rng.normal(size=(1, 2, n, 64)).astype(dtype_of(dtype)) for n in (90, 70, 70)
    )
    sinks = np.full(2, sink, np.float32)
    out, lse = attend(
        cupy, (q, k, v), precision, sinks=sinks, causal=True, query_offset=-20
    )
    assert (out[:, :, :20] == 0).all()
    np.testing.assert_array_equal(lse[:, :, :20], np.float32(sink))
    if sink > 1e20:
        assert (out == 0).all()
        np.testing.assert_array_equal(lse, np.float32(sink))
    if sink < -1e5:
        without = attend(cupy, (q, k, v), precision, causal=True, query_offset=-20)
        # Query 20 sees one key, whose value float32 copies where there are no sinks.
        for x, y in zip((out, lse), without, strict=True):
            np.testing.assert_array_equal(x[:, :, 21:], y[:, :, 21:])


@pytest.mark.gpu
@pytest.mark.parametrize("by", [1e20, 1e30, 3e38, -1e20, -1e30, np.finfo("f4").min])
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_huge_biases(cupy, rng, forced, dtype, precision, by):
    """On all keys of a row it is the mean of the values; on some of them, none."""
    q, k, v = (
        rng.normal(size=(1, 2, n, 64)).astype(dtype_of(dtype)) for n in (200, 260, 260)
    )
    bias = rng.normal(size=(200, 260)).astype(np.float32)
    bias[10:30] = -np.inf  # rows that see nothing
    bias[60::7, :70] = -np.inf  # nothing in the first tile
    clean = attend(cupy, (q, k, v), precision, bias=bias)
    bias[60::7, :70] = -np.abs(by)
    bias[3:190:8] = by
    result = attend(cupy, (q, k, v), precision, bias=bias)
    rows = np.arange(200)
    huge = np.isin(rows, rows[3:190:8])
    for x, y in zip(result, clean, strict=True):
        np.testing.assert_array_equal(x[:, :, ~huge], y[:, :, ~huge])
    out, lse = (x[:, :, huge] for x in result)
    mean = wide(v).mean(axis=2, keepdims=True)
    relative = TF32_ATTENTION if precision == "tf32" else BOUNDS["attention"][dtype]
    assert np.abs(out - mean).max() <= relative * np.abs(wide(v)).max()
    np.testing.assert_allclose(lse, np.float32(by), rtol=2.0**-22)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(150, 150), (70, 2000)])
@pytest.mark.parametrize("kind", ["large q", "far values", "columns", "tiny", "huge"])
@pytest.mark.parametrize(
    ("precision", "head_dim"), [("float32", 64), ("float32", 256), ("tf32", 64)]
)
def test_numbers_that_float16_cannot_hold(
    cupy, rng, forced, seqlens, kind, precision, head_dim
):
    """Tiles whose parts would lack digits are computed one by one."""
    q, k, v = (
        rng.normal(size=(1, 2, n, head_dim)).astype(np.float32)
        for n in (*seqlens, seqlens[1])
    )
    if kind == "large q":  # a column that meets zeros alone
        q[..., 0], k[..., 0] = 1e9, 0
    elif kind == "far values":
        v *= np.exp(rng.normal(size=(1, 2, seqlens[1], 1)) * 10).astype(np.float32)
    elif kind == "columns":
        v *= np.exp(rng.normal(size=head_dim) * 8).astype(np.float32)
    elif kind == "tiny":
        v *= np.float32(1e-25)
    else:
        q, k, v = q * np.float32(1e-15), k * np.float32(1e15), v * np.float32(1e25)
    compare(cupy, (q, k, v), {"causal": True}, precision)


@pytest.mark.gpu
def test_memory_in_a_graph(cupy, rng, forced):
    """Split keys are written at each replay, and to no memory of others."""
    q, k, v = (
        place(cupy, rng.normal(size=(1, 2, 200, 64)).astype(np.float32))
        for _ in range(3)
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream:
        expected = cupyflash.attention(q, k, v)
        out = cupy.empty_like(expected)
        stream.synchronize()
        stream.begin_capture()
        cupyflash.attention(q, k, v, out=out)
        graph = stream.end_capture()
        others = [cupy.full(n, 7, np.uint8) for n in 64 * (512, 4096, 32768)]
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(to_host(out), to_host(expected))
        assert all(bool((x == 7).all()) for x in others)
