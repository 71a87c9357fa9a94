"""Who the benchmarks compare with, and how the tables choose among them."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import cupyflash
from cupyflash._cli import bench_cases

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    """script(name) is a module of the folders of scripts."""
    folders = [ROOT / folder for folder in ("benchmarks", "tools")]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        # Not so modules of the package, which others hold by now.
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent in folders:
            del sys.modules[name]


class Tensor:
    """As much of a torch tensor as the calls of FlashAttention-4 use."""

    def __init__(self, array):
        self.array = array

    def transpose(self, a, b):
        return Tensor(self.array.swapaxes(a, b))


class Flash4:
    """Its two functions, with their order of arguments, by our own."""

    def _flash_attn_fwd(self, q, k, v, *, causal, return_lse=False):
        q, k, v = (x.array.swapaxes(1, 2) for x in (q, k, v))
        out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
        return Tensor(out.swapaxes(1, 2)), lse if return_lse else None, None, None, None

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, causal):
        dout, q, k, v, out = (x.array.swapaxes(1, 2) for x in (dout, q, k, v, out))
        grads = cupyflash.attention_vjp(dout, q, k, v, out, lse, causal=causal)
        return tuple(Tensor(x.swapaxes(1, 2)) for x in grads[:3])


@pytest.fixture
def torch():
    return types.SimpleNamespace(from_dlpack=Tensor)


def inputs(case):
    q, k, v = bench_cases.attention_inputs(np, case)
    return bench_cases.random(np, q.shape, case.dtype, 3), q, k, v


@pytest.mark.parametrize("causal", [False, True])
def test_flash4_gets_and_gives_what_we_do(script, torch, causal):
    peers, table = script("peers"), script("attention_table")
    case = table.Cell(2, 3, 3, 5, 7, 8, "float16", causal=causal)
    dout, q, k, v = inputs(case)
    flash4, only = Flash4(), (peers.FLASH4,)
    peers._torch_forward = peers._torch_backward = lambda *args: {}
    calls = peers.forward(torch, flash4, case, q, k, v, only)
    expected, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
    np.testing.assert_array_equal(calls[peers.FLASH4]().array, expected)
    calls = peers.backward(torch, flash4, case, dout, q, k, v, only)
    found = calls[peers.FLASH4]()
    grads = cupyflash.attention_vjp(dout, q, k, v, expected, lse, causal=causal)
    for mine, theirs in zip(grads[:3], found, strict=True):
        np.testing.assert_array_equal(theirs.array, mine)


def test_flash4_is_compiled_ahead_where_it_keeps_what_it_compiles(
    script, torch, monkeypatch
):
    peers, table = script("peers"), script("attention_table")
    peers._torch_forward = peers._torch_backward = lambda *args: {}
    calls = []

    class Counted(Flash4):
        def _flash_attn_fwd(self, *args, **options):
            calls.append("forward")
            return super()._flash_attn_fwd(*args, **options)

        def _flash_attn_bwd(self, *args, **options):
            calls.append("backward")
            return super()._flash_attn_bwd(*args, **options)

    found = {"torch": torch, peers.FLASH4_MODULE: Counted()}
    monkeypatch.setattr(peers.timing, "optional", found.get)
    case = table.Cell(1, 2, 2, 4, 4, 8, "float16")
    dout, *qkv = inputs(case)
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    peers.compile_flash4(peers.forward, case, *qkv)
    assert calls == []
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    peers.compile_flash4(peers.forward, case, *qkv)
    assert calls == ["forward"]
    peers.compile_flash4(peers.backward, case, dout, *qkv)
    assert calls == ["forward", "forward", "backward"]
    del found[peers.FLASH4_MODULE]
    peers.compile_flash4(peers.forward, case, *qkv)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("dtype", "card", "is_there", "offered"),
    [
        ("float16", "", True, True),
        ("float16", "", False, False),
        ("float32", "", True, False),
        ("float16", "sm_80", True, False),  # that is about another card
    ],
)
def test_where_flash4_is_a_peer(script, torch, dtype, card, is_there, offered):
    peers, table = script("peers"), script("attention_table")
    peers._torch_forward = peers._torch_backward = lambda *args: {}
    case = table.Cell(1, 2, 2, 4, 4, 8, dtype, card=card)
    dout, q, k, v = inputs(case)
    module = Flash4() if is_there else None
    forward = peers.forward(torch, module, case, q, k, v)
    backward = peers.backward(torch, module, case, dout, q, k, v)
    assert (peers.FLASH4 in forward) == (peers.FLASH4 in backward) == offered


def test_peers_are_chosen(script, torch):
    peers, table = script("peers"), script("attention_table")
    case = table.Cell(1, 2, 2, 4, 4, 8, "float16")
    everybody = dict.fromkeys(("torch", "torch cudnn", "torch flash"))
    peers._torch_forward = lambda *args: everybody
    calls = peers.forward(torch, Flash4(), case, *inputs(case)[1:], ("torch cudnn",))
    assert list(calls) == ["torch", "torch cudnn"]
    assert peers.names("torch cudnn, flash-attn-4") == ("torch cudnn", "flash-attn-4")
    with pytest.raises(argparse.ArgumentTypeError, match="named cudnn; there are"):
        peers.names("cudnn")


def test_a_report_says_who_was_not_there(script, tmp_path, capsys):
    timing = script("timing")
    assert timing.optional("no_such_library") is None
    assert "without no_such_library: ModuleNotFoundError" in capsys.readouterr().err
    timing.save(tmp_path / "report.json", "attention", False, table=[])
    machine = json.loads((tmp_path / "report.json").read_text())["machine"]
    assert machine["absent"]["no_such_library"].startswith("ModuleNotFoundError: No")


def test_the_tables_take_the_fastest_peer(script):
    tables = script("readme_tables")
    row = {
        "case": "a", "group": "bfloat16, D = 64", "dtype": "bfloat16", "card": "",
        "causal": True, "seqlen_q": 512, "batch": 1, "seqlen_k": 512,
    }  # fmt: skip
    rates = {
        "cupyflash": 5e12, "cupyflash, one order": 9e12, "torch cudnn": 4e12,
        "flash-attn-4": 4.5e12, "torch flash": 2e12,
    }  # fmt: skip
    table = [
        {**row, "provider": name, "rate": rate, "seconds": 1 / rate}
        for name, rate in rates.items()
    ]
    table.append({**row, "provider": "torch efficient", "failed": "not this case"})
    report = {"table": table}
    label = "bfloat16, D = 64, n = 512, causal"
    assert list(tables._beside_the_best(report)) == [
        (label, 5.0, 4.5, "FlashAttention-4")
    ]
    report["table"] = [r for r in table if r["provider"] != "flash-attn-4"]
    assert list(tables._beside_the_best(report)) == [(label, 5.0, 4.0, "cuDNN")]
    report["table"] = [{**r, "card": "sm_80"} for r in table]
    assert list(tables._beside_the_best(report)) == [
        (label, 5.0, 2.0, "FlashAttention-2")
    ]
    report["table"] = table[:1]
    assert list(tables._beside_the_best(report)) == []


def test_no_table_is_made_of_a_report_without_rows(script, tmp_path, monkeypatch):
    """Reports of single steps have names like those of a whole benchmark."""
    tables = script("readme_tables")
    for name, rows in (
        ("softmax_step.json", []),
        ("softmax_steps.json", [{"kind": "columns", "us": 3.0}]),
        ("softmax_whole.json", [{"provider": "cupyflash"}]),
    ):
        report = {"machine": {"gpu": "card", "date": "2026-01-01"}, "rows": rows}
        (tmp_path / name).write_text(json.dumps(report))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert [name for name, _ in tables.reports("softmax")] == ["softmax_whole.json"]


def test_the_tables_are_those_of_the_results(script, monkeypatch, tmp_path):
    """What --check says, and that it sees a number that is another."""
    tables = script("readme_tables")
    monkeypatch.setattr(sys, "argv", ["readme_tables.py", "--check"])
    tables.main()
    for name in tables._TABLES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = (ROOT / name).read_text("utf-8")
        table = tables._TABLE.search(text)[0]
        (tmp_path / name).write_text(text.replace(table, table.replace("1", "7")))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"README\.md is older.*make tables"):
        tables.main()
    monkeypatch.setattr(sys, "argv", ["readme_tables.py"])
    tables.main()
    for name in tables._TABLES:
        assert (tmp_path / name).read_text("utf-8") == (ROOT / name).read_text("utf-8")


def test_every_peer_has_a_name_in_the_tables(script):
    """And so has the plain computation of our own benchmark."""
    peers, tables = script("peers"), script("readme_tables")
    assert set(tables._PEERS) == {*peers.NAMES, "cupy"}


def test_the_short_table_has_all_cells_of_the_long_one(script):
    """Its least and most, too: nothing slow is lost on the way to the README."""
    tables = script("readme_tables")

    def read(text):
        rows = [line.split(" | ") for line in text.splitlines() if " | " in line][2:]
        cells, least, _, most = zip(*(row[1:5] for row in rows), strict=True)
        return sum(map(int, cells)), min(map(float, least)), max(map(float, most))

    long = read(tables.tensor_cores())
    assert read(tables.headline()) == read(tables.by_head_dim()) == long
    assert long[0] == len(list(tables.cells()))


def test_a_report_of_the_cpu_names_what_blas_runs(script, tmp_path, monkeypatch):
    timing = script("timing")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    timing.save(tmp_path / "a.json", "a", False)
    blas = json.loads((tmp_path / "a.json").read_text("utf-8"))["machine"]["blas"]
    assert blas["environment"]["OPENBLAS_CORETYPE"] == "Haswell"
    for library in blas["libraries"]:
        assert library["version"]
        assert library["num_threads"] >= 1


def test_a_report_of_torch_names_its_cudnn(script, tmp_path, monkeypatch):
    """It is a peer of its own, and comes with no version but torch's."""
    timing = script("timing")
    cudnn = types.SimpleNamespace(version=lambda: 91002)
    backends = types.SimpleNamespace(cudnn=cudnn)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(backends=backends))
    timing.save(tmp_path / "a.json", "a", False)
    machine = json.loads((tmp_path / "a.json").read_text("utf-8"))["machine"]
    assert machine["cudnn"] == 91002


