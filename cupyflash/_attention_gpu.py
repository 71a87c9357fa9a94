"""The CuPy back end of attention: plans of kernels and matmuls, launched."""

import math
from typing import Any

import cupy
import numpy as np

from cupyflash import (
    _arrays,
    _attention_kernels,
    _attention_problem,
    _gpu,
    _kernels,
    _layout,
)
from cupyflash._attention_kernels import ATTENTION_KERNELS, OPTIONS, FusedKernel

_NULL = _gpu.NULL
_plans = _gpu.PlanCache()


# --- calls ---------------------------------------------------------------------------


def attention(
    q,
    k,
    v,
    bias,
    mask,
    scale,
    causal,
    query_offset,
    window,
    softcap,
    sinks,
    alibi_slopes,
    query_lengths,
    key_lengths,
    layout,
    precision,
    return_lse,
    out,
    method,
) -> tuple[Any, Any]:
    """attention() of CuPy arrays; a call seen before goes straight to its launch."""
    offset_is_int = type(query_offset) is int
    offsets = None if offset_is_int else query_offset
    try:
        key: Any = (
            *(q.shape, q.strides, q.dtype.char, q.data.device_id),
            *(k.shape, k.strides, k.dtype.char, k.data.device_id),
            *(v.shape, v.strides, v.dtype.char, v.data.device_id),
            *(scale, type(scale), causal, type(causal), softcap, type(softcap)),
            # By its repr, since 1 and True are not the same argument.
            window if window is None else repr(window),
            *(layout, precision, bool(return_lse), method, offset_is_int),
            out if out is None else _facts(out),
        )
        options = (bias, mask, sinks, alibi_slopes, offsets, query_lengths, key_lengths)
        if not (
            bias is mask is sinks is alibi_slopes is offsets
            is query_lengths is key_lengths is None
        ):  # fmt: skip
            key += tuple([x if x is None else _facts(x) for x in options])
        plan = _plans.get(key)
    except (AttributeError, TypeError, ValueError):
        # Not all CuPy arrays, or an option of a wrong type: the checks will say.
        key = plan = None
    if plan is not None:
        arrays = (q, k, v, out, *options)
        if out is None or not plan.may_overlap(arrays):
            far = _attention_kernels.FAR
            offset = max(-far, min(query_offset, far)) if offset_is_int else plan.offset
            if _gpu.current_device() == plan.device_id:
                return plan(arrays, offset)
            with cupy.cuda.Device(plan.device_id):
                return plan(arrays, offset)
    problem, operands = _attention_problem.attention(
        q, k, v, bias, mask, scale, causal, query_offset, window, softcap, sinks,
        alibi_slopes, query_lengths, key_lengths, layout, precision, return_lse, out,
        method,
    )  # fmt: skip
    with cupy.cuda.Device(operands.q.data.device_id):
        ready = _ready(operands)
        if plan is None:
            plan = make_plan(problem, ready)
            # Views of the same memory have the same pointer: the arrays of a call can
            # be launched as they come, unless one had to be copied.
            copied = any(a is not b for a, b in zip(ready, operands, strict=True))
            if key is not None and isinstance(plan, _FusedPlan) and not copied:
                _plans.put(key, plan)
        return plan.run(ready, _attention_kernels.launch_offset(problem))


def _facts(x):
    """What a plan depends on in an array; AttributeError if it is not CuPy's."""
    return x.shape, x.strides, x.dtype.char, x.data.device_id


def run(problem, operands) -> tuple[Any, Any]:
    """Attention of a checked problem: (out, lse or None)."""
    with cupy.cuda.Device(operands.q.data.device_id):
        operands = _ready(operands)
        offset = _attention_kernels.launch_offset(problem)
        return make_plan(problem, operands).run(operands, offset)


def _ready(operands):
    """The operands with q, k and v fit for a kernel: the last axis contiguous."""
    return operands._replace(
        q=_with_contiguous_rows(operands.q),
        k=_with_contiguous_rows(operands.k),
        v=_with_contiguous_rows(operands.v),
    )


def _with_contiguous_rows(x):
    """`x`, or a copy of it if its last axis is not contiguous; broadcasts stay so."""
    if x.size == 0 or x.shape[-1] == 1 or x.strides[-1] == x.itemsize:
        return x
    own = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.strides)]
    if own.shape[-1] != x.shape[-1]:
        own = cupy.broadcast_to(own, (*own.shape[:-1], x.shape[-1]))
    return cupy.broadcast_to(cupy.ascontiguousarray(own), x.shape)


