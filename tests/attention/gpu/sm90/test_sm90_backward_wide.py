"""The Hopper row of wide heads and options in the gradient table, and its numbers."""

import dataclasses

import numpy as np
import pytest
import small_entries
import vjp_laws
from accuracy import to_host
from placing import FORMS, place
from test_attention_vjp import BIASES, OPTIONS, agree, gradients, inputs
from test_sm90_backward import BOUNDS, HALVES, HOPPER, SEQLENS, problem

import cupyflash
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.sm90 import backward_wide
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel

ROW = backward_wide.HOPPER_WIDE_VJP


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [129, 136, 160, 192, 200, 255, 256])
@pytest.mark.parametrize("bounds", [{}, {"right": 0}, {"left": 5, "right": 3}])
def test_takes(dtype, head_dim, bounds):
    asked = problem(dtype, head_dim, **bounds)
    assert ROW.unsupported_reason(asked, HOPPER) is None
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, HOPPER)
    assert row is ROW


@pytest.mark.parametrize(
    ("dims", "compiled"), [((192, 128), 192), ((64, 136), 192), ((8, 256), 256)]
)
def test_takes_the_larger_of_two_head_dims(dims, compiled):
    asked = problem(head_dim=dims[0], head_dim_v=dims[1])
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, HOPPER)
    assert row is ROW
    assert ROW.dim(asked.forward) == compiled


@pytest.mark.parametrize(
    ("asked", "device", "reason"),
    [
        (problem("float32", 256), HOPPER, "takes float16 and bfloat16, not float32"),
        (problem(head_dim=1), HOPPER, "head_dim 1 is not from 2"),
        (problem(head_dim=257), HOPPER, "head_dim 257 is not from 2 to 256"),
        (problem(head_dim=128), HOPPER, "takes head dimensions above 128, not 128"),
        (problem(head_dim=256, no_tensor_map="q starts"), HOPPER, "q starts"),
        (problem(head_dim=256, softcap=3.0), HOPPER, "has no softcap"),
        (problem(head_dim=256, bias="float32"), HOPPER, "has no bias"),
        (problem(head_dim=64, mask="bool"), HOPPER, "TMA cannot read"),
        (
            problem(head_dim=64, bias="float64", terms="tiles"),
            HOPPER,
            "does not support a float64 bias for each score",
        ),
        (problem(head_dim=256, bias="float32", terms="tiles"), HOPPER, "shared memory"),
        (problem(head_dim=64, scale=0.0, softcap=3.0), HOPPER, "takes scales from"),
        (problem("float32", 64, softcap=3.0), HOPPER, "takes float16 and bfloat16"),
        (problem(head_dim=256, scale=0.0), HOPPER, "takes scales from 1e-20"),
        (problem(head_dim=256), _device.device_of_arch("sm_80"), "needs sm_90a"),
        (problem(head_dim=256), _device.device_of_arch("sm_100"), "needs sm_90a"),
        (
            problem(head_dim=256),
            dataclasses.replace(HOPPER, smem_optin=101376),
            "shared memory",
        ),
        (problem(head_dim=256, seqlen_k=0), HOPPER, "no keys"),
    ],
)
def test_leaves_to_the_next_row(asked, device, reason):
    assert reason in ROW.unsupported_reason(asked, device)
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device)
    assert row is not ROW


def test_a_q_that_entries_share_is_left_to_the_next_row():
    asked = problem(head_dim=256, batch=(3,))
    own = dataclasses.replace(asked, q_shape=(3, 8, 9, 256))
    shared = dataclasses.replace(asked, q_shape=(1, 8, 9, 256))
    assert ROW.unsupported_reason(own, HOPPER) is None
    assert "batch entries that share q" in ROW.unsupported_reason(shared, HOPPER)


