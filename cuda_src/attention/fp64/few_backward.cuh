// SPDX-License-Identifier: MIT
// Shared by the float64 gradient kernels of few queries on tensor cores. A block has
// all queries of an entry, up to kRows, and tiles of 16 of its keys, of which each warp
// takes every kWarps-th with memory of its own: no warp waits for another.
//
// Blocks share the keys of an entry if there are several splits. Each has tiles
// [first, last) of them.
//
// Shared  q, dO   2 x kRows x kDim            rows of `place` (tile.cuh)
//         k, v    kWarps x 2 x 16 x kDim      the same, a tile of a warp
//         dS      kWarps x kRows x kKeyPitch  of a tile, by queries
// totals  (entries, queries, splits)  sum of exp(s - lse) over the keys of a split
#pragma once

#include "attention/fp64/backward_row.cuh"
#include "attention/fp64/tile.cuh"
#include "attention/fp64/weights.cuh"
#include "ptx/hold.cuh"

#if !defined(DIM) || !defined(ROWS) || !defined(MIN_BLOCKS)
#error "DIM, ROWS and MIN_BLOCKS come from the host"
#endif
#ifdef UNALIGNED  // rows of k, v, dk or dv are no whole 16-byte vectors
constexpr bool kUnaligned = true;
#else
constexpr bool kUnaligned = false;
#endif
constexpr int kDim = DIM;    // of all rows, padded with zeros
constexpr int kRows = ROWS;  // queries, padded
constexpr int kMinBlocks = MIN_BLOCKS;
constexpr int kWarps = kNumThreads / kWarpSize;
constexpr int kKeys = kWarpRows;         // of a tile
constexpr int kChunks = kDim / 16;       // of columns
constexpr int kRowTiles = kRows / 8;     // of queries
constexpr int kKeyPitch = kKeys + kVec;  // other banks for other queries
constexpr int kUnroll = kRows * kDim < 16 * 128 ? 2 : 1;  // more spills
constexpr int kOfRows = kRows * kDim, kOfKeys = kKeys * kDim;
constexpr int kSteps = (kRows + 15) / 16;  // of sums over queries
static_assert(kDim % 16 == 0 && (kRows == 8 || kRows % 16 == 0));

// FEW_GRADS of _attention/gpu/fp64/few_backward.py is the same struct on the host.
struct few_grads_t {
  operand_t dout, lse, dlse, dq, dk, dv;
};

using product_t = double[kRowTiles][4];  // keys g and g + 8, queries 2 t and 2 t + 1
using weights_t = double[kSteps][2][4];  // of keys g and g + 8; fragments b
// Columns 2 g + (0, 0, 1, 1), queries 2 t + (0, 1, 0, 1).
using sums_t = double[kChunks][kRowTiles][4];

__device__ __forceinline__ double* shared_rows(int n) {
  extern __shared__ __align__(16) unsigned char smem[];
  return reinterpret_cast<double*>(smem) + n * kOfRows;
}
__device__ __forceinline__ int warp_index() { return threadIdx.x / kWarpSize; }
// k (0) or v (1) of this warp.
__device__ __forceinline__ double* shared_keys(int n) {
  return shared_rows(2) + (2 * warp_index() + n) * kOfKeys;
}
__device__ __forceinline__ double* exchange_of_warp() {
  return shared_rows(2) + 2 * kWarps * kOfKeys + warp_index() * kRows * kKeyPitch;
}

// The lse of a query that does not exist: its weights are 0.
constexpr double kNoRow = 1e300;

// Of the queries of an entry.
struct rows_t {
  double lse[kRows], delta[kRows], factor[kRows];
};

// The tiles of keys of a split, and keys from `last_key` on hidden from all queries.
struct split_t {
  index_t entry, number;
  int first, last, last_key;

  __device__ __forceinline__ split_t(index_t num_splits, index_t seqlen_k) {
    entry = divide(block_index(), num_splits);
    number = block_index() - entry * num_splits;
    const index_t tiles = (seqlen_k + kKeys - 1) / kKeys;
    first = static_cast<int>(divide(tiles * number, num_splits));
    last = static_cast<int>(divide(tiles * (number + 1), num_splits));
    last_key = 0;
  }
};

// Starts copies of kKeys rows to shared memory; zeros from `num_rows` rows and `dim`
// columns on.
__device__ __forceinline__ void copy_tile(double* smem, const double* x, index_t stride,
                                          int num_rows, int dim) {
  constexpr int kVectors = kDim / kVec;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(smem));
  unsigned lane = threadIdx.x % kWarpSize;
  ptx::launder(lane);  // recompute addresses, rather than keep them in registers
  if constexpr (kUnaligned) {
#pragma unroll 8
    for (int n = lane; n < kOfKeys; n += kWarpSize) {
      const int row = n / kDim, col = n % kDim;
      const bool exists = row < num_rows && col < dim;
      ptx::copy_or_fill<8>(to + (place<kDim>(row, col / kVec) + col % kVec) * 8,
                           x + (exists ? row * stride + col : 0), exists ? 8 : 0);
    }
    return;
  }
#pragma unroll 8
  for (int n = lane; n < kKeys * kVectors; n += kWarpSize) {
    const int row = n / kVectors, vector = n % kVectors;
    const bool exists = row < num_rows && vector * kVec < dim;
    ptx::copy_or_fill<16>(to + place<kDim>(row, vector) * 8,
                          x + (exists ? row * stride + vector * kVec : 0),
                          exists ? 16 : 0);
  }
}

