"""The CuPy back end of attention: plans of kernels and matmuls, launched."""

import functools
import math
import threading
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from cupyflash import (
    _arrays,
    _attention_hopper,
    _attention_kernels,
    _attention_params,
    _attention_problem,
    _attention_views,
    _gpu,
    _kernels,
    _layout,
    _tensormap,
)
from cupyflash._attention_f64 import TensorFloat64Kernel
from cupyflash._attention_hopper import HopperKernel
from cupyflash._attention_kernels import ATTENTION_KERNELS, FusedKernel, UnfusedKernel
from cupyflash._attention_mma import MmaKernel
from cupyflash._attention_rows import OPTIONS

_NULL = _gpu.NULL
_plans = _gpu.PlanCache()
_current_stream = cupy.cuda.get_current_stream
_is_capturing_on = cupy.cuda.runtime.streamIsCapturing


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
            q.shape, q.strides, q.dtype, q.data.device_id,
            k.shape, k.strides, k.dtype, k.data.device_id,
            v.shape, v.strides, v.dtype, v.data.device_id,
            # Whether the copy engine of Hopper can read them.
            q.data.ptr % 16 == 0, k.data.ptr % 16 == 0, v.data.ptr % 16 == 0,
            scale, scale.__class__, causal, causal.__class__, softcap,
            softcap.__class__,
            # By its repr, since 1 and True are not the same argument.
            window if window is None else repr(window),
            layout, precision, return_lse, return_lse.__class__, method, offset_is_int,
            out if out is None else _facts(out),
        )  # fmt: skip
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
            far = _attention_params.FAR
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
        if plan is None:
            plan = make_plan(problem, operands)
            # Views of the same memory have the same pointer: the arrays of a call can
            # be launched as they come.
            if key is not None and plan.takes_arrays:
                _plans.put(key, plan)
        return plan.run(operands, _attention_params.launch_offset(problem))


def _facts(x):
    """What a plan depends on in an array; AttributeError if it is not CuPy's."""
    return x.shape, x.strides, x.dtype, x.data.device_id


def run(problem, operands) -> tuple[Any, Any]:
    """Attention of a checked problem: (out, lse or None)."""
    with cupy.cuda.Device(operands.q.data.device_id):
        offset = _attention_params.launch_offset(problem)
        return make_plan(problem, operands).run(operands, offset)


def make_plan(problem, operands):
    """Selection, grid and parameters of a problem."""
    device_id = operands.q.data.device_id
    if not all((*problem.batch, problem.num_heads, problem.seqlen_q)):
        return _EmptyPlan(problem, operands, device_id)
    device = _gpu.device(device_id)
    row, _, known, fit, copies = _select(problem, operands, device)
    num_parts = 1
    if isinstance(row, (FusedKernel, TensorFloat64Kernel)) and known.seqlen_k:
        num_parts, keys_of_part = row.parts(known, device)
    if num_parts > 1:
        plan = _PartsPlan(row, known, fit, device, num_parts, keys_of_part)
    else:
        plan = _PLANS[type(row)](row, known, fit, device)
    plan.out_shape, plan.lse_shape = _shapes(problem)
    return _CopyingPlan(problem, operands, plan, fit, copies) if copies else plan


def _select(problem, operands, device):
    """(row, what was refused, problem and operands for it, what has to be copied)."""
    arrays = {name: getattr(operands, name) for name in "qkv"}
    most = _attention_views.most_copied(problem)
    for for_copy_engine in (tuple(arrays), ()):
        if for_copy_engine and not _attention_views.may_copy(problem):
            continue
        views, copies = _attention_views.made_to_fit(arrays, for_copy_engine, most)
        known, fit = _known(problem, operands._replace(**views))
        row, refused = _kernels.select(ATTENTION_KERNELS, known, device)
        if isinstance(row, HopperKernel):
            break
    return row, refused, known, fit, copies


def _known(problem, operands):
    """What kernels are told, with what the Hopper kernel must know of the arrays."""
    problem, operands = _attention_views.folded(problem, operands)
    known = replace(
        problem,
        no_tensor_map=_no_tensor_map(problem, operands),
        heads_can_be_packed=_heads_can_be_packed(problem, operands),
        terms=_terms(problem, operands),
    )
    return known, operands


def _terms(problem, operands):
    """How bias and mask lie in memory, in the words of AttentionProblem."""
    arrays = [x for x in (operands.bias, operands.mask) if x is not None]
    if problem.seqlen_q == 1 or all(x.strides[-2] == 0 for x in arrays):
        return "keys"
    return "unit" if all(x.strides[-1] == x.itemsize for x in arrays) else "any"


