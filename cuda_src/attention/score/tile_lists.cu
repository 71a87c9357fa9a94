// SPDX-License-Identifier: MIT
// attention_tile_lists: lists of the tiles of scores that a mask function shows, for
// kernels that work on tiles.
//
// Algorithm  The parts of the mask that depend on a query or a key alone are computed
//            for all rows of a tile and reduced to their range; the rest follows by
//            interval arithmetic. With TRANSPOSED lists belong to tiles of keys,
//            otherwise to tiles of queries (the owner)
// Grid       one block per list: tile of the owner, head, batch entry
// Threads    8 lanes find the range of a tile of the other side, where the mask has a
//            part that depends on this side alone; 4 then compare it with the owner's
//            parts
// Memory     global: lists once, (2 + tiles of the other side) words of 4 bytes each:
//            first their number, then an entry for each tile that some part sees, in
//            order: index of the tile << 8 | 2 bits for each part of the owner's tile:
//            0 it sees nothing, 1 some, 2 all. At least one tile is listed.
//            With WHOLE_FIRST only tiles that all parts see whole follow that number,
//            and the others fill the list from its end; the second word counts them
// Numbers    64-bit integers; whatever depends on floats counts as mixed
// Limits     includes other masks by position, but not arrays
#include "attention/score/score.cuh"
#include "attention/score/tile_lists.cuh"
#include "common/reduce.cuh"

#if !defined(PART_ROWS) || !defined(PARTS) || !defined(OTHER_ROWS) || \
    !defined(TRANSPOSED) || !defined(WHOLE_FIRST)
#error "PART_ROWS, PARTS, OTHER_ROWS, TRANSPOSED, WHOLE_FIRST come from the host"
#endif

// Rows per part of the owner's tile, parts per tile, rows of the other side's tile.
constexpr int kPartRows = PART_ROWS, kParts = PARTS, kOtherRows = OTHER_ROWS;
constexpr bool kTransposed = TRANSPOSED;  // the owner's rows are keys
// Whole tiles are a group of their own. Rows behind the last query count as if they saw
// all that the other rows see: their results are not stored.
constexpr bool kWholeFirst = WHOLE_FIRST;
static_assert(!kWholeFirst || !kTransposed);
constexpr unsigned kWhole = 0xaa & ((1 << 2 * kParts) - 1);  // all parts see all
constexpr int kNumWarps = kNumThreads / kWarpSize;
constexpr int kLanes = 8;  // that find the range of a tile
constexpr int kTilesOfWarp = kWarpSize / kLanes;
static_assert(kParts <= 4);

using interval_t = expr::interval_t;
using head_t = mask_mod_exact_head<accum_t>;
constexpr int kOfQuery = mask_mod_exact_row_count, kOfKey = mask_mod_exact_col_count;
constexpr int kOfOwner = kTransposed ? kOfKey : kOfQuery;
constexpr int kOfOther = kTransposed ? kOfQuery : kOfKey;
constexpr int kMost = kOfQuery > kOfKey ? kOfQuery : kOfKey;
// Tiles of the other side at a time, whose ranges fit into shared memory.
constexpr int kFitting = 32768 / (sizeof(interval_t) * (kOfOther > 0 ? kOfOther : 1));
constexpr int kRoundTiles = kNumThreads / 4 < kFitting ? kNumThreads / 4 : kFitting;
static_assert(kRoundTiles > 0);

struct list_params_t {
  int own_first;                // row of the first tile; may be negative
  int num_own, num_other;       // tiles
  int batch_lists, head_lists;  // 0 where entries, or heads, share lists
  int stride;                   // of a list, in words
};

// What all threads of a block share.
struct function_mask_t {
  const scores_t& scores;
  const params_t& params;
  head_t head;

  // The parts of the mask that depend on query or key `row` alone.
  template <bool kKeys>
  __device__ __forceinline__ void numbers_of(
      index_t row, long long (&x)[kMost > 0 ? kMost : 1]) const {
    const auto& args = params.functions.mask;
    const expr::int_t b = scores.entry(), h = scores.query_head();
    if constexpr (kKeys) {
      long long of_key[kOfKey > 0 ? kOfKey : 1];
      mask_mod_exact_col_numbers(mask_mod_exact_of_col<accum_t>(head, b, h, row, args),
                                 of_key);
      for (int n = 0; n < kOfKey; ++n) x[n] = of_key[n];
    } else {
      long long of_query[kOfQuery > 0 ? kOfQuery : 1];
      const expr::int_t i = scores.diagonal(row);
      mask_mod_exact_row_numbers(mask_mod_exact_of_row<accum_t>(head, b, h, i, args),
                                 of_query);
      for (int n = 0; n < kOfQuery; ++n) x[n] = of_query[n];
    }
  }

