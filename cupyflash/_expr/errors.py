"""Errors of a traced function, raised at the user's line."""

import linecache
import sys
from typing import NoReturn


class AtLine(Exception):
    """An error whose message names the user's line."""


class AtLineTypeError(AtLine, TypeError):
    """What cannot be traced."""


class AtLineValueError(AtLine, ValueError):
    """What does not fit the arrays given."""


def fail(
    message: str,
    place: tuple[str, int] | None = None,
    kind: type[AtLine] = AtLineTypeError,
    cause: Exception | None = None,
) -> NoReturn:
    """Raise at a place (file, line), or where the user's code now stands."""
    if place is None:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__package__") == __package__:
            frame = frame.f_back
        place = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(*place).strip()
    shown = f"\n    {source}" if source else ""
    raise kind(f"{place[0]}:{place[1]}: {message}{shown}") from cause
