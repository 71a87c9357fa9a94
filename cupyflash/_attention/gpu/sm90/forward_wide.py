"""The kernel spec of attention for heads above 256 columns, on sm_90a."""

from dataclasses import dataclass

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import (
    MOST_COUNTED,
    MOST_KEYS,
    SplitKV,
    if_on,
    launch_config,
    most_seen,
    num_heads,
    num_tiles,
    scale_is_plain,
    split_to_fill,
    too_many,
)
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.tensor_map import MAX_BATCH_AXES

# Head dimensions are compiled in steps; zeros pad.
_STEP = 64
# Up to here other rows are faster; above the latter no block can hold the tiles.
_NARROW, _WIDEST = 256, 576

# Queries and keys of a 16-bit tile.
BLOCK = 64
_NUM_THREADS = 256
_BARRIERS = 32  # bytes, after the tiles


@dataclass(frozen=True, kw_only=True)
class HopperWideKernel(spec.ForwardSpec):
    """Tensor cores of sm_90a for 16-bit heads of 257 to 576 columns, any strides."""

    arch: str = "sm_90a"

    def unsupported_reason(self, problem, device) -> str | None:
        if reason := spec.refuse_other_arch(self.arch, device):
            return reason
        if problem.has_functions:
            return "takes no score or mask function"
        reason = spec.refuse_mma(problem, device, spec.HALVES, _WIDEST, self.arch)
        if reason is not None:
            return reason
        if max(problem.head_dim, problem.head_dim_v) <= _NARROW:
            return f"is for heads above {_NARROW} columns"
        if most_seen(problem) > (most := MOST_KEYS[problem.dtype]):
            return f"sums in {problem.dtype} are exact enough up to {most} keys"
        return too_many(self.counts(problem, device))

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        return {  # coordinates in tensor maps
            "keys": (problem.seqlen_k, MOST_COUNTED),
            "heads of all batch entries": (num_heads(problem), MOST_COUNTED),
        }

    def dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """head_dim and head_dim_v as they are compiled."""
        dim, dim_v = (
            max(-(-n // _STEP), 1) * _STEP
            for n in (problem.head_dim, problem.head_dim_v)
        )
        return dim, dim_v

    def smem(self, problem: AttentionProblem) -> int:
        """Bytes of tiles of q, k, v and p, of one float per row and side, and more."""
        dim, dim_v = self.dims(problem)
        return BLOCK * 2 * (2 * dim + dim_v + BLOCK) + 2 * 4 * BLOCK + _BARRIERS

    def is_mapped(self, problem: AttentionProblem, batch_dims: int) -> bool:
        """Whether k and v are loaded by TMA.

        Above 512 columns of v there are no registers for it.
        """
        has_map = problem.no_tensor_map is None and batch_dims <= MAX_BATCH_AXES
        return has_map and problem.seqlen_k > 0 and self.dims(problem)[1] <= 512

    def split_kv(self, problem, device) -> SplitKV:
        """One block per multiprocessor."""
        return split_to_fill(problem, device, BLOCK, blocks_per_sm=1)

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        dims = self.dims(problem)
        switches = if_on(
            SCALE_SCORES=not scale_is_plain(problem.scale),
            MAPPED=self.is_mapped(problem, batch_dims),
        )
        config = launch_config(
            problem,
            batch_dims,
            num_tiles(problem, BLOCK),
            _NUM_THREADS,
            "attention/sm90/forward_wide.cu",
            f"attention_{self.name}",
            arch=self.arch,
            smem=self.smem(problem),
            HEAD_DIM=dims[0],
            HEAD_DIM_V=dims[1],
            **switches,
        )
        return (config,)


HOPPER_WIDE = HopperWideKernel(name="hopper_wide")
