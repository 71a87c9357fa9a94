"""Gradients without the padding columns that fill the last vector of a row.

The kernels of sm_90a write rows of whole 16-byte vectors; another launch trims them.
"""

import math
from typing import Any

import numpy as np

from cupyflash._attention.gpu import copy_config
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda.launch_sequence import PointersAndBytes, Result, Steps, num_bytes

TRIM = copy_config.TRIM_PARAMS.dtype(kMatrices=copy_config.MATRICES)


def trimmed(
    steps: Steps, problem, results: dict[str, Any]
) -> tuple[Steps, dict[str, Result | None]]:
    """The same launches and results, with padded results moved to memory in between."""
    dtype = problem.forward.dtype
    # (name, shape, shape as written)
    written = [
        (f"d{n}", getattr(problem, f"{n}_shape"), problem.written_shape(n))
        for n in "qkv"
    ]
    written = [x for x in written if x[1] != x[2]]
    if not written:
        return steps, results
    none = ("",) * (copy_config.MATRICES - len(written))
    wide = [name for name, *_ in written]
    narrow = [f"trimmed_{name}" for name in wide]
    numbers, config = _trim(written, ITEMSIZE[dtype])
    pointers = PointersAndBytes((*wide, *none, *narrow, *none), numbers)
    named = {f"trimmed_{n}" if n in wide else n: x for n, x in results.items()}
    for name, shape, _ in written:
        named[f"trimmed_{name}"] = named[f"trimmed_{name}"]._replace(shape=shape)
    memory = {name: num_bytes(shape, results[name].dtype) for name, _, shape in written}
    launches = [*steps.launches, (config, (pointers,))]
    return (
        steps._replace(launches=launches, scratch={**steps.scratch, **memory}),
        named,
    )


def _trim(written, itemsize):
    """narrow_params_t behind its pointers, and the launch."""
    word = math.gcd(16, *(shape[-1] * itemsize for _, shape, _ in written))
    per_word = word // itemsize
    fields = np.zeros((), TRIM)
    fields["first_block"] = 1 << 62  # for a matrix that does not exist
    num_blocks = 0
    for n, (_, shape, wide) in enumerate(written):
        num_words = math.prod(shape) // per_word
        fields["num_words"][n] = num_words
        fields["columns"][n] = shape[-1] // per_word
        fields["pitch"][n] = wide[-1] // per_word
        fields["first_block"][n] = num_blocks
        num_blocks += copy_config.blocks_of_narrow(num_words * word)
    numbers = fields.tobytes()[2 * copy_config.MATRICES * 8 :]
    return numbers, copy_config.narrow_config(word, num_blocks)
