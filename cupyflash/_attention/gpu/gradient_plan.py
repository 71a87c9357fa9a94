"""What plans of attention_vjp are made of: kernels, and sums after them."""

import math
from typing import Any

import cupy

from cupyflash._attention.gpu import gradient_config, gradient_layout
from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu import plan as attention_plan
from cupyflash._attention.gpu.gradient_layout import Target, grads_dtype, sum_dtype
from cupyflash._attention.gpu.params import contiguous_strides, params_dtype
from cupyflash._core import arrays as _arrays
from cupyflash._cuda import graphs, structs
from cupyflash._cuda import launch as _launch

FOUND_BYTES = 256  # found_t, and to the next multiple of what memory is aligned to


class BasePlan:
    """What all plans share: the device, and the gradients that a call returns."""

    launches: tuple[Any, ...] = ()

    def __init__(self, problem, device_id):
        forward = problem.forward
        self.device_id = device_id
        self.offset = attention_params.launch_offset(forward)
        self.rows_shape = problem.rows_shape
        dtype = _arrays.to_dtype(forward.dtype)
        # {name: (shape, dtype)}, in the order of AttentionGrads.
        self.gradients = {
            f"d{name}": (problem.written_shape(name), dtype) for name in "qkv"
        }
        if problem.need_dbias:
            dtype = _arrays.to_dtype(forward.bias)
            self.gradients["dbias"] = (problem.bias_shape, dtype)
        if problem.need_dsinks:
            dtype = _arrays.to_dtype(forward.sinks)
            self.gradients["dsinks"] = (problem.sinks_shape, dtype)

    def new_gradients(self, zeros=()):
        """Arrays for the gradients; those in `zeros`, which no kernel writes, are 0."""
        return {
            name: (cupy.zeros if name in zeros else cupy.ndarray)(*facts)
            for name, facts in self.gradients.items()
        }


def addresses(arrays):
    """Pointers of the arrays of a call, 0 for one that is absent."""
    return map(attention_plan.address, arrays)


class Kernel:
    """A launch, and the parameters that all its calls end with.

    These are made of one layout: a kernel that is told where one lse lies cannot be
    told the batch axes that another one leaves.
    """

    def __init__(self, launch, *params):
        self.launch, self.params = launch, params

    def enqueue(self, *args):
        self.launch.enqueue(*args, *self.params)


class Part:
    """One kernel that makes gradients, or terms of them that are then added up."""

    def __init__(self, names, kernel, sums=()):
        self.names, self.kernel = names, kernel
        self.sums = sums  # of each gradient, or none
        self.launches = (kernel.launch, *(x.kernel.launch for x in sums))

    def __call__(self, inputs, made, rest):
        """Launch, into the gradients that were made."""
        into = self.targets(made)
        self.make(inputs, into, rest)
        self.add_up(into, made)

    def targets(self, made):
        """Where the kernel writes: gradients, or new terms of them."""
        if not self.sums:
            return [made[name] for name in self.names]
        into = [x.new_terms() for x in self.sums]
        graphs.keep_if_capturing(into)
        return into

    def make(self, inputs, into, rest):
        """Launch the kernel."""
        self.kernel.enqueue(*inputs, *addresses(into), *rest)

    def add_up(self, into, made):
        """Launch the sums, if there are any."""
        for add_up, terms, name in zip(self.sums, into, self.names, strict=False):
            add_up(terms, made[name])


class Sum:
    """The kernel that adds up terms."""

    def __init__(self, shape, dtype, kernel):
        self.shape, self.dtype, self.kernel = shape, dtype, kernel

    def new_terms(self):
        """Memory for the terms."""
        return cupy.ndarray(self.shape, self.dtype)

    def __call__(self, terms, out):
        self.kernel.enqueue(terms.data.ptr, out.data.ptr)


