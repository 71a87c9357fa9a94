"""Tables and progress on the terminal: rich where it is installed, else plain text."""

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

T = TypeVar("T")

_HAS_RICH = importlib.util.find_spec("rich") is not None

# Table width when the output is not a terminal.
_FILE_WIDTH = 120


def count(text: str) -> int:
    """The argparse type of a count: an integer of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def complain(text: str) -> None:
    """Print why a command cannot do its work."""
    print(text, file=sys.stderr)


def heading(text: str) -> None:
    """Print a headline."""
    print(f"\n{text}\n{'-' * len(text)}")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table: text left-aligned, numbers right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    right = [
        bool(cells) and all(_is_number(row[i]) for row in cells)
        for i in range(len(columns))
    ]
    (_rich_table if _HAS_RICH else _plain_table)(columns, cells, right)


def _is_number(text):
    """Whether a cell is a number, a percentage or empty."""
    try:
        float(text.removesuffix(" ulp").rstrip(" %x").replace(",", "") or 0)
    except ValueError:
        return text in ("-", "")
    return True


def _rich_table(columns, cells, right):
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, is_right in zip(columns, right, strict=True):
        grid.add_column(name, justify="right" if is_right else "left", overflow="fold")
    for row in cells:
        grid.add_row(*(Text(cell, style=_style(cell)) for cell in row))
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    Console(width=width).print(grid)


def _style(cell):
    return {"ok": "green", "FAILED": "bold red"}.get(cell, "")


def _plain_table(columns, cells, right):
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in (columns, ["-" * w for w in widths], *cells):
        line = (
            cell.rjust(w) if is_right else cell.ljust(w)
            for cell, w, is_right in zip(row, widths, right, strict=True)
        )
        print("  ".join(line).rstrip())


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield `items`, with a progress bar if the output is a terminal."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    if not sys.stderr.isatty():
        yield from items
    elif _HAS_RICH:
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        yield from track(items, label, total, console=console, transient=True)
    else:
        for done, item in enumerate(items):
            print(f"\r{label} {done}/{total or '?'}", end="", file=sys.stderr)
            yield item
        print("\r\033[K", end="", file=sys.stderr)


def size(num_bytes: float) -> str:
    """A number of bytes in readable units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return (
                f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
            )
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def seconds(t: float) -> str:
    """A duration in readable units."""
    if t < 1e-3:
        return f"{t * 1e6:.0f} us"
    return f"{t * 1e3:.1f} ms" if t < 1 else f"{t:.1f} s"
