"""How long rows are held on chip: configs of threads, registers and shared memory.

A row is counted in 16-byte vectors of its widest array. The first config that can hold
it is used; all numbers were tuned on an H200.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cupyflash._cuda.device import Device

VECTOR_BYTES = 16
WARP = 32

# Threads of a block with several short rows.
_BLOCK_THREADS = 128


@dataclass(frozen=True)
class OnChipConfig:
    """A way to hold a row; it limits the length of the row."""

    threads: int  # the most threads of a block per row
    in_registers: int  # the most vectors per thread in registers
    threads_per_sm: int  # among which the registers of a multiprocessor are divided
    in_smem: int = 0  # the most further vectors per thread in shared memory
    cluster: int = 1  # the most blocks that share a row
    doubling: bool = False  # 1, 2, 4, ... blocks, and lanes that leave few slots empty
    fill: float = 0.0  # the least part of the slots that a row must fill

    @property
    def slots(self) -> int:
        """Vectors per block."""
        return self.threads * (self.in_registers + self.in_smem)

    @property
    def vectors(self) -> int:
        return self.cluster * self.slots

    def blocks(self, vectors: int) -> int:
        """Blocks that share a row with this many vectors."""
        blocks = -(-vectors // self.slots)
        return 1 << (blocks - 1).bit_length() if self.doubling else blocks

    def takes(self, vectors: int) -> bool:
        """Whether a row with this many vectors fits and fills its blocks."""
        least = self.fill * self.blocks(vectors) * self.slots
        return least <= vectors <= self.vectors


@dataclass(frozen=True)
class Hold:
    """How threads hold a row."""

    lanes: int  # threads of a block that work on one row
    rows_per_block: int
    in_registers: int  # vectors per thread
    in_smem: int
    cluster: int
    min_blocks: int  # blocks per multiprocessor, by registers

    @property
    def num_threads(self) -> int:
        return self.lanes * self.rows_per_block


# softmax and log_softmax of floats. 32 registers per thread for the row (8 vectors), 64
# in total: the loads of 1024 threads hide the latency of memory.
FORWARD = (
    # Up to 4 KB 4 vectors per thread, above 8.
    OnChipConfig(320, 8, 1024),
    # Only two blocks of 352 or 384 threads fit, but five of these.
    OnChipConfig(192, 8, 1024, cluster=2),
    OnChipConfig(512, 8, 1024),
)
# Exponentials of doubles take as many registers as another vector.
FORWARD_F64 = (FORWARD[0], OnChipConfig(224, 7, 1024, cluster=2), FORWARD[-1])
# With one more vector, log_softmax of 16 bits spills, and more so with more threads in
# rows of one or two vectors.
LOG_16_BITS = (
    OnChipConfig(1, 2, 896),
    OnChipConfig(320, 7, 1024),
    OnChipConfig(192, 7, 1024, cluster=2),
    OnChipConfig(512, 7, 1024),
)
# Rows that do not fill whole blocks: shared memory before more blocks.
_FULL = (OnChipConfig(256, 8, 1024, cluster=8, doubling=True, fill=15 / 16),)
_LONGEST = (
    OnChipConfig(256, 8, 768, in_smem=18, cluster=16, doubling=True),
    OnChipConfig(256, 16, 512, in_smem=16, cluster=16, doubling=True),
)
FORWARD_CLUSTERS = (
    *_FULL,
    OnChipConfig(256, 6, 1024, in_smem=10, cluster=8, doubling=True),
    OnChipConfig(256, 6, 1024, in_smem=12, cluster=8, doubling=True),
    OnChipConfig(256, 6, 1024, in_smem=10, cluster=16, doubling=True),
    # Fewer clusters of 14 blocks than of 16 fit on the device.
    OnChipConfig(256, 6, 1024, in_smem=13, cluster=16, doubling=True),
    *_LONGEST,
)
# log_softmax of doubles has registers for a table only with elements in shared memory.
LOG_F64_CLUSTERS = (
    OnChipConfig(256, 5, 1024, in_smem=11, cluster=8, doubling=True),
    # More shared memory rather than 16 blocks.
    OnChipConfig(256, 5, 1024, in_smem=13, cluster=8, doubling=True),
    OnChipConfig(256, 8, 768, in_smem=14, cluster=8, doubling=True),
    OnChipConfig(256, 5, 1024, in_smem=11, cluster=16, doubling=True),
    OnChipConfig(256, 5, 1024, in_smem=13, cluster=16, doubling=True),
    *_LONGEST,
)
FORWARD_F64_CLUSTERS = (
    OnChipConfig(256, 6, 768, in_smem=10, cluster=4, doubling=True, fill=15 / 16),
    *LOG_F64_CLUSTERS,
)
# Rows over several axes: the offsets of vectors take registers as well.
FORWARD_OF_PIECES, FORWARD_OF_PIECES_CLUSTERS = LOG_16_BITS, FORWARD_CLUSTERS[1:]
# With a mask, a scale, integers or strides, registers are needed elsewhere.
FORWARD_HEAVY = (OnChipConfig(512, 4, 512),)
FORWARD_HEAVY_CLUSTERS = (
    OnChipConfig(256, 4, 512, cluster=16),
    OnChipConfig(256, 4, 512, in_smem=4, cluster=16),
)
# A scale alone needs fewer registers; unlimited, the compiler would take up to 114.
# log_softmax of 16 bits would spill in rows of one or two vectors.
FORWARD_SCALED = (OnChipConfig(1, 2, 512), OnChipConfig(512, 4, 1024))
FORWARD_SCALED_CLUSTERS = (
    OnChipConfig(256, 4, 1024, cluster=16),
    OnChipConfig(256, 4, 1024, in_smem=4, cluster=16),
)
STRIDED = (OnChipConfig(512, 2, 512),)

# Gradients hold as many vectors of y and of dy.
BACKWARD = (OnChipConfig(512, 4, 1024),)
# 16 bits: twice as many numbers need registers when they are computed with.
BACKWARD_16_BITS = (OnChipConfig(256, 4, 768),)
# Rows over several axes: with one more vector, softmax_vjp of float16 spills.
BACKWARD_OF_PIECES = (OnChipConfig(256, 3, 768),)
BACKWARD_CLUSTERS = (
    OnChipConfig(256, 8, 512, cluster=8),
    OnChipConfig(256, 8, 512, cluster=16, doubling=True, fill=15 / 16),
    OnChipConfig(256, 8, 512, in_smem=8, cluster=8, doubling=True),
    OnChipConfig(256, 8, 512, in_smem=8, cluster=16),
)
BACKWARD_LOG_F64_CLUSTERS = BACKWARD_CLUSTERS[2:]
BACKWARD_16_BITS_CLUSTERS = (
    # 4 vectors for 3 blocks of 224 threads per multiprocessor.
    OnChipConfig(256, 6, 512, in_smem=2, cluster=16),
    OnChipConfig(256, 6, 512, in_smem=10, cluster=16),
)


# On architectures other than sm_90 the assembler spills more.
_FORWARD_ELSEWHERE = (OnChipConfig(512, 5, 1024),)
_F64_ELSEWHERE = (
    OnChipConfig(256, 6, 512, cluster=8),
    OnChipConfig(256, 6, 512, in_smem=10, cluster=16),
)
ELSEWHERE = {
    FORWARD: _FORWARD_ELSEWHERE,
    FORWARD_F64: _FORWARD_ELSEWHERE,
    LOG_16_BITS: (OnChipConfig(512, 5, 512),),
    BACKWARD: (OnChipConfig(512, 3, 1024),),
    BACKWARD_16_BITS: (OnChipConfig(256, 3, 768),),
    FORWARD_SCALED: FORWARD_HEAVY,
    FORWARD_SCALED_CLUSTERS: FORWARD_HEAVY_CLUSTERS,
    FORWARD_CLUSTERS: (
        OnChipConfig(256, 6, 512, cluster=8),
        OnChipConfig(256, 6, 512, in_smem=10, cluster=16),
    ),
    FORWARD_F64_CLUSTERS: _F64_ELSEWHERE,
    FORWARD_OF_PIECES_CLUSTERS: _F64_ELSEWHERE,
    LOG_F64_CLUSTERS: _F64_ELSEWHERE,
    BACKWARD_CLUSTERS: (
        OnChipConfig(256, 6, 512, cluster=16),
        OnChipConfig(256, 6, 512, in_smem=10, cluster=16),
    ),
    BACKWARD_LOG_F64_CLUSTERS: (
        OnChipConfig(256, 6, 512, cluster=16),
        OnChipConfig(256, 6, 512, in_smem=10, cluster=16),
    ),
    BACKWARD_16_BITS_CLUSTERS: (OnChipConfig(256, 5, 512, in_smem=10, cluster=16),),
}


def without_clusters(
    in_registers: int, arrays: int, device: Device
) -> tuple[OnChipConfig, ...]:
    """One block with all the shared memory that it may have, for `arrays` rows."""
    threads = 512
    spare = device.smem_optin - 8192  # for the exchange between warps
    in_smem = spare // (threads * VECTOR_BYTES * arrays)
    return (
        (OnChipConfig(threads, in_registers, 512, in_smem=in_smem),)
        if in_smem > 0
        else ()
    )


def ladder(
    short: tuple[OnChipConfig, ...],
    clusters: tuple[OnChipConfig, ...],
    arrays: int,
    device: Device,
) -> tuple[OnChipConfig, ...]:
    """The configs that a device has."""
    if device.cc != (9, 0):
        short = ELSEWHERE.get(short, short)
        clusters = ELSEWHERE.get(clusters, clusters)
    if device.cc >= (9, 0):
        return (*short, *clusters)
    if not clusters:
        return short
    return (*short, *without_clusters(short[-1].in_registers, arrays, device))


def hold(configs: Sequence[OnChipConfig], vectors: int, ends: int = 0) -> Hold | None:
    """How the first config that fits holds a row with this many vectors.

    At most `ends` elements are outside whole vectors, at its two ends.
    """
    vectors = max(1, vectors)
    config = next((config for config in configs if config.takes(vectors)), None)
    if config is None:
        return None
    cluster = config.blocks(vectors)
    lanes = _lanes_of_short_row(vectors, config.in_registers, ends)
    if lanes is None:
        lanes = _lanes_of_long_row(-(-vectors // cluster), config)
    slots = -(-vectors // (cluster * lanes))
    rows_per_block = _BLOCK_THREADS // lanes if lanes <= WARP else 1
    in_registers = min(slots, config.in_registers)
    threads_per_sm = config.threads_per_sm
    if lanes <= 4:  # the two ends of a row take registers of few threads
        threads_per_sm -= threads_per_sm // 4
    return Hold(
        lanes,
        rows_per_block,
        in_registers,
        slots - in_registers,
        cluster,
        max(1, threads_per_sm // (lanes * rows_per_block)),
    )


def _lanes_of_short_row(vectors, most, ends):
    """Threads, a power of two, that leave the fewest slots empty; None for a long row.

    Each thread has a few vectors, so that its fixed work per row pays off. A single
    thread with more than two would touch each memory line repeatedly, and so would few
    threads at the ends of the row.
    """
    if vectors <= 2 and not ends:
        return 1
    fewest = min(-(-most // 2), 2 if vectors <= 4 else 3 if vectors <= 8 else 4)
    fits = [
        (lanes * slots, slots, lanes)
        for lanes in (2, 4, 8, 16, 32, 64)
        if fewest <= (slots := -(-vectors // lanes)) <= most and 2 * lanes >= ends
    ]
    if fits:
        return min(fits)[2]
    few = 1 << (-(-ends // 2) - 1).bit_length() if ends else 2
    return few if vectors <= few * most and few <= WARP else None


# Fewer lanes pay off if they leave this much less of the slots empty.
_FEWER_LANES = 1.04


def _lanes_of_long_row(vectors, config):
    """Threads, in whole warps, for this many vectors per block."""
    per_thread = config.in_registers + config.in_smem
    # More than one warp: the exchange between them costs the same for all lengths.
    fewest = max(2 * WARP, -(-vectors // (per_thread * WARP)) * WARP)
    if not config.doubling:
        return fewest

    def cost(lanes):
        slots = -(-vectors // lanes) * lanes
        return slots if lanes == config.threads else slots * _FEWER_LANES

    return min(range(config.threads, fewest - 1, -WARP), key=cost)


@dataclass(frozen=True)
class Stream:
    """Blocks that share rows, which stream through rings in their shared memory."""

    threads: int  # per block
    ring: int  # steps per thread, of a vector of each operand
    ahead: int  # of these, steps that may be loading
    blocks: int  # per group, which shares a row
    groups: int


_STREAM_THREADS = 512
# Bytes being loaded per multiprocessor, and bytes of the steps that hide the latency of
# the exchange between blocks.
_STREAM_AHEAD = 40 << 10
_STREAM_HIDDEN = 40 << 10


def stream(vectors: int, rows: int, place: int, device: Device) -> Stream | None:
    """How rows of this many vectors stream, at `place` bytes each; None: too long."""
    threads = _STREAM_THREADS
    step = threads * place
    ring = (device.smem_optin - 8192) // step
    ahead = max(1, _STREAM_AHEAD // step)
    longest = ring - ahead  # steps per row
    if longest < 2:
        return None
    hidden = min(_STREAM_HIDDEN // step, longest // 2)
    blocks = -(-vectors // (threads * (longest - hidden)))
    if blocks > device.num_sms:
        if vectors > threads * longest * device.num_sms:
            return None
        blocks = device.num_sms
    groups = min(rows, device.num_sms // blocks)
    return Stream(threads, ring, ahead, device.num_sms // groups, groups)