# --- the landscape -------------------------------------------------------------------


def landscape_row(cell, own, **others):
    names = ("batch", "queries", "keys", "head_dim", "dtype", "option")
    seconds = {"cupyflash": own, **others}
    least = min(others.values())
    return {
        "cell": cell.name,
        **{name: getattr(cell, name) for name in names},
        "ratio": least / own,
        "seconds": seconds,
    }


def test_cells_of_the_landscape_are_known_by_name(script):
    landscape = script("bench_landscape")
    cells = landscape.cells()
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(cell.affordable for cell in cells)
    for name in ("batch", "queries", "keys"):
        assert {getattr(cell, name) for cell in cells} >= {1, 16}
    assert {(c.dtype, c.option) for c in cells} == set(landscape.KINDS)
    assert not landscape.Cell(10_000, 4096, 4096, 64, "float32", "plain").affordable
    gradients = landscape.gradient_cells()
    assert {cell.batch for cell in gradients} == set(landscape.BATCHES)
    assert not {cell.name for cell in gradients} & {cell.name for cell in cells}
    grouped = landscape.grouped_cells()
    assert {cell.queries for cell in grouped} == set(landscape.GROUP_QUERIES)
    assert not {cell.name for cell in grouped} & {cell.name for cell in cells}


def test_a_ratio_is_to_the_fastest_other(script):
    landscape = script("bench_landscape")
    times = {"cupyflash": 2.0, "numpy": 3.0, "torch": 1.0}
    assert landscape.ratio(times) == (0.5, "torch")


