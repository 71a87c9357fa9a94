"""Every kernel file compiles with NVRTC, GPU or not, in a sample of its variants.

`make compile`, which CI runs beside the tests, takes each row, dtype, tile and option.
What it has found, in compiled.tsv, is not compiled again, but for one variant of each
kernel file, to see that the compiler still says the same.
"""

import dataclasses
import functools
import hashlib
import importlib
import itertools
import re
import sys
from pathlib import Path

import pytest

from cupyflash._cli import compile_jobs, outcomes
from cupyflash._cli import nvrtc as _nvrtc
from cupyflash._cli.compile_jobs import Job
from cupyflash._cli.nvrtc import Finding
from cupyflash._cli.outcomes import Outcomes, digest_of
from cupyflash._cuda import device as _device
from cupyflash._cuda import source as _source
from cupyflash._cuda.kernel import Variant

# Of each kernel file one variant in so many.
ARCHS = {"sm_90a": 8, "sm_80": 16, "sm_75": 11, "sm_120": 23}
CHUNK = 8

ROOT = Path(__file__).parents[2]

# What `make compile` keeps.
KNOWN = Outcomes(ROOT / "tests/record/compiled.tsv")


# What `make compile` compiles for.
ALL_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@functools.cache
def jobs_of(*archs):
    return compile_jobs.jobs_for(*map(_device.device_of_arch, archs))


def sample(arch, step):
    """Every `step`-th of the representative variants of each kernel file."""
    jobs = jobs_of(*(ALL_ARCHS if arch in ALL_ARCHS else (arch,)))
    jobs = [job for job in jobs if job.arch == arch]

    def source(job):
        return job.variant.source

    groups = itertools.groupby(sorted(jobs, key=source), source)
    return [job for _, group in groups for job in list(group)[::step]]


def chunks():
    for arch, step in ARCHS.items():
        jobs = sample(arch, step)
        for start in range(0, len(jobs), CHUNK):
            some = jobs[start : start + CHUNK]
            name = f"{arch}-{some[0].operation}-{some[0].row}-{start}"
            yield pytest.param(some, id=name)


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    if reason := _nvrtc.unusable():
        pytest.skip(reason)


@pytest.mark.parametrize("jobs", list(chunks()))
def test_variants_compile(jobs):
    """To machine code; what is marked fast does not spill."""
    problems = []
    for job in jobs:
        finding = KNOWN.get(job, _nvrtc.version()) or _nvrtc.find(job)[0]
        o = _nvrtc.outcome_of(job, finding, 0.0)
        if o.problem:
            problems.append(f"{o.operation}/{o.row} {o.arch} {o.defines}: {o.problem}")
    assert not problems, "\n".join(problems)


@functools.cache
def one_of_each_file():
    """Of each kernel file the variant with the first digest, among those known."""
    known = [job for job in jobs_of(*ALL_ARCHS) if KNOWN.get(job) is not None]
    firsts = {job.variant.source: job for job in sorted(known, key=digest_of)[::-1]}
    return [firsts[source] for source in sorted(firsts)]


@pytest.mark.parametrize("job", one_of_each_file(), ids=lambda job: job.variant.source)
def test_the_compiler_still_says_what_is_known(job):
    """Of the same NVRTC all of it, of another that nothing is wrong."""
    finding, _ = _nvrtc.find(job)
    assert not _nvrtc.outcome_of(job, finding, 0.0).problem
    if KNOWN.version_of(job) == _nvrtc.version():
        assert finding == KNOWN.get(job)


@pytest.mark.parametrize("operation", ["softmax", "attention", "points"])
def test_each_kernel_file_is_compiled(operation):
    device = _device.device_of_arch("sm_90a")
    jobs = compile_jobs.jobs_for(device)
    compiled = {job.variant.source for job in jobs}
    files = {
        path.relative_to(_source.CUDA_SRC).as_posix()
        for path in (_source.CUDA_SRC / operation).rglob("*.cu")
    }
    # Copies serve both; exponentials are there to be judged.
    files |= {
        path.relative_to(_source.CUDA_SRC).as_posix()
        for folder in ("copy", "check")
        for path in (_source.CUDA_SRC / folder).rglob("*.cu")
    }
    assert files <= compiled


