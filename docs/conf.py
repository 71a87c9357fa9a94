"""Sphinx configuration."""

import os
import sys
from pathlib import Path

import docutils.nodes
import latex2mathml.converter

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import cupyflash  # noqa: E402

project = "cupyflash"
author = "The cupyflash authors"
copyright = "2026, The cupyflash authors"
version = release = cupyflash.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
# Design notes are for those who change the code, and stay in the repository.
exclude_patterns = ["_build", "design", "lesson", "guides/GALLERY_HEADER.rst"]
templates_path = ["_templates"]

autosummary_generate = True
numpydoc_show_class_members = False
# The types of parameters stand in the docstrings.
autodoc_typehints = "none"
myst_heading_anchors = 3

# Scripts that become pages: each runs when the site is built, and a page whose script
# fails, fails the build. Files that begin with _ are shared by the others.
sphinx_gallery_conf = {
    "examples_dirs": ["lesson", "../examples", "guides"],
    "gallery_dirs": ["generated/lesson", "generated/gallery", "generated/guides"],
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"(^|[\\/])_[^\\/]*$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    # Each page of the reference shows the examples that call its function.
    "backreferences_dir": "generated/backreferences",
    "doc_module": ("cupyflash",),
    "capture_repr": (),
    "download_all_examples": False,
    "plot_gallery": "True",
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
}

# Prompts and output are not part of what is copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "cupyflash"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "icon_links": [
        {
            "name": "Source",
            "url": "https://github.com/cupyflash/cupyflash",
            "icon": "fa-brands fa-github",
        }
    ],
    # The list of versions is that of the newest site, for old sites too.
    "switcher": {
        "json_url": "https://cupyflash.readthedocs.io/en/latest/_static/switcher.json",
        "version_match": ".".join(release.split(".")[:2]),
    },
    "check_switcher": False,
    "navbar_end": ["version-switcher", "theme-switcher", "navbar-icon-links"],
}

# Pages of the repository and of the site itself, before there is a site.
linkcheck_ignore = [
    r"https://github\.com/cupyflash/.*",
    r"https://cupyflash\.readthedocs\.io/.*",
]

# Names of other libraries become links where the network can be reached: a build
# without it must not fail.
if os.environ.get("READTHEDOCS") or os.environ.get("CUPYFLASH_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "scipy": ("https://docs.scipy.org/doc/scipy", None),
        "cupy": ("https://docs.cupy.dev/en/stable", None),
    }


def setup(app):
    """Formulae as MathML, which browsers draw themselves: no script from elsewhere."""
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.config.html_math_renderer = "mathml"


def inline_math(self, node):
    """A formula in a line of text."""
    self.body.append(latex2mathml.converter.convert(node.astext()))
    raise docutils.nodes.SkipNode


def block_math(self, node):
    """A formula that stands alone."""
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    self.body.append(f'<div class="formula">{formula}</div>')
    raise docutils.nodes.SkipNode
