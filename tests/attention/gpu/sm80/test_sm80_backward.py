"""The mma row of the gradient table: what it takes, its tiles, and its numbers."""

import dataclasses
import functools

import numpy as np
import pytest
import vjp_laws
from accuracy import dtype_of, to_host
from placing import FORMS, place
from test_attention_vjp import BIASES, OPTIONS, agree, gradients, inputs

import cupyflash
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.sm80.backward import DIMS, MMA_VJP, SCHEDULE
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel, plan_cache

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
HALVES = ("float16", "bfloat16")


def problem(dtype="bfloat16", head_dim=64, **options):
    forward = samples.made_up(dtype, head_dim)
    forward = dataclasses.replace(forward, **options)
    shape = (*forward.batch, forward.num_kv_heads, forward.seqlen_k, head_dim)
    return AttentionVjpProblem(forward, (), shape, shape)


def device(arch):
    return _device.device_of_arch(arch)


# --- the row -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [1, 7, 64, 72, 128, 200, 256])
@pytest.mark.parametrize("options", [{}, {"bias": "float32"}, {"softcap": 3.0}])
def test_takes(arch, dtype, head_dim, options):
    asked = problem(dtype, head_dim, **options)
    assert MMA_VJP.unsupported_reason(asked, device(arch)) is None
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device(arch))
    before = dict.fromkeys((7, 64, 72, 128), "hopper")
    before |= {200: "hopper_wide", 256: "hopper_wide"}
    if "softcap" in options:
        before = dict.fromkeys((7, 64, 72, 128), "hopper_wide")
    if arch != "sm_90a" or "bias" in options:
        before = {}
    assert row.name == before.get(head_dim, "mma")


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem("float64"), "sm_90a", "takes float16 and bfloat16, not float64"),
        (problem("float32"), "sm_90a", "takes float16 and bfloat16, not float32"),
        (problem("float16"), "sm_75", "needs sm_80"),
        (problem(head_dim=257), "sm_90a", "head_dim 257 is above 256"),
        (problem(head_dim_v=300), "sm_90a", "head_dim_v 300 is above 256"),
        (problem(seqlen_k=0), "sm_90a", "no keys"),
        (problem("float16", seqlen_q=(1 << 18) + 1), "sm_90a", "262144 terms"),
        (problem("float16", seqlen_k=(1 << 18) + 1), "sm_90a", "262144 terms"),
        (problem(batch=(1 << 26,)), "sm_90a", "32 bits"),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    assert reason in MMA_VJP.unsupported_reason(asked, device(arch))
    row, refused = kernel.select(ATTENTION_VJP_KERNELS, asked, device(arch))
    assert row.name != "mma"
    assert row.name == "hopper" or "mma" in dict(refused)