def test_worst_cells_come_first_also_to_one_provider(script):
    landscape = script("bench_landscape")
    a, b, c = landscape.cells()[:3]
    rows = [
        landscape_row(a, 1.0, numpy=2.0, torch=3.0),
        landscape_row(b, 1.0, numpy=1.5, torch=0.5),
        landscape_row(c, 1.0, numpy=1.2),
    ]
    assert landscape.worst(rows, number=2) == [(b.name, 0.5), (c.name, 1.2)]
    assert landscape.worst(rows, "numpy", 1) == [(c.name, 1.2)]
    assert [name for name, _ in landscape.worst(rows, "torch")] == [b.name, a.name]


def test_pieces_of_the_landscape_are_joined(script):
    landscape = script("bench_landscape")
    a, b, c = landscape.cells()[:3]
    old = [landscape_row(c, 1.0, numpy=2.0), landscape_row(a, 1.0, numpy=2.0)]
    new = [landscape_row(b, 1.0, numpy=2.0), landscape_row(a, 1.0, numpy=4.0)]
    rows = landscape.merged(old, new)
    assert [row["cell"] for row in rows] == [a.name, b.name, c.name]
    assert rows[0]["ratio"] == 4.0


@pytest.mark.parametrize("option", ["plain", "causal", "bias", "gradients", "grouped"])
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (1, 1)])
def test_both_ways_of_a_cell_agree(script, option, queries, keys):
    landscape = script("bench_landscape")
    cell = landscape.Cell(2, queries, keys, 4, "float64", option)
    row = landscape.measure(cell, None, 0.0)
    assert row["cell"] == cell.name
    assert row["fastest_other"] == "numpy"
    assert set(row["seconds"]) == {"cupyflash", "numpy"}