def test_an_error_names_the_file_and_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(_source, "CUDA_SRC", tmp_path)
    _source.load.cache_clear()
    (tmp_path / "bad.cuh").write_text("\nint f() { return nonsense; }\n")
    (tmp_path / "bad.cu").write_text(
        '#include "bad.cuh"\nextern "C" __global__ void bad() {}\n'
    )
    variant = Variant("bad.cu", "bad")
    try:
        job = Job("softmax", "bad", False, "sm_80", variant)
        outcome = _nvrtc.outcome_of(job, *_nvrtc.find(job))
    finally:
        _source.load.cache_clear()
    assert "bad.cuh(2)" in outcome.problem
    assert "nonsense" in outcome.problem


# --- what is compiled of all that there is -------------------------------------------


def made_up(*defines, fast=True, arch="sm_80", source="k.cu"):
    """A job with defines such as "TILE=1"."""
    items = tuple(tuple(define.split("=")) for define in defines)
    return Job("softmax", "row", fast, arch, Variant(source, "k", items))


@pytest.fixture
def sources(monkeypatch):
    """sources(text) makes it the text of all kernels, which asks nothing at first."""

    texts = [""]
    monkeypatch.setattr(_source, "load", lambda *_: texts[-1])
    monkeypatch.setattr(compile_jobs, "_sides", compile_jobs._sides.__wrapped__)
    return texts.append


def test_one_job_stands_for_those_that_show_no_more(sources):
    plain = made_up("TILE=1")
    masked = made_up("TILE=1", "MASK=1")
    capped = made_up("TILE=1", "SOFTCAP=1")
    both = made_up("TILE=1", "MASK=1", "SOFTCAP=1")
    assert compile_jobs.enough([plain, masked, capped, both]) == [plain, both]
    assert compile_jobs.enough([plain, masked, capped]) == [masked, capped]


def test_each_option_is_compiled_with_each_tile(sources):
    jobs = [
        made_up(f"TILE={tile}", *options)
        for tile in (1, 2, 3)
        for options in ((), ("MASK=1",), ("BIAS_T=float",), ("BIAS_T=double",))
    ]
    chosen = compile_jobs.enough(jobs)
    shown = [(job.variant.defines[0], job.variant.defines[1:]) for job in chosen]
    for tile in (1, 2, 3):
        options = [dict(o) for t, o in shown if t == ("TILE", str(tile))]
        assert any("MASK" in o for o in options)
        assert any("BIAS_T" in o for o in options)
    # A type of an optional array is seen once, whatever the tile.
    types = [dict(o).get("BIAS_T") for _, o in shown]
    assert {"float", "double"} <= set(types)
    slow = [dataclasses.replace(job, fast=False) for job in jobs]
    assert len(compile_jobs.enough(slow)) < len(chosen)


def test_each_architecture_meets_each_tile_and_each_option(sources):
    """But not each of one with each of the other: that is for a tile and an option."""
    archs, tiles, options = ("sm_80", "sm_90a", "sm_120"), range(4), range(3)
    cells = set(itertools.product(archs, tiles, options))
    jobs = [made_up(f"TILE={t}", f"MASK={o}", arch=arch) for arch, t, o in cells]
    chosen = compile_jobs.enough(jobs)
    found = {(job.arch, *job.variant.defines) for job in chosen}
    assert len(found) < len(cells)
    for pair in itertools.combinations(range(3), 2):
        shown = {tuple(cell[i] for i in pair) for cell in found}
        assert len(shown) == len({tuple(cell[i] for i in pair) for cell in cells})


