"""Every kernel file compiles with NVRTC, GPU or not, in a sample of its variants.

`make compile`, which CI runs beside the tests, takes each row, dtype and switch.
"""

import itertools

import pytest

from cupyflash import _cli_compile, _kernels, _source

# Of each kernel file one variant in so many.
ARCHS = {"sm_90a": 8, "sm_80": 16, "sm_75": 11, "sm_120": 23}
CHUNK = 8


def sample(arch, step):
    """Every `step`-th of the representative variants of each kernel file."""
    jobs = _cli_compile.jobs_for(_kernels.device_of_arch(arch), False)

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
    if reason := _cli_compile._no_compiler():
        pytest.skip(reason)


@pytest.mark.parametrize("jobs", list(chunks()))
def test_variants_compile(jobs):
    """To machine code; what is marked fast does not spill."""
    outcomes = [_cli_compile.compile_one(job) for job in jobs]
    problems = [
        f"{o.operation}/{o.row} {o.arch} {o.defines}: {o.problem}"
        for o in outcomes
        if o.problem
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("operation", ["softmax", "attention"])
def test_each_kernel_file_is_compiled(operation):
    device = _kernels.device_of_arch("sm_90a")
    jobs = _cli_compile.jobs_for(device, False)
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
    variant = _kernels.Variant("bad.cu", "bad")
    try:
        outcome = _cli_compile.compile_one(
            _cli_compile.Job("softmax", "bad", False, "sm_80", variant)
        )
    finally:
        _source.load.cache_clear()
    assert "bad.cuh(2)" in outcome.problem
    assert "nonsense" in outcome.problem
