"""The row of short entries, and of few keys, in both tables."""

import dataclasses

import numpy as np
import pytest
import small_entries
import vjp_laws
from accuracy import to_host
from placing import FORMS, place
from small_entries import DTYPES, SINGLE, device, gradient
from test_attention_vjp import OPTIONS, agree, inputs

import cupyflash
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.sm80.short_backward import MMA_SHORT_VJP
from cupyflash._attention.gpu.sm80.short_forward import MMA_SHORT
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import kernel

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
# (queries, keys, head_dim, head_dim_v) round tiles of 16.
SIZES = (
    (40, 40, 64, 64),
    (16, 16, 32, 32),
    (17, 33, 64, 64),
    (1, 9, 1, 1),
    (9, 4, 8, 8),
    (1, 100, 64, 64),
    (64, 64, 128, 128),
    (33, 15, 33, 17),
    (64, 20, 16, 96),
)


def problem(dtype="float16", head_dim=64, queries=40, keys=40, **options):
    made = samples.made_up(dtype, head_dim)
    short = {"num_heads": 512, "num_kv_heads": 512, "seqlen_q": queries}
    return dataclasses.replace(made, **{**short, "seqlen_k": keys, **options})


# --- the row -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys", "dim"), [(1, 9, 1), (40, 40, 64)])
def test_takes(arch, dtype, queries, keys, dim):
    asked = problem(dtype, dim, queries, keys)
    row, refused = kernel.select(ATTENTION_KERNELS, asked, device(arch))
    assert row is MMA_SHORT
    assert [name for name, _ in refused] == ["gemv", "tiny"]
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, gradient(asked), device(arch))
    assert row is MMA_SHORT_VJP


REFUSED = [
    (problem("float64"), "sm_90a", "not float64"),
    (problem(), "sm_75", "needs sm_80"),
    (problem(queries=0), "sm_90a", "queries, not 0"),
    (problem(keys=129), "sm_90a", "keys, not 129"),
    (problem(keys=0), "sm_90a", "keys, not 0"),
    (problem(head_dim=257), "sm_90a", "head_dim 257 is above"),
    (problem(head_dim_v=260), "sm_90a", "head_dim_v 260 is above"),
    (
        problem(num_heads=131, num_kv_heads=131),
        "sm_90a",
        "132 blocks, and has it for 131",
    ),
    (problem(keys_of_part=256), "sm_90a", "all keys of a head"),
    (problem(score="s * 2"), "sm_90a", "no score or mask function"),
]


@pytest.mark.parametrize(("asked", "arch", "reason"), REFUSED)
def test_leaves_to_the_next_row(asked, arch, reason):
    for row, x in ((MMA_SHORT, asked), (MMA_SHORT_VJP, gradient(asked))):
        assert reason in row.unsupported_reason(x, device(arch))


@pytest.mark.parametrize(
    ("dtype", "queries", "keys"),
    [
        ("float16", 64, 48),
        ("float16", 48, 64),
        ("bfloat16", 16, 112),
        ("float32", 64, 64),
        ("float32", 16, 32),
    ],
)
def test_takes_as_many_keys_as_pay(dtype, queries, keys):
    asked = problem(dtype, 64, queries, keys)
    assert MMA_SHORT.unsupported_reason(asked, device()) is None
    more = dataclasses.replace(asked, seqlen_k=keys + 1)
    assert f"1 to {keys} keys" in MMA_SHORT.unsupported_reason(more, device())


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (gradient(problem(head_dim=129)), "sm_90a", "1 to 32 keys, not 40"),
        (gradient(problem(head_dim=257)), "sm_90a", "head_dim 257 is above 256"),
        (gradient(problem("float32", 129, keys=33)), "sm_90a", "1 to 32 keys, not 33"),
        (gradient(problem("float32", 192, 65, 17)), "sm_100", "registers for 17 keys"),
        (gradient(problem("float32", 256, 32, 32)), "sm_86", "shared memory"),
        (gradient(problem(), need_dbias=True), "sm_90a", "does not compute dbias"),
        (gradient(problem(), need_dsinks=True), "sm_90a", "does not compute dsinks"),
        (gradient(problem(keys=113)), "sm_90a", "1 to 112 keys, not 113"),
        (gradient(problem(keys=80, softcap=3.0)), "sm_90a", "registers"),
        (gradient(problem("float32", 96, softcap=3.0)), "sm_90a", "registers"),
        (gradient(problem("float32", 128, 64, 64)), "sm_86", "shared memory"),
        (
            AttentionVjpProblem(problem(batch=(3,)), (512, 40, 64), (), ()),
            "sm_90a",
            "q is shared by entries of the batch",
        ),
    ],
)
def test_gradients_are_left_to_the_next_row(asked, arch, reason):
    assert reason in MMA_SHORT_VJP.unsupported_reason(asked, device(arch))


