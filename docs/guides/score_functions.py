"""
Score and mask functions
========================

You can compute the score between a query and a key with a plain Python function.
``score=`` changes the score, and ``mask=`` decides which keys a query sees. Your
function is traced once, differentiated symbolically, and evaluated for one block of
scores at a time, so the matrix of all scores is never stored. For NumPy arrays, NumPy
evaluates it; for CuPy arrays, it is compiled into the kernel.

Name the arguments you need:

* ``s``, the score so far: scaled, after the softcap, before the bias (not in a mask);
* ``b``, the batch entry, and ``h``, the query head;
* ``i``, the position of the query among the keys (``query_offset`` is added), and
  ``j``, the key;
* after ``*``, arrays by name, which you index with one integer per axis.
"""

import matplotlib.pyplot as plt
import numpy as np

from cupyflash import attention, attention_vjp, explain, scores

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 4, 256, 16))


def relative(s, h, i, j, *, slope):
    """Lower the score of keys that are farther away."""
    return s - slope[h] * abs(i - j)


slopes = np.array([0.5, 0.25, 0.125, 0.0625])
call = {"score": relative, "score_arrays": {"slope": slopes}}
out, lse = attention(q, k, v, **call, return_lse=True)
assert np.allclose(out, attention(q, k, v, alibi_slopes=slopes))

# %%
# What is allowed
# ---------------
# Arithmetic, powers, comparisons, ``& | ^ ~``, ``abs``, ``<<`` and ``>>`` of integers;
# from NumPy ``where``, ``select``, ``clip``, ``minimum``, ``maximum``, ``isin``, roots,
# exponentials, logarithms, trigonometric and hyperbolic functions and their inverses,
# ``floor``, ``round``, ``sign``, ``isfinite`` and similar functions; helper functions,
# loops over constants, ``functools.partial``, ``x.astype(int)``. If you use a function
# that is missing, the error lists those that exist. Floats have the precision of the
# scores, whatever ``astype`` says.
#
# A Python ``if`` cannot work, because there is no value to test yet while the function
# is traced. Mistakes like this raise an error that points at the line and says what to
# write instead:


def wrong(s, i, j):
    return s if i > j else -s


try:
    attention(q, k, v, score=wrong)
except TypeError as error:
    print(str(error).split(": ", 1)[1])

# %%
# What was understood, and its derivative
# ---------------------------------------
# ``explain`` shows both. Expressions that occur twice are computed once.

table = rng.standard_normal((32, 4))
t5 = {"score": scores.t5_bias(), "score_arrays": {"table": table}}
print(explain("attention", q, k, v, **t5).details["score"])


def bent(s):
    return 2.0 * np.tanh(s / 2.0) + np.where(s > 0, 0.1 * s, 0)


print(explain(attention_vjp, out, q, k, v, out, lse, score=bent))

# %%
# Numbers and arrays
# ------------------
# Numbers that a function closes over may change from call to call, and so may the
# contents of arrays, without tracing it again. Literals and booleans are part of the
# function itself. A function cannot close over arrays, lists, classes or other objects,
# nor import a module of yours, because their contents could change unnoticed: pass
# arrays by name, and bind other numbers to names outside of the function.

for cap in (1.0, 2.0):
    capped = attention(q, k, v, score=lambda s, cap=cap: cap * np.tanh(s / cap))
    assert np.allclose(capped, attention(q, k, v, softcap=cap))

# %%
# Indices count from 0 and do not wrap around. One out of range raises an
# ``IndexError``, unless another option hides that pair. So clip the index, or hide the
# pair:

near = {
    "score": lambda s, i, j, *, t: s + t[i - j],
    "score_arrays": {"t": rng.random(256)},
}
try:
    attention(q, k, v, **near)
except IndexError as error:
    print(error)
attention(q, k, v, **near, causal=True)

# %%
# Gradients
# ---------
# ``attention_vjp`` takes the same arguments. In ``need_dscore``, name the arrays of
# floats whose gradients you want as well; they are bit-identical in every run.

grads = attention_vjp(out, q, k, v, out, lse, **call, need_dscore=["slope"])
step = np.array([1e-6, 0, 0, 0])
moved = {**call, "score_arrays": {"slope": slopes + step}}
change = (attention(q, k, v, **moved) - out) * out
print(f"by the gradient {grads.dscore['slope'][0]:.6f}", end=", ")
print(f"by a difference {change.sum() / 1e-6:.6f}")
assert np.isclose(grads.dscore["slope"][0], change.sum() / 1e-6, rtol=1e-4)

# %%
# Masks, and the tiles they skip
# ------------------------------
# A mask that depends on positions is first evaluated for whole tiles, by interval
# arithmetic. Tiles that are hidden everywhere are skipped, and tiles that are seen
# everywhere need no mask. You don't have to build or keep anything. ``explain`` counts
# the tiles. The pictures show each mask for 64 queries and keys, and their titles the
# share of tiles that is skipped for 4,096 of each.

masks = {
    "sliding_window(8)": (scores.sliding_window, (8,), (512,), {}),
    "prefix_lm": (scores.prefix_lm, None, None, {"prefix": lambda n: [n // 3]}),
    "document": (
        scores.document,
        None,
        None,
        {"documents": lambda n: np.arange(n)[None] * 5 // n},
    ),
    "dilated_window(5, 4)": (scores.dilated_window, (5, 4), (64, 8), {}),
    "neighborhood_2d(8, 8, 3)": (scores.neighborhood_2d, (8, 8, 3), (64, 64, 7), {}),
}


def with_mask(entry, length, large):
    """The options of a call."""
    function, few, many, arrays = entry
    mask = function if few is None else function(*(many if large else few))
    given = {name: np.asarray(make(length)) for name, make in arrays.items()}
    return {"mask": mask, "mask_arrays": given or None}


figure, axes = plt.subplots(1, 5, figsize=(13, 3.1), layout="constrained")
x = np.ones((1, 1, 4096, 4), np.float32)
for axis, (name, entry) in zip(axes, masks.items(), strict=True):
    seen = attention(
        x[:, :, :64], x[:, :, :64], np.eye(64, dtype=np.float32)[None, None],
        scale=0, **with_mask(entry, 64, large=False),
    )  # fmt: skip
    told = explain("attention", x, x, x, **with_mask(entry, 4096, large=True))
    tiles = told.details["tiles_of_the_mask"]
    empty = tiles["empty"] / sum(tiles.values())
    print(f"{name:25} {tiles}")
    axis.imshow(seen[0, 0] > 0, cmap="gray", vmin=0, vmax=1.2)
    axis.set(title=f"{name}\n{empty:.0%} skipped", xlabel="key")
    axis.title.set_size(9)
axes[0].set_ylabel("query")

# %%
# Ready-made functions
# --------------------
# ``cupyflash.scores`` has these masks, and the scores ``alibi``, ``softcap``,
# ``t5_bias``, ``soft_nearest_neighbor`` and ``debye``, each a few lines long. Use them
# as they are, or as a starting point for your own.

soft_window = attention(
    q, k, v, mask=scores.sliding_window(32), **call, softcap=20.0, sinks=np.zeros(4)
)
assert soft_window.shape == q.shape

plt.show()
