"""Plans of attention_vjp for wide heads and options on sm_90a."""

import math
from typing import Any

import cupy

from cupyflash import (
    _attention_gpu,
    _attention_hopper,
    _attention_params,
    _attention_vjp_kernels,
    _attention_vjp_layout,
    _attention_vjp_wide,
    _gpu,
)
from cupyflash._attention_params import params_dtype
from cupyflash._attention_rows import is_plain
from cupyflash._attention_vjp_layout import grads_dtype
from cupyflash._attention_vjp_plans import (
    _FOUND_BYTES,
    _all_summed,
    _gradients,
    _Launches,
    _repair,
)
from cupyflash._attention_vjp_problem import AttentionGrads

_PARTS = (("_wide_keys", ("dk", "dv")), ("_wide_queries", ("dq",)))
_COUNTERS = 128  # where those of the kernels stand, behind found_t; zeros at first


class _Part:
    """A kernel that makes some of the gradients, and its parameters."""

    def __init__(self, name, names, row, forward, layout, device, device_id):
        self.names = names
        # dbias is written beside dq, and does not decide what entries are kept.
        owners = tuple(n for n in names if n != "dbias")
        fields = _attention_vjp_layout.entries_fields(
            _all_summed(layout, owners), [layout.targets[n] for n in names]
        )
        self.grads = _gpu.pack_bytes(
            {**layout.grads, **fields}, grads_dtype(layout.batch_dims)
        )
        self.schedule = row.schedule(
            name, forward, device, fields["num_kept"], fields["num_summed"]
        )
        blocks = min(self.schedule["num_items"], device.num_sms)
        makes_dbias = "dbias" in names
        config = row.config(name, forward, layout.batch_dims, blocks, makes_dbias)
        self.dtype = _attention_vjp_wide.INPUTS[_attention_vjp_wide.has_terms(forward)]
        self.launch = _gpu.Launch(config.variant, config.grid, config.block, device_id)

    def inputs(self, maps):
        """The parameter that depends on where arrays lie."""
        fields = {**self.schedule, "slot": (0, 0), **maps}
        return _gpu.pack_bytes(fields, self.dtype)