@pytest.mark.parametrize(
    "archs", [("sm_80",), ("sm_90a",), ("sm_120",), ALL_ARCHS], ids="+".join
)
def test_what_is_compiled_shows_all_that_there_is(archs, monkeypatch):
    chosen = jobs_of(*archs)
    monkeypatch.setattr(compile_jobs, "enough", list)
    every = compile_jobs.jobs_for(*map(_device.device_of_arch, archs))
    assert set(chosen) < set(every)

    def seen(jobs):
        """Each kernel with each architecture and with each define, fast ones with
        all three, and with each head dimension.
        """
        found = set()
        for job in jobs:
            defines = dict(job.variant.defines)
            kernel = job.operation, job.row, job.fast, job.variant.source
            found.add((*kernel, compile_jobs._code_of(job)))
            found |= {(kernel, item) for item in defines.items()}
            if job.fast:
                dim = defines.get("HEAD_DIM")
                found |= {(kernel, dim, name) for name in defines}
                found |= {(kernel, job.arch, name) for name in defines}
        return found

    assert seen(chosen) == seen(every)


def test_architectures_with_the_same_code_are_compiled_once(sources):
    fast = [made_up("TILE=1", arch=arch) for arch in ALL_ARCHS]
    slow = [dataclasses.replace(job, fast=False) for job in fast]
    archs = [job.arch for job in compile_jobs.distinct(fast)]
    assert archs == ["sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"]
    archs = [job.arch for job in compile_jobs.distinct(slow)]
    assert archs == ["sm_80", "sm_90a", "sm_100"]
    assert compile_jobs.distinct(fast[2:3]) == fast[2:3]
    assert len(compile_jobs.distinct(fast[:1] + slow[:1])) == 2


@pytest.mark.parametrize(
    "test",
    [
        "#if __CUDA_ARCH__ >= 890",
        "#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890",
        "#if __CUDA_ARCH__ == 860",  # of a form that is not understood
        "#ifdef __CUDA_ARCH_SPECIFIC__",
    ],
)
def test_a_source_that_asks_is_compiled_for_each(sources, test):
    sources(test)
    for fast in (False, True):
        jobs = [made_up(arch=arch, fast=fast) for arch in ("sm_86", "sm_89")]
        assert compile_jobs.distinct(jobs) == jobs


def test_the_options_are_those_of_cupy(monkeypatch):
    """All that CuPy gives NVRTC, and the report."""
    compiler = pytest.importorskip("cupy").cuda.compiler
    given = []

    def compile(self, options=(), log_stream=None):
        given.extend(options)
        return b"", None

    monkeypatch.setattr(compiler._NVRTCProgram, "compile", compile)
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", _of_sm_80)
    job = made_up("A=1")
    options = (*job.variant.options, "-ftz=true")
    compiler.compile_using_nvrtc("", options, "80")
    assert set(given) <= set(_nvrtc.options_of(job))


def _of_sm_80(arch):
    return "-arch=sm_80", "cubin"


def text_and_code(job, sections):
    """Hashes of the compiler's text, without its architecture, and of the code."""
    from cupy_backends.cuda.libs import nvrtc

    text = _source.load(job.variant.source, job.variant.generated)
    program = nvrtc.createProgram(text, job.variant.source, (), ())
    try:
        nvrtc.compileProgram(program, _nvrtc.options_of(job))
        ptx, cubin = nvrtc.getPTX(program), nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    lines = [x for x in ptx.splitlines() if not x.startswith((".target", "//"))]
    code = dict(sections(cubin))[f".text.{job.variant.entry}"]
    return tuple(hashlib.md5(x).hexdigest() for x in ("\n".join(lines).encode(), code))


def sides(job, arch):
    return compile_jobs._sides(job.variant.source, arch)


@pytest.fixture
def sections(monkeypatch):
    """The sections of an ELF file, as the comparison of machine code reads them."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    return importlib.import_module("compare_machine_code").sections


@pytest.mark.parametrize(
    ("operation", "row"),
    [("softmax", "vjp_tiled"), ("softmax", "safe"), ("attention_vjp", "mma")],
)
def test_architectures_that_are_left_out_have_the_same_code(operation, row, sections):
    """The tables of same text and same code, on kernels of each kind."""
    device = _device.device_of_arch("sm_80")
    job = next(
        job
        for job in compile_jobs.jobs_for(device)
        if (job.operation, job.row) == (operation, row)
    )
    found = {
        arch: text_and_code(dataclasses.replace(job, arch=arch), sections)
        for arch in ALL_ARCHS
    }
    for arch, other in compile_jobs._SAME_TEXT.items():
        if sides(job, arch) == sides(job, other):
            assert found[arch][0] == found[other][0]
    for arch, other in compile_jobs._SAME_CODE.items():
        assert found[arch] == found[other]
    assert found["sm_80"] != found["sm_90a"]


# --- what is known -------------------------------------------------------------------

FINE = Finding(40, 0, 0, 16, "", "")


@pytest.fixture
def text(monkeypatch):
    """text["k.cu"] is what the kernel's file holds."""
    texts = {"k.cu": "one"}
    monkeypatch.setattr(_source, "load", lambda name, *_: texts[name])
    return texts


