"""The hopper_wide row of the attention table: what it takes, its parts of the keys."""

import dataclasses

import numpy as np
import oracle
import pytest
from accuracy import dtype_of, to_host, wide
from placing import ROW_FORMS, place
from test_sm80_forward import OPTIONS, attend, compare

import cupyflash
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.sm90.forward_wide import HOPPER_WIDE
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel

H200 = _device.device_of_arch("sm_90a")
DIMS = (
    (576, 512),
    (512, 512),
    (576, 576),
    (257, 257),
    (512, 64),
    (64, 512),
    (512, 300),
)


def problem(dtype="bfloat16", dims=(576, 512), **options):
    made = samples.made_up(dtype, dims[0])
    return dataclasses.replace(made, head_dim_v=dims[1], **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dims", [*DIMS, (320, 320), (384, 384), (1, 260), (300, 1)])
@pytest.mark.parametrize("options", [{}, {"mask": "bool"}, "all"])
def test_takes(dtype, dims, options):
    options = samples._ALL_OPTIONS if options == "all" else options
    asked = problem(dtype, dims, no_tensor_map="q starts anywhere", **options)
    row, _ = kernel.select(ATTENTION_KERNELS, asked, H200)
    assert row is HOPPER_WIDE
    (config,) = row.configs(asked, 2, H200)
    assert config.variant.smem <= H200.smem_optin
    assert config.num_blocks == 64 * 64
    rounded = tuple(-(-n // 64) * 64 for n in dims)
    defines = dict(config.variant.defines)
    assert (defines["HEAD_DIM"], defines["HEAD_DIM_V"]) == tuple(map(str, rounded))


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(), "sm_80", "needs sm_90a"),
        (problem(), "sm_120", "needs sm_90a"),
        (problem("float32"), "sm_90a", "takes float16 and bfloat16, not float32"),
        (problem(dims=(577, 64)), "sm_90a", "head_dim 577 is above 576"),
        (problem(dims=(64, 640)), "sm_90a", "head_dim_v 640 is above 576"),
        (problem(dims=(256, 256)), "sm_90a", "is for heads above 256 columns"),
        (problem("float16", seqlen_k=(1 << 18) + 1), "sm_90a", "up to 262144 keys"),
    ],
)
def test_leaves_to_other_rows(asked, arch, reason):
    device = _device.device_of_arch(arch)
    assert reason in HOPPER_WIDE.unsupported_reason(asked, device)
    row, _ = kernel.select(ATTENTION_KERNELS, asked, device)
    assert row is not HOPPER_WIDE


@pytest.mark.parametrize(
    ("asked", "mapped"),
    [
        ({}, True),
        ({"seqlen_k": 0}, False),
        ({"dims": (512, 576)}, False),
        ({"no_tensor_map": "k starts anywhere"}, False),
    ],
)
def test_what_the_copy_engine_brings(asked, mapped):
    asked = problem(**asked)
    assert HOPPER_WIDE.is_mapped(asked, 2) == mapped
    assert not HOPPER_WIDE.is_mapped(asked, 3)
    (config,) = HOPPER_WIDE.configs(asked, 2, H200)
    assert ("MAPPED" in dict(config.variant.defines)) == mapped


def test_needs_a_compiler_for_it():
    old = dataclasses.replace(H200, nvrtc=(12, 8))
    assert "needs NVRTC 12.9" in HOPPER_WIDE.unsupported_reason(problem(), old)


@pytest.mark.parametrize(
    ("asked", "split"),
    [
        (problem(), (1, 4096)),
        # 128 heads of one query that share their keys, 16 sequences: 32 tiles.
        ({"seqlen_q": 128, "num_heads": 1, "batch": (16,)}, (4, 1024)),
        ({"seqlen_q": 128, "num_heads": 1, "batch": (1,)}, (16, 256)),
        ({"seqlen_q": 64, "num_heads": 67, "batch": (1,)}, (1, 4096)),
        ({"seqlen_q": 1, "num_heads": 1, "seqlen_k": 511}, (1, 511)),
        ({"seqlen_q": 1, "num_heads": 1, "seqlen_k": 513}, (3, 256)),
    ],
)
def test_split_of_the_keys(asked, split):
    if isinstance(asked, dict):
        asked = {"num_kv_heads": asked["num_heads"], **asked}
        asked = problem(**asked)
    assert HOPPER_WIDE.split_kv(asked, H200)[:2] == split


def test_shared_memory():
    tiles = 2 * 64 * (2 * 320 + 64 + 64)
    assert HOPPER_WIDE.smem(problem(dims=(300, 64))) == tiles + 512 + 32


# --- on a device ---------------------------------------------------------------------


@pytest.fixture(autouse=True)
def on_hopper(request):
    if request.node.get_closest_marker("gpu"):
        from cupyflash._cuda import runtime

        reason = HOPPER_WIDE.unsupported_reason(problem(), runtime.device(0))
        if reason is not None:
            pytest.skip(reason)