class HopperWidePlan:
    """Statistics, dk and dv, dq, and repairs if they are asked for."""

    def __init__(self, row, problem, operands, device, device_id):
        forward = problem.forward
        self.device_id = device_id
        self.offset = _attention_params.launch_offset(forward)
        self.gradients = _gradients(problem)
        layout = _attention_vjp_layout.layout(problem, operands)
        batch_dims = layout.batch_dims
        self.params = _gpu.pack_bytes(layout.params, params_dtype(batch_dims))
        makes_dbias = _makes_dbias(problem, layout)
        of_queries = ("dq", "dbias") if makes_dbias else ("dq",)
        self.parts = [
            _Part(name, names, row, forward, layout, device, device_id)
            for name, names in (
                ("_wide_keys", ("dk", "dv")),
                ("_wide_queries", of_queries),
            )
        ]
        self.encoders = {
            name: _attention_gpu._encoder(
                forward,
                {**layout.params, **layout.grads},
                name,
                x,
                _attention_vjp_wide.BLOCK,
            )
            for name, x in (
                *((name, getattr(operands.forward, name)) for name in "qkv"),
                ("dout", operands.dout),
                *(
                    (name, getattr(operands.forward, name))
                    for name in _attention_vjp_wide.tiles_of_terms(forward)
                ),
            )
        }
        self.inputs: dict[tuple[int, ...], Any] = {}

        # Memory between the kernels, as vjp_hopper.cuh has it.
        num_entries = math.prod(forward.batch) * forward.num_heads
        num_blocks = -(-forward.seqlen_q // _attention_vjp_wide.BLOCK)
        sizes = (
            _FOUND_BYTES,
            4 * num_entries * num_blocks * _attention_vjp_wide.BLOCK * 2,
            4 * num_entries * forward.seqlen_q,
        )
        self.starts = [sum(sizes[:n]) for n in range(len(sizes))]
        self.num_bytes = sum(sizes)
        self.is_plain = is_plain(forward)
        config = row.rows_config(forward, batch_dims)
        self.rows = _gpu.Launch(config.variant, config.grid, config.block, device_id)
        self.repairs = [
            _repair(part, names, forward, layout, device, device_id)
            for part, names in (("queries", ("dq",)), ("keys", ("dk", "dv")))
        ]
        slow = _Launches(
            _attention_vjp_kernels.REPAIRING, forward, layout, device, device_id
        )
        # The portable kernel makes dbias, or repairs it.
        self.bias = None
        if problem.need_dbias:
            self.bias = slow.bias(REPAIRS=1) if makes_dbias else slow.bias()
        self.repairs_dbias = makes_dbias
        # What nobody sees has no tile that writes zeros.
        self.clears_dbias = makes_dbias and (
            _attention_hopper.bounds_of(forward) > 0
            or _attention_hopper.has_lengths(forward)
        )
        self.bias_params = _gpu.pack(layout.params, params_dtype(batch_dims))
        self.sinks = slow.sinks(problem) if problem.need_dsinks else None
        self.rows_shape = problem.rows_shape
        self.launches = (
            self.rows,
            *(part.launch for part in self.parts),
            *(launch for _, launch, _ in self.repairs),
            *(self.bias.launches if self.bias else ()),
            *((self.sinks.launch,) if self.sinks else ()),
        )

    def _new_inputs(self, pointers):
        """Those of both kernels, for arrays at these places."""
        if len(self.inputs) >= _attention_gpu._MAX_INPUTS:
            self.inputs.clear()
        encoders = self.encoders.items()
        maps = {
            f"{name}_map": encode(ptr)
            for (name, encode), ptr in zip(encoders, pointers, strict=True)
        }
        packed = [part.inputs(maps) for part in self.parts]
        self.inputs[pointers] = packed
        return packed

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = {name: cupy.ndarray(*facts) for name, facts in self.gradients.items()}
        q, k, v, out, *options, dout, lse, dlse = (
            0 if x is None else x.data.ptr for x in arrays
        )
        pointers: tuple[int, ...] = (q, k, v, dout)
        if len(self.encoders) > len(pointers):
            # Bias and mask come first among the options.
            pointers += tuple(ptr for ptr in options[:2] if ptr)
        inputs = self.inputs.get(pointers)
        if inputs is None:
            inputs = self._new_inputs(pointers)
        memory = cupy.cuda.alloc(self.num_bytes)
        sink_terms = None
        if self.sinks is not None:
            sink_terms = cupy.ndarray(self.rows_shape, "float32")
        _attention_gpu.keep_if_capturing((memory, sink_terms))
        found, stats, delta = (memory.ptr + start for start in self.starts)
        memory.memset_async(0, _FOUND_BYTES)
        if self.clears_dbias:
            made["dbias"].data.memset_async(0, made["dbias"].nbytes)
        rest = (*options, offset, self.params)
        grads = self.parts[0].grads
        if self.is_plain:
            no_sums_nor_entries = 0, 0, 0, 0, 0
            self.rows.enqueue(
                out, dout, lse, dlse, stats, delta, *no_sums_nor_entries, found,
                self.params, grads,
            )  # fmt: skip
        else:
            terms = 0 if sink_terms is None else sink_terms.data.ptr
            self.rows.enqueue(
                out, dout, lse, dlse, stats, delta, terms, 0, 0, found, *rest, grads
            )
        for n, (part, maps) in enumerate(zip(self.parts, inputs, strict=True)):
            targets = (made[name].data.ptr for name in part.names)
            counter = found + _COUNTERS + 4 * n
            part.launch.enqueue(
                maps, stats, *targets, found, counter, *rest, part.grads
            )
        for names, launch, grads in self.repairs:
            targets = (made[name].data.ptr for name in names)
            launch.enqueue(q, k, v, dout, lse, delta, *targets, found, *rest, grads)
        if self.bias is not None:
            self._make_dbias(arrays, memory, made, offset)
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)

    def _make_dbias(self, arrays, memory, made, offset):
        """dbias by the portable kernel, with a repair only if that is asked for."""
        q, k, v, _, *options, dout, lse, _ = arrays
        options = [_gpu.NULL if x is None else x for x in options]
        delta = cupy.ndarray(self.rows_shape, "float32", memory + self.starts[-1])
        rest = (*options, offset, self.bias_params)
        if self.repairs_dbias:
            found = cupy.ndarray(1, "int32", memory)
            rest = (found, *rest)
        self.bias((q, k, v, dout, lse, delta), made, rest, "float32")


def _makes_dbias(problem, layout):
    """Whether the kernel of queries makes dbias: each score has a bias of its own."""
    able = _attention_vjp_wide.can_make_dbias(problem.forward)
    if not problem.need_dbias or not able:
        return False
    target = layout.targets["dbias"]
    entries = zip(layout.shape, target.entries, strict=True)
    own = all(n == 1 or step for n, step in entries)
    return own and bool(target.row) and target.col == 1
