"""Plans of attention_vjp for the row by mma.sync."""

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
from cupyflash._attention_vjp_layout import grads_dtype
from cupyflash._attention_vjp_mma import items_dtype
from cupyflash._attention_vjp_plans import (
    _all_summed,
    _gradients,
    _Launches,
    _Part,
    _repair,
)
from cupyflash._attention_vjp_problem import AttentionGrads

_STILL_ODD = 8  # where it stands in found_t
_FOUND_BYTES = 256  # found_t, and to the next multiple of what memory is aligned to


class _MmaLaunches(_Launches):
    """Launches whose parameters are bytes."""

    def _grads(self, **fields):
        return _gpu.pack_bytes(
            {**self.layout.grads, **fields}, grads_dtype(self.layout.batch_dims)
        )

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
        return self._part(
            part,
            tile,
            -(-seqlen // block),
            -(-other // step),
            {name: self.layout.targets[name] for name in names},
            {name: (seqlen, dims[name]) for name in names},
            forward.dtype,
            **more,
        )

    def straight(self, part, tile, name):
        """A part that makes a gradient with no terms, to be made again()."""
        target = self.layout.targets[name]
        entries = _all_summed(self.layout, (name,))
        fields = _attention_vjp_layout.entries_fields(entries, [target])
        return _Part((name,), None, self._grads(**fields), None)

    def again(self, made, part, tile, **more):
        """The careful launch of a part, into what that has made."""
        forward = self.forward
        grad = forward.dtype if made.terms is None else forward.compute_dtype
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
        return _Part(made.names, self._launch(config), made.grads, None)


class MmaPlan:
    """Statistics, all gradients, dq to 16 bits, and repairs if they are asked for."""

    def __init__(self, row, problem, operands, device, device_id):
        forward = problem.forward
        self.device_id = device_id
        self.offset = _attention_params.launch_offset(forward)
        self.gradients = _gradients(problem)
        layout = _attention_vjp_layout.layout(problem, operands)
        batch_dims = layout.batch_dims
        self.params = _gpu.pack_bytes(layout.params, params_dtype(batch_dims))
        make = _MmaLaunches(row, forward, layout, device, device_id)
        self.grads = make._grads()
        tile = row.tile("", forward, device)
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
        queries = self.queries or make.straight("_queries", own, "dq")
        self.careful_queries = make.again(
            queries, "_queries", own, STATS_M=tile.block_m
        )

        # Of dq, whose batch entries add to one slot where they share q.
        dq, matrix = layout.targets["dq"], forward.seqlen_q * forward.head_dim
        num_slots = math.prod(problem.q_shape) // matrix
        self.dq_steps = num_slots, forward.num_heads * matrix, dq.entries[-1], dq.row
        (grads,) = np.frombuffer(self.keys.grads, grads_dtype(batch_dims))
        num_kept = int(grads["num_kept"])
        num_entries = math.prod(forward.batch) * forward.num_heads
        items = {
            "section": row.section(forward, device, num_kept, num_entries // num_kept),
            "slot": tuple(step // matrix for step in dq.entries[:-2]),
        }
        self.items = _gpu.pack_bytes(items, items_dtype(batch_dims))

        # Memory between the kernels, as vjp_mma.cuh has it.
        num_floats = num_blocks * tile.block_m
        sums = 0 if ordered else num_slots * num_floats * row.dim(forward)
        self.num_vectors = sums // 4
        sizes = (_FOUND_BYTES, 4 * sums, 4 * num_entries * num_floats * 2)
        self.starts = [sum(sizes[:n]) for n in range(len(sizes))]
        self.num_bytes = sum(sizes)

        def launch(part, blocks):
            config = row.config(part, tile, forward, batch_dims, forward.dtype, blocks)
            return _gpu.Launch(config.variant, config.grid, config.block, device_id)

        self.rows = launch("_rows", row.rows_blocks(forward, tile))
        self.dq = None if ordered else launch("_dq", num_slots * num_blocks)
        self.repairs = [
            _repair(part, names, forward, layout, device, device_id)
            for part, names in (("queries", ("dq",)), ("keys", ("dk", "dv")))
        ]
        slow = _Launches(
            _attention_vjp_kernels.REPAIRING, forward, layout, device, device_id
        )
        self.bias = slow.bias() if problem.need_dbias else None
        self.bias_params = _gpu.pack(layout.params, params_dtype(batch_dims))
        self.sinks = slow.sinks(problem) if problem.need_dsinks else None
        self.rows_shape = problem.rows_shape
        self.launches = (
            self.rows,
            *self.keys.launches,
            *(self.queries.launches if self.queries else (self.dq,)),
            self.careful_keys.launch,
            self.careful_queries.launch,
            *(launch for _, launch, _ in self.repairs),
            *(self.bias.launches if self.bias else ()),
            *((self.sinks.launch,) if self.sinks else ()),
        )

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = {name: cupy.ndarray(*facts) for name, facts in self.gradients.items()}
        q, k, v, out, *options, dout, lse, dlse = (
            0 if x is None else x.data.ptr for x in arrays
        )
        memory = cupy.cuda.alloc(self.num_bytes)
        delta = cupy.ndarray(self.rows_shape, "float32")
        sink_terms = cupy.ndarray(self.rows_shape if self.sinks else 0, "float32")
        _attention_gpu.keep_if_capturing((memory, delta, sink_terms))
        found, sums, stats = (memory.ptr + n for n in self.starts)
        memory.memset_async(0, _FOUND_BYTES)
        rest = (*options, offset, self.params)
        self.rows.enqueue(
            out, dout, lse, dlse, stats, delta.data.ptr,
            sink_terms.data.ptr if self.sinks else 0, sums, self.num_vectors, found,
            *rest, self.grads,
        )  # fmt: skip
        inputs = (q, k, v, dout, stats)
        of_keys = self._targets(self.keys, made)
        of_queries = self._targets(self.queries or self.careful_queries, made)
        self._make(self.keys, of_keys, (*inputs, sums, found, self.items), rest)
        if self.queries is not None:
            self._make(self.queries, of_queries, (*inputs, found), rest)
        else:
            self.dq.enqueue(
                sums, made["dq"].data.ptr, *self.dq_steps, found, self.params
            )
        self._make(self.careful_keys, of_keys, (*inputs, 0, found, self.items), rest)
        self._make(self.careful_queries, of_queries, (*inputs, found), rest)
        self._add_up(self.keys, of_keys, made)
        if self.queries is not None:
            self._add_up(self.queries, of_queries, made)
        for names, launch, grads in self.repairs:
            targets = (made[name].data.ptr for name in names)
            launch.enqueue(
                q,
                k,
                v,
                dout,
                lse,
                delta.data.ptr,
                *targets,
                found + _STILL_ODD,
                *rest,
                grads,
            )
        if self.bias is not None:
            q, k, v, _, *options, dout, lse, _ = arrays
            options = [_gpu.NULL if x is None else x for x in options]
            self.bias(
                (q, k, v, dout, lse, delta), made, (*options, offset, self.bias_params),
                "float32",
            )  # fmt: skip
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)

    def _targets(self, part, made):
        """Where a part writes: gradients, or terms of them."""
        if part.terms is None:
            return [made[name] for name in part.names]
        into = [cupy.ndarray(shape, "float32") for shape, _ in part.terms]
        _attention_gpu.keep_if_capturing(into)
        return into

    def _make(self, part, into, inputs, rest):
        """A kernel of this row."""
        part.launch.enqueue(*inputs, *(x.data.ptr for x in into), *rest, part.grads)

    def _add_up(self, part, into, made):
        """The sums of terms, if it has any."""
        for (_, add_up), terms, name in zip(
            part.terms or (), into, part.names, strict=False
        ):
            add_up(terms, made[name])
