"""Plans of attention_vjp for the row by mma.sync."""

import math

import cupy
import numpy as np

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_layout import grads_dtype
from cupyflash._attention.gpu.gradient_plan import (
    FOUND_BYTES,
    BasePlan,
    Kernel,
    Launches,
    Part,
    addresses,
    all_summed,
)
from cupyflash._attention.gpu.params import params_dtype, sections
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt.repair import repairs
from cupyflash._attention.gpu.sm80.backward import items_dtype
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._cuda import graphs, structs
from cupyflash._cuda import launch as _launch

_STILL_ODD = 8  # where it stands in found_t


class MmaLaunches(Launches):
    """The parts that this row makes."""

    def own(self, part, tile, names, **more):
        """The launch of this row that makes the gradients `names`."""
        forward = self.forward
        of_queries = part == "_queries"
        seqlen = forward.seqlen_q if of_queries else forward.seqlen_k
        other = forward.seqlen_k if of_queries else forward.seqlen_q
        block, step = tile.block_m, tile.block_n
        if not of_queries:
            block, step = step, block
        dims = {
            "dq": forward.head_dim,
            "dk": forward.head_dim,
            "dv": forward.head_dim_v,
        }
        return self.part(
            part,
            tile,
            -(-seqlen // block),
            -(-other // step),
            {name: self.layout.targets[name] for name in names},
            {name: (seqlen, dims[name]) for name in names},
            forward.dtype,
            **more,
        )

    def fast_bias(self):
        """The launch for dbias."""
        tile = self.row.tile("_bias", self.forward, self.device)
        return self.bias_by("_bias", tile)

    def straight(self, name):
        """A part that makes a gradient with no terms, to be made again()."""
        target = self.layout.targets[name]
        entries = all_summed(self.layout, (name,))
        fields = gradient_layout.entries_fields(entries, [target])
        return Part((name,), Kernel(None, self.params, self.grads(**fields)))

    def again(self, made, part, tile, **more):
        """The careful launch of a part, into what that has made."""
        forward = self.forward
        grad = forward.compute_dtype if made.sums else forward.dtype
        config = self.row.config(
            part,
            tile,
            forward,
            self.layout.batch_dims,
            grad,
            2 * self.device.num_sms,
            CAREFUL=1,
            **more,
        )
        return Part(made.names, self.kernel(config, made.kernel.params[-1]))


class MmaPlan(BasePlan):
    """Statistics, all gradients, dq to 16 bits, and repairs if they are asked for."""

    def __init__(self, row, problem, operands, device, device_id):
        super().__init__(problem, device_id)
        forward = problem.forward
        layout = gradient_layout.layout(problem, operands)
        batch_dims = layout.batch_dims
        self.params = structs.pack_bytes(layout.params, params_dtype(batch_dims))
        make = MmaLaunches(row, forward, layout, device, device_id)
        self.grads = make.grads()
        tile = row.tile("", forward, device)
        self.stats_m = tile.block_m
        # In one order of sums, dq has a kernel of its own.
        ordered = problem.deterministic
        self.keys = make.own("", tile, ("dk", "dv"), MAKES_DQ=int(not ordered))
        num_blocks = -(-forward.seqlen_q // tile.block_m)
        own = row.tile("_queries", forward, device)
        self.queries = None
        if ordered:
            self.queries = make.own("_queries", own, ("dq",), STATS_M=tile.block_m)
        # The same without what nobody sees, if a gradient is not finite.
        self.careful_keys = make.again(self.keys, "", tile, MAKES_DQ=0)
        queries = self.queries or make.straight("dq")
        self.careful_queries = make.again(
            queries, "_queries", own, STATS_M=tile.block_m
        )

        # Of dq, whose batch entries add to one slot where they share q.
        dq, matrix = layout.targets["dq"], forward.seqlen_q * forward.head_dim
        num_slots = math.prod(problem.q_shape) // matrix
        self.dq_steps = num_slots, forward.num_heads * matrix, dq.entries[-1], dq.row
        (grads,) = np.frombuffer(self.keys.kernel.params[-1], grads_dtype(batch_dims))
        num_kept = int(grads["num_kept"])
        num_entries = math.prod(forward.batch) * forward.num_heads
        items = {
            "section": row.section(forward, device, num_kept, num_entries // num_kept),
            "slot": tuple(step // matrix for step in dq.entries[:-2]),
        }
        self.items = structs.pack_bytes(items, items_dtype(batch_dims))

        # Memory between the kernels, as attention/sm80/backward.cuh has it.
        num_floats = num_blocks * tile.block_m
        sums = 0 if ordered else num_slots * num_floats * row.dim(forward)
        self.num_vectors = sums // 4
        sizes = (FOUND_BYTES, 4 * sums, 4 * num_entries * num_floats * 2)
        self.starts, self.num_bytes = sections(*sizes)

        def launch(part, blocks):
            config = row.config(part, tile, forward, batch_dims, forward.dtype, blocks)
            return _launch.Launch(config.variant, config.grid, config.block, device_id)

        self.rows = launch("_rows", row.rows_blocks(forward, tile))
        self.dq = None if ordered else launch("_dq", num_slots * num_blocks)
        self.repairs = repairs(forward, layout, device, device_id)
        slow = Launches(simt_backward.FALLBACK, forward, layout, device, device_id)
        self.bias = make.fast_bias() if problem.need_dbias else None
        self.sinks = slow.sinks(problem) if problem.need_dsinks else None
        self.launches = (
            self.rows,
            *self.keys.launches,
            *(self.queries.launches if self.queries else (self.dq,)),
            *self.careful_keys.launches,
            *self.careful_queries.launches,
            *(repair.kernel.launch for repair in self.repairs),
            *(self.bias.launches if self.bias else ()),
            *((self.sinks.kernel.launch,) if self.sinks else ()),
        )

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = self.new_gradients()
        q, k, v, out, *options, dout, lse, dlse = addresses(arrays)
        memory = cupy.cuda.alloc(self.num_bytes)
        delta = cupy.ndarray(self.rows_shape, "float32")
        sink_terms = self.sinks.new_terms() if self.sinks else None
        graphs.keep_if_capturing((memory, delta, sink_terms))
        delta_at, terms_at = addresses((delta, sink_terms))
        found, sums, stats = (memory.ptr + n for n in self.starts)
        memory.memset_async(0, FOUND_BYTES)
        rest = (*options, offset)
        self.rows.enqueue(
            out, dout, lse, dlse, stats, delta_at, terms_at, sums, self.num_vectors,
            found, *rest, self.params, self.grads,
        )  # fmt: skip
        inputs = (q, k, v, dout, stats)
        of_keys = self.keys.targets(made)
        of_queries = (self.queries or self.careful_queries).targets(made)
        self.keys.make((*inputs, sums, found, self.items), of_keys, rest)
        if self.queries is not None:
            self.queries.make((*inputs, found), of_queries, rest)
        else:
            self.dq.enqueue(
                sums, made["dq"].data.ptr, *self.dq_steps, found, self.params
            )
        self.careful_keys.make((*inputs, 0, found, self.items), of_keys, rest)
        self.careful_queries.make((*inputs, found), of_queries, rest)
        self.keys.add_up(of_keys, made)
        if self.queries is not None:
            self.queries.add_up(of_queries, made)
        if self.bias is not None:
            self.bias((*inputs, self.stats_m), made, rest)
        inputs = (q, k, v, dout, lse, delta_at)
        for repair in self.repairs:
            repair(inputs, made, found + _STILL_ODD, rest)
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)
