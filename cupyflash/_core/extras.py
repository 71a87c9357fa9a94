"""What to install for packages that only a part of the functions needs."""


def command(extra: str) -> str:
    """The command that adds an extra to the installed package, in any folder."""
    return f'pip install "cupyflash[{extra}]"'


CUDA = f"{command('cuda13x')} (or [cuda12x])"
