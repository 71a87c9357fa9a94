"""Softmax as a user would write it: array operations in the dtype of the input.

A kernel may be at most twice as far from the reference as these are.
"""

import numpy as np


def softmax(xp, x, axis):
    """exp(x - max) / sum, each step rounded to the dtype of `x`."""
    _, e, total, rounded = _steps(xp, x, axis)
    return rounded(e / total).astype(x.dtype)


def log_softmax(xp, x, axis):
    """x - max - log(sum), likewise."""
    t, _, total, rounded = _steps(xp, x, axis)
    return rounded(t - rounded(xp.log(total))).astype(x.dtype)


def _steps(xp, x, axis):
    work = np.float64 if x.dtype == np.float64 else np.float32

    def rounded(y):
        return y.astype(x.dtype, copy=False).astype(work, copy=False)

    t = x.astype(work, copy=False)
    t = rounded(t - t.max(axis=axis, keepdims=True))
    e = rounded(xp.exp(t))
    return t, e, rounded(e.sum(axis=axis, keepdims=True)), rounded