@pytest.mark.parametrize(("queries", "blocks"), [(64, 1), (65, 2), (256, 4)])
def test_blocks_have_parts_of_the_queries(queries, blocks):
    """A group of 4 heads: as many tiles of 16 queries as a block takes, or fewer."""
    asked = problem("float16", 32, queries, 16, num_heads=2048)
    (config,) = MMA_SHORT.configs(asked, 1, device())
    assert config.num_blocks == 512 * blocks
    (gradients,) = MMA_SHORT_VJP.configs(asked, 1, device(), False)
    assert gradients.num_blocks == 512 * MMA_SHORT_VJP.num_splits(asked, device())
    assert dict(gradients.variant.defines)["BLOCK_M"] == "64"


@pytest.mark.parametrize(("entries", "tiles"), [(1, 4), (32, 4), (65, 4), (66, 16)])
def test_parts_are_small_where_blocks_would_be_too_few(entries, tiles):
    """A block for each of 132 multiprocessors, or one tile of 16 for each warp."""
    asked = problem("float32", 64, 512, 32, num_heads=entries, num_kv_heads=entries)
    row, _ = kernel.select(ATTENTION_KERNELS, asked, device())
    assert row is MMA_SHORT
    (config,) = MMA_SHORT.configs(asked, 1, device())
    assert config.num_blocks == entries * 32 // tiles
    defines = dict(config.variant.defines)
    assert defines["TILES_OF_BLOCK"] == str(tiles)
    assert ("LOADS_AHEAD" in defines) == (tiles > 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [129, 192, 256])