def test_the_picture_has_a_place_for_every_cell(script, tmp_path):
    pytest.importorskip("matplotlib")
    landscape = script("bench_landscape")
    cells = [c for c in landscape.cells() if c.batch == 1 and c.head_dim == 64]
    rows = [landscape_row(cell, 1.0, numpy=2.0) for cell in cells]
    grid = landscape.grid(rows, 64, "float32", "plain")
    assert grid[(1, 16)][128] == 2.0
    landscape.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


# --- the landscape on a GPU ----------------------------------------------------------


def test_cells_of_the_gpu_are_known_by_name(script):
    landscape = script("bench_landscape_gpu")
    cells, gradients = landscape.cells(), landscape.gradient_cells()
    every = [*cells, *gradients]
    assert len({cell.name for cell in every}) == len(every)
    assert {type(cell) for cell in cells} == {landscape.Attention, landscape.Softmax}
    kinds = {landscape.AttentionVjp, landscape.SoftmaxVjp, landscape.LogSumExp}
    assert {type(cell) for cell in gradients} == kinds
    asked = {(c.dtype, c.option) for c in gradients if c.function == "attention_vjp"}
    assert {("float64", "plain"), ("float64", "causal")} < asked
    # torch has NaN there.
    assert not landscape.AttentionVjp(1, 512, 32, 64, "float16", "causal").affordable
    assert not landscape.Attention(1024, 4096, 4096, 64, "float32", "plain").affordable
    assert not landscape.Softmax(1 << 18, 1 << 20, 0, "float16").affordable


def test_cells_of_the_gpu_call_what_they_say(script):
    """On NumPy arrays, whose calls have the same arguments."""
    landscape = script("bench_landscape_gpu")
    rng = np.random.default_rng(0)
    for option in ("plain", "causal", "bias"):
        cell = landscape.Attention(2, 3, 5, 8, "float32", option)
        shapes = [x.shape for x in cell.arrays(np, fill=False)]
        assert shapes[:3] == [(2, 1, 3, 8), (2, 1, 5, 8), (2, 1, 5, 8)]
        arrays = [rng.standard_normal(shape, dtype="f4") for shape in shapes]
        options = {"causal": option == "causal"}
        if option == "bias":
            options["bias"] = arrays[3]
        expected = cupyflash.attention(*arrays[:3], **options)
        np.testing.assert_array_equal(cell.own(arrays)(), expected)
    for axis in (0, 1):
        x = rng.standard_normal((4, 6))
        cell = landscape.Softmax(4, 6, axis, "float64")
        expected = cupyflash.softmax(x, axis)
        np.testing.assert_array_equal(cell.own([x])(), expected)


def test_gradients_of_the_gpu_call_what_they_say(script):
    """The same; and the formula that stands beside attention_vjp is right."""
    landscape = script("bench_landscape_gpu")
    rng = np.random.default_rng(0)
    for option in ("plain", "causal"):
        cell = landscape.AttentionVjp(2, 3, 5, 8, "float64", option)
        shapes = [x.shape for x in cell.arrays(np, fill=False)]
        assert shapes[-1] == shapes[0] == (2, 1, 3, 8)
        q, k, v, dout = arrays = [rng.standard_normal(shape) for shape in shapes]
        causal = option == "causal"
        out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
        expected = cupyflash.attention_vjp(dout, q, k, v, out, lse, causal=causal)
        found = cell.own(arrays)()
        torch = torch_of_numpy()
        tensors = [tensor_of(x) for x in (q, k)]
        p = tensor_of(landscape._weights(torch, *tensors, None, cell.hidden(torch)))
        formula = landscape._gradients(*map(tensor_of, (dout, q, k, v)), p)
        assert len(found) == len(formula) == 3
        for own, best, other in zip(found, expected[:3], formula, strict=True):
            np.testing.assert_array_equal(own, best)
            np.testing.assert_allclose(other.view(np.ndarray), best, 1e-12, 1e-14)
    y, dy = rng.standard_normal((2, 4, 6))
    for axis in (0, 1):
        cell = landscape.SoftmaxVjp(4, 6, axis, "float64")
        assert [x.shape for x in cell.arrays(np, fill=False)] == [(4, 6), (4, 6)]
        best = cupyflash.softmax_vjp(y, dy, axis)
        np.testing.assert_array_equal(cell.own([y, dy])(), best)
        cell = landscape.LogSumExp(4, 6, axis, "float64")
        best = cupyflash.logsumexp(y, axis)
        np.testing.assert_array_equal(cell.own([y])(), best)


