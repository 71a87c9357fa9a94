// SPDX-License-Identifier: MIT
// attention_vjp_tiled_f64_finish: dq of float64 and the factors of queries, of loops
// over keys that several blocks shared.
//
// Algorithm  dq = factor sum of the splits' dq, where the factor comes from the sum of
//            their totals, as in attention_vjp_tiled_f64_queries without LOOP_SPLITS
// Grid       a warp per query of an entry and kWarpSize columns
// Memory     global: the sums of each split once, their totals once per warp; dq once
// Numbers    float64, in a fixed order of sums: the same bits in every run
// Limits     as attention_vjp_tiled_f64_queries
#include "attention/fp64/backward_row.cuh"
#include "attention/simt/gradients.cuh"
#include "common/reduce.cuh"

constexpr int kWarpsOfBlock = kNumThreads / kWarpSize;
constexpr int kAtOnce = 8;  // loads in flight

// The sum of num_splits numbers that are `step` apart, in order.
__device__ __forceinline__ pair_t<double> sum_of(const double* x, index_t step,
                                                 index_t num_splits) {
  pair_t<double> sum = {0, 0};
#pragma unroll 1
  for (index_t n = 0; n < num_splits; n += kAtOnce) {
    double next[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      next[i] = n + i < num_splits ? x[(n + i) * step] : -0.0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const pair_t<double> more = exact_sum(sum.high, next[i]);
      sum = {more.high, sum.low + more.low};
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    attention_vjp_tiled_f64_finish(
        const double* __restrict__ sums,    // (splits, entries, queries, head_dim)
        const double* __restrict__ totals,  // (splits, entries, queries)
        ROW_PARAMETERS,
        accum_t* __restrict__ factor,      // as delta
        accum_t* __restrict__ sink_terms,  // as delta, or null
        const index_t num_splits, grad_t* __restrict__ dq,
        int* __restrict__ found,  // 1: something is not finite
        SCORE_PARAMETERS, const __grid_constant__ grads_t grads) {
  const index_t chunks = (params.head_dim + kWarpSize - 1) / kWarpSize;
  const index_t warp = block_index() * kWarpsOfBlock + threadIdx.x / kWarpSize;
  const index_t row = divide(warp, chunks);
  const index_t kept_index = divide(row, params.seqlen_q);
  if (kept_index >= grads.num_kept) return;
  const index_t i = row - kept_index * params.seqlen_q;
  const index_t chunk = warp - row * chunks;
  const int lane = threadIdx.x % kWarpSize;

  const offsets_t<3> kept = locate(grads.kept, kept_index);
  const tile_coord_t at = grads.entry(params, kept.of[0], 0);
  const index_t among_rows = at.row_of_heads * params.seqlen_q + i;
  const index_t num_rows = grads.num_kept * params.seqlen_q;
  const pair_t<double> l = sum_of(totals + among_rows, num_rows, num_splits);
  const double lse_i = at.at(lse, grads.lse)[i * grads.lse.row];
  const scores_t scores(at, SCORE_ARGUMENTS);
  const bool counts = scores.is_query(i) && scores.sink() != -infinity<double>();
  const double sink = counts ? exp_diff_exact(scores.sink(), lse_i) : 0;
  const double own_factor = factor_of(l.high + (l.low + sink), lse_i);
  if (chunk == 0 && lane == 0) {
    factor[among_rows] = own_factor;
    if (kHasSinks && sink_terms != nullptr) {
      sink_terms[among_rows] = counts ? -sink * own_factor * delta[among_rows] : 0;
    }
  }
  const index_t d = chunk * kWarpSize + lane;
  if (d >= params.head_dim) return;
  const pair_t<double> sum =
      sum_of(sums + row * params.head_dim + d, num_rows * params.head_dim, num_splits);
  // If a sum is not finite, `low` is meaningless.
  const double x = (is_finite(sum.high) ? sum.high + sum.low : sum.high) * own_factor;
  if (!is_finite(x)) *found = 1;
  dq[kept.of[1] + i * grads.row[0] + d * grads.col[0]] = x;
}
