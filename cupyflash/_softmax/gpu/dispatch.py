"""The softmax family on CuPy arrays.

A repeated call, with the same shapes, strides, dtypes and options, goes directly from a
dictionary to the launch. Any other passes the checks of `problem` and leaves a plan.
"""

from cupyflash._cuda import graphs, plan_cache
from cupyflash._cuda import launch as cuda_launch
from cupyflash._softmax import problem as softmax_problem
from cupyflash._softmax.gpu.complex import _run_complex
from cupyflash._softmax.gpu.plan import VECTOR, inputs_of, layout_of, make_plan

_plans = plan_cache.PlanCache()


# --- calls ---------------------------------------------------------------------------


def softmax(function, x, axis, where, scale, dtype, out, method):
    """softmax or log_softmax of a CuPy array."""
    try:
        data = x.data
        at = onto = data.ptr
        of_out = None
        if out is not None:
            of_out = layout_of(out)
            onto = out.data.ptr
        # The classes tell True from 1, which the checks do as well.
        key = (function, x.shape, x._c_contiguous or x.strides, x.dtype,
               data.device_id, axis, axis.__class__, scale, scale.__class__, dtype,
               method, where if where is None else layout_of(where), of_out,
               (at | onto) % VECTOR)  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # not a CuPy array, or not hashable
        key = plan = None
    if plan is not None:
        # An absent mask may have any address: it is never read.
        if where is None and (out is None or abs(at - onto) >= plan.reach):
            return plan.run(out, at, at)[0]
        pointers = at, at if where is None else where.data.ptr
        if out is None or not plan.may_overlap(onto, pointers):
            return plan.run(out, *pointers)[0]
    return _planned(
        key, softmax_problem.softmax, function, x, axis, where, scale, dtype, out,
        method,
    )  # fmt: skip


def logsumexp(a, axis, b, keepdims, return_sign, where, out):
    """logsumexp of a CuPy array."""
    try:
        at = a.data.ptr
        # No element may begin within another, which the checks look at.
        key = ("logsumexp", *layout_of(a), at % VECTOR, axis, axis.__class__,
               keepdims, keepdims.__class__, return_sign, return_sign.__class__,
               b if b is None else (*layout_of(b), b.data.ptr % VECTOR),
               where if where is None else layout_of(where),
               out if out is None else (*layout_of(out), out.data.ptr % VECTOR),
               )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        key = plan = None
    if plan is not None:
        pointers = (at, at if b is None else b.data.ptr,
                    at if where is None else where.data.ptr)  # fmt: skip
        if out is None or not plan.may_overlap(out.data.ptr, pointers):
            return _returned(plan.run(out, *pointers))
    return _planned(
        key, softmax_problem.logsumexp, a, axis, b, keepdims, return_sign, where, out
    )


def vjp(function, y, dy, axis, scale, out):
    """softmax_vjp or log_softmax_vjp of CuPy arrays."""
    try:
        pointers = y_at, dy_at = y.data.ptr, dy.data.ptr
        onto = y_at if out is None else out.data.ptr
        key = (function, layout_of(y), layout_of(dy), axis, axis.__class__, scale,
               scale.__class__, out if out is None else layout_of(out),
               (y_at | dy_at | onto) % VECTOR)  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        key = plan = None
    if plan is not None:
        if out is None or not plan.may_overlap(onto, pointers):
            return plan.run(out, *pointers)[0]
    return _planned(key, softmax_problem.vjp, function, y, dy, axis, scale, out)


@graphs.keeps_memory
def _planned(key, check, *arguments):
    """Check a call, run it, and keep its plan under `key`."""
    return _checked(key, *check(*arguments))


def unplanned(check, *arguments):
    """Check a call and run it."""
    return _planned(None, check, *arguments)


def _checked(key, problem, operands):
    """Run a problem that has passed the checks, and keep its plan under `key`."""
    if problem.is_complex:
        with operands.x.device:
            return _run_complex(problem, operands)
    inputs = inputs_of(problem, operands)
    pointers = tuple((inputs[0] if x is None else x).data.ptr for x in inputs)
    unfit: tuple[str, ...] = ()
    while True:
        planned = make_plan(problem, inputs, operands.out, unfit)
        try:
            results = planned.sequence(pointers, operands.out)
            break
        except cuda_launch.DoesNotFitError:
            unfit += (planned.row.name,)  # the next kernel, then
    if key is not None:
        _plans.put(key, planned.sequence)
    return _returned(results)


def _returned(results):
    """The result, or logsumexp and its sign."""
    return results[0] if len(results) == 1 else results


def describe(problem, operands):
    """What would be launched; nothing is, and nothing is compiled."""
    if problem.is_complex:
        return {"kernel": "array operations of CuPy", "reason": "complex numbers"}
    inputs = inputs_of(problem, operands)
    sequence, row, refused = make_plan(problem, inputs, operands.out)
    if row is None:
        return {"kernel": "none", "reason": "there is nothing to compute"}
    return {
        "kernel": row.name,
        "refused": refused,
        "launches": [cuda_launch.describe(launch) for launch in sequence.launches],
    }
