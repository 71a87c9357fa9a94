"""Lists of the tiles that a mask function shows, for kernels that loop over them."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET, launch_config
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct

if TYPE_CHECKING:  # it imports CuPy, which selecting a kernel must not
    from cupyflash._cuda.launch_sequence import PointersAndBytes, Step

_THREADS = 512
_WORD = 4  # bytes
_HEADER = 2  # words before the entries of a list

LIST_PARAMS = Struct(
    "list_params_t",
    "attention/score/tile_lists.cu",
    (
        ("int", "own_first", "num_own", "num_other"),
        ("int", "batch_lists", "head_lists", "stride"),
    ),
)
TILE_LISTS = Struct(
    "tile_lists_t",
    "attention/score/tile_lists.cuh",
    (("const unsigned*", "words"), ("int", "stride", "batch_lists", "head_lists")),
)


class TileLists(NamedTuple):
    """Lists of one kernel, and how their tiles are divided.

    The owner's tiles have `parts` of `part_rows` queries, or keys if `transposed`, from
    row `own_first` on; those of the other side have `other_rows`.
    """

    part_rows: int
    parts: int
    other_rows: int
    transposed: bool = False
    own_first: int = 0
    name: str = "tile_lists"  # of the memory that holds them
    whole_first: bool = False  # whole tiles are a group of their own

    def config(
        self, problem: AttentionProblem, batch_dims: int, num_blocks: int = 1
    ) -> LaunchConfig:
        """The launch that makes the lists."""
        return launch_config(
            problem,
            batch_dims,
            num_blocks,
            _THREADS,
            "attention/score/tile_lists.cu",
            "attention_tile_lists",
            PART_ROWS=self.part_rows,
            PARTS=self.parts,
            OTHER_ROWS=self.other_rows,
            TRANSPOSED=int(self.transposed),
            WHOLE_FIRST=int(self.whole_first),
        )

    def _counts(self, problem):
        """(tiles of the owner, tiles of the other side, heads, entries with lists)."""
        own, other = problem.seqlen_q, problem.seqlen_k
        if self.transposed:
            own, other = other, own
        num_own = -(-(own - self.own_first) // (self.parts * self.part_rows))
        by_device = (problem.query_offsets, problem.query_lengths, problem.key_lengths)
        per_entry = "b" in problem.mask_varies_by or any(
            x is not None for x in by_device
        )
        return (
            num_own,
            -(-other // self.other_rows),
            problem.num_heads if "h" in problem.mask_varies_by else 0,
            math.prod(problem.batch) if per_entry else 0,
        )

    def _strides(self, problem):
        num_own, num_other, heads, entries = self._counts(problem)
        return {
            "stride": _HEADER + num_other,
            "batch_lists": num_own * max(heads, 1) if entries else 0,
            "head_lists": num_own if heads else 0,
        }

    def num_bytes(self, problem: AttentionProblem) -> int:
        """The size of the memory that holds them."""
        num_own, num_other, heads, entries = self._counts(problem)
        return _WORD * num_own * (_HEADER + num_other) * max(heads, 1) * max(entries, 1)

    def step(self, problem: AttentionProblem, batch_dims: int, params: Any) -> "Step":
        """The launch that makes them, with its arguments."""
        num_own, num_other, heads, entries = self._counts(problem)
        own = {"own_first": self.own_first, "num_own": num_own, "num_other": num_other}
        packed = LIST_PARAMS.pack({**own, **self._strides(problem)})
        blocks = num_own * max(heads, 1) * max(entries, 1)
        config = self.config(problem, batch_dims, blocks)
        return config, (self.name, *OPTIONS_AND_OFFSET, params, packed)

    def argument(self, problem: AttentionProblem) -> "PointersAndBytes":
        """tile_lists_t, the argument of the kernel that loops over them."""
        packed = TILE_LISTS.pack(self._strides(problem))
        from cupyflash._cuda.launch_sequence import PointersAndBytes

        return PointersAndBytes((self.name,), packed[8:])