@pytest.mark.parametrize(("queries", "keys"), [(1000, 1), (1000, 32), (40, 20)])
def test_registers_hold_dk_of_wide_heads(dtype, dim, queries, keys):
    """In shared memory they would leave room for few blocks."""
    asked = problem(dtype, dim, queries, keys)
    assert MMA_SHORT_VJP.unsupported_reason(gradient(asked), device()) is None
    row = 4 if MMA_SHORT_VJP.sums_tiles(asked) else 1
    assert MMA_SHORT_VJP.warps(asked) == max(4, row * -(-keys // 16))
    assert MMA_SHORT_VJP.block_m(asked) <= (32 if dtype == "float32" else 64)
    assert MMA_SHORT_VJP.head_bytes(asked, 1) <= device().smem_optin
    several = queries > MMA_SHORT_VJP.block_m(asked)
    assert MMA_SHORT_VJP.sums_tiles(asked) == several
    assert MMA_SHORT_VJP._keeps_in_registers(asked) == several


@pytest.mark.parametrize(
    ("dtype", "arch", "heads", "queries", "group", "taken"),
    [
        ("float16", "sm_90a", 32, 512, 1, False),
        ("bfloat16", "sm_90a", 1, 512, 1, False),
        ("float16", "sm_90a", 32, 513, 1, True),
        ("float16", "sm_90a", 200, 512, 1, True),
        ("float16", "sm_90a", 32, 512, 2, True),
        ("float16", "sm_80", 32, 512, 1, True),
        ("float32", "sm_90a", 32, 512, 1, True),
    ],
)
def test_few_wide_heads_of_few_queries_are_left_to_hopper(
    dtype, arch, heads, queries, group, taken
):
    few = {"num_heads": heads * group, "num_kv_heads": heads}
    asked = gradient(problem(dtype, 256, queries, 16, **few))
    reason = MMA_SHORT_VJP.unsupported_reason(asked, device(arch))
    assert reason == (
        None if taken else f"asks for 513 queries of {heads} heads, not 512"
    )
    if not taken:
        row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device(arch))
        assert row.name == "hopper_wide"


@pytest.mark.parametrize(
    ("dtype", "dims", "queries", "keys", "warps"),
    [
        ("float32", (256, 256), 1000, 32, 4),
        ("float32", (256, 256), 1000, 16, 2),
        ("float32", (256, 192), 16, 16, 4),
        ("float32", (256, 96), 16, 16, 2),  # no third of 256 columns is whole steps
        ("float32", (192, 96), 16, 16, 3),
        ("float32", (256, 33), 16, 16, 4),  # of 64 columns, as compiled
        ("float32", (256, 17), 16, 16, 2),
        ("float16", (256, 256), 1000, 32, 2),
        ("float16", (256, 256), 1000, 16, 1),
        ("float32", (128, 128), 1000, 32, 1),
    ],
)
def test_warps_that_share_queries_of_wide_heads(dtype, dims, queries, keys, warps):
    asked = problem(dtype, dims[0], queries, keys, head_dim_v=dims[1])
    assert MMA_SHORT_VJP._sharing(asked) == warps


@pytest.mark.parametrize(
    ("dtype", "head_dim", "keys", "stages"),
    [
        ("float16", 64, 32, 2),
        ("float32", 64, 32, 1),
        ("float32", 64, 64, 1),
        ("float32", 128, 32, 1),
    ],
)
def test_gradients_hold_the_next_tile_unless_blocks_are_fewer(
    dtype, head_dim, keys, stages
):
    asked = problem(dtype, head_dim, 512, keys)
    assert MMA_SHORT_VJP.stages(asked, device()) == stages
    assert MMA_SHORT_VJP.head_bytes(asked, stages) <= device().smem_optin
    assert MMA_SHORT_VJP.stages(problem(dtype, head_dim), device()) == 1


@pytest.mark.parametrize(
    ("dtype", "queries", "dim", "options", "keys"),
    [
        ("float32", 512, 64, {}, 64),
        ("float32", 512, 256, {}, 32),
        ("float32", 64, 256, {}, 32),
        ("bfloat16", 512, 32, {}, 16),
        ("bfloat16", 512, 128, {"bias": "bfloat16", "terms": "any"}, 7),
        ("float16", 32, 256, {}, 16),
    ],
)
def test_takes_as_few_keys_as_pay(dtype, queries, dim, options, keys):
    asked = problem(dtype, dim, queries, keys, **options)
    assert MMA_SHORT.unsupported_reason(asked, device()) is None
    more = dataclasses.replace(asked, seqlen_k=keys + 1)
    assert f"1 to {keys} keys" in MMA_SHORT.unsupported_reason(more, device())


def test_no_number_of_keys_pays():
    for queries, dim in ((65, 64), (33, 256)):
        reason = MMA_SHORT.unsupported_reason(
            problem("float16", dim, queries, 16), device()
        )
        assert reason == f"is no faster for {queries} queries of {dim} columns"


def test_dk_of_long_sums_is_left_to_the_next_row():
    """Blocks have whole heads where there are so many."""
    heads = {"num_heads": 4096, "num_kv_heads": 4096}
    asked = gradient(problem("float16", 64, 1 << 16, 17, **heads))
    reason = MMA_SHORT_VJP.unsupported_reason(asked, device())
    assert "up to 32768 queries of a block, not 65536" in reason
    group = problem("float16", 64, 1 << 14, 17, num_heads=1 << 14, num_kv_heads=4096)
    reason = MMA_SHORT_VJP.unsupported_reason(gradient(group), device())
    assert "up to 32768 queries of a block, not 65536" in reason


def test_sums_of_blocks_that_share_queries_are_as_short():
    asked = problem("float16", 64, 1 << 18, 17, num_heads=32, num_kv_heads=32)
    assert MMA_SHORT_VJP.unsupported_reason(gradient(asked), device()) is None
    assert MMA_SHORT_VJP.num_splits(asked, device()) >= 8


@pytest.mark.parametrize(
    ("entries", "queries", "group", "splits"),
    [
        (32, 4096, 1, 11),  # 352 blocks run at once, of 396
        (132, 4096, 1, 3),
        (1, 512, 1, 4),  # two tiles for each block
        (1, 448, 1, 1),  # seven tiles are a short loop
        (200, 512, 1, 1),
        (100, 20, 16, 4),  # the tiles of heads of a group are one loop
        (1024, 4096, 1, 1),  # blocks enough
    ],
)
def test_blocks_of_gradients_share_many_queries(entries, queries, group, splits):
    asked = problem("float16", 64, queries, 32, num_heads=entries * group)
    asked = dataclasses.replace(asked, num_kv_heads=entries)
    assert MMA_SHORT_VJP.num_splits(asked, device()) == splits
    (config,) = MMA_SHORT_VJP.configs(asked, 1, device(), False)
    assert config.num_blocks == entries * splits
    assert ("LOOP_SPLITS" in dict(config.variant.defines)) == (splits > 1)


@pytest.mark.parametrize(
    ("dtype", "queries", "keys"),
    [("float16", 4096, 16), ("float16", 16384, 32), ("float32", 4096, 64)],
)
def test_as_few_keys_of_few_heads_as_pay(dtype, queries, keys):
    few = {"num_heads": 16, "num_kv_heads": 16}
    asked = problem(dtype, 64, queries, keys, **few)
    assert MMA_SHORT_VJP.unsupported_reason(gradient(asked), device()) is None
    more = dataclasses.replace(asked, seqlen_k=keys + 1)
    reason = MMA_SHORT_VJP.unsupported_reason(gradient(more), device())
    assert f"to {keys} keys" in reason
    short = dataclasses.replace(asked, seqlen_q=448)
    reason = MMA_SHORT_VJP.unsupported_reason(gradient(short), device())
    assert reason == "needs work for 132 blocks, and has it for 16"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys", "dim", "dim_v"), SIZES)
def test_blocks_hold_all_heads(dtype, queries, keys, dim, dim_v):
    """A block for each head of k, whole tiles, no more than the limit."""
    asked = problem(dtype, dim, queries, keys, head_dim_v=dim_v, num_heads=2048)
    configs = [*MMA_SHORT.configs(asked, 1, device())]
    if MMA_SHORT_VJP.unsupported_reason(gradient(asked), device()) is None:
        configs.append(MMA_SHORT_VJP.config(asked, 1, device()))
    for config in configs:
        defines = {n: x for n, x in config.variant.defines if x.isdigit()}
        sizes = {n: int(x) for n, x in defines.items()}
        assert sizes["NUM_THREADS"] == 32 * sizes["WARPS"]
        assert config.num_blocks == 512
        tile = 8 if dtype == "float32" else 16
        assert sizes["BLOCK_N"] % tile == 0
        assert keys <= sizes["BLOCK_N"] < keys + tile
        assert sizes["HEAD_DIM"] >= dim
        assert sizes["HEAD_DIM_V"] >= dim_v
        assert config.variant.smem <= device().smem_optin
        if "BLOCK_M" in sizes:
            assert max(sizes["BLOCK_M"], sizes["BLOCK_N"]) <= 16 * sizes["WARPS"]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_go_where_their_arrays_have_them(layout):
    pytest.importorskip("cupy")
    from cupyflash._attention.gpu.sm80.short_backward import SHORT_GRADS
    from cupyflash._attention.gpu.sm80.short_backward_plan import short_vjp_steps

    (config, _), *again = small_entries.check_strides_of_gradients(
        MMA_SHORT_VJP, short_vjp_steps, SHORT_GRADS, layout, (7, 20), (4, 2),
        (40, 30, 64, 48),
    )  # fmt: skip
    assert [c.variant.entry for c, _ in again] == [
        "attention_vjp_queries",
        "attention_vjp_keys",
    ]
    assert dict(config.variant.defines)["GROUPED"] == "1"


# Many queries with few keys: the last block has 4 rows, and the last tile of gradients
# one.
FEW_KEYS = (
    *((260, 1, 32, 32), (129, 16, 24, 17), (193, 31, 64, 64), (100, 17, 128, 33)),
    *((70, 3, 256, 256), (90, 30, 192, 200)),
)
# Of these the gradients alone are of this row.
OTHER_FORWARD = (
    *((dtype, size) for dtype in ("float16", "bfloat16") for size in FEW_KEYS[2:]),
    ("float32", (1, 100, 64, 64)),
    ("float16", (64, 64, 128, 128)),
    ("bfloat16", (64, 64, 128, 128)),
)


# --- numbers -------------------------------------------------------------------------


@pytest.fixture
def no_gemv(monkeypatch):
    """Leave few queries to this row, too."""
    small_entries.change_tables(
        monkeypatch, lambda rows: tuple(row for row in rows if row.name != "gemv")
    )


def check_both(cupy, rng, dtype, size, heads=(2, 2), **options):
    makes_forward = (dtype, size) not in OTHER_FORWARD
    small_entries.check_both(
        "mma_short", cupy, rng, dtype, size, heads, (num_sms(cupy) // heads[1] + 1,),
        makes_forward, **options,
    )  # fmt: skip


def num_sms(cupy):
    """Multiprocessors of the device: heads that the row asks for."""
    from cupyflash._cuda import runtime

    return runtime.device(0).num_sms


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_size(cupy, rng, dtype, size):
    check_both(cupy, rng, dtype, size)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (16, 1)])