SWITCHES = {
    "bias of keys": {"bias": "float32", "terms": "keys"},
    "mask of keys": {"mask": "bool", "terms": "keys"},
    "bias": {"bias": "float32", "terms": "tiles"},
    "16-bit bias": {"bias": "bfloat16", "terms": "tiles"},
    "mask": {"mask": "bool", "terms": "tiles"},
    "bias and mask": {"bias": "float16", "mask": "bool", "terms": "tiles"},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": "float32"},
    "sinks": {"sinks": "float32"},
    "key lengths": {"key_lengths": "int32"},
    "lengths": {"key_lengths": "int64", "query_lengths": "int32"},
    "offsets": {"query_offset": "array", "query_offsets": "int32"},
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("head_dim", [8, 33, 64, 96, 100, 128, 192, 256])
def test_takes_options(name, head_dim, dtype):
    asked = problem(dtype, head_dim, right=0, **SWITCHES[name])
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, HOPPER)
    too_wide = name in ("softcap", "bias", "16-bit bias", "mask", "bias and mask")
    if head_dim <= 64:
        too_wide = name in ("sinks", "key lengths", "lengths", "offsets")
    is_left = head_dim in (8, 33, 64, 256) and too_wide
    is_faster = name in ("alibi", "mask", "mask of keys") and head_dim <= 128
    assert row.name == ("hopper" if is_faster else "mma" if is_left else "hopper_wide")
    again = dataclasses.replace(asked, deterministic=True)
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, again, HOPPER)
    assert row.name == ("mma" if is_left else "hopper_wide")


def test_entries_that_share_k_must_see_the_same():
    asked = problem(head_dim=96, batch=(3,), key_lengths="int32")
    asked = dataclasses.replace(asked, q_shape=(3, 8, 9, 96))
    own = dataclasses.replace(asked, k_shape=(3, 8, 9, 96), v_shape=(3, 8, 9, 96))
    shared = dataclasses.replace(asked, k_shape=(1, 8, 9, 96), v_shape=(1, 8, 9, 96))
    assert ROW.unsupported_reason(own, HOPPER) is None
    assert "that share k see different keys" in ROW.unsupported_reason(shared, HOPPER)


@pytest.mark.parametrize("name", [None, *SWITCHES])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_stages_are_the_first_that_fit(name, head_dim):
    asked = problem(head_dim=head_dim, **SWITCHES.get(name, {}))
    if ROW.unsupported_reason(asked, HOPPER) is not None:
        return
    for part in ("_wide_keys", "_wide_queries"):
        variant = ROW.config(part, asked.forward, 1, 1).variant
        assert variant.smem <= HOPPER.smem_optin - 768
        stages = [int(n) for key, n in variant.defines if key.startswith("STAGES")]
        assert all(n >= 1 for n in stages)
        has_terms = "STAGES_TERMS" in dict(variant.defines)
        assert has_terms == bool(backward_wide.tiles_of_terms(asked.forward) and name)


def test_the_parameters_are_whole_lines():
    for struct in backward_wide.INPUTS.values():
        assert struct.dtype().itemsize % 64 == 0


# --- numbers -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_gemv(request, monkeypatch):
    """On a GPU, leave one query of each head of a group to this row, too."""
    if request.node.get_closest_marker("gpu"):
        leave_out(monkeypatch, "gemv")


def leave_out(monkeypatch, name):
    """Take a row out of the tables."""
    small_entries.change_tables(
        monkeypatch, lambda rows: tuple(row for row in rows if row.name != name)
    )


