"""A mask array as bits, for kernels that read those of a thread as a word."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._cuda.structs import Struct

if TYPE_CHECKING:  # it imports CuPy, which selecting a kernel must not
    from cupyflash._cuda.launch_sequence import PointersAndBytes, Step

NAME = "mask_bits"  # of the memory that holds them
_THREADS = 256
_BYTES_OF_TILE = 16

MASK_ROWS = Struct(
    "mask_rows_t",
    "attention/score/mask_bits.cu",
    (
        ("long long", "num_rows", "seqlen_k", "col"),
        ("long long", "size[kMaskAxes]", "step[kMaskAxes]"),
    ),
)
MASK_BITS = Struct(
    "mask_bits_t",
    "attention/score/mask_bits.cuh",
    (("const uint4*", "tiles"), (OPERAND, "steps")),
)


class MaskBits(NamedTuple):
    """The bits of a mask of (batch, heads, queries, keys), in tiles of `block_n` keys.

    `steps` are those of the mask in elements; axes where they are 0 share bits.
    """

    block_n: int
    seqlen_k: int
    shape: tuple[int, ...]  # (*batch, heads, queries)
    steps: tuple[int, ...]
    col: int

    @classmethod
    def of(
        cls, problem: AttentionProblem, fields: dict[str, Any], block_n: int
    ) -> "MaskBits":
        """Those of a call, by the fields of its params_t."""
        batch_steps, head, row, col = fields["mask"]
        shape = (*fields["batch_shape"], problem.num_heads, problem.seqlen_q)
        steps = (*batch_steps, head, row)
        kept = tuple(n if step else 1 for n, step in zip(shape, steps, strict=True))
        return cls(block_n, problem.seqlen_k, kept, steps, col)

    @property
    def num_tiles(self) -> int:
        """Tiles of keys of a query."""
        return -(-self.seqlen_k // self.block_n)

    @property
    def num_bytes(self) -> int:
        """The size of the memory that holds them."""
        return _BYTES_OF_TILE * self.num_tiles * math.prod(self.shape)

    def step(self) -> "Step":
        """The launch that makes them, with its arguments."""
        num_rows = math.prod(self.shape)
        rows = {
            "num_rows": num_rows,
            "seqlen_k": self.seqlen_k,
            "col": self.col,
            "size": self.shape,
            "step": self.steps,
        }
        packed = MASK_ROWS.pack(rows, kMaskAxes=len(self.shape))
        return config(self.block_n, len(self.shape) - 2, num_rows), (
            "mask",
            NAME,
            packed,
        )

    def argument(self) -> "PointersAndBytes":
        """mask_bits_t, the argument of the kernel that reads them."""
        from cupyflash._cuda.launch_sequence import PointersAndBytes

        *batch, head, row = (
            self.num_tiles * math.prod(self.shape[axis + 1 :]) * (n > 1)
            for axis, n in enumerate(self.shape)
        )
        operand = (tuple(batch), head, row, 1)
        packed = MASK_BITS.pack({"steps": operand}, kBatchDims=len(batch))
        return PointersAndBytes((NAME,), packed[8:])


def config(block_n: int, batch_dims: int, num_rows: int = 1) -> LaunchConfig:
    """The launch that makes bits of so many queries."""
    numbers = {"BATCH_DIMS": batch_dims, "NUM_THREADS": _THREADS, "BLOCK_N": block_n}
    defines = tuple((name, str(n)) for name, n in numbers.items())
    variant = Variant("attention/score/mask_bits.cu", "attention_mask_bits", defines)
    return LaunchConfig.over(variant, -(-num_rows // (_THREADS // 32)), _THREADS)
