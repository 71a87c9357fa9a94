"""The row of the gradient table for float32 on tensor cores: tiles, and its numbers."""

import dataclasses
import itertools
import math

import fuzz_vjp
import mask_views
import numpy as np
import pytest
import test_sm80_backward
import vjp_laws
from accuracy import assert_as_accurate, max_error, to_host, wide
from placing import FORMS, place
from test_attention_vjp import BIASES, OPTIONS, agree, gradients, inputs, problem_of
from test_sm80_backward import ARCHS, device

import cupyflash
from cupyflash._attention.gpu import backward_coverage
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.sm80.backward_fp32 import (
    DIMS,
    MMA_SPLIT_VJP,
    granules,
    split_tile_bytes,
)
from cupyflash._cuda import kernel, plan_cache
from cupyflash._reference import backward as reference_vjp

PARTS = ("_queries", "_keys")


def problem(dtype="float32", head_dim=64, **options):
    return test_sm80_backward.problem(dtype, head_dim, **options)


# --- the row -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("head_dim", [4, 7, 8, 16, 31, 32, 33, 64, 72, 128])
@pytest.mark.parametrize("options", [{}, {"bias": "float32"}, {"softcap": 3.0}])
def test_takes(arch, precision, head_dim, options):
    asked = problem(head_dim=head_dim, precision=precision, **options)
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device(arch))
    assert row.name == "mma_split"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("head_dim", [129, 192, 256])
@pytest.mark.parametrize("options", [{}, {"bias": "float32"}, {"softcap": 3.0}])
def test_takes_wide_heads_where_two_granules_fit(arch, precision, head_dim, options):
    """Four operands of 32 rows: more shared memory than sm_86 and others have."""
    asked = problem(head_dim=head_dim, precision=precision, **options)
    reason = MMA_SPLIT_VJP.unsupported_reason(asked, device(arch))
    if precision == "float32" and arch in ("sm_86", "sm_89", "sm_120"):
        assert "more shared memory" in reason
    else:
        assert reason is None
        row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device(arch))
        assert row.name == "mma_split"


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({}, False),
        ({"query_lengths": "int32", "key_lengths": "int32", "right": 0}, False),
        ({"mask": "bool"}, True),
        ({"softcap": 3.0}, True),
        ({"seqlen_q": 1 << 15}, False),
        ({"seqlen_q": 1 << 16}, True),
    ],
)
def test_where_dk_and_dv_of_wide_heads_are_apart(options, apart):
    """Registers hold both, but not with options of scores or second sums of each."""
    card = device("sm_90a")
    for dim in (192, 256):
        forward = problem(head_dim=dim, **options).forward
        tile = MMA_SPLIT_VJP.tile("_keys", forward, card)
        assert tile.apart == (apart and dim == 256)
        assert (tile.rows, tile.num_threads) == (64, 256)


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem("float64"), "sm_90a", "takes float32, not float64"),
        (problem("float16"), "sm_90a", "takes float32, not float16"),
        (problem(), "sm_75", "needs sm_80"),
        (problem(head_dim=257), "sm_90a", "head_dim 257 is above 256"),
        (problem(head_dim_v=300), "sm_90a", "head_dim_v 300 is above 256"),
        (problem(head_dim=129), "sm_89", "more shared memory"),
        (problem(seqlen_q=63, seqlen_k=127), "sm_90a", "from 64 queries and keys on"),
        (problem(seqlen_q=127, seqlen_k=63), "sm_90a", "or 128 of either"),
        (problem(seqlen_k=0), "sm_90a", "no keys"),
        (problem(head_dim=3), "sm_90a", "much more than out"),
        (problem(head_dim=1), "sm_90a", "much more than out"),
        (problem(head_dim=3, seqlen_q=64), "sm_90a", "much more than out"),
        # Entries of the batch share k and v, whose parts do not: dk has one entry.
        (
            dataclasses.replace(
                problem(seqlen_q=64, seqlen_k=1 << 14, batch=(64,)),
                k_shape=(64, 1 << 14, 64),
                v_shape=(64, 1 << 14, 64),
            ),
            "sm_90a",
            "much more than out",
        ),
        (problem(batch=(1 << 26,)), "sm_90a", "32 bits"),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    assert reason in MMA_SPLIT_VJP.unsupported_reason(asked, device(arch))
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device(arch))
    assert row.name != "mma_split"


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("seqlen_q", [64, 300])
def test_parts_of_narrow_rows_stay_small(precision, seqlen_q):
    """As documented: how many times dk and dv those of many keys are."""
    taken = set()
    for dim in range(1, 257):
        asked = problem(
            head_dim=dim, precision=precision, seqlen_q=seqlen_q, seqlen_k=1 << 14
        )
        if MMA_SPLIT_VJP.unsupported_reason(asked, device("sm_90a")) is not None:
            continue
        taken.add(dim)
        grads = 4 * (math.prod(asked.k_shape) + math.prod(asked.v_shape))
        rows = 2 * math.prod(asked.k_shape[:-1])
        columns = MMA_SPLIT_VJP.dim(asked.forward)
        parts = rows * columns * 2 * MMA_SPLIT_VJP.parts(asked.forward)
        assert parts <= (2 if dim >= 32 else 64 / dim) * grads
        assert parts <= 16 * grads
    # In one part, rows of two columns.
    assert taken == set(range(4 if precision == "float32" else 2, 257))


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_compile_list_has_both_precisions(precision):
    parts = MMA_SPLIT_VJP.parts(problem(precision=precision).forward)
    found = {
        (variant.entry, defines["HEAD_DIM"])
        for row, variant in backward_coverage.compile_list(device("sm_90a"), False)
        if row == "mma_split"
        and (defines := dict(variant.defines)).get("PARTS") == str(parts)
    }
    assert found == {
        (f"attention_vjp_mma_split{part}", str(dim))
        for part in (*PARTS, "_prepare", "_finish")
        for dim in DIMS
    }


