// SPDX-License-Identifier: MIT
// attention_mma: compile-time configuration, shared memory, and the work of a block.
#pragma once

#include "attention/sm80/fp32_forward.cuh"
#include "attention/sm80/long_sums.cuh"
#include "ptx/registers.cuh"

#ifdef STAGES
constexpr int kStages = STAGES;
#else
constexpr int kStages = 1;
#endif
// float32 was split in advance by attention_mma_prepare; otherwise it is split here.
constexpr bool kPrepared = IS_GIVEN(PREPARED);
// Rows of 16-bit q, k and v consist of whole, aligned 16-byte chunks.
constexpr bool kAligned = IS_GIVEN(ALIGNED);
constexpr bool kStaged = kSplits && !kPrepared;
static_assert(kStages == 1 || (kStages == 2 && !kStaged && kWarpsPerRow == 1));
// A block processes several tiles of queries.
constexpr bool kPersistent = IS_GIVEN(PERSISTENT);
// Bytes of a stage in shared memory.
constexpr unsigned kStageK = kParts * kBytesK + (kPrepared ? kBytesTileStats : 0);
constexpr unsigned kStageV = kParts * kBytesV + (kPrepared ? kBytesTileStats : 0);
constexpr unsigned kStage = kStageK + kStageV;
constexpr unsigned kBytesOut = kBlockM * kHeadDimV * sizeof(elem_t);
constexpr unsigned kBytesTiles = kParts * kBytesQ + kStages * kStage;
// Fragments of q stay in registers if these suffice.
constexpr bool kKeepQ =
    !kSplits && kHeadDim <= 64 && kHeadDimV <= 64 && kRowTiles * kHeadDim <= 128;
// A persistent block stores results through shared memory while its next tiles load.
// kOutApart: through a buffer of its own. Otherwise through one stage, or as below; a
// block that is not persistent may use all tiles.
constexpr bool kOutApart = kPersistent && kStages == 1 && kKeepQ && kWarpsPerRow == 1;
// kOutByP: through the buffer of the weights, half of the rows at a time, while q and
// the next k load beside the last products with v.
constexpr bool kOutByP = kPersistent && kStages == 1 && kWarpsPerRow > 1;
constexpr int kOutRounds = kOutByP ? 2 : 1;
// kOutByQ: through the tile of q, which is then loaded last.
constexpr bool kOutByQ =
    kPersistent && !kOutApart && !kOutByP && (kStages == 1 || kBytesOut > kStage);
static_assert(!kPersistent || (!kSplits && !kHasTerms));
static_assert(!kHasParts || kSplits);  // 16 bits would round partial results
static_assert(!kPersistent || kOutApart || kOutByP ||
              kBytesOut <= (kOutByQ ? kBytesQ : kStage));
static_assert(!kOutByP || (kBytesOut <= 4 * kBytesP && kRowTiles == 2));
constexpr unsigned kBytesFront = kOutApart                 ? kBytesTiles + kBytesOut
                                 : kBytesTiles > kBytesOut ? kBytesTiles
                                                           : kBytesOut;

// Tensor cores truncate the low bits of a sum: sums of products of one sign come out
// smaller by about 0.4 ulp per step of 16 columns after the first. Half of this is
// compensated, and never more than the 2 ulp that a score may be off by; up to 4 steps
// nothing is. float32 is summed with rounding (fp32_forward.cuh).
constexpr double kUnits = 0.2 * (kSteps + 1);
constexpr double kGivenBack =
    kSplits || kSteps <= 4 ? 1.0 : 1 + (kUnits < 1.9 ? kUnits : 1.9) / 8388608;

// The keys that the queries of a block see by their position.
struct block_bounds_t {
  int low, high, num_keys;      // as mask_bounds_t, for the tile at key 0
  int plain_first, plain_last;  // tiles of which all queries see all keys

  block_bounds_t() = default;
  __device__ __forceinline__ block_bounds_t(const mask_bounds_t& head, int i0)
      : low(head.low + i0),
        high(head.high + i0),
        num_keys(head.num_keys),
        plain_first(low + kBlockM - 1),
        plain_last(min(high, num_keys) - kBlockN) {}

  // Whether all queries see all keys of the tile at j0.
  __device__ __forceinline__ bool sees_all(int j0) const {
    return plain_first <= j0 && j0 <= plain_last;
  }
};

// A tile of queries, and the keys it attends to.
struct work_tile_t {
  const elem_t* q_rows;
  block_bounds_t block;
  int num_rows, first, last, i0;

