"""
Which kernel do I get?
======================

cupyflash keeps its kernels in a table, best first, and runs the first one that can take
the problem. A kernel that cannot take it says why. :func:`cupyflash.explain` shows the
choice for a call without running it:
"""

from dataclasses import replace

import ml_dtypes
import numpy as np

import cupyflash
from cupyflash._attention.gpu import backward_registry, forward_registry
from cupyflash._cuda import device
from cupyflash._cuda import kernel as _kernel
from cupyflash._softmax import memory_layout
from cupyflash._softmax.gpu import registry as softmax_registry

x = np.ones((2, 8, 1024, 64), np.float32)
print(cupyflash.explain("attention", x, x, x, causal=True))

# %%
# On the CPU there is one implementation per method. On a GPU the choice depends on the
# dtype, head size, options and card. The rest of this page asks the tables themselves,
# for cards that need not be present. It runs when the page is built, so it is true of
# the version you are reading about.

ARCHS = {
    "sm_75": "Turing",
    "sm_80": "Ampere",
    "sm_89": "Ada",
    "sm_90a": "Hopper",
    "sm_120": "Blackwell",
}


def chosen(rows, problem, arch):
    """Name of the kernel that would run."""
    try:
        row, _ = _kernel.select(rows, problem, device.device_of_arch(arch))
    except NotImplementedError:
        return "none"
    return row.name


def table(cases, rows):
    """A line for each problem, a column for each card."""
    lines = {"": ARCHS, " ": ARCHS.values()}
    for name, problem in cases.items():
        lines[name] = [chosen(rows, problem, arch) for arch in ARCHS]
    first = max(map(len, lines))
    width = max(len(word) for words in lines.values() for word in words)
    for name, words in lines.items():
        print(f"{name:<{first}}", *(f"{word:>{width}}" for word in words))


# %%
# Attention
# ---------
# ``none`` means that bfloat16 needs a newer card.


def attention(dtype, head_dim, **options):
    """The checked problem of a call."""
    q = np.ones((1, 1, 128, head_dim), dtype)
    return cupyflash.explain("attention", q, q, q, **options).problem


table(
    {
        f"{np.dtype(dtype).name}, head_dim {head_dim}": attention(dtype, head_dim)
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
        for head_dim in (64, 128, 256, 512, 576, 1024)
    },
    forward_registry.ATTENTION_KERNELS,
)

# %%
# Gradients of attention
# ----------------------
# An option, here a soft cap, may need a different kernel.


def gradients(dtype, head_dim, softcap):
    """The checked problem of a call."""
    q = np.ones((1, 1, 128, head_dim), dtype)
    lse = np.ones((1, 1, 128), np.float64 if dtype == np.float64 else np.float32)
    explained = cupyflash.explain("attention_vjp", q, q, q, q, q, lse, softcap=softcap)
    return explained.problem


table(
    {
        f"{np.dtype(dtype).name}, head_dim {head_dim}{', softcap' * (softcap > 0)}": (
            gradients(dtype, head_dim, softcap)
        )
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
        for head_dim in (64, 128, 256, 512)
        for softcap in (0.0, 3.0)
    },
    backward_registry.ATTENTION_VJP_KERNELS,
)

# %%
# Many short entries
# ------------------
# There are kernels for the case where every multiprocessor has a head to work on, and
# the keys of a head fit on the chip. For one query an entry, and for the tiniest
# entries, there are others again.


def short(dtype, queries, keys, head_dim, entries):
    """The checked problem of a call."""
    q = np.ones((entries, 1, queries, head_dim), dtype)
    k = np.ones((entries, 1, keys, head_dim), dtype)
    return cupyflash.explain("attention", q, k, k).problem


table(
    {
        f"{entries} x {queries} x {keys} x {dim}, {np.dtype(dtype).name}": short(
            dtype, queries, keys, dim, entries
        )
        for dtype in (np.float16, np.float32)
        for entries, queries, keys, dim in (
            (500, 40, 40, 64),
            (500, 1, 100, 64),
            (500, 65, 40, 64),
            (8000, 4, 4, 8),
            (8, 40, 40, 64),
        )
    },
    forward_registry.ATTENTION_KERNELS,
)

# %%
# With a method
# -------------
# Asking for a method limits the choice to the kernels that implement it.

methods = ("auto", "naive", "safe", "online", "tiled")
table(
    {f"method={m!r}": attention(np.float32, 64, method=m) for m in methods},
    forward_registry.ATTENTION_KERNELS,
)

# %%
# Softmax
# -------
# By the length of a row. Rows that do not fit into the blocks of a cluster are read
# twice, or once if all multiprocessors together hold some of them (``relay``). If the
# axis is not the contiguous one, neighbouring columns are processed together: the last
# three lines, in float32.

NAMES = ("x", "where", "out")


def softmax(dtype, layout):
    """The checked problem of a call on rows or columns of a length."""
    x = np.zeros((8, layout.row_length), dtype)
    problem = cupyflash.explain("softmax", x, axis=-1).problem
    return replace(problem, layout=layout)


table(
    {
        f"{np.dtype(dtype).name} {length:,}": softmax(
            dtype, memory_layout.rows(8, length, NAMES)
        )
        for dtype in (np.float16, np.float32, np.float64)
        for length in (7, 64, 4096, 32_768, 1_048_576)
    }
    | {
        f"columns {length:,}": softmax(
            np.float32, memory_layout.columns(1, length, 1024, NAMES)
        )
        for length in (64, 4096, 1_048_576)
    },
    [row for row in softmax_registry.KERNELS if "softmax" in row.functions],
)
