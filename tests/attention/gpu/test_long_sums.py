"""Sums over many keys or queries: which kernels make them in runs, and how exact."""

import dataclasses
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import rows
from accuracy import BOUNDS

from cupyflash._attention.gpu import backward_coverage, samples
from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu.config import LONG_SUM, RUN_TILES
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._cuda import device

DEVICE = device.device_of_arch("sm_90a")
FORWARD = {"float32": ("mma", "tiled", "online"), "float64": ("tiled_f64", "tiled")}
GRADIENTS = {"float32": ("mma_split", "tiled"), "float64": ("tiled_f64", "tiled")}


def problem(dtype="float32", **options):
    made = samples.made_up(dtype)
    return dataclasses.replace(made, **options)


def in_runs(configs):
    """Entries of the kernels that make runs."""
    return {
        config.variant.entry
        for config in configs
        if dict(config.variant.defines).get("RUN_TILES") == str(RUN_TILES)
    }


# --- who makes runs ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"), [(d, n) for d in FORWARD for n in (*FORWARD[d], "online")]
)
def test_attention_over_many_keys(dtype, name):
    row = rows.row_of("attention", name)
    for seqlen_k, long in ((LONG_SUM, False), (LONG_SUM + 1, True)):
        asked = problem(dtype, seqlen_k=seqlen_k)
        found = in_runs(row.configs(asked, 1, DEVICE))
        assert found == ({f"attention_{name}"} if long else set())
    for few in ({"seqlen_q": 1 << 20}, {"seqlen_k": 1 << 20, "left": 9, "right": 0}):
        assert not in_runs(row.configs(problem(dtype, **few), 1, DEVICE))


@pytest.mark.parametrize("dtype", GRADIENTS)
@pytest.mark.parametrize("part", ["queries", "keys", "bias"])
def test_gradients_over_many_rows(dtype, part):
    """Sums of dq are over keys, those of dk and dv over the queries of a group."""
    asked = {
        "ordinary": problem(dtype),
        "queries": problem(dtype, seqlen_q=1 << 16),
        "keys": problem(dtype, seqlen_k=1 << 16),
        "group": problem(dtype, num_kv_heads=1),
    }
    found = [
        name for name, x in asked.items() if attention_config.two_level_sum(x, part)
    ]
    assert (
        found
        == {
            "queries": ["keys"],
            "keys": ["queries", "group"],
            "bias": ["queries", "keys"],
        }[part]
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "precision": "tf32"},
    ],
)
def test_types_that_promise_less(asked):
    """Their kernels stay as they are."""
    long = problem(seqlen_q=1 << 20, seqlen_k=1 << 20, **asked)
    for part in ("queries", "keys", "bias"):
        assert attention_config.two_level_sum(long, part) == {}


def test_compile_lists_have_them():
    from cupyflash._attention.gpu import coverage as attention_coverage

    entries = set()
    for table in (attention_coverage, backward_coverage):
        for _, variant in table.compile_list(DEVICE, False):
            if "RUN_TILES" in dict(variant.defines):
                entries.add(variant.entry.removeprefix("attention_"))
    assert entries == {
        "mma", "tiled", "tiled_f64", "online", "vjp_queries", "vjp_keys",
        "vjp_mma_split_queries", "vjp_mma_split_keys", "vjp_tiled_f64_queries",
        "vjp_tiled_f64_keys",
    }  # fmt: skip


# --- how exact -----------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch):
    """The script whose problems these are: all terms of a sum have one sign."""
    folder = Path(__file__).parents[3] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("bench_long_keys")
    for name in ("bench_long_keys", "timing"):
        sys.modules.pop(name, None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "alike"])
@pytest.mark.parametrize("dtype", FORWARD)
def test_out_over_a_million_keys(cupy, bench, monkeypatch, dtype, kind):
    random = cupy.random.RandomState(1)
    for name in FORWARD[dtype]:
        rows.force(monkeypatch, "attention", name)
        asked = bench.problem(cupy, random, "out", kind, 1 << 20, 64, 64, dtype)
        _, error = bench.found("out", *asked, "auto")
        assert error <= BOUNDS["attention"][dtype], name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "alike"])
