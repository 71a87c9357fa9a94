"""The plan of attention on sm_90a."""

import cupy

from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu.plan import FusedPlan, address
from cupyflash._attention.gpu.sm90.forward import HOPPER_INPUTS
from cupyflash._attention.gpu.sm90.operands import encoder, q_encoder
from cupyflash._cuda import graphs, structs
from cupyflash._cuda.tensor_map import MappedInputs


class HopperPlan(FusedPlan):
    """The Hopper kernel: tensor maps in place of pointers, tiles from a counter."""

    def __init__(self, row, problem, operands, device):
        super().__init__(row, problem, operands, device)
        fields = attention_params.params_fields(problem, operands)
        tile = row.tile(problem)
        box_n = tile.box_n or tile.block_n
        encoders = {
            "q": q_encoder(problem, fields, operands.q, row.pack(problem)),
            "k": encoder(problem, fields, "k", operands.k, box_n),
            "v": encoder(problem, fields, "v", operands.v, box_n),
        }
        self.inputs = MappedInputs(encoders, self._inputs)
        self.schedule = row.schedule(problem, device)
        self.num_splits = self.schedule["num_splits"]
        self.merges = row.merges(problem, device)
        # How many numbers the kernel counts in, if it does.
        self.counted = 2 if row.is_dynamic(problem) else 0
        if self.merges:
            self.counted = 2 + device.num_sms // 2
        self.starts, self.num_bytes = row.memory_of_parts(problem, device)

    def _inputs(self, maps, pointers):
        """The kernel's parameter that depends on where q, k and v lie."""
        fields = {**self.schedule, **dict(zip("qkv", pointers, strict=True)), **maps}
        return structs.pack_bytes(fields, HOPPER_INPUTS)

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        q, k, v, out = arrays[:4]
        pointers = q.data.ptr, k.data.ptr, v.data.ptr
        inputs = self.inputs.get(pointers)
        if inputs is None:
            inputs = self.inputs.make(pointers)
        if out is None:
            out = self.new_out()
        lse = self.new_lse()
        options = self.no_options or [address(x) for x in arrays[4:]]
        out_at, lse_at = out.data.ptr, address(lse)
        counter = 0
        if self.counted:
            counter = graphs.counters(self.device_id, self.counted).of_current_stream()
        if self.num_splits == 1:
            self.launch.enqueue(
                inputs, out_at, lse_at, counter, *options, offset, self.params
            )
            return out, lse
        memory = cupy.cuda.alloc(self.num_bytes)
        lses, parts = (memory.ptr + start for start in self.starts)
        graphs.keep_if_capturing(memory)
        merged = (out_at, lse_at) if self.merges else ()
        self.launch.enqueue(
            inputs, parts, lses, counter, *merged, *options, offset, self.params
        )
        if not self.merges:
            self.launches[1].enqueue(
                parts, lses, out_at, lse_at, self.num_splits, self.params
            )
        return out, lse
