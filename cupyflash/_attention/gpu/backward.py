"""The CuPy back end of attention_vjp: plans of kernels and their launches."""

from dataclasses import replace
from typing import Any

import cupy

from cupyflash._attention import vjp_problem
from cupyflash._attention.functions import described
from cupyflash._attention.gpu import copies as _copies
from cupyflash._attention.gpu import diagonals, gradient_copies, gradient_layout, views
from cupyflash._attention.gpu import functions as _functions
from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.config import AttentionCall
from cupyflash._attention.gpu.fp64.backward import TensorFloat64VjpKernel
from cupyflash._attention.gpu.fp64.backward_plan import tensor_float64_steps
from cupyflash._attention.gpu.fp64.few_backward import FewFloat64VjpKernel
from cupyflash._attention.gpu.fp64.few_backward_plan import few_float64_steps
from cupyflash._attention.gpu.fp64.sections_backward import SectionsFloat64VjpKernel
from cupyflash._attention.gpu.fp64.sections_backward_plan import sections_float64_steps
from cupyflash._attention.gpu.fp64.short_backward import ShortFloat64VjpKernel
from cupyflash._attention.gpu.fp64.short_backward_plan import short_float64_steps
from cupyflash._attention.gpu.gradient_plan import gradient_results
from cupyflash._attention.gpu.plan import (
    AttentionPlan,
    addresses,
    arrays_of,
    facts,
)
from cupyflash._attention.gpu.simt.backward import VjpKernel
from cupyflash._attention.gpu.simt.backward_dscore import results as dscore_results
from cupyflash._attention.gpu.simt.backward_dscore import with_dscore
from cupyflash._attention.gpu.simt.backward_plan import portable_steps
from cupyflash._attention.gpu.simt.gemv_backward import GemvVjpKernel
from cupyflash._attention.gpu.simt.gemv_backward_plan import gemv_vjp_steps
from cupyflash._attention.gpu.simt.tiny_backward import TinyVjpKernel
from cupyflash._attention.gpu.simt.tiny_backward_plan import tiny_vjp_steps
from cupyflash._attention.gpu.sm80.backward import MmaVjpKernel
from cupyflash._attention.gpu.sm80.backward_fp32 import MmaSplitVjpKernel
from cupyflash._attention.gpu.sm80.backward_fp32_plan import mma_split_steps
from cupyflash._attention.gpu.sm80.backward_plan import mma_vjp_steps
from cupyflash._attention.gpu.sm80.few_backward import MmaFewVjpKernel
from cupyflash._attention.gpu.sm80.short_backward import MmaShortVjpKernel
from cupyflash._attention.gpu.sm80.short_backward_plan import short_vjp_steps
from cupyflash._attention.gpu.sm90.backward import HopperVjpKernel
from cupyflash._attention.gpu.sm90.backward_plan import hopper_vjp_steps
from cupyflash._attention.gpu.sm90.backward_wide import HopperWideVjpKernel
from cupyflash._attention.gpu.sm90.backward_wide_plan import hopper_wide_vjp_steps
from cupyflash._attention.gpu.sm90.operands import unmapped
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._cuda import graphs, kernel, plan_cache, runtime, tensor_map
from cupyflash._cuda import launch as _launch
from cupyflash._cuda.launch_sequence import Steps

_plans = plan_cache.PlanCache()

# Kinds of kernel specs, and their launches.
_STEPS = {
    HopperVjpKernel: hopper_vjp_steps,
    HopperWideVjpKernel: hopper_wide_vjp_steps,
    MmaVjpKernel: mma_vjp_steps,
    GemvVjpKernel: gemv_vjp_steps,
    MmaFewVjpKernel: short_vjp_steps,
    MmaShortVjpKernel: short_vjp_steps,
    TinyVjpKernel: tiny_vjp_steps,
    MmaSplitVjpKernel: mma_split_steps,
    ShortFloat64VjpKernel: short_float64_steps,
    FewFloat64VjpKernel: few_float64_steps,
    SectionsFloat64VjpKernel: sections_float64_steps,
    TensorFloat64VjpKernel: tensor_float64_steps,
    VjpKernel: portable_steps,
}
# Those that load by TMA and write whole vectors.
_BY_VECTORS = (HopperVjpKernel, HopperWideVjpKernel)
# Those for which rows between vectors are copied first on cards that have TMA.
_OF_COPIES = (*_BY_VECTORS, MmaFewVjpKernel)


# --- calls ---------------------------------------------------------------------------


