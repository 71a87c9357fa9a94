"""Tiles of the attention kernel for sm_90a, tuned on an H200.

What each was measured against: docs/design/lab/0024-tiles-and-the-next-best.md.
"""

import math
from dataclasses import dataclass

# Queries of a warpgroup: rows of a box of q.
HOPPER_GROUP_ROWS = 64


@dataclass(frozen=True)
class HopperTile:
    """Warpgroups of 64 queries each, keys of a tile, and whether they use pingpong."""

    num_groups: int
    block_n: int
    pingpong: bool = True
    num_stages: int = 2  # tiles of k, and of v, in shared memory at a time
    # Whether L2 should evict keys first, because nobody else reads them.
    evict_first: bool = False
    stage_out: bool = True  # stage out in shared memory, if there is room
    box_n: int = 0  # keys per TMA box, or 0: those of the tile
    # Bytes of keys and values of a section, in units of the L2 cache.
    cache_share: float = 11 / 20
    score_ps: int = 0  # picoseconds of a score, or 0: not measured

    @property
    def block_m(self) -> int:
        return HOPPER_GROUP_ROWS * self.num_groups

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_groups + 1)


# Upper bounds of seqlen_q, and the tile up to there.
Ladder = dict[float, HopperTile]

# Tiles for queries that see all keys, and for a causal mask.
Others = tuple[tuple[HopperTile, ...], tuple[HopperTile, ...]]

# If one warpgroup has room for all queries, by head dimension: the tile for keys and
# values that fit into the L2 cache, the one for more, and, since options take
# registers, the one for scores with an option and the one for several.
Few = dict[float, tuple[HopperTile, HopperTile, HopperTile, HopperTile]]
FEW: Few = {
    64: (
        HopperTile(1, 128, False, 2, True),
        HopperTile(1, 128, False, 2, True),
        HopperTile(1, 128, False, 6),
        HopperTile(1, 64, False, 6),
    ),
    128: (
        HopperTile(1, 128, False, 2, True, box_n=16),
        HopperTile(1, 128, False, 1),
        HopperTile(1, 64, False, 6),
        HopperTile(1, 64, False, 6),
    ),
    192: (HopperTile(1, 64, False, 4),) * 4,
    256: (HopperTile(1, 64, False, 3),) * 4,
}

# For windows of up to this many keys, where another tile is faster than that for other
# position bounds; by (head_dim, head_dim_v) as compiled.
NARROW_KEYS = 1024
NARROW = {(128, 128): HopperTile(3, 64, False, 4)}

# For a mask function and no option that takes registers, where another tile is faster
# than that for one score option; by (head_dim, head_dim_v) as compiled. The third stage
# hides that the producer must read where the next tile lies.
LISTED: dict[tuple[int, int], Ladder] = {
    (64, 64): {
        128: HopperTile(2, 128, False),
        math.inf: HopperTile(3, 128, num_stages=3),
    },
}

# Tiles that may suit the multiprocessors better than that of the ladder, by (head_dim,
# head_dim_v) as compiled: forward_model.py tells which.
OTHERS: dict[tuple[int, int], Others] = {
    (64, 64): (
        (
            HopperTile(2, 128, score_ps=65),
            HopperTile(4, 64, num_stages=4, score_ps=59),
            HopperTile(3, 128, stage_out=False, score_ps=52),
        ),
        (HopperTile(2, 128, score_ps=67), HopperTile(3, 128, score_ps=56)),
    ),
    (128, 128): (
        (
            HopperTile(2, 128, score_ps=82),
            HopperTile(3, 80, score_ps=74),
        ),
        (HopperTile(2, 128, score_ps=84),),
    ),
}


@dataclass(frozen=True)
class BiasTiles:
    """Tiles for a bias that TMA loads; without one, threads read the bias."""

    short: HopperTile  # queries see up to SHORT_KEYS keys
    alone: HopperTile
    few: HopperTile | None = None  # one warpgroup has room for all queries
    # With other score options, which take registers: for few queries, with one of
    # them, and with several.
    few_beside: HopperTile | None = None
    beside: HopperTile | None = None
    several: HopperTile | None = None


SHORT_KEYS = 256
_BIASED_UP_TO_128 = BiasTiles(
    short=HopperTile(3, 64, num_stages=3),
    alone=HopperTile(2, 128),
    few=HopperTile(1, 128, False, 2),
    few_beside=HopperTile(1, 64, False, 4),
    beside=HopperTile(2, 128, False),
    several=HopperTile(2, 64, num_stages=4),
)
# By (head_dim, head_dim_v) as compiled.
BIASED: dict[tuple[int, int], BiasTiles] = {
    (64, 64): BiasTiles(
        short=HopperTile(3, 64, False, 4),
        alone=HopperTile(2, 128, num_stages=3, stage_out=False),
        few=HopperTile(1, 128, False, 3),
        few_beside=HopperTile(1, 64, False, 6),
        beside=HopperTile(2, 128, stage_out=False),
        several=HopperTile(2, 128, False, stage_out=False),
    ),
    (96, 96): _BIASED_UP_TO_128,
    (128, 128): _BIASED_UP_TO_128,
    (192, 128): BiasTiles(
        short=HopperTile(2, 64, num_stages=3),
        alone=HopperTile(2, 64, num_stages=3),
        beside=HopperTile(2, 64, num_stages=3),
        several=HopperTile(2, 64, num_stages=3),
    ),
    (192, 192): BiasTiles(
        short=HopperTile(2, 64),
        alone=HopperTile(2, 64),
        few=HopperTile(1, 64, False, 3),
    ),
    (256, 256): BiasTiles(
        short=HopperTile(2, 64),
        alone=HopperTile(2, 64),
        few=HopperTile(1, 64, False, 2),
    ),
}

