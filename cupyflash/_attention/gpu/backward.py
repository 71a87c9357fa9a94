"""The CuPy back end of attention_vjp: plans of kernels, launched one after another."""

from dataclasses import replace
from typing import Any

import cupy

from cupyflash import (
    _attention_params,
    _attention_views,
    _attention_vjp_layout,
    _attention_vjp_problem,
    _gpu,
    _graphs,
    _kernels,
    _tensormap,
)
from cupyflash._attention_arrays import unmapped
from cupyflash._attention_rows import OPTIONS
from cupyflash._attention_vjp_f64 import TensorFloat64VjpKernel
from cupyflash._attention_vjp_f64_plan import TensorFloat64Plan
from cupyflash._attention_vjp_hopper import HopperVjpKernel
from cupyflash._attention_vjp_hopper_plan import HopperPlan
from cupyflash._attention_vjp_kernels import ATTENTION_VJP_KERNELS
from cupyflash._attention_vjp_mma import MmaVjpKernel
from cupyflash._attention_vjp_mma_plan import MmaPlan
from cupyflash._attention_vjp_mma_split import MmaSplitVjpKernel
from cupyflash._attention_vjp_mma_split_plan import MmaSplitPlan
from cupyflash._attention_vjp_plans import Plan, ZeroPlan
from cupyflash._attention_vjp_problem import AttentionGrads
from cupyflash._attention_vjp_view_plans import CopyingPlan, NarrowingPlan
from cupyflash._attention_vjp_wide import HopperWideVjpKernel
from cupyflash._attention_vjp_wide_plan import HopperWidePlan

_plans = _gpu.PlanCache()

# Arguments of attention_vjp that are arrays, by their place, dlse the last.
_ARRAYS = (0, 1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 16, 20)
_QUERY_OFFSET = 10
# Kinds of rows with a plan of their own.
_PLANS = (
    (HopperVjpKernel, HopperPlan),
    (HopperWideVjpKernel, HopperWidePlan),
    (MmaVjpKernel, MmaPlan),
    (MmaSplitVjpKernel, MmaSplitPlan),
    (TensorFloat64VjpKernel, TensorFloat64Plan),
)
# Rows that read by the copy engine, and write whole vectors.
_BY_VECTORS = (HopperVjpKernel, HopperWideVjpKernel)


# --- calls ---------------------------------------------------------------------------


def attention_vjp(*arguments) -> AttentionGrads:
    """attention_vjp() of CuPy arrays; a call seen before goes to its launches."""
    key = _key(arguments)
    plan = None if key is None else _plans.get(key)
    if plan is None:
        return _planned(key, *arguments)
    query_offset = arguments[_QUERY_OFFSET]
    is_int = type(query_offset) is int
    offset = query_offset if is_int else plan.offset
    dout, q, k, v, out, lse, bias, mask, *rest = (arguments[i] for i in _ARRAYS)
    sinks, alibi, query_lengths, key_lengths, dlse = rest
    offsets = None if is_int else query_offset
    arrays = (q, k, v, out, bias, mask, sinks, alibi, offsets, query_lengths,
              key_lengths, dout, lse, dlse)  # fmt: skip
    if _gpu.current_device() == plan.device_id:
        return plan(arrays, offset)
    with cupy.cuda.Device(plan.device_id):
        return plan(arrays, offset)


def _key(arguments):
    """What a plan depends on; None if that is for the checks to say."""
    parts: list[Any] = []
    far = _attention_params.FAR
    for place, x in enumerate(arguments):
        if x is None:
            parts.append(None)
        elif type(x) is cupy.ndarray:
            data = x.data
            # Whether the copy engine of Hopper can read it, or nobody can.
            parts.append((x.shape, x.strides, x.dtype, data.device_id, data.ptr % 16))
        elif place == _QUERY_OFFSET and type(x) is int and -far <= x <= far:
            parts.append(int)
        elif place in _ARRAYS or place == _QUERY_OFFSET:
            return None
        else:
            # By its repr, since 1 and True are not the same argument.
            parts.append((type(x), repr(x)))
    return tuple(parts)


@_graphs.keeps_memory
def _planned(key, *arguments) -> AttentionGrads:
    """Check a call and run it; keep its plan under `key`."""
    problem, operands = _attention_vjp_problem.attention_vjp(*arguments)
    with cupy.cuda.Device(operands.forward.q.data.device_id):
        plan = make_plan(problem, operands)
        # Views of the same memory have the same pointer: the arrays of a call can be
        # launched as they come.
        if key is not None:
            _plans.put(key, plan)
        offset = _attention_params.launch_offset(problem.forward)
        return plan(_arrays_of(operands), offset)


