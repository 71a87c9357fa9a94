"""Tiles of the attention kernel for sm_90a, each with what it was measured against."""

import math
from dataclasses import dataclass

# Queries of a warpgroup: rows of a box of q.
HOPPER_GROUP_ROWS = 64


@dataclass(frozen=True)
class HopperTile:
    """Warpgroups of 64 queries each, keys of a tile, and whether they take turns."""

    num_groups: int
    block_n: int
    take_turns: bool = True
    num_stages: int = 2  # tiles of k, and of v, that are in shared memory at a time
    # Whether keys that nobody else reads are the first to leave the L2 cache.
    evict_first: bool = False
    stage_out: bool = True  # whether out goes through shared memory that has room
    box_n: int = 0  # keys that TMA brings at a time, or 0: the tile's
    # Bytes of keys and values of a section, in units of the L2 cache.
    cache_share: float = 11 / 20

    @property
    def block_m(self) -> int:
        return HOPPER_GROUP_ROWS * self.num_groups

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_groups + 1)


# Upper bounds of seqlen_q, and the tile up to there.
Ladder = tuple[tuple[float, HopperTile], ...]

# Where one warpgroup has room for all queries, by head dimension: the tile for keys and
# values that the L2 cache holds, the one for more, and the one for scores with terms,
# which take registers.
FEW: tuple[tuple[float, tuple[HopperTile, HopperTile, HopperTile]], ...] = (
    # us, 32 : 8 heads x 16 x 8192 keys: 78.3; 6 tiles at a time 80.1
    (
        64,
        (
            HopperTile(1, 128, False, 2, True),
            HopperTile(1, 128, False, 2, True),
            HopperTile(1, 128, False, 6),
        ),
    ),
    # 8192 keys 19.5, whole boxes 19.9; 16 x 8192 keys 137.4, boxes of 16 182,
    # (2 stages, boxes of 16) 146.9, (2 stages) 141.8
    (
        128,
        (
            HopperTile(1, 128, False, 2, True, box_n=16),
            HopperTile(1, 128, False, 1),
            HopperTile(1, 64, False, 6),
        ),
    ),
    (192, (HopperTile(1, 64, False, 4),) * 3),
    (256, (HopperTile(1, 64, False, 3),) * 3),
)

# For windows of up to so many keys, where another tile is faster than that of all
# queries that see a part by position; by (head_dim, head_dim_v) as compiled.
NARROW_KEYS = 1024
NARROW = {
    # us at n = 16384: windows of 256 keys 119, of 1024 238, with the tile of
    # causal calls 135 and 249; of 4096 685 and 661
    (128, 128): HopperTile(3, 64, False, 4),
}

# For mask functions, where the tile of a term of scores leaves too few registers.
LISTED = {(128, 128): HopperTile(2, 112, False)}

