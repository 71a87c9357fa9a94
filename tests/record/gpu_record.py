"""The record of the GPU tests: which sources ran, on what, and how it went.

    python tests/record/gpu_record.py --write [pytest arguments]   run them; needs a GPU
    python tests/record/gpu_record.py --join FILE...               one record of several
    python tests/record/gpu_record.py --write --part 2/3           a third of the files
    python tests/record/gpu_record.py --check                      is the record up to
    date? python tests/record/gpu_record.py --unmet                      kernels that no
    test met

``--write`` takes any arguments of pytest: ``tests/gpu -k laws`` runs a part of a
folder. It uses all cores and all cards, unless ``-n`` says how many processes test.
tests/record/sanitize.py adds what compute-sanitizer found.

``--write`` leaves with pytest's exit code; ``--check`` prints a line and leaves with 0,
since a machine without a GPU can do nothing about it; with ``--strict`` it leaves with
1 unless all files ran whole on these sources and nothing failed. Files of tests among
the pytest arguments run alone, and their results replace those of the same files in the
record: the whole can be run in parts. ``--part 2/3`` deals the files by the seconds
that they took last time. Of a file that runs with ``-k``, or test by test, the record
keeps what ran beside what it had, and the file is not whole by it. Parts that ran side
by side, on several GPUs, each with a ``--record`` of its own, are joined after it; the
last of a file counts. The record has for each file the digest of the sources that it
ran on: of the package, its kernels, the tests and setup.cfg, wherever they lie.

Each test says which variants of kernels it launched first in its process; those of
tests that passed and compare results are in the record, and what share they are of the
rows that are to be met whole (tests/support/variants.py).
"""

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

import workers  # noqa: E402

RECORD = ROOT / "tests" / "record" / "gpu_record.json"


_INCLUDE = re.compile(rb'^[ \t]*#include[ \t]+"([^"]+)"[^\n]*\n', re.MULTILINE)


def sources_digest(root: Path = ROOT) -> str:
    """sha256 of what runs: kernels with their headers, the package, tests, setup.cfg.

    It is made of contents alone, so that it stays when a file moves.
    """
    kernels = root / "cuda_src"
    contents = [_joined(kernels, path, set()) for path in kernels.rglob("*.cu")]
    python = [*(root / "cupyflash").rglob("*.py"), *(root / "tests").rglob("*.py")]
    contents += [_text(path) for path in (*python, root / "setup.cfg")]
    digests = sorted(hashlib.sha256(content).digest() for content in contents)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _text(path):
    return path.read_bytes().replace(b"\r\n", b"\n")


def _joined(folder, path, seen):
    """The text of a kernel with each header pasted in once, as it is compiled."""

    def paste(match):
        header = folder / match[1].decode()
        # What is generated for a call comes of the package, which is in the digest.
        if header in seen or header.parent.name == "generated":
            return b""
        seen.add(header)
        return _joined(folder, header, seen)

    return _INCLUDE.sub(paste, _text(path))


# Tests of what surrounds kernels: what they launch is not compared with the oracle.
COMPARE_NOTHING = ("gpu/test_memory.py", "gpu/test_threads.py", "test_environment.py")


class Counter:
    """A pytest plugin that counts outcomes and keeps the names of failures."""

    def __init__(self):
        self.passed: set[str] = set()
        self.skipped: set[str] = set()
        self.failures: set[str] = set()
        self.planned: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.cases: dict[str, int] = {}
        self.deselected: set[str] = set()
        self.variants: set[str] = set()

    def pytest_collection_finish(self, session):
        self.planned |= {item.nodeid for item in session.items}

    def pytest_deselected(self, items):
        """By -k and the like; tests that need no GPU are none of this record."""
        self.deselected |= {
            item.nodeid for item in items if item.get_closest_marker("gpu")
        }

    def pytest_runtest_logreport(self, report):
        name = _file(report.nodeid)
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.when == "call":
            # A test that tries many problems says how many.
            properties = dict(report.user_properties)
            tried = properties.get("cases", 1)
            if report.passed and name not in COMPARE_NOTHING:
                self.variants |= {*properties.get("variants", "").split()}
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
                "left_out": sum(_file(test) == name for test in self.deselected),
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

    from cupyflash._core import threads

    runtime = cupy.cuda.runtime
    cards = range(runtime.getDeviceCount())
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", workers.all_cards())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of NumPy in each process
    sizes = [runtime.getDeviceProperties(card)["totalGlobalMem"] for card in cards]
    # What follows in a file shares kernels: parts of it go to a worker as they are.
    number = workers.number_of(threads.num_cores(), sizes)
    return ["-n", str(number), "--dist", "worksteal"]


