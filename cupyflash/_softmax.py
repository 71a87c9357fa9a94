"""softmax, log_softmax, logsumexp and their vector-Jacobian products."""

from cupyflash import _arrays, _softmax_problem


def _on(problem):
    """The back end of a problem."""
    if problem.backend == "numpy":
        from cupyflash import _softmax_cpu as backend
    else:
        from cupyflash import _softmax_gpu as backend
    return backend


def softmax(
    x, axis=None, *, where=None, scale=1.0, dtype=None, out=None, method="auto"
):
    """TODO docstring."""
    if _arrays.is_cupy(x):
        from cupyflash import _softmax_gpu

        return _softmax_gpu.softmax("softmax", x, axis, where, scale, dtype, out, method)
    problem, operands = _softmax_problem.softmax(
        "softmax", x, axis, where, scale, dtype, out, method
    )
    return _on(problem).run(problem, operands)


def log_softmax(
    x, axis=None, *, where=None, scale=1.0, dtype=None, out=None, method="auto"
):
    """TODO docstring."""
    if _arrays.is_cupy(x):
        from cupyflash import _softmax_gpu

        return _softmax_gpu.softmax(
            "log_softmax", x, axis, where, scale, dtype, out, method
        )
    problem, operands = _softmax_problem.softmax(
        "log_softmax", x, axis, where, scale, dtype, out, method
    )
    return _on(problem).run(problem, operands)


def logsumexp(
    a, axis=None, b=None, keepdims=False, return_sign=False, *, where=None, out=None
):
    """TODO docstring."""
    if _arrays.is_cupy(a):
        from cupyflash import _softmax_gpu

        return _softmax_gpu.logsumexp(a, axis, b, keepdims, return_sign, where, out)
    problem, operands = _softmax_problem.logsumexp(
        a, axis, b, keepdims, return_sign, where, out
    )
    return _on(problem).run(problem, operands)


def softmax_vjp(y, dy, axis=None, *, scale=1.0, out=None):
    """TODO docstring."""
    return _vjp("softmax_vjp", y, dy, axis, scale, out)


def log_softmax_vjp(y, dy, axis=None, *, scale=1.0, out=None):
    """TODO docstring."""
    return _vjp("log_softmax_vjp", y, dy, axis, scale, out)


def _vjp(function, y, dy, axis, scale, out):
    if _arrays.is_cupy(y):
        from cupyflash import _softmax_gpu

        return _softmax_gpu.vjp(function, y, dy, axis, scale, out)
    problem, operands = _softmax_problem.vjp(function, y, dy, axis, scale, out)
    return _on(problem).run(problem, operands)
