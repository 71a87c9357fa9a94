"""Plans of attention_vjp: everything but the arrays, ready to be launched."""

import math
import struct
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from cupyflash import (
    _arrays,
    _attention_gpu,
    _attention_kernels,
    _attention_params,
    _attention_vjp_kernels,
    _attention_vjp_layout,
    _gpu,
)
from cupyflash._attention_params import contiguous_strides, params_dtype
from cupyflash._attention_rows import OPTIONS
from cupyflash._attention_vjp_layout import Target, grads_dtype, sum_dtype
from cupyflash._attention_vjp_problem import AttentionGrads

_NULL = _gpu.NULL


class ZeroPlan:
    """Gradients of no rows: zeros."""

    launches: tuple[Any, ...] = ()

    def __init__(self, problem, device_id):
        self.device_id = device_id
        self.offset = _attention_params.launch_offset(problem.forward)
        self.gradients = _gradients(problem)

    def __call__(self, arrays, offset):
        """The zeros, in the order of AttentionGrads."""
        made = {n: cupy.zeros(*facts) for n, facts in self.gradients.items()}
        return AttentionGrads(**made)


def _gradients(problem):
    """{name: (shape, dtype)} of what a call returns."""
    forward = problem.forward
    dtype = _arrays.to_dtype(forward.dtype)
    found = {
        "dq": (problem.q_shape, dtype),
        "dk": (problem.k_shape, dtype),
        "dv": (problem.v_shape, dtype),
    }
    if problem.need_dbias:
        found["dbias"] = (problem.bias_shape, _arrays.to_dtype(forward.bias))
    if problem.need_dsinks:
        found["dsinks"] = (problem.sinks_shape, _arrays.to_dtype(forward.sinks))
    return found


class Plan:
    """All launches of a call: delta, each kind of gradient, and sums of terms."""

    def __init__(self, row, problem, operands, device, device_id):
        forward = problem.forward
        self.device_id = device_id
        self.offset = _attention_params.launch_offset(forward)
        self.gradients = _gradients(problem)
        self.rows_shape = problem.rows_shape
        self.accum = np.dtype(forward.compute_dtype)
        layout = _attention_vjp_layout.layout(problem, operands)
        self.delta_params = _gpu.pack(layout.params, params_dtype(layout.batch_dims))
        make = _Launches(row, forward, layout, device, device_id)
        self.delta, self.delta_grads = make.rows()
        self.own_lse = None
        if forward.dtype == forward.compute_dtype and forward.seqlen_k:
            self.own_lse = own_lse_plan(problem, operands, device)
            self.own_bytes = math.prod(self.own_lse.out_shape) * self.accum.itemsize
            lse = cupy.ndarray(self.rows_shape, self.accum)
            layout = _attention_vjp_layout.layout(problem, operands._replace(lse=lse))
            make = _Launches(row, forward, layout, device, device_id)
        self.params = _gpu.pack(layout.params, params_dtype(layout.batch_dims))
        self.parts = [make.queries()]
        if forward.seqlen_k:
            self.parts.append(make.keys())
            if problem.need_dbias:
                self.parts.append(make.bias())
        self.sinks = make.sinks(problem) if problem.need_dsinks else None
        self.launches = (
            *(self.own_lse.launches if self.own_lse else ()),
            self.delta,
            *(launch for part in self.parts for launch in part.launches),
            *((self.sinks.launch,) if self.sinks else ()),
        )
        self.none_made = {
            name
            for name in self.gradients
            if name != "dsinks" and not any(name in part.names for part in self.parts)
        }

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
        sink_terms = None
        if self.sinks is not None:
            sink_terms = cupy.ndarray(self.rows_shape, self.accum)
        _attention_gpu.keep_if_capturing((delta, sink_terms))
        self.delta(
            out, dout, lse,
            _NULL if own_lse is None else own_lse,
            _NULL if dlse is None else dlse, delta,
            _NULL if sink_terms is None else sink_terms,
            *options, offset, self.delta_params, self.delta_grads,
        )  # fmt: skip
        lse = lse if own_lse is None else own_lse
        for part in self.parts:
            part(
                (q, k, v, dout, lse, delta), made, (*options, offset, self.params),
                self.accum,
            )  # fmt: skip
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)