// c = keys rows^T of a tile.
__device__ __forceinline__ void multiply(product_t& c, const double* keys,
                                         const double* rows) {
  const int g = lane_g(), t = lane_t();
  // Rows g and g + 8 are swizzled alike.
  const double* const keys_lane[2] = {keys + place<kDim>(g, t),
                                      keys + place<kDim>(g, 4 + t)};
  const double* const rows_lane[2] = {rows + place<kDim>(g, t),
                                      rows + place<kDim>(g, 4 + t)};
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = 0;
  }
#pragma unroll kUnroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    double a[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const double2 x = load2(keys_lane[i] + 8 * h * kDim + 16 * chunk);
        a[4 * i + h] = x.x;
        a[4 * i + 2 + h] = x.y;
      }
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      double b[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const double2 x = load2(rows_lane[i] + 8 * n * kDim + 16 * chunk);
        b[2 * i] = x.x;
        b[2 * i + 1] = x.y;
      }
      add_product(c[n], a, b);
    }
  }
}

// The weight for element e of tile n of a product: in step n / 2.
__device__ __forceinline__ double& weight_at(weights_t& w, int n, int e) {
  return w[n / 2][e / 2][n % 2 * 2 + e % 2];
}

// The transposed fragment a of 16 columns of `rows`, whose rows are the slots.
template <int kNumRows>
__device__ __forceinline__ void load_columns(double (&a)[8], const double* rows,
                                             int chunk) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    double2 x = {0, 0};
    if (8 * (i / 2) < kNumRows) {
      x = ptx::load_here(rows + place<kDim>(2 * lane_t() + i % 2, lane_g()) +
                         8 * (i / 2) * kDim + 16 * chunk);
    }
    a[2 * i] = x.x;
    a[2 * i + 1] = x.y;
  }
}

// Calls take(n, e, p, derivative) with exp(s - lse) for each element of the products of
// the tile of keys from j0 on.
template <typename Take>
__device__ __forceinline__ void weigh(const product_t& c, const rows_t& rows,
                                      const scores_t& scores,
                                      const mask_bounds_t& all_bounds,
                                      const params_t& params, const exp2_t& exp2,
                                      int j0, Take take) {
  const mask_bounds_t bounds = moved(all_bounds, 0, j0);
  const int g = lane_g(), t = lane_t();
  const auto make = [&](auto check) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = g + 8 * (e / 2), query = 8 * n + 2 * t + e % 2;
        double derivative;
        const double p = weight_of<check.value>(c[n][e], bounds.sees(query, key), exp2,
                                                scores, params.scale, query, j0 + key,
                                                rows.lse[query], derivative);
        take(n, e, p, derivative);
      }
    }
  };
  // Those of rows that do not exist are 0.
  if (!kTerms && bounds.sees_all(static_cast<int>(params.seqlen_q), kKeys)) {
    make(flag_t<false>{});
  } else {
    make(flag_t<true>{});
  }
}

// Adds the weights of a tile to `totals` of queries 8 n + 2 t + e.
__device__ __forceinline__ void add_weights(double (&totals)[kRowTiles][2],
                                            const product_t& c, const rows_t& rows,
                                            const scores_t& scores,
                                            const mask_bounds_t& bounds,
                                            const params_t& params, const exp2_t& exp2,
                                            int j0) {
  weigh(c, rows, scores, bounds, params, exp2, j0,
        [&](int n, int e, double p, double) { totals[n][e % 2] += p; });
}

// Sums of all warps, for all threads, in `shared`; the block waits before and after.
__device__ __forceinline__ void sum_totals(double (&totals)[kRowTiles][2],
                                           double (&shared)[kWarps][kRows]) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      double& total = totals[n][e];
#pragma unroll
      for (int lanes = 4; lanes < kWarpSize; lanes *= 2) {
        total += shuffle_xor(total, lanes);
      }
      if (lane_g() == 0) shared[warp_index()][8 * n + 2 * lane_t() + e] = total;
    }
  }
  __syncthreads();
  if (threadIdx.x < kRows) {
    double total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += shared[warp][threadIdx.x];
    shared[0][threadIdx.x] = total;
  }
  __syncthreads();
}

// Sums of weights over the keys of a split; q is in shared memory.
__device__ __forceinline__ void walk_totals(double (&totals)[kRowTiles][2],
                                            const split_t& split, const double* k,
                                            const rows_t& rows, const scores_t& scores,
                                            const mask_bounds_t& bounds,
                                            const params_t& params,
                                            const exp2_t& exp2) {
  // The memory of k and v holds two tiles of k.
  const auto fetch = [&](int tile) {
    if (tile < split.last) {
      const int j0 = tile * kKeys;
      copy_tile(shared_keys((tile - split.first) / kWarps % 2), k + j0 * params.k.row,
                params.k.row, split.last_key - j0, static_cast<int>(params.head_dim));
    }
    ptx::commit_copy_group();
  };
  int tile = split.first + warp_index();
  fetch(tile);
#pragma unroll 1
  for (; tile < split.last; tile += kWarps) {
    fetch(tile + kWarps);
    ptx::wait_copy_groups<1>();
    __syncwarp();
    product_t c;
    multiply(c, shared_keys((tile - split.first) / kWarps % 2), shared_rows(0));
    add_weights(totals, c, rows, scores, bounds, params, exp2, tile * kKeys);
    __syncwarp();  // the tile is read
  }
  ptx::wait_copy_groups<0>();
}
