"""Attention over sequences that are spread over processes, one GPU or CPU each.

`shard` cuts q, k and v along the sequence. Each process, called a rank, has one part
and gets its part of the result. While one part is being computed, the keys and values
of the next are on their way, and no rank ever holds all of them. NumPy arrays travel by
sockets or MPI, CuPy arrays by NCCL.

>>> import numpy as np
>>> from cupyflash import distributed
>>> comm = distributed.connect()  # under mpirun or torchrun: one of many ranks
>>> q = distributed.shard(np.ones((2, 64, 8)), comm, causal=True)
>>> out = distributed.attention(q, q, q, comm, causal=True)
>>> distributed.unshard(out, comm, causal=True).shape
(2, 64, 8)
"""

from cupyflash.distributed._comm import Comm
from cupyflash.distributed._environment import connect
from cupyflash.distributed._ring import attention, attention_vjp
from cupyflash.distributed._shards import shard, unshard

__all__ = [
    "Comm",
    "attention",
    "attention_vjp",
    "connect",
    "shard",
    "unshard",
]
