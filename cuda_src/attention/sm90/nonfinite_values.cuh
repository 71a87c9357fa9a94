// SPDX-License-Identifier: MIT
// attention_hopper: infinities and NaN in values that are hidden from some query.
//
// A product cannot leave out a key: it gives the key a weight of 0, and 0 * NaN is NaN.
// A work tile with a nonfinite result is therefore computed a second time. That pass
// scrubs tiles of v with hidden keys in shared memory before they are multiplied:
// nonfinite numbers become 0. Those that a query does see are added to its result at
// the end. Rows that see none keep every bit, since 0 times any number adds nothing.
// Finite data pay only for the check of the results.
#pragma once

#include "attention/sm90/softmax.cuh"
#include "common/reduce.cuh"
#include "ptx/barrier.cuh"

// The idle warps of the producer warpgroup scrub tiles one after another as TMA
// delivers them. One of these warps may be reading key terms instead (score_mod.cuh).
constexpr int kScrubbers = !kHidesSome ? 0 : kTermsOfKeys ? 64 : 96;
// Named barriers; pingpong has 1 to 4. Until the first order the scrubbers sleep at the
// second one, because polling an mbarrier would take issue slots from the consumers.
constexpr int kScrubBarrier = 8, kWakeBarrier = 9;

// Flag of a work tile that is recomputed; larger than any number of a work tile.
constexpr int kCareful = 1 << 30;

constexpr int kOrders = 2 * kStages, kRemembered = 8;
struct orders_t {
  // Ring of orders to the scrubbers: the stage of v (-1: stop), and the index of the
  // work tile within this block. At most kStages tiles of v are still to be multiplied
  // when the next one is loaded, so twice as many slots need no further
  // synchronization.
  int stage[kOrders], work_tile[kOrders];
  // By index % 2, the last work tile with nonfinite values. Two entries suffice because
  // work tile n + 2 begins after n is finished.
  int special[2];
  // By index, work tiles to be recomputed, or -1. When work tile n begins, n - 2 is
  // finished; at least one entry is checked per work tile.
  int again[kRemembered];
  // State of the producer that does not fit into registers: orders so far, work tiles
  // checked so far, whether the current one is a second pass and which of its tiles
  // need no scrubbing, and the next work tile.
  unsigned count, looked_at;
  bool careful;
  int whole_first, whole_last, next;
};

// For the producer: the next work tile to recompute among the first `num_work_tiles`,
// or -1.
__device__ __forceinline__ int find_again(volatile orders_t& orders,
                                          unsigned num_work_tiles) {
  while (orders.looked_at < num_work_tiles) {
    const unsigned number = orders.looked_at;
    orders.looked_at = number + 1;
    const int work_tile = orders.again[number % kRemembered];
    if (work_tile >= 0) return work_tile;
  }
  return -1;
}

// Whether a 16-bit number is infinite or NaN, for both halves of a word: 0 or ffff.
__device__ __forceinline__ unsigned special_mask(unsigned word) {
  constexpr unsigned kExponent = pair16_t::kExponent;
  const unsigned low = (word & kExponent) == kExponent ? 0xffffu : 0u;
  const unsigned high = (word >> 16 & kExponent) == kExponent ? 0xffff0000u : 0u;
  return low | high;
}

// Zeroes the nonfinite numbers of a tile; returns whether this thread found any.
__device__ __forceinline__ bool clean(uint4* tile, int thread) {
  constexpr int kVectors = kBytesV / 16;
  bool found = false;
#pragma unroll 2
  for (int n = thread; n < kVectors; n += kScrubbers) {
    const uint4 x = tile[n];
    // The sum of x * 0: NaN if any x is not finite, else 0 of either sign.
    unsigned sum = pair16_t::fma(x.x, 0, 0);
    sum = pair16_t::fma(x.y, 0, sum);
    sum = pair16_t::fma(x.z, 0, sum);
    sum = pair16_t::fma(x.w, 0, sum);
    if ((sum & 0x7fff7fff) != 0) {
      tile[n] = make_uint4(x.x & ~special_mask(x.x), x.y & ~special_mask(x.y),
                           x.z & ~special_mask(x.z), x.w & ~special_mask(x.w));
      found = true;
    }
  }
  return found;
}