def own_lse_plan(problem, operands, device):
    """A forward plan that rounds scores as the gradient kernels do; for its lse."""
    forward = replace(problem.forward, return_lse=True)
    row = next(
        row
        for row in _attention_kernels.ATTENTION_KERNELS
        if row.name in ("tiled", "online") and row.refusal(forward, device) is None
    )
    inputs = operands.forward._replace(out=None, given_out=None)
    return _attention_gpu._FusedPlan(row, forward, inputs, device)


class _Part:
    """One kernel that makes gradients, or terms of them that are then added up."""

    def __init__(self, names, launch, grads, terms):
        self.names, self.launch, self.grads = names, launch, grads
        self.terms = terms  # (shape, sum) of each gradient, or None
        self.launches = (launch, *(x.launch for _, x in terms or ()))

    def __call__(self, inputs, made, rest, accum):
        """Launch, into the gradients that were made."""
        targets = [made[name] for name in self.names]
        if self.terms is not None:
            into = [cupy.ndarray(shape, accum) for shape, _ in self.terms]
            _attention_gpu.keep_if_capturing(into)
        else:
            into = targets
        self.launch(*inputs, *into, *rest, self.grads)
        for (_, add_up), terms, target in zip(
            self.terms or (), into, targets, strict=False
        ):
            add_up(terms, target)


class _SumOfTerms:
    """The kernel that adds up terms."""

    def __init__(self, launch, params):
        self.launch, self.params = launch, params

    def __call__(self, terms, out):
        self.launch(terms, out, self.params)