def attention_vjp(arguments, score_and_arrays=()) -> AttentionGrads:
    """attention_vjp() of CuPy arrays; a repeated call goes directly to its launches.

    `score_and_arrays` are the last four of `vjp_problem.attention_vjp`, if it has
    functions.
    """
    (
        dout, q, k, v, out, lse, bias, mask, scale, causal, query_offset, window,
        softcap, sinks, alibi_slopes, query_lengths, key_lengths, layout, precision,
        method, dlse, need_dbias, need_dsinks, deterministic,
    ) = arguments  # fmt: skip
    far = attention_params.FAR
    # Larger offsets change the window, too: leave them to the checks.
    is_int = query_offset.__class__ is int and -far <= query_offset <= far
    offsets = None if is_int else query_offset
    try:
        # By their reprs, since 1 and True are not the same argument.
        key: Any = (
            scale, scale.__class__, causal, causal.__class__, softcap,
            softcap.__class__, window if window is None else repr(window),
            layout, precision, method, need_dbias, need_dbias.__class__, need_dsinks,
            need_dsinks.__class__, deterministic, deterministic.__class__, is_int,
        )  # fmt: skip
        packed = b""
        if score_and_arrays:
            score, score_arrays, mask_arrays, need_dscore = score_and_arrays
            of_mask, mask = (mask, None) if callable(mask) else (None, mask)
            of_functions, packed = _functions.of_call(
                q, score, score_arrays, of_mask, mask_arrays, softcap,
                query_offset if is_int else None,
            )  # fmt: skip
            key += of_functions
            if need_dscore:
                shapes = (x.shape for x in score_arrays.values())
                key += repr(need_dscore), *shapes
        key = (
            key, facts(q), facts(k), facts(v), facts(dout), facts(out), facts(lse),
            dlse is None or facts(dlse), bias is None or facts(bias),
            mask is None or facts(mask), sinks is None or facts(sinks),
            alibi_slopes is None or facts(alibi_slopes),
            offsets is None or facts(offsets),
            query_lengths is None or facts(query_lengths),
            key_lengths is None or facts(key_lengths),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError, ValueError):
        # Not all are CuPy arrays, or an option has a wrong type: the checks raise the
        # error.
        key = plan = None
    if plan is None:
        return _planned(key, (*arguments, *score_and_arrays))
    given = bias, mask, sinks, alibi_slopes, offsets, query_lengths, key_lengths
    options = addresses(given)
    if plan.taken:
        packed = b""
        options = _functions.with_taken(options, plan.taken, score_arrays, mask_arrays)
    found = plan.run(
        None, q.data.ptr, k.data.ptr, v.data.ptr, *options,
        query_offset if is_int else plan.offset, packed, dout.data.ptr, out.data.ptr,
        lse.data.ptr, 0 if dlse is None else dlse.data.ptr,
    )  # fmt: skip
    return _named(plan, found)


@graphs.keeps_memory
def _planned(key, arguments) -> AttentionGrads:
    """Check a call and run it; keep its plan under `key`."""
    problem, operands = vjp_problem.attention_vjp(*arguments)
    with cupy.cuda.Device(operands.forward.q.data.device_id):
        plan = make_plan(problem, operands)
        forward = operands.forward
        plan.taken = tuple(x for x in forward.taken if x.array is not None)
        # Views of the same memory have the same pointer: the arrays of a call can be
        # passed to the launches unchanged.
        if key is not None:
            _plans.put(key, plan)
        return run(plan, problem, operands)


def run(plan, problem, operands) -> AttentionGrads:
    """Launch a plan for checked operands."""
    forward = operands.forward
    given = (operands.dout, forward.out, operands.lse, operands.dlse)
    pointers = AttentionCall(*addresses((*arrays_of(forward), None, None, *given)))
    pointers = pointers._replace(
        offset=attention_params.launch_offset(problem.forward),
        functions=_functions.packed(problem.forward, forward.functions),
    )
    return _named(plan, plan(pointers))


def _named(plan, found):
    """The results of a plan by their names."""
    if not plan.dscore:
        return AttentionGrads(*found)
    of_arrays = dict(zip(plan.dscore, found[-len(plan.dscore) :], strict=True))
    return AttentionGrads(*found[: -len(plan.dscore)], of_arrays)


def unplanned(arguments, score_and_arrays=()) -> AttentionGrads:
    """Check a call and run it."""
    return _planned(None, (*arguments, *score_and_arrays))


