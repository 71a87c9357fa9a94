"""Gradients made again where those of a faster row are not finite."""

import math
from dataclasses import replace

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu import plan as attention_plan
from cupyflash._attention.gpu.gradient_plan import Launches, addresses, all_summed
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt import forward as simt_forward
from cupyflash._cuda import graphs


class Fallback:
    """The portable kernel that makes gradients again if they are not all finite."""

    def __init__(
        self, names, forward, layout, device, device_id, overlaps=False, **more
    ):
        self.names = names
        of_queries = names == ("dq",)
        part = "queries" if of_queries else "keys"
        # Where the kernel writes, in its order; 0 for what this one leaves alone.
        self.targets = ("dq",) if of_queries else ("dk", "dv")
        row = simt_backward.FALLBACK
        heads = forward.num_heads if of_queries else forward.num_kv_heads
        seqlen = forward.seqlen_q if of_queries else forward.seqlen_k
        tile = row.tile(forward, device, math.prod(forward.batch) * heads, seqlen)
        config = row.config(
            part, tile, forward, layout.batch_dims, forward.dtype, device.num_sms,
            REPAIRS=1, **more,
        )  # fmt: skip
        fields = gradient_layout.entries_fields(
            all_summed(layout, names), [layout.targets[n] for n in names]
        )
        make = Launches(row, forward, layout, device, device_id)
        self.kernel = make.kernel(config, make.grads(**fields), overlaps)

    def __call__(self, inputs, made, found, rest):
        """Launch, by what other kernels have noted at `found`."""
        targets = addresses(
            made[name] if name in self.names else None for name in self.targets
        )
        self.kernel.enqueue(*inputs, *targets, found, *rest)


def repaired_together(layout):
    """Of dk and dv, which a kernel may make again in one walk: those summed alike.

    There are no terms here for what one of them shares and the other does not.
    """
    alone = [all_summed(layout, (name,)).kept for name in ("dk", "dv")]
    return [("dk", "dv")] if alone[0] == alone[1] else [("dk",), ("dv",)]


def repairs(forward, layout, device, device_id, overlaps=False):
    """The kernels that make dq, and dk and dv, again."""
    return [
        Fallback(names, forward, layout, device, device_id, overlaps)
        for names in (("dq",), *repaired_together(layout))
    ]


class RecomputedLse:
    """An lse made anew, of scores rounded as the portable gradient kernels round them.

    Kernels that take it are made by `layout`, which is not that of the call: this lse
    is contiguous, so that batch axes may merge which do not with the lse of the call.
    """

    def __init__(self, problem, operands, device):
        self.layout = gradient_layout.with_new_lse(problem, operands)
        forward = replace(problem.forward, return_lse=True)
        row = next(
            row
            for row in (simt_forward.TILED, simt_forward.ONLINE)
            if row.unsupported_reason(forward, device) is None
        )
        inputs = operands.forward._replace(out=None, given_out=None)
        self._plan = attention_plan.FusedPlan(row, forward, inputs, device)
        size = math.prod(self._plan.out_shape)
        self._out_bytes = size * self._plan.out_dtype.itemsize
        self.launches = self._plan.launches

    def __call__(self, arrays, offset, made):
        """The lse, on the way to which out overwrites a gradient if one has room."""
        q, k, v, _, *options, _, _, _ = arrays
        room = next((x for x in made.values() if x.nbytes >= self._out_bytes), None)
        unused, lse = self._plan((q, k, v, room, *options), offset)
        graphs.keep_if_capturing((unused, lse))
        return lse
