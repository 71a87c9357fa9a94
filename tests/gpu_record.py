"""The record of the GPU tests: which sources ran, on what, and how it went.

    python tests/gpu_record.py --write [pytest arguments]   run them; needs a GPU
    python tests/gpu_record.py --join FILE...               one record of several
    python tests/gpu_record.py --check                      is the record up to date?

``--write`` takes any arguments of pytest: ``tests/gpu -k laws`` runs a part of a
folder. It uses all cores and all cards, unless ``-n`` says how many processes test.
tests/sanitize.py adds what compute-sanitizer found.

``--write`` leaves with pytest's exit code; ``--check`` prints a line and leaves with 0,
since a machine without a GPU can do nothing about it. Files of tests among the pytest
arguments run alone, and their results replace those of the same files in the record:
the whole can be run in parts. Parts that ran side by side, on several GPUs, each with a
``--record`` of its own, are joined after it; the last of a file counts. The record has
for each file the digest of the sources that it ran on.
"""

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import workers

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"


def sources_digest(root: Path = ROOT) -> str:
    """sha256 over the sorted paths and contents of the sources."""
    paths = [
        path
        for folder in ("cuda_src", "cupyflash")
        for path in (root / folder).rglob("*")
        if path.suffix in (".cu", ".cuh", ".py") and "__pycache__" not in path.parts
    ]
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        name = path.relative_to(root).as_posix()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


class Counter:
    """A pytest plugin that counts outcomes and keeps the names of failures."""

    def __init__(self):
        self.passed: set[str] = set()
        self.skipped: set[str] = set()
        self.failures: set[str] = set()
        self.planned: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.cases: dict[str, int] = {}

    def pytest_collection_finish(self, session):
        self.planned |= {item.nodeid for item in session.items}

    def pytest_runtest_logreport(self, report):
        name = _file(report.nodeid)
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.when == "call":
            # A test that tries many problems says how many.
            tried = dict(report.user_properties).get("cases", 1)
            self.cases[name] = self.cases.get(name, 0) + int(not report.skipped) * tried
        if report.failed:
            self.failures.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.failures.add(report.nodeid)

    def result(self, files):
        """By file: counts, and the tests that failed in any phase."""
        failures = sorted(self.failures)
        # Those that an interrupted run did not come to.
        left = self.planned - self.passed - self.skipped - self.failures
        return {
            name: {
                "passed": sum(_file(test) == name for test in self.passed)
                - sum(_file(test) == name for test in self.passed & self.failures),
                "skipped": sum(_file(test) == name for test in self.skipped),
                "not_run": sum(_file(test) == name for test in left),
                "cases": self.cases.get(name, 0),
                "seconds": round(self.seconds.get(name, 0.0), 1),
                "failures": [test for test in failures if _file(test) == name],
            }
            for name in {*files, *map(_file, failures)}
        }


def _file(test):
    """The name of the file of a test, as the record has it: below tests/."""
    path = Path(test.partition("::")[0])
    parts = path.parts
    if "tests" in parts:
        return "/".join(parts[parts.index("tests") + 1 :])
    return path.name


def device_facts():
    """Device, driver, CUDA and CuPy; an error without a device."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
    }


def side_by_side():
    """Arguments of pytest for a test process on each core, and cards by turns."""
    if importlib.util.find_spec("xdist") is None:
        return []
    import cupy

    from cupyflash import _threads

    runtime = cupy.cuda.runtime
    cards = range(runtime.getDeviceCount())
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, cards)))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of NumPy in each process
    sizes = [runtime.getDeviceProperties(card)["totalGlobalMem"] for card in cards]
    # What follows in a file shares kernels: parts of it go to a worker as they are.
    number = workers.number_of(_threads.num_cores(), sizes)
    return ["-n", str(number), "--dist", "worksteal"]


def write(path, pytest_arguments):
    """Run the GPU tests and write what came of them; pytest's exit code."""
    import pytest

    try:
        facts = device_facts()
    except Exception as error:
        print(f"no GPU to make a record with: {str(error).splitlines()[0]}")
        return 2
    os.environ["CUPYFLASH_REQUIRE_GPU"] = "1"
    # The package of this checkout, also in the processes that tests start.
    sys.path.insert(0, str(ROOT))
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    digest = sources_digest()  # of what runs, should a file change meanwhile
    files = [file for name in pytest_arguments for file in _files_in(name)]
    if not any(a.startswith("--thread-seconds") for a in pytest_arguments):
        pytest_arguments = [*pytest_arguments, "--thread-seconds", "60"]
    if not any(a.startswith(("-n", "--numprocesses")) for a in pytest_arguments):
        pytest_arguments = [*pytest_arguments, *side_by_side()]
    counter = Counter()

    class OfWorkers:
        """Under xdist the workers know what is planned."""

        @pytest.hookimpl(optionalhook=True)
        def pytest_xdist_node_collection_finished(self, node, ids):
            counter.planned |= {*ids}

    code = pytest.main(
        [
            "-m",
            "gpu",
            # Where pytest-benchmark is installed it would warn under xdist.
            "-p",
            "no:benchmark",
            *(() if files else (str(ROOT / "tests"),)),
            *pytest_arguments,
        ],
        plugins=[counter, OfWorkers()],
    )
    found = counter.result(files or _test_files())
    for of_file in found.values():
        of_file["sources"] = digest
    facts = {"date": datetime.date.today().isoformat(), **facts}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if files:
            found = before.get("files", {}) | found
        if "sanitizer" in before:
            facts["sanitizer"] = before["sanitizer"]
    _save(path, facts, found)
    return int(code)


