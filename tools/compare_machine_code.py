"""Compare the machine code of all kernels of two versions of the sources.

    python tools/compare_machine_code.py main .
    python tools/compare_machine_code.py v0.1 HEAD --arch sm_80 --json compared.json

Each version is a folder or a revision of git. What `python -m cupyflash compile` takes
for the architecture is compiled of both, with no GPU, and compared: instructions,
constants, registers, stack and shared memory; line numbers and names of files stay out.
A kernel is the same one in both if its entry and options are, wherever its source lies;
what is left over is matched by its code. What differs in comments and layout alone is
not compiled; with `--exact` it is. Results are kept in build/machine_code, so that the
next comparison compiles only what is new.

The exit code is 0 when all kernels are equal, 1 when some differ or are in one version
alone, 2 when the comparison cannot be made.
"""

import argparse
import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cupyflash._cli import console, nvrtc, outcomes  # noqa: E402
from cupyflash._core import threads  # noqa: E402

FACTS = ("registers", "spill_bytes", "stack_bytes", "static_smem", "instructions")
INSTRUCTION_BYTES = 16  # from sm_70 on


class ComparisonError(Exception):
    """Why two versions cannot be compared."""


# --- the two versions ----------------------------------------------------------------


@contextlib.contextmanager
def checkout(version, repository=ROOT):
    """The folder of a version; that of a revision is gone afterwards."""
    if (Path(version) / "cupyflash").is_dir():
        yield Path(version).resolve()
        return
    git = ["git", "-C", str(repository), "worktree"]
    with tempfile.TemporaryDirectory(prefix="cupyflash-") as folder:
        path = Path(folder) / "checkout"
        add = [*git, "add", "--quiet", "--detach", str(path), version]
        added = subprocess.run(add, capture_output=True, text=True)
        if added.returncode:
            raise ComparisonError(
                f"{version} is neither a folder with cupyflash/ nor a revision: "
                f"{added.stderr.strip()}"
            )
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def kernels_of(folder, arch):
    """The kernels of a version by entry and options, with their texts."""
    with tempfile.TemporaryDirectory() as there:
        path = Path(there) / "list.json"
        command = [sys.executable, "-m", "cupyflash", "compile", "--arch", arch]
        done = subprocess.run(
            [*command, "--list", str(path)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ComparisonError(
                f"{folder}: python -m cupyflash compile --list: {done.stderr.strip()}"
            )
        listed = json.loads(path.read_text(encoding="utf-8"))
    found = {}
    for kernel in listed["kernels"]:
        generated = kernel.get("generated", "")  # of functions of the caller
        text = listed["sources"][kernel["source"] + generated]
        name = kernel["entry"], generated, *sorted(kernel["options"])
        found[name] = {**kernel, "text": text}
    return found


# --- machine code --------------------------------------------------------------------


def sections(elf):
    """(name, content) of the sections of a 64-bit ELF file."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)
    ]
    names = headers[of_names][4]
    for name, _, _, _, offset, length in headers:
        at = names + name
        yield elf[at : elf.index(b"\0", at)].decode(), elf[offset : offset + length]


def code_of(cubin):
    """(hash of instructions and constants, number of instructions)."""
    # .nv.constant4 has the addresses of global constants, also of those that no
    # instruction reads.
    code = sorted(
        (name.split(".")[1], content)
        for name, content in sections(cubin)
        if name.startswith((".text.", ".nv.constant")) and name != ".nv.constant4"
    )
    size = sum(len(content) for kind, content in code if kind == "text")
    digest = hashlib.sha256(repr(code).encode()).hexdigest()
    return digest, size // INSTRUCTION_BYTES


def compile_kernel(kernel):
    """What there is to compare of a kernel; an error of the compiler counts as code."""
    error, log, cubin = nvrtc.compile_text(
        kernel["text"], kernel["source"], kernel["options"]
    )
    if error:
        return {**dict.fromkeys(FACTS), "code": "", "error": error}
    code, instructions = code_of(cubin)
    facts = nvrtc.read_report(log, kernel["entry"])
    return {**facts, "instructions": instructions, "code": code, "error": ""}


def digest_of(kernel, exact=False):
    """A hash of all that the machine code of a kernel depends on."""
    text = kernel["text"]
    if not exact:  # without comments and layout, and without the names of its files
        text = "\n".join(filter(None, (x for _, x in outcomes.files_in(text))))
    facts = text, kernel["entry"], kernel["options"], nvrtc.version()
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def compile_all(kernels, cache, num_processes):
    """{digest: what compile_kernel gives} of {digest: kernel}, kept in a folder."""
    cache.mkdir(parents=True, exist_ok=True)
    results, todo = {}, []
    for digest in kernels:
        try:
            kept = (cache / f"{digest}.json").read_text(encoding="utf-8")
            results[digest] = json.loads(kept)
        except (OSError, ValueError):
            todo.append(digest)
    done = nvrtc.in_parallel(
        compile_kernel, [kernels[digest] for digest in todo], num_processes
    )
    for place, result in console.progress(done, "compiling", len(todo)):
        results[todo[place]] = result
        path = cache / f"{todo[place]}.json"
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(result), encoding="utf-8")
        written.replace(path)
    return results


# --- the comparison ------------------------------------------------------------------


def compare(before, after, cache, num_processes=1, exact=False):
    """Which kernels of two versions are equal, and the others one by one."""
    digests = [
        {name: digest_of(kernel, exact) for name, kernel in version.items()}
        for version in (before, after)
    ]
    same_text = {
        name
        for name in before.keys() & after.keys()
        if not exact and digests[0][name] == digests[1][name]
    }
    kernels = {
        of_version[name]: kernel
        for of_version, version in zip(digests, (before, after), strict=True)
        for name, kernel in version.items()
        if name not in same_text
    }
    results = compile_all(kernels, cache, num_processes)

    def result(side, name):
        return results[digests[side][name]]

    same_code, differs = [], []
    for name in sorted((before.keys() & after.keys()) - same_text):
        both = result(0, name), result(1, name)
        if both[0] == both[1] and not both[0]["error"]:
            same_code.append(name)
        else:
            differs.append(_line(before[name], after[name], *both))
    only = [sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())]
    renamed = []
    for name in only[0][:]:
        twin = next((n for n in only[1] if result(1, n) == result(0, name)), None)
        if twin is not None and not result(0, name)["error"]:
            only[0].remove(name)
            only[1].remove(twin)
            renamed.append(_line(before[name], after[twin], result(0, name), None))
    return {
        "same_text": len(same_text),
        "same_code": len(same_code),
        "renamed": renamed,
        "differs": differs,
        "only_before": [_line(before[n], None, result(0, n), None) for n in only[0]],
        "only_after": [_line(None, after[n], None, result(1, n)) for n in only[1]],
    }


def _line(before, after, *results):
    """A kernel of the report; what its sources are called may differ."""
    kernel = after or before
    line = {
        "operation": kernel["operation"],
        "row": kernel["row"],
        "entry": kernel["entry"],
        "sources": [version and version["source"] for version in (before, after)],
        "options": kernel["options"],
    }
    for side, result in zip(("before", "after"), results, strict=True):
        if result is not None:
            line[side] = {name: result[name] for name in (*FACTS, "error")}
    return line


def report(found, limit=40):
    """The comparison in words."""
    differs, renamed = found["differs"], len(found["renamed"])
    print(
        f"{found['same_text'] + found['same_code'] + renamed} kernels are equal "
        f"({found['same_text']} by their text, {found['same_code']} by their code, "
        f"{renamed} under another name), {len(differs)} differ, "
        f"{len(found['only_before'])} are only before, {len(found['only_after'])} only "
        "after"
    )
    lines = [*differs, *found["only_before"], *found["only_after"]]
    for line in lines[:limit]:
        defines = " ".join(o[2:] for o in line["options"] if o.startswith("-D"))
        source = next(filter(None, reversed(line["sources"])))
        print(f"\n{line['operation']}/{line['row']} {source}: {defines}")
        for side in ("before", "after"):
            if side not in line:
                print(f"  {side:6} not there")
            elif line[side]["error"]:
                print(f"  {side:6} {line[side]['error'].splitlines()[0]}")
            else:
                facts = (f"{line[side][n]} {n.replace('_', ' ')}" for n in FACTS)
                print(f"  {side:6} {', '.join(facts)}")
    if len(lines) > limit:
        print(f"\nand {len(lines) - limit} more: --json FILE has all of them")


def main(argv=None):
    """Compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a folder or a revision")
    parser.add_argument("after", help="a folder or a revision, such as .")
    parser.add_argument("--arch", default="sm_90a", help="(default sm_90a)")
    parser.add_argument("--jobs", type=console.count, default=threads.num_cores())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "build" / "machine_code", metavar="FOLDER"
    )
    parser.add_argument(
        "--exact", action="store_true", help="compile also what has the same text"
    )
    args = parser.parse_args(argv)
    versions = []
    try:
        if reason := nvrtc.unusable():
            raise ComparisonError(reason)
        for version in (args.before, args.after):
            with checkout(version) as folder:
                versions.append(kernels_of(folder, args.arch))
    except ComparisonError as error:
        print(error, file=sys.stderr)
        return 2
    found = compare(*versions, args.cache, args.jobs, args.exact)
    if args.json:
        facts = {"before": args.before, "after": args.after, "arch": args.arch}
        facts["nvrtc"] = nvrtc.version()
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**facts, **found}, indent=1) + "\n")
    report(found)
    parts = ("differs", "only_before", "only_after")
    return int(any(found[part] for part in parts))


if __name__ == "__main__":
    sys.exit(main())
