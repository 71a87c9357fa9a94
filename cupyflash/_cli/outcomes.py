"""What the compiler reported for each kernel, kept in a file by digest of the source.

`make compile` keeps tests/record/compiled.tsv, so that a clean clone compiles only what
has changed. It has a line for each kernel, sorted by digest, so that two branches
rarely add neighbouring lines; .gitattributes makes git keep the lines of both.
"""

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from cupyflash._cli import nvrtc as _nvrtc
from cupyflash._cli.compile_jobs import Job
from cupyflash._cli.nvrtc import Finding
from cupyflash._cuda import source

_HEAD = """\
# What NVRTC said of each kernel that `make compile` compiles; it writes this file.
# digest\tNVRTC\tregisters\tstack\tspills\tshared\twarning
"""
_NONE = "-"

# Of the kernels recorded with another NVRTC, one in SAMPLE is compiled again. PyPI has
# a new NVRTC every few weeks and users have any version, so the file cannot cover all.
# Compiling everything again at each release would take half an hour where nothing
# changed here; trusting the file would miss a compiler that spills. A sample finds what
# is common, and `make compile FULL=1` the rest.
SAMPLE = 16

_COMMENT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')""", re.DOTALL
)
_TOKEN = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|\w+|[-+*/%&|^<>=!:.]+|[^\w\s])"""
)
_SEAM = re.compile(r'^#line \d+ "([^"]+)"$', re.MULTILINE)


@functools.cache
def tokens_of(text: str) -> str:
    """C++ without comments and layout: equal tokens compile to equal code.

    Preprocessor directives keep their lines. Adjacent operators stay as written.
    """
    text = _COMMENT.sub(lambda match: match[1] or " ", text.replace("\\\n", " "))
    lines = [""]
    after_directive = False
    for line in text.split("\n"):
        tokens = " ".join(_TOKEN.findall(line))
        is_directive = tokens.startswith("#")
        if is_directive or after_directive:
            lines.append(tokens)
        elif tokens:
            lines[-1] += f" {tokens}"
        after_directive = is_directive
    return "\n".join(line.strip() for line in lines)


def files_in(text):
    """(name, tokens) of the files in a joined text, in their order."""
    first, *rest = _SEAM.split(text)
    names, pieces = ["", *rest[::2]], [first, *rest[1::2]]
    return [(name, tokens_of(p)) for name, p in zip(names, pieces, strict=True)]


@functools.cache
def _hash_of_bodies(text):
    """A hash of the tokens of each file in a joined text, in any order of the files.

    So moving a file, or sorting includes by new names, changes nothing. Headers here
    give the same result in any order; a test checks this by compiling some known
    kernels.
    """
    bodies: dict[str, list[str]] = {}
    for name, tokens in files_in(text):
        bodies.setdefault(name, []).append(tokens)
    return hashlib.sha256(repr(sorted(bodies.values())).encode()).hexdigest()


def digest_of(job: Job) -> str:
    """A hash of all that a finding depends on besides the compiler."""
    text = source.load(job.variant.source, job.variant.generated)
    facts = _hash_of_bodies(text), job.variant.entry, _nvrtc.options_of(job)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def find(job: Job) -> tuple[str, Finding, float]:
    """The digest of a job's source, its finding, and the seconds."""
    finding, seconds = _nvrtc.find(job)
    return digest_of(job), finding, seconds


class Outcomes:
    """Findings of earlier runs that had no error."""

    def __init__(self, path: Path | None) -> None:
        self.used = 0
        self.of_others = 0  # of those, found with another NVRTC
        self.is_foreign = False  # the file, which `save` would replace
        self._path = path
        # By digest: the NVRTC version that was used, and what it said.
        self._lines: dict[str, tuple[str, Finding]] = {}
        if path is not None and path.exists():
            whole = path.read_text(encoding="utf-8", errors="replace")
            for text in whole.splitlines():
                try:
                    digest, nvrtc, *numbers, warning = text.split("\t")
                    registers, stack, spills, smem = (
                        None if number == _NONE else int(number) for number in numbers
                    )
                except ValueError:  # a comment
                    continue
                warning = "" if warning == _NONE else warning
                finding = Finding(registers, stack, spills, smem, warning, "")
                self._lines[digest] = nvrtc, finding
            self.is_foreign = not (self._lines or whole[:1] in ("", "#"))

    def get(self, job: Job, nvrtc: str | None = None) -> Finding | None:
        """The finding of a job, if one is valid for this version of NVRTC."""
        digest = digest_of(job)
        if digest not in self._lines:
            return None
        known, finding = self._lines[digest]
        is_other = nvrtc not in (None, known)
        if is_other and _is_in_sample(digest, nvrtc):
            return None
        self.used += 1
        self.of_others += is_other
        return finding

    def version_of(self, job: Job) -> str:
        """The NVRTC version that a job's finding comes from."""
        return self._lines[digest_of(job)][0]

    def put(self, digest: str, finding: Finding, nvrtc: str) -> None:
        """Record the finding of the job with this digest."""
        if not finding.error:
            self._lines[digest] = nvrtc, finding

    def missing(self, jobs: Iterable[Job]) -> tuple[int, int]:
        """How many jobs have no line, and how many lines have no job."""
        digests = {digest_of(job) for job in jobs}
        return len(digests - self._lines.keys()), len(self._lines.keys() - digests)

    def prune(self, jobs: Iterable[Job]) -> None:
        """Drop the lines of kernels that are not among these."""
        digests = {digest_of(job) for job in jobs}
        self._lines = {d: line for d, line in self._lines.items() if d in digests}

    def save(self) -> None:
        """Write the file, if one was given."""
        if self._path is None:
            return
        rows = []
        for digest, (nvrtc, f) in sorted(self._lines.items()):
            facts = (f.registers, f.stack_bytes, f.spill_bytes, f.static_smem)
            numbers = [_NONE if fact is None else str(fact) for fact in facts]
            rows.append([digest, nvrtc, *numbers, f.serialized or _NONE])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".part")
        text = "".join("\t".join(row) + "\n" for row in rows)
        written.write_text(_HEAD + text, encoding="utf-8")
        written.replace(self._path)


def _is_in_sample(digest, nvrtc):
    """Whether this NVRTC version compiles it again; each version samples others."""
    number = hashlib.sha256(f"{digest} {nvrtc}".encode()).digest()
    return int.from_bytes(number) % SAMPLE == 0
