"""Score and mask functions in the kernels of sm_90."""

from dataclasses import replace

import numpy as np
import pytest
from function_problems import asked

import cupyflash
from cupyflash import scores
from cupyflash._attention.gpu.sm90.backward_wide import HOPPER_WIDE_VJP
from cupyflash._attention.gpu.sm90.forward import HOPPER
from cupyflash._cli import nvrtc
from cupyflash._cli.compile_jobs import Job
from cupyflash._cuda.device import device_of_arch

SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], "float32")
DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 5, (2, 1000)), axis=1)
TABLE = np.random.default_rng(1).normal(size=(32, 4)).astype("float32")


def relative(s, h, i, j, *, table):
    return s + table[np.clip(i - j, -15, 16) + 15, h]


def capped(s, h, i, j, *, slopes, cap=3.0):
    return cap * np.tanh(s / cap) - slopes[h] * abs(i - j)


ALIBI = {"score": scores.alibi, "score_arrays": {"slopes": SLOPES}}
DOCUMENT = {"mask": scores.document, "mask_arrays": {"documents": DOCUMENTS}}
CASES = {
    "alibi": ALIBI,
    "table": {"score": relative, "score_arrays": {"table": TABLE}},
    "derivative": {"score": capped, "score_arrays": {"slopes": SLOPES}},
    "hides": {"score": lambda s, i, j: np.where((i + j) % 3 == 0, -np.inf, s)},
    "document": DOCUMENT,
    "document and causal": {**DOCUMENT, "causal": True},
    "both": {**ALIBI, **DOCUMENT},
    "prefix": {
        "mask": scores.prefix_lm,
        "mask_arrays": {"prefix": np.array([77, 500])},
    },
    "window": {"mask": scores.sliding_window(100)},
    "softcap": {"score": scores.softcap(2.0)},
    "dilated": {"mask": scores.dilated_window(30, 4)},
    "heads differ": {"mask": lambda h, i, j: (i - j) % (h + 2) == 0},
    "rows see nothing": {"mask": lambda i, j: (i > 600) & (j < 300)},
    "lengths": {
        **DOCUMENT,
        "key_lengths": np.array([333, 995]),
        "query_offset": 0,  # queries of padding stand before the first key otherwise
    },
    "softcap before": {**ALIBI, "softcap": 3.0, "causal": True},
    "softcap and document": {**DOCUMENT, "softcap": 3.0},
}


# --- what is compiled ----------------------------------------------------------------


def findings(row, configs):
    if why := nvrtc.unusable():
        pytest.skip(why)
    for config in configs:
        finding, _ = nvrtc.find(
            Job("attention", row.name, True, "sm_90a", config.variant)
        )
        assert not finding.error, finding.error
        yield finding


@pytest.mark.parametrize(
    "name",
    [
        "both",
        "softcap and document",
        "document",
        "prefix",
        "lengths",
        "dilated",
        "heads differ",
    ],
)
def test_the_forward_compiles(name):
    problem, _ = asked(dtype="float16", shape=(2, 4, 1000, 64), **CASES[name])
    device = device_of_arch("sm_90a")
    assert HOPPER.unsupported_reason(problem, device) is None
    configs = [*HOPPER.configs(problem, 1, device)]
    if problem.mask_function:
        configs.append(HOPPER.tile_lists(problem, device).config(problem, 1))
    assert all(not found.spill_bytes for found in findings(HOPPER, configs))


@pytest.mark.parametrize("name", ["derivative"])
def test_the_backward_compiles(name):
    problem, _ = asked(dtype="float16", shape=(2, 4, 1000, 128), **CASES[name])
    problem = replace(problem, terms="keys")
    device = device_of_arch("sm_90a")
    configs = HOPPER_WIDE_VJP.configs(problem, 1, device, everything=False)
    assert all(not found.spill_bytes for found in findings(HOPPER_WIDE_VJP, configs))


