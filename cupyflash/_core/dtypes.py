"""The dtypes of array elements: their names in kernels, and their sizes."""

from typing import NamedTuple


class _Facts(NamedTuple):
    cuda: str  # half_t and bfloat16_t are ours (cuda_src/common/types.cuh)
    itemsize: int
    tensor_map: int | None = None  # CUtensorMapDataType, where a map may have it


FLOATS = ("float16", "bfloat16", "float32", "float64")

_TABLE = {
    "float16": _Facts("half_t", 2, 6),
    "bfloat16": _Facts("bfloat16_t", 2, 9),
    "float32": _Facts("float", 4, 7),
    "float64": _Facts("double", 8),
    "bool": _Facts("bool", 1, 0),
    "int8": _Facts("signed char", 1),
    "int16": _Facts("short", 2),
    "int32": _Facts("int", 4),
    "int64": _Facts("long long", 8),
    "uint8": _Facts("unsigned char", 1),
    "uint16": _Facts("unsigned short", 2),
    "uint32": _Facts("unsigned int", 4),
    "uint64": _Facts("unsigned long long", 8),
}
CUDA_TYPES = {name: facts.cuda for name, facts in _TABLE.items()}
ITEMSIZE = {name: facts.itemsize for name, facts in _TABLE.items()}
TENSOR_MAP_TYPES = {name: facts.tensor_map for name, facts in _TABLE.items()}

# The word that moves an element of this many bytes.
WORDS = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
