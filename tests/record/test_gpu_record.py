"""The record of the GPU tests: what it counts, joins and says."""

import json
import os
import sys
import types

import gpu_record
import numpy as np
import pytest
import sanitize

import cupyflash
from cupyflash._core import threads


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("tests/cuda/test_gpu.py::test_a[1]", "cuda/test_gpu.py"),
        ("tests/gpu/test_rows.py::test_contract[x::y]", "gpu/test_rows.py"),
        ("test_gpu.py::test_a", "test_gpu.py"),
    ],
)
def test_files_are_named_below_tests(test, name):
    assert gpu_record._file(test) == name


def test_the_files_of_an_argument(monkeypatch):
    monkeypatch.chdir(gpu_record.ROOT)
    files = gpu_record._test_files()
    assert {"cuda/test_gpu.py", "gpu/test_rows.py"} <= {*files}
    assert gpu_record._files_in("tests/cuda/test_gpu.py") == ["cuda/test_gpu.py"]
    assert gpu_record._files_in("tests/gpu/test_rows.py::test_contract") == [
        "gpu/test_rows.py"
    ]
    folder = gpu_record._files_in("tests/gpu")
    assert folder == [file for file in files if file.startswith("gpu/")]
    assert gpu_record._files_in("tests") == files
    for other in ("-k", "laws", "60", "cupyflash", "tests/support/accuracy.py"):
        assert gpu_record._files_in(other) == []


