"""Plans of attention by mma.sync."""

import cupy

from cupyflash._attention.gpu.plan import FusedPlan, address
from cupyflash._cuda import graphs


class MmaPlan(FusedPlan):
    """The mma kernel; of float32, keys and values that another kernel has split."""

    def __init__(self, row, problem, operands, device):
        super().__init__(row, problem, operands, device)
        is_prepared = len(self.launches) > 1
        self.images_bytes = row.images(problem, device) if is_prepared else 0

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        q, k, v, out = arrays[:4]
        if out is None:
            out = self.new_out()
        lse = self.new_lse()
        options = self.no_options or [address(x) for x in arrays[4:]]
        images = 0
        if self.images_bytes:
            memory = cupy.cuda.alloc(self.images_bytes)
            images = memory.ptr
            graphs.keep_if_capturing(memory)
            self.launches[1].enqueue(
                images, k.data.ptr, v.data.ptr, *options, offset, self.params
            )
        self.launch.enqueue(
            images,
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