def _heads_can_be_packed(problem, operands):
    """Whether heads of a group and queries can be two axes of a tensor map of q."""
    q = operands.q
    if problem.group_size == 1 or q.ndim < 3 or 0 in q.strides[-3:-1]:
        return False
    axes = len(_attention_params.params_fields(problem, operands)["batch_shape"])
    return axes == 1 and (q.shape[-2] == 1 or q.strides[-2] > 0)


def _no_tensor_map(problem, operands):
    """Why q, k and v cannot be read through tensor maps, or None."""
    if operands.q.itemsize != _tensormap.ITEMSIZE or problem.seqlen_k == 0:
        return None  # refused for that already
    for name in ("q", "k", "v"):
        x = getattr(operands, name)
        if reason := _tensormap.refusal(x.data.ptr, x.shape, x.strides):
            return f"{name} {reason}"
    axes = len(_attention_params.params_fields(problem, operands)["batch_shape"])
    if axes > _tensormap.MAX_BATCH_AXES:
        return f"the batch is {axes} axes that cannot be merged"
    return None


def describe(problem, operands) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    if isinstance(problem, _attention_problem.MergeProblem):
        launch = _merge_plan(problem, operands).launch
        return {"kernel": "merge", "launches": [_describe_launch(launch)]}
    device = _gpu.device(operands.q.data.device_id)
    row, refused, *_, copies = _select(problem, operands, device)
    told = {"kernel": row.name, "refused": refused, "device": device.name}
    if copies:
        told["copied first"] = ", ".join(copies)
    plan = make_plan(problem, operands)
    told["launches"] = [_describe_launch(launch) for launch in plan.launches]
    if isinstance(row, UnfusedKernel) and plan.launches:
        shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
        told["scores in memory"] = f"{shape} {row.scores_dtype(problem)}"
        told["matmuls"] = "cupy.matmul before the first launch and after it"
    else:
        told["split of the keys"] = plan.num_splits
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


def _shapes(problem):
    """Those of out and lse of a call; None for lse if it is not asked for."""
    return problem.out_shape, problem.lse_shape if problem.return_lse else None


class _Plan:
    """What all calls of one kind share; the arrays come with the call.

    A call's arrays stand in the order q, k, v, out, then OPTIONS.
    """

    launches: tuple[Any, ...] = ()
    num_splits = 1  # parts that the keys are split into
    takes_arrays = False  # whether it can be called with the arrays of a call

    def __init__(self, problem, operands, device_id):
        self.device_id = device_id
        self.out_shape, self.lse_shape = _shapes(problem)
        self.out_dtype = _arrays.to_dtype(problem.dtype)
        self.lse_dtype = np.dtype(problem.compute_dtype)
        self.offset = _attention_params.launch_offset(problem)
        arrays = operands.q, operands.k, operands.v, operands.out
        arrays += tuple(getattr(operands, name) for name in OPTIONS)
        # How far from the pointer of `out` that of an input makes their spans meet.
        self.too_near = []
        if operands.out is not None:
            out_first, out_end = _address_range(operands.out)
            for place, x in enumerate(arrays):
                if x is not None and place != 3:
                    first, end = _address_range(x)
                    self.too_near.append((place, out_first - end, out_end - first))

    def may_overlap(self, arrays):
        """Whether the span of `out` meets that of an input; the checks decide then."""
        out = arrays[3].data.ptr
        for place, low, high in self.too_near:
            if low < arrays[place].data.ptr - out < high:
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


def _arrays_of(operands):
    """The arrays of a call in the order of plans."""
    arrays = (operands.q, operands.k, operands.v, operands.given_out)
    return arrays + tuple(getattr(operands, name) for name in OPTIONS)


def _address(x):
    return 0 if x is None else x.data.ptr


class _FusedPlan(_Plan):
    """One kernel over q, k and v."""

    takes_arrays = True

    def __init__(self, row, problem, operands, device):
        super().__init__(problem, operands, operands.q.data.device_id)
        fields = _attention_params.params_fields(problem, operands)
        batch_dims = len(fields["batch_shape"])
        dtype = _attention_params.params_dtype(batch_dims)
        self.params = _gpu.pack_bytes(fields, dtype)
        self.launches = tuple(
            _gpu.Launch(config.variant, config.grid, config.block, self.device_id)
            for config in row.configs(problem, batch_dims, device)
        )
        self.launch = self.launches[0]
        absent = all(getattr(operands, name) is None for name in OPTIONS)
        self.no_options = (0,) * len(OPTIONS) if absent else None

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        q, k, v, out = arrays[:4]
        if out is None:
            out = self.new_out()
        lse = self.new_lse()
        options = self.no_options or [_address(x) for x in arrays[4:]]
        self.launch.enqueue(
            q.data.ptr,
            k.data.ptr,
            v.data.ptr,
            out.data.ptr,
            _address(lse),
            *options,
            offset,
            self.params,
        )
        return out, lse

    def run(self, operands, offset):
        """Launch for checked operands."""
        return self(_arrays_of(operands), offset)


