"""Kernels read like their algorithm: no body is longer than a few screens."""

import re

import pytest

from cupyflash._cuda import source

# Lines of a body, braces included. What is longer is divided into functions by role:
# load, compute, store.
LIMITS = {"softmax": 150}
OTHERS = 200

SOURCES = sorted(
    path.relative_to(source.CUDA_SRC).as_posix()
    for path in source.CUDA_SRC.rglob("*.cu*")
)


_NAME = re.compile(r"(operator(?:\(\)|[^\w\s(]+)|\w+)(?:<[^<>()]*>)?\s*\(")


def bodies_of(text):
    """(name, number of lines) of each function for the device in a CUDA source."""
    text = re.sub(r"//[^\n]*", "", text)
    for match in re.finditer(r"\b__(?:global|device)__\b", text):
        depth, at = 0, match.end()
        while text[at] not in ";{" or depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        head = text[match.end() : at]
        if text[at] == ";" or "(" not in head:  # a declaration, or a variable
            continue
        first, depth = at, 1
        while depth:
            at += 1
            depth += {"{": 1, "}": -1}.get(text[at], 0)
        name = next(n for n in _NAME.findall(head) if not n.startswith("__"))
        yield name, text.count("\n", first, at) + 1


@pytest.mark.parametrize("name", SOURCES)
def test_no_body_is_too_long(name):
    limit = LIMITS.get(name.partition("/")[0], OTHERS)
    text = (source.CUDA_SRC / name).read_text(encoding="utf-8")
    found = list(bodies_of(text))
    assert [(body, n) for body, n in found if n > limit] == []
    if name.endswith(".cu"):
        assert found, "no function was found"


def test_bodies_are_measured():
    text = """\
__device__ const int table[2] = {1, 2};
__device__ void declared(int x);
__device__ __forceinline__ int one(int x) { return x; }  // {
struct a_t {
  int x;
  template <typename T> __device__ a_t operator()(T y) const {
    return {x};
  }
};
extern "C" __global__ void __launch_bounds__(256) kernel(
    const int* x,  // (rows), {
    int count) {
  if (count > 0) {
    x[0];
  }
}
"""
    assert dict(bodies_of(text)) == {"one": 1, "operator()": 3, "kernel": 5}