def write(path, pytest_arguments, part=None):
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
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if part is not None:
        dealt = deal(_test_files(), before.get("files", {}), part[1])[part[0] - 1]
        pytest_arguments = [
            *(str(ROOT / "tests" / name) for name in dealt), *pytest_arguments
        ]  # fmt: skip
    files = [file for name in pytest_arguments for file in _files_in(name)]
    by_name = {_file(name) for name in pytest_arguments if "::" in name}
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

        @pytest.hookimpl(optionalhook=True)
        def pytest_testnodedown(self, node, error):
            found = getattr(node, "workeroutput", None) or {}
            counter.deselected |= {*found.get("deselected", ())}

    arguments = [
        "-m",
        "gpu",
        # Where pytest-benchmark is installed it would warn under xdist.
        "-p",
        "no:benchmark",
        *(() if files else (str(ROOT / "tests"),)),
        *pytest_arguments,
    ]
    try:
        code = pytest.main(arguments, plugins=[counter, OfWorkers()])
    except KeyboardInterrupt:  # once more, while pytest ended after the first
        code = pytest.ExitCode.INTERRUPTED
    found = counter.result(files or _test_files())
    for of_file in found.values():
        of_file["sources"] = digest
    facts = {"date": datetime.date.today().isoformat(), **facts}
    kept = before.get("files", {})
    for name, of_file in list(found.items()):
        if name in by_name or of_file.pop("left_out"):
            found[name] = _beside(kept.get(name), of_file)
    if files:
        found = kept | found
    for name in ("sanitizer", "fuzz"):
        if name in before:
            facts[name] = before[name]
    facts["variants"] = _with_variants(before.get("variants"), digest, counter.variants)
    _save(path, facts, found)
    return int(code)


def _beside(before, part):
    """A file of which a part ran: what it had, or nothing, and the part beside it."""
    empty = dict.fromkeys(("passed", "skipped", "not_run", "cases"), 0)
    whole = before or {**empty, "seconds": 0.0, "failures": [], "sources": ""}
    return {**whole, "part": {n: part[n] for n in ("passed", "failures", "sources")}}


