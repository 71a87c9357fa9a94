"""benchmarks/row_relay.cu on the emulation, against NumPy.

python tests/support/emulation/row_relay_run.py
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parent), str(ROOT), str(ROOT / "benchmarks")]

import emulation  # noqa: E402

cupy = emulation.install("sm_90a", None)

import numpy as np  # noqa: E402
import row_relay  # noqa: E402

from emulation import stand_in  # noqa: E402

PTX = """
inline void load_bulk(unsigned target, const void* source, unsigned bytes,
                      unsigned barrier, unsigned long long) {
  ptx::cp_async_bulk(target, source, bytes, barrier);
}
inline void store_bulk(void* target, unsigned source, unsigned bytes,
                       unsigned long long) {
  if (source % 16 || bytes % 16) emu::fail("cp.async.bulk is not aligned");
  memcpy(target, emu::shared_at(source), bytes);
}
inline void fence_shared_writes() {}
"""
# Blocks, chunks of the ring, rows, floats of a row: slices that end within a chunk, a
# block with less than others, more rows than are under way. In the last, whole lines
# rounded up would leave one block half as many chunks as the others have, and a ring of
# more rows than there are barriers for.
CASES = (
    (3, 10, 7, 12_384),
    (4, 16, 20, 20_000),
    (2, 53, 5, 32_768),
    (40, 53, 30, 126_752),
)


class Emulated(row_relay.Relay):
    """The kernel made by g++."""

    def compile(self, defines):
        headers = "".join(
            (HERE / "ptx" / f"{name}.cuh").read_text(encoding="utf-8")
            for name in row_relay.HEADERS
        )
        given = "".join(f"#define {name} {x}\n" for name, x in defines.items())
        text = given + headers.replace("#pragma once", "") + PTX + row_relay.kernel()
        return stand_in.RawKernel(text, "row_relay", (9, 0))

    def launch(self, *arguments):
        self.kernel(*arguments, self.smem, enable_cooperative_groups=True)


def check(blocks, chunks, rows, length, bytes_alone):
    """A case with rows of several widths of scores."""
    rng = np.random.default_rng(0)
    scales = np.linspace(1, 30, rows)[:, None]
    x = (rng.standard_normal((rows, length)) * scales).astype(np.float32)
    relay = Emulated(blocks, bytes_alone, chunks)
    assert not relay.refusal(4 * length)
    out = cupy.empty(x.shape, np.float32)
    relay(cupy.asarray(x), out, cupy.empty(relay.board_bytes(rows), np.uint8))
    found = cupy.asnumpy(out)
    if bytes_alone:
        np.testing.assert_array_equal(found, x)
        return
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    np.testing.assert_allclose(found, exact, 4e-7, 1e-37)


if __name__ == "__main__":
    for case in CASES:
        for bytes_alone in (False, True):
            check(*case, bytes_alone)
            print(*case, "bytes alone" if bytes_alone else "softmax", "agrees")
