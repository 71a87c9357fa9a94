"""The reductions: a checked problem goes to the back end of its arrays."""

import functools


@functools.cache
def _cpu():
    from cupyflash._points.cpu import forward

    return forward


@functools.cache
def _gpu():
    """The CuPy back end, imported when the first GPU array arrives."""
    from cupyflash._points.gpu import dispatch

    return dispatch


def backend(problem):
    """The module that runs a problem."""
    return _cpu() if problem.backend == "numpy" else _gpu()


def run(problem, is_vector=False):
    """(out, lse) of a problem; values that were a vector give a vector."""
    out, lse = backend(problem).compute(problem)
    return (out[..., 0] if is_vector else out), lse
