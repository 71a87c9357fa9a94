"""python -m cupyflash: each sub-command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from numpy.linalg import lapack_lite

import cupyflash
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._cli import bench as bench_command
from cupyflash._cli import check as check_command
from cupyflash._cli import compile_jobs, console, demo, nvrtc
from cupyflash._cli import main as cli
from cupyflash._softmax.gpu import registry as softmax_registry

ROOT = Path(cupyflash.__file__).parent.parent


def main(*args):
    return cli.main(args)


def test_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "cupyflash", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert result.stdout.strip() == cupyflash.__version__


def test_compile_looks_at_its_files_before_it_compiles(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(nvrtc, "use", lambda path: None)
    monkeypatch.setattr(nvrtc, "unusable", lambda: None)
    monkeypatch.setattr(nvrtc, "unknown", lambda device: None)
    for option in ("--json", "--known"):
        (tmp_path / "below").mkdir(exist_ok=True)
        assert main("compile", option, str(tmp_path / "below")) == 2
        assert "below" in (said := capsys.readouterr().err)
        assert "folder" in said or "directory" in said


@pytest.mark.parametrize("content", [b"a\tb\tc\n1\t2\n", b"\xff\xfe\x00 notes"])
def test_compile_leaves_files_of_others_as_they_are(tmp_path, capsys, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    assert main("compile", "--known", str(path)) == 2
    assert "has no outcomes of earlier runs, and is left as it is" in (
        capsys.readouterr().err
    )
    assert path.read_bytes() == content


def test_the_commands():
    assert {"info", "demo", "bench", "compile", "check"} <= set(cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_shows_examples(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command, "--help")
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "examples:" in text
    assert f"python -m cupyflash {command}" in text


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main("--help")
    text = capsys.readouterr().out
    assert all(f"    {command}" in text for command in cli.COMMANDS)


@pytest.mark.parametrize("args", [(), ("paint",), ("info", "--loud")])
def test_unknown_arguments(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(*args)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_info(capsys):
    assert main("info") == 0
    text = capsys.readouterr().out
    assert cupyflash.__version__ in text
    assert "NumPy back end" in text


def test_check_on_numpy(capsys):
    assert main("check", "--backend", "numpy") == 0
    text = capsys.readouterr().out
    assert "attention" in text
    assert "0 failed" in text
    assert "FAILED" not in text


@pytest.mark.gpu
def test_check_on_cupy(cupy, capsys, monkeypatch):
    reported, report = [], check_command._report

    def keep(backend, found):
        reported.extend(found)
        report(backend, found)

    monkeypatch.setattr(check_command, "_report", keep)
    assert main("check", "--backend", "cupy") == 0
    text = capsys.readouterr().out
    assert "0 failed" in text
    # Each kernel of the tables; the words of a line are no proof, "short rows" is a
    # kind of input and "short" a kernel.
    met = {
        (case.function if case.function.startswith("attention") else "", verdict.row)
        for case, verdict in reported
    }
    for table, function in (
        (softmax_registry.KERNELS, ""),
        (ATTENTION_KERNELS, "attention"),
        (ATTENTION_VJP_KERNELS, "attention_vjp"),
    ):
        named = {(function, row.name) for row in table}
        if not function or cupy.cuda.Device().compute_capability == "90":
            assert named <= met
        assert named & met


def test_check_goes_on_after_an_error(monkeypatch, capsys):
    """A call that raises is a line that failed, and its message follows."""

    call = check_command._call

    def broken(function, *args, **options):
        if function is cupyflash.logsumexp:
            raise RuntimeError("no kernel today\nand more")
        return call(function, *args, **options)

    monkeypatch.setattr(check_command, "_call", broken)
    monkeypatch.setattr(check_command, "_METHODS", ("safe",))
    assert main("check", "--backend", "numpy") == 1
    text = capsys.readouterr().out
    assert "logsumexp auto float32: RuntimeError: no kernel today" in text
    assert "4 failed" in text


@pytest.mark.parametrize("function", check_command._KINDS)
def test_every_kind_of_check_on_numpy(function):
    """What a GPU is asked is right where the answer is known to be."""
    for kind in check_command._KINDS[function]:
        verdict = check_command.measure(
            check_command.Case("numpy", function, "auto", "float32", kind)
        )
        assert verdict.is_good, (kind, verdict)


def test_check_fits_a_terminal(monkeypatch, capsys):
    """Of 80 columns; and a back end named twice is checked once."""
    monkeypatch.setattr(check_command, "_METHODS", ("safe",))
    assert main("check", "--backend", "numpy", "--backend", "numpy") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    named = [line.split()[:3] for line in lines]
    assert named.count(["softmax", "safe", "float32"]) == 1


def test_check_counts_failures(monkeypatch, capsys):
    monkeypatch.setattr(check_command, "_METHODS", ("safe",))
    monkeypatch.setitem(check_command.ALLOWED["softmax"], "float32", 1e-12)
    assert main("check", "--backend", "numpy") == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.fixture
def one_job(monkeypatch):
    """Let compile do the first job of each architecture alone."""
    if reason := nvrtc.unusable():
        pytest.skip(reason)
    every = compile_jobs.jobs_for

    def firsts(*devices, everything):
        return [every(device)[0] for device in devices]

    monkeypatch.setattr(compile_jobs, "jobs_for", firsts)


@pytest.mark.usefixtures("one_job")
def test_compile(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    code = main(
        "compile", "--arch", "sm_80", "--arch", "sm_90a", "--jobs", "1", "--json",
        str(path),
    )  # fmt: skip
    assert code == 0
    assert "2 kernels for sm_80, sm_90a" in capsys.readouterr().out
    outcomes = json.loads(path.read_text("utf-8"))
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["problem"] == ""
        assert outcome["registers"] > 0
        assert outcome["spill_bytes"] == 0
        assert outcome["seconds"] > 0
        assert outcome["dynamic_smem"] >= 0


@pytest.mark.usefixtures("one_job")
def test_compile_knows_what_it_has_found(tmp_path, capsys):
    known = str(tmp_path / "known.tsv")
    for arch, option, expected in (
        ("sm_80", "--quiet", 0),
        ("sm_80", "--quiet", 1),
        ("sm_80", "--full", 0),
        ("sm_90a", "--quiet", 0),
    ):
        given = ("--arch", arch, option, "--jobs", "1", "--known", known)
        assert main("compile", *given) == 0
        assert f"{expected} of them known" in capsys.readouterr().out


@pytest.mark.usefixtures("one_job")
def test_compile_says_what_is_missing(tmp_path, capsys, monkeypatch):
    """And drops what is of no kernel; without a compiler it can say so too."""
    known = str(tmp_path / "known.tsv")

    def run(arch, *options):
        given = ("--arch", arch, "--jobs", "1", "--known", known)
        assert main("compile", *given, *options) == 0
        return capsys.readouterr().out

    run("sm_80")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        assert "has all of 1 kernels" in run("sm_80", "--missing")
        said = run("sm_90a", "--missing")
    assert "lacks 1 of 1 kernels and has 1 that are gone; make compile writes" in said
    run("sm_90a")
    assert "lacks 0 of 1 kernels and has 1 that are gone" in run("sm_90a", "--missing")
    run("sm_90a", "--prune")
    assert "has all of 1 kernels" in run("sm_90a", "--missing")


@pytest.mark.usefixtures("one_job")
def test_compile_keeps_what_it_found_before_it_was_stopped(tmp_path, monkeypatch):
    known = tmp_path / "known.tsv"

    def stopped(items, *args):
        yield next(iter(items))
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "progress", stopped)
    given = ("--arch", "sm_80", "--arch", "sm_90a", "--jobs", "1")
    assert main("compile", *given, "--known", str(known)) == 130
    lines = known.read_text("utf-8").splitlines()
    assert sum(not line.startswith("#") for line in lines) == 1


@pytest.mark.usefixtures("one_job")
def test_compile_lists_kernels_and_sources(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    path = tmp_path / "folder" / "list.json"
    assert main("compile", "--arch", "sm_80", "--list", str(path)) == 0
    listed = json.loads(path.read_text("utf-8"))
    (kernel,) = listed["kernels"]
    assert "-arch=sm_80" in kernel["options"]
    assert kernel["entry"] in listed["sources"][kernel["source"]]


@pytest.mark.parametrize("option", ["--full", "--prune", "--missing"])
def test_compile_of_what_is_known_needs_a_file(option, capsys):
    assert main("compile", option) == 2
    assert f"{option}" in capsys.readouterr().err


@pytest.mark.usefixtures("one_job")
def test_compile_by_a_given_nvrtc(capfd):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no list of loaded libraries")
    paths = (line.split()[-1] for line in maps.read_text("utf-8").splitlines())
    loaded = next(path for path in paths if "libnvrtc.so" in path)
    assert main("compile", "--jobs", "1", "--nvrtc", loaded) == 0
    assert "1 kernels for sm_90a by NVRTC 1" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere/libnvrtc.so.13", "cannot be loaded:"),
        (lapack_lite.__file__, "is not a libnvrtc.so"),
    ],
)
def test_compile_by_what_is_no_nvrtc(path, reason, capsys):
    assert main("compile", "--nvrtc", path) == 2
    assert f"--nvrtc {path} {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["volta", "90", "sm_9", "sm_10", "sm_70", "sm_90b"])
def test_compile_of_an_unknown_architecture(arch, capsys):
    assert main("compile", "--arch", arch) == 2
    said = f"--arch must look like sm_80 or sm_90a, from sm_75 on, got {arch}"
    assert said in capsys.readouterr().err


def test_compile_of_an_architecture_that_nvrtc_does_not_know(capsys):
    """One sentence, not one for each kernel."""
    if reason := nvrtc.unusable():
        pytest.skip(reason)
    assert main("compile", "--arch", "sm_80", "--arch", "sm_999") == 2
    said = capsys.readouterr()
    assert said.err.endswith(" does not compile for --arch sm_999\n")
    assert said.err.count("\n") == 1
    assert not said.out


@pytest.mark.parametrize("option", [("bench", "--turns"), ("compile", "--jobs")])
def test_counts_of_nothing(option, capsys):
    with pytest.raises(SystemExit):
        main(*option, "0")
    assert f"argument {option[1]}: must be 1 or more, got 0" in capsys.readouterr().err


def test_compile_without_nvrtc_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main("compile") == 2
    text = capsys.readouterr().err
    assert "NVRTC cannot be used" in text
    assert 'pip install "cupyflash[nvrtc]" installs it' in text


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_folder_that_is_none(command, monkeypatch, tmp_path, capsys):
    """Said at once, not after the work, and without a traceback."""
    monkeypatch.setattr(bench_command, "measured", None)
    monkeypatch.setattr(demo, "_fit", None)
    path = tmp_path / "a file"
    path.touch()
    assert main(command, "--cpu", "--output", str(path)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("python -m cupyflash: ")
    assert str(path) in said.err
    assert not said.out


def test_output_that_nobody_reads():
    """As in `python -m cupyflash check | head -1`."""
    code = (
        "import sys\n"
        "from cupyflash._cli import main as _cli, info as _cli_info\n"
        "_cli_info.run = lambda args: print('line\\n' * 100_000)\n"
        "sys.exit(_cli.main(['info']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_bench_refuses_nonsense(capsys):
    with pytest.raises(SystemExit):
        main("bench", "--no-such-option")
    assert "usage:" in capsys.readouterr().err


def test_the_report_of_the_assembler_is_read():
    log = (
        "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
        "ptxas info    : Function properties for other\n"
        "    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 20 registers\n"
        "ptxas info    : Compiling entry function 'mine' for 'sm_90a'\n"
        "ptxas info    : Function properties for mine\n"
        "    16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem\n"
    )
    facts = nvrtc.read_report(log, "mine")
    assert facts == {
        "registers": 168,
        "stack_bytes": 16,
        "spill_bytes": 16,
        "static_smem": 1024,
    }
    assert nvrtc.read_report(log, "none")["registers"] is None
