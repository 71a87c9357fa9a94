"""python -m cupyflash: the command line, one module a sub-command."""

import argparse
import os
import sys
from collections.abc import Sequence

import cupyflash
from cupyflash import (
    _cli_bench,
    _cli_check,
    _cli_compile,
    _cli_info,
    _console,
    _demo,
)

# Name -> its module, with add_arguments(parser), run(args) -> exit code and EXAMPLES,
# and one line of help. The modules import what is heavy only when they run.
COMMANDS = {
    "info": (_cli_info, "versions, devices, and which back ends can be used"),
    "demo": (_demo, "fit simulations, estimate a density, compare the four methods"),
    "bench": (_cli_bench, "time softmax and attention on this machine"),
    "compile": (_cli_compile, "compile the kernels for any GPU, on any machine"),
    "check": (_cli_check, "compare the numerics of this machine with float64"),
}

_EXAMPLES = """
examples:
  python -m cupyflash info
  python -m cupyflash check
  python -m cupyflash compile --arch sm_90a --json kernels.json
  python -m cupyflash COMMAND --help
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m cupyflash",
        description="Softmax and attention for NumPy and CuPy arrays.",
        epilog=_EXAMPLES,
        formatter_class=keep_lines,
    )
    top.add_argument("--version", action="version", version=cupyflash.__version__)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, about) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=module.EXAMPLES,
            formatter_class=keep_lines,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; return its exit code."""
    args = parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has seen enough: `... | head`
        # What is still in the buffer has a place to go when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a folder that is none, a disk that is full
        _console.complain(f"python -m cupyflash: {error}")
        return 2