def test_lists_are_shared_by_what_a_mask_does_not_depend_on():
    device = device_of_arch("sm_90a")

    def num_lists(**options):
        problem, _ = asked(dtype="float16", shape=(2, 4, 1000, 64), **options)
        lists = HOPPER.tile_lists(problem, device)
        tile = HOPPER.tile(problem, device)
        words = -(-1000 // tile.block_m) * (2 - (-1000 // tile.block_n))
        return lists.num_bytes(problem) / 4 / words

    assert num_lists(mask=lambda i, j: (i + j) % 2 == 0) == 1
    assert num_lists(**DOCUMENT) == 2
    assert num_lists(mask=lambda h, j: j % (h + 1) == 0) == 4
    assert num_lists(mask=lambda b, h, j: j % (h + b + 1) == 0) == 8


# --- what is computed ----------------------------------------------------------------


def on_gpu(cupy, options):
    def moved(x):
        if isinstance(x, dict):
            return {name: moved(y) for name, y in x.items()}
        return cupy.asarray(x) if isinstance(x, np.ndarray) else x

    return moved(options)


def largest_error(got, wanted):
    error = abs(got.get().astype("f8") - wanted).max()
    return error / max(abs(wanted).max(), 1e-9)


def inputs(*shapes):
    rng = np.random.default_rng(2)
    return [rng.standard_normal(shape).astype("float16") for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("name", CASES)
def test_the_forward_is_that_of_float64(name, dim):
    cupy = pytest.importorskip("cupy")
    q, k, v = inputs((2, 4, 1000, dim), (2, 2, 1000, dim), (2, 2, 1000, dim))
    options = CASES[name]
    out, lse = cupyflash.attention(
        *map(cupy.asarray, (q, k, v)),
        return_lse=True,
        out=cupy.full(q.shape, np.nan, "float16"),
        **on_gpu(cupy, options),
    )
    wide = [x.astype("f8") for x in (q, k, v)]
    wanted, wanted_lse = cupyflash.attention(*wide, return_lse=True, **options)
    assert largest_error(out, wanted) < 2e-3
    np.testing.assert_allclose(lse.get(), wanted_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("name", CASES)
def test_the_backward_is_that_of_float64(name, dim):
    cupy = pytest.importorskip("cupy")
    q, k, v = inputs((2, 4, 1000, dim), (2, 2, 1000, dim), (2, 2, 1000, dim))
    (dout,) = inputs(q.shape)
    options = CASES[name]
    given, gpu = list(map(cupy.asarray, (q, k, v))), on_gpu(cupy, options)
    out, lse = cupyflash.attention(*given, return_lse=True, **gpu)
    got = cupyflash.attention_vjp(cupy.asarray(dout), *given, out, lse, **gpu)
    wide = [x.astype("f8") for x in (q, k, v)]
    wanted = cupyflash.attention_vjp(
        dout.astype("f8"),
        *wide,
        *cupyflash.attention(*wide, return_lse=True, **options),
        **options,
    )
    for ours, theirs in zip(got[:3], wanted[:3], strict=True):
        assert largest_error(ours, theirs) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "offset"), [(300, 1000, 700), (5, 1000, 990), (1, 999, 9)]
)
@pytest.mark.parametrize("name", ["alibi", "document", "both"])
def test_positions_are_those_among_the_keys(name, seqlen_q, seqlen_k, offset):
    cupy = pytest.importorskip("cupy")
    q, k, v = inputs((2, 4, seqlen_q, 64), *[(2, 1, seqlen_k, 64)] * 2)
    options = {**CASES[name], "query_offset": offset}
    given = map(cupy.asarray, (q, k, v))
    out = cupyflash.attention(*given, **on_gpu(cupy, options))
    wanted = cupyflash.attention(*(x.astype("f8") for x in (q, k, v)), **options)
    assert largest_error(out, wanted) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(103, 103), (50, 35), (7, 5)])