def arrays_of(rng, dtype, dims, queries=70, keys=100, heads=(2, 4, 2)):
    batch, num_heads, kv_heads = heads
    shapes = (
        (batch, num_heads, queries, dims[0]),
        (batch, kv_heads, keys, dims[0]),
        (batch, kv_heads, keys, dims[1]),
    )
    return [(rng.normal(size=s) * 1.5).astype(dtype_of(dtype)) for s in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlens", [(70, 100), (130, 513), (1, 1), (1, 700)])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dims(cupy, rng, dtype, dims, seqlens, causal):
    arrays = arrays_of(rng, dtype, dims, *seqlens)
    if dtype == "float16" or seqlens == (130, 513):
        compare(cupy, arrays, {"causal": causal})


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(70, 100), (200, 777)])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "dims"), [("bfloat16", (576, 512)), ("float16", (320, 320))]
)
def test_options(cupy, rng, dtype, dims, option, seqlens):
    arrays = arrays_of(rng, dtype, dims, *seqlens)
    shapes = [x.shape for x in arrays]
    compare(cupy, arrays, OPTIONS[option](rng, *shapes[:2]))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [*ROW_FORMS, "swapped", "gaps"])
def test_strides(cupy, rng, form):
    """In memory of any form the bits are the same."""
    arrays = arrays_of(rng, "float16", (576, 512), 130, 150)
    result, expected = (
        cupyflash.attention(*[place(cupy, x, lies) for x in arrays])
        for lies in (form, "plain")
    )
    np.testing.assert_array_equal(to_host(result), to_host(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 1000])
@pytest.mark.parametrize("group", [1, 7, 128])
def test_one_query_and_a_group(cupy, rng, group, keys):
    """Heads that share their keys become rows of a tile; parts of keys are merged."""
    arrays = arrays_of(rng, "bfloat16", (576, 512), 1, keys, (2, group, 1))
    sinks = rng.normal(size=group).astype(np.float32)
    for options in ({}, {"sinks": sinks}, {"key_lengths": np.array([keys, keys // 3])}):
        compare(cupy, arrays, options)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("keys", [300, 600])
@pytest.mark.parametrize("option", ["causal", "window", "mask", "bias"])
def test_hidden_values_leave_no_bit(cupy, rng, option, keys, bad):
    """Rows that do not see a NaN keep their bits; those that see it get it."""
    q, k, v = arrays_of(rng, "float16", (512, 512), 200, keys, (1, 2, 2))
    options = OPTIONS[option](rng, q.shape, k.shape)
    expected = attend(cupy, (q, k, v), "float32", **options)[0]
    v[:, :, 150, 301] = bad
    result = attend(cupy, (q, k, v), "float32", **options)[0]
    names = ("mask", "causal", "query_offset", "window", "query_lengths", "key_lengths")
    seen, _, _ = oracle.visible(
        (1,), 2, 200, keys,
        *(options.get(n, False if n == "causal" else None) for n in names),
    )  # fmt: skip
    seen = np.broadcast_to(seen, (1, 2, 200, keys))[..., 150]
    if option == "bias":
        seen = seen & ~np.isneginf(options["bias"][..., 150])
    np.testing.assert_array_equal(result[~seen], expected[~seen])
    others = np.arange(512) != 301
    np.testing.assert_array_equal(result[..., others], expected[..., others])
    assert not np.isfinite(result[seen][:, 301]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 64, 200])
def test_what_lies_behind_the_lengths(cupy, rng, queries):
    q, k, v = arrays_of(rng, "bfloat16", (576, 512), queries, 700, (3, 2, 1))
    lengths = np.array([0, 130, 700])
    expected = attend(cupy, (q, k, v), "float32", key_lengths=lengths)
    for x in (k, v):
        x[0], x[1, :, 130:] = np.nan, np.nan
    result = attend(cupy, (q, k, v), "float32", key_lengths=lengths)
    for x, y in zip(result, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [1, 13, 40])
def test_maxima_that_move(cupy, rng, step):
    # Scores grow along the keys, in every `step`-th of them; all of one sign.
    q, k, v = arrays_of(rng, "float16", (576, 512), 70, 600)
    q, k = np.abs(q), np.abs(k)
    k[..., ::step, :] *= (np.arange(0, 600, step)[:, None] / 100).astype(k.dtype)
    compare(cupy, (q, k, v), {})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_huge_scores(cupy, rng, dtype):
    """A row of huge scores is its value of the largest; the rest keep their bits."""
    q, k, v = arrays_of(rng, dtype, (512, 512), 200, 260, (1, 2, 2))
    huge = np.isin(np.arange(200), [0, 3, 70, 71, 150, 199])
    if dtype == "float16":
        k = (wide(k) * 1e3).astype(k.dtype)
    clean = attend(cupy, (q, k, v), "float32")
    q[:, :, huge] = (
        wide(q[:, :, huge]) * (3e3 if dtype == "float16" else 1e25)
    ).astype(q.dtype)
    result = attend(cupy, (q, k, v), "float32")
    for x, y in zip(result, clean, strict=True):
        np.testing.assert_array_equal(x[:, :, ~huge], y[:, :, ~huge])
    scores = wide(q)[:, :, huge] @ wide(k).swapaxes(-1, -2) * 512**-0.5
    second, first = np.sort(scores, axis=-1)[..., -2:].transpose(3, 0, 1, 2)
    clear = (first - second) > 0.01 * np.abs(first)
    assert clear.any()
    best = np.take_along_axis(wide(v), scores.argmax(-1)[..., None], axis=2)
    out, lse = (x[:, :, huge] for x in result)
    np.testing.assert_allclose(lse[clear], first[clear], rtol=2.0**-20)
    np.testing.assert_array_equal(out[clear], best[clear])


@pytest.mark.gpu
def test_no_keys(cupy):
    q, k, v = (cupy.ones((1, 2, n, 512), "f2") for n in (70, 0, 0))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
