"""The float64 row of the gradient table: what it takes, its tiles, and its results."""

import dataclasses

import mask_views
import numpy as np
import pytest
import small_entries
from accuracy import assert_as_accurate, max_error, to_host
from placing import place
from test_attention_vjp import agree, gradients, inputs

import cupyflash
from cupyflash._attention.gpu import mask_bits, samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.fp64.backward import TILED_F64_VJP as ROW
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel
from cupyflash._reference import backward as reference_vjp

ARCHS = ("sm_80", "sm_90a", "sm_100")
HOPPER = _device.device_of_arch("sm_90a")
HEAD_DIMS = (1, 16, 33, 64, 65, 96, 97, 128)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (40, 7)},
    "offset": {"causal": True, "query_offset": 50},
    "softcap": {"softcap": 5.0, "causal": True},
    "zero scale": {"scale": 0.0},
    "negative scale": {"scale": -0.1},
}


def problem(head_dim=64, **options):
    forward = samples.made_up("float64", head_dim)
    forward = dataclasses.replace(forward, **options)
    return AttentionVjpProblem(forward, (), (), ())


# --- selection -----------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "options", [{}, {"bias": "float64"}, {"softcap": 30.0}, {"scale": -1.0}]
)
def test_takes(arch, head_dim, options):
    """Of calls with more scores, some have the row of sections."""
    device = _device.device_of_arch(arch)
    few = {"num_heads": 2, "num_kv_heads": 2, "seqlen_q": 200, "seqlen_k": 200}
    asked = problem(head_dim, **few, **options)
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device)
    assert row is ROW
    assert ROW.unsupported_reason(problem(head_dim, **options), device) is None
    for tile in ROW.fitting(asked.forward, device):
        config = ROW.config("keys", tile, asked.forward, 1, "float64", 1)
        # Static memory takes up to 3 KiB more.
        assert config.variant.smem + 3072 <= device.smem_optin


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(dtype="float32"), "sm_90a", "takes float64, not float32"),
        (problem(129), "sm_90a", "not both up to 128"),
        (problem(head_dim_v=300), "sm_90a", "not both up to 128"),
        (problem(seqlen_k=1 << 29), "sm_90a", "32 bits"),
        (problem(seqlen_q=1 << 29), "sm_90a", "32 bits"),
        (problem(), "sm_75", "no fast tensor cores"),
        (problem(), "sm_86", "no fast tensor cores"),
        (problem(), "sm_120", "no fast tensor cores"),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    device = _device.device_of_arch(arch)
    assert reason in ROW.unsupported_reason(asked, device)
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device)
    assert row is not ROW


def test_a_card_with_little_shared_memory():
    small = dataclasses.replace(HOPPER, smem_optin=48 * 1024)
    assert "more shared memory" in ROW.unsupported_reason(problem(128), small)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seqlen", [1, 16, 17, 100, 4096])
@pytest.mark.parametrize("heads", [1, 64])
@pytest.mark.parametrize("arch", ARCHS)
def test_tiles(head_dim, seqlen, heads, arch):
    """The number of other heads may change block_m, never the bits of a gradient."""
    device = _device.device_of_arch(arch)
    forward = problem(head_dim).forward
    assert ROW.dim(forward) >= head_dim
    forward = dataclasses.replace(forward, seqlen_q=seqlen)
    tile = ROW.tile("queries", forward, device, heads)
    assert tile.num_threads == 4 * tile.block_m
    assert len({tile.block_n for tile in ROW.fitting(forward, device)}) == 1


def test_columns_are_padded_to_few_more():
    found = {n: ROW.dim(problem(n).forward) for n in (1, 32, 33, 49, 65, 81, 97, 113)}
    assert found == {
        **{1: 32, 32: 32, 33: 48, 49: 64, 65: 80, 81: 96},
        **{97: 112, 113: 128},
    }


def test_a_mask_alone_comes_as_bits():
    """Other options finish scores one by one, and read the mask as they do."""
    masked, plain = problem(mask="bool").forward, problem().forward
    assert mask_bits.has_bits(masked)
    for changed in (
        {"bias": "float64"},
        {"softcap": 3.0},
        {"alibi_slopes": "float64"},
        {"scale": -1.0},
        {"seqlen_q": 16},
        {"seqlen_k": 0},
    ):
        assert not mask_bits.has_bits(dataclasses.replace(masked, **changed))
    assert not mask_bits.has_bits(plain)
    (tile,) = {ROW.tile("keys", x, HOPPER, 8) for x in (masked, plain)}
    with_bits, without = (
        dict(ROW.config("keys", tile, x, 1, "float64", 1).variant.defines)
        for x in (masked, plain)
    )
    assert with_bits == {**without, "MASK_BITS": "1"}


