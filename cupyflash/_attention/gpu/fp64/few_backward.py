"""The kernel spec of float64 gradients of few queries: a block has all of an entry."""

import math
from dataclasses import dataclass

from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu.config import LONG_SUM, if_on, is_plain, num_heads
from cupyflash._attention.gpu.fp64.forward import unsupported_reason
from cupyflash._attention.gpu.fp64.short_backward import SHORT_F64_VJP
from cupyflash._attention.gpu.gradient_limits import refuse_gradients
from cupyflash._attention.gpu.params import OPERAND
from cupyflash._attention.gpu.simt.gemv_backward import GEMV_VJP
from cupyflash._attention.gpu.spec import BackwardSpec
from cupyflash._attention.problem import AttentionProblem
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct

FEW_GRADS = Struct(
    "few_grads_t",
    "attention/fp64/few_backward.cuh",
    ((OPERAND, "dout", "lse", "dlse", "dq", "dk", "dv"),),
)

# Keys of a tile, and those of a row of dS in shared memory.
_KEYS, _PITCH = 16, 18
# The most shared memory other than that of smem(), and what the system reserves.
_STATIC_SMEM, _RESERVED_SMEM = 2048, 1024

# Keys up to which products with vectors are as fast, by queries; and of over 3 queries
# of 33 to 64 columns.
_OF_VECTORS = {2: math.inf, 3: 100, 8: 64}
_OF_VECTORS_OF_64_COLUMNS = 48

# The file of each kernel, below cuda_src/.
_SOURCES = {
    "": "attention/fp64/few_backward.cu",
    "_totals": "attention/fp64/few_backward_totals.cu",
}


def _is_unaligned(forward: AttentionProblem) -> bool:
    """Whether some rows are no whole vectors of two numbers."""
    odd = forward.head_dim % 2 or forward.head_dim_v % 2
    return bool(odd) or forward.no_vectors is not None