  // Their ranges over rows [first, last), by kLanes lanes, all of which get them.
  template <bool kKeys, int kLanes>
  __device__ __forceinline__ void bounds_of(
      int first, int last, interval_t (&bounds)[kMost > 0 ? kMost : 1]) const {
    constexpr int kCount = kKeys ? kOfKey : kOfQuery;
    constexpr long long kLargest = 0x7fffffffffffffffll;
    for (int n = 0; n < kCount; ++n) bounds[n] = {kLargest, -kLargest, true};
#pragma unroll 4
    for (int row = first + int(threadIdx.x % kLanes); row < last; row += kLanes) {
      long long x[kMost > 0 ? kMost : 1];
      numbers_of<kKeys>(row, x);
      for (int n = 0; n < kCount; ++n) {
        bounds[n].low = expr::minimum(bounds[n].low, x[n]);
        bounds[n].high = expr::maximum(bounds[n].high, x[n]);
      }
    }
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) {
        bounds[n].low = expr::minimum(bounds[n].low,
                                      __shfl_xor_sync(kFullMask, bounds[n].low, step));
        bounds[n].high = expr::maximum(
            bounds[n].high, __shfl_xor_sync(kFullMask, bounds[n].high, step));
      }
    }
  }

  // How much of keys [j_first, j_last) queries [i_first, i_last) see: 0 nothing, 1
  // some, 2 all.
  __device__ __forceinline__ unsigned seen(int i_first, int i_last, int j_first,
                                           int j_last, const interval_t* queries,
                                           const interval_t* keys) const {
    const int num_queries = static_cast<int>(scores.num_queries());
    const int num_keys = static_cast<int>(scores.num_keys());
    const bool is_whole = (kWholeFirst || i_last <= num_queries) && j_last <= num_keys;
    i_first = max(i_first, 0);
    i_last = min(i_last, num_queries);
    j_last = min(j_last, num_keys);
    if (i_first >= i_last || j_first >= j_last) return 0;
    const mask_bounds_t band = scores.mask_bounds(i_first, j_first);
    const int rows = i_last - i_first, cols = j_last - j_first;
    // By position: col - row ranges from 1 - rows to cols - 1.
    if (cols - 1 < band.low || 1 - rows >= band.high) return 0;
    const bool by_position = band.low <= 1 - rows && cols <= band.high;
    const interval_t i = {scores.diagonal(i_first), scores.diagonal(i_last - 1), true};
    const interval_t j = {j_first, j_last - 1, true};
    const interval_t d = {i.low - j.high, i.high - j.low, true};
    const int found = mask_mod_exact_bounds<accum_t>(
        i, j, d, expr::point(scores.entry()), expr::point(scores.query_head()), head,
        queries, keys, params.functions.mask);
    if (found == 0) return 0;
    return found == 1 && by_position && is_whole ? 2 : 1;
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    attention_tile_lists(unsigned* __restrict__ lists,  // as above
                         SCORE_PARAMETERS, const __grid_constant__ list_params_t list) {
  __shared__ interval_t owners[kParts][kMost > 0 ? kMost : 1];
  __shared__ interval_t others[kRoundTiles][kOfOther > 0 ? kOfOther : 1];
  __shared__ int counts[2][kNumWarps];  // at the front, and at the end
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

  // The list of this block, and one of the heads that it belongs to.
  const int own_tile = static_cast<int>(block_index() % list.num_own);
  const int of_head = static_cast<int>(block_index() / list.num_own);
  const int num_heads = list.head_lists > 0 ? static_cast<int>(params.num_heads) : 1;
  const index_t head = of_head % num_heads, entry = of_head / num_heads;
  const tile_coord_t at(params, entry * params.num_heads + head);
  if (!at.exists) return;
  unsigned* const words =
      lists +
      (entry * list.batch_lists + head * list.head_lists + own_tile) * list.stride;
  const scores_t scores(at, SCORE_ARGUMENTS);
  const function_mask_t function = {
      scores, params,
      mask_mod_exact_of_head<accum_t>(static_cast<expr::int_t>(scores.entry()),
                                      static_cast<expr::int_t>(scores.query_head()),
                                      params.functions.mask)};
  const int own_first = list.own_first + own_tile * (kParts * kPartRows);
  const int own_rows =
      static_cast<int>(kTransposed ? params.seqlen_k : params.seqlen_q);
  const int other_rows =
      static_cast<int>(kTransposed ? params.seqlen_q : params.seqlen_k);

  if (kOfOwner > 0 && warp < kParts) {
    interval_t bounds[kMost > 0 ? kMost : 1];
    const int first = own_first + warp * kPartRows;
    function.bounds_of<kTransposed, kWarpSize>(
        max(first, 0), min(first + kPartRows, own_rows), bounds);
    if (lane == 0) {
      for (int n = 0; n < kOfOwner; ++n) owners[warp][n] = bounds[n];
    }
  }
  __syncthreads();  // the ranges of all parts

  auto seen_by = [&](int part, int tile, const interval_t* of_other) {
    const int own = own_first + part * kPartRows, other = tile * kOtherRows;
    return kTransposed ? function.seen(other, other + kOtherRows, own, own + kPartRows,
                                       of_other, owners[part])
                       : function.seen(own, own + kPartRows, other, other + kOtherRows,
                                       owners[part], of_other);
  };
  int num_listed[2] = {};
  for (int first = 0; first < list.num_other; first += kRoundTiles) {
    const int last = min(list.num_other, first + kRoundTiles);
    if constexpr (kOfOther > 0) {
      // Lanes behind the last tile take part in the shuffles.
      for (int n = threadIdx.x / kLanes; first + n / kTilesOfWarp * kTilesOfWarp < last;
           n += kNumThreads / kLanes) {
        interval_t bounds[kMost > 0 ? kMost : 1];
        const int row = (first + n) * kOtherRows;
        function.bounds_of<!kTransposed, kLanes>(row, min(row + kOtherRows, other_rows),
                                                 bounds);
        if (threadIdx.x % kLanes == 0 && first + n < last) {
          for (int m = 0; m < kOfOther; ++m) others[n][m] = bounds[m];
        }
      }
      __syncthreads();  // the ranges of this round
    }
    const int place = threadIdx.x / 4, part = threadIdx.x % 4, tile = first + place;
    unsigned seen = 0;
    if (tile < last && part < kParts) {
      seen = seen_by(part, tile, others[place]) << 2 * part;
    }
    seen |= __shfl_xor_sync(kFullMask, seen, 1);
    seen |= __shfl_xor_sync(kFullMask, seen, 2);
    if (part > 0) seen = 0;  // the first of the four lists the tile
    const bool at_end = kWholeFirst && seen != 0 && seen != kWhole;
    const bool at_front = seen != 0 && !at_end;
    const unsigned ballots[2] = {__ballot_sync(kFullMask, at_front),
                                 __ballot_sync(kFullMask, at_end)};
    if (lane < 2) counts[lane][warp] = __popc(lane == 0 ? ballots[0] : ballots[1]);
    __syncthreads();  // the counts of all warps
    int before[2] = {}, all[2] = {};
    for (int group = 0; group < 2; ++group) {
      for (int w = 0; w < kNumWarps; ++w) {
        before[group] += w < warp ? counts[group][w] : 0;
        all[group] += counts[group][w];
      }
    }
    auto place_in = [&](int group) {
      return num_listed[group] + before[group] +
             __popc(ballots[group] & ((1u << lane) - 1));
    };
    const unsigned entry = static_cast<unsigned>(tile) << 8 | seen;
    if (at_front) words[kListHeader + place_in(0)] = entry;
    if (at_end) words[list.stride - 1 - place_in(1)] = entry;
    for (int group = 0; group < 2; ++group) num_listed[group] += all[group];
    __syncthreads();  // counts and classes have been read
  }
  if (threadIdx.x == 0) {
    if (num_listed[0] + num_listed[1] == 0) {  // one tile of which nothing is seen
      num_listed[kWholeFirst] = 1;
      words[kWholeFirst ? list.stride - 1 : kListHeader] = 0;
    }
    words[0] = num_listed[0];
    words[1] = num_listed[1];
  }
}
