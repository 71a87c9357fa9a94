// SPDX-License-Identifier: MIT
// attention_hopper: tile sizes, options, and the order in which work tiles are taken.
#pragma once

#include "attention/sm90/operands.cuh"
#include "attention/score/mask_bits.cuh"
#include "attention/score/score.cuh"
#include "attention/score/tile_lists.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_N) || \
    !defined(BOUNDS) || !defined(PINGPONG) || !defined(STAGES)
#error "HEAD_DIM, HEAD_DIM_V, BLOCK_N, STAGES, BOUNDS and PINGPONG come from the host"
#endif

// Dimensions rounded up for wgmma; TMA pads with zeros.
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockN = BLOCK_N;                   // keys per tile
constexpr int kNumGroups = kNumThreads / 128 - 1;  // consumer warpgroups
constexpr int kGroupM = 64;                        // queries per warpgroup
constexpr int kBlockM = kNumGroups * kGroupM;
constexpr int kStages = STAGES;  // tiles of k, and of v, in shared memory
constexpr bool kPingpong = PINGPONG;
// Rows of k and v per TMA box.
#ifdef BOX_N
constexpr int kBoxN = BOX_N;
#else
constexpr int kBoxN = kBlockN;
#endif

// pack_gqa: consecutive rows of a tile are the same query position of kPack heads that
// share a head of k and v.
#ifdef PACK
constexpr int kPack = PACK;
#else
constexpr int kPack = 1;
#endif
__device__ __forceinline__ int query_of(int row) { return row / kPack; }
// One past the last query of the rows up to row_last.
__device__ __forceinline__ int query_end(int row_last) {
  return (row_last - 1) / kPack + 1;
}

// The keys of a query tile are split over several work tiles, which write partial sums
// in float and lse in double. With COMBINE the block that finishes last combines them
// (split_kv.cuh); where rows are too many for one block, combine.cu does.
#ifdef SPLIT
constexpr bool kSplit = true;
using out_t = float;
using lse_t = double;
#else
constexpr bool kSplit = false;
using out_t = elem_t;
using lse_t = float;
#endif
constexpr bool kCombine = IS_GIVEN(COMBINE);
static_assert(!kCombine || kSplit);

// Each tile of k and v is read by one work tile only: L2 evicts it first.
constexpr bool kReadOnce = IS_GIVEN(READ_ONCE);

// Position bounds on the keys of a query: 0 none, 1 an upper bound, 2 lower and upper.
constexpr int kBounds = BOUNDS;
constexpr bool kHasLengths = kHasQueryLengths || kHasKeyLengths;

// The scale cannot be folded into the factor of exp2.
constexpr bool kScaleScores = IS_GIVEN(SCALE_SCORES);
// Bias and mask are the same for all queries, or arrays with contiguous keys.
constexpr bool kTermsOfKeys = IS_GIVEN(TERMS_OF_KEYS);
constexpr bool kUnitColumns = IS_GIVEN(UNIT_COLUMNS);
// A bias over keys and no other score option, in the unit of q.k. Up to 128 columns it
// is the initial value of the accumulators. With more, presetting costs too much;
// adding it after the product hides behind the longer products of the other warpgroup.
constexpr bool kKeyBias = IS_GIVEN(KEY_BIAS);
constexpr bool kPresetBias = kKeyBias && kHeadDimV <= 128;
constexpr bool kBiasBehind = kKeyBias && !kPresetBias;
// A bias of 16 bits whose tiles TMA loads, each with its tile of k.
constexpr bool kBiasTiles = IS_GIVEN(BIAS_TILES);
static_assert(!kBiasTiles || (kHasBias && !kTermsOfKeys && sizeof(bias_t) == 2));
// A mask array as bits that a kernel before has made.
constexpr bool kMaskBits = IS_GIVEN(MASK_BITS);
static_assert(!kMaskBits || (kHasMask && !kHasMaskFunction));
static_assert(!kKeyBias ||
              (kTermsOfKeys && (kAddsBiasAlone || kMaskBits) && !kScaleScores));
// Whether scores are finished one by one before the softmax, or it scales them.
constexpr bool kHasTerms =
    !kKeyBias && (kScaleScores || kHasSoftcap || kHasBias || kHasAlibi ||
                  (kHasMask && !kMaskBits) || kHasScoreFunction);
// A softcap alone: it maps products directly to exponents of 2.
constexpr bool kCapOnly = kHasSoftcap && !kHasBias && !kHasAlibi && !kHasMask &&
                          !kScaleScores && !kHasScoreFunction && !kHasMaskFunction;

// Where keys may be hidden: anywhere, or only in tiles that not all queries of the
// block see completely.
constexpr bool kHidesSome = kHidesKeys || kBounds > 0 || kHasKeyLengths;
// A mask function hides whole tiles of keys: work tiles walk over lists of the others.
enum : bool { kListsTiles = kHasMaskFunction };
// Work tiles differ in length, so blocks take them from a counter.
constexpr bool kDynamic = kHidesSome || kHasLengths;