def join(path, parts):
    """Write the record of all files in `parts`; 2 if they are of several devices."""
    found, facts, sanitizer = {}, [], {}
    for part in parts:
        record = json.loads(part.read_text(encoding="utf-8"))
        # Records of before had one digest for all.
        one = record.pop("sources", None)
        for of_file in record["files"].values():
            of_file.setdefault("sources", one)
        found |= record["files"]
        sanitizer |= record.pop("sanitizer", {})
        facts.append({k: v for k, v in record.items() if k not in _COUNTS})
    if any(other != facts[0] for other in facts):
        print("the records are of different days or devices")
        return 2
    if sanitizer:
        facts[0]["sanitizer"] = sanitizer
    _save(path, facts[0], found)
    return 0


_COUNTS = ("passed", "failed", "skipped", "files")


def _save(path, facts, found):
    sanitizer = facts.pop("sanitizer", None)
    record = {
        **facts,
        "passed": sum(of_file["passed"] for of_file in found.values()),
        "failed": sum(len(of_file["failures"]) for of_file in found.values()),
        "skipped": sum(of_file["skipped"] for of_file in found.values()),
        "files": dict(sorted(found.items())),
    }
    if sanitizer:
        record["sanitizer"] = sanitizer
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {summary(record)}")


def _files_in(argument):
    """The test files that an argument of pytest names: one, or those of a folder."""
    path = Path(argument.partition("::")[0])
    if not path.exists():
        return []
    try:
        name = path.resolve().relative_to(ROOT / "tests").as_posix()
    except ValueError:
        return []
    below = "" if name == "." else f"{name}/"
    return [file for file in _test_files() if file == name or file.startswith(below)]


def _test_files(root: Path = ROOT):
    """Names of all test files, below tests/."""
    folder = root / "tests"
    return [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("test_*.py"))
    ]


def put_sanitizer(path, version, found):
    """Write what the tools found ({tool: {row: facts}}) into the record.

    Rows that did not run now keep what they had.
    """
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    digest = sources_digest()
    tools = before.get("sanitizer", {}).get("tools", {})
    for tool, rows in found.items():
        of_tool = tools.setdefault(tool, {})
        of_tool.update(
            {row: {**facts, "sources": digest} for row, facts in rows.items()}
        )
    before["sanitizer"] = {
        "version": version,
        "date": datetime.date.today().isoformat(),
        "tools": tools,
    }
    path.write_text(json.dumps(before, indent=1) + "\n", encoding="utf-8")


def check_sanitizer(sanitizer):
    """Print a line a tool, and each row with an error or without a verdict."""
    if not sanitizer:
        print("  no compute-sanitizer: make gpu-sanitize runs it")
        return
    digest = sources_digest()
    for tool, rows in sanitizer["tools"].items():
        errors = sum(facts["errors"] or 0 for facts in rows.values())
        calls = sum(facts["calls"] for facts in rows.values())
        others = sum(facts["sources"] != digest for facts in rows.values())
        note = f", {others} on other sources" if others else ""
        print(f"  {tool}: {len(rows)} rows, {calls} calls, {errors} errors{note}")
        for row, facts in rows.items():
            if facts["errors"] or facts["errors"] is None or "message" in facts:
                said = facts.get("message") or facts.get("ended", "")
                told = "no verdict" if facts["errors"] is None else facts["errors"]
                print(f"    {row}: {told} {said}".rstrip())


def summary(record):
    """Who ran it and how it went."""
    return (
        f"{record['device']}, {record['date']}: {record['passed']} passed, "
        f"{record['failed']} failed, {record['skipped']} skipped"
    )


def check(path):
    """Print a line on the record, and the tests that failed in it."""
    if not path.exists():
        print("WARNING: there is no GPU record; make gpu-check writes one")
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    files, digest = record.get("files", {}), sources_digest()
    others = [name for name, found in files.items() if found["sources"] != digest]
    missing = [name for name in _test_files() if name not in files]
    left = {name: found.get("not_run", 0) for name, found in files.items()}
    left = {name: number for name, number in left.items() if number}
    if others or missing or left:
        print(f"WARNING: the GPU record is not whole. {summary(record)}")
    else:
        print(f"The GPU record is of these sources. {summary(record)}")
    if others:
        print(f"  ran on other sources: {', '.join(others)}")
    for name, number in left.items():
        print(f"  not finished: {name}, {number} tests did not run")
    if missing:
        print(f"  not in it: {', '.join(missing)}")
    for of_file in files.values():
        for name in of_file["failures"]:
            print(f"  failed: {name}")
    check_sanitizer(record.get("sanitizer"))


def main():
    """Parse the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="run the GPU tests")
    what.add_argument("--check", action="store_true", help="compare with the sources")
    what.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="join parts")
    parser.add_argument(
        "--record", type=Path, default=RECORD, metavar="FILE", help="where it lies"
    )
    args, pytest_arguments = parser.parse_known_args()
    if args.write:
        return write(args.record, pytest_arguments)
    if args.join:
        return join(args.record, args.join)
    check(args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
