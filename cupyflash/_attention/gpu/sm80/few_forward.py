"""The kernel spec of float32 attention of few queries over many keys."""

from dataclasses import dataclass
from typing import Any

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import (
    LONG_SUM,
    MOST_COUNTED,
    OPTIONS,
    SplitKV,
    compiled_dims,
    holds_blocks,
    launch_config,
    most_seen,
    num_tiles,
    split_to_fill,
    too_many,
)
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, by_threshold

# Head dimensions that are compiled; zeros pad.
DIMS = (64, 128, 192, 256)
# Queries of a tile; wide heads with more options than so many have no registers for
# the most. From `_NEEDS_MORE` on the compiler needs more of them for the same code, and
# heads above `_NARROW` columns have none for softcap with ALiBi.
_FEWEST, _MOST = 16, 32
_NARROW, _WIDE, _MANY_OPTIONS = 64, 192, 4
_NEEDS_MORE = (10, 0)
# Warps of a block, keys of a tile, and pieces of k and v in the ring of a warp.
_WARPS, _BLOCK_N, _STAGES = 4, 64, 4
_MIN_BLOCKS = 2
# Keys from which on few heads split them, into tiles if need be.
_SHORTEST_SPLIT = 256
_BYTES_OF_PIECE = 4096


@dataclass(frozen=True, kw_only=True)
class MmaFewKernel(spec.ForwardSpec):
    """float32 in two tf32 parts, made in registers as k and v arrive.

    `fewest` and `most` queries, and keys from which on it pays off, by the head
    dimension.
    """

    fewest: int
    most: dict[float, int]
    least_keys: dict[float, int]

    def unsupported_reason(self, problem, device) -> str | None:
        if reason := spec.refuse_mma(problem, device, ("float32",), DIMS[-1]):
            return reason
        if problem.has_functions:
            return "takes no score or mask function"
        widest = max(problem.head_dim, problem.head_dim_v)
        most, least = (by_threshold(n, widest) for n in (self.most, self.least_keys))
        if not self.fewest <= problem.seqlen_q <= most:
            return f"takes {self.fewest} to {most} queries, not {problem.seqlen_q}"
        if problem.seqlen_k < least:
            return f"takes {least} keys or more, not {problem.seqlen_k}"
        if most_seen(problem) > LONG_SUM:
            return f"sums up to {LONG_SUM} keys"
        if reason := too_many(self.counts(problem, device)):
            return reason
        smem = self.smem(problem, device)
        if not holds_blocks(device, _MIN_BLOCKS, smem):
            return f"needs {_MIN_BLOCKS} blocks of {smem} bytes of shared memory"
        return None

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        return {"keys": (problem.seqlen_k, MOST_COUNTED)}

    def split_kv(self, problem, device) -> SplitKV:
        block_m = self._block_m(problem, device)
        return split_to_fill(
            problem, device, block_m, _MIN_BLOCKS, _BLOCK_N, _SHORTEST_SPLIT
        )

    def _block_m(self, problem: AttentionProblem, device: Device) -> int:
        """Queries of a tile: enough for all, if registers suffice."""
        is_few = problem.seqlen_q <= _FEWEST
        return _FEWEST if is_few or self._is_crowded(problem, device) else _MOST

    def _is_crowded(self, problem: AttentionProblem, device: Device) -> bool:
        """Whether options leave no registers for the most queries."""
        widest = max(problem.head_dim, problem.head_dim_v)
        count = sum(getattr(problem, name) is not None for name in OPTIONS)
        is_capped = problem.softcap > 0
        if widest > _WIDE and count + is_capped > _MANY_OPTIONS:
            return True
        has_both = is_capped and problem.alibi_slopes is not None
        return device.cc >= _NEEDS_MORE and widest > _NARROW and has_both

    def smem(self, problem: AttentionProblem, device: Device) -> int:
        """Bytes for q, two tiles of scores, and the rings of the warps."""
        dim, _ = compiled_dims(problem, DIMS)
        per_query = 4 * (dim + 2 * _BLOCK_N)
        rings = _WARPS * _STAGES * _BYTES_OF_PIECE
        return self._block_m(problem, device) * per_query + rings

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        dim, dim_v = compiled_dims(problem, DIMS)
        switches: dict[str, Any] = {
            "HEAD_DIM": dim,
            "HEAD_DIM_V": dim_v,
            "BLOCK_M": self._block_m(problem, device),
            "BLOCK_N": _BLOCK_N,
            "STAGES": _STAGES,
            "MIN_BLOCKS": _MIN_BLOCKS,
            "PARTS": 2 if problem.precision == "float32" else 1,
        }
        if problem.no_vectors:
            switches["UNALIGNED"] = 1
        config = launch_config(
            problem,
            batch_dims,
            num_tiles(problem, self._block_m(problem, device)),
            32 * _WARPS,
            "attention/sm80/few_forward.cu",
            f"attention_{self.name}",
            smem=self.smem(problem, device),
            **switches,
        )
        return (config,)


MMA_FEW = MmaFewKernel(
    name="mma_few",
    fewest=6,
    # More of narrow heads are as fast with parts that are made before.
    most={_WIDE: 32, DIMS[-1]: 64},
    least_keys={_WIDE: 128, DIMS[-1]: 64},
)