class _HopperPlan(_FusedPlan):
    """The Hopper kernel: tensor maps in place of pointers, tiles from a counter."""

    def __init__(self, row, problem, operands, device):
        super().__init__(row, problem, operands, device)
        fields = _attention_params.params_fields(problem, operands)
        tile = row.tile(problem)
        box_n = tile.box_n or tile.block_n
        self.encoders = {
            "q": _q_encoder(problem, fields, operands.q, row.pack(problem)),
            "k": _encoder(problem, fields, "k", operands.k, box_n),
            "v": _encoder(problem, fields, "v", operands.v, box_n),
        }
        self.schedule = row.schedule(problem, device)
        self.num_splits = self.schedule["num_splits"]
        self.merges = row.merges(problem, device)
        # How many numbers the kernel counts in, if it does.
        self.counted = 2 if row.is_dynamic(problem) else 0
        if self.merges:
            self.counted = 2 + device.num_sms // 2
        # Sums of the parts, float32, behind their lse, float64.
        num_rows = self.num_splits * math.prod(problem.lse_shape)
        self.lse_bytes = 8 * num_rows
        self.parts_bytes = (8 + 4 * problem.head_dim_v) * num_rows
        self.inputs: dict[tuple[int, ...], Any] = {}

    def _new_inputs(self, pointers):
        """The kernel's parameter that depends on where q, k and v lie."""
        if len(self.inputs) >= _MAX_INPUTS:
            self.inputs.clear()
        fields = dict(self.schedule)
        for (name, encode), ptr in zip(self.encoders.items(), pointers, strict=True):
            fields |= {name: ptr, f"{name}_map": encode(ptr)}
        packed = _gpu.pack_bytes(fields, _attention_hopper.HOPPER_INPUTS)
        self.inputs[pointers] = packed
        return packed

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        q, k, v, out = arrays[:4]
        pointers = q.data.ptr, k.data.ptr, v.data.ptr
        inputs = self.inputs.get(pointers)
        if inputs is None:
            inputs = self._new_inputs(pointers)
        if out is None:
            out = self.new_out()
        lse = self.new_lse()
        options = self.no_options or [_address(x) for x in arrays[4:]]
        out_at, lse_at = out.data.ptr, _address(lse)
        counter = 0
        if self.counted:
            counter = _counters(self.device_id, self.counted).of_current_stream()
        if self.num_splits == 1:
            self.launch.enqueue(
                inputs, out_at, lse_at, counter, *options, offset, self.params
            )
            return out, lse
        memory = cupy.cuda.alloc(self.parts_bytes)
        lses, parts = memory.ptr, memory.ptr + self.lse_bytes
        keep_if_capturing(memory)
        merged = (out_at, lse_at) if self.merges else ()
        self.launch.enqueue(
            inputs, parts, lses, counter, *merged, *options, offset, self.params
        )
        if not self.merges:
            self.launches[1].enqueue(
                parts, lses, out_at, lse_at, self.num_splits, self.params
            )
        return out, lse


class _MmaPlan(_FusedPlan):
    """The mma kernel; of float32, keys and values that another kernel has split."""

    def __init__(self, row, problem, operands, device):
        super().__init__(row, problem, operands, device)
        is_prepared = len(self.launches) > 1
        self.images_bytes = row.images(problem, device) if is_prepared else 0

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        q, k, v, out = arrays[:4]
        if out is None:
            out = self.new_out()
        lse = self.new_lse()
        options = self.no_options or [_address(x) for x in arrays[4:]]
        images = 0
        if self.images_bytes:
            memory = cupy.cuda.alloc(self.images_bytes)
            images = memory.ptr
            keep_if_capturing(memory)
            self.launches[1].enqueue(
                images, k.data.ptr, v.data.ptr, *options, offset, self.params
            )
        self.launch.enqueue(
            images,
            q.data.ptr,
            k.data.ptr,
            v.data.ptr,
            out.data.ptr,
            _address(lse),
            *options,
            offset,
            self.params,
        )
        return out, lse


# Memory that kernels in CUDA graphs write to whenever they are replayed: it must not go
# back to the pool.
_kept_for_graphs: list[Any] = []


