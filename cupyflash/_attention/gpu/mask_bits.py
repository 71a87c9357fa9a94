"""A mask array as bits, for kernels that read those of a thread as a word."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cupyflash._attention.gpu.config import has_terms
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._cuda.structs import Struct

if TYPE_CHECKING:  # it imports CuPy, which selecting a kernel must not
    from cupyflash._cuda.launch_sequence import PointersAndBytes, Step

NAME = "mask_bits"  # of the memory that holds them
MOST_KEYS = 128  # of a tile
_THREADS = 256
_BYTES_OF_TILE = 16
_FEW_QUERIES = 16
_QUERIES, _KEYS = 64, 128  # of a block that makes words

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

MASK_MATRICES = Struct(
    "mask_matrices_t",
    "attention/score/mask_words.cu",
    (
        ("long long", "num_blocks", "seqlen_q", "seqlen_k", "row", "col"),
        ("long long", "left", "right"),
        ("long long", "size[kMaskAxes]", "step[kMaskAxes]"),
    ),
)
MASK_WORDS = Struct(
    "mask_words_t",
    "attention/score/mask_words.cuh",
    (("const unsigned*", "words"), (OPERAND, "steps")),
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


def has_bits(problem: AttentionProblem) -> bool:
    """Whether a kernel before those of mma.sync makes bits of the mask.

    It does where no other term changes scores, which then know nothing of the mask; not
    for few queries, where a launch counts.
    """
    is_alone = problem.mask is not None and not has_terms(replace(problem, mask=None))
    return is_alone and problem.seqlen_q > _FEW_QUERIES and problem.seqlen_k > 0


def without_bits(problem: AttentionProblem) -> AttentionProblem:
    """The problem as scores know it: without a mask that comes as bits."""
    return replace(problem, mask=None) if has_bits(problem) else problem


def switches(problem: AttentionProblem) -> dict[str, int]:
    """What a kernel is compiled with to read bits, if there are any."""
    return {"MASK_BITS": 1} if has_bits(problem) else {}


def add_bits(
    launches: list["Step"],
    scratch: dict[str, int],
    problem: AttentionProblem,
    fields: dict[str, Any],
) -> tuple["PointersAndBytes", ...]:
    """Adds the launch that makes bits, if there are any; what kernels take of them."""
    if not has_bits(problem):
        return ()
    bits = MaskBits.of(problem, fields, MOST_KEYS)
    launches.append(bits.step())
    scratch[NAME] = bits.num_bytes
    return (bits.argument(),)


def configs(problem: AttentionProblem, batch_dims: int) -> tuple[LaunchConfig, ...]:
    """The launch of add_bits(), if there is one."""
    return (config(MOST_KEYS, batch_dims),) if has_bits(problem) else ()


def config(block_n: int, batch_dims: int, num_rows: int = 1) -> LaunchConfig:
    """The launch that makes bits of so many queries."""
    numbers = {"BATCH_DIMS": batch_dims, "NUM_THREADS": _THREADS, "BLOCK_N": block_n}
    defines = tuple((name, str(n)) for name, n in numbers.items())
    variant = Variant("attention/score/mask_bits.cu", "attention_mask_bits", defines)
    return LaunchConfig.over(variant, -(-num_rows // (_THREADS // 32)), _THREADS)


class MaskWords(NamedTuple):
    """What a mask of (batch, heads, queries, keys), or a bound on positions, hides.

    The format is that of mask_words.cuh.

    `steps` are those of the mask in elements; batch and head axes where they are 0
    share words. `window` is (left, right) of params_t.
    """

    seqlen_q: int
    seqlen_k: int
    shape: tuple[int, ...]  # (*batch, heads)
    steps: tuple[int, ...]
    row: int
    col: int
    window: tuple[int, int]

    @classmethod
    def of(cls, problem: AttentionProblem, fields: dict[str, Any]) -> "MaskWords":
        """Those of a call, by the fields of its params_t."""
        batch_steps, head, row, col = fields["mask"]
        shape, steps = (*fields["batch_shape"], problem.num_heads), (*batch_steps, head)
        kept = tuple(n if step else 1 for n, step in zip(shape, steps, strict=True))
        window = fields["left"], fields["right"]
        return cls(problem.seqlen_q, problem.seqlen_k, kept, steps, row, col, window)

    @property
    def words_of_queries(self) -> int:
        """Words of 64 queries."""
        return -(-self.seqlen_k // _KEYS) * _THREADS

    @property
    def words_of_head(self) -> int:
        """Words of all queries of a head, in whole tiles of two times 64."""
        return -(-self.seqlen_q // (2 * _QUERIES)) * 2 * self.words_of_queries

    @property
    def num_bytes(self) -> int:
        """The size of the memory that holds them."""
        return 4 * self.words_of_head * math.prod(self.shape)

    def step(self) -> "Step":
        """The launch that makes them, with its arguments."""
        num_blocks = self.num_bytes // (4 * _THREADS)
        fields = {
            "num_blocks": num_blocks,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "row": self.row,
            "col": self.col,
            "left": self.window[0],
            "right": self.window[1],
            "size": self.shape,
            "step": self.steps,
        }
        packed = MASK_MATRICES.pack(fields, kMaskAxes=len(self.shape))
        launch = words_config(len(self.shape) - 1, num_blocks)
        return launch, ("mask", NAME, "offset", packed)

    def argument(self) -> "PointersAndBytes":
        """mask_words_t, the argument of the kernel that reads them."""
        from cupyflash._cuda.launch_sequence import PointersAndBytes

        *batch, head = (
            self.words_of_head * math.prod(self.shape[axis + 1 :]) * (n > 1)
            for axis, n in enumerate(self.shape)
        )
        operand = (tuple(batch), head, self.words_of_queries, 1)
        packed = MASK_WORDS.pack({"steps": operand}, kBatchDims=len(batch))
        return PointersAndBytes((NAME,), packed[8:])


def words_config(batch_dims: int, num_blocks: int = 1) -> LaunchConfig:
    """The launch that makes words, of so many blocks of queries and keys."""
    defines = (("BATCH_DIMS", str(batch_dims)), ("NUM_THREADS", str(_THREADS)))
    variant = Variant("attention/score/mask_words.cu", "attention_mask_words", defines)
    return LaunchConfig.over(variant, num_blocks, _THREADS)