@dataclass(frozen=True, kw_only=True)
class FewFloat64VjpKernel(BackwardSpec):
    """float64 tensor cores: a block has all queries of an entry, and goes over keys.

    `blocks` are those of a multiprocessor by queries and head dimension as they are
    compiled, and by the keys up to which there are so many; others are alone. Each has
    up to `most_warps` warps. Blocks share the keys of an entry if
    the device is done sooner that way, in at most `most_waves` waves, where a block
    spends as long as `of_start` tiles of a warp beside its loop.
    """

    blocks: dict[tuple[int, int], dict[float, int]]
    most_queries: int = 16
    narrow: int = 128  # columns; there are no registers for more and over 8 queries
    least_queries: int = 2
    least_keys: int = 17
    least_keys_of_large: int = 256  # of over 8 queries above 64 columns
    yields: bool = True  # to rows that are as fast or faster
    most_warps: int = 8
    of_start: float = 2.0
    most_waves: int = 4

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        queries, keys = forward.seqlen_q, forward.seqlen_k
        if not self.least_queries <= queries <= self.most_queries:
            least, most = self.least_queries, self.most_queries
            return f"takes entries with {least} to {most} queries, not {queries}"
        if not self.least_keys <= keys <= LONG_SUM:
            least = self.least_keys
            return f"takes entries with {least} to {LONG_SUM} keys, not {keys}"
        if reason := unsupported_reason(
            forward, device, self.dims[-1], {}, self.fitting
        ) or refuse_gradients(problem, "dbias", "dsinks", "dscore"):
            return reason
        if forward.has_functions:
            return "takes no score or mask function"
        if forward.keys_of_part is not None:
            return "takes all keys of a head"
        if forward.group_size > 1:
            return f"takes one query head per head of k, not {forward.group_size}"
        if not num_heads(forward):
            return "there are no heads"
        rows, dim = self.rows(forward), self.dim(forward)
        spills = dim > self.narrow or (dim == self.narrow and not is_plain(forward))
        if rows > 8 and spills:
            return f"has too few registers for {queries} queries of {dim} columns"
        least = self.least_keys_of_large
        if rows > 8 and dim > 64 and keys < least:
            return f"takes {least} keys or more for {queries} queries, not {keys}"
        return self._refuse_slower(problem, device) if self.yields else None

    def _refuse_slower(self, problem, device: Device) -> str | None:
        """Why rows that stand below are as fast or faster, or None."""
        forward = problem.forward
        queries, keys = forward.seqlen_q, forward.seqlen_k
        most = next((n for rows, n in _OF_VECTORS.items() if queries <= rows), 0)
        if queries > 3 and self.dim(forward) == 64:
            most = _OF_VECTORS_OF_64_COLUMNS
        few_heads = num_heads(forward) < device.num_sms
        if keys <= most or few_heads:
            if GEMV_VJP.unsupported_reason(problem, device) is None:
                return f"vectors are as fast for {queries} queries of {keys} keys"
        if SHORT_F64_VJP.unsupported_reason(problem, device) is None:
            return f"{keys} keys fit on a multiprocessor"
        return None

    def rows(self, forward: AttentionProblem) -> int:
        """Queries as they are compiled."""
        return 8 if forward.seqlen_q <= 8 else 16

    def num_blocks(self, forward: AttentionProblem) -> int:
        """Blocks of a multiprocessor."""
        by_keys = self.blocks.get((self.rows(forward), self.dim(forward)), {})
        return next((n for most, n in by_keys.items() if forward.seqlen_k <= most), 1)

    def smem(self, forward: AttentionProblem, warps: int) -> int:
        """Bytes for q and dO; a tile of k and v, and dS, of each warp."""
        rows, dim = self.rows(forward), self.dim(forward)
        return 8 * (2 * rows * dim + warps * (2 * _KEYS * dim + rows * _PITCH))

    def fitting(self, forward: AttentionProblem, device: Device) -> tuple[int, ...]:
        """Numbers of warps of a block that fit on `device`, from large to small."""
        room = (device.smem_optin + _RESERVED_SMEM) // self.num_blocks(forward)
        room -= _STATIC_SMEM + _RESERVED_SMEM
        return tuple(
            n for n in range(self.most_warps, 0, -1) if self.smem(forward, n) <= room
        )

    def num_splits(self, forward: AttentionProblem, device: Device) -> int:
        """Blocks that share the keys of an entry."""
        tiles, heads = -(-forward.seqlen_k // _KEYS), num_heads(forward)
        warps = self.fitting(forward, device)[0]
        places = device.num_sms * self.num_blocks(forward)
        most = min(self.most_waves * places // heads, tiles // warps)

        def length(splits: int) -> float:
            """Tiles of all waves, one after the other."""
            waves = -(-heads * splits // places)
            of_block = -(-tiles // splits)
            return waves * (-(-of_block // warps) + self.of_start)

        return min(range(1, max(1, most) + 1), key=length)

    def parts(self, splits: int) -> tuple[str, ...]:
        """The kernels of a call, in order."""
        return ("_totals", "") if splits > 1 else ("",)

    def config(
        self,
        forward: AttentionProblem,
        batch_dims: int,
        device: Device,
        part: str = "",
        splits: int = 1,
    ) -> LaunchConfig:
        """The launch of a part."""
        warps, dim = self.fitting(forward, device)[0], self.dim(forward)
        return attention_config.launch_config(
            forward,
            batch_dims,
            num_heads(forward) * splits,
            32 * warps,
            _SOURCES[part],
            f"attention_vjp_{self.name}{part}",
            smem=self.smem(forward, warps),
            DIM=dim,
            ROWS=self.rows(forward),
            MIN_BLOCKS=self.num_blocks(forward),
            **if_on(KEY_SPLITS=splits > 1, UNALIGNED=_is_unaligned(forward)),
        )

    def configs(self, forward, batch_dims, device, everything):
        splits = self.num_splits(forward, device)
        return tuple(
            self.config(forward, batch_dims, device, part, splits)
            for part in self.parts(splits)
        )


FEW_F64_VJP = FewFloat64VjpKernel(
    name="few_f64",
    dims=(32, 64, 96, 128, 192, 256),
    blocks={(8, 32): {math.inf: 2}, (8, 64): {511: 2}},
)