def test_where_a_tile_spills_it_is_shorter_and_the_block_is_not():
    for arch, block_n in (("sm_80", 64), ("sm_90a", 64), ("sm_100", 32)):
        tiles = ROW.fitting(problem(64).forward, _device.device_of_arch(arch))
        assert (tiles[0].block_m, tiles[0].block_n) == (64, block_n)
    tiles = ROW.fitting(problem(64, softcap=3.0).forward, HOPPER)
    assert (tiles[0].block_m, tiles[0].block_n) == (64, 32)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("arch", ARCHS)
def test_tiles_of_short_loops(head_dim, arch):
    """A tile has no more rows than it needs, whatever the number of heads."""
    device = _device.device_of_arch(arch)
    most = ROW.fitting(problem(head_dim).forward, device)[0].block_n
    for part, rows in (("queries", "seqlen_k"), ("keys", "seqlen_q")):
        for seqlen in (0, 1, 16, 17, 32, 33, 64, 65):
            forward = problem(head_dim, **{rows: seqlen}).forward
            tiles = ROW.fitting(forward, device, part)
            (block_n,) = {tile.block_n for tile in tiles}
            least = 16 if part == "keys" and seqlen <= 16 else 32
            assert block_n == (least if seqlen <= 32 else most)
            for heads in (1, 10, 1000):
                assert ROW.tile(part, forward, device, heads) in tiles


# --- results -------------------------------------------------------------------------


@pytest.fixture
def cupy(cupy, monkeypatch):
    """CuPy, without the rows that would take calls of few queries or keys."""
    others = "few_f64", "gemv", "short_f64"
    small_entries.change_tables(
        monkeypatch, lambda rows: tuple(row for row in rows if row.name not in others)
    )
    return cupy


def shapes(seqlen_q, seqlen_k, head_dim, head_dim_v=None, heads=(2, 2)):
    q, k = (heads[0], seqlen_q, head_dim), (heads[1], seqlen_k, head_dim)
    return {"q": q, "k": k, "head_dim_v": head_dim_v}


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(1, 1), (1, 300), (130, 127), (300, 65), (33, 0)])
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (40, 100), (96, 7), (48, 40), (80, 65), (112, 112)]
)
def test_sizes(cupy, rng, seqlens, dims):
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims))
    agree(cupy, *arrays)
    agree(cupy, *arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(cupy, rng, head_dim, name):
    arrays = inputs(rng, "float64", **shapes(150, 170, head_dim, heads=(4, 2)))
    agree(cupy, *arrays, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seqlens", [(16, 90), (17, 40), (90, 32), (70, 2), (9, 33)])
@pytest.mark.parametrize("dims", [(64, 64), (100, 128)])
def test_options_of_short_loops(cupy, rng, name, seqlens, dims):
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims, heads=(4, 2)))
    agree(cupy, *arrays, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["bias", "mask", "sinks", "alibi_slopes", "lengths"])
