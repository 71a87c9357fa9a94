// SPDX-License-Identifier: MIT
// attention_hopper: sizes, shared memory, and the order in which tiles are taken.
#pragma once

#include "attention/score.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_N) || \
    !defined(BOUNDS) || !defined(TAKE_TURNS)
#error "HEAD_DIM, HEAD_DIM_V, BLOCK_N, BOUNDS and TAKE_TURNS come from the host"
#endif

// The dimensions as they are computed with; the copy engine fills up with zeros.
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockN = BLOCK_N;                   // keys of a tile
constexpr int kNumGroups = kNumThreads / 128 - 1;  // warpgroups that compute
constexpr int kGroupM = 64;                        // queries of a warpgroup
constexpr int kBlockM = kNumGroups * kGroupM;
constexpr int kStages = 2;  // tiles of k, and of v, in shared memory; 3 bring nothing
constexpr bool kTakeTurns = TAKE_TURNS;

// Which keys a query may see by its position: 0 all, 1 up to a last one, 2 from a first
// one to a last one.
constexpr int kBounds = BOUNDS;
constexpr bool kHasLengths = kHasQueryLengths || kHasKeyLengths;
// Items differ in length, so that blocks take them from a counter.
constexpr bool kDynamic = kBounds > 0 || kHasLengths;

#ifdef SCALE_SCORES
constexpr bool kScaleScores =
    true;  // the scale is not a number that exp2 can take over
#else
constexpr bool kScaleScores = false;
#endif
// Whether scores are finished one by one before the softmax; else the softmax scales.
constexpr bool kHasTerms =
    kScaleScores || kHasSoftcap || kHasBias || kHasAlibi || kHasMask;

// A tile in shared memory: chunks of 64 columns, each [rows][128 bytes], swizzled.
constexpr int kChunksQk = (kHeadDim + 63) / 64, kChunksV = (kHeadDimV + 63) / 64;
constexpr int kBytesQ = kGroupM * kChunksQk * 128;  // of one warpgroup
constexpr int kBytesK = kBlockN * kChunksQk * 128, kBytesV = kBlockN * kChunksV * 128;
static_assert(kHeadDim % 16 == 0 && kBlockN % 16 == 0 && sizeof(elem_t) == 2);

struct schedule_t {
  int num_items;   // tiles of queries, over all heads and batch entries
  int num_blocks;  // of one head
  int num_heads;   // of all batch entries
  int section;     // heads whose keys and values stay in the L2 cache together
};

// Blocks take `next` by turns; the last to finish sets both numbers back to 0.
struct counter_t {
  int next, finished;
};

// Where item number `item` lies. In a section the tiles that see most keys come first.
__device__ __forceinline__ place_t place_of(int item,
                                            const schedule_t& schedule,
                                            const params_t& params) {
  place_t at;
  const unsigned number = item, num_blocks = schedule.num_blocks;
  unsigned heads;
  if constexpr (kDynamic) {
    const unsigned in_section = schedule.section * num_blocks;
    const unsigned first = number / in_section * schedule.section;
    const unsigned rest = number % in_section;
    const unsigned left = schedule.num_heads - first;
    const unsigned width = left < schedule.section ? left : schedule.section;
    at.tile = num_blocks - 1 - rest / width;
    heads = first + rest % width;
  } else {
    heads = number / num_blocks;
    at.tile = number % num_blocks;
  }
  at.row_of_heads = heads;
  const unsigned num_heads = params.num_heads;
  unsigned entry = heads / num_heads;
  at.head = heads % num_heads;
  at.kv_head = unsigned(at.head) / unsigned(params.group_size);
#pragma unroll
  for (int axis = kBatchDims - 1; axis > 0; --axis) {
    const unsigned size = params.batch_shape[axis];
    at.batch[axis] = entry % size;
    entry /= size;
  }
  at.batch[0] = entry;
  at.exists = true;
  return at;
}

// Tiles [first, last) of keys.
struct tiles_t {
  int first, last;
};

// The tiles that hold the keys which queries [i_first, i_last) see. At least one.
__device__ __forceinline__ tiles_t tiles_of(const scores_t& scores,
                                            int i_first,
                                            int i_last,
                                            int seqlen_k) {
  if constexpr (!kDynamic) {
    return {0, (seqlen_k + kBlockN - 1) / kBlockN};
  } else {
    const range_t keys = scores.keys_of(i_first, i_last);
    const int first = int(keys.first) / kBlockN;
    const int last = (int(keys.last) + kBlockN - 1) / kBlockN;
    return first < last ? tiles_t{first, last} : tiles_t{0, 1};
  }
}

// Spins until the phase is over.
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Barriers in shared memory, in pairs: "full" the copy engine ends, "empty" the
// readers.
struct ring_t {
  unsigned full, empty;  // addresses of the first of each

  static constexpr int kBytes = 8;  // of a barrier
  __device__ unsigned full_at(unsigned stage) const { return full + stage * kBytes; }
  __device__ unsigned empty_at(unsigned stage) const { return empty + stage * kBytes; }
};

// The stage of tile number n in a ring, and the parity of its turn there.
__device__ __forceinline__ unsigned stage_of(unsigned n) { return n % kStages; }
__device__ __forceinline__ unsigned parity_of(unsigned n) { return n / kStages & 1; }