def put(known, job, finding=FINE, nvrtc="13.0"):
    known.put(digest_of(job), finding, nvrtc)


def test_findings_are_kept(tmp_path, text):
    path = tmp_path / "folder" / "known.tsv"
    job, other = made_up("A=1"), made_up("A=2")
    known = Outcomes(path)
    assert known.get(job) is None
    put(known, job)
    put(known, other, dataclasses.replace(FINE, error="k.cu(1): error"))
    known.save()
    known = Outcomes(path)
    assert known.get(job, "13.0") == FINE
    assert known.get(other) is None  # errors are looked for again
    assert (known.used, known.of_others) == (1, 0)
    assert known.get(dataclasses.replace(job, arch="sm_90a")) is None
    text["k.cu"] = "two"
    assert known.get(job) is None


@pytest.mark.parametrize(
    "finding",
    [
        FINE,
        Finding(255, 16, 8, 0, "(C7510) wgmma are serialized, in the entry", ""),
        Finding(None, None, None, None, "", ""),
    ],
)
def test_the_file_gives_back_what_went_in(tmp_path, text, finding):
    known = Outcomes(tmp_path / "known.tsv")
    put(known, made_up(), finding)
    known.save()
    assert Outcomes(tmp_path / "known.tsv").get(made_up()) == finding


def test_a_known_spill_is_still_a_problem(tmp_path, text):
    known = Outcomes(None)
    put(known, made_up(), dataclasses.replace(FINE, spill_bytes=8))

    def problem(job):
        return _nvrtc.outcome_of(job, known.get(job), 0.0).problem

    assert "spills 8 bytes" in problem(made_up())
    assert not problem(made_up(fast=False))


@pytest.mark.parametrize(
    "content", ["nonsense", "a\tb", "a\t13.0\tx\t\t\t\t\n", "#\n\n"]
)
def test_lines_that_cannot_be_read(tmp_path, text, content):
    path = tmp_path / "known.tsv"
    path.write_text(content)
    known = Outcomes(path)
    assert known.get(made_up()) is None
    put(known, made_up())
    known.save()
    assert Outcomes(path).get(made_up()) == FINE


def test_a_line_a_kernel_in_the_order_of_digests(tmp_path, text):
    jobs = [made_up(f"A={n}") for n in range(20)]
    files = []
    for order in (jobs, jobs[::-1]):
        known = Outcomes(tmp_path / "known.tsv")
        known.prune([])
        for job in order:
            put(known, job)
        known.save()
        files.append((tmp_path / "known.tsv").read_text())
    assert files[0] == files[1]
    lines = [line for line in files[0].splitlines() if not line.startswith("#")]
    assert [line.split("\t")[0] for line in lines] == sorted(map(digest_of, jobs))


def test_what_no_kernel_has_any_more_goes(text):
    known = Outcomes(None)
    for value in "123":
        put(known, made_up(f"A={value}"))
    jobs = [made_up("A=1"), made_up("A=3"), made_up("A=4")]
    assert known.missing(jobs) == (1, 1)
    known.prune(jobs)
    assert known.missing(jobs) == (1, 0)
    assert [v for v in "1234" if known.get(made_up(f"A={v}"))] == ["1", "3"]


