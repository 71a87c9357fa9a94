"""Lengths about which the softmax table changes its mind, found by asking explain.

Nothing here knows a threshold: when the table moves, the tests that use this follow.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import oracle
from accuracy import dtype_of

import cupyflash

FUNCTIONS = (
    "softmax",
    "log_softmax",
    "logsumexp",
    "softmax_vjp",
    "log_softmax_vjp",
)


@dataclass(frozen=True)
class Kind:
    """Shapes with one free length: (outer, length, inner), reduced over the middle."""

    outer: int
    inner: int
    longest: int

    def shape(self, length):
        """The outer axis shrinks where the array would become large."""
        outer = min(self.outer, max(1, 2**20 // (length * self.inner)))
        return outer, length, self.inner


KINDS = {
    "one row": Kind(1, 1, 3_000_000),
    "few rows": Kind(5, 1, 400_000),
    "many rows": Kind(1500, 1, 20_000),
    "columns": Kind(3, 32, 40_000),
    "odd columns": Kind(7, 37, 20_000),
    "narrow columns": Kind(50, 3, 60_000),
    "wide columns": Kind(1, 1000, 5_000),
}


def arguments(function, x):
    """Positional arguments of a call that reduces the middle axis."""
    return (x, x, 1) if function.endswith("_vjp") else (x, 1)


def launch_of(function, x, **options):
    """(tier, all that it is compiled and launched with but the grid)."""
    told = cupyflash.explain(function, *arguments(function, x), **options)
    launches = told.details.get("launches", [])
    facts = [{k: v for k, v in x.items() if k != "grid"} for x in launches]

    def most(fact):
        return max((launch.get(fact, 0) for launch in launches), default=0)

    cluster = most("cluster")
    tier = [
        told.kernel,
        *(["shared memory"] if most("shared memory") else []),
        *(["cluster"] if 1 < cluster <= 8 else []),
        *(["large cluster"] if cluster > 8 else []),
    ]
    return ", ".join(tier), repr(facts)


def kernel_of(tier):
    """The row of the table that a tier belongs to."""
    return tier.split(",")[0]


def thresholds(xp, function, dtype, kind):
    """{last length of a step: its tier}, in rising order; the longest comes last.

    A step is a run of lengths that one compiled kernel takes; a tier is a kernel and
    the kind of memory that it holds a row in.
    """
    from cupyflash._cuda import runtime

    return _thresholds(xp, function, dtype, kind, runtime.device(0))


@functools.cache
def _thresholds(xp, function, dtype, kind, device):
    """The same, by the table that this device has."""

    def of(length):
        x = xp.empty(KINDS[kind].shape(length), dtype_of(dtype))
        return launch_of(function, x)

    longest = KINDS[kind].longest
    grid = {1, longest}
    grid |= {n for p in range(23) for n in (2**p, 3 * 2**p // 2 + 1) if n < longest}
    found = {}
    lengths = sorted(grid)
    for low, high in itertools.pairwise(lengths):
        step, last = of(low), of(high)
        while step != last:  # there may be several steps between two of the grid
            a, b = low, high
            while b - a > 1:
                middle = (a + b) // 2
                a, b = (middle, b) if of(middle) == step else (a, middle)
            found[a] = step[0]
            low, step = b, of(b)
    found[longest] = of(longest)[0]
    return found


# Steps, and changes of tier, that one test tries; others are left to other tests.
_MOST_STEPS = 5


def lengths_around(found, turn):
    """The last length of each step, the first of the next, and an odd one between.

    Where there are many steps, each of which is compiled anew, they are shared out by
    `turn`, those where the tier changes apart from the others.
    """
    steps = list(itertools.pairwise([0, *sorted(found)]))
    changes = [
        i
        for i, (_, end) in enumerate(steps[:-1])
        if found[end] != found[steps[i + 1][1]]
    ]
    lengths = {1, steps[-1][1]}
    for i in _share(range(len(steps)), turn):
        start, end = steps[i]
        lengths |= {start + 1, end, (start + end) // 2 | 1}
    for i in _share(changes, turn):
        lengths |= {steps[i][1], steps[i][1] + 1}
    return sorted(n for n in lengths if n <= steps[-1][1])


def _share(items, turn):
    """Some of `items`, evenly from all over."""
    stride = max(1, -(-len(items) // _MOST_STEPS))
    return items[turn % stride :: stride]


def one_length_of_each_tier(found):
    """{tier: a length within its middle step, odd where there is such}."""
    steps = {}
    for start, end in itertools.pairwise([0, *sorted(found)]):
        steps.setdefault(found[end], []).append((start, end))
    lengths = {}
    for tier, its_own in steps.items():
        start, end = its_own[len(its_own) // 2]
        lengths[tier] = max(start + 1, min(end, (start + end) // 2 | 1))
    return lengths


def inputs(rng, function, shape, dtype):
    """x (or y and dy) on the host; each row has a spread of its own."""
    spread = np.exp(rng.uniform(-1, 3.5, size=(shape[0], 1, shape[2])))
    x = (rng.standard_normal(shape) * spread).astype(dtype_of(dtype))
    if not function.endswith("_vjp"):
        return (x,)
    y = getattr(oracle, function.removesuffix("_vjp"))(x, 1, real=np.float64)
    dy = rng.standard_normal(shape)
    return y.astype(x.dtype), dy.astype(x.dtype)
