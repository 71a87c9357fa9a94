// SPDX-License-Identifier: MIT
// attention_combine: combines results over splits of the keys into the result over all.
//
// Algorithm  lse = log sum_p exp(lse_p),  out = sum_p exp(lse_p - lse) out_p.
//            A split with lse = -inf saw no key and contributes nothing, not even a
//            NaN. A sum that overflows is computed again with smaller weights.
// Grid       one warp per row of out and 32 * COLUMNS of its columns
// Memory     global: outs and out once, lses twice per warp; any strides
// Numbers    all in accum_t. Kernels on splits return m and l of lse = m + log l
//            (SUMS), so that no rounding of lse becomes an error of the weights
// Limits     none
#include "attention/combine_params.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

#ifndef ELEM_T
#error "ELEM_T, LSE_T, ACCUM_T, COLUMNS and NUM_THREADS come from the host"
#endif
using elem_t = ELEM_T;  // of outs
using lse_t = LSE_T;
using accum_t = ACCUM_T;
#ifdef OUT_T
using out_t = OUT_T;
#else
using out_t = elem_t;
#endif
#ifdef OUT_LSE_T
using out_lse_t = OUT_LSE_T;
#else
using out_lse_t = lse_t;
#endif
// The weight exp(lse) of a split is l exp(m). l is 0 if it saw no key; if all its
// scores are NaN, l is NaN and m is -inf.
struct sum_t {
  accum_t m, l;
};
#ifdef SUMS
using part_lse_t = sum_t;
__device__ __forceinline__ sum_t sum_of(sum_t x) { return x; }
#else
using part_lse_t = lse_t;
__device__ __forceinline__ sum_t sum_of(lse_t lse) {
  const accum_t m = to<accum_t>(lse);
  return {m, m == -infinity<accum_t>() ? accum_t(0) : accum_t(1)};
}
#endif
constexpr int kNumThreads = NUM_THREADS;
constexpr int kColumns = COLUMNS;  // of a lane, kWarpSize apart
constexpr int kWarpColumns = kWarpSize * kColumns;

// Splits that a lane loads before it waits for the first.
constexpr int kAtOnce = 8;

// Scaled by this, weights sum to at most 1: there are fewer than 2^56 splits and keys,
// and a key weighs up to 2^8 in them. A power of 2 rounds nothing but the smallest
// numbers.
constexpr accum_t kDown = accum_t(0x1p-64);

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_combine(const elem_t* __restrict__ outs,      // (parts, rows, head_dim_v)
                      const part_lse_t* __restrict__ lses,  // (parts, rows)
                      out_t* __restrict__ out,              // (rows, head_dim_v)
                      out_lse_t* __restrict__ lse,  // (rows), contiguous, or null
                      const __grid_constant__ combine_params_t params) {
  const long long block = blockIdx.x + static_cast<long long>(gridDim.x) * blockIdx.y;
  const long long warp = (block * kNumThreads + threadIdx.x) / kWarpSize;
  const long long column_blocks =
      params.head_dim_v > kWarpColumns ? (params.head_dim_v - 1) / kWarpColumns + 1 : 1;
  const long long row = divide(warp, column_blocks);
  if (row >= params.num_rows) return;
  const auto offsets = locate(params.rows, row);
  const int lane = threadIdx.x % kWarpSize;
  const part_lse_t* row_lses = lses + offsets.of[kLses];

  auto sum_at = [&](long long part) -> sum_t {
    if (part >= params.num_parts) return {-infinity<accum_t>(), 0};
    return sum_of(row_lses[part * params.lses_part]);
  };
  // A lane holds every 32nd split; sums take them one by one, in order.
  accum_t m = -infinity<accum_t>();
  for (long long first = 0; first < params.num_parts; first += kWarpSize) {
    const accum_t x = sum_at(first + lane).m;
    m = x > m ? x : m;
  }
  m = warp_reduce<kWarpSize>(m, [](accum_t a, accum_t b) { return a > b ? a : b; });

  const long long column = (warp - row * column_blocks) * kWarpColumns + lane;
  auto exists = [&](int c) { return column + c * kWarpSize < params.head_dim_v; };
  const elem_t* x[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const long long from = exists(c) ? column + c * kWarpSize : 0;
    x[c] = outs + offsets.of[kOuts] + from * params.outs_col;
  }
  auto add = [](accum_t& total, accum_t& rest, accum_t x) {
    const pair_t<accum_t> both = exact_sum(total, x);
    total = both.high;
    rest += both.low;
  };
  // Sums of the weights times `by`, and of the values with these weights. Rounding
  // errors are summed as well: splits may be many, and all alike.
  auto add_up = [&](accum_t by, accum_t& l, accum_t(&sum)[kColumns]) {
    accum_t rest_l = 0, rest_sum[kColumns] = {};
    l = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] = 0;
    for (long long first = 0; first < params.num_parts; first += kWarpSize) {
      const sum_t part = sum_at(first + lane);
      const accum_t own = part.l * exp_diff(part.m, m) * by;
      const unsigned seen = __ballot_sync(kFullMask, part.l != 0);
      // Splits that saw nothing are not read; the others are loaded several at a time.
      for (int begin = 0; begin < kWarpSize && seen >> begin != 0; begin += kAtOnce) {
        elem_t values[kAtOnce][kColumns];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (seen >> begin >> n == 0) break;
          const bool counts = seen >> (begin + n) & 1;
          const long long from = (first + begin + n) * params.outs_part;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            values[n][c] = counts ? x[c][from] : elem_t{};
          }
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (seen >> begin >> n == 0) break;
          const accum_t weight = __shfl_sync(kFullMask, own, begin + n);
          add(l, rest_l, weight);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const accum_t value = to<accum_t>(values[n][c]);
            add(sum[c], rest_sum[c], rounded_product(weight, value));
          }
        }
      }
    }
    // If a sum is not finite, its rounding error is meaningless.
    if (is_finite(l)) l += rest_l;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (is_finite(sum[c])) sum[c] += rest_sum[c];
    }
  };
  accum_t l, sum[kColumns];
  add_up(1, l, sum);
  bool is_right = true;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) is_right = is_right && is_finite(sum[c]);
  // Sums of the largest numbers overflow although their mean does not. A sum that stays
  // nonfinite is kept.
  accum_t unit[kColumns];  // of a sum
#pragma unroll
  for (int c = 0; c < kColumns; ++c) unit[c] = l;
  if (__any_sync(kFullMask, !is_right)) {
    accum_t small_l, small_sum[kColumns];
    add_up(kDown, small_l, small_sum);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (!is_finite(sum[c]) && is_finite(small_sum[c])) {
        sum[c] = small_sum[c];
        unit[c] = small_l;
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (exists(c)) {
      out[offsets.of[kOut] + (column + c * kWarpSize) * params.out_col] =
          to<out_t>(l == 0 ? accum_t(0) : sum[c] / unit[c]);
    }
  }
  if (lse != nullptr && column == 0) {
    lse[row] = to<out_lse_t>(l == 0 ? -infinity<accum_t>() : m + log_of(l));
  }
}