def test_all_cores_and_cards_test_side_by_side(monkeypatch):
    pytest.importorskip("xdist")
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda card: {"totalGlobalMem": 80 << 30},
    )
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(threads, "num_cores", lambda: 16)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # and what it was comes back
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert gpu_record.side_by_side() == ["-n", "24", "--dist", "worksteal"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert os.environ["OMP_NUM_THREADS"] == "3"


def report(test, outcome="passed", when="call", properties=()):
    return types.SimpleNamespace(
        nodeid=test,
        when=when,
        passed=outcome == "passed",
        failed=outcome == "failed",
        skipped=outcome == "skipped",
        duration=0.5,
        user_properties=list(properties),
    )


def test_what_is_counted():
    counter = gpu_record.Counter()
    tests = [f"tests/gpu/test_a.py::test_{name}" for name in "xyzw"]
    items = [types.SimpleNamespace(nodeid=test) for test in tests]
    counter.pytest_collection_finish(types.SimpleNamespace(items=items))
    for one in (
        report("tests/gpu/test_a.py::test_x", when="setup"),
        report("tests/gpu/test_a.py::test_x", properties=[("cases", 40)]),
        report("tests/gpu/test_a.py::test_y", "failed"),
        report("tests/gpu/test_a.py::test_z", "skipped"),
    ):
        counter.pytest_runtest_logreport(one)
    assert counter.result(["gpu/test_a.py", "test_b.py"]) == {
        "gpu/test_a.py": {
            "passed": 1,
            "skipped": 1,
            "not_run": 1,
            "left_out": 0,
            "cases": 41,
            "seconds": 2.0,
            "failures": ["tests/gpu/test_a.py::test_y"],
        },
        "test_b.py": {
            "passed": 0,
            "skipped": 0,
            "not_run": 0,
            "left_out": 0,
            "cases": 0,
            "seconds": 0.0,
            "failures": [],
        },
    }


FACTS = {"date": "2026-01-01", "device": "a card"}


def found(sources, failures=()):
    return {"passed": 2, "skipped": 0, "failures": [*failures], "sources": sources}


def test_parts_are_joined(tmp_path, capsys):
    paths = [tmp_path / f"{i}.json" for i in range(2)]
    for path, name in zip(paths, ("test_a.py", "gpu/test_b.py"), strict=True):
        gpu_record._save(path, dict(FACTS), {name: found("x", [f"tests/{name}::t"])})
    gpu_record.put_sanitizer(
        paths[1], "1.0", {"memcheck": {"softmax/tiled": {"calls": 1, "errors": 0}}}
    )
    whole = tmp_path / "whole.json"
    assert gpu_record.join(whole, paths) == 0
    record = json.loads(whole.read_text("utf-8"))
    assert [*record["files"]] == ["gpu/test_b.py", "test_a.py"]
    assert (record["passed"], record["failed"]) == (4, 2)
    assert record["sanitizer"]["tools"]["memcheck"]["softmax/tiled"]["calls"] == 1
    gpu_record._save(paths[0], {**FACTS, "device": "another"}, {})
    assert gpu_record.join(whole, paths) == 2
    assert "different days or devices" in capsys.readouterr().out


def test_check_tells_what_is_missing(tmp_path, capsys, monkeypatch):
    digest = gpu_record.sources_digest()
    monkeypatch.setattr(
        gpu_record, "_test_files", lambda: ["test_a.py", "gpu/test_b.py", "test_c.py"]
    )
    path = tmp_path / "record.json"
    gpu_record.check(path)
    assert "there is no GPU record" in capsys.readouterr().out
    files = {"test_a.py": found(digest), "test_c.py": found("before", ["tests/t::x"])}
    files["test_a.py"]["not_run"] = 3
    gpu_record._save(path, dict(FACTS), files)
    capsys.readouterr()
    gpu_record.check(path)
    text = capsys.readouterr().out
    assert "not in it: gpu/test_b.py" in text
    assert "other sources: test_c.py" in text
    assert "not finished: test_a.py, 3 tests did not run" in text
    assert "failed: tests/t::x" in text
    assert "make gpu-sanitize" in text


def test_what_the_sanitizers_found(tmp_path, capsys):
    """Rows that are run later join those that were; errors are named."""
    path = tmp_path / "record.json"
    gpu_record._save(path, dict(FACTS), {"test_a.py": found("x")})
    clean = {"calls": 3, "errors": 0, "seconds": 1.0}
    gpu_record.put_sanitizer(path, "1.0", {"memcheck": {"a/x": clean, "a/y": clean}})
    bad = {"calls": 2, "errors": 4, "seconds": 1.0, "message": "Invalid read"}
    none = {"calls": 0, "errors": None, "seconds": 1.0, "ended": "exit 1: why"}
    gpu_record.put_sanitizer(
        path, "1.0", {"memcheck": {"a/y": bad}, "racecheck": {"a/x": none}}
    )
    capsys.readouterr()
    gpu_record.check(path)
    text = capsys.readouterr().out
    assert "memcheck: 2 rows, 5 calls, 4 errors" in text
    assert "a/y: 4 Invalid read" in text
    assert "a/x: no verdict exit 1: why" in text
    # A new run of the tests keeps them.
    record = json.loads(path.read_text("utf-8"))
    assert record["files"]["test_a.py"]["passed"] == 2


# --- tests/record/sanitize.py
# ---------------------------------------------------------------

CLEAN = """\
========= COMPUTE-SANITIZER
softmax/span: span-softmax: agrees
softmax/tiled: tiled-softmax: agrees
softmax/tiled: tiled-log_softmax: agrees
softmax/tiled_more: tiled-log_softmax: agrees
========= ERROR SUMMARY: 0 errors
"""
HAZARDS = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at k+0x10 in a.cu:3
=========     and Read access at k+0x20 in a.cu:5 [2 hazards]
=========     Host Frame: main
attention/x: plain: agrees
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_reports_of_the_tools_are_read():
    errors, calls, lines = sanitize.read_report(CLEAN)
    assert (errors, calls, sanitize.message_of(lines)) == (0, 4, "")
    assert sanitize.calls_of(CLEAN, "softmax/tiled") == 2
    errors, calls, lines = sanitize.read_report(HAZARDS)
    assert (errors, calls) == (2, 1)
    message = sanitize.message_of(lines)
    assert message.startswith("Error: Race reported between Write")
    assert " and Read access at " in message
    assert sanitize.read_report("Traceback\n")[0] is None


def test_rows_of_a_unit_with_errors_run_alone(monkeypatch):
    ran = []

    def run(command, **options):
        rows = command[command.index(sanitize.__file__) + 1 :]
        ran.append(rows)
        text = "".join(f"{row}: x: agrees\n" for row in rows)
        number = int("a/bad" in rows)
        text += f"========= ERROR SUMMARY: {number} errors\n"
        return types.SimpleNamespace(stdout=text, stderr="", returncode=9 * number)

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    result = sanitize.run_tool("tool", "memcheck", ("a/good", "a/bad"))
    assert [result[row]["errors"] for row in ("a/good", "a/bad")] == [0, 1]
    assert ran == [["a/good", "a/bad"], ["a/good"], ["a/bad"]]


OF_A_ROW = {"errors": 0, "calls": 2, "seconds": 1.0}


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (OF_A_ROW, 0),
        (OF_A_ROW | {"message": "compiled so that each lane arrives"}, 0),
        (OF_A_ROW | {"errors": 3}, 1),
        (OF_A_ROW | {"errors": None, "ended": "exit none after 120 s: "}, 1),
        (OF_A_ROW | {"calls": 0}, 1),
        (OF_A_ROW | {"ended": "exit 1: a/x: plain: WRONG"}, 1),
    ],
)
def test_what_is_not_judged_is_no_success(monkeypatch, tmp_path, found, code):
    """A tool that crashes, runs out of time or meets no call of a row."""
    monkeypatch.setattr(sanitize, "find_tool", lambda: "tool")
    monkeypatch.setattr(sanitize, "_compile", lambda group: 0)
    monkeypatch.setattr(sanitize, "run_tool", lambda *args: {"attention/tiled": found})
    version = types.SimpleNamespace(stdout="Version 1.0")
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *args, **kwargs: version)
    path = tmp_path / "r.json"
    assert sanitize.record(path, ("memcheck",), ("attention/tiled",), 1) == code
    tools = json.loads(path.read_text("utf-8"))["sanitizer"]["tools"]
    assert tools["memcheck"]["attention/tiled"]["errors"] == found["errors"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merge_of_the_sanitizer_can_be_wrong(monkeypatch, dtype):
    sanitize.check_merge(np, dtype)
    merge = cupyflash.merge_attention_states

    def wrong(outs, lses):
        out, lse = merge(outs, lses)
        out[0, 3, 5] += 0.1
        return out, lse

    monkeypatch.setattr(cupyflash, "merge_attention_states", wrong)
    with pytest.raises(AssertionError):
        sanitize.check_merge(np, dtype)


def test_every_row_is_sanitized():
    groups = sanitize.groups()
    assert len(groups) == len(set(groups)) >= 20
    for group in groups:
        assert sanitize.cases_of(group), group


# With more than 128 columns a mask array is left to mma.
_ALONE_OF_WIDER = [x for x in sanitize._ALONE if x != "mask array"]


@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("attention/hopper", sanitize._ALONE),
        ("attention/mma", sanitize._ALONE),
        ("attention_vjp/hopper", ("any order", *sanitize._ALONE[:4])),
        ("attention_vjp/hopper_wide", ("any order", *_ALONE_OF_WIDER)),
        ("attention_vjp/mma", ("any order", *sanitize._ALONE)),
    ],
)
def test_options_alone_and_functions_are_sanitized(group, options):
    cases = [c for c in sanitize.cases_of(group) if isinstance(c, sanitize.Alone)]
    assert tuple(case.option for case in cases) == options