// Alibi and no other term: tiles of keys are taken from the diagonal on, where scores
// are largest, so that the reference of a row seldom moves.
constexpr bool kFromDiagonal = kHasAlibi && kBounds == 0 && kNumGroups > 1 &&
                               !kHasSoftcap && !kHasBias && !kHasMask &&
                               !kHasScoreFunction && !kListsTiles;

// The bounds on the keys differ by batch entry and are known on the device only.
constexpr bool kBoundsPerTile = kHasLengths || kHasQueryOffsets;

// A tile in shared memory: chunks of 64 columns, each [rows][128 bytes], swizzled.
constexpr int kChunksQk = (kHeadDim + 63) / 64, kChunksV = (kHeadDimV + 63) / 64;
constexpr int kBytesQ = kGroupM * kChunksQk * 128;  // per warpgroup
constexpr int kBytesK = kBlockN * kChunksQk * 128, kBytesV = kBlockN * kChunksV * 128;
static_assert(kHeadDim % 16 == 0 && kBlockN % 16 == 0 && sizeof(elem_t) == 2);
// A tile of the bias, in chunks of 64 keys.
constexpr int kChunksBias = kBiasTiles ? kBlockN / 64 : 0;
constexpr int kBytesBias = kBlockM * kChunksBias * 128;
static_assert(!kBiasTiles || kBlockN % 64 == 0);

struct schedule_t {
  int num_work_tiles;  // number of work tiles: query tiles x heads x batch x splits
  int num_blocks;      // query tiles per head
  int num_heads;       // over the whole batch; packed heads count as one
  int section;         // heads whose keys and values fit into the L2 cache together
  int num_splits;      // splits of the keys per query tile
  int absent;  // rows by which the first tile of a head starts before the first query
};

// The first row of a tile, which may be negative: where later queries see more keys,
// tiles are aligned to the last query, so that the partial tile is a short one.
__device__ __forceinline__ int first_row(const tile_coord_t& at,
                                         const schedule_t& schedule) {
  constexpr bool kFromTheEnd = kBounds > 0 && kNumGroups > 1;
  return static_cast<int>(at.tile) * kBlockM - (kFromTheEnd ? schedule.absent : 0);
}