@pytest.mark.parametrize(
    "options",
    [
        {"score": lambda s, i, j: s - 0.01 * abs(i - j)},
        {"score": lambda s, i, j: s + 0.3 * ((i + j) % 5)},
        {"mask": lambda i, j: (7 * i + j) % 3 != 0},
    ],
)
def test_keys_of_odd_columns_are_split(options, dims):
    cupy = pytest.importorskip("cupy")
    head_dim, head_dim_v = dims
    shapes = (1, 2, 8, head_dim), (1, 2, 3000, head_dim), (1, 2, 3000, head_dim_v)
    q, k, v = inputs(*shapes)
    given = list(map(cupy.asarray, (q, k, v)))
    told = cupyflash.explain("attention", *given, **options)
    assert told.details["split of the keys"] > 1
    assert told.details["copied first"] == "q, k, v"
    out = cupyflash.attention(*given, **options)
    wanted = cupyflash.attention(*(x.astype("f8") for x in (q, k, v)), **options)
    assert largest_error(out, wanted) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [103, 128])
def test_keys_are_split_where_few_queries_see_a_list(head_dim):
    cupy = pytest.importorskip("cupy")
    of_k = (1, 1, 20_000, head_dim)
    q, k, v = inputs((1, 4, 7, head_dim), of_k, of_k)
    options = {"mask": lambda i, j: (j // 512) % 3 == 0, "query_offset": 19_000}
    given = list(map(cupy.asarray, (q, k, v)))
    told = cupyflash.explain("attention", *given, **options)
    assert told.details["split of the keys"] > 1
    out = cupyflash.attention(*given, **options)
    wanted = cupyflash.attention(*(x.astype("f8") for x in (q, k, v)), **options)
    assert largest_error(out, wanted) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [0.0, np.nan])
@pytest.mark.parametrize("seqlen_k", [129, 1025, 1153, 2305])
@pytest.mark.parametrize("seqlen_q", [1, 65, 130])
def test_more_splits_than_a_list_fills(seqlen_q, seqlen_k, bad):
    """Nine tiles by four splits are three each: nothing is left for the last one."""
    cupy = pytest.importorskip("cupy")
    of_k = (1, 1, seqlen_k, 128)
    q, k, v = inputs((1, 2, seqlen_q, 128), of_k, of_k)
    last = seqlen_k - 1
    v[..., last, :] = bad  # which no query sees
    for mask in (lambda j: j < last, lambda j: j < min(190, last)):
        options = {"mask": mask, "return_lse": True}
        out, lse = cupyflash.attention(*map(cupy.asarray, (q, k, v)), **options)
        wide = (x.astype("f8") for x in (q, k, v))
        wanted, wanted_lse = cupyflash.attention(*wide, **options)
        assert largest_error(out, wanted) < 2e-3
        assert largest_error(lse, wanted_lse) < 1e-5


@pytest.mark.gpu
def test_values_behind_a_mask_may_be_nan():
    cupy = pytest.importorskip("cupy")
    q, k, v = inputs(*[(2, 4, 1000, 64)] * 3)
    v[:, :, 700:, :] = np.nan
    options = {"mask": lambda i, j: (j < 700) | (i > 990)}
    out = cupyflash.attention(*map(cupy.asarray, (q, k, v)), **options).get()
    wanted = cupyflash.attention(*(x.astype("f8") for x in (q, k, v)), **options)
    assert np.isnan(out[:, :, 991:]).all()
    assert abs(out[:, :, :991] - wanted[:, :, :991]).max() < 2e-3


@pytest.mark.gpu
def test_explain_counts_the_tiles_of_a_mask():
    cupy = pytest.importorskip("cupy")
    q = cupy.zeros((2, 4, 1024, 64), "float16")
    documents = cupy.asarray(np.arange(1024)[None].repeat(2, 0) // 256)
    mask = {"mask": scores.document, "mask_arrays": {"documents": documents}}
    told = cupyflash.explain("attention", q, q, q, **mask)
    assert told.details["tiles_of_the_mask"] == {"full": 32, "mixed": 0, "empty": 96}
