"""The plan of the float64 gradients on tensor cores."""

import cupy
import numpy as np

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_plan import BasePlan, Launches, addresses
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt.repair import RecomputedLse, repairs
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._cuda import graphs


class TensorFloat64Plan(BasePlan):
    """delta; dq, what brings weights to a sum of 1, and dsinks; dk and dv; dbias.

    A gradient that is not finite may come from what is not seen, as 0 * NaN: then the
    portable kernels make dq, dk and dv again.
    """

    def __init__(self, row, problem, operands, device, device_id):
        super().__init__(problem, device_id)
        forward = problem.forward
        layout = gradient_layout.layout(problem, operands)
        make = Launches(row, forward, layout, device, device_id)
        self.delta = make.rows()
        self.queries, self.keys, self.sinks = make.queries(), None, None
        self.repairs = []
        if forward.seqlen_k:
            self.keys = make.keys()
            self.repairs = repairs(forward, layout, device, device_id)
        if problem.need_dsinks:
            self.sinks = make.sinks(problem)
        self.recomputed_lse = self.bias = None
        if problem.need_dbias and forward.seqlen_k:
            # By the portable kernel, and so with an lse of its roundings.
            self.recomputed_lse = RecomputedLse(problem, operands, device)
            portable, own = simt_backward.FALLBACK, self.recomputed_lse.layout
            self.bias = Launches(portable, forward, own, device, device_id).bias()
        parts = [part for part in (self.queries, self.keys, self.bias) if part]
        self.launches = (
            *(self.recomputed_lse.launches if self.recomputed_lse else ()),
            self.delta.launch,
            *(launch for part in parts for launch in part.launches),
            *(repair.kernel.launch for repair in self.repairs),
            *((self.sinks.kernel.launch,) if self.sinks else ()),
        )
        made = {name for part in parts for name in part.names}
        self.none_made = {n for n in self.gradients if n != "dsinks" and n not in made}

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = self.new_gradients(zeros=self.none_made)
        recomputed_lse = (
            self.recomputed_lse(arrays, offset, made) if self.recomputed_lse else None
        )
        q, k, v, out, *options, dout, lse, dlse = addresses(arrays)
        delta = cupy.ndarray(self.rows_shape, "float64")
        factor = cupy.ndarray(self.rows_shape, "float64")
        found = cupy.zeros(1, np.int32)
        sink_terms = self.sinks.new_terms() if self.sinks else None
        memory = delta, factor, found, sink_terms
        graphs.keep_if_capturing(memory)
        delta_at, factor_at, found_at, terms_at = addresses(memory)
        (own_at,) = addresses((recomputed_lse,))
        rest = (*options, offset)
        self.delta.enqueue(out, dout, lse, own_at, dlse, delta_at, 0, *rest)
        inputs = (q, k, v, dout, lse, delta_at)
        of_rows, of_keys = (*inputs, factor_at, terms_at), (*inputs, factor_at)
        self.queries(of_rows, made, (found_at, *rest))
        if self.keys is not None:
            self.keys(of_keys, made, (found_at, *rest))
        for repair in self.repairs:
            repair(inputs, made, found_at, rest)
        if self.bias is not None:
            self.bias((q, k, v, dout, own_at, delta_at), made, rest)
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)
