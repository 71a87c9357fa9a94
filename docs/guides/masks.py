"""
Masks, causal and query_offset
==============================

Which keys does a query see? Each picture below comes from an actual call. With the
identity as values, the result of attention is its matrix of weights, and with
``scale=0`` every key that is seen gets the same weight. So whatever is not black is
seen. Queries are rows and keys are columns.
"""

import matplotlib.pyplot as plt
import numpy as np

import cupyflash


def weights(num_queries, num_keys, **options):
    """The weights of attention whose scores are all zero."""
    q = np.ones((1, 1, num_queries, 4))
    k = np.ones((1, 1, num_keys, 4))
    v = np.eye(num_keys)[None, None]
    return cupyflash.attention(q, k, v, scale=0, **options)[0, 0]


def show(calls, num_queries=8, num_keys=8):
    """One picture for each call, with its options as the title."""
    size = (3.2 * len(calls), 0.9 + 2.5 * min(num_queries / num_keys, 1))
    _, axes = plt.subplots(1, len(calls), figsize=size, layout="constrained")
    for axis, (title, options) in zip(np.ravel(axes), calls.items(), strict=True):
        seen = weights(num_queries, num_keys, **options)
        axis.imshow(seen > 0, cmap="gray", vmin=0, vmax=1.2)
        axis.set_xticks(np.arange(num_keys + 1) - 0.5, minor=True)
        axis.set_yticks(np.arange(num_queries + 1) - 0.5, minor=True)
        axis.grid(which="minor", color="tab:gray", linewidth=0.5)
        axis.tick_params(which="minor", length=0)
        axis.set(title=title, xlabel="key", ylabel="query")


# %%
# The diagonal
# ------------
# ``query_offset`` is the position of query 0 among the keys. With ``causal=True``,
# query *i* sees keys up to ``i + query_offset``. With as many queries as keys there is
# only one sensible choice. With fewer queries there are two conventions:
#
# * ``None``, the default: the last query lines up with the last key, as you want for a
#   key-value cache, and as in FlashAttention;
# * ``0``: the first query lines up with the first key, as in PyTorch and JAX.

show(
    {
        "causal=True": {"causal": True},
        "causal=True, query_offset=0": {"causal": True, "query_offset": 0},
        "causal=True, query_offset=2": {"causal": True, "query_offset": 2},
    },
    num_queries=4,
)

# %%
# More queries than keys
# ----------------------
# By the same rule, the first queries see nothing. Their result is 0 and their lse is
# -inf, never NaN.

show(
    {
        "causal=True": {"causal": True},
        "causal=True, query_offset=0": {"causal": True, "query_offset": 0},
    },
    num_queries=8,
    num_keys=5,
)
assert (weights(8, 5, causal=True)[:3] == 0).all()

# %%
# Windows
# -------
# ``window=(left, right)`` counts keys on each side of the diagonal; a single number
# sets both. ``None`` means unbounded, so ``window=(None, 0)`` is causal.

show(
    {
        "window=2": {"window": 2},
        "window=(3, 0)": {"window": (3, 0)},
        "window=(1, None)": {"window": (1, None)},
    }
)
assert (weights(8, 8, window=(None, 0)) == weights(8, 8, causal=True)).all()

# %%
# Lengths
# -------
# In a padded batch each entry has its own length, and the diagonal follows the lengths:
# the last query in use lines up with the last key in use.

show(
    {
        "key_lengths=5": {"key_lengths": np.array([5])},
        "query_lengths=6,\nkey_lengths=5": {
            "query_lengths": np.array([6]),
            "key_lengths": np.array([5]),
        },
        "the same, causal=True": {
            "query_lengths": np.array([6]),
            "key_lengths": np.array([5]),
            "causal": True,
        },
    }
)

# %%
# A cache
# -------
# Say you have two new queries, and a cache with room for 8 keys of which 5 are in use,
# counting the two new ones. Then query 0 belongs to the fourth key. The offset follows
# from the lengths. If you give it as a number, it is the length before the new keys.

cache = {"key_lengths": np.array([5]), "causal": True}
show(
    {
        "key_lengths=5, causal=True": cache,
        "the same, query_offset=3": cache | {"query_offset": 3},
    },
    num_queries=2,
)
assert (weights(2, 8, **cache) == weights(2, 8, **cache, query_offset=3)).all()

# %%
# Masks of any shape
# ------------------
# ``mask`` is bool, True for a key that is seen, and broadcasts: a vector masks keys,
# and a matrix applies to all heads. A key must pass all the masks that you give.

rng = np.random.default_rng(0)
keys = np.array([1, 1, 0, 1, 1, 0, 1, 1], bool)
blocks = np.kron(np.eye(2, dtype=bool), np.ones((4, 4), bool))
show(
    {
        "mask of keys": {"mask": keys},
        "mask of blocks": {"mask": blocks},
        "blocks, causal=True": {"mask": blocks, "causal": True},
    }
)

# %%
# Biases
# ------
# If some keys should count for less but not vanish, use a bias, of any shape that
# broadcasts to (batch, heads, queries, keys). It is read in place and never expanded.
# ``alibi_slopes`` make a bias from positions. ``sinks`` only add to the denominator, so
# the weights of a row add up to less than 1.

distance = np.abs(np.arange(8)[:, None] - np.arange(8))
cases = {
    "bias=-distance": weights(8, 8, bias=-distance.astype(float)),
    "alibi_slopes=[1]": weights(8, 8, alibi_slopes=np.ones(1)),
    "alibi_slopes, sinks=[0]": weights(
        8, 8, alibi_slopes=np.ones(1), sinks=np.zeros(1)
    ),
}
figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.4), layout="constrained")
for axis, (title, seen) in zip(axes, cases.items(), strict=True):
    axis.imshow(seen, cmap="gray", vmin=0, vmax=0.8)
    axis.set(title=title, xlabel="key", ylabel="query")
    print(f"{title:<25} rows add up to {seen.sum(axis=1).round(2)}")
assert np.allclose(cases["bias=-distance"], cases["alibi_slopes=[1]"])

plt.show()
