"""A kernel's text as a shared library of the host, made by g++ once."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from cupyflash._cuda import source

HERE = Path(__file__).parent
# Kept between runs: the name of a library is the digest of all that it is made of.
FOLDER = Path(tempfile.gettempdir()) / f"cupyflash-emulation-{os.getuid()}"
FLAGS = (
    *("-std=gnu++17", "-O1", "-fPIC", "-shared", "-w", "-g1", "-mfma", "-mf16c"),
    *("-fno-strict-aliasing", "-fwrapv", "-fno-threadsafe-statics", "-fno-gnu-unique"),
    # An access that is not aligned stops here as it does on a GPU, and a variable that
    # nothing was written to is no zero by luck.
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
    *("-ftrivial-auto-var-init=pattern", "-Wl,-Bsymbolic"),
)


def missing():
    """Why nothing can be emulated here, or None."""
    if os.uname().sysname != "Linux" or os.uname().machine != "x86_64":
        return "the emulation switches stacks of x86-64 under Linux"
    return None if shutil.which("g++") else "no g++"


class Sources:
    """cuda_src/ with the headers of ptx/ that are written in C++ here."""

    def __truediv__(self, name):
        found = HERE / name
        return found if found.exists() else CUDA_SRC / name


CUDA_SRC = source.CUDA_SRC

_SHARED = re.compile(r"(extern\s+)?__shared__\s+(?:__align__\((\w+)\)\s+)?([^;]+);")
_CLUSTER = re.compile(r"__cluster_dims__\(\s*(\w+)\s*,\s*1\s*,\s*1\s*\)")


def host_text(text, entry):
    """The text of a kernel as C++."""
    cluster = "1"
    if match := _CLUSTER.search(text):
        # What the host defines is not there for a kernel without a cluster.
        cluster = match[1]
        text = _CLUSTER.sub("", text)
    text, dynamic = _place_shared(text)
    for name in dynamic:  # an object that becomes a pointer, but not by a cast
        text = re.sub(rf"(reinterpret_cast<[^>()]*>\(){name}\b", rf"\1+{name}", text)
    return "".join(
        [
            '#include "language.h"\nstatic unsigned emu_reserved;\n',
            text,
            f"""
extern "C" const char* emu_launch(emu::launch_t* launch, void** arguments) {{
  launch->cluster = {cluster};
  launch->reserved = &emu_reserved;
  return emu::emu_run(
      launch, [](void** of) {{ emu::call({entry}, of); }}, arguments);
}}
""",
        ]
    )


def _place_shared(text):
    """Variables in shared memory as references to where they lie in that of a block."""
    dynamic = []

    def place(match):
        is_dynamic, alignment, declaration = match.groups()
        lines = "\n" * match[0].count("\n")
        if is_dynamic:
            kind, name = re.match(r"\s*(.+?)\s*(\w+)\[\]", declaration).groups()
            if text[: match.start()].endswith("\n"):  # outside of functions
                dynamic.append(name)
                return f"static emu::dynamic_shared_t<{kind}> {name};{lines}"
            return (
                f"{kind}* const {name} = reinterpret_cast<{kind}*>("
                f"emu::self->shared + emu::dynamic_start);{lines}"
            )
        first, *others = _split(declaration)
        kind, first = re.match(
            r"(.+[\s*&])(\w+\s*(?:\[.*)?)$", first, re.DOTALL
        ).groups()
        found = []
        for declared in (first, *others):
            name, axes = re.match(r"\s*(\w+)(.*)", declared, re.DOTALL).groups()
            least = alignment or f"alignof({name}_shared_t)"
            found.append(
                f"typedef {kind}{name}_shared_t{axes}; "
                f"static const unsigned {name}_shared_at = emu::reserve_shared("
                f"emu_reserved, sizeof({name}_shared_t), {least}); "
                f"{name}_shared_t& {name} = *reinterpret_cast<{name}_shared_t*>("
                f"emu::self->shared + {name}_shared_at);"
            )
        return " ".join(found) + lines

    return _SHARED.sub(place, text), dynamic


def _split(declaration):
    """At commas outside of brackets."""
    parts, depth = [""], 0
    for letter in declaration:
        depth += (letter in "<([{") - (letter in ">)]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _build(text, flags, suffix=".cpp"):
    """The library of a text."""
    own = (HERE / "language.h").read_text() + (HERE / "runtime.cpp").read_text()
    digest = hashlib.sha256("\0".join([text, own, *flags]).encode()).hexdigest()[:24]
    library = FOLDER / f"{digest}.so"
    if library.exists():
        return library
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        path = Path(folder) / f"kernel{suffix}"
        path.write_text(text)
        made = Path(folder) / "kernel.so"
        done = subprocess.run(
            ["g++", *flags, f"-I{HERE}", str(path), "-o", str(made)],
            capture_output=True,
            text=True,
            cwd=FOLDER,  # where the lines of kernels are said to lie
        )
        if done.returncode:
            kept = FOLDER / f"{digest}{suffix}"
            kept.write_text(text)
            raise RuntimeError(f"g++ does not compile {kept}:\n{done.stderr[:6000]}")
        made.replace(library)  # another process may make the same
    return library


def with_line(message):
    """A message of the runtime with the line of the kernel in place of an address."""
    found = re.search(r"(/\S+\.so)\+(0x[0-9a-f]+)", message)
    if found is None or shutil.which("addr2line") is None:
        return message
    told = subprocess.run(
        ["addr2line", "-i", "-e", *found.groups()], capture_output=True, text=True
    )
    lines = [
        line.split(" ")[0] for line in told.stdout.replace(f"{FOLDER}/", "").split("\n")
    ]
    return message.replace(found[0], " from ".join(filter(None, lines)))


@functools.cache
def runtime():
    """Fibers and barriers, whose names all kernels find."""
    flags = tuple(f for f in FLAGS if "sanitize" not in f and "auto-var" not in f)
    flags = ("-O2" if f == "-O1" else f for f in flags)
    library = _build((HERE / "runtime.cpp").read_text(), tuple(flags))
    return ctypes.PyDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def kernel(text, entry, cc):
    """The function emu_launch of a kernel's text for a compute capability."""
    runtime()
    arch = 100 * cc[0] + 10 * cc[1]
    flags = (*FLAGS, f"-D__CUDA_ARCH__={arch}")
    # PyDLL keeps the lock of Python: the runtime runs one launch at a time.
    launch = ctypes.PyDLL(str(_build(host_text(text, entry), flags))).emu_launch
    launch.restype = ctypes.c_char_p
    return launch
