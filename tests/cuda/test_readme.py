"""The tables of kernels in cuda_src/ name every file, and only what there is."""

import re
from pathlib import Path

import pytest

from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._cuda import source

ATTENTION = source.CUDA_SRC / "attention"
MODULES = Path(source.__file__).parents[1] / "_attention" / "gpu"
ROWS = {kernel.name for kernel in (*ATTENTION_KERNELS, *ATTENTION_VJP_KERNELS)}


def table_of(text):
    """[cells of a line] of the lines that start with a name in backquotes."""
    lines = re.findall(r"^\| (`.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


TABLE = table_of((ATTENTION / "README.md").read_text("utf-8"))


def test_each_file_of_attention_has_one_line():
    named = [line[0].strip("`") for line in TABLE]
    assert len(named) == len(set(named))
    there = {p.relative_to(ATTENTION).as_posix() for p in ATTENTION.rglob("*.cu*")}
    copies = {name for name in named if name.startswith("../copy/")}
    assert all((ATTENTION / name).exists() for name in copies)
    assert set(named) - copies == there


@pytest.mark.parametrize("line", TABLE, ids=lambda line: line[0].strip("`"))
def test_a_line_says_what_launches_a_kernel_and_when(line):
    name, computes, launcher, when = line
    assert computes
    assert launcher
    if not name.endswith(".cu`"):
        return
    assert when
    modules = re.findall(r"`([\w/]+\.py)`", launcher)
    rows = re.findall(r"rows? (`\w+`(?: and `\w+`)*)", launcher)
    assert modules or rows
    assert all((MODULES / module).exists() for module in modules), modules
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) <= ROWS


@pytest.mark.parametrize("folder", ["softmax", "points"])
def test_the_others_name_every_file(folder):
    text = (source.CUDA_SRC / folder / "README.md").read_text("utf-8")
    named = set(re.findall(r"`([\w./]+\.cuh?)`", text))
    files = {
        path.relative_to(source.CUDA_SRC / folder).as_posix()
        for path in (source.CUDA_SRC / folder).rglob("*.cu*")
    }
    assert files <= named
    assert all((source.CUDA_SRC / folder / name).exists() for name in named)


def test_a_table_is_read():
    text = "| file | what |\n| --- | --- |\n| `a.cu` | x | row `mma` | |\n"
    assert table_of(text) == [["`a.cu`", "x", "row `mma`", ""]]
