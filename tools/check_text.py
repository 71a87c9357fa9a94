"""Check files for trailing blanks, a missing newline at the end, and size.

Usage: check_text.py FILE...    (a pre-commit hook; make lint gives it what git knows)
"""

import sys
from pathlib import Path

MAX_KILOBYTES = 1000


def complaints(path):
    """What is wrong with one file, a line each."""
    content = path.read_bytes()
    if len(content) > MAX_KILOBYTES * 1024:
        yield f"{path}: {len(content) // 1024} KB is more than {MAX_KILOBYTES}"
    if b"\0" in content or not content:
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        if line != line.rstrip():
            yield f"{path}:{number}: blanks at the end of the line"
    if not content.endswith(b"\n") or content.endswith(b"\n\n"):
        yield f"{path}: should end with exactly one newline"


def main():
    """Print all complaints; exit code 1 if there are any."""
    found = [
        text
        for name in sys.argv[1:]
        for text in complaints(Path(name))
        if Path(name).is_file()
    ]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
