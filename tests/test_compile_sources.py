"""Every kernel file compiles with NVRTC, GPU or not, in a sample of its variants.

`make compile`, which CI runs beside the tests, takes each row, dtype, tile and option;
what it has found is not compiled again.
"""

import dataclasses
import hashlib
import itertools
import json
import struct
from pathlib import Path

import pytest

from cupyflash import _compile_jobs, _kernels, _nvrtc, _source
from cupyflash._compile_jobs import Job
from cupyflash._kernels import Variant
from cupyflash._nvrtc import Finding, Known, key_of

# Of each kernel file one variant in so many.
ARCHS = {"sm_90a": 8, "sm_80": 16, "sm_75": 11, "sm_120": 23}
CHUNK = 8

# Where `make compile` leaves its findings.
KNOWN = Known(Path(__file__).parent.parent / "build" / "compiled.json")


def sample(arch, step):
    """Every `step`-th of the representative variants of each kernel file."""
    jobs = _compile_jobs.jobs_for(_kernels.device_of_arch(arch), False)

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
    outcomes = [_nvrtc.compile_one(job, KNOWN) for job in jobs]
    problems = [
        f"{o.operation}/{o.row} {o.arch} {o.defines}: {o.problem}"
        for o in outcomes
        if o.problem
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("operation", ["softmax", "attention"])
def test_each_kernel_file_is_compiled(operation):
    device = _kernels.device_of_arch("sm_90a")
    jobs = _compile_jobs.jobs_for(device, False)
    compiled = {job.variant.source for job in jobs}
    files = {
        path.relative_to(_source.CUDA_SRC).as_posix()
        for path in (_source.CUDA_SRC / operation).glob("*.cu")
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
        outcome = _nvrtc.compile_one(Job("softmax", "bad", False, "sm_80", variant))
    finally:
        _source.load.cache_clear()
    assert "bad.cuh(2)" in outcome.problem
    assert "nonsense" in outcome.problem


# --- what is compiled of all that there is -------------------------------------------

ALL_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


def made_up(*defines, fast=True, arch="sm_80", source="k.cu"):
    """A job with defines such as "TILE=1"."""
    items = tuple(tuple(define.split("=")) for define in defines)
    return Job("softmax", "row", fast, arch, Variant(source, "k", items))


def test_one_job_stands_for_those_that_show_no_more():
    plain = made_up("TILE=1")
    masked = made_up("TILE=1", "MASK=1")
    capped = made_up("TILE=1", "SOFTCAP=1")
    both = made_up("TILE=1", "MASK=1", "SOFTCAP=1")
    assert _compile_jobs.enough([plain, masked, capped, both]) == [plain, both]
    assert _compile_jobs.enough([plain, masked, capped]) == [masked, capped]


def test_each_option_is_compiled_with_each_tile():
    jobs = [
        made_up(f"TILE={tile}", *options)
        for tile in (1, 2, 3)
        for options in ((), ("MASK=1",), ("BIAS_T=float",), ("BIAS_T=double",))
    ]
    chosen = _compile_jobs.enough(jobs)
    shown = [(job.variant.defines[0], job.variant.defines[1:]) for job in chosen]
    for tile in (1, 2, 3):
        options = [dict(o) for t, o in shown if t == ("TILE", str(tile))]
        assert any("MASK" in o for o in options)
        assert any("BIAS_T" in o for o in options)
    # A type of an optional array is seen once, whatever the tile.
    types = [dict(o).get("BIAS_T") for _, o in shown]
    assert {"float", "double"} <= set(types)
    slow = [dataclasses.replace(job, fast=False) for job in jobs]
    assert len(_compile_jobs.enough(slow)) < len(chosen)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_what_is_compiled_shows_all_that_there_is(arch, monkeypatch):
    device = _kernels.device_of_arch(arch)
    chosen = _compile_jobs.jobs_for(device, False)
    monkeypatch.setattr(_compile_jobs, "enough", list)
    every = _compile_jobs.jobs_for(device, False)
    assert set(chosen) < set(every)

    def seen(jobs):
        """(kernel, name, value) of all defines, and for fast rows with head_dim."""
        found = set()
        for job in jobs:
            defines = dict(job.variant.defines)
            kernel = job.operation, job.row, job.fast, job.variant.source
            found |= {(kernel, item) for item in defines.items()}
            if job.fast:
                dim = defines.get("HEAD_DIM")
                found |= {(kernel, dim, name) for name in defines}
        return found

    assert seen(chosen) == seen(every)


def test_architectures_with_the_same_code_are_compiled_once(monkeypatch):
    monkeypatch.setattr(_source, "load", lambda name: "")
    monkeypatch.setattr(_compile_jobs, "_sides", _compile_jobs._sides.__wrapped__)
    fast = [made_up("TILE=1", arch=arch) for arch in ALL_ARCHS]
    slow = [dataclasses.replace(job, fast=False) for job in fast]
    archs = [job.arch for job in _compile_jobs.distinct(fast)]
    assert archs == ["sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"]
    archs = [job.arch for job in _compile_jobs.distinct(slow)]
    assert archs == ["sm_80", "sm_90a", "sm_100"]
    assert _compile_jobs.distinct(fast[2:3]) == fast[2:3]
    assert len(_compile_jobs.distinct(fast[:1] + slow[:1])) == 2


@pytest.mark.parametrize(
    "test",
    [
        "#if __CUDA_ARCH__ >= 890",
        "#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890",
        "#if __CUDA_ARCH__ == 860",  # of a form that is not understood
        "#ifdef __CUDA_ARCH_SPECIFIC__",
    ],
)
def test_a_source_that_asks_is_compiled_for_each(monkeypatch, test):
    monkeypatch.setattr(_source, "load", lambda name: test)
    monkeypatch.setattr(_compile_jobs, "_sides", _compile_jobs._sides.__wrapped__)
    for fast in (False, True):
        jobs = [made_up(arch=arch, fast=fast) for arch in ("sm_86", "sm_89")]
        assert _compile_jobs.distinct(jobs) == jobs


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


def text_and_code(job):
    """Hashes of the compiler's text, without its architecture, and of the code."""
    from cupy_backends.cuda.libs import nvrtc

    text = _source.load(job.variant.source)
    program = nvrtc.createProgram(text, job.variant.source, (), ())
    try:
        nvrtc.compileProgram(program, _nvrtc.options_of(job))
        ptx, cubin = nvrtc.getPTX(program), nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    lines = [x for x in ptx.splitlines() if not x.startswith((".target", "//"))]
    code = section(cubin, f".text.{job.variant.entry}")
    return tuple(hashlib.md5(x).hexdigest() for x in ("\n".join(lines).encode(), code))


def sides(job, arch):
    return _compile_jobs._sides(job.variant.source, arch)


def section(elf, wanted):
    """The bytes of a section of a 64-bit ELF file."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)
    ]
    names = headers[of_names][4]
    for header in headers:
        at = names + header[0]
        if elf[at : elf.index(b"\0", at)].decode() == wanted:
            return elf[header[4] : header[4] + header[5]]
    raise LookupError(wanted)


@pytest.mark.parametrize(
    ("operation", "row"),
    [("softmax", "vjp_tiled"), ("softmax", "safe"), ("attention_vjp", "mma")],
)
def test_architectures_that_are_left_out_have_the_same_code(operation, row):
    """The tables of same text and same code, on kernels of each kind."""
    device = _kernels.device_of_arch("sm_80")
    job = next(
        job
        for job in _compile_jobs.jobs_for(device, False)
        if (job.operation, job.row) == (operation, row)
    )
    found = {
        arch: text_and_code(dataclasses.replace(job, arch=arch)) for arch in ALL_ARCHS
    }
    for arch, other in _compile_jobs._SAME_TEXT.items():
        if sides(job, arch) == sides(job, other):
            assert found[arch][0] == found[other][0]
    for arch, other in _compile_jobs._SAME_CODE.items():
        assert found[arch] == found[other]
    assert found["sm_80"] != found["sm_90a"]


# --- what is known -------------------------------------------------------------------

FINE = Finding(40, 0, 0, 16, "", "")


@pytest.fixture
def text(monkeypatch):
    """text["k.cu"] is what the kernel's file holds."""
    texts = {"k.cu": "one"}
    monkeypatch.setattr(_source, "load", texts.__getitem__)
    return texts


def test_findings_are_kept(tmp_path, text, monkeypatch):
    path = tmp_path / "folder" / "known.json"
    job, other = made_up("A=1"), made_up("A=2")
    known = Known(path)
    assert known.get(job) is None
    known.put(key_of(job), FINE)
    known.put(key_of(other), dataclasses.replace(FINE, error="k.cu(1): error"))
    known.save()
    known = Known(path)
    assert known.get(job) == FINE
    assert known.get(other) is None  # errors are looked for again
    assert known.used == 1
    assert known.get(dataclasses.replace(job, arch="sm_90a")) is None
    monkeypatch.setattr(_nvrtc, "_find", None)
    outcome = _nvrtc.compile_one(job, known)
    assert (outcome.registers, outcome.problem) == (40, "")
    text["k.cu"] = "two"
    assert known.get(job) is None


def test_a_known_spill_is_still_a_problem(tmp_path, text):
    known = Known(tmp_path / "known.json")
    known.put(key_of(made_up()), dataclasses.replace(FINE, spill_bytes=8))
    assert "spills 8 bytes" in _nvrtc.compile_one(made_up(), known).problem
    assert not _nvrtc.compile_one(made_up(fast=False), known).problem


@pytest.mark.parametrize("content", ["nonsense", "[1]", '{"a": [1]}', '{"a": 1}'])
def test_findings_that_cannot_be_read(tmp_path, text, content):
    path = tmp_path / "known.json"
    path.write_text(content)
    known = Known(path)
    assert known.get(made_up()) is None
    known.put(key_of(made_up()), FINE)
    known.save()
    assert Known(path).get(made_up()) == FINE


def test_the_oldest_findings_go(tmp_path, text, monkeypatch):
    monkeypatch.setattr(Known, "_MOST", 2)
    known = Known(tmp_path / "known.json")
    for value in "123":
        known.put(key_of(made_up(f"A={value}")), FINE)
    known.get(made_up("A=1"))
    known.save()
    assert len(json.loads((tmp_path / "known.json").read_text())) == 2
    known = Known(tmp_path / "known.json")
    kept = [v for v in "123" if known.get(made_up(f"A={v}")) is not None]
    assert kept == ["1", "3"]
