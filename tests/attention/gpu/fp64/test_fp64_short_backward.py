"""The row of float64 gradients of few keys: what it takes, its blocks, its results."""

import dataclasses

import fp64_vjp_laws
import numpy as np
import pytest
import small_entries
from accuracy import assert_as_accurate, max_error, to_host
from placing import ROW_FORMS
from test_attention_vjp import agree, gradients, inputs
from test_fp64_backward import ARCHS, HOPPER, OPTIONS, launches, shapes

from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.fp64.short_backward import SHORT_F64_VJP as ROW
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel
from cupyflash._reference import backward as reference_vjp

MOST = {32: 64, 64: 32, 96: 32, 128: 32, 192: 32, 256: 32}  # keys, by head dimension


def problem(head_dim=64, keys=16, more=None, **options):
    forward = samples.made_up("float64", head_dim)
    forward = dataclasses.replace(forward, seqlen_k=keys, **options)
    return AttentionVjpProblem(forward, (), (), (), **(more or {}))


# --- selection -----------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 8, 32, 33, 64, 90, 128, 129, 192, 256])
@pytest.mark.parametrize("options", [{}, {"bias": "float64"}, {"softcap": 3.0}])
def test_takes_few_keys(head_dim, options):
    most = MOST[ROW.dim(problem(head_dim).forward)]
    for keys in (1, 16, 17, most):
        asked = problem(head_dim, keys, **options)
        assert kernel.select(ATTENTION_VJP_KERNELS, asked, HOPPER)[0] is ROW
        team = ROW.team(asked.forward, HOPPER, 1)
        config = ROW.config("all", team, asked.forward, 1, "float64", 1)
        assert config.variant.smem + 3072 <= HOPPER.smem_optin
    asked = problem(head_dim, most + 1, **options)
    assert kernel.select(ATTENTION_VJP_KERNELS, asked, HOPPER)[0] is not ROW


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(dtype="float32"), "sm_90a", "takes float64, not float32"),
        (problem(257), "sm_90a", "not both up to 256"),
        (problem(keys=0), "sm_90a", "1 to 64 keys, not 0"),
        (problem(keys=65), "sm_90a", "1 to 64 keys, not 65"),
        (problem(128, keys=33), "sm_90a", "more shared memory"),
        (problem(256, keys=33), "sm_90a", "more shared memory"),
        (problem(128, keys=32), "sm_80", "more shared memory"),
        (problem(256, keys=17), "sm_80", "more shared memory"),
        (problem(seqlen_q=1 << 16), "sm_90a", "sums up to 32768 queries"),
        (problem(num_kv_heads=4), "sm_90a", "of a head of k, not 65536"),
        (problem(more={"need_dbias": True}), "sm_90a", "does not compute dbias"),
        (problem(keys_of_part=256), "sm_90a", "all keys of a head"),
        (problem(), "sm_86", "no fast tensor cores"),
        (
            AttentionVjpProblem(problem(batch=(3,)).forward, (64, 4096, 64), (), ()),
            "sm_90a",
            "q is shared by entries of the batch",
        ),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    device = _device.device_of_arch(arch)
    assert reason in ROW.unsupported_reason(asked, device)
    assert kernel.select(ATTENTION_VJP_KERNELS, asked, device)[0] is not ROW


@pytest.mark.parametrize("arch", ARCHS)
def test_a_block_has_no_more_warps_than_tiles(arch):
    device = _device.device_of_arch(arch)
    for (keys, dim), teams in ROW.teams.items():
        forward = problem(dim, keys).forward
        if not ROW.fitting(forward, device):
            continue
        for queries in (1, 16, 17, 40, 64, 200, 4096):
            asked = dataclasses.replace(forward, seqlen_q=queries)
            team = ROW.team(asked, device, 1)
            assert team.warps % team.team == 0
            units = -(-queries // team.block_m)
            assert team.teams < 2 * units or team.teams % 2 == 1
            others = [ROW.of_few[keys, dim][1]] if (keys, dim) in ROW.of_few else []
            assert team.warps <= max(t.warps for t in (*teams, *others))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_few_queries_have_small_tiles(arch):
    """Of heads of 97 to 128 columns, and of no more shared memory than the others."""
    device = _device.device_of_arch(arch)

    def tile(queries, summed=1, head_dim=128, keys=32):
        forward = problem(head_dim, keys, seqlen_q=queries).forward
        team = ROW.team(forward, device, summed)
        assert team.smem(32, 128) <= ROW.teams[32, 128][0].smem(32, 128)
        return team.block_m

    assert {tile(n) for n in (1, 16, 33, 48)} == {tile(16, 3)} == {16}
    assert {tile(n) for n in (49, 64, 4096)} == {tile(16, 4)} == {64}
    assert tile(48, head_dim=100, keys=17) == 16
    assert tile(48, head_dim=128, keys=16) == 32
    assert tile(16, head_dim=96) == 64


def test_blocks_share_queries_where_multiprocessors_are_idle():
    def splits(entries, queries, summed=1, keys=16):
        forward = problem(keys=keys, seqlen_q=queries).forward
        team = ROW.team(forward, HOPPER, summed)
        return ROW.splits(forward, HOPPER, team, entries, summed)

    assert splits(1, 511) == splits(1000, 511) == splits(10_000, 4096) == 1
    assert splits(1, 512) > 1
    assert splits(32, 4096) > 1
    assert splits(1, 256, summed=2) > 1


# --- results -------------------------------------------------------------------------


@pytest.fixture
def cupy(cupy, monkeypatch):
    """CuPy, without the rows that would take calls of few queries."""
    others = "few_f64", "gemv"
    small_entries.change_tables(
        monkeypatch, lambda rows: tuple(row for row in rows if row.name not in others)
    )
    return cupy


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [1, 7, 16, 17, 32, 50, 64])
@pytest.mark.parametrize("queries", [1, 16, 33, 150, 700])
@pytest.mark.parametrize(
    "dims",
    [
        (8, 8),
        (64, 64),
        (33, 100),
        (128, 128),
        (96, 7),
        (190, 60),
        (129, 256),
        (256, 256),
    ],
)
def test_sizes(cupy, rng, keys, queries, dims):
    arrays = inputs(rng, "float64", **shapes(queries, keys, *dims))
    dim = next(n for n in MOST if max(dims) <= n)
    if (queries, keys, *dims) != (1, 1, 8, 8):  # of the row for the fewest of both
        is_taken = "on cupy: short_f64" in launches(cupy, *arrays)
        assert is_taken == (keys <= MOST[dim])
    agree(cupy, *arrays)
    agree(cupy, *arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seqlens", [(150, 32), (40, 5), (900, 16)])
@pytest.mark.parametrize("dims", [(64, 64), (100, 128), (256, 200), (130, 192)])
def test_options(cupy, rng, name, seqlens, dims):
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims, heads=(4, 2)))
    agree(cupy, *arrays, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(20, 30), (70, 20), (700, 11)])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_all_options(cupy, rng, seqlens, head_dim):
    queries, keys = seqlens
    q, k = (2, 4, queries, head_dim), (2, 2, keys, head_dim)
    fp64_vjp_laws.all_options(cupy, rng, q, k, [queries - 3, 20])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ROW_FORMS)
