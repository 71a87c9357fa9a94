"""Sphinx configuration."""

import hashlib
import inspect
import os
import pydoc
import sys
from pathlib import Path

import docutils.nodes
import latex2mathml.converter
from sphinx.util.inspect import stringify_signature

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
# Design notes and experiments are for those who change the code, and stay in the
# repository.
exclude_patterns = [
    "_build",
    "design",
    "lab",
    "lesson",
    "on_a_gpu",
    "guides/GALLERY_HEADER.rst",
]
templates_path = ["_templates"]

autosummary_generate = True


def own_methods(name, methods):
    """Those that a class has from this package, and not from tuple or SciPy."""
    bases = pydoc.locate(name).__mro__
    homes = {method: next(b for b in bases if method in vars(b)) for method in methods}
    return [
        method
        for method, home in homes.items()
        if home.__module__.startswith("cupyflash") and method != "__init__"
    ]


# For class.rst. Sphinx warns that it cannot remember a function between two builds.
autosummary_context = {"own_methods": own_methods}
suppress_warnings = ["config.cache"]
numpydoc_show_class_members = False
# The types of parameters are in the docstrings.
autodoc_typehints = "none"
myst_heading_anchors = 3

# Scripts that become pages: each runs when the site is built, and if one fails, so does
# the build. Files that begin with _ are shared by the others.
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
# Pages that stand alone have no menu of their own.
html_sidebars = {"index": [], "which_problem": [], "speed": []}
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
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
    app.connect("source-read", add_gpu_output)
    app.connect("autodoc-process-signature", show_constructor)


def show_constructor(app, what, name, obj, options, signature, annotation):
    """What __init__ takes, for a class whose __new__ passes everything on to it."""
    if what == "class" and (signature or "").endswith("*args, **kwargs)"):
        given = inspect.signature(obj.__init__)
        plain = given.replace(parameters=list(given.parameters.values())[1:])
        return stringify_signature(plain, show_annotation=False), annotation
    return None


def add_gpu_output(app, docname, source):
    """What the example of a page of the gallery printed and drew on a GPU."""
    folder, _, name = docname.rpartition("/")
    output = HERE / "on_a_gpu" / f"{name}.txt"
    if folder == "generated/gallery" and output.exists():
        text, footer, rest = source[0].partition("\n.. _sphx_glr_download_")
        assert footer, f"{docname} has no footer: where does its GPU output go?"
        source[0] = text + gpu_output(name, output) + footer + rest


def gpu_output(name, output):
    """A section of reStructuredText with the output of one example."""
    script = HERE.parent / "examples" / f"{name}.py"
    where, _, digest = (
        output.read_text("utf-8").partition("\n")[0].rpartition(", script ")
    )
    lines = [
        "The same on a GPU",
        "-----------------",
        "",
        f"The script's larger problem, timed on warm calls: {where}.",
        *(
            []
            if digest == hashlib.sha256(script.read_bytes()).hexdigest()[:12]
            else ["The script has changed a little since."]
        ),
        "",
        f".. literalinclude:: /on_a_gpu/{name}.txt",
        "   :language: text",
        "   :lines: 2-",
        "",
    ]
    if (HERE / "on_a_gpu" / f"{name}.png").exists():
        lines += [
            f".. image:: /on_a_gpu/{name}.png",
            "   :alt: The picture from the run on the GPU",
            "",
        ]
    return "\n" + "\n".join(lines)


def inline_math(self, node):
    """A formula in a line of text."""
    self.body.append(latex2mathml.converter.convert(node.astext()))
    raise docutils.nodes.SkipNode


def block_math(self, node):
    """A formula that stands alone."""
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    self.body.append(f'<div class="formula">{formula}</div>')
    raise docutils.nodes.SkipNode
