"""What parallel workers share: cards by turns, kernels that one of them compiles."""

import subprocess
import sys

import pytest
import workers


def test_cards_go_by_turns():
    assert [workers.cards_of(f"gw{n}", "0,2,GPU-7") for n in range(4)] == [
        "0,2,GPU-7",
        "2,GPU-7,0",
        "GPU-7,0,2",
        "0,2,GPU-7",
    ]


def test_only_workers_take_turns(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    workers.take_turns()
    assert workers.os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    workers.take_turns()
    assert workers.os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"


@pytest.mark.parametrize(
    ("cores", "cards", "number"),
    [(16, [140], 24), (64, [140] * 4, 96), (16, [24], 6), (2, [140], 3), (8, [2], 1)],
)
def test_as_many_as_cores_and_cards_can_take(cores, cards, number):
    assert workers.number_of(cores, [size << 30 for size in cards]) == number


# Whether another process may have what this one holds.
ASK = """
import fcntl, sys
with open(sys.argv[1], "ab") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def test_one_worker_compiles(monkeypatch, tmp_path):
    pytest.importorskip("fcntl")
    compiler = pytest.importorskip("cupy").cuda.compiler
    folder = tmp_path / "cupyflash-run"

    def may_have(*kernel):
        ask = [sys.executable, "-c", ASK, str(folder / workers.name_of(*kernel))]
        return subprocess.run(ask, capture_output=True).returncode == 0

    def compile_here(source, options, arch, backend):
        return may_have(source, options), may_have(source, ("-DB",)), arch, backend

    asked = []
    monkeypatch.setattr(workers.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile_with_cache_cuda", compile_here)
    monkeypatch.setattr(compiler, "_preprocess", lambda *args: asked.append(args))
    workers.compile_once("run")
    found = compiler._compile_with_cache_cuda("text", ("-DA",), "90", backend="nvrtc")
    assert found == (False, True, "90", "nvrtc")
    assert may_have("text", ("-DA",))
    assert [*tmp_path.iterdir()] == [folder]
    # The version of the compiler: once, whatever the options are.
    for options in ("-DA", "-DB"):
        compiler._preprocess("", (options,), "90", "nvrtc")
    compiler._preprocess("", (), "80", "nvrtc")
    compiler._preprocess("__global__", (), "90", "nvrtc")
    assert [args[2] for args in asked] == ["90", "80", "90"]