@pytest.mark.parametrize("dim", [50, 130])
def test_strides(cupy, rng, form, dim):
    arrays = inputs(rng, "float64", q=(3, 2, 70, dim), k=(3, 2, 9, dim))
    agree(cupy, *arrays, forms=dict.fromkeys(("q", "k", "v", "dout", "out"), form))


@pytest.mark.gpu
@pytest.mark.parametrize("batch_k", [(1,), ()])
@pytest.mark.parametrize("queries", [30, 600])
@pytest.mark.parametrize("dim", [64, 256])
def test_entries_that_share_keys(cupy, rng, batch_k, queries, dim):
    q, k, v, _ = inputs(rng, "float64", (3, 4, queries, dim), (*batch_k, 2, 12, dim))
    dout = rng.normal(size=(3, 4, queries, dim))
    agree(cupy, q, k, v, dout, causal=True)
    agree(cupy, q, k, np.concatenate([v.reshape(1, 2, 12, dim)] * 3), dout)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(200, 3), (1500, 30)])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_as_accurate_as_the_plain_computation(cupy, rng, seqlens, head_dim):
    q, k, v, dout = inputs(rng, "float64", **shapes(*seqlens, head_dim))
    grads = gradients(cupy, q, k, v, dout)
    exact = reference_vjp.attention_vjp(dout, q, k, v)
    plain = reference_vjp.plain_attention_vjp(dout, q, k, v)
    for got, standard, best in zip(grads[:3], plain[:3], exact[:3], strict=True):
        assert_as_accurate(to_host(got), standard, best, factor=3.0)
        assert max_error(got, best) <= 1e-13 * np.abs(best).max()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("seqlens", [(60, 12), (600, 30)])
@pytest.mark.parametrize("dim", [64, 160])
def test_what_nobody_sees_leaves_the_bits_as_they_are(cupy, rng, bad, seqlens, dim):
    arrays = inputs(rng, "float64", **shapes(*seqlens, dim))
    fp64_vjp_laws.what_nobody_sees_leaves_the_bits_as_they_are(
        cupy, arrays, bad, slice(33, 35)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(60, 12), (600, 30)])
@pytest.mark.parametrize("dim", [64, 256])
def test_values_that_are_not_finite(cupy, rng, seqlens, dim):
    arrays = inputs(rng, "float64", **shapes(*seqlens, dim))
    fp64_vjp_laws.values_that_are_not_finite(cupy, arrays, row=3)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("seqlens", [(30, 20), (150, 20), (40, 1), (500, 16)])
def test_the_same_bits_in_every_run(cupy, rng, head_dim, seqlens):
    """Whatever the other heads, unless blocks share queries."""
    q, k, v, dout = inputs(rng, "float64", **shapes(*seqlens, head_dim))
    whole = gradients(cupy, q, k, v, dout, causal=True)
    again = gradients(cupy, q, k, v, dout, causal=True)
    many = (np.tile(x, (40, 1, 1)) for x in (q, k, v, dout))
    many = gradients(cupy, *many, causal=True)
    for a, b, c in zip(whole[:3], again[:3], many[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))
        np.testing.assert_array_equal(to_host(a), to_host(c)[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(5000, 1), (2049, 32)])
@pytest.mark.parametrize("dim", [64, 256])
def test_shared_queries_have_the_same_bits_again(cupy, rng, seqlens, dim):
    arrays = inputs(rng, "float64", **shapes(*seqlens, dim))
    assert "backward_reduce.cu" in launches(cupy, *arrays)
    agree(cupy, *arrays)
    fp64_vjp_laws.the_same_bits_again(cupy, arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(60, 7), (700, 20)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dim", [64, 256])
def test_lse_of_other_roundings(cupy, rng, seqlens, has_sinks, dim):
    arrays = inputs(rng, "float64", **shapes(*seqlens, dim))
    sinks = rng.normal(size=2) if has_sinks else None
    need = {"need_dsinks": True} if has_sinks else {}
    fp64_vjp_laws.lse_of_other_roundings(cupy, arrays, sinks, **need)
