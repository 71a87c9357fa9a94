"""The CuPy back end of attention_vjp: plans of kernels, launched one after another."""

from dataclasses import replace
from typing import Any

import cupy

from cupyflash._attention import vjp_problem
from cupyflash._attention.gpu import copies as _copies
from cupyflash._attention.gpu import gradient_layout
from cupyflash._attention.gpu import params as attention_params
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.config import OPTIONS
from cupyflash._attention.gpu.fp64.backward import TensorFloat64VjpKernel
from cupyflash._attention.gpu.fp64.backward_plan import TensorFloat64Plan
from cupyflash._attention.gpu.gradient_copies import CopyingPlan, NarrowingPlan
from cupyflash._attention.gpu.simt.backward_plan import Plan, ZeroPlan
from cupyflash._attention.gpu.sm80.backward import MmaVjpKernel
from cupyflash._attention.gpu.sm80.backward_fp32 import MmaSplitVjpKernel
from cupyflash._attention.gpu.sm80.backward_fp32_plan import MmaSplitPlan
from cupyflash._attention.gpu.sm80.backward_plan import MmaPlan
from cupyflash._attention.gpu.sm90.backward import HopperVjpKernel
from cupyflash._attention.gpu.sm90.backward_plan import HopperPlan
from cupyflash._attention.gpu.sm90.backward_wide import HopperWideVjpKernel
from cupyflash._attention.gpu.sm90.backward_wide_plan import HopperWidePlan
from cupyflash._attention.gpu.sm90.operands import unmapped
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._cuda import graphs, kernel, plan_cache, runtime, tensor_map
from cupyflash._cuda import launch as _launch

_plans = plan_cache.PlanCache()

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
# Rows that read by TMA, and write whole vectors.
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
    if runtime.current_device() == plan.device_id:
        return plan(arrays, offset)
    with cupy.cuda.Device(plan.device_id):
        return plan(arrays, offset)


def _key(arguments):
    """What a plan depends on; None if that is for the checks to say."""
    parts: list[Any] = []
    far = attention_params.FAR
    for place, x in enumerate(arguments):
        if x is None:
            parts.append(None)
        elif type(x) is cupy.ndarray:
            data = x.data
            # Whether TMA can read it, or nobody can.
            parts.append((x.shape, x.strides, x.dtype, data.device_id, data.ptr % 16))
        elif place == _QUERY_OFFSET and type(x) is int and -far <= x <= far:
            parts.append(int)
        elif place in _ARRAYS or place == _QUERY_OFFSET:
            return None
        else:
            # By its repr, since 1 and True are not the same argument.
            parts.append((type(x), repr(x)))
    return tuple(parts)


@graphs.keeps_memory
def _planned(key, *arguments) -> AttentionGrads:
    """Check a call and run it; keep its plan under `key`."""
    problem, operands = vjp_problem.attention_vjp(*arguments)
    with cupy.cuda.Device(operands.forward.q.data.device_id):
        plan = make_plan(problem, operands)
        # Views of the same memory have the same pointer: the arrays of a call can be
        # launched as they come.
        if key is not None:
            _plans.put(key, plan)
        offset = attention_params.launch_offset(problem.forward)
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
    device = runtime.device(device_id)
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
    most = _copies.most_copied(problem.forward)
    terms = {name: getattr(forward, name) for name in ("bias", "mask")}
    terms = {name: x for name, x in terms.items() if x is not None}
    # One number a query would become one a score.
    is_large = any(x.shape[-1] > 1 and x.strides[-1] == 0 for x in terms.values())
    can_copy = not problem.need_dbias and not is_large
    if can_copy and _terms(problem.forward, forward) == "any":
        arrays |= terms
        engine += ("bias", "mask")
    for for_tma in (engine, ()):
        if not for_tma:
            arrays = {n: x for n, x in arrays.items() if n not in ("bias", "mask")}
        elif not _copies.may_copy(problem.forward):
            continue
        views, copies = _copies.made_to_fit(arrays, for_tma, most)
        dout = views.pop("dout", operands.dout)
        fit = operands._replace(forward=forward._replace(**views), dout=dout)
        known = _known(problem, fit)
        row, refused = kernel.select(ATTENTION_VJP_KERNELS, known, device)
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
        tensor_map.unsupported_reason(x.data.ptr, x.shape, x.strides, x.itemsize)
        is None
        for x in arrays
    )
    return "tiles" if not any(of_keys) and all(fit) else "any"


def _no_tensor_map(problem, operands):
    """Why q, k, v and dout cannot be read through tensor maps, or None."""
    forward = operands.forward
    if forward.q.itemsize != tensor_map.ITEMSIZE or problem.forward.seqlen_k == 0:
        return None  # refused for that already
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
    }