def test_arrays(cupy, rng, head_dim, name):
    q, k = (1, 2, 150, head_dim), (1, 2, 170, head_dim)
    arrays = {
        "bias": {"bias": rng.normal(size=(2, 150, 170))},
        "mask": {"mask": rng.random((1, 170)) < 0.5},
        "sinks": {"sinks": rng.normal(size=2)},
        "alibi_slopes": {"alibi_slopes": rng.random(2)},
        "lengths": {"query_lengths": np.array([77]), "key_lengths": np.array([90])},
    }[name]
    agree(cupy, *inputs(rng, "float64", q=q, k=k), **arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("name", mask_views.VIEWS)
@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_masks_of_any_strides(cupy, rng, head_dim, name):
    arrays = {n: (*x, head_dim) for n, x in mask_views.SHAPES.items()}
    options = {"mask": mask_views.view(rng, name)}
    agree(cupy, *inputs(rng, "float64", **arrays), **options)
    options["key_lengths"] = np.array([150, 3])
    options["window"] = (60, 40)
    agree(cupy, *inputs(rng, "float64", **arrays), **options)


@pytest.mark.gpu
def test_entries_that_share_queries_or_keys(cupy, rng):
    """Those of a gradient are added up in order."""
    q, k, v, _ = inputs(rng, "float64", (1, 4, 50, 64), (3, 1, 70, 64))
    dout = rng.normal(size=(3, 4, 50, 64))
    agree(cupy, q, k, v, dout, causal=True)
    agree(cupy, np.repeat(q, 3, 0), k[:1], v[:1], dout)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_as_accurate_as_the_plain_computation(cupy, rng, head_dim, causal):
    """Also where one key has nearly all the weight, at scores of 60."""
    q, k, v, dout = inputs(rng, "float64", **shapes(200, 250, head_dim))
    q[:, ::5] *= 2
    grads = gradients(cupy, q, k, v, dout, causal=causal)
    exact = reference_vjp.attention_vjp(dout, q, k, v, causal=causal)
    plain = reference_vjp.plain_attention_vjp(dout, q, k, v, causal=causal)
    for got, standard, best in zip(grads[:3], plain[:3], exact[:3], strict=True):
        assert_as_accurate(to_host(got), standard, best, factor=3.0)
        assert max_error(got, best) <= 1e-13 * np.abs(best).max()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_values_that_are_not_finite(cupy, rng, head_dim):
    """What a query does not see never reaches it; what it sees does, as on the CPU."""
    q, k, v, dout = inputs(rng, "float64", **shapes(200, 200, head_dim))
    v[0, 100, :9] = np.nan  # from query 100 on
    dout[1, 30, 3], k[1, 150, 0] = -np.inf, np.nan
    options = {"causal": True, "query_offset": 0}
    host = gradients(np, q, k, v, dout, **options)
    device = gradients(cupy, q, k, v, dout, **options)
    for a, b in zip(host[:3], device[:3], strict=True):
        b = to_host(b)
        finite = np.isfinite(a)
        np.testing.assert_array_equal(finite, np.isfinite(b))
        a, b = np.where(finite, a, 0), np.where(finite, b, 0)
        assert np.abs(a - b).max() <= 1e-12 * np.abs(a).max()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_nobody_sees_leaves_the_bits_as_they_are(cupy, rng, head_dim, bad):
    q, k, v, dout = inputs(rng, "float64", **shapes(150, 170, head_dim))
    mask = np.ones((150, 170), bool)
    mask[:, 40:70], mask[33:35] = False, False
    arrays = [place(cupy, x) for x in (q, k, v)]
    out, lse = cupyflash.attention(*arrays, mask=place(cupy, mask), return_lse=True)

    def call():
        arrays = [place(cupy, x) for x in (dout, q, k, v)]
        return cupyflash.attention_vjp(*arrays, out, lse, mask=place(cupy, mask))

    clean = call()
    k[:, 40:70], v[:, 40:70], q[:, 33:35], dout[:, 33:35] = bad, bad, bad, bad
    poisoned = call()
    for a, b in zip(clean[:3], poisoned[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


@pytest.mark.gpu
def test_lse_of_other_roundings(cupy, rng):
    """Weights sum to 1 whatever lse was rounded to, unless it knows of more keys."""
    q, k, v, dout = (
        place(cupy, x) for x in inputs(rng, "float64", **shapes(60, 70, 64))
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    exact = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    near = cupyflash.attention_vjp(dout, q, k, v, out, lse * (1 + 4e-16))
    for a, b in zip(exact[:3], near[:3], strict=True):
        assert max_error(b, to_host(a)) <= 1e-14 * np.abs(to_host(a)).max()
    # Half of all weight lies elsewhere.
    half = cupyflash.attention_vjp(dout, q, k, v, out, lse + np.log(2))
    for a, b in zip(exact[:3], half[:3], strict=True):
        assert max_error(b, to_host(a) / 2) <= 1e-13 * np.abs(to_host(a)).max()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("seqlens", [(11, 40), (30, 50), (50, 12)])
def test_short_loops_and_values_that_are_not_finite(cupy, rng, bad, seqlens):
    q, k, v, dout = inputs(rng, "float64", **shapes(*seqlens, 64))
    options = {"query_lengths": seqlens[0] - 2, "key_lengths": seqlens[1] - 3}
    clean = gradients(cupy, q, k, v, dout, **options)
    q[:, -1:], dout[:, -2:], k[:, -2:], v[:, -1:] = bad, bad, bad, bad  # all hidden
    hidden = gradients(cupy, q, k, v, dout, **options)
    for a, b in zip(clean[:3], hidden[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))
    q, k, v, dout = inputs(rng, "float64", **shapes(*seqlens, 64))
    q[0, 3, 5] = bad
    agree(cupy, q, k, v, dout)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlens", [(150, 333), (16, 333), (25, 333), (150, 20)])
def test_the_same_bits_in_every_run(cupy, rng, head_dim, seqlens):
    """Whatever the tiles: neither the heads beside it nor block_m change a gradient.

    Unless loops are long enough to be shared.
    """
    q, k, v, dout = inputs(rng, "float64", **shapes(*seqlens, head_dim))
    whole = gradients(cupy, q, k, v, dout, causal=True)
    again = gradients(cupy, q, k, v, dout, causal=True)
    many = gradients(
        cupy, *(np.tile(x, (40, 1, 1)) for x in (q, k, v, dout)), causal=True
    )
    for a, b, c in zip(whole[:3], again[:3], many[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))
        np.testing.assert_array_equal(to_host(a), to_host(c)[:2])


# --- loops that blocks share ---------------------------------------------------------


# Blocks share the loop over keys, that over queries, and both; 64 splits.
LONG_LOOPS = ((5, 1000), (1000, 3), (515, 700), (64, 2049), (1, 4096))


@pytest.mark.parametrize("part", ["queries", "keys"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("arch", ARCHS)
def test_blocks_share_loops_only_where_multiprocessors_are_idle(part, head_dim, arch):
    device = _device.device_of_arch(arch)

    def sharing(rows, loop, entries):
        names = ("seqlen_q", "seqlen_k")[:: 1 if part == "queries" else -1]
        asked = problem(head_dim, **dict(zip(names, (rows, loop), strict=True)))
        return ROW.sharing(part, asked.forward, device, entries)

    assert sharing(1, 511, 1)[1] == 1
    assert sharing(1, 512, 1)[1] == 8
    for rows in (1, 16, 17, 40, 100, 1000, 4096):
        for entries in (1, 3, 30, 300):
            tile, splits = sharing(rows, 1 << 20, entries)
            if splits == 1:
                continue
            blocks = entries * -(-rows // tile.block_m)
            room = device.num_sms * tile.resident(head_dim, device)
            assert room // 2 < blocks * splits <= room
            assert tile.block_m < 2 * rows or tile.block_m == 16
    tile = ROW.fitting(problem(head_dim).forward, device)[0]
    room = device.num_sms * tile.resident(head_dim, device)
    for entries in (room, room // 2 + 1):
        assert sharing(tile.block_m, 1 << 20, entries)[1] == 1
    assert sharing(tile.block_m, 1 << 20, room // 2)[1] == room // (room // 2)


@pytest.mark.parametrize("part", ["queries", "keys"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_tile_of_long_loops_takes_the_fewest_and_shortest_waves(part, head_dim):
    """On 132 multiprocessors; as timed: docs/design/lab/0015-float64-gradients.md."""

    def chosen(heads, rows, loop, **bounds):
        names = ("seqlen_q", "seqlen_k")[:: 1 if part == "queries" else -1]
        sides = dict(zip(names, (rows, loop), strict=True))
        asked = problem(head_dim, **sides, **bounds)
        tile, splits = ROW.sharing(part, asked.forward, HOPPER, heads)
        if splits == 1:
            tile = ROW.tile(part, asked.forward, HOPPER, heads)
        return tile.block_m, splits

    # Two waves of 32 rows take longer than one of 64.
    assert chosen(2, 4096, 4096) == (64, 1)
    assert chosen(8, 1024, 1024) == (64, 1)
    # Sums of splits take longer than one wave of 32 rows where the loop is shorter.
    assert chosen(1, 4096, 4096) == (64, 2)
    assert chosen(4, 1024, 1024) == (32, 1)
    # The longest loop of one wave is as long as without bounds: 870 us, not 622.
    assert chosen(2, 4096, 4096, right=0) == (32, 1)
    # Many waves.
    assert chosen(64, 4096, 4096) == chosen(128, 1024, 1024) == (64, 1)
    # Short loops: blocks hide copies of each other.
    assert chosen(8, 1024, 256) == (32, 1)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("rows", [1, 16, 17, 40, 64, 65, 100, 1000, 4096, 4200])
@pytest.mark.parametrize("entries", [1, 2, 7, 33, 66])
def test_terms_of_shared_loops_stay_small(head_dim, rows, entries):
    """As documented for dq, dk and dv together: up to 26 MiB on an H100."""
    forward = problem(head_dim, seqlen_q=rows, seqlen_k=1 << 20).forward
    _, splits = ROW.sharing("queries", forward, HOPPER, entries)
    of_one = entries * rows * splits * head_dim * 8 if splits > 1 else 0
    assert 3 * of_one <= 26 << 20


def launches(cupy, q, k, v, dout):
    """What explain says of a call."""
    q, k, v = (cupy.asarray(x) for x in (q, k, v))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    return str(
        cupyflash.explain("attention_vjp", cupy.asarray(dout), q, k, v, out, lse)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", LONG_LOOPS)
def test_which_loops_are_shared(cupy, rng, seqlens):
    arrays = inputs(rng, "float64", **shapes(*seqlens, 64))
    told = launches(cupy, *arrays)
    assert ("fp64/backward_dq_finish.cu" in told) == (seqlens[1] >= 512)
    assert ("backward_reduce.cu" in told) == (seqlens[0] >= 512)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seqlens", LONG_LOOPS)
@pytest.mark.parametrize("dims", [(64, 64), (100, 128)])
def test_blocks_share_long_loops(cupy, rng, name, seqlens, dims):
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims))
    agree(cupy, *arrays, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(20, 700), (700, 20)])
def test_all_options_of_shared_loops(cupy, rng, seqlens):
    queries, keys = seqlens
    options = {
        "bias": rng.normal(size=(4, queries, keys)),
        "mask": rng.random((queries, keys)) < 0.8,
        "sinks": rng.normal(size=4),
        "alibi_slopes": rng.random(4) * 0.1,
        "query_lengths": np.array([queries - 3]),
        "key_lengths": np.array([keys - 7]),
        "softcap": 4.0,
        "window": (600, 600),
    }
    q, k = (1, 4, queries, 64), (1, 2, keys, 64)
    arrays = inputs(rng, "float64", q=q, k=k)
    agree(cupy, *arrays, **options)
    for name in ("sinks", "query_lengths", "key_lengths", "mask", "bias"):
        agree(cupy, *arrays, **{name: options[name]})
    agree(cupy, *arrays, dlse=rng.normal(size=(1, 4, queries)), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "batch_k"), [((3,), (1,)), ((1,), (3,)), ((2,), ())])
@pytest.mark.parametrize("seqlens", [(6, 600), (600, 6)])
def test_shared_loops_of_shared_arrays(cupy, rng, batch, batch_k, seqlens):
    """Sums over entries stand beside sums over splits."""
    shapes = {"q": (*batch, 4, seqlens[0], 64), "k": (*batch_k, 1, seqlens[1], 64)}
    agree(cupy, *inputs(rng, "float64", **shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("seqlens", [(600, 9), (9, 600)])
def test_shared_loops_and_values_that_are_not_finite(cupy, rng, bad, seqlens):
    q, k, v, dout = inputs(rng, "float64", **shapes(*seqlens, 64))
    options = {"key_lengths": seqlens[1] - 3}
    clean = gradients(cupy, q, k, v, dout, **options)
    k[:, -2:], v[:, -1:] = bad, bad  # which nobody sees
    hidden = gradients(cupy, q, k, v, dout, **options)
    for a, b in zip(clean[:3], hidden[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))
    k[0, 3, 5] = bad
    agree(cupy, q, k, v, dout)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", LONG_LOOPS)
def test_shared_loops_have_the_same_bits_again(cupy, rng, seqlens):
    arrays = inputs(rng, "float64", **shapes(*seqlens, 64))
    first = gradients(cupy, *arrays)
    again = gradients(cupy, *arrays)
    for a, b in zip(first[:3], again[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(40, 1500), (1500, 40)])
def test_weights_of_shared_loops_sum_to_1(cupy, rng, seqlens):
    """Whatever lse was rounded to, unless it knows of more keys."""
    q, k, v, dout = (
        place(cupy, x) for x in inputs(rng, "float64", **shapes(*seqlens, 64))
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    exact = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    near = cupyflash.attention_vjp(dout, q, k, v, out, lse * (1 + 4e-16))
    half = cupyflash.attention_vjp(dout, q, k, v, out, lse + np.log(2))
    for a, b, c in zip(exact[:3], near[:3], half[:3], strict=True):
        largest = np.abs(to_host(a)).max()
        assert max_error(b, to_host(a)) <= 1e-14 * largest
        assert max_error(c, to_host(a) / 2) <= 1e-13 * largest