def keep_if_capturing(memory):
    """Keep what a kernel on the current stream will use, if it goes into a graph."""
    if _is_capturing():
        _kept_for_graphs.append(memory)


def _is_capturing():
    """Whether launches on the current stream go into a CUDA graph."""
    ptr = _current_stream().ptr
    # 0 and 1 are the default stream, which cannot be captured.
    return ptr > 1 and _is_capturing_on(ptr)


# Sets of pointers that a plan remembers the maps of.
_MAX_INPUTS = 256


def _encoder(problem, fields, name, x, rows):
    """Tensor maps for an operand whose batch axes have been merged."""
    batch, *steps = fields[name]
    shape = (*fields["batch_shape"], *x.shape[-3:])
    strides = tuple(step * x.itemsize for step in (*batch, *steps))
    dtype = getattr(problem, name, problem.dtype)  # bias and mask have their own
    return _tensormap.Encoder(dtype, _tensormap.layout(shape, strides), rows)


def _q_encoder(problem, fields, q, pack):
    """The same of q, whose heads in groups of `pack` come next to its columns."""
    rows = _attention_hopper.HOPPER_GROUP_ROWS
    if pack == 1:
        return _encoder(problem, fields, "q", q, rows)
    (batch,), head, row, col = fields["q"]
    shape = (*fields["batch_shape"], problem.num_heads // pack, problem.seqlen_q, pack)
    steps = batch, head * pack, row, head, col
    where = _tensormap.layout(
        (*shape, problem.head_dim), tuple(step * q.itemsize for step in steps)
    )
    return _tensormap.Encoder(problem.dtype, where, pack, rows // pack)


class _Counters:
    """Rows of zeros on a device; a kernel counts in one and leaves zeros.

    Kernels that may run at one time must not share a row. So each stream has its own,
    and each launch in a CUDA graph, which may be replayed on any stream.
    """

    COUNT = 1 << 13

    def __init__(self, device_id, numbers):
        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():
            raise RuntimeError(
                "the first attention call on a device cannot be captured into a CUDA "
                "graph: make the same call once before the capture, as a warm-up"
            )
        # Rows of 8 bytes and their multiples.
        self._bytes = -(-numbers // 2) * 8
        with cupy.cuda.Device(device_id):
            self._memory = cupy.zeros(self.COUNT * self._bytes // 8, np.int64)
            stream.synchronize()  # other streams will use them, once for all
        self._lock = threading.Lock()
        self._of_stream: dict[Any, Any] = {}
        self._used = 0

    def of_current_stream(self):
        """Address of the row for a launch on the current stream."""
        ptr = _current_stream().ptr
        if ptr > 1 and _is_capturing_on(ptr):
            return self._take()
        # Threads share the number, not the stream, of "per-thread default".
        key = (ptr, threading.get_ident()) if ptr == _PER_THREAD else ptr
        row = self._of_stream.get(key)
        if row is None:
            row = self._of_stream[key] = self._take()
        return row

    def _take(self):
        with self._lock:
            if self._used == self.COUNT:
                raise RuntimeError(
                    f"more than {self.COUNT} streams and captured calls of attention "
                    "on one device"
                )
            self._used += 1
            return self._memory.data.ptr + (self._used - 1) * self._bytes


_PER_THREAD = 2  # cudaStreamPerThread


@functools.cache
def _counters(device_id, numbers=2):
    return _Counters(device_id, numbers)


class _UnfusedPlan(_Plan):
    """naive and safe: S and P in memory, cupy.matmul for both products."""

    def __init__(self, row, problem, operands, device):
        super().__init__(problem, operands, operands.q.data.device_id)
        self.problem = problem
        self.scores_dtype = row.scores_dtype(problem)
        fields = _attention_params.params_fields(problem, operands)
        batch_dims = len(fields["batch_shape"])
        self.params = _gpu.pack(fields, _attention_params.params_dtype(batch_dims))
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


class _PartsPlan(_Plan):
    """A fused plan over parts of the keys, and the kernel that merges their results."""

    takes_arrays = True

    def __init__(self, row, problem, operands, device, num_parts, keys_of_part):
        super().__init__(problem, operands, operands.q.data.device_id)
        self.num_splits = num_parts
        of_parts = _attention_views.in_parts(problem, operands, num_parts, keys_of_part)
        self.parts = _PLANS[type(row)](row, *of_parts, device)
        shape = (*problem.batch, problem.num_heads, problem.seqlen_q)
        merged = _attention_problem.MergeProblem(
            problem.backend,
            num_parts,
            shape,
            problem.head_dim_v,
            problem.dtype,
            problem.compute_dtype,
        )
        steps = _attention_params.new_out_strides(problem)
        if operands.out is not None:
            steps = _layout.element_strides(operands.out)
        of_parts = (
            _attention_params.contiguous_strides((num_parts, *shape, *more))
            for more in ((problem.head_dim_v,), ())
        )
        self.merge = _MergePlan(merged, self.device_id, *of_parts, steps)
        self.launches = (*self.parts.launches, self.merge.launch)

    def __call__(self, arrays, offset):
        """Launch; `arrays` as they stand in a call, out None for a new one."""
        out, lse = arrays[3], self.new_lse()
        if out is None:
            out = self.new_out()
        outs, lses = self.parts((*arrays[:3], None, *arrays[4:]), offset)
        keep_if_capturing((outs, lses))
        self.merge.launch(
            outs, lses, out, _NULL if lse is None else lse, self.merge.params
        )
        return out, lse

    def run(self, operands, offset):
        """Launch for checked operands."""
        return self(_arrays_of(operands), offset)


class _CopyingPlan(_Plan):
    """Copies of q, k and v, as far as they need them, before another plan."""

    def __init__(self, problem, operands, plan, fit, copies):
        super().__init__(problem, operands, operands.q.data.device_id)
        self.plan = plan
        self.launches = (*(copy.launch for copy in copies.values()), *plan.launches)
        self.num_splits = plan.num_splits
        self.takes_arrays = plan.takes_arrays
        self.copies = [copies.get(name) for name in "qkv"]
        self.views = {name: getattr(fit, name) for name in copies}

    def _copied(self, arrays):
        """q, k and v, copied where that is needed."""
        ready = tuple(
            x if copy is None else copy(x)
            for x, copy in zip(arrays, self.copies, strict=True)
        )
        keep_if_capturing(ready)
        return ready

    def __call__(self, arrays, offset):
        """Copy and launch; `arrays` as they stand in a call."""
        return self.plan((*self._copied(arrays[:3]), *arrays[3:]), offset)

    def run(self, operands, offset):
        """The same for checked operands."""
        made = dict(zip("qkv", self._copied(operands[:3]), strict=True))
        views = {
            name: cupy.ndarray(x.shape, x.dtype, made[name].data, x.strides)
            for name, x in self.views.items()
        }
        return self.plan.run(operands._replace(**views), offset)


_PLANS = {
    HopperKernel: _HopperPlan,
    FusedKernel: _FusedPlan,
    MmaKernel: _MmaPlan,
    TensorFloat64Kernel: _FusedPlan,
    UnfusedKernel: _UnfusedPlan,
}


def _fold_group(q, problem):
    """Query heads that share a head of k as rows of one matrix."""
    rows = problem.group_size * problem.seqlen_q
    shape = (*problem.batch, problem.num_kv_heads, rows, problem.head_dim)
    return q if problem.group_size == 1 else q.reshape(shape)


# --- merge_attention_states ----------------------------------------------------------

_merge_plans = _gpu.PlanCache()


class _MergePlan:
    """The merge kernel for arrays of given shapes and strides in elements."""

    def __init__(self, problem, device_id, outs, lses, out):
        self.device_id = device_id
        _gpu.device(device_id)  # refuses cards that are too old
        outs_part, *outs_rows, outs_col = outs
        lses_part, *lses_rows = lses
        *out_rows, out_col = out
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


def _merge_plan(problem, operands):
    """The plan of a call of merge_attention_states."""
    outs, lses, out = operands
    steps = (
        _attention_params.contiguous_strides(outs.shape[1:])
        if out is None
        else _layout.element_strides(out)
    )
    of_parts = _layout.element_strides(outs), _layout.element_strides(lses)
    return _MergePlan(problem, outs.data.device_id, *of_parts, steps)


def merge(problem, operands) -> tuple[Any, Any]:
    """merge_attention_states of a checked problem: (out, lse)."""
    outs, lses, out = operands
    device_id = outs.data.device_id
    steps = None if out is None else out.strides
    key = problem, device_id, outs.strides, lses.strides, steps
    plan = _merge_plans.get(key)
    if plan is None:
        plan = _merge_plan(problem, operands)
        _merge_plans.put(key, plan)
    with cupy.cuda.Device(device_id):
        if out is None:
            out = _gpu.empty((*problem.shape, problem.head_dim_v), problem.dtype)
        lse = _gpu.empty(problem.shape, problem.lse_dtype)
        if lse.size:
            plan.launch(outs, lses, out, lse, plan.params)
    return out, lse
