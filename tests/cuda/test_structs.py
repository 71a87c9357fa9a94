"""Structs that host and device share: lists of fields beside the CUDA sources."""

import importlib
import pkgutil
import re

import numpy as np
import pytest

import cupyflash
from cupyflash._cuda import source, structs
from cupyflash._cuda.structs import AXES, Struct

pytest.importorskip("cupy")  # some lists stand beside plans


def all_structs():
    """Those of all modules, by source and name."""
    found = {}

    def add(x):
        if isinstance(x, Struct):
            found[x.source, x.name] = x
        elif isinstance(x, dict):
            for value in x.values():
                add(value)

    for module in pkgutil.walk_packages(cupyflash.__path__, "cupyflash."):
        if re.search(r"\._(attention|softmax|points)\.gpu\b|\._cuda\b", module.name):
            for value in vars(importlib.import_module(module.name)).values():
                add(value)
    return found


STRUCTS = all_structs()


def body_of(name, text):
    """(alignment, base, what stands between the braces) of a struct in CUDA."""
    head = rf"struct (?:alignas\((\d+)\) )?{name}(?: : (\w+))? {{"
    (match,) = re.finditer(head, text)
    depth, end = 1, match.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return int(match[1] or 1), match[2], text[match.end() : end - 1]


def declared(body):
    """[(type, name with the sizes of an array)] up to the first function."""
    found = []
    for statement in body.split(";"):
        words = " ".join(statement.split())
        if words.startswith("static_assert"):
            continue
        if "(" in words or not words:
            break
        kind, names = re.fullmatch(
            r"((?:const )?(?:long long|[\w:]+(?:<[^>]*>)?)) ?(.*)", words
        ).groups()
        for name in names.split(","):
            stars = "*" * name.count("*")
            found.append((kind + stars, name.replace("*", "").strip()))
    return found


def listed(struct):
    """The same of a list of fields."""
    for kind, *names in struct.fields:
        if isinstance(kind, tuple):
            inner, *arguments = kind
            kind = f"{inner.name}<{', '.join(map(str, arguments))}>"
        elif isinstance(kind, Struct):
            kind = kind.name
        yield from ((kind, name) for name in names)


@pytest.mark.parametrize("key", STRUCTS, ids="-".join)
def test_fields_are_those_of_the_source(key):
    """Their types, names and order, and how the whole is aligned."""
    struct = STRUCTS[key]
    text = (source.CUDA_SRC / struct.source).read_text(encoding="utf-8")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    alignment, base, body = body_of(struct.name, text)
    # What some kernels alone have stands at the end, and is packed apart.
    body = re.sub(r"#if.*?#endif", " ", body, flags=re.DOTALL)
    assert list(listed(struct)) == declared(body)
    assert base == (struct.base and struct.base.name)
    aligned = struct.base or struct  # alignas() of a base holds for what is made of it
    assert aligned.alignment == (alignment if base is None else aligned.alignment)
    assert struct.alignment == aligned.alignment


def test_each_struct_that_a_source_calls_shared_is_listed():
    """Comments above such a struct say that there is "the same struct on the host"."""
    shared = set()
    for path in source.CUDA_SRC.rglob("*.cu*"):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(
            r"((?:^//[^\n]*\n)+)struct (?:alignas\(\d+\) )?(\w+)", text, re.MULTILINE
        ):
            comment = " ".join(match[1].replace("//", " ").split())
            if "the same struct on the host" in comment:
                shared.add((path.relative_to(source.CUDA_SRC).as_posix(), match[2]))
    assert len(shared) >= 10
    assert shared <= set(STRUCTS), shared - set(STRUCTS)


def test_a_struct_is_packed_as_c_does():
    """Gaps in front of wider fields, and behind all of them."""
    inner = Struct("in_t", "a.cu", (("int", "a"), ("double", "b[n]")))
    outer = Struct(
        "out_t", "a.cu", (("int", "first"), (inner, "inside"), ("char*", "p")),
        alignment=64,
    )  # fmt: skip
    packed = outer.pack({"first": 1, "b": [3.0, 4.0], "p": 7}, n=2)
    assert len(packed) == 64
    assert np.frombuffer(packed, "i4")[[0, 2]].tolist() == [1, 0]
    assert np.frombuffer(packed, "f8")[2:4].tolist() == [3, 4]
    assert np.frombuffer(packed, "i8")[4] == 7
    assert packed == outer.pack({"first": 1, "inside": {"b": [3, 4]}, "p": 7}, n=2)


def test_a_base_keeps_its_padding():
    """Members of a derived struct begin behind it, however they are aligned."""
    base = Struct("base_t", "a.cu", (("int", "a", "b", "c"),), alignment=16)
    more = Struct("more_t", "a.cu", (("int", "d"),), alignment=16, base=base)
    assert more.dtype().fields["d"][1] == base.dtype().itemsize == 16
    assert len(more.pack({"a": 1, "d": 2})) == 32


def test_a_template_gets_its_arguments():
    whole = Struct("t", "a.cu", (((AXES, "kDims", 3), "axes"),))
    dtype = whole.dtype(kDims=2)["axes"]
    assert (dtype["size"].shape, dtype["stride"].shape) == ((2,), (3, 2))


def test_a_field_that_is_not_there_is_an_error():
    with pytest.raises(KeyError, match="nothing"):
        structs.AXES.pack({"nothing": 1}, kAxes=1, kArrays=1)
