"""
A sequence over several processes
=================================

Attention over one sequence that is split over several processes. Started by hand, the
script starts two processes on this machine, which compute with NumPy. With ``--gpu``
each takes a GPU, and NCCL carries keys and values. Under ``torchrun`` or ``mpirun`` it
is one of their ranks.

Run it: ``python examples/long_sequence.py``, with ``--ranks 4``, or with
``--gpu --tokens 1000000`` on two GPUs.
"""

import argparse
import time

import numpy as np
from _support import choose, is_rank, start_ranks, to_numpy

import cupyflash
from cupyflash import distributed

HEADS, KV_HEADS, DIM = 4, 2, 64

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--gpu", action="store_true", help="one GPU per rank")
parser.add_argument("--tokens", type=int, help="length of the sequence")
options = parser.parse_args()
tokens = options.tokens or choose(tiny=500, cpu=3_000, gpu=3_000)

# %%
# What each rank does
# -------------------
# It creates its own part of the sequence: two pieces, one from the front and one from
# the back, so that all ranks have equal work under a causal mask. Here every token is a
# function of its position, so no rank needs the whole sequence.


def tokens_at(places, heads, seed):
    """Numbers that only depend on the position in the sequence."""
    phases = np.random.default_rng(seed).uniform(0, 2 * np.pi, (heads, 1, DIM))
    waves = np.random.default_rng(seed + 1).uniform(0, 1, (heads, 1, DIM))
    return (2 * np.sin(places[None, :, None] * waves + phases)).astype(np.float32)


def rank_of_many():
    """One rank: attention and its gradients of this rank's part."""
    xp = np
    with distributed.connect(timeout=120) as comm:
        if options.gpu:
            import cupy as xp

            xp.cuda.Device(comm.local_rank).use()
        places = distributed.shard(np.arange(tokens), comm, axis=0, causal=True)
        q = xp.asarray(tokens_at(places, HEADS, 0))
        k, v = (xp.asarray(tokens_at(places, KV_HEADS, seed)) for seed in (2, 4))

        start = time.perf_counter()
        out, lse = distributed.attention(q, k, v, comm, causal=True, return_lse=True)
        grads = distributed.attention_vjp(
            out, q, k, v, out, lse, comm, causal=True, deterministic=True
        )
        norm = float(abs(grads.dk).sum())  # waits for the GPU
        seconds = time.perf_counter() - start
        print(
            f"rank {comm.rank} of {comm.size}: {len(places):,} of {tokens:,} tokens, "
            f"{seconds:.2f} s, |dk| {norm:.4g}",
            flush=True,
        )
        check(places, to_numpy(out))


def check(places, out):
    """Some queries again, in one process: they see all keys before them."""
    k, v = (tokens_at(np.arange(tokens), KV_HEADS, seed) for seed in (2, 4))
    for n in (0, len(places) // 2, len(places) - 1):
        place = int(places[n])
        q = tokens_at(places[n : n + 1], HEADS, 0)
        alone = cupyflash.attention(q, k, v, causal=True, query_offset=place)
        np.testing.assert_allclose(out[:, n], alone[:, 0], atol=1e-5)


# %%
# Starting them
# -------------
# A launcher tells each process its rank through environment variables. This does the
# same for processes on this machine.

if is_rank():
    rank_of_many()
else:
    start_ranks(options.ranks)
