"""The plan of attention_vjp on sm_90a."""

import math
import struct

import cupy

from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu.config import OPTIONS
from cupyflash._attention.gpu.gradient_layout import grads_dtype
from cupyflash._attention.gpu.gradient_plan import (
    FOUND_BYTES,
    BasePlan,
    addresses,
    all_summed,
)
from cupyflash._attention.gpu.params import params_dtype, sections
from cupyflash._attention.gpu.simt.repair import repairs
from cupyflash._attention.gpu.sm90 import backward as sm90_backward
from cupyflash._attention.gpu.sm90.operands import encoder
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._cuda import graphs, structs
from cupyflash._cuda import launch as _launch
from cupyflash._cuda.tensor_map import MappedInputs


class HopperPlan(BasePlan):
    """Statistics, all gradients, dq to 16 bits, and repairs if they are asked for."""

    def __init__(self, row, problem, operands, device, device_id):
        super().__init__(problem, device_id)
        forward = problem.forward
        # What _rows makes the maximum of has to be 0; the rest of found_t it sets.
        self.looks_for_largest = forward.dtype == "float16"
        layout = gradient_layout.layout(problem, operands)
        batch_dims = layout.batch_dims
        self.params = structs.pack_bytes(layout.params, params_dtype(batch_dims))
        dq, dk, dv = (layout.targets[name] for name in ("dq", "dk", "dv"))
        entries = all_summed(layout, ("dk", "dv"))
        fields = gradient_layout.entries_fields(entries, [dk, dv])
        grads_type = grads_dtype(batch_dims)
        self.grads = structs.pack_bytes({**layout.grads, **fields}, grads_type)
        num_kept, num_summed = fields["num_kept"], fields["num_summed"]
        dq_way = row.dq_way(problem, device, num_kept)
        in_turns = dq_way == sm90_backward.TURNS
        apart = dq_way == sm90_backward.APART
        self.is_fed = row.tile(forward, dq_way).feeder

        seqlen_q, heads = forward.seqlen_q, forward.num_heads
        *rows, columns = problem.written_shape("q")
        head_step = seqlen_q * columns
        num_slots = math.prod(rows) // seqlen_q
        slot = [0, 0]
        slot[:batch_dims] = (step // head_step for step in dq.entries[:-2])
        self.slot = slot
        self.schedule = {
            **row.schedule(forward, device, num_kept, num_summed, dq_way),
            "slot": slot,
        }
        self.dq_steps = num_slots, heads * head_step, dq.entries[-1], dq.row
        block_m = row.tile(forward).block_m
        encoders = {
            name: encoder(forward, {**layout.params, **layout.grads}, name, x, rows)
            for name, x, rows in (
                ("q", operands.forward.q, block_m),
                ("k", operands.forward.k, sm90_backward.BLOCK_N),
                ("v", operands.forward.v, sm90_backward.BLOCK_N),
                ("dout", operands.dout, block_m),
            )
        }
        self.inputs = MappedInputs(encoders, self._inputs)

        # Memory between the kernels, as attention/sm90/backward.cuh has it.
        num_entries = num_kept * num_summed
        num_blocks = row.num_blocks(forward)
        # If dq has a kernel of its own, it needs none of this.
        sums = 0 if apart else num_slots * num_blocks * block_m * row.dim(forward)
        turns = num_slots * num_blocks * row.num_warps * in_turns
        num_items, num_split = (self.schedule[n] for n in ("num_items", "num_split"))
        turns += num_split * row.num_warps * 2  # parts that have ended
        rows = num_split * sm90_backward.BLOCK_N
        parts = rows * 2 * row.dim(forward)
        self.num_vectors = (sums + turns) // 4
        num_whole, num_tiles = self.schedule["num_whole"], self.schedule["num_tiles"]
        num_cut = num_tiles * num_kept - num_whole
        num_pieces = num_cut * self.schedule["num_pieces"]
        sizes = (
            FOUND_BYTES,
            4 * (sums + turns),  # _rows makes both 0 in one go
            4 * parts,
            4 * num_entries * num_blocks * block_m * 2,
            4 * _PART_BYTES * num_pieces,
            _ENTRY_BYTES * num_entries,
            4 * num_entries * seqlen_q,
        )
        self.starts, self.num_bytes = sections(*sizes)
        self.turns_behind = 4 * sums

        def launch(part, blocks):
            config = row.config(part, forward, batch_dims, blocks, dq_way)
            overlaps = part != "_rows"  # which comes first
            return _launch.Launch(
                config.variant, config.grid, config.block, device_id, overlaps
            )

        # A block of threads of _rows has a quarter of the queries of a block.
        self.rows = launch("_rows", num_entries * num_blocks * 4)
        self.main = launch("", row.grid(forward, device, num_items, dq_way))
        tiles = -(-seqlen_q // sm90_backward.TILE_M)
        self.dq = (
            launch("_queries", num_entries * tiles)
            if apart
            else launch("_dq", 4 * num_cut + 2 * num_slots * num_blocks)
        )
        self.cut = struct.pack(
            "4i", num_cut, self.schedule["num_pieces"], num_whole, num_tiles
        )
        fields = gradient_layout.entries_fields(all_summed(layout, ("dq",)), [dq])
        self.dq_grads = None
        if apart:
            self.dq_grads = structs.pack_bytes({**layout.grads, **fields}, grads_type)
        self.repairs = repairs(forward, layout, device, device_id, overlaps=True)
        of_repairs = (repair.kernel.launch for repair in self.repairs)
        self.launches = (self.rows, self.main, self.dq, *of_repairs)

    def _inputs(self, maps, pointers):
        """The parameter of the main kernel that depends on where arrays lie."""
        inputs = sm90_backward.INPUTS
        return structs.pack_bytes({**self.schedule, **maps}, inputs)

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = self.new_gradients()
        q, k, v, out, *_, dout, lse, dlse = addresses(arrays)
        pointers = q, k, v, dout
        inputs = self.inputs.get(pointers)
        if inputs is None:
            inputs = self.inputs.make(pointers)
        memory = cupy.cuda.alloc(self.num_bytes)
        graphs.keep_if_capturing(memory)
        found, sums, parts, stats, pieces, entries, delta = (
            memory.ptr + start for start in self.starts
        )
        turns = sums + self.turns_behind
        if self.looks_for_largest:
            memory.memset_async(0, FOUND_BYTES)
        self.rows.enqueue(
            out, dout, lse, dlse, stats, delta, sums, self.num_vectors,
            0 if self.is_fed else entries, *self.slot, found, self.params, self.grads,
        )  # fmt: skip
        dq, dk, dv = (made[name].data.ptr for name in ("dq", "dk", "dv"))
        self.main.enqueue(
            inputs, *(() if self.is_fed else (entries,)), stats, sums, turns,
            parts if self.is_fed else pieces, dk, dv, found,
            graphs.counters(self.device_id).of_current_stream(),
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
        for repair in self.repairs:
            inputs = q, k, v, dout, lse, delta
            repair(inputs, made, found, (*_NO_OPTIONS, offset))
        return AttentionGrads(**made)


_NO_OPTIONS = (0,) * len(OPTIONS)
_ENTRY_BYTES = 80  # of located_t, attention/sm90/backward.cuh
_PART_BYTES = 4 * 64 * 64  # of `pieces` in attention/sm90/backward.cuh