@pytest.mark.parametrize("seqlens", [(1, 128), (8, 4096), (4096, 1), (512, 1 << 15)])
def test_takes_few_of_one_and_many_of_the_other(seqlens):
    """What these give up on leaves one loop over all rows to each block."""
    sizes = {"seqlen_q": seqlens[0], "seqlen_k": seqlens[1]}
    asked = problem(num_heads=16, num_kv_heads=16, **sizes)
    assert MMA_SPLIT_VJP.unsupported_reason(asked, device("sm_90a")) is None


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("head_dim", DIMS)
def test_blocks_share_loops_only_where_multiprocessors_are_idle(part, head_dim):
    card = device("sm_90a")

    def splits(loop, blocks):
        other = "seqlen_k" if part == "_queries" else "seqlen_q"
        asked = problem(head_dim=head_dim, **{other: loop}).forward
        return MMA_SPLIT_VJP.num_splits(part, asked, card, blocks)

    forward = problem(head_dim=head_dim).forward
    resident = card.num_sms * MMA_SPLIT_VJP.tile(part, forward, card).min_blocks
    for loop, most in ((480, 1), (512, 4), (4096, 32), (1 << 20, resident)):
        assert splits(loop, 1) == most
    half = card.num_sms // 2
    assert splits(1 << 20, half) == resident // half
    assert splits(1 << 20, half + 1) == 1
    assert splits(1 << 20, 10 * resident) == 1


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_every_tile_is_for_some_device(part, terms, dim):
    options = {"softcap": 1.0} if terms else {}
    chosen = {
        MMA_SPLIT_VJP.tile(
            part,
            problem(head_dim=dim, precision=precision, **options).forward,
            device(arch),
        )
        for arch in ARCHS
        for precision in ("float32", "tf32")
    } - {None}
    assert chosen == set(MMA_SPLIT_VJP.tiles[part, terms][dim])
    for tile in chosen:
        # Whole granules; a warp has 16 or 32 rows of one, with another of wide heads.
        assert tile.rows % 32 == 0
        assert 128 % tile.rows == 0
        sharing = 2 if dim > 128 else 1
        assert tile.rows // (tile.num_threads // 32 // sharing) in (16, 32)


