"""How long rows are held on chip: tiers of threads, registers and shared memory.

A row is counted in vectors of 16 bytes of its widest array. The first tier that can
hold it takes it; all numbers were chosen on an H200, as a share of the speed of a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cupyflash._cuda.device import Device

VECTOR_BYTES = 16
WARP = 32

# Threads of a block that holds several short rows.
_BLOCK_THREADS = 128


@dataclass(frozen=True)
class Tier:
    """A way to hold a row, and thereby the longest row that it can hold."""

    threads: int  # a block gives to a row, at most
    held: int  # vectors a thread has in registers, at most
    threads_per_sm: int  # that the registers of a multiprocessor are divided among
    parked: int = 0  # vectors a thread has in shared memory besides, at most
    cluster: int = 1  # blocks that share a row, at most
    doubling: bool = False  # 1, 2, 4, ... blocks, and lanes that leave few slots empty
    fill: float = 0.0  # part of the slots that a row has to fill

    @property
    def slots(self) -> int:
        """Vectors of a block."""
        return self.threads * (self.held + self.parked)

    @property
    def vectors(self) -> int:
        return self.cluster * self.slots

    def blocks(self, vectors: int) -> int:
        """Blocks that share a row of so many vectors."""
        blocks = -(-vectors // self.slots)
        return 1 << (blocks - 1).bit_length() if self.doubling else blocks

    def takes(self, vectors: int) -> bool:
        """Whether a row of so many vectors fits and fills its blocks."""
        least = self.fill * self.blocks(vectors) * self.slots
        return least <= vectors <= self.vectors


@dataclass(frozen=True)
class Hold:
    """A row as its threads hold it."""

    lanes: int  # threads of a block that work on one row
    rows_per_block: int
    held: int  # vectors a thread
    parked: int
    cluster: int
    min_blocks: int  # that a multiprocessor is to have registers for

    @property
    def num_threads(self) -> int:
        return self.lanes * self.rows_per_block


# softmax and log_softmax of floats. 32 registers a thread for the row (8 vectors), 64
# in all: the loads of 1024 threads cover the latency of memory.
FORWARD = (
    # Up to 4 KB 4 vectors a thread: 0.97 to 0.99 at 256 and 1024; with 8 it is 0.01
    # less, with 2 and 1 less than 0.91, with 3, of rows that are no whole vectors, 0.8.
    # Above, 8 vectors: 0.95 to 0.98; with 4 0.90 to 0.94 at 4096 and 0.83 at 8192.
    Tier(320, 8, 1024),
    # Of blocks of 352 and 384 threads two fit, of these five: 10467 floats 0.93, 0.98.
    Tier(192, 8, 1024, cluster=2),
    Tier(512, 8, 1024),
)
# Exponentials of doubles take the registers of a vector more.
FORWARD_F64 = (FORWARD[0], Tier(224, 7, 1024, cluster=2), FORWARD[-1])
# log_softmax of 16 bits spills 24 bytes with a vector more, and up to 148 in rows of
# one or two vectors with more threads.
LOG_16_BITS = (
    Tier(1, 2, 896),
    Tier(320, 7, 1024),
    Tier(192, 7, 1024, cluster=2),
    Tier(512, 7, 1024),
)
# Rows that do not fill whole blocks: shared memory before more blocks. 50257 floats:
# 0.96 in 4 blocks, 0.90 in 7 without it.
_FULL = (
    # 4 blocks of 256 on a multiprocessor: 0.97 to 0.98 at 32768 and 65536 (float32);
    # 2 blocks of 512 reach 0.96 and 0.90, with half of the row parked 0.94.
    Tier(256, 8, 1024, cluster=8, doubling=True, fill=15 / 16),
)
_LONGEST = (
    # Three blocks: 0.78 at 204691 doubles, two of the next tier 0.74.
    Tier(256, 8, 768, parked=18, cluster=16, doubling=True),
    # 0.77 at 262144 (float64); to read the row twice reaches 0.4.
    Tier(256, 16, 512, parked=16, cluster=16, doubling=True),
)
FORWARD_CLUSTERS = (
    *_FULL,
    Tier(256, 6, 1024, parked=10, cluster=8, doubling=True),
    # 275567 of 16 bits: 0.94, in 16 blocks with 3 parked 0.85; 145000 floats 0.95,
    # 0.93.
    # With 13 parked 300001 of 16 bits 0.91, in 16 blocks of 160 threads 0.94.
    Tier(256, 6, 1024, parked=12, cluster=8, doubling=True),
    Tier(256, 6, 1024, parked=10, cluster=16, doubling=True),
    # Of 14 blocks fewer fit onto the card than of 16: 264107 floats 0.86, 0.93.
    Tier(256, 6, 1024, parked=13, cluster=16, doubling=True),
    *_LONGEST,
)
# log_softmax of doubles has a table only where it parks: 16384 0.92, 0.89 without.
LOG_F64_CLUSTERS = (
    Tier(256, 5, 1024, parked=11, cluster=8, doubling=True),
    # More parked rather than 16 blocks: 69632 0.93, 0.81; 90112 0.92, 0.86 (three
    # blocks a multiprocessor); but 98304 0.85, 0.88.
    Tier(256, 5, 1024, parked=13, cluster=8, doubling=True),
    Tier(256, 8, 768, parked=14, cluster=8, doubling=True),
    Tier(256, 5, 1024, parked=11, cluster=16, doubling=True),
    Tier(256, 5, 1024, parked=13, cluster=16, doubling=True),
    *_LONGEST,
)
FORWARD_F64_CLUSTERS = (
    # 32768: 0.96, as below 0.95, of 8 vectors without shared memory 0.90; but 65536
    # 0.93 and 0.94, 20001 0.88 and 0.94.
    Tier(256, 6, 768, parked=10, cluster=4, doubling=True, fill=15 / 16),
    *LOG_F64_CLUSTERS,
)
# Rows over several axes: where each vector lies takes registers, too.
FORWARD_OF_PIECES, FORWARD_OF_PIECES_CLUSTERS = LOG_16_BITS, FORWARD_CLUSTERS[1:]
# With a mask, a scale, integers or strides, registers go elsewhere.
FORWARD_HEAVY = (Tier(512, 4, 512),)
FORWARD_HEAVY_CLUSTERS = (
    Tier(256, 4, 512, cluster=16),
    Tier(256, 4, 512, parked=4, cluster=16),
)
# A scale alone takes fewer: left to itself the compiler takes up to 114.
# log_softmax of 16 bits in rows of a vector or two would spill 208 bytes.
FORWARD_SCALED = (Tier(1, 2, 512), Tier(512, 4, 1024))
FORWARD_SCALED_CLUSTERS = (
    Tier(256, 4, 1024, cluster=16),
    Tier(256, 4, 1024, parked=4, cluster=16),
)
STRIDED = (Tier(512, 2, 512),)

# Gradients hold as many vectors of y and of dy.
BACKWARD = (Tier(512, 4, 1024),)
# 16 bits: what becomes of twice as many numbers needs registers, too.
BACKWARD_16_BITS = (Tier(256, 4, 768),)
# Rows over several axes: with a vector more, softmax_vjp of float16 spills 180 bytes.
BACKWARD_OF_PIECES = (Tier(256, 3, 768),)
BACKWARD_CLUSTERS = (
    Tier(256, 8, 512, cluster=8),
    # 8 vectors: 1.02 at 131072 (float32); with 4 and twice the threads 0.99.
    Tier(256, 8, 512, cluster=16, doubling=True, fill=15 / 16),
    # 50257 doubles: 1.00, in 13 blocks without shared memory 0.86.
    Tier(256, 8, 512, parked=8, cluster=8, doubling=True),
    Tier(256, 8, 512, parked=8, cluster=16),
)
# log_softmax of doubles: 65536 1.00, in 16 blocks without shared memory 0.86; 10000
# 1.02, in three 0.82. softmax of doubles: 32768 1.02, without 1.03.
BACKWARD_LOG_F64_CLUSTERS = BACKWARD_CLUSTERS[2:]
BACKWARD_16_BITS_CLUSTERS = (
    # 4 vectors of 3 blocks of 224 threads a multiprocessor: 0.79 to 0.92.
    Tier(256, 6, 512, parked=2, cluster=16),
    Tier(256, 6, 512, parked=10, cluster=16),
)


# The assembler spills more of the same on other architectures than sm_90.
_FORWARD_ELSEWHERE = (Tier(512, 5, 1024),)
_F64_ELSEWHERE = (
    Tier(256, 6, 512, cluster=8),
    Tier(256, 6, 512, parked=10, cluster=16),
)
ELSEWHERE = {
    FORWARD: _FORWARD_ELSEWHERE,
    FORWARD_F64: _FORWARD_ELSEWHERE,
    LOG_16_BITS: (Tier(512, 5, 512),),
    BACKWARD: (Tier(512, 3, 1024),),
    BACKWARD_16_BITS: (Tier(256, 3, 768),),
    FORWARD_SCALED: FORWARD_HEAVY,
    FORWARD_SCALED_CLUSTERS: FORWARD_HEAVY_CLUSTERS,
    FORWARD_CLUSTERS: (
        Tier(256, 6, 512, cluster=8),
        Tier(256, 6, 512, parked=10, cluster=16),
    ),
    FORWARD_F64_CLUSTERS: _F64_ELSEWHERE,
    FORWARD_OF_PIECES_CLUSTERS: _F64_ELSEWHERE,
    LOG_F64_CLUSTERS: _F64_ELSEWHERE,
    BACKWARD_CLUSTERS: (
        Tier(256, 6, 512, cluster=16),
        Tier(256, 6, 512, parked=10, cluster=16),
    ),
    BACKWARD_LOG_F64_CLUSTERS: (
        Tier(256, 6, 512, cluster=16),
        Tier(256, 6, 512, parked=10, cluster=16),
    ),
    BACKWARD_16_BITS_CLUSTERS: (Tier(256, 5, 512, parked=10, cluster=16),),
}


def without_clusters(held: int, arrays: int, device: Device) -> tuple[Tier, ...]:
    """One block with all the shared memory that it may have, for `arrays` rows."""
    threads = 512
    spare = device.smem_optin - 8192  # for the exchange between warps
    parked = spare // (threads * VECTOR_BYTES * arrays)
    return (Tier(threads, held, 512, parked=parked),) if parked > 0 else ()


def ladder(
    short: tuple[Tier, ...],
    clusters: tuple[Tier, ...],
    arrays: int,
    device: Device,
) -> tuple[Tier, ...]:
    """The tiers that a device has."""
    if device.cc != (9, 0):
        short = ELSEWHERE.get(short, short)
        clusters = ELSEWHERE.get(clusters, clusters)
    if device.cc >= (9, 0):
        return (*short, *clusters)
    if not clusters:
        return short
    return (*short, *without_clusters(short[-1].held, arrays, device))


def hold(tiers: Sequence[Tier], vectors: int, ends: int = 0) -> Hold | None:
    """How the first tier that can holds a row of so many vectors.

    `ends` elements beside whole vectors stand at its two ends, at most.
    """
    vectors = max(1, vectors)
    tier = next((tier for tier in tiers if tier.takes(vectors)), None)
    if tier is None:
        return None
    cluster = tier.blocks(vectors)
    lanes = _lanes_of_short_row(vectors, tier.held, ends)
    if lanes is None:
        lanes = _lanes_of_long_row(-(-vectors // cluster), tier)
    slots = -(-vectors // (cluster * lanes))
    rows_per_block = _BLOCK_THREADS // lanes if lanes <= WARP else 1
    held = min(slots, tier.held)
    threads_per_sm = tier.threads_per_sm
    if lanes <= 4:  # the two ends of a row take registers of few threads
        threads_per_sm -= threads_per_sm // 4
    return Hold(
        lanes,
        rows_per_block,
        held,
        slots - held,
        cluster,
        max(1, threads_per_sm // (lanes * rows_per_block)),
    )


def _lanes_of_short_row(vectors, most, ends):
    """Threads, a power of two, that leave the fewest slots empty; None for a long row.

    A thread has a few vectors: what it does for a row is worth it then. One thread
    alone with more than two would touch each line of memory again and again, and few
    threads would do so for the ends of the row.
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


