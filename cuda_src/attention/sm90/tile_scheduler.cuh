// SPDX-License-Identifier: MIT
// attention_hopper: sizes, shared memory, and the order in which tiles are taken.
#pragma once

#include "attention/sm90/operands.cuh"
#include "attention/score/score.cuh"
#include "attention/score/tile_lists.cuh"

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_N) || \
    !defined(BOUNDS) || !defined(TAKE_TURNS) || !defined(STAGES)
#error "HEAD_DIM, HEAD_DIM_V, BLOCK_N, STAGES, BOUNDS and TAKE_TURNS come from the host"
#endif

// The dimensions as they are computed with; TMA fills up with zeros.
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kBlockN = BLOCK_N;                   // keys of a tile
constexpr int kNumGroups = kNumThreads / 128 - 1;  // warpgroups that compute
constexpr int kGroupM = 64;                        // queries of a warpgroup
constexpr int kBlockM = kNumGroups * kGroupM;
constexpr int kStages = STAGES;  // tiles of k, and of v, in shared memory
constexpr bool kTakeTurns = TAKE_TURNS;
// Rows of k and v that TMA brings at a time.
#ifdef BOX_N
constexpr int kBoxN = BOX_N;
#else
constexpr int kBoxN = kBlockN;
#endif

// Rows of a tile are queries of so many heads of a group, side by side for one
// position.
#ifdef PACK
constexpr int kPack = PACK;
#else
constexpr int kPack = 1;
#endif
__device__ __forceinline__ int query_of(int row) { return row / kPack; }
// The queries of rows [row_first, row_last), one more than the last of them.
__device__ __forceinline__ int query_end(int row_last) {
  return (row_last - 1) / kPack + 1;
}

// The keys of an item are one part of several: sums in float, lse in double. The block
// that ends the last part of a tile merges them (split_kv.cuh), or another kernel
// does where there are more rows than a block should merge (forward_combine.cu).
#ifdef SPLIT
constexpr bool kSplit = true;
using out_t = float;
using lse_t = double;
#else
constexpr bool kSplit = false;
using out_t = elem_t;
using lse_t = float;
#endif
#ifdef MERGE
constexpr bool kMerge = true;
static_assert(kSplit);
#else
constexpr bool kMerge = false;
#endif

// Each tile of k and v belongs to one item, and leaves the L2 cache first.
#ifdef READ_ONCE
constexpr bool kReadOnce = true;
#else
constexpr bool kReadOnce = false;
#endif

// Which keys a query may see by its position: 0 all, 1 up to a last one, 2 from a first
// one to a last one.
constexpr int kBounds = BOUNDS;
constexpr bool kHasLengths = kHasQueryLengths || kHasKeyLengths;

#ifdef SCALE_SCORES
constexpr bool kScaleScores =
    true;  // the scale is not a number that exp2 can take over
#else
constexpr bool kScaleScores = false;
#endif
// Bias and mask are the same to all queries, or arrays whose keys lie side by side.
#ifdef TERMS_OF_KEYS
constexpr bool kTermsOfKeys = true;
#else
constexpr bool kTermsOfKeys = false;
#endif
#ifdef UNIT_COLUMNS
constexpr bool kUnitColumns = true;
#else
constexpr bool kUnitColumns = false;
#endif
// A bias of keys and no other term, in units of the products. Up to 128 columns they
// are added to it, in the accumulators; with more, little may be preset, and what comes
// behind the products hides beside the longer ones of the other warpgroup.
#ifdef KEY_BIAS
constexpr bool kKeyBias = true;
static_assert(kTermsOfKeys && kHasBias && !kHasMask && !kHasSoftcap && !kHasAlibi &&
              !kScaleScores);
