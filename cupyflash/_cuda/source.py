"""Finds cuda_src/ and joins a kernel with its headers."""

import functools
import re
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent

# In a wheel the sources lie in the package; in a checkout, beside it.
CUDA_SRC = next(
    (p for p in (_PACKAGE / "cuda_src", _PACKAGE.parent / "cuda_src") if p.is_dir()),
    _PACKAGE / "cuda_src",
)

_INCLUDE = re.compile(r'^[ \t]*#include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)


# The include that stands for text which the host makes.
GENERATED = "generated/functions.cuh"


@functools.cache
def load(name: str, generated: str = "") -> str:
    """Return the text of `name` with every quoted include pasted in once.

    CuPy's disk cache does not look into headers, so the text has to be whole. ``#line``
    keeps the file and line of each message of the compiler. `generated` is what stands
    in place of the include ``generated/functions.cuh``.
    """
    seen: set[str] = set()

    def paste(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        if name == GENERATED:
            text = generated
        else:
            text = (CUDA_SRC / name).read_text(encoding="utf-8")
        parts, at = [f'#line 1 "{name}"\n'], 0
        for match in _INCLUDE.finditer(text):
            parts.append(text[at : match.start()])
            parts.append(paste(match[1]))
            line = text.count("\n", 0, match.end()) + 2
            parts.append(f'\n#line {line} "{name}"')
            at = match.end()
        return "".join([*parts, text[at:]])

    return paste(name)
