"""The kernel spec of float64 attention of few keys: all of an entry's are on chip."""

import math
from dataclasses import dataclass, replace
from typing import Any

from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu.fp64.forward import WARP_ROWS, unsupported_reason
from cupyflash._attention.gpu.spec import ForwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, by_threshold

# The most shared memory other than that of Cut.smem, and what the system reserves.
_STATIC_SMEM, _RESERVED_SMEM = 512, 1024
# Columns of a part of a tile of q.
_UNIT = 32
# Blocks have at most so many tiles of queries, or fewer if blocks would be too few.
_TILES_OF_BLOCK = (64, 32, 16)
_WARPS = (1, 2, 4, 6, 8)
# So many warps share a tile where fewer would be on a multiprocessor.
_TEAM = 4
_BYTES = ITEMSIZE["float64"]


@dataclass(frozen=True)
class Cut:
    """Warps of a block, parts of tiles of q at a time, and blocks at a time."""

    warps: int
    stages: int
    min_blocks: int  # blocks per multiprocessor; limits the registers of a thread
    team: int = 1  # warps that share a tile of queries

    @property
    def teams(self) -> int:
        return self.warps // self.team

    @property
    def resident(self) -> int:
        """Warps per multiprocessor."""
        return self.warps * self.min_blocks


@dataclass(frozen=True, kw_only=True)
class ShortFloat64Kernel(ForwardSpec):
    """float64 tensor cores: a block has all keys of an entry, and goes over queries.

    `most_keys` that pay off, by the head dimension; `most_warps` of a multiprocessor,
    whose registers suffice, by the keys; `stages` from what is best to what fits.
    """

    dims: tuple[int, ...]  # head dimensions that are compiled; zeros pad
    most_keys: dict[float, int]
    most_warps: dict[float, int]
    stages: tuple[int, ...]

    def unsupported_reason(self, problem, device) -> str | None:
        if problem.dtype == "float64":
            most = by_threshold(
                self.most_keys, max(problem.head_dim, problem.head_dim_v)
            )
            if not 1 <= problem.seqlen_k <= most:
                return f"takes entries with 1 to {most} keys, not {problem.seqlen_k}"
            if problem.seqlen_q < 1:
                return "takes entries with queries"
        if problem.keys_of_part is not None:
            return "holds all keys of a head at once"
        counts = self.counts(problem, device)
        return unsupported_reason(problem, device, self.dims[-1], counts, self._cuts)

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        queries = problem.group_size * problem.seqlen_q
        most = attention_config.MOST_COUNTED
        return {"queries of a head of k": (queries, most)}

    def keys(self, problem: AttentionProblem) -> int:
        """Keys as they are compiled."""
        return next(n for n in (8, 16, 32, 64) if problem.seqlen_k <= n)

    def _dims(self, problem: AttentionProblem) -> tuple[int, int]:
        return attention_config.compiled_dims(problem, self.dims)

    def smem(self, problem: AttentionProblem, cut: Cut) -> int:
        """Bytes for k, v, the parts of tiles of q and scores that a team exchanges."""
        (dim, dim_v), keys = self._dims(problem), self.keys(problem)
        of_team = cut.stages * min(dim, _UNIT) + (keys if cut.team > 1 else 0)
        return _BYTES * (keys * (dim + dim_v) + cut.teams * WARP_ROWS * of_team)

    def _num_heads(self, problem: AttentionProblem) -> int:
        """Heads of k and v over all batch entries."""
        return math.prod(problem.batch) * problem.num_kv_heads

    def _num_tiles(self, problem: AttentionProblem) -> int:
        """Tiles of queries of a head of k and v."""
        return problem.group_size * -(-problem.seqlen_q // WARP_ROWS)

    def _tiles_at_once(self, problem: AttentionProblem, device: Device) -> int:
        """The most that a block can have without idle multiprocessors."""
        tiles = self._num_tiles(problem)
        of_each = -(-self._num_heads(problem) * tiles // device.num_sms)
        return max(1, min(tiles, of_each))

    def _fitting(self, problem: AttentionProblem, device: Device, cut: Cut) -> Cut:
        """`cut` with as many blocks as fit on a multiprocessor, maybe none."""
        smem = self.smem(problem, cut) + _STATIC_SMEM
        if smem > device.smem_optin:
            return replace(cut, min_blocks=0)
        blocks = (device.smem_optin + _RESERVED_SMEM) // (smem + _RESERVED_SMEM)
        most = by_threshold(self.most_warps, problem.seqlen_k) // cut.warps
        return replace(cut, min_blocks=min(blocks, most))

    def _cuts(self, problem: AttentionProblem, device: Device) -> tuple[Cut, ...]:
        """What fits on `device`, with no more warps than keep all of it busy."""
        most = self._tiles_at_once(problem, device)
        cuts = (
            self._fitting(problem, device, Cut(warps, stages, 0))
            for stages in self.stages
            for warps in _WARPS
            if warps <= most
        )
        return tuple(cut for cut in cuts if cut.min_blocks > 0)

    def _team(self, problem: AttentionProblem, device: Device) -> Cut | None:
        """Few tiles, each of a team, and most parts of them at a time, if that fits."""
        dim, dim_v = self._dims(problem)
        if self.keys(problem) % (8 * _TEAM) != 0 or dim_v % (16 * _TEAM) != 0:
            return None
        teams = min(_WARPS[-1] // _TEAM, self._tiles_at_once(problem, device))
        parts = dim // min(dim, _UNIT)
        for stages in range(parts + 1, 1, -1):
            cut = self._fitting(problem, device, Cut(_TEAM * teams, stages, 0, _TEAM))
            if cut.min_blocks > 0:
                return cut
        return None

    def cut(self, problem: AttentionProblem, device: Device) -> Cut:
        """Most warps at a time, of these the fewest per block, from 4 on."""
        cuts = self._cuts(problem, device)
        most = max(cut.resident for cut in cuts)
        if most < _TEAM and (of_teams := self._team(problem, device)):
            return of_teams
        return next(
            cut
            for cut in sorted(cuts, key=lambda x: (-x.stages, x.warps < 4, x.warps))
            if cut.resident == most
        )

    def tiles_of_block(self, problem, device, cut: Cut) -> int:
        """Tiles of queries of a block: as many as leave no multiprocessor idle."""
        heads, tiles = self._num_heads(problem), self._num_tiles(problem)
        if tiles <= cut.teams:
            return _TILES_OF_BLOCK[0]
        for of_block in _TILES_OF_BLOCK:
            blocks = heads * -(-tiles // of_block)
            if blocks >= 2 * device.num_sms * cut.min_blocks:
                return of_block
        return cut.teams

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        cut = self.cut(problem, device)
        tiles_of_block = self.tiles_of_block(problem, device, cut)
        dim, dim_v = self._dims(problem)
        switches: dict[str, Any] = {
            "HEAD_DIM": dim,
            "HEAD_DIM_V": dim_v,
            "BLOCK_N": self.keys(problem),
            "UNIT": min(dim, _UNIT),
            "STAGES": cut.stages,
            "TILES_OF_BLOCK": tiles_of_block,
            "MIN_BLOCKS": cut.min_blocks,
        }
        if cut.team > 1:
            switches["TEAM"] = cut.team
        if not attention_config.scale_is_plain(problem.scale):
            switches["SCALE_SCORES"] = 1
        config = attention_config.launch_config(
            problem,
            batch_dims,
            self._num_heads(problem) * -(-self._num_tiles(problem) // tiles_of_block),
            32 * cut.warps,
            "attention/fp64/short_forward.cu",
            f"attention_{self.name}",
            smem=self.smem(problem, cut),
            **switches,
        )
        return (config,)


SHORT_F64 = ShortFloat64Kernel(
    name="short_f64",
    dims=(16, 32, 64, 96, 128, 192, 256),
    most_keys={128: 64, math.inf: 32},
    most_warps={8: 16, 32: 12, 64: 8},
    stages=(3, 2),
)
