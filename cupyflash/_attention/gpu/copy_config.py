"""Launches that copy to rows padded to whole vectors, and back."""

from typing import Any

from cupyflash._attention.gpu.config import LONG_AXIS
from cupyflash._core.dtypes import CUDA_TYPES, WORDS
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._cuda.structs import AXES, Struct

_COPY_THREADS = 256


COPY_PARAMS = Struct(
    "copy_params_t",
    "copy/align_rows.cu",
    (
        ("long long", "num_rows", "num_columns", "column_stride", "by_columns"),
        ((AXES, "ROW_DIMS", 1), "rows"),
    ),
)


def copy_config(
    dtype: str, row_dims: int, num_columns: int, num_vectors: int
) -> LaunchConfig:
    """The launch that copies a matrix to rows of whole vectors."""
    defines: dict[str, Any] = {
        "ELEM_T": CUDA_TYPES[dtype],
        "ROW_DIMS": row_dims,
        "NUM_THREADS": _COPY_THREADS,
    }
    if num_columns > LONG_AXIS:
        defines["LONG_AXES"] = 1
    source, entry = "copy/align_rows.cu", "attention_copy"
    return LaunchConfig.over_threads(source, entry, num_vectors, defines)


MATRICES = 3  # per launch
TRIM_PARAMS = Struct(
    "narrow_params_t",
    "copy/trim_rows.cu",
    (
        ("const word_t*", "wide[kMatrices]"),
        ("word_t*", "narrow[kMatrices]"),
        ("long long", "num_words[kMatrices]", "columns[kMatrices]"),
        ("long long", "pitch[kMatrices]", "first_block[kMatrices]"),
    ),
)
_NARROW_THREADS = 256


def blocks_of_narrow(num_bytes: int) -> int:
    """Blocks that copy one result out of padded rows."""
    return -(-num_bytes // (16 * _NARROW_THREADS))


def narrow_config(word: int, num_blocks: int) -> LaunchConfig:
    """The launch that copies results out of padded rows, in words of `word` bytes."""
    defines = {"WORD_T": WORDS[word], "NUM_THREADS": str(_NARROW_THREADS)}
    variant = Variant("copy/trim_rows.cu", "attention_narrow", tuple(defines.items()))
    return LaunchConfig.over(variant, num_blocks, _NARROW_THREADS)