// Coordinates of query tile `tile` of head `heads`, counted over the whole batch; of
// packed heads, the first.
__device__ __forceinline__ tile_coord_t coord_of(unsigned heads, index_t tile,
                                                 const params_t& params) {
  tile_coord_t at;
  at.tile = tile;
  at.row_of_heads = heads * kPack;
  const unsigned num_heads = params.num_heads / kPack;
  unsigned entry = heads / num_heads;
  at.head = heads % num_heads * kPack;
  at.kv_head = kReadOnce ? unsigned(at.head) / kPack  // a whole group is packed
                         : unsigned(at.head) / unsigned(params.group_size);
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

// Coordinates of work tile `work_tile`. Within a section, tiles that see most keys go
// first.
__device__ __forceinline__ tile_coord_t coord_of(int work_tile,
                                                 const schedule_t& schedule,
                                                 const params_t& params) {
  const unsigned number =
      kSplit ? unsigned(work_tile) / schedule.num_splits : work_tile;
  const unsigned num_blocks = schedule.num_blocks;
  if constexpr (kNumGroups == 1) {  // a single tile holds all queries of a head
    return coord_of(number, 0, params);
  } else if constexpr (kDynamic) {
    const unsigned in_section = schedule.section * num_blocks;
    const unsigned first = number / in_section * schedule.section;
    const unsigned rest = number % in_section;
    const unsigned left = schedule.num_heads - first;
    const unsigned width = left < schedule.section ? left : schedule.section;
    return coord_of(first + rest % width, num_blocks - 1 - rest / width, params);
  } else {
    return coord_of(number / num_blocks, number % num_blocks, params);
  }
}

// A range [first, last) of tiles of keys, or of keys.
struct tiles_t {
  int first, last;
};

// The keys that queries [i_first, i_last) see by their position, as one range that may
// be empty.
__device__ __forceinline__ tiles_t keys_of(const mask_bounds_t& bounds, int i_first,
                                           int i_last) {
  i_last = min(i_last, bounds.num_queries);
  if (i_first >= i_last) return {0, 0};
  return {min(max(i_first + bounds.low, 0), bounds.num_keys),
          min(max(i_last - 1 + bounds.high, 0), bounds.num_keys)};
}

// The tiles of keys that rows [row_first, row_last) see; at least one.
__device__ __forceinline__ tiles_t tiles_of(const mask_bounds_t& bounds, int row_first,
                                            int row_last, int seqlen_k) {
  if constexpr (!kDynamic) {
    return {0, (seqlen_k + kBlockN - 1) / kBlockN};
  } else {
    const tiles_t keys = keys_of(bounds, query_of(row_first), query_end(row_last));
    const int first = keys.first / kBlockN;
    const int last = (keys.last + kBlockN - 1) / kBlockN;
    return first < last ? tiles_t{first, last} : tiles_t{0, 1};
  }
}

// The order in which a work tile takes its tiles of keys: from the last one to the
// first. With kFromDiagonal it starts at the tile that has the position of its last
// query, and the tiles behind that one come last.
struct tile_order_t {
  tiles_t tiles;
  int start;

  __device__ __forceinline__ int tile(int n) const {
    if constexpr (!kFromDiagonal) return tiles.last - 1 - n;
    const int tile = start - n;
    return tile < tiles.first ? tile + tiles.last - tiles.first : tile;
  }
  // Whether keys of the tile may not exist.
  __device__ __forceinline__ bool is_last(int tile) const {
    return tile == tiles.last - 1;
  }
};
__device__ __forceinline__ tile_order_t order_of(const tiles_t& tiles,
                                                 const scores_t& scores, int row_last) {
  if constexpr (!kFromDiagonal) return {tiles, 0};
  const index_t tile = scores.diagonal(query_end(row_last) - 1) / kBlockN;
  return {tiles, static_cast<int>(clamp(tile, tiles.first, tiles.last - 1))};
}

// The part of a work tile in the key tiles of its queries. An empty part is represented
// by one tile with all keys hidden.
struct split_t {
  tiles_t tiles;
  bool empty;
};
__device__ __forceinline__ split_t split_of(const tiles_t& tiles, int work_tile,
                                            const schedule_t& schedule) {
  if constexpr (!kSplit) return {tiles, false};
  const unsigned num_splits = schedule.num_splits;
  const int each = (tiles.last - tiles.first + num_splits - 1) / num_splits;
  const int first = tiles.first + int(unsigned(work_tile) % num_splits) * each;
  const int last = min(first + each, tiles.last);
  if (first < last) return {{first, last}, false};
  return {{tiles.first, tiles.first + 1}, true};
}

// The tiles of keys that every row of [row_first, row_last) sees completely.
__device__ __forceinline__ tiles_t whole_tiles_of(const mask_bounds_t& bounds,
                                                  int row_first, int row_last,
                                                  int seqlen_k) {
  if constexpr (kHidesKeys) return {0, 0};
  const int i_first = query_of(row_first);
  const int i_last = min(query_end(row_last), bounds.num_queries);
  const int first = keys_of(bounds, i_last - 1, i_last).first;
  const int last = keys_of(bounds, i_first, i_first + 1).last;
  return {(first + kBlockN - 1) / kBlockN,
          (last == seqlen_k ? last + kBlockN - 1 : last) / kBlockN};
}
__device__ __forceinline__ bool is_in(int tile, const tiles_t& tiles) {
  return tiles.first <= tile && tile < tiles.last;
}

// A work tile as published by the producer; it is valid until the consumers release it.
struct tile_info_t {
  int work_tile;  // num_work_tiles or more: no work left
  int tile, heads, head, kv_head, batch[kBatchDims];
  mask_bounds_t bounds;    // of the whole score matrix
  int first, last, empty;  // its part of the keys
  const unsigned* list;    // with kListsTiles

  __device__ void put(const tile_coord_t& at) volatile {
    tile = at.tile;
    heads = at.row_of_heads;
    head = at.head;
    kv_head = at.kv_head;
#pragma unroll
    for (int axis = 0; axis < kBatchDims; ++axis) batch[axis] = at.batch[axis];
  }
  __device__ void put(const mask_bounds_t& seen) volatile {
    bounds.low = seen.low;
    bounds.high = seen.high;
    bounds.num_queries = seen.num_queries;
    bounds.num_keys = seen.num_keys;
  }
  __device__ void put(const split_t& split) volatile {
    first = split.tiles.first;
    last = split.tiles.last;
    empty = split.empty;
  }
  __device__ tile_coord_t coord() const volatile {
    tile_coord_t at;
    at.tile = tile;
    at.row_of_heads = heads;
    at.head = head;
    at.kv_head = kv_head;
#pragma unroll
    for (int axis = 0; axis < kBatchDims; ++axis) at.batch[axis] = batch[axis];
    at.exists = true;
    return at;
  }
  __device__ mask_bounds_t seen() const volatile {
    return {bounds.low, bounds.high, bounds.num_queries, bounds.num_keys};
  }
  __device__ split_t split() const volatile { return {{first, last}, empty != 0}; }
};

// Pairs of mbarriers in shared memory: TMA completes "full", the readers "empty".
struct ring_t {
  unsigned full, empty;  // addresses of the first of each

  static constexpr int kBytes = 8;  // per barrier
  __device__ unsigned full_at(unsigned stage) const { return full + stage * kBytes; }
  __device__ unsigned empty_at(unsigned stage) const { return empty + stage * kBytes; }
};

// Stage and phase parity of tile n in a ring.
__device__ __forceinline__ unsigned stage_of(unsigned n) { return n % kStages; }
__device__ __forceinline__ unsigned parity_of(unsigned n) { return n / kStages & 1; }
