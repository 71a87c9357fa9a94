"""The CuPy back end of attention: plans of kernels and matmuls, launched."""

from dataclasses import replace
from typing import Any

import cupy

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.gpu import combine
from cupyflash._attention.gpu import copies as _copies
from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu import views as _views
from cupyflash._attention.gpu.copies import CopyingPlan
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.fp64.forward import TensorFloat64Kernel
from cupyflash._attention.gpu.plan import EmptyPlan, FusedPlan
from cupyflash._attention.gpu.simt.forward import FusedKernel, UnfusedKernel
from cupyflash._attention.gpu.simt.forward_plan import UnfusedPlan
from cupyflash._attention.gpu.sm80.forward import MmaKernel
from cupyflash._attention.gpu.sm80.forward_plan import MmaPlan
from cupyflash._attention.gpu.sm90.forward import HopperKernel
from cupyflash._attention.gpu.sm90.forward_plan import HopperPlan
from cupyflash._attention.gpu.sm90.forward_wide import HopperWideKernel
from cupyflash._attention.gpu.sm90.forward_wide_plan import HopperWidePlan
from cupyflash._attention.gpu.sm90.operands import unmapped
from cupyflash._attention.gpu.split_kv import PartsPlan
from cupyflash._cuda import graphs, kernel, plan_cache, runtime, tensor_map
from cupyflash._cuda import launch as _launch

_plans = plan_cache.PlanCache()
# Kinds of rows, and their plans.
_PLANS = {
    HopperKernel: HopperPlan,
    FusedKernel: FusedPlan,
    MmaKernel: MmaPlan,
    HopperWideKernel: HopperWidePlan,
    TensorFloat64Kernel: FusedPlan,
    UnfusedKernel: UnfusedPlan,
}

merge = combine.merge


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
    far = attention_params.FAR
    # One beyond that changes the window, too: that is for the checks.
    offset_is_int = type(query_offset) is int and -far <= query_offset <= far
    offsets = None if offset_is_int else query_offset
    try:
        key: Any = (
            q.shape, q.strides, q.dtype, q.data.device_id,
            k.shape, k.strides, k.dtype, k.data.device_id,
            v.shape, v.strides, v.dtype, v.data.device_id,
            # Whether TMA can read them, or nobody can.
            q.data.ptr % 16, k.data.ptr % 16, v.data.ptr % 16,
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
            offset = query_offset if offset_is_int else plan.offset
            if runtime.current_device() == plan.device_id:
                return plan(arrays, offset)
            with cupy.cuda.Device(plan.device_id):
                return plan(arrays, offset)
    return _planned(
        key, plan, q, k, v, bias, mask, scale, causal, query_offset, window, softcap,
        sinks, alibi_slopes, query_lengths, key_lengths, layout, precision, return_lse,
        out, method,
    )  # fmt: skip


@graphs.keeps_memory
def _planned(key, plan, *arguments):
    """Check a call and run it; keep the plan under `key` if it is a new one."""
    problem, operands = attention_problem.attention(*arguments)
    with cupy.cuda.Device(operands.q.data.device_id):
        if plan is None:
            plan = make_plan(problem, operands)
            # Views of the same memory have the same pointer: the arrays of a call can
            # be launched as they come.
            if key is not None and plan.takes_arrays:
                _plans.put(key, plan)
        return plan.run(operands, attention_params.launch_offset(problem))


def unplanned(*arguments):
    """Check a call and run it."""
    return _planned(None, None, *arguments)


def _facts(x):
    """What a plan depends on in an array; AttributeError if it is not CuPy's."""
    data = x.data
    return x.shape, x.strides, x.dtype, data.device_id, data.ptr % 8


def make_plan(problem, operands):
    """Selection, grid and parameters of a problem."""
    device_id = operands.q.data.device_id
    if not all((*problem.batch, problem.num_heads, problem.seqlen_q)):
        return EmptyPlan(problem, operands, device_id)
    device = runtime.device(device_id)
    row, _, known, fit, copies = _select(problem, operands, device)
    kind, parts = _PLANS[type(row)], (1, known.seqlen_k)
    if known.seqlen_k and hasattr(row, "key_parts"):  # row hopper has its own way
        parts = row.key_parts(known, device)
    if parts[0] > 1:
        plan = PartsPlan(kind, row, known, fit, device, parts)
    else:
        plan = kind(row, known, fit, device)
    plan.set_shapes(problem)
    return CopyingPlan(problem, operands, plan, fit, copies) if copies else plan


def _select(problem, operands, device):
    """(row, what was refused, problem and operands for it, what has to be copied)."""
    arrays = {name: getattr(operands, name) for name in "qkv"}
    most = _copies.most_copied(problem)
    for for_tma in (tuple(arrays), ()):
        if for_tma and not _copies.may_copy(problem):
            continue
        views, copies = _copies.made_to_fit(arrays, for_tma, most)
        known, fit = _known(problem, operands._replace(**views))
        row, refused = kernel.select(ATTENTION_KERNELS, known, device)
        if isinstance(row, HopperKernel):
            break
    return row, refused, known, fit, copies


def _known(problem, operands):
    """What kernels are told, with what the Hopper kernel must know of the arrays."""
    problem, operands = _views.pack_gqa(problem, operands)
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
    is_one = _num_batch_axes(problem, operands) == 1
    return is_one and (q.shape[-2] == 1 or q.strides[-2] > 0)


def _no_tensor_map(problem, operands):
    """Why q, k and v cannot be read through tensor maps, or None."""
    if operands.q.itemsize != tensor_map.ITEMSIZE or problem.seqlen_k == 0:
        return None  # refused for that already
    q, k, v = operands.q, operands.k, operands.v
    return unmapped(lambda: _num_batch_axes(problem, operands), q=q, k=k, v=v)


def _num_batch_axes(problem, operands):
    """Axes of the batch that are left when those that can be are merged."""
    return len(attention_params.params_fields(problem, operands)["batch_shape"])


def describe(problem, operands) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    if isinstance(problem, attention_problem.MergeProblem):
        return combine.describe(problem, operands)
    device = runtime.device(operands.q.data.device_id)
    row, refused, *_, copies = _select(problem, operands, device)
    told = {"kernel": row.name, "refused": refused, "device": device.name}
    if copies:
        told["copied first"] = ", ".join(copies)
    plan = make_plan(problem, operands)
    told["launches"] = [_launch.describe(launch) for launch in plan.launches]
    if isinstance(row, UnfusedKernel) and plan.launches:
        shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
        told["scores in memory"] = f"{shape} {row.scores_dtype(problem)}"
        told["matmuls"] = "cupy.matmul before the first launch and after it"
    else:
        told["split of the keys"] = plan.num_splits
    return told