@pytest.mark.parametrize("dim", DIMS)
def test_few_queries_have_small_tiles(dim):
    """A granule of queries has a block of its own; more have larger tiles."""
    chosen = set()
    for arch, queries in itertools.product(ARCHS, (1, 16, 32)):
        forward = problem(head_dim=dim, seqlen_q=queries).forward
        if dim > 128 and arch in ("sm_86", "sm_89", "sm_120"):
            continue  # no tile fits
        chosen.add(MMA_SPLIT_VJP.tile("_queries", forward, device(arch)))
        of_keys = MMA_SPLIT_VJP.tile("_keys", forward, device(arch))
        assert of_keys in MMA_SPLIT_VJP.tiles["_keys", False][dim]
    assert chosen == set(MMA_SPLIT_VJP.few_queries[dim])
    for tile in chosen:
        assert (tile.rows, tile.num_threads) == (32, 128 if dim > 128 else 64)
    more = problem(head_dim=dim, seqlen_q=33).forward
    tile = MMA_SPLIT_VJP.tile("_queries", more, device("sm_90a"))
    assert tile in MMA_SPLIT_VJP.tiles["_queries", False][dim]


def test_sizes_of_split_tiles():
    assert [granules(n, 128) for n in (1, 128, 129)] == [4, 4, 8]
    # Tiles of wide heads have 64 rows.
    assert [granules(n, 129) for n in (1, 64, 65, 129)] == [2, 2, 4, 6]
    asked = problem(head_dim=65, seqlen_q=100, seqlen_k=200).forward
    count, size = MMA_SPLIT_VJP.split_operands(asked)
    assert count == 64 * (2 * 4 + 2 * 8)
    assert size == count * split_tile_bytes(128, 2)
    assert split_tile_bytes(128, 2) == 32 * 128 * 4 + 128


def test_a_short_problem_is_cut_into_sections():
    asked = problem(right=0).forward
    on = device("sm_90a")
    for part in PARTS:
        assert MMA_SPLIT_VJP.section(part, problem().forward, on, 64, 1) == 1
        assert 1 <= MMA_SPLIT_VJP.section(part, asked, on, 64, 1) <= 64


# --- what parts leave out ------------------------------------------------------------


def in_parts(x, axis):
    """`x` as the kernels have it: two float16 numbers, a power of 2 a granule."""
    largest = fuzz_vjp._largest(np.abs(x).astype(float), axis)
    power = 2.0 ** (14 - np.floor(np.log2(largest)))
    high = (x * power).astype(np.float16).astype(float)
    return (high + (x * power - high).astype(np.float16)) / power


@pytest.mark.parametrize("spread", [1, 12, 30])
def test_the_bound_is_what_parts_leave_out(rng, spread):
    """A model of dv: large weights meet zeros of dout, and small ones are left."""
    q, k, v, dout = inputs(rng, q=(1, 1, 96, 8), k=(1, 1, 64, 8))
    q = q * np.float32(spread / 2)
    dout[..., :4] *= rng.random((96, 4)) < 1 / 32
    problem = problem_of(q, k, v, dout, {})
    exact, sizes, size, lse = fuzz_vjp.exact_gradients(problem)
    bound = fuzz_vjp.gradient_bound(
        problem, exact["dv"], sizes["dv"], size, lse, "float32"
    )[0, 0]
    s = q[0, 0].astype(float) @ k[0, 0].T.astype(float) / np.sqrt(8)
    p = np.exp(s - lse[0, 0][:, None])
    of_dout = np.repeat(np.abs(dout[0, 0]).reshape(3, 32 * 8).max(-1), 32)
    power = 2.0 ** (14 - np.floor(np.log2(of_dout)))[:, None]
    high = (dout[0, 0] * power).astype(np.float16).astype(float)
    dout_parts = (high + (dout[0, 0] * power - high).astype(np.float16)) / power
    error = np.abs(in_parts(p, 0).T @ dout_parts - exact["dv"][0, 0])
    lost = fuzz_vjp.lost_in_parts(problem)["dv"][0, 0]
    assert (error <= bound + lost).all()
    if spread == 30:
        over = error > bound  # the element's own terms do not explain it
        assert over.any()
        assert (error / lost)[over].max() > 1e-2  # and the bound is not far away