@pytest.mark.parametrize("size", [(40, 40, 64, 64), (1, 30, 33, 64)])
def test_query_heads_of_a_group(cupy, rng, dtype, heads, size):
    check_both(cupy, rng, dtype, size, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", FEW_KEYS)
def test_few_keys(cupy, rng, dtype, size):
    check_both(cupy, rng, dtype, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_keys_of_few_entries(cupy, rng, dtype):
    """Blocks of four tiles, one for each warp; the last has one."""
    size = 260, 3, 32, 32
    q, k, v, _ = inputs(rng, dtype, (3, 2, 260, 32), (3, 2, 3, 32), 32)
    told = cupyflash.explain("attention", *(place(cupy, x) for x in (q, k, v)))
    assert (told.kernel == "mma_short") == (dtype == "float32" or num_sms(cupy) <= 30)
    agree(cupy, *inputs(rng, dtype, q.shape, k.shape, size[-1]), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_keys_of_a_group(cupy, rng, dtype):
    check_both(cupy, rng, dtype, (70, 15, 32, 32), heads=(4, 2))


def check_shared(cupy, rng, dtype, size, heads=(2, 2), **options):
    """Gradients where several blocks have a part of the queries of a head of k."""
    queries, keys, *dims = size
    vjp_laws.check(
        "mma_short", cupy, rng, dtype, dims=dims, heads=heads,
        batch=(-(-num_sms(cupy) // 6), 1), seqlens=(queries, keys), **options,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2)])
@pytest.mark.parametrize("size", [(1031, 1, 64, 64), (777, 15, 32, 17)])
def test_blocks_that_share_queries(cupy, rng, dtype, heads, size):
    check_shared(cupy, rng, dtype, size, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(777, 47, 64, 64), (520, 64, 33, 128)])
def test_blocks_that_share_queries_of_more_keys(cupy, rng, size):
    check_shared(cupy, rng, "float32", size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SINGLE)
def test_options_of_blocks_that_share_queries(cupy, rng, dtype, name):
    check_shared(cupy, rng, dtype, (900, 13, 32, 32), **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_strides_of_blocks_that_share_queries(cupy, rng, dtype, form):
    batch = -(-num_sms(cupy) // 6)
    shapes = (batch, 2, 900, 24), (batch, 2, 15, 24)
    forms = dict.fromkeys((*"qkv", "dout", "out", "lse"), form)
    agree(cupy, *inputs(rng, dtype, *shapes), forms=forms, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_keys_of_blocks_that_share_queries(cupy, rng, dtype):
    batch = -(-num_sms(cupy) // 6)
    small_entries.check_parts_of_the_keys(
        cupy, rng, dtype, (batch, 2, 900, 64), (batch, 2, 16, 64), cut=7
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [30, 70])
@pytest.mark.parametrize("cut", [1, 7])
def test_parts_of_keys_of_wide_heads(cupy, rng, dtype, queries, cut):
    batch = num_sms(cupy) // 2 + 1
    small_entries.check_parts_of_the_keys(
        cupy, rng, dtype, (batch, 2, queries, 200), (batch, 2, 16, 200), cut
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [24, 100])
def test_rows_of_which_some_have_an_lse_of_other_keys(cupy, rng, dtype, queries):
    """Only these read out; the others see no key of the other part."""
    shape = num_sms(cupy), 2, queries, 40
    mask = np.ones((queries, 16), bool)
    mask[::3, 7:] = mask[5::7, :7] = False
    small_entries.check_parts_of_the_keys(
        cupy, rng, dtype, shape, (*shape[:2], 16, 40), cut=7, mask=mask
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_no_query_of_these_blocks_sees(cupy, rng, dtype):
    """NaN of a hidden key reaches no gradient, whatever block has the queries."""
    batch = -(-num_sms(cupy) // 6)
    q, k, v, dout = inputs(rng, dtype, (batch, 2, 900, 32), (batch, 2, 9, 32))
    mask = np.ones((900, 9), bool)
    mask[:, 4] = False
    k[0, 1, 4], v[0, 0, 4] = np.nan, np.inf
    agree(cupy, q, k, v, dout, mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_share_queries_give_the_same_bits(cupy, rng, dtype):
    batch = -(-num_sms(cupy) // 6)
    shapes = (batch, 2, 900, 64), (batch, 2, 16, 64)
    small_entries.check_entries_alone(cupy, rng, dtype, *shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(30, 16, 256, 192), (20, 3, 160, 256)])
def test_wide_heads(cupy, rng, dtype, size):
    check_both(cupy, rng, dtype, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(530, 1, 256, 256), (517, 15, 160, 130)])
def test_blocks_that_share_queries_of_wide_heads(cupy, rng, dtype, size):
    check_shared(cupy, rng, dtype, size)
    check_shared(cupy, rng, dtype, size, heads=(2, 1), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_heads_give_the_same_bits(cupy, rng, dtype):
    batch = num_sms(cupy) // 2 + 1
    shapes = (batch, 2, 70, 192), (batch, 2, 16, 192)
    small_entries.check_entries_alone(cupy, rng, dtype, *shapes)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SINGLE)
def test_options(cupy, rng, dtype, name):
    check_both(cupy, rng, dtype, (21, 37, 64, 64), **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SINGLE)
def test_options_of_few_keys(cupy, rng, dtype, name):
    """Positions are those of the whole call in each part of the queries."""
    check_both(cupy, rng, dtype, (150, 13, 32, 32), **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_lse_and_what_flows_into_it(cupy, rng, dtype):
    shape = (num_sms(cupy), 2, 24, 64)
    small_entries.check_parts_of_the_keys(cupy, rng, dtype, shape, shape, cut=11)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_strides(cupy, rng, dtype, form):
    shape = (num_sms(cupy), 2, 18, 24)
    forms = dict.fromkeys((*"qkv", "dout", "out", "lse"), form)
    agree(cupy, *inputs(rng, dtype, shape, shape), forms=forms, causal=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(7, 50), (50, 103), (103, 30), (9, 1), (126, 2)])
@pytest.mark.parametrize("form", ["plain", "shifted"])
def test_rows_of_any_width(cupy, rng, dtype, dims, form):
    """Copied in words, or one by one where these are of 2 bytes and odd."""
    dim, dim_v = dims
    shape = (num_sms(cupy), 2, 19, dim)
    forms = dict.fromkeys((*"qkv", "dout"), form)
    agree(cupy, *inputs(rng, dtype, shape, shape, dim_v), forms=forms)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_do_not_know_of_each_other(cupy, rng, dtype):
    shape = (num_sms(cupy) + 5, 2, 40, 64)
    small_entries.check_entries_alone(cupy, rng, dtype, shape, shape)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**12])
def test_gradients_of_any_size_in_float16(cupy, rng, size):
    """dS keeps its digits where dO is small, and has room where it is large."""
    shape = (num_sms(cupy), 1, 32, 32)
    q, k, v, dout = (x.astype(np.float64) for x in inputs(rng, "float16", shape, shape))
    if size > 1:  # dS is beyond float16, dq and dk are within
        q, k, v = q / 2**8, k / 2**4, v * 2**6
    agree(cupy, *(x.astype(np.float16) for x in (q, k, v, dout * size)))


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gemv")
def test_values_that_are_infinite_in_float32(cupy, rng):
    """Scores of parts whose products are not numbers, though the scores are."""
    shape = (num_sms(cupy), 1, 20, 16)
    q, k, v, _ = inputs(rng, "float32", shape, shape)
    q[0, 0, 3] = 0
    q[0, 0, 3, 2], k[0, 0, :, 2] = -np.inf, np.abs(k[0, 0, :, 2]) + 1
    k[0, 0, 5, 2] = 3.4e38  # rounds to infinity in 11 bits
    q[0, 0, 4:] = 0
    q[0, 0, 4:, 2] = 2e-38
    out, lse = (
        to_host(x)
        for x in cupyflash.attention(
            *(place(cupy, x) for x in (q, k, v)), return_lse=True
        )
    )
    s = (q[0, 0, 4:].astype(np.float64) @ k[0, 0].T.astype(np.float64)) / 4
    weights = np.exp(s - s.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    # The low part of 2e-38 is below the normal numbers: 11 bits of it are left.
    np.testing.assert_allclose(out[0, 0, 4:], weights @ v[0, 0], rtol=0, atol=2.0**-11)
    # All scores of row 3 are -inf.
    assert not out[0, 0, 3].any()
    assert np.isneginf(lse[0, 0, 3])
