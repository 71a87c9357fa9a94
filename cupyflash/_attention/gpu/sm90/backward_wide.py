"""The kernel spec of gradients for wide heads and options on sm_90a."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._attention.gpu import gradient_limits
from cupyflash._attention.gpu.config import is_plain, launch_config, num_heads
from cupyflash._attention.gpu.sm80.backward import MMA_VJP, MmaVjpTile
from cupyflash._attention.gpu.sm90 import forward as sm90_forward
from cupyflash._attention.gpu.spec import BackwardSpec, refuse_smem
from cupyflash._attention.gpu.tile_lists import TileLists
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import CUDA_TYPES, ITEMSIZE
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.structs import Struct
from cupyflash._cuda.tensor_map import MAX_BATCH_AXES

BLOCK = 64  # queries of a block, keys of a tile
TILE_M = 128  # queries of a tile of the kernel for dq
# The most shared memory of a block, and the most of it other than tiles, without
# options and with them.
_SMEM, _STATIC = 232448, {False: 768, True: 1792}
# Stages by kernel, from best to least: the first that fit are used. Those of q, dO and
# terms; those of v and terms.
_STAGES = {
    "_wide_keys": ((3, 3, 2), (3, 2, 2), (2, 2, 2), (2, 2, 1)),
    "_wide_queries": ((2, 2), (1, 2), (2, 1), (1, 1)),
}
_STAGE_NAMES = {
    "_wide_keys": ("STAGES_Q", "STAGES_DOUT", "STAGES_TERMS"),
    "_wide_queries": ("STAGES_V", "STAGES_TERMS"),
}
_THREADS = {"_rows": 256, "_wide_keys": 384, "_wide_queries": 384}


INPUTS = {
    False: gradient_limits.INPUTS,
    True: Struct(
        "with_terms_t",
        "attention/sm90/backward_score_mod.cuh",
        (
            ("ptx::tensor_map_t", "bias_map", "mask_map"),
            (sm90_forward.CAP, "cap"),
            ("float", "inverse_cap"),
        ),
        alignment=64,
        base=gradient_limits.INPUTS,
    ),
}


def has_terms(forward: AttentionProblem) -> bool:
    """kHasTerms of the kernels."""
    arrays = (forward.bias, forward.mask, forward.alibi_slopes)
    return forward.softcap > 0 or any(x is not None for x in arrays)


def tiles_of_terms(forward: AttentionProblem) -> tuple[str, ...]:
    """Which of bias and mask are loaded by TMA, a tile at a time."""
    if forward.terms == "keys":
        return ()
    return tuple(name for name in ("bias", "mask") if getattr(forward, name))


def can_make_dbias(forward: AttentionProblem) -> bool:
    """Whether the kernel of queries can write dbias, if each score has its own bias."""
    has_derivative = forward.softcap or forward.score is not None
    return "bias" in tiles_of_terms(forward) and not has_derivative


def _bytes_of_terms(forward):
    """Bytes of the bias and mask of 64 queries and 64 keys."""
    names = tiles_of_terms(forward)
    sizes = (1 if name == "mask" else ITEMSIZE[forward.bias] for name in names)
    return BLOCK * BLOCK * sum(sizes)


# The file of each kernel, below cuda_src/.
_SOURCES = {
    "_wide_keys": "attention/sm90/backward_wide_dkdv.cu",
    "_wide_queries": "attention/sm90/backward_wide_dq.cu",
    "_rows": "attention/sm90/backward_preprocess.cu",
}


@dataclass(frozen=True, kw_only=True)
class HopperWideVjpKernel(BackwardSpec):
    """wgmma and TMA, for what the row `hopper` does not support.

    These are larger head dimensions, and options. Two kernels with seven products: one
    owns keys (dk, dv), the other queries (dq).
    """

    above: int  # the largest head dimension left to the row `hopper`
    softcap_up_to: int  # above this head dimension a softcap spills
    # Up to this one `mma` is as fast with lengths, offsets and sinks; with score
    # options it has at most half the speed.
    terms_alone_up_to: int
    arch: str = "sm_90a"

    def unsupported_reason(self, problem, device) -> str | None:
        forward = problem.forward
        largest = self.dims[-1]
        reason = gradient_limits.unsupported_reason(
            problem, device, self.arch, largest, takes_options=True
        )
        if reason is not None:
            return reason
        widest = max(forward.head_dim, forward.head_dim_v)
        if is_plain(forward) and widest <= self.above:
            return f"takes head dimensions above {self.above}, not {widest}"
        if any(gradient_limits.shared_axes(problem.q_shape, forward)):
            return "cannot sum the dq of batch entries that share q"
        if reason := self._unsupported_options(problem):
            return reason
        smem = max(self._smem(part, forward) for part in _THREADS)
        return refuse_smem(smem + _STATIC[not is_plain(forward)], device)

    def _unsupported_options(self, problem):
        forward = problem.forward
        if forward.softcap and self.dim(forward) > self.softcap_up_to:
            return f"has no softcap for head dimensions above {self.softcap_up_to}"
        if forward.softcap and forward.score is not None and self.dim(forward) > 64:
            return "has too few registers for a softcap and a score function"
        widest = max(forward.head_dim, forward.head_dim_v)
        changes_scores = has_terms(forward) or forward.has_functions
        if widest <= self.terms_alone_up_to and not changes_scores:
            return (
                "takes lengths, offsets and sinks without other options for head "
                f"dimensions above {self.terms_alone_up_to}, not {widest}"
            )
        if tiles := tiles_of_terms(forward):
            if forward.terms != "tiles":
                return f"has no {', '.join(tiles)} that TMA cannot read"
            if forward.bias == "float64":
                return "does not support a float64 bias for each score"
        if sm90_forward.has_lengths(forward) and any(
            gradient_limits.shared_axes(problem.k_shape, forward)
        ):
            return "batch entries that share k see different keys"
        return None

    def _stages(self, part, forward):
        """The first stages that fit; the last ones if none do."""
        most = _SMEM - _STATIC[not is_plain(forward)]
        ladder = _STAGES[part]
        fit = (n for n in ladder if self._smem_of(part, forward, n) <= most)
        return next(fit, ladder[-1])

    def _smem(self, part, forward):
        if part == "_rows":
            return 0
        return self._smem_of(part, forward, self._stages(part, forward))

    def _smem_of(self, part, forward, stages):
        """Bytes of the tiles, each of 64 rows, and of what is next to them."""
        tile = BLOCK * 2 * self.dim(forward)
        *stages, of_terms = stages
        terms = of_terms * _bytes_of_terms(forward)
        if part == "_wide_keys":
            # k and v without the columns in registers, stages of q and dO, statistics
            # of a stage, P
            stats, held = 4 * BLOCK, 2 * 64 * 2 * BLOCK
            weights = 4 * BLOCK * BLOCK
            num = sum(stages)
            q_tile = max(tile, held)  # k and v arrive through a stage of q
            tiles = 2 * tile - held + stages[0] * q_tile + stages[1] * tile
            return tiles + num * stats + weights + terms + 1024
        # q and dO of two warpgroups, two stages of k; terms of two blocks of queries
        return (6 + stages[0]) * tile + 2 * terms + 1024

    def config(
        self, part, forward, batch_dims, num_blocks, makes_dbias=False
    ) -> LaunchConfig:
        """The launch of a part."""
        # Statistics do not depend on columns; a power of two of threads computes those
        # of a row.
        dim = self.dims[-1] if part == "_rows" else self.dim(forward)
        more: dict[str, Any] = {"HEAD_DIM": dim, "BLOCK_M": BLOCK}
        if part == "_rows":
            more |= gradient_limits.rows_defines(forward)
        else:
            # Only the device knows what lengths hide.
            bounds = sm90_forward.bounds_of(forward)
            lengths = sm90_forward.has_lengths(forward)
            varies = lengths or forward.mask_function is not None
            more["BOUNDS"] = max(bounds, int(varies))
            stages = self._stages(part, forward)
            more |= zip(_STAGE_NAMES[part], stages, strict=True)
            if not tiles_of_terms(forward):
                del more["STAGES_TERMS"]
                if forward.bias or forward.mask:
                    more["TERMS_OF_KEYS"] = 1
            if makes_dbias and forward.bias:
                more["DBIAS_T"] = CUDA_TYPES[forward.bias]
        return launch_config(
            forward,
            batch_dims,
            num_blocks,
            _THREADS[part],
            _SOURCES[part],
            f"attention_vjp_hopper{part}",
            arch=self.arch,
            smem=self._smem(part, forward),
            GRAD_T=CUDA_TYPES[forward.dtype],
            **more,
        )

    def tile_lists(self, part: str) -> TileLists:
        """Lists of the tiles that a mask function shows to those of a kernel."""
        if part == "_wide_keys":
            return TileLists(BLOCK, 1, BLOCK, transposed=True, name="key_tile_lists")
        return TileLists(BLOCK, TILE_M // BLOCK, BLOCK, name="query_tile_lists")

    def rows_config(self, forward: AttentionProblem, batch_dims: int) -> LaunchConfig:
        """The launch that computes statistics; with options that of the row `mma`."""
        if is_plain(forward):
            # A block has an eighth of the queries of a block of the main kernel.
            blocks = -(-forward.seqlen_q // BLOCK) * 8
            blocks *= num_heads(forward)
            return self.config("_rows", forward, batch_dims, blocks)
        tile = MmaVjpTile(BLOCK, BLOCK, 256)
        blocks = MMA_VJP.rows_blocks(forward, tile)
        return MMA_VJP.config("_rows", tile, forward, batch_dims, forward.dtype, blocks)

    def configs(self, forward, batch_dims, device, everything):
        if batch_dims > MAX_BATCH_AXES:
            return
        yield self.rows_config(forward, batch_dims)
        for part in _STAGES:
            yield self.config(part, forward, batch_dims, 1)
            if forward.mask_function is not None:
                yield self.tile_lists(part).config(forward, batch_dims)
        if can_make_dbias(forward):
            yield self.config("_wide_queries", forward, batch_dims, 1, makes_dbias=True)

    def schedule(self, part, forward, device, num_kept, num_summed) -> dict[str, Any]:
        """How the work tiles of a kernel are divided, and units: fields of inputs_t."""
        columns = forward.head_dim + forward.head_dim_v
        if part == "_wide_keys":
            rows, tile = forward.seqlen_k, BLOCK
            entry_bytes = forward.seqlen_q * 2 * columns * num_summed
        else:
            rows, tile = forward.seqlen_q, TILE_M
            entry_bytes = forward.seqlen_k * 2 * columns // forward.group_size
        num_tiles = -(-rows // tile)
        to_log2, hidden = gradient_limits.units(forward)
        return {
            "num_work_tiles": num_tiles * num_kept,
            "num_tiles": num_tiles,
            "num_blocks": -(-forward.seqlen_q // BLOCK),
            "num_kept": num_kept,
            "num_summed": num_summed,
            "section": gradient_limits.section_in_cache(device, num_kept, entry_bytes),
            "to_log2": to_log2,
            "hidden": hidden,
            **self._cap(forward),
        }

    def _cap(self, forward):
        if not forward.softcap:
            return {}
        cap = sm90_forward.cap_of(forward, in_log2=True)
        return {"cap": cap, "inverse_cap": 1 / np.float32(cap["softcap"])}


HOPPER_WIDE_VJP = HopperWideVjpKernel(
    name="hopper_wide",
    above=128,
    dims=(64, 128, 192, 256),
    softcap_up_to=192,
    terms_alone_up_to=64,
)
