// SPDX-License-Identifier: MIT
// attention_hopper: infinities and NaN among values that some query does not see.
//
// A product cannot leave out a key: its weight is 0, and 0 times NaN is NaN. An item
// with such a result is computed a second time, with care: tiles of v in which a key is
// hidden from some query are looked through in shared memory before they are
// multiplied, and numbers that are not finite become 0. What queries see of them is
// added to the result at the end. Rows that see none keep every bit, for 0 times any
// number adds nothing. Finite data pay for the look at the result alone.
#pragma once

#include "attention/sm90/softmax.cuh"
#include "common/reduce.cuh"
#include "ptx/barrier.cuh"

// The idle warps of the producer's warpgroup look through the tiles, one after another
// as TMA brings them.
// One of them reads terms of keys (score_mod.cuh).
constexpr int kScrubbers = !kHidesSome ? 0 : kTermsOfKeys ? 64 : 96;
// Of bar.sync; the turns have 1 to 4. Until the first order the scrubbers sleep at the
// second one: a wait for an mbarrier would take turns of the warps that compute.
constexpr int kScrubBarrier = 8, kWakeBarrier = 9;

// Of an item that is computed with care; more than there are items.
constexpr int kCareful = 1 << 30;

constexpr int kOrders = 2 * kStages, kRemembered = 8;
struct orders_t {
  // A ring of orders to the scrubbers: the stage of v (-1: no more), and the number of
  // its item in this block. At most kStages tiles of v are not yet multiplied when the
  // next one is asked for, so that twice as many slots need no other guard.
  int stage[kOrders], item[kOrders];
  // By item number % 2, the last item of whose values one was not finite. Two are
  // enough, since item n + 2 begins when n is done.
  int special[2];
  // By item number, tiles to be computed again, or -1. When item n begins, n - 2 is
  // done; with each new item at least one is looked at.
  int again[kRemembered];
  // The producer's own numbers, for which it has no registers: orders so far, items
  // looked at so far, whether its item wants care and which tiles of it do not, and the
  // item after it.
  unsigned count, looked_at;
  bool careful;
  int whole_first, whole_last, next;
};

// For the producer, the next item to be computed again among the first `num_items`
// numbers, or -1.
__device__ __forceinline__ int find_again(volatile orders_t& orders,
                                          unsigned num_items) {
  while (orders.looked_at < num_items) {
    const unsigned number = orders.looked_at;
    orders.looked_at = number + 1;
    const int item = orders.again[number % kRemembered];
    if (item >= 0) return item;
  }
  return -1;
}

// Whether a 16-bit number is an infinity or NaN, for both in a word: 0 or ffff.
__device__ __forceinline__ unsigned special_mask(unsigned word) {
  constexpr unsigned kExponent = pair16_t::kExponent;
  const unsigned low = (word & kExponent) == kExponent ? 0xffffu : 0u;
  const unsigned high = (word >> 16 & kExponent) == kExponent ? 0xffff0000u : 0u;
  return low | high;
}

// Sets what is not finite in a tile to 0; whether this thread found any.
__device__ __forceinline__ bool clean(uint4* tile, int thread) {
  constexpr int kVectors = kBytesV / 16;
  bool found = false;
#pragma unroll 2
  for (int n = thread; n < kVectors; n += kScrubbers) {
    const uint4 x = tile[n];
    // x * 0 summed up: NaN where one is not finite, else 0 of either sign.
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

// Adds the infinities and NaN that the rows of this warp, in warpgroup `group` of those
// that compute the rows from `row_block` on, see in the tiles that have been cleaned.
template <typename RowNumber>
__device__ __forceinline__ void add_specials(
    const elem_t* v, out_t* out, const tile_coord_t& at, int row_block, int group,
    const scores_t& scores, const mask_bounds_t& band, const params_t& params,
    const tiles_t& tiles, const unsigned* list, int item, const RowNumber& row_number) {
  const int lane = threadIdx.x % kWarpSize;
  const int num_rows = int(params.seqlen_q) * kPack, head_dim_v = params.head_dim_v;
  v = at.at_kv(v, params.v);
  if constexpr (!kSplit) out = at.at(out, params.out);
  const tiles_t whole = whole_tiles_of(
      band, max(row_block, 0), min(row_block + kBlockM, num_rows), params.seqlen_k);
  const int row_first = row_block + group * kGroupM + threadIdx.x / kWarpSize % 4 * 16;
  const int row_last = min(row_first + 16, num_rows);
  if (row_first < 0 || row_first >= row_last) return;
  const tiles_t keys = keys_of(band, query_of(row_first), query_end(row_last));
#pragma unroll 1
  for (int place = tiles.first; place < tiles.last; ++place) {
    const int tile = kListsTiles ? listed_tile(list, place).tile() : place;
    if (is_in(tile, whole)) continue;
    const int j_first = max(tile * kBlockN, keys.first);
    const int j_last = min((tile + 1) * kBlockN, keys.last);
#pragma unroll 1
    for (int j0 = j_first; j0 < j_last; j0 += kWarpSize) {
      // A lane looks through a key; then the warp goes through those that have some.
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
        for (int row = row_first; row < row_last; ++row) {
          const int i = query_of(row);
          const tiles_t seen = keys_of(band, i, i + 1);
          if (j < seen.first || j >= seen.last) continue;
          if (kHidesAnywhere && scores(0.f, i, j) == -infinity<float>()) continue;
          out_t* out_row = out;
          index_t step = 1;
          if constexpr (kSplit) {
            out_row += row_number(at, row, item) * head_dim_v;
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
