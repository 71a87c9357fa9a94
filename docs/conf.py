"""Sphinx configuration."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cupyflash

project = "cupyflash"
author = "The cupyflash authors"
copyright = "2026, The cupyflash authors"
version = release = cupyflash.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]

autosummary_generate = True
numpydoc_show_class_members = False
# The types of parameters stand in the docstrings.
autodoc_typehints = "none"
myst_heading_anchors = 3

html_theme = "pydata_sphinx_theme"
html_title = "cupyflash"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
