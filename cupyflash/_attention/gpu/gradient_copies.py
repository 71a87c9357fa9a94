"""Plans of attention_vjp that put copies before another plan, or behind it.

The kernels of sm_90a read and write rows of whole vectors of 16 bytes. Of arrays whose
rows are no such vectors they get copies, and what they write goes to the gradients.
"""

import math
import struct

import cupy
import numpy as np

from cupyflash._attention.gpu import copy_config
from cupyflash._attention.gpu.config import OPTIONS
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda import graphs
from cupyflash._cuda import launch as _launch

_MATRICES = 3
_POINTERS = struct.Struct(f"{2 * _MATRICES}Q")
# narrow_params_t of cuda_src/copy/trim_rows.cu, behind its pointers.
_NUMBERS = np.dtype(
    [
        (name, "i8", (_MATRICES,))
        for name in ("num_words", "columns", "pitch", "first_block")
    ]
)


class CopyingPlan:
    """Copies of some arrays before another plan."""

    def __init__(self, plan, copies):
        self.plan = plan
        self.device_id, self.offset = plan.device_id, plan.offset
        self.launches = (*(copy.launch for copy in copies.values()), *plan.launches)
        places = ("q", "k", "v", "out", *OPTIONS, "dout")
        self.copies = [(places.index(name), copy) for name, copy in copies.items()]

    def __call__(self, arrays, offset):
        """Copy and launch; `arrays` as _arrays_of() has them."""
        ready = list(arrays)
        for place, copy in self.copies:
            ready[place] = copy(ready[place])
        graphs.keep_if_capturing(ready)
        return self.plan(tuple(ready), offset)


class NarrowingPlan:
    """Gradients without the columns that fill the last vector of a row."""

    def __init__(self, plan, problem):
        self.plan = plan
        self.device_id, self.offset = plan.device_id, plan.offset
        # (name, shape, shape as written)
        written = [
            (f"d{n}", getattr(problem, f"{n}_shape"), problem.written_shape(n))
            for n in "qkv"
        ]
        self.written = [x for x in written if x[1] != x[2]]
        self.no_pointers = (0,) * (_MATRICES - len(self.written))
        self.numbers, self.launch = _narrowing(
            self.written, ITEMSIZE[problem.forward.dtype], plan.device_id
        )
        self.launches = (*plan.launches, self.launch)

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = self.plan(arrays, offset)
        wide = [getattr(made, name) for name, *_ in self.written]
        narrow = [cupy.ndarray(shape, wide[0].dtype) for _, shape, _ in self.written]
        graphs.keep_if_capturing(wide)
        pointers = (
            *(x.data.ptr for x in wide),
            *self.no_pointers,
            *(x.data.ptr for x in narrow),
            *self.no_pointers,
        )
        self.launch.enqueue(_POINTERS.pack(*pointers) + self.numbers)
        names = (name for name, *_ in self.written)
        return made._replace(**dict(zip(names, narrow, strict=True)))


def _narrowing(written, itemsize, device_id):
    """The numbers of narrow_params_t, and the launch."""
    word = math.gcd(16, *(shape[-1] * itemsize for _, shape, _ in written))
    per_word = word // itemsize
    fields = np.zeros(1, _NUMBERS)
    fields["first_block"] = 1 << 62  # of a matrix that there is not
    num_blocks = 0
    for n, (_, shape, wide) in enumerate(written):
        num_words = math.prod(shape) // per_word
        fields["num_words"][0, n] = num_words
        fields["columns"][0, n] = shape[-1] // per_word
        fields["pitch"][0, n] = wide[-1] // per_word
        fields["first_block"][0, n] = num_blocks
        num_blocks += copy_config.blocks_of_narrow(num_words * word)
    config = copy_config.narrow_config(word, num_blocks)
    launch = _launch.Launch(config.variant, config.grid, config.block, device_id)
    return fields.tobytes(), launch