#else
constexpr bool kKeyBias = false;
#endif
constexpr bool kPresetBias = kKeyBias && kHeadDimV <= 128;
constexpr bool kBiasBehind = kKeyBias && !kPresetBias;
// Whether scores are finished one by one before the softmax; else the softmax scales.
constexpr bool kHasTerms = !kKeyBias && (kScaleScores || kHasSoftcap || kHasBias ||
                                         kHasAlibi || kHasMask || kHasScoreFunction);
// A softcap and nothing else: the way is one from product to weight, and what leaves
// the softcap are exponents of 2.
constexpr bool kCapOnly = kHasSoftcap && !kHasBias && !kHasAlibi && !kHasMask &&
                          !kScaleScores && !kHasScoreFunction && !kHasMaskFunction;

// Where a key may be hidden from a query: anywhere, or in tiles that not all queries of
// a block see whole.
constexpr bool kHidesAnywhere =
    kHasMask || kHasBias || kHasScoreFunction || kHasMaskFunction;
constexpr bool kHidesSome = kHidesAnywhere || kBounds > 0 || kHasKeyLengths;
// Tiles of keys of an item are those of a list: a mask function hides some of them.
enum : bool { kListsTiles = kHasMaskFunction };
// Items differ in length, so that blocks take them from a counter.
constexpr bool kDynamic = kHidesSome || kHasLengths;

// Whether the device alone knows which keys the queries of an item see; else it is the
// same to all items.
constexpr bool kBandOfItem = kHasLengths || kHasQueryOffsets;

// A tile in shared memory: chunks of 64 columns, each [rows][128 bytes], swizzled.
constexpr int kChunksQk = (kHeadDim + 63) / 64, kChunksV = (kHeadDimV + 63) / 64;
constexpr int kBytesQ = kGroupM * kChunksQk * 128;  // of one warpgroup
constexpr int kBytesK = kBlockN * kChunksQk * 128, kBytesV = kBlockN * kChunksV * 128;
static_assert(kHeadDim % 16 == 0 && kBlockN % 16 == 0 && sizeof(elem_t) == 2);

struct schedule_t {
  int num_items;   // tiles of queries, over all heads, batch entries and splits
  int num_blocks;  // of one head
  int num_heads;   // of all batch entries; packed heads are one
  int section;     // heads whose keys and values stay in the L2 cache together
  int num_splits;  // parts of the keys of one tile of queries
  int absent;      // rows of the first tile of a head that do not exist
};

// The first row of a tile; it may be below 0. Where later queries see more keys, tiles
// are counted from the last query, so that the one that is not full is a short one.
__device__ __forceinline__ int first_row(const tile_coord_t& at,
                                         const schedule_t& schedule) {
  constexpr bool kFromTheEnd = kBounds > 0 && kNumGroups > 1;
  return static_cast<int>(at.tile) * kBlockM - (kFromTheEnd ? schedule.absent : 0);
}

