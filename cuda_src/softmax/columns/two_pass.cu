// SPDX-License-Identifier: MIT
// softmax_long_columns: columns too long to be held on chip are read twice.
//
// Algorithm  As softmax_online, along an axis that is not contiguous: the first pass
//            computes m and l of each column (softmax/detail/online_sum.cuh), the
//            second writes exp(s_i - m) / l, or (s_i - m) - log l; s = scale * x.
// Grid       1-D; a block takes a tile at a time, a cluster takes one
// Tiles      kColumns columns of one slab; a thread reads kHeld x kVector elements at a
//            time and keeps m and l for each of its kVector columns
// Memory     x twice, the second time partly from cache, and out once; up to 16 bytes
//            per access, lanes contiguous; shared: m and l per warp and column
// Numbers    exponentials in acc_t of exact differences, sums in double, rounded once;
//            for 16-bit results plain differences and the fast exponential
// Limits     the last outer axis has stride 1 in x and out; one reduced axis
#include "softmax/detail/params.cuh"
#include "softmax/detail/column_tile.cuh"
#include "softmax/detail/online_sum.cuh"

using tile_t = place_t<layout_t, long long>;
using total_t = running_t<acc_t>;

struct partial_t {
  double l;
  acc_t m;

  partial_t() = default;
  __device__ __forceinline__ explicit partial_t(const total_t& sum)
      : l(sum.l.value), m(sum.m) {}
  __device__ __forceinline__ total_t total() const {
    total_t sum;
    sum.l.value = l;
    sum.m = m;
    return sum;
  }
};

struct shared_t {
  partial_t sum[kPartials][kColumns];
  partial_t piece[kCluster][kColumns];
};

// The elements that this thread has at a time.
struct batch_t {
  slots_t<x_t> value;
  unsigned long long selected;  // one bit per slot

  __device__ __forceinline__ batch_t(const x_t* x, const bool* where,
                                     const tile_t& tile, int first, int rows) {
    value.fill(x_t());
    tile.load_rows(value, x, kX, first, rows);
    selected = 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int i = tile.offset(j);
        if (k >= rows || i >= tile.columns) continue;
        const long long at =
            kHasWhere ? (first + k) * tile.step(kWhere) +
                            i * tile.layout.outer.stride[kWhere][OUTER_AXES - 1]
                      : 0;
        if (!kHasWhere || where[at]) selected |= 1ull << (k * kVector + j);
      }
    }
  }
  __device__ __forceinline__ bool is_selected(int k, int j) const {
    return selected >> (k * kVector + j) & 1;
  }
  __device__ __forceinline__ score_t score(int k, int j, const tile_t& tile) const {
    if (!is_selected(k, j)) return score_t::absent(tile.layout);
    return score_t(to<acc_t>(value.get(k, j)), tile.layout);
  }
};
static_assert(kHeld * kVector <= 64, "a bit an element");
static_assert(!kInWarp, "a long column has its own block");

// m and l of each of this thread's columns over the tile, in every thread.
__device__ __forceinline__ void join_columns(shared_t& shared, total_t (&sum)[kVector],
                                             keys_t keys) {
  combine_in_warp(sum, combine_t(keys));
  const int part = threadIdx.x / (kShuffles ? kWarpSize : kSide);
  if (kShuffles ? threadIdx.x % kWarpSize < kSide : threadIdx.x < kGroup) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      shared.sum[part][tile_t::side() * kVector + j] = partial_t(sum[j]);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
    total_t total = shared.sum[0][c].total();
    for (int i = 1; i < kPartials; ++i) {
      total.take(shared.sum[i][c].total(), keys);
    }
    share(&shared.piece[cluster_rank()][c], partial_t(total));
  }
  cluster_sync();
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int c = tile_t::side() * kVector + j;
    sum[j] = shared.piece[0][c].total();
    for (int rank = 1; rank < kCluster; ++rank) {
      sum[j].take(shared.piece[rank][c].total(), keys);
    }
  }
  cluster_sync();  // all have read before the next tile is written
}

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kNumThreads, RESIDENT)
    softmax_long_columns(const x_t* x, const bool* where, out_t* out,
                         const __grid_constant__ layout_t layout) {
  __shared__ shared_t shared;
  const keys_t keys(layout);
  const thread_map how =
      takes_vectors(x, layout, kX) && takes_vectors(out, layout, kOut)
          ? thread_map::kVectors
          : thread_map::kSingles;
  if (kCluster > 1) cluster_sync();  // no block may be written to before it runs
  const tile_index_t end = num_tiles(layout);
  for (tile_index_t at = first_tile(); at < end; at += tile_step()) {
    const tile_t tile(layout, how, at);
    const x_t* x_tile = x + tile.start(kX);
    const bool* where_tile = where + tile.start(kWhere);
    out_t* out_tile = out + tile.start(kOut);

    total_t sum[kVector];
    for (int first = 0; first < tile.rows; first += kHeld) {
      const int rows = tile.rows - first < kHeld ? tile.rows - first : kHeld;
      const batch_t batch(x_tile, where_tile, tile, first, rows);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        acc_t m = -infinity<acc_t>();
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
          m = larger_finite_t()(m, batch.score(k, j, tile).key);
        }
        sum[j].see(m, keys);
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
          if (batch.is_selected(k, j)) {
            sum[j].l += batch.score(k, j, tile).exp_minus(sum[j].shift());
          }
        }
      }
    }
    join_columns(shared, sum, keys);

    finish_t finish[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      finish[j] = finish_t(sum[j].shift(), sum[j].l.value);
    }
    // Last rows first: these are most likely still in cache.
    for (int left = tile.rows; left > 0;) {
      const int rows = left % kHeld ? left % kHeld : kHeld;
      left -= rows;
      const batch_t batch(x_tile, where_tile, tile, left, rows);
      tile.store_rows(out_tile, kOut, left, rows, [&](int k, int j) {
        const acc_t y = finish[j](batch.score(k, j, tile));
        return to<out_t>(!kHasWhere || batch.is_selected(k, j) ? y : unselected());
      });
    }
  }
}
