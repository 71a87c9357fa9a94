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


@functools.cache
def gpu_gradients():
    """Gradients on CuPy arrays."""
    from cupyflash._points.gpu import gradients

    return gradients


def backend(problem):
    """The module that runs a problem."""
    return _cpu() if problem.backend == "numpy" else _gpu()


def kept_kernel(x, y, epsilon, squared_diameter, tol):
    """The kernel matrix of two NumPy clouds, where it may be kept, or None."""
    from cupyflash._points.cpu import scaled_kernel

    return scaled_kernel.kept(x, y, epsilon, squared_diameter, tol)


def run(problem, is_vector=False):
    """(out, lse) of a problem; values that were a vector give a vector."""
    out, lse = backend(problem).compute(problem)
    return (out[..., 0] if is_vector else out), lse
