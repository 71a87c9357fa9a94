"""Plans of attention_vjp for the row of float32 by mma.sync."""

import math

import cupy

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.gradient_plan import (
    FOUND_BYTES,
    BasePlan,
    Launches,
    addresses,
)
from cupyflash._attention.gpu.params import sections
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._attention.gpu.simt.repair import (
    Fallback,
    RecomputedLse,
    repaired_together,
)
from cupyflash._attention.gpu.sm80.backward_fp32 import made_by, makes
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._cuda import graphs


class _SplitLaunches(Launches):
    """The parts that this row makes."""

    def own(self, part, names):
        """(part, entries of a section) of this row's kernel for `names`."""
        forward, layout = self.forward, self.layout
        of_queries = part == "_queries"
        seqlen, other = forward.seqlen_q, forward.seqlen_k
        if not of_queries:
            seqlen, other = other, seqlen
        tile = self.row.tile(part, forward, self.device)
        targets = {name: layout.targets[name] for name in names}
        blocks, walk = -(-seqlen // tile.rows), -(-other // 32)
        # A block for dq has one entry: what it finds of its rows is of that.
        entries = (
            gradient_layout.keep_entries(layout.shape, targets)
            if of_queries
            else gradient_layout.choose_entries(
                layout.shape, targets, blocks, walk, self.device.num_sms
            )
        )
        dims = {
            "dq": forward.head_dim,
            "dk": forward.head_dim,
            "dv": forward.head_dim_v,
        }
        made = self.part_of(
            part,
            tile,
            blocks,
            entries,
            targets,
            {name: (seqlen, dims[name]) for name in names},
            forward.dtype,
            **makes(part, names),
        )
        num_summed = math.prod(layout.shape) // entries.num_kept
        section = self.row.section(
            part, forward, self.device, entries.num_kept, num_summed
        )
        return made, section


class MmaSplitPlan(BasePlan):
    """Delta, images of the inputs, dq, dk and dv, and repairs if they are asked for."""

    def __init__(self, row, problem, operands, device, device_id):
        super().__init__(problem, device_id)
        forward = problem.forward
        layout = gradient_layout.layout(problem, operands)
        make = _SplitLaunches(row, forward, layout, device, device_id)
        self.rows = make.rows()
        num_images, image_bytes = row.images(forward)
        config = row.config(
            "_prepare", None, forward, layout.batch_dims, "float32", num_images
        )
        self.prepare = make.kernel(config, make.grads())
        self.queries, self.section_q = make.own("_queries", ("dq",))
        tile = row.tile("_keys", forward, device)
        self.keys = [make.own("_keys", names) for names in made_by("_keys", tile)]

        # Memory between the kernels.
        num_rows = math.prod(problem.rows_shape)
        sizes = (FOUND_BYTES, image_bytes, row.stats_bytes(forward), 4 * num_rows)
        self.starts, self.num_bytes = sections(*sizes)

        # Scores of the portable kernels are rounded in another order, to which an lse
        # made anew belongs: that of repairs is left by the one for dq to that for dk.
        own = gradient_layout.with_new_lse(problem, operands)
        self.repair_queries = Fallback(
            ("dq",), forward, layout, device, device_id, OWN_LSE=1
        )
        self.repairs_of_keys = [
            Fallback(names, forward, own, device, device_id)
            for names in repaired_together(own)
        ]
        self.recomputed_lse = self.bias = None
        slow = Launches(simt_backward.FALLBACK, forward, own, device, device_id)
        if problem.need_dbias:
            self.recomputed_lse = RecomputedLse(problem, operands, device)
            self.bias = slow.bias()
        self.sinks = slow.sinks(problem) if problem.need_dsinks else None
        self.launches = (
            *(self.recomputed_lse.launches if self.recomputed_lse else ()),
            self.rows.launch,
            self.prepare.launch,
            *self.queries.launches,
            *(launch for part, _ in self.keys for launch in part.launches),
            self.repair_queries.kernel.launch,
            *(repair.kernel.launch for repair in self.repairs_of_keys),
            *(self.bias.launches if self.bias else ()),
            *((self.sinks.kernel.launch,) if self.sinks else ()),
        )

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = self.new_gradients()
        recomputed_lse = (
            self.recomputed_lse(arrays, offset, made) if self.recomputed_lse else None
        )
        q, k, v, out, *options, dout, lse, dlse = addresses(arrays)
        memory = cupy.cuda.alloc(self.num_bytes)
        delta = cupy.ndarray(self.rows_shape, "float32")
        sink_terms = self.sinks.new_terms() if self.sinks else None
        graphs.keep_if_capturing((memory, delta, sink_terms))
        delta_at, terms_at, own_at = addresses((delta, sink_terms, recomputed_lse))
        found, images, stats, repaired_lse = (memory.ptr + n for n in self.starts)
        memory.memset_async(0, FOUND_BYTES)
        rest = (*options, offset)
        self.rows.enqueue(out, dout, lse, own_at, dlse, delta_at, terms_at, *rest)
        self.prepare.enqueue(images, q, k, v, dout, *rest)
        inputs = (images, lse, delta_at, stats, found, self.section_q)
        self._make(self.queries, inputs, made, rest)
        for part, section in self.keys:
            self._make(part, (images, stats, found, section), made, rest)
        inputs = (q, k, v, dout)
        self.repair_queries(
            (*inputs, lse, delta_at), made, found, (repaired_lse, *rest)
        )
        for repair in self.repairs_of_keys:
            repair((*inputs, repaired_lse, delta_at), made, found, rest)
        if self.bias is not None:
            self.bias((*inputs, own_at, delta_at), made, rest)
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)

    def _make(self, part, inputs, made, rest):
        """A kernel of this row, and the sums of its terms if it has any."""
        into = part.targets(made)
        # One that makes dk or dv alone has parameters for both.
        is_half = part.names in (("dk",), ("dv",))
        part.make(inputs, into * 2 if is_half else into, rest)
        part.add_up(into, made)
