"""The row of float64 gradients by sections: what it takes, and its results."""

import ctypes
import dataclasses
import itertools

import numpy as np
import pytest
import small_entries
from accuracy import assert_as_accurate, max_error, to_host
from placing import ROW_FORMS, place
from test_attention_vjp import agree, gradients, inputs
from test_fp64_backward import ARCHS, OPTIONS, launches, shapes

import cupyflash
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.fp64 import sections_backward
from cupyflash._attention.gpu.fp64.sections_backward import (
    PRODUCTS,
    SQUARE,
    section_bytes,
)
from cupyflash._attention.gpu.fp64.sections_backward import SECTIONS_F64_VJP as ROW
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel
from cupyflash._reference import backward as reference_vjp


def problem(head_dim=256, **options):
    forward = samples.made_up("float64", head_dim)
    forward = dataclasses.replace(forward, **options)
    return AttentionVjpProblem(forward, (), (), ())


# --- selection -----------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [129, 160, 192, 256])
@pytest.mark.parametrize(
    "options", [{}, {"bias": "float64"}, {"softcap": 30.0}, {"seqlen_k": 1}]
)
def test_takes(arch, head_dim, options):
    device = _device.device_of_arch(arch)
    asked = problem(head_dim, **options)
    # That of few keys comes before it.
    rows = [row for row in ATTENTION_VJP_KERNELS if row.name != "short_f64"]
    assert kernel.select(rows, asked, device)[0] is ROW
    is_taken = kernel.select(ATTENTION_VJP_KERNELS, asked, device)[0] is ROW
    assert is_taken == (asked.forward.seqlen_k > 1)
    for part in PRODUCTS:
        for tile in ROW.fitting(device, part, asked.forward):
            config = ROW.config(part, tile, asked.forward, 1, "float64", 1)
            # Static memory takes up to 3 KiB more.
            assert config.variant.smem + 3072 <= device.smem_optin


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(dtype="float32"), "sm_90a", "takes float64, not float32"),
        (problem(257), "sm_90a", "not both up to 256"),
        (problem(seqlen_k=1 << 29), "sm_90a", "32 bits"),
        (problem(seqlen_q=1 << 29), "sm_90a", "32 bits"),
        (problem(seqlen_k=0), "sm_90a", "no keys"),
        (problem(keys_of_part=256), "sm_90a", "no parts of keys"),
        (problem(), "sm_86", "no fast tensor cores"),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    device = _device.device_of_arch(arch)
    assert reason in ROW.unsupported_reason(asked, device)
    assert kernel.select(ATTENTION_VJP_KERNELS, asked, device)[0] is not ROW


def of_sizes(head_dim, heads, queries, keys, **options):
    sizes = {"num_heads": heads, "seqlen_q": queries, "seqlen_k": keys}
    return problem(head_dim, num_kv_heads=heads, **sizes, **options)


