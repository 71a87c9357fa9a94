"""How to install packages that only some functions need."""


def command(extra: str) -> str:
    """The command that adds an extra to the installed package, in any folder."""
    return f'pip install "cupyflash[{extra}]"'


CUDA = f"{command('cuda13x')} (or [cuda12x])"
