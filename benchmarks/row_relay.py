"""Softmax of very long rows with each element read once: `row_relay.cu` on a card.

What the package has for such rows reads them twice, the second time from the L2 cache
(`cuda_src/softmax/rows/cached_two_pass.cu`). Here a row lies in the shared memory of
all multiprocessors. `bench_walls.py` times both.
"""

from pathlib import Path

import cupy
import numpy as np

from cupyflash._cuda import source

CHUNK_BYTES, _MOST_CHUNKS, _ROWS_UNDER_WAY, _LINE = 4096, 32, 16, 128
_SHARED_BYTES = 227 << 10
_THREADS = 32 * 20
_LEFT_BYTES = 12 << 10  # of shared memory, for barriers and sums

HEADERS = ("mbarrier", "bulk", "relaxed", "cache_hint")
# What ptx/ lacks: bulk copies with a cache policy, and those to global memory.
_PTX = r"""
__device__ __forceinline__ void load_bulk(unsigned target, const void* source,
                                          unsigned bytes, unsigned barrier,
                                          unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void store_bulk(void* target, unsigned source,
                                           unsigned bytes, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0], [%1], %2, %3;" ::"l"(target),
      "r"(source), "r"(bytes), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void fence_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
"""


def kernel():
    """The text of the kernel alone."""
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return f'#line 1 "row_relay.cu"\n{text}'


class Relay:
    """The kernel on a number of blocks, which must all fit on the card at once."""

    def __init__(self, blocks, bytes_alone=False, chunks=None):
        self.blocks, self.bytes_alone = blocks, bytes_alone
        self.chunks = chunks or (_SHARED_BYTES - _LEFT_BYTES) // CHUNK_BYTES
        self.smem = self.chunks * CHUNK_BYTES
        defines = {"CHUNKS": self.chunks, "BLOCKS": blocks}
        self.kernel = self.compile(
            defines | {"BYTES_ALONE": 1} if bytes_alone else defines
        )
        self.kernel.max_dynamic_shared_size_bytes = self.smem

    def compile(self, defines):
        """A function of the card."""
        headers = "".join(source.load(f"ptx/{name}.cuh") for name in HEADERS)
        options = ("-std=c++17", *(f"-D{name}={x}" for name, x in defines.items()))
        return cupy.RawKernel(
            headers + _PTX + kernel(),
            "row_relay",
            options,
            enable_cooperative_groups=True,
        )

    def launch(self, grid, block, arguments):
        """Enqueue the kernel."""
        self.kernel(grid, block, arguments, shared_mem=self.smem)

    def refusal(self, row_bytes):
        """Why rows of so many bytes are not for it; empty if they are."""
        lines = -(-row_bytes // _LINE)
        least = -(-max(lines // self.blocks * _LINE - _LINE, 0) // CHUNK_BYTES)
        most = -(-(-(-lines // self.blocks) * _LINE) // CHUNK_BYTES)
        if row_bytes % 16:
            return "a row is no whole number of vectors"
        # Barriers of rows serve for one round of the ring.
        if not self.chunks <= _ROWS_UNDER_WAY * least:
            return f"{least} chunks of a row in a block"
        if most > min(_MOST_CHUNKS, self.chunks // 2):
            return f"{most} chunks of a row in a block"
        return ""

    def __call__(self, x, out, board):
        """Enqueue it for the rows of x; `board` is memory for `board_bytes`."""
        rows, row_bytes = len(x), x.nbytes // len(x)
        board.data.memset_async(0xFF, self.board_bytes(rows))
        sizes = np.int64(row_bytes), np.uint32(rows)
        arguments = (x, out, board, *sizes)
        self.launch((self.blocks,), (_THREADS,), arguments)

    def board_bytes(self, rows):
        """Bytes that blocks publish sums in."""
        return 16 * self.blocks * rows
