"""Write the sha256 of a source distribution into conda-forge/recipe.yaml.

    python tools/conda_recipe.py dist/cupyflash-0.2.0.tar.gz

The file must be the one on PyPI: what ``pip download --no-binary cupyflash --no-deps
cupyflash==0.2.0`` fetches, or what the release workflow kept as its artifact. Another
build of the same commit may differ in its time stamps.
"""

import hashlib
import re
import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parent.parent / "conda-forge" / "recipe.yaml"


def with_digest(recipe, sdist):
    """The text of the recipe with the digest of `sdist`, which must be its version."""
    version = re.search(r'^  version: "(\S+)"$', recipe, re.MULTILINE)[1]
    if sdist.name != f"cupyflash-{version}.tar.gz":
        raise ValueError(
            f"the recipe is of version {version}, got {sdist.name}: give "
            f"cupyflash-{version}.tar.gz"
        )
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    return re.sub(r'^  sha256: "\w+"$', f'  sha256: "{digest}"', recipe, flags=re.M)


def main():
    """Rewrite the recipe for the one file given."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        text = with_digest(RECIPE.read_text("utf-8"), Path(sys.argv[1]))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    RECIPE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
