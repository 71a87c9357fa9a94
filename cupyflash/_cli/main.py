"""python -m cupyflash: the command line, one module for each sub-command."""

import argparse
import os
import sys
from collections.abc import Sequence

import cupyflash
from cupyflash._cli import bench as bench_command
from cupyflash._cli import check as check_command
from cupyflash._cli import compile as compile_command
from cupyflash._cli import console, demo
from cupyflash._cli import info as info_command

# Name -> its module, which has add_arguments(parser), run(args) -> exit code and
# EXAMPLES, and a line of help. The modules import heavy packages only when they run.
COMMANDS = {
    "info": (info_command, "versions, devices, and which back ends can be used"),
    "demo": (demo, "fit simulations, estimate a density, compare the four methods"),
    "bench": (bench_command, "time softmax and attention on this machine"),
    "compile": (compile_command, "compile the kernels for any GPU, on any machine"),
    "check": (check_command, "compare the numerics of this machine with float64"),
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
    except BrokenPipeError:  # the reader closed the pipe early, as in `... | head`
        # Give the rest of the buffer somewhere to go when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a missing folder, a full disk
        console.complain(f"python -m cupyflash: {error}")
        return 2
