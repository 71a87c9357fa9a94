"""Plans of attention_vjp for the row of float32 by mma.sync."""

import math

import cupy

from cupyflash import (
    _attention_gpu,
    _attention_params,
    _attention_vjp_kernels,
    _attention_vjp_layout,
    _gpu,
)
from cupyflash._attention_params import params_dtype
from cupyflash._attention_vjp_layout import grads_dtype
from cupyflash._attention_vjp_mma_split import made_by, makes
from cupyflash._attention_vjp_plans import (
    _gradients,
    _Launches,
    _repair,
    own_lse_plan,
)
from cupyflash._attention_vjp_problem import AttentionGrads

_FOUND_BYTES = 256  # found_t, and to the next multiple of what memory is aligned to


class _SplitLaunches(_Launches):
    """Launches whose parameters are bytes."""

    def _grads(self, **fields):
        return _gpu.pack_bytes(
            {**self.layout.grads, **fields}, grads_dtype(self.layout.batch_dims)
        )

    def own(self, part, names):
        """(launch, entries of a section) of this row's kernel for `names`."""
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
            _attention_vjp_layout.keep_entries(layout.shape, targets)
            if of_queries
            else _attention_vjp_layout.choose_entries(
                layout.shape, targets, blocks, walk, self.device.num_sms
            )
        )
        dims = {
            "dq": forward.head_dim,
            "dk": forward.head_dim,
            "dv": forward.head_dim_v,
        }
        launch = self._part_of(
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
        return launch, section


class MmaSplitPlan:
    """Delta, images of the inputs, dq, dk and dv, and repairs if they are asked for."""

    def __init__(self, row, problem, operands, device, device_id):
        forward = problem.forward
        self.device_id = device_id
        self.offset = _attention_params.launch_offset(forward)
        self.gradients = _gradients(problem)
        self.rows_shape = problem.rows_shape
        layout = _attention_vjp_layout.layout(problem, operands)
        batch_dims = layout.batch_dims
        self.params = _gpu.pack_bytes(layout.params, params_dtype(batch_dims))
        make = _SplitLaunches(row, forward, layout, device, device_id)
        self.rows, self.grads = make.rows()
        num_images, image_bytes = row.images(forward)
        self.prepare = make._launch(
            row.config("_prepare", None, forward, batch_dims, "float32", num_images)
        )
        self.queries, self.section_q = make.own("_queries", ("dq",))
        tile = row.tile("_keys", forward, device)
        self.keys = [make.own("_keys", names) for names in made_by("_keys", tile)]

        # Memory between the kernels.
        num_rows = math.prod(problem.rows_shape)
        sizes = (_FOUND_BYTES, image_bytes, row.stats_bytes(forward), 4 * num_rows)
        self.starts = [sum(sizes[:n]) for n in range(len(sizes))]
        self.num_bytes = sum(sizes)

        # Kernels after these take the lse that is made anew, which is contiguous.
        lse = cupy.ndarray(self.rows_shape, "float32")
        own = _attention_vjp_layout.layout(problem, operands._replace(lse=lse))
        # Its batch axes may merge where those with the lse of the call do not.
        self.own_params = _gpu.pack_bytes(own.params, params_dtype(own.batch_dims))
        self.repairs = [
            _repair("queries", ("dq",), forward, layout, device, device_id, OWN_LSE=1),
            _repair("keys", ("dk", "dv"), forward, own, device, device_id),
        ]
        slow = _Launches(
            _attention_vjp_kernels.REPAIRING, forward, own, device, device_id
        )
        self.own_lse = self.bias = None
        if problem.need_dbias:
            self.own_lse = own_lse_plan(problem, operands, device)
            self.own_bytes = 4 * math.prod(self.own_lse.out_shape)
            self.bias = slow.bias()
            self.bias_params = _gpu.pack(own.params, params_dtype(own.batch_dims))
        self.sinks = slow.sinks(problem) if problem.need_dsinks else None
        self.launches = (
            *(self.own_lse.launches if self.own_lse else ()),
            self.rows,
            self.prepare,
            *self.queries.launches,
            *(launch for part, _ in self.keys for launch in part.launches),
            *(launch for _, launch, _ in self.repairs),
            *(self.bias.launches if self.bias else ()),
            *((self.sinks.launch,) if self.sinks else ()),
        )

    def __call__(self, arrays, offset):
        """Launch; `arrays` as _arrays_of() has them."""
        made = {name: cupy.ndarray(*facts) for name, facts in self.gradients.items()}
        own_lse = self._own_lse(arrays, offset, made)
        q, k, v, out, *options, dout, lse, dlse = (
            0 if x is None else x.data.ptr for x in arrays
        )
        memory = cupy.cuda.alloc(self.num_bytes)
        delta = cupy.ndarray(self.rows_shape, "float32")
        sink_terms = cupy.ndarray(self.rows_shape if self.sinks else 0, "float32")
        _attention_gpu.keep_if_capturing((memory, own_lse, delta, sink_terms))
        found, images, stats, repaired_lse = (memory.ptr + n for n in self.starts)
        memory.memset_async(0, _FOUND_BYTES)
        rest = (*options, offset, self.params)
        self.rows.enqueue(
            out, dout, lse, 0 if own_lse is None else own_lse.data.ptr, dlse,
            delta.data.ptr, sink_terms.data.ptr if self.sinks else 0, *rest, self.grads,
        )  # fmt: skip
        self.prepare.enqueue(images, q, k, v, dout, *rest, self.grads)
        self._make(
            self.queries, made,
            (images, lse, delta.data.ptr, stats, found, self.section_q), rest,
        )  # fmt: skip
        for part, section in self.keys:
            self._make(part, made, (images, stats, found, section), rest)
        for (names, launch, grads), of_lse, more, params in zip(
            self.repairs, (lse, repaired_lse), ((repaired_lse,), ()),
            (self.params, self.own_params), strict=True,
        ):  # fmt: skip
            launch.enqueue(
                q, k, v, dout, of_lse, delta.data.ptr,
                *(made[name].data.ptr for name in names), found, *more,
                *options, offset, params, grads,
            )  # fmt: skip
        if self.bias is not None:
            q, k, v, _, *options, dout, _, _ = arrays
            options = [_gpu.NULL if x is None else x for x in options]
            self.bias(
                (q, k, v, dout, own_lse, delta), made,
                (*options, offset, self.bias_params), "float32",
            )  # fmt: skip
        if self.sinks is not None:
            self.sinks(sink_terms, made["dsinks"])
        return AttentionGrads(**made)

    def _own_lse(self, arrays, offset, made):
        """The lse of the portable kernels' scores, if they are to make dbias."""
        if self.own_lse is None:
            return None
        q, k, v, _, *options, _, _, _ = arrays
        # Its out goes where a gradient will be, if there is room.
        room = next((x for x in made.values() if x.nbytes >= self.own_bytes), None)
        unused, own_lse = self.own_lse((q, k, v, room, *options), offset)
        _attention_gpu.keep_if_capturing(unused)
        return own_lse

    def _make(self, part, made, inputs, rest):
        """A kernel of this row, and the sums of its terms if it has any."""
        into = [made[name] for name in part.names]
        if part.terms is not None:
            into = [cupy.ndarray(shape, "float32") for shape, _ in part.terms]
            _attention_gpu.keep_if_capturing(into)
        targets = [x.data.ptr for x in into]
        if part.names in (("dk",), ("dv",)):
            targets *= 2  # the kernel has parameters for both
        part.launch.enqueue(*inputs, *targets, *rest, part.grads)
        for (_, add_up), terms, name in zip(
            part.terms or (), into, part.names, strict=False
        ):
            add_up(terms, made[name])
