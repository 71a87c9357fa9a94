"""Plans of attention_vjp by the portable row, and of no rows."""

import cupy

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_plan import BasePlan, Launches, addresses
from cupyflash._attention.gpu.simt.repair import RecomputedLse
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._cuda import graphs


class ZeroPlan(BasePlan):
    """Gradients of no rows: zeros."""

    def __call__(self, arrays, offset):
        """The zeros, in the order of AttentionGrads."""
        return AttentionGrads(**self.new_gradients(zeros=self.gradients))


class Plan(BasePlan):
    """All launches of a call: delta, each kind of gradient, and sums of terms."""

    def __init__(self, row, problem, operands, device, device_id):
        super().__init__(problem, device_id)
        forward = problem.forward
        layout = gradient_layout.layout(problem, operands)
        make = Launches(row, forward, layout, device, device_id)
        self.delta = make.rows()
        self.accum = forward.compute_dtype
        self.recomputed_lse = None
        if forward.dtype == forward.compute_dtype and forward.seqlen_k:
            self.recomputed_lse = RecomputedLse(problem, operands, device)
            make = Launches(row, forward, self.recomputed_lse.layout, device, device_id)
        self.parts = [make.queries()]
        if forward.seqlen_k:
            self.parts.append(make.keys())
            if problem.need_dbias:
                self.parts.append(make.bias())
        self.sinks = make.sinks(problem) if problem.need_dsinks else None
        self.launches = (
            *(self.recomputed_lse.launches if self.recomputed_lse else ()),
            self.delta.launch,
            *(launch for part in self.parts for launch in part.launches),
            *((self.sinks.kernel.launch,) if self.sinks else ()),
        )
        self.none_made = {
            name
            for name in self.gradients
            if name != "dsinks" and not any(name in part.names for part in self.parts)
        }

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = self.new_gradients(zeros=self.none_made)
        recomputed_lse = (
            self.recomputed_lse(arrays, offset, made) if self.recomputed_lse else None
        )
        q, k, v, out, *options, dout, lse, dlse = addresses(arrays)
        delta = cupy.ndarray(self.rows_shape, self.accum)
        sink_terms = self.sinks.new_terms() if self.sinks else None
        graphs.keep_if_capturing((delta, sink_terms))
        delta_at, terms_at, own_at = addresses((delta, sink_terms, recomputed_lse))
        self.delta.enqueue(
            out, dout, lse, own_at, dlse, delta_at, terms_at, *options, offset
        )
        for part in self.parts:
            inputs = q, k, v, dout, own_at or lse, delta_at
            part(inputs, made, (*options, offset))
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)