# By (head_dim, head_dim_v) as compiled, eight ladders: for queries that see all keys;
# with position bounds; with lengths on the device; with one score option (bias, mask,
# alibi with a window); with a softcap, or alibi; with a softcap and terms of keys; with
# several options; with one beside a mask that is packed as bits.
TILES: dict[tuple[int, int], tuple[Ladder, ...]] = {
    (64, 64): (
        {
            2047: HopperTile(4, 64, num_stages=4, score_ps=59),
            math.inf: HopperTile(3, 128, stage_out=False, score_ps=52),
        },
        {
            512: HopperTile(4, 64, False, 4, score_ps=61),
            4095: HopperTile(4, 64, num_stages=4, score_ps=59),
            8191: HopperTile(3, 128, score_ps=52),
            math.inf: HopperTile(3, 128, cache_share=11 / 10, score_ps=52),
        },
        {math.inf: HopperTile(3, 112)},
        {math.inf: HopperTile(2, 128, False)},
        {math.inf: HopperTile(3, 112, stage_out=False)},
        {math.inf: HopperTile(3, 80)},
        {math.inf: HopperTile(2, 64, False)},
        {math.inf: HopperTile(2, 128)},
    ),
    (96, 96): (
        {math.inf: HopperTile(3, 96)},
        {
            2048: HopperTile(3, 64, False, 4, cache_share=3 / 4),
            math.inf: HopperTile(3, 112, cache_share=4 / 5),
        },
        {math.inf: HopperTile(2, 128, False)},
        {math.inf: HopperTile(2, 128, False)},
        {math.inf: HopperTile(3, 96)},
        {math.inf: HopperTile(2, 96, False)},
        {math.inf: HopperTile(2, 48, False)},
        {math.inf: HopperTile(2, 112)},
    ),
    (128, 128): (
        {
            2047: HopperTile(2, 128, score_ps=82),
            math.inf: HopperTile(3, 80, score_ps=74),
        },
        {
            512: HopperTile(3, 64, False, 4, cache_share=11 / 50, score_ps=77),
            2048: HopperTile(3, 64, False, 4, cache_share=3 / 4, score_ps=77),
            math.inf: HopperTile(3, 80, False, cache_share=11 / 10, score_ps=77),
        },
        {math.inf: HopperTile(2, 128, False)},
        {math.inf: HopperTile(2, 128, False)},
        {math.inf: HopperTile(3, 80)},
        {math.inf: HopperTile(2, 96, False)},
        {math.inf: HopperTile(2, 48, False)},
        {math.inf: HopperTile(2, 128)},
    ),
    (192, 128): (
        {math.inf: HopperTile(2, 128)},
        {
            1024: HopperTile(3, 64, False),
            2048: HopperTile(3, 64, False, cache_share=3 / 4),
            math.inf: HopperTile(2, 128, cache_share=11 / 10),
        },
        {math.inf: HopperTile(2, 128, False)},
        {math.inf: HopperTile(2, 128, False)},
        {math.inf: HopperTile(2, 96, False)},
        {math.inf: HopperTile(2, 96, False)},
        {math.inf: HopperTile(2, 48, False)},
        {math.inf: HopperTile(2, 80)},
    ),
    (192, 192): (
        {4096: HopperTile(2, 96), math.inf: HopperTile(2, 112)},
        {2048: HopperTile(2, 96), math.inf: HopperTile(2, 96, cache_share=11 / 10)},
        {math.inf: HopperTile(2, 96)},
        {math.inf: HopperTile(2, 80)},
        {math.inf: HopperTile(2, 80)},
        {math.inf: HopperTile(2, 80)},
        {},
        {math.inf: HopperTile(2, 80)},
    ),
    (256, 256): (
        {4096: HopperTile(2, 64), math.inf: HopperTile(2, 80)},
        {2048: HopperTile(2, 64), math.inf: HopperTile(2, 64, cache_share=11 / 10)},
        {math.inf: HopperTile(2, 48)},
        {math.inf: HopperTile(2, 48)},
        {math.inf: HopperTile(2, 80)},
        {math.inf: HopperTile(2, 64)},
        {},
        {math.inf: HopperTile(2, 64)},
    ),
}