// A condition that is the same for the whole warp. With lists of tiles only a vote
// tells the compiler so; else the loop over keys, too, keeps no addresses in uniform
// registers.
__device__ __forceinline__ bool same(bool condition) {
  if constexpr (kListsTiles) return __any_sync(kFullMask, condition);
  return condition;
}

// Adds the infinities and NaN that rows of this warp see in scrubbed tiles. `group` is
// the warpgroup among those that compute the rows from `row_block` on.
template <typename RowNumber, typename TileOf>
__device__ __forceinline__ void add_specials(
    const elem_t* v, out_t* out, const tile_coord_t& at, int row_block, int group,
    const scores_t& scores, const mask_bounds_t& bounds, const params_t& params,
    const tiles_t& tiles, int work_tile, const RowNumber& row_number,
    const TileOf& tile_of) {
  const int lane = threadIdx.x % kWarpSize;
  const int num_rows = int(params.seqlen_q) * kPack, head_dim_v = params.head_dim_v;
  v = at.at_kv(v, params.v);
  if constexpr (!kSplit) out = at.at(out, params.out);
  const tiles_t whole = whole_tiles_of(
      bounds, max(row_block, 0), min(row_block + kBlockM, num_rows), params.seqlen_k);
  const int row_first = row_block + group * kGroupM + threadIdx.x / kWarpSize % 4 * 16;
  const int row_last = min(row_first + 16, num_rows);
  if (same(row_first < 0) || same(row_first >= row_last)) return;
  const tiles_t keys = keys_of(bounds, query_of(row_first), query_end(row_last));
#pragma unroll 1
  for (int coord = tiles.first; same(coord < tiles.last); ++coord) {
    const int tile = tile_of(coord);
    if (is_in(tile, whole)) continue;
    const int j_first = max(tile * kBlockN, keys.first);
    const int j_last = min((tile + 1) * kBlockN, keys.last);
#pragma unroll 1
    for (int j0 = j_first; same(j0 < j_last); j0 += kWarpSize) {
      // Each lane checks one key; then the warp handles the keys with nonfinite values.
      bool special = false;
      if (j0 + lane < j_last) {
        const auto* row =
            reinterpret_cast<const uint4*>(v + (j0 + lane) * params.v.row);
#pragma unroll 4
        for (int n = 0; n < (head_dim_v + 7) / 8; ++n) {  // rows are whole vectors
          const uint4 x = row[n];
          special |= (special_mask(x.x) | special_mask(x.y) | special_mask(x.z) |
                      special_mask(x.w)) != 0;
        }
      }
      unsigned left = __ballot_sync(kFullMask, special);
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int j = j0 + __ffs(left) - 1;
#pragma unroll 1
        for (int row = row_first; same(row < row_last); ++row) {
          const int i = query_of(row);
          const tiles_t seen = keys_of(bounds, i, i + 1);
          if (same(j < seen.first) || same(j >= seen.last)) continue;
          const bool hidden = kHidesKeys && scores(0.f, i, j) == -infinity<float>();
          if (same(hidden)) continue;
          out_t* out_row = out;
          index_t step = 1;
          if constexpr (kSplit) {
            out_row += row_number(at, row, work_tile) * head_dim_v;
          } else {
            out_row += i * params.out.row + row % kPack * params.out.head;
            step = params.out.col;
          }
#pragma unroll 1
          for (int column = lane; column < head_dim_v; column += kWarpSize) {
            const float x = to<float>(v[j * params.v.row + column]);
            out_t& sum = out_row[column * step];
            if (!is_finite(x)) sum = to<out_t>(to<float>(sum) + x);
          }
        }
      }
    }
  }
}
