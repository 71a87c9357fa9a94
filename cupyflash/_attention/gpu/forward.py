"""The CuPy back end of attention: plans of kernels and matmuls, and their launches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cupy

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.functions import described, tiles_of_mask
from cupyflash._attention.gpu import combine, diagonals, split_kv
from cupyflash._attention.gpu import copies as _copies
from cupyflash._attention.gpu import functions as _functions
from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu import views as _views
from cupyflash._attention.gpu.config import FORWARD_CALL
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.fp64.forward import TensorFloat64Kernel
from cupyflash._attention.gpu.fp64.forward_plan import tensor_float64_forward_steps
from cupyflash._attention.gpu.fp64.short_forward import ShortFloat64Kernel
from cupyflash._attention.gpu.plan import (
    AttentionPlan,
    addresses,
    arrays_of,
    facts,
    fused_steps,
    results_of,
)
from cupyflash._attention.gpu.simt.forward import FusedKernel, UnfusedKernel
from cupyflash._attention.gpu.simt.forward_plan import UnfusedPlan
from cupyflash._attention.gpu.simt.gemv_forward import GemvKernel
from cupyflash._attention.gpu.simt.gemv_forward_plan import gemv_steps
from cupyflash._attention.gpu.simt.tiny_forward import TinyKernel
from cupyflash._attention.gpu.sm80.few_forward import MmaFewKernel
from cupyflash._attention.gpu.sm80.forward import MmaKernel
from cupyflash._attention.gpu.sm80.forward_plan import mma_steps
from cupyflash._attention.gpu.sm80.short_forward import MmaShortKernel
from cupyflash._attention.gpu.sm90.forward import HopperKernel, has_mask_bits
from cupyflash._attention.gpu.sm90.forward_plan import hopper_steps
from cupyflash._attention.gpu.sm90.forward_wide import HopperWideKernel
from cupyflash._attention.gpu.sm90.forward_wide_plan import hopper_wide_steps
from cupyflash._attention.gpu.sm90.operands import unmapped
from cupyflash._cuda import graphs, kernel, plan_cache, runtime, tensor_map
from cupyflash._cuda import launch as _launch
from cupyflash._cuda.launch_sequence import Steps

_plans = plan_cache.PlanCache()
# Kinds of kernel specs, and their launches.
_STEPS = {
    HopperKernel: hopper_steps,
    FusedKernel: fused_steps,
    MmaFewKernel: fused_steps,
    MmaKernel: mma_steps,
    GemvKernel: gemv_steps,
    MmaShortKernel: fused_steps,
    TinyKernel: fused_steps,
    HopperWideKernel: hopper_wide_steps,
    ShortFloat64Kernel: fused_steps,
    TensorFloat64Kernel: tensor_float64_forward_steps,
}
_FAR = attention_params.FAR
# For counts of a mask in explain(): the least size of a tile, and the most tiles of a
# side.
_TILE, _MOST_TILES = 128, 64

merge = combine.merge


def attention(
    q, k, v, bias, mask, scale, causal, query_offset, window, softcap, sinks,
    alibi_slopes, query_lengths, key_lengths, layout, precision, return_lse, out,
    method, score_and_arrays,
) -> Sequence[Any]:  # fmt: skip
    """attention() of CuPy arrays; a repeated call goes directly to its launch.

    `score_and_arrays` are the last three of `problem.attention`, if it has functions.
    All by position and one by one, which Python does faster than with a tuple of them.
    """
    given_mask = mask
    # Larger offsets change the window, too: leave them to the checks.
    offset_is_int = query_offset.__class__ is int and -_FAR <= query_offset <= _FAR
    offsets = None if offset_is_int else query_offset
    bias_at = mask_at = sinks_at = slopes_at = offsets_at = 0
    query_lengths_at = key_lengths_at = 0
    functions: tuple[Any, ...] = ()
    packed = b""
    try:
        of_q, of_k, of_v = q.data, k.data, v.data
        q_at, k_at, v_at = of_q.ptr, of_k.ptr, of_v.ptr
        key: Any = (
            q.shape, q._c_contiguous or q.strides, q.dtype, of_q.device_id,
            k.shape, k._c_contiguous or k.strides, k.dtype, of_k.device_id,
            v.shape, v._c_contiguous or v.strides, v.dtype, of_v.device_id,
            # The alignment decides whether TMA can read them.
            (q_at | k_at | v_at) % 16 and (q_at % 16, k_at % 16, v_at % 16),
            scale, scale.__class__, causal, causal.__class__, softcap,
            softcap.__class__,
            # By its repr, since 1 and True are not the same argument.
            window if window is None else repr(window),
            layout, precision, return_lse, return_lse.__class__, method, offset_is_int,
            out is None or facts(out),
        )  # fmt: skip
        if score_and_arrays:
            score, score_arrays, mask_arrays = score_and_arrays
            of_mask, mask = (mask, None) if callable(mask) else (None, mask)
            functions = score, score_arrays, of_mask, mask_arrays
            of_functions, packed = _functions.of_call(
                q, *functions, softcap, query_offset if offset_is_int else None
            )
            key += of_functions
        if bias is not None:
            key = key, "bias", facts(bias)
            bias_at = bias.data.ptr
        if mask is not None:
            key = key, "mask", facts(mask)
            mask_at = mask.data.ptr
        if sinks is not None:
            key = key, "sinks", facts(sinks)
            sinks_at = sinks.data.ptr
        if alibi_slopes is not None:
            key = key, "alibi_slopes", facts(alibi_slopes)
            slopes_at = alibi_slopes.data.ptr
        if offsets is not None:
            key = key, "offsets", facts(offsets)
            offsets_at = offsets.data.ptr
        if query_lengths is not None:
            key = key, "query_lengths", facts(query_lengths)
            query_lengths_at = query_lengths.data.ptr
        if key_lengths is not None:
            key = key, "key_lengths", facts(key_lengths)
            key_lengths_at = key_lengths.data.ptr
        plan = _plans.get(key)
    except (AttributeError, TypeError, ValueError):
        # Not all are CuPy arrays, or an option has a wrong type: the checks raise the
        # error.
        key = plan = None
    if plan is not None:
        offset = query_offset if offset_is_int else plan.offset
        if out is None and not plan.taken:
            return plan.run(
                None, q_at, k_at, v_at, bias_at, mask_at, sinks_at, slopes_at,
                offsets_at, query_lengths_at, key_lengths_at, offset, packed,
            )  # fmt: skip
        options: Any = (
            bias_at, mask_at, sinks_at, slopes_at, offsets_at, query_lengths_at,
            key_lengths_at,
        )  # fmt: skip
        if plan.taken:
            packed = b""
            options = _functions.with_taken(options, plan.taken, *functions[1::2])
        pointers = q_at, k_at, v_at, *options, offset, packed
        if out is None or not (
            plan.may_overlap(out.data.ptr, pointers)
            or (functions and _functions.overlap(out, *functions[1::2]))
        ):
            return plan.run(out, *pointers)
    arguments = (
        q, k, v, bias, given_mask, scale, causal, query_offset, window, softcap, sinks,
        alibi_slopes, query_lengths, key_lengths, layout, precision, return_lse, out,
        method, *score_and_arrays,
    )  # fmt: skip
    return _planned(key, plan, arguments)


@graphs.keeps_memory
def _planned(key, plan, arguments):
    """Check a call and run it; keep the plan under `key` if it is a new one."""
    problem, operands = attention_problem.attention(*arguments)
    with cupy.cuda.Device(operands.q.data.device_id):
        if plan is None:
            plan = make_plan(problem, operands)
            plan.taken = tuple(x for x in operands.taken if x.array is not None)
            # Views of the same memory have the same pointer: the arrays of a call can
            # be passed to the launches unchanged.
            if key is not None and isinstance(plan, AttentionPlan):
                _plans.put(key, plan)
        return run(plan, problem, operands)


def run(plan, problem, operands) -> Sequence[Any]:
    """Launch a plan for checked operands."""
    offset = attention_params.launch_offset(problem)
    if isinstance(plan, UnfusedPlan):
        return plan(operands, offset)
    functions = _functions.packed(problem, operands.functions)
    pointers = (*addresses(arrays_of(operands)), offset, functions)
    return plan(pointers, operands.given_out)


def unplanned(arguments, score_and_arrays=()):
    """Check a call and run it."""
    return _planned(None, None, (*arguments, *score_and_arrays))


def make_plan(problem, operands) -> AttentionPlan | UnfusedPlan:
    """Selection, grid and parameters of a problem."""
    device_id = operands.q.data.device_id
    if not all((*problem.batch, problem.num_heads, problem.seqlen_q)):
        results = results_of(problem)
        return AttentionPlan(device_id, FORWARD_CALL, results, Steps([]))
    device = runtime.device(device_id)
    given, problem = problem, diagonals.tabled(problem, operands)
    row, _, known, fit, copies = _select(problem, operands, device)
    if isinstance(row, UnfusedKernel):
        row, _, known, fit, copies = _select(given, operands, device)
        results = results_of(problem)
        return UnfusedPlan(row, known, fit, device, device_id, results, copies)
    steps_of, names = _STEPS[type(row)], ("out", "lse")
    split = row.split_kv(known, device)
    if split.num_splits > 1 and not split.in_kernel:
        steps = split_kv.split_steps(steps_of, row, known, fit, device, split)
        names = split_kv.RESULTS
    else:
        steps = steps_of(row, known, fit, device)
    steps = diagonals.with_table(steps, given, problem)
    plan = AttentionPlan(
        device_id,
        _copies.names_before(FORWARD_CALL, copies),
        results_of(problem, names),
        _copies.with_copies(steps, copies),
        arrays_of(operands),
        operands.out,
    )
    plan.num_splits = split.num_splits
    plan.offset = attention_params.launch_offset(problem)
    return plan


def _select(problem, operands, device):
    """(row, what was refused, problem and operands for it, what must be copied)."""
    arrays = {name: getattr(operands, name) for name in "qkv"}

    def select(for_tma):
        views, copies = _copies.made_to_fit(arrays, for_tma)
        known, fit = _known(problem, operands._replace(**views))
        row, refused = kernel.select(ATTENTION_KERNELS, known, device)
        return row, refused, known, fit, copies

    if of_tma := _copies.copied_for_tma(problem, arrays):
        copied = select(of_tma)
        if isinstance(copied[0], HopperKernel):
            return copied
    found = select({})
    if isinstance(found[0], MmaKernel):
        if of_tma := _copies.copied_to_split(problem, arrays):
            copied = select(of_tma)
            if isinstance(copied[0], HopperKernel):
                return copied
    return found


def _known(problem, operands):
    """The problem, with what kernels must know about the arrays."""
    problem, operands = _views.pack_gqa(problem, operands)
    arrays = {"q": operands.q, "k": operands.k, "v": operands.v}
    known = replace(
        problem,
        no_tensor_map=_no_tensor_map(problem, operands),
        no_vectors=_views.no_vectors(**arrays),
        row_alignment=_views.row_alignment(**arrays),
        heads_can_be_packed=_heads_can_be_packed(problem, operands),
        terms=_terms(problem, operands),
    )
    return known, operands


def _terms(problem, operands):
    """The memory layout of bias and mask; see AttentionProblem."""
    bias = operands.bias
    arrays = [x for x in (bias, operands.mask) if x is not None]
    if problem.seqlen_q == 1 or all(x.strides[-2] == 0 for x in arrays):
        return "keys"
    if has_mask_bits(problem):
        arrays = [] if bias is None else [bias]
        if bias is not None and bias.strides[-2] == 0:
            return "bias of keys"
    if not all(x.strides[-1] == x.itemsize for x in arrays):
        return "any"
    if bias is None or bias.strides[-2] == 0:
        return "unit"
    at = bias.data.ptr, bias.shape, bias.strides, bias.itemsize
    return "unit" if tensor_map.unsupported_reason(*at) else "tiles"


def _heads_can_be_packed(problem, operands):
    """Whether heads of a group and queries can be two axes of a tensor map of q."""
    q = operands.q
    if problem.group_size == 1 or q.ndim < 3 or 0 in q.strides[-3:-1]:
        return False
    is_one = _num_batch_axes(problem, operands) == 1
    return is_one and (q.shape[-2] == 1 or q.strides[-2] > 0)


def _no_tensor_map(problem, operands):
    """Why q, k and v cannot be read through tensor maps, or None."""
    if operands.q.itemsize != tensor_map.ITEMSIZE or problem.seqlen_k == 0:
        return None  # the problem is refused for that already
    q, k, v = operands.q, operands.k, operands.v
    return unmapped(lambda: _num_batch_axes(problem, operands), q=q, k=k, v=v)


def _num_batch_axes(problem, operands):
    """The number of batch axes that remain after merging."""
    return len(attention_params.params_fields(problem, operands)["batch_shape"])


def describe(problem, operands) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    if isinstance(problem, attention_problem.MergeProblem):
        return combine.describe(problem, operands)
    device = runtime.device(operands.q.data.device_id)
    row, refused, *_, copies = _select(problem, operands, device)
    details = {"kernel": row.name, "refused": refused, "device": device.name}
    if copies:
        details["copied first"] = ", ".join(copies)
    plan = make_plan(problem, operands)
    details["launches"] = [_launch.describe(launch) for launch in plan.launches]
    if isinstance(row, UnfusedKernel) and plan.launches:
        shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
        details["scores in memory"] = f"{shape} {row.scores_dtype(problem)}"
        details["matmuls"] = "cupy.matmul before the first launch and after it"
    else:
        details["split of the keys"] = getattr(plan, "num_splits", 1)
    details |= described(operands.functions, operands.taken)
    mask = operands.functions.mask if operands.functions else None
    if mask is not None and isinstance(problem.query_offset, int):
        lists = math.prod(problem.batch) if "b" in problem.mask_varies_by else 1
        lists *= problem.num_heads if "h" in problem.mask_varies_by else 1
        tiles = max(8, int(_MOST_TILES / math.sqrt(lists)))
        side = max(_TILE, -(-max(problem.seqlen_q, problem.seqlen_k) // tiles))
        details["tiles_of_the_mask"] = tiles_of_mask(
            problem, mask, problem.query_offset, side, side
        )
    return details