def tensor_of(x):
    """An array as what stands for a tensor of torch."""
    return x.view(ArrayTensor)


class ArrayTensor(np.ndarray):
    """What the landscape uses of torch's tensors; their dtype has no name."""

    dtype = property(lambda self: "torch.float32")

    def transpose(self, i, j):
        return np.swapaxes(self, i, j)

    def bool(self):
        return self.astype(bool)

    def tril(self, k):
        return np.tril(self.view(np.ndarray), k).view(ArrayTensor)

    def triu(self, k):
        return np.triu(self.view(np.ndarray), k).view(ArrayTensor)

    def masked_fill_(self, mask, value):
        self[..., np.asarray(mask)] = value


def torch_of_numpy():
    """A torch whose attention gives back the bias or mask that it was asked for."""

    def softmax(scores, axis):
        e = np.exp(np.asarray(scores) - np.asarray(scores).max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    def ones(*shape, device, dtype=float):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return np.ones(shape, dtype).view(ArrayTensor)

    torch = types.SimpleNamespace(softmax=softmax, ones=ones, bool=bool)
    torch.from_dlpack = lambda x: np.from_dlpack(x).view(ArrayTensor)
    sdpa = lambda q, k, v, **options: options  # noqa: E731
    functional = types.SimpleNamespace(scaled_dot_product_attention=sdpa)
    torch.nn = types.SimpleNamespace(functional=functional)
    return torch


@pytest.mark.parametrize("option", ["plain", "causal", "bias"])
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 5)])
def test_others_on_the_gpu_compute_the_same(script, option, queries, keys):
    landscape = script("bench_landscape_gpu")
    rng = np.random.default_rng(0)
    cell = landscape.Attention(2, queries, keys, 8, "float32", option)
    shapes = [x.shape for x in cell.arrays(np, fill=False)]
    arrays = [rng.standard_normal(shape, dtype="f4") for shape in shapes]
    others, compared = cell.others(torch_of_numpy(), np, arrays)
    own = cell.own(arrays)()
    formula = others["formula"]().view(np.ndarray)
    np.testing.assert_allclose(formula, own, 1e-5, 1e-6)
    assert own[compared].shape == own.shape
    options = others["torch"]()
    if option == "bias":
        np.testing.assert_array_equal(options["attn_mask"].view(np.ndarray), arrays[3])
    elif option == "causal" and queries != keys:
        seen = np.tri(queries, keys, keys - queries, dtype=bool)
        np.testing.assert_array_equal(options["attn_mask"].view(np.ndarray), seen)
    else:
        assert options == ({"is_causal": True} if option == "causal" else {})