def deal(files, before, number):
    """Files in so many parts of about the same time, by what they took last time."""
    took = {name: before[name].get("seconds", 0.0) for name in files if name in before}
    usual = sorted(took.values())[len(took) // 2] if took else 1.0
    parts = [(0.0, i, []) for i in range(number)]
    for name in sorted(files, key=lambda name: -took.get(name, usual)):
        seconds, i, names = min(parts)
        parts[i] = seconds + took.get(name, usual), i, [*names, name]
    return [names for _, _, names in parts]


# --- which kernels were met ----------------------------------------------------------


def _with_variants(before, digest, met):
    """The variants that were met on these sources, and what share that is."""
    if before and before["sources"] == digest:
        met = met | {*before["met"].split()}
    sys.path.insert(0, str(ROOT))  # a checkout that is not installed
    import variants

    shares: dict[str, list[int]] = {}
    for name, (operation, row, _) in variants.wanted().items():
        of_row = shares.setdefault(f"{operation}/{row}", [0, 0])
        of_row[0] += name in met
        of_row[1] += 1
    return {"sources": digest, "rows": shares, "met": " ".join(sorted(met))}


def unmet(path):
    """Print what the compile list has and no test met, the worst row first."""
    sys.path.insert(0, str(ROOT))
    import variants

    record = json.loads(path.read_text(encoding="utf-8"))
    met = {*record.get("variants", {"met": ""})["met"].split()}
    rows: dict[str, list[str]] = {}
    for name, (operation, row, variant) in variants.wanted().items():
        left = rows.setdefault(f"{operation}/{row}", [])
        if name not in met:
            defines = " ".join(f"{n}={x}" for n, x in variant.defines)
            left.append(f"{variant.source} {defines}")
    for row, left in sorted(rows.items(), key=lambda item: -len(item[1])):
        print(f"{row}: {len(left)} not met")
        for line in left:
            print(f"  {line}")


def put_fuzz(path, found):
    """Write what tests/support/fuzz_gpu.py found into the record."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    digest = sources_digest()
    kept = {name: x for name, x in found.items() if name != "variants"}
    before["fuzz"] = {**kept, "sources": digest}
    met = {*found["variants"]}
    before["variants"] = _with_variants(before.get("variants"), digest, met)
    path.write_text(json.dumps(before, indent=1) + "\n", encoding="utf-8")


def join(path, parts):
    """Write the record of all files in `parts`; 2 if they are of several devices."""
    found, facts, sanitizer, fuzz, variants = {}, [], {}, None, None
    for part in parts:
        record = json.loads(part.read_text(encoding="utf-8"))
        # Records of before had one digest for all.
        one = record.pop("sources", None)
        for of_file in record["files"].values():
            of_file.setdefault("sources", one)
        found |= record["files"]
        sanitizer |= record.pop("sanitizer", {})
        fuzz = record.pop("fuzz", fuzz)
        if part_of := record.pop("variants", None):
            met = {*part_of["met"].split()}
            variants = _with_variants(variants, part_of["sources"], met)
        facts.append({k: v for k, v in record.items() if k not in _COUNTS})
    if any(other != facts[0] for other in facts):
        print("the records are of different days or devices")
        return 2
    if sanitizer:
        facts[0]["sanitizer"] = sanitizer
    if fuzz:
        facts[0]["fuzz"] = fuzz
    if variants:
        facts[0]["variants"] = variants
    _save(path, facts[0], found)
    return 0


_COUNTS = ("passed", "failed", "skipped", "files")


def _save(path, facts, found):
    last = {n: facts.pop(n) for n in ("fuzz", "variants", "sanitizer") if n in facts}
    record = {
        **facts,
        "passed": sum(of_file["passed"] for of_file in found.values()),
        "failed": sum(len(of_file["failures"]) for of_file in found.values()),
        "skipped": sum(of_file["skipped"] for of_file in found.values()),
        "files": dict(sorted(found.items())),
    }
    record |= last
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
    """Print a line on the record, and what failed in it; whether it is whole."""
    if not path.exists():
        print("WARNING: there is no GPU record; make gpu-check writes one")
        return False
    record = json.loads(path.read_text(encoding="utf-8"))
    files, digest = record.get("files", {}), sources_digest()
    others = [name for name, found in files.items() if found["sources"] != digest]
    missing = [name for name in _test_files() if name not in files]
    left = {name: found.get("not_run", 0) for name, found in files.items()}
    left = {name: number for name, number in left.items() if number}
    is_whole = not (others or missing or left)
    if is_whole:
        print(f"The GPU record is of these sources. {summary(record)}")
    else:
        print(f"WARNING: the GPU record is not whole. {summary(record)}")
    if others:
        print(f"  ran on other sources: {', '.join(others)}")
    for name, number in left.items():
        print(f"  not finished: {name}, {number} tests did not run")
    if missing:
        print(f"  not in it: {', '.join(missing)}")
    failures = [name for of_file in files.values() for name in of_file["failures"]]
    for name, of_file in files.items():
        if part := of_file.get("part"):
            note = "" if part["sources"] == digest else ", on other sources"
            failures += part["failures"]
            print(f"  in part: {name}, {part['passed']} tests passed{note}")
    for name in failures:
        print(f"  failed: {name}")
    is_met = check_variants(record.get("variants"), digest)
    is_drawn = check_fuzz(record.get("fuzz"), digest)
    check_sanitizer(record.get("sanitizer"))
    return is_whole and not failures and is_met and is_drawn


def check_variants(variants, digest):
    """Print the share of the variants that were met; whether it is of these sources."""
    if not variants:
        print("  which kernels were met is not in it")
        return False
    rows = variants["rows"]
    met, number = (sum(row[i] for row in rows.values()) for i in (0, 1))
    is_of_these = variants["sources"] == digest
    note = "" if is_of_these else ", on other sources"
    print(f"  kernels met: {met} of {number}, {met / number:.1%}{note}")
    for name, (some, all_) in sorted(rows.items(), key=lambda x: x[1][0] / x[1][1]):
        if some < all_:
            print(f"    {name}: {some} of {all_}")
    return is_of_these


def check_fuzz(found, digest):
    """Print what came of random problems; whether all passed on these sources."""
    if not found:
        print("  no random problems: make gpu-fuzz runs them")
        return False
    is_of_these = found["sources"] == digest
    note = "" if is_of_these else ", on other sources"
    print(
        f"  random problems: {found['passed']} of {found['problems']} passed, "
        f"{len(found['bad'])} bad, {found['not_run']} not run{note}"
    )
    for bad in found["bad"]:
        print(f"    bad: {bad['line']}")
    return is_of_these and not found["bad"]


def main():
    """Parse the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="run the GPU tests")
    what.add_argument("--check", action="store_true", help="compare with the sources")
    what.add_argument("--unmet", action="store_true", help="kernels that no test met")
    what.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="join parts")
    parser.add_argument(
        "--record", type=Path, default=RECORD, metavar="FILE", help="where it lies"
    )
    parser.add_argument("--strict", action="store_true", help="--check may fail")
    parser.add_argument(
        "--part", type=part_of, metavar="K/N", help="of --write: the k-th of n parts"
    )
    args, pytest_arguments = parser.parse_known_args()
    if args.write:
        return write(args.record, pytest_arguments, args.part)
    if args.join:
        return join(args.record, args.join)
    if args.unmet:
        unmet(args.record)
        return 0
    is_good = check(args.record)
    return int(args.strict and not is_good)


def part_of(text):
    """(2, 3) of "2/3"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"must look like 2/3, got {text}")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    sys.exit(main())