# Fewer lanes than all are worth it if they leave so much less of the slots empty: with
# 160 lanes instead of 256, 32952 floats 0.98 and 0.96, but 20000 doubles 0.93 and 0.95.
_FEWER_LANES = 1.04


def _lanes_of_long_row(vectors, tier):
    """Threads, whole warps, for so many vectors in a block."""
    per_thread = tier.held + tier.parked
    # Of more than one warp: the exchange between them is the same for all lengths.
    fewest = max(2 * WARP, -(-vectors // (per_thread * WARP)) * WARP)
    if not tier.doubling:
        return fewest

    def cost(lanes):
        slots = -(-vectors // lanes) * lanes
        return slots if lanes == tier.threads else slots * _FEWER_LANES

    return min(range(tier.threads, fewest - 1, -WARP), key=cost)


@dataclass(frozen=True)
class Stream:
    """Blocks that share rows, which pass through rings in their shared memory."""

    threads: int  # a block
    ring: int  # steps of a thread, of a vector of each operand
    ahead: int  # of these, steps whose loads are under way
    blocks: int  # a group, which shares a row
    groups: int


# Gradients of rows of 2^20 floats: 0.87, with 256 threads 0.69, with 1024 0.85. Two
# launches that read twice reach 0.60.
_STREAM_THREADS = 512
# Bytes of loads under way on a multiprocessor (64 KB: 0.72), and of the steps that are
# to hide how long blocks take to hear of each other.
_STREAM_AHEAD = 40 << 10
_STREAM_HIDDEN = 40 << 10


def stream(vectors: int, rows: int, place: int, device: Device) -> Stream | None:
    """How rows of so many vectors stream, at `place` bytes each; None: too long."""
    threads = _STREAM_THREADS
    step = threads * place
    ring = (device.smem_optin - 8192) // step
    ahead = max(1, _STREAM_AHEAD // step)
    longest = ring - ahead  # steps of a row
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