@pytest.mark.parametrize("part", ["", "_queries"])
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_every_tile_is_for_some_device(part, terms, dim):
    ladder = MMA_VJP.query_tiles if part else MMA_VJP.tiles
    options = {"softcap": 1.0} if terms else {}
    chosen = {
        MMA_VJP.tile(part, problem(head_dim=dim, **options).forward, device(arch))
        for arch in ARCHS
    }
    assert chosen == set(ladder[terms][dim])
    for tile in chosen:
        warps = tile.num_threads // 32
        assert tile.block_m % 32 == 0
        assert tile.block_n % 16 == 0
        if part:
            assert tile.block_m == 16 * warps
        else:
            assert tile.block_n % (16 * warps // tile.warps_m) == 0
            # Of dq, a warp makes 32 rows and a multiple of 16 columns.
            assert dim % (16 * warps // (tile.block_m // 32)) == 0


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_every_tile_of_a_bias_is_for_some_device(more, dim):
    options = {"bias": "float32"} | ({"softcap": 1.0} if more else {})
    asked = problem(head_dim=dim, **options).forward
    chosen = {MMA_VJP.tile("_bias", asked, device(arch)) for arch in ARCHS}
    assert chosen == set(MMA_VJP.bias_tiles[more][dim])
    for tile in chosen:
        # A warp has 32 queries and 32 keys.
        warps_n = tile.num_threads // 32 // tile.warps_m
        assert (tile.block_m, tile.block_n) == (32 * tile.warps_m, 32 * warps_n)


def test_a_short_problem_is_cut_into_sections():
    asked = problem(right=0, seqlen_q=4096).forward
    on = device("sm_90a")
    assert MMA_VJP.section(problem().forward, on, 64, 1) == 1
    section = MMA_VJP.section(asked, on, 64, 1)
    assert 1 <= section <= 64
    assert MMA_VJP.section(dataclasses.replace(asked, seqlen_q=1), on, 64, 1) == 64


def test_the_struct_of_items():
    assert SCHEDULE.dtype(kBatchDims=3).itemsize == 4 * 8


# --- numbers -------------------------------------------------------------------------


@pytest.fixture
def forced(cupy, monkeypatch):
    """The row in front of the table."""
    from cupyflash._attention.gpu import backward as attention_vjp_gpu

    def force(row=MMA_VJP):
        before = ("hopper", "hopper_wide", "mma")
        rest = [x for x in ATTENTION_VJP_KERNELS if x.name not in before]
        monkeypatch.setattr(attention_vjp_gpu, "ATTENTION_VJP_KERNELS", (row, *rest))
        plans = plan_cache.PlanCache()
        monkeypatch.setattr(attention_vjp_gpu, "_plans", plans)

    force()
    return force


check = functools.partial(vjp_laws.check, "mma")


SEQLENS = ((1, 1), (1, 300), (63, 113), (113, 63), (65, 1049), (1049, 65), (300, 200))
BOUNDS = {
    "full": {},
    "causal": {"causal": True},
    "causal from the top": {"causal": True, "query_offset": 0},
    "ahead": {"causal": True, "query_offset": -40},
    "window": {"window": (70, 20)},
    "left window": {"window": (100, None), "causal": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_every_length(cupy, rng, forced, dtype, name, seqlens, dims, deterministic):
    options = {**BOUNDS[name], "deterministic": deterministic}
    check(cupy, rng, dtype, dims, seqlens=seqlens, batch=(1,), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "dims", [(1, 1), (8, 8), (33, 65), (64, 16), (72, 72), (32, 128), (130, 256)]
)
def test_every_head_dim(cupy, rng, forced, dtype, dims, deterministic):
    options = {"causal": True, "scale": 0.1, "deterministic": deterministic}
    check(cupy, rng, dtype, dims, seqlens=(150, 200), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", [8, 100, 200])
def test_every_option(cupy, rng, forced, name, head_dim, deterministic, dtype):
    options = {
        n: x.astype(np.float32) if n in ("sinks", "alibi_slopes") else x
        for n, x in OPTIONS[name].items()
    }
    arrays = inputs(
        rng, dtype, (2, 4, 9, head_dim), (2, 2, 11, head_dim), head_dim_v=head_dim
    )
    dlse = rng.normal(size=(2, 4, 9)).astype(np.float32)
    agree(cupy, *arrays, dlse=dlse, deterministic=deterministic, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_all_options_at_once(cupy, rng, forced, dtype, deterministic, head_dim):
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
        "deterministic": deterministic,
    }
    dims = (head_dim, head_dim)
    check(cupy, rng, dtype, dims, (4, 2), shape[2:], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIASES)
def test_gradients_of_a_bias(cupy, rng, forced, name):
    bias = rng.normal(size=BIASES[name]).astype(np.float32)
    agree(cupy, *inputs(rng, "bfloat16"), bias=bias, need_dbias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("to_share", ["entries", "heads", "all", "queries", "keys"])
@pytest.mark.parametrize("head_dim", [40, 128, 200])
@pytest.mark.parametrize(
    ("dtype", "of_bias"),
    [("bfloat16", "float32"), ("float16", "float64"), ("bfloat16", "bfloat16")],
)
def test_gradients_of_a_shared_bias(
    cupy, rng, forced, dtype, of_bias, head_dim, to_share
):
    """Over several tiles, with keys that nobody sees; the same bits in every run."""
    batch, heads, seqlen_q, seqlen_k = 3, 4, 150, 210
    shape = {
        "entries": (heads, seqlen_q, seqlen_k),
        "heads": (batch, 1, seqlen_q, seqlen_k),
        "all": (seqlen_q, seqlen_k),
        "queries": (heads, 1, seqlen_k),
        "keys": (batch, 1, seqlen_q, 1),
    }[to_share]
    bias = rng.normal(size=shape)
    bias[..., : shape[-1] // 3] -= np.inf if shape[-1] > 1 else 0
    shapes = {"q": (batch, heads, seqlen_q, head_dim)}
    shapes["k"] = (batch, 2, seqlen_k, head_dim)
    arrays = inputs(rng, dtype, **shapes)
    options = {"bias": bias.astype(dtype_of(of_bias)), "need_dbias": True}
    first = agree(cupy, *arrays, **options, causal=True)
    again = agree(cupy, *arrays, **options, causal=True)
    np.testing.assert_array_equal(to_host(first.dbias), to_host(again.dbias))
    lengths = {"key_lengths": np.array([210, 64, 1])}
    agree(cupy, *arrays, **options, **lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(300, 300), (512, 2048)])
def test_one_number_a_query_is_not_copied(cupy, rng, seqlens):
    """As a bias of each score it would be as many times as large as there are keys."""
    shapes = {"q": (2, 4, seqlens[0], 64), "k": (2, 2, seqlens[1], 64)}
    arrays = inputs(rng, "bfloat16", **shapes)
    bias = rng.normal(size=(4, seqlens[0], 1)).astype(np.float32)
    agree(cupy, *arrays, bias=bias)
    *placed, on_card = (place(cupy, x) for x in (*arrays, bias))
    out, lse = cupyflash.attention(*placed[:3], bias=on_card, return_lse=True)
    told = cupyflash.explain(
        "attention_vjp", placed[3], *placed[:3], out, lse, bias=on_card
    )
    assert told.kernel == "mma"
    assert "copied first" not in told.details


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1), (40, 1)])
def test_query_heads_share_key_heads(cupy, rng, forced, layout, heads, deterministic):
    for dims in ((64, 64), (128, 128)):
        options = {"layout": layout, "causal": True, "deterministic": deterministic}
        check(cupy, rng, "bfloat16", dims, heads, (140, 270), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("batch", "batch_k"), vjp_laws.BATCHES)
def test_batch_axes(cupy, rng, forced, batch, batch_k, deterministic):
    arrays = inputs(rng, "bfloat16", q=(*batch, 4, 150, 64), k=(*batch_k, 2, 140, 64))
    agree(cupy, *arrays, causal=True, deterministic=deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-0.3, 1e-3, 2.0, 0.0])
def test_scales(cupy, rng, forced, scale):
    check(cupy, rng, "bfloat16", seqlens=(200, 100), scale=scale, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", [*FORMS, "heads"])
def test_strides(cupy, rng, forced, dtype, form):
    vjp_laws.strides(cupy, rng, dtype, form, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_seen_never_leaks(cupy, rng, forced, dtype, bad, deterministic):
    vjp_laws.what_is_not_seen_never_leaks(
        cupy, rng, dtype, bad, 64, deterministic=deterministic
    )


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_padding_may_hold_anything(cupy, rng, forced, bad):
    vjp_laws.padding_may_hold_anything(cupy, rng, bad, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_nan_stays_where_it_is_seen(cupy, rng, forced, dtype):
    vjp_laws.nan_stays_where_it_is_seen(cupy, rng, dtype, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-4, 1e-2, 30, 1000])
def test_gradients_of_every_size(cupy, rng, forced, size):
    vjp_laws.gradients_of_every_size(cupy, rng, size, 64)


def all_tiles():
    """(dtype, part, with terms, head_dim, tile)."""
    for part in ("", "_queries"):
        ladder = MMA_VJP.query_tiles if part else MMA_VJP.tiles
        for terms, by_dim in ladder.items():
            for dim, tiles in by_dim.items():
                for n, tile in enumerate(tiles):
                    name = f"{part or 'keys'}-{dim}-{'terms' if terms else 'plain'}-{n}"
                    yield pytest.param(part, terms, dim, tile, id=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("part", "terms", "dim", "tile"), list(all_tiles()))
def test_each_tile(cupy, rng, forced, dtype, part, terms, dim, tile):
    from cupyflash._cuda import runtime

    if not tile.fits(part, dim, runtime.device(0)):
        pytest.skip("a tile for other cards")
    field = "query_tiles" if part else "tiles"
    one = {terms: dict.fromkeys(DIMS, (tile,)) for terms in (False, True)}
    forced(dataclasses.replace(MMA_VJP, **{field: one}))
    options = {"causal": True, "query_offset": 5, "deterministic": bool(part)}
    if terms:
        options["bias"] = rng.normal(size=(1, 280)).astype(np.float32)
    check(cupy, rng, dtype, (dim, dim), seqlens=(300, 280), batch=(1,), **options)


@pytest.mark.gpu
def test_a_call_can_be_captured(cupy, rng, forced):
    vjp_laws.a_call_can_be_captured(cupy, rng, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_in_every_run(cupy, rng, forced, head_dim, options):
    """On request those of dq too."""
    shapes = {"q": (2, 8, 700, head_dim), "k": (2, 2, 900, head_dim)}
    arrays = inputs(rng, "bfloat16", **shapes)
    for deterministic in (False, True):
        given = {"causal": True, "deterministic": deterministic, **options}
        first = gradients(cupy, *arrays, **given)
        for _ in range(3):
            again = gradients(cupy, *arrays, **given)
            for name in ("dq", "dk", "dv") if deterministic else ("dk", "dv"):
                a, b = (to_host(getattr(x, name)) for x in (first, again))
                np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))
