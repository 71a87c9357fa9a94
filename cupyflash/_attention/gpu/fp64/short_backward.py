"""The kernel spec of float64 gradients of few keys: all of an entry's are on chip."""

import math
from dataclasses import dataclass, replace

from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu.fp64.forward import WARP_ROWS, unsupported_reason
from cupyflash._attention.gpu.gradient_limits import shared_axes
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct

SHORT_F64 = Struct(
    "short_f64_t", "attention/fp64/short_gradients.cuh", ((OPERAND, "dq"),)
)

# The most shared memory other than that of Team.smem, and what the system reserves.
_STATIC_SMEM, _RESERVED_SMEM = 3072, 1024
# Rows of queries are counted in 32 bits.
_MOST_COUNTED = (1 << 29) - 1
# Blocks share queries of an entry from so many on.
_LONG_LOOP = 512
# What a block does beside its loop, in tiles of all its teams; the most that share one.
_OF_START, _MOST_SPLITS = 1.0, 64


@dataclass(frozen=True)
class Team:
    """Warps of a block, those that share a tile of queries, and blocks at a time."""

    warps: int
    team: int
    min_blocks: int = 1  # blocks per multiprocessor; limits the registers of a thread
    source: str = ""  # what follows the name of the kernel and of its file

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return self.team * WARP_ROWS

    @property
    def teams(self) -> int:
        return self.warps // self.team

    def smem(self, keys: int, dim: int) -> int:
        """Bytes for k and v; q, dO, P and dS of each warp."""
        of_warp = 2 * WARP_ROWS * (dim + keys)
        return 8 * (2 * keys * dim + self.warps * of_warp)


@dataclass(frozen=True)
class WideTeam(Team):
    """Warps that share a tile of as few queries as a warp has, and divide columns."""

    source: str = "_wide"

    @property
    def block_m(self) -> int:
        return WARP_ROWS

    def smem(self, keys: int, dim: int) -> int:
        """Bytes for k and v; q, dO, halves of S and dP, P and dS of each team."""
        of_team = 2 * WARP_ROWS * dim + 6 * WARP_ROWS * keys
        return 8 * (2 * keys * dim + self.teams * of_team)