WIDER = [
    (1, 512, 512), (32, 512, 4096), (32, 4096, 512), (1, 4096, 4096), (1, 32, 1 << 17),
    (128, 1 << 14, 1 << 13),
]  # fmt: skip
SMALL_HEADS = [(1024, 512, 512), (32, 256, 256), (1024, 32, 512), (1024, 512, 64)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("head_dim", "sizes"),
    [
        *itertools.product((113, 120, 128), WIDER + SMALL_HEADS),
        *itertools.product((49, 64, 81, 96), SMALL_HEADS),
    ],
)
def test_takes_narrow_heads(arch, head_dim, sizes):
    device = _device.device_of_arch(arch)
    asked = of_sizes(head_dim, *sizes)
    assert kernel.select(ATTENTION_VJP_KERNELS, asked, device)[0] is ROW
    # Grouped heads have the same products.
    grouped = dataclasses.replace(asked.forward, num_kv_heads=1)
    asked = dataclasses.replace(asked, forward=grouped)
    assert kernel.select(ATTENTION_VJP_KERNELS, asked, device)[0] is ROW
    # Either head dimension may be the larger one.
    forward = dataclasses.replace(asked.forward, head_dim=16)
    asked = dataclasses.replace(asked, forward=forward)
    assert kernel.select(ATTENTION_VJP_KERNELS, asked, device)[0] is ROW


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        *(
            (of_sizes(columns, 1024, 512, 512), f"does not take {columns} columns")
            for columns in (1, 32, 33, 48, 65, 80, 97, 112)
        ),
        (of_sizes(128, 1024, 31, 512), "of few scores"),
        (of_sizes(128, 1024, 512, 63), "of few scores"),
        (of_sizes(128, 1, 512, 500), "of few scores"),
        (of_sizes(64, 32, 128, 128), "of few scores"),
        (of_sizes(64, 32, 512, 4096), "262144 scores of a head"),
        (of_sizes(96, 32, 513, 512), "262144 scores of a head"),
        (of_sizes(128, 1, 512, (1 << 17) + 1), "bytes for weights"),
        (of_sizes(128, 128, 1 << 14, (1 << 13) + 1), "bytes for weights"),
        (of_sizes(128, 32, 512, 512, right=0), "bounds and options"),
        (of_sizes(128, 32, 512, 512, left=9), "bounds and options"),
        (of_sizes(128, 32, 512, 512, sinks="float64"), "bounds and options"),
        (of_sizes(128, 32, 512, 512, key_lengths="int32"), "bounds and options"),
        (of_sizes(128, 32, 512, 512, bias="float64"), "score options"),
        (of_sizes(128, 32, 512, 512, softcap=30.0), "score options"),
        (of_sizes(128, 32, 512, 512, mask="bool"), "score options"),
    ],
)
def test_leaves_narrow_heads_to_the_next_row(arch, asked, reason):
    device = _device.device_of_arch(arch)
    row, refused = kernel.select(ATTENTION_VJP_KERNELS, asked, device)
    assert row.name == "tiled_f64"
    assert reason in dict(refused)["sections_f64"]


def of_inputs(kept, summed, queries, keys):
    """The problem of `summed` heads of q of 256 columns for each of `kept` of k."""
    asked = problem(seqlen_q=queries, seqlen_k=keys, batch=(), num_heads=kept * summed)
    forward = dataclasses.replace(asked.forward, num_kv_heads=kept)
    q, k = (kept * summed, queries, 256), (kept, keys, 256)
    return AttentionVjpProblem(forward, q, k, k)


@pytest.mark.parametrize("kept", [1, 3, 32, 1000])
@pytest.mark.parametrize("summed", [1, 4, 100])
@pytest.mark.parametrize("queries", [1, 100, 512, 4096, 5000])
@pytest.mark.parametrize("keys", [1, 500, 4096, 100_000])
def test_sections_have_each_query_once_and_stay_small(kept, summed, queries, keys):
    asked = of_inputs(kept, summed, queries, keys)
    assert section_bytes(asked) == min(
        max(64 << 20, 1024 * kept * (summed * queries + keys) * 2), 256 << 20
    )
    seen = {}
    sections = [*ROW.sections(asked, kept, summed)]
    assert len(sections) <= 2.2 * sections_backward.MOST_SECTIONS
    for section in sections:
        assert section.num_kept > 0 < section.num_rows
        assert section.first_row % SQUARE == 0
        rows = section.num_entries * section.num_rows
        least = kept * summed * queries / sections_backward.MOST_SECTIONS
        # A square of queries is the least that there can be.
        small = 16 * rows * keys <= section_bytes(asked)
        assert small or rows <= max(SQUARE, least)
        first, last = section.first_kept, section.first_kept + section.num_kept
        of_last = section.first_summed + section.num_summed
        for entry in itertools.product(
            range(first, last), range(section.first_summed, of_last)
        ):
            assert seen.get(entry, 0) == section.first_row  # in order, without gaps
            seen[entry] = section.first_row + section.num_rows
        assert section.adds == (section.first_summed + section.first_row > 0)
    entries = itertools.product(range(kept), range(summed))
    assert seen == dict.fromkeys(entries, queries)


# --- results -------------------------------------------------------------------------


@pytest.fixture(params=["one section", "many"])
def cupy(cupy, monkeypatch, request):
    """CuPy, with calls in one section or in several."""
    if request.param == "many":
        for name in ("LEAST_BYTES", "MOST_BYTES"):
            monkeypatch.setattr(sections_backward, name, 1 << 19)
    others = "few_f64", "gemv", "tiny", "short_f64"
    small_entries.change_tables(
        monkeypatch, lambda rows: tuple(row for row in rows if row.name not in others)
    )
    return cupy


