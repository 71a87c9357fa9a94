"""The plan of attention of wide heads on sm_90a."""

import numpy as np

from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu.plan import FusedPlan, address
from cupyflash._attention.gpu.sm90.forward_wide import BLOCK
from cupyflash._attention.gpu.sm90.operands import encoder
from cupyflash._cuda import structs, tensor_map

# maps_t of cuda_src/attention/sm90/forward_wide.cu.
_MAPS = np.dtype([("k_map", tensor_map.MAP), ("v_map", tensor_map.MAP)])


class HopperWidePlan(FusedPlan):
    """The hopper_wide kernel, with tensor maps of k and v where they can be mapped."""

    def __init__(self, row, problem, operands, device):
        super().__init__(row, problem, operands, device)
        if problem.keys_of_part is not None:  # not rounded to 16 bits
            self.out_dtype = np.dtype(problem.compute_dtype)
        fields = attention_params.params_fields(problem, operands)
        self.maps = None
        if row.is_mapped(problem, len(fields["batch_shape"])):
            self.maps = tensor_map.MappedInputs(
                {
                    name: encoder(problem, fields, name, getattr(operands, name), BLOCK)
                    for name in "kv"
                },
                lambda maps, pointers: structs.pack_bytes(maps, _MAPS),
            )

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        q, k, v, out = arrays[:4]
        if out is None:
            out = self.new_out()
        lse = self.new_lse()
        options = self.no_options or [address(x) for x in arrays[4:]]
        maps = ()
        if self.maps is not None:
            pointers = k.data.ptr, v.data.ptr
            maps = (self.maps.get(pointers) or self.maps.make(pointers),)
        self.launch.enqueue(
            *maps,
            q.data.ptr,
            k.data.ptr,
            v.data.ptr,
            out.data.ptr,
            address(lse),
            *options,
            offset,
            self.params,
        )
        return out, lse
