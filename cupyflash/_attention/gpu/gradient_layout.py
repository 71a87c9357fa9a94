"""Where the numbers of a gradient go: strides, and sums over shared entries."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu.params import contiguous_strides
from cupyflash._attention.vjp_problem import AttentionVjpProblem, aligned, aligned_bias
from cupyflash._cuda.structs import AXES, Struct

# Tiles that a block may loop over before it pays to divide them between blocks.
_SHORT_WALK = 16


# --- parameters ----------------------------------------------------------------------


GRADS = Struct(
    "grads_t",
    "attention/simt/gradients.cuh",
    (
        (attention_params.OPERAND, "dout", "lse", "dlse"),
        ("index_t", "num_kept", "num_summed"),
        ((AXES, "kEntryAxes", 3), "kept"),
        ((AXES, "kEntryAxes", 1), "summed"),
        ("index_t", "row[2]", "col[2]"),
    ),
)
SUM = Struct(
    "sum_t",
    "attention/simt/backward_reduce.cu",
    (
        ("long long", "num_sums", "num_terms"),
        ((AXES, "kAxes", 2), "sums"),
        ((AXES, "kAxes", 1), "terms"),
    ),
)


def grads_dtype(batch_dims: int) -> np.dtype:
    """grads_t for arrays with this many batch axes."""
    return GRADS.dtype(kBatchDims=batch_dims, kEntryAxes=batch_dims + 2)


@dataclass(frozen=True)
class Target:
    """Strides of a gradient; 0 along axes of entries that share it.

    The axes of entries are the batch axes, heads of k, and heads of a group.
    """

    entries: tuple[int, ...]
    row: int
    col: int


@dataclass(frozen=True)
class Layout:
    """A call in numbers: batch axes merged, and strides of every array along them."""

    params: dict[str, Any]  # params_t
    grads: dict[str, Any]  # dout, lse and dlse of grads_t
    shape: tuple[int, ...]  # of the axes of entries
    targets: dict[str, Target]  # "dq", "dk", "dv", "dbias"

    @property
    def batch_dims(self) -> int:
        return len(self.shape) - 2


def layout(problem: AttentionVjpProblem, operands) -> Layout:
    """The kernels' view of the arrays; new gradients are contiguous."""
    forward, batch = problem.forward, problem.forward.batch
    outside = {name: getattr(operands, name) for name in ("dout", "lse", "dlse")}
    gradients = {}
    for name, view in _gradient_views(problem).items():
        shape = (*batch, *view.shape[len(batch) :])
        if name == "dbias":
            shape = (*batch, forward.num_heads, forward.seqlen_q, forward.seqlen_k)
        gradients[name] = np.broadcast_to(view, shape)
    inputs = {
        name: getattr(operands.forward, name) for name in attention_params.FORWARD
    }
    strides = attention_params.strides_of(inputs | outside | gradients)
    shape, found = attention_params.operands_of(batch, strides)
    targets = {}
    for name in gradients:
        of_batch, head, row, col = found[name]
        of_head = (forward.group_size * head, head)
        if name in ("dk", "dv"):
            of_head = head, 0
        targets[name] = Target((*of_batch, *of_head), row, col)
    params = {
        **attention_params.scalar_fields(forward),
        "batch_shape": shape,
        **{name: found[name] for name in inputs},
    }
    return Layout(
        params,
        {name: found[name] for name in outside},
        (*shape, forward.num_kv_heads, forward.group_size),
        targets,
    )


def operands_of_targets(layout: Layout) -> dict[str, Any]:
    """Strides of gradients as operand_t has them."""
    found = {}
    for name, target in layout.targets.items():
        *batch, kv_head, in_group = target.entries
        head = kv_head if name in ("dk", "dv") else in_group
        found[name] = (tuple(batch), head, target.row, target.col)
    return found


def with_new_lse(problem: AttentionVjpProblem, operands) -> Layout:
    """The same for kernels that use a new, contiguous lse instead of the call's.

    Batch axes may merge that do not merge with the lse of the call.
    """
    lse = _made_up(problem.rows_shape, problem.forward.compute_dtype)
    return layout(problem, operands._replace(lse=lse))