SEQLENS = [(1, 1), (1, 300), (130, 127), (300, 65), (40, 20), (700, 9)]


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("dims", [(256, 256), (129, 200), (40, 136), (192, 7)])
def test_sizes(cupy, rng, seqlens, dims):
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims))
    agree(cupy, *arrays)
    agree(cupy, *arrays, causal=True)
    assert "sections_f64" in launches(cupy, *arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(140, 270), (300, 65)])
@pytest.mark.parametrize("dims", [(128, 128), (65, 100), (16, 72), (33, 64)])
def test_sizes_of_narrow_heads(cupy, rng, monkeypatch, seqlens, dims):
    narrow = dataclasses.replace(ROW.narrow[128], least_pairs=0)
    row = dataclasses.replace(ROW, narrow=dict.fromkeys((64, 80, 112, 128), narrow))
    small_entries.change_tables(
        monkeypatch,
        lambda rows: tuple(row if x.name == row.name else x for x in rows),
    )
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims))
    agree(cupy, *arrays)
    assert "sections_f64" in launches(cupy, *arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(300, 270), (20, 300), (300, 20)])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(cupy, rng, seqlens, name):
    arrays = inputs(rng, "float64", **shapes(*seqlens, 160, heads=(4, 2)))
    agree(cupy, *arrays, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bias", "mask", "sinks", "alibi_slopes", "lengths"])
def test_arrays(cupy, rng, name):
    q, k = (2, 2, 150, 160), (2, 2, 170, 160)
    arrays = {
        "bias": {"bias": rng.normal(size=(2, 150, 170))},
        "mask": {"mask": rng.random((1, 170)) < 0.5},
        "sinks": {"sinks": rng.normal(size=2)},
        "alibi_slopes": {"alibi_slopes": rng.random(2)},
        "lengths": {
            "query_lengths": np.array([77, 150]),
            "key_lengths": np.array([90, 5]),
            "causal": True,
        },
    }[name]
    agree(cupy, *inputs(rng, "float64", q=q, k=k), **arrays)


@pytest.mark.gpu
def test_all_options(cupy, rng):
    options = {
        "bias": rng.normal(size=(4, 200, 270)),
        "mask": rng.random((200, 270)) < 0.8,
        "sinks": rng.normal(size=4),
        "alibi_slopes": rng.random(4) * 0.1,
        "query_lengths": np.array([197]),
        "key_lengths": np.array([263]),
        "softcap": 4.0,
        "window": (150, 150),
    }
    q, k = (1, 4, 200, 136), (1, 2, 270, 136)
    arrays = inputs(rng, "float64", q=q, k=k)
    agree(cupy, *arrays, **options)
    agree(cupy, *arrays, dlse=rng.normal(size=(1, 4, 200)), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "batch_k"), [((3,), (1,)), ((1,), (3,)), ((2,), ())])
