"""The float64 row of the gradient table: what it takes, its tiles, and its results."""

import dataclasses

import numpy as np
import pytest
from accuracy import assert_as_accurate, max_error, to_host
from placing import place
from test_attention_vjp import agree, gradients, inputs

import cupyflash
from cupyflash._attention.gpu import samples
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
    device = _device.device_of_arch(arch)
    asked = problem(head_dim, **options)
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device)
    assert row is ROW
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
    tile = ROW.tile(forward, device, heads, seqlen)
    assert tile.num_threads == 4 * tile.block_m
    assert len({tile.block_n for tile in ROW.fitting(forward, device)}) == 1


def test_where_a_tile_spills_it_is_shorter_and_the_block_is_not():
    for arch, block_n in (("sm_80", 64), ("sm_90a", 64), ("sm_100", 32)):
        tiles = ROW.fitting(problem(64).forward, _device.device_of_arch(arch))
        assert (tiles[0].block_m, tiles[0].block_n) == (64, block_n)
    tiles = ROW.fitting(problem(64, softcap=3.0).forward, HOPPER)
    assert (tiles[0].block_m, tiles[0].block_n) == (64, 32)


# --- results -------------------------------------------------------------------------


def shapes(seqlen_q, seqlen_k, head_dim, head_dim_v=None, heads=(2, 2)):
    q, k = (heads[0], seqlen_q, head_dim), (heads[1], seqlen_k, head_dim)
    return {"q": q, "k": k, "head_dim_v": head_dim_v}


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(1, 1), (1, 300), (130, 127), (300, 65), (33, 0)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 100), (96, 7)])
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
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_in_every_run(cupy, rng, head_dim):
    """Whatever the tiles: neither the heads beside it nor block_m change a gradient."""
    q, k, v, dout = inputs(rng, "float64", **shapes(150, 333, head_dim))
    whole = gradients(cupy, q, k, v, dout, causal=True)
    again = gradients(cupy, q, k, v, dout, causal=True)
    many = gradients(
        cupy, *(np.tile(x, (40, 1, 1)) for x in (q, k, v, dout)), causal=True
    )
    for a, b, c in zip(whole[:3], again[:3], many[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))
        np.testing.assert_array_equal(to_host(a), to_host(c)[:2])