def make_plan(problem, operands):
    """Selection, grid and parameters of a problem."""
    device_id = operands.q.data.device_id
    if not all((*problem.batch, problem.num_heads, problem.seqlen_q)):
        return _EmptyPlan(problem, operands, device_id)
    device = _gpu.device(device_id)
    row, _ = _kernels.select(ATTENTION_KERNELS, problem, device)
    kind = _FusedPlan if isinstance(row, FusedKernel) else _UnfusedPlan
    return kind(row, problem, operands, device)


def describe(problem, operands) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    if isinstance(problem, _attention_problem.MergeProblem):
        launch = _MergePlan(problem, operands).launch
        return {"kernel": "merge", "launches": [_describe_launch(launch)]}
    device = _gpu.device(operands.q.data.device_id)
    row, refused = _kernels.select(ATTENTION_KERNELS, problem, device)
    told = {"kernel": row.name, "refused": refused, "device": device.name}
    plan = make_plan(problem, operands)
    told["launches"] = [_describe_launch(launch) for launch in plan.launches]
    if isinstance(plan, _UnfusedPlan):
        shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
        told["scores in memory"] = f"{shape} {row.scores_dtype(problem)}"
        told["matmuls"] = "cupy.matmul before the first launch and after it"
    else:
        told["split of the keys"] = 1
    return told


def _describe_launch(launch):
    return {
        "source": launch.variant.source,
        "grid": launch.grid,
        "block": launch.block,
        "shared memory": launch.variant.smem,
        "defines": " ".join(f"{n}={v}" for n, v in launch.variant.defines),
    }


# --- plans ---------------------------------------------------------------------------


def _address_range(x):
    """Bytes that `x` spans, as offsets from its pointer."""
    if x.size == 0:
        return 0, 0
    steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    return sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps) + x.itemsize


class _Plan:
    """What all calls of one kind share; the arrays come with the call.

    A call's arrays stand in the order q, k, v, out, then OPTIONS.
    """

    launches: tuple[Any, ...] = ()

    def __init__(self, problem, operands, device_id):
        self.device_id = device_id
        self.out_shape = problem.out_shape
        self.out_dtype = _arrays.to_dtype(problem.dtype)
        self.lse_shape = problem.lse_shape if problem.return_lse else None
        self.lse_dtype = np.dtype(problem.compute_dtype)
        self.offset = _attention_kernels.launch_offset(problem)
        arrays = operands.q, operands.k, operands.v, operands.out
        arrays += tuple(getattr(operands, name) for name in OPTIONS)
        self.ranges = [None if x is None else _address_range(x) for x in arrays]

    def may_overlap(self, arrays):
        """Whether the span of `out` meets that of an input; the checks decide then."""
        start = arrays[3].data.ptr
        low, high = (start + end for end in self.ranges[3])
        for place, x in enumerate(arrays):
            if x is not None and place != 3:
                start = x.data.ptr
                first, last = self.ranges[place]
                if low < start + last and start + first < high:
                    return True
        return False

    def new_out(self):
        return cupy.ndarray(self.out_shape, self.out_dtype)

    def new_lse(self):
        return cupy.ndarray(self.lse_shape, self.lse_dtype) if self.lse_shape else None


class _EmptyPlan(_Plan):
    """A result without elements: nothing is launched."""

    def run(self, operands, offset):
        """The empty arrays."""
        out = operands.given_out
        return self.new_out() if out is None else out, self.new_lse()


class _FusedPlan(_Plan):
    """One kernel over q, k and v."""

    def __init__(self, row, problem, operands, device):
        super().__init__(problem, operands, operands.q.data.device_id)
        fields = _attention_kernels.params_fields(problem, operands)
        batch_dims = len(fields["batch_shape"])
        self.params = _gpu.pack(fields, _attention_kernels.params_dtype(batch_dims))
        (config,) = row.configs(problem, batch_dims, device)
        self.launch = _gpu.Launch(
            config.variant, config.grid, config.block, self.device_id
        )
        self.launches = (self.launch,)
        absent = all(getattr(operands, name) is None for name in OPTIONS)
        self.no_options = (_NULL,) * len(OPTIONS) if absent else None

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        q, k, v, out = arrays[:4]
        if out is None:
            out = self.new_out()
        lse = self.new_lse()
        options = self.no_options or [_NULL if x is None else x for x in arrays[4:]]
        self.launch(
            q, k, v, out, _NULL if lse is None else lse, *options, offset, self.params
        )
        return out, lse

    def run(self, operands, offset):
        """Launch for checked operands."""
        arrays = (operands.q, operands.k, operands.v, operands.given_out)
        arrays += tuple(getattr(operands, name) for name in OPTIONS)
        return self(arrays, offset)


