"""Structs that host and device share: one list of fields for each.

tests/cuda/test_structs.py compares each with the struct in its CUDA source.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

# A CUtensorMap as a kernel argument passed by value.
MAP = np.dtype("V128")

_TYPES: dict[str, Any] = {
    "index_t": "i8",
    "long long": "i8",
    "int": "i4",
    "unsigned": "u4",
    "float": "f4",
    "double": "f8",
    "ptx::tensor_map_t": MAP,
}


_PADDING = "_padding"


@dataclass(frozen=True)
class Struct:
    """A struct of a CUDA source, packed by NumPy.

    A field is a type and the names declared with it, such as ``("index_t",
    "size[kAxes]")``. The type may be another struct, or one with the arguments of its
    template: ``((AXES, "kAxes", 2), "terms")``. A pointer type ends with ``*``.
    """

    name: str
    source: str  # below cuda_src/
    fields: tuple[tuple[Any, ...], ...]
    template: tuple[str, ...] = ()
    alignment: int = 1  # its size is a multiple
    base: "Struct | None" = None

    @functools.cache  # noqa: B019  structs are constants of modules
    def dtype(self, **sizes: int) -> np.dtype:
        """The dtype for these values of the constants in it."""
        found: list[tuple[Any, ...]] = []
        if self.base is not None:
            inner = self.base.dtype(**sizes)
            own = [name for name in inner.names or () if name != _PADDING]
            found = [(name, inner[name]) for name in own]
            # Members of a derived struct do not begin in the padding of its base.
            fields: Any = inner.fields
            end = max(fields[name][1] + inner[name].itemsize for name in own)
            if missing := inner.itemsize - end:
                found.append((f"{_PADDING}_of_base", f"V{missing}"))
        for kind, *names in self.fields:
            of_type = _dtype_of(kind, sizes)
            for name in names:
                declared, *axes = re.findall(r"\w+", name)
                shape = tuple(_size_of(n, sizes) for n in axes)
                found.append((declared, of_type, shape))
        dtype = np.dtype(found, align=True)
        if missing := -dtype.itemsize % self.alignment:
            dtype = np.dtype([*found, (_PADDING, f"V{missing}")], align=True)
        return dtype

    def offset(self, name: str) -> int:
        """The offset of a field, in bytes."""
        fields = self.dtype().fields
        assert fields is not None
        return fields[name][1]

    def pack(self, fields: dict[str, Any], **sizes: int) -> bytes:
        """The struct as one argument of `Launch.enqueue`; fields not given are 0.

        Those of a nested struct may be given among the others.
        """
        record = np.zeros(1, self.dtype(**sizes))
        if left := fields.keys() - _fill(record, fields):
            raise KeyError(f"{self.name} has no {', '.join(sorted(left))}")
        return record.tobytes()


def _fill(record, fields):
    """Write fields; returns the names of those that were found."""
    found = set()
    for name in record.dtype.names:
        if name not in fields:
            if record.dtype[name].names:
                found |= _fill(record[name], fields)
            continue
        found.add(name)
        value = fields[name]
        if isinstance(value, dict):
            _fill(record[name], value)
        else:
            record[name] = value
    return found


def _size_of(name, sizes):
    return int(name) if str(name).isdigit() else sizes[name]


def _dtype_of(kind, sizes):
    if isinstance(kind, Struct):
        return kind.dtype(**sizes)
    if isinstance(kind, tuple):
        struct, *arguments = kind
        values = (_size_of(x, sizes) for x in arguments)
        return struct.dtype(**dict(zip(struct.template, values, strict=True)))
    return np.dtype("u8" if kind.endswith("*") else _TYPES[kind])


AXES = Struct(
    "axes_t",
    "common/strides.cuh",
    (("long long", "size[kAxes]", "stride[kArrays][kAxes]"),),
    template=("kAxes", "kArrays"),
)