class Launches:
    """Makes the parts of a plan, by the kernels of a row and one layout."""

    def __init__(self, row, forward, layout, device, device_id):
        self.row, self.forward, self.layout = row, forward, layout
        self.device, self.device_id = device, device_id
        self.params = structs.pack_bytes(layout.params, params_dtype(layout.batch_dims))

    def launch(self, config, overlaps=False):
        """The launch of a configuration."""
        return _launch.Launch(
            config.variant, config.grid, config.block, self.device_id, overlaps
        )

    def grads(self, **fields):
        """grads_t, with the fields of entries where it takes them."""
        return structs.pack_bytes(
            {**self.layout.grads, **fields}, grads_dtype(self.layout.batch_dims)
        )

    def kernel(self, config, grads, overlaps=False):
        """A configuration with all that it is told of arrays."""
        return Kernel(self.launch(config, overlaps), self.params, grads)

    def rows(self):
        """The kernel for delta."""
        config = gradient_config.rows_config(self.forward, self.layout.batch_dims)
        return self.kernel(config, self.grads())

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
        return self.part(part, tile, blocks, walk, targets, matrices, forward.dtype)

    def bias(self, **more):
        """The launch for dbias."""
        forward = self.forward
        num_entries = math.prod(forward.batch) * forward.num_heads
        tile = self.row.tile(forward, self.device, num_entries, forward.seqlen_q)
        return self.bias_by("bias", tile, **more)

    def bias_by(self, part, tile, **more):
        """The same by a kernel of the row and tiles of it."""
        forward, target = self.forward, self.layout.targets["dbias"]
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
        return self.part(
            part, tile, blocks, walk, {"dbias": target}, {"dbias": (rows, cols)},
            forward.bias, SUM_QUERIES=int(sum_queries), SUM_KEYS=int(sum_keys), **more,
        )  # fmt: skip

    def part(self, part, tile, blocks, walk, targets, matrices, dtype, **more):
        """A kernel over entries, and the sums after it.

        An entry has `blocks` blocks; each walks over `walk` tiles.
        """
        entries = gradient_layout.choose_entries(
            self.layout.shape, targets, blocks, walk, self.device.num_sms
        )
        return self.part_of(
            part, tile, blocks, entries, targets, matrices, dtype, **more
        )

    def part_of(self, part, tile, blocks, entries, targets, matrices, dtype, **more):
        """The same over given entries."""
        # An axis of the matrix that the kernel keeps though the gradient does not.
        outside = entries.has_terms or any(
            n > 1 and not step
            for name, target in targets.items()
            for n, step in zip(matrices[name], (target.row, target.col), strict=True)
        )
        sums, into, grad = [], list(targets.values()), dtype
        if outside:
            grad = self.forward.compute_dtype
            into = []
            for name, target in targets.items():
                rows, cols = matrices[name]
                full = (*entries.terms_shape, rows, cols)
                *steps, row, col = (
                    0 if n == 1 else s
                    for n, s in zip(full, contiguous_strides(full), strict=True)
                )
                into.append(Target(tuple(steps), row, col))
                steps = (*target.entries, target.row, target.col)
                sums.append(self.sum(full, steps, dtype))
        config = self.row.config(
            part, tile, self.forward, self.layout.batch_dims, grad,
            blocks * entries.num_kept, **more,
        )  # fmt: skip
        fields = gradient_layout.entries_fields(entries, into)
        return Part(tuple(targets), self.kernel(config, self.grads(**fields)), sums)

    def sum(self, shape, out_strides, dtype):
        """Terms of `shape`, contiguous, summed where `out_strides` is 0."""
        steps = contiguous_strides(shape)
        kept = [bool(step) for step in out_strides]
        sizes = [n if k else 1 for n, k in zip(shape, kept, strict=True)]
        summed = [1 if k else n for n, k in zip(shape, kept, strict=True)]
        accum = self.forward.compute_dtype
        config = gradient_config.sum_config(
            accum, dtype, len(shape), math.prod(sizes), math.prod(summed)
        )
        fields = {
            "num_sums": math.prod(sizes),
            "num_terms": math.prod(summed),
            "sums": (sizes, (steps, out_strides)),
            "terms": (summed, (steps,)),
        }
        params = structs.pack_bytes(fields, sum_dtype(len(shape)))
        return Sum(shape, accum, Kernel(self.launch(config), params))

    def sinks(self, problem):
        """The sum of the rows' terms for each head."""
        *batch, heads, seqlen_q = problem.rows_shape
        head = int(math.prod(problem.sinks_shape) > 1)
        return self.sum(
            (math.prod(batch), heads, seqlen_q), (0, head, 0), self.forward.sinks
        )


def all_summed(layout, names):
    """Entries that a block sums by itself, all that these gradients share."""
    targets = {name: layout.targets[name] for name in names}
    return gradient_layout.choose_entries(layout.shape, targets, 1, 1, 0)