def test_the_landscape_keeps_what_it_has_measured(script, tmp_path, monkeypatch):
    """Rows are on disk before the run is over: a killed one loses seconds of it."""
    landscape = script("bench_landscape_gpu")
    path = tmp_path / "landscape.json"
    cells = landscape.cells()[:3]
    monkeypatch.setattr(landscape, "cells", lambda: cells)
    monkeypatch.setattr(landscape, "_SAVE_SECONDS", 0)
    monkeypatch.setattr(
        landscape.timing,
        "save",
        lambda path, *_, **content: path.write_text(json.dumps(content)),
    )
    for name in ("cupy", "torch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    def measure(cupy, torch, cell, seconds):
        if cell is cells[1]:  # the last, as every second cell comes first
            raise KeyboardInterrupt
        return {"cell": cell.name, "ratio": 1.0}

    monkeypatch.setattr(landscape, "measure", measure)
    command = ["--jobs", "0", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_landscape_gpu.py", *command])
    with pytest.raises(KeyboardInterrupt):
        landscape.main()
    rows = json.loads(path.read_text())["rows"]
    assert [row["cell"] for row in rows] == [cells[0].name, cells[2].name]


def test_the_picture_of_the_gpu_has_every_cell(script):
    landscape = script("bench_landscape_gpu")
    cells = [*landscape.cells(), *landscape.gradient_cells()]
    old = [{"cell": cell.name, "ratio": 1.0} for cell in cells[::-1]]
    rows = landscape.merged(old, [{"cell": cells[3].name, "ratio": 2.0}])
    assert [row["cell"] for row in rows] == [cell.name for cell in cells]
    assert [row["ratio"] for row in rows].count(2.0) == 1
    panels = landscape.panels([*rows, {"cell": "of another version", "ratio": 1.0}])
    shown = [x for panel in panels.values() for line in panel.values() for x in line]
    assert len(shown) == len(cells)


def test_parts_of_cards_are_joined(script, tmp_path, monkeypatch, capsys):
    landscape = script("bench_landscape_gpu")
    cells = landscape.cells()[:5]
    monkeypatch.setattr(landscape, "draw", lambda rows, path: None)
    paths = [tmp_path / f"{i}.json" for i in (1, 2)]
    for i, path in enumerate(paths):
        rows = [{"cell": c.name, "ratio": 0.5 + i} for c in cells[i::2]]
        report = {"machine": {}, "rows": rows, "below_095": []}
        path.write_text(json.dumps(report))
    whole = tmp_path / "whole.json"
    command = ["--join", *map(str, paths), "--json", str(whole)]
    monkeypatch.setattr(sys, "argv", ["bench_landscape_gpu.py", *command])
    landscape.main()
    found = json.loads(whole.read_text())
    assert [row["cell"] for row in found["rows"]] == [cell.name for cell in cells]
    assert found["below_095"] == [cell.name for cell in cells[::2]]
    assert "3 of 5 cells below 0.95" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b"])
def test_parts_that_there_are_not(script, text):
    timing = script("timing")
    assert timing.part_of_many("2/3") == (2, 3)
    with pytest.raises(argparse.ArgumentTypeError, match="is not like 1/3"):
        timing.part_of_many(text)


def test_first_calls_are_of_all_rows(script):
    first = script("bench_first")
    cases = first.cases()
    import rows

    assert {(c.operation, c.row) for c in cases} == {*rows.all_rows()}
    assert len({first.label(c) for c in cases}) == len(cases)


def test_first_calls_call_what_they_say(script):
    """On NumPy arrays, whose calls have the same arguments."""
    first = script("bench_first")
    seen = set()
    for case in first.cases():
        if case.function in seen or case.dtype != "float32":
            continue
        seen.add(case.function)
        result = first.call_of(case, np)()
        first_of = result[0] if isinstance(result, tuple) else result
        assert first_of.dtype == np.float32
    assert {"softmax", "attention", "attention_vjp", "logsumexp"} <= seen


def test_turns_keep_the_least_time(script):
    landscape = script("bench_landscape_gpu")
    called = []
    best = landscape.best_times(
        {"a": lambda: called.append("a"), "b": lambda: called.append("b")},
        lambda: None,
        0.0,
    )
    assert set(best) == {"a", "b"}
    assert all(0 < seconds < 1 for seconds in best.values())
    assert min(called.count(name) for name in "ab") >= 3


# --- walls ---------------------------------------------------------------------------


def test_the_walks_of_the_walls_cover_their_arrays(script, monkeypatch):
    """The parts of every order lie side by side, and fill what they are told."""
    pytest.importorskip("cupy")
    monkeypatch.setitem(sys.modules, "rates", types.ModuleType("rates"))
    walls = script("bench_walls")
    for _, shape, _, _ in walls.CALLS:
        for itemsize in (2, 4, 8):
            row = shape[-1] * itemsize // 16
            for _, lag, parts, width, stride in walls.walks(shape, itemsize):
                if len(shape) == 2:
                    assert stride == row
                    assert parts * walls._PART == shape[0] * width
                    assert row % width == 0
                else:
                    assert (parts, width, stride) == (1, walls._PART, walls._PART)
                    assert row % walls._PART == 0
                assert lag == 0 or lag * walls._PART > row * (len(shape) == 1)


# --- Triton --------------------------------------------------------------------------

# Interpreted, on the CPU; the decorator asks for it when it is imported.
IN_TRITON = """
import sys
import torch
import triton
sys.path.insert(0, sys.argv[1])
import triton_kernels

torch.manual_seed(0)
for n in (1, 7, 128, 1000, 9000):
    for dtype, most in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        x = 5 * torch.randn(3, n, dtype=dtype)
        x[0, n // 2 + 1 :] = float("-inf")
        expected = torch.softmax(x.double(), -1)
        torch.testing.assert_close(
            triton_kernels.softmax(x).double(), expected, rtol=most, atol=1e-30
        )
CASES = ((64, 64, 0), (70, 100, 0), (70, 100, 1), (64, 64, 1), (100, 70, 1))
for n, m, causal in CASES:
    q, k, v = (torch.randn(1, 2, rows, 32) for rows in (n, m, m))
    out, lse = torch.empty_like(q), torch.empty(1, 2, n)
    triton_kernels._attention.fn[(triton.cdiv(n, 32), 2)](
        q, k, v, out, lse, 32**-0.5, n, m, D=32, CAUSAL=bool(causal), BLOCK_M=32,
        BLOCK_N=32,
    )
    s = q.double() @ k.double().transpose(-1, -2) / 32**0.5
    if causal:
        s.masked_fill_(~torch.ones(n, m).tril(m - n).bool(), float("-inf"))
    expected = torch.softmax(s, -1).nan_to_num() @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    logs = torch.logsumexp(s, -1).float()
    torch.testing.assert_close(lse, logs, rtol=0, atol=1e-5)
"""


def test_the_kernels_in_triton_compute_what_they_say():
    for name in ("torch", "triton"):
        pytest.importorskip(name)
    done = subprocess.run(
        [sys.executable, "-c", IN_TRITON, str(ROOT / "benchmarks")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_note_on_several_gpus_has_the_numbers_of_the_model(script):
    model = script("ring_model")
    note = ROOT / "docs/design/decisions/several-gpus.md"
    lines = set(note.read_text().splitlines())
    for row in model.limits():
        assert "| " + " | ".join(row) + " |" in lines
    for gpus in (2, 8, 64):
        rows = [model.speedups(gpus, backward) for backward in (False, True)]
        for (tokens, *forward), (_, full, _, zigzag) in zip(*rows, strict=True):
            cells = f"{gpus}, {tokens}", *forward, full, zigzag
            assert "| " + " | ".join(cells) + " |" in lines
    for keys in (8_192, 131_072, 1_048_576, 16_777_216):
        cells = f"{keys:,}", *(f"{1e6 * model.decode(keys, n):.0f}" for n in (1, 8, 64))
        assert "| " + " | ".join(cells) + " |" in lines


def test_more_gpus_are_never_worth_more_than_their_number(script):
    """But for what few rows leave idle, which a ring has less of with a causal mask."""
    model = script("ring_model")
    for gpus in (2, 8, 64):
        for seqlen in (16_384, 131_072, 1_048_576):
            alone = model.one_gpu(seqlen, False, False)
            seconds, hidden = model.ring(seqlen, gpus)
            assert 0 <= hidden <= 1
            assert alone / seconds <= gpus * 1.02
            # A zigzag is never slower than one piece a rank.
            assert model.ring(seqlen, gpus, True)[0] <= (
                model.ring(seqlen, gpus, True, zigzag=False)[0] * 1.001
            )


def test_the_model_of_rings_runs(script, capsys):
    script("ring_model").main()
    assert capsys.readouterr().out.count("| --- ") > 20


def test_two_gpus_on_numpy(tmp_path):
    """Its whole way over two processes, at a size that says nothing about speed."""
    path = tmp_path / "two.json"
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "bench_two_gpus.py"),
            "--cpu",
            "--seconds=100",
            f"--json={path}",
        ],
        check=True,
        timeout=170,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    report = json.loads(path.read_text())
    assert [(x["causal"], x["backward"]) for x in report["goal"]] == [
        (False, False), (False, True), (True, False), (True, True),
    ]  # fmt: skip
    assert all(x["times_one"] > 0 for x in report["goal"] + report["lengths"])
    assert [x["same_bits"] for x in report["goal"][1::2]] == [True, True]
    assert 0 <= report["goal"][1]["hidden"]["share_hidden"] <= 1
    assert set(report["errors"]) == {"out", "lse", "dq", "dk", "dv"}
    assert all(x < report["allowed"] for x in report["errors"].values())
    assert report["problems"] == {"done": 6, "bad": []}
    assert len(report["lengths"]) == 4
    assert report["left_out"] == []