def _made_up(shape, dtype="int8"):
    """A contiguous array that occupies no memory, for its shape and strides."""
    element = np.empty(1, dtype)
    steps = tuple(step * element.itemsize for step in contiguous_strides(shape))
    return np.lib.stride_tricks.as_strided(element, shape, steps)


def _gradient_views(problem):
    """Views of made-up gradients, batch + matrix axes, that occupy no memory."""
    forward = problem.forward
    views = {}
    for name in "qkv":
        columns = getattr(problem, f"{name}_shape")[-1]
        written = _made_up(problem.written_shape(name))[..., :columns]
        is_packed = name == "q" and problem.is_packed
        own = replace(forward, layout="bhsd") if is_packed else forward
        views[f"d{name}"] = aligned(written, own)
    if problem.need_dbias:
        views["dbias"] = aligned_bias(_made_up(problem.bias_shape), forward)
    return views


# --- sums over entries ---------------------------------------------------------------


@dataclass(frozen=True)
class Entries:
    """Which axes of entries a kernel keeps; it sums over the others.

    `outside` are axes that are kept although the gradients lack them: the kernel writes
    terms along them, which another kernel adds up.
    """

    shape: tuple[int, ...]
    kept: tuple[bool, ...]
    outside: dict[str, tuple[int, ...]]

    @property
    def num_kept(self) -> int:
        return math.prod(n for n, k in zip(self.shape, self.kept, strict=True) if k)

    @property
    def has_terms(self) -> bool:
        return any(self.outside.values())

    @property
    def terms_shape(self) -> tuple[int, ...]:
        """Axes of entries in an array of terms."""
        return tuple(n if k else 1 for n, k in zip(self.shape, self.kept, strict=True))


def choose_entries(
    shape: tuple[int, ...],
    targets: dict[str, Target],
    blocks: int,
    walk: int,
    num_sms: int,
) -> Entries:
    """Sum inside the kernel what all its gradients sum, unless blocks are few.

    A kept entry has `blocks` blocks, each of which loops over `walk` tiles.
    """

    owns = {name: _own(shape, target) for name, target in targets.items()}
    kept = [any(column) for column in zip(*owns.values(), strict=True)]
    # Longest first: one axis may suffice.
    for axis in sorted(range(len(shape)), key=lambda a: -shape[a]):
        size = math.prod(n for n, k in zip(shape, kept, strict=True) if k)
        length = walk * math.prod(shape) // max(size, 1)
        if not kept[axis] and size * blocks < num_sms and length > _SHORT_WALK:
            kept[axis] = True
    return _entries(shape, targets, kept)


def all_summed(layout: Layout, names: tuple[str, ...]) -> Entries:
    """Entries summed within a block: all that these gradients share."""
    targets = {name: layout.targets[name] for name in names}
    return choose_entries(layout.shape, targets, 1, 1, 0)


def keep_entries(shape: tuple[int, ...], targets: dict[str, Target]) -> Entries:
    """All entries kept: none is summed inside the kernel."""
    return _entries(shape, targets, [True] * len(shape))


def _own(shape, target):
    """Along which axes of entries a gradient has entries of its own."""
    return [n == 1 or bool(step) for n, step in zip(shape, target.entries, strict=True)]


def _entries(shape, targets, kept):
    outside = {}
    for name, target in targets.items():
        own = _own(shape, target)
        outside[name] = tuple(a for a, k in enumerate(kept) if k and not own[a])
    return Entries(shape, tuple(kept), outside)


def entries_fields(entries: Entries, targets: list[Target]) -> dict[str, Any]:
    """The fields of grads_t that tell where the gradients of an entry go."""
    strides = contiguous_strides(entries.shape)
    kept_sizes = entries.terms_shape
    summed_sizes = tuple(
        1 if k else n for n, k in zip(entries.shape, entries.kept, strict=True)
    )
    targets = (targets * 2)[:2]
    return {
        "num_kept": math.prod(kept_sizes),
        "num_summed": math.prod(summed_sizes),
        "kept": (kept_sizes, (strides, *(t.entries for t in targets))),
        "summed": (summed_sizes, (strides,)),
        "row": tuple(t.row for t in targets),
        "col": tuple(t.col for t in targets),
    }