  work_tile_t() = default;
  // `head` has the bounds for query 0 and key 0, clamped to values so large that sums
  // with positions stay out of range. Rows past the last query are zeros and never
  // stored. Tiles of keys start at multiples of kBlockN, so that the order of summation
  // of a row does not depend on its tile of queries.
  __device__ __forceinline__ work_tile_t(const mask_bounds_t& head,
                                         const elem_t* q_head, index_t row_stride,
                                         int i0, int first_of_part = 0)
      : q_rows(q_head + i0 * row_stride), block(head, i0), i0(i0) {
    num_rows = max(0, min(head.num_queries - i0, kBlockM));
    const bool any = num_rows > 0;
    const int low = max(first_of_part, min(block.low, block.num_keys));
    first = any ? low / kBlockN * kBlockN : 0;
    last = any ? max(0, min(block.high - 1 + num_rows, block.num_keys)) : 0;
  }
};

// The first query of tile `turn` of this block; negative past the last tile. The blocks
// of a head go through the tiles in a zigzag, so that each gets long and short ones.
__device__ __forceinline__ int query_of_turn(int turn, int num_tiles) {
  const int blocks = gridDim.x, block = blockIdx.x;
  const int tile =
      turn % 2 == 0 ? turn * blocks + block : (turn + 1) * blocks - 1 - block;
  return (num_tiles - 1 - tile) * kBlockM;
}

// How q of float32 was split.
struct split_queries_t {
  float unit = 1, size = 0;  // factor from products of parts to q.k; largest magnitude
};

// What is needed only at the end of the kernel, or for rare data: no registers for it
// during the loop.
struct block_state_t {
  tile_coord_t at;
  double from_log2;
  const elem_t *k_rows, *v_rows;
  const elem_t* q_head;  // of tile 0
  mask_bounds_t head;
  work_tile_t work;
  int turn;  // index of the work tile among those of this block
  bool aligned_q, aligned_k, aligned_v;
  __device__ bool has_aligned_q() const { return kAligned || aligned_q; }
  __device__ bool has_aligned_k() const { return kAligned || aligned_k; }
  __device__ bool has_aligned_v() const { return kAligned || aligned_v; }
  bool special;                   // a value of this block's keys is not finite
  const unsigned char* operands;  // split tiles of k and v of this head
  split_queries_t split_q;        // for wide heads
};
constexpr unsigned kBytesStatsOfStaging = 128, kBytesState = 384;
static_assert(sizeof(block_state_t) <= kBytesState);
static_assert(4 * sizeof(tile_stats_t) + sizeof(int) <= kBytesStatsOfStaging);

// The state, reloaded; still known to be in shared memory, because generic loads take
// ten times as long.
__device__ __forceinline__ const block_state_t& reload_state(
    const block_state_t& state) {
  unsigned address = shared_address(&state);
  ptx::launder(address);
  return *static_cast<const block_state_t*>(__cvta_shared_to_generic(address));
}

// --- shared memory -------------------------------------------------------------------

// In memory order; smem_bytes() of _attention/gpu/sm80/forward.py must agree.
struct smem_t {
  unsigned char *front, *q, *k, *v;  // further stages of k and v follow the first
  unsigned char *staging_k, *staging_v;
  tile_stats_t *stats_k, *stats_v;  // for float32, by parity of the tile
  int* largest_q;
  block_state_t* state;
  unsigned char* p;
  row_exchange_t* exchange;

  __device__ __forceinline__ explicit smem_t(unsigned char* smem) : front(smem) {
    q = smem;
    k = q + kParts * kBytesQ;
    v = k + kStageK;
    staging_k = k + kStages * kStage;
    staging_v = staging_k + (kStaged ? 2 * kBytesK : 0);
    unsigned char* const behind =
        kSplits ? staging_v + (kStaged ? 2 * kBytesV : 0) : smem + kBytesFront;
    stats_k = reinterpret_cast<tile_stats_t*>(behind);
    stats_v = stats_k + 2;
    largest_q = reinterpret_cast<int*>(stats_v + 2);
    state = reinterpret_cast<block_state_t*>(behind + kBytesStatsOfStaging);
    p = behind + kBytesStatsOfStaging + kBytesState;
    exchange =
        reinterpret_cast<row_exchange_t*>(p + (kWarpsPerRow > 1 ? 2 * kBytesP : 0));
  }
};

// The results of a work tile so far.
struct result_t {
  out_frag_t& o;
  softmax_t& rows;
  centers_t& centers;
  two_level_out_t& two_level;
  bool careful;  // second pass, for rows that the first could not sum
  bool& begun;   // the next tile of queries is loading
};
