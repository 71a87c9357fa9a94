"""Dtypes as kernels name them, and their sizes."""

# The C++ type of an array element, by dtype name; half_t and bfloat16_t are ours
# (cuda_src/common/types.cuh).
CUDA_TYPES = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
    "bool": "bool",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
}

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