@pytest.mark.parametrize("option", ["any order", *sanitize._ALONE])
@pytest.mark.parametrize("operation", ["attention", "attention_vjp"])
def test_a_call_with_an_option_alone_can_be_wrong(monkeypatch, operation, option):
    shapes = ((1, 2, 9, 8), (1, 1, 70, 8), (1, 1, 70, 8))
    case = sanitize.Alone(operation, "tiled", "float32", "auto", shapes, option)
    case.check(np)
    name = operation
    function = getattr(cupyflash, name)

    def wrong(q, *args, **kwargs):
        result = function(q, *args, **kwargs)
        if q.dtype == np.float32 and len(made) == 0:  # the first call is that on trial
            result[0][0, 1, 3, 5] += 0.1
        made.append(result)
        return result

    made = []
    monkeypatch.setattr(cupyflash, name, wrong)
    with pytest.raises(AssertionError):
        case.check(np)


def test_without_the_tool(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert sanitize.record(tmp_path / "r.json", ("memcheck",), (), 1) == 2
    assert "not installed" in capsys.readouterr().out


# --- what a run stands for -----------------------------------------------------------


def sources(root, headers="common", package="cupyflash"):
    """A checkout as far as its digest goes."""
    texts = {
        f"cuda_src/{headers}/a.cuh": "int a;\n",
        "cuda_src/k.cu": f'#include "{headers}/a.cuh"\nint k;\n',
        f"{package}/x.py": "x = 1\n",
        "tests/test_x.py": "def test_x(): pass\n",
        "setup.cfg": "[metadata]\n",
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


def test_the_digest_is_that_of_contents(tmp_path):
    """A file that moves changes nothing; one that changes does, whatever it is."""
    root = sources(tmp_path / "a")
    before = gpu_record.sources_digest(root)
    moved = sources(tmp_path / "b", headers="elsewhere", package="cupyflash/inner")
    assert gpu_record.sources_digest(moved) == before
    for name in ("cuda_src/common/a.cuh", "cupyflash/x.py", "tests/test_x.py",
                 "setup.cfg"):  # fmt: skip
        path = root / name
        text = path.read_text("utf-8")
        path.write_text(text.replace("\n", "\r\n"), "utf-8", newline="")
        assert gpu_record.sources_digest(root) == before
        path.write_text(text + "\n", "utf-8")
        assert gpu_record.sources_digest(root) != before
        path.write_text(text, "utf-8")
    (root / "tests" / "gpu_record.json").write_text("{}", "utf-8")
    assert gpu_record.sources_digest(root) == before


def test_a_part_of_a_file_stamps_no_more_than_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_record, "_test_files", lambda: ["test_a.py"])
    digest = gpu_record.sources_digest()
    part = {"passed": 1, "failures": ["tests/test_a.py::t"], "sources": digest}
    whole = gpu_record._beside(found("before"), part)
    assert whole["sources"] == "before"
    assert whole["part"] == part
    path = tmp_path / "record.json"
    gpu_record._save(path, dict(FACTS), {"test_a.py": whole})
    assert not gpu_record.check(path)
    text = capsys.readouterr().out
    assert "not whole" in text
    assert "in part: test_a.py, 1 tests passed" in text
    assert "failed: tests/test_a.py::t" in text
    assert gpu_record._beside(None, part)["sources"] == ""


def test_an_interrupted_run_is_recorded(tmp_path, monkeypatch):
    """`timeout` sends its signal twice, and pytest takes one."""

    def main(arguments, plugins):
        counter = plugins[0]
        counter.planned |= {"tests/gpu/test_sizes.py::a", "tests/gpu/test_sizes.py::b"}
        counter.passed.add("tests/gpu/test_sizes.py::a")
        raise KeyboardInterrupt

    path = tmp_path / "record.json"
    monkeypatch.setattr(pytest, "main", main)
    monkeypatch.setattr(gpu_record, "device_facts", lambda: {"device": "a card"})
    monkeypatch.setattr(gpu_record, "side_by_side", list)
    monkeypatch.setattr(gpu_record, "_with_variants", lambda *args: {})
    for name in ("CUPYFLASH_REQUIRE_GPU", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("sys.path", [*sys.path])
    assert gpu_record.write(path, []) == pytest.ExitCode.INTERRUPTED
    found = json.loads(path.read_text("utf-8"))["files"]["gpu/test_sizes.py"]
    assert (found["passed"], found["not_run"]) == (1, 1)


def test_what_is_deselected_is_counted():
    counter = gpu_record.Counter()
    items = [
        types.SimpleNamespace(
            nodeid="tests/test_a.py::t", get_closest_marker={"gpu": 1}.get
        ),
        types.SimpleNamespace(nodeid="tests/test_a.py::u", get_closest_marker={}.get),
    ]
    counter.pytest_deselected(items)
    assert counter.result(["test_a.py"])["test_a.py"]["left_out"] == 1


def test_parts_take_the_same_time():
    took = {"a": 50.0, "b": 30.0, "c": 25.0, "d": 1.0}
    files = ["a", "b", "c", "d", "new"]
    before = {name: {"seconds": s} for name, s in took.items()}
    parts = gpu_record.deal(files, before, 2)
    assert sorted(name for names in parts for name in names) == sorted(files)
    times = [sum(took.get(name, 30.0) for name in names) for names in parts]
    assert max(times) - min(times) <= 30
    assert gpu_record.deal(files, {}, 1) == [files]
    assert gpu_record.part_of("2/3") == (2, 3)
    for text in ("0/3", "4/3", "2"):
        with pytest.raises(gpu_record.argparse.ArgumentTypeError):
            gpu_record.part_of(text)


VARIANTS = {
    "aa": ("attention", "hopper", None),
    "bb": ("attention", "hopper", None),
    "cc": ("attention_vjp", "mma", None),
}


@pytest.fixture
def listed(monkeypatch):
    """A compile list of three kernels."""
    import variants

    monkeypatch.setattr(variants, "wanted", lambda: VARIANTS)


def test_variants_that_were_met(listed, tmp_path, capsys):
    first = gpu_record._with_variants(None, "x", {"aa", "other"})
    assert first["rows"] == {"attention/hopper": [1, 2], "attention_vjp/mma": [0, 1]}
    more = gpu_record._with_variants(first, "x", {"cc"})
    assert more["met"].split() == ["aa", "cc", "other"]
    # What was met on other sources counts no more.
    assert gpu_record._with_variants(more, "y", {"bb"})["met"] == "bb"
    assert gpu_record.check_variants(more, "x")
    text = capsys.readouterr().out
    assert "kernels met: 2 of 3, 66.7%" in text
    assert "attention/hopper: 1 of 2" in text
    assert not gpu_record.check_variants(more, "y")
    assert not gpu_record.check_variants(None, "x")


def test_strict(listed, tmp_path, monkeypatch, capsys):
    """Leaves with 0 for a record that is whole, and of these sources, alone."""
    monkeypatch.setattr(gpu_record, "_test_files", lambda: ["test_a.py"])
    digest = gpu_record.sources_digest()
    path = tmp_path / "record.json"
    gpu_record._save(path, dict(FACTS), {"test_a.py": found(digest)})
    fuzzed = {
        "problems": 5, "passed": 5, "not_run": 0, "bad": [], "variants": {"aa": 2},
    }  # fmt: skip
    gpu_record.put_fuzz(path, fuzzed)

    def code(*arguments):
        argv = ["gpu_record.py", "--check", "--record", str(path), *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        return gpu_record.main()

    assert code("--strict") == 0
    assert "random problems: 5 of 5 passed" in capsys.readouterr().out
    record = json.loads(path.read_text("utf-8"))
    for change in (
        {"files": {"test_a.py": found("other")}},
        {"files": {"test_a.py": found(digest, ["tests/test_a.py::t"])}},
        {"files": {"test_a.py": found(digest) | {"not_run": 1}}},
        {"files": {}},
        {"fuzz": {**fuzzed, "sources": digest, "bad": [{"line": "python"}]}},
        {"fuzz": None},
        {"variants": None},
    ):
        path.write_text(json.dumps(record | change), "utf-8")
        assert code("--strict") == 1, change
        assert code() == 0


def test_launches_are_noted_once_between_two_tests():
    import launched
    import planned

    class Launch:
        variant = planned.kernel.Variant("a.cu", "a")

        def __call__(self, x):
            return x + 1

        def enqueue(self, x):
            return x + 2

        start = None

        def starter(self):
            return self.start

    watch = launched.Watch()
    launch = watch.over(Launch)()
    assert (launch(1), launch.enqueue(1)) == (2, 3)
    assert watch.names == {planned.digest_of(Launch.variant)}
    watch.begin()
    assert watch.names == set()
    launch.enqueue(1)
    assert watch.names == {planned.digest_of(Launch.variant)}
    assert launch.starter() is None  # before it is compiled
    launch.start = (lambda *args: args), 0
    start, first = launch.starter()
    watch.begin()
    assert watch.names == set()
    assert start(first, 2) == (0, 2)
    assert watch.names == {planned.digest_of(Launch.variant)}


# --- tests/support/variants.py
# ---------------------------------------------------------------


def test_samples_lead_to_what_is_listed():
    pytest.importorskip("cupy")
    import planned
    import variants

    listed, met = variants.wanted(), set()
    assert len(listed) > 1000
    with planned.device():
        for operation, row in (("attention", "hopper"), ("attention_vjp", "mma")):
            for index in range(3):
                for call, plan in variants.reached(operation, row, index, met):
                    assert plan.rows[-1] == f"{operation}/{row}"
                    assert call[0] in variants.SIZES
    assert len(met) >= 6
    assert met <= listed.keys()


def test_every_defect_has_tests_that_exist():
    """The table that the page on testing shows."""
    folder = gpu_record.ROOT / "tests"
    lines = (folder / "record" / "defects.tsv").read_text("utf-8").splitlines()
    names = [line.split("\t")[0] for line in lines[1:]]
    assert len({*names}) == len(names) >= 29
    for line in lines[1:]:
        _, what, tests = line.split("\t")
        assert what
        assert tests
        for test in tests.split():
            file, function = test.split("::")
            text = (folder / file).read_text("utf-8")
            assert f"\ndef {function}(" in text, test
