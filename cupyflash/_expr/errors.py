"""Errors of a traced function, raised at the user's line."""

import contextlib
import linecache
import sys
import threading
import types
from collections.abc import Iterator
from typing import NoReturn

# Whose lines are not the user's.
_INSIDE = __package__, "numpy", "numpy._core", "numpy.lib"


class AtLine(Exception):
    """An error whose message names the user's line."""


class AtLineTypeError(AtLine, TypeError):
    """What cannot be traced."""


class AtLineValueError(AtLine, ValueError):
    """What does not fit the arrays given."""


def start_of(code: types.CodeType) -> tuple[str, int]:
    """The place (file, line) of a function, below its decorators."""
    line = code.co_firstlineno
    while linecache.getline(code.co_filename, line).lstrip().startswith("@"):
        line += 1
    return code.co_filename, line


def fail(
    message: str,
    place: tuple[str, int] | None = None,
    kind: type[AtLine] = AtLineTypeError,
    cause: Exception | None = None,
) -> NoReturn:
    """Raise at a place (file, line), or where the user's code now stands."""
    if place is None:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__package__", "") in _INSIDE:
            frame = frame.f_back
        place = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(*place).strip()
    shown = f"\n    {source}" if source else ""
    error = kind(f"{place[0]}:{place[1]}: {message}{shown}")
    _last.raised = error
    raise error from cause


_last = threading.local()


@contextlib.contextmanager
def unhidden() -> Iterator[None]:
    """Raise what `fail` raised within, though the function has caught it."""
    _last.raised = None
    yield
    if _last.raised is not None:
        raise _last.raised
