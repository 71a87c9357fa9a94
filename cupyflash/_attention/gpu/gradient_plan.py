"""Building blocks of plans of attention_vjp: kernels, and sums after them."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from cupyflash._attention.gpu import gradient_config, gradient_layout
from cupyflash._attention.gpu.config import OPTIONS_AND_OFFSET, num_heads, num_tiles
from cupyflash._attention.gpu.functions import with_functions
from cupyflash._attention.gpu.gradient_layout import GRADS, SUM, Target
from cupyflash._attention.gpu.params import PARAMS, contiguous_strides
from cupyflash._core import arrays as _arrays
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._cuda.launch_sequence import Result, Step, num_bytes

FOUND_BYTES = 256  # found_t, rounded up to the alignment of memory


def last_arguments(layout, struct) -> tuple[str | bytes, ...]:
    """The options and params_t, and the struct with the strides of all gradients.

    They are the last arguments of the kernels that write dq, dk and dv in one launch.
    """
    dims = layout.batch_dims
    fields = layout.grads | gradient_layout.operands_of_targets(layout)
    return (
        *OPTIONS_AND_OFFSET,
        PARAMS.pack(layout.params, kBatchDims=dims),
        struct.pack(fields, kBatchDims=dims),
    )


def gradient_results(problem) -> dict[str, Result | None]:
    """The results of a call, in the order of AttentionGrads, as kernels write them."""
    forward = problem.forward
    dtype = _arrays.to_dtype(forward.dtype)
    found: dict[str, Result | None] = {
        f"d{name}": Result(problem.written_shape(name), dtype) for name in "qkv"
    }
    found |= dict.fromkeys(("dbias", "dsinks"))
    if problem.need_dbias:
        found["dbias"] = Result(problem.bias_shape, _arrays.to_dtype(forward.bias))
    if problem.need_dsinks:
        found["dsinks"] = Result(problem.sinks_shape, _arrays.to_dtype(forward.sinks))
    return found


class Part(NamedTuple):
    """One kernel that computes gradients, or terms of them that are then summed.

    Its parameters come from one layout: a kernel that takes the strides of one lse
    cannot take the batch axes that another lse leaves.
    """

    names: tuple[str, ...]
    config: LaunchConfig
    into: tuple[str | int, ...]  # gradients, their terms, or 0 for none
    params: tuple[Any, bytes]
    sums: tuple[Step, ...] = ()
    terms: Mapping[str, int] = MappingProxyType({})  # bytes by name

    def launch(self, inputs, *after) -> Step:
        """The launch of the kernel alone; `after` follows the arrays that it writes."""
        rest = (*after, *OPTIONS_AND_OFFSET, *self.params)
        return self.config, (*inputs, *self.into, *rest)

    def launches(self, inputs, *after) -> list[Step]:
        """The launch of the kernel, and the sums of its terms."""
        return [self.launch(inputs, *after), *self.sums]

    def for_finish(self) -> "Part":
        """The same for dq in splits, whose terms Kernels.finish() adds: dq_splits."""
        terms = {"dq_splits": self.terms["dq_terms"]}
        return self._replace(into=("dq_splits",), sums=(), terms=terms)


class Kernels:
    """Makes the parts of a sequence from a kernel spec and one layout."""

    def __init__(self, row, forward, layout, device):
        self.row, self.forward, self.layout = row, forward, layout
        self.device = device
        params = PARAMS.pack(layout.params, kBatchDims=layout.batch_dims)
        self.params = with_functions(params, forward)

    def grads(self, **fields):
        """grads_t, with the fields of entries if it has them."""
        dims = self.layout.batch_dims
        return GRADS.pack(
            {**self.layout.grads, **fields}, kBatchDims=dims, kEntryAxes=dims + 2
        )

    def grads_of(self, names, entries=None):
        """grads_t of a kernel that writes these gradients; by default all_summed()."""
        entries = entries or gradient_layout.all_summed(self.layout, names)
        targets = [self.layout.targets[name] for name in names]
        return self.grads(**gradient_layout.entries_fields(entries, targets))

    def rows(self, lse, dsinks_terms) -> Step:
        """The kernel for delta; `lse` is a recomputed one, if there is one."""
        config = gradient_config.rows_config(self.forward, self.layout.batch_dims)
        arguments = ("out", "dout", "lse", lse, "dlse", "delta", dsinks_terms)
        rest = (*OPTIONS_AND_OFFSET, self.params, self.grads())
        return config, (*arguments, *rest)

    def matrix(self, name) -> tuple[int, int]:
        """Rows and columns of a head of dq, dk or dv."""
        forward = self.forward
        rows = forward.seqlen_q if name == "dq" else forward.seqlen_k
        return rows, forward.head_dim_v if name == "dv" else forward.head_dim

    def lost_sink_terms(self) -> Step:
        """The kernel for terms of dsinks that the rounding of `out` has lost."""
        forward, device = self.forward, self.device
        heads = num_heads(forward)
        tile = self.row.tile(forward, device, heads, forward.seqlen_q)
        blocks = min(num_tiles(forward, tile.block_m), 2 * device.num_sms)
        config = self.row.config(
            "sinks", tile, forward, self.layout.batch_dims, forward.dtype, blocks
        )
        arguments = ("q", "k", "v", "dout", "lse", "delta", "dlse", "dsinks_terms")
        rest = (*OPTIONS_AND_OFFSET, self.params, self.grads())
        return config, (*arguments, *rest)

    def queries(self) -> Part:
        """The kernel for dq."""
        return self._of_rows("queries", self.forward.num_heads, ("dq",))

    def keys(self) -> Part:
        """The kernel for dk and dv."""
        return self._of_rows("keys", self.forward.num_kv_heads, ("dk", "dv"))

    def _of_rows(self, part, heads, names):
        """A kernel whose blocks own tiles of rows of each of the heads."""
        forward = self.forward
        num_entries = math.prod(forward.batch) * heads
        seqlen, _ = self.matrix(names[0])
        tile = self.row.tile(forward, self.device, num_entries, seqlen)
        columns = [self.matrix(name)[1] for name in names]
        chunks = max(self.row.num_chunks(forward, n) for n in columns)
        blocks = -(-seqlen // tile.block_m) * chunks
        other = forward.seqlen_k if part == "queries" else forward.seqlen_q
        return self.part(part, tile, blocks, -(-other // tile.block_n), names)

    def finish(self, part, **more) -> Part:
        """The kernel that adds dq and totals of the splits of a loop."""
        targets = {"dq": self.layout.targets["dq"]}
        entries = gradient_layout.keep_entries(self.layout.shape, targets)
        blocks = self.row.blocks_of_finish(self.forward)
        return self.part_of(part, None, blocks, entries, ("dq",), **more)

    def bias(self, **more) -> Part:
        """The kernel for dbias."""
        forward = self.forward
        num_entries = math.prod(forward.batch) * forward.num_heads
        tile = self.row.tile(forward, self.device, num_entries, forward.seqlen_q)
        return self.bias_by("bias", tile, **more)

    def bias_by(self, part, tile, **more) -> Part:
        """The same, by a kernel of the kernel spec with one of its tiles."""
        forward, target = self.forward, self.layout.targets["dbias"]
        sum_queries = forward.seqlen_q > 1 and not target.row
        # If all keys share it as well, a second kernel sums over keys.
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
            part, tile, blocks, walk, ("dbias",), (rows, cols), forward.bias,
            SUM_QUERIES=int(sum_queries), SUM_KEYS=int(sum_keys), **more,
        )  # fmt: skip

    def part(
        self, part, tile, blocks, walk, names, matrix=None, dtype=None, **more
    ) -> Part:
        """A kernel over entries, and the sums after it.

        An entry has `blocks` blocks; each loops over `walk` tiles.
        """
        targets = {name: self.layout.targets[name] for name in names}
        entries = gradient_layout.choose_entries(
            self.layout.shape, targets, blocks, walk, self.device.num_sms
        )
        return self.part_of(part, tile, blocks, entries, names, matrix, dtype, **more)

    def part_of(
        self, part, tile, blocks, entries, names, matrix=None, dtype=None, splits=1,
        **more,
    ) -> Part:  # fmt: skip
        """The same over given entries; `matrix` is what it writes for each of them.

        If blocks share a loop, each of the `splits` writes terms of its own.
        """
        targets = [self.layout.targets[name] for name in names]
        matrices = [matrix or self.matrix(name) for name in names]
        dtype = dtype or self.forward.dtype
        # An axis of the matrix that the kernel keeps although the gradient lacks it.
        outside = (
            splits > 1
            or entries.has_terms
            or any(
                n > 1 and not step
                for target, shape in zip(targets, matrices, strict=True)
                for n, step in zip(shape, (target.row, target.col), strict=True)
            )
        )
        sums, terms, into, grad = [], {}, tuple(names), dtype
        if splits > 1:
            more["splits"] = splits
        if outside:
            grad = self.forward.compute_dtype
            into = tuple(f"{name}_terms" for name in names)
            kept = zip(names, targets, matrices, strict=True)
            targets = []
            for name, target, matrix_shape in kept:
                full = (splits, *entries.terms_shape, *matrix_shape)
                _, *steps, row, col = (
                    0 if n == 1 else s
                    for n, s in zip(full, contiguous_strides(full), strict=True)
                )
                targets.append(Target(tuple(steps), row, col))
                out_strides = (0, *target.entries, target.row, target.col)
                if splits == 1:
                    full, out_strides = full[1:], out_strides[1:]
                sums.append(self.sum(full, out_strides, dtype, name))
                terms[f"{name}_terms"] = num_bytes(full, grad)
        config = self.row.config(
            part, tile, self.forward, self.layout.batch_dims, grad,
            blocks * entries.num_kept * splits, **more,
        )  # fmt: skip
        fields = gradient_layout.entries_fields(entries, targets)
        params = self.params, self.grads(**fields)
        return Part(tuple(names), config, into, params, tuple(sums), terms)

    def sum_of_splits(self, name, splits) -> tuple[Step, int]:
        """The sum of the terms of dq, dk or dv that `splits` blocks wrote; their bytes.

        Terms of dk and dv are sums over the query heads that share a head of k.
        """
        forward, target = self.forward, self.layout.targets[name]
        entries = self.layout.shape if name == "dq" else self.layout.shape[:-1]
        shape = (splits, *entries, *self.matrix(name))
        of_entries = target.entries[: len(entries)]
        strides = (0, *of_entries, target.row, target.col)
        sums = self.sum(shape, strides, forward.dtype, name)
        return sums, num_bytes(shape, forward.compute_dtype)

    def sum(self, shape, out_strides, dtype, name) -> Step:
        """Contiguous terms of `shape`, summed along axes where `out_strides` is 0."""
        steps = contiguous_strides(shape)
        kept = [bool(step) for step in out_strides]
        sizes = [n if k else 1 for n, k in zip(shape, kept, strict=True)]
        summed = [1 if k else n for n, k in zip(shape, kept, strict=True)]
        config = gradient_config.sum_config(
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
        params = SUM.pack(fields, kAxes=len(shape))
        return config, (f"{name}_terms", name, params)


def sinks(problem, kernels: Kernels) -> tuple[list[Step], dict[str, int]]:
    """The sum of the rows' terms for each head, and memory for them; or nothing.

    `kernels` are portable ones.
    """
    if not problem.need_dsinks:
        return [], {}
    *batch, heads, seqlen_q = problem.rows_shape
    shape = (math.prod(batch), heads, seqlen_q)
    head = int(math.prod(problem.sinks_shape) > 1)
    forward = problem.forward
    steps = [kernels.sum(shape, (0, head, 0), forward.sinks, "dsinks")]
    if forward.dtype == "float16":  # bfloat16 has the exponents of float32
        steps.insert(0, kernels.lost_sink_terms())
    return steps, {"dsinks_terms": num_bytes(shape, forward.compute_dtype)}