// Tile `tile` of queries of head number `heads` over all batch entries; of packed ones,
// the first.
__device__ __forceinline__ tile_coord_t place_of(unsigned heads, index_t tile,
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

// Where item number `item` lies. In a section the tiles that see most keys come first.
__device__ __forceinline__ tile_coord_t place_of(int item, const schedule_t& schedule,
                                                 const params_t& params) {
  const unsigned number = kSplit ? unsigned(item) / schedule.num_splits : item;
  const unsigned num_blocks = schedule.num_blocks;
  if constexpr (kNumGroups == 1) {  // which has all queries of a head in one tile
    return place_of(number, 0, params);
  } else if constexpr (kDynamic) {
    const unsigned in_section = schedule.section * num_blocks;
    const unsigned first = number / in_section * schedule.section;
    const unsigned rest = number % in_section;
    const unsigned left = schedule.num_heads - first;
    const unsigned width = left < schedule.section ? left : schedule.section;
    return place_of(first + rest % width, num_blocks - 1 - rest / width, params);
  } else {
    return place_of(number / num_blocks, number % num_blocks, params);
  }
}

// Tiles [first, last) of keys.
struct tiles_t {
  int first, last;
};

// Keys that the queries [i_first, i_last) see by their position, as one range that may
// be empty. `band` is that of all scores.
__device__ __forceinline__ tiles_t keys_of(const mask_bounds_t& band, int i_first,
                                           int i_last) {
  i_last = min(i_last, band.num_queries);
  if (i_first >= i_last) return {0, 0};
  return {min(max(i_first + band.low, 0), band.num_keys),
          min(max(i_last - 1 + band.high, 0), band.num_keys)};
}

// The tiles that hold the keys which rows [row_first, row_last) see. At least one.
__device__ __forceinline__ tiles_t tiles_of(const mask_bounds_t& band, int row_first,
                                            int row_last, int seqlen_k) {
  if constexpr (!kDynamic) {
    return {0, (seqlen_k + kBlockN - 1) / kBlockN};
  } else {
    const tiles_t keys = keys_of(band, query_of(row_first), query_end(row_last));
    const int first = keys.first / kBlockN;
    const int last = (keys.last + kBlockN - 1) / kBlockN;
    return first < last ? tiles_t{first, last} : tiles_t{0, 1};
  }
}

// The share of an item in the tiles of its queries. A share may be empty: then it is
// one tile, of which nothing is seen.
struct share_t {
  tiles_t tiles;
  bool empty;
};
__device__ __forceinline__ share_t share_of(const tiles_t& tiles, int item,
                                            const schedule_t& schedule) {
  if constexpr (!kSplit) return {tiles, false};
  const unsigned num_splits = schedule.num_splits;
  const int each = (tiles.last - tiles.first + num_splits - 1) / num_splits;
  const int first = tiles.first + int(unsigned(item) % num_splits) * each;
  const int last = min(first + each, tiles.last);
  if (first < last) return {{first, last}, false};
  return {{tiles.first, tiles.first + 1}, true};
}

// The tiles of which each of the rows [row_first, row_last) sees every key.
__device__ __forceinline__ tiles_t whole_tiles_of(const mask_bounds_t& band,
                                                  int row_first, int row_last,
                                                  int seqlen_k) {
  if constexpr (kHidesAnywhere) return {0, 0};
  const int i_first = query_of(row_first);
  const int i_last = min(query_end(row_last), band.num_queries);
  const int first = keys_of(band, i_last - 1, i_last).first;
  const int last = keys_of(band, i_first, i_first + 1).last;
  return {(first + kBlockN - 1) / kBlockN,
          (last == seqlen_k ? last + kBlockN - 1 : last) / kBlockN};
}
__device__ __forceinline__ bool is_in(int tile, const tiles_t& tiles) {
  return tiles.first <= tile && tile < tiles.last;
}

// What the producer tells the others of an item. It stands until they are done.
struct tile_info_t {
  int item;  // or one that is none: no more
  int tile, heads, head, kv_head, batch[kBatchDims];
  mask_bounds_t band;      // of all scores
  int first, last, empty;  // its share

  __device__ void put(const tile_coord_t& at) volatile {
    tile = at.tile;
    heads = at.row_of_heads;
    head = at.head;
    kv_head = at.kv_head;
#pragma unroll
    for (int axis = 0; axis < kBatchDims; ++axis) batch[axis] = at.batch[axis];
  }
  __device__ void put(const mask_bounds_t& seen) volatile {
    band.low = seen.low;
    band.high = seen.high;
    band.num_queries = seen.num_queries;
    band.num_keys = seen.num_keys;
  }
  __device__ void put(const share_t& share) volatile {
    first = share.tiles.first;
    last = share.tiles.last;
    empty = share.empty;
  }
  __device__ tile_coord_t place() const volatile {
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
    return {band.low, band.high, band.num_queries, band.num_keys};
  }
  __device__ share_t share() const volatile { return {{first, last}, empty != 0}; }
};

// Barriers in shared memory, in pairs: "full" TMA ends, "empty" the
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