def test_another_nvrtc_compiles_a_sample(text):
    """Always the same one for a version, and another for the next."""
    known = Outcomes(None)
    jobs = [made_up(f"A={n}") for n in range(20 * outcomes.SAMPLE)]
    for job in jobs:
        put(known, job, nvrtc="13.0")
    assert all(known.get(job, "13.0") for job in jobs)
    samples = {
        version: [job for job in jobs if known.get(job, version) is None]
        for version in ("13.1", "13.2")
    }
    assert samples["13.1"] != samples["13.2"]
    for version, sample in samples.items():
        assert 5 <= len(sample) <= 60
        assert sample == [job for job in jobs if known.get(job, version) is None]
        assert all(known.get(job) for job in sample)  # there, but to be looked at
    before = known.of_others
    put(known, samples["13.1"][0], nvrtc="13.1")
    assert known.get(samples["13.1"][0], "13.1")
    assert known.of_others == before


# --- digests -------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """write({name: text}) makes cuda_src/ of these files alone, and gives a digest."""

    def write(files):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, "utf-8")
        monkeypatch.setattr(_source, "CUDA_SRC", folder)
        _source.load.cache_clear()
        return digest_of(made_up(source=next(iter(files))))

    yield write
    _source.load.cache_clear()


FILES = {
    "a.cu": '#include "one/b.cuh"\n#include "one/z.cuh"\nint c = Z + B;\n',
    "one/b.cuh": "#pragma once\nconstexpr int B = 2;\n",
    "one/z.cuh": '#pragma once\n#include "one/b.cuh"\nconstexpr int Z = 2;\n',
}


def test_a_move_changes_no_digest(tree):
    """Not of a header, nor of the kernel, nor includes in the order of new names."""
    before = tree(FILES)
    moved = {
        "two/k.cu": '#include "a/z.cuh"\n#include "one/b.cuh"\nint c = Z + B;\n',
        "a/z.cuh": FILES["one/z.cuh"],
        "one/b.cuh": FILES["one/b.cuh"],
    }
    assert tree(moved) == before


@pytest.mark.parametrize(
    ("name", "old", "new", "is_same"),
    [
        ("one/b.cuh", "constexpr", "// why\nconstexpr", True),
        ("one/b.cuh", "int B = 2;", "int\n    B=2;  /* two */", True),
        ("one/b.cuh", "2", "3", False),
        ("a.cu", "Z + B", "Z - B", False),
        ("a.cu", '#include "one/z.cuh"\n', "", False),
        ("a.cu", "int c", "#define N 1\nint c", False),
    ],
)
def test_what_changes_a_digest(tree, name, old, new, is_same):
    before = tree(FILES)
    assert FILES[name] != (text := FILES[name].replace(old, new))
    assert (tree({**FILES, name: text}) == before) == is_same


def test_a_digest_has_entry_options_and_architecture(text):
    job = made_up("A=1", arch="sm_80")
    entry = dataclasses.replace(
        job, variant=dataclasses.replace(job.variant, entry="l")
    )
    others = [made_up("A=2"), made_up("A=1", arch="sm_86"), entry]
    assert len({digest_of(job) for job in (job, *others)}) == 4
    assert digest_of(dataclasses.replace(job, row="other", fast=False)) == digest_of(
        job
    )


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("a  b", "a\n\n b // c", True),
        ("ab", "a b", False),
        ("a + +b", "a ++b", False),
        ('f("// no comment")', 'f("")', False),
        ('f("a  b")', 'f("a b")', False),
        ("#define A 1\nint a;", "#define A 1 int a;", False),
        ("#define A 1 \\\n  + 2\nx", "#define A 1 + 2\nx", True),
        (
            "int a;\n#if B\nint c;\n#endif",
            "int a; // x\n  #if B\nint\nc;\n#endif",
            True,
        ),
        ("a /* b\n c */ d", "a d", True),
        ("'\"' /* a */ '\"'", "'\"' '\"'", True),
    ],
)
def test_tokens(one, other, is_same):
    assert (outcomes.tokens_of(one) == outcomes.tokens_of(other)) == is_same


def test_no_kernel_asks_where_it_stands():
    """A file's name and line would be part of its code, and are not in its digest."""
    for path in _source.CUDA_SRC.rglob("*.cu*"):
        assert not re.search(r"__(LINE|FILE)__", path.read_text("utf-8")), path