# --- numbers -------------------------------------------------------------------------


@pytest.fixture
def forced(cupy, monkeypatch):
    """The row in front of the table, from one query and key on."""
    from cupyflash._attention.gpu import backward as attention_vjp_gpu

    def force(row=MMA_SPLIT_VJP):
        row = dataclasses.replace(row, least=1, most_split_bytes=np.inf)
        rest = [x for x in ATTENTION_VJP_KERNELS if x.name != "mma_split"]
        monkeypatch.setattr(attention_vjp_gpu, "ATTENTION_VJP_KERNELS", (row, *rest))
        plans = plan_cache.PlanCache()
        monkeypatch.setattr(attention_vjp_gpu, "_plans", plans)

    force()
    return force


def check(cupy, rng, *sizes, **options):
    """Compare with the oracle; the row must be this one."""
    return vjp_laws.check("mma_split", cupy, rng, "float32", *sizes, **options)


SEQLENS = (
    (64, 64),
    (64, 300),
    (113, 63),
    (65, 1049),
    (1049, 129),
    (300, 200),
    (19, 300),
)
BOUNDS = {
    "full": {},
    "causal": {"causal": True},
    "causal from the top": {"causal": True, "query_offset": 0},
    "ahead": {"causal": True, "query_offset": -40},
    "window": {"window": (70, 20)},
    "left window": {"window": (100, None), "causal": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_every_length(cupy, rng, forced, name, seqlens, dims):
    check(cupy, rng, dims, seqlens=seqlens, batch=(1,), **BOUNDS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seqlens", [(64, 64), (113, 63), (300, 200), (19, 300)])
@pytest.mark.parametrize("dims", [(192, 192), (256, 256)])
def test_every_length_of_wide_heads(cupy, rng, forced, name, seqlens, dims):
    """Two warps share rows, and have half of the columns each."""
    check(cupy, rng, dims, seqlens=seqlens, batch=(1,), **BOUNDS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seqlens", [(100, 300), (300, 200), (9, 1000)])
@pytest.mark.parametrize("dims", [(4, 4), (7, 7), (8, 16), (30, 30), (31, 64)])
def test_narrow_heads(cupy, rng, name, seqlens, dims):
    """Rows of less than half of the columns that are compiled, as the table has it."""
    check(cupy, rng, dims, (4, 2), seqlens, **BOUNDS[name])


# Blocks share the loop over keys, that over queries, and both; a split that is empty.
LONG_LOOPS = ((5, 1000), (1000, 3), (515, 700), (64, 2049))


def launches(cupy, q, k, v, dout):
    """What explain says of a call."""
    q, k, v = (cupy.asarray(x) for x in (q, k, v))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    return str(
        cupyflash.explain("attention_vjp", cupy.asarray(dout), q, k, v, out, lse)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seqlens", LONG_LOOPS)
@pytest.mark.parametrize("dims", [(64, 64), (100, 128), (256, 200)])
def test_blocks_share_long_loops(cupy, rng, forced, name, seqlens, dims):
    check(cupy, rng, dims, seqlens=seqlens, batch=(1,), **BOUNDS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", LONG_LOOPS)
def test_which_loops_are_shared(cupy, rng, forced, seqlens):
    arrays = inputs(rng, q=(1, 2, seqlens[0], 64), k=(1, 2, seqlens[1], 64))
    told = launches(cupy, *arrays)
    assert ("fp32_backward_dq_finish.cu" in told) == (seqlens[1] >= 512)
    assert ("backward_reduce.cu" in told) == (seqlens[0] >= 512)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_all_options_of_shared_loops(cupy, rng, forced, precision):
    for shape in ((1, 4, 20, 700), (1, 4, 700, 20)):
        _, heads, queries, keys = shape
        options = {
            "bias": rng.normal(size=shape[1:]).astype(np.float32),
            "mask": rng.random((queries, keys)) < 0.8,
            "sinks": rng.normal(size=heads).astype(np.float32),
            "alibi_slopes": (rng.random(heads) * 0.1).astype(np.float32),
            "query_lengths": np.array([queries - 3]),
            "key_lengths": np.array([keys - 7]),
            "softcap": 4.0,
            "window": (600, 600),
        }
        if precision == "float32":
            check(cupy, rng, (64, 64), (4, 2), shape[2:], batch=(1,), **options)
        arrays = inputs(rng, q=(1, 4, queries, 64), k=(1, 2, keys, 64))
        dlse = rng.normal(size=shape[:3]).astype(np.float32)
        agree(cupy, *arrays, dlse=dlse, causal=True, precision=precision)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "batch_k"), [((3,), (1,)), ((1,), (3,)), ((2,), ())])
@pytest.mark.parametrize("seqlens", [(6, 600), (600, 6)])
def test_shared_loops_of_shared_arrays(cupy, rng, forced, batch, batch_k, seqlens):
    """Sums over entries stand beside sums over splits."""
    shapes = {"q": (*batch, 4, seqlens[0], 64), "k": (*batch_k, 1, seqlens[1], 64)}
    agree(cupy, *inputs(rng, **shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_shared_loops_give_way_to_plain_float32(cupy, rng, forced, bad):
    for shape in ((1, 2, 600, 64), (1, 2, 9, 64)):
        other = (1, 2, 609 - shape[2], 64)
        q, k, v, dout = inputs(rng, q=shape, k=other)
        k[0, 1, 3, 5] = bad
        agree(cupy, q, k, v, dout)


@pytest.mark.gpu
def test_many_queries_without_keys(cupy, rng):
    """Without any row in front."""
    q, k, v, dout = inputs(rng, q=(1, 2, 700, 64), k=(1, 2, 0, 64))
    grads = agree(cupy, q, k, v, dout)
    assert not to_host(grads.dq).any()
    assert grads.dk.shape == k.shape


@pytest.mark.gpu
def test_shared_loops_have_the_same_bits_again(cupy, rng, forced):
    shape = 1, 1, 700, 64
    q, k, v, dout = (cupy.asarray(x) for x in inputs(rng, q=shape, k=shape))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    first = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    again = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    for a, b in zip(first[:3], again[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dims",
    [
        *((1, 1), (8, 8), (33, 65), (64, 16), (72, 72), (32, 128), (128, 3)),
        *((129, 129), (133, 255), (192, 64), (200, 8), (5, 256)),
    ],
)
def test_every_head_dim(cupy, rng, forced, dims):
    check(cupy, rng, dims, seqlens=(150, 200), causal=True, scale=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", [8, 100, 160, 256])
def test_every_option(cupy, rng, forced, name, head_dim):
    options = {
        n: x.astype(np.float32) if n in ("sinks", "alibi_slopes") else x
        for n, x in OPTIONS[name].items()
    }
    arrays = inputs(
        rng, "float32", (2, 4, 9, head_dim), (2, 2, 11, head_dim), head_dim_v=head_dim
    )
    dlse = rng.normal(size=(2, 4, 9)).astype(np.float32)
    agree(cupy, *arrays, dlse=dlse, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_all_options_at_once(cupy, rng, forced, head_dim):
    shape = (2, 4, 150, 170)
    options = {
        "bias": rng.normal(size=shape[1:]).astype(np.float32),
        "mask": rng.random((150, 170)) < 0.8,
        "sinks": rng.normal(size=4).astype(np.float32),
        "alibi_slopes": (rng.random(4) * 0.1).astype(np.float32),
        "query_lengths": np.array([150, 70]),
        "key_lengths": np.array([90, 170]),
        "softcap": 4.0,
        "window": (100, 60),
    }
    check(cupy, rng, (head_dim, head_dim), (4, 2), shape[2:], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", mask_views.VIEWS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_of_any_strides(cupy, rng, forced, head_dim, name):
    arrays = {n: (*x, head_dim) for n, x in mask_views.SHAPES.items()}
    options = {"mask": mask_views.view(rng, name)}
    agree(cupy, *inputs(rng, **arrays), **options)
    options |= {"key_lengths": np.array([150, 3]), "window": (60, 40)}
    agree(cupy, *inputs(rng, **arrays), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIASES)
def test_gradients_of_a_bias(cupy, rng, forced, name):
    bias = rng.normal(size=BIASES[name]).astype(np.float32)
    agree(cupy, *inputs(rng), bias=bias, need_dbias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1), (40, 1)])
def test_query_heads_share_key_heads(cupy, rng, forced, layout, heads):
    for dims in ((64, 64), (128, 128), (256, 256)):
        check(cupy, rng, dims, heads, (140, 270), layout=layout, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "batch_k"), vjp_laws.BATCHES)
def test_batch_axes(cupy, rng, forced, batch, batch_k):
    arrays = inputs(rng, q=(*batch, 4, 150, 64), k=(*batch_k, 2, 140, 64))
    agree(cupy, *arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-0.3, 1e-3, 2.0, 0.0])
def test_scales(cupy, rng, forced, scale):
    check(cupy, rng, seqlens=(200, 100), scale=scale, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [*FORMS, "heads"])
def test_strides(cupy, rng, forced, form):
    vjp_laws.strides(cupy, rng, "float32", form, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fortran", "heads", "rows", "gaps"])
@pytest.mark.parametrize("name", ["columns", "rows of dout"])
def test_axes_that_merge_but_for_lse(cupy, rng, forced, form, name):
    """Kernels that take an lse made anew merge them: dbias, and repairs of keys."""
    arrays = inputs(rng, q=(2, 3, 2, 96, 64), k=(2, 3, 1, 70, 64))
    arrays = [
        SPREADS[name](x, n)
        for x, n in zip(arrays, ("q", "k", "v", "dout"), strict=True)
    ]
    bias = rng.normal(size=(70,)).astype(np.float32)
    forms = {"lse": form}
    agree(cupy, *arrays, forms=forms, bias=bias, need_dbias=True, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_not_seen_never_leaks(cupy, rng, forced, bad):
    vjp_laws.what_is_not_seen_never_leaks(cupy, rng, "float32", bad, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_numbers_leave_no_bit(cupy, rng, forced, bad):
    """Of keys behind the diagonal, and of queries that see no key."""
    q, k, v, dout = inputs(rng, q=(1, 2, 200, 64), k=(1, 2, 150, 64))
    options = {"causal": True, "query_offset": -60}
    placed = (place(cupy, x) for x in (q, k, v))
    out, lse = cupyflash.attention(*placed, return_lse=True, **options)
    results = []
    for x in (0, bad):
        k[:, :, 140:], v[:, :, 140:] = x, x
        q[:, :, :60], dout[:, :, :60] = x, x
        placed = (place(cupy, x) for x in (dout, q, k, v))
        results.append(cupyflash.attention_vjp(*placed, out, lse, **options)[:3])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_padding_may_hold_anything(cupy, rng, forced, bad):
    vjp_laws.padding_may_hold_anything(cupy, rng, bad, 64, "float32")


@pytest.mark.gpu
def test_nan_stays_where_it_is_seen(cupy, rng, forced):
    vjp_laws.nan_stays_where_it_is_seen(cupy, rng, "float32", 64)


def as_accurate(cupy, q, k, v, dout, **options):
    """Compare the errors with those of the unfused computation in float32."""
    grads = gradients(cupy, q, k, v, dout, **options)
    exact = reference_vjp.attention_vjp(dout, q, k, v, **options)
    plain = reference_vjp.plain_attention_vjp(dout, q, k, v, **options)
    for name in ("dq", "dk", "dv"):
        found, standard, best = (getattr(x, name) for x in (grads, plain, exact))
        assert np.isfinite(wide(found)).all()
        assert_as_accurate(found, standard, best, factor=3.0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 6])
def test_as_accurate_as_the_plain_computation(
    cupy, rng, forced, head_dim, causal, size
):
    q, k, v, dout = inputs(rng, q=(2, 2, 500, head_dim), k=(2, 1, 700, head_dim))
    q *= np.float32(size)
    as_accurate(cupy, q, k, v, dout, causal=causal)


SPREADS = {
    "small": lambda x, name: x * np.float32(1e-20 if name == "v" else 1),
    "tiny dout": lambda x, name: x * np.float32(1e-20 if name == "dout" else 1),
    "large dout": lambda x, name: x * np.float32(1e12 if name == "dout" else 1),
    "rows": lambda x, name: (
        x * (2.0 ** -(np.arange(x.shape[-2]) % 60))[:, None].astype(np.float32)
    ),
    "rows of dout": lambda x, name: (
        x
        * (2.0 ** -(np.arange(x.shape[-2]) % (60 if name == "dout" else 1)))[
            :, None
        ].astype(np.float32)
    ),
    "columns": lambda x, name: (
        x * (2.0 ** -(np.arange(x.shape[-1]) % 50)).astype(np.float32)
    ),
    "a large column": lambda x, name: np.where(
        np.arange(x.shape[-1]) == 3, 1e5 * x if name == "v" else x * 0, x
    ).astype(np.float32),
    "large scores": lambda x, name: x * np.float32(30 if name in "qk" else 1),
    "huge scores": lambda x, name: x * np.float32(1e15 if name in "qk" else 1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPREADS)
def test_numbers_of_every_size(cupy, rng, forced, name):
    """What float16 numbers hold, and what they do not."""
    shapes = {"q": (1, 2, 130, 64), "k": (1, 2, 170, 64)}
    arrays = inputs(rng, **shapes)
    spread = SPREADS[name]
    arrays = [
        spread(x, n) for x, n in zip(arrays, ("q", "k", "v", "dout"), strict=True)
    ]
    if name == "huge scores":
        found = gradients(cupy, *arrays)
        assert all(np.isfinite(wide(x)).all() for x in found[:3])
        return
    agree(cupy, *arrays)


@pytest.fixture
def asked(cupy, monkeypatch):
    """Tells whether the call before asked the portable kernels for its gradients."""
    memory, alloc = [], cupy.cuda.alloc

    def remembered(size):
        memory.append(alloc(size))
        return memory[-1]

    monkeypatch.setattr(cupy.cuda, "alloc", remembered)
    return lambda: bool(cupy.ndarray(1, np.int32, memptr=memory[-1]).get()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("seqlens", [(64, 64), (300, 280), (129, 65), (1049, 63)])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_ordinary_calls_need_no_repair(
    cupy, rng, forced, asked, head_dim, seqlens, options
):
    """Of any length: a query that is not there must not spoil the keys."""
    q, k = ((1, 2, n, head_dim) for n in seqlens)
    gradients(cupy, *inputs(rng, q=q, k=k), **options)
    assert not asked()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "dout"])
@pytest.mark.parametrize("row", [3, 131, 200, 383])
def test_uneven_rows_of_every_block(cupy, rng, forced, asked, name, row):
    """A row that parts cannot hold beside its neighbours, wherever it stands."""
    shape = (1, 2, 384, 64)
    arrays = dict(
        zip(("q", "k", "v", "dout"), inputs(rng, q=shape, k=shape), strict=True)
    )
    arrays[name][:, :, row] *= np.float32(2.0**-40)
    gradients(cupy, *arrays.values())
    assert asked()
    agree(cupy, *arrays.values())


@pytest.mark.gpu
def test_weights_of_a_part(cupy, rng, forced):
    """lse of more keys than are here: weights far below 1."""
    q, k, v, dout = (
        place(cupy, x) for x in inputs(rng, q=(1, 2, 128, 64), k=(1, 2, 256, 64))
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    first = slice(None), slice(None), slice(None, 128)
    base = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    half = cupyflash.attention_vjp(dout, q, k[first], v[first], out, lse)
    np.testing.assert_allclose(
        to_host(half.dv),
        to_host(base.dv)[first],
        atol=2e-6 * abs(to_host(base.dv)).max(),
    )
    # As if others had e^30 times their weight.
    far = cupyflash.attention_vjp(dout, q, k, v, out, lse + np.float32(30))
    scaled = to_host(far.dv).astype(np.float64) * np.exp(30)
    np.testing.assert_allclose(
        scaled, to_host(base.dv), atol=1e-4 * abs(to_host(base.dv)).max()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
def test_tf32(cupy, rng, forced, head_dim):
    shape = 1, 2, 300, head_dim
    q, k, v, dout = inputs(rng, q=shape, k=shape)
    exact = reference_vjp.attention_vjp(dout, q, k, v)
    grads = gradients(cupy, q, k, v, dout, precision="tf32")
    for name in ("dq", "dk", "dv"):
        best = wide(getattr(exact, name))
        error = max_error(getattr(grads, name), best)
        assert error <= 1e-2 * np.abs(best).max(), name


def all_tiles():
    """(part, with terms, head_dim, tile)."""
    for (part, terms), by_dim in MMA_SPLIT_VJP.tiles.items():
        for dim, tiles in by_dim.items():
            for n, tile in enumerate(tiles):
                name = f"{part[1:]}-{dim}-{'terms' if terms else 'plain'}-{n}"
                yield pytest.param(part, terms, dim, tile, id=name)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize(("part", "terms", "dim", "tile"), list(all_tiles()))
def test_each_tile(cupy, rng, forced, asked, part, terms, dim, tile, precision):
    """With no repair, which would hide that a tile reads what has not arrived."""
    from cupyflash._cuda import runtime

    if not tile.fits(part, dim, 2, runtime.device(0)):
        pytest.skip("a tile for other cards")
    tiles = {**MMA_SPLIT_VJP.tiles}
    tiles |= {(part, x): dict.fromkeys(DIMS, (tile,)) for x in (False, True)}
    forced(dataclasses.replace(MMA_SPLIT_VJP, tiles=tiles))
    options = {"causal": True, "query_offset": 5}
    if terms:
        options["bias"] = rng.normal(size=(1, 280)).astype(np.float32)
    if precision == "float32":
        check(cupy, rng, (dim, dim), seqlens=(300, 280), batch=(1,), **options)
    arrays = inputs(rng, q=(1, 2, 300, dim), k=(1, 2, 280, dim))
    found = gradients(cupy, *arrays, precision=precision, **options)
    assert not asked()
    if precision == "float32":
        return
    exact = reference_vjp.attention_vjp(arrays[3], *arrays[:3], **options)
    for a, b in zip(found[:3], exact[:3], strict=True):
        assert max_error(a, b) <= 1e-2 * np.abs(wide(b)).max()


@pytest.mark.gpu
def test_a_call_can_be_captured(cupy, rng, forced):
    vjp_laws.a_call_can_be_captured(cupy, rng, 64, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_same_bits_in_every_run(cupy, rng, forced, head_dim, options):
    shapes = {"q": (2, 8, 700, head_dim), "k": (2, 2, 900, head_dim)}
    arrays = inputs(rng, **shapes)
    given = {"causal": True, **options}
    first = gradients(cupy, *arrays, **given)
    for _ in range(3):
        again = gradients(cupy, *arrays, **given)
        for name in ("dq", "dk", "dv"):
            a, b = (to_host(getattr(x, name)) for x in (first, again))
            np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