@pytest.mark.parametrize("seqlens", [(6, 600), (600, 6), (140, 150)])
def test_entries_that_share_queries_or_keys(cupy, rng, batch, batch_k, seqlens):
    shapes = {"q": (*batch, 4, seqlens[0], 136), "k": (*batch_k, 1, seqlens[1], 136)}
    agree(cupy, *inputs(rng, "float64", **shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ROW_FORMS)
def test_rows_in_memory(cupy, rng, form):
    """Rows that are no multiples of vectors, and axes in another order."""
    q, k, v, dout = (
        place(cupy, x, form) for x in inputs(rng, "float64", **shapes(150, 140, 131))
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    got = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    exact = reference_vjp.attention_vjp(*(to_host(x) for x in (dout, q, k, v)))
    for a, b in zip(got[:3], exact[:3], strict=True):
        assert max_error(a, b) <= 1e-13 * np.abs(b).max()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_as_accurate_as_the_plain_computation(cupy, rng, causal):
    """Also where one key has nearly all the weight, at scores of 60."""
    q, k, v, dout = inputs(rng, "float64", **shapes(200, 250, 256))
    q[:, ::5] *= 2
    grads = gradients(cupy, q, k, v, dout, causal=causal)
    exact = reference_vjp.attention_vjp(dout, q, k, v, causal=causal)
    plain = reference_vjp.plain_attention_vjp(dout, q, k, v, causal=causal)
    for got, standard, best in zip(grads[:3], plain[:3], exact[:3], strict=True):
        assert_as_accurate(to_host(got), standard, best, factor=3.0)
        assert max_error(got, best) <= 1e-13 * np.abs(best).max()


@pytest.mark.gpu
def test_values_that_are_not_finite(cupy, rng):
    """What a query does not see never reaches it; what it sees does, as on the CPU."""
    q, k, v, dout = inputs(rng, "float64", **shapes(200, 200, 160))
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
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_nobody_sees_changes_nothing(cupy, rng, bad):
    q, k, v, dout = inputs(rng, "float64", **shapes(150, 170, 136))
    options = {"query_lengths": 140, "key_lengths": 165}
    clean = gradients(cupy, q, k, v, dout, **options)
    q[:, 140:], dout[:, 145:], k[:, 165:], v[:, 166:] = bad, bad, bad, bad
    hidden = gradients(cupy, q, k, v, dout, **options)
    for a, b in zip(clean[:3], hidden[:3], strict=True):
        a, b = to_host(a), to_host(b)
        assert np.abs(a - b).max() <= 1e-13 * np.abs(a).max()


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(150, 333), (16, 1333), (1500, 20)])
def test_the_same_bits_in_every_run(cupy, rng, seqlens):
    arrays = inputs(rng, "float64", **shapes(*seqlens, 160))
    first = gradients(cupy, *arrays, causal=True)
    again = gradients(cupy, *arrays, causal=True)
    for a, b in zip(first[:3], again[:3], strict=True):
        np.testing.assert_array_equal(to_host(a), to_host(b))


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(140, 150), (40, 1500), (1500, 40)])
def test_lse_of_other_roundings(cupy, rng, seqlens):
    """Weights sum to 1 whatever lse was rounded to, unless it knows of more keys."""
    q, k, v, dout = (
        place(cupy, x) for x in inputs(rng, "float64", **shapes(*seqlens, 136))
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    exact = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    near = cupyflash.attention_vjp(dout, q, k, v, out, lse * (1 + 4e-16))
    half = cupyflash.attention_vjp(dout, q, k, v, out, lse + np.log(2))
    for a, b, c in zip(exact[:3], near[:3], half[:3], strict=True):
        largest = np.abs(to_host(a)).max()
        assert max_error(b, to_host(a)) <= 1e-14 * largest
        assert max_error(c, to_host(a) / 2) <= 1e-13 * largest


@pytest.mark.gpu
def test_every_tile(cupy, rng, monkeypatch):
    """Each of them for all parts at once, plain and with options."""
    arrays = inputs(rng, "float64", **shapes(150, 170, 200))
    for tile in ROW.tiles:
        row = dataclasses.replace(ROW, tiles=(tile,), tiles_with_terms=(tile,))
        small_entries.change_tables(
            monkeypatch,
            lambda rows, own=row: tuple(own if x.name == own.name else x for x in rows),
        )
        agree(cupy, *arrays)
        agree(cupy, *arrays, causal=True, query_offset=20)


# --- what is in memory before ---------------------------------------------------------

FULL = 0x3F  # of each byte: 0.0005 in float64


@pytest.fixture
def full_memory(cupy, monkeypatch):
    """Memory that comes full of numbers. In emulation it would be NaN, which repairs
    would hide.
    """
    if "emulation" in cupy.__version__:
        from emulation.memory import Memory

        init = Memory.__init__

        def fill(self, size):
            init(self, size)
            ctypes.memset(self.ptr, FULL, size)

        monkeypatch.setattr(Memory, "__init__", fill)
        yield
        return
    malloc = cupy.get_default_memory_pool().malloc

    def filled(size):
        memory = malloc(size)
        memory.memset(FULL, size)
        return memory

    with cupy.cuda.using_allocator(filled):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("full_memory")
@pytest.mark.parametrize(
    ("seqlens", "options"),
    [
        ((20, 300), {"causal": True, "query_offset": 3}),  # most keys are seen by none
        ((300, 20), {"causal": True, "query_offset": -290}),  # most queries see none
        ((150, 300), {"window": (5, 5)}),
        ((300, 150), {"query_lengths": np.array(20), "key_lengths": np.array(7)}),
    ],
)
def test_where_nothing_was_written_nothing_is_read(cupy, rng, seqlens, options):
    agree(cupy, *inputs(rng, "float64", **shapes(*seqlens, 160)), **options)