class _Launches:
    """Makes the launches of a plan."""

    def __init__(self, row, forward, layout, device, device_id):
        self.row, self.forward, self.layout = row, forward, layout
        self.device, self.device_id = device, device_id

    def _launch(self, config):
        return _gpu.Launch(config.variant, config.grid, config.block, self.device_id)

    def _grads(self, **fields):
        return _gpu.pack(
            {**self.layout.grads, **fields}, grads_dtype(self.layout.batch_dims)
        )

    def rows(self):
        """The launch for delta, and its parameters."""
        config = _attention_vjp_kernels.rows_config(
            self.forward, self.layout.batch_dims
        )
        return self._launch(config), self._grads()

    def queries(self):
        """The launch for dq."""
        forward = self.forward
        return self._of_rows(
            "queries", forward.num_heads, forward.seqlen_q, {"dq": forward.head_dim}
        )

    def keys(self):
        """The launch for dk and dv."""
        forward = self.forward
        dims = {"dk": forward.head_dim, "dv": forward.head_dim_v}
        return self._of_rows("keys", forward.num_kv_heads, forward.seqlen_k, dims)

    def _of_rows(self, part, heads, seqlen, dims):
        """Blocks that own tiles of `seqlen` rows of each of the heads."""
        forward = self.forward
        num_entries = math.prod(forward.batch) * heads
        tile = self.row.tile(forward, self.device, num_entries, seqlen)
        chunks = max(self.row.num_chunks(forward, dim) for dim in dims.values())
        blocks = -(-seqlen // tile.block_m) * chunks
        targets = {name: self.layout.targets[name] for name in dims}
        matrices = {name: (seqlen, dim) for name, dim in dims.items()}
        other = forward.seqlen_k if part == "queries" else forward.seqlen_q
        walk = -(-other // tile.block_n)
        return self._part(part, tile, blocks, walk, targets, matrices, forward.dtype)

    def bias(self, **more):
        """The launch for dbias."""
        forward, target = self.forward, self.layout.targets["dbias"]
        num_entries = math.prod(forward.batch) * forward.num_heads
        tile = self.row.tile(forward, self.device, num_entries, forward.seqlen_q)
        sum_queries = forward.seqlen_q > 1 and not target.row
        # Where all keys share it too, the second kernel sums over keys.
        sum_keys = forward.seqlen_k > 1 and not target.col and not sum_queries
        rows = 1 if sum_queries else forward.seqlen_q
        cols = 1 if sum_keys else forward.seqlen_k
        blocks = -(-rows // tile.block_m) * -(-cols // tile.block_n)
        walk = 1
        if sum_queries:
            walk = -(-forward.seqlen_q // tile.block_m)
        elif sum_keys:
            walk = -(-forward.seqlen_k // tile.block_n)
        return self._part(
            "bias", tile, blocks, walk, {"dbias": target}, {"dbias": (rows, cols)},
            forward.bias, SUM_QUERIES=int(sum_queries), SUM_KEYS=int(sum_keys), **more,
        )  # fmt: skip

    def _part(self, part, tile, blocks, walk, targets, matrices, dtype, **more):
        """A kernel over entries, and the sums after it.

        An entry has `blocks` blocks; each walks over `walk` tiles.
        """
        entries = _attention_vjp_layout.choose_entries(
            self.layout.shape, targets, blocks, walk, self.device.num_sms
        )
        return self._part_of(
            part, tile, blocks, entries, targets, matrices, dtype, **more
        )

    def _part_of(self, part, tile, blocks, entries, targets, matrices, dtype, **more):
        """The same over given entries."""
        # An axis of the matrix that the kernel keeps though the gradient does not.
        outside = entries.has_terms or any(
            n > 1 and not step
            for name, target in targets.items()
            for n, step in zip(matrices[name], (target.row, target.col), strict=True)
        )
        terms, into, grad = None, list(targets.values()), dtype
        if outside:
            grad = self.forward.compute_dtype
            into, terms = [], []
            for name, target in targets.items():
                rows, cols = matrices[name]
                full = (*entries.terms_shape, rows, cols)
                *steps, row, col = (
                    0 if n == 1 else s
                    for n, s in zip(full, contiguous_strides(full), strict=True)
                )
                into.append(Target(tuple(steps), row, col))
                sums = self._sum(full, (*target.entries, target.row, target.col), dtype)
                terms.append((full, sums))
        config = self.row.config(
            part, tile, self.forward, self.layout.batch_dims, grad,
            blocks * entries.num_kept, **more,
        )  # fmt: skip
        fields = _attention_vjp_layout.entries_fields(entries, into)
        return _Part(
            tuple(targets),
            self._launch(config),
            self._grads(**fields),
            terms,
        )

    def _sum(self, shape, out_strides, dtype):
        """Terms of `shape`, contiguous, summed where `out_strides` is 0."""
        steps = contiguous_strides(shape)
        kept = [bool(step) for step in out_strides]
        sizes = [n if k else 1 for n, k in zip(shape, kept, strict=True)]
        summed = [1 if k else n for n, k in zip(shape, kept, strict=True)]
        config = _attention_vjp_kernels.sum_config(
            self.forward.compute_dtype,
            dtype,
            len(shape),
            math.prod(sizes),
            math.prod(summed),
        )
        fields = {
            "num_sums": math.prod(sizes),
            "num_terms": math.prod(summed),
            "sums": (sizes, (steps, out_strides)),
            "terms": (summed, (steps,)),
        }
        return _SumOfTerms(
            self._launch(config), _gpu.pack(fields, sum_dtype(len(shape)))
        )

    def sinks(self, problem):
        """The sum of the rows' terms for each head."""
        *batch, heads, seqlen_q = problem.rows_shape
        head = int(math.prod(problem.sinks_shape) > 1)
        return self._sum(
            (math.prod(batch), heads, seqlen_q), (0, head, 0), self.forward.sinks
        )


# --- Hopper ---------------------------------------------------------------------------


class HopperPlan:
    """Statistics, all gradients, dq to 16 bits, and repairs if they are asked for."""

    def __init__(self, row, problem, operands, device, device_id):
        forward = problem.forward
        self.device_id = device_id
        self.offset = _attention_params.launch_offset(forward)
        self.gradients = _gradients(problem)
        # What _rows makes the maximum of has to be 0; the rest of found_t it sets.
        self.looks_for_largest = forward.dtype == "float16"
        layout = _attention_vjp_layout.layout(problem, operands)
        batch_dims = layout.batch_dims
        self.params = _gpu.pack_bytes(layout.params, params_dtype(batch_dims))
        dq, dk, dv = (layout.targets[name] for name in ("dq", "dk", "dv"))
        entries = _all_summed(layout, ("dk", "dv"))
        fields = _attention_vjp_layout.entries_fields(entries, [dk, dv])
        grads_type = grads_dtype(batch_dims)
        self.grads = _gpu.pack_bytes({**layout.grads, **fields}, grads_type)
        num_kept, num_summed = fields["num_kept"], fields["num_summed"]
        dq_way = row.dq_way(problem, device, num_kept)
        in_turns = dq_way == _attention_vjp_kernels.TURNS
        apart = dq_way == _attention_vjp_kernels.APART
        self.is_fed = row.tile(forward, dq_way).feeder

        seqlen_q, heads, dim = forward.seqlen_q, forward.num_heads, forward.head_dim
        num_slots = math.prod(problem.q_shape) // (seqlen_q * dim)
        slot = [0, 0]
        slot[:batch_dims] = (step // (seqlen_q * dim) for step in dq.entries[:-2])
        self.slot = slot
        self.schedule = {
            **row.schedule(forward, device, num_kept, num_summed, dq_way),
            "slot": slot,
        }
        self.dq_steps = num_slots, heads * seqlen_q * dim, dq.entries[-1], dq.row
        block_m = row.tile(forward).block_m
        self.encoders = {
            name: _attention_gpu._encoder(
                forward, {**layout.params, **layout.grads}, name, x, rows
            )
            for name, x, rows in (
                ("q", operands.forward.q, block_m),
                ("k", operands.forward.k, _attention_vjp_kernels.HOPPER_BLOCK_N),
                ("v", operands.forward.v, _attention_vjp_kernels.HOPPER_BLOCK_N),
                ("dout", operands.dout, block_m),
            )
        }
        self.inputs: dict[tuple[int, ...], Any] = {}

        # Memory between the kernels, as vjp_hopper.cuh has it.
        num_entries = num_kept * num_summed
        num_blocks = row.num_blocks(forward)
        # If dq has a kernel of its own, it needs none of this.
        sums = 0 if apart else num_slots * num_blocks * block_m * row.dim(forward)
        turns = num_slots * num_blocks * row.num_warps * in_turns
        num_items, num_split = (self.schedule[n] for n in ("num_items", "num_split"))
        turns += num_split * row.num_warps * 2  # parts that have ended
        rows = num_split * _attention_vjp_kernels.HOPPER_BLOCK_N
        parts = rows * 2 * row.dim(forward)
        self.num_vectors = (sums + turns) // 4
        num_whole, num_tiles = self.schedule["num_whole"], self.schedule["num_tiles"]
        num_cut = num_tiles * num_kept - num_whole
        num_pieces = num_cut * self.schedule["num_pieces"]
        sizes = (
            _FOUND_BYTES,
            4 * sums,
            4 * turns,
            4 * parts,
            4 * num_entries * num_blocks * block_m * 2,
            4 * _PART_BYTES * num_pieces,
            _ENTRY_BYTES * num_entries,
            4 * num_entries * seqlen_q,
        )
        self.starts = [sum(sizes[:n]) for n in range(len(sizes))]
        self.num_bytes = sum(sizes)

        def launch(part, blocks):
            config = row.config(part, forward, batch_dims, blocks, dq_way)
            overlaps = part != "_rows"  # which comes first
            return _gpu.Launch(
                config.variant, config.grid, config.block, device_id, overlaps
            )

        # A block of threads of _rows has a quarter of the queries of a block.
        self.rows = launch("_rows", num_entries * num_blocks * 4)
        self.main = launch("", row.grid(forward, device, num_items, dq_way))
        tiles = -(-seqlen_q // _attention_vjp_kernels.HOPPER_TILE_M)
        self.dq = (
            launch("_queries", num_entries * tiles)
            if apart
            else launch("_dq", 4 * num_cut + 2 * num_slots * num_blocks)
        )
        self.cut = struct.pack(
            "4i", num_cut, self.schedule["num_pieces"], num_whole, num_tiles
        )
        fields = _attention_vjp_layout.entries_fields(
            _all_summed(layout, ("dq",)), [dq]
        )
        self.dq_grads = None
        if apart:
            self.dq_grads = _gpu.pack_bytes({**layout.grads, **fields}, grads_type)
        self.repairs = [
            _repair(part, names, forward, layout, device, device_id, overlaps=True)
            for part, names in (("queries", ("dq",)), ("keys", ("dk", "dv")))
        ]
        repairs = (launch for _, launch, _ in self.repairs)
        self.launches = (self.rows, self.main, self.dq, *repairs)

    def _new_inputs(self, pointers):
        """The parameter of the main kernel that depends on where arrays lie."""
        if len(self.inputs) >= _attention_gpu._MAX_INPUTS:
            self.inputs.clear()
        fields = dict(self.schedule)
        for (name, encode), ptr in zip(self.encoders.items(), pointers, strict=True):
            fields[f"{name}_map"] = encode(ptr)
        packed = _gpu.pack_bytes(fields, _attention_vjp_kernels.VJP_HOPPER_INPUTS)
        self.inputs[pointers] = packed
        return packed

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = {name: cupy.ndarray(*facts) for name, facts in self.gradients.items()}
        out, (dout, lse, dlse) = arrays[3].data.ptr, arrays[-3:]
        q, k, v = (x.data.ptr for x in arrays[:3])
        dout, lse = dout.data.ptr, lse.data.ptr
        dlse = 0 if dlse is None else dlse.data.ptr
        pointers = q, k, v, dout
        inputs = self.inputs.get(pointers)
        if inputs is None:
            inputs = self._new_inputs(pointers)
        memory = cupy.cuda.alloc(self.num_bytes)
        _attention_gpu.keep_if_capturing(memory)
        found, sums, turns, parts, stats, pieces, entries, delta = (
            memory.ptr + start for start in self.starts
        )
        if self.looks_for_largest:
            memory.memset_async(0, _FOUND_BYTES)
        self.rows.enqueue(
            out, dout, lse, dlse, stats, delta, sums, self.num_vectors,
            0 if self.is_fed else entries, *self.slot, found, self.params, self.grads,
        )  # fmt: skip
        dq, dk, dv = (made[name].data.ptr for name in ("dq", "dk", "dv"))
        self.main.enqueue(
            inputs, *(() if self.is_fed else (entries,)), stats, sums, turns,
            parts if self.is_fed else pieces, dk, dv, found,
            _attention_gpu._counters(self.device_id).of_current_stream(),
            *_NO_OPTIONS, offset, self.params, self.grads,
        )  # fmt: skip
        if self.dq_grads is None:
            cut = struct.pack("3Q", pieces, dk, dv) + self.cut
            self.dq.enqueue(
                sums, dq, *self.dq_steps, cut, found, self.params, self.grads
            )
        else:
            self.dq.enqueue(
                inputs, stats, dq, found, *_NO_OPTIONS, offset, self.params,
                self.dq_grads,
            )  # fmt: skip
        for names, launch, grads in self.repairs:
            targets = (made[name].data.ptr for name in names)
            launch.enqueue(
                q, k, v, dout, lse, delta, *targets, found, *_NO_OPTIONS, offset,
                self.params, grads,
            )  # fmt: skip
        return AttentionGrads(**made)


_NO_OPTIONS = (0,) * len(OPTIONS)
_ENTRY_BYTES = 80  # of located_t, vjp_hopper.cuh
_PART_BYTES = 4 * 64 * 64  # of `pieces` in vjp_hopper.cuh
_FOUND_BYTES = 256  # found_t, and to the next multiple of what memory is aligned to


def _all_summed(layout, names):
    """Entries that a block sums by itself, all that these gradients share."""
    targets = {name: layout.targets[name] for name in names}
    return _attention_vjp_layout.choose_entries(layout.shape, targets, 1, 1, 0)


def _repair(part, names, forward, layout, device, device_id, overlaps=False, **more):
    """(gradients, launch, their parameters) of a kernel that makes them again."""
    row = _attention_vjp_kernels.REPAIRING
    of_queries = part == "queries"
    heads = forward.num_heads if of_queries else forward.num_kv_heads
    seqlen = forward.seqlen_q if of_queries else forward.seqlen_k
    tile = row.tile(forward, device, math.prod(forward.batch) * heads, seqlen)
    config = row.config(
        part, tile, forward, layout.batch_dims, forward.dtype, device.num_sms,
        REPAIRS=1, **more,
    )  # fmt: skip
    fields = _attention_vjp_layout.entries_fields(
        _all_summed(layout, names), [layout.targets[name] for name in names]
    )
    grads = _gpu.pack_bytes({**layout.grads, **fields}, grads_dtype(layout.batch_dims))
    launch = _gpu.Launch(config.variant, config.grid, config.block, device_id, overlaps)
    return names, launch, grads
