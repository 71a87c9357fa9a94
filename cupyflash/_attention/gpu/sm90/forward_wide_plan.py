"""The launches of attention of wide heads on sm_90a."""

from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET
from cupyflash._attention.gpu.plan import pack_params
from cupyflash._attention.gpu.sm90.forward_wide import BLOCK
from cupyflash._attention.gpu.sm90.operands import encoder
from cupyflash._cuda import tensor_map
from cupyflash._cuda.launch_sequence import Steps
from cupyflash._cuda.structs import Struct

MAPS = Struct(
    "maps_t",
    "attention/sm90/forward_wide.cu",
    (("ptx::tensor_map_t", "k", "v"),),
    alignment=64,
)


def hopper_wide_steps(row, problem, operands, device) -> Steps:
    """The hopper_wide kernel, with tensor maps of k and v where they can be mapped."""
    params, batch_dims, fields = pack_params(problem, operands)
    maps: tuple[tensor_map.MappedInputs, ...] = ()
    if row.is_mapped(problem, batch_dims):
        encoders = {
            name: encoder(problem, fields, name, getattr(operands, name), BLOCK)
            for name in "kv"
        }
        maps = (
            tensor_map.MappedInputs(
                encoders,
                lambda maps, pointers: MAPS.pack(
                    {"k": maps["k_map"], "v": maps["v_map"]}
                ),
            ),
        )
    (config,) = row.configs(problem, batch_dims, device)
    arguments = ("q", "k", "v", "out", "lse", *OPTIONS_AND_OFFSET, params)
    return Steps([(config, (*maps, *arguments))])
