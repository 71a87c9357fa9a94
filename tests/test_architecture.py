"""The rule of imports: which folder may import which, read from the sources alone."""

import ast
from functools import cache
from pathlib import Path

import pytest

import cupyflash

PACKAGE = Path(cupyflash.__file__).parent

# Package -> what it may import, itself left out. __init__.py, __main__.py and
# _explain.py, which stand above, may import all but CuPy; scores imports nothing else.
PACKAGES = {
    "_cli": {"", "_attention", "_softmax", "_points", "_reference", "_cuda", "_core"},
    "_reference": {"_attention", "_cuda", "_core"},
    "_attention": {"_cuda", "_expr", "_core"},
    "_softmax": {"_cuda", "_core"},
    "_points": {"_cuda", "_expr", "_core"},
    "_cuda": {"_core"},
    "_expr": {"_core"},
    "_core": set(),
}

# What the command line and the references may see of the operations: public functions,
# their results, and what there is to compile.
SEEN = {
    "_cli": {
        "_attention.api",
        "_softmax.api",
        "_attention.gpu.coverage",
        "_attention.gpu.backward_coverage",
        "_softmax.gpu.coverage",
        "_points.gpu.coverage",
    },
    "_reference": {"_attention.vjp_problem"},
}

# In the gpu/ of an operation, from above: a module imports from its own line or from
# those below. A folder stands for all that is in it.
ATTENTION_GPU = (
    {"forward", "backward"},  # dispatch: a call becomes a plan
    {
        "forward_registry",
        "backward_registry",
        "coverage",
        "backward_coverage",
        "samples",
    },
    {"sm90"},
    {"sm80", "fp64"},
    {"simt"},
    {
        "plan",
        "split_kv",
        "copies",
        "combine",
        "views",
        "gradient_plan",
        "gradient_copies",
    },
    {
        "config",
        "functions",
        "params",
        "combine_config",
        "copy_config",
        "diagonals",
        "mask_bits",
        "tile_lists",
        "gradient_config",
        "gradient_layout",
        "gradient_limits",
        "spec",
    },
)
SOFTMAX_GPU = (
    {"dispatch", "complex"},
    {"plan"},
    {"coverage"},
    {"registry"},
    {"shapes"},
    {"heuristics", "limits"},
    {"config", "transpose"},
)
POINTS_GPU = (
    {"gradients"},
    {"dispatch"},
    {"plan", "gradient_plan", "clouds"},
    {"coverage"},
    {"registry", "moments"},
    {"config", "series", "functions"},
)

# Modules that import CuPy when they are imported; all others work without it.
WITH_CUPY = {
    "_cuda": {
        "runtime",
        "launch",
        "launch_sequence",
        "compiler",
        "graphs",
        "structs",
    },
    "_softmax.gpu": {"complex"},
    "_points.gpu": {"dispatch", "clouds", "gradients"},
    "_attention.gpu": {
        "forward",
        "backward",
        "combine",
        "copies",
        "split_kv",
        "views",
    },
}

# What public packages import beside their own modules: never a back end.
PUBLIC = {
    "points": {
        "_points.api",
        "_points.gradients",
        "_points.problem",
        "_core.arrays",
        "_core.typing",
    },
    "dask": {
        "",
        "points",
        "_attention.problem",
        "_points.problem",
        "_softmax.problem",
        "_core.arrays",
        "_core.extras",
        "_core.foreign_names",
        "_core.typing",
    },
    "distributed": {
        "",
        "_attention.problem",
        "_attention.row_sums",
        "_attention.vjp_problem",
        "_core.arrays",
        "_core.extras",
        "_core.foreign_names",
        "_core.strides",
        "_core.typing",
    },
}

# (module, what it imports): why it may.
EXCEPTIONS: dict[tuple[str, str], str] = {}


@cache
def modules():
    """{dotted name below cupyflash: path}; "" is the package itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] == "cuda_src":
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


@cache
def imports(module):
    """(what a module imports of the package, other packages), anywhere in it."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
    }
    ours, others = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are absolute"
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for source, name in names:
            if source.partition(".")[0] != "cupyflash":
                if id(node) not in lazy:
                    others.add(source.partition(".")[0])
                continue
            below = source.partition(".")[2]
            whole = f"{below}.{name}".strip(".")
            ours.add(whole if whole in modules() else below)
    return ours - {module}, others


def below(module, package):
    return module == package or module.startswith(f"{package}.")


def in_package():
    return [m for m in modules() if m.startswith("_") and m != "_explain"]