def check(cupy, rng, dtype, dims=(256, 256), *sizes, **options):
    """Compare with the oracle; the row must be this one.

    Alibi alone is left to the row `hopper` up to 128 columns.
    """
    options_alone = options.keys() - {"batch", "batch_k", "layout", "causal", "scale"}
    is_left = options_alone == {"alibi_slopes"} and max(dims) <= 128
    row = "hopper" if is_left else "hopper_wide"
    return vjp_laws.check(row, cupy, rng, dtype, dims, *sizes, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("dims", [(256, 256), (192, 192)])
def test_every_length(cupy, rng, dtype, name, seqlens, dims):
    check(cupy, rng, dtype, dims, seqlens=seqlens, batch=(1,), **BOUNDS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "dims", [(136, 136), (160, 160), (192, 128), (64, 184), (8, 256), (256, 40)]
)
def test_every_head_dim(cupy, rng, dtype, dims):
    check(cupy, rng, dtype, dims, seqlens=(150, 200), causal=True, scale=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dims", [(256, 256), (192, 192)])
def test_blocks_take_item_after_item(cupy, rng, name, dims):
    """Several for each multiprocessor, of different lengths."""
    options = {**BOUNDS[name], "batch": (3,)}
    check(cupy, rng, "bfloat16", dims, (16, 8), (900, 1300), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_query_heads_share_key_heads(cupy, rng, layout, heads, causal):
    options = {"layout": layout, "causal": causal}
    check(cupy, rng, "bfloat16", (256, 256), heads, (140, 270), **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "batch_k"),
    [((), ()), ((3,), (1,)), ((2, 3), (2, 3)), ((2, 3), (1, 3)), ((2, 3), (2, 1))],
)
def test_batch_axes(cupy, rng, batch, batch_k):
    options = {"batch": batch, "batch_k": batch_k, "causal": True}
    check(cupy, rng, "bfloat16", (192, 256), (4, 2), (150, 140), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [((1,), (3,)), ((1, 3), (2, 1))])
def test_shared_queries_go_to_the_next_row(cupy, rng, batch):
    shapes = {"q": (*batch[0], 4, 150, 256), "k": (*batch[1], 2, 140, 256)}
    agree(cupy, *inputs(rng, "bfloat16", **shapes), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-0.3, 1e-3, 2.0])
def test_scales(cupy, rng, scale):
    check(cupy, rng, "bfloat16", seqlens=(200, 100), scale=scale, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", [*FORMS, "heads"])
def test_strides(cupy, rng, dtype, form):
    vjp_laws.strides(cupy, rng, dtype, form, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_seen_never_leaks(cupy, rng, dtype, bad):
    vjp_laws.what_is_not_seen_never_leaks(cupy, rng, dtype, bad, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_nan_stays_where_it_is_seen(cupy, rng, dtype):
    vjp_laws.nan_stays_where_it_is_seen(cupy, rng, dtype, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-4, 1e-2, 30, 1000])
def test_gradients_of_every_size(cupy, rng, size):
    vjp_laws.gradients_of_every_size(cupy, rng, size, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [192, 256])
def test_the_same_bits_in_every_run(cupy, rng, head_dim):
    """Of all gradients, asked for or not; also from a graph."""
    shapes = {"q": (2, 8, 700, head_dim), "k": (2, 2, 900, head_dim)}
    arrays = [place(cupy, x) for x in inputs(rng, "bfloat16", **shapes)]
    q, k, v, dout = arrays
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)

    def call(deterministic=False):
        return cupyflash.attention_vjp(
            dout, q, k, v, out, lse, causal=True, deterministic=deterministic
        )

    first = [to_host(x).view(np.uint16) for x in call()[:3]]
    captured = vjp_laws.from_graph(cupy, call, q.shape)
    for again in (captured, call(), call(deterministic=True)):
        for a, b in zip(first, again[:3], strict=True):
            np.testing.assert_array_equal(a, to_host(b).view(np.uint16))


# --- options -------------------------------------------------------------------------


def options_of(name, rng, batch, heads, seqlen_q, seqlen_k):
    """Arguments of a call; rows of bias and mask are multiples of 16 bytes."""
    columns = -(-seqlen_k // 16) * 16
    dense = rng.normal(size=(batch, heads, seqlen_q, columns))
    dense[..., ::7] = -np.inf
    bias = dense[..., :seqlen_k].astype(np.float32)
    mask = rng.random((batch, 1, seqlen_q, columns)) < 0.8
    mask[:, :, :2] = False
    lengths = {
        "query_lengths": np.array([seqlen_q, seqlen_q // 2, 0, 3])[:batch],
        "key_lengths": np.array([seqlen_k // 3, seqlen_k, 5, 0])[:batch],
    }
    return {
        "bias of keys": {"bias": bias[:, :1, :1]},
        "mask of keys": {"mask": mask[:, :, 2:3, :seqlen_k]},
        "bias": {"bias": bias},
        "bias of all": {"bias": bias[0, 0], "causal": True},
        "mask": {"mask": mask[..., :seqlen_k]},
        "bias and mask": {"bias": bias, "mask": mask[0, 0, :, :seqlen_k]},
        "softcap": {"softcap": 2.5, "causal": True},
        "alibi": {"alibi_slopes": (rng.random(heads) * 0.2).astype(np.float32)},
        "sinks": {"sinks": rng.normal(size=heads).astype(np.float32)},
        "lengths": lengths,
        "causal lengths": {**lengths, "causal": True},
        "offsets": {"query_offset": np.array([5, -70, 0, 31])[:batch], "causal": True},
        "window of lengths": {**lengths, "window": (40, 20)},
    }[name]


# Left to the next row at 256 columns: no room for tiles, or for the softcap.
TOO_WIDE = ("bias", "bias of all", "mask", "bias and mask", "softcap")
# The same without others up to 64 columns.
ALONE = ("sinks", "lengths", "causal lengths", "offsets", "window of lengths")
# Alone, `hopper` takes them up to 128 columns.
MASKS = ("mask of keys", "mask")
OPTION_NAMES = (
    "bias of keys",
    "mask of keys",
    "bias",
    "bias of all",
    "mask",
    "bias and mask",
    "softcap",
    "alibi",
    "sinks",
    "lengths",
    "causal lengths",
    "offsets",
    "window of lengths",
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTION_NAMES)
@pytest.mark.parametrize("seqlens", [(64, 64), (304, 208), (96, 1040)])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_each_option(cupy, rng, monkeypatch, dtype, name, seqlens, head_dim):
    """float32 rows of 16 keys are whole vectors: TMA can read them."""
    if name in MASKS:
        leave_out(monkeypatch, "hopper")
    options = options_of(name, rng, 2, 4, *seqlens)
    if head_dim == 256 and name in TOO_WIDE:
        pytest.skip("left to the next row")
    if head_dim <= 64 and name in ALONE:
        options["softcap"] = 9.0
    if head_dim == 192 and name == "bias and mask":
        options["bias"] = options["bias"].astype(np.float16)
    check(cupy, rng, dtype, (head_dim, head_dim), (4, 2), seqlens, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(1, 1), (1, 300), (63, 113), (113, 63), (65, 70)])
@pytest.mark.parametrize("head_dim", [72, 128])
@pytest.mark.parametrize(
    "name", [n for n in OPTION_NAMES if n[:4] not in ("bias", "mask")]
)
def test_options_of_odd_lengths(cupy, rng, name, seqlens, head_dim):
    options = options_of(name, rng, 2, 4, *seqlens)
    check(cupy, rng, "bfloat16", (head_dim, head_dim), (4, 2), seqlens, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("terms", ["keys", "tiles"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_all_options_at_once(cupy, rng, dtype, terms, head_dim):
    shape = (1, 176) if terms == "keys" else (150, 176)
    options = {
        "bias": rng.normal(size=(4, *shape)).astype(np.float32),
        "mask": rng.random(shape) < 0.8,
        "sinks": rng.normal(size=4).astype(np.float32),
        "alibi_slopes": (rng.random(4) * 0.1).astype(np.float32),
        "query_lengths": np.array([150, 70]),
        "key_lengths": np.array([90, 176]),
        "softcap": 4.0,
        "window": (100, 60),
    }
    if terms == "tiles" and head_dim == 192:
        options["bias"] = options["bias"].astype(np.float16)
    check(cupy, rng, dtype, (head_dim, head_dim), (4, 2), (150, 176), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", [8, 128])
def test_the_options_of_all_rows(cupy, rng, name, head_dim, dtype):
    """With dlse, and the gradients of a bias a key and of sinks."""
    options = {
        n: x.astype(np.float32) if n in ("sinks", "alibi_slopes") else x
        for n, x in OPTIONS[name].items()
    }
    shapes = {"q": (2, 4, 9, head_dim), "k": (2, 2, 11, head_dim)}
    arrays = inputs(rng, dtype, **shapes)
    dlse = rng.normal(size=(2, 4, 9)).astype(np.float32)
    bias = rng.normal(size=(4, 1, 11)).astype(np.float32)
    agree(cupy, *arrays, dlse=dlse, bias=bias, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIASES)
def test_gradients_of_a_bias(cupy, rng, name):
    bias = rng.normal(size=BIASES[name]).astype(np.float32)
    agree(cupy, *inputs(rng, "bfloat16"), bias=bias, need_dbias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_padding_may_hold_anything(cupy, rng, bad, head_dim):
    vjp_laws.padding_may_hold_anything(cupy, rng, bad, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_and_keys_behind_a_mask_get_zeros(cupy, rng, dtype):
    """Also where NaN stands in them, and in the bias of what is hidden."""
    q, k, v, dout = inputs(rng, dtype, q=(2, 2, 160, 128), k=(2, 2, 192, 128))
    mask = rng.random((160, 192)) < 0.7
    mask[:70], mask[:, 130:] = False, False
    bias = rng.normal(size=(2, 160, 192)).astype(np.float32)
    bias[:, ~mask] = np.nan
    q[:, :, :70], dout[:, :, :70] = np.nan, np.inf
    k[:, :, 130:], v[:, :, 130:] = np.nan, np.nan
    grads = agree(cupy, q, k, v, dout, mask=mask, bias=bias, need_dbias=False)
    assert not to_host(grads.dq)[:, :, :70].any()
    assert not to_host(grads.dk)[:, :, 130:].any()
    assert not to_host(grads.dv)[:, :, 130:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bias", "mask", "softcap", "causal lengths"])
def test_the_same_bits_with_options(cupy, rng, monkeypatch, name):
    if name in MASKS:
        leave_out(monkeypatch, "hopper")
    options = options_of(name, rng, 2, 8, 704, 912)
    arrays = inputs(rng, "bfloat16", q=(2, 8, 704, 128), k=(2, 2, 912, 128))
    first = gradients(cupy, *arrays, **options)
    # Often, since TMA loads tiles into memory that warps have just read.
    for deterministic in (False, True) * 10:
        again = gradients(cupy, *arrays, deterministic=deterministic, **options)
        for a, b in zip(first[:3], again[:3], strict=True):
            a, b = (to_host(x).view(np.uint16) for x in (a, b))
            np.testing.assert_array_equal(a, b)


# --- rows that are no whole vectors --------------------------------------------------


@pytest.fixture
def copies(monkeypatch):
    """Calls of any length may have copies for TMA."""
    vjp_laws.copy_always(monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dims", [(129, 129), (200, 201), (255, 133), (65, 250)])
def test_odd_head_dims(cupy, rng, copies, dtype, name, dims):
    for seqlens in ((150, 200), (300, 65), (130, 300)):
        check(cupy, rng, dtype, dims, (4, 2), seqlens, batch=(1,), **BOUNDS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("batch", [((2,), (2,)), ((2, 3), (2, 1))])
def test_odd_heads_that_entries_share(cupy, rng, copies, layout, batch):
    options = {"layout": layout, "batch": batch[0], "batch_k": batch[1], "causal": True}
    check(cupy, rng, "bfloat16", (129, 200), (4, 2), (150, 140), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTION_NAMES)
@pytest.mark.parametrize("head_dim", [33, 65, 100, 129])
def test_each_option_of_odd_heads(
    cupy, rng, monkeypatch, copies, dtype, name, head_dim
):
    if name in MASKS:
        leave_out(monkeypatch, "hopper")
    options = options_of(name, rng, 2, 4, 304, 208)
    if head_dim <= 64 and name in ALONE:
        options["softcap"] = 9.0
    if head_dim == 129 and name == "bias and mask":
        options["bias"] = options["bias"].astype(np.float16)
    check(cupy, rng, dtype, (head_dim, head_dim), (4, 2), (304, 208), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("head_dim", [33, 100])
def test_gradients_of_a_bias_of_odd_heads(cupy, rng, copies, name, head_dim):
    """And of sinks."""
    bias = rng.normal(size=BIASES[name]).astype(np.float32)
    shapes = {"q": (2, 4, 9, head_dim), "k": (2, 2, 11, head_dim)}
    options = {"bias": bias, "sinks": rng.normal(size=4).astype(np.float32)}
    agree(cupy, *inputs(rng, "bfloat16", **shapes), **options, need_dbias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("head_dim", [100, 150])
def test_padding_of_odd_heads_may_hold_anything(cupy, rng, copies, bad, head_dim):
    vjp_laws.padding_may_hold_anything(cupy, rng, bad, head_dim)
    vjp_laws.what_is_not_seen_never_leaks(cupy, rng, "bfloat16", bad, head_dim)