class _UnfusedPlan(_Plan):
    """naive and safe: S and P in memory, cupy.matmul for both products."""

    def __init__(self, row, problem, operands, device):
        super().__init__(problem, operands, operands.q.data.device_id)
        self.problem = problem
        self.scores_dtype = row.scores_dtype(problem)
        fields = _attention_kernels.params_fields(problem, operands)
        batch_dims = len(fields["batch_shape"])
        self.params = _gpu.pack(fields, _attention_kernels.params_dtype(batch_dims))
        self.launches = tuple(
            _gpu.Launch(config.variant, config.grid, config.block, self.device_id)
            for config in row.configs(problem, batch_dims, device)
        )

    def run(self, operands, offset):
        """Two matmuls, each followed by a launch."""
        problem = self.problem
        if cupy.cuda.get_current_stream().is_capturing():
            raise NotImplementedError(
                f"method={problem.method!r} multiplies by cuBLAS, which CuPy does not "
                "allow while a CUDA graph is captured; 'auto', 'tiled' and 'online' "
                "can be captured"
            )
        out, lse = operands.given_out, self.new_lse()
        if out is None:
            out = self.new_out()
        options = [getattr(operands, name) for name in OPTIONS]
        softmax, values = self.launches

        s = self._matmul(_fold_group(operands.q, problem), operands.k.swapaxes(-1, -2))
        softmax(
            s,
            _NULL if lse is None else lse,
            *[_NULL if x is None else x for x in options],
            offset,
            self.params,
        )
        o = self._matmul(s, operands.v)  # s has become P
        values(s, o, operands.v, out, self.params)
        return out, lse

    def _matmul(self, a, b):
        """a @ b in the dtype of the scores, contiguous; sums in float32 at least."""
        shape = (*a.shape[:-1], b.shape[-1])
        if a.shape[-1] == 0 or 0 in shape:
            return cupy.zeros(shape, _arrays.to_dtype(self.scores_dtype))
        # cuBLAS through CuPy has no bfloat16: round float32 products instead.
        work = "float32" if self.scores_dtype == "bfloat16" else self.scores_dtype
        product = cupy.matmul(a.astype(work, copy=False), b.astype(work, copy=False))
        return cupy.ascontiguousarray(
            product.astype(_arrays.to_dtype(self.scores_dtype), copy=False)
        )


def _fold_group(q, problem):
    """Query heads that share a head of k as rows of one matrix."""
    rows = problem.group_size * problem.seqlen_q
    shape = (*problem.batch, problem.num_kv_heads, rows, problem.head_dim)
    return q if problem.group_size == 1 else q.reshape(shape)


# --- merge_attention_states ----------------------------------------------------------

_merge_plans = _gpu.PlanCache()


class _MergePlan:
    """The merge kernel for arrays of given shapes and strides."""

    def __init__(self, problem, operands):
        outs, lses, out = operands
        self.device_id = outs.data.device_id
        _gpu.device(self.device_id)  # refuses cards that are too old
        outs_part, *outs_rows, outs_col = _layout.element_strides(outs)
        lses_part, *lses_rows = _layout.element_strides(lses)
        *out_rows, out_col = (
            _attention_kernels.contiguous_strides(outs.shape[1:])
            if out is None
            else _layout.element_strides(out)
        )
        shape, rows = _layout.collapse(problem.shape, [outs_rows, lses_rows, out_rows])
        shape = shape or (1,)
        fields = {
            "num_rows": math.prod(problem.shape),
            "num_parts": problem.num_parts,
            "head_dim_v": problem.head_dim_v,
            "outs_part": outs_part,
            "outs_col": outs_col,
            "lses_part": lses_part,
            "out_col": out_col,
            "size": shape,
            "stride": [steps or (0,) for steps in rows],
        }
        dims = len(shape)
        self.params = _gpu.pack(fields, _attention_kernels.merge_params_dtype(dims))
        config = _attention_kernels.merge_config(problem, dims)
        self.launch = _gpu.Launch(
            config.variant, config.grid, config.block, self.device_id
        )


def merge(problem, operands) -> tuple[Any, Any]:
    """merge_attention_states of a checked problem: (out, lse)."""
    outs, lses, out = operands
    device_id = outs.data.device_id
    steps = None if out is None else out.strides
    key = problem, device_id, outs.strides, lses.strides, steps
    plan = _merge_plans.get(key)
    if plan is None:
        plan = _MergePlan(problem, operands)
        _merge_plans.put(key, plan)
    with cupy.cuda.Device(device_id):
        if out is None:
            out = _gpu.empty((*problem.shape, problem.head_dim_v), problem.dtype)
        lse = _gpu.empty(problem.shape, problem.lse_dtype)
        if lse.size:
            plan.launch(outs, lses, out, lse, plan.params)
    return out, lse
