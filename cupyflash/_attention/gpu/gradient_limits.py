"""Limits of gradient kernels, and the parameter of those for sm_90a."""

import math

from cupyflash._attention.gpu.config import (
    MOST_COUNTED,
    MOST_KEYS,
    OPTIONS,
    num_heads,
    too_many,
)
from cupyflash._attention.gpu.spec import HALVES, refuse_dtype, refuse_other_arch
from cupyflash._attention.problem import AttentionProblem
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda.device import Device
from cupyflash._cuda.structs import Struct

INPUTS = Struct(
    "inputs_t",
    "attention/sm90/backward.cuh",
    (
        ("ptx::tensor_map_t", "q_map", "k_map", "v_map", "dout_map"),
        ("int", "num_work_tiles", "num_tiles", "num_blocks", "section"),
        ("int", "num_kept", "num_summed"),
        ("index_t", "slot[2]"),
        ("float", "to_log2", "hidden"),
        ("int", "num_split", "part_blocks", "num_parts"),
    ),
    alignment=64,
)

# The least queries of a block, and keys of a tile.
_LEAST_BLOCK = 64


def shared_axes(shape: tuple[int, ...], forward: AttentionProblem) -> tuple[bool, ...]:
    """Which batch axes an array lacks."""
    own = shape[: max(0, len(shape) - 3)]
    own = (1,) * (len(forward.batch) - len(own)) + tuple(own)
    return tuple(n == 1 < all_ for n, all_ in zip(own, forward.batch, strict=True))


def refuse_gradients(problem: AttentionVjpProblem, *missing: str) -> str | None:
    """Why gradients without sums over entries, and without `missing`, do not do."""
    for name in missing:
        if getattr(problem, f"need_{name}"):
            return f"does not compute {name}"
    for name in "qkv":
        if any(shared_axes(getattr(problem, f"{name}_shape"), problem.forward)):
            return f"{name} is shared by entries of the batch"
    return None


def num_summed(problem: AttentionVjpProblem) -> int:
    """The number of entries that are summed into one head of dk."""
    forward = problem.forward
    shared = shared_axes(problem.k_shape, forward)
    return forward.group_size * math.prod(
        n for n, own in zip(forward.batch, shared, strict=True) if own
    )


def unsupported_reason(
    problem: AttentionVjpProblem,
    device: Device,
    arch: str,
    largest: int,
    most_summed: float = math.inf,
    takes_options: bool = False,
) -> str | None:
    """Why no row of `arch` supports a problem, with head dimensions up to `largest`.

    `most_summed` is the number of entries that a kernel can sum into one head of dk.
    """
    forward = problem.forward
    if forward.has_functions and not takes_options:
        return "takes no score or mask function"
    reason = refuse_other_arch(arch, device) or refuse_dtype(forward, *HALVES)
    if reason is not None:
        return reason
    options = [name for name in OPTIONS if getattr(forward, name) is not None]
    options += ["softcap"] * (forward.softcap > 0)
    if options and not takes_options:
        return f"has no {', '.join(options)}"
    if not 1e-20 <= abs(forward.scale) <= 1e20:
        return f"takes scales from 1e-20 to 1e20, not {forward.scale}"
    for name in ("head_dim", "head_dim_v"):
        n = getattr(forward, name)
        if not 2 <= n <= largest:  # rows of whole vectors take four times 2 columns
            return f"{name} {n} is not from 2 to {largest}"
    if forward.seqlen_k == 0:
        return "there are no keys"
    if forward.no_tensor_map is not None:
        return forward.no_tensor_map
    shared = shared_axes(problem.k_shape, forward)
    if shared != shared_axes(problem.v_shape, forward):
        return "k and v are shared by different entries of the batch"
    if (summed := num_summed(problem)) > most_summed:
        return f"sums at most {most_summed} heads into one of k, not {summed}"
    # Limits the queries whose terms are summed, as keys are for out.
    terms, most = summed * forward.seqlen_q, MOST_KEYS[forward.dtype]
    if terms > most:
        return f"sums in {forward.dtype} are exact enough up to {most} queries"
    return too_many(counts(problem, device))


def counts(problem: AttentionVjpProblem, device: Device) -> dict[str, tuple[int, int]]:
    """What is counted in 32 bits: how many there are, and how many may be."""
    forward = problem.forward
    heads = num_heads(forward)
    blocks = heads * -(-forward.seqlen_q // _LEAST_BLOCK)
    tiles = heads * -(-forward.seqlen_k // _LEAST_BLOCK)
    # Per multiprocessor, with up to twice its share of tiles.
    steps = 2 * -(-tiles // device.num_sms) * -(-forward.seqlen_q // _LEAST_BLOCK)
    return {
        "queries": (forward.seqlen_q, MOST_COUNTED),
        "keys": (forward.seqlen_k, MOST_COUNTED),
        "blocks of queries": (blocks, MOST_COUNTED),
        "tiles of keys": (tiles, MOST_COUNTED),
        "blocks of queries that a block goes through": (steps, (1 << 32) - 1),
    }


# Most of the L2 cache.
CACHE_SHARE = 4 / 5


def in_cache(device: Device, entry_bytes: int, share: float = CACHE_SHARE) -> int:
    """Entries that fit into a share of the L2 cache together; at least one."""
    return max(1, int(device.l2_bytes * share) // entry_bytes)


def section_in_cache(device: Device, num_kept: int, entry_bytes: int) -> int:
    """Entries per section, so that those of one fit into the L2 cache together."""
    return section(num_kept, in_cache(device, entry_bytes))


def section(num_kept: int, most: int) -> int:
    """Entries per section, at most `most`.

    Sections have equal size, since a small one at the end would not fill the device.
    """
    num_sections = -(-num_kept // most)
    return -(-num_kept // num_sections)


def rows_defines(forward: AttentionProblem) -> dict[str, int]:
    """Defines of the preprocess kernel: whether rows of out end inside a vector."""
    return {"ENDS_INSIDE": 1} if forward.head_dim_v % 8 else {}


def units(forward: AttentionProblem) -> tuple[float, float]:
    """The factor from scores to exponents of 2, and a score whose weight is 0."""
    return forward.scale * math.log2(math.e), (
        -math.inf if forward.scale > 0 else math.inf
    )
