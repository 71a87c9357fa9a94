"""
A density of a cloud over several processes
===========================================

The kernel density of a cloud of points, at those same points. Each process has a part
of the cloud, so the cloud may be larger than one card or one machine holds. Parts
travel around the ring while the previous one is being used; no process ever has them
all.

With one more column, the squared distance of two points is a product,

.. math:: -\\tfrac12 |x - y|^2 = (x, 1) \\cdot (y, -\\tfrac12 |y|^2) - \\tfrac12 |x|^2,

so the lse of attention is a log sum of kernels. Its result, the weighted mean of the
points, gives the gradient of the log density.

Run it: ``python examples/density_over_ranks.py``, with ``--ranks 4``, or with ``--gpu``
on two GPUs; under ``torchrun`` or ``mpirun`` it is one of their ranks.
"""

import argparse
import time

import numpy as np
from _support import choose, is_rank, start_ranks, to_numpy

from cupyflash import distributed, points

DIM, WIDTH = 3, 0.3

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--gpu", action="store_true", help="one GPU per rank")
parser.add_argument("--points", type=int, help="of the whole cloud")
options = parser.parse_args()
count = options.points or choose(tiny=400, cpu=6_000, gpu=6_000)


def cloud(first, end):
    """Some points of a cloud of two blobs; each is a function of its number."""
    numbers = np.arange(first, end)
    golden = (numbers[:, None] * np.array([0.7549, 0.5698, 0.4302])) % 1
    blob = np.where(numbers % 3, -1.0, 1.0)[:, None]
    return blob + np.sqrt(-2 * np.log1p(-0.99 * golden)) * np.cos(40 * golden)


def density(xp, comm, part):
    """Log density at this rank's points, and its gradient."""
    x = xp.asarray(part / WIDTH)
    half = (x**2).sum(axis=1, keepdims=True) / 2
    q = xp.concatenate([x, xp.ones_like(half)], axis=1)
    k = xp.concatenate([x, -half], axis=1)
    mean, lse = distributed.attention(q, k, x, comm, scale=1.0, return_lse=True)
    norm = np.log(count) + DIM * np.log(WIDTH * np.sqrt(2 * np.pi))
    return lse - half[:, 0] - norm, (mean - x) / WIDTH


def rank_of_many():
    """One rank: the density at its part of the cloud."""
    with distributed.connect(timeout=120) as comm:
        xp = np
        if options.gpu:
            import cupy as xp

            xp.cuda.Device(comm.local_rank).use()
        first, end = (count * (comm.rank + n) // comm.size for n in (0, 1))
        part = cloud(first, end)
        start = time.perf_counter()
        log_density, gradient = (to_numpy(x) for x in density(xp, comm, part))
        seconds = time.perf_counter() - start
        print(
            f"rank {comm.rank} of {comm.size}: {len(part):,} of {count:,} points, "
            f"{seconds:.2f} s, mean log density {log_density.mean():.4f}",
            flush=True,
        )
        check(part[:50], log_density[:50], gradient[:50])


def check(some, log_density, gradient):
    """Some of it again, in one process that has all points."""
    whole = cloud(0, count)
    lse = points.logsumexp(some, whole, bandwidth=WIDTH)
    norm = np.log(count) + DIM * np.log(WIDTH * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(log_density, lse - norm, atol=1e-10)
    slopes = points.logsumexp_vjp(np.ones(len(some)), some, whole, bandwidth=WIDTH).dx
    np.testing.assert_allclose(gradient, slopes, atol=1e-9)


if is_rank():
    rank_of_many()
else:
    start_ranks(options.ranks)
