"""The launches of float64 attention on tensor cores."""

from typing import Any

from cupyflash._attention.gpu import mask_bits
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.plan import pack_params
from cupyflash._cuda.launch_sequence import Steps


def tensor_float64_forward_steps(
    row, problem, operands, device, out="out", lse="lse"
) -> Steps:
    """One kernel over q, k and v, and before it one that makes bits of a mask."""
    params, batch_dims, fields = pack_params(problem, operands)
    (config,) = row.configs(problem, batch_dims, device)
    launches: list[Any] = []
    scratch: dict[str, int] = {}
    of_mask = mask_bits.add_bits(launches, scratch, problem, fields)
    rest = (*of_mask, *OPTIONS_AND_OFFSET, params)
    launches.append((config, ("q", "k", "v", out, lse, *rest)))
    return Steps(launches, scratch)
