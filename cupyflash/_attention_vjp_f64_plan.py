"""The plan of the float64 gradients on tensor cores."""

import math

import cupy
import numpy as np

from cupyflash import (
    _attention_gpu,
    _attention_params,
    _attention_vjp_kernels,
    _attention_vjp_layout,
    _gpu,
)
from cupyflash._attention_params import params_dtype
from cupyflash._attention_vjp_plans import (
    _NULL,
    _gradients,
    _Launches,
    _repair,
    own_lse_plan,
)
from cupyflash._attention_vjp_problem import AttentionGrads


class TensorFloat64Plan:
    """delta; dq, what brings weights to a sum of 1, and dsinks; dk and dv; dbias.

    A gradient that is not finite may come from what is not seen, as 0 * NaN: then the
    portable kernels make dq, dk and dv again.
    """

    def __init__(self, row, problem, operands, device, device_id):
        forward = problem.forward
        self.device_id = device_id
        self.offset = _attention_params.launch_offset(forward)
        self.gradients = _gradients(problem)
        self.rows_shape = problem.rows_shape
        self.accum = np.dtype(forward.compute_dtype)
        layout = _attention_vjp_layout.layout(problem, operands)
        self.params = _gpu.pack(layout.params, params_dtype(layout.batch_dims))
        make = _Launches(row, forward, layout, device, device_id)
        self.delta, self.delta_grads = make.rows()
        self.queries, self.keys, self.sinks = make.queries(), None, None
        self.repairs = []
        if forward.seqlen_k:
            self.keys = make.keys()
            for part, names in (("queries", ("dq",)), ("keys", ("dk", "dv"))):
                *repair, grads = _repair(
                    part, names, forward, layout, device, device_id
                )
                self.repairs.append((*repair, _by_value(grads)))
        if problem.need_dsinks:
            self.sinks = make.sinks(problem)
        self.own_lse = self.bias = None
        if problem.need_dbias and forward.seqlen_k:
            # By the portable kernel, and so with an lse of its roundings.
            self.own_lse = own_lse_plan(problem, operands, device)
            self.own_bytes = math.prod(self.own_lse.out_shape) * self.accum.itemsize
            lse = cupy.ndarray(self.rows_shape, self.accum)
            own = _attention_vjp_layout.layout(problem, operands._replace(lse=lse))
            self.bias_params = _gpu.pack(own.params, params_dtype(own.batch_dims))
            portable = _attention_vjp_kernels.REPAIRING
            self.bias = _Launches(portable, forward, own, device, device_id).bias()
        parts = (part for part in (self.queries, self.keys, self.bias) if part)
        self.launches = (
            *(self.own_lse.launches if self.own_lse else ()),
            self.delta,
            *(launch for part in parts for launch in part.launches),
            *(launch for _, launch, _ in self.repairs),
            *((self.sinks.launch,) if self.sinks else ()),
        )
        made = {name for part in (self.queries, self.keys, self.bias) if part
                for name in part.names}  # fmt: skip
        self.none_made = {n for n in self.gradients if n != "dsinks" and n not in made}

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = {
            name: (cupy.zeros if name in self.none_made else cupy.ndarray)(*facts)
            for name, facts in self.gradients.items()
        }
        q, k, v, out, *options, dout, lse, dlse = arrays
        own_lse = None
        if self.own_lse is not None:
            # Its out goes where a gradient will be, if there is room.
            room = next((x for x in made.values() if x.nbytes >= self.own_bytes), None)
            unused, own_lse = self.own_lse((q, k, v, room, *options), offset)
            _attention_gpu.keep_if_capturing((unused, own_lse))
        options = [_NULL if x is None else x for x in options]
        delta = cupy.ndarray(self.rows_shape, self.accum)
        factor = cupy.ndarray(self.rows_shape, self.accum)
        found = cupy.zeros(1, np.int32)
        sink_terms = None
        if self.sinks is not None:
            sink_terms = cupy.ndarray(self.rows_shape, self.accum)
        _attention_gpu.keep_if_capturing((delta, factor, found, sink_terms))
        self.delta(
            out, dout, lse, _NULL if own_lse is None else own_lse,
            _NULL if dlse is None else dlse, delta, _NULL, *options, offset,
            self.params, self.delta_grads,
        )  # fmt: skip
        inputs, rest = (q, k, v, dout, lse, delta), (*options, offset, self.params)
        terms = _NULL if sink_terms is None else sink_terms
        self.queries((*inputs, factor, terms), made, (found, *rest), self.accum)
        if self.keys is not None:
            self.keys((*inputs, factor), made, (found, *rest), self.accum)
        for names, launch, grads in self.repairs:
            launch(*inputs, *(made[name] for name in names), found, *rest, grads)
        if self.bias is not None:
            inputs, rest = (*inputs[:4], own_lse, delta), (*options, offset)
            self.bias(inputs, made, (*rest, self.bias_params), self.accum)
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)


def _by_value(struct: bytes):
    """A struct as an argument of a call."""
    return np.frombuffer(struct, f"V{len(struct)}")