def unplanned(*arguments) -> AttentionGrads:
    """Check a call and run it."""
    return _planned(None, *arguments)


def _arrays_of(operands):
    """The arrays of a call in the order of plans."""
    forward = operands.forward
    options = (getattr(forward, name) for name in OPTIONS)
    return (
        *(forward.q, forward.k, forward.v, forward.out, *options),
        *(operands.dout, operands.lse, operands.dlse),
    )


def make_plan(problem, operands):
    """Selection, grids and parameters of a problem."""
    device_id = operands.forward.q.data.device_id
    if 0 in problem.rows_shape:
        return ZeroPlan(problem, device_id)
    device = _gpu.device(device_id)
    row, _, known, fit, copies = _select(problem, operands, device)
    kind = next((plan for of, plan in _PLANS if isinstance(row, of)), Plan)
    if isinstance(row, _BY_VECTORS):
        known = replace(known, whole_vectors=True)
    plan = kind(row, known, fit, device, device_id)
    if any(known.written_shape(n) != getattr(known, f"{n}_shape") for n in "qkv"):
        plan = NarrowingPlan(plan, known)
    return CopyingPlan(plan, copies) if copies else plan


def _select(problem, operands, device):
    """(row, what was refused, problem and operands for it, what has to be copied)."""
    forward = operands.forward
    arrays = {name: getattr(forward, name) for name in ("q", "k", "v", "out")}
    arrays["dout"] = operands.dout
    engine = ("q", "k", "v", "dout")
    most = _attention_views.most_copied(problem.forward)
    terms = {name: getattr(forward, name) for name in ("bias", "mask")}
    terms = {name: x for name, x in terms.items() if x is not None}
    # One number a query would become one a score.
    is_large = any(x.shape[-1] > 1 and x.strides[-1] == 0 for x in terms.values())
    can_copy = not problem.need_dbias and not is_large
    if can_copy and _terms(problem.forward, forward) == "any":
        arrays |= terms
        engine += ("bias", "mask")
    for for_copy_engine in (engine, ()):
        if not for_copy_engine:
            arrays = {n: x for n, x in arrays.items() if n not in ("bias", "mask")}
        elif not _attention_views.may_copy(problem.forward):
            continue
        views, copies = _attention_views.made_to_fit(arrays, for_copy_engine, most)
        dout = views.pop("dout", operands.dout)
        fit = operands._replace(forward=forward._replace(**views), dout=dout)
        known = _known(problem, fit)
        row, refused = _kernels.select(ATTENTION_VJP_KERNELS, known, device)
        if isinstance(row, _BY_VECTORS):
            break
    return row, refused, known, fit, copies


def _known(problem, operands):
    """The problem, with what the rows of sm_90a must know of the arrays."""
    forward = replace(
        problem.forward,
        no_tensor_map=_no_tensor_map(problem, operands),
        terms=_terms(problem.forward, operands.forward),
    )
    return replace(problem, forward=forward)


def _terms(forward, operands):
    """How bias and mask lie in memory, in the words of AttentionProblem."""
    arrays = [x for x in (operands.bias, operands.mask) if x is not None]
    of_keys = [forward.seqlen_q == 1 or x.strides[-2] == 0 for x in arrays]
    if all(of_keys):
        return "keys"
    fit = (
        _tensormap.refusal(x.data.ptr, x.shape, x.strides, x.itemsize) is None
        for x in arrays
    )
    return "tiles" if not any(of_keys) and all(fit) else "any"


def _no_tensor_map(problem, operands):
    """Why q, k, v and dout cannot be read through tensor maps, or None."""
    forward = operands.forward
    if forward.q.itemsize != _tensormap.ITEMSIZE or problem.forward.seqlen_k == 0:
        return None  # refused for that already
    return unmapped(
        lambda: _attention_vjp_layout.layout(problem, operands).batch_dims,
        q=forward.q, k=forward.k, v=forward.v, dout=operands.dout,
    )  # fmt: skip


def describe(problem, operands) -> dict[str, Any]:
    """What a call would launch, for explain(); nothing is compiled or launched."""
    device = _gpu.device(operands.forward.q.data.device_id)
    row, refused, *_, copies = _select(problem, operands, device)
    plan = make_plan(problem, operands)
    return {
        "kernel": row.name,
        "refused": refused,
        "device": device.name,
        **({"copied first": ", ".join(copies)} if copies else {}),
        "launches": [_gpu.describe(launch) for launch in plan.launches],
        "bits are the same in every run": problem.deterministic
        or not isinstance(row, (HopperVjpKernel, MmaVjpKernel)),
    }
