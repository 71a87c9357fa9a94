// SPDX-License-Identifier: MIT
// Shared by logsumexp of columns: an accurate log, and the results.
//
// Parameters HAS_WHERE   1 if there is a mask
#pragma once

#include "softmax/detail/column_tile.cuh"
#include "softmax/detail/log_params.cuh"

constexpr bool kHasWhere = HAS_WHERE;
using tile_t = place_t<layout_t, long long>;

struct larger_wide_t {
  __device__ __forceinline__ wide_sum_t operator()(wide_sum_t a, wide_sum_t b) const {
    return {larger_finite_t()(a.high, b.high), 0};
  }
};
struct plus_wide_t {
  __device__ __forceinline__ wide_sum_t operator()(wide_sum_t a, wide_sum_t b) const {
    return plus_t()(a, b);
  }
};

// Accurate logs of the columns, for any values: the largest score plus log1p of all
// other terms, which are never added to the 1 that would swallow them. read(take) calls
// take(score) for all rows of this thread, kInRegisters at a time; combine(value, f)
// reduces a number per column of each thread over the tile, for every thread.
template <typename Read, typename Combine>
__device__ __forceinline__ void careful_logs(double (&log)[kVector], Read read,
                                             Combine combine) {
  wide_sum_t m[kVector], top[kVector], rest[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    m[j] = {-infinity<double>(), 0};
    top[j] = rest[j] = {};
  }
  read([&](auto score_of) {
#pragma unroll
    for (int k = 0; k < kInRegisters; ++k) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        m[j].high = larger_finite_t()(m[j].high, score_of(k, j));
      }
    }
  });
  combine(m, larger_wide_t());
  read([&](auto score_of) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
#pragma unroll 1
      for (int k = 0; k < kInRegisters; ++k) {
        const double score = score_of(k, j);
        if (score == m[j].high) {
          top[j].high += 1;
        } else {
          add_exp(rest[j], score, m[j].high);
        }
      }
    }
  });
  combine(top, plus_wide_t());
  combine(rest, plus_wide_t());
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    rest[j] += top[j].high - 1;
    log[j] = log_beside(m[j].high, rest[j]);
  }
}

// Reduces a number of each of this thread's columns over the tile, for every thread.
template <typename Combine>
__device__ __forceinline__ void combine_columns(
    partials_t<wide_sum_t>& numbers, wide_sum_t (&careful)[kCluster][kColumns],
    wide_sum_t (&value)[kVector], Combine combine) {
  if constexpr (kInWarp) {
    combine_in_warp(value, combine);
  } else {
    write_partials(numbers, value, combine);
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < kColumns; c += kNumThreads) {
      share(&careful[cluster_rank()][c], combine_partials(numbers, c, combine));
    }
    cluster_sync();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int c = tile_t::side() * kVector + j;
      value[j] = careful[0][c];
#pragma unroll
      for (int rank = 1; rank < kCluster; ++rank) {
        value[j] = combine(value[j], careful[rank][c]);
      }
    }
    cluster_sync();  // all have read before the next number is written
  }
}

// Destination of the results of a tile.
struct results_t {
  const tile_t& tile;
  out_t* out;
  out_t* sign;

  // For column i of the tile.
  __device__ __forceinline__ void write(int i, double log) const {
    const long long step = tile.layout.outer.stride[kOut][OUTER_AXES - 1];
    out[tile.start(kOut) + i * step] = to<out_t>(log);
  }
  __device__ __forceinline__ void write_sign(int i, acc_t top) const {
    if (!tile.layout.returns_sign) return;
    const long long step = tile.layout.outer.stride[kSign][OUTER_AXES - 1];
    sign[tile.start(kSign) + i * step] = to<out_t>(sign_of(top));
  }
};