def make_plan(problem, operands) -> AttentionPlan:
    """Selection, grids and parameters of a problem."""
    device_id = operands.forward.q.data.device_id
    steps, copies = Steps([]), {}
    if 0 not in problem.rows_shape:
        device = runtime.device(device_id)
        given = problem.forward
        table = diagonals.tabled(given, operands.forward)
        of_table = replace(problem, forward=table)
        row, _, known, fit, copies = _select(of_table, operands, device)
        known = replace(known, whole_vectors=isinstance(row, _BY_VECTORS))
        steps = _STEPS[type(row)](row, known, fit, device)
        steps = diagonals.with_table(steps, given, table)
        functions = {n: getattr(given, n) for n in ("score", "generated", "table")}
        own = replace(known, forward=replace(known.forward, **functions))
        steps = with_dscore(steps, own, fit, device)
        problem = replace(problem, whole_vectors=known.whole_vectors)
    results = gradient_results(problem) | dscore_results(problem, operands)
    if steps.launches:
        kernel.check_results(results, device)
    written = {name for _, arguments in steps.launches for name in arguments}
    zeros = [n for n, x in results.items() if x is not None and n not in written]
    steps = steps._replace(zeros=(*steps.zeros, *zeros))
    steps, results = gradient_copies.trimmed(steps, problem, results)
    plan = AttentionPlan(
        device_id,
        _copies.names_before(AttentionCall._fields, copies),
        results,
        _copies.with_copies(steps, copies),
        arrays_of(operands.forward),
    )
    plan.offset = attention_params.launch_offset(problem.forward)
    plan.dscore = problem.need_dscore
    return plan


def _select(problem, operands, device):
    """(row, what was refused, problem and operands for it, what must be copied)."""
    forward = operands.forward
    arrays = {name: getattr(forward, name) for name in ("q", "k", "v", "out")}
    arrays["dout"] = operands.dout
    inputs = {name: arrays[name] for name in ("q", "k", "v", "dout")}
    of_tma = _copies.copied_for_gradients(problem, inputs)
    terms = {name: getattr(forward, name) for name in ("bias", "mask")}
    terms = {name: x for name, x in terms.items() if x is not None}
    # One number per query would become one per score.
    is_large = any(x.shape[-1] > 1 and x.strides[-1] == 0 for x in terms.values())
    can_copy = not problem.need_dbias and not is_large
    if of_tma and can_copy and _terms(problem.forward, forward) == "any":
        arrays |= terms
        of_tma |= dict.fromkeys(terms, _copies.most_copied(problem.forward))
    for for_tma in (of_tma, {}) if of_tma else ({},):
        if not for_tma:
            arrays = {n: x for n, x in arrays.items() if n not in ("bias", "mask")}
        views, copies = _copies.made_to_fit(arrays, for_tma)
        dout = views.pop("dout", operands.dout)
        fit = operands._replace(forward=forward._replace(**views), dout=dout)
        known, fit = _known(problem, fit)
        row, refused = kernel.select(ATTENTION_VJP_KERNELS, known, device)
        if isinstance(row, _OF_COPIES) and device.cc[0] == 9:
            break
    return row, refused, known, fit, copies


def _known(problem, operands):
    """Problem and operands, packed, with what rows of sm_90a know about the arrays."""
    problem, operands = views.pack_gqa_of_gradients(problem, operands)
    arrays = {name: getattr(operands.forward, name) for name in ("q", "k", "v", "out")}
    arrays["dout"] = operands.dout
    forward = replace(
        problem.forward,
        no_tensor_map=_no_tensor_map(problem, operands),
        no_vectors=views.no_vectors(**arrays),
        row_alignment=views.row_alignment(**arrays),
        terms=_terms(problem.forward, operands.forward),
    )
    return replace(problem, forward=forward), operands


def _terms(forward, operands):
    """The memory layout of bias and mask; see AttentionProblem."""
    arrays = [x for x in (operands.bias, operands.mask) if x is not None]
    of_keys = [forward.seqlen_q == 1 or x.strides[-2] == 0 for x in arrays]
    if all(of_keys):
        return "keys"
    fit = (
        tensor_map.unsupported_reason(x.data.ptr, x.shape, x.strides, x.itemsize)
        is None
        for x in arrays
    )
    return "tiles" if not any(of_keys) and all(fit) else "any"


def _no_tensor_map(problem, operands):
    """Why q, k, v and dout cannot be read through tensor maps, or None."""
    forward = operands.forward
    if forward.q.itemsize != tensor_map.ITEMSIZE or problem.forward.seqlen_k == 0:
        return None  # the problem is refused for that already
    return unmapped(
        lambda: gradient_layout.layout(problem, operands).batch_dims,
        q=forward.q, k=forward.k, v=forward.v, dout=operands.dout,
    )  # fmt: skip


def describe(problem, operands) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    device = runtime.device(operands.forward.q.data.device_id)
    row, refused, *_, copies = _select(problem, operands, device)
    plan = make_plan(problem, operands)
    return {
        "kernel": row.name,
        "refused": refused,
        "device": device.name,
        **({"copied first": ", ".join(copies)} if copies else {}),
        "launches": [_launch.describe(launch) for launch in plan.launches],
        "bits are the same in every run": problem.deterministic
        or not isinstance(row, (HopperVjpKernel, MmaVjpKernel)),
        **described(operands.forward.functions, operands.forward.taken),
    }
