"""The row of the gradient table for wide heads on sm_90a, and how it cuts a problem."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cupyflash import _attention_kernels, _attention_vjp_limits
from cupyflash._attention_kernels import Config
from cupyflash._attention_problem import AttentionProblem
from cupyflash._attention_vjp_problem import AttentionVjpProblem
from cupyflash._kernels import CUDA_TYPES, Device, Variant

BLOCK = 64  # queries of a block, keys of a tile
TILE_M = 128  # queries of a tile that makes dq
_STATIC = 768  # bytes of shared memory beside tiles, at most
_THREADS = {"_rows": 256, "_wide_keys": 384, "_wide_queries": 384}


@dataclass(frozen=True)
class HopperWideVjpKernel:
    """Tensor cores fed by the copy engine, for head dimensions above those of `hopper`.

    Two kernels, seven products: one owns keys (dk, dv), one queries (dq).
    """

    name: str
    rungs: tuple[str, ...]
    above: int  # the largest head dimension that is left to the row `hopper`
    dims: tuple[int, ...]  # as they are compiled; zeros fill up
    arch: str = "sm_90a"
    fast: bool = True

    def refusal(self, problem: AttentionVjpProblem, device: Device) -> str | None:
        """Why these kernels cannot take `problem` on `device`, or None."""
        forward = problem.forward
        largest = self.dims[-1]
        reason = _attention_vjp_limits.refusal(problem, device, self.arch, largest)
        if reason is not None:
            return reason
        widest = max(forward.head_dim, forward.head_dim_v)
        if widest <= self.above:
            return f"takes head dimensions above {self.above}, not {widest}"
        if any(_attention_vjp_limits.shared_axes(problem.q_shape, forward)):
            return "makes dq of one entry, and entries of the batch share q"
        smem = max(self._smem(part, forward) for part in _THREADS) + _STATIC
        if smem > device.smem_optin:
            return (
                f"needs {smem} bytes of shared memory, a block may have "
                f"{device.smem_optin}"
            )
        return None

    def dim(self, forward: AttentionProblem) -> int:
        """The head dimensions as they are compiled; zeros fill the rest."""
        widest = max(forward.head_dim, forward.head_dim_v)
        return min(n for n in self.dims if n >= widest)

    def _smem(self, part, forward):
        """The tiles, each of 64 rows, and what stands beside them."""
        dim = self.dim(forward)
        tile = BLOCK * 2 * dim
        if part == "_wide_keys":
            # k and v without the columns that are held, stages of q and dO, statistics
            # of a stage, P
            stages = 3 + (3 if dim <= 192 else 2)
            stats, held = 4 * BLOCK, 2 * 64 * 2 * BLOCK
            weights = 4 * BLOCK * BLOCK
            return (2 + stages) * tile - held + stages * stats + weights + 1024
        if part == "_wide_queries":
            # two of q and dO, two stages of k, one or two of v
            return (8 if dim <= 192 else 7) * tile + 1024
        return 0

    def config(
        self,
        part: str,
        forward: AttentionProblem,
        batch_dims: int,
        num_blocks: int,
    ) -> Config:
        """The launch of ``vjp_hopper<part>.cu``."""
        # Statistics do not depend on columns; a power of two of threads makes a row's.
        dim = self.dims[-1] if part == "_rows" else self.dim(forward)
        more: dict[str, Any] = {"HEAD_DIM": dim, "BLOCK_M": BLOCK}
        if part != "_rows":
            more["BOUNDS"] = _attention_kernels._bounds(forward)
        defines = _attention_kernels._defines(
            forward,
            batch_dims,
            _THREADS[part],
            GRAD_T=CUDA_TYPES[forward.dtype],
            **more,
        )
        variant = Variant(
            source=f"attention/vjp_hopper{part}.cu",
            entry=f"attention_vjp_hopper{part}",
            defines=defines,
            arch=self.arch,
            smem=self._smem(part, forward),
        )
        return Config(variant, num_blocks, _THREADS[part])

    def configs(self, forward: AttentionProblem, batch_dims: int) -> Iterator[Config]:
        """Every launch of a problem but the repairs."""
        yield from (self.config(part, forward, batch_dims, 1) for part in _THREADS)

    def schedule(
        self,
        part: str,
        forward: AttentionProblem,
        device: Device,
        num_kept: int,
        num_summed: int,
    ) -> dict[str, Any]:
        """How the items of a kernel are cut, and units: fields of inputs_t."""
        columns = forward.head_dim + forward.head_dim_v
        if part == "_wide_keys":
            rows, tile = forward.seqlen_k, BLOCK
            entry_bytes = forward.seqlen_q * 2 * columns * num_summed
        else:
            rows, tile = forward.seqlen_q, TILE_M
            entry_bytes = forward.seqlen_k * 2 * columns // forward.group_size
        # Sections are equal, since a small one at the end would not fill the device.
        in_cache = _attention_vjp_limits.in_cache(device, entry_bytes)
        num_sections = -(-num_kept // in_cache)
        num_tiles = -(-rows // tile)
        to_log2, hidden = _attention_vjp_limits.units(forward)
        return {
            "num_items": num_tiles * num_kept,
            "num_tiles": num_tiles,
            "num_blocks": -(-forward.seqlen_q // BLOCK),
            "num_kept": num_kept,
            "num_summed": num_summed,
            "section": -(-num_kept // num_sections),
            "to_log2": to_log2,
            "hidden": hidden,
        }


HOPPER_WIDE_VJP = HopperWideVjpKernel(
    name="hopper_wide",
    rungs=("tiled", "auto"),
    above=128,
    dims=(192, 256),
)