@pytest.mark.parametrize("result", ["dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", GRADIENTS)
def test_gradients_over_half_a_million_rows(
    cupy, bench, monkeypatch, dtype, result, kind
):
    random = cupy.random.RandomState(2)
    for name in GRADIENTS[dtype]:
        rows.force(monkeypatch, "attention_vjp", name)
        # Keys in parts may take so many bytes a query only.
        is_bounded = (name, result) == ("mma_split", "dq")
        lengths = (1 << 16, 1 << 15) if is_bounded else (1 << 19, 64)
        asked = bench.problem(cupy, random, result, kind, *lengths, 64, dtype)
        _, error = bench.found(result, *asked, "auto")
        assert error <= BOUNDS["attention"][dtype], name


def test_exact_sums_of_the_script(bench, rng):
    """They are right to the last bit of a long double, near enough."""
    for dtype in (np.float32, np.float64):
        x = (1 + rng.random((1000, 3))).astype(dtype)
        exact = x.astype(np.longdouble).sum(axis=0)
        np.testing.assert_allclose(bench.exact_sum(x), exact, rtol=1e-18, atol=0)


@pytest.mark.parametrize("kind", ["random", "alike"])
@pytest.mark.parametrize("result", ["out", "dq", "dk", "dv"])
def test_problems_of_the_script(bench, result, kind):
    """Their exact results are those of attention and its gradients."""
    asked = bench.problem(
        np, np.random.RandomState(0), result, kind, 96, 6, 16, "float64"
    )
    _, error = bench.found(result, *asked, "auto")
    assert error < 1e-14


# --- scores of wide heads ------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 256, 257, 320, 576, 700])
def test_every_column_is_in_one_part(head_dim):
    parts = attention_config.columns_apart(head_dim)
    found = np.concatenate([np.arange(head_dim)[part] for part in parts])
    np.testing.assert_array_equal(found, np.arange(head_dim))
    assert len(parts) == (1 if head_dim <= 256 else -(-head_dim // 64))


@pytest.mark.parametrize("head_dim", [128, 256, 320, 576])
def test_gradients_of_wide_heads_sum_scores_in_parts(head_dim):
    made = samples.made_up("float32", head_dim)
    row = simt_backward.FALLBACK
    tile = row.fitting(made, DEVICE)[0]
    for part in ("queries", "keys"):
        config = row.config(part, tile, made, 1, "float32", 1)
        assert ("SUMS_APART" in dict(config.variant.defines)) == (head_dim > 256)


def one_sum(q, k):
    """Sums of products in float32, one after the other, each rounded once."""
    sums = np.zeros(len(q), np.float32)
    for a, b in zip(q.T.astype(float), k.T.astype(float), strict=True):
        sums = (a * b + sums).astype(np.float32)
    return sums


def parts_of(q, k, columns, keeps_low):
    """The same in parts: simt/tiled.cu (keeps_low) and simt/tile.cuh."""
    sums = low = np.zeros(len(q), np.float32)
    for first in range(0, q.shape[1], columns):
        part = one_sum(q[:, first : first + columns], k[:, first : first + columns])
        high = sums + part
        was = high - part
        low = low + ((sums - was) + (part - (high - was)))
        sums = high
    return sums + low if keeps_low else sums


@pytest.mark.parametrize("head_dim", [320, 576, 640])
def test_scores_in_parts_keep_what_is_promised(rng, head_dim):
    # All products of one sign, which is the worst: q = 8 k.
    k = rng.normal(size=(10_000, head_dim)).astype(np.float32)
    exact = (8 * k.astype(float) ** 2).sum(1)

    def worst(sums):
        return (np.abs(sums - exact) / exact).max() * 2.0**22

    assert worst(one_sum(8 * k, k)) > 3  # why there are parts
    assert worst(parts_of(8 * k, k, 32, keeps_low=True)) < 0.8
    # Gradients are allowed twice as much.
    assert worst(parts_of(8 * k, k, 64, keeps_low=False)) < 1.5