def allowed(module, imported):
    return (module, imported) in EXCEPTIONS


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_those_below(package):
    wrong = [
        f"{module} imports {imported or 'cupyflash'}"
        for module in in_package()
        if below(module, package)
        for imported in imports(module)[0]
        if imported not in ("_explain", *SEEN.get(package, ()))
        and not below(imported, package)
        and (
            imported.partition(".")[0] not in PACKAGES[package]
            or (
                package in SEEN
                and imported.partition(".")[0] in ("_attention", "_softmax")
            )
        )
        and not allowed(module, imported)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "lines"),
    [
        ("_attention.gpu", ATTENTION_GPU),
        ("_softmax.gpu", SOFTMAX_GPU),
        ("_points.gpu", POINTS_GPU),
    ],
    ids=["attention", "softmax", "points"],
)
def test_kernels_import_those_below(package, lines):
    def line_of(module):
        name = module.removeprefix(f"{package}.").partition(".")[0]
        found = [n for n, names in enumerate(lines) if name in names]
        assert found, f"{module} stands in no line of the table"
        return found[0]

    inside = [m for m in modules() if m.startswith(f"{package}.")]
    wrong = [
        f"{module} imports {imported}, which stands above it"
        for module in inside
        for imported in imports(module)[0]
        if imported in inside
        and line_of(imported) < line_of(module)
        and not allowed(module, imported)
    ]
    assert not wrong, "\n".join(wrong)
    names = {m.removeprefix(f"{package}.").partition(".")[0] for m in inside}
    assert set().union(*lines) == names, "the table names other modules than there are"


def test_architectures_do_not_know_each_other():
    """sm_80 and float64 stand in one line, and neither imports the other."""
    for one, other in (("sm80", "fp64"), ("fp64", "sm80")):
        for module in modules():
            if below(module, f"_attention.gpu.{one}"):
                for imported in imports(module)[0]:
                    assert not below(imported, f"_attention.gpu.{other}"), module


def test_what_is_not_for_a_gpu_knows_none():
    """Checks and the CPU import nothing of gpu/; public functions do when called."""
    for module in in_package():
        operation, _, name = module.partition(".")
        operations = "_attention", "_softmax", "_points"
        if operation in operations and name[:3] not in ("gpu", "api"):
            for imported in imports(module)[0]:
                assert not below(imported, f"{operation}.gpu"), module


@pytest.mark.parametrize("package", PUBLIC)
def test_public_packages_import_checks_and_functions(package):
    """What they need to check and to call, never a back end."""
    for module in modules():
        if below(module, package):
            for imported in imports(module)[0]:
                assert below(imported, package) or imported in PUBLIC[package], module


def test_scores_stand_alone():
    for module in modules():
        if below(module, "scores"):
            assert all(below(imported, "scores") for imported in imports(module)[0])


def test_only_these_modules_import_cupy():
    wrong = []
    for module in modules():
        if "cupy" not in imports(module)[1]:
            continue
        package, _, name = module.rpartition(".")
        is_plan = below(module, "_attention.gpu") and name.endswith("_plan")
        if not is_plan and name not in WITH_CUPY.get(package, ()):
            wrong.append(module)
    assert not wrong


def test_no_import_goes_round():
    above, done = [], set()

    def visit(module):
        if module in done:
            return
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        above.append(module)
        tree_imports = top_imports(module)
        for imported in sorted(tree_imports):
            visit(imported)
        above.pop()
        done.add(module)

    for module in modules():
        visit(module)


@cache
def top_imports(module):
    """Those that run when the module is imported, functions left out."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("cupyflash"):
            source = node.module.partition(".")[2]
            for alias in node.names:
                whole = f"{source}.{alias.name}".strip(".")
                found.add(whole if whole in modules() else source)
    # A package's own __init__ is run first, whoever asks.
    return {m for m in found if m} - {module}


def test_the_top_is_small():
    """Beside packages, the package's own folder holds three modules."""
    names = {path.name for path in PACKAGE.glob("*.py")}
    assert names == {"__init__.py", "__main__.py", "_explain.py"}
    assert all(
        (path / "__init__.py").exists()
        for path in PACKAGE.rglob("*")
        if path.is_dir() and any(path.glob("*.py"))
    )


def test_every_package_is_shipped():
    """setup.cfg names the packages one by one, since cuda_src/ is mapped into them."""
    text = (PACKAGE.parent / "setup.cfg").read_text(encoding="utf-8")
    for path in PACKAGE.rglob("__init__.py"):
        name = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        assert f"    {name}\n" in text, name