@dataclass(frozen=True, kw_only=True)
class ShortFloat64VjpKernel(BackwardSpec):
    """float64 tensor cores: a block has all keys of an entry, and goes over queries.

    `teams` maps keys and head dimensions, as they are compiled, to what fits from large
    to small; `of_few` to the most queries for which other warps are faster, and these.
    """

    teams: dict[tuple[int, int], tuple[Team, ...]]
    of_few: dict[tuple[int, int], tuple[int, Team]]

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        most = max(keys for keys, _ in self.teams)
        if forward.dtype == "float64" and not 1 <= forward.seqlen_k <= most:
            return f"takes entries with 1 to {most} keys, not {forward.seqlen_k}"
        counts = self.counts(problem, device)
        if reason := unsupported_reason(
            forward, device, self.dims[-1], counts, self.fitting
        ):
            return reason
        if forward.keys_of_part is not None:
            return "holds all keys of a head at once"
        if problem.need_dbias:
            return "does not compute dbias"
        if any(shared_axes(problem.q_shape, forward)):
            return "q is shared by entries of the batch"
        queries, longest = self.num_queries(problem), attention_config.LONG_SUM
        if queries > longest:
            return f"sums up to {longest} queries of a head of k, not {queries}"
        return None

    def counts(self, problem, device) -> dict[str, tuple[int, int]]:
        rows = attention_config.num_rows(problem.forward)
        return {"queries": (rows, _MOST_COUNTED)}

    def num_queries(self, problem) -> int:
        """Queries whose terms a head of dk sums, at least."""
        return problem.forward.group_size * problem.forward.seqlen_q

    def keys(self, forward: AttentionProblem) -> int:
        """Keys as they are compiled."""
        return next(n for n in (16, 32, 64) if forward.seqlen_k <= n)

    def fitting(self, forward: AttentionProblem, device: Device) -> tuple[Team, ...]:
        """What fits on `device`."""
        keys, dim = self.keys(forward), self.dim(forward)
        return tuple(
            team
            for team in self.teams.get((keys, dim), ())
            if team.smem(keys, dim) + _STATIC_SMEM <= device.smem_optin
        )

    def team(self, forward: AttentionProblem, device: Device, summed: int) -> Team:
        """The warps of a block: no more than the tiles of its `summed` entries keep."""
        team = self.fitting(forward, device)[0]
        size = self.keys(forward), self.dim(forward)
        most, other = self.of_few.get(size, (0, team))
        if summed * forward.seqlen_q <= most:
            team = other
        units = summed * -(-forward.seqlen_q // team.block_m)
        while team.teams % 2 == 0 and team.teams // 2 >= units:
            half, blocks = team.warps // 2, 2 * team.min_blocks
            team = replace(team, warps=half, min_blocks=blocks)
        return team

    def splits(
        self,
        forward: AttentionProblem,
        device: Device,
        team: Team,
        entries: int,
        summed: int,
    ) -> int:
        """How many blocks share the queries of one of `entries` of k and v."""
        if summed * forward.seqlen_q < _LONG_LOOP:
            return 1
        smem = team.smem(self.keys(forward), self.dim(forward))
        smem += _STATIC_SMEM + _RESERVED_SMEM
        resident = max(1, (device.smem_optin + _RESERVED_SMEM) // smem)
        room = device.num_sms * min(resident, team.min_blocks)
        units = summed * -(-forward.seqlen_q // team.block_m)

        def time(splits):
            waves = -(-entries * splits // room)
            return waves * (math.ceil(units / splits / team.teams) + _OF_START), splits

        most = min(_MOST_SPLITS, max(1, units // team.teams))
        return min(range(1, most + 1), key=time)

    def config(
        self, part, team, forward, batch_dims, grad, num_blocks, splits=1
    ) -> LaunchConfig:
        """The launch; `part` is its only one."""
        keys, dim = self.keys(forward), self.dim(forward)
        return attention_config.launch_config(
            forward,
            batch_dims,
            num_blocks,
            32 * team.warps,
            f"attention/fp64/short_backward{team.source}.cu",
            f"attention_vjp_{self.name}{team.source}",
            smem=team.smem(keys, dim),
            DIM=dim,
            BLOCK_N=keys,
            TEAM=team.team,
            MIN_BLOCKS=team.min_blocks,
            GRAD_T=CUDA_TYPES[grad],
            **({"LOOP_SPLITS": 1} if splits > 1 else {}),
        )

    def configs(self, forward, batch_dims, device, everything):
        team = self.team(forward, device, forward.group_size)
        is_long = forward.group_size * forward.seqlen_q >= _LONG_LOOP
        for splits in (1, 2) if is_long else (1,):
            yield self.config("all", team, forward, batch_dims, "float64", 1, splits)


SHORT_F64_VJP = ShortFloat64VjpKernel(
    name="short_f64",
    dims=(32, 64, 96, 128, 192, 256),
    teams={
        (16, 32): (Team(4, 1, 3),),
        (32, 32): (Team(8, 1),),
        (64, 32): (Team(8, 4), Team(4, 4)),
        (16, 64): (Team(4, 1, 2), Team(4, 1)),
        (32, 64): (Team(8, 2), Team(4, 2)),
        (16, 96): (Team(6, 2), Team(4, 2)),
        (32, 96): (Team(4, 4),),
        (16, 128): (Team(4, 2), Team(2, 2)),
        (32, 128): (Team(4, 4),),
        (16, 192): (WideTeam(8, 4), WideTeam(4, 4)),
        (32, 192): (WideTeam(8, 8),),
        (16, 256): (WideTeam(8, 4), WideTeam(4, 4)),
        (32, 256): (WideTeam(8, 8),),
    },
    # Tiles of 64 queries would be padding, mostly.
    of_few={(32, 128): (48, WideTeam(8, 8))},
)
