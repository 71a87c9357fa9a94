"""Plans of attention_vjp for wide heads and options on sm_90a."""

import math

import cupy

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import is_plain
from cupyflash._attention.gpu.gradient_layout import grads_dtype
from cupyflash._attention.gpu.gradient_plan import (
    FOUND_BYTES,
    BasePlan,
    Launches,
    addresses,
    all_summed,
)
from cupyflash._attention.gpu.params import params_dtype, sections
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt.repair import repairs
from cupyflash._attention.gpu.sm80.backward import MMA_VJP
from cupyflash._attention.gpu.sm80.backward_plan import MmaLaunches
from cupyflash._attention.gpu.sm90 import backward_wide
from cupyflash._attention.gpu.sm90 import forward as sm90_forward
from cupyflash._attention.gpu.sm90.operands import encoder
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._cuda import graphs, launch, structs
from cupyflash._cuda.tensor_map import MappedInputs

_PARTS = (("_wide_keys", ("dk", "dv")), ("_wide_queries", ("dq",)))
_COUNTERS = 128  # where those of the kernels stand, behind found_t; zeros at first


class _Part:
    """A kernel that makes some of the gradients, and its parameters."""

    def __init__(self, name, names, row, forward, layout, device, device_id):
        self.names = names
        # dbias is written beside dq, and does not decide what entries are kept.
        owners = tuple(n for n in names if n != "dbias")
        fields = gradient_layout.entries_fields(
            all_summed(layout, owners), [layout.targets[n] for n in names]
        )
        self.grads = structs.pack_bytes(
            {**layout.grads, **fields}, grads_dtype(layout.batch_dims)
        )
        self.schedule = row.schedule(
            name, forward, device, fields["num_kept"], fields["num_summed"]
        )
        blocks = min(self.schedule["num_items"], device.num_sms)
        makes_dbias = "dbias" in names
        config = row.config(name, forward, layout.batch_dims, blocks, makes_dbias)
        self.dtype = backward_wide.INPUTS[backward_wide.has_terms(forward)]
        self.launch = launch.Launch(
            config.variant, config.grid, config.block, device_id
        )

    def inputs(self, maps):
        """The parameter that depends on where arrays lie."""
        fields = {**self.schedule, "slot": (0, 0), **maps}
        return structs.pack_bytes(fields, self.dtype)


class HopperWidePlan(BasePlan):
    """Statistics, dk and dv, dq, and repairs if they are asked for."""

    def __init__(self, row, problem, operands, device, device_id):
        super().__init__(problem, device_id)
        forward = problem.forward
        layout = gradient_layout.layout(problem, operands)
        batch_dims = layout.batch_dims
        self.params = structs.pack_bytes(layout.params, params_dtype(batch_dims))
        makes_dbias = _makes_dbias(problem, layout)
        of_queries = ("dq", "dbias") if makes_dbias else ("dq",)
        self.parts = [
            _Part(name, names, row, forward, layout, device, device_id)
            for name, names in (
                ("_wide_keys", ("dk", "dv")),
                ("_wide_queries", of_queries),
            )
        ]
        encoders = {
            name: encoder(
                forward,
                {**layout.params, **layout.grads},
                name,
                x,
                backward_wide.BLOCK,
            )
            for name, x in (
                *((name, getattr(operands.forward, name)) for name in "qkv"),
                ("dout", operands.dout),
                *(
                    (name, getattr(operands.forward, name))
                    for name in backward_wide.tiles_of_terms(forward)
                ),
            )
        }
        self.inputs = MappedInputs(encoders, self._inputs)
        self.maps_terms = len(encoders) > 4

        # Memory between the kernels, as attention/sm90/backward.cuh has it.
        num_entries = math.prod(forward.batch) * forward.num_heads
        num_blocks = -(-forward.seqlen_q // backward_wide.BLOCK)
        sizes = (
            FOUND_BYTES,
            4 * num_entries * num_blocks * backward_wide.BLOCK * 2,
            4 * num_entries * forward.seqlen_q,
        )
        self.starts, self.num_bytes = sections(*sizes)
        self.is_plain = is_plain(forward)
        config = row.rows_config(forward, batch_dims)
        self.rows = launch.Launch(config.variant, config.grid, config.block, device_id)
        self.repairs = repairs(forward, layout, device, device_id)
        slow = Launches(simt_backward.FALLBACK, forward, layout, device, device_id)
        # What the kernel of queries cannot make; and what repairs it where it does.
        self.bias = self.repair_of_bias = None
        if makes_dbias:
            self.repair_of_bias = slow.bias(REPAIRS=1)
        elif problem.need_dbias:
            fast = MmaLaunches(MMA_VJP, forward, layout, device, device_id)
            self.bias = fast.fast_bias()
        # What nobody sees has no tile that writes zeros.
        self.clears_dbias = makes_dbias and (
            sm90_forward.bounds_of(forward) > 0 or sm90_forward.has_lengths(forward)
        )
        self.sinks = slow.sinks(problem) if problem.need_dsinks else None
        self.launches = (
            self.rows,
            *(part.launch for part in self.parts),
            *(repair.kernel.launch for repair in self.repairs),
            *(self.bias.launches if self.bias else ()),
            *(self.repair_of_bias.launches if self.repair_of_bias else ()),
            *((self.sinks.kernel.launch,) if self.sinks else ()),
        )

    def _inputs(self, maps, pointers):
        """Those of both kernels that depend on where arrays lie."""
        return [part.inputs(maps) for part in self.parts]

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = self.new_gradients()
        q, k, v, out, *options, dout, lse, dlse = addresses(arrays)
        pointers: tuple[int, ...] = (q, k, v, dout)
        if self.maps_terms:
            # Bias and mask come first among the options.
            pointers += tuple(ptr for ptr in options[:2] if ptr)
        inputs = self.inputs.get(pointers)
        if inputs is None:
            inputs = self.inputs.make(pointers)
        memory = cupy.cuda.alloc(self.num_bytes)
        sink_terms = self.sinks.new_terms() if self.sinks else None
        graphs.keep_if_capturing((memory, sink_terms))
        found, stats, delta = (memory.ptr + start for start in self.starts)
        memory.memset_async(0, FOUND_BYTES)
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
            (terms,) = addresses((sink_terms,))
            self.rows.enqueue(
                out, dout, lse, dlse, stats, delta, terms, 0, 0, found, *rest, grads
            )
        for n, (part, maps) in enumerate(zip(self.parts, inputs, strict=True)):
            targets = addresses(made[name] for name in part.names)
            counter = found + _COUNTERS + 4 * n
            part.launch.enqueue(
                maps, stats, *targets, found, counter, *rest, part.grads
            )
        inputs, rest = (q, k, v, dout, lse, delta), (*options, offset)
        if self.bias is not None:
            self.bias((q, k, v, dout, stats, backward_wide.BLOCK), made, rest)
        for repair in self.repairs:
            repair(inputs, made, found, rest)
        if self.repair_of_bias is not None:
            self.repair_of_bias(inputs, made, (found, *rest))
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)


def _makes_dbias(problem, layout):
    """Whether the kernel of queries makes dbias: each score has a bias of its own."""
    able = backward_wide.can_make_dbias(problem.forward)
    if not problem.need_dbias or not able:
        return False
    target = layout.targets["dbias"]
    entries = zip(layout.shape, target.entries, strict=True)
    own = all(n == 1 or step for n, step in entries)
    return own and bool(target.row) and target.col == 1