# For (head_dim, head_dim_v) as compiled seven ladders: for queries that see all keys;
# for those that see a part by position; for lengths on the device; for scores with a
# term of their own (bias, mask, alibi); with a softcap; with a softcap and terms of
# keys; and with several.
TILES: dict[tuple[int, int], tuple[Ladder, ...]] = {
    (64, 64): (
        # us at n = 512: 153.8, with 2 stages 166.5; at 16384: 3658, staged 3686
        (
            (2047, HopperTile(4, 64, num_stages=4)),
            (math.inf, HopperTile(3, 128, stage_out=False)),
        ),
        # us at n = 512: 120.4, with turns 123.5, and 2 stages 140.6; at n = 16384:
        # 1943, with sections of half the cache 1961
        (
            (512, HopperTile(4, 64, False, 4)),
            (4095, HopperTile(4, 64, num_stages=4)),
            (8191, HopperTile(3, 128)),
            (math.inf, HopperTile(3, 128, cache_share=11 / 10)),
        ),
        ((math.inf, HopperTile(3, 112)),),
        ((math.inf, HopperTile(2, 128, False)),),
        # n = 4096: 1429 us, staged 1451
        ((math.inf, HopperTile(3, 112, stage_out=False)),),
        ((math.inf, HopperTile(3, 80)),),
        ((math.inf, HopperTile(2, 64, False)),),
    ),
    (96, 96): (
        ((math.inf, HopperTile(3, 96)),),
        # us at n = 512: 111.7, (2, 128) without turns 122.4; at n = 2048: 251 and
        # 269; at n = 4096: 437, without turns 444, (2, 128) 460; at n = 16384: 1518
        # and 1642
        (
            (2048, HopperTile(3, 64, False, 4, cache_share=3 / 4)),
            (math.inf, HopperTile(3, 112, cache_share=4 / 5)),
        ),
        ((math.inf, HopperTile(2, 128, False)),),
        ((math.inf, HopperTile(2, 128, False)),),
        ((math.inf, HopperTile(3, 96)),),
        ((math.inf, HopperTile(2, 96, False)),),
        ((math.inf, HopperTile(2, 48, False)),),
    ),
    (128, 128): (
        ((2047, HopperTile(2, 128)), (math.inf, HopperTile(3, 80))),
        # us at n = 512: 98.5, with sections of half the cache 100.2; at n = 1024:
        # 141.5, with turns 145.7, (2, 128) 150.9; at n = 2048: 225.6 and 236.5, in
        # another run 220.5, with sections of half the cache 223.0; at n = 4096:
        # 399.0, (3, 64) 401.5, (2, 128) 409.8; at n = 16384: 1364, with sections of
        # half the cache 1401
        (
            (512, HopperTile(3, 64, False, 4, cache_share=11 / 50)),
            (2048, HopperTile(3, 64, False, 4, cache_share=3 / 4)),
            (math.inf, HopperTile(3, 80, False, cache_share=11 / 10)),
        ),
        ((math.inf, HopperTile(2, 128, False)),),
        ((math.inf, HopperTile(2, 128, False)),),
        ((math.inf, HopperTile(3, 80)),),
        ((math.inf, HopperTile(2, 96, False)),),
        ((math.inf, HopperTile(2, 48, False)),),
    ),
    (192, 128): (
        # us at n = 4096: 552, (3, 80) 568
        ((math.inf, HopperTile(2, 128)),),
        # us at n = 512: 81.3, (2, 128) without turns 88.1; at n = 2048: 178.7 and
        # 187.2, with sections of half the cache 184.0; at n = 4096: 303, without
        # turns 313, with sections of half the cache 317; at n = 16384: 1072, 1202
        (
            (1024, HopperTile(3, 64, False)),
            (2048, HopperTile(3, 64, False, cache_share=3 / 4)),
            (math.inf, HopperTile(2, 128, cache_share=11 / 10)),
        ),
        ((math.inf, HopperTile(2, 128, False)),),
        ((math.inf, HopperTile(2, 128, False)),),
        ((math.inf, HopperTile(2, 96, False)),),
        ((math.inf, HopperTile(2, 96, False)),),
        ((math.inf, HopperTile(2, 48, False)),),
    ),
    (192, 192): (
        # us at n = 1024: 185.9, (2, 112) has no room for out and takes 204.8;
        # at n = 4096: 649 and 658
        ((4096, HopperTile(2, 96)), (math.inf, HopperTile(2, 112))),
        # us at n = 4096: 366, with sections of half the cache 370; at n = 16384:
        # 1288 and 1334
        (
            (2048, HopperTile(2, 96)),
            (math.inf, HopperTile(2, 96, cache_share=11 / 10)),
        ),
        ((math.inf, HopperTile(2, 96)),),
        ((math.inf, HopperTile(2, 80)),),
        ((math.inf, HopperTile(2, 80)),),
        ((math.inf, HopperTile(2, 80)),),
        (),
    ),
    (256, 256): (
        # us at n = 512: 115.7, (2, 80) has no room for out and takes 128.6; at
        # n = 4096: 684 and 695
        ((4096, HopperTile(2, 64)), (math.inf, HopperTile(2, 80))),
        # us at n = 4096: 374, with sections of half the cache 385; at n = 8192: 705
        # and 728; at n = 1024 150 and 133
        (
            (2048, HopperTile(2, 64)),
            (math.inf, HopperTile(2, 64, cache_share=11 / 10)),
        ),
        ((math.inf, HopperTile(2, 48)),),
        ((math.inf, HopperTile(2, 48)),),
        ((math.inf, HopperTile(2, 80)),),
        ((math.inf, HopperTile(2, 64)),),
        (),
    ),
}
